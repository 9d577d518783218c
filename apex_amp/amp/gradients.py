"""The gradients of one optimizer between two steps: set aside, unscaled, accumulated, put back after an exception."""
from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Iterable, Sequence

import torch
import torch.distributed as dist

from ..multi_tensor import multi_tensor_axpby, multi_tensor_scale
from .master_weights import MasterWeights

if TYPE_CHECKING:
    from .scaler import LossScaler

_KERNEL_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


class ScaledBy:
    """The scale that gradients left in `.grad` still carry."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scale = scaler.scale_tensor.clone()
        self._scaler = scaler
        self._version = scaler.scale_tensor._version

    def is_current(self, scaler: LossScaler) -> bool:
        """True when `scaler` still has this scale, known without reading it from the device."""
        return scaler is self._scaler and scaler.scale_tensor._version == self._version


class Gradients:
    """What the backwards since the last step left for one optimizer.

    `own` are parameters that the optimizer updates directly; the others are model parameters with an FP32 master. Outside a
    scale_loss block both hold unscaled gradients, and `parameter.grad is master.grad` (FP32) for the latter, so that
    clipping, zeroing or editing either is the same thing. Inside a block the backward writes fresh, scaled gradients.
    """

    def __init__(self, masters: MasterWeights | None) -> None:
        self.masters = masters
        self._aliases: list[torch.Tensor | None] = []
        self._left_scaled: ScaledBy | None = None
        self._own: list[torch.Tensor] = []
        self._set_aside_own: list[torch.Tensor | None] = []
        self._set_aside_model: list[torch.Tensor | None] = []
        self._flags: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []

    # --- the scale_loss window, in the order of its calls -------------------------------------------------------------

    def open(self, param_groups: list[dict], scaler: LossScaler, drop_earlier: bool) -> None:
        """Before the backward: sets earlier gradients aside, so that the backward starts from none.

        With torch.distributed initialized, gradients of `own` parameters stay in place, multiplied by the current scale:
        a reducer must still see what earlier backwards left there. `drop_earlier` zeroes those that are known not to be
        finite, so that one overflow does not count twice.
        """
        self.reconcile()
        self._own = self._own_params(param_groups)
        self._set_aside_model = []
        if self.masters is not None:
            parameters = self.masters.model_params
            self._set_aside_model = [parameter.grad for parameter in parameters]
            keep_in_place = self._left_scaled is not None and is_distributed()
            for parameter, grad, alias in zip(parameters, self._set_aside_model, self._aliases):
                if grad is not None and not (keep_in_place and grad is not alias):
                    parameter.grad = None
        if is_distributed():
            self._rescale_in_place(scaler, drop_earlier)
        else:
            self._set_aside_own = [parameter.grad for parameter in self._own]
            for parameter, grad in zip(self._own, self._set_aside_own):
                if grad is not None:
                    parameter.grad = None

    def put_back(self, error: BaseException) -> None:
        """After an exception: gradients exactly as before the block."""
        if self.masters is not None:
            for parameter, grad in zip(self.masters.model_params, self._set_aside_model):
                parameter.grad = grad
        if not is_distributed():
            for parameter, grad in zip(self._own, self._set_aside_own):
                parameter.grad = grad
        else:
            note = ("apex_amp: the backward stopped half-way under torch.distributed, where gradients cannot be put back: "
                    "call zero_grad() before the next iteration")
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                warnings.warn(note)
        self._forget_set_aside()

    @torch.no_grad()
    def keep_scaled(self, scaler: LossScaler) -> None:
        """Leaves this backward's gradients scaled in `.grad`, merged with those that a later `unscale` has to finish too."""
        ignored = torch.zeros_like(scaler.found_inf)
        factor = scaler.scale_tensor if self._left_scaled is None else scaler.scale_tensor / self._left_scaled.scale
        pairs = list(zip(self._own, self._set_aside_own))
        if self.masters is not None and self._left_scaled is not None:
            pairs += [(parameter, earlier) for parameter, earlier, alias in zip(
                self.masters.model_params, self._set_aside_model, self._aliases)
                if earlier is not alias and parameter.grad is not earlier]
        pairs = [(parameter, earlier) for parameter, earlier in pairs if earlier is not None]
        _accumulate([parameter for parameter, _ in pairs], [earlier for _, earlier in pairs],
                    [parameter.grad for parameter, _ in pairs], factor, ignored)
        if self.masters is not None:
            # A parameter that this backward did not reach shows its earlier gradient again, so that clearing it is seen.
            for parameter, alias in zip(self.masters.model_params, self._aliases):
                if parameter.grad is None:
                    parameter.grad = alias
        self._left_scaled = ScaledBy(scaler)
        self._forget_set_aside()

    @torch.no_grad()
    def unscale(self, scaler: LossScaler) -> None:
        """Adds this backward's unscaled gradients to what was there before; raises `scaler.found_inf` where one is not finite."""
        found_inf = torch.zeros_like(scaler.found_inf) if scaler.is_identity else scaler.found_inf
        inv_scale = scaler.inv_scale()
        self._flags = []
        new_own = [parameter.grad for parameter in self._own]
        earlier_own = self._set_aside_own or [None] * len(self._own)
        if self._left_scaled is not None and not is_distributed():
            earlier_own = self._unscale_left_scaled(found_inf)
        self._add(zip(self._own, new_own, earlier_own), inv_scale, found_inf)
        if self.masters is not None:
            self._add([(master, parameter.grad, master.grad)
                       for master, parameter in zip(self.masters.masters, self.masters.model_params)],
                      inv_scale, found_inf)
            self._share()
        self._left_scaled = None
        self._forget_set_aside()
        _reduce_over_meshes(self._own, found_inf)

    def _unscale_left_scaled(self, found_inf: torch.Tensor) -> list[torch.Tensor | None]:
        """Finishes the gradients that earlier blocks left scaled; returns those of `own` parameters."""
        inv_scale = self._left_scaled.scale.reciprocal()
        self._add([(parameter, grad, None) for parameter, grad in zip(self._own, self._set_aside_own)],
                  inv_scale, found_inf)
        if self.masters is not None:
            self._add([(master, grad, master.grad) for master, grad, alias in zip(
                self.masters.masters, self._set_aside_model, self._aliases) if grad is not alias],
                inv_scale, found_inf)
        return [None if grad is None else parameter.grad for parameter, grad in zip(self._own, self._set_aside_own)]

    def _add(self, triples: Iterable[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
             inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """holder.grad = earlier + grad * inv_scale, for every (holder, grad, earlier)."""
        present = []
        for holder, grad, earlier in triples:
            if grad is not None:
                present.append((holder, grad, earlier))
            elif earlier is not None:
                holder.grad = earlier
        if present:
            self._flags += _accumulate(*zip(*present), inv_scale, found_inf)

    # --- between the blocks -------------------------------------------------------------------------------------------

    def reconcile(self) -> list[torch.Tensor]:
        """Applies to the masters what was done to the gradients since the last block: cleared, replaced, edited.

        Returns the model parameters whose gradient came from a backward outside any scale_loss block; it is taken as it is.
        """
        if self.masters is None:
            return []
        self._aliases += [None] * (len(self.masters.masters) - len(self._aliases))
        outside = []
        for index, (parameter, master) in enumerate(zip(self.masters.model_params, self.masters.masters)):
            grad, alias = parameter.grad, self._aliases[index]
            if grad is alias and master.grad is alias:
                continue
            if grad is alias:
                parameter.grad = self._aliases[index] = master.grad
            elif grad is None:
                master.grad = self._aliases[index] = None
            elif self._left_scaled is None:
                if grad.dtype == parameter.dtype:
                    outside.append(parameter)
                parameter.grad = master.grad = self._aliases[index] = grad.float()
            else:
                self._aliases[index] = master.grad
        return outside

    def clear_masters(self) -> None:
        """Drops the masters' gradients after a step; the model parameters keep showing theirs until the next backward."""
        for master in self.masters.masters if self.masters is not None else ():
            master.grad = None

    def clear_model(self, set_to_none: bool) -> None:
        """The model parameters' part of zero_grad: their masters' part is the optimizer's own."""
        self._left_scaled = None
        if set_to_none:
            self._aliases = []
        for parameter in self.masters.model_params if self.masters is not None else ():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def culprits(self) -> list[torch.Tensor]:
        """The model's parameters in whose gradients the last `unscale` found an inf or NaN."""
        found = [holder for holders, flags in self._flags for holder, flag in zip(holders, flags.tolist()) if flag]
        model_params = {} if self.masters is None else dict(zip(map(id, self.masters.masters), self.masters.model_params))
        return [model_params.get(id(holder), holder) for holder in found]

    # --- internals ----------------------------------------------------------------------------------------------------

    def _own_params(self, param_groups: list[dict]) -> list[torch.Tensor]:
        params = [parameter for group in param_groups for parameter in group["params"]]
        if self.masters is None:
            return params
        masters = set(map(id, self.masters.masters))
        return [parameter for parameter in params if id(parameter) not in masters]

    def _share(self) -> None:
        self._aliases = [master.grad for master in self.masters.masters]
        for parameter, grad in zip(self.masters.model_params, self._aliases):
            parameter.grad = grad

    def _forget_set_aside(self) -> None:
        self._set_aside_own, self._set_aside_model = [], []

    @torch.no_grad()
    def _rescale_in_place(self, scaler: LossScaler, drop_earlier: bool) -> None:
        holders = self._own + (self.masters.model_params if self.masters is not None else [])
        grads = [holder.grad for holder in holders if holder.grad is not None]
        if not grads or (self._left_scaled is not None and self._left_scaled.is_current(scaler)):
            return
        if drop_earlier:
            torch._foreach_zero_(grads)
            return
        factor = scaler.scale_tensor if self._left_scaled is None else scaler.scale_tensor / self._left_scaled.scale
        holders = [holder for holder in holders if holder.grad is not None]
        _accumulate(holders, grads, [None] * len(grads), factor, torch.zeros_like(scaler.found_inf))
        if self._left_scaled is not None:
            self._left_scaled = ScaledBy(scaler)


def _accumulate(holders: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
                earlier: Sequence[torch.Tensor | None], factor: torch.Tensor, found_inf: torch.Tensor) -> list[tuple[Sequence[torch.Tensor], torch.Tensor]]:
    """holder.grad = earlier + grad * factor in the holder's dtype, with one pass over each gradient.

    Sums are written into `earlier`, and products of the same dtype into `grad`, in place. Raises `found_inf` where `grad` is not
    finite; returns (holders, float32 flag per holder) for the gradients that went through each pass.
    """
    first, added, others = [], [], []
    for holder, grad, before in zip(holders, grads, earlier):
        if not (_is_kernel_tensor(grad) and (before is None or _is_kernel_tensor(before))):
            others.append((holder, grad, before))
        elif before is None:
            first.append((holder, grad, grad if grad.dtype == holder.dtype else torch.empty_like(grad, dtype=holder.dtype)))
        else:
            added.append((holder, grad, before))
    flags = []
    for triples in (first, added):
        if not triples:
            continue
        targets, sources, results = zip(*triples)
        per_tensor = torch.zeros(len(triples), device=found_inf.device)
        if triples is first:
            multi_tensor_scale(_local(sources), _local(results), found_inf, factor, per_tensor)
        else:
            multi_tensor_axpby(_local(sources), _local(results), _local(results), found_inf, factor, 1.0, "x", per_tensor)
        for target, result in zip(targets, results):
            if target.grad is not result:
                target.grad = result
        flags.append((targets, per_tensor))
    for holder, grad, before in others:
        flags.append(((holder,), _accumulate_one(holder, grad, before, factor, found_inf)))
    return flags


def _accumulate_one(holder: torch.Tensor, grad: torch.Tensor, before: torch.Tensor | None, factor: torch.Tensor,
                    found_inf: torch.Tensor) -> torch.Tensor:
    """The same for what the kernels do not read: sparse, float64 and complex gradients, and those with a graph of their own."""
    with torch.set_grad_enabled(grad.requires_grad):
        if grad.is_sparse:
            values = grad._values().to(holder.dtype) * factor.to(grad.device, holder.dtype)
            result = torch.sparse_coo_tensor(grad._indices(), values, grad.shape).coalesce()
        else:
            values = result = grad.to(holder.dtype) * factor.to(grad.device, holder.real.dtype)
        flag = (~torch.isfinite(values.detach())).any().to(found_inf.device, torch.float32).reshape(1)
        holder.grad = result if before is None else before + result
    torch.maximum(found_inf, flag, out=found_inf)
    return flag


def _is_kernel_tensor(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _KERNEL_DTYPES and not tensor.is_sparse and not tensor.requires_grad


def _local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The shards that this rank holds, where tensors are DTensors."""
    if not is_distributed():
        return list(tensors)
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _reduce_over_meshes(parameters: list[torch.Tensor], found_inf: torch.Tensor) -> None:
    """Lets all ranks that share sharded parameters (FSDP2) agree on an overflow."""
    if not is_distributed():
        return
    meshes = {parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")}
    for mesh in sorted(meshes, key=str):
        for dimension in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
