"""Whether the gradients of one scale_loss block were finite: known at once on a CPU, when the flag arrives on a GPU."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._C import host_value
from .gradients import Flags, Gradients
from .scaler import LossScaler

if TYPE_CHECKING:
    from ._state import Setup

# After so many skipped steps in a row the cause is in the model, not in the scale.
SKIPS_BEFORE_WARNING = 20


class Overflow:
    """The verdict on one block, made when its scaler has been updated.

    `happened()` waits for the device at most once; the first time that the verdict is known it is reported, and
    remembered. Under a CUDA graph's capture nothing reaches the host: then `found_inf` alone decides, on the device.
    """

    def __init__(self, setup: Setup, scaler: LossScaler, flags: list[tuple[Gradients, list[Flags]]]) -> None:
        self._setup, self._scaler, self._flags = setup, scaler, flags
        self._happened: bool | None = None
        self._event: torch.cuda.Event | None = None
        self.found_inf = scaler.found_inf
        self._seen = (scaler.found_inf, scaler.scale_tensor)
        if scaler.device.type != "cpu":
            # The next block clears the scaler's own flag.
            self.found_inf = scaler.found_inf.clone()
            self._seen = (self.found_inf, scaler.scale_tensor.clone())
            if scaler.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                self._seen = tuple(tensor.to("cpu", non_blocking=True) for tensor in self._seen)
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(scaler.device))
        else:
            self.happened()

    def is_known(self) -> bool:
        """True when `happened` will not wait."""
        return self._happened is not None or (self._event is not None and self._event.query())

    def happened(self) -> bool:
        if self._happened is None:
            if self._event is not None:
                self._event.synchronize()
            self._happened = _number(self._seen[0]) != 0
            self._report()
            self._flags, self._event, self._seen = [], None, ()
        return self._happened

    def settle(self) -> bool:
        """Reports the verdict if it has arrived; returns whether it has."""
        return self.is_known() and (self.happened() or True)

    def __getstate__(self) -> dict[str, Any]:
        self.happened()
        return dict(self.__dict__)

    def _report(self) -> None:
        setup, scaler = self._setup, self._scaler
        if not self._happened:
            scaler.skips_in_a_row = 0
            return
        scaler.skips_in_a_row += 1
        names = setup.parameter_names()
        culprits = [names.get(id(parameter), "a parameter of no initialized model")
                    for gradients, flags in self._flags for parameter in gradients.culprits(flags)]
        setup.overflow_report = culprits
        loss_id = setup.loss_scalers.index(scaler)
        change = "reducing loss scale to" if scaler.dynamic else "keeping static loss scale"
        setup.say(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change} {_number(self._seen[1])}")
        setup.say(f"Gradients that are not finite: {_abridged(culprits)}", level=2)
        if scaler.skips_in_a_row == SKIPS_BEFORE_WARNING:
            setup.warn(f"{SKIPS_BEFORE_WARNING} steps in a row were skipped by loss scaler {loss_id}: the loss scale "
                       f"is not the cause. Gradients that are not finite: {_abridged(culprits)}. Look for an inf or "
                       "NaN in the loss, the inputs or the learning rate")


def _number(scalar: torch.Tensor) -> float:
    return host_value(scalar) if scalar.is_cpu else scalar.item()


def _abridged(names: list[str], most: int = 20) -> str:
    listed = ", ".join(names[:most]) or "none was named"
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
