"""FP32 master weights: pairs of a low-precision model parameter and the FP32 tensor that the optimizer trains."""
from __future__ import annotations

import copy
import struct
import weakref
from typing import Any, ClassVar, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from .._C import note_equal, same_objects, written_pairs
from ..multi_tensor import multi_tensor_copy


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The FP32 master of a model parameter; None for a parameter that is its own master."""
    return getattr(parameter, "_amp_master", None)


def is_master(tensor: torch.Tensor) -> bool:
    return any(masters.model_params_of([tensor])[0] is not None for masters in MasterWeights.alive)


class MasterWeights:
    """The pairs of one optimizer, in the order of its param_groups.

    A pair is kept equal by version counters: whichever side was written since the last `sync` goes over to the other,
    the master when both were. So an optimizer step, `load_state_dict`, an in-place write into a `state_dict()` value
    (which aliases the master) and a write into the model parameter all reach the other side. Elements of a model
    parameter that still are their master's rounded value leave it exact. Writes through `.data` move no counter: `pull`
    takes the model's values whatever the counters say.
    """

    # Whether some master in this process has ever belonged to two optimizers; such a one has `_amp_is_shared`.
    any_is_shared = False
    alive: ClassVar[weakref.WeakSet[MasterWeights]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.model_params: list[nn.Parameter] = []
        self.masters: list[nn.Parameter] = []
        self._index: dict[int, int] = {}
        self._master_index: dict[int, int] = {}
        # The versions (int64) of each pair, master's and model parameter's, when it was equal last.
        self._seen = bytearray()
        MasterWeights.alive.add(self)

    def add(self, parameter: nn.Parameter, fp32_value: torch.Tensor | None = None) -> nn.Parameter:
        """Makes and returns the master of `parameter`; it takes over the storage of `fp32_value` where given."""
        master = master_of(parameter)
        if master is not None:
            for other in MasterWeights.alive:
                other.sync([parameter])
            master._amp_is_shared = MasterWeights.any_is_shared = True
        else:
            # Not detach(): it would share the version counter of what it was detached from.
            master = nn.Parameter(parameter.data.float() if fp32_value is None else fp32_value.data)
        self._append(parameter, master)
        return master

    def _append(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        self._index[id(parameter)] = self._master_index[id(master)] = len(self.model_params)
        self.model_params.append(parameter)
        self.masters.append(master)
        # The parameter finds its master, and carries the master's FP32 gradient as its own.
        parameter._amp_master = master
        parameter.grad_dtype = None
        self._seen += struct.pack("qq", master._version, parameter._version)

    def unshared(self) -> list[nn.Parameter]:
        """The masters that no other optimizer has."""
        if not MasterWeights.any_is_shared:
            return self.masters
        return [master for master in self.masters if not hasattr(master, "_amp_is_shared")]

    def detach(self) -> None:
        """Parts the pairs: the model parameters forget their masters and carry gradients of their own dtype again."""
        for parameter in self.model_params:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            if hasattr(parameter, "_amp_master"):
                del parameter._amp_master

    def sync(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Brings both sides together, of all pairs or of those of `parameters`.

        Costs two integer comparisons a pair when nothing was written.
        """
        positions = None if parameters is None else self._positions(parameters)
        written, model_written = written_pairs(self.masters, self.model_params, self._seen, positions)
        if written:
            self._push(written)
        if model_written:
            self._pull(model_written)

    def push(self) -> None:
        """Overwrites the model's values by the masters', whatever the counters say."""
        self._push(None)

    def pull(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the model's values of `parameters` over into their masters."""
        self._pull(self._positions(parameters))

    @torch.no_grad()
    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Gives every rank of `group` the masters of its first one, exactly, and the model parameters with them."""
        for master in self.masters:
            dist.broadcast(master, dist.get_global_rank(group, 0), group)
        self.push()

    def model_params_of(self, masters: list[torch.Tensor]) -> list[nn.Parameter | None]:
        """The low-precision side of each one's pair; None for a tensor that is no master."""
        if self._are_all(masters):
            return self.model_params
        positions = map(self._master_index.get, map(id, masters))
        return [None if position is None else self.model_params[position] for position in positions]

    def note_written(self, masters: list[torch.Tensor]) -> None:
        """Takes the pairs of `masters` for equal: an optimizer's kernel has just written both sides."""
        self._note_equal(None if self._are_all(masters) else [self._master_index[id(master)] for master in masters])

    def _are_all(self, masters: list[torch.Tensor]) -> bool:
        return same_objects(masters, self.masters)

    def take_zeroed_grads(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives masters without gradients, which a step drops, the zeros that zero_grad left in the model."""
        for position in self._positions(parameters):
            grad, master = self.model_params[position].grad, self.masters[position]
            if master.grad is None and grad is not None and grad.dtype == master.dtype:
                master.grad = grad

    def follow(self) -> None:
        """Moves the masters to where the model has been moved."""
        for parameter, master in zip(self.model_params, self.masters):
            if master.device != parameter.device:
                master.data = master.data.to(parameter.device)

    def _positions(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        return [self._index[id(parameter)] for parameter in parameters if id(parameter) in self._index]

    def _pairs(self, positions: list[int] | None) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        if positions is None:
            return self.masters, self.model_params
        return [self.masters[i] for i in positions], [self.model_params[i] for i in positions]

    def _push(self, positions: list[int] | None) -> None:
        with torch.set_grad_enabled(False):  # half the cost of no_grad()
            multi_tensor_copy(*self._pairs(positions))
        self._note_equal(positions)

    def _pull(self, positions: list[int]) -> None:
        with torch.no_grad():
            for master, parameter in zip(*self._pairs(positions)):
                master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.float()))
        self._note_equal(positions)

    def _note_equal(self, positions: list[int] | None) -> None:
        note_equal(self.masters, self.model_params, self._seen, positions)
        if not MasterWeights.any_is_shared:
            return
        masters, _ = self._pairs(positions)
        for other in MasterWeights.alive:
            index = other._master_index
            note_equal(other.masters, other.model_params, other._seen,
                       [index[id(master)] for master in masters if id(master) in index])

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        self.sync()
        duplicate = memo[id(self)] = MasterWeights()
        for parameter, master in zip(self.model_params, self.masters):
            copied = copy.deepcopy(master, memo)
            if hasattr(master, "_amp_is_shared"):
                copied._amp_is_shared = True
            duplicate._append(copy.deepcopy(parameter, memo), copied)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        self.sync()
        return {"pairs": list(zip(self.model_params, self.masters))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MasterWeights.__init__(self)
        for parameter, master in state["pairs"]:
            self._append(parameter, master)


# --- state_dict of a model whose parameters have masters --------------------------------------------------------------

class FP32StateDict:
    """Lets `state_dict()` and `load_state_dict()` of a low-precision model, and of each of its submodules, speak FP32.

    `masters`: the model's own list of MasterWeights, which grows as optimizers are wrapped.
    """

    def __init__(self, masters: list[MasterWeights]) -> None:
        self._masters = masters

    def register(self, model: nn.Module) -> None:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # it can have no hooks: its parent's serve it
                module._register_state_dict_hook(self.after_state_dict)
                module.register_load_state_dict_pre_hook(self.before_load_state_dict)

    def after_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str,
                         local_metadata: dict) -> None:
        """Gives FP32: the masters themselves where a parameter has one, else the low-precision value in float.

        With keep_vars=True the entries are the module's own tensors and stay so.
        """
        for masters in self._masters:
            masters.sync(parameter for _, parameter in _own_tensors(module) if parameter is not None)
        for name, tensor in _own_tensors(module):
            key = prefix + name
            if tensor is None or key not in state_dict or state_dict[key] is tensor:
                continue
            master = master_of(tensor)
            if master is not None:
                state_dict[key] = master.detach()
            elif tensor.dtype in (torch.float16, torch.bfloat16):
                state_dict[key] = state_dict[key].float()

    def before_load_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict,
                               strict: bool, missing_keys: list, unexpected_keys: list, error_msgs: list) -> None:
        """Loads a checkpoint's FP32 values into the masters, exactly; torch then loads the parameters themselves."""
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the low-precision parameters that amp.initialize made, "
                "and leave their FP32 masters behind: call it without assign, or before amp.initialize.")
        for name, tensor in _own_tensors(module):
            value = state_dict.get(prefix + name)
            master = None if tensor is None else master_of(tensor)
            if master is not None and isinstance(value, torch.Tensor) and value.shape == master.shape:
                with torch.no_grad():
                    master.copy_(value)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, tensor) of a module's own parameters and buffers, and of all that is inside its scripted children."""
    for store in (module._parameters, module._buffers):
        yield from store.items()
    for name, child in module._modules.items():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.named_parameters(name)
            yield from child.named_buffers(name)
