"""Ops over whole lists of tensors in one pass: scale, axpby, copy, unscale, l2norm, and the loss scale's update.

Lists are flat lists (or tuples) of dense tensors, paired by position: the tensors at one position have one shape and
one device. Dtypes may be float16, bfloat16 and float32 in any mix, and float64 where a function says so; arithmetic
is FP32 (float64 where a list holds float64), rounded to nearest even when stored. Empty lists and empty tensors are
fine. Tensors whose memory is dense in the same order at one position (contiguous, or all channels_last) are used in
place; others go through one contiguous copy each, written tensors back again.

`found_inf` is a float32 tensor of one element, on any device: an op stores 1.0 when a tensor that it checks holds an
inf or NaN, and never clears it. `found_inf_per_tensor`, a float32 tensor with an element for each position, is raised
alike. The check looks at inputs only: a finite float that overflows to inf in half is stored as inf, not reported.
A scale may be a float, rounded to FP32, or a float32 tensor of one element, which is read on its device: no function
here waits for a device whose tensors it works on.

No function has a gradient: they run on gradients and parameters, and refuse to write a tensor that requires grad in
grad mode. Every written tensor's version moves. Errors are TypeError or ValueError that name the argument and its
index, and nothing has been written when one is raised.

Eager calls go straight to the compiled functions. Under torch.compile, and for tensors the compiled functions can't
reach by pointer (see csrc/tensor_lists.h), calls go to the ops registered here as torch.ops.apex_amp.*, which run the
same functions, or plain torch where this build has no kernels for the device.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _C

__all__ = ["multi_tensor_axpby", "multi_tensor_check", "multi_tensor_copy", "multi_tensor_l2norm", "multi_tensor_scale",
           "multi_tensor_unscale_", "update_scale_"]

_ops = torch.ops.apex_amp


def multi_tensor_scale(src: Sequence[Tensor], dst: Sequence[Tensor], found_inf: Tensor, scale: float | Tensor,
                       found_inf_per_tensor: Tensor | None = None) -> None:
    """dst[i] = src[i] * scale, checking src for inf and NaN. float64 is allowed; dst[i] may be src[i]."""
    if is_compiling() or not _C.multi_tensor_scale(src, dst, found_inf, scale, found_inf_per_tensor):
        _ops.multi_tensor_scale(src, dst, found_inf, scale, found_inf_per_tensor)


def multi_tensor_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: float | Tensor,
                          found_inf_per_tensor: Tensor | None = None) -> None:
    """grads[i] *= inv_scale, checking them for inf and NaN before. float64 is allowed."""
    if is_compiling() or not _C.multi_tensor_unscale_(grads, found_inf, inv_scale, found_inf_per_tensor):
        _ops.multi_tensor_unscale_(grads, found_inf, inv_scale, found_inf_per_tensor)


def multi_tensor_axpby(x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor,
                       a: float | Tensor, b: float | Tensor, check: str = "x",
                       found_inf_per_tensor: Tensor | None = None) -> None:
    """out[i] = a * x[i] + b * y[i], both products rounded; checks "x", "y" or "both". out[i] may be x[i] or y[i]."""
    if is_compiling() or not _C.multi_tensor_axpby(x, y, out, found_inf, a, b, check, found_inf_per_tensor):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            a, b = scalar_tensor(a, found_inf.device), scalar_tensor(b, found_inf.device)
        _ops.multi_tensor_axpby(x, y, out, found_inf, a, b, check, found_inf_per_tensor)


def multi_tensor_check(tensors: Sequence[Tensor], found_inf: Tensor,
                       found_inf_per_tensor: Tensor | None = None) -> None:
    """Only checks the tensors for inf and NaN."""
    if is_compiling() or not _C.multi_tensor_check(tensors, found_inf, found_inf_per_tensor):
        _ops.multi_tensor_check(tensors, found_inf, found_inf_per_tensor)


def multi_tensor_copy(src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
    """dst[i] = src[i], converted to dst[i]'s dtype."""
    if is_compiling() or not _C.multi_tensor_copy(src, dst):
        _ops.multi_tensor_copy(src, dst)


def multi_tensor_l2norm(tensors: Sequence[Tensor], per_tensor: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The L2 norm of all elements of all tensors, as a 0-dim float32 tensor on the first tensor's device.

    With per_tensor, (that norm, a float32 vector of each tensor's norm). float64 is allowed. Squares are summed in
    double in a fixed order: a norm's bits depend neither on alignment nor on the other tensors nor on the number of
    threads, and float inputs up to 1e30 don't overflow. The norm of no tensors is 0, on the CPU.
    """
    if len(tensors) == 0:
        total = torch.zeros((), dtype=torch.float32)
        return (total, total.new_zeros(0)) if per_tensor else total
    result = None if is_compiling() else _C.multi_tensor_l2norm(tensors, per_tensor)
    if result is None:
        result = (_ops.multi_tensor_l2norm_per_tensor if per_tensor else _ops.multi_tensor_l2norm)(tensors)
    return result


def update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth_factor: float,
                  backoff_factor: float, growth_interval: int, min_scale: float, max_scale: float) -> None:
    """One step of dynamic loss scaling, without reading anything back to the host.

    found_inf not zero: scale *= backoff_factor and the count restarts. Otherwise growth_tracker counts a clean step,
    and at growth_interval scale *= growth_factor and the count restarts, also when max_scale stops the growth. A
    changed scale is clamped to [min_scale, max_scale]; on a CPU the version of one that did not change stays. scale:
    float32, growth_tracker: int32, one element each, on one device.
    """
    args = (scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    if is_compiling() or not _C.update_scale_(*args):
        _ops.update_scale_(*args)


# The same functions in plain torch, for devices this build has no kernels for. Nothing here waits for the device.

def scalar_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    """`value`, as a float32 tensor if it is none."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=device)


def _scalar_on(value: float | Tensor, device: torch.device) -> float | Tensor:
    return value.reshape(()).to(device) if isinstance(value, Tensor) else value


def _by_device(first: Sequence[Tensor]) -> Iterator[tuple[torch.device, list[int]]]:
    """Each device of the list with the positions of its tensors that aren't empty."""
    positions: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(first):
        if tensor.numel():
            positions.setdefault(tensor.device, []).append(i)
    yield from positions.items()


def _raise_flags(tensors: list[Tensor], index: list[int], found_inf: Tensor, per_tensor: Tensor | None) -> None:
    """Raises found_inf, and per_tensor at index, for tensors that aren't finite: their largest magnitude isn't."""
    bad = ~torch.stack([norm.float() for norm in torch._foreach_norm(tensors, float("inf"))]).isfinite()
    found_inf.masked_fill_(bad.any().to(found_inf.device), 1.0)
    if per_tensor is not None:
        where = torch.tensor(index, device=per_tensor.device)
        per_tensor[where] = per_tensor[where].masked_fill(bad.to(per_tensor.device), 1.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _torch_scale(src: list[Tensor], dst: list[Tensor], found_inf: Tensor, scale: float | Tensor,
                 found_inf_per_tensor: Tensor | None = None) -> None:
    for device, index in _by_device(src):
        inputs = [src[i] for i in index]
        _raise_flags(inputs, index, found_inf, found_inf_per_tensor)
        products = torch._foreach_mul([_wide(t) for t in inputs], _scalar_on(scale, device))
        torch._foreach_copy_([dst[i] for i in index], products)


def _torch_unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: float | Tensor,
                    found_inf_per_tensor: Tensor | None = None) -> None:
    _torch_scale(grads, grads, found_inf, inv_scale, found_inf_per_tensor)


def _torch_axpby(x: list[Tensor], y: list[Tensor], out: list[Tensor], found_inf: Tensor, a: float | Tensor,
                 b: float | Tensor, check: str = "x", found_inf_per_tensor: Tensor | None = None) -> None:
    for device, index in _by_device(x):
        xs, ys = [x[i].float() for i in index], [y[i].float() for i in index]
        for name, inputs in (("x", xs), ("y", ys)):
            if check in (name, "both"):
                _raise_flags(inputs, index, found_inf, found_inf_per_tensor)
        sums = torch._foreach_mul(xs, _scalar_on(a, device))
        torch._foreach_add_(sums, torch._foreach_mul(ys, _scalar_on(b, device)))
        torch._foreach_copy_([out[i] for i in index], sums)


def _torch_copy(src: list[Tensor], dst: list[Tensor]) -> None:
    torch._foreach_copy_(dst, src)


def _torch_check(tensors: list[Tensor], found_inf: Tensor, found_inf_per_tensor: Tensor | None = None) -> None:
    for _, index in _by_device(tensors):
        _raise_flags([tensors[i] for i in index], index, found_inf, found_inf_per_tensor)


def _torch_l2norm_per_tensor(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    norms = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0].device)
    for _, index in _by_device(tensors):
        found = torch.stack(torch._foreach_norm([tensors[i] for i in index], 2, dtype=torch.float64))
        norms[torch.tensor(index, device=norms.device)] = found.to(norms.device)
    return norms.norm().float(), norms.float()


def _torch_l2norm(tensors: list[Tensor]) -> Tensor:
    return _torch_l2norm_per_tensor(tensors)[0]


def _torch_update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth_factor: float,
                         backoff_factor: float, growth_interval: int, min_scale: float, max_scale: float) -> None:
    found = found_inf.to(scale.device).reshape(scale.shape) != 0
    count = (growth_tracker + 1).reshape(scale.shape)
    changed = found | (count >= growth_interval)
    factor = torch.where(found, backoff_factor, growth_factor)
    growth_tracker.copy_(count.masked_fill(changed, 0).reshape(growth_tracker.shape))
    scale.copy_(torch.where(changed, (scale * factor).clamp(min_scale, max_scale), scale))


# The registered ops: they mutate what their schema marks and have no gradient.

def _direct(function: Callable[..., object]) -> Callable[..., object]:
    """A compiled function as a registered op's kernel, where there is nothing left to dispatch to."""
    def kernel(*args: object) -> object:
        result = function(*args)
        if result is None or result is False:
            raise TypeError(f"apex_amp::{function.__name__}: expected tensors with memory of their own, all on devices "
                            "this build has kernels for; got a tensor subclass or a foreign device in a list")
        return None if result is True else result
    return kernel


def _fake_nothing(*args: object, **kwargs: object) -> None:
    """Ops that only write have no outputs to describe."""


def _fake_l2norm(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


def _fake_l2norm_per_tensor(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _fake_l2norm(tensors), tensors[0].new_empty(len(tensors), dtype=torch.float32)


def _l2norm(tensors: list[Tensor]) -> Tensor | None:
    return _C.multi_tensor_l2norm(tensors, False)


def _l2norm_per_tensor(tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    return _C.multi_tensor_l2norm(tensors, True)


_library = torch.library.Library("apex_amp", "DEF")


def register(schema: str, compiled: Callable[..., object], in_torch: Callable[..., object],
             fake: Callable[..., object] = _fake_nothing) -> None:
    """Defines torch.ops.apex_amp's op of `schema`: `compiled` where this build has kernels, `in_torch` elsewhere."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA") if _C.build_info()["cuda"] else ("CPU",):
        _library.impl(name, _direct(compiled), key)
    _library.impl(name, in_torch, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"apex_amp::{name}", fake, lib=_library)


def _register_ops() -> None:
    flags = "Tensor(b!) found_inf"
    per_tensor = "Tensor(c!)? found_inf_per_tensor=None"
    # The overload that takes tensors comes first: torch.ops would read a tensor as a float, waiting for its device.
    for overload, scalar in ((".tensor", "Tensor"), ("", "float")):
        register(f"multi_tensor_scale{overload}(Tensor[] src, Tensor(a!)[] dst, {flags}, {scalar} scale, {per_tensor})"
                 " -> ()", _C.multi_tensor_scale, _torch_scale)
        register(f"multi_tensor_unscale_{overload}(Tensor(a!)[] grads, {flags}, {scalar} inv_scale, {per_tensor})"
                 " -> ()", _C.multi_tensor_unscale_, _torch_unscale_)
        register(f"multi_tensor_axpby{overload}(Tensor[] x, Tensor[] y, Tensor(a!)[] out, {flags}, {scalar} a, "
                 f"{scalar} b, str check=\"x\", {per_tensor}) -> ()", _C.multi_tensor_axpby, _torch_axpby)
    register("multi_tensor_copy(Tensor[] src, Tensor(a!)[] dst) -> ()", _C.multi_tensor_copy, _torch_copy)
    register(f"multi_tensor_check(Tensor[] tensors, {flags}, {per_tensor}) -> ()", _C.multi_tensor_check, _torch_check)
    register("multi_tensor_l2norm(Tensor[] tensors) -> Tensor", _l2norm, _torch_l2norm, _fake_l2norm)
    register("multi_tensor_l2norm_per_tensor(Tensor[] tensors) -> (Tensor, Tensor)", _l2norm_per_tensor,
             _torch_l2norm_per_tensor, _fake_l2norm_per_tensor)
    register("update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, float growth_factor, "
             "float backoff_factor, int growth_interval, float min_scale, float max_scale) -> ()",
             _C.update_scale_, _torch_update_scale_)


_register_ops()
