"""What the fused optimizers share: gradients and state gathered into lists, checks, checkpoints."""
from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from .._C import are_plain, get_grads, state_lists

_HALF_TYPES = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALF_TYPES, torch.float32)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@dataclass
class Batch:
    """Parameters of one group and one device that take the step in one call; all lists have one order."""
    group: dict[str, Any]
    inv_scale: Tensor | None
    owners: list[Tensor]  # the parameters as the group has them
    params: list[Tensor]  # what the update writes
    grads: list[Tensor]
    model_params: list[Tensor] | None
    states: list[dict[str, Any]] = field(default_factory=list)

    def part(self, positions: list[int]) -> Batch:
        return Batch(self.group, self.inv_scale, _pick(self.owners, positions), _pick(self.params, positions),
                     _pick(self.grads, positions),
                     None if self.model_params is None else _pick(self.model_params, positions),
                     _pick(self.states, positions))

    def state(self, *keys: str) -> list[list[Tensor]]:
        """The list of each kind of state, with None for a parameter that has none of it."""
        lists = [[state.get(key) for state in self.states] for key in keys] if is_compiling() \
            else state_lists(self.states, *keys)
        return [_local(tensors) for tensors in lists]


class FusedOptimizer(torch.optim.Optimizer):
    """Base class: one call of a multi-tensor update rule for each group, device and kind of parameter.

    Parameters may be float16, bfloat16 or float32, dense or the local shards of DTensors; state is float32 also for
    parameters in half precision. A parameter has no state before its first gradient, and counts its own steps.

    Under torch.amp.GradScaler, and after amp.initialize, `found_inf` (and GradScaler's `grad_scale`) are read on the
    device: a step that turns out to be an overflow changes nothing, and the host never waits to know.

    Args, of all fused optimizers:
        params: an iterable of parameters, or of dicts that define groups.
        lr: learning rate, a float or a float32 tensor of one element.
        weight_decay: its coefficient.
        amsgrad: where it is taken, it must be False.
        set_grad_none: what `zero_grad()` without an argument does; the gradients of model parameters that have FP32
            masters become None then in any case.
        materialize_master_grads: False: after amp.initialize at O2 or O5, leaving scale_loss only checks the model's
            half gradients, and the step reads them as they are, with one backward for each step. The masters then
            have a `.grad` only after `amp.master_params(optimizer)`, which unscales them.
    """

    # amp's word for an optimizer that takes `_amp_step` (amp_optimizer.AmpStep) and writes the model's parameters.
    _writes_model_params = True
    # torch.amp.GradScaler's word for an optimizer that takes found_inf and grad_scale as attributes.
    _step_supports_amp_scaling = True
    # Whether the rule is elementwise, so that each rank may step its shards of DTensors alone.
    _takes_shards: ClassVar[bool] = True
    # Attributes that a copy or a pickle must keep: torch's __getstate__ keeps groups and state only.
    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "materialize_master_grads")

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], set_grad_none: bool,
                 materialize_master_grads: bool) -> None:
        self.set_grad_none = set_grad_none
        self.materialize_master_grads = materialize_master_grads
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients: to None or to zeros, as the constructor's set_grad_none says unless told here."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if param.requires_grad:
                self._check(len(self.param_groups) - 1, index, param, None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; returns the loss of `closure`, which is called once, before it.

        Raises:
            RuntimeError: a sparse gradient, or one of an unsupported dtype. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather()
        if batches:
            self._update(batches, getattr(self, "found_inf", None))
            self._tell_amp(batches)
        return loss

    # --- what a rule defines ------------------------------------------------------------------------------------------

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter that gets its first gradient."""
        raise NotImplementedError

    def _update(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        """Takes the step for all batches."""
        raise NotImplementedError

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _gather(self) -> list[Batch]:
        """The parameters that have a gradient, all of them checked before any gets new state."""
        amp_step = getattr(self, "_amp_step", None)
        grad_scale = getattr(self, "grad_scale", None)
        inv_scale = None if grad_scale is None else grad_scale.double().reciprocal().float()
        model_inv_scale = None if amp_step is None else amp_step.inv_scale
        batches = [batch for index, group in enumerate(self.param_groups)
                   for batch in self._gather_group(index, group, inv_scale, amp_step, model_inv_scale)]
        for batch in batches:
            batch.states = list(map(self.state.get, batch.owners))
            for i, owner in enumerate(batch.owners if not all(batch.states) else ()):
                if not batch.states[i]:
                    batch.states[i] = self.state[owner] = self._new_state(owner, batch.group)
        return batches

    def _gather_group(self, group_index: int, group: dict[str, Any], inv_scale: Tensor | None, amp_step: Any,
                      model_inv_scale: Tensor | None) -> list[Batch]:
        params = group["params"]
        model_params = [None] * len(params) if amp_step is None else amp_step.model_params_of(params)
        if model_inv_scale is None:
            model_inv_scale, grads = inv_scale, _grads(params)
        else:
            grads = _grads([param if model_param is None else model_param
                            for param, model_param in zip(params, model_params)])
        if params and not is_compiling():
            if amp_step is None and are_plain(params, grads):
                return [Batch(group, inv_scale, params, params, grads, None)]
            if amp_step is not None and are_plain(params, grads, model_params):
                return [Batch(group, model_inv_scale, params, params, grads, model_params)]
        kinds: dict[tuple[torch.device, bool], list[int]] = {}
        for index, (param, grad, model_param) in enumerate(zip(params, grads, model_params)):
            if grad is not None:
                self._check(group_index, index, param, grad)
                kinds.setdefault((param.device, model_param is not None), []).append(index)
        return [Batch(group, model_inv_scale if has_copies else inv_scale, _pick(params, positions),
                      _local(_pick(params, positions)), _local(_pick(grads, positions)),
                      _pick(model_params, positions) if has_copies else None)
                for (_, has_copies), positions in kinds.items()]

    def _check(self, group_index: int, index: int, param: Tensor, grad: Tensor | None) -> None:
        whole = self._takes_shards or type(param) in _PLAIN_TYPES or not hasattr(param, "to_local")
        fits = grad is None or (grad.dtype in _DTYPES and grad.layout is torch.strided)
        if param.dtype in _DTYPES and whole and fits:
            return
        name = f"{type(self).__name__}: parameter {index} of group {group_index}, of shape {tuple(param.shape)},"
        if param.dtype not in _DTYPES:
            raise RuntimeError(f"{name} is {param.dtype}: expected float16, bfloat16 or float32. Use torch.optim for "
                               "it, or model.float()")
        if not whole:
            raise RuntimeError(f"{name} is sharded (a DTensor), and this optimizer needs norms of whole parameters: "
                               "use FusedAdam or torch.optim.AdamW with sharded models")
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{name} has a sparse gradient, which this optimizer does not support: use "
                               "torch.optim.SparseAdam or SGD for it, or build the embedding with sparse=False")
        raise RuntimeError(f"{name} has a gradient of {grad.dtype}: expected float16, bfloat16 or float32")

    def _tell_amp(self, batches: list[Batch]) -> None:
        amp_step = getattr(self, "_amp_step", None)
        if amp_step is not None:
            amp_step.note_written([owner for batch in batches if batch.model_params for owner in batch.owners])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            # Apex counted steps for the whole group.
            group_step = group.pop("step", None)
            for param in group["params"]:
                param_state = self.state.get(param)
                if param_state and (group_step is not None or "step" in param_state):
                    step = param_state.get("step", group_step)
                    param_state["step"] = torch.as_tensor(step, dtype=torch.float32).to(param.device).reshape(())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, of torch's optimizer of the same rule, or of Apex's."""
        super().load_state_dict(state_dict)
        # torch gives state the parameter's dtype; that of half parameters is FP32 here.
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for index, param in zip(saved, params):
            for key, value in state_dict["state"].get(index, {}).items():
                if param.dtype in _HALF_TYPES and isinstance(value, Tensor) and value.is_floating_point():
                    self.state[param][key] = value.detach().to(param.device, torch.float32, copy=True)


def zeros_like(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)


def new_step(param: Tensor) -> Tensor:
    """A parameter's step count, where the kernels can read and move it."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def _pick(values: list[Any], positions: list[int]) -> list[Any]:
    return [values[position] for position in positions]


def _grads(tensors: list[Tensor]) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors] if is_compiling() else get_grads(tensors)


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """The shards that this rank holds, where tensors are DTensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensors
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def check_options(optimizer: str, betas: tuple[float, float] | None = None, **not_negative: Any) -> None:
    """Raises TypeError for an option that is not a number, and ValueError for one out of its range.

    Options are at least 0; betas are two numbers in [0, 1). Tensors are not read: that would wait for their device.
    """
    for name, value in not_negative.items():
        if isinstance(value, Tensor):
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{optimizer}: {name} must be a number, got {value!r}")
        if not value >= 0:
            raise ValueError(f"{optimizer}: {name} must be at least 0, got {value!r}")
    if betas is not None and (not isinstance(betas, (list, tuple)) or len(betas) != 2):
        raise TypeError(f"{optimizer}: betas must be two numbers, got {betas!r}")
    for index, beta in enumerate(betas or ()):
        if not 0 <= beta < 1:
            raise ValueError(f"{optimizer}: betas[{index}] must be at least 0 and below 1, got {beta!r}")
