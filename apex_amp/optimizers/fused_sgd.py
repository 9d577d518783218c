"""SGD with momentum in one pass."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from ..multi_tensor_updates import multi_tensor_sgd
from .fused_optimizer import Batch, FusedOptimizer, check_options, zeros_like


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD defines it, whose `state_dict()` it has.

    Args, beside those of every FusedOptimizer:
        lr: required here or in every group.
        momentum: factor of the momentum buffer. A parameter's first gradient becomes its buffer.
        dampening: the gradient enters the buffer times 1 - dampening. Where a buffer is new, dampening is not 0 and an
            overflow is known on the device only, that step waits for the device.
        weight_decay: L2 regularization.
        nesterov: step along gradient + momentum * buffer; needs momentum, and dampening 0.
        wd_after_momentum: add the decay to the step instead of to the gradient.
        set_grad_none: False here, as in Apex.

    Raises:
        ValueError: no lr, an option out of its range, or nesterov without momentum or with dampening.
    """

    _options = (*FusedOptimizer._options, "wd_after_momentum")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = required, momentum: float = 0,
                 dampening: float = 0, weight_decay: float = 0, nesterov: bool = False, wd_after_momentum: bool = False,
                 materialize_master_grads: bool = True, set_grad_none: bool = False) -> None:
        check_options("FusedSGD", lr=0 if lr is required else lr, momentum=momentum, weight_decay=weight_decay)
        self.wd_after_momentum = wd_after_momentum
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults, set_grad_none, materialize_master_grads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        if group["lr"] is required:
            raise ValueError("FusedSGD: lr is missing: give the constructor or every group a learning rate, lr=0.1")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("FusedSGD: nesterov needs momentum above 0 and dampening 0, got "
                             f"momentum={group['momentum']!r} and dampening={group['dampening']!r}")
        super().add_param_group(param_group)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        if any(self._must_know(batch) for batch in batches) and found_inf is not None and found_inf.item() != 0:
            return
        for batch in batches:
            for part, first_run in self._split(batch):
                group = part.group
                buffers = part.state("momentum_buffer")[0] if group["momentum"] else None
                multi_tensor_sgd(part.grads, part.params, buffers, part.model_params, found_inf, part.inv_scale,
                                 group["lr"], group["momentum"], group["dampening"], group["weight_decay"],
                                 bool(group["nesterov"]), first_run, bool(self.wd_after_momentum))

    def _must_know(self, batch: Batch) -> bool:
        """Whether a skip has to be known here: zeros in a new buffer must not be taken for the buffer of a step."""
        return bool(batch.group["momentum"] and batch.group["dampening"]) and \
            any(state.get("momentum_buffer") is None for state in batch.states)

    def _split(self, batch: Batch) -> list[tuple[Batch, bool]]:
        """The batch as (parameters that have a momentum buffer, False) and (those that get it now, True)."""
        if not batch.group["momentum"]:
            return [(batch, False)]
        new = [buffer is None for buffer in batch.state("momentum_buffer")[0]]
        for owner, state, is_new in zip(batch.owners, batch.states, new):
            if is_new:
                state["momentum_buffer"] = zeros_like(owner)
        if all(new) or not any(new):
            return [(batch, new[0])]
        return [(batch.part([i for i, is_new in enumerate(new) if is_new is first]), first) for first in (False, True)]
