"""Gradients of several backwards: micro-batches, losses, models and optimizers, delayed unscaling, overflows."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from apex_amp import amp
from tests.training import INF, LEVELS, MASTERS, Dot, backward, initialize, integers, values


def grads(optimizer) -> list[torch.Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ["optimizer", "model", "zeros", "none by hand"])
def test_micro_batches_add_up_as_in_fp32(level: str, zero: str) -> None:
    inputs = integers(8)

    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        for i, x in enumerate(inputs):
            backward(level, model(x), optimizer)
            if i % 4 == 3:
                optimizer.step()
                if zero == "optimizer":
                    optimizer.zero_grad()
                elif zero == "zeros":
                    optimizer.zero_grad(set_to_none=False)
                elif zero == "model":
                    model.zero_grad()
                else:
                    for parameter in model.parameters():
                        parameter.grad = None
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delays", list(itertools.product([False, True], repeat=3)))
def test_delayed_unscaling_changes_nothing_in_the_result(level: str, delays: tuple[bool, ...]) -> None:
    inputs = integers(8)

    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        for i, x in enumerate(inputs):
            delay = [*delays, False][i % 4]
            backward(level, model(x), optimizer, **({"delay_unscale": delay} if level else {}))
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_delay_unscale_leaves_scaled_gradients(level: str) -> None:
    model = Dot(parameters=1)
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125), loss_scale=128.0)
    x = torch.tensor([1.0, 2, 3, 4])
    backward(level, model(x), optimizer, delay_unscale=True)
    assert torch.equal(model.weights[0].grad.float(), 128 * x)
    backward(level, model(x), optimizer, delay_unscale=True)
    assert torch.equal(model.weights[0].grad.float(), 256 * x)
    backward(level, model(x), optimizer)
    assert torch.equal(model.weights[0].grad.float(), 3 * x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_delayed_block_counts_once_when_it_is_finished(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125), loss_scale="dynamic",
                                  max_loss_scale=1024.0)
    before = values(model)
    backward(level, model(torch.ones(4)) * INF, optimizer, delay_unscale=True)
    assert amp.loss_scale() == 1024
    backward(level, model(torch.ones(4)), optimizer)
    assert amp.loss_scale() == 512
    optimizer.step()
    assert amp.last_step_skipped(optimizer) and torch.equal(values(model), before)
    optimizer.zero_grad()
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert torch.equal(values(model), before - 0.125) and amp.loss_scale() == 512


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_found_not_finite_do_not_count_again_while_the_skip_is_pending(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125), loss_scale="dynamic",
                                  max_loss_scale=1024.0)
    backward(level, model(torch.ones(4)) * INF, optimizer)
    backward(level, model(torch.ones(4)), optimizer)
    backward(level, model(torch.ones(4)), optimizer, delay_unscale=True)
    backward(level, model(torch.ones(4)), optimizer)
    assert amp.loss_scale() == 512
    optimizer.step()
    assert amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("one_block", [True, False])
def test_several_losses_of_one_graph(level: str, one_block: bool) -> None:
    """retain_graph in one block, or a block for each loss with its own scaler."""
    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125),
                                      **({"num_losses": 2} if level else {}))
        for x in inputs:
            optimizer.zero_grad()
            shared = model(x)
            losses = shared * 2, shared * 3
            if one_block and level:
                with amp.scale_loss(torch.stack(losses), optimizer) as scaled:
                    scaled[0].backward(retain_graph=True)
                    scaled[1].backward()
            else:
                for loss_id, loss in enumerate(losses):
                    options = {"loss_id": loss_id} if level else {}
                    backward(level, loss, optimizer, retain_graph=loss_id == 0, **options)
            optimizer.step()
        return values(model)

    inputs = integers(3)
    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_loss_answers_for_its_own_scale_also_when_another_finishes_it(level: str, order: tuple[int, int]) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125), loss_scale="dynamic",
                                  num_losses=2, max_loss_scale=1024.0)
    delayed, last = order
    backward(level, model(torch.ones(4)) * INF, optimizer, loss_id=delayed, delay_unscale=True)
    backward(level, model(torch.ones(4)), optimizer, loss_id=last)
    assert amp.loss_scale(delayed) == 512 and amp.loss_scale(last) == 1024
    optimizer.step()
    assert amp.last_step_skipped(optimizer)

    # With the scales unequal now, the sums are still those of FP32.
    optimizer.zero_grad()
    for loss_id, delay in ((delayed, True), (last, True), (delayed, True), (last, False)):
        backward(level, model(torch.ones(4)), optimizer, loss_id=loss_id, delay_unscale=delay)
    for grad in grads(optimizer):
        assert torch.equal(grad, torch.full((4,), 4.0))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("given_to_scale_loss", ["both at once", "one each", "only those reached"])
def test_several_models_and_optimizers(level: str, given_to_scale_loss: str) -> None:
    """Model 0 is trained by loss 0, model 1 by both: every combination of blocks gives FP32's result."""
    inputs = integers(4)

    def run(level: str | None) -> torch.Tensor:
        models = [Dot(), Dot()]
        optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.125),
                      torch.optim.SGD(models[1].parameters(), lr=0.125)]
        models, optimizers = initialize(level, models, optimizers, **({"num_losses": 2} if level else {}))
        for x in inputs:
            for optimizer in optimizers:
                optimizer.zero_grad()
            if given_to_scale_loss == "both at once":
                backward(level, models[0](x) + 3 * models[1](x), optimizers)
            elif given_to_scale_loss == "one each":
                backward(level, models[0](x), optimizers[0], **({"loss_id": 0} if level else {}))
                backward(level, 3 * models[1](x), [optimizers[1]], **({"loss_id": 1} if level else {}))
            else:
                backward(level, models[0](x) + models[1](x), optimizers)
                backward(level, 2 * models[1](x), optimizers[1], **({"loss_id": 1} if level else {}))
            for optimizer in optimizers:
                optimizer.step()
        return torch.cat([values(model) for model in models])

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_one_optimizer_skips_all_of_its_block_and_only_those(level: str, bad: int) -> None:
    models = [Dot(), Dot(), Dot()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    models, optimizers = initialize(level, models, optimizers, loss_scale="dynamic", max_loss_scale=1024.0,
                                    num_losses=2)
    x = torch.ones(4)
    before = [values(model) for model in models]
    losses = [models[0](x), models[1](x)]
    losses[bad] = losses[bad] * INF
    backward(level, losses[0] + losses[1], optimizers[:2])
    backward(level, models[2](x), optimizers[2], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.last_step_skipped(optimizer) for optimizer in optimizers] == [True, True, False]
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (512, 1024)
    assert torch.equal(values(models[0]), before[0]) and torch.equal(values(models[1]), before[1])
    assert torch.equal(values(models[2]), before[2] - 0.125)
    assert all(name.startswith(("", "model1.")[bad] + "weights.") for name in amp.overflow_report())


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_with_a_parameter_in_common(level: str) -> None:
    inputs = integers(3)

    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=3)
        first = torch.optim.SGD(list(model.weights[:2]), lr=0.125)
        second = torch.optim.SGD(list(model.weights[1:]), lr=0.25)
        model, optimizers = initialize(level, model, [first, second])
        for x in inputs:
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(level, model(x), optimizers)
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_same_optimizer_twice_in_one_block_is_one(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    backward(level, model(torch.ones(4)), [optimizer, optimizer])
    assert all(torch.equal(grad, torch.ones(4)) for grad in grads(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_edited_between_blocks(level: str) -> None:
    """Zeroed, replaced, scaled in place and dropped through the model's parameters: all of it is what the step uses."""
    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=4)
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        backward(level, model(torch.ones(4)), optimizer)
        zeroed, replaced, scaled, dropped = model.parameters()
        zeroed.grad.zero_()
        replaced.grad = torch.full_like(replaced, 5.0)
        scaled.grad.mul_(2)
        dropped.grad = None
        backward(level, model(2 * torch.ones(4)), optimizer)
        optimizer.step()
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_that_a_backward_does_not_reach_keep_their_gradients(level: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=2)
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        backward(level, model(torch.ones(4)), optimizer)
        model.weights[0].requires_grad_(False)
        backward(level, model(torch.ones(4)), optimizer)
        model.weights[0].requires_grad_(True)
        optimizer.step()
        return values(model)

    assert torch.equal(run(level), run(None))
    assert not torch.equal(run(None)[:4] - 1, run(None)[4:] - 2)


@pytest.mark.parametrize("level", LEVELS)
def test_gan_loop_with_alternating_freezing(level: str) -> None:
    inputs = integers(6)

    def run(level: str | None) -> torch.Tensor:
        generator, critic = Dot(parameters=1), Dot(parameters=2)
        optimizers = [torch.optim.SGD(generator.parameters(), lr=0.125), torch.optim.SGD(critic.parameters(), lr=0.125)]
        (generator, critic), optimizers = initialize(level, [generator, critic], optimizers,
                                                     **({"num_losses": 3} if level else {}))
        for x in inputs:
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
            optimizers[1].zero_grad()
            backward(level, critic(x), optimizers[1], **({"loss_id": 0} if level else {}))
            backward(level, -2 * critic(x + 1), optimizers[1], **({"loss_id": 1} if level else {}))
            optimizers[1].step()
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            optimizers[0].zero_grad()
            backward(level, generator(x) + critic(x).detach(), optimizers[0], **({"loss_id": 2} if level else {}))
            optimizers[0].step()
        return torch.cat([values(generator), values(critic)])

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_finishes_what_was_left_scaled_and_says_so(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125), verbosity=1)
    before = values(model)
    backward(level, model(torch.ones(4)), optimizer, delay_unscale=True)
    with pytest.warns(UserWarning, match="delay_unscale=True"):
        optimizer.step()
    assert torch.equal(values(model), before - 0.125)


@pytest.mark.parametrize("level", MASTERS)
def test_the_masters_gradient_is_the_model_parameters_own(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    backward(level, model(torch.randn(3, 4)).square().sum(), optimizer)
    for parameter, master in zip(model.parameters(), amp.master_params(optimizer)):
        assert parameter.grad is master.grad and master.grad.dtype == torch.float32
