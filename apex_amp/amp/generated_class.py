"""Subclasses made on the fly, so that one object of a user's class can behave a little differently.

Swapping `obj.__class__` for a generated subclass keeps everything people rely on: `isinstance`, bound methods with
their signatures, `super()`, deepcopy, DataParallel replicas. An attribute on the instance would not survive all of
these.
"""
from __future__ import annotations

import abc
import contextlib
import inspect
from typing import Any, Callable, Iterator


def generate_class(base: type, role: str, make_namespace: Callable[[type], dict[str, Any]]) -> type:
    """The subclass of `base` for `role`, made at the first request: one per base and role, freed with its base.

    It looks like its base (`__name__`, `__qualname__`, `__module__`, `__doc__`), and calling it makes a plain instance
    of the base: `type(model)(...)` is a fresh, uninitialized model. Registries that the base keeps of its subclasses,
    in `__init_subclass__` or in a metaclass, do not hear of it.
    """
    for existing in type.__subclasses__(base):
        if existing.__dict__.get("_amp_role") == role:
            return existing

    def call_base(cls: type, *args: Any, **kwargs: Any) -> Any:
        # User subclasses of a generated class (class Child(type(model))) are constructed as usual.
        made = base if "_amp_role" in cls.__dict__ else cls
        return type(base).__call__(made, *args, **kwargs)

    def signature(cls: type) -> inspect.Signature:
        if "_amp_role" not in cls.__dict__:
            raise AttributeError("__signature__")
        return inspect.signature(base)

    metaclass = type(type(base).__name__, (type(base),), {"__call__": call_base, "__signature__": property(signature)})
    namespace = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "_amp_role": role,
        **make_namespace(base),
    }
    # An abstract base class needs ABCMeta's own construction; a user's metaclass is passed over.
    make = abc.ABCMeta.__new__ if issubclass(metaclass, abc.ABCMeta) else type.__new__
    with _silent_init_subclass(base):
        return make(metaclass, base.__name__, (base,), namespace)


@contextlib.contextmanager
def _silent_init_subclass(base: type) -> Iterator[None]:
    own = base.__dict__.get("__init_subclass__")
    type.__setattr__(base, "__init_subclass__", classmethod(lambda cls, **kwargs: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(base, "__init_subclass__")
        else:
            type.__setattr__(base, "__init_subclass__", own)


def base_of(obj: object) -> type:
    """The class of `obj` as its author wrote it, whether or not it has been swapped."""
    cls = type(obj)
    return cls.__mro__[1] if "_amp_role" in cls.__dict__ else cls
