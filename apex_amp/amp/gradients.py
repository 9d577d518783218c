"""The gradients of one optimizer between two steps: set aside, unscaled, accumulated, put back after an exception."""
from __future__ import annotations

import warnings
from itertools import chain
from typing import TYPE_CHECKING, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._C import (are_first, get_grads, same_grads, same_objects, set_grads, share_grads, sort_grads, take_grads,
                  versions)
from ..multi_tensor import multi_tensor_axpby, multi_tensor_check, multi_tensor_scale
from .master_weights import MasterWeights

if TYPE_CHECKING:
    from .scaler import LossScaler

_HAS_DISTRIBUTED = dist.is_available()

# Tensors, and for each, in one float32 tensor, whether its gradient was found not to be finite.
Flags = tuple[Sequence[Tensor], Tensor]


class ScaledBy:
    """The scale that gradients left in `.grad` still carry."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scale = scaler.scale_tensor.clone()
        self._version = scaler.scale_tensor._version

    def is_current(self, scaler: LossScaler) -> bool:
        """True when `scaler` still has this scale, known without reading it from the device."""
        return scaler is self.scaler and scaler.scale_tensor._version == self._version


class Gradients:
    """What the backwards since the last step left for one optimizer.

    The backward writes the gradients of `carriers`, the optimizer reads those of `holders`. A parameter that the
    optimizer updates itself is both; of a model parameter with an FP32 master, the master is the holder. Outside a
    scale_loss block both have one unscaled gradient (`carrier.grad is holder.grad`), so that clipping, zeroing or
    editing either is the same thing. Inside a block the backward writes fresh, scaled gradients.

    While gradients are left scaled, the carriers have those, and the masters what had been unscaled before.

    With `materialize` False a block's low-precision gradients are only checked, and stay scaled in the carriers for a
    step that reads them there; the masters have none. Whatever else than that step comes next, `materialize_masters`
    goes first.
    """

    def __init__(self, masters: MasterWeights | None, materialize: bool = True) -> None:
        self.masters = masters
        self.left_scaled: ScaledBy | None = None
        self._materialize = materialize
        # The scale of gradients that the masters don't have, those gradients, and their versions.
        self._unmaterialized: tuple[ScaledBy, list[Tensor], list[int]] | None = None
        # What each model parameter and its master shared when this was last looked at.
        self._shared: list[Tensor | None] = []
        # How many holders got no gradient in the last block.
        self.missing = 0
        # Small FP32 gradients to be written again, once nobody else has them.
        self._spares: list[Tensor | None] = []
        # What the optimizer's groups held when these were listed from them; see `_list_parameters`.
        self._groups: list[list[Tensor]] = []
        self._own = 0
        self._carriers: list[Tensor] = []
        self._holders: list[Tensor] = []
        self._forget_block()

    # --- the scale_loss window, in the order of its calls -------------------------------------------------------------

    def catch_up(self) -> None:
        """Before a block: does to the masters' gradients whatever is still to be done since the last one."""
        self.materialize_masters()
        self.reconcile()

    def open(self, param_groups: list[dict], scaler: LossScaler, skip_is_pending: bool,
             taken: set[int] | None = None) -> None:
        """Before the backward: sets earlier gradients aside, so that the backward starts from none; after `catch_up`.

        Args:
            skip_is_pending: earlier gradients are known not to be finite and will not be used: where they would have to
                be mixed with new ones they are dropped, so that one overflow does not count twice.
            taken: ids of the carriers that another optimizer of this block has; receives those of this one.
        """
        self._skip_is_pending = skip_is_pending
        self._list_parameters(param_groups, taken)
        self._set_aside = take_grads(self._carriers)
        if taken is None and self.left_scaled is None:
            self._shared = self._set_aside[self._own:]
        if is_distributed():
            self._leave_in_place(scaler)

    def clear_set_aside(self, set_to_none: bool, parameters: Iterable[Tensor] | None = None) -> None:
        """zero_grad() inside a block, for all carriers or for those among `parameters`: nothing earlier is kept."""
        chosen = None if parameters is None else set(map(id, parameters))
        for i, grad in enumerate(self._set_aside):
            if grad is not None and (chosen is None or id(self._carriers[i]) in chosen):
                if set_to_none:
                    self._set_aside[i] = None
                else:
                    grad.detach().zero_()

    def put_back(self, error: BaseException) -> None:
        """After an exception: gradients exactly as before the block."""
        keep = is_distributed()
        for carrier, grad in zip(self._carriers, self._set_aside):
            if grad is not None or not keep:
                carrier.grad = grad
        if keep:
            note = ("apex_amp: the backward stopped half-way under torch.distributed, where gradients cannot be put "
                    "back: call zero_grad() before the next iteration")
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                warnings.warn(note)
        self._forget_block()

    @torch.no_grad()
    def keep_scaled(self, scaler: LossScaler) -> None:
        """Leaves this backward's gradients scaled in `.grad`, merged with those that a later `unscale` must finish too.

        Earlier gradients that are unscaled already are merged only where the optimizer updates the parameter itself;
        masters go on holding theirs.
        """
        if self.left_scaled is not None:
            merged, factor = self._left_scaled_positions(), scaler.scale_tensor / self.left_scaled.scale
        else:
            merged, factor = [], scaler.scale_tensor
            if not self._skip_is_pending:
                merged = [i for i, grad in enumerate(self._set_aside[:self._own]) if grad is not None]
        carriers = [self._carriers[i] for i in merged]
        _accumulate(carriers, [self._set_aside[i] for i in merged], [carrier.grad for carrier in carriers], factor,
                    torch.zeros_like(scaler.found_inf))
        # A parameter that no such gradient reached shows its master's again, so that clearing it is seen.
        for carrier, holder in zip(self._carriers[self._own:], self._holders[self._own:]):
            if carrier.grad is None:
                carrier.grad = holder.grad
        self.left_scaled = ScaledBy(scaler)
        self._forget_block()

    def unscale(self, scaler: LossScaler) -> list[Flags]:
        """Adds this backward's unscaled gradients to what was there before.

        Raises `scaler.found_inf` where a gradient is not finite; returns for whom. A scale of 1 checks nothing.
        """
        found_inf = torch.zeros_like(scaler.found_inf) if scaler.is_identity else scaler.found_inf
        new, earlier, flags = get_grads(self._carriers), self._set_aside, []
        if self.left_scaled is not None:
            flags = self._finish_left_scaled(found_inf)
            earlier = [holder.grad if i >= self._own or grad is not None else None
                       for i, (holder, grad) in enumerate(zip(self._holders, earlier))]
            self.left_scaled = None
        elif self._may_stay_low_precision(new, earlier):
            flags = self._only_check(new[self._own:], scaler, found_inf)
            new, earlier = new[:self._own], earlier[:self._own]
        if scaler.is_identity:
            new[:self._own] = [None if before is None else grad for grad, before in zip(new[:self._own], earlier)]
        flags += _accumulate(self._holders[:len(new)], new, earlier, scaler.inv_scale(), found_inf, self._spares)
        self.missing = len(self._holders) - sum(len(holders) for holders, _ in flags)
        if self._unmaterialized is None:
            self._share()
        _reduce_over_meshes(self._holders, found_inf)
        self._forget_block()
        return flags

    # --- between the blocks -------------------------------------------------------------------------------------------

    def reconcile(self) -> list[Tensor]:
        """Applies to the masters what was done to the gradients since the last block: cleared, replaced, edited.

        Returns the model parameters whose gradient came from a backward outside any scale_loss block; it is taken as it
        is.
        """
        if self.masters is None or self._unmaterialized is not None:
            return []
        parameters, masters = self.masters.model_params, self.masters.masters
        if same_grads(parameters, masters):
            return []
        self._shared += [None] * (len(masters) - len(self._shared))
        grads, master_grads, outside = get_grads(parameters), get_grads(masters), []
        for i, (grad, shared, master_grad) in enumerate(zip(grads, self._shared, master_grads)):
            if grad is shared and grad is master_grad:
                continue
            if grad is shared:
                parameters[i].grad = self._shared[i] = master_grad
            elif grad is None:
                masters[i].grad = self._shared[i] = None
            elif self.left_scaled is None:
                if grad.dtype == parameters[i].dtype:
                    outside.append(parameters[i])
                parameters[i].grad = masters[i].grad = self._shared[i] = grad.float()
            else:
                self._shared[i] = master_grad
        return outside

    def clear_masters(self) -> None:
        """Drops the masters' gradients after a step; the model parameters keep showing theirs until the next backward.

        Those of masters that another optimizer has too stay for its step.
        """
        if self._unmaterialized is not None:
            self._unmaterialized = None
            set_grads(self.masters.model_params)
        if self.masters is not None:
            set_grads(self.masters.unshared())

    def clear_model(self, set_to_none: bool) -> None:
        """The model parameters' part of zero_grad: their masters' part is the optimizer's own.

        Inside a block, what was set aside is cleared too.
        """
        self.left_scaled = None
        self.clear_set_aside(set_to_none)
        if self.masters is None:
            return
        if set_to_none:
            self._unmaterialized = None
        self.materialize_masters()
        if set_to_none:
            self._shared = []
            set_grads(self.masters.model_params)
        else:
            with torch.no_grad():
                for parameter in self.masters.model_params:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            self.masters.take_zeroed_grads(self.masters.model_params)

    def materialize_masters(self) -> None:
        """Gives the masters the gradients that the last block only checked."""
        if self._unmaterialized is None:
            return
        inv_scale = self.inv_scale()
        self._unmaterialized = None
        grads = get_grads(self.masters.model_params)
        _accumulate(self.masters.masters, grads, [None] * len(grads), inv_scale, torch.zeros_like(inv_scale))
        self._share()

    def inv_scale(self) -> Tensor | None:
        """What a step has to multiply the model parameters' gradients by; None: the masters have theirs.

        Raises RuntimeError if gradients were written meanwhile: whoever did it, like
        clip_grad_norm_(model.parameters()), met scaled values.
        """
        if self._unmaterialized is None:
            return None
        left, grads, seen = self._unmaterialized
        if versions(grads) != seen:
            raise RuntimeError("the model's gradients were written while they still carried the loss scale, because "
                               "the optimizer has materialize_master_grads=False: clip or edit the gradients of "
                               "amp.master_params(optimizer) instead, or leave materialize_master_grads at True")
        return left.scale.reciprocal()

    def __getstate__(self) -> dict:
        self.materialize_masters()
        return {**self.__dict__, "_spares": [], "_groups": []}

    def culprits(self, flags: list[Flags]) -> list[Tensor]:
        """The model's parameters that `flags` say have an inf or NaN in their gradient, each once."""
        pairs = () if self.masters is None else zip(self.masters.masters, self.masters.model_params)
        model_params = {id(master): parameter for master, parameter in pairs}
        found = [model_params.get(id(holder), holder) for holders, per_holder in flags
                 for holder, flag in zip(holders, per_holder.tolist()) if flag]
        return list({id(parameter): parameter for parameter in found}.values())

    # --- internals ----------------------------------------------------------------------------------------------------

    def _list_parameters(self, param_groups: list[dict], taken: set[int] | None) -> None:
        """Fills `_carriers` and `_holders`: first the `_own` parameters that are both, then those with a master."""
        groups = [group["params"] for group in param_groups]
        if taken is None and len(groups) == len(self._groups) and all(map(same_objects, groups, self._groups)):
            return
        own = list(chain.from_iterable(groups))
        carriers: list[Tensor] = []
        holders: list[Tensor] = []
        if self.masters is not None:
            carriers, holders = self.masters.model_params, self.masters.masters
            if same_objects(own, holders):
                own = []
            else:
                masters = set(map(id, holders))
                own = [parameter for parameter in own if id(parameter) not in masters]
        if taken is not None:
            own = [parameter for parameter in own if id(parameter) not in taken]
            pairs = [(carrier, holder) for carrier, holder in zip(carriers, holders) if id(carrier) not in taken]
            carriers, holders = [carrier for carrier, _ in pairs], [holder for _, holder in pairs]
            taken.update(map(id, own), map(id, carriers))
        self._groups = [list(parameters) for parameters in groups] if taken is None else []
        self._own, self._carriers, self._holders = len(own), own + carriers, own + holders

    def _forget_block(self) -> None:
        self._set_aside: list[Tensor | None] = []
        self._skip_is_pending = False

    def _may_stay_low_precision(self, new: list[Tensor | None], earlier: list[Tensor | None]) -> bool:
        """Whether a step can read the pairs' new gradients where they are: the first of its kind, and all there is."""
        if self._materialize or self.masters is None or len(self.masters.unshared()) < len(self.masters.masters):
            return False
        return len(self._carriers) - self._own == len(self.masters.masters) \
            and are_first(new[self._own:], earlier[self._own:])

    def _only_check(self, new: list[Tensor | None], scaler: LossScaler, found_inf: Tensor) -> list[Flags]:
        holders = [holder for holder, grad in zip(self._holders[self._own:], new) if grad is not None]
        grads = [grad for grad in new if grad is not None]
        per_tensor = found_inf.new_zeros(len(grads))
        if not scaler.is_identity:
            multi_tensor_check(grads, found_inf, per_tensor)
        self._unmaterialized = ScaledBy(scaler), grads, versions(grads)
        return [(holders, per_tensor)]

    def _left_scaled_positions(self) -> list[int]:
        """Where a gradient that was set aside is one that an earlier block left scaled."""
        return [i for i, grad in enumerate(self._set_aside)
                if grad is not None and (i < self._own or grad is not self._holders[i].grad)]

    def _finish_left_scaled(self, found_inf: Tensor) -> list[Flags]:
        """Unscales what earlier blocks left scaled, into the holders' gradients."""
        positions = self._left_scaled_positions()
        holders = [self._holders[i] for i in positions]
        unscaled = [None if i < self._own else self._holders[i].grad for i in positions]
        return _accumulate(holders, [self._set_aside[i] for i in positions], unscaled,
                           self.left_scaled.scale.reciprocal(), found_inf)

    def _share(self) -> None:
        if self.masters is not None:
            self._shared = share_grads(self.masters.masters, self.masters.model_params)

    @torch.no_grad()
    def _leave_in_place(self, scaler: LossScaler) -> None:
        """With torch.distributed initialized: earlier gradients stay in `.grad`, multiplied by the current scale.

        A reducer must still see what earlier backwards left there. The FP32 gradients that model parameters share with
        their masters are no reducer's: those are set aside as ever.
        """
        if self.left_scaled is None:
            positions = [i for i, grad in enumerate(self._set_aside[:self._own]) if grad is not None]
        else:
            positions = self._left_scaled_positions()
        carriers, grads = [self._carriers[i] for i in positions], [self._set_aside[i] for i in positions]
        set_grads(carriers, grads)
        for i in positions:
            self._set_aside[i] = None
        if not grads or (self.left_scaled is not None and self.left_scaled.is_current(scaler)):
            return
        if self._skip_is_pending:
            for grad in grads:
                grad.zero_()
            return
        factor = scaler.scale_tensor if self.left_scaled is None else scaler.scale_tensor / self.left_scaled.scale
        _accumulate(carriers, grads, [None] * len(grads), factor,
                    torch.zeros_like(scaler.found_inf))
        if self.left_scaled is not None:
            self.left_scaled = ScaledBy(scaler)


def is_distributed() -> bool:
    return _HAS_DISTRIBUTED and dist.is_initialized()


def _accumulate(holders: Sequence[Tensor], grads: Sequence[Tensor | None], earlier: Sequence[Tensor | None],
                factor: Tensor, found_inf: Tensor, spares: list[Tensor | None] | None = None) -> list[Flags]:
    """holder.grad = earlier + grad * factor in the holder's dtype, with one pass over each gradient.

    Sums are written into `earlier`, and products of the same dtype into `grad`, in place. Raises `found_inf` where
    `grad` is not finite. Where there is no `grad`, the holder has `earlier`. `spares`, kept by the caller for its next
    call, saves small tensors from being made again.
    """
    to_scale, results, to_add, others, kept = sort_grads(grads, earlier, holders, [] if spares is None else spares)
    flags = [((holders[i],), _accumulate_one(holders[i], grads[i], earlier[i], factor, found_inf)) for i in others]
    if to_scale:
        flags.append(_scale(_at(to_scale, holders), _at(to_scale, grads), results, factor, found_inf))
    if to_add:
        flags.append(_add(_at(to_add, holders), _at(to_add, grads), _at(to_add, earlier), factor, found_inf))
    if kept:
        set_grads(_at(kept, holders), _at(kept, earlier))
    return flags


def _at(positions: Sequence[int], values: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The values at ascending `positions`."""
    return values if len(positions) == len(values) else [values[i] for i in positions]


def _scale(holders: Sequence[Tensor], grads: Sequence[Tensor], results: Sequence[Tensor], factor: Tensor,
           found_inf: Tensor) -> Flags:
    per_tensor = found_inf.new_zeros(len(grads))
    multi_tensor_scale(_local(grads), _local(results), found_inf, factor, per_tensor)
    set_grads(holders, results)
    return holders, per_tensor


def _add(holders: Sequence[Tensor], grads: Sequence[Tensor], earlier: Sequence[Tensor], factor: Tensor,
         found_inf: Tensor) -> Flags:
    per_tensor = found_inf.new_zeros(len(grads))
    sums = _local(earlier)
    multi_tensor_axpby(_local(grads), sums, sums, found_inf, factor, 1.0, "x", per_tensor)
    set_grads(holders, earlier)
    return holders, per_tensor


def _accumulate_one(holder: Tensor, grad: Tensor, before: Tensor | None, factor: Tensor, found_inf: Tensor) -> Tensor:
    """The same for what the kernels do not read: sparse, float64 and complex gradients, and those with a graph."""
    wide = torch.promote_types(holder.dtype, torch.float32)
    with torch.set_grad_enabled(grad.requires_grad):
        values = (grad._values() if grad.is_sparse else grad).to(wide) * factor.to(grad.device)
        flag = (~torch.isfinite(values.detach())).any().to(found_inf.device, torch.float32)
        result = values.to(holder.dtype)
        if grad.is_sparse:
            result = torch.sparse_coo_tensor(grad._indices(), result, grad.shape, check_invariants=False).coalesce()
        if before is not None:
            result = result + before if before.is_sparse and not result.is_sparse else before + result
        holder.grad = result
    torch.maximum(found_inf, flag, out=found_inf)
    return flag.reshape(1)


def _local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The shards that this rank holds, where tensors are DTensors."""
    if not is_distributed():
        return tensors
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _reduce_over_meshes(parameters: list[Tensor], found_inf: Tensor) -> None:
    """Lets all ranks that share sharded parameters (FSDP2) agree on an overflow."""
    if not is_distributed():
        return
    meshes = {parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")}
    for mesh in sorted(meshes, key=str):
        for dimension in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
