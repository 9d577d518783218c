"""Casts in the forward and backward of custom autograd Functions."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .cast_state import cast_region, cast_type_on, disable_casts

__all__ = ["custom_bwd", "custom_fwd"]

_torch_custom_fwd, _torch_custom_bwd = torch.amp.custom_fwd, torch.amp.custom_bwd


def custom_fwd(fwd: Callable[..., Any] | None = None, *, device_type: str,
               cast_inputs: torch.dtype | None = None) -> Callable[..., Any]:
    """Decorator for the `forward` of a custom autograd Function, as `torch.amp.custom_fwd`; `custom_bwd` goes with it.

    With `cast_inputs`, a forward inside a region gets its floating tensors on `device_type` (float64 excepted) in that
    type and runs with casts off; else, and outside any region, it runs in the surrounding state.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    in_torch_autocast = _torch_custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx._amp_cast_type = cast_type_on(device_type)
        if ctx._amp_cast_type is None or cast_inputs is None:
            return in_torch_autocast(ctx, *args, **kwargs)
        ctx._amp_cast_type, ctx._fwd_used_autocast = None, False
        ctx._dtype = torch.get_autocast_dtype(device_type)  # torch's custom_bwd reads it, after amp.shutdown()
        args, kwargs = _cast_inputs(args, device_type, cast_inputs), _cast_inputs(kwargs, device_type, cast_inputs)
        with disable_casts():
            return fwd(ctx, *args, **kwargs)

    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Callable[..., Any]:
    """Decorator for the `backward` of a custom autograd Function, which casts as its `custom_fwd` forward did."""
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    in_torch_autocast = _torch_custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx._fwd_used_autocast:
            return in_torch_autocast(ctx, *args, **kwargs)
        with cast_region(getattr(ctx, "_amp_cast_type", None), device_type, True):
            return bwd(ctx, *args, **kwargs)

    return backward


def _cast_inputs(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        casts = value.is_floating_point() and value.device.type == device_type and value.dtype is not torch.float64
        return value.to(dtype) if casts else value
    if type(value) in (tuple, list):
        return type(value)(_cast_inputs(item, device_type, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast_inputs(item, device_type, dtype) for key, item in value.items()}
    return value


_DECORATORS = {_torch_custom_fwd(len, device_type="cpu").__code__: custom_fwd,
               _torch_custom_bwd(len, device_type="cpu").__code__: custom_bwd}


def decorated_here(function: Any) -> Callable[..., Any] | None:
    """What `function`, if torch.amp.custom_fwd or custom_bwd decorated it, is under this module's; else None."""
    code = getattr(function, "__code__", None)
    if code not in _DECORATORS:
        return None
    closure = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    options = {name: closure[name] for name in ("device_type", "cast_inputs") if name in closure}
    return _DECORATORS[code](function.__wrapped__, **options)
