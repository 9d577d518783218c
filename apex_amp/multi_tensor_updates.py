"""The optimizers' update rules over whole lists of tensors, in one pass each: adam, sgd, lamb, novograd, adagrad.

All lists are paired by position and on one device. `grads` and `params` are float16, bfloat16 or float32 in any mix;
state is float32; arithmetic is FP32. `steps` is a list of float32 tensors of one element, which the call counts up, or
a number that is taken as the count of all, this step included. `model_params` (None: none) receive the new float32
params rounded to float16 or bfloat16.

`found_inf` and `inv_scale` are float32 tensors of one element, or None. Gradients are multiplied by inv_scale, and
where found_inf isn't 0 nothing is written at all; both are read on their device, so that no call waits for it. `lr` is
a float or such a tensor. Every tensor of a written list has its version moved, skipped or not. Errors are TypeError or
ValueError that name the argument and its index, and nothing has been written when one is raised.

Calls go to the compiled functions, or to the ops registered here, as multi_tensor.py says.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _C
from .multi_tensor import register, scalar_tensor

__all__ = ["multi_tensor_adagrad", "multi_tensor_adam", "multi_tensor_lamb", "multi_tensor_novograd",
           "multi_tensor_sgd"]

Tensors = Sequence[Tensor]
Steps = Sequence[Tensor] | float

_ops = torch.ops.apex_amp


def multi_tensor_adam(grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Steps,
                      model_params: Tensors | None, found_inf: Tensor | None, inv_scale: Tensor | None,
                      lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
                      adam_w_mode: bool, bias_correction: bool) -> None:
    """Adam (arXiv 1412.6980) with L2 regularization, or with adam_w_mode decoupled weight decay (arXiv 1711.05101)."""
    args = (grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr, beta1, beta2, eps,
            weight_decay, adam_w_mode, bias_correction)
    if is_compiling() or not _C.multi_tensor_adam(*args):
        _ops.multi_tensor_adam(*args)


def multi_tensor_sgd(grads: Tensors, params: Tensors, momentum_buffers: Tensors | None, model_params: Tensors | None,
                     found_inf: Tensor | None, inv_scale: Tensor | None, lr: float | Tensor, momentum: float,
                     dampening: float, weight_decay: float, nesterov: bool, first_run: bool,
                     wd_after_momentum: bool) -> None:
    """torch.optim.SGD's rule. first_run: the buffers' values don't count, they become the gradients."""
    args = (grads, params, momentum_buffers, model_params, found_inf, inv_scale, lr, momentum, dampening, weight_decay,
            nesterov, first_run, wd_after_momentum)
    if is_compiling() or not _C.multi_tensor_sgd(*args):
        _ops.multi_tensor_sgd(*args)


def multi_tensor_lamb(grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Steps,
                      model_params: Tensors | None, found_inf: Tensor | None, inv_scale: Tensor | None,
                      lr: float | Tensor, grad_norm: float | Tensor, beta1: float, beta2: float, eps: float,
                      weight_decay: float, adam_w_mode: bool, bias_correction: bool, grad_averaging: bool,
                      max_grad_norm: float, use_nvlamb: bool) -> None:
    """LAMB (arXiv 1904.00962) in two passes: moments and norms, then parameters.

    grad_norm is the norm of all gradients as they are in `grads`, before inv_scale; gradients are scaled down where
    grad_norm * inv_scale exceeds a max_grad_norm that is not 0. The update is multiplied by |param| / |update| where
    weight_decay is not 0, or everywhere with use_nvlamb, and by 1 where a norm is 0.
    """
    args = (grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr, grad_norm, beta1,
            beta2, eps, weight_decay, adam_w_mode, bias_correction, grad_averaging, max_grad_norm, use_nvlamb)
    if is_compiling() or not _C.multi_tensor_lamb(*args):
        if isinstance(lr, Tensor) != isinstance(grad_norm, Tensor):
            device = lr.device if isinstance(lr, Tensor) else grad_norm.device
            args = (*args[:8], scalar_tensor(lr, device), scalar_tensor(grad_norm, device), *args[10:])
        _ops.multi_tensor_lamb(*args)


def multi_tensor_novograd(grads: Tensors, params: Tensors, exp_avgs: Tensors, averaged_norms: Tensors,
                          steps: Sequence[Tensor], model_params: Tensors | None, found_inf: Tensor | None,
                          inv_scale: Tensor | None, lr: float | Tensor, grad_norms: Tensor, beta1: float, beta2: float,
                          eps: float, weight_decay: float, bias_correction: bool, grad_averaging: bool,
                          reg_inside_moment: bool, l2_norm: bool, init_zero: bool) -> None:
    """NovoGrad (arXiv 1905.11286). grad_norms: a float32 vector, the norm of each of `grads` as it is.

    averaged_norms are float32 tensors of one element: sqrt(beta2 * old**2 + (1 - beta2) * norm**2), or without l2_norm
    the average itself; a parameter's first norm stands in for the old one unless init_zero.
    """
    args = (grads, params, exp_avgs, averaged_norms, steps, model_params, found_inf, inv_scale, lr, grad_norms, beta1,
            beta2, eps, weight_decay, bias_correction, grad_averaging, reg_inside_moment, l2_norm, init_zero)
    if is_compiling() or not _C.multi_tensor_novograd(*args):
        _ops.multi_tensor_novograd(*args)


def multi_tensor_adagrad(grads: Tensors, params: Tensors, sums: Tensors, steps: Steps, model_params: Tensors | None,
                         found_inf: Tensor | None, inv_scale: Tensor | None, lr: float | Tensor, lr_decay: float,
                         eps: float, weight_decay: float, adagrad_w_mode: bool) -> None:
    """Adagrad (JMLR 12, 2011) with L2 regularization, or with adagrad_w_mode decoupled weight decay."""
    args = (grads, params, sums, steps, model_params, found_inf, inv_scale, lr, lr_decay, eps, weight_decay,
            adagrad_w_mode)
    if is_compiling() or not _C.multi_tensor_adagrad(*args):
        _ops.multi_tensor_adagrad(*args)


# The same rules in plain torch, tensor by tensor. Nothing here waits for the device.

class _Step:
    """What the rules below share: which writes happen, and the gradients they see."""

    def __init__(self, found_inf: Tensor | None, inv_scale: Tensor | None) -> None:
        self.found_inf, self.inv_scale = found_inf, inv_scale

    def write(self, target: Tensor, value: Tensor) -> Tensor:
        """target = value unless skipped; returns the value in FP32."""
        if self.found_inf is not None:
            value = torch.where(self.found_inf.to(target.device).reshape(()) != 0, target.to(value.dtype), value)
        target.copy_(value)
        return value

    def gradient(self, grad: Tensor) -> Tensor:
        return grad.float() if self.inv_scale is None else grad.float() * self.inv_scale.to(grad.device).reshape(())

    def count(self, steps: Steps, i: int) -> Tensor | float:
        return steps if isinstance(steps, (int, float)) else self.write(steps[i], steps[i] + 1)

    def finish(self, param: Tensor, value: Tensor, model_params: Tensors | None, i: int) -> None:
        self.write(param, value)
        if model_params is not None:
            self.write(model_params[i], value)


def _torch_adam(grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr, beta1, beta2, eps,
                weight_decay, adam_w_mode, bias_correction) -> None:
    step = _Step(found_inf, inv_scale)
    for i, param in enumerate(params):
        value, update = _adam_update(step, grads[i], param, exp_avgs[i], exp_avg_sqs[i], step.count(steps, i), 1.0,
                                     beta1, beta2, 1 - beta1, eps, weight_decay, adam_w_mode, bias_correction)
        step.finish(param, value - lr * update, model_params, i)


def _adam_update(step, grad, param, exp_avg, exp_avg_sq, count, clip, beta1, beta2, beta3, eps, weight_decay,
                 decoupled, bias_correction) -> tuple[Tensor, Tensor]:
    """(the parameter in FP32, its update before the learning rate); moves the moments."""
    value = param.float()
    gradient = step.gradient(grad) / clip
    if not decoupled:
        gradient = gradient + weight_decay * value
    first = step.write(exp_avg, beta1 * exp_avg + beta3 * gradient)
    second = step.write(exp_avg_sq, beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient)
    corrections = (1 - beta1 ** count, 1 - beta2 ** count) if bias_correction else (1.0, 1.0)
    update = first / corrections[0] / ((second / corrections[1]).sqrt() + eps)
    return value, update + weight_decay * value if decoupled else update


def _torch_sgd(grads, params, momentum_buffers, model_params, found_inf, inv_scale, lr, momentum, dampening,
               weight_decay, nesterov, first_run, wd_after_momentum) -> None:
    step = _Step(found_inf, inv_scale)
    for i, param in enumerate(params):
        value, update = param.float(), step.gradient(grads[i])
        if not wd_after_momentum:
            update = update + weight_decay * value
        if momentum != 0:
            buffer = momentum_buffers[i]
            moved = step.write(buffer, update if first_run else momentum * buffer + (1 - dampening) * update)
            update = update + momentum * moved if nesterov else moved
        if wd_after_momentum:
            update = update + weight_decay * value
        step.finish(param, value - lr * update, model_params, i)


def _torch_lamb(grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr, grad_norm, beta1,
                beta2, eps, weight_decay, adam_w_mode, bias_correction, grad_averaging, max_grad_norm,
                use_nvlamb) -> None:
    step = _Step(found_inf, inv_scale)
    for i, param in enumerate(params):
        norm = step.gradient(torch.as_tensor(grad_norm, dtype=torch.float32, device=param.device))
        clip = (norm / max_grad_norm).clamp(min=1.0) if max_grad_norm > 0 else 1.0
        value, update = _adam_update(step, grads[i], param, exp_avgs[i], exp_avg_sqs[i], step.count(steps, i), clip,
                                     beta1, beta2, 1 - beta1 if grad_averaging else 1.0, eps, weight_decay,
                                     adam_w_mode, bias_correction)
        if use_nvlamb or weight_decay != 0:
            norms = value.norm(), update.norm()
            update = update * torch.where((norms[0] != 0) & (norms[1] != 0), norms[0] / norms[1], 1.0)
        step.finish(param, value - lr * update, model_params, i)


def _torch_novograd(grads, params, exp_avgs, averaged_norms, steps, model_params, found_inf, inv_scale, lr, grad_norms,
                    beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, reg_inside_moment, l2_norm,
                    init_zero) -> None:
    step = _Step(found_inf, inv_scale)
    for i, param in enumerate(params):
        norm, old = step.gradient(grad_norms[i]), averaged_norms[i]
        earlier = old if init_zero else torch.where(steps[i] == 0, norm.to(old.device), old)
        average = (beta2 * earlier ** 2 + (1 - beta2) * norm ** 2).sqrt() if l2_norm \
            else beta2 * earlier + (1 - beta2) * norm
        average, count = step.write(old, average), step.count(steps, i)
        corrections = (1 - beta1 ** count, (1 - beta2 ** count).sqrt()) if bias_correction else (1.0, 1.0)
        denominator = average / corrections[1] + eps
        value, gradient = param.float(), step.gradient(grads[i])
        if reg_inside_moment:
            gradient = gradient / denominator + weight_decay * value
        first = step.write(exp_avgs[i], beta1 * exp_avgs[i] + (1 - beta1 if grad_averaging else 1.0) * gradient)
        update = first / corrections[0]
        if not reg_inside_moment:
            update = update / denominator + weight_decay * value
        step.finish(param, value - lr * update, model_params, i)


def _torch_adagrad(grads, params, sums, steps, model_params, found_inf, inv_scale, lr, lr_decay, eps, weight_decay,
                   adagrad_w_mode) -> None:
    step = _Step(found_inf, inv_scale)
    for i, param in enumerate(params):
        value, gradient = param.float(), step.gradient(grads[i])
        if not adagrad_w_mode:
            gradient = gradient + weight_decay * value
        total = step.write(sums[i], sums[i] + gradient * gradient)
        update = gradient / (total.sqrt() + eps)
        if adagrad_w_mode:
            update = update + weight_decay * value
        rate = lr / (1 + (step.count(steps, i) - 1) * lr_decay)
        step.finish(param, value - rate * update, model_params, i)


def _register_ops() -> None:
    lists = "Tensor[] grads, Tensor(a!)[] params"
    moments = "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs"
    options = "Tensor(e!)[]? model_params, Tensor? found_inf, Tensor? inv_scale"
    decay = "float beta1, float beta2, float eps, float weight_decay"
    # As in multi_tensor.py, overloads that take tensors come first.
    for overload, lr, steps in (("tensor", "Tensor", "Tensor(d!)[]"), ("", "float", "Tensor(d!)[]"),
                                ("tensor_number", "Tensor", "float"), ("number", "float", "float")):
        name = f".{overload}".rstrip(".")
        register(f"multi_tensor_adam{name}({lists}, {moments}, {steps} steps, {options}, {lr} lr, {decay}, "
                 "bool adam_w_mode, bool bias_correction) -> ()", _C.multi_tensor_adam, _torch_adam)
        register(f"multi_tensor_lamb{name}({lists}, {moments}, {steps} steps, {options}, {lr} lr, {lr} grad_norm, "
                 f"{decay}, bool adam_w_mode, bool bias_correction, bool grad_averaging, float max_grad_norm, "
                 "bool use_nvlamb) -> ()", _C.multi_tensor_lamb, _torch_lamb)
        register(f"multi_tensor_adagrad{name}({lists}, Tensor(b!)[] sums, {steps} steps, {options}, {lr} lr, "
                 "float lr_decay, float eps, float weight_decay, bool adagrad_w_mode) -> ()", _C.multi_tensor_adagrad,
                 _torch_adagrad)
        if steps == "float":
            continue
        register(f"multi_tensor_sgd{name}({lists}, Tensor(b!)[]? momentum_buffers, {options}, {lr} lr, float momentum, "
                 "float dampening, float weight_decay, bool nesterov, bool first_run, bool wd_after_momentum) -> ()",
                 _C.multi_tensor_sgd, _torch_sgd)
        register(f"multi_tensor_novograd{name}({lists}, Tensor(b!)[] exp_avgs, Tensor(c!)[] averaged_norms, "
                 f"{steps} steps, {options}, {lr} lr, Tensor grad_norms, {decay}, bool bias_correction, "
                 "bool grad_averaging, bool reg_inside_moment, bool l2_norm, bool init_zero) -> ()",
                 _C.multi_tensor_novograd, _torch_novograd)


_register_ops()
