"""`cast_report`: what ran in which type, and why."""
from __future__ import annotations

import dataclasses
import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from apex_amp import _C

from . import patching

__all__ = ["CastReport", "CastRow", "cast_report"]


@dataclasses.dataclass(frozen=True)
class CastRow:
    """Calls of one patched function at one module that went alike."""

    module: str  # qualified name of the module whose forward called it; "" is the model itself
    function: str  # as written: "torch.nn.functional.linear"
    policy: str
    inputs: tuple[str, ...]  # dtypes of the tensors it was given
    outputs: tuple[str, ...]  # dtypes of the tensors it returned
    casts: int = 0  # casts made, those of functions it called included
    cache_hits: int = 0  # casts taken from the weight cache
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class CastReport:
    """What one forward did. Prints as a table."""

    rows: list[CastRow]
    unpatched: list[str]  # places that bound a patched function earlier and still call the original

    def __str__(self) -> str:
        header = [field.name.replace("_", " ") for field in dataclasses.fields(CastRow)]
        table = [header, *([_text(value) for value in dataclasses.astuple(row)] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [f"not patched: {place}" for place in self.unpatched]
        return "\n".join(lines)


def cast_report(model: torch.nn.Module, *inputs: Any, **named_inputs: Any) -> CastReport:
    """Runs one forward of `model` and reports every patched function it called, in order.

    Answers "why is this half?": the row of the function, at the module that called it, with the types it
    got and gave, the casts made and the casts found in the weight cache. The forward is a real one: it
    moves BatchNorm statistics and random state like any other.
    """
    names = {module: name for name, module in model.named_modules()}
    active: list[str] = []
    counts: dict[CastRow, int] = {}

    def enter(module: torch.nn.Module, _: Any) -> None:
        active.append(names.get(module, type(module).__name__))

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        active.pop()

    def observe(function: Any, arguments: Any, result: Any, casts: int, cache_hits: int) -> None:
        row = CastRow(active[-1] if active else "", _name(function), function.policy,
                      tuple(_dtypes(arguments)), tuple(_dtypes(result)), casts, cache_hits)
        counts[row] = counts.get(row, 0) + 1

    hooks = [torch.nn.modules.module.register_module_forward_pre_hook(enter),
             torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)]
    _C.set_cast_observer(observe)
    try:
        model(*inputs, **named_inputs)
    finally:
        _C.set_cast_observer(None)
        for hook in hooks:
            hook.remove()
    rows = [dataclasses.replace(row, calls=calls) for row, calls in counts.items()]
    return CastReport(rows, sorted(_unpatched()))


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _name(function: Any) -> str:
    return function.location.replace(":", ".") if function.location else function.__name__


def _dtypes(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield str(value.dtype).removeprefix("torch.")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _dtypes(item)


def _unpatched() -> Iterator[str]:
    """Partials, default arguments and module-level tables outside torch that hold an original."""
    names = {id(function.__wrapped__): _name(function) for function in patching.installed_functions()}
    for item in gc.get_objects():
        if type(item) is functools.partial and id(item.func) in names:
            yield f"{names[id(item.func)]} in {item!r}"
        elif type(item) is types.FunctionType and not patching.is_internal(item.__module__ or ""):
            for default in [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]:
                if id(default) in names:
                    yield f"{names[id(default)]} as a default argument of {item.__module__}.{item.__qualname__}"
    for module in patching.user_modules():
        for name, table in list(vars(module).items()):
            if name.startswith("__") or type(table) not in (dict, list, tuple):
                continue
            for value in table.values() if type(table) is dict else table:
                if id(value) in names:
                    yield f"{names[id(value)]} in {module.__name__}.{name}"
