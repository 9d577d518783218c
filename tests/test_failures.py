"""What goes wrong in a training loop, and what is left then: exactly what was there before. And nothing piles up."""
from __future__ import annotations

import gc
import itertools
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from apex_amp import amp
from apex_amp.amp.cast_state import current_cast_type
from tests.training import INF, LEVELS, Dot, backward, initialize, integers, values


def snapshot(model: nn.Module, optimizer) -> list:
    tensors = [*model.parameters(), *amp.master_params(optimizer)]
    return ([tensor.detach().clone() for tensor in tensors]
            + [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
            + [amp.state_dict(), current_cast_type(), amp.overflow_report()])


def assert_same(before: list, after: list) -> None:
    for old, new in zip(before, after):
        assert torch.equal(old, new) and old.dtype == new.dtype if isinstance(old, torch.Tensor) else old == new


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt, GeneratorExit, torch.OutOfMemoryError])
@pytest.mark.parametrize("moment", ["before backward", "inside backward", "after backward"])
@pytest.mark.parametrize("earlier", ["none", "accumulated", "left scaled", "overflowed"])
def test_an_exception_inside_the_block_leaves_everything_as_it_was(level: str, error: type, moment: str,
                                                                   earlier: str) -> None:
    def fail(_) -> None:
        raise error("simulated")

    model = Dot(parameters=3)
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    if earlier != "none":
        loss = model(torch.ones(4))
        backward(level, loss * INF if earlier == "overflowed" and level != "O0" else loss, optimizer,
                 delay_unscale=earlier == "left scaled")
    before = snapshot(model, optimizer)
    hook = model.weights[0].register_hook(fail) if moment == "inside backward" else None
    with pytest.raises(error, match="simulated"):
        with amp.scale_loss(model(torch.ones(4)), optimizer) as scaled:
            if moment == "before backward":
                fail(None)
            scaled.backward()
            fail(None)
    if hook is not None:
        hook.remove()
    assert_same(before, snapshot(model, optimizer))

    # The retry adds to what was there.
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert amp.last_step_skipped(optimizer) == (earlier == "overflowed" and level != "O0")
    if not amp.last_step_skipped(optimizer) and earlier != "overflowed":
        times = 1 if earlier == "none" else 2
        assert torch.equal(values(model), values(Dot(parameters=3)) - 0.125 * times)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_with_several_optimizers_puts_all_of_them_back(level: str) -> None:
    model = Dot(parameters=3)
    optimizers = [torch.optim.SGD(list(weights), lr=0.125) for weights in (model.weights[:2], model.weights[1:])]
    model, optimizers = initialize(level, model, optimizers)
    backward(level, model(torch.ones(4)), optimizers)
    before = [snapshot(model, optimizer) for optimizer in optimizers]
    with pytest.raises(MemoryError):
        with amp.scale_loss(model(torch.ones(4)), optimizers) as scaled:
            scaled.backward()
            raise MemoryError
    for old, optimizer in zip(before, optimizers):
        assert_same(old, snapshot(model, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_forward_leaves_the_casts_as_they_were(level: str) -> None:
    class Fails(Dot):
        broken = True

        def forward(self, x):
            output = super().forward(x)
            if self.broken:
                raise MemoryError("simulated")
            return output

    model = Fails()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    before = snapshot(model, optimizer)
    with pytest.raises(MemoryError):
        with amp.scale_loss(model(torch.ones(4)), optimizer) as scaled:
            scaled.backward()
    assert_same(before, snapshot(model, optimizer))
    model.broken = False
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)


@pytest.mark.parametrize("level", LEVELS)
def test_an_out_of_memory_retry_loop_trains_as_if_nothing_had_happened(level: str) -> None:
    inputs = integers(8)

    def run(level: str | None, failing: tuple[int, ...]) -> torch.Tensor:
        model = Dot()
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        left = list(failing)
        for index, x in enumerate(inputs):
            while True:
                try:
                    loss = model(x)
                    if level is None:
                        loss.backward()
                    else:
                        with amp.scale_loss(loss, optimizer) as scaled:
                            scaled.backward()
                            if index in left:
                                left.remove(index)
                                raise MemoryError("simulated")
                    break
                except MemoryError:
                    continue
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    assert torch.equal(run(level, (0, 1, 1, 4, 7)), run(None, ()))


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_closure_leaves_the_step_undone(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    before = snapshot(model, optimizer)

    def closure():
        with amp.scale_loss(model(torch.ones(4)), optimizer) as scaled:
            scaled.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_optimizers_own_step_goes_on(level: str) -> None:
    class Fails(torch.optim.SGD):
        broken = True

        def step(self, closure=None):
            if self.broken:
                raise ValueError("simulated")
            return super().step(closure)

    model = Dot()
    model, optimizer = initialize(level, model, Fails(model.parameters(), lr=0.125))
    backward(level, model(torch.ones(4)), optimizer)
    with pytest.raises(ValueError, match="simulated"):
        optimizer.step()
    optimizer.broken = False
    optimizer.step()
    assert torch.equal(values(model), values(Dot()) - 0.125)


# --- nothing piles up -------------------------------------------------------------------------------------------------

def endless_loop(level: str) -> Iterator[None]:
    """Accumulation, delays, overflows, and a second optimizer that is given to scale_loss but never stepped."""
    model = Dot()
    optimizers = [torch.optim.SGD([model.weights[0]], lr=2.0 ** -20), torch.optim.SGD([model.weights[1]], lr=0.125)]
    model, optimizers = initialize(level, model, optimizers, loss_scale="dynamic")
    x, bad = torch.full((4,), 2.0 ** -10), torch.full((4,), INF)
    for index in itertools.count():
        backward(level, model(x), optimizers, delay_unscale=index % 3 == 0)
        backward(level, model(bad if index % 50 == 0 else x), optimizers)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield


def run(iterations: Iterator[None], count: int) -> None:
    for _ in itertools.islice(iterations, count):
        pass
    gc.collect()


@pytest.mark.parametrize("level", LEVELS)
def test_iterations_leave_nothing_that_this_package_allocated(level: str) -> None:
    def allocated() -> int:
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/apex_amp/*")])
        return sum(trace.size for trace in snapshot.traces)

    iterations = endless_loop(level)
    tracemalloc.start()
    try:
        run(iterations, 300)  # fills the interpreter's own caches and free lists
        before = allocated()
        run(iterations, 600)
        assert allocated() - before < 600 * 32  # less than the smallest object and the pointer to it, an iteration
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_ten_thousand_iterations_in_flat_memory(level: str) -> None:
    iterations = endless_loop(level)
    run(iterations, 1000)
    objects, resident = len(gc.get_objects()), resident_bytes()
    run(iterations, 9000)
    assert len(gc.get_objects()) <= objects + 10
    assert resident_bytes() - resident < 2 ** 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
