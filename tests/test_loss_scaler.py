"""The loss scale itself: growth, backoff, limits, static scales, state, and every word that is printed about it."""
from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from apex_amp import amp
from apex_amp.amp.overflow import SKIPS_BEFORE_WARNING, Overflow
from apex_amp.amp.scaler import GROWTH_INTERVAL, SMALLEST_SCALE, LossScaler
from tests.training import INF, LEVELS, Dot, backward, initialize, values


def setup(level: str = "O1", **options):
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    return initialize(level, model, optimizer, **{"loss_scale": "dynamic", **options})


def iterate(level: str, model: nn.Module, optimizer, bad: bool = False, loss_id: int = 0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(4)) * 2.0 ** -10
    backward(level, loss * INF if bad else loss, optimizer, loss_id=loss_id)
    optimizer.step()


def reference_scales(overflows: list[bool], start: float, least: float, most: float, interval: int) -> list[float]:
    """The rule in plain Python."""
    scale, clean, seen = start, 0, []
    for overflow in overflows:
        if overflow:
            scale, clean = max(least, scale / 2), 0
        else:
            clean += 1
            if clean == interval:
                scale, clean = min(most, scale * 2), 0
        seen.append(scale)
    return seen


@pytest.mark.parametrize("least, most", [(None, 2.0 ** 24), (2.0 ** 12, 2.0 ** 17), (1024.0, 1024.0), (None, 100.0)])
def test_growth_and_backoff_follow_the_rule(monkeypatch, least: float | None, most: float) -> None:
    monkeypatch.setattr("apex_amp.amp.scaler.GROWTH_INTERVAL", 3)
    scaler = LossScaler("dynamic", least, most)
    overflows = (torch.rand(400) < 0.15).tolist() + [True] * 60 + [False] * 150
    wanted = reference_scales(overflows, min(2.0 ** 16, most), SMALLEST_SCALE if least is None else least, most, 3)
    for overflow, scale in zip(overflows, wanted):
        scaler.found_inf.fill_(overflow)
        scaler.update()
        assert scaler.loss_scale() == scale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_thousand_clean_exits_double_the_scale(level: str) -> None:
    model, optimizer = setup(level)
    scaler = amp.state_dict()["loss_scaler0"]
    assert scaler == {"loss_scale": 2.0 ** 16, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": GROWTH_INTERVAL - 2}})
    iterate(level, model, optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": GROWTH_INTERVAL - 1}}
    iterate(level, model, optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 0}}
    iterate(level, model, optimizer, bad=True)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}}


def test_delayed_exits_do_not_count() -> None:
    model, optimizer = setup()
    for _ in range(3):
        backward("O1", model(torch.ones(4)), optimizer, delay_unscale=True)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    backward("O1", model(torch.ones(4)), optimizer)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_growth_stops_at_the_maximum_and_the_count_restarts() -> None:
    model, optimizer = setup(max_loss_scale=3000.0)
    assert amp.loss_scale() == 3000
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2048.0, "unskipped": GROWTH_INTERVAL - 1}})
    iterate("O1", model, optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 3000.0, "unskipped": 0}}


def test_the_floor_without_a_minimum_and_with_one() -> None:
    for minimum, floor in ((None, 2.0 ** -10), (0, 2.0 ** -10), (16.0, 16.0)):
        model, optimizer = setup(min_loss_scale=minimum)
        for _ in range(30):
            iterate("O1", model, optimizer, bad=True)
        assert amp.loss_scale() == floor
        before = values(model)
        iterate("O1", model, optimizer)
        assert torch.isfinite(values(model)).all() and not torch.equal(values(model), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 128.0, 7.0, "48.5", 0.5, 1e-3])
def test_static_scales(level: str, scale: float | str) -> None:
    """A static scale never moves; gradients are FP32's to rounding; it skips on overflow unless it is 1."""
    model, optimizer = setup(level, loss_scale=scale)
    x = torch.tensor([1.0, -3.0, 0.375, 0.0])
    backward(level, model(x), optimizer)
    for parameter in amp.master_params(optimizer):
        torch.testing.assert_close(parameter.grad.float(), x, rtol=2.0 ** -7, atol=0)
    optimizer.step()
    before = values(model)
    iterate(level, model, optimizer, bad=float(scale) != 1)
    assert amp.loss_scale() == pytest.approx(float(scale), rel=1e-7)
    if float(scale) != 1:
        assert torch.equal(values(model), before) and amp.last_step_skipped(optimizer)
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0


def test_a_static_scale_of_one_makes_no_pass_over_the_gradients(monkeypatch) -> None:
    def forbidden(*args):
        raise AssertionError("a pass over the gradients")

    monkeypatch.setattr("apex_amp.amp.gradients.multi_tensor_scale", forbidden)
    monkeypatch.setattr("apex_amp.amp.gradients.multi_tensor_axpby", forbidden)
    for level in ("O0", "O1", "O3", "O4"):
        model, optimizer = setup(level, loss_scale=1.0)
        iterate(level, model, optimizer)
        backward(level, model(torch.ones(4)), optimizer, delay_unscale=True)
        backward(level, model(torch.ones(4)), optimizer)
    # At O5 bfloat16 gradients must become FP32, but those that are FP32 already are left alone.
    model = nn.BatchNorm1d(4)
    model, optimizer = initialize("O5", model, torch.optim.SGD(model.parameters(), lr=0.125), loss_scale=1.0)
    backward("O5", model(torch.randn(8, 4)).square().sum(), optimizer)


def test_per_loss_scalers_move_on_their_own() -> None:
    model, optimizer = setup(num_losses=3)
    iterate("O1", model, optimizer, bad=True, loss_id=1)
    iterate("O1", model, optimizer, loss_id=2)
    assert [amp.loss_scale(i) for i in range(3)] == [2.0 ** 16, 2.0 ** 15, 2.0 ** 16]
    assert [amp.state_dict()[f"loss_scaler{i}"]["unskipped"] for i in range(3)] == [0, 0, 1]
    for loss_id in (3, -1, "0", None):
        with pytest.raises(IndexError, match="num_losses"):
            backward("O1", model(torch.ones(4)), optimizer, loss_id=loss_id)


@pytest.mark.parametrize("loss_scale", ["dynamic", 64.0])
def test_state_survives_a_round_trip(loss_scale: float | str) -> None:
    model, optimizer = setup(loss_scale=loss_scale, num_losses=2)
    iterate("O1", model, optimizer)
    if loss_scale == "dynamic":
        iterate("O1", model, optimizer, bad=True, loss_id=1)
    saved = amp.state_dict()
    setup(loss_scale=loss_scale, num_losses=2)
    assert amp.state_dict() != saved
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved


def test_a_scale_that_is_no_scale_is_refused() -> None:
    scaler = LossScaler("dynamic")
    for value in (0.0, -1.0, INF, float("nan")):
        with pytest.raises(ValueError, match="positive finite"):
            scaler._loss_scale = value
    scaler._loss_scale = 4.0
    assert scaler.loss_scale() == 4.0


# --- what is printed --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", ["O1", "O2"])
def test_messages_at_each_verbosity(level: str, capsys) -> None:
    words = "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 32768.0\n"
    names = "Gradients that are not finite: weights.0, weights.1\n"
    for verbosity, wanted in ((0, ""), (1, words), (2, words + names)):
        model, optimizer = setup(level, verbosity=verbosity, num_losses=2)
        said = capsys.readouterr()
        assert (said.out == "") == (verbosity == 0) and said.err == ""
        assert amp.overflow_report() == []
        iterate(level, model, optimizer, loss_id=1)
        iterate(level, model, optimizer, bad=True, loss_id=1)
        said = capsys.readouterr()
        assert (said.out, said.err) == (wanted, "")
        assert amp.overflow_report() == ["weights.0", "weights.1"]


def test_message_of_a_static_scale(capsys) -> None:
    model, optimizer = setup(loss_scale=128.0, verbosity=1)
    capsys.readouterr()
    iterate("O1", model, optimizer, bad=True)
    wanted = "Gradient overflow.  Skipping step, loss scaler 0 keeping static loss scale 128.0\n"
    assert capsys.readouterr().out == wanted


def test_only_the_parameters_that_overflowed_are_named() -> None:
    model, optimizer = setup("O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(4)) * 2.0 ** -10, optimizer) as scaled:
        scaled.backward()
        model.weights[1].grad[2] = float("nan")
    assert amp.overflow_report() == ["weights.1"]


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_warning_after_many_skips_in_a_row_names_the_parameters(verbosity: int) -> None:
    model, optimizer = setup(verbosity=verbosity)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(SKIPS_BEFORE_WARNING - 1):
            iterate("O1", model, optimizer, bad=True)
        iterate("O1", model, optimizer)
        for _ in range(SKIPS_BEFORE_WARNING - 1):
            iterate("O1", model, optimizer, bad=True)
        assert not caught
        for _ in range(SKIPS_BEFORE_WARNING):
            iterate("O1", model, optimizer, bad=True)
    assert len(caught) == verbosity
    assert all("weights.0, weights.1" in str(warning.message) for warning in caught)


def test_other_ranks_print_nothing(monkeypatch, capsys) -> None:
    for rank, wanted in ((0, 1), (1, 0)):
        model, optimizer = setup(verbosity=1)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr("torch.distributed.is_initialized", lambda: True)
            patch.setattr("torch.distributed.get_rank", lambda *args: rank)
            iterate("O1", model, optimizer, bad=True)
        assert capsys.readouterr().out.count("Gradient overflow.") == wanted


# --- a device whose flag arrives later --------------------------------------------------------------------------------

class LateEvent:
    """Stands in for the CUDA event after which a flag is on the host."""

    def __init__(self) -> None:
        self.arrived = False
        self.waits = 0

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waits += 1
        self.arrived = True


@pytest.fixture
def late_flags(monkeypatch):
    """Makes every verdict of this CPU look like one that is still on its way from a GPU."""
    events: list[LateEvent] = []

    def init(self, setup, scaler, flags):
        self._setup, self._scaler, self._flags = setup, scaler, flags
        self._happened = None
        self.found_inf = scaler.found_inf.clone()
        self._seen = (self.found_inf, scaler.scale_tensor.clone())
        self._event = LateEvent()
        events.append(self._event)

    monkeypatch.setattr(Overflow, "__init__", init)
    return events


def test_an_ordinary_optimizer_waits_for_the_flag_once_at_step(late_flags) -> None:
    model, optimizer = setup()
    before = values(model)
    optimizer.zero_grad()
    backward("O1", model(torch.ones(4)) * INF, optimizer)
    assert late_flags[0].waits == 0
    optimizer.step()
    assert late_flags[0].waits == 1 and torch.equal(values(model), before) and amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("name, options", [
    ("SGD", dict(momentum=0.9, weight_decay=0.1)), ("SGD", dict(nesterov=True, momentum=0.9)), ("Adam", {}),
    ("AdamW", {}), ("Adagrad", {})])
def test_fused_optimizers_skip_on_the_device_without_waiting(late_flags, capsys, name: str, options: dict) -> None:
    """Overflow first, then two good steps, another overflow, a good step: equal to the good steps alone."""
    def run(level: str | None) -> tuple[torch.Tensor, dict]:
        model = Dot()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.125, fused=True, **options)
        model, optimizer = initialize(level, model, optimizer, loss_scale="dynamic", verbosity=1)
        for bad in (True, False, False, True, False):
            if bad and level is None:
                continue
            optimizer.zero_grad()
            loss = model(torch.ones(4))
            backward(level, loss * INF if bad else loss, optimizer)
            optimizer.step()
            assert not hasattr(optimizer, "found_inf")
        return values(model), optimizer.state_dict()["state"]

    got, state = run("O1")
    assert all(event.waits == 0 for event in late_flags)
    assert "Gradient overflow" not in capsys.readouterr().out
    wanted, wanted_state = run(None)
    assert torch.equal(got, wanted)
    for index, entries in wanted_state.items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(value)), key


def test_messages_come_when_the_flag_has_arrived(late_flags, capsys) -> None:
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    model, optimizer = initialize("O1", model, optimizer, loss_scale="dynamic", verbosity=1)
    capsys.readouterr()
    iterate("O1", model, optimizer, bad=True)
    iterate("O1", model, optimizer)
    assert capsys.readouterr().out == ""
    late_flags[0].arrived = True
    iterate("O1", model, optimizer)
    wanted = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == wanted
    assert amp.overflow_report() == ["weights.0", "weights.1"]
    assert not amp.last_step_skipped(optimizer)


def test_fused_sgd_with_dampening_waits_because_zero_momentum_is_not_the_same(late_flags) -> None:
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, dampening=0.5, fused=True)
    model, optimizer = initialize("O1", model, optimizer, loss_scale="dynamic")
    before = values(model)
    iterate("O1", model, optimizer, bad=True)
    assert late_flags[0].waits == 1 and torch.equal(values(model), before)
    optimizer.zero_grad()
    backward("O1", model(torch.ones(4)), optimizer)
    optimizer.step()
    assert torch.equal(values(model), before - 0.125)
