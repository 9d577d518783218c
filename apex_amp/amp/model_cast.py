"""What a model does differently after `amp.initialize`: its forward has a cast state, and at O2, O3 and O5 another dtype."""
from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._state import refresh_cast_devices
from .cast_state import cast_scope
from .generated_class import base_of, generate_class
from .master_weights import MasterWeights, load_state_dict_pre_hook, state_dict_hook


@dataclasses.dataclass
class ModelCast:
    """amp's state of one model, kept as `model._amp_cast`.

    `cast_type`: what patched functions cast to inside its forward (None: they do not). `input_type` and `output_type`: what
    floating inputs and outputs of forward are cast to (None: left alone). `masters`: the FP32 master weights of its
    parameters, one object an optimizer. `instance_forward`: a forward that the user had put on the instance. `ddp`: the
    DistributedDataParallel wrapper whose forward called it last, held weakly.
    """
    cast_type: torch.dtype | None
    input_type: torch.dtype | None
    output_type: torch.dtype | None
    masters: list[MasterWeights] = dataclasses.field(default_factory=list)
    instance_forward: Callable | None = None
    ddp: weakref.ref | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ddp": None}

    def before_forward(self) -> None:
        for masters in self.masters:
            masters.sync()
        active = DistributedDataParallel._active_ddp_module
        if active is not None:
            self.ddp = weakref.ref(active)

    @property
    def casts_weights(self) -> bool:
        return self.input_type in (torch.float16, torch.bfloat16)


def cast_of(model: nn.Module) -> ModelCast | None:
    return model.__dict__.get("_amp_cast")


def wrap_model(model: nn.Module, cast: ModelCast) -> None:
    """Makes `model` an amp model, in place; see `ModelCast`."""
    cast.instance_forward = model.__dict__.pop("forward", None)
    model._amp_cast = cast
    model.__class__ = generate_class(type(model), "model", _namespace)


def unwrap_model(model: nn.Module) -> None:
    """Makes it an ordinary FP32 model again; weights that had masters get their exact values back."""
    cast = model._amp_cast
    _remove_hooks(model)
    for masters in cast.masters:
        masters.sync()
        for parameter, master in zip(masters.model_params, masters.masters):
            parameter.data = master.data
        masters.detach()
    for tensor in (*model.parameters(), *model.buffers()):
        if cast.casts_weights and tensor.dtype == cast.input_type:
            tensor.data = tensor.data.float()
    del model._amp_cast
    model.__class__ = base_of(model)
    if cast.instance_forward is not None:
        model.forward = cast.instance_forward


def _namespace(base: type) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cast = self._amp_cast
        if not torch.compiler.is_compiling() and "_is_replica" not in self.__dict__:
            cast.before_forward()
        if cast.input_type is not None:
            args, kwargs = cast_floating(args, cast.input_type), cast_floating(kwargs, cast.input_type)
        with cast_scope(cast.cast_type, forward=True):
            if cast.instance_forward is None:
                output = base.forward(self, *args, **kwargs)
            else:
                output = cast.instance_forward(*args, **kwargs)
        return output if cast.output_type is None else cast_floating(output, cast.output_type)

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved = base._apply(self, *args, **kwargs)
        for masters in self._amp_cast.masters:
            masters.follow()
        refresh_cast_devices()
        return moved

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple:
        make, arguments, state, *rest = base.__reduce_ex__(self, protocol)
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        if make is copyreg.__newobj__:  # pickle insists that its class be the object's own
            make, arguments = copyreg._reconstructor, (base, object, None)
        if _is_plain_on_disk(self):
            return make, arguments, {name: value for name, value in state.items() if name != "_amp_cast"}, *rest
        return _rebuild, (base, make, arguments), state, *rest

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if hasattr(base, "__deepcopy__"):
            return base.__deepcopy__(self, memo)
        make, arguments, *rest = base.__reduce_ex__(self, 4)
        return copy._reconstruct(self, memo, make, arguments, *rest)

    return {"forward": forward, "_apply": _apply, "__reduce_ex__": __reduce_ex__, "__deepcopy__": __deepcopy__}


def _is_plain_on_disk(model: nn.Module) -> bool:
    """At O0, O1 and O4 the weights are untouched, so a pickle holds a plain model that loads without this package."""
    return not model._amp_cast.casts_weights and model._amp_cast.instance_forward is None


def _rebuild(base: type, make: Callable, arguments: tuple) -> nn.Module:
    model = make(*arguments)
    model.__class__ = generate_class(base, "model", _namespace)
    return model


# --- casting a model's own tensors ------------------------------------------------------------------------------------

def cast_weights(model: nn.Module, dtype: torch.dtype, stays_fp32: Callable[[str, nn.Module], bool],
                 fp32_values: dict[torch.Tensor, torch.Tensor]) -> None:
    """Casts floating parameters and float32 buffers to `dtype`, in place; float64, integer and complex buffers are left.

    Modules for which `stays_fp32(name, module)` stay FP32 with all that is inside them. `fp32_values` receives the FP32
    value that each cast parameter had, uncopied.
    """
    kept: set[nn.Module] = set()
    for name, module in model.named_modules():
        if stays_fp32(name, module):
            kept.update(module.modules())
    for module in model.modules():
        if module in kept:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if not isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                    fp32_values.setdefault(parameter, parameter.detach().float())
                parameter.grad = None
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in (torch.float32, torch.float16, torch.bfloat16):
                module._buffers[name] = buffer.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def keep_module_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets an FP32 module stand inside a low-precision model: inputs are cast to FP32, outputs back to `dtype`."""
    module.register_forward_pre_hook(_CastInputs(torch.float32), with_kwargs=True)
    module.register_forward_hook(_CastOutput(dtype))


def serve_fp32_state_dict(model: nn.Module) -> None:
    """Lets state_dict() and load_state_dict() of the model and of all its submodules speak FP32."""
    for module in model.modules():
        module._register_state_dict_hook(state_dict_hook)
        module.register_load_state_dict_pre_hook(load_state_dict_pre_hook)


def _remove_hooks(model: nn.Module) -> None:
    ours = (state_dict_hook, load_state_dict_pre_hook)
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks,
                      module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "hook", hook) in ours or isinstance(hook, (_CastInputs, _CastOutput)):
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

    Looks into tuples, namedtuples, lists, mappings and dataclasses, and keeps their class; the caller's containers are not
    changed. Another object with a `to` method is asked for `to(dtype)`. Raises TypeError where that returns None.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if value is None or isinstance(value, (str, bytes, int, float, complex, nn.Module)):
        return value
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if hasattr(value, "to") and not isinstance(value, type):
        return _cast_by_its_own_to(value, dtype)
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_changes(value, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)
                                     if hasattr(value, field.name)}, dtype, object.__setattr__)
    return value


def _cast_sequence(value: Any, dtype: torch.dtype) -> Any:
    items = [cast_floating(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value)):
        return value
    if type(value) in (tuple, list):
        return type(value)(items)
    if hasattr(value, "_make"):
        return type(value)._make(items)
    if isinstance(value, list):
        duplicate = copy.copy(value)
        duplicate[:] = items
        return duplicate
    return type(value)(items)


def _cast_mapping(value: Mapping, dtype: torch.dtype) -> Mapping:
    if type(value) is dict:
        items = {key: cast_floating(item, dtype) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    try:
        return _with_changes(value, dict(value.items()), dtype, lambda duplicate, key, item: duplicate.__setitem__(key, item))
    except (AttributeError, TypeError):  # an immutable mapping
        return type(value)({key: cast_floating(item, dtype) for key, item in value.items()})


def _with_changes(value: Any, items: dict, dtype: torch.dtype, assign: Callable[[Any, Any, Any], None]) -> Any:
    """`value`, or a shallow copy in which the items that casting changed are replaced."""
    changed = {key: new for key, item in items.items() if (new := cast_floating(item, dtype)) is not item}
    if not changed:
        return value
    duplicate = copy.copy(value)
    for key, item in changed.items():
        assign(duplicate, key, item)
    return duplicate


def _cast_by_its_own_to(value: Any, dtype: torch.dtype) -> Any:
    """`value.to(dtype)`, on a shallow copy, since many such methods change the object and return it.

    Some batch classes forward whatever they are given to every tensor they hold; integer tensors among their attributes
    are put back.
    """
    before = dict(getattr(value, "__dict__", {}))
    cast = copy.copy(value).to(dtype)
    if cast is None:
        raise TypeError(f"{type(value).__name__}.to({dtype}) returned None: a batch class given to an amp model must return the cast "
                        "batch from its `to` method (or be a tuple, list, dict or dataclass, which need no method)")
    for name, old in before.items():
        new = getattr(cast, name, None)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if new.is_floating_point() and not old.is_floating_point():
                setattr(cast, name, old)
    return cast
