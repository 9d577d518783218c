"""Whether the gradients of one scale_loss block were finite: known at once on a CPU, when the flag arrives on a GPU."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from .gradients import Gradients

if TYPE_CHECKING:
    from ._state import Setup

# After so many skipped steps in a row the cause is in the model, not in the scale.
SKIPS_BEFORE_WARNING = 20


class Overflow:
    """The verdict on one block. `happened()` waits for the device at most once, prints the message and remembers."""

    def __init__(self, setup: Setup, loss_id: int, gradients: Sequence[Gradients]) -> None:
        scaler = setup.loss_scalers[loss_id]
        self._setup, self._loss_id, self._gradients = setup, loss_id, gradients
        self.found_inf = scaler.found_inf
        self._happened: bool | None = None
        self._event: torch.cuda.Event | None = None
        if scaler.device.type == "cuda":
            # found_inf is cleared by the next block; this copy is the block's own.
            self.found_inf = scaler.found_inf.clone()
            self._on_host = torch.cat((self.found_inf, scaler.scale_tensor)).to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(scaler.device))
        else:
            self._on_host = torch.cat((scaler.found_inf, scaler.scale_tensor))
            self.happened()

    def is_known(self) -> bool:
        """True when `happened` will not wait."""
        return self._happened is not None or self._event is None or self._event.query()

    def happened(self) -> bool:
        if self._happened is None:
            if self._event is not None:
                self._event.synchronize()
            found_inf, scale = self._on_host.tolist()
            self._happened = found_inf != 0
            self._report(scale)
            self._gradients, self._event = (), None
        return self._happened

    def __getstate__(self) -> dict[str, Any]:
        self.happened()
        return dict(self.__dict__)

    def _report(self, scale: float) -> None:
        setup, scaler = self._setup, self._setup.loss_scalers[self._loss_id]
        if not self._happened:
            scaler.skips_in_a_row = 0
            return
        scaler.skips_in_a_row += 1
        names = setup.parameter_names()
        culprits = [names.get(id(parameter), "a parameter of no initialized model")
                    for gradients in self._gradients for parameter in gradients.culprits()]
        setup.overflow_report = culprits
        change = "reducing loss scale to" if scaler.dynamic else "keeping static loss scale"
        setup.say(f"Gradient overflow.  Skipping step, loss scaler {self._loss_id} {change} {scale}")
        setup.say(f"Gradients that are not finite: {_abridged(culprits)}", level=2)
        if scaler.skips_in_a_row == SKIPS_BEFORE_WARNING:
            setup.warn(f"{SKIPS_BEFORE_WARNING} steps in a row were skipped by loss scaler {self._loss_id}: the loss scale is not "
                       f"the cause. Gradients that are not finite: {_abridged(culprits)}. Look for an inf or NaN in the "
                       "loss, the inputs or the learning rate")


def _abridged(names: list[str], most: int = 20) -> str:
    listed = ", ".join(names[:most]) or "none was named"
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
