"""torch.autocast's regions over this package's casts."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import patching
from .cast_state import CastScope, cast_region, cast_type_on
from .custom_function import custom_bwd, custom_fwd

__all__ = ["autocast", "custom_bwd", "custom_fwd", "get_autocast_dtype", "is_autocast_enabled"]


class autocast(torch.autocast):
    """A region in which functions cast as at opt level O1; put it where `torch.autocast` stood.

        with amp.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(inputs), targets)

    A context manager and a decorator. Regions nest and hold for the calling thread and for the workers that
    `torch.nn.DataParallel` starts from it; each parameter is cast once in the outermost one. What the innermost region
    says of a device type holds there, be it one of these or a `torch.autocast`. The first region entered patches
    torch's functions, `amp.shutdown()` puts them back; code compiled with fullgraph=True may hold regions once they are
    patched.

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
            raise TypeError(f"amp.autocast(...) as a decorator needs a callable, got {type(function).__name__}; as a "
                            "context manager it is entered with 'with'")
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
    """Whether the calling thread's functions cast tensors on `device_type`, by this package or by torch.autocast."""
    return cast_type_on(device_type) is not None or torch.is_autocast_enabled(device_type)


def get_autocast_dtype(device_type: str = "cuda") -> torch.dtype:
    """What they cast to; outside any region, what `autocast(device_type)` would cast to."""
    return cast_type_on(device_type) or torch.get_autocast_dtype(device_type)
