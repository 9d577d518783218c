"""FP32 masters at O2 and O5: which parameters have one, what reaches which side, and what becomes of them."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from apex_amp import amp
from apex_amp.amp.master_weights import master_of

LOW = {"O2": torch.float16, "O5": torch.bfloat16}
levels = pytest.mark.parametrize("level", LOW)


def build(level: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0, **keywords)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def assert_paired(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every model parameter is its master, rounded."""
    masters = list(amp.master_params(optimizer))
    assert len(masters) == len(list(model.parameters()))
    for parameter, master in zip(model.parameters(), masters):
        assert master.dtype is torch.float32 and torch.equal(parameter, master.to(parameter.dtype))


@levels
def test_masters_are_the_exact_fp32_values_right_after_initialize(level):
    torch.manual_seed(0)
    plain = nn.Linear(4, 8)
    weight = plain.weight.detach().clone()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    groups = [id(group) for group in optimizer.param_groups]
    model, optimizer = amp.initialize(plain, optimizer, opt_level=level, verbosity=0)
    assert [id(group) for group in optimizer.param_groups] == groups
    masters = list(amp.master_params(optimizer))
    assert torch.equal(masters[0], weight) and masters[0].requires_grad and masters[0].is_leaf
    assert model.weight.dtype is LOW[level] and torch.equal(model.weight, weight.to(LOW[level]))
    assert master_of(model.weight) is masters[0] is optimizer.param_groups[0]["params"][0]


@levels
def test_fp32_parameters_are_their_own_masters(level):
    model, optimizer = build(level)
    assert master_of(model[1].weight) is None
    assert any(master is model[1].weight for master in amp.master_params(optimizer))
    step(model, optimizer)
    assert_paired(model, optimizer)


@levels
def test_updates_too_small_for_half_accumulate_in_the_masters(level):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0 ** -14)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    for _ in range(64):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert next(amp.master_params(optimizer)).item() == 1 - 64 * 2.0 ** -14
    assert model.weight.item() == torch.tensor(1 - 64 * 2.0 ** -14).to(LOW[level]).item()


# --- writes -----------------------------------------------------------------------------------------------------------

@levels
@pytest.mark.parametrize("when", ["before any step", "between steps"])
def test_a_write_into_a_model_parameter_reaches_its_master(level, when):
    model, optimizer = build(level)
    if when == "between steps":
        step(model, optimizer)
    value = torch.full((8, 4), 1 / 3, dtype=LOW[level])
    untouched = next(iter(model[3].parameters())).clone(), model.state_dict()["3.weight"].clone()
    with torch.no_grad():
        model[0].weight.copy_(value)
    model(torch.randn(6, 4))
    assert torch.equal(master_of(model[0].weight), value.float())
    assert torch.equal(model[3].weight, untouched[0]) and torch.equal(model.state_dict()["3.weight"], untouched[1])
    with torch.no_grad():
        nn.init.zeros_(model[0].weight)
    optimizer.step()  # no gradients: it only takes the write over
    assert not master_of(model[0].weight).any() and not model[0].weight.any()


@levels
def test_elements_that_were_not_changed_keep_their_exact_masters(level):
    """Weight clipping, in place or through .data, must not round all other weights."""
    model, optimizer = build(level)
    exact = master_of(model[0].weight).clone()
    kept = model[0].weight.abs() < 0.2
    with torch.no_grad():
        model[0].weight.clamp_(-0.2, 0.2)
        model[3].weight.copy_(model[3].weight)
    last = master_of(model[3].weight).clone()
    model(torch.randn(6, 4))
    assert torch.equal(master_of(model[3].weight), last)
    model[0].weight.data.clamp_(-0.2, 0.2)
    amp.sync_masters(model)
    clipped = master_of(model[0].weight)
    assert 0 < kept.sum() < kept.numel() and torch.equal(clipped[kept], exact[kept])
    assert torch.equal(clipped[~kept], model[0].weight[~kept].float())


@levels
def test_a_write_into_a_master_reaches_the_model_parameter(level):
    model, optimizer = build(level)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.mul_(0.5)
    model.eval()(torch.randn(2, 4))
    assert_paired(model, optimizer)


@levels
def test_writes_through_data_need_sync_masters(level):
    model, optimizer = build(level)
    before = master_of(model[0].weight).clone()
    model[0].weight.data.fill_(0.25)
    model(torch.randn(6, 4))
    assert torch.equal(master_of(model[0].weight), before)
    amp.sync_masters(nn.DataParallel(model))
    assert torch.all(master_of(model[0].weight) == 0.25)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.25))
    with pytest.raises(RuntimeError, match="Linear.*did not go through amp.initialize"):
        amp.sync_masters(nn.Linear(1, 1))
    assert amp.sync_masters(amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)) is None


@levels
def test_sync_costs_nothing_when_nothing_was_written(level, monkeypatch):
    model, optimizer = build(level)
    step(model, optimizer)
    monkeypatch.setattr("apex_amp.amp.master_weights.multi_tensor_copy", lambda *lists: pytest.fail("copied"))
    model.eval()(torch.randn(2, 4))


# --- sets of masters --------------------------------------------------------------------------------------------------

@levels
def test_a_parameter_in_two_optimizers_has_one_master(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.weight], lr=0.2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=128.0)
    assert optimizers[1].param_groups[0]["params"][0] is optimizers[0].param_groups[0]["params"][0]
    reference = copy.deepcopy(model.state_dict())["weight"]
    x = torch.ones(2, 4)
    with amp.scale_loss(model(x).float().sum(), optimizers[1]) as scaled_loss:
        scaled_loss.backward()
    optimizers[1].step()
    torch.testing.assert_close(model.state_dict()["weight"], reference - 0.2 * 2)
    assert torch.equal(model.weight, model.state_dict()["weight"].to(LOW[level]))
    with torch.no_grad():
        model.weight.zero_()
    model(x)
    assert not model.state_dict()["weight"].any()


@levels
def test_state_that_an_optimizer_had_moves_to_the_masters_and_back(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = optimizer.state_dict()
    assert set(optimizer.state) == set(amp.master_params(optimizer))
    amp.shutdown()
    assert set(optimizer.state) == set(model.parameters())
    for state in (after, optimizer.state_dict()):
        assert state["param_groups"] == before["param_groups"]
        for index, values in before["state"].items():
            assert all(torch.equal(state["state"][index][key], value) for key, value in values.items())


@levels
def test_shutdown_gives_the_exact_values_back(level):
    model, optimizer = build(level)
    step(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    amp.shutdown()
    assert type(model) is nn.Sequential and type(optimizer) is torch.optim.SGD
    assert all(torch.equal(value, expected[name]) and value.dtype is expected[name].dtype
               for name, value in model.state_dict().items())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert all(not hasattr(p, "_amp_master") and p.dtype is torch.float32 for p in model.parameters())
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


@levels
@pytest.mark.cuda
def test_masters_move_with_the_model(level):
    model, optimizer = build(level)
    model.cuda()
    assert all(master.device.type == "cuda" for master in amp.master_params(optimizer))
    assert_paired(model, optimizer)


@levels
def test_a_deepcopy_and_a_pickle_have_masters_of_their_own(level):
    model, optimizer = build(level)
    step(model, optimizer)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter, original in zip(twin.parameters(), model.parameters()):
            assert (master_of(parameter) is None) == (master_of(original) is None)
            if master_of(parameter) is not None:
                assert master_of(parameter) is not master_of(original)
                assert torch.equal(master_of(parameter), master_of(original))
        for value in twin.state_dict().values():
            value.zero_()
        twin(torch.randn(6, 4))
        assert not any(parameter.any() for parameter in twin.parameters())
    assert all(parameter.any() for parameter in (model[0].weight, model[3].weight))


@levels
def test_the_optimizer_may_die_first(level):
    model, optimizer = build(level)
    step(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    del optimizer
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model.state_dict()["0.weight"].zero_()
    model(torch.randn(6, 4))
    assert not model[0].weight.any()


@levels
def test_parameters_replaced_after_initialize_are_reported(level):
    model, optimizer = build(level)
    step(model, optimizer)
    model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))
    optimizer._amp_stash.setup.verbosity = 1
    with pytest.warns(UserWarning, match=r"1 parameters with FP32 masters .* shape \(1, 8\)"):
        step(model, optimizer)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="replaced the model's parameters .* before amp.initialize"):
        model.to("meta")


@levels
def test_frozen_parameters_are_not_reported_as_replaced(level, recwarn):
    model, optimizer = build(level)
    optimizer._amp_stash.setup.verbosity = 1
    step(model, optimizer)
    model[0].requires_grad_(False)
    step(model, optimizer, seed=1)
    assert not recwarn.list


@levels
def test_a_small_fp32_gradient_is_written_again_unless_somebody_has_it(level):
    model, optimizer = build(level)

    def gradient(seed: int) -> torch.Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        return model[0].weight.grad

    address = gradient(0).data_ptr()
    assert gradient(1).data_ptr() == address
    held = gradient(2)
    copy_of_held = held.clone()
    view = gradient(3).view(-1)
    copy_of_view = view.clone()
    array = gradient(4).numpy()
    copy_of_array = array.copy()
    gradient(5)
    assert torch.equal(held, copy_of_held) and torch.equal(view, copy_of_view) and (array == copy_of_array).all()
