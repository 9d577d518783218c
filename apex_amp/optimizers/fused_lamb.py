"""LAMB: Adam whose step is scaled layer by layer."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..multi_tensor import multi_tensor_l2norm
from ..multi_tensor_updates import multi_tensor_lamb
from .fused_optimizer import Batch, FusedOptimizer, check_options, new_step, zeros_like


class FusedLAMB(FusedOptimizer):
    """LAMB (Large Batch Optimization for Deep Learning, arXiv 1904.00962), as Apex varies it.

    Where it departs from the paper: gradients are first scaled down to `max_grad_norm`, the norm of the gradients of
    all groups together; the trust ratio |param| / |update| has no bounds (phi is the identity), is 1 where either norm
    is 0, and applies where weight_decay is not 0, or everywhere with use_nvlamb.

    Args, beside those of every FusedOptimizer:
        bias_correction: divide the moments by 1 - beta**step; False takes them as they are.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        adam_w_mode: True: decoupled weight decay; False: L2 regularization.
        grad_averaging: the gradient enters the first moment times 1 - beta1; False: as it is.
        max_grad_norm: the constructor's value holds for all groups; 0 or None: no clipping.
        use_nvlamb: apply the trust ratio to parameters without weight decay too.

    Raises:
        RuntimeError: amsgrad=True.
        TypeError, ValueError: an option that is no number, or out of its range.
    """

    _options = (*FusedOptimizer._options, "adam_w_mode", "use_nvlamb")
    _takes_shards = False

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
                 amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True,
                 set_grad_none: bool = True, max_grad_norm: float | None = 1.0, use_nvlamb: bool = False, *,
                 materialize_master_grads: bool = True) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant")
        check_options("FusedLAMB", betas, lr=lr, eps=eps, weight_decay=weight_decay,
                      max_grad_norm=0 if max_grad_norm is None else max_grad_norm)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
                        grad_averaging=grad_averaging, max_grad_norm=max_grad_norm)
        super().__init__(params, defaults, set_grad_none, materialize_master_grads)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"step": new_step(param), "exp_avg": zeros_like(param), "exp_avg_sq": zeros_like(param)}

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        max_grad_norm = self.defaults["max_grad_norm"] or 0.0
        grad_norm = self._grad_norm(batches) if max_grad_norm else None
        for batch in batches:
            group = batch.group
            norm = 0.0 if grad_norm is None else _scaled_alike(grad_norm, batch)
            multi_tensor_lamb(batch.grads, batch.params, *batch.state("exp_avg", "exp_avg_sq", "step"),
                              batch.model_params, found_inf, batch.inv_scale, group["lr"], norm, *group["betas"],
                              group["eps"], group["weight_decay"], bool(self.adam_w_mode),
                              bool(group["bias_correction"]), bool(group["grad_averaging"]), max_grad_norm,
                              bool(self.use_nvlamb))

    def _grad_norm(self, batches: list[Batch]) -> Tensor:
        """The norm of the unscaled gradients of all groups."""
        by_scale: dict[int, list[Batch]] = {}
        for batch in batches:
            by_scale.setdefault(id(batch.inv_scale), []).append(batch)
        norms = []
        for alike in by_scale.values():
            norm = multi_tensor_l2norm([grad for batch in alike for grad in batch.grads])
            inv_scale = alike[0].inv_scale
            norms.append(norm if inv_scale is None else norm * inv_scale.to(norm.device).reshape(()))
        return norms[0] if len(norms) == 1 else torch.stack([norm.to(norms[0].device) for norm in norms]).norm()


def _scaled_alike(norm: Tensor, batch: Batch) -> Tensor:
    """`norm` as it were of gradients that still carry the batch's loss scale."""
    return norm if batch.inv_scale is None else norm / batch.inv_scale.to(norm.device).reshape(())
