"""torch.autocast's regions over this package's casts."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import patching
from .cast_state import CastScope, cast_region, cast_type_on, disable_casts

__all__ = ["autocast", "custom_bwd", "custom_fwd", "get_autocast_dtype", "is_autocast_enabled"]


class autocast(torch.autocast):
    """A region in which functions cast as at opt level O1; put it where `torch.autocast` stood.

        with amp.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(inputs), targets)

    A context manager and a decorator. Regions nest and hold for the calling thread and for the workers that
    `torch.nn.DataParallel` starts from it; each parameter is cast once in the outermost one. What the innermost region says
    of a device type holds there, be it one of these or a `torch.autocast`. The first region entered patches torch's
    functions; `amp.shutdown()` puts them back.

    Args:
        device_type: "cuda", "cpu", ...; tensors on other device types are treated as outside the region.
        dtype: torch.float16 or torch.bfloat16; None: torch's default for the device type.
        enabled: False runs the region in the types that its tensors have.
        cache_enabled: False casts a parameter anew at each use; None: as torch.is_autocast_cache_enabled().

    Raises:
        RuntimeError, ValueError: as torch.autocast, for a device type or dtype that it does not know.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
                 cache_enabled: bool | None = None) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._entered: list[CastScope] = []

    def __enter__(self) -> autocast:
        region = _region(self.fast_dtype if self._enabled else None, self.device, self._cache_enabled)
        region.__enter__()
        self._entered.append(region)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"amp.autocast(...) as a decorator needs a callable, got {type(function).__name__}; as a context manager "
                            "it is entered with 'with'")
        cast_type, device_type, cached = self.fast_dtype if self._enabled else None, self.device, self._cache_enabled

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with _region(cast_type, device_type, cached):  # one for each call: threads may run it at the same time
                return function(*args, **kwargs)

        return in_region


def _region(cast_type: torch.dtype | None, device_type: str, cached: bool) -> CastScope:
    if not patching.is_installed():
        patching.install()
    return cast_region(cast_type, device_type, cached)


def is_autocast_enabled(device_type: str = "cuda") -> bool:
    """Whether functions of the calling thread now cast tensors on `device_type`, by this package or by torch.autocast."""
    return cast_type_on(device_type) is not None or torch.is_autocast_enabled(device_type)


def get_autocast_dtype(device_type: str = "cuda") -> torch.dtype:
    """What they cast to; outside any region, what `autocast(device_type)` would cast to."""
    return cast_type_on(device_type) or torch.get_autocast_dtype(device_type)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, device_type: str,
               cast_inputs: torch.dtype | None = None) -> Callable[..., Any]:
    """Decorator for the `forward` of a custom autograd Function, as `torch.amp.custom_fwd`; `custom_bwd` goes with it.

    With `cast_inputs`, a forward inside a region gets its floating tensors on `device_type` (float64 excepted) in that type and
    runs with casts off; else, and outside any region, it runs in the surrounding state.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    in_torch_autocast = torch.amp.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx._amp_cast_type = cast_type_on(device_type)
        if ctx._amp_cast_type is None or cast_inputs is None:
            return in_torch_autocast(ctx, *args, **kwargs)
        ctx._amp_cast_type, ctx._fwd_used_autocast = None, False
        with disable_casts():
            return fwd(ctx, *_cast_inputs(args, device_type, cast_inputs), **_cast_inputs(kwargs, device_type, cast_inputs))

    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Callable[..., Any]:
    """Decorator for the `backward` of a custom autograd Function whose forward has `custom_fwd`: it casts as that did."""
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    in_torch_autocast = torch.amp.custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx._fwd_used_autocast:
            return in_torch_autocast(ctx, *args, **kwargs)
        with cast_region(ctx._amp_cast_type, device_type, True):
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
