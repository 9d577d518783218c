"""LARC: layer-wise adaptive rates around any optimizer."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..multi_tensor import multi_tensor_l2norm


class LARC:
    """Layer-wise adaptive rate control (Large Batch Training of Convolutional Networks, arXiv 1708.03888).

    Works on the gradients of the optimizer that it wraps: each becomes (grad + weight_decay * param) * r, with
    rate = trust_coefficient * |param| / (|grad| + weight_decay * |param| + eps) and r = min(rate / lr, 1), or r = rate
    without clip. So the wrapped optimizer's weight decay is folded in, and acts as L2 regularization. The gradient of a
    parameter where either norm is 0 is left as it is, without weight decay. After amp.initialize these are the masters'
    gradients, which are made for it even where the wrapped optimizer has materialize_master_grads=False.

    Args:
        optimizer: the optimizer to wrap; reachable as `optim`.
        trust_coefficient: how far a layer may move, in proportion to its norm.
        clip: True: the smaller of the layer's rate and the optimizer's; False: their product.
        eps: added to the denominator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True,
                 eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.optim, "_step_supports_amp_scaling", False)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rescales the gradients in place and steps the wrapped optimizer; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        amp_stash = getattr(self.optim, "_amp_stash", None)
        if amp_stash is not None:  # with materialize_master_grads=False the masters may have no gradients yet
            amp_stash.gradients.materialize_masters()
        with self._weight_decay_absorbed() as weight_decays, self._amp_scaling_handed_on() as scale:
            for group, weight_decay in zip(self.param_groups, weight_decays):
                self._rescale_gradients(group, weight_decay, scale)
            self.optim.step()
        return loss

    @contextlib.contextmanager
    def _weight_decay_absorbed(self) -> Iterator[list[float]]:
        weight_decays = [group.get("weight_decay", 0) for group in self.param_groups]
        decaying = [group for group in self.param_groups if "weight_decay" in group]
        absorbed = [group["weight_decay"] for group in decaying]
        for group in decaying:
            group["weight_decay"] = 0
        try:
            yield weight_decays
        finally:
            for group, weight_decay in zip(decaying, absorbed):
                group["weight_decay"] = weight_decay

    @contextlib.contextmanager
    def _amp_scaling_handed_on(self) -> Iterator[Tensor | float]:
        """Hands on what torch.amp.GradScaler or amp gave this optimizer; yields the gradients' loss scale."""
        given = {name: vars(self)[name] for name in ("found_inf", "grad_scale") if name in vars(self)}
        vars(self.optim).update(given)
        try:
            scale = given.get("grad_scale")
            yield 1.0 if scale is None else scale
        finally:
            for name in given:
                del vars(self.optim)[name]

    @torch.no_grad()
    def _rescale_gradients(self, group: dict[str, Any], weight_decay: float, scale: Tensor | float) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        param_norms = multi_tensor_l2norm(params, per_tensor=True)[1]
        grad_norms = multi_tensor_l2norm([param.grad for param in params], per_tensor=True)[1] / scale
        rates = self.trust_coefficient * param_norms / (grad_norms + param_norms * weight_decay + self.eps)
        if self.clip:
            rates = (rates / group["lr"]).clamp(max=1)
        # Chosen on the device, which the host need not wait for.
        applies = (param_norms != 0) & (grad_norms != 0)
        rates = torch.where(applies, rates, 1.0)
        decays = torch.where(applies, weight_decay * scale, 0.0)
        for param, rate, decay in zip(params, rates, decays):
            param.grad.add_(param * decay.to(param.device)).mul_(rate.to(param.device))
