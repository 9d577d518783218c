"""Two processes that talk through gloo: DistributedDataParallel and fully_shard around amp models."""
from __future__ import annotations

import contextlib
import copy
import datetime
import io
import os
import traceback
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex_amp import amp

pytestmark = pytest.mark.distributed

RANKS = 2
LEVELS = ["O0", "O1", "O2", "O4", "O5"]
TOLERANCE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O4": 2e-2, "O5": 2e-2}


class Ranks:
    """RANKS processes that wait for work: functions `work(rank)` of this module."""

    def __init__(self, directory: Path) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(rank, there, directory), daemon=True))
            self.pipes.append(here)
            self.processes[-1].start()
            there.close()

    def run(self, work: Callable[[int], None]) -> None:
        for pipe in self.pipes:
            pipe.send(work)
        failures = [failure for pipe in self.pipes if (failure := pipe.recv()) is not None]
        assert not failures, "\n".join(failures)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _serve(rank: int, pipe: Any, directory: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=60))
    while True:
        work = pipe.recv()
        try:
            work(rank)
        except BaseException:
            pipe.send(f"rank {rank}: {traceback.format_exc()}")
        else:
            pipe.send(None)
        amp.shutdown()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def build(level: str, seed: int = 3, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keywords = {"verbosity": 0, **({"loss_scale": 512.0} if level in ("O1", "O2") else {}), **keywords}
    return amp.initialize(model, optimizer, opt_level=level, **keywords)


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The joint batch of a step, or one rank's half of it."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
    return (x, y) if rank is None else (x.chunk(RANKS)[rank], y.chunk(RANKS)[rank])


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor],
             factor: float = 1.0) -> None:
    loss = (model(data[0]).float() - data[1]).square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def assert_ranks_agree(model: nn.Module) -> None:
    """Weights, and what state_dict gives, are the same bits on every rank."""
    for value in (*model.state_dict().values(), *model.parameters()):
        value = value.detach().float().contiguous()
        gathered = [torch.empty_like(value) for _ in range(RANKS)]
        dist.all_gather(gathered, value)
        assert all(torch.equal(gathered[0], other) for other in gathered)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], level: str) -> None:
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=TOLERANCE[level], atol=TOLERANCE[level])


def train_alone(level: str, steps: int = 4) -> list[torch.Tensor]:
    model, optimizer = build(level)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, optimizer, batch(step))
        optimizer.step()
    return weights(model)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------

def ddp_work(rank: int) -> None:
    for level in LEVELS:
        expected = train_alone(level)
        variants = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}]
        for options in variants if level in ("O1", "O2") else variants[:1]:
            model, optimizer = build(level)
            ddp = DistributedDataParallel(model, **options)
            for step in range(4):
                optimizer.zero_grad()
                backward(ddp, optimizer, batch(step, rank))
                optimizer.step()
            assert_ranks_agree(ddp)
            assert_close(weights(ddp), expected, level)


def test_ddp_equals_one_process_on_the_joint_batch(ranks):
    ranks.run(ddp_work)


def no_sync_work(rank: int) -> None:
    for level in LEVELS:
        alone, alone_optimizer = build(level)
        for step in range(3):
            alone_optimizer.zero_grad()
            for part in range(3):
                backward(alone, alone_optimizer, batch(10 * step + part), 1 / 3)
            alone_optimizer.step()
        for set_to_none, compiled, bucket_view in ((True, False, False), (False, False, True), (True, True, True)):
            model, optimizer = build(level)
            ddp = DistributedDataParallel(torch.compile(model, backend="eager") if compiled else model,
                                          gradient_as_bucket_view=bucket_view)
            for step in range(3):
                optimizer.zero_grad(set_to_none=set_to_none)
                for part in range(3):
                    with ddp.no_sync() if part < 2 else contextlib.nullcontext():
                        backward(ddp, optimizer, batch(10 * step + part, rank), 1 / 3)
                optimizer.step()
            assert_ranks_agree(ddp)
            assert_close(weights(ddp), weights(alone), level)


def test_no_sync_accumulates_as_one_process_does(ranks):
    ranks.run(no_sync_work)


def overflow_work(rank: int) -> None:
    for level in ("O1", "O2"):
        model, optimizer = build(level, loss_scale="dynamic")
        ddp = DistributedDataParallel(model)
        for step in range(5):
            before = weights(ddp)
            optimizer.zero_grad()
            backward(ddp, optimizer, batch(step, rank), float("inf") if (step, rank) == (2, 1) else 1e-3)
            optimizer.step()
            assert amp.last_step_skipped(optimizer) == (step == 2)
            assert all(torch.equal(a, b) for a, b in zip(weights(ddp), before)) == (step == 2)
        assert_ranks_agree(ddp)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 2}}
        # Accumulated without communication, an overflow of one rank comes out at the first synchronized backward.
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, optimizer, batch(7, rank), float("inf") if rank == 0 else 1e-3)
        before = weights(ddp)
        backward(ddp, optimizer, batch(8, rank), 1e-3)
        optimizer.step()
        assert amp.last_step_skipped(optimizer) and amp.loss_scale() == 16384.0
        assert all(torch.equal(a, b) for a, b in zip(weights(ddp), before))
        assert_ranks_agree(ddp)


def test_an_overflow_on_one_rank_skips_on_all(ranks):
    ranks.run(overflow_work)


def first_rank_work(rank: int) -> None:
    """Rank 1 starts from other weights, and only rank 0 loads the checkpoint.

    DDP makes both rank 0's, masters included.
    """
    for level in LEVELS:
        source, optimizer = build(level)
        backward(source, optimizer, batch(0))
        optimizer.step()
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        model, optimizer = build(level, seed=50 + rank)
        if rank == 0:
            model.load_state_dict(torch.load(buffer))
        ddp = DistributedDataParallel(model)
        assert all(torch.equal(a, b) for a, b in zip(weights(ddp), weights(source)))
        for step in range(2):
            optimizer.zero_grad()
            backward(ddp, optimizer, batch(step, rank))
            optimizer.step()
        assert_ranks_agree(ddp)
        # A DDP checkpoint ("module." keys) goes back into the wrapper.
        saved = copy.deepcopy(ddp.state_dict())
        backward(ddp, optimizer, batch(5, rank))
        optimizer.step()
        ddp.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(weights(ddp), saved.values()))
        assert_ranks_agree(ddp)


def test_ddp_gives_all_ranks_the_first_ones_masters(ranks):
    ranks.run(first_rank_work)


def compile_work(rank: int) -> None:
    for level in ("O1", "O2", "O5"):
        expected = train_alone(level)
        for order in ("inside", "outside"):
            model, optimizer = build(level)
            if order == "inside":
                ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True))
            else:
                ddp = torch.compile(DistributedDataParallel(model), backend="aot_eager")
            for step in range(4):
                optimizer.zero_grad()
                backward(ddp, optimizer, batch(step, rank))
                optimizer.step()
            assert_ranks_agree(ddp)
            assert_close(weights(ddp), expected, level)
            assert all("_orig_mod." in key and "module." in key for key in ddp.state_dict())
            torch._dynamo.reset()


def test_compiled_models_under_ddp(ranks):
    ranks.run(compile_work)


def printing_work(rank: int) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model, optimizer = build("O1", loss_scale="dynamic", verbosity=1)
        ddp = DistributedDataParallel(model)
        backward(ddp, optimizer, batch(0, rank), float("inf"))
        optimizer.step()
    expected = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert (expected in printed.getvalue()) == (rank == 0) and (printed.getvalue() == "") == (rank == 1)


def test_only_the_first_rank_prints(ranks):
    ranks.run(printing_work)


def exception_work(rank: int) -> None:
    for level in ("O1", "O2"):
        model, optimizer = build(level)
        ddp = DistributedDataParallel(model)
        backward(ddp, optimizer, batch(0, rank))
        scale = amp.loss_scale()
        with pytest.raises(KeyError) as raised:
            with amp.scale_loss(ddp(batch(1, rank)[0]).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                raise KeyError("stop")
        assert "zero_grad" in "".join(getattr(raised.value, "__notes__", [])) and amp.loss_scale() == scale
        optimizer.zero_grad()
        backward(ddp, optimizer, batch(2, rank))
        optimizer.step()
        assert_ranks_agree(ddp)


def test_an_exception_inside_scale_loss_says_that_gradients_must_be_zeroed(ranks):
    ranks.run(exception_work)


# --- fully_shard ------------------------------------------------------------------------------------------------------

def fully_shard_work(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for level in ("O0", "O1", "O4"):
        expected = train_alone(level)
        for initialize_first in (False, True):
            torch.manual_seed(3)
            model = Net()
            keywords = {"opt_level": level, "verbosity": 0, **({"loss_scale": 512.0} if level == "O1" else {})}
            if initialize_first:
                model = amp.initialize(model, **keywords)
            for layer in (model.first, model.last, model):
                fully_shard(layer)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = amp.initialize(model, optimizer, **keywords)
            for step in range(4):
                optimizer.zero_grad()
                backward(model, optimizer, batch(step, rank))
                optimizer.step()
            assert_close([value.full_tensor() for value in weights(model)], expected, level)

    # An overflow that only one rank's shard sees is seen by both.
    torch.manual_seed(3)
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    before = [value.full_tensor() for value in weights(model)]
    with amp.scale_loss(model(batch(0, rank)[0]).float().sum() * 1e-3, optimizer) as scaled_loss:
        scaled_loss.backward()
        if rank == 1:
            next(model.parameters()).grad.to_local().fill_(float("inf"))
    optimizer.step()
    assert amp.last_step_skipped(optimizer) and amp.loss_scale() == 32768.0
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, weights(model)))


def test_fully_shard_equals_one_process(ranks):
    ranks.run(fully_shard_work)


def refused_work(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    sharded = fully_shard(Net())
    for level in ("O2", "O3", "O5"):
        with pytest.raises(RuntimeError, match="use opt_level='O1' or 'O4' with fully_shard"):
            amp.initialize(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), opt_level=level, verbosity=0)
    for shard in (lambda model: fully_shard(model), lambda model: fully_shard(model.first)):
        model, optimizer = build("O2")
        shard(model)
        with pytest.raises(RuntimeError, match="use opt_level='O1' or 'O4' with fully_shard"):
            backward(model, optimizer, batch(0, rank))
    with pytest.raises(RuntimeError, match="FullyShardedDataParallel.*fully_shard"):
        amp.initialize(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), opt_level="O1", verbosity=0)


def test_sharded_models_are_refused_where_masters_cannot_work(ranks):
    ranks.run(refused_work)
