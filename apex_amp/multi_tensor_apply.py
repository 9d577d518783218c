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

from . import multi_tensor, multi_tensor_updates

__all__ = ["MultiTensorApply", "multi_tensor_adam", "multi_tensor_applier", "multi_tensor_applier_l2norm",
           "multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_lamb", "multi_tensor_lamb_stage1_cuda",
           "multi_tensor_lamb_stage2_cuda", "multi_tensor_scale", "multi_tensor_sgd"]

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


# The optimizers' functions. Apex keeps state in the parameter's dtype where it likes; here the rules want FP32.

class _FloatState:
    """Lists of state as float32: themselves, or copies that are written back on leaving the block."""

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self._lists = lists

    def __enter__(self) -> list[list[Tensor]]:
        self._floats = [[tensor.float() for tensor in tensors] for tensors in self._lists]
        return self._floats

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        for tensors, floats in zip(self._lists, self._floats) if exception_type is None else ():
            for tensor, value in zip(tensors, floats):
                if tensor is not value:
                    tensor.copy_(value)


@torch.no_grad()
def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float,
                      beta2: float, eps: float, step: int, mode: int, bias_correction: int,
                      weight_decay: float) -> None:
    """[grads, params, exp_avgs, exp_avg_sqs]: one Adam step; mode 0: L2 regularization, 1: decoupled weight decay.

    noop_flag is neither read nor raised.
    """
    grads, params, *moments = _unpack("multi_tensor_adam", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    with _FloatState(*moments) as (exp_avgs, exp_avg_sqs):
        multi_tensor_updates.multi_tensor_adam(grads, params, exp_avgs, exp_avg_sqs, step, None, None, None, lr, beta1,
                                               beta2, eps, weight_decay, mode == 1, bool(bias_correction))


@torch.no_grad()
def multi_tensor_sgd(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, wd: float, momentum: float,
                     dampening: float, lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool,
                     scale: float) -> None:
    """[grads, params, momentum_buffers] or those and [model_params]: one SGD step on grads * scale.

    Nothing is written when noop_flag isn't 0; it is never raised.
    """
    model_params = tensor_lists[3] if len(tensor_lists) == 4 else None
    grads, params, momenta = _unpack("multi_tensor_sgd", tensor_lists[:3], "grads", "params", "momentum_buffers")
    with _FloatState(momenta) as (buffers,):
        multi_tensor_updates.multi_tensor_sgd(grads, params, buffers, model_params, noop_flag.float(),
                                              noop_flag.new_full((1,), scale, dtype=torch.float32), lr, momentum,
                                              dampening, wd, bool(nesterov), bool(first_run), bool(wd_after_momentum))


@torch.no_grad()
def multi_tensor_lamb(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float,
                      beta2: float, eps: float, step: int, bias_correction: int, weight_decay: float,
                      grad_averaging: int, mode: int, global_grad_norm: Tensor, max_grad_norm: float,
                      use_nvlamb: bool | None = False) -> None:
    """[grads, params, exp_avgs, exp_avg_sqs]: one LAMB step. Unlike Apex's it leaves the gradients as they are."""
    grads, params, *moments = _unpack("multi_tensor_lamb", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    with _FloatState(*moments) as (exp_avgs, exp_avg_sqs):
        multi_tensor_updates.multi_tensor_lamb(grads, params, exp_avgs, exp_avg_sqs, step, None, None, None, lr,
                                               global_grad_norm, beta1, beta2, eps, weight_decay, mode == 1,
                                               bool(bias_correction), bool(grad_averaging), max_grad_norm,
                                               bool(use_nvlamb))


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists,
                                  per_tensor_decay: Tensor, step: int, beta1: float, beta2: float, eps: float,
                                  global_grad_norm: Tensor, max_global_grad_norm: float) -> None:
    """[grads, params, exp_avgs, exp_avg_sqs, updates]: moves the moments and writes LAMB's updates.

    As in Apex, `step` counts the steps before this one.
    """
    grads, params, exp_avgs, exp_avg_sqs, updates = _unpack("multi_tensor_lamb_stage1_cuda", tensor_lists, "grads",
                                                            "params", "exp_avgs", "exp_avg_sqs", "updates")
    clip = (global_grad_norm / max_global_grad_norm).clamp(min=1.0)
    correct1, correct2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
    for i, (grad, param) in enumerate(zip(grads, params)):
        gradient = grad.float() / clip.reshape(())
        exp_avgs[i].mul_(beta1).add_(gradient, alpha=1 - beta1)
        exp_avg_sqs[i].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = exp_avgs[i] / correct1 / ((exp_avg_sqs[i] / correct2).sqrt() + eps)
        updates[i].copy_(update + per_tensor_decay[i] * param)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists,
                                  per_tensor_param_norm: Tensor, per_tensor_update_norm: Tensor, lr: float,
                                  weight_decay: float, use_nvlamb: bool | None = False) -> None:
    """[params, updates]: params -= lr * trust ratio * updates."""
    params, updates = _unpack("multi_tensor_lamb_stage2_cuda", tensor_lists, "params", "updates")
    applies = (per_tensor_param_norm != 0) & (per_tensor_update_norm != 0)
    ratios = torch.where(applies, per_tensor_param_norm / per_tensor_update_norm, 1.0)
    if not use_nvlamb and weight_decay == 0:
        ratios = torch.ones_like(ratios)
    for param, update, ratio in zip(params, updates, ratios):
        param.sub_(lr * ratio * update)
