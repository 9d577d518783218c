"""Casts under torch.compile.

Dynamo can't look into a C callable. It is told to trace, in place of every CastFunction, a Python twin
that reads the thread's cast type as an attribute: Dynamo guards it, so toggling casts recompiles. A
tensor method or operator stays in the graph by name and runs the CastFunction itself, on fake tensors
while tracing; then a hook installs the same guard.

Nothing here is loaded before something else has imported torch._dynamo.
"""
from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex_amp import _C

from . import cast_lists, cast_state

_HALF_TYPES = (torch.float16, torch.bfloat16)
_CAST_TYPES = (*_HALF_TYPES, torch.float32)
_DYNAMO = "torch._dynamo"


class _Scopes:
    """The scopes entered inside the code being traced."""

    # (cast type, device or None: those of the process, `_autocasts(device)` at its entry), outermost first. One for all
    # devices hides those around it.
    chain: tuple[tuple[torch.dtype | None, str | None, int], ...] = ()
    held: bool | None = None  # by the innermost; None: as outside


_scopes = _Scopes()


def _autocasts(device: str | None) -> int:
    """How many torch.autocast regions for `device` the code being traced has entered and not left."""
    return _C.traced_autocasts(device)


_autocasts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo asks while it traces


def _cast_type_on(device: str) -> torch.dtype | None:
    """`cast_state.cast_type_on` in the code being traced."""
    cast_type, devices, around = cast_state.state.cast_type, cast_state.state.devices, 0
    for scope_cast_type, scope_device, autocasts in reversed(_scopes.chain):
        if scope_device == device:
            return None if _autocasts(device) > autocasts else scope_cast_type
        if scope_device is None:
            cast_type, devices, around = scope_cast_type, cast_state.devices, autocasts
            break
    is_cast = (devices is None or device in devices) and _autocasts(None) <= around
    return cast_type if is_cast else None


def _traced_held() -> bool:
    return cast_state.state.held if _scopes.held is None else _scopes.held


# ------------------------------------------------------------------------------------------------
# The Python twin of CastFunction: traced, never run eagerly

def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found.extend(_tensors(value))
    return found


def _cast_type_of(tensor: torch.Tensor) -> torch.dtype | None:
    return _cast_type_on(tensor.device.type) if tensor.dtype in _CAST_TYPES else None


def _to(value: Any, target: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype != target and _cast_type_of(value) is not None else value
    if type(value) is list:
        return [_to(item, target) for item in value]
    if type(value) is tuple:
        return tuple([_to(item, target) for item in value])
    return value


def _exceeds(values: Any, dtypes: set[torch.dtype]) -> bool:
    limit = torch.finfo(torch.float16 if torch.float16 in dtypes else torch.bfloat16).max
    return any(type(value) in (int, float) and limit < abs(value) < float("inf") for value in values)


def _saturate(value: Any, limit: float) -> Any:
    return min(max(value, -limit), limit) if type(value) in (int, float) else value


def make_twin(function: Any) -> Callable[..., Any]:
    """What Dynamo traces in place of `function`, a CastFunction."""
    original, policy, fixed, message = function.__wrapped__, function.policy, function.cast_type, function.message
    if isinstance(original, types.MethodDescriptorType | types.WrapperDescriptorType):
        name = function.__name__
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)

    def twin(*args: Any, **kwargs: Any) -> Any:
        if policy == "untracked_write":
            return original(*args, **kwargs)
        if policy in ("fp32", "fp32_by_dtype") and kwargs.get("dtype") is not None:
            return original(*args, **kwargs)
        out = kwargs.pop("out", None)
        values = [*args, *kwargs.values()]
        tensors = _tensors(values)
        cast = [tensor for tensor in tensors if _cast_type_of(tensor) is not None]
        dtypes = {tensor.dtype for tensor in cast}
        target: torch.dtype | None = torch.float32
        kept = 0
        if not dtypes or any(tensor.dtype == torch.float64 and tensor.dim() > 0 for tensor in tensors):
            target = None
        elif policy == "low_precision":
            target = fixed or _cast_type_of(cast[0])
            if any(tensor.is_sparse for tensor in tensors):
                target = torch.float32
            if out is not None:
                target = out.dtype if out.dtype in _CAST_TYPES else None
        elif policy in ("promote", "promote_by_kernel"):
            low = [dtype for dtype in dtypes if dtype in _HALF_TYPES]
            differ = len(dtypes) > 1 and (policy == "promote" or any(tensor.dim() == 0 for tensor in tensors))
            if not differ and not (low and _exceeds(values, dtypes)):
                target = None
        elif policy == "promote_rest":
            kept = 1
            target = torch.float32 if len(dtypes) > 1 else None
        elif policy in ("match_self", "fill_in_place"):
            kept = 1
            target = args[0].dtype if _cast_type_of(args[0]) is not None else None
            if policy == "fill_in_place" and target in _HALF_TYPES:
                limit = torch.finfo(target).max
                args = tuple([_saturate(value, limit) for value in args])
                kwargs = {name: _saturate(value, limit) for name, value in kwargs.items()}
        elif policy == "fp32_in_place" and args[0].dtype in _HALF_TYPES:
            raise NotImplementedError(message)
        elif policy == "banned" and any(dtype in _HALF_TYPES for dtype in dtypes):
            raise NotImplementedError(message)
        if out is not None:
            kwargs["out"] = out
        if target is None:
            return original(*args, **kwargs)
        args = (*args[:kept], *[_to(value, target) for value in args[kept:]])
        kwargs = {name: value if name == "out" else _to(value, target) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return twin


# ------------------------------------------------------------------------------------------------
# Scopes

_entered = threading.local()  # its `scopes`: what a running graph has entered


def _swap_scopes(chain: Any) -> None:
    """A node of the graph: changes the scopes around the tensor methods that follow it.

    While tracing, they belong to the trace: an attempt that Dynamo gives up leaves nothing behind.
    """
    tracing = torch._guards.TracingContext.try_get()
    if tracing is not None:
        tracing._apex_amp_scopes = chain  # type: ignore[attr-defined]
        return
    for scope in reversed(getattr(_entered, "scopes", [])):
        scope.__exit__()
    _entered.scopes = []
    for cast_type, device, _ in chain:
        scope = _C.cast_scope(cast_type) if device is None else _C.region_scope(cast_type, device, True)
        scope.__enter__()
        _entered.scopes.append(scope)


class _TracedScope:
    """What Dynamo traces in place of a CastScope."""

    def __init__(self, cast_type: torch.dtype | None, forward: bool, device: str | None) -> None:
        self.cast_type = cast_type
        self.forward = forward
        self.device = device

    def __enter__(self) -> None:
        self.outer = (_scopes.chain, _scopes.held)
        held = self.cast_type is None and not self.forward
        entry = (self.cast_type, self.device, _autocasts(self.device))
        self.changes = True
        if self.forward and _traced_held():
            self.changes = False
        elif self.device is not None:
            self.changes = self.cast_type is not None or _cast_type_on(self.device) is not None
            chain = (*_scopes.chain, entry)
        else:
            chain = (entry,)
            if not _scopes.chain:
                outer = None if _autocasts(None) else cast_state.state.cast_type
                self.changes = self.cast_type is not outer or held is not _traced_held()
        if self.changes:
            _scopes.chain, _scopes.held = chain, held
            _swap_scopes(chain)

    def __exit__(self, *exception: Any) -> None:
        if self.changes:
            _scopes.chain, _scopes.held = self.outer
            _swap_scopes(_scopes.chain)


def _traced_scope(cast_type: torch.dtype | None, forward: bool = False) -> _TracedScope:
    return _TracedScope(cast_type, forward, None)


def _traced_region(cast_type: torch.dtype | None, device_type: str, cached: bool) -> _TracedScope:
    return _TracedScope(cast_type, False, device_type)


# ------------------------------------------------------------------------------------------------
# Registration

def _teach_dynamo() -> None:
    import torch._dynamo
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder

    # substitute_in_graph keeps its table by equality, and a CastFunction equals its original; going by
    # type needs no table.
    def build(builder: Any, function: Any) -> Any:
        vars(function).setdefault("__torch_dynamo_polyfill__", make_twin(function))
        return PolyfilledFunctionVariable(function, source=builder.source,
                                          **builder.install_guards(GuardBuilder.ID_MATCH))

    def build_without_source(tx: Any, function: Any) -> Any:
        vars(function).setdefault("__torch_dynamo_polyfill__", make_twin(function))
        return PolyfilledFunctionVariable(function)

    for cast_function in (_C.CastFunction, _C.CastMethod):
        VariableBuilder._type_dispatch()[cast_function] = build
        SourcelessBuilder._type_handlers[cast_function] = build_without_source  # type: ignore[attr-defined]
    torch._dynamo.substitute_in_graph(_C.cast_scope, skip_signature_check=True)(_traced_scope)
    torch._dynamo.substitute_in_graph(_C.region_scope, skip_signature_check=True)(_traced_region)
    torch._dynamo.allow_in_graph(_swap_scopes)
    torch.fx.node.has_side_effect(_swap_scopes)


def _guard_cast_type() -> tuple[tuple[torch.dtype | None, str | None], ...]:
    """Called by a CastFunction that runs on fake tensors; the scopes around it in the code being traced."""
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None:
        return ()
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, ImportSource

    for name in ("cast_type", "devices"):
        package, *attributes = f"{cast_state.__name__}.state.{name}".split(".")
        source: Any = ImportSource(package)
        for attribute in attributes:
            source = AttrSource(source, attribute)
        install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
    chain = getattr(tracing, "_apex_amp_scopes", ())
    # The graph names the method, not its casts: keep compile caches from taking one for the other.
    state = cast_state.state
    torch.compiler.config.cache_key_tag = f"{_cache_key_tag}apex_amp {state.cast_type} {state.devices} {_lists_digest}"
    if any(_autocasts(device) > autocasts for _, device, autocasts in chain):
        return ()  # a torch.autocast region further in decides
    return tuple((cast_type, device) for cast_type, device, _ in chain)


class _AfterDynamoImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs `then` once torch._dynamo has been imported by somebody."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.loader: Any = None

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DYNAMO or self.loader is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        self.then()


_taught = False
_cache_key_tag = ""  # the user's own
_lists_digest = ""
_waiting: _AfterDynamoImport | None = None


def _digest_of_lists() -> str:
    lists = {name: value for name, value in vars(cast_lists).items() if name.isupper()}
    return hashlib.sha256(repr(lists).encode()).hexdigest()


def _connect() -> None:
    global _taught, _cache_key_tag, _lists_digest
    if not _taught:
        _taught = True
        _teach_dynamo()
    _cache_key_tag = torch.compiler.config.cache_key_tag
    _lists_digest = _digest_of_lists()
    _C.set_mode_hook(_guard_cast_type)
    sys.modules[_DYNAMO].reset()


def install() -> None:
    """Connects Dynamo with the casts, now or when somebody imports it; drops what it has compiled."""
    global _waiting
    if _DYNAMO in sys.modules:
        _connect()
    else:
        _waiting = _AfterDynamoImport(_connect)
        sys.meta_path.insert(0, _waiting)


def uninstall() -> None:
    """Undoes `install`."""
    global _waiting
    if _waiting in sys.meta_path:
        sys.meta_path.remove(_waiting)
    _waiting = None
    _C.set_mode_hook(None)
    if _DYNAMO in sys.modules:
        torch.compiler.config.cache_key_tag = _cache_key_tag
        sys.modules[_DYNAMO].reset()
