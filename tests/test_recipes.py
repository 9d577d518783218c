"""The workflows of PyTorch's AMP examples, each in FP32, in three-line style and in native style.

Both styles must give the same bits, and FP32's result to half precision.
https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""
from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex_amp import amp

HALF = torch.float16
SCALE = 1024.0  # at the usual 2**16 these nets would overflow first
TOLERANCE = dict(rtol=1e-2, atol=4e-3)

Recipe = Callable[[list[nn.Module], list[torch.optim.Optimizer]], None]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def region() -> amp.autocast:
    return amp.autocast("cpu", HALF)


def native_scaler() -> amp.GradScaler:
    return amp.GradScaler("cpu", init_scale=SCALE)


def initialize(models: Any, optimizers: Any, **options: Any) -> Any:
    return amp.initialize(models, optimizers, opt_level="O1", max_loss_scale=SCALE, verbosity=0, **options)


def trained(recipe: Recipe, models: int = 1) -> torch.Tensor:
    """The parameters of fresh nets after the recipe."""
    nets: list[nn.Module] = [Net(seed) for seed in range(models)]
    recipe(nets, [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets])
    amp.shutdown()
    return torch.cat([parameter.detach().flatten() for net in nets for parameter in net.parameters()])


def check(plain: Recipe, three_line: Recipe, native: Recipe, models: int = 1, same_bits: bool = True) -> None:
    start = trained(lambda nets, optimizers: None, models)
    expected, lines, regions = (trained(recipe, models) for recipe in (plain, three_line, native))
    torch.testing.assert_close(lines, regions, **(dict(rtol=0, atol=0) if same_bits else TOLERANCE))
    assert (expected - start).abs().max() > 20 * TOLERANCE["atol"], "too little training to tell right from wrong"
    for result in (lines, regions):
        torch.testing.assert_close(result, expected, **TOLERANCE)
        assert not torch.equal(result, expected), "nothing ran in half precision"


def test_typical_training() -> None:
    def plain(nets: Any, optimizers: Any) -> None:
        [model], [optimizer] = nets, optimizers
        for x, target in batches():
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for x, target in batches():
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        for x, target in batches():
            optimizer.zero_grad()
            with region():
                loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    check(plain, three_line, native)


def test_clipping_unscaled_gradients() -> None:
    max_norm = 0.5

    def plain(nets: Any, optimizers: Any) -> None:
        [model], [optimizer] = nets, optimizers
        for x, target in batches(8):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for x, target in batches(8):
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
            optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        for x, target in batches(8):
            optimizer.zero_grad()
            with region():
                loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()

    check(plain, three_line, native)


@pytest.mark.parametrize("delay_unscale", [False, True])
def test_gradient_accumulation(delay_unscale: bool) -> None:
    every = 2

    def plain(nets: Any, optimizers: Any) -> None:
        [model], [optimizer] = nets, optimizers
        for i, (x, target) in enumerate(batches(8), start=1):
            (F.mse_loss(model(x), target) / every).backward()
            if i % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for i, (x, target) in enumerate(batches(8), start=1):
            steps = i % every == 0
            with amp.scale_loss(F.mse_loss(model(x), target) / every, optimizer,
                                delay_unscale=delay_unscale and not steps) as scaled_loss:
                scaled_loss.backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        for i, (x, target) in enumerate(batches(8), start=1):
            with region():
                loss = F.mse_loss(model(x), target) / every
            scaler.scale(loss).backward()
            if i % every == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    check(plain, three_line, native)


def norm(gradients: Any) -> torch.Tensor:
    return sum(gradient.float().pow(2).sum() for gradient in gradients).sqrt()


def test_gradient_penalty() -> None:
    def plain(nets: Any, optimizers: Any) -> None:
        [model], [optimizer] = nets, optimizers
        for x, target in batches():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)
            (loss + norm(gradients)).backward()
            optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for x, target in batches():
            optimizer.zero_grad()
            loss, scale = F.mse_loss(model(x), target), amp.loss_scale()
            scaled = torch.autograd.grad(loss * scale, model.parameters(), create_graph=True)
            penalty = norm(gradient / scale for gradient in scaled)
            with amp.scale_loss(loss + penalty, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        for x, target in batches():
            optimizer.zero_grad()
            with region():
                loss = F.mse_loss(model(x), target)
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            with region():
                loss = loss + norm(gradient / scaler.get_scale() for gradient in scaled)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    check(plain, three_line, native)


def test_several_models_losses_and_optimizers() -> None:
    def losses(model0: nn.Module, model1: nn.Module, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output0, output1 = model0(x), model1(x)
        return F.mse_loss(2 * output0 + 3 * output1, target), F.mse_loss(3 * output0 - 5 * output1, target)

    def plain(nets: Any, optimizers: Any) -> None:
        for x, target in batches():
            loss0, loss1 = losses(*nets, x, target)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss0.backward(retain_graph=True)
            loss1.backward()
            for optimizer in optimizers:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        nets, optimizers = initialize(nets, optimizers, num_losses=2)
        for x, target in batches():
            loss0, loss1 = losses(*nets, x, target)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with amp.scale_loss(loss0, optimizers, loss_id=0) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
            with amp.scale_loss(loss1, optimizers, loss_id=1) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        scaler = native_scaler()
        for x, target in batches():
            with region():
                loss0, loss1 = losses(*nets, x, target)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss0).backward(retain_graph=True)
            scaler.scale(loss1).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                scaler.step(optimizer)
            scaler.update()

    check(plain, three_line, native, models=2)


class Square(torch.autograd.Function):
    """A kernel that knows float32 only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        assert gradient.dtype == torch.float32
        return 2 * x * gradient


class NativeSquare(torch.autograd.Function):
    forward = staticmethod(amp.custom_fwd(Square.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(amp.custom_bwd(Square.backward, device_type="cpu"))


def test_custom_autograd_functions_that_need_a_type() -> None:
    def train(model: nn.Module, optimizer: Any, square: Callable[..., torch.Tensor], step: Callable[..., None]) -> None:
        for x, target in batches():
            optimizer.zero_grad()
            step(lambda: F.mse_loss(square(model(x)), target))

    def plain(nets: Any, optimizers: Any) -> None:
        def step(compute_loss: Callable[[], torch.Tensor]) -> None:
            compute_loss().backward()
            optimizers[0].step()

        train(nets[0], optimizers[0], Square.apply, step)

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])

        def step(compute_loss: Callable[[], torch.Tensor]) -> None:
            with amp.scale_loss(compute_loss(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        train(model, optimizer, amp.float_function(Square.apply), step)

    def native(nets: Any, optimizers: Any) -> None:
        scaler = native_scaler()

        def step(compute_loss: Callable[[], torch.Tensor]) -> None:
            with region():
                loss = compute_loss()
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()

        train(nets[0], optimizers[0], NativeSquare.apply, step)

    check(plain, three_line, native)


# ------------------------------------------------------------------------------------------------
# Several devices

@pytest.fixture
def cpu_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets torch's parallel_apply, threads and all, run where there is no accelerator."""
    module = sys.modules["torch.nn.parallel.parallel_apply"]
    monkeypatch.setattr(module, "_get_device_index", lambda *args: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    for name in ("current_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda *args: contextlib.nullcontext())
    yield


def parallel_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """nn.DataParallel's forward on two replicas that share the model's parameters."""
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for replica in replicas:
        replica._modules = dict(model._modules)
    threads = threading.active_count()
    outputs = torch.nn.parallel.parallel_apply(replicas, [(chunk,) for chunk in x.chunk(2)])
    assert threading.active_count() == threads and len(outputs) == 2
    return torch.cat([output.float() for output in outputs])


class DecoratedNet(Net):
    @amp.autocast("cpu", HALF)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.usefixtures("cpu_replicas")
@pytest.mark.parametrize("where", ["decorator", "region around"])
def test_data_parallel(where: str) -> None:
    def plain(nets: Any, optimizers: Any) -> None:
        [model], [optimizer] = nets, optimizers
        for x, target in batches():
            optimizer.zero_grad()
            F.mse_loss(parallel_forward(model, x), target).backward()
            optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for x, target in batches():
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(parallel_forward(model, x), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        if where == "decorator":
            model.__class__ = DecoratedNet
        for x, target in batches():
            optimizer.zero_grad()
            with region() if where == "region around" else contextlib.nullcontext():
                loss = F.mse_loss(parallel_forward(model, x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    # At O1 the threads share the cast of a weight, and so the half sum of its gradients.
    check(plain, three_line, native, same_bits=False)


def ddp_recipes(rank: int) -> dict[str, Recipe]:
    """Each process trains on its half of every batch."""
    def mine(count: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((x.chunk(2)[rank], target.chunk(2)[rank]) for x, target in batches(count))

    def plain(nets: Any, optimizers: Any) -> None:
        model, [optimizer] = DistributedDataParallel(nets[0]), optimizers
        for x, target in mine():
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        model = DistributedDataParallel(model)
        for x, target in mine():
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    def native(nets: Any, optimizers: Any) -> None:
        model, [optimizer], scaler = DistributedDataParallel(nets[0]), optimizers, native_scaler()
        for x, target in mine():
            optimizer.zero_grad()
            with region():
                loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return {"plain": plain, "three_line": three_line, "native": native}


def train_distributed(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        check(**ddp_recipes(rank))
        results = {name: trained(recipe) for name, recipe in ddp_recipes(rank).items()}
    finally:
        dist.destroy_process_group()
    torch.save(results, Path(folder) / f"rank{rank}.pt")


@pytest.mark.distributed
def test_distributed_data_parallel_with_one_process_per_device(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_distributed, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0)

    def plain(nets: Any, optimizers: Any) -> None:
        for x, target in batches():
            optimizers[0].zero_grad()
            F.mse_loss(nets[0](x), target).backward()
            optimizers[0].step()

    torch.testing.assert_close(ranks[0]["plain"], trained(plain), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------
# Styles mixed in one process

@pytest.mark.parametrize("casts", ["O1", "amp.autocast", "torch.autocast"])
@pytest.mark.parametrize("scaling", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an O1 model"])
def test_parts_of_both_styles_combine(casts: str, scaling: type[torch.amp.GradScaler], beside: bool) -> None:
    def plain(nets: Any, optimizers: Any) -> None:
        for x, target in batches():
            optimizers[0].zero_grad()
            F.mse_loss(nets[0](x), target).backward()
            optimizers[0].step()

    def mixed(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, scaling("cpu", init_scale=SCALE)
        neighbour = initialize(Net(seed=1), []) if beside else None
        if casts == "O1":
            model, optimizer = initialize(model, optimizer)
        around = {"O1": contextlib.nullcontext, "amp.autocast": region, "torch.autocast": lambda: torch.autocast("cpu", HALF)}[casts]
        for x, target in batches():
            optimizer.zero_grad()
            with around():
                loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == SCALE and (neighbour is None or neighbour[0](x).dtype == HALF)

    result = trained(mixed)
    torch.testing.assert_close(result, trained(plain), **TOLERANCE)
    assert not torch.equal(result, trained(plain))


def test_an_overflow_skips_the_same_steps_in_both_styles() -> None:
    def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x, target * (float("inf") if i in (1, 2) else 1)) for i, (x, target) in enumerate(batches(5))]

    scales: list[float] = []

    def plain(nets: Any, optimizers: Any) -> None:
        for i, (x, target) in enumerate(batches(5)):
            if i not in (1, 2):
                optimizers[0].zero_grad()
                F.mse_loss(nets[0](x), target).backward()
                optimizers[0].step()

    def three_line(nets: Any, optimizers: Any) -> None:
        model, optimizer = initialize(nets[0], optimizers[0])
        for x, target in data():
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        scales.append(amp.loss_scale())

    def native(nets: Any, optimizers: Any) -> None:
        [model], [optimizer], scaler = nets, optimizers, native_scaler()
        for x, target in data():
            optimizer.zero_grad()
            with region():
                loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    check(plain, three_line, native)
    assert scales == [SCALE / 4, SCALE / 4]
