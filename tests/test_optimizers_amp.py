"""The fused optimizers under amp: one pass that writes the model too, half gradients, skips on the device."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex_amp import amp, optimizers
from apex_amp.amp import master_weights
from apex_amp.amp.overflow import Overflow

FLOAT_LEVELS = ("O0", "O1", "O2", "O4", "O5")  # at O3 torch steps in half arithmetic, where eps is 0
ALL = [("FusedAdam", {"lr": 0.01, "weight_decay": 0.1}), ("FusedSGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
       ("FusedLAMB", {"lr": 0.01}), ("FusedNovoGrad", {"lr": 0.01, "weight_decay": 0.1}),
       ("FusedAdagrad", {"lr": 0.01})]
IDS = [name for name, _ in ALL]
TWINS = [("FusedAdam", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
         ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
         ("FusedAdagrad", torch.optim.Adagrad, {"lr": 0.01})]


def make(name: str, given: dict[str, Any], level: str = "O2", **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    make_optimizer = getattr(optimizers, name, None) or getattr(torch.optim, name)
    optimizer = make_optimizer([{"params": model[0].parameters()}, {"params": [*model[1].parameters(),
                                *model[3].parameters()], "lr": 0.02}], **given, **more)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0 if level == "O2" else None)


def backward(model: nn.Module, optimizer: Any, step: int, overflow: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    data, target = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    loss = nn.functional.mse_loss(model(data).float(), target)
    with amp.scale_loss(loss * float("inf") if overflow else loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def train(model: nn.Module, optimizer: Any, begin: int = 0, end: int = 8, overflow_at: int | None = None,
          clip: float | None = None) -> None:
    for step in range(begin, end):
        backward(model, optimizer, step, step == overflow_at)
        if clip:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
        optimizer.step()
        optimizer.zero_grad()


def everything_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of the model's parameters, the masters, and the optimizer's state."""
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    state = [value for master in masters for value in optimizer.state[master].values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *masters, *state]]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        assert one.dtype == other.dtype and torch.equal(one, other)


def assert_alike(name: str, run: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    """Equal bits, except that LAMB's norm of scaled and of unscaled gradients may round apart."""
    if name != "FusedLAMB":
        assert_equal(everything_of(*run), everything_of(*expected))
    for one, other in zip(amp.master_params(run[1]), amp.master_params(expected[1])):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def separate_copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Inside the returned context, fused optimizers leave the model's parameters to amp's copy."""
    def switch(on: bool) -> None:
        monkeypatch.setattr(optimizers.FusedAdam.__mro__[1], "_writes_model_params", not on)
    return switch


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("name,twin,given", TWINS, ids=[twin.__name__ for _, twin, _ in TWINS])
def test_every_level_follows_torchs_optimizer(name: str, twin: type, given: dict, level: str) -> None:
    ours, theirs = make(name, given, level), make(twin.__name__, given, level)
    train(*ours)
    train(*theirs)
    # Below O0 a weight that rounds the other way moves the next gradient by a rounding step of the model's type.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if level == "O0" else {"rtol": 0.02, "atol": 0.01}
    for one, other in zip(amp.master_params(ours[1]), amp.master_params(theirs[1])):
        torch.testing.assert_close(one.float(), other.float(), **tolerance)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name,given", ALL, ids=IDS)
def test_one_pass_has_the_bits_of_separate_passes(name: str, given: dict, level: str, separate_copies: Any) -> None:
    overflow_at = 3 if level == "O2" else None
    separate_copies(True)
    expected = make(name, given, level)
    train(*expected, overflow_at=overflow_at)
    separate_copies(False)
    for materialize in (True, False):
        run = make(name, given, level, materialize_master_grads=materialize)
        train(*run, overflow_at=overflow_at)
        assert_alike(name, run, expected)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_no_copy_pass_follows_a_fused_step(level: str, materialize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("FusedAdam", {}, level, materialize_master_grads=materialize)
    copied = []
    copy = master_weights.multi_tensor_copy
    monkeypatch.setattr(master_weights, "multi_tensor_copy", lambda src, dst: (copied.extend(src), copy(src, dst)))
    train(model, optimizer)
    assert copied == []
    low = torch.float16 if level == "O2" else torch.bfloat16
    masters = {id(value): value for value in model.state_dict().values()}
    for name, param in model.named_parameters():
        assert torch.equal(param, model.state_dict()[name].to(param.dtype))
    assert low in {param.dtype for param in model.parameters()} and masters


@pytest.mark.parametrize("name,given", ALL, ids=IDS)
def test_clipping_materialized_masters(name: str, given: dict) -> None:
    default, lazy = make(name, given), make(name, given, materialize_master_grads=False)
    for run in (default, lazy):
        train(*run, clip=0.05)
    assert_equal(everything_of(*lazy), everything_of(*default))


def test_master_params_give_masters_their_gradients() -> None:
    model, optimizer = make("FusedSGD", {"lr": 0.1}, materialize_master_grads=False)
    backward(model, optimizer, 0)
    weight = model[0].weight
    assert weight.grad.dtype == torch.float16
    assert all(master.grad is None for master in optimizer.param_groups[0]["params"])
    scaled = weight.grad.float()
    masters = list(amp.master_params(optimizer))
    assert torch.equal(masters[0].grad, scaled / 128)
    assert weight.grad is masters[0].grad


@pytest.mark.parametrize("between", ["nothing", "zero_grad", "zero_grad to zeros", "exception"])
def test_several_backwards_before_a_step(between: str) -> None:
    runs = [make("FusedAdam", {"lr": 0.01}, materialize_master_grads=materialize) for materialize in (True, False)]
    for model, optimizer in runs:
        backward(model, optimizer, 0)
        if between.startswith("zero_grad"):
            optimizer.zero_grad(set_to_none=between == "zero_grad")
        if between == "exception":
            with pytest.raises(KeyError), amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as loss:
                loss.backward()
                raise KeyError
        backward(model, optimizer, 1)
        optimizer.step()
        train(model, optimizer, 2, 4)
    assert_equal(everything_of(*runs[1]), everything_of(*runs[0]))


def test_delayed_unscaling_of_half_gradients() -> None:
    runs = [make("FusedAdam", {"lr": 0.01}, materialize_master_grads=materialize) for materialize in (True, False)]
    for model, optimizer in runs:
        loss = model(torch.ones(4, 6)).float().square().mean()
        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        backward(model, optimizer, 1)
        optimizer.step()
        train(model, optimizer, 2, 4)
    assert_equal(everything_of(*runs[1]), everything_of(*runs[0]))


def test_clipping_scaled_model_gradients_is_refused() -> None:
    model, optimizer = make("FusedAdam", {}, materialize_master_grads=False)
    backward(model, optimizer, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = everything_of(model, optimizer)
    with pytest.raises(RuntimeError, match="still carried the loss scale.*edit the gradients of amp.master_params"):
        optimizer.step()
    assert_equal(everything_of(model, optimizer), before)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("name,given", ALL, ids=IDS)
def test_an_overflow_known_on_the_device_only(name: str, given: dict, materialize: bool,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose flag is still under way: the step must not ask for it, and skips all the same."""
    given = {**given, "dampening": 0.0} if "dampening" in given else given
    expected = make(name, given)
    train(*expected, overflow_at=2)
    run = make(name, given, materialize_master_grads=materialize)
    reads: list[str] = []
    for step in range(8):
        backward(*run, step, overflow=step == 2)
        with monkeypatch.context() as patch:
            patch.setattr(Overflow, "is_known", lambda self: False)
            for method in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
                patch.setattr(Tensor, method, lambda self, *args, method=method: reads.append(method))
            run[1].step()
        run[1].zero_grad()
    assert reads == []
    assert_alike(name, run, expected)


@pytest.mark.parametrize("make_optimizer", [
    lambda params: optimizers.FusedAdam(params, lr=0.01),
    lambda params: optimizers.FusedAdam(params, lr=0.01, materialize_master_grads=False),
    lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)], ids=["FusedAdam", "half gradients", "torch's"])
def test_scale_and_flag_are_not_read_through_torch(make_optimizer: Callable[..., Any]) -> None:
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Reads.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **kwargs or {})

    model = nn.Linear(6, 3)
    model, optimizer = amp.initialize(model, make_optimizer(model.parameters()), opt_level="O2", verbosity=0)
    loss = model(torch.ones(2, 6)).float().square().mean()
    with Reads():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert Reads.count == 0 and not amp.last_step_skipped(optimizer)


def test_a_closure_with_half_gradients() -> None:
    runs = [make("FusedAdam", {"lr": 0.01}, materialize_master_grads=materialize) for materialize in (True, False)]
    for model, optimizer in runs:
        for step in range(3):
            optimizer.step(lambda: optimizer.zero_grad() or backward(model, optimizer, step))
    assert_equal(everything_of(*runs[1]), everything_of(*runs[0]))


@pytest.mark.parametrize("given,gone", [({}, True), ({"set_to_none": True}, True), ({"set_to_none": False}, False)],
                         ids=str)
def test_zero_grad_of_an_optimizer_that_keeps_gradients(given: dict, gone: bool) -> None:
    """FusedSGD's default fills FP32 parameters' gradients with zeros; model parameters with masters lose theirs."""
    model, optimizer = make("FusedSGD", {"lr": 0.1})
    backward(model, optimizer, 0)
    optimizer.zero_grad(**given)
    half, floats = model[0].weight.grad, model[1].weight.grad
    assert half is None if gone else not half.any()
    assert floats is None if given.get("set_to_none") else not floats.any()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_under_amp(level: str) -> None:
    """Around an optimizer before initialize, it steps masters as it steps FP32 parameters."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    larc = optimizers.LARC(optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    model, larc = amp.initialize(model, larc, opt_level=level, verbosity=0)
    before = [param.detach().float().clone() for param in model.parameters()]
    train(model, larc, overflow_at=1)
    for param, old in zip(model.parameters(), before):
        assert not torch.equal(param.float(), old) and param.isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("name,given", ALL, ids=IDS)
def test_no_synchronization_on_a_gpu(name: str, given: dict, materialize: bool) -> None:
    given = {**given, "dampening": 0.0} if "dampening" in given else given
    model = nn.Linear(64, 64).cuda()
    optimizer = getattr(optimizers, name)(model.parameters(), **given, materialize_master_grads=materialize)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    data = torch.randn(8, 64, device="cuda")

    def iteration() -> None:
        with amp.scale_loss(model(data).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    torch.cuda.set_sync_debug_mode("error")
    try:
        iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("name,given", ALL, ids=IDS)
def test_a_cuda_graph_replays_the_step(name: str, given: dict, materialize: bool) -> None:
    """scale_loss and step, captured once and replayed, move the masters as eager steps do."""
    given = {**given, "dampening": 0.0} if "dampening" in given else given
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).cuda()
        optimizer = getattr(optimizers, name)(model.parameters(), **given, materialize_master_grads=materialize)
        runs.append(amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0))
    data = torch.randn(8, 64, device="cuda")

    def iteration(model: nn.Module, optimizer: Any) -> None:
        with amp.scale_loss(model(data).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            for _ in range(2):
                iteration(*run)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration(*runs[0])
    for _ in range(3):
        graph.replay()
        iteration(*runs[1])
    for one, other in zip(*(run[1].param_groups[0]["params"] for run in runs)):
        torch.testing.assert_close(one, other)
