"""The fused optimizers' arithmetic, against torch.optim in float64 and against references written from the papers."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from apex_amp import optimizers

STEPS = 100
SHAPES = ((), (7,), (33, 5), (3, 4, 5, 6), (1031,))


# ---- references, in float64 ----

class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962 with phi the identity, and Apex's clipping by the norm of all gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
                 adam_w_mode: bool = True, grad_averaging: bool = True, max_grad_norm: float = 1.0,
                 use_nvlamb: bool = False) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.bias_correction, self.decoupled, self.averaging = bias_correction, adam_w_mode, grad_averaging
        self.max_grad_norm, self.use_nvlamb = max_grad_norm, use_nvlamb

    @torch.no_grad()
    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        clip = max(1.0, norm.item() / self.max_grad_norm) if self.max_grad_norm else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad / clip, group)

    def move(self, p: Tensor, g: Tensor, group: dict) -> None:
        state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
        t = state["t"] = state.get("t", 0) + 1
        g = g if self.decoupled else g + decay * p
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1 if self.averaging else 1) * g
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g ** 2
        if self.bias_correction:
            m, v = m / (1 - beta1 ** t), v / (1 - beta2 ** t)
        u = m / (v.sqrt() + group["eps"]) + (decay * p if self.decoupled else 0)
        ratio = 1.0
        if (self.use_nvlamb or decay) and p.norm() > 0 and u.norm() > 0:
            ratio = p.norm() / u.norm()
        p -= group["lr"] * ratio * u


class NovoGrad(torch.optim.Optimizer):
    """Algorithm 1 of arXiv 1905.11286 (reg_inside_moment) and the variants that Apex's options name."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: int = 2,
                 init_zero: bool = False) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.bias_correction, self.inside, self.averaging = bias_correction, reg_inside_moment, grad_averaging
        self.squared, self.init_zero = norm_type == 2, init_zero

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.move(p, p.grad, group)

    def move(self, p: Tensor, g: Tensor, group: dict) -> None:
        state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
        t = state["t"] = state.get("t", 0) + 1
        layer = g.square().sum() if self.squared else g.abs().max()
        old = state.get("v", torch.zeros_like(layer) if self.init_zero else layer)
        v = state["v"] = beta2 * old + (1 - beta2) * layer
        norm = v.sqrt() if self.squared else v
        correct1 = 1 - beta1 ** t if self.bias_correction else 1.0
        denominator = (norm / math.sqrt(1 - beta2 ** t) if self.bias_correction else norm) + group["eps"]
        entering = g / denominator + decay * p if self.inside else g
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1 if self.averaging else 1) * entering
        p -= group["lr"] * (m / correct1 if self.inside else m / correct1 / denominator + decay * p)


class AdagradW(torch.optim.Adagrad):
    """torch's Adagrad with decoupled weight decay."""

    @torch.no_grad()
    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p *= 1 - group["lr"] * group["weight_decay"]
            group["weight_decay"] = 0
        super().step()
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay


class SgdDecayAfterMomentum(torch.optim.SGD):
    """torch's SGD whose weight decay does not enter the momentum buffer."""

    @torch.no_grad()
    def step(self) -> None:
        params = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        decays = [group["lr"] * group["weight_decay"] * p for p, group in params]
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0
        super().step()
        for (p, _), decay in zip(params, decays):
            p -= decay
        for group, weight_decay in zip(self.param_groups, kept):
            group["weight_decay"] = weight_decay


def options(**choices: tuple) -> list[dict[str, Any]]:
    """All combinations of one value for each option."""
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def adam_cases() -> list[tuple]:
    cases = []
    for decoupled, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        for given in options(weight_decay=(0.0, 0.1), betas=((0.9, 0.999), (0.5, 0.9)), eps=(1e-8, 1e-3)):
            cases.append(("FusedAdam", {"lr": 3e-3, "adam_w_mode": decoupled, **given}, reference, {"lr": 3e-3, **given}))
    return cases


def sgd_cases() -> list[tuple]:
    cases = []
    for given in options(momentum=(0.0, 0.9), dampening=(0.0, 0.3), weight_decay=(0.0, 0.1), nesterov=(False, True)):
        if given["nesterov"] and (given["dampening"] or not given["momentum"]):
            continue
        cases.append(("FusedSGD", {"lr": 0.05, **given}, torch.optim.SGD, {"lr": 0.05, **given}))
        cases.append(("FusedSGD", {"lr": 0.05, "wd_after_momentum": True, **given}, SgdDecayAfterMomentum,
                      {"lr": 0.05, **given}))
    return cases


def adagrad_cases() -> list[tuple]:
    return [("FusedAdagrad", {"lr": 0.05, "adagrad_w_mode": decoupled, **given}, reference, {"lr": 0.05, **given})
            for decoupled, reference in ((False, torch.optim.Adagrad), (True, AdagradW))
            for given in options(weight_decay=(0.0, 0.1), eps=(1e-10, 1e-2))]


def lamb_cases() -> list[tuple]:
    switches = options(bias_correction=(True, False), adam_w_mode=(True, False), weight_decay=(0.0, 0.05),
                       use_nvlamb=(False, True))
    more = options(weight_decay=(0.05,), grad_averaging=(False,), max_grad_norm=(1.0, 0.0, 1e3))
    return [("FusedLAMB", {"lr": 3e-3, **given}, Lamb, {"lr": 3e-3, **given}) for given in switches + more]


def novograd_cases() -> list[tuple]:
    switches = options(reg_inside_moment=(True, False), norm_type=(2, 0), init_zero=(False, True)) + \
        options(reg_inside_moment=(True, False), grad_averaging=(False,), bias_correction=(True, False))
    return [("FusedNovoGrad", {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.95, 0.98), **given}, NovoGrad,
             {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.95, 0.98), **given}) for given in switches]


CASES = adam_cases() + sgd_cases() + adagrad_cases() + lamb_cases() + novograd_cases()
CASE_IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in given.items() if k != 'lr')}" for name, given, _, _ in CASES]
# One with every option on, for each optimizer.
FULL_CASES = [
    ("FusedAdam", {"weight_decay": 0.1}), ("FusedSGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("FusedLAMB", {"weight_decay": 0.05}), ("FusedNovoGrad", {"weight_decay": 0.05}), ("FusedAdagrad", {"weight_decay": 0.1}),
]


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in SHAPES]
    params[3] = params[3].contiguous(memory_format=torch.channels_last)
    return [param.requires_grad_() for param in params]


def groups_of(params: list[Tensor]) -> list[dict]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 2e-3}]


def set_grads(params: list[Tensor], step: int, dtype: torch.dtype) -> None:
    """Gradients pull to 0, with noise; one parameter has none in every third step, and starts late."""
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        noise = torch.randn(param.shape, generator=generator)
        absent = index == 1 and (step < 5 or step % 3 == 0)
        param.grad = None if absent else (noise + 0.5 * index).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_hundred_steps_follow_the_reference_in_float64(case: tuple) -> None:
    name, given, reference_class, reference_given = case
    params = make_params()
    exact = [param.detach().double().requires_grad_() for param in params]
    fused = getattr(optimizers, name)(groups_of(params), **given)
    reference = reference_class(groups_of(exact), **reference_given)
    for step in range(STEPS):
        set_grads(params, step, torch.float32)
        for param, twin in zip(params, exact):
            twin.grad = None if param.grad is None else param.grad.double()
        fused.step()
        reference.step()
    for param, twin in zip(params, exact):
        torch.testing.assert_close(param.double(), twin, rtol=2e-5, atol=2e-5)
