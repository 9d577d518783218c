"""The fused optimizers' arithmetic, against torch.optim in float64 and against references written from the papers."""
from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from apex_amp import multi_tensor_updates, optimizers

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
            cases.append(("FusedAdam", {"lr": 3e-3, "adam_w_mode": decoupled, **given}, reference,
                          {"lr": 3e-3, **given}))
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
    ("FusedLAMB", {"weight_decay": 0.05}), ("FusedNovoGrad", {"weight_decay": 0.05}),
    ("FusedAdagrad", {"weight_decay": 0.1}),
]


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in SHAPES]
    params[3] = params[3].contiguous(memory_format=torch.channels_last)
    for param in params:
        param.requires_grad_().grad_dtype = None  # takes gradients of any dtype
    return params


def groups_of(params: list[Tensor]) -> list[dict]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 2e-3}]


def set_grads(params: list[Tensor], step: int, dtype: torch.dtype) -> None:
    """Gradients pull to 0, with noise; one parameter has none in every third step, and starts late."""
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        noise = torch.randn(param.shape, generator=generator)
        absent = index == 1 and (step < 2 or step % 3 == 0)
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


# ---- one pass: half gradients, FP32 parameters, half copies ----

class AmpStep:
    """What the engine hands a fused optimizer for one step: see apex_amp/amp/amp_optimizer.py."""

    def __init__(self, masters: list[Tensor], model_params: list[Tensor], inv_scale: Tensor | None = None) -> None:
        model_param_of = dict(zip(map(id, masters), model_params)).get
        self.model_params_of = lambda some: [model_param_of(id(master)) for master in some]
        self.inv_scale = inv_scale
        self.written: list[Tensor] = []

    def note_written(self, masters: list[Tensor]) -> None:
        self.written += masters


def make(name: str, params: Any, **given: Any) -> Any:
    return getattr(optimizers, name)(params, **given)


def everything_of(optimizer: Any) -> list[Tensor]:
    """Copies of all parameters and state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [value for param in params for value in optimizer.state.get(param, {}).values() if value is not None]
    return [tensor.detach().clone() for tensor in params + state]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
def test_half_gradients_and_copies_are_those_of_separate_passes(case: tuple, half: torch.dtype) -> None:
    """Scaled half gradients in, masters and rounded copies out: bit for bit what float gradients and a copy give."""
    name, given = case
    params, twins = make_params(), make_params()
    copies = [torch.empty_like(param, dtype=half) for param in params]
    fused, plain = make(name, groups_of(params), **given), make(name, groups_of(twins), **given)
    for step in range(5):
        set_grads(twins, step, half)
        for copy, twin in zip(copies, twins):
            copy.grad_dtype = None
            copy.grad = None if twin.grad is None else twin.grad * 8
            twin.grad = None if twin.grad is None else twin.grad.float()
        fused._amp_step = AmpStep(params, copies, torch.tensor([0.125]))
        fused.step()
        plain.step()
        assert_equal(everything_of(fused), everything_of(plain))
        moved = [param for param, copy in zip(params, copies) if copy.grad is not None]
        assert sorted(map(id, fused._amp_step.written)) == sorted(map(id, moved))
        for param, copy in zip(params, copies):
            assert copy.grad is None or torch.equal(copy, param.to(half))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
def test_half_parameters_keep_float_state(case: tuple, half: torch.dtype) -> None:
    """A step of a half parameter is the float step, rounded once."""
    name, given = case
    params = make_params(half)
    fused = make(name, params, **given)
    for step in range(3):
        set_grads(params, step, half)
        floats = [param.detach().float() for param in params]
        twin = make(name, [value.requires_grad_() for value in floats], **given)
        for param, value in zip(params, floats):
            value.grad = None if param.grad is None else param.grad.float()
            if param in fused.state:
                twin.state[value] = {key: tensor.clone() for key, tensor in fused.state[param].items()}
        fused.step()
        twin.step()
        for param, value in zip(params, floats):
            assert torch.equal(param, value.to(half))
            for key, tensor in fused.state.get(param, {}).items():
                assert tensor.dtype == torch.float32 and torch.equal(tensor, twin.state[value][key])


def test_fused_adam_with_masters_of_its_own() -> None:
    halves, floats = make_params(torch.float16), make_params(torch.float16)
    masters = [param.detach().float().requires_grad_() for param in floats]
    fused = optimizers.FusedAdam(halves, capturable=True, master_weights=True)
    plain = optimizers.FusedAdam(masters)
    for step in range(5):
        set_grads(halves, step, torch.float16)
        for param, master in zip(halves, masters):
            master.grad = None if param.grad is None else param.grad.float()
        fused.step()
        plain.step()
    for param, master in zip(halves, masters):
        assert torch.equal(fused.state[param]["master_param"], master) and torch.equal(param, master.half())


# ---- skipping ----

@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("case", FULL_CASES + [("FusedSGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})],
                         ids=lambda case: "-".join(map(str, case)))
def test_a_step_that_found_inf_changes_nothing(case: tuple, first: bool) -> None:
    """Nor does it leave a trace: the next step is the one that would have come without it."""
    name, given = case
    params, twins = make_params(), make_params()
    fused, plain = make(name, groups_of(params), **given), make(name, groups_of(twins), **given)
    for step in range(0 if first else 3):
        for optimizer, tensors in ((fused, params), (plain, twins)):
            set_grads(tensors, step, torch.float32)
            optimizer.step()
    before = everything_of(fused)
    set_grads(params, 9, torch.float32)
    params[0].grad.fill_(torch.inf)
    fused.found_inf = torch.ones(())
    fused.step()
    assert_equal(everything_of(fused)[:len(before)] if not first else everything_of(fused)[:len(params)],
                 before if not first else before[:len(params)])
    for optimizer, tensors in ((fused, params), (plain, twins)):
        set_grads(tensors, 10, torch.float32)
        optimizer.found_inf = torch.zeros(1)
        optimizer.step()
    assert_equal(everything_of(fused), everything_of(plain))


@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
def test_grad_scaler_of_torch_drives_the_step(case: tuple) -> None:
    """torch.amp.GradScaler leaves unscaling and skipping to the optimizer."""
    name, given = case
    params, twins = make_params(), make_params()
    fused, plain = make(name, groups_of(params), **given), make(name, groups_of(twins), **given)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        set_grads(params, step, torch.float32)
        set_grads(twins, step, torch.float32)
        for param in params:
            if param.grad is not None:
                param.grad *= scaler.get_scale()
        scaler.scale(torch.ones(()))
        if step == 3:
            params[0].grad.fill_(torch.nan)
        scaler.step(fused)
        scaler.update()
        if step != 3:
            plain.step()
    assert scaler.get_scale() == 512.0
    assert_equal(everything_of(fused), everything_of(plain))


@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
def test_a_step_reads_nothing_back(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """No .item(), tolist(), bool() or float() of a tensor in a step: on a GPU each would wait for the device."""
    name, given = case
    params = make_params()
    fused = make(name, groups_of(params), **given)
    reads: list[str] = []
    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, method, lambda self, *args, method=method: reads.append(method))
    for step in range(2):
        set_grads(params, step, torch.float32)
        fused.found_inf, fused.grad_scale = torch.zeros(1), torch.full((1,), 4.0)
        fused.step()
    monkeypatch.undo()
    assert reads == []


# ---- plain torch, for devices without kernels ----

@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_plain_torch_follows_the_kernels(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    name, given, _, _ = case
    params, twins = make_params(), make_params()
    copies = [[torch.empty_like(param, dtype=torch.bfloat16) for param in params] for _ in range(2)]
    fused, plain = make(name, groups_of(params), **given), make(name, groups_of(twins), **given)
    rule = name.removeprefix("Fused").lower()
    in_torch = types.SimpleNamespace(**{f"multi_tensor_{rule}": getattr(multi_tensor_updates, f"_torch_{rule}")})
    for step in range(4):
        set_grads(params, step, torch.float16)
        set_grads(twins, step, torch.float16)
        for optimizer, tensors, halves in ((fused, params, copies[0]), (plain, twins, copies[1])):
            optimizer.found_inf = torch.tensor([float(step == 1)])
            optimizer.grad_scale = torch.full((1,), 2.0)
            optimizer._amp_step = AmpStep(tensors, halves)
        fused.step()
        with monkeypatch.context() as patch:
            patch.setattr(multi_tensor_updates._C, f"multi_tensor_{rule}", lambda *args: False)
            patch.setattr(multi_tensor_updates, "_ops", in_torch)
            plain.step()
    for one, other in zip(everything_of(fused), everything_of(plain)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for param, half in zip(twins, copies[1]):
        assert torch.equal(half, param.bfloat16())


# ---- sizes and layouts ----

@pytest.mark.slow
def test_a_hundred_million_elements() -> None:
    size = 100_000_007
    grad, param = torch.full((size,), 0.5, dtype=torch.bfloat16), torch.zeros(size)
    multi_tensor_updates.multi_tensor_sgd([grad], [param], None, None, None, None, 1.0, 0.0, 0.0, 0.0, False, False,
                                          False)
    assert param.min() == param.max() == -0.5


@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
def test_strided_empty_and_channels_last_parameters(case: tuple) -> None:
    name, given = case

    def build(contiguous: bool) -> list[Tensor]:
        torch.manual_seed(1)
        values = [torch.randn(6, 10), torch.randn(0), torch.randn(2, 3, 4, 5), torch.randn(40)]
        if not contiguous:
            values = [values[0].t().contiguous().t(), values[1],
                      values[2].contiguous(memory_format=torch.channels_last), torch.stack([values[3]] * 2, 1)[:, 0]]
        return [value.requires_grad_() for value in values]

    results = []
    for contiguous in (True, False):
        params = build(contiguous)
        fused = make(name, params, **given)
        for step in range(3):
            set_grads(params, step + 7, torch.float32)
            for param in params:
                param.grad = None if param.grad is None else param.grad.contiguous()
            fused.step()
        results.append([param.detach() for param in params])
    for one, other in zip(*results):
        # Norms are summed in memory order.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("size", [1, 7, 8, 31, 32, 33, 32767, 32768, 32769, 200_003])
def test_every_element_of_every_size_moves_alike(case: tuple, size: int) -> None:
    """Vectors, tails, chunks and threads: elements with equal inputs have equal outputs, wherever they are."""
    name, given = case
    param = torch.full((size,), 0.5).requires_grad_()
    fused = make(name, [param], **given)
    for _ in range(2):
        param.grad = torch.full((size,), 0.25)
        fused.step()
    assert param.unique().numel() == 1 and param[0] != 0.5
    for value in fused.state[param].values():
        assert value.unique().numel() == 1
