"""`apex.optimizers.FusedAdam` as scripts of 2018 and 2019 construct it too."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import optimizers


class FusedAdam(optimizers.FusedAdam):
    """apex_amp.optimizers.FusedAdam with the arguments that Apex dropped in October 2019.

    Args:
        max_grad_norm: before each step, clip the gradients of each group to this joint norm; 0: don't. Default: 0.
        eps_inside_sqrt: ignored, with a warning; eps is added to the root.
        Everything else: as apex_amp.optimizers.FusedAdam.
    """

    def __init__(self, params: Any, *args: Any, max_grad_norm: float = 0.0, eps_inside_sqrt: bool = False,
                 **kwargs: Any):
        if eps_inside_sqrt:
            warnings.warn("apex.optimizers.FusedAdam: eps_inside_sqrt is ignored, eps is added to the root",
                          stacklevel=2)
        super().__init__(params, *args, **kwargs)
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)
        self.defaults["max_grad_norm"] = max_grad_norm

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Clip, then step; returns the loss of `closure`, which is called once, before both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["max_grad_norm"] > 0:
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
        super().step(None, *args, **kwargs)
        return loss
