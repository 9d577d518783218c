"""Adagrad in one pass."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..multi_tensor_updates import multi_tensor_adagrad
from .fused_optimizer import Batch, FusedOptimizer, check_options, new_step, zeros_like


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), with torch.optim.Adagrad's `state_dict()`.

    Args, beside those of every FusedOptimizer:
        eps: added to the root of the sum of squares.
        adagrad_w_mode: True: decoupled weight decay; False: L2 regularization.

    Groups also carry torch's lr_decay and initial_accumulator_value, both 0, and follow them when a checkpoint of
    torch's or the group sets them.

    Raises:
        TypeError, ValueError: an option that is no number, or out of its range.
    """

    _options = (*FusedOptimizer._options, "adagrad_w_mode")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
                 set_grad_none: bool = True, adagrad_w_mode: bool = False, *,
                 materialize_master_grads: bool = True) -> None:
        check_options("FusedAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        defaults = dict(lr=lr, eps=eps, weight_decay=weight_decay, lr_decay=0.0, initial_accumulator_value=0.0)
        super().__init__(params, defaults, set_grad_none, materialize_master_grads)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"step": new_step(param), "sum": zeros_like(param).fill_(group["initial_accumulator_value"])}

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        for batch in batches:
            group = batch.group
            multi_tensor_adagrad(batch.grads, batch.params, *batch.state("sum", "step"), batch.model_params, found_inf,
                                 batch.inv_scale, group["lr"], group["lr_decay"], group["eps"], group["weight_decay"],
                                 bool(self.adagrad_w_mode))
