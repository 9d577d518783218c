"""Python cost of one scale_loss + step + zero_grad at every level, against torch's GradScaler around the same optimizer.

    python benchmarks/bench_training_step.py [--sizes 10 161 2000] [--optimizer SGD] [--seconds 2]

Parameters have 16 elements each, and a ready-made list of gradients stands for the backward, so that what is left is
the optimizer's own step (the same in every column, shown alone as "optimizer") and what each side adds to it. All
columns of a size take turns in one process; figures are medians.
"""
from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Callable

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from apex_amp import amp  # noqa: E402

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {"SGD": dict(lr=0.1, momentum=0.9), "Adam": dict(lr=1e-3), "AdamW": dict(lr=1e-3, foreach=True)}


class Parameters(torch.nn.Module):
    """`count` parameters and nothing to compute with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(16)) for _ in range(count))

    def forward(self) -> None:
        pass


def make_iteration(column: str, count: int, optimizer_name: str) -> Callable[[], None]:
    """One iteration of `column`: an opt level, "GradScaler" or "optimizer" (its step alone, unscaled)."""
    model = Parameters(count)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), **OPTIMIZERS[optimizer_name])
    if column in LEVELS:
        model, optimizer = amp.initialize(model, optimizer, opt_level=column, verbosity=0)
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    loss = torch.zeros((), requires_grad=True)

    def backward() -> None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient

    def amp_iteration() -> None:
        with amp.scale_loss(loss, optimizer):
            backward()
        optimizer.step()
        optimizer.zero_grad()

    def scaler_iteration() -> None:
        scaler.scale(loss)
        backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def plain_iteration() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    if column == "GradScaler":
        scaler = torch.amp.GradScaler("cpu")
        return scaler_iteration
    return amp_iteration if column in LEVELS else plain_iteration


def measure(count: int, optimizer_name: str, seconds: float) -> dict[str, float]:
    """Median seconds of one iteration for every column."""
    iterations = {column: make_iteration(column, count, optimizer_name) for column in ("optimizer", "GradScaler", *LEVELS)}
    times: dict[str, list[float]] = {column: [] for column in iterations}
    for iteration in iterations.values():
        iteration()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["optimizer"]) < 5:
        for column, iteration in iterations.items():
            start = time.thread_time()
            iteration()
            times[column].append(time.thread_time() - start)
    amp.shutdown()
    return {column: statistics.median(values) for column, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 161, 2000])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD")
    parser.add_argument("--seconds", type=float, default=4.0, help="per size")
    options = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{options.optimizer}, torch {torch.__version__}, Python {platform.python_version()}, 1 thread, {platform.machine()}; "
          "us per iteration (ratio to GradScaler)")
    columns = ("optimizer", "GradScaler", *LEVELS)
    print("parameters  " + "".join(f"{column:>18}" for column in columns))
    for count in options.sizes:
        medians = measure(count, options.optimizer, options.seconds)
        cells = (f"{1e6 * medians[column]:,.0f} ({medians[column] / medians['GradScaler']:.2f})" for column in columns)
        print(f"{count:>10}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
