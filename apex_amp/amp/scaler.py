"""Loss scaling: one scale, static or dynamic, kept on the device of the gradients."""
from __future__ import annotations

import math
from typing import Any

import torch

from ..multi_tensor import update_scale_

INIT_SCALE = 2.0 ** 16
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000
# Below this scale every half gradient that scaling could rescue is zero anyway.
SMALLEST_SCALE = 2.0 ** -10


class LossScaler:
    """The scale of one loss.

    Args:
        loss_scale: "dynamic", or the number that a static scale keeps for ever.
        min_loss_scale: floor of a dynamic scale; None: 2**-10, so that it never reaches zero.
        max_loss_scale: ceiling of a dynamic scale, which starts at min(2**16, max_loss_scale).

    A dynamic scale doubles after 2,000 updates in a row without an overflow and halves at each overflow
    (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2). Scale, counter and flag are 0-dim
    tensors on `device`, so that an update on a GPU needs no host synchronization.
    """

    def __init__(self, loss_scale: float | str, min_loss_scale: float | None = None,
                 max_loss_scale: float = 2.0 ** 24, device: torch.device | str = "cpu") -> None:
        self.dynamic = loss_scale == "dynamic"
        self.min_loss_scale = SMALLEST_SCALE if min_loss_scale is None else float(min_loss_scale)
        self.max_loss_scale = float(max_loss_scale)
        start = min(self.max_loss_scale, INIT_SCALE) if self.dynamic else float(loss_scale)
        self.scale_tensor = torch.tensor(start, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._forget_versions()
        self.skips_in_a_row = 0
        # A static scale of 1 changes nothing and checks nothing: no pass over the gradients at all.
        self.is_identity = not self.dynamic and start == 1.0

    @property
    def device(self) -> torch.device:
        return self.scale_tensor.device

    def to(self, device: torch.device) -> None:
        """Moves the scale to the device of the gradients."""
        if device != self.device:
            self.scale_tensor = self.scale_tensor.to(device)
            self.growth_tracker = self.growth_tracker.to(device)
            self.found_inf = self.found_inf.to(device)
            self._forget_versions()

    def _forget_versions(self) -> None:
        # Versions tell what need not be computed again; on a CPU only, for a CUDA graph's replay moves none.
        self._cleared_at = -1
        self._inverse: tuple[int, torch.Tensor] = -1, self.scale_tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_versions()

    def loss_scale(self) -> float:
        """The current scale (waits for the device)."""
        return self.scale_tensor.item()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        # Scripts written for Apex assign this attribute right after initialize.
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a loss scale must be a positive finite number, got {value!r}")
        self.scale_tensor.fill_(value)
        self.is_identity = not self.dynamic and value == 1.0

    @property
    def _unskipped(self) -> int:
        return int(self.growth_tracker.item())

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` in FP32 times the scale, which must be on its device."""
        return (loss if loss.dtype == torch.float32 else loss.float()) * self.scale_tensor

    def inv_scale(self) -> torch.Tensor:
        """1 / scale, float32."""
        if self._inverse[0] != self.scale_tensor._version or not self.scale_tensor.is_cpu:
            self._inverse = self.scale_tensor._version, self.scale_tensor.reciprocal()
        return self._inverse[1]

    def clear_found_inf(self) -> None:
        """Makes `found_inf` zero."""
        if self._cleared_at != self.found_inf._version or not self.found_inf.is_cpu:
            self.found_inf.zero_()
            self._cleared_at = self.found_inf._version

    def update(self) -> None:
        """Grows or backs off a dynamic scale by `found_inf` (non-zero: an overflow), without reading it on the host.

        A static scale counts its clean updates only.
        """
        rule = (GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, self.min_loss_scale, self.max_loss_scale)
        if not self.dynamic:
            rule = (1.0, 1.0, 2 ** 31 - 1, 0.0, math.inf)
        update_scale_(self.scale_tensor, self.growth_tracker, self.found_inf, *rule)

    def state_dict(self) -> dict[str, float | int]:
        """{"loss_scale": float, "unskipped": int}, as Apex wrote it."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self._loss_scale = float(state["loss_scale"])
        self.growth_tracker.fill_(int(state["unskipped"]))
