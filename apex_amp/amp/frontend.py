"""The words a training script says: initialize, master_params, state_dict, load_state_dict and their kin."""
from __future__ import annotations

import dataclasses
import sys
import weakref
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from . import amp_optimizer, distributed, patching
from ._state import Options, Setup, process, refresh_casts
from .amp_optimizer import Stash, stash_of, unwrap_optimizer, wrap_optimizer
from .arguments import (BRIEFS, as_list, check_dtype, check_models, check_optimizers, find_fp32_modules, make_scalers,
                        parse_options)
from .master_weights import FP32StateDict, MasterWeights
from .model_cast import ModelCast, cast_of, cast_weights, keep_module_fp32, unwrap_model, wrap_model
from .scaler import LossScaler

def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    patch_torch_functions_type: torch.dtype | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0 ** 24,
    keep_fp32_modules: Sequence[type | str] = (),
) -> Any:
    """Prepares models and optimizers for mixed-precision training at `opt_level`; both are changed in place.

    Call it after the models and optimizers are made and before a model is wrapped for parallel training or compiled. It
    may be called many times: each call has its own level and loss scalers, and a model or optimizer that comes again is
    set up anew from its FP32 weights.

    Args:
        models: a module, or a list or tuple of them, with FP32 parameters.
        optimizers: an optimizer, a list or tuple of them, or None for inference.
        enabled: False makes this and every other amp call a no-op.
        opt_level: "O0" (FP32), "O1" (casts around functions), "O2" (half model, FP32 masters), "O3" (all half), and
            "O4", "O5", the bfloat16 twins of O1 and O2.
        cast_model_type, patch_torch_functions, patch_torch_functions_type, keep_batchnorm_fp32, master_weights:
            override the level's property of that name; None leaves it.
        loss_scale: "dynamic", or a positive number (or its string) that stays; None: the level's own.
        cast_model_outputs: dtype of forward's floating outputs; None: FP32 where the model is cast, else untouched.
        num_losses: how many loss scalers, chosen by `scale_loss(..., loss_id=...)`.
        verbosity: 0 prints nothing, 1 prints set-up and overflows, 2 also names the parameters that overflowed.
        min_loss_scale, max_loss_scale: limits of a dynamic scale; no minimum means 2**-10.
        keep_fp32_modules: module types or qualified names that stay FP32 where the model is cast (nn.LayerNorm, ...).

    Returns:
        The same objects in the same shape: models alone where optimizers is None, else (models, optimizers).

    Raises:
        RuntimeError: an unknown level, an override that contradicts it, or a model that is already half, wrapped or
            scripted.
        TypeError, ValueError: an argument of another kind. Nothing has been changed when an error is raised.
    """
    returned = models if optimizers is None else (models, optimizers)
    if not enabled:
        process.latest, process.was_initialized = None, True
        return returned

    targets = [unwrapped(model) for model in as_list("models", models, nn.Module, "a torch.nn.Module")]
    optimizer_list = [] if optimizers is None else as_list("optimizers", optimizers, None, "an optimizer")
    options = parse_options(opt_level, dict(
        cast_model_type=cast_model_type, patch_torch_functions=patch_torch_functions,
        patch_torch_functions_type=patch_torch_functions_type, keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights, loss_scale=loss_scale))
    check_dtype("cast_model_outputs", cast_model_outputs)
    check_models(targets, options)
    check_optimizers(optimizer_list, options)
    fp32_modules, islands = find_fp32_modules(options, keep_fp32_modules, targets)
    scalers = make_scalers(options.loss_scale, num_losses, min_loss_scale, max_loss_scale)
    setup = Setup(options, scalers, int(verbosity))

    fp32_values = _undo_earlier(targets, optimizer_list)
    for model in targets:
        _set_up_model(model, options, cast_model_outputs, fp32_modules, fp32_values)
    for module in islands:
        keep_module_fp32(module, options.cast_model_type)
    for optimizer in optimizer_list:
        wrap_optimizer(optimizer, setup, fp32_values if options.master_weights else None)
        setup.optimizers.append(weakref.ref(optimizer))
    _register(setup, targets)
    for optimizer in optimizer_list:
        _give_masters_to_models(stash_of(optimizer).masters)
    device = next((parameter.device for model in targets for parameter in model.parameters()), torch.device("cpu"))
    for scaler in scalers:
        scaler.to(device)
    _announce(setup)
    return returned


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return model._orig_mod if compiler is not None and isinstance(model, compiler.OptimizedModule) else model


def _undo_earlier(models: list[nn.Module], optimizers: list) -> dict[torch.Tensor, torch.Tensor]:
    """Makes plain again what comes a second time, and earlier calls' optimizers that train masters of these models.

    Returns the FP32 value of each parameter that had a master.
    """
    fp32_values: dict[torch.Tensor, torch.Tensor] = {}
    earlier = [cast for cast in map(cast_of, models) if cast is not None]
    for optimizer in [*optimizers, *_alive_optimizers()]:
        stash = stash_of(optimizer)
        if stash is None:
            continue
        of_these_models = any(masters is stash.masters for cast in earlier for masters in cast.masters)
        if of_these_models or any(optimizer is given for given in optimizers):
            if stash.masters is not None:
                stash.masters.sync()
                fp32_values.update(zip(stash.masters.model_params, stash.masters.masters))
            unwrap_optimizer(optimizer)
            _take_masters_from_models(stash.masters, except_models=models)
    for model in models:
        if cast_of(model) is not None:
            unwrap_model(model)
    return fp32_values


def _set_up_model(model: nn.Module, options: Options, cast_model_outputs: torch.dtype | None,
                  fp32_modules: set[nn.Module], fp32_values: dict[torch.Tensor, torch.Tensor]) -> None:
    dtype = options.cast_model_type
    output_type = cast_model_outputs if cast_model_outputs is not None or dtype is None else torch.float32
    cast = ModelCast(options.cast_type, dtype, output_type)
    if dtype is not None:
        cast_weights(model, dtype, fp32_modules, fp32_values)
    if cast.casts_weights:
        FP32StateDict(cast.masters).register(model)
    wrap_model(model, cast)


def _give_masters_to_models(masters: MasterWeights | None) -> None:
    """Each model keeps the masters of its own parameters in step with itself, also when its optimizer is gone."""
    if masters is None:
        return
    mastered = set(map(id, masters.model_params))
    for model in _alive_models():
        if any(id(parameter) in mastered for parameter in model.parameters()):
            cast_of(model).masters.append(masters)


def _take_masters_from_models(masters: MasterWeights | None, except_models: list[nn.Module]) -> None:
    for model in _alive_models():
        if not any(model is kept for kept in except_models):
            own = cast_of(model).masters
            own[:] = [kept for kept in own if kept is not masters]


def _alive_models() -> list[nn.Module]:
    return [model for setup in process.alive for model in setup.alive_models()]


def _alive_optimizers() -> list[Any]:
    return [optimizer for setup in process.alive for ref in setup.optimizers if (optimizer := ref()) is not None]


def _register(setup: Setup, models: list[nn.Module]) -> None:
    for earlier in process.alive:
        earlier.models = [ref for ref in earlier.models if not any(ref() is model for model in models)]
    process.alive = [earlier for earlier in process.alive if earlier.alive_models()]
    for model in models:
        setup.watch(model)
    process.alive.append(setup)
    process.latest, process.was_initialized = setup, True
    distributed.install()
    amp_optimizer.install()
    if setup.options.cast_type is not None:
        patching.install()
    refresh_casts()


def _announce(setup: Setup) -> None:
    options = setup.options
    setup.say(f"Selected optimization level {options.opt_level}:  {BRIEFS[options.opt_level]}")
    for field in dataclasses.fields(options):
        setup.say(f"{field.name:26} : {getattr(options, field.name)}")


# --- after initialize ---

def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterates over the FP32 parameters that `optimizer` updates: the masters at O2 and O5, else the model's own.

    Clip these: `torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`. With a fused optimizer's
    materialize_master_grads=False this is what gives the masters their gradients.
    """
    stash = stash_of(optimizer)
    if stash is not None:
        stash.gradients.materialize_masters()
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict | None = None) -> dict[str, dict[str, float | int]]:
    """{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...} of the last initialize; {} with enabled=False.

    Masters are in the model's state_dict, so model, optimizer and this together are the whole training state.
    """
    _require_initialize("amp.state_dict")
    destination = {} if destination is None else destination
    for index, scaler in enumerate(process.latest.loss_scalers if process.latest else []):
        destination[f"loss_scaler{index}"] = scaler.state_dict()
    return destination


def load_state_dict(state_dict: dict[str, dict[str, float | int]]) -> None:
    """Restores the loss scalers of the last `amp.initialize`; also from files that Apex wrote.

    A static scale stays what `initialize` was told, and a dynamic one keeps its start where the checkpoint comes from a
    level that did not scale at all. With another number of losses, what fits is loaded and a warning says what was
    left.
    """
    _require_initialize("amp.load_state_dict")
    setup = process.latest
    if setup is None:
        return
    saved = _check_saved_scalers(state_dict)
    known = {f"loss_scaler{index}": scaler for index, scaler in enumerate(setup.loss_scalers)}
    for key in known.keys() & saved.keys():
        _load_scaler(setup, known[key], saved[key])
    left = [key for key in saved if key not in known]
    missing = [key for key in known if key not in saved]
    if left or missing:
        setup.warn(f"amp.load_state_dict: the checkpoint has {len(saved)} loss scalers and this run {len(known)}; not "
                   f"loaded: {left or 'none'}; left at their start: {missing or 'none'}")


def _check_saved_scalers(state_dict: Any) -> dict[str, dict[str, float | int]]:
    expected = 'expected what amp.state_dict() returned: {"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}'
    if not isinstance(state_dict, dict):
        raise TypeError(f"amp.load_state_dict: {expected}, got {type(state_dict).__name__}")
    for key, saved in state_dict.items():
        if not str(key).startswith("loss_scaler"):
            raise RuntimeError(f"amp.load_state_dict: unexpected key {key!r}: {expected}")
        if not isinstance(saved, dict) or not {"loss_scale", "unskipped"} <= saved.keys():
            raise RuntimeError(f"amp.load_state_dict: {key!r} holds {saved!r}: {expected}")
    return state_dict


def _load_scaler(setup: Setup, scaler: LossScaler, saved: dict[str, float | int]) -> None:
    current = scaler.loss_scale()
    never_scaled = scaler.dynamic and saved["loss_scale"] == 1.0 and saved["unskipped"] == 0
    if never_scaled or (not scaler.dynamic and saved["loss_scale"] != current):
        setup.say(f"amp.load_state_dict: keeping loss scale {current}; the checkpoint has {saved['loss_scale']}, of "
                  "another kind of scaling")
    else:
        scaler.load_state_dict(saved)


def loss_scale(loss_id: int = 0) -> float:
    """The current scale of one loss of the last `amp.initialize`; 1.0 with enabled=False. Waits for a GPU."""
    _require_initialize("amp.loss_scale")
    if process.latest is None:
        return 1.0
    scalers = process.latest.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(f"amp.loss_scale: loss_id must be from 0 to {len(scalers) - 1}, got {loss_id!r}")
    return scalers[loss_id].loss_scale()


def last_step_skipped(optimizer: Any) -> bool:
    """Whether the last `optimizer.step()` changed nothing because of a gradient overflow."""
    return _stash(optimizer, "amp.last_step_skipped").last_step_skipped()


def overflow_report() -> list[str]:
    """Names of the parameters whose gradients were not finite at the last overflow of the last `amp.initialize`.

    [] before the first overflow.
    """
    _require_initialize("amp.overflow_report")
    return [] if process.latest is None else list(process.latest.overflow_report)


def sync_masters(model: nn.Module) -> None:
    """Brings the model's low-precision values and their FP32 masters together now, after writes that nothing else sees.

    Those are writes through `.data` into the model's parameters, and writes into `state_dict()` values between two
    forwards of a compiled model, which can't look; an uncompiled forward and an optimizer step see the latter.
    `model` may be inside DistributedDataParallel, DataParallel or torch.compile's wrapper.
    """
    casts = [cast for cast in map(cast_of, model.modules()) if cast is not None]
    if not casts:
        raise RuntimeError(f"amp.sync_masters: this model ({type(model).__name__}) did not go through amp.initialize")
    for cast in casts:
        cast.sync()
        for masters in cast.masters:
            masters.pull(model.parameters())


def shutdown() -> None:
    """Puts every patched torch name back and makes every living model and optimizer an ordinary FP32 one again."""
    for optimizer in _alive_optimizers():
        if stash_of(optimizer) is not None:
            unwrap_optimizer(optimizer)
    for model in _alive_models():
        unwrap_model(model)
    process.alive.clear()
    process.latest, process.was_initialized = None, False
    refresh_casts()
    patching.uninstall()
    distributed.uninstall()
    amp_optimizer.uninstall()


def _require_initialize(caller: str) -> None:
    if not process.was_initialized:
        raise RuntimeError(f"{caller} was called before amp.initialize")


def _stash(optimizer: Any, caller: str) -> Stash:
    stash = stash_of(optimizer)
    if stash is None:
        raise RuntimeError(f"{caller}: this optimizer ({type(optimizer).__name__}) did not go through amp.initialize")
    return stash
