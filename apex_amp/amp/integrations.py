"""Where torch runs code later, elsewhere or by other rules, and the cast state must follow it."""
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.data._utils.worker as data_worker
from torch.autograd.function import BackwardCFunction

from apex_amp import _C

Replace = Callable[[Any, str, Any], None]


def patch(replace: Replace, lifted: Callable[[], AbstractContextManager[None]]) -> None:
    """Replaces torch's entry points, through `replace(owner, name, value)`."""
    _script_without_patches(replace, lifted)
    _recompute_in_forward_state(replace)
    _backward_in_forward_state(replace)
    _no_casts_in_data_workers(replace)
    _no_cached_casts_across_graph_capture(replace)
    _notice_data_access(replace)


def _script_without_patches(replace: Replace, lifted: Callable[[], AbstractContextManager[None]]) -> None:
    """The TorchScript compiler resolves names to torch's own functions and knows no others."""
    original = torch.jit.script

    @functools.wraps(original)
    def script(*args: Any, **kwargs: Any) -> Any:
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        with lifted():
            return original(*args, **kwargs)

    replace(torch.jit, "script", script)
    replace(torch.jit._script, "script", script)


def _recompute_in_forward_state(replace: Replace) -> None:
    """Non-reentrant checkpoints recompute inside backward; reentrant ones are custom Functions."""
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(torch.utils.checkpoint, name)

    @functools.wraps(original)
    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        state = _C.scope_token()

        def run(*inputs: Any, **named: Any) -> Any:
            with _C.resume_scope(state):
                return fn(*inputs, **named)

        return original(run, *args, **kwargs)

    replace(torch.utils.checkpoint, name, generator)


def _backward_in_forward_state(replace: Replace) -> None:
    """The backward of a custom Function casts as its forward did, wherever and whenever it runs."""
    original = BackwardCFunction.apply

    def __init__(self: Any) -> None:  # called once per forward, in the forward's state
        self._cast_state = _C.scope_token()

    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        with _C.resume_scope(self._cast_state):
            return original(self, *args)

    replace(BackwardCFunction, "__init__", __init__)
    replace(BackwardCFunction, "apply", apply)


def _no_casts_in_data_workers(replace: Replace) -> None:
    original = data_worker._worker_loop

    @functools.wraps(original)
    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        _C.set_default_cast_type(None)  # this is a process of its own
        with _C.cast_scope(None):
            return original(*args, **kwargs)

    replace(data_worker, "_worker_loop", _worker_loop)


def _no_cached_casts_across_graph_capture(replace: Replace) -> None:
    """A captured graph must make its own casts, and what it made has no values until it is replayed."""
    for name in ("capture_begin", "capture_end"):
        original = getattr(torch.cuda.CUDAGraph, name)

        @functools.wraps(original)
        def clearing(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            _C.clear_weight_cache()
            return _original(self, *args, **kwargs)

        replace(torch.cuda.CUDAGraph, name, clearing)


def _notice_data_access(replace: Replace) -> None:
    """`p.data` hands out the memory of `p` with a version counter of its own."""
    original = torch._C.TensorBase.data

    def get(self: Any) -> Any:
        _C.drop_cached_casts(self)
        return original.__get__(self)

    replace(torch.Tensor, "data", property(get, original.__set__, original.__delete__, original.__doc__))


def free_deleted_models(phase: str, info: dict[str, int]) -> None:
    """For gc.callbacks. A cached cast reaches its parameter through grad_fn, where the collector can't see: let go first."""
    if phase == "start" and info["generation"] == 2:
        _C.clear_weight_cache()
