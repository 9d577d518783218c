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
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _C

__all__ = ["multi_tensor_axpby", "multi_tensor_copy", "multi_tensor_l2norm", "multi_tensor_scale",
           "multi_tensor_unscale_", "update_scale_"]


def multi_tensor_scale(src: Sequence[Tensor], dst: Sequence[Tensor], found_inf: Tensor, scale: float | Tensor,
                       found_inf_per_tensor: Tensor | None = None) -> None:
    """dst[i] = src[i] * scale, checking src for inf and NaN. float64 is allowed; dst[i] may be src[i]."""
    _C.multi_tensor_scale(src, dst, found_inf, scale, found_inf_per_tensor)


def multi_tensor_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: float | Tensor,
                          found_inf_per_tensor: Tensor | None = None) -> None:
    """grads[i] *= inv_scale, checking them for inf and NaN before. float64 is allowed."""
    _C.multi_tensor_unscale_(grads, found_inf, inv_scale, found_inf_per_tensor)


def multi_tensor_axpby(x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor,
                       a: float | Tensor, b: float | Tensor, check: str = "x",
                       found_inf_per_tensor: Tensor | None = None) -> None:
    """out[i] = a * x[i] + b * y[i], both products rounded; checks "x", "y" or "both". out[i] may be x[i] or y[i]."""
    _C.multi_tensor_axpby(x, y, out, found_inf, a, b, check, found_inf_per_tensor)


def multi_tensor_copy(src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
    """dst[i] = src[i], converted to dst[i]'s dtype."""
    _C.multi_tensor_copy(src, dst)


def multi_tensor_l2norm(tensors: Sequence[Tensor], per_tensor: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The L2 norm of all elements of all tensors, as a 0-dim float32 tensor on the first tensor's device.

    With per_tensor, (that norm, a float32 vector of each tensor's norm). float64 is allowed. Squares are summed in
    double in a fixed order: a norm's bits depend neither on alignment nor on the other tensors nor on the number of
    threads, and float inputs up to 1e30 don't overflow. The norm of no tensors is 0, on the CPU.
    """
    return _C.multi_tensor_l2norm(tensors, per_tensor)


def update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth_factor: float,
                  backoff_factor: float, growth_interval: int, min_scale: float, max_scale: float) -> None:
    """One step of dynamic loss scaling, without reading anything back to the host.

    found_inf not zero: scale *= backoff_factor and the count restarts. Otherwise growth_tracker counts a clean step,
    and at growth_interval scale *= growth_factor and the count restarts, also when max_scale stops the growth. A
    changed scale is clamped to [min_scale, max_scale]. scale: float32, growth_tracker: int32, one element each, on
    one device.
    """
    _C.update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale,
                     max_scale)
