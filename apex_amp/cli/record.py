"""Runs one script at one opt level for `apex-amp compare` and writes what happened, one JSON object a line.

Started as `python -m apex_amp.cli.record SETTINGS [-m] SCRIPT ARGS...`, SETTINGS being a `Settings` as JSON. Events:
    {"event": "initialize", "parameters": {dtype: count}, "dropped": [name, ...]}
    {"event": "iteration", "losses": {loss_id: float}, "loss_scale": {loss_id: float}, "skipped": bool,
     "seconds": float}
    {"event": "end", "peak_bytes": int, "error": str | null}
An iteration begins where the script enters amp.scale_loss with the loss_id that it used first.
"""
from __future__ import annotations

import collections
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import amp
from .run import run_as_main

# The properties that an opt level chooses: at a level the script didn't ask for, its overrides of these make no sense.
LEVEL_PROPERTIES = ("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32",
                    "master_weights", "loss_scale")


@dataclass
class Settings:
    """opt_level: what amp.initialize is made to use. steps: iterations, None for all. events: the output file."""
    opt_level: str
    steps: int | None
    seed: int
    events: str


class EnoughSteps(SystemExit):
    """Ends the script as its own sys.exit() would."""


class Recorder:
    """Stands in for amp.initialize and amp.scale_loss."""

    def __init__(self, settings: Settings, write: Callable[[dict], None]):
        self.settings = settings
        self.write = write
        self.initialize_of_amp = amp.initialize
        self.scale_loss_of_amp = amp.scale_loss
        self.first_loss_id: int | None = None
        self.iterations = 0
        self.losses: dict[int, float] = {}
        self.optimizers: list[Any] = []
        self.started = 0.0

    def initialize(self, models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1",
                   **overrides: Any) -> Any:
        dropped = []
        if opt_level != self.settings.opt_level:
            dropped = [name for name in LEVEL_PROPERTIES if overrides.pop(name, None) is not None]
        result = self.initialize_of_amp(models, optimizers, True, self.settings.opt_level, **overrides)
        counts: collections.Counter = collections.Counter()
        for model in models if isinstance(models, (list, tuple)) else [models]:
            counts.update(str(p.dtype).removeprefix("torch.") for p in model.parameters())
        self.write({"event": "initialize", "parameters": dict(counts), "dropped": dropped})
        return result

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizers: Any, loss_id: int = 0, *args: Any,
                   **kwargs: Any) -> Iterator[torch.Tensor]:
        if self.first_loss_id is None:
            self.first_loss_id = loss_id
            self.started = time.perf_counter()
        elif loss_id == self.first_loss_id:
            self.finish_iteration()
            if self.iterations == self.settings.steps:
                raise EnoughSteps
        self.losses[loss_id] = loss.detach().float().mean().item()
        self.optimizers += optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        with self.scale_loss_of_amp(loss, optimizers, loss_id, *args, **kwargs) as scaled_loss:
            yield scaled_loss

    def finish_iteration(self) -> None:
        """Reports the iteration that has just ended, if one has."""
        if not self.losses:
            return
        now = time.perf_counter()
        self.write({"event": "iteration", "losses": self.losses,
                    "loss_scale": {loss_id: amp.loss_scale(loss_id) for loss_id in self.losses},
                    "skipped": any(amp.last_step_skipped(optimizer) for optimizer in self.optimizers),
                    "seconds": now - self.started})
        self.losses, self.optimizers, self.started = {}, [], now
        self.iterations += 1


def peak_bytes() -> int:
    """The most memory in use so far: allocated on the GPUs where there are any, else resident in this process."""
    if torch.cuda.is_available():
        return sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def seed_everything(seed: int) -> None:
    import numpy
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def main(argv: list[str]) -> None:
    settings = Settings(**json.loads(argv[0]))
    command = argv[1:]
    is_module = command[0] == "-m"
    if is_module:
        command = command[1:]
    with open(settings.events, "w", buffering=1) as events:
        def write(event: dict) -> None:
            events.write(json.dumps(event) + "\n")

        recorder = Recorder(settings, write)
        vars(amp).update(initialize=recorder.initialize, scale_loss=recorder.scale_loss)
        seed_everything(settings.seed)
        error: str | None = None
        try:
            run_as_main(command[0], command[1:], is_module)
        except SystemExit as exit:
            if exit.code not in (None, 0):
                error = f"the script exited with {exit.code!r}"
        except BaseException as exception:
            error = f"{type(exception).__name__}: {exception}"
            raise
        finally:
            if error is None:
                recorder.finish_iteration()
                if recorder.iterations == 0:
                    error = "the script never entered amp.scale_loss"
            write({"event": "end", "peak_bytes": peak_bytes(), "error": error})


if __name__ == "__main__":
    main(sys.argv[1:])
