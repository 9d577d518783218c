"""LARC against the rule of arXiv 1708.03888 in float64, around several optimizers."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex_amp import amp
from apex_amp.optimizers import LARC, FusedAdam, FusedSGD

INNER = [(FusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), (FusedAdam, {"lr": 0.01, "weight_decay": 0.01,
         "adam_w_mode": False}), (torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1})]


def make_params() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in ((), (5,), (40, 3))] + [torch.zeros(4, requires_grad=True)]


def reference_step(params: list[Tensor], inner: torch.optim.Optimizer, decay: float, trust: float, clip: bool,
                   eps: float) -> None:
    """Rescales float64 gradients parameter by parameter; `inner` has weight_decay=0."""
    for param in params:
        grad = param.grad
        if grad is None or param.norm() == 0 or grad.norm() == 0:
            continue
        rate = trust * param.norm().item() / (grad.norm().item() + decay * param.norm().item() + eps)
        factor = min(rate / inner.param_groups[0]["lr"], 1.0) if clip else rate
        param.grad = (grad + decay * param.detach()) * factor
    inner.step()


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("inner", INNER, ids=lambda inner: f"{inner[0].__module__.split('.')[0]}.{inner[0].__name__}")
def test_hundred_steps_follow_the_reference(inner: tuple, clip: bool) -> None:
    make, given = inner
    params = make_params()
    exact = [param.detach().double().requires_grad_() for param in params]
    larc = LARC(make(params, **given), trust_coefficient=0.05, clip=clip)
    twin = torch.optim.Adam if "Adam" in make.__name__ else torch.optim.SGD
    kept = {key: value for key, value in given.items() if key not in ("weight_decay", "adam_w_mode")}
    reference = twin(exact, **kept)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        for index, (param, other) in enumerate(zip(params, exact)):
            grad = torch.randn(param.shape, generator=generator) + param.detach()
            param.grad = None if index == 1 and step % 4 == 0 else grad
            other.grad = None if param.grad is None else grad.double()
        larc.step()
        reference_step(exact, reference, given.get("weight_decay", 0), 0.05, clip, 1e-8)
    for param, other in zip(params, exact):
        torch.testing.assert_close(param.double(), other, rtol=1e-4, atol=1e-5)
    assert larc.param_groups[0].get("weight_decay", 0) == given.get("weight_decay", 0)


@pytest.mark.parametrize("wrapped", ["before initialize", "after initialize"])
def test_half_gradients_are_made_masters_first(wrapped: str) -> None:
    """Around an optimizer whose masters get gradients on demand only, LARC rescales them all the same."""
    def run(materialize: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer: Any = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01,
                                  materialize_master_grads=materialize)
        if wrapped == "before initialize":
            optimizer = LARC(optimizer)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)
        larc = optimizer if wrapped == "before initialize" else LARC(optimizer)
        for step in range(3):
            with amp.scale_loss(model(torch.full((2, 4), 1.0 + step)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            larc.step()
            larc.zero_grad()
        return [master.detach().clone() for master in amp.master_params(larc)]

    assert all(map(torch.equal, run(materialize=False), run(materialize=True)))


def test_a_zero_gradient_gets_no_weight_decay() -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    LARC(FusedSGD(params, lr=0.1, weight_decay=0.5)).step()
    assert all(torch.equal(param, old) for param, old in zip(params, before))


def test_weight_decay_comes_back_when_the_step_fails() -> None:
    params = make_params()
    inner = FusedSGD(params, lr=0.1, weight_decay=0.5)

    def fail(*args: Any) -> None:
        raise RuntimeError("no step")

    inner.step = fail
    with pytest.raises(RuntimeError, match="no step"):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == 0.5


def test_faces_of_the_wrapped_optimizer() -> None:
    params = make_params()
    larc = LARC(FusedSGD(params, lr=0.1, momentum=0.9))
    for param in params:
        param.grad = torch.ones_like(param)
    losses = []
    assert larc.step(lambda: losses.append(1) or 3.5) == 3.5 and losses == [1]
    other = LARC(FusedSGD(make_params(), lr=0.2, momentum=0.9))
    other.load_state_dict(larc.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    buffers = [list(wrapper.state.values())[2]["momentum_buffer"] for wrapper in (larc, other)]
    assert torch.equal(*buffers)
    larc.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in params)
    extra = torch.ones(2, requires_grad=True)
    larc.add_param_group({"params": [extra]})
    assert larc.param_groups[1]["params"] == [extra]


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler_of_torch_drives_the_step(overflow: bool) -> None:
    """Scaled gradients give the step of unscaled ones; an overflow gives none."""
    params, twins = make_params(), make_params()
    before = [param.detach().clone() for param in params]
    larc, plain = (LARC(FusedSGD(tensors, lr=0.1, weight_decay=0.01)) for tensors in (params, twins))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for param, twin in zip(params, twins):
        twin.grad = torch.full_like(twin, 0.3)
        param.grad = twin.grad * 256
    if overflow:
        params[2].grad[1, 1] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.step(larc)
    plain.step()
    for param, twin, old in zip(params, twins, before):
        torch.testing.assert_close(param, old if overflow else twin)
