"""FP32 master weights: pairs of a low-precision model parameter and the FP32 tensor that the optimizer really trains."""
from __future__ import annotations

import copy
from typing import Any, Iterable

import torch
from torch import nn

from .._C import versions
from ..multi_tensor import multi_tensor_copy


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The FP32 master of a model parameter; None for a parameter that is its own master."""
    return getattr(parameter, "_amp_master", None)


class MasterWeights:
    """The pairs of one optimizer, in the order of its param_groups.

    A pair is kept equal by version counters: whichever side was written since the last `sync` overwrites the other, the
    master when both were. So an optimizer step, `load_state_dict`, an in-place write into a `state_dict()` value (which
    aliases the master) and a write into the model parameter all reach the other side. Writes through `.data` move no
    counter: `pull` takes the model's values whatever the counters say.
    """

    # Whether some master belongs to two optimizers; such a one has `_amp_is_shared`.
    any_is_shared = False

    def __init__(self) -> None:
        self.model_params: list[nn.Parameter] = []
        self.masters: list[nn.Parameter] = []
        self._model_versions: list[int] = []
        self._master_versions: list[int] = []

    def add(self, parameter: nn.Parameter, fp32_value: torch.Tensor | None = None) -> nn.Parameter:
        """Makes and returns the master of `parameter`; it takes over the storage of `fp32_value` where that is given."""
        existing = master_of(parameter)
        if existing is not None:
            master = existing
            master._amp_is_shared = MasterWeights.any_is_shared = True
        else:
            # .data: a detached view would share its version counter with the parameter it is to be compared with.
            value = parameter.data.float() if fp32_value is None else fp32_value.data
            master = nn.Parameter(value, requires_grad=True)
        self.model_params.append(parameter)
        self.masters.append(master)
        self.attach()
        self._model_versions.append(parameter._version)
        self._master_versions.append(master._version)
        return master

    def attach(self) -> None:
        """Lets every parameter find its master and carry the master's FP32 gradient as its own."""
        for parameter, master in zip(self.model_params, self.masters):
            parameter._amp_master = master
            parameter.grad_dtype = None

    def detach(self) -> None:
        for parameter in self.model_params:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            if hasattr(parameter, "_amp_master"):
                del parameter._amp_master

    @torch.no_grad()
    def sync(self) -> None:
        """Brings both sides of every pair together; costs two integer comparisons a pair when nothing was written."""
        master_versions, model_versions = versions(self.masters), versions(self.model_params)
        if master_versions == self._master_versions and model_versions == self._model_versions:
            return
        pushed = [i for i, version in enumerate(master_versions) if version != self._master_versions[i]]
        moved = set(pushed)
        pulled = [i for i, version in enumerate(model_versions) if version != self._model_versions[i] and i not in moved]
        multi_tensor_copy([self.masters[i] for i in pushed], [self.model_params[i] for i in pushed])
        multi_tensor_copy([self.model_params[i] for i in pulled], [self.masters[i] for i in pulled])
        self._note_versions()

    @torch.no_grad()
    def push(self) -> None:
        """Overwrites the model's values by the masters', whatever the counters say: fused kernels do not move them."""
        multi_tensor_copy(self.masters, self.model_params)
        self._note_versions()

    @torch.no_grad()
    def pull(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Overwrites the masters of `parameters` (default: all) by the model's values."""
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        chosen = [i for i, parameter in enumerate(self.model_params) if wanted is None or id(parameter) in wanted]
        multi_tensor_copy([self.model_params[i] for i in chosen], [self.masters[i] for i in chosen])
        self._note_versions()

    def follow(self) -> None:
        """Moves the masters to where the model has been moved."""
        for parameter, master in zip(self.model_params, self.masters):
            if master.device != parameter.device:
                master.data = master.data.to(parameter.device)

    def _note_versions(self) -> None:
        self._master_versions, self._model_versions = versions(self.masters), versions(self.model_params)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        self.sync()
        duplicate = MasterWeights()
        memo[id(self)] = duplicate
        duplicate.model_params = copy.deepcopy(self.model_params, memo)
        duplicate.masters = copy.deepcopy(self.masters, memo)
        duplicate.attach()
        duplicate._note_versions()
        return duplicate

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.attach()
        self._note_versions()


# --- state_dict of a model whose parameters have masters --------------------------------------------------------------

def state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    """Gives FP32: the masters themselves where a parameter has one, else the low-precision value in float.

    With keep_vars=True the entries are the module's own parameters and stay so.
    """
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            key = prefix + name
            if tensor is None or key not in state_dict or state_dict[key] is tensor:
                continue
            master = master_of(tensor)
            if master is not None:
                state_dict[key] = master.detach()
            elif tensor.dtype in (torch.float16, torch.bfloat16):
                state_dict[key] = state_dict[key].float()


def load_state_dict_pre_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict,
                             strict: bool, missing_keys: list, unexpected_keys: list, error_msgs: list) -> None:
    """Loads a checkpoint's FP32 values into the masters, exactly; torch then loads the parameters themselves."""
    if local_metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace the low-precision parameters that amp.initialize made and leave "
            "their FP32 masters behind; call it without assign, or before amp.initialize.")
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        master = None if parameter is None else master_of(parameter)
        if master is not None and isinstance(value, torch.Tensor) and value.shape == master.shape:
            with torch.no_grad():
                master.copy_(value)
