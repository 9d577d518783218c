"""A training loop that is written once and runs plain in FP32, as the oracle, or under amp at any level.

`Dot` and the numbers that tests feed it (small integers, learning rates and weights that are multiples of 1/8) are
exact in half and bfloat16 too, so that every level must give the FP32 result to the last bit.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex_amp import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SCALED = ("O1", "O2")  # the levels with a dynamic scale of their own
MASTERS = ("O2", "O5")
INF = float("inf")


class Dot(nn.Module):
    """sum(weight * x) over several parameters; the gradient of each is x."""

    def __init__(self, size: int = 4, parameters: int = 2) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((size,), 1.0 + i)) for i in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def initialize(level: str | None, models: Any, optimizers: Any, **options: Any) -> Any:
    """amp.initialize with a quiet, small scale; level None leaves everything plain."""
    if level is None:
        return models, optimizers
    return amp.initialize(models, optimizers, opt_level=level, **{"verbosity": 0, "loss_scale": 128.0, **options})


def backward(level: str | None, loss: torch.Tensor, optimizers: Any, retain_graph: bool = False,
             **options: Any) -> None:
    if level is None:
        loss.backward(retain_graph=retain_graph)
        return
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward(retain_graph=retain_graph)


def train(level: str | None, model: nn.Module, optimizer: Any, inputs: list[torch.Tensor],
          **options: Any) -> torch.Tensor:
    """One step for each input; returns the model's parameters afterwards."""
    model, optimizer = initialize(level, model, optimizer, **options)
    for x in inputs:
        optimizer.zero_grad()
        backward(level, model(x), optimizer)
        optimizer.step()
    return values(model)


def integers(count: int, size: int = 4, most: int = 3) -> list[torch.Tensor]:
    return [torch.randint(-most, most + 1, (size,)).float() for _ in range(count)]
