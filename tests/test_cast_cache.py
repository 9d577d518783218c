"""The weight cache: one cast per iteration, never a stale one, and nothing kept alive."""
from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp import _C
from apex_amp.amp import cast_state
from cast_fixtures import casts

pytestmark = pytest.mark.usefixtures(casts.__name__)

HALF = torch.float16


def made(work: Callable[[], object]) -> int:
    """How many casts `work` makes."""
    before = _C.cast_counters()["casts"]
    work()
    return _C.cast_counters()["casts"] - before


def entries() -> int:
    return _C.cast_counters()["cache_entries"]


def forward() -> object:
    return cast_state.cast_scope(HALF, forward=True)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(16.0).reshape(4, 4))


X = torch.eye(4).half()


def test_a_parameter_is_cast_once_over_several_forwards(weight: nn.Parameter) -> None:
    def three_forwards() -> None:
        for _ in range(3):
            with forward():
                F.linear(X, weight)
                X @ weight
    assert made(three_forwards) == 1
    cast_state.clear_weight_cache()
    assert made(three_forwards) == 1


def test_gradients_of_shared_casts_add_up(weight: nn.Parameter) -> None:
    (F.linear(X, weight).float().sum() + (X @ weight).float().sum()).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("make", [
    lambda: torch.ones(4, 4),  # no gradient
    lambda: nn.Parameter(torch.ones(4, 4)) * 1,  # not a leaf
    lambda: torch.ones(4, 4, requires_grad=True).as_subclass(type("Sub", (torch.Tensor,), {})),
    lambda: nn.Parameter(torch.ones(4, 4).bfloat16()),
])
def test_what_is_never_cached(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert made(lambda: F.linear(X, tensor)) >= 0 and entries() == 0
    assert torch.equal(F.linear(X, tensor), F.linear(X, tensor))


def writes() -> dict[str, Callable[[nn.Parameter], object]]:
    def in_no_grad(write: Callable[[nn.Parameter], object]) -> Callable[[nn.Parameter], object]:
        return lambda p: torch.no_grad()(write)(p)

    def kept_data(p: nn.Parameter) -> None:
        data = p.data
        F.linear(X, p)
        data.fill_(7.0)

    def through_numpy(p: nn.Parameter) -> None:
        p.detach().numpy()[:] = 7.0

    def flat_buffer(p: nn.Parameter) -> None:
        flat = torch.zeros(32)
        p.data = flat[:16].view(4, 4)
        F.linear(X, p)
        flat.fill_(7.0)

    def through_storage(p: nn.Parameter) -> None:
        torch.tensor([], dtype=torch.float32).set_(p.untyped_storage()).fill_(7.0)

    return {
        "copy_": in_no_grad(lambda p: p.copy_(torch.full((4, 4), 7.0))),
        "fill_": in_no_grad(lambda p: p.fill_(7.0)),
        "foreach": in_no_grad(lambda p: torch._foreach_add_([p], 1.0)),
        "detach": lambda p: p.detach().fill_(7.0),
        "data.copy_": lambda p: p.data.copy_(torch.full((4, 4), 7.0)),
        "data.mul_": lambda p: p.data.mul_(2.0).add_(1.0),
        "data =": lambda p: setattr(p, "data", torch.full((4, 4), 7.0)),
        "detach().data": lambda p: p.detach().data.fill_(7.0),
        "kept data": kept_data,
        "numpy": through_numpy,
        "flat buffer": flat_buffer,
        "storage": through_storage,
        "optimizer": lambda p: (setattr(p, "grad", torch.ones(4, 4)), torch.optim.SGD([p], lr=1.0).step()),
        "fused optimizer": lambda p: (setattr(p, "grad", torch.ones(4, 4)),
                                      torch.optim.SGD([p], lr=1.0, fused=True).step()),
        "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.full((4, 4), 7.0))),
        "load_state_dict": lambda p: nn.ParameterList([p]).load_state_dict({"0": torch.full((4, 4), 7.0)}),
        "set_": in_no_grad(lambda p: p.set_(torch.full((4, 4), 7.0))),
    }


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("write", writes())
def test_a_written_parameter_is_cast_anew(weight: nn.Parameter, write: str, scoped: bool, grad: bool) -> None:
    def run() -> torch.Tensor:
        if not scoped:
            return F.linear(X, weight).detach()
        with forward():
            return F.linear(X, weight).detach()

    with torch.set_grad_enabled(grad):
        before = run()
        writes()[write](weight)
        after = run()
    assert torch.equal(after, weight.detach().half().t())
    assert not torch.equal(after, before)


def test_a_holder_of_the_storage_bounds_entries_to_one_forward(weight: nn.Parameter) -> None:
    view = weight.detach()
    with forward():
        assert made(lambda: (F.linear(X, weight), F.linear(X, weight))) == 1
    with forward():
        assert made(lambda: F.linear(X, weight)) == 1
    del view
    cast_state.clear_weight_cache()
    with forward():
        F.linear(X, weight)
    view = weight.detach()  # since the entry was made
    with forward():
        assert made(lambda: F.linear(X, weight)) == 1
    assert view is not None


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("owner", [numpy.zeros((4, 4), dtype=numpy.float32), bytearray(64)], ids=["numpy", "buffer"])
def test_memory_that_torch_does_not_own_is_cast_anew(owner: Any, scoped: bool) -> None:
    view = numpy.frombuffer(owner, dtype=numpy.float32).reshape(4, 4)
    weight = nn.Parameter(torch.frombuffer(owner, dtype=torch.float32).reshape(4, 4))
    for value in (1.0, 2.0):
        view[:] = value
        with forward() if scoped else contextlib.nullcontext():
            assert F.linear(X, weight).eq(value).all()


def test_without_grad_entries_live_in_one_outermost_forward(weight: nn.Parameter) -> None:
    with torch.no_grad():
        with forward():
            with forward():
                assert made(lambda: F.linear(X, weight)) == 1
            assert made(lambda: F.linear(X, weight)) == 0
            assert entries() == 1
        assert entries() == 0
        assert made(lambda: (F.linear(X, weight), F.linear(X, weight))) == 2
        assert entries() == 0


def test_grad_modes_do_not_share_casts(weight: nn.Parameter) -> None:
    with forward():
        with torch.inference_mode():
            assert F.linear(X, weight).is_inference()
        with torch.no_grad():
            assert not F.linear(X, weight).requires_grad
        result = F.linear(X, weight)
        result.float().sum().backward()
    assert weight.grad is not None


def test_an_inference_parameter_is_not_cached() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(4, 4))
        F.linear(X, weight)
    assert entries() == 0


def test_a_frozen_then_thawed_parameter_gets_its_gradient(weight: nn.Parameter) -> None:
    weight.requires_grad_(False)
    F.linear(X, weight)
    weight.requires_grad_(True)
    F.linear(X, weight).float().sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_a_deleted_model_is_freed_by_the_collector(grad: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.set_grad_enabled(grad), forward():
        model(X)
    model.itself = [model]  # a cycle: only the collector can free it
    watched = [weakref.ref(model), weakref.ref(model[0].weight)]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_casts_are_freed_when_the_cache_is_cleared(weight: nn.Parameter) -> None:
    F.linear(X, weight)
    assert entries() == 1
    cast_state.clear_weight_cache()
    watched = weakref.ref(weight)
    assert entries() == 0 and watched() is weight


def test_second_backward_through_cached_casts(weight: nn.Parameter) -> None:
    """A graph freed by one backward must not be served to the next forward's casts."""
    for count in (1, 2):
        F.linear(X, weight).float().sum().backward()
        assert weight.grad is not None and weight.grad.sum() == 16 * count


def test_double_backward(weight: nn.Parameter) -> None:
    x = (X.float() / 64).requires_grad_()
    (gradient,) = torch.autograd.grad(F.linear(x, weight).float().tanh().sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_transforms_and_fake_tensors_neither_read_nor_write_the_cache(weight: nn.Parameter) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    cast_state.clear_weight_cache()
    torch.func.vmap(lambda w: F.linear(X, w))(weight.detach().expand(2, 4, 4))
    torch.func.grad(lambda w: F.linear(X, w).float().sum())(weight)
    torch.func.functional_call(nn.Linear(4, 4, bias=False), {"weight": weight * 1}, (X,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert F.linear(mode.from_tensor(X), weight).dtype == HALF
    make_fx(lambda x: F.linear(x, weight))(X)
    torch.jit.trace(nn.Linear(4, 4), (X,))
    assert entries() == 0
    F.linear(X, weight)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(F.linear(mode.from_tensor(X), weight)).__name__ == "FakeTensor"


def test_per_sample_gradients() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).float().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(gradients["weight"], x[:, None].expand(3, 2, 4), rtol=1e-2, atol=1e-3)


def test_forward_mode_derivatives(weight: nn.Parameter) -> None:
    _, tangent = torch.func.jvp(lambda w: F.linear(X, w).float(), (weight.detach(),), (torch.ones(4, 4),))
    assert torch.equal(tangent, torch.ones(4, 4))


def test_threads_of_different_cast_types_share_parameters_and_clear_in_between(weight: nn.Parameter) -> None:
    """Each thread gets its own type, with the values of the weight as it is, whatever the others cast and clear."""
    types = [torch.float16, torch.bfloat16, None, torch.float16] * 2
    start, failures = threading.Barrier(len(types)), []

    def work(number: int, cast_type: torch.dtype | None) -> None:
        expected = weight.detach().to(cast_type or torch.float32).t()
        x = torch.eye(4)
        start.wait()
        for step in range(200):
            with cast_state.cast_scope(cast_type, forward=True):
                result = F.linear(x, weight)
            if not torch.equal(result, expected):
                failures.append((number, step, result.dtype))
            result.float().sum().backward()
            if step % 7 == number % 7:
                cast_state.clear_weight_cache()

    threads = [threading.Thread(target=work, args=each) for each in enumerate(types)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert torch.equal(weight.grad, torch.full((4, 4), 200.0 * len(types)))


def test_memory_is_flat_over_20000_iterations(weight: nn.Parameter) -> None:
    """Nothing is left behind: an object, a reference, or 4 bytes of Python's or of C++'s per iteration."""
    x = torch.ones(4, 4)

    def iterate(count: int) -> None:
        for _ in range(count):
            with forward():
                loss = torch.cat([F.linear(x, weight), x]).sum()
            loss.backward()
            cast_state.clear_weight_cache()

    def state() -> tuple[list[int], int, int]:
        gc.collect()
        references = [sys.getrefcount(value) for value in (
            weight, x, F.linear, F.linear.__wrapped__, torch.float32, torch.float16)]
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return [len(gc.get_objects()), *references], tracemalloc.get_traced_memory()[0], resident

    tracemalloc.start()
    try:
        iterate(1000)
        counts, traced, resident = state()
        iterate(20_000)
        counts_now, traced_now, resident_now = state()
    finally:
        tracemalloc.stop()
    assert all(abs(now - then) < 20 for then, now in zip(counts, counts_now))
    assert traced_now - traced < 80_000
    assert resident_now - resident < 2 << 20
