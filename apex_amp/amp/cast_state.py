"""What casts aim at, in the process and in each thread, and the weight cache's controls.

A cast type is torch.float16, torch.bfloat16, or None for no casts. The innermost `cast_scope` of the
calling thread decides; outside any scope the process default does.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._contextlib import context_decorator

from apex_amp import _C

__all__ = ["cast_scope", "clear_weight_cache", "current_cast_type", "disable_casts", "set_cast_devices",
           "set_default_cast_type"]

F = TypeVar("F", bound=Callable[..., Any])


class CastScope(Protocol):
    """A context manager and a decorator."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...

    def __call__(self, function: F) -> F: ...


state = _C.CastState()  # its `cast_type` is the calling thread's
devices: frozenset[str] | None = None  # device types that are cast; None: all


def cast_scope(cast_type: torch.dtype | None, forward: bool = False) -> CastScope:
    """Context manager: inside it, patched functions of this thread cast to `cast_type`.

    None means plain torch. Scopes nest, and exceptions leave them like any other exit.
    `forward=True` marks the forward of an initialized model; the outermost one bounds the life of the
    weight cache's short-lived entries.
    """
    return _C.cast_scope(cast_type, forward)


def cast_region(cast_type: torch.dtype | None, device_type: str, cached: bool) -> CastScope:
    """Context manager of the native face: a scope that speaks for tensors on one device type only.

    Cached casts leave with the outermost region; `cached=False` makes none.
    """
    return _C.region_scope(cast_type, device_type, cached)


def run_in_scope(function: Callable[..., Any], cast_type: torch.dtype | None, forward: bool) -> Callable[..., Any]:
    """`function` with each call inside `cast_scope(cast_type, forward)`: what a scope used as a decorator gives.

    A generator is inside it while it runs, and not while it waits.
    """
    return context_decorator(lambda: _C.cast_scope(cast_type, forward), function)


def disable_casts() -> CastScope:
    """Context manager and decorator: inside it, this thread runs plain torch, in the dtypes its tensors have."""
    return _C.cast_scope(None)


def current_cast_type() -> torch.dtype | None:
    """The type casts of the calling thread aim at now; None while casts are off."""
    return _C.current_cast_type()


def cast_type_on(device_type: str) -> torch.dtype | None:
    """The type that casts of tensors on `device_type` ("cpu", "cuda", ...) aim at now; None where there are none."""
    return _C.cast_type_on(device_type)


def set_default_cast_type(cast_type: torch.dtype | None) -> None:
    """Sets what holds outside any scope, in all threads."""
    _C.set_default_cast_type(cast_type)


def set_cast_devices(device_types: Iterable[str]) -> None:
    """Sets the device types ("cpu", "cuda", ...) whose tensors are cast; others are left as they are."""
    global devices
    devices = frozenset(device_types)
    _C.set_cast_devices(devices)


def clear_weight_cache() -> None:
    """Forgets every cached cast of a parameter.

    Needed only after parameters were written through a raw pointer; all other writes are noticed.
    """
    _C.clear_weight_cache()
