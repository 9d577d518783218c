"""Apex's `apex.normalization` over torch's layer_norm and rms_norm, whose kernels are fused today.

The plain forms return the input's dtype; the mixed forms return the weight's. Where input and weight differ in
dtype, the normalization is computed in the wider of the two.
"""
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm",
    "fused_layer_norm", "fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine",
    "fused_rms_norm", "fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine", "manual_rms_norm",
    "FusedLayerNormFunction", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction", "FusedRMSNormAffineFunction", "FusedRMSNormAffineMixedDtypesFunction",
]


def _layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
                eps: float, dtype: torch.dtype) -> Tensor:
    widest = _widest(input, weight, bias)
    return F.layer_norm(input.to(widest), _as_shape(normalized_shape), _cast(weight, widest), _cast(bias, widest),
                        eps).to(dtype)


def _rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None,
              dtype: torch.dtype) -> Tensor:
    widest = _widest(input, weight)
    return F.rms_norm(input.to(widest), _as_shape(normalized_shape), _cast(weight, widest), eps).to(dtype)


def _widest(*tensors: Tensor | None) -> torch.dtype:
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor is not None])


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def fused_layer_norm(input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6,
                     memory_efficient: bool = False) -> Tensor:
    """Layer normalization over the last dimensions, of shape `normalized_shape`, without weight and bias.

    `memory_efficient` (in all functions of this module) chose what Apex's kernel saved for backward; it is ignored.
    """
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Sequence[int],
                            eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Layer normalization with weight and bias of shape `normalized_shape`; returns the input's dtype."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Sequence[int],
                                        eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """`fused_layer_norm_affine` returning the weight's dtype."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6,
                   memory_efficient: bool = False) -> Tensor:
    """Root-mean-square normalization (arXiv:1910.07467) over the last dimensions, without weight."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def fused_rms_norm_affine(input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6,
                          memory_efficient: bool = False) -> Tensor:
    """Root-mean-square normalization with a weight of shape `normalized_shape`; returns the input's dtype."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(input: Tensor, weight: Tensor, normalized_shape: Sequence[int],
                                      eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """`fused_rms_norm_affine` returning the weight's dtype."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """Apex's name for the plain torch formula; the same as `fused_rms_norm` and its affine form here."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype if weight is None else weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm under Apex's name; returns the input's dtype.

    Args:
        normalized_shape: the trailing dimensions to normalize over: an int or a sequence of ints.
        eps: added to the variance. Default: 1e-5.
        elementwise_affine: learn a weight (ones at first) and a bias (zeros). Default: True.
        memory_efficient: ignored, see `fused_layer_norm`.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
                 memory_efficient: bool = False):
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, input.dtype)


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm under Apex's name; returns the input's dtype.

    Args: as `FusedLayerNorm`; there is no bias.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
                 memory_efficient: bool = False):
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return _rms_norm(input, self.normalized_shape, self.weight, self.eps, input.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` returning the weight's dtype; always affine."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, memory_efficient: bool = False,
                 elementwise_affine: bool | None = None):
        _require_affine("MixedFusedLayerNorm", elementwise_affine)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` returning the weight's dtype; always affine."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, memory_efficient: bool = False,
                 elementwise_affine: bool | None = None):
        _require_affine("MixedFusedRMSNorm", elementwise_affine)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return _rms_norm(input, self.normalized_shape, self.weight, self.eps, self.weight.dtype)


def _require_affine(name: str, elementwise_affine: bool | None) -> None:
    if elementwise_affine is False:
        raise RuntimeError(f"{name} is always affine, got elementwise_affine=False; "
                           f"use {name.removeprefix('Mixed')} for a norm without weight")
    if elementwise_affine:
        warnings.warn(f"{name} is always affine; elementwise_affine=True is ignored", stacklevel=3)


def _as_function_class(name: str, function: Callable[..., Tensor]) -> type:
    return type(name, (), {"__doc__": f"Apex's autograd class; `apply` is `{function.__name__}`.",
                           "__module__": __name__, "apply": staticmethod(function)})


FusedLayerNormFunction = _as_function_class("FusedLayerNormFunction", fused_layer_norm)
FusedLayerNormAffineFunction = _as_function_class("FusedLayerNormAffineFunction", fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = _as_function_class(
    "FusedLayerNormAffineMixedDtypesFunction", mixed_dtype_fused_layer_norm_affine)
FusedRMSNormFunction = _as_function_class("FusedRMSNormFunction", fused_rms_norm)
FusedRMSNormAffineFunction = _as_function_class("FusedRMSNormAffineFunction", fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = _as_function_class(
    "FusedRMSNormAffineMixedDtypesFunction", mixed_dtype_fused_rms_norm_affine)
