"""What an optimizer does differently after `amp.initialize`: it may skip a step, and it may train FP32 masters."""
from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from typing import Any, Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .._C import set_grads
from .cast_state import cast_scope, clear_weight_cache, current_cast_type
from .generated_class import base_of, generate_class
from .gradients import Gradients, is_distributed
from .master_weights import MasterWeights, is_master, master_of
from .overflow import Overflow
from .scaler import LossScaler
from ._state import Setup

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class Stash:
    """amp's state of one optimizer, kept as `optimizer._amp_stash`."""

    def __init__(self, setup: Setup, masters: MasterWeights | None, materialize_master_grads: bool = True) -> None:
        self.setup = setup
        self.masters = masters
        self.gradients = Gradients(masters, materialize_master_grads)
        # The blocks since the last step, those before it, and those whose verdict had not reached the host then.
        self.overflows: list[Overflow] = []
        self.last_step: list[Overflow] = []
        self._unsettled: list[Overflow] = []
        # Inside a scale_loss block: ends it, for a step that comes too early.
        self.end_block: Callable[[], None] | None = None
        # The most parameters without a gradient that were looked into.
        self.missing = 0
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

    def note(self, overflow: Overflow) -> None:
        """Remembers one more block; earlier ones that decide nothing are forgotten, for a step may never come."""
        unknown = [earlier for earlier in self.overflows if not earlier.is_known()]
        skipping = [earlier for earlier in self.overflows if earlier.is_known() and earlier.happened()]
        self.overflows = [*skipping[:1], *unknown, overflow]

    def begin_step(self) -> None:
        """Makes the blocks so far those of this step, and reports what has reached the host of earlier ones."""
        waiting = self._unsettled + self.last_step
        self._unsettled = [overflow for overflow in waiting if not overflow.settle()]
        self.last_step, self.overflows = self.overflows, []

    def skip_is_pending(self) -> bool:
        """True when the host knows already that the next step will be skipped."""
        return any(overflow.is_known() and overflow.happened() for overflow in self.overflows)

    def last_step_skipped(self) -> bool:
        return any(overflow.happened() for overflow in self.last_step)

    def finish_left_scaled(self, optimizer: Any, unless_by: LossScaler | None = None) -> bool:
        """Unscales and checks what delayed blocks left scaled, by the scaler that scaled it; False: there was nothing.

        What `unless_by` scaled can wait, and so does what a reducer has not seen: ranks must not judge it on their own.
        """
        left = self.gradients.left_scaled
        if left is None or left.scaler is unless_by or (unless_by is not None and is_distributed()):
            return False
        self.gradients.catch_up()
        self.gradients.open(optimizer.param_groups, left.scaler, self.skip_is_pending())
        unscale(left.scaler, [self])
        return True

    def __getstate__(self) -> dict[str, Any]:
        # The step as torch's optimizers, whose copies leave it behind.
        return {**self.__dict__, "end_block": None, "instance_step": None}


class AmpStep:
    """Lets a fused optimizer write the model's parameters itself, as `optimizer._amp_step` during its step."""

    def __init__(self, stash: Stash) -> None:
        self._gradients = stash.gradients
        # The low-precision parameters to be written with masters, None for what is none; and what is told afterwards.
        self.model_params_of, self.note_written = stash.masters.model_params_of, stash.masters.note_written

    @property
    def inv_scale(self) -> torch.Tensor | None:
        """Not None: gradients are to be read from the model's parameters, and multiplied by this."""
        return self._gradients.inv_scale()


def unscale(scaler: LossScaler, stashes: list[Stash], decide: bool = True) -> None:
    """Ends a block: gradients are unscaled and checked, the scale is updated, and the optimizers' next steps decided.

    With decide=False the check is only left in `scaler.found_inf`.
    """
    scaler.clear_found_inf()
    flags = [(stash.gradients, stash.gradients.unscale(scaler)) for stash in stashes]
    if decide and not scaler.is_identity:
        scaler.update()
        overflow = Overflow(stashes[0].setup, scaler, flags)
        for stash in stashes:
            stash.note(overflow)


def wrap_optimizer(optimizer: Any, setup: Setup, fp32_values: dict[torch.Tensor, torch.Tensor] | None) -> None:
    """Turns `optimizer` into an amp optimizer, in place.

    `fp32_values` (parameter -> its value before the model was cast) asks for FP32 masters of the low-precision
    parameters in `param_groups`; None: the optimizer goes on updating the model's parameters themselves. Group dicts
    keep their identity and filled state moves to the masters.
    """
    masters = None if fp32_values is None else MasterWeights()
    if masters is not None:
        for group in optimizer.param_groups:
            _replace_by_masters(optimizer, group, masters, fp32_values)
    instance_step = vars(optimizer).pop("step", None)
    optimizer.__class__ = generate_class(type(optimizer), "optimizer", _namespace)
    optimizer._amp_stash = Stash(setup, masters, getattr(optimizer, "materialize_master_grads", True))
    if getattr(instance_step, "_wrapped_by_lr_sched", False):
        _let_schedulers_see_steps(optimizer)
        function = instance_step.__wrapped__  # the class's step, or what the user had put on the instance before
        instance_step = None if function is base_of(optimizer).step else types.MethodType(function, optimizer)
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
    if instance_step is not None:
        optimizer.step = instance_step
    if scheduled:
        _let_schedulers_see_steps(optimizer)


def stash_of(optimizer: Any) -> Stash | None:
    """amp's state of `optimizer`, or of the one that it wraps as `.optim` (LARC, made after initialize)."""
    stash = getattr(optimizer, "_amp_stash", None)
    return getattr(getattr(optimizer, "optim", None), "_amp_stash", None) if stash is None else stash


def _replace_by_masters(optimizer: Any, group: dict, masters: MasterWeights,
                        fp32_values: dict[torch.Tensor, torch.Tensor]) -> None:
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype not in _LOW_PRECISION:
            continue
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise RuntimeError("a lazy parameter has no value yet, so it can have no FP32 master: run one forward "
                               "before amp.initialize")
        master = masters.add(parameter, fp32_values.get(parameter))
        group["params"][index] = master
        state = _state_of(optimizer)
        if parameter in state:
            state[master] = state.pop(parameter)


def _state_of(optimizer: Any) -> dict:
    """Per-parameter state; a wrapper (LARC and its like) keeps it in the optimizer that it wraps."""
    return optimizer.state if hasattr(optimizer, "state") else optimizer.optim.state


def _let_schedulers_see_steps(optimizer: Any) -> None:
    """Puts torch's own marker on `step` again: a learning-rate scheduler made before had wrapped the step of then."""
    reference = weakref.ref(optimizer)
    plain_step = optimizer.step.__func__

    @functools.wraps(plain_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        self = reference()
        self._opt_called = True
        return plain_step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


_step_hook: RemovableHandle | None = None


def install() -> None:
    """Lets the steps of optimizers that amp does not know be seen: see `_after_any_step`."""
    global _step_hook
    if _step_hook is None:
        _step_hook = register_optimizer_step_post_hook(_after_any_step)


def uninstall() -> None:
    global _step_hook
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


def _after_any_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
    """torch's fused kernels write parameters and move no version counter, which masters go by."""
    if torch.compiler.is_compiling() or stash_of(optimizer) is not None:
        return
    torch.autograd.graph.increment_version(
        [parameter for group in optimizer.param_groups if group.get("fused") for parameter in group["params"]
         if master_of(parameter) is not None or is_master(parameter)])


# --- the generated class ----------------------------------------------------------------------------------------------

def _namespace(base: type) -> dict[str, Any]:
    # `_amp_stash` is None in an instance of a user's subclass of the generated class: an ordinary optimizer.
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._amp_stash is None:
            return base.step(self, *args, **kwargs)
        return _step(self, base.step, args, kwargs)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        if self._amp_stash is not None:
            self._amp_stash.gradients.clear_model(set_to_none)
        if set_to_none and base.zero_grad is _TORCH_ZERO_GRAD:  # the same, without a Python loop
            for group in self.param_groups:
                set_grads(group["params"])
        else:
            base.zero_grad(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict) -> None:
        earlier = list(self.param_groups)
        base.add_param_group(self, param_group)
        for group in self.param_groups if self._amp_stash is not None else ():
            if not any(group is other for other in earlier):
                _adopt_group(self, group)

    def make_masters_now(self: Any) -> None:
        """Does nothing: Apex made masters at the first backward unless asked earlier."""

    def __setstate__(self: Any, state: Any) -> None:
        if isinstance(state, _Pickled):
            self._amp_stash = state.stash
            state = state.state
        if hasattr(base, "__setstate__"):
            base.__setstate__(self, state)
        elif state is not None:
            vars(self).update(state)

    def __reduce_ex__(self: Any, protocol: int) -> tuple:
        make, arguments, *rest = base.__reduce_ex__(self, protocol)
        if self._amp_stash is None:
            return make, arguments, *rest
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        state = rest[0] if rest else None
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in ("step", "_amp_stash")}
        return _rebuild, (base, make, arguments), _Pickled(state, self._amp_stash), *rest[1:]

    wrapped = {"step": step, "zero_grad": zero_grad, "add_param_group": add_param_group}
    namespace = {name: functools.wraps(getattr(base, name))(method)
                 for name, method in wrapped.items() if hasattr(base, name)}
    return {**namespace, "__setstate__": __setstate__, "__reduce_ex__": __reduce_ex__,
            "__class__": property(base_of, object.__dict__["__class__"].__set__),  # super(self.__class__, self) ends
            "_amp_stash": None, "_amp_lazy_init": make_masters_now, "_lazy_init_maybe_master_weights": make_masters_now}


@dataclasses.dataclass
class _Pickled:
    """What a pickle or a copy of an amp optimizer carries: the state that its own class gave, and amp's."""
    state: Any
    stash: Stash


def _rebuild(base: type, make: Callable, arguments: tuple) -> Any:
    optimizer = make(*arguments)
    optimizer.__class__ = generate_class(base, "optimizer", _namespace)
    return optimizer


def _adopt_group(optimizer: Any, group: dict) -> None:
    """Lets amp know a group that the base class has just added."""
    stash = optimizer._amp_stash
    if any(not scaler.is_identity for scaler in stash.setup.loss_scalers):
        # No block knew these parameters as the optimizer's: what they have are scaled gradients that nobody unscaled.
        set_grads(group["params"])
    if stash.masters is None:
        return
    # The base class compares with the masters in param_groups, so it cannot see that a model parameter is there.
    present = set(map(id, stash.masters.model_params))
    if any(id(parameter) in present for parameter in group["params"]):
        optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]
        raise ValueError("some parameters appear in more than one parameter group: add_param_group was given "
                         "parameters whose FP32 masters this optimizer has already")
    _replace_by_masters(optimizer, group, stash.masters, {})


# --- the step ---------------------------------------------------------------------------------------------------------

def _step(optimizer: Any, base_step: Callable, args: tuple, kwargs: dict) -> Any:
    """One optimizer step: nothing after an overflow, else the base step on the masters, then the copy to the model."""
    stash = optimizer._amp_stash
    if stash.end_block is not None:
        stash.end_block()
    if stash.finish_left_scaled(optimizer):
        stash.setup.warn("optimizer.step() found gradients that amp.scale_loss(..., delay_unscale=True) had left "
                         "scaled, and unscaled them itself: what was done to them before, like clipping, met scaled "
                         "gradients. Leave delay_unscale out in the last block before the step")
    if (args[0] if args else kwargs.get("closure")) is not None:
        return _step_with_closure(optimizer, base_step, args, kwargs)
    _prepare(stash)
    on_device = _decide_on_device(optimizer, stash)
    stash.begin_step()
    if not on_device and stash.last_step_skipped():
        return _end_step(stash, None)
    return _end_step(stash, _take_step(optimizer, base_step, args, kwargs, on_device))


def _step_with_closure(optimizer: Any, base_step: Callable, args: tuple, kwargs: dict) -> Any:
    """The same where the gradients are made inside the step; a skip known before only runs the closure."""
    stash = optimizer._amp_stash
    closure = _Closure(args[0] if args else kwargs["closure"], optimizer)
    if stash.skip_is_pending():
        loss = closure.run()
        stash.begin_step()
        return _end_step(stash, loss)
    _prepare(stash)
    args, kwargs = ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})
    try:
        loss = _take_step(optimizer, base_step, args, kwargs)
    except _OverflowInClosure as overflow:
        loss = overflow.loss
    return _end_step(stash, loss)


def _take_step(optimizer: Any, base_step: Callable, args: tuple, kwargs: dict, on_device: bool = False) -> Any:
    """The optimizer's own step, which skips by itself where `on_device`, and the copy to the model."""
    stash = optimizer._amp_stash
    writes_model_params = stash.masters is not None and getattr(optimizer, "_writes_model_params", False)
    try:
        if on_device:
            optimizer.found_inf = functools.reduce(torch.maximum, [overflow.found_inf for overflow in stash.last_step])
        if writes_model_params:
            optimizer._amp_step = AmpStep(stash)
        with cast_scope(None):
            if stash.instance_step is not None:
                loss = stash.instance_step(*args, **kwargs)
            else:
                loss = base_step(optimizer, *args, **kwargs)
    finally:
        vars(optimizer).pop("found_inf", None)
        vars(optimizer).pop("_amp_step", None)
    if writes_model_params:
        stash.masters.sync()
    elif stash.masters is not None:
        stash.masters.push()  # the optimizer may have written where no version counter moves
    return loss


def _end_step(stash: Stash, loss: Any) -> Any:
    stash.gradients.clear_masters()
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
        stash.setup.warn(f"the gradients of {len(outside)} low-precision parameters ({listed}, ...) came from a "
                         "backward outside amp.scale_loss: they are used as they are, and small ones have become zero. "
                         "Wrap it: with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()")
    if stash.gradients.missing > stash.missing:
        stash.missing = stash.gradients.missing
        _warn_of_replaced(stash)


def _warn_of_replaced(stash: Stash) -> None:
    known = {id(parameter) for model in stash.setup.alive_models() for parameter in model.parameters()}
    lost = [parameter for parameter in stash.masters.model_params if id(parameter) not in known]
    if known and lost:
        stash.setup.warn(f"{len(lost)} parameters with FP32 masters are in no model that went through amp.initialize, "
                         f"the first of shape {tuple(lost[0].shape)}. One assigned to a module afterwards "
                         "(module.weight = nn.Parameter(...)) is not trained: copy into the parameter that is there, "
                         "or assign before amp.initialize")


def _decide_on_device(optimizer: Any, stash: Stash) -> bool:
    """True when the optimizer's kernels can skip by a flag on the device, so that the host need not wait for it.

    torch's fused SGD leaves momentum buffers of a skipped first step uninitialized; they are made here, where zeros
    mean the same.
    """
    if all(overflow.is_known() for overflow in stash.overflows):
        return False
    if stash.instance_step is not None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if getattr(optimizer, "_writes_model_params", False):
        return True
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return True


class _OverflowInClosure(BaseException):
    """Ends a step whose closure overflowed before anything changed. No Exception, for optimizers that catch those."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss


class _Closure:
    """The user's closure, called when the optimizer calls it, with casts on; an overflow in it ends the step.

    That can be done silently only while the parameters are what they were, which their versions tell: a move through
    `.data` is not seen. LBFGS calls its closure again after moving them; sharpness-aware optimizers move them first.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: Any) -> None:
        self._closure, self._optimizer = closure, optimizer
        self._cast_type = current_cast_type()
        self._versions = self._parameter_versions()
        setup = optimizer._amp_stash.setup
        if isinstance(optimizer, torch.optim.LBFGS) and any(scaler.dynamic for scaler in setup.loss_scalers):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step calls its closure again after moving the parameters: with "
                "loss_scale=\"dynamic\" an overflow there can't be undone. Give amp.initialize a static loss_scale.")

    def __call__(self) -> Any:
        stash = self._optimizer._amp_stash
        if stash.masters is not None:
            stash.masters.push()
        loss = self.run()
        _prepare(stash)
        stash.begin_step()
        if stash.last_step_skipped():
            if self._parameter_versions() == self._versions:
                raise _OverflowInClosure(loss)
            raise RuntimeError(f"gradient overflow in a closure that {type(self._optimizer).__name__}.step called "
                               "after moving the parameters: the step can't be undone. Give amp.initialize a lower, "
                               "static loss_scale.")
        return loss

    def run(self) -> Any:
        with torch.enable_grad(), cast_scope(self._cast_type):
            return self._closure()

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for group in self._optimizer.param_groups for parameter in group["params"]]
