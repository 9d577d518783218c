"""NovoGrad: momentum over gradients that are normalized layer by layer."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..multi_tensor import multi_tensor_l2norm
from ..multi_tensor_updates import multi_tensor_novograd
from .fused_optimizer import Batch, FusedOptimizer, check_options, new_step, zeros_like


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (Stochastic Gradient Methods with Layer-wise Adaptive Moments, arXiv 1905.11286), as Apex varies it.

    Where it departs from the paper, whose rule is reg_inside_moment=True, bias_correction=False, grad_averaging=False
    and betas=(0.95, 0.98): the average over layers' gradients is kept as a norm, not as its square; with bias
    correction the norm is divided by sqrt(1 - beta2**step), although the first norm already is the whole average.

    Args, beside those of every FusedOptimizer:
        bias_correction: divide the first moment by 1 - beta1**step and the norm as above.
        betas: decay rates of the moment and of the norm, in [0, 1).
        eps: added to the norm.
        reg_inside_moment: normalize and decay the gradient before it enters the moment; False: the step after it.
        grad_averaging: the gradient enters the moment times 1 - beta1; False: as it is.
        norm_type: 2: the norm of a layer's gradient; 0: its largest magnitude.
        init_zero: start the averaged norm from 0, not from the first norm.

    State of a parameter: step, exp_avg, and exp_avg_sq, the averaged norm (not squared, in spite of Apex's name).

    Raises:
        RuntimeError: amsgrad=True, or another norm_type.
        TypeError, ValueError: an option that is no number, or out of its range.
    """

    _options = (*FusedOptimizer._options, "moment_mode")
    _takes_shards = False

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 amsgrad: bool = False, reg_inside_moment: bool = False, grad_averaging: bool = True,
                 norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True, *,
                 materialize_master_grads: bool = True) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant")
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad: norm_type must be 2 (L2 norm) or 0 (largest magnitude), got "
                               f"{norm_type!r}")
        check_options("FusedNovoGrad", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
                        grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero)
        super().__init__(params, defaults, set_grad_none, materialize_master_grads)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "exp_avg_sq" in group:
                self._adopt_norms(group, group.pop("exp_avg_sq"))

    def _adopt_norms(self, group: dict[str, Any], norms: list[Tensor]) -> None:
        """Takes over averaged norms as Apex kept them: [those of half parameters, those of float32 ones]."""
        for norms_of_kind, is_float in zip(norms, (False, True)):
            params = [param for param in group["params"]
                      if param in self.state and (param.dtype == torch.float32) == is_float]
            if len(params) != norms_of_kind.numel():
                kind = "float32" if is_float else "half"
                raise ValueError(f"FusedNovoGrad.load_state_dict: the checkpoint has {norms_of_kind.numel()} averaged "
                                 f"norms (exp_avg_sq) of {kind} parameters in a group, expected {len(params)}: give "
                                 "the parameters the dtypes that they had when it was made")
            for param, norm in zip(params, norms_of_kind):
                self.state[param]["exp_avg_sq"] = norm.detach().clone().to(param.device, torch.float32)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"step": new_step(param), "exp_avg": zeros_like(param), "exp_avg_sq": new_step(param)}

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        for batch in batches:
            group = batch.group
            l2_norm = group["norm_type"] == 2
            norms = multi_tensor_l2norm(batch.grads, per_tensor=True)[1] if l2_norm \
                else _largest_magnitudes(batch.grads)
            multi_tensor_novograd(batch.grads, batch.params, *batch.state("exp_avg", "exp_avg_sq", "step"),
                                  batch.model_params, found_inf, batch.inv_scale, group["lr"], norms, *group["betas"],
                                  group["eps"], group["weight_decay"], bool(group["bias_correction"]),
                                  bool(group["grad_averaging"]), self.moment_mode == 0, l2_norm,
                                  bool(group["init_zero"]))


def _largest_magnitudes(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.abs().amax().float() if grad.numel() else grad.new_zeros((), dtype=torch.float32)
                        for grad in grads])
