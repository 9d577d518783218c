"""Casting through `amp.initialize`: which forward is cast, what ends with an iteration, compile, shutdown."""
from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_amp import _C, amp
from apex_amp.amp import patching

HALF, FLOAT = torch.float16, torch.float32
torch.compile(torch.neg, backend="eager")(torch.ones(1))  # the first compilation replaces names of torch itself
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    amp.shutdown()
    assert not patching.is_installed()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.fc(x).dtype, torch.mm(x, x).dtype, (x @ x).dtype]
        return self.fc(x)


def test_each_model_runs_at_its_own_level() -> None:
    half = amp.initialize(Net(), opt_level="O1", verbosity=0)
    full = amp.initialize(Net(), opt_level="O0", verbosity=0)
    bfloat = amp.initialize(Net(), opt_level="O4", verbosity=0)
    for model, dtype in ((half, HALF), (full, FLOAT), (bfloat, torch.bfloat16)):
        model(X)
        assert model.seen == [dtype] * 3
        with amp.disable_casts():
            model(X)
        assert model.seen == [FLOAT] * 3
    assert torch.mm(X, X).dtype == torch.bfloat16  # outside any forward: the latest alive
    del bfloat, model
    gc.collect()
    assert torch.mm(X, X).dtype == FLOAT
    del full
    gc.collect()
    assert torch.mm(X, X).dtype == HALF


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_end_with_scale_loss_and_with_step(level: str) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    for delay_unscale, left in ((True, 2), (False, 0)):
        with amp.scale_loss(model(X).float().sum(), optimizer, delay_unscale=delay_unscale) as loss:
            loss.backward()
        assert _C.cast_counters()["cache_entries"] == left
    model(X)
    assert _C.cast_counters()["cache_entries"] == 2
    optimizer.step()
    assert _C.cast_counters()["cache_entries"] == 0


@pytest.mark.parametrize("grad", [False, True])
def test_a_deleted_model_is_freed(grad: bool) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with torch.set_grad_enabled(grad):
        model(X)
    watched = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.parametrize("mode", [None, False, True])
def test_training_follows_fp32(mode: bool | None) -> None:
    """`mode`: no checkpoint, or its `use_reentrant`."""
    def train(level: str | None) -> list[float]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        if level:
            block, optimizer = amp.initialize(block, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            h = block(X.clone().requires_grad_())
            h = block(h) if mode is None else checkpoint(block, h, use_reentrant=mode)
            loss = h.float().pow(2).mean()
            if level:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(None)
    for level in ("O1", "O4"):
        assert train(level) == pytest.approx(expected, rel=3e-2)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_initialized_model_compiles_whole(level: str, backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for context in (amp.disable_casts, torch.enable_grad):
        with context():
            result, expected = compiled(X), model(X)
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("reshard", [False, True])
def test_fully_sharded_parameters_are_cast_anew(process_group: None, level: str, reshard: bool) -> None:
    """FSDP gathers new values into the same parameter objects, at the same version."""
    from torch.distributed.fsdp import fully_shard

    def train(sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        if sharded:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            for part in (model[0], model[2], model):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        history = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(X) + model(-X)).float().pow(2).mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            with torch.no_grad():
                history += [loss.item(), model(X).float().sum().item()]
        return history

    assert train(sharded=True) == pytest.approx(train(sharded=False), rel=5e-3)


def test_shutdown_and_initialize_again() -> None:
    original = F.linear
    for _ in range(2):
        model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
        assert model(X).dtype == HALF and F.linear is not original
        amp.shutdown()
        assert F.linear is original and torch.mm(X, X).dtype == FLOAT


def test_registered_functions_of_a_script() -> None:
    try:
        amp.register_float_function(torch, "sigmoid")
        model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
        assert torch.sigmoid(model(X)).dtype == FLOAT and F.binary_cross_entropy(
            torch.sigmoid(model(X)), torch.ones(4, 4)).dtype == FLOAT
    finally:
        amp.shutdown()
        del patching._registered[torch, "sigmoid"]


def test_initialize_and_shutdown_take_milliseconds_and_do_not_load_dynamo() -> None:
    code = """
import sys, time, torch
from apex_amp import amp
best = [1.0, 1.0]
for _ in range(4):
    model = torch.nn.Linear(4, 4)
    times = [time.process_time()]
    amp.initialize(model, opt_level="O1", verbosity=0)
    times.append(time.process_time())
    amp.shutdown()
    times.append(time.process_time())
    best = [min(best[0], times[1] - times[0]), min(best[1], times[2] - times[1])]
assert 'torch._dynamo' not in sys.modules
print(*best)
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    initialize, shutdown = map(float, result.stdout.split())
    assert initialize < 0.05 and shutdown < 0.05
