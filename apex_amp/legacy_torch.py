"""`apex-amp run --legacy-torch`: what scripts of 2018 to 2021 need from torch and numpy and today's no longer give.

Nothing here is active before `enable()`; `disable()` puts everything back.
"""
from __future__ import annotations

import collections.abc
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# How processes that a script starts learn what is enabled: `import apex` there reads it.
ENVIRONMENT_VARIABLE = "APEX_AMP_LEGACY_TORCH"

_enabled: ExitStack | None = None


def enable(trusted_files: Iterable[str] = (), children: bool = False) -> None:
    """Switch everything on that `SWITCHES` lists.

    Args:
        trusted_files: files from which torch.load may read whole pickled objects, which can run code.
        children: also in Python processes that this one starts, from their `import apex` on.
    """
    global _enabled
    if _enabled is not None:
        return
    trusted = [os.path.realpath(path) for path in trusted_files]
    with ExitStack() as stack:
        for switch in SWITCHES:
            stack.enter_context(switch(trusted))
        _enabled = stack.pop_all()
    if children:
        os.environ[ENVIRONMENT_VARIABLE] = os.pathsep.join(trusted)


def enable_if_inherited() -> None:
    """Switch everything on when the process that started this one asked for it."""
    trusted = os.environ.get(ENVIRONMENT_VARIABLE)
    if trusted is not None:
        enable(filter(None, trusted.split(os.pathsep)))


def disable() -> None:
    """Put back what `enable()` changed."""
    global _enabled
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    if _enabled is not None:
        _enabled.close()
        _enabled = None


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """`owner.name` is `make(original)` inside; put back unless someone else has replaced it since."""
    original = getattr(owner, name)
    is_inherited = name not in vars(owner)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            if is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def torch_six(trusted: list[str]) -> Iterator[None]:
    """`torch._six` (gone since torch 2.0): string_classes, int_classes, container_abcs, inf, nan, PY3, PY37."""
    module = types.ModuleType("torch._six")
    module.__dict__.update(string_classes=(str, bytes), int_classes=int, container_abcs=collections.abc,
                           inf=float("inf"), nan=float("nan"), FileNotFoundError=FileNotFoundError,
                           PY2=False, PY3=True, PY37=True)
    sys.modules["torch._six"] = module
    torch._six = module  # type: ignore[attr-defined]
    try:
        yield
    finally:
        sys.modules.pop("torch._six", None)
        del torch._six  # type: ignore[attr-defined]


@contextmanager
def numpy_names(trusted: list[str]) -> Iterator[None]:
    """np.float, np.int, np.bool, np.object, np.str, np.long, np.unicode (gone since numpy 1.24)."""
    import numpy
    builtin_types = {"float": float, "int": int, "bool": bool, "object": object, "str": str, "complex": complex,
                     "long": int, "unicode": str}
    missing = {name: value for name, value in builtin_types.items() if name not in vars(numpy)}
    for name, value in missing.items():
        setattr(numpy, name, value)
    try:
        yield
    finally:
        for name in missing:
            delattr(numpy, name)


@contextmanager
def byte_masks(trusted: list[str]) -> Iterator[None]:
    """uint8 masks in masked_fill, masked_fill_, masked_select and masked_scatter (bool only since torch 2.0)."""

    def accept_byte_mask(original: Callable) -> Callable:
        def with_bool_mask(self: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return original(self, mask.bool() if mask.dtype == torch.uint8 else mask, *args, **kwargs)
        return with_bool_mask

    with ExitStack() as stack:
        for name in ("masked_fill", "masked_fill_", "masked_select", "masked_scatter", "masked_scatter_"):
            stack.enter_context(_replaced(torch.Tensor, name, accept_byte_mask))
        for name in ("masked_fill", "masked_select", "masked_scatter"):
            stack.enter_context(_replaced(torch, name, accept_byte_mask))
        yield


@contextmanager
def bool_subtraction(trusted: list[str]) -> Iterator[None]:
    """`1 - mask` and `mask1 - mask2` of bool tensors (an error since torch 1.2): computed as on uint8 masks."""

    def as_bytes(value: Any) -> Any:
        return value.byte() if isinstance(value, torch.Tensor) and value.dtype == torch.bool else value

    def accept_bool(original: Callable) -> Callable:
        def subtract(self: torch.Tensor, other: Any) -> torch.Tensor:
            return original(as_bytes(self), as_bytes(other))
        return subtract

    with _replaced(torch.Tensor, "__rsub__", accept_bool), _replaced(torch.Tensor, "__sub__", accept_bool):
        yield


@contextmanager
def full_of_ints(trusted: list[str]) -> Iterator[None]:
    """`torch.full(size, 1)` gives the default float dtype, as before torch 1.7, instead of int64."""

    def with_float_default(original: Callable) -> Callable:
        def full(size: Any, fill_value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(fill_value) is int and kwargs.get("dtype") is None and kwargs.get("out") is None:
                kwargs["dtype"] = torch.get_default_dtype()
            return original(size, fill_value, *args, **kwargs)
        return full

    with _replaced(torch, "full", with_float_default):
        yield


@contextmanager
def load_of_trusted_files(trusted: list[str]) -> Iterator[None]:
    """torch.load reads whole pickled objects (weights_only=False) from the files that the user named as trusted."""

    def with_trust(original: Callable) -> Callable:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
            if isinstance(path, (str, os.PathLike)) and os.path.realpath(path) in trusted:
                kwargs.setdefault("weights_only", False)
            return original(f, *args, **kwargs)
        return load

    with _replaced(torch, "load", with_trust):
        yield


SWITCHES: tuple[Callable, ...] = (torch_six, numpy_names, byte_masks, bool_subtraction, full_of_ints,
                                  load_of_trusted_files)
