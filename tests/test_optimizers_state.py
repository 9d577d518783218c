"""The fused optimizers' checkpoints, copies, options and errors."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from apex_amp import optimizers
from apex_amp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

ALL = [(FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}), (FusedSGD, {"lr": 0.1, "momentum": 0.9,
       "wd_after_momentum": True, "weight_decay": 0.1}), (FusedLAMB, {"use_nvlamb": True, "adam_w_mode": False}),
       (FusedNovoGrad, {"reg_inside_moment": True, "weight_decay": 0.1}), (FusedAdagrad, {"adagrad_w_mode": True,
       "weight_decay": 0.1})]
IDS = [make.__name__ for make, _ in ALL]
TWINS = [(FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
         (FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
         (FusedSGD, {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
         (FusedSGD, {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
         (FusedAdagrad, {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1})]
TWIN_IDS = [f"{theirs.__name__}{'-'.join(map(str, given))}" for _, given, theirs, _ in TWINS]


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((3, 5), (), (17,))]


def train(optimizer: Any, params: list[Tensor], begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def saved(optimizer: Any, tmp_path: Any) -> dict:
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    return torch.load(tmp_path / "optimizer.pt")


def assert_same(actual: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other, **tolerance or {"rtol": 0, "atol": 0})


# ---- checkpoints ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_a_resumed_run_is_bit_identical(make: type, given: dict, dtype: torch.dtype, tmp_path: Any) -> None:
    params = make_params(dtype)
    optimizer = make(params, **given)
    train(optimizer, params, 0, 3)
    resumed_params = [param.detach().clone().requires_grad_() for param in params]
    resumed = make(resumed_params, **{"lr": 5.0})
    for name in ("adam_w_mode", "wd_after_momentum", "use_nvlamb", "moment_mode", "adagrad_w_mode"):
        if hasattr(optimizer, name):
            setattr(resumed, name, getattr(optimizer, name))
    resumed.load_state_dict(saved(optimizer, tmp_path))
    train(optimizer, params, 3, 6)
    train(resumed, resumed_params, 3, 6)
    assert_same(resumed_params, params)


@pytest.mark.parametrize("fused_again", [False, True])
@pytest.mark.parametrize("ours,given,theirs,their_given", TWINS, ids=TWIN_IDS)
def test_checkpoints_go_to_torch_and_back(ours: type, given: dict, theirs: type, their_given: dict, fused_again: bool,
                                          tmp_path: Any) -> None:
    params = make_params()
    twins = [param.detach().clone().requires_grad_() for param in params]
    sources = (theirs(params, **their_given), ours(twins, **given))[::-1 if fused_again else 1]
    targets = (ours, given), (theirs, their_given)
    make, options = targets[fused_again]
    first, second = (params, twins)[::-1 if fused_again else 1]
    train(sources[0], first, 0, 3)
    train(sources[1], second, 0, 3)
    target = make([param.detach().clone().requires_grad_() for param in first], **{**options, "lr": 9.0})
    target.load_state_dict(saved(sources[0], tmp_path))
    target_params = target.param_groups[0]["params"]
    train(target, target_params, 3, 6)
    train(sources[1], second, 3, 6)
    assert target.param_groups[0]["lr"] == sources[0].param_groups[0]["lr"]
    assert_same(target_params, second, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_apex_loads(tmp_path: Any) -> None:
    """Apex counted a group's steps in the group."""
    params = make_params()
    optimizer = FusedAdam(params)
    train(optimizer, params, 0, 4)
    old = saved(optimizer, tmp_path)
    old["param_groups"][0]["step"] = 4
    for state in old["state"].values():
        del state["step"]
    resumed_params = [param.detach().clone().requires_grad_() for param in params]
    resumed = FusedAdam(resumed_params)
    resumed.load_state_dict(old)
    train(optimizer, params, 4, 6)
    train(resumed, resumed_params, 4, 6)
    assert_same(resumed_params, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_novograd_checkpoint_of_apex_loads(dtype: torch.dtype, tmp_path: Any) -> None:
    """Apex kept the norms in the group, [of half parameters, of float32 ones], and moments in the parameter's dtype."""
    def make() -> tuple[list[Tensor], FusedNovoGrad]:
        params = [param.detach().to(dtype if i == 1 else torch.float32).requires_grad_()
                  for i, param in enumerate(make_params())]
        return params, FusedNovoGrad(params, weight_decay=0.1)

    params, optimizer = make()
    train(optimizer, params, 0, 4)
    for param in params:  # what a half moment can hold
        optimizer.state[param]["exp_avg"].copy_(optimizer.state[param]["exp_avg"].to(param.dtype))
    old = saved(optimizer, tmp_path)
    norms: list[list[float]] = [[], []]
    for param, state in zip(params, old["state"].values()):
        norms[param.dtype == torch.float32].append(state.pop("exp_avg_sq").item())
        state["exp_avg"] = state["exp_avg"].to(param.dtype)
        del state["step"]
    old["param_groups"][0].update(step=4, exp_avg_sq=[torch.tensor(of_kind) for of_kind in norms])
    resumed_params, resumed = make()
    for param, source in zip(resumed_params, params):
        param.data.copy_(source.data)
    resumed.load_state_dict(old)
    train(optimizer, params, 4, 6)
    train(resumed, resumed_params, 4, 6)
    assert_same(resumed_params, params)
    assert "exp_avg_sq" not in resumed.param_groups[0]


def test_a_novograd_checkpoint_with_other_dtypes_is_refused() -> None:
    params = make_params()
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, 0, 1)
    old = optimizer.state_dict()
    old["param_groups"][0]["exp_avg_sq"] = [torch.ones(3), torch.empty(0)]
    with pytest.raises(ValueError, match="has 3 averaged norms .exp_avg_sq. of half parameters in a group, expected 0"):
        FusedNovoGrad(make_params()).load_state_dict(old)


def test_adagrad_follows_torchs_options_from_a_checkpoint(tmp_path: Any) -> None:
    params = make_params()
    twins = [param.detach().clone().requires_grad_() for param in params]
    theirs = torch.optim.Adagrad(params, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5)
    ours = FusedAdagrad(twins)
    ours.load_state_dict(saved(theirs, tmp_path))
    train(theirs, params, 0, 5)
    train(ours, twins, 0, 5)
    assert_same(twins, params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_checkpoint_that_adam_cannot_follow_is_refused(option: str) -> None:
    theirs = torch.optim.Adam(make_params(), **{option: True})
    ours = FusedAdam(make_params(), lr=0.5)
    with pytest.raises(RuntimeError, match=f"{option}=True"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
                         ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_copies_keep_their_options(make: type, given: dict, duplicate: Any) -> None:
    params = make_params()
    optimizer = make(params, **given)
    train(optimizer, params, 0, 2)
    for param in params:
        param.grad = None
    twin = duplicate(optimizer)
    twins = twin.param_groups[0]["params"]
    train(optimizer, params, 2, 4)
    train(twin, twins, 2, 4)
    assert_same(twins, params)


@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_state_comes_with_the_first_gradient(make: type, given: dict) -> None:
    params = make_params()
    optimizer = make(params, **given)
    optimizer.step()
    assert len(optimizer.state) == 0
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert list(optimizer.state) == [params[0]]
    params[0].grad, params[2].grad = None, torch.ones_like(params[2])
    optimizer.step()
    if "step" in optimizer.state[params[0]]:
        assert [optimizer.state[params[i]]["step"].item() for i in (0, 2)] == [1, 1]


# ---- options and faces ----

@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_zero_grad(make: type, given: dict) -> None:
    for set_grad_none in (True, False):
        params = make_params()
        optimizer = make(params, **given, set_grad_none=set_grad_none)
        for given_here, gone in (((), set_grad_none), ((False,), False), ((True,), True)):
            for call in (lambda: optimizer.zero_grad(*given_here),
                         lambda: optimizer.zero_grad(**dict(zip(("set_to_none",), given_here)))):
                for param in params:
                    param.grad = torch.ones_like(param)
                call()
                assert all(param.grad is None if gone else (param.grad == 0).all() for param in params)


@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_a_closure_runs_once_with_gradients_on(make: type, given: dict) -> None:
    params = make_params()
    optimizer = make(params, **given)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = sum((param ** 2).sum() for param in params)
        loss.backward()
        return loss

    before = params[0].detach().clone()
    assert optimizer.step(closure).item() > 0
    assert calls == [True] and not torch.equal(params[0], before)


@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_schedulers_and_tensor_learning_rates(make: type, given: dict) -> None:
    params, twins = make_params(), make_params()
    ours = make(params, **{**given, "lr": 0.5})
    with_tensor = make(twins, **{**given, "lr": torch.tensor(0.5)})
    for optimizer, tensors in ((ours, params), (with_tensor, twins)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            train(optimizer, tensors, step, step + 1)
            scheduler.step()
    assert ours.param_groups[0]["lr"] == 0.0625
    assert_same(twins, params)


def test_capturable_adam_keeps_lr_as_a_tensor() -> None:
    params = make_params()
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], lr=0.25, capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [rate.item() for rate in rates] == [0.25, 0.5] and all(rate.dtype == torch.float32 for rate in rates)
    train(optimizer, params, 0, 1)


def test_a_subclass_written_for_apex() -> None:
    """fairseq's way: amp_C's function in its call shape, over state that the subclass keeps."""
    from apex_amp.multi_tensor_apply import multi_tensor_applier

    class Subclass(FusedAdam):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                params = [param for param in group["params"] if param.grad is not None]
                for param in params:
                    if len(self.state[param]) == 0:
                        self.state[param]["exp_avg"] = torch.zeros_like(param, dtype=torch.float16)
                        self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
                lists = [[param.grad for param in params], [param.data for param in params],
                         [self.state[param]["exp_avg"] for param in params],
                         [self.state[param]["exp_avg_sq"] for param in params]]
                multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists, group["lr"],
                                     *group["betas"], group["eps"], group["step"], self.adam_w_mode,
                                     1 if group["bias_correction"] else 0, group["weight_decay"])

    params, twins = make_params(), make_params()
    train(Subclass(params), params, 0, 3)
    train(FusedAdam(twins), twins, 0, 3)
    assert_same(params, twins, rtol=1e-3, atol=1e-4)


# ---- errors ----

@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_gradients_that_are_refused_leave_everything_alone(make: type, given: dict) -> None:
    sparse = "parameter 0 of group 1, of shape \\(17,\\), has a sparse gradient"
    for bad, message in ((torch.ones(17).to_sparse(), sparse),
                         (torch.ones(17, dtype=torch.float64), "has a gradient of torch.float64")):
        params = make_params()
        optimizer = make([{"params": params[:2]}, {"params": params[2:]}], **given)
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad_dtype = None
            param.grad = torch.ones_like(param)
        params[2].grad = bad
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert_same(params, before)
        assert len(optimizer.state) == 0


@pytest.mark.parametrize("make,given", ALL, ids=IDS)
def test_float64_parameters_are_refused(make: type, given: dict) -> None:
    params = make_params()
    params[1] = params[1].detach().double().requires_grad_()
    with pytest.raises(RuntimeError, match="parameter 1 of group 0, of shape \\(\\), is torch.float64: expected"):
        make(params, **given)


@pytest.mark.parametrize("make,given,error,message", [
    (FusedAdam, {"amsgrad": True}, RuntimeError, "AMSGrad"), (FusedLAMB, {"amsgrad": True}, RuntimeError, "AMSGrad"),
    (FusedNovoGrad, {"amsgrad": True}, RuntimeError, "AMSGrad"), (FusedSGD, {}, ValueError, "lr is missing"),
    (FusedAdam, {"lr": -1.0}, ValueError, "FusedAdam: lr must be at least 0, got -1.0"),
    (FusedAdam, {"betas": (0.9, 1.0)}, ValueError, "betas\\[1\\] must be at least 0 and below 1, got 1.0"),
    (FusedAdam, {"eps": float("nan")}, ValueError, "eps must be at least 0, got nan"),
    (FusedAdam, {"lr": "0.1"}, TypeError, "lr must be a number, got '0.1'"),
    (FusedLAMB, {"lr": None}, TypeError, "lr must be a number, got None"),
    (FusedNovoGrad, {"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
    (FusedAdam, {"betas": (0.9,)}, TypeError, "betas must be two numbers, got \\(0.9,\\)"),
    (FusedAdam, {"max_grad_norm": 1.0}, TypeError, "max_grad_norm"),
    (FusedSGD, {"lr": 0.1, "nesterov": True}, ValueError, "nesterov needs momentum above 0"),
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, ValueError, "dampening=0.1"),
    (FusedNovoGrad, {"norm_type": 1}, RuntimeError, "norm_type must be 2 .* got 1"),
    (FusedAdagrad, {"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0, got -0.1"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_options(make: type, given: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(make_params(), **given)


def test_step_arguments_of_old_fused_adam_are_refused() -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = FusedAdam(params)
    with pytest.raises(RuntimeError, match="takes no grads, output_params, scale or grad_norms"):
        optimizer.step(scale=128.0)
    assert_same(params, before)


def test_the_package_exports_every_optimizer() -> None:
    assert set(optimizers.__all__) == {"FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "LARC"}
