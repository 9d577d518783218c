"""What one call of `amp.initialize` set up, and which calls are alive in this process."""
from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .cast_state import set_cast_devices, set_default_cast_type

if TYPE_CHECKING:
    from .scaler import LossScaler


@dataclass
class Options:
    """The properties of an opt level after the caller's overrides; see the README's table of levels."""
    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    patch_torch_functions_type: torch.dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    enabled: bool = True

    @property
    def cast_type(self) -> torch.dtype | None:
        """The type that patched functions cast to inside a forward of this call's models; None: they do not cast."""
        return self.patch_torch_functions_type if self.patch_torch_functions else None

    @property
    def casts_weights(self) -> bool:
        return self.cast_model_type in (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class Setup:
    """One call of `amp.initialize`. Its optimizers hold it; it holds its models and optimizers weakly."""
    options: Options
    loss_scalers: list[LossScaler]
    verbosity: int
    models: list[weakref.ref] = field(default_factory=list)
    optimizers: list[weakref.ref] = field(default_factory=list)
    overflow_report: list[str] = field(default_factory=list)

    def alive_models(self) -> list[torch.nn.Module]:
        return [model for ref in self.models if (model := ref()) is not None]

    def watch(self, model: torch.nn.Module) -> None:
        """Counts `model` among this call's; the call ends when the last of them is freed."""
        self.models.append(weakref.ref(model, _end_dead_setups))

    def clear_set_aside(self, model: torch.nn.Module, set_to_none: bool) -> None:
        """model.zero_grad() inside a scale_loss block also means the gradients that were there before it."""
        for ref in self.optimizers:
            stash = getattr(ref(), "_amp_stash", None)
            if stash is not None and stash.end_block is not None:
                stash.gradients.clear_set_aside(set_to_none, model.parameters())

    def parameter_names(self) -> dict[int, str]:
        """id -> qualified name of every parameter of the models alive; later models are told apart by number."""
        names: dict[int, str] = {}
        for index, model in enumerate(self.alive_models()):
            prefix = f"model{index}." if index else ""
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names

    def say(self, message: str, level: int = 1) -> None:
        """Prints `message` on rank 0 when the caller asked for at least this verbosity."""
        if self.verbosity >= level and not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            print(message)

    def warn(self, message: str) -> None:
        """A warning that verbosity=0 silences."""
        if self.verbosity >= 1:
            warnings.warn(f"apex_amp: {message}", stacklevel=3)

    def __deepcopy__(self, memo: dict) -> Setup:
        return self  # copies of an optimizer share the loss scale, as two optimizers of one call do

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "models": [], "optimizers": []}


class ProcessState:
    """The calls of `amp.initialize` in this process.

    `latest` is the last call's set-up: what `amp.state_dict()` saves. None before the first call and when the last one
    had enabled=False. `alive` lists, oldest first, the set-ups of which at least one model still exists.
    """

    def __init__(self) -> None:
        self.latest: Setup | None = None
        self.was_initialized = False
        # Scripts written for Apex set this to pass models that are half already.
        self.allow_incoming_model_not_fp32 = False
        self.alive: list[Setup] = []


process = ProcessState()


def _end_dead_setups(_: weakref.ref) -> None:
    alive = [setup for setup in process.alive if setup.alive_models()]
    if len(alive) < len(process.alive):
        process.alive = alive
        refresh_casts()


def refresh_casts() -> None:
    """Outside any forward the latest alive call decides what patched functions cast to."""
    set_default_cast_type(process.alive[-1].options.cast_type if process.alive else None)
    refresh_cast_devices()


def refresh_cast_devices() -> None:
    """Tensors are cast on those device types only that hold parameters of an initialized model."""
    models = [model for setup in process.alive if setup.options.cast_type is not None for model in setup.alive_models()]
    set_cast_devices({tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())})
