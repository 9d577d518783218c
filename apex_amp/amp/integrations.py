"""Where torch runs code later, elsewhere or by other rules, and the cast state must follow it."""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.data._utils.worker as data_worker
from torch.autograd.function import BackwardCFunction

from apex_amp import _C

from . import custom_function

Replace = Callable[[Any, str, Any], None]

_CAST_TYPES = {torch.float16, torch.bfloat16, torch.float32}


def patch(replace: Replace, lifted: Callable[[], AbstractContextManager[None]]) -> None:
    """Replaces torch's entry points, through `replace(owner, name, value)`."""
    _script_without_patches(replace, lifted)
    _recompute_in_forward_state(replace)
    _backward_in_forward_state(replace)
    _custom_functions_see_casts(replace)
    _no_casts_in_data_workers(replace)
    _no_cached_casts_across_graph_capture(replace)
    _notice_data_access(replace)
    _forget_casts_before_swap(replace)
    _saved_tensors_keep_their_types(replace)
    _recurrent_modules_take_mixed_types(replace)
    _pause_in_torch_autocast(replace)
    _parallel_workers_in_caller_state(replace)


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


def _in_present_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the cast state that the calling thread has now, whenever and in whatever thread it runs."""
    state = _C.scope_token()

    def in_state(*args: Any, **kwargs: Any) -> Any:
        with _C.resume_scope(state):
            return function(*args, **kwargs)

    return in_state


def _recompute_in_forward_state(replace: Replace) -> None:
    """Checkpoints recompute inside backward, in torch.autocast's state of their forward, and so in this one."""
    checkpoint = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, name + "_impl"):  # from torch 2.14 on the work is here
        name += "_impl"
    generator, forward = getattr(checkpoint, name), checkpoint.CheckpointFunction.forward

    @functools.wraps(generator)
    def non_reentrant(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(_in_present_state(fn), *args, **kwargs)

    @functools.wraps(forward)
    def reentrant(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, _in_present_state(run_function), *args)

    replace(checkpoint, name, non_reentrant)
    replace(checkpoint.CheckpointFunction, "forward", staticmethod(reentrant))


def _backward_in_forward_state(replace: Replace) -> None:
    """The backward of a custom Function casts as its forward did, wherever and whenever it runs."""
    original = BackwardCFunction.apply

    def __init__(self: Any) -> None:  # called once per forward, in the forward's state
        self._cast_state = _C.scope_token()

    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        state = getattr(self, "_cast_state", None)
        if state is None:  # its forward ran before the patches were installed
            return original(self, *args)
        with _C.resume_scope(state):
            return original(self, *args)

    replace(BackwardCFunction, "__init__", __init__)
    replace(BackwardCFunction, "apply", apply)


def _custom_functions_see_casts(replace: Replace) -> None:
    """torch.amp.custom_fwd and custom_bwd know torch.autocast's regions only, also where they have been applied."""
    for name in ("custom_fwd", "custom_bwd"):
        for owner in (torch.amp, torch.amp.autocast_mode):
            replace(owner, name, getattr(custom_function, name))
    for function in _subclasses(torch.autograd.Function):
        for name in ("forward", "backward"):
            decorated = custom_function.decorated_here(getattr(vars(function).get(name), "__func__", None))
            if decorated is not None:
                replace(function, name, staticmethod(decorated))


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in type.__subclasses__(kind):
        yield subclass
        yield from _subclasses(subclass)


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
    original: Any = torch._C.TensorBase.data  # the descriptor itself

    def get(self: Any) -> Any:
        _C.drop_cached_casts(self)
        return original.__get__(self)

    replace(torch.Tensor, "data", property(get, original.__set__, original.__delete__, original.__doc__))


def _forget_casts_before_swap(replace: Replace) -> None:
    """Tensors that change places, as in module.to() of a subclass, must have no weak reference to them."""
    original = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(*args: Any) -> None:
        _C.clear_weight_cache()
        original(*args)

    replace(torch.utils, "swap_tensors", swap_tensors)


def _saved_tensors_keep_their_types(replace: Replace) -> None:
    """What hooks pack and unpack for the backward, as `save_on_cpu` does with .cpu(), is no step of the model."""
    original = torch.autograd.graph.saved_tensors_hooks.__init__

    @functools.wraps(original)
    def __init__(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        original(self, _C.cast_scope(None)(pack_hook), _C.cast_scope(None)(unpack_hook))

    replace(torch.autograd.graph.saved_tensors_hooks, "__init__", __init__)


def _recurrent_modules_take_mixed_types(replace: Replace) -> None:
    """torch.nn's RNNs refuse an input of another type than their weights, unless torch.autocast is on."""
    original = torch.nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: Any, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
        dtypes = {input.dtype, self._flat_weights[0].dtype}
        if len(dtypes) == 2 and dtypes <= _CAST_TYPES and _C.cast_type_on(input.device.type) is not None:
            input = torch.empty(input.shape, dtype=self._flat_weights[0].dtype, device="meta")
        original(self, input, batch_sizes)

    replace(torch.nn.RNNBase, "check_input", check_input)


def _pause_in_torch_autocast(replace: Replace) -> None:
    """Of nested regions the innermost decides: inside torch's own, casts on its device type are torch's."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        entered = enter(self)
        scope = _C.autocast_scope(self.device, isinstance(self, torch.amp.autocast_mode._UnmanagedAutocast))
        scope.__enter__()
        vars(self).setdefault("_paused_casts", []).append(scope)
        return entered

    @functools.wraps(leave)
    def __exit__(self: Any, *exception: Any) -> Any:
        if vars(self).get("_paused_casts"):  # not when it was entered before the patches were installed
            self._paused_casts.pop().__exit__(*exception)
        return leave(self, *exception)

    replace(torch.autocast, "__enter__", __enter__)
    replace(torch.autocast, "__exit__", __exit__)


def _parallel_workers_in_caller_state(replace: Replace) -> None:
    """DataParallel runs replicas in threads that take over torch.autocast's state, and so this one."""
    original: Callable[..., Any] = torch.nn.parallel.parallel_apply

    @functools.wraps(original)
    def parallel_apply(modules: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return original([_in_present_state(module) for module in modules], *args, **kwargs)

    for owner in (torch.nn.parallel, sys.modules[original.__module__], sys.modules[torch.nn.DataParallel.__module__]):
        replace(owner, "parallel_apply", parallel_apply)


def after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A step hook of all optimizers: torch's fused ones write parameters without moving their versions."""
    if not torch.compiler.is_compiling():
        _C.clear_weight_cache()


def free_deleted_models(phase: str, info: dict[str, int]) -> None:
    """For gc.callbacks: a cached cast reaches its parameter through grad_fn, where the collector can't see."""
    if phase == "start" and info["generation"] == 2:
        _C.clear_weight_cache()
