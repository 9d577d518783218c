"""Puts CastFunctions in front of torch's functions, methods and operators, and takes them away again."""
from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex_amp import _C

from . import cast_lists, integrations, traced_casts

__all__ = ["bfloat16_function", "float_function", "half_function", "install", "is_installed", "promote_function",
           "register_bfloat16_function", "register_float_function", "register_half_function",
           "register_promote_function", "uninstall"]

F = TypeVar("F", bound=Callable[..., Any])
_MISSING = object()
_CAST_TYPES = (_C.CastFunction, _C.CastMethod)


class _Patches:
    """The attributes replaced so far, and what was there before."""

    def __init__(self) -> None:
        self.replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there now
        self.step_hook: Any = None  # the handle

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.replaced.append((owner, name, before, value))

    def restore(self) -> None:
        """Puts everything back, last first, but leaves what somebody else has put there since."""
        for owner, name, before, value in reversed(self.replaced):
            if vars(owner).get(name, _MISSING) is not value:
                continue
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def reapply(self) -> None:
        for owner, name, before, value in self.replaced:
            if vars(owner).get(name, _MISSING) is before:
                setattr(owner, name, value)


_lock = threading.RLock()
_patches: _Patches | None = None  # None while not installed
_lifted = 0
_functions: dict[tuple[str, str], Any] = {}  # CastFunctions made so far: one per name, for good
_registered: dict[tuple[Any, str], tuple[str, torch.dtype | None]] = {}  # user functions: policy, fixed cast type


# ------------------------------------------------------------------------------------------------
# Policies of names

def _in_place_message(name: str) -> str:
    plain = {"__ipow__": "pow"}.get(name, name.removesuffix("_"))
    return (f"{name} would write an FP32 result into a half-precision tensor: {plain} runs in FP32 under amp. "
            f"Use the out-of-place form, x = x.{plain}(...), or call it under amp.disable_casts().")


def _policies() -> dict[str, tuple[str, str | None]]:
    """Policy and refusal message of each listed name; in-place forms included."""
    policies: dict[str, tuple[str, str | None]] = {}
    low_precision = [*cast_lists.LOW_PRECISION, *cast_lists.RNN, *cast_lists.RNN_CELLS]
    promote = [*cast_lists.PROMOTE, *cast_lists.SEQUENCE_PROMOTE]
    for name in [*low_precision, *promote]:
        policies[name + "_"] = ("match_self", None)
    for name in cast_lists.FP32:
        policies[name + "_"] = ("fp32_in_place", _in_place_message(name + "_"))
    for policy, listed in (("low_precision", low_precision), ("fp32", cast_lists.FP32), ("promote", promote),
                           ("promote_by_kernel", cast_lists.PROMOTE_BY_KERNEL), ("match_self", cast_lists.MATCH_SELF),
                           ("promote_rest", cast_lists.PROMOTE_REST),
                           ("fill_in_place", cast_lists.FILL_IN_PLACE),
                           ("untracked_write", cast_lists.UNTRACKED_WRITE)):
        for name in listed:
            policies[name] = (policy, None)
    for name in cast_lists.FP32_BY_DTYPE:
        if policies.get(name) == ("fp32", None):
            policies[name] = ("fp32_by_dtype", None)
    for name in cast_lists.FP32_IN_PLACE:
        policies[name] = ("fp32_in_place", _in_place_message(name))
    for name, message in cast_lists.BANNED.items():
        policies[name] = ("banned", message)
    return policies


def _namespace(path: str) -> Any:
    if path == "torch.Tensor":
        return torch.Tensor
    return sys.modules[path]


def _path(owner: Any) -> str:
    """Where an owner is found again by pkgutil.resolve_name, up to the attribute's own name."""
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}."
    return f"{owner.__name__}:"


def _cast_function(owner: Any, name: str, original: Any, policy: str, message: str | None = None,
                   cast_type: torch.dtype | None = None) -> Any:
    """The one CastFunction of a name: made anew only when the original or the policy has changed."""
    key = (_path(owner), name)
    known = _functions.get(key)
    if (known is not None and known.__wrapped__ is original and known.policy == policy
            and known.cast_type == cast_type):
        return known
    function = _C.cast_function(original, policy, location=key[0] + name, cast_type=cast_type, message=message)
    _functions[key] = function
    return function


# ------------------------------------------------------------------------------------------------
# Install, uninstall

def is_installed() -> bool:
    return _patches is not None


def installed_functions() -> list[Any]:
    """The CastFunctions in force, one per patched name."""
    return [value for _, _, _, value in _patches.replaced if isinstance(value, _CAST_TYPES)] if _patches else []


def install() -> None:
    """Patches torch by `cast_lists` and the registered functions. Does nothing when installed already.

    Casts still depend on the cast state: with no cast type set, everything behaves as plain torch.
    """
    global _patches
    with _lock:
        if _patches is not None:
            return
        patches = _Patches()
        try:
            _patch_names(patches)
            for (owner, name), (policy, cast_type) in _registered.items():
                _patch_registered(patches, owner, name, policy, cast_type)
            integrations.patch(patches.replace, lifted)
            _rebind_early_bound(patches)
        except BaseException:
            patches.restore()
            raise
        _C.set_saturate_hook(_warn_saturated)
        gc.callbacks.append(integrations.free_deleted_models)
        patches.step_hook = register_optimizer_step_post_hook(integrations.after_optimizer_step)
        traced_casts.install()
        _patches = patches


def uninstall() -> None:
    """Puts every patched name and object back. CastFunctions still held by others act as their originals."""
    global _patches
    with _lock:
        if _patches is None:
            return
        _patches.restore()
        _patches.step_hook.remove()
        _patches = None
        gc.callbacks.remove(integrations.free_deleted_models)
        traced_casts.uninstall()
        _C.set_default_cast_type(None)
        _C.clear_weight_cache()


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Context manager: inside it every patched name holds its original, in all threads."""
    global _lifted
    with _lock:
        patches = _patches
        if patches is not None and _lifted == 0:
            patches.restore()
        _lifted += 1
    try:
        yield
    finally:
        with _lock:
            _lifted -= 1
            if patches is not None and patches is _patches and _lifted == 0:
                patches.reapply()


def _patch_names(patches: _Patches) -> None:
    policies = _policies()
    for path in cast_lists.NAMESPACES:
        owner = _namespace(path)
        for name in set(dir(owner)).intersection(policies):
            if (owner, name) in _registered:
                continue
            original = getattr(owner, name)
            policy, message = policies[name]
            if (not callable(original)  # torch.fft, the module
                    or owner is torch.nn.functional and name in cast_lists.FORWARDING
                    or owner is not torch.Tensor and policy == "untracked_write"):
                continue
            patches.replace(owner, name, _cast_function(owner, name, original, policy, message))
    rnn = torch.nn.modules.rnn
    for name in [*cast_lists.RNN, *cast_lists.RNN_CELLS]:
        original = getattr(torch._VF, name)
        patches.replace(torch._VF, name, _cast_function(torch._VF, name, original, "low_precision"))
    implementations = {mode: getattr(torch._VF, mode.lower()) for mode in rnn._rnn_impls}
    patches.replace(rnn, "_rnn_impls", implementations)


def _rebind_early_bound(patches: _Patches) -> None:
    """Names that modules outside torch bound before: globals, class attributes, nn.Module attributes."""
    functions: dict[int, Any] = {}  # by the original's address; what stands for it keeps it alive
    for owner, _, before, value in patches.replaced:
        if isinstance(value, _CAST_TYPES) and owner is not torch._VF:
            functions.setdefault(id(value.__wrapped__), value)
        elif isinstance(before, types.FunctionType) and isinstance(owner, types.ModuleType):
            functions.setdefault(id(before), value)

    def rebind(owner: Any) -> None:
        if functions.keys().isdisjoint(map(id, vars(owner).values())):
            return
        for name, value in list(vars(owner).items()):
            if id(value) in functions:
                with contextlib.suppress(AttributeError, TypeError):  # read-only classes and modules
                    patches.replace(owner, name, functions[id(value)])

    for module in user_modules():
        rebind(module)
        for kind in _C.instances_in(list(vars(module).values()), type):
            if vars(kind).get("__module__") == vars(module)["__name__"]:
                rebind(kind)
    for module in _C.instances_in(gc.get_objects(), torch.nn.Module):
        rebind(module)


def user_modules() -> Iterator[types.ModuleType]:
    """The loaded modules outside torch, this package and the standard library; reads none of their attributes."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), types.ModuleType) and not is_internal(vars(module).get("__name__") or ""):
            yield module


def is_internal(module_name: str) -> bool:
    """Whether a module belongs to torch, this package or the standard library: never rebound."""
    top = module_name.partition(".")[0]
    return top in ("torch", "apex_amp") or top in sys.stdlib_module_names and top != "__main__"


def _warn_saturated(function: Any, number: float, dtype: torch.dtype) -> None:
    warnings.warn(f"{function.__name__}: {number} does not fit {dtype}, in which amp runs here; its limit "
                  f"{torch.finfo(dtype).max} with the same sign is written instead", stacklevel=2)


# ------------------------------------------------------------------------------------------------
# Users' own functions

def _wrap_descriptor(raw: Any, wrap: Callable[[Any], Any]) -> Any:
    """Wraps the function inside a staticmethod or classmethod, or the function itself."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(wrap(raw.__func__))
    return wrap(raw)


def _bindable(original: Any, policy: str, cast_type: torch.dtype | None) -> Any:
    """A CastFunction of a user's function, inside a Python function where the original is one.

    A class may hold it as a method: torch.compile binds Python functions only.
    """
    function = _C.cast_function(original, policy, cast_type=cast_type)
    if not isinstance(original, types.FunctionType):
        return function

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _patch_registered(patches: _Patches, owner: Any, name: str, policy: str, cast_type: torch.dtype | None) -> None:
    if isinstance(owner, type) and owner is not torch.Tensor:
        raw = inspect.getattr_static(owner, name)
        replacement = _wrap_descriptor(raw, lambda original: _bindable(original, policy, cast_type))
    else:
        replacement = _cast_function(owner, name, getattr(owner, name), policy, cast_type=cast_type)
    patches.replace(owner, name, replacement)


def _register(owner: Any, name: str, policy: str, cast_type: torch.dtype | None = None) -> None:
    if not hasattr(owner, name):
        raise ValueError(f"No function named {name} in module {owner}.")
    with _lock:
        was_installed = is_installed()
        default = _C.default_cast_type()
        uninstall()
        _registered[owner, name] = (policy, cast_type)
        if was_installed:
            install()
            _C.set_default_cast_type(default)


def _decorate(function: F, policy: str, cast_type: torch.dtype | None = None) -> F:
    return _wrap_descriptor(function, lambda original: _bindable(original, policy, cast_type))


def half_function(fn: F) -> F:
    """Decorator: while casts are on, float tensors among the arguments of `fn` become float16."""
    return _decorate(fn, "low_precision", torch.float16)


def bfloat16_function(fn: F) -> F:
    """Decorator: while casts are on, float tensors among the arguments of `fn` become bfloat16."""
    return _decorate(fn, "low_precision", torch.bfloat16)


def float_function(fn: F) -> F:
    """Decorator: while casts are on, half tensors among the arguments of `fn` become float32."""
    return _decorate(fn, "fp32")


def promote_function(fn: F) -> F:
    """Decorator: while casts are on, tensor arguments of `fn` whose types differ become float32."""
    return _decorate(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """`half_function` for `module.name`, in place. `module` is a module or a class.

    Register before `initialize`; afterwards it takes effect at once.
    Raises ValueError when there is no such function.
    """
    _register(module, name, "low_precision", torch.float16)


def register_bfloat16_function(module: Any, name: str) -> None:
    """`bfloat16_function` for `module.name`, in place; see `register_half_function`."""
    _register(module, name, "low_precision", torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """`float_function` for `module.name`, in place; see `register_half_function`."""
    _register(module, name, "fp32")


def register_promote_function(module: Any, name: str) -> None:
    """`promote_function` for `module.name`, in place; see `register_half_function`."""
    _register(module, name, "promote")
