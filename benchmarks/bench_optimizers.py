"""Times the fused optimizers' steps against torch's best way, interleaved in one run.

python -m benchmarks.bench_optimizers [--device cpu] [--threads 2] [--repeats 7] [--optimizers FusedAdam ...] [--memory]

Rows "O2": leaving scale_loss, step and zero_grad of a half model with FP32 masters, its half gradients ready-made;
torch's side copies half gradients to float, unscales and checks them, takes its step and copies the masters to half.
"half gradients" is the same with materialize_master_grads=False. Rows "FP32": the step alone. Torch's step is the fused
one where torch has the optimizer, else written with torch._foreach_*.

GB/s counts the bytes that a row must move at least: each list it reads or writes once for each pass. --memory prints
the peak of a process's memory over a few steps, in bytes a parameter, beside torch.amp's.
"""
from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex_amp import amp, optimizers
from benchmarks.bench_multi_tensor import interleaved_seconds
from benchmarks.report import describe_machine

SHAPES = [(161, 155_000), (10_000, 2_500)]  # tensors, elements of each
LR = 1e-3
# Lists of FP32 state that a step reads and writes, and passes over gradient, parameter and state beside the first:
# LAMB reads gradients for their norm, and parameters and moments again for its second stage.
STATE_LISTS = {"FusedAdam": 2, "FusedSGD": 1, "FusedLAMB": 2, "FusedNovoGrad": 1, "FusedAdagrad": 1}
EXTRA_BYTES = {"FusedLAMB": 16, "FusedNovoGrad": 4}
OPTIONS = {"FusedSGD": {"momentum": 0.9}}
WANTED = {"O2": (1.2, 2.0), "O2, half gradients": (1.5, 2.0), "FP32": (1.0, 1.0)}  # CPU ratio for each of SHAPES


class ForeachLamb(torch.optim.Optimizer):
    """LAMB as one would write it with torch's own list functions."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, dict(lr=lr))
        self.steps = 0
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        params = self.param_groups[0]["params"]
        self.steps += 1
        grads = [p.grad for p in params]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        grads = torch._foreach_div(grads, norm.clamp(min=1.0))
        torch._foreach_lerp_(self.m, grads, 0.1)
        torch._foreach_mul_(self.v, 0.999)
        torch._foreach_addcmul_(self.v, grads, grads, 0.001)
        denominators = torch._foreach_div(self.v, 1 - 0.999 ** self.steps)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, 1e-6)
        updates = torch._foreach_div(self.m, 1 - 0.9 ** self.steps)
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, params, alpha=0.01)
        ratios = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(updates))
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-LR)


class ForeachNovoGrad(torch.optim.Optimizer):
    """NovoGrad alike. Rates go through the host: list functions are slower with a tensor for each tensor."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, dict(lr=lr))
        self.steps = 0
        self.m = [torch.zeros_like(p) for p in params]
        self.squares: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        params = self.param_groups[0]["params"]
        self.steps += 1
        grads = [p.grad for p in params]
        squares = torch.stack(torch._foreach_norm(grads)).square()
        self.squares = squares if self.squares is None else self.squares.lerp(squares, 0.001)
        torch._foreach_lerp_(self.m, grads, 0.1)
        denominators = (self.squares / (1 - 0.999 ** self.steps)).sqrt() + 1e-8
        rates = (LR / (1 - 0.9 ** self.steps) / denominators).tolist()
        torch._foreach_sub_(params, torch._foreach_mul(self.m, rates))


TORCHS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0, fused=True),
    "FusedSGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, fused=True),
    "FusedLAMB": lambda params: ForeachLamb(params, LR),
    "FusedNovoGrad": lambda params: ForeachNovoGrad(params, LR),
    "FusedAdagrad": lambda params: torch.optim.Adagrad(params, lr=LR, fused=params[0].device.type == "cpu")}


class Parameters(nn.Module):
    def __init__(self, tensors: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size, device=device)) for _ in range(tensors))


def amp_step(name: str, model: nn.Module, half_grads: list[Tensor], materialize: bool) -> Callable[[], None]:
    optimizer = getattr(optimizers, name)(model.parameters(), lr=LR, **OPTIONS.get(name, {}),
                                          materialize_master_grads=materialize)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)
    params, loss = list(model.parameters()), torch.zeros((), device=half_grads[0].device, requires_grad=True)

    def step() -> None:
        with amp.scale_loss(loss, optimizer):
            for param, grad in zip(params, half_grads):
                param.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_step(name: str, masters: list[Tensor], half_grads: list[Tensor]) -> Callable[[], None]:
    optimizer = TORCHS[name](masters)
    weights = [master.detach().half() for master in masters]
    found_inf, inv_scale = torch.zeros(1, device=masters[0].device), torch.ones(1, device=masters[0].device)

    def step() -> None:
        for master in masters:
            master.grad = torch.empty_like(master)
        grads = [master.grad for master in masters]
        torch._foreach_copy_(grads, half_grads)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()

    return step


def cases(name: str, tensors: int, size: int, device: torch.device) -> Iterator[tuple[str, list[Callable], list[int]]]:
    """(row, ours in one or two variants and torch's last, bytes a parameter of each of ours)."""
    def params() -> list[Tensor]:
        return [torch.randn(size, device=device, requires_grad=True) for _ in range(tensors)]

    state = 8 * STATE_LISTS[name] + EXTRA_BYTES.get(name, 0)
    ours, theirs = params(), params()
    for param in ours + theirs:
        param.grad = torch.full_like(param, 1e-3)
    yield "FP32", [getattr(optimizers, name)(ours, lr=LR, **OPTIONS.get(name, {})).step,
                   TORCHS[name](theirs).step], [12 + state]
    for param in theirs:
        param.grad = None
    del ours
    half_grads = [torch.full((size,), 0.125, dtype=torch.float16, device=device) for _ in range(tensors)]
    steps = [amp_step(name, Parameters(tensors, size, device), half_grads, materialize)
             for materialize in (True, False)]
    yield "O2", [*steps, torch_step(name, theirs, half_grads)], [6 + 14 + state, 2 + 12 + state]


def measure(names: list[str], device: torch.device, repeats: int) -> None:
    print("| optimizer | row | tensors x elements | ms | GB/s | torch ms | ratio | wanted |\n" + "|---" * 8 + "|")
    for name in names:
        for column, (tensors, size) in enumerate(SHAPES):
            for row, functions, moved in cases(name, tensors, size, device):
                *ours, torchs = interleaved_seconds(functions, repeats, device)
                for seconds, number, label in zip(ours, moved, (row, f"{row}, half gradients")):
                    wanted = f"{WANTED[label][column]:g}" if device.type == "cpu" and name == "FusedAdam" else ""
                    print(f"| {name} | {label} | {tensors:,} x {size:,} | {seconds * 1e3:.1f} | "
                          f"{number * tensors * size / seconds / 1e9:.1f} | {torchs * 1e3:.1f} | "
                          f"{torchs / seconds:.2f} | {wanted} |", flush=True)
                amp.shutdown()


# ---- memory ----

LAYERS, WIDTH = 24, 1024


def peak_bytes(variant: str) -> float:
    """The peak of this process over three steps of a deep stack of linear layers, in bytes a parameter."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    data = torch.randn(4, WIDTH)
    if variant == "torch.amp + AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu")
    else:
        optimizer = optimizers.FusedAdam(model.parameters(), materialize_master_grads="half" not in variant)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for _ in range(3):
        if variant == "torch.amp + AdamW":
            with torch.autocast("cpu", torch.float16):
                loss = model(data).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            with amp.scale_loss(model(data).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return used / sum(param.numel() for param in model.parameters())


def measure_memory() -> None:
    print("| CPU, peak over three steps | bytes a parameter |\n|---|---|")
    for variant in ("O2, FusedAdam", "O2, FusedAdam, half gradients", "torch.amp + AdamW"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"| {variant} | {pool.apply(peak_bytes, (variant,)):.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu (default) or cuda")
    parser.add_argument("--threads", default=2, type=int, help="CPU threads (default: 2)")
    parser.add_argument("--repeats", default=7, type=int, help="rounds per row (default: 7)")
    parser.add_argument("--optimizers", nargs="+", default=list(TORCHS), choices=list(TORCHS), metavar="NAME")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe_machine(options.device)
    print(f"{machine['device']}, {machine['cpu']}, {options.threads} threads, torch {torch.__version__}")
    measure_memory() if options.memory else measure(options.optimizers, options.device, options.repeats)


if __name__ == "__main__":
    main()
