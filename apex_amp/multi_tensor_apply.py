"""Apex's `apex.multi_tensor_apply`, and the functions of its compiled module `amp_C` in their call shape.

Code written for Apex calls `multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, masters], scale)`,
which becomes `multi_tensor_scale(chunk_size, overflow_buf, [grads, masters], scale)`. Here chunk_size is taken and
not needed, and the overflow buffer, an int32 (or float32) tensor of one element that Apex calls noop_flag, is raised
to 1 where Apex raises it and never cleared. New code is better off with apex_amp.multi_tensor, which says what the
ops compute.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import multi_tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier", "multi_tensor_applier_l2norm", "multi_tensor_axpby",
           "multi_tensor_l2norm", "multi_tensor_scale"]

TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls op(chunk_size, noop_flag_buffer, tensor_lists, *args). `available` is always True here."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raises nothing: the ops need no special build."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists,
                 *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(256 * 32)
multi_tensor_applier_l2norm = MultiTensorApply(2048 * 32)


def _unpack(op: str, tensor_lists: TensorLists, *names: str) -> TensorLists:
    if len(tensor_lists) != len(names):
        raise ValueError(f"{op}: tensor_lists: expected {len(names)} lists ({', '.join(names)}), "
                         f"got {len(tensor_lists)}")
    return tensor_lists


class _OverflowBuffer:
    """An Apex overflow buffer as the float32 found_inf that the ops raise; leaving the block folds it back."""

    def __init__(self, op: str, noop_flag: Tensor) -> None:
        if not isinstance(noop_flag, Tensor) or noop_flag.dtype not in (torch.int32, torch.float32) \
                or noop_flag.numel() != 1:
            got = f"{noop_flag.dtype} of shape {tuple(noop_flag.shape)}" if isinstance(noop_flag, Tensor) \
                else type(noop_flag).__name__
            raise TypeError(f"{op}: noop_flag: expected an int32 (or float32) tensor of one element, got {got}")
        self.noop_flag = noop_flag

    def __enter__(self) -> Tensor:
        self.found_inf = torch.zeros((), dtype=torch.float32, device=self.noop_flag.device)
        return self.found_inf

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is None:
            self.noop_flag.masked_fill_(self.found_inf.reshape(self.noop_flag.shape) != 0, 1)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """[src, dst]: dst = src * scale; an inf or NaN in src raises noop_flag."""
    src, dst = _unpack("multi_tensor_scale", tensor_lists, "src", "dst")
    with _OverflowBuffer("multi_tensor_scale", noop_flag) as found_inf, torch.no_grad():
        multi_tensor.multi_tensor_scale(src, dst, found_inf, scale)


def multi_tensor_axpby(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float,
                       arg_to_check: int) -> None:
    """[x, y, out]: out = a * x + b * y; an inf or NaN in x (arg_to_check 0), y (1) or either (-1) raises noop_flag."""
    x, y, out = _unpack("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    checks = {0: "x", 1: "y", -1: "both"}
    if arg_to_check not in checks:
        raise ValueError(f"multi_tensor_axpby: arg_to_check: expected 0 (x), 1 (y) or -1 (both), got {arg_to_check}")
    with _OverflowBuffer("multi_tensor_axpby", noop_flag) as found_inf, torch.no_grad():
        multi_tensor.multi_tensor_axpby(x, y, out, found_inf, a, b, check=checks[arg_to_check])


def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists,
                        per_tensor: bool | None = False) -> tuple[Tensor, Tensor]:
    """[tensors]: (float32 norm of all of them, shape [1]; float32 norm of each, empty unless per_tensor)."""
    tensors, = _unpack("multi_tensor_l2norm", tensor_lists, "tensors")
    norm, norms = multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)
    return norm.reshape(1), norms if per_tensor else norms.new_empty(0)
