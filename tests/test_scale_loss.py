"""scale_loss: what it yields, what bad use gets, clipping, double backward, and what a training loop does around it."""
from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from apex_amp import amp, optimizers
from apex_amp.multi_tensor import multi_tensor_l2norm
from tests.training import INF, LEVELS, MASTERS, Dot, backward, initialize, integers, train, values


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.125, **options})


@pytest.mark.parametrize("level", LEVELS)
def test_it_yields_the_loss_in_fp32_times_the_scale(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model), loss_scale=128.0)
    for loss in (torch.tensor(3.0, requires_grad=True), torch.ones(2, 3, requires_grad=True),
                 torch.tensor(3.0, dtype=torch.float16, requires_grad=True),
                 torch.tensor([3.0], dtype=torch.float64, requires_grad=True)):
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.dtype == torch.float32 and scaled.shape == loss.shape
            assert torch.equal(scaled, loss.float() * 128)
            scaled.sum().backward()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "FusedSGD", "FusedAdam", "FusedLAMB"])
def test_the_default_dtype_is_the_users_own(level: str, default: torch.dtype, kind: str) -> None:
    make = getattr(optimizers, kind, None) or getattr(torch.optim, kind)
    plain, model = Dot(), Dot()
    expected = train(level, plain, make(plain.parameters(), lr=0.125), inputs := integers(3))
    torch.set_default_dtype(default)
    try:
        got = train(level, model, make(model.parameters(), lr=0.125), inputs)
        assert multi_tensor_l2norm([]).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # half Adam at O3 divides 0 by 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "model", "model of two optimizers"])
def test_zero_grad_inside_the_block_clears_what_was_there_before(level: str, set_to_none: bool, by: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=3)
        optimizers = [sgd(model, momentum=0.5)] if by != "model of two optimizers" else [
            torch.optim.SGD(model.weights[:1], lr=0.125), torch.optim.SGD(model.weights[1:], lr=0.25)]
        model, optimizers = initialize(level, model, optimizers)
        for x in integers(4):
            backward(level, model(3 * x), optimizers)  # to be cleared
            with amp.scale_loss(model(x), optimizers) if level else contextlib.nullcontext(model(x)) as scaled:
                for cleared in optimizers if by == "optimizer" else [model]:
                    cleared.zero_grad(set_to_none=set_to_none)
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    torch.manual_seed(0)
    expected = run(None)
    torch.manual_seed(0)
    assert torch.equal(run(level), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_inside_the_block_is_right_and_warned_of(level: str) -> None:
    model, plain = Dot(parameters=3), Dot(parameters=3)
    expected = train(None, plain, sgd(plain, momentum=0.5), inputs := integers(3))
    parts = model.weights[:1], model.weights[1:]
    pair = [torch.optim.SGD(list(weights), lr=0.125, momentum=0.5) for weights in parts]
    model, pair = initialize(level, model, pair, verbosity=1)
    for x in inputs:
        with pytest.warns(UserWarning, match="inside the amp.scale_loss block"):
            with amp.scale_loss(model(x), pair) as scaled:
                for optimizer in pair:
                    optimizer.zero_grad()
                scaled.backward()
                for optimizer in pair:
                    optimizer.step()
    assert torch.equal(values(model), expected)
    with pytest.warns(UserWarning), amp.scale_loss(model(x) * INF, pair) as scaled:
        scaled.backward()
        pair[0].step()
    pair[1].step()
    assert torch.equal(values(model), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_inside_another_of_the_same_optimizer_is_refused(level: str) -> None:
    model, other = Dot(), Dot()
    (model, other), optimizers = initialize(level, [model, other], [sgd(model), sgd(other)])
    loss, other_loss = model(x := integers(1)[0]), other(x)
    with amp.scale_loss(loss, optimizers[0]) as scaled:
        with amp.scale_loss(other_loss, optimizers[1]) as other_scaled:
            other_scaled.backward()
        with pytest.raises(RuntimeError, match="open already"):
            with amp.scale_loss(loss, optimizers):
                pass
        scaled.backward()
    assert all(torch.equal(parameter.grad, x) for parameter in (*model.parameters(), *other.parameters()))


@pytest.mark.parametrize("level", LEVELS)
def test_bad_use_is_answered_with_the_way_out(level: str) -> None:
    loss = torch.ones((), requires_grad=True)
    model = Dot()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="before amp.initialize"):
        with amp.scale_loss(loss, optimizer):
            pass
    model, optimizer = initialize(level, model, optimizer)
    stranger = sgd(Dot())
    with pytest.raises(RuntimeError, match=r"the optimizer \(SGD\) did not go through amp.initialize"):
        with amp.scale_loss(loss, stranger):
            pass
    with pytest.raises(RuntimeError, match=r"optimizers\[1\] \(SGD\)"):
        with amp.scale_loss(loss, [optimizer, stranger]):
            pass
    with pytest.raises(RuntimeError, match="empty list"):
        with amp.scale_loss(loss, []):
            pass
    for bad, words in ((1.0, "got float"), (torch.tensor(1), "got torch.int64")):
        with pytest.raises(TypeError, match=words):
            with amp.scale_loss(bad, optimizer):
                pass
    other = Dot()
    other, other_optimizer = initialize(level, other, sgd(other))
    with pytest.raises(RuntimeError, match="different calls of amp.initialize"):
        with amp.scale_loss(loss, [optimizer, other_optimizer]):
            pass


def test_disabled_amp_hands_the_loss_through() -> None:
    model = Dot()
    model, optimizer = amp.initialize(model, sgd(model), enabled=False)
    loss = model(torch.ones(4))
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_without_backward_changes_nothing(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model))
    with amp.scale_loss(model(torch.ones(4)), optimizer):
        pass
    optimizer.step()
    assert torch.equal(values(model), values(Dot()))
    assert all(parameter.grad is None for parameter in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", [
    lambda parameters: clip_grad_norm_(parameters, 2.0),
    lambda parameters: clip_grad_norm_(parameters, 2.0, foreach=True),
    lambda parameters: clip_grad_norm_(parameters, 1.0, norm_type=INF),
    lambda parameters: clip_grad_value_(parameters, 1.0),
], ids=["norm", "foreach norm", "infinity norm", "value"])
@pytest.mark.parametrize("through", ["master_params", "model.parameters", "both in turn"])
def test_clipping(level: str, clip, through: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, sgd(model))
        steps = []
        for index, x in enumerate(integers(4)):
            optimizer.zero_grad()
            backward(level, model(x), optimizer)
            if level is None or through == "model.parameters" or (through == "both in turn" and index % 2):
                clip(model.parameters())
            else:
                clip(amp.master_params(optimizer))
            trained = model.parameters() if level is None else amp.master_params(optimizer)
            steps.append(torch.cat([parameter.grad.float() for parameter in trained]))
            optimizer.step()
        return torch.cat(steps)

    torch.manual_seed(0)
    got = run(level)
    torch.manual_seed(0)
    torch.testing.assert_close(got, run(None), rtol=2.0 ** -10 if level == "O3" else 1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("batchnorm", [False, True])
def test_gradient_penalty(level: str, batchnorm: bool) -> None:
    """autograd.grad(create_graph=True) inside the loss: WGAN-GP's critic step, near FP32's."""
    x = torch.randn(16, 4)

    def run(level: str | None) -> tuple[float, torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if batchnorm else []), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer = initialize(level, model, sgd(model), loss_scale=16.0)
        real = x.clone().requires_grad_(True)
        out = model(real)
        slope, = torch.autograd.grad(out.sum(), real, create_graph=True)
        loss = (slope.float().norm(2, dim=1) - 1).square().mean() + out.float().mean()
        backward(level, loss, optimizer)
        trained = list(model.parameters() if level is None else amp.master_params(optimizer))
        gradient = torch.cat([parameter.grad.float().flatten() for parameter in trained])
        before = values(model)
        optimizer.step()
        assert torch.isfinite(values(model)).all() and not torch.equal(values(model), before)
        return loss.item(), gradient

    (loss, gradient), (wanted_loss, wanted) = run(level), run(None)
    tolerance = 0 if level == "O0" else 0.01 if level in ("O1", "O2", "O3") else 0.08
    assert loss == pytest.approx(wanted_loss, abs=tolerance)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=tolerance)


class SumOfSquares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))

    def forward(self) -> torch.Tensor:
        return (self.weight * self.weight).sum()


@pytest.mark.parametrize("level", LEVELS)
def test_backward_create_graph_inside_the_block(level: str) -> None:
    """A penalty on the gradients of the parameters themselves: the graph of .grad survives unscaling."""
    def run(level: str | None) -> torch.Tensor:
        model = SumOfSquares()
        model, optimizer = initialize(level, model, sgd(model), loss_scale=16.0)
        loss = model().float()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            if level is None:
                loss.backward(create_graph=True)
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward(create_graph=True)
        gradient = model.weight.grad
        assert torch.equal(gradient.float(), torch.tensor([2.0, 4.0, -2.0]))
        model.weight.grad = None
        penalty = gradient.float().square().sum()
        backward(level, penalty, optimizer)
        optimizer.step()
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_of_gradients_that_have_a_graph(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        with amp.scale_loss(model(torch.ones(4)) * INF, optimizer) as scaled:
            scaled.backward(create_graph=True)
    optimizer.step()
    assert amp.last_step_skipped(optimizer) and torch.equal(values(model), values(Dot()))
    optimizer.zero_grad()
    model.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_autograd_functions_other_than_backward(level: str) -> None:
    """torch.autograd.backward, and gradients that the user computes by autograd.grad and assigns."""
    x = torch.tensor([1.0, 2, 3, -1])
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model))
    with amp.scale_loss(model(x), optimizer) as scaled:
        torch.autograd.backward([scaled])
    with amp.scale_loss(model(x), optimizer) as scaled:
        for parameter, grad in zip(model.parameters(), torch.autograd.grad(scaled, list(model.parameters()))):
            parameter.grad = grad
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.25 * x.repeat(2))


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_unused_and_thawed_parameters(level: str) -> None:
    inputs = integers(4)

    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=3)
        model.unused = nn.Parameter(torch.ones(4))
        model.weights[0].requires_grad_(False)
        model, optimizer = initialize(level, model, sgd(model, momentum=0.5, weight_decay=0.125))
        for index, x in enumerate(inputs):
            model.weights[0].requires_grad_(index >= 2)
            model.weights[1].requires_grad_(index < 2)
            optimizer.zero_grad()
            backward(level, model(x), optimizer)
            optimizer.step()
        return values(model)

    tolerance = {"O5": 2.0 ** -8, "O2": 2.0 ** -11, "O3": 2.0 ** -9}.get(level, 0)
    torch.testing.assert_close(run(level), run(None), rtol=tolerance, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_an_overflow_leaves_no_trace_in_the_next_iterations(level: str, zero: str) -> None:
    inputs = integers(6)

    def run(level: str | None, bad: tuple[int, ...]) -> tuple[torch.Tensor, dict]:
        model = Dot()
        model, optimizer = initialize(level, model, torch.optim.Adam(model.parameters(), lr=0.125))
        for index, x in enumerate(inputs):
            for repeat in range(2 if index in bad else 1):
                (optimizer if zero == "optimizer" else model).zero_grad()
                is_bad = index in bad and repeat == 0
                backward(level, model(x) * (float("nan") if is_bad else 1), optimizer)
                optimizer.step()
        return values(model), optimizer.state_dict()["state"]

    (got, state), (wanted, wanted_state) = run(level, (0, 1, 4)), run(level, ())
    assert torch.equal(got, wanted)
    for index, entries in wanted_state.items():
        assert all(torch.equal(state[index][key], value) for key, value in entries.items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skip_happens_exactly_once(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model))
    backward(level, model(torch.ones(4)) * INF, optimizer)
    optimizer.step()
    assert amp.last_step_skipped(optimizer)
    optimizer.zero_grad()
    for parameter in amp.master_params(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not amp.last_step_skipped(optimizer) and torch.equal(values(model), values(Dot()) - 0.125)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delay_overflow_check_unscales_but_decides_nothing(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model), loss_scale="dynamic", max_loss_scale=1024.0)
    backward(level, model(torch.ones(4)), optimizer, delay_overflow_check=True)
    assert all(torch.equal(parameter.grad, torch.ones(4)) for parameter in amp.master_params(optimizer))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 0}
    backward(level, model(torch.ones(4)) * INF, optimizer, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 0}
    optimizer.step()
    assert not amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", MASTERS)
def test_a_backward_outside_the_block_warns_by_name(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, sgd(model), verbosity=1)
    model(torch.ones(4)).backward()
    with pytest.warns(UserWarning, match=r"2 low-precision parameters \(weights.0, weights.1, ...\).*amp.scale_loss"):
        optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)


@pytest.mark.parametrize("level", LEVELS)
def test_step_and_zero_grad_before_any_backward(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.Adam(model.parameters()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad(True)
    optimizer.step()
    assert torch.equal(values(model), values(Dot())) and not amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_what_the_model_and_the_masters_show(level: str, set_to_none: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = initialize(level, model, sgd(model))
    backward(level, model(torch.randn(5, 4)).square().sum(), optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in (*model.parameters(), *amp.master_params(optimizer)):
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_an_unused_parameter_moves_on_by_momentum_where_its_gradient_is_zeroed(level: str, set_to_none: bool,
                                                                               by: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, sgd(model, momentum=0.5, weight_decay=0.25))
        for used in (True, False, True, False):
            (optimizer if by == "optimizer" else model).zero_grad(set_to_none)
            model.weights[0].requires_grad_(used)
            backward(level, model(torch.ones(4)), optimizer)
            optimizer.step()
        return torch.cat([value.flatten() for value in model.state_dict().values()]).float()

    assert torch.allclose(run(level), run(None), rtol=2e-3 if level == "O3" else 0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_hooks_see_the_gradient_once(level: str) -> None:
    calls = []
    model = Dot()
    model.weights[0].register_hook(lambda grad: calls.append("hook"))
    model, optimizer = initialize(level, model, sgd(model))
    model.weights[0].register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    backward(level, model(torch.ones(4)), optimizer)
    assert calls == ["hook", "accumulated"]
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)
