"""Adam and AdamW in one pass."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..multi_tensor_updates import multi_tensor_adam
from .fused_optimizer import Batch, FusedOptimizer, check_options, new_step, zeros_like


class FusedAdam(FusedOptimizer):
    """Adam (arXiv 1412.6980); with adam_w_mode AdamW (arXiv 1711.05101), the default. amsgrad is not supported.

    `state_dict()` is torch.optim.Adam's: checkpoints load either way, with adam_w_mode=True for torch.optim.AdamW's.

    Args, beside those of every FusedOptimizer:
        bias_correction: divide the moments by 1 - beta**step; False takes them as they are.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        adam_w_mode: True: decoupled weight decay; False: L2 regularization.
        capturable: keeps `lr` as a tensor on the parameters' device, so that a captured CUDA graph follows a scheduler;
            all else may be captured anyway.
        master_weights: half parameters get an FP32 master in their state ("master_param"), and are its rounded copy.
            Not needed after amp.initialize, which has masters of its own.

    Raises:
        RuntimeError: amsgrad=True.
        TypeError, ValueError: an option that is no number, or out of its range.
    """

    _options = (*FusedOptimizer._options, "adam_w_mode", "capturable", "master_weights")

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
                 weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
                 capturable: bool = False, master_weights: bool = False, *,
                 materialize_master_grads: bool = True) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant: use torch.optim.AdamW(amsgrad=True)")
        check_options("FusedAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults, set_grad_none, materialize_master_grads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(group["params"][0].device, copy=True)

    def step(self, closure: Callable[[], Any] | None = None, grads: Any = None, output_params: Any = None,
             scale: Any = None, grad_norms: Any = None) -> Any:
        """Takes one step; returns the loss of `closure`, which is called once, before it.

        Raises:
            RuntimeError: a sparse gradient, one of an unsupported dtype, or an argument that FusedAdam had before amp
                (grads, output_params, scale, grad_norms). Nothing has changed then.
        """
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError("FusedAdam.step takes no grads, output_params, scale or grad_norms any more: let "
                               "amp.initialize handle half precision, and call step() as torch.optim.Adam's")
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in state_dict["param_groups"]):
                raise RuntimeError(f"FusedAdam.load_state_dict: the checkpoint was made with {option}=True, which "
                                   "FusedAdam does not support: load it into torch.optim.Adam or AdamW")
        super().load_state_dict(state_dict)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"step": new_step(param), "exp_avg": zeros_like(param), "exp_avg_sq": zeros_like(param)}
        if self.master_weights and param.dtype != torch.float32:
            state["master_param"] = param.detach().float()
        return state

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        for batch in self._with_own_masters(batches) if self.master_weights else batches:
            group = batch.group
            multi_tensor_adam(batch.grads, batch.params, *batch.state("exp_avg", "exp_avg_sq", "step"),
                              batch.model_params, found_inf, batch.inv_scale, group["lr"], *group["betas"],
                              group["eps"], group["weight_decay"], bool(self.adam_w_mode),
                              bool(group["bias_correction"]))

    def _with_own_masters(self, batches: list[Batch]) -> list[Batch]:
        """The batches, with half parameters replaced by the masters in their state and written as copies."""
        split = []
        for batch in batches:
            own = [state.get("master_param") for state in batch.states]
            without = batch.part([i for i, master in enumerate(own) if master is None])
            halves = batch.part([i for i, master in enumerate(own) if master is not None])
            halves.model_params, halves.params = halves.params, [master for master in own if master is not None]
            split += [part for part in (without, halves) if part.owners]
        return split

    # --- what subclasses written for Apex's FusedAdam (fairseq's) use -------------------------------------------------

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)

    @staticmethod
    def multi_tensor_adam(*args: Any) -> None:
        """amp_C.multi_tensor_adam."""
        from ..multi_tensor_apply import multi_tensor_adam as in_apex_shape
        in_apex_shape(*args)
