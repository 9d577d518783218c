"""What an optimizer does differently after `amp.initialize`: it may skip a step, and it may train FP32 masters."""
from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, Callable, Sequence

import torch

from .cast_state import cast_scope, clear_weight_cache, current_cast_type
from .generated_class import base_of, generate_class
from .gradients import Gradients
from .master_weights import MasterWeights, master_of
from .overflow import Overflow
from ._state import Setup

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Stash:
    """amp's state of one optimizer, kept as `optimizer._amp_stash`."""

    def __init__(self, setup: Setup, masters: MasterWeights | None) -> None:
        self.setup = setup
        self.masters = masters
        self.gradients = Gradients(masters)
        self.overflows: list[Overflow] = []
        self.last_step: list[Overflow] = []
        # A step function that the user had put on the instance: it stays the step that is taken.
        self.instance_step: Callable | None = None
        # Scripts written for Apex set this after asking for masters early; here they exist from the start.
        self.lazy_init_called = True

    @property
    def all_fp16_params(self) -> Sequence[torch.Tensor]:
        """Apex's name for the model parameters that have masters."""
        return [] if self.masters is None else self.masters.model_params

    @property
    def all_fp32_from_fp16_params(self) -> Sequence[torch.Tensor]:
        """Apex's name for the masters, in the same order."""
        return [] if self.masters is None else self.masters.masters

    def skip_is_pending(self) -> bool:
        """True when the host knows already that the next step will be skipped."""
        return any(overflow.is_known() and overflow.happened() for overflow in self.overflows)

    def last_step_skipped(self) -> bool:
        return any(overflow.happened() for overflow in self.last_step)


def wrap_optimizer(optimizer: Any, setup: Setup, fp32_values: dict[torch.Tensor, torch.Tensor] | None) -> None:
    """Turns `optimizer` into an amp optimizer, in place.

    `fp32_values` (parameter -> its value before the model was cast) asks for FP32 masters of the low-precision parameters
    in `param_groups`; None: the optimizer goes on updating the model's parameters themselves. Group dicts keep their
    identity and filled state moves to the masters.
    """
    masters = None if fp32_values is None else MasterWeights()
    if masters is not None:
        for group in optimizer.param_groups:
            _replace_by_masters(optimizer, group, masters, fp32_values)
    instance_step = vars(optimizer).pop("step", None)
    optimizer.__class__ = generate_class(type(optimizer), "optimizer", _namespace)
    optimizer._amp_stash = Stash(setup, masters)
    if getattr(instance_step, "_wrapped_by_lr_sched", False):
        _let_schedulers_see_steps(optimizer)
    elif instance_step is not None:
        optimizer._amp_stash.instance_step = instance_step


def unwrap_optimizer(optimizer: Any) -> None:
    """Makes it an ordinary optimizer of the model's parameters again, with masters' state carried back."""
    masters = optimizer._amp_stash.masters
    scheduled = getattr(vars(optimizer).pop("step", None), "_wrapped_by_lr_sched", False)
    if masters is not None:
        parameter_of = dict(zip(map(id, masters.masters), masters.model_params))
        for group in optimizer.param_groups:
            group["params"] = [parameter_of.get(id(master), master) for master in group["params"]]
        for parameter, master in zip(masters.model_params, masters.masters):
            state = _state_of(optimizer)
            if master in state:
                state[parameter] = state.pop(master)
        masters.detach()
    instance_step = optimizer._amp_stash.instance_step
    del optimizer._amp_stash
    optimizer.__class__ = base_of(optimizer)
    if scheduled:
        _let_schedulers_see_steps(optimizer)
    elif instance_step is not None:
        optimizer.step = instance_step


def stash_of(optimizer: Any) -> Stash | None:
    return getattr(optimizer, "_amp_stash", None)


def _replace_by_masters(optimizer: Any, group: dict, masters: MasterWeights,
                        fp32_values: dict[torch.Tensor, torch.Tensor]) -> None:
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype not in _LOW_PRECISION:
            continue
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise RuntimeError("a lazy parameter has no value yet, so it can have no FP32 master: run one forward before "
                               "amp.initialize")
        master = masters.add(parameter, fp32_values.get(parameter))
        group["params"][index] = master
        state = _state_of(optimizer)
        if parameter in state:
            state[master] = state.pop(parameter)


def _state_of(optimizer: Any) -> dict:
    """Per-parameter state; a wrapper (LARC and its like) keeps it in the optimizer that it wraps."""
    return optimizer.state if hasattr(optimizer, "state") else optimizer.optim.state


def _let_schedulers_see_steps(optimizer: Any) -> None:
    """Puts torch's own marker on `step` again: a learning-rate scheduler made before had wrapped the class's old step."""
    reference = weakref.ref(optimizer)
    class_step = type(optimizer).step

    @functools.wraps(class_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        self = reference()
        self._opt_called = True
        return class_step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


# --- the generated class ----------------------------------------------------------------------------------------------

def _namespace(base: type) -> dict[str, Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _step(self, base.step, args, kwargs)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        self._amp_stash.gradients.clear_model(set_to_none)
        base.zero_grad(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict) -> None:
        stash = stash_of(self)
        if stash is not None and stash.masters is not None:
            params = param_group["params"]
            param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
            _replace_by_masters(self, param_group, stash.masters, {})
        base.add_param_group(self, param_group)

    def make_masters_now(self: Any) -> None:
        """Does nothing: Apex made masters at the first backward unless asked earlier."""

    def __getstate__(self: Any) -> dict[str, Any]:
        # Python 3.10's object has no __getstate__; torch's optimizers leave out hooks and instance attributes by theirs.
        state = dict(base.__getstate__(self) if hasattr(base, "__getstate__") else vars(self))
        state.pop("step", None)
        return {**state, "_amp_stash": self._amp_stash}

    def __reduce_ex__(self: Any, protocol: int) -> tuple:
        return _rebuild, (base,), self.__getstate__()

    wrapped = {"step": step, "zero_grad": zero_grad, "add_param_group": add_param_group}
    namespace = {name: functools.wraps(getattr(base, name))(method) for name, method in wrapped.items() if hasattr(base, name)}
    return {**namespace, "__getstate__": __getstate__, "__reduce_ex__": __reduce_ex__,
            "_amp_lazy_init": make_masters_now, "_lazy_init_maybe_master_weights": make_masters_now}


def _rebuild(base: type) -> Any:
    generated = generate_class(base, "optimizer", _namespace)
    return generated.__new__(generated)


def _step(optimizer: Any, base_step: Callable, args: tuple, kwargs: dict) -> Any:
    """One optimizer step: nothing at all after an overflow, else the base step on the masters, then the copy to the model."""
    stash = optimizer._amp_stash
    closure = args[0] if args else kwargs.get("closure")
    loss = None
    if closure is not None:
        closure = _Closure(closure, optimizer)
        loss = closure()
        closure.use_again(loss)
        args, kwargs = ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})

    _prepare(stash)
    stash.last_step, stash.overflows = stash.overflows, []
    if _decide_on_device(optimizer, stash):
        optimizer.found_inf = functools.reduce(torch.maximum, [overflow.found_inf for overflow in stash.last_step])
        skipped = False
    else:
        skipped = stash.last_step_skipped()
    try:
        if not skipped:
            with cast_scope(None):
                loss = stash.instance_step(*args, **kwargs) if stash.instance_step else base_step(optimizer, *args, **kwargs)
    finally:
        vars(optimizer).pop("found_inf", None)
    stash.gradients.clear_masters()
    if stash.masters is not None:
        stash.masters.sync()
    clear_weight_cache()
    return loss


def _prepare(stash: Stash) -> None:
    if stash.masters is None:
        return
    stash.masters.sync()
    outside = stash.gradients.reconcile()
    if outside:
        names = stash.setup.parameter_names()
        listed = ", ".join(names.get(id(parameter), "?") for parameter in outside[:5])
        stash.setup.warn(f"the gradients of {len(outside)} low-precision parameters ({listed}, ...) came from a backward outside "
                         "amp.scale_loss: they are used as they are, and small ones have become zero. Wrap the backward: "
                         "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()")


def _decide_on_device(optimizer: Any, stash: Stash) -> bool:
    """True when the optimizer's kernels can skip by a flag on the device, so that the host need not wait for it.

    torch's fused SGD leaves momentum buffers of a skipped first step uninitialized; they are made here, where zeros mean the same.
    """
    if not stash.last_step or all(overflow.is_known() for overflow in stash.last_step):
        return False
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    for group in optimizer.param_groups:
        if group.get("momentum"):
            if group.get("dampening"):
                return False
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
    return True


class _Closure:
    """The user's closure, run once before the step, so that an overflow in it can still skip the whole step.

    The optimizer's first call gets that run's loss. An optimizer that calls it again (LBFGS) has already moved the
    parameters then, so an overflow can only be an error.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: Any) -> None:
        self._closure, self._optimizer = closure, optimizer
        self._cast_type = current_cast_type()
        self._first: list[Any] = []
        self._many_calls = isinstance(optimizer, torch.optim.LBFGS)

    def use_again(self, loss: Any) -> None:
        self._first.append(loss)

    def __call__(self) -> Any:
        if self._first:
            self._many_calls = True
            return self._first.pop()
        stash = self._optimizer._amp_stash
        if self._many_calls and any(scaler.dynamic for scaler in stash.setup.loss_scalers):
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step calls its closure again after moving the parameters: with "
                "loss_scale=\"dynamic\" an overflow there could not be undone. Give amp.initialize a static loss_scale.")
        with torch.enable_grad(), cast_scope(self._cast_type):
            loss = self._closure()
        _prepare(stash)
        if self._many_calls and any(overflow.happened() for overflow in stash.overflows):
            stash.overflows.clear()
            raise RuntimeError(f"gradient overflow inside {type(self._optimizer).__name__}.step, which calls its closure many "
                               "times: the step can't be undone. Lower the static loss_scale given to amp.initialize.")
        return loss
