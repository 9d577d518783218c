"""Several calls of amp.initialize in one process: side by side, in a row, and over and over as in a notebook."""
from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp import amp
from apex_amp.amp._state import process
from tests.training import INF, LEVELS, Dot, backward, initialize, integers, train, values


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


class Net(nn.Module):
    """A linear layer that notes the dtype that F.linear computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = F.linear(x, self.layer.weight, self.layer.bias)
        self.seen = output.dtype
        return output.float().square().mean()


COMPUTES_IN = {"O0": torch.float32, "O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16,
               "O5": torch.bfloat16}


@pytest.mark.parametrize("first, second", itertools.permutations(LEVELS, 2))
def test_two_models_at_two_levels_train_side_by_side(first: str, second: str) -> None:
    """Each as if the other were not there: its own casts, its own loss scale, its own overflows."""
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    fresh = [Net(), Net()]

    def alone(index: int, level: str) -> torch.Tensor:
        model = Net()
        model.load_state_dict(fresh[index].state_dict())
        model, optimizer = initialize(level, model, sgd(model))
        for _ in range(3):
            optimizer.zero_grad()
            backward(level, model(x), optimizer)
            optimizer.step()
        result = values(model)
        amp.shutdown()
        return result

    wanted = [alone(0, first), alone(1, second)]
    models = [Net(), Net()]
    optimizers = []
    for index, level in enumerate((first, second)):
        models[index].load_state_dict(fresh[index].state_dict())
        models[index], optimizer = initialize(level, models[index], sgd(models[index]), loss_scale=128.0)
        optimizers.append(optimizer)
    for step in range(3):
        for level, model, optimizer in zip((first, second), models, optimizers):
            if step == 1:
                optimizer.zero_grad()
                backward(level, model(x) * INF, optimizer)
                optimizer.step()
                assert amp.last_step_skipped(optimizer)
            optimizer.zero_grad()
            backward(level, model(x), optimizer)
            assert model.seen == COMPUTES_IN[level]
            optimizer.step()
    assert torch.equal(values(models[0]), wanted[0])
    assert torch.equal(values(models[1]), wanted[1])


def test_a_loss_id_belongs_to_the_call_that_knew_the_optimizer() -> None:
    first, second = Dot(), Dot()
    first, first_optimizer = initialize("O1", first, sgd(first), loss_scale="dynamic", num_losses=2,
                                        max_loss_scale=512.0)
    second, second_optimizer = initialize("O1", second, sgd(second), loss_scale="dynamic", max_loss_scale=64.0)
    with amp.scale_loss(torch.ones((), requires_grad=True), first_optimizer, loss_id=1) as scaled:
        assert scaled.item() == 512
    with pytest.raises(IndexError):
        backward("O1", second(torch.ones(4)), second_optimizer, loss_id=1)
    backward("O1", first(torch.ones(4)) * INF, first_optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}
    with amp.scale_loss(torch.ones((), requires_grad=True), first_optimizer) as scaled:
        assert scaled.item() == 256


@pytest.mark.parametrize("first, second", itertools.product(LEVELS, LEVELS))
def test_initialize_again_at_another_level_goes_on_from_the_same_weights(first: str, second: str) -> None:
    inputs = integers(4)

    def run(level: str | None, again: str | None) -> torch.Tensor:
        model = Dot()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        train(level, model, optimizer, inputs[:2])
        optimizer.zero_grad()
        return train(again, model, optimizer, inputs[2:])

    assert torch.equal(run(first, second), run(None, None))


@pytest.mark.parametrize("level", LEVELS)
def test_shutdown_gives_back_ordinary_objects_and_initialize_works_again(level: str) -> None:
    inputs = integers(6)
    originals = torch.mm, torch.Tensor.__add__, F.linear
    model = Dot()
    optimizer = sgd(model)
    train(level, model, optimizer, inputs[:2])
    amp.shutdown()
    assert (torch.mm, torch.Tensor.__add__, F.linear) == originals
    assert type(model) is Dot and type(optimizer) is torch.optim.SGD and "step" not in vars(optimizer)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    train(None, model, optimizer, inputs[2:4])
    got = train(level, model, optimizer, inputs[4:])
    reference = Dot()
    wanted = train(None, reference, sgd(reference), inputs)
    tolerance = {"O2": 2.0 ** -11, "O3": 2.0 ** -9, "O5": 2.0 ** -8}.get(level, 0)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_notebook_that_initializes_over_and_over_stacks_nothing(level: str) -> None:
    model = Dot()
    optimizer = sgd(model)
    for _ in range(20):
        model, optimizer = initialize(level, model, optimizer)
    assert type(model).__mro__[1] is Dot and type(optimizer).__mro__[1] is torch.optim.SGD
    assert len(process.alive) == 1
    assert len(model._state_dict_hooks) <= 1 and len(model._load_state_dict_pre_hooks) <= 1
    calls = []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    backward(level, model(torch.ones(4)), optimizer)
    handle.remove()
    assert calls == [1]
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)


@pytest.mark.parametrize("level", LEVELS)
def test_a_set_up_that_nobody_uses_any_more_is_freed(level: str) -> None:
    def cell() -> list[weakref.ref]:
        model = Dot()
        model, optimizer = initialize(level, model, sgd(model), loss_scale="dynamic")
        backward(level, model(torch.ones(4)) * INF, optimizer)
        optimizer.step()
        return [weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(amp.master_params(optimizer)))]

    references = cell() + cell()
    gc.collect()
    assert all(reference() is None for reference in references)
    assert process.alive == []


@pytest.mark.parametrize("level", LEVELS)
def test_one_model_with_an_optimizer_of_a_later_call(level: str) -> None:
    """initialize(model) for inference first, then the model with an optimizer."""
    model = Dot()
    model = amp.initialize(model, opt_level=level, verbosity=0)
    with torch.no_grad():
        assert model(torch.ones(4)).item() == 12
    assert torch.equal(train(level, model, torch.optim.SGD(model.parameters(), lr=0.125), [torch.ones(4)]),
                       values(Dot()) - 0.125)


def test_disabled_after_enabled_leaves_the_earlier_set_up_working() -> None:
    first, second = Dot(), Dot()
    first, first_optimizer = initialize("O2", first, sgd(first))
    second, second_optimizer = amp.initialize(second, sgd(second), enabled=False)
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        backward("O2", model(torch.ones(4)), optimizer)
        optimizer.step()
        assert torch.equal(values(model), values(Dot()) - 0.125)
