"""What `initialize` accepts: the opt levels, and the checks of its arguments, all made before anything changes."""
from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from ._state import Options, process
from .model_cast import cast_of
from .scaler import LossScaler

_half, _bfloat16, _float = torch.float16, torch.bfloat16, torch.float32

# opt_level, cast_model_type, patch_torch_functions, its type, keep_batchnorm_fp32, master_weights, loss_scale
OPT_LEVELS = {
    "O0": Options("O0", _float, False, None, None, False, 1.0),
    "O1": Options("O1", None, True, _half, None, None, "dynamic"),
    "O2": Options("O2", _half, False, None, True, True, "dynamic"),
    "O3": Options("O3", _half, False, None, False, False, 1.0),
    "O4": Options("O4", None, True, _bfloat16, None, None, 1.0),
    "O5": Options("O5", _bfloat16, False, None, True, True, 1.0),
}

BRIEFS = {
    "O0": "Pure FP32 training.",
    "O1": "Insert automatic casts around PyTorch functions and Tensor methods.",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "Pure FP16 training.",
    "O4": "Insert automatic casts to bfloat16 around PyTorch functions and Tensor methods.",
    "O5": "BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}


def as_list(name: str, given: Any, kind: type | None, wanted: str) -> list:
    """The items of a list or tuple, or `given` alone; each is of `kind`, or has param_groups where that is None."""
    if isinstance(given, (list, tuple)):
        listed = list(given)
    elif isinstance(given, (dict, set, str)) or given is None:
        raise TypeError(f"{name} must be {wanted}, or a list or tuple of them, got {type(given).__name__}")
    else:
        listed = [given]
    for index, item in enumerate(listed):
        if not (hasattr(item, "param_groups") if kind is None else isinstance(item, kind)):
            which = f"{name}[{index}]" if isinstance(given, (list, tuple)) else name
            raise TypeError(f"{which} must be {wanted}, got {type(item).__name__}")
    return list({id(item): item for item in listed}.values()) if kind is not None else listed


def parse_options(opt_level: str, overrides: dict[str, Any]) -> Options:
    """The level's options with those that are not None in `overrides` in their place."""
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise RuntimeError(f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3', 'O4', "
                           "'O5'. Note that in 'O0', 'O1' etc. the prefix O is the letter O, not the number zero.")
    patched = opt_level in ("O1", "O4")
    given = {name: value for name, value in overrides.items() if value is not None}
    if patched:
        _refuse_at_patched_level(opt_level, given)
    else:
        for name in ("patch_torch_functions", "patch_torch_functions_type"):
            if given.get(name):
                raise RuntimeError(f"{name}={given[name]} makes no sense at {opt_level}, which casts the model's "
                                   "weights: choose opt_level='O1' or 'O4' for casts around functions.")
    if "keep_batchnorm_fp32" in given:
        given["keep_batchnorm_fp32"] = _parse_bool("keep_batchnorm_fp32", given["keep_batchnorm_fp32"])
    if "loss_scale" in given:
        given["loss_scale"] = _parse_loss_scale(given["loss_scale"])
    if given.get("cast_model_type") is False:
        given["cast_model_type"] = None
    check_dtype("cast_model_type", given.get("cast_model_type"))
    return dataclasses.replace(OPT_LEVELS[opt_level], **given)


def _refuse_at_patched_level(opt_level: str, given: dict[str, Any]) -> None:
    level_type = OPT_LEVELS[opt_level].patch_torch_functions_type
    if given.get("cast_model_type", False) not in (False, _float):
        raise RuntimeError(f"cast_model_type={given['cast_model_type']} makes no sense at {opt_level}, which casts "
                           "around functions and leaves the model's weights FP32: choose opt_level='O2' or 'O3' for a "
                           "cast model.")
    if "keep_batchnorm_fp32" in given:
        raise RuntimeError(f"keep_batchnorm_fp32={given['keep_batchnorm_fp32']} makes no sense at {opt_level}: "
                           "batchnorm functions run in FP32 there anyway. Leave it None, or choose opt_level='O2' or "
                           "'O3'.")
    if "master_weights" in given:
        raise RuntimeError(f"master_weights={given['master_weights']} makes no sense at {opt_level}: the model's "
                           "weights are FP32 already. Leave it None, or choose opt_level='O2'.")
    if given.get("patch_torch_functions_type", level_type) != level_type:
        raise RuntimeError(f"patch_torch_functions_type={given['patch_torch_functions_type']} at {opt_level}: O1 casts "
                           "to torch.float16 and O4 to torch.bfloat16; choose the level for the type.")


def _parse_bool(name: str, value: Any) -> bool:
    if value in (True, "True"):
        return True
    if value in (False, "False"):
        return False
    raise ValueError(f"{name} must be a boolean, the string 'True' or 'False', or None, got {value!r}")


def _parse_loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return value
    try:
        scale = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"loss_scale must be 'dynamic' or a number, got {value!r}") from None
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"loss_scale must be positive and finite, got {value!r}")
    return scale


def check_dtype(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating torch.dtype or None, got {value!r}")


def make_scalers(loss_scale: float | str, num_losses: int, minimum: float | None, maximum: float) -> list[LossScaler]:
    if not isinstance(num_losses, numbers.Integral) or num_losses < 1:
        raise ValueError(f"num_losses must be an integer of at least 1, got {num_losses!r}")
    maximum = 2.0 ** 24 if maximum is None else float(maximum)
    if maximum <= 0 or (minimum is not None and not 0 <= float(minimum) <= maximum):
        raise ValueError(f"loss scale limits must be 0 <= min_loss_scale <= max_loss_scale, got {minimum!r} and "
                         f"{maximum!r}")
    return [LossScaler(loss_scale, minimum or None, maximum) for _ in range(num_losses)]


def check_models(models: list[nn.Module], options: Options) -> None:
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should "
                               "only be applied to the model(s) AFTER they have been returned from amp.initialize.")
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(model).__mro__):
            raise RuntimeError("Incoming model is an instance of FullyShardedDataParallel, whose flat parameters hide "
                               "an overflow of one rank from the others: use torch.distributed.fsdp.fully_shard, at "
                               "opt_level='O1' or 'O4'.")
        if isinstance(model, torch.jit.ScriptModule):
            raise RuntimeError("Incoming model is a ScriptModule, whose forward can't be changed any more: call "
                               "amp.initialize first, then torch.jit.script.")
        for name, parameter in model.named_parameters():
            if options.casts_weights and hasattr(parameter, "device_mesh"):
                raise RuntimeError(f"parameter {name} is sharded (a DTensor), and {options.opt_level} would replace it "
                                   "by a low-precision one: use opt_level='O1' or 'O4' with fully_shard.")
        if cast_of(model) is None and not process.allow_incoming_model_not_fp32:
            _check_is_fp32(model)


def _check_is_fp32(model: nn.Module) -> None:
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.dtype in (_half, _bfloat16):
                raise RuntimeError(f"Found {kind} {name} with dtype {tensor.dtype}, expected torch.float32. When using "
                                   "amp.initialize, you do not need to call .half() or .bfloat16() on your model "
                                   "before passing it, no matter what optimization level you choose.")


def check_optimizers(optimizers: list, options: Options) -> None:
    for index, optimizer in enumerate(optimizers):
        if any(optimizer is earlier for earlier in optimizers[:index]):
            raise ValueError(f"optimizers[{index}] ({type(optimizer).__name__}) was passed twice to amp.initialize")
        lazy = any(isinstance(parameter, nn.parameter.UninitializedTensorMixin)
                   for group in optimizer.param_groups for parameter in group["params"])
        if lazy and options.master_weights:
            raise RuntimeError("an optimizer holds parameters of a lazy module that have no value yet, so they can "
                               "have no FP32 master: run one forward before amp.initialize")


def find_fp32_modules(options: Options, listed: Sequence[type | str],
                      models: list[nn.Module]) -> tuple[set[nn.Module], list[nn.Module]]:
    """Which modules stay FP32 in cast models: all of them, and the outermost of those that the caller listed."""
    _check_listed(listed, models)
    kept: set[nn.Module] = set()
    islands: list[nn.Module] = []
    if not options.casts_weights:
        return kept, islands
    for model in models:
        for name, module in model.named_modules():
            if any(name == item if isinstance(item, str) else isinstance(module, item) for item in listed):
                if module not in kept:
                    islands.extend(_called_modules(module))
                kept.update(module.modules())
            elif options.keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm):
                kept.add(module)
        _check_parameters_are_not_torn(model, kept)
    return kept, islands


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or what is in it where it is a mere container, whose forward is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _called_modules(child)
    else:
        yield module


def _check_listed(listed: Sequence[type | str], models: list[nn.Module]) -> None:
    if isinstance(listed, (str, type)):
        raise TypeError(f"keep_fp32_modules must be a list of module types or names, got {listed!r} alone")
    for item in listed:
        if isinstance(item, str):
            if not any(item == name for model in models for name, _ in model.named_modules()):
                raise ValueError(f"keep_fp32_modules: no module is called {item!r}; names are those of "
                                 "model.named_modules()")
        elif not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise TypeError(f"keep_fp32_modules must hold module types or names, got {item!r}")


def _check_parameters_are_not_torn(model: nn.Module, kept: set[nn.Module]) -> None:
    holders: dict[int, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            other, other_is_kept = holders.setdefault(id(parameter), (name, module in kept))
            if other_is_kept != (module in kept):
                raise ValueError(f"modules {other!r} and {name!r} share a parameter, but only one of them stays FP32: "
                                 "list both or neither in keep_fp32_modules")
