"""Apex's older and private faces of amp, over the engine: `amp.init` and its handle, `amp._amp_state`, `amp.lists`."""
from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from . import cast_lists, patching
from ._state import Setup, process
from .amp_optimizer import stash_of, wrap_optimizer
from .cast_state import clear_weight_cache, current_cast_type, disable_casts
from .frontend import initialize, master_params
from .scale_context import scale_loss
from .scaler import LossScaler

__all__ = ["AmpHandle", "NoOpHandle", "OptimWrapper", "applier", "disable_casts", "init", "scale_loss"]


def _latest_setup(wanted: str) -> Setup:
    if process.latest is None:
        raise AttributeError(f"{wanted}: there is none before amp.initialize, or with enabled=False")
    return process.latest


# --- the handle of amp.init ------------------------------------------------------------------------------------------

class AmpHandle:
    """What `amp.init` returned: casts for the whole process, and optimizers wrapped one by one."""

    def __init__(self, anchor: nn.Module | None = None):
        # amp.initialize keeps casts on as long as a model of its call lives; here the handle holds a stand-in for one.
        self._anchor = anchor

    def is_active(self) -> bool:
        """Whether casts are on in this thread."""
        return patching.is_installed() and current_cast_type() is not None

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """`optimizer` with dynamic loss scaling, one scale for each of its `num_loss` losses in an iteration."""
        options = dataclasses.replace(_latest_setup("handle.wrap_optimizer").options, loss_scale="dynamic")
        wrap_optimizer(optimizer, Setup(options, [LossScaler("dynamic") for _ in range(num_loss)], verbosity=1), None)
        return OptimWrapper(optimizer, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """`amp.scale_loss(loss, optimizer)` with the scale given to `amp.init`."""
        if stash_of(optimizer) is None:
            wrap_optimizer(optimizer, _latest_setup("handle.scale_loss"), None)
        with scale_loss(loss, optimizer) as scaled_loss:
            yield scaled_loss

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        clear_weight_cache()

    def _deactivate(self) -> None:
        """Puts torch's functions back; they cast no more until the next `amp.initialize` at a level with casts."""
        patching.uninstall()

    has_cache = True
    verbose = False


class NoOpHandle(AmpHandle):
    """What `amp.init(enabled=False)` returned: everything runs in FP32, unscaled."""

    def is_active(self) -> bool:
        return False

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        return OptimWrapper(optimizer, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        yield loss

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _deactivate(self) -> None:
        pass

    has_cache = False


class OptimWrapper:
    """An optimizer whose losses are scaled by `with optimizer.scale_loss(loss) as scaled_loss`.

    The losses of an iteration use the scales in turn; `step()` starts over. Everything else is the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_loss: int):
        self._optimizer = optimizer
        self._num_loss = num_loss
        self._loss_index = 0

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        if stash_of(self._optimizer) is None:
            yield loss
            return
        if self._loss_index == self._num_loss:
            raise RuntimeError(f"optimizer.scale_loss: this is loss {self._num_loss + 1} since the last step, expected "
                               f"at most num_loss={self._num_loss}; give wrap_optimizer the number of losses")
        with scale_loss(loss, self._optimizer, loss_id=self._loss_index) as scaled_loss:
            yield scaled_loss
        self._loss_index += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._loss_index = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def init(enabled: bool = True, loss_scale: float | str = "dynamic", patch_type: torch.dtype = torch.float16,
         enable_caching: bool = True, verbose: bool = False, allow_banned: bool = False) -> AmpHandle:
    """Apex's first API: casts around torch's functions for the whole process, at once, without naming a model.

    `amp.initialize` replaces it. Tensors of the accelerator are cast, or of the CPU on a machine without one.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: "dynamic" or a number, for `handle.scale_loss`.
        patch_type: torch.float16 (as opt_level O1) or torch.bfloat16 (O4).
        enable_caching, verbose: accepted; weights are always cached, and the cast report is `amp.cast_report()`.
        allow_banned: run binary_cross_entropy in FP32 instead of refusing half arguments.

    Raises:
        ValueError: another `patch_type`.
    """
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    levels = {torch.float16: "O1", torch.bfloat16: "O4"}
    if patch_type not in levels:
        raise ValueError(f"amp.init: patch_type must be torch.float16 or torch.bfloat16, got {patch_type!r}")
    if allow_banned:
        for name in cast_lists.BANNED:
            patching.register_float_function(nn.functional, name)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    anchor = initialize(nn.Linear(1, 1, device=device), opt_level=levels[patch_type], loss_scale=loss_scale,
                        verbosity=int(verbose))
    _amp_state.handle = AmpHandle(anchor)
    return _amp_state.handle


# --- amp._amp_state ---------------------------------------------------------------------------------------------------

class _OptProperties:
    """The last initialize's options as Apex's `Properties`: attributes, and a dict under `.options`."""

    def __init__(self, setup: Setup | None):
        self._setup = setup

    @property
    def options(self) -> dict[str, Any]:
        return {"enabled": False} if self._setup is None else dataclasses.asdict(self._setup.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.options:
            raise AttributeError(f"amp._amp_state.opt_properties has no {name!r}; there are {', '.join(self.options)}")
        return self.options[name]


class _LegacyLossScaler:
    """A loss scaler as scripts that unscale by hand know it."""

    def __init__(self, scaler: LossScaler):
        self._scaler = scaler
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device=scaler.device)

    @property
    def dynamic(self) -> bool:
        return self._scaler.dynamic

    def loss_scale(self) -> float:
        return self._scaler.loss_scale()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scaler._loss_scale = value

    @property
    def _unskipped(self) -> int:
        return int(self._scaler.growth_tracker.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.growth_tracker.fill_(value)

    def clear_overflow_state(self) -> None:
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Grows or backs off by `_overflow_buf`, which scripts replace by their own; returns whether to skip."""
        found_inf = self._overflow_buf != 0
        self._scaler.found_inf.copy_(found_inf.reshape(1))
        self._scaler.update()
        return bool(found_inf) and self.dynamic


class _AmpState(types.ModuleType):
    """`apex.amp._amp_state`, at once the module of that name and the object of that name in it."""

    hard_override = False

    def __init__(self) -> None:
        super().__init__("apex.amp._amp_state", self.__doc__)
        self._amp_state = self
        self.master_params = master_params
        self._handle: AmpHandle | None = None
        self._faces: dict[int, _LegacyLossScaler] = {}

    @property
    def loss_scalers(self) -> list[_LegacyLossScaler]:
        scalers = _latest_setup("amp._amp_state.loss_scalers").loss_scalers
        self._faces = {id(scaler): self._faces.get(id(scaler)) or _LegacyLossScaler(scaler) for scaler in scalers}
        return list(self._faces.values())

    @property
    def opt_properties(self) -> _OptProperties:
        if not process.was_initialized:
            raise AttributeError("amp._amp_state.opt_properties: amp.initialize has not been called")
        return _OptProperties(process.latest)

    @property
    def handle(self) -> AmpHandle:
        return self._handle or AmpHandle()

    @handle.setter
    def handle(self, value: AmpHandle) -> None:
        self._handle = value

    @property
    def verbosity(self) -> int:
        return process.latest.verbosity if process.latest else 1

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        _latest_setup("amp._amp_state.verbosity").verbosity = value

    @property
    def allow_incoming_model_not_fp32(self) -> bool:
        return process.allow_incoming_model_not_fp32

    @allow_incoming_model_not_fp32.setter
    def allow_incoming_model_not_fp32(self, value: bool) -> None:
        process.allow_incoming_model_not_fp32 = value

    def maybe_print(self, message: str, rank0: bool = False) -> None:
        """Prints `message` unless verbosity is 0."""
        if process.latest is None:
            print(message)
        else:
            process.latest.say(message)


_amp_state = _AmpState()


# --- amp.lists --------------------------------------------------------------------------------------------------------

class _NameList(MutableSequence):
    """One of Apex's lists of function names: those of `cast_lists`, where a name stands for all its namespaces."""

    def __init__(self, names: list[str]):
        self._names = names

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._names[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._names[index]

    def __len__(self) -> int:
        return len(self._names)

    def insert(self, index: int, value: str) -> None:
        if value not in self._names:
            self._names.insert(index, value)

    def remove(self, value: str) -> None:
        """Takes `value` out; scripts take a name out of three modules' lists, which are one list here."""
        with contextlib.suppress(ValueError):
            self._names.remove(value)


def _overrides(name: str, module: Any) -> types.ModuleType:
    face = types.ModuleType(f"apex.amp.lists.{name}",
                            "Lists of names that amp casts; change them before amp.initialize.")
    low_precision = _NameList(cast_lists.LOW_PRECISION)
    face.__dict__.update(MODULE=module, FP16_FUNCS=low_precision, BFLOAT16_FUNCS=low_precision,
                         FP32_FUNCS=_NameList(cast_lists.FP32), CASTS=_NameList(cast_lists.PROMOTE),
                         SEQUENCE_CASTS=_NameList(cast_lists.SEQUENCE_PROMOTE))
    return face


lists = types.ModuleType("apex.amp.lists", "Lists of names that amp casts.")
lists.__dict__.update(functional_overrides=_overrides("functional_overrides", nn.functional),
                      torch_overrides=_overrides("torch_overrides", torch),
                      tensor_overrides=_overrides("tensor_overrides", torch.Tensor))


# --- apex.amp._initialize ---------------------------------------------------------------------------------------------

def applier(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `fn` applied to each tensor in its nest of sequences and mappings."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, collections.abc.Mapping):
        return {key: applier(item, fn) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        items = [applier(item, fn) for item in value]
        make: Any = type(value)
        return make(*items) if hasattr(value, "_fields") else make(items)
    return value
