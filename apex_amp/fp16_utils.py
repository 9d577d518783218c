"""Apex's `apex.fp16_utils`: mixed precision by hand, as before amp.initialize, over the same engine.

`FP16_Optimizer` is the O2 machinery of apex_amp.amp for a model that is half already; the functions convert models
and copy between half parameters and FP32 masters.
"""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from .amp._state import Setup
from .amp.amp_optimizer import Stash, wrap_optimizer
from .amp.arguments import OPT_LEVELS
from .amp.master_weights import MasterWeights
from .amp.scale_context import scale_loss
from .amp.scaler import LossScaler as AmpLossScaler
from .multi_tensor import multi_tensor_copy, multi_tensor_scale, update_scale_

__all__ = [
    "BN_convert_float", "network_to_half", "prep_param_lists", "model_grads_to_master_grads",
    "master_params_to_model_params", "tofp16", "to_python_float", "clip_grad_norm", "convert_module",
    "convert_network", "FP16Model", "FP16_Optimizer", "LossScaler", "DynamicLossScaler",
]


# --- models in half ---------------------------------------------------------------------------------------------------

class tofp16(nn.Module):
    """A module whose forward is `input.half()`."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Turn every affine BatchNorm in `module` back to float32, in place."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in half except its BatchNorms, converted in place, behind a module that casts the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating parameters, their gradients and the buffers of `module` itself, not of its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if gradient is None else gradient.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert all of `network` except affine BatchNorms, in place."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """`network` converted to half except its BatchNorms; forward casts its positional inputs to half."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(value.half() for value in inputs))


# --- masters by hand --------------------------------------------------------------------------------------------------

def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The trainable parameters of `model` and FP32 masters for them.

    Args:
        model: the model, in half.
        flat_master: one flat master instead of one per parameter; the parameters must share a dtype.

    Returns:
        (model_params, master_params), for `model_grads_to_master_grads` and `master_params_to_model_params`.

    Raises:
        TypeError: `flat_master` with parameters of several dtypes.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [param.detach().clone().float().requires_grad_() for param in model_params]
    dtypes = {param.dtype for param in model_params}
    if len(dtypes) > 1:
        raise TypeError("prep_param_lists: flat_master=True needs parameters of one dtype, "
                        f"got {sorted(map(str, dtypes))}; use flat_master=False")
    flat = nn.Parameter(torch._utils._flatten_dense_tensors([param.detach() for param in model_params]).float())
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(model_params: Sequence[Tensor], master_params: Sequence[Tensor],
                                flat_master: bool = False) -> None:
    """Copy the gradients of `model_params` to those of `master_params`; None where a parameter has none."""
    if flat_master:
        masters = torch._utils._unflatten_dense_tensors(master_params[0].grad, model_params)
        multi_tensor_copy([param.grad for param in model_params if param.grad is not None], list(masters))
        return
    for model_param, master in zip(model_params, master_params):
        if model_param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = torch.empty_like(master, requires_grad=False)
    pairs = [(p.grad, m.grad) for p, m in zip(model_params, master_params) if p.grad is not None and m.grad is not None]
    multi_tensor_copy([source for source, _ in pairs], [target for _, target in pairs])


@torch.no_grad()
def master_params_to_model_params(model_params: Sequence[Tensor], master_params: Sequence[Tensor],
                                  flat_master: bool = False) -> None:
    """Copy the values of `master_params` into `model_params`, rounding to their dtype."""
    if flat_master:
        master_params = torch._utils._unflatten_dense_tensors(master_params[0], model_params)
    multi_tensor_copy(list(master_params), list(model_params))


def to_python_float(value: Tensor | Sequence[float]) -> float:
    """The number in a tensor of one element, or the first item of a sequence."""
    return value.item() if hasattr(value, "item") else value[0]


# --- loss scalers by hand ---------------------------------------------------------------------------------------------

class LossScaler:
    """A static loss scale for hand-written loops."""

    def __init__(self, scale: float = 1):
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Always False: a static scale doesn't look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    def scale_gradient(self, module: nn.Module, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """`grad_in` times the scale, for use as a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A dynamic loss scale for hand-written loops.

    Args:
        init_scale: the first scale. Default: 2**32.
        scale_factor: divides the scale at an overflow and multiplies it after `scale_window` clean iterations.
        scale_window: Default: 1000.
    """

    def __init__(self, init_scale: float = 2 ** 32, scale_factor: float = 2.0, scale_window: int = 1000):
        super().__init__(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` holds an inf or NaN."""
        grads = [param.grad.detach() for param in params if param.grad is not None]
        if not grads:
            return False
        found_inf = torch.zeros(1, dtype=torch.float32, device=grads[0].device)
        multi_tensor_scale(grads, grads, found_inf, 1.0)
        return bool(found_inf.item())

    def update_scale(self, overflow: bool) -> None:
        """Back off after an overflow (not below 1), grow after a window of clean iterations."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


class _ConfigurableLossScaler(AmpLossScaler):
    """The engine's dynamic scaler with the constants that `dynamic_loss_args` may set."""

    def __init__(self, init_scale: float = 2.0 ** 16, scale_factor: float = 2.0, scale_window: int = 2000,
                 min_loss_scale: float | None = None, max_loss_scale: float = 2.0 ** 24):
        super().__init__("dynamic", min_loss_scale, max(max_loss_scale, init_scale))
        self._loss_scale = init_scale
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def update(self) -> None:
        update_scale_(self.scale_tensor, self.growth_tracker, self.found_inf, self.scale_factor, 1 / self.scale_factor,
                      self.scale_window, self.min_loss_scale, self.max_loss_scale)


# --- FP16_Optimizer ---------------------------------------------------------------------------------------------------

class FP16_Optimizer:
    """Trains a half model with FP32 masters and loss scaling around any torch optimizer.

        model = model.half()
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)   # instead of loss.backward()
        optimizer.step()           # changes nothing after an overflow

    `amp.initialize(model, optimizer, opt_level="O2")` does the same and more. Half and bfloat16 parameters in the
    optimizer's groups are replaced by FP32 masters; float ones stay. It isn't a torch.optim.Optimizer: give a learning
    rate scheduler the wrapped one, `.optimizer`.

    Args:
        init_optimizer: the optimizer of the half model; becomes `.optimizer`.
        static_loss_scale: the scale without `dynamic_loss_scale`. Default: 1.
        dynamic_loss_scale: find the scale while training.
        dynamic_loss_args: any of init_scale (2**16), scale_factor (2), scale_window (2000), min_loss_scale,
            max_loss_scale (2**24).
        verbose: print a message for each skipped step. Default: True.

    Raises:
        TypeError: `dynamic_loss_args` has another name.
    """

    def __init__(self, init_optimizer: torch.optim.Optimizer, static_loss_scale: float = 1.0,
                 dynamic_loss_scale: bool = False, dynamic_loss_args: Mapping[str, Any] | None = None,
                 verbose: bool = True):
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler: AmpLossScaler = _ConfigurableLossScaler(**(dynamic_loss_args or {}))
        else:
            self.loss_scaler = AmpLossScaler(static_loss_scale)
        loss_scale = "dynamic" if dynamic_loss_scale else static_loss_scale
        options = dataclasses.replace(OPT_LEVELS["O2"], loss_scale=loss_scale)
        setup = Setup(options, [self.loss_scaler], verbosity=int(verbose))
        wrap_optimizer(init_optimizer, setup, fp32_values={})
        setup.optimizers.append(weakref.ref(init_optimizer))
        self._stash: Stash = init_optimizer._amp_stash  # type: ignore[attr-defined]
        self._masters = cast(MasterWeights, self._stash.masters)

    # --- a training step ----------------------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model's parameters and of the masters."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of the scaled loss; unless told to wait, the masters then have its unscaled gradients.

        Args:
            loss: what `loss.backward()` would have been called on.
            update_master_grads: False leaves the gradients scaled until `update_master_grads()`, for several losses.
            retain_graph: as for `Tensor.backward`.
        """
        with scale_loss(loss, self.optimizer, delay_unscale=not update_master_grads) as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Unscale what `backward(loss, update_master_grads=False)` left."""
        nothing = torch.zeros((), device=self.loss_scaler.device)
        with scale_loss(nothing, self.optimizer):
            pass

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the current step, or after `step()` of that step, overflowed."""
        return any(overflow.happened() for overflow in self._stash.overflows or self._stash.last_step)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | int:
        """Clip the masters' gradients by their joint norm; returns that norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm([param for group in self.param_groups for param in group["params"]], max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them to the model; after an overflow, change nothing.

        A closure must call `backward(loss)` of this object.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The masters' gradients, by param_group; None after an overflow."""
        if self.overflow:
            return None
        return [[param.grad for param in group["params"]] for group in self.param_groups]

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    cur_scale = loss_scale  # the name in apex.contrib.optimizers

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> dict:
        return self.optimizer.state

    @property
    def all_fp16_params(self) -> Sequence[Tensor]:
        """The model's parameters that have a master."""
        return self._masters.model_params

    @property
    def all_fp32_from_fp16_params(self) -> Sequence[Tensor]:
        """Their masters, in the same order."""
        return self._masters.masters

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _masters_by_group(self) -> list[list[Tensor]]:
        masters = set(map(id, self.all_fp32_from_fp16_params))
        return [[param for param in group["params"] if id(param) in masters] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Loss scaler, masters and the wrapped optimizer's state; loads with torch.load's defaults."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self._masters_by_group()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` gave, here or in Apex; load the model first.

        Raises:
            ValueError: the checkpoint's masters don't fit this optimizer's.
        """
        saved_masters = state_dict["fp32_from_fp16"]
        shapes = [[master.shape for master in group] for group in self._masters_by_group()]
        saved_shapes = [[master.shape for master in group] for group in saved_masters]
        if shapes != saved_shapes:
            raise ValueError(f"FP16_Optimizer.load_state_dict: expected masters of shapes {shapes}, "
                             f"got {saved_shapes}; the checkpoint belongs to another model or to other param_groups")
        scaler = state_dict["loss_scaler"]
        if not isinstance(scaler, Mapping):  # Apex pickled the object itself
            scaler = {"loss_scale": vars(scaler)["_loss_scale"], "unskipped": vars(scaler)["_unskipped"]}
        self.loss_scaler.load_state_dict(scaler)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            for group, saved_group in zip(self._masters_by_group(), saved_masters):
                for master, saved in zip(group, saved_group):
                    master.copy_(saved)
        self._masters.sync()
