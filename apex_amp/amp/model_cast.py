"""What a model does differently after `amp.initialize`: a forward with a cast state; at O2, O3, O5 another dtype."""
from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from . import patching
from ._state import process, refresh_cast_devices
from .cast_state import cast_scope
from .generated_class import base_of, generate_class
from .master_weights import FP32StateDict, MasterWeights, master_of


@dataclasses.dataclass(eq=False)
class ModelCast:
    """amp's state of one model, kept as `model._amp_cast`.

    `cast_type`: what patched functions cast to inside its forward (None: they do not). `input_type` and `output_type`:
    what floating inputs and outputs of forward are cast to (None: left alone). `masters`: the FP32 master weights of
    its parameters, one object an optimizer. `instance_forward`: a forward that the user had put on the instance. `ddp`:
    the DistributedDataParallel wrapper around it, held weakly. `is_checked`: its first forward found nothing wrong.
    """
    cast_type: torch.dtype | None
    input_type: torch.dtype | None
    output_type: torch.dtype | None
    masters: list[MasterWeights] = dataclasses.field(default_factory=list)
    instance_forward: Callable | None = None
    ddp: weakref.ref | None = None
    is_checked: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ddp": None}

    @property
    def casts_weights(self) -> bool:
        return self.input_type in (torch.float16, torch.bfloat16)

    def sync(self) -> None:
        for masters in self.masters:
            masters.sync()


def cast_of(model: nn.Module) -> ModelCast | None:
    return model.__dict__.get("_amp_cast")


def wrap_model(model: nn.Module, cast: ModelCast) -> None:
    """Makes `model` an amp model, in place; see `ModelCast`."""
    cast.instance_forward = model.__dict__.pop("forward", None)
    _adopt(model, cast, generate_class(type(model), "model", _namespace))
    _feed_scripted_modules_fp32(model)


def _adopt(model: nn.Module, cast: ModelCast, generated: type) -> None:
    # Past __setattr__, which models override.
    model.__dict__["_amp_cast"] = cast
    object.__setattr__(model, "__class__", generated)


def unwrap_model(model: nn.Module) -> None:
    """Makes it an ordinary FP32 model again; weights that had masters get their exact values back."""
    cast = model.__dict__.pop("_amp_cast")
    object.__setattr__(model, "__class__", base_of(model))
    if cast.instance_forward is not None:
        model.__dict__["forward"] = cast.instance_forward
    _remove_hooks(model)
    for scripted in _scripted_modules(model):
        scripted.__dict__.pop("forward", None)
    cast.sync()
    for masters in cast.masters:
        for parameter, master in zip(masters.model_params, masters.masters):
            parameter.data = master.data
        masters.detach()
    for tensor in (*model.parameters(), *model.buffers()):
        if cast.casts_weights and tensor.dtype == cast.input_type:
            tensor.data = tensor.data.float()


def _namespace(base: type) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cast = self._amp_cast
        if cast is None:
            return base.forward(self, *args, **kwargs)
        if cast.masters and not torch.compiler.is_compiling() and "_is_replica" not in self.__dict__:
            if not cast.is_checked:
                _check_not_sharded(self, cast)
            cast.sync()
        if cast.input_type is not None:
            args, kwargs = cast_floating(args, cast.input_type), cast_floating(kwargs, cast.input_type)
        # Dynamo knows cast_scope only where something is patched, and is reset when something becomes so.
        is_plain = torch.compiler.is_compiling() and not patching.is_installed()
        with contextlib.nullcontext() if is_plain else cast_scope(cast.cast_type, forward=True):
            if cast.instance_forward is None:
                output = base.forward(self, *args, **kwargs)
            else:
                output = cast.instance_forward(*args, **kwargs)
        return output if cast.output_type is None else cast_floating(output, cast.output_type)

    with contextlib.suppress(TypeError, ValueError):  # a forward written in C
        forward.__signature__ = inspect.signature(base.forward)  # getfullargspec doesn't look at what is wrapped

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        cast = self._amp_cast
        if cast is None:
            return base._apply(self, *args, **kwargs)
        cast.sync()
        before = _dtypes(self)
        with_masters = [parameter for parameter in self.parameters() if master_of(parameter) is not None]
        moved = base._apply(self, *args, **kwargs)
        if not set(map(id, with_masters)).issubset(map(id, self.parameters())):
            raise RuntimeError("this call replaced the model's parameters by new ones, as to(\"meta\") does, while the "
                               "optimizer goes on training the FP32 masters of the old: call it before amp.initialize")
        for masters in cast.masters:
            masters.follow()
        if _dtypes(self) != before:
            _take_inputs_as_weights_are(self, cast)
        refresh_cast_devices()
        return moved

    @functools.wraps(base.zero_grad)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        base.zero_grad(self, set_to_none)
        cast = cast_of(self)
        for masters in cast.masters if cast is not None and not set_to_none else ():
            masters.take_zeroed_grads(self.parameters())
        for setup in process.alive:
            setup.clear_set_aside(self, set_to_none)

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return _copied(self, base, memo)

    def __copy__(self: nn.Module) -> nn.Module:
        return _copied(self, base, None)

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple:
        return _reduced(self, base, protocol)

    namespace = {"forward": forward, "_apply": _apply, "zero_grad": zero_grad, "__deepcopy__": __deepcopy__,
                 "__copy__": __copy__, "__reduce_ex__": __reduce_ex__, "_amp_cast": None}
    if getattr(base, "cls_to_become", None) is not None:  # a lazy module changes its class at its first forward
        namespace["cls_to_become"] = generate_class(base.cls_to_become, "model", _namespace)
    return namespace


def _take_inputs_as_weights_are(model: nn.Module, cast: ModelCast) -> None:
    """After model.float(), .half() and their like: weights take their masters' values as exactly as they can now."""
    with torch.no_grad():
        for masters in cast.masters:
            for parameter, master in zip(masters.model_params, masters.masters):
                parameter.copy_(master)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if cast.input_type is not None and len(dtypes) == 1:
        cast.input_type = dtypes.pop()


def _feed_scripted_modules_fp32(model: nn.Module) -> None:
    """TorchScript runs no patched functions, so where those cast, a scripted module must get what its weights need."""
    if model._amp_cast.cast_type is not None:
        for scripted in _scripted_modules(model):
            # Not through __setattr__, which would ask the compiler, nor a hook, which a scripted module can't have.
            scripted.__dict__["forward"] = functools.partial(_forward_in_fp32, scripted)


def _forward_in_fp32(scripted: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast_floating((args, kwargs), torch.float32)
    return scripted.__getattr__("forward")(*args, **kwargs)  # past the instance's own


def _scripted_modules(model: nn.Module) -> list[torch.jit.ScriptModule]:
    return [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]


def _check_not_sharded(model: nn.Module, cast: ModelCast) -> None:
    if any("_is_fsdp_managed_module" in module.__dict__ for module in model.modules()):
        raise RuntimeError("fully_shard replaced the low-precision parameters that amp.initialize made, so their FP32 "
                           "masters can't be trained: use opt_level='O1' or 'O4' with fully_shard.")
    cast.is_checked = True


# --- copies and pickles -----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def _as_plain(model: nn.Module, base: type) -> Iterator[ModelCast]:
    """Shows the class and attributes that the model's author wrote, whose copying and pickling then do their work."""
    cast, generated = model.__dict__.pop("_amp_cast"), type(model)
    object.__setattr__(model, "__class__", base)
    try:
        yield cast
    finally:
        _adopt(model, cast, generated)


def _copied(model: nn.Module, base: type, memo: dict[int, Any] | None) -> nn.Module:
    """A copy, deep where there is a memo: an amp model like the original, with masters of its own when it is deep."""
    if model._amp_cast is None:  # of a user's subclass of a generated class
        return copy._reconstruct(model, memo, *base.__reduce_ex__(model, 4))
    model._amp_cast.sync()
    copier = copy.copy if memo is None else functools.partial(copy.deepcopy, memo=memo)
    with _as_plain(model, base) as cast:
        duplicate = copier(model)
        # A model's own __deepcopy__ may have made a fresh FP32 model, which stays one.
        duplicate_cast = copier(cast) if _dtypes(duplicate) == _dtypes(model) else None
    if duplicate_cast is not None:
        _adopt(duplicate, duplicate_cast, generate_class(base_of(duplicate), "model", _namespace))
        _feed_scripted_modules_fp32(duplicate)
        for setup in process.alive:
            if any(ref() is model for ref in setup.models):
                setup.watch(duplicate)
                _warn_of_half_averages(setup, cast)
    return duplicate


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    return [parameter.dtype for parameter in model.parameters()]


def _warn_of_half_averages(setup: Any, cast: ModelCast) -> None:
    frame = sys._getframe()
    while cast.casts_weights and frame is not None:
        if frame.f_code is AveragedModel.__init__.__code__:
            setup.warn(f"AveragedModel averages the {cast.input_type} parameters of this model, which can't follow "
                       "small updates. Keep an average of model.state_dict() instead, whose values are the FP32 "
                       "masters")
        frame = frame.f_back


def _reduced(model: nn.Module, base: type, protocol: int) -> tuple:
    """At O0, O1 and O4 the weights are untouched; the pickle holds the plain model and loads without this package."""
    if model._amp_cast is None:
        return base.__reduce_ex__(model, protocol)
    model._amp_cast.sync()
    with _as_plain(model, base) as cast:
        make, arguments, *rest = model.__reduce_ex__(protocol)
        if rest and rest[0] is model.__dict__:
            rest[0] = dict(rest[0])
    if make is copyreg.__newobj__:  # pickle insists that its class be the object's own
        make = arguments[0].__new__
    if cast.casts_weights and rest:
        return make, arguments, (rest[0], cast), None, None, _restore
    if cast.instance_forward is not None and rest and isinstance(rest[0], dict):
        rest[0].setdefault("forward", cast.instance_forward)
    return make, arguments, *rest


def _restore(model: nn.Module, state: tuple[Any, ModelCast]) -> None:
    plain_state, cast = state
    model.__setstate__(plain_state)
    _adopt(model, cast, generate_class(type(model), "model", _namespace))


# --- casting a model's own tensors ------------------------------------------------------------------------------------

def cast_weights(model: nn.Module, dtype: torch.dtype, fp32_modules: set[nn.Module],
                 fp32_values: dict[torch.Tensor, torch.Tensor]) -> None:
    """Casts floating parameters and float32 buffers to `dtype`, in place; other buffers are left.

    What belongs to `fp32_modules` stays as it is. `fp32_values` receives the FP32 value that each cast parameter had,
    uncopied.
    """
    for module in model.modules():
        if module in fp32_modules:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if not isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                    fp32_values.setdefault(parameter, parameter.data.float())
                parameter.grad = None
                parameter.data = parameter.data.to(dtype)
        for buffer in module._buffers.values():
            if buffer is not None and buffer.dtype in (torch.float32, torch.float16, torch.bfloat16):
                buffer.data = buffer.data.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def keep_module_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets an FP32 module stand inside a low-precision model: inputs are cast to FP32, outputs back to `dtype`."""
    module.register_forward_pre_hook(_CastInputs(torch.float32), with_kwargs=True)
    module.register_forward_hook(_CastOutput(dtype))


def _remove_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks,
                      module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                function = getattr(hook, "hook", hook)  # torch wraps a load_state_dict pre-hook
                if isinstance(getattr(function, "__self__", function), (FP32StateDict, _CastInputs, _CastOutput)):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclasses.dataclass(eq=False)
class _CastInputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


@dataclasses.dataclass(eq=False)
class _CastOutput:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return cast_floating(output, self.dtype)


# --- casting what goes in and out of forward --------------------------------------------------------------------------

def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it cast to `dtype`; what holds none comes back as the same object.

    Looks into tuples, namedtuples, lists, mappings and dataclasses, and keeps their class; the caller's containers are
    not changed. Another object with a `to` method is asked for `to(dtype)`. Raises TypeError where that fails or
    returns None.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)):
        return value
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if hasattr(value, "to"):
        return _cast_by_its_own_to(value, dtype)
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value):
        return _cast_dataclass(value, dtype)
    return value


def _cast_sequence(value: Any, dtype: torch.dtype) -> Any:
    items = [cast_floating(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value)):
        return value
    if type(value) in (tuple, list) or hasattr(value, "n_fields"):  # n_fields: torch.return_types and their like
        return type(value)(items)
    if isinstance(value, list):
        duplicate = _copy_with_containers(value)
        duplicate[:] = items
        return duplicate
    duplicate = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        duplicate.__dict__.update(value.__dict__)
    return duplicate


def _cast_mapping(value: Mapping, dtype: torch.dtype) -> Mapping:
    items = {key: cast_floating(item, dtype) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if type(value) is dict:
        return items
    if not hasattr(type(value), "__setitem__"):
        return type(value)(items)
    duplicate = _copy_with_containers(value)
    for key, item in changed.items():
        duplicate[key] = item
    return duplicate


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    items = {name: getattr(value, name) for name in names if hasattr(value, name)}
    changed = {name: new for name, item in items.items() if (new := cast_floating(item, dtype)) is not item}
    if not changed:
        return value
    duplicate = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(duplicate, name, item)  # frozen ones too
    return duplicate


def _cast_by_its_own_to(value: Any, dtype: torch.dtype) -> Any:
    """`value.to(dtype)`, on a copy, since many such methods change the object and return it."""
    try:
        with _FloatingOnly():
            cast = _copy_with_containers(value).to(dtype)
    except Exception as error:
        raise TypeError(f"{type(value).__name__}.to({dtype}) failed ({error}): a batch class given to an amp model "
                        "must take a dtype in its `to` method (or be a tuple, list, dict or dataclass, which need no "
                        "method)") from error
    if cast is None:
        raise TypeError(f"{type(value).__name__}.to({dtype}) returned None: a batch class given to an amp model must "
                        "return the cast batch from its `to` method (or be a tuple, list, dict or dataclass, which "
                        "need no method)")
    return cast


class _FloatingOnly(TorchFunctionMode):
    """Inside it Tensor.to leaves integer, bool and complex tensors alone: many batch classes hand a dtype to all."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.Tensor.to and not args[0].is_floating_point():
            return args[0]
        return function(*args, **(kwargs or {}))


def _copy_with_containers(value: Any) -> Any:
    """A shallow copy that shares no plain dict or list with `value`, so that filling the one leaves the other alone."""
    duplicate = copy.copy(value)
    for name, item in getattr(duplicate, "__dict__", {}).items():
        duplicate.__dict__[name] = _copy_plain_containers(item)
    return duplicate


def _copy_plain_containers(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy_plain_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy_plain_containers(item) for item in value]
    return value
