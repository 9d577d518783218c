"""Python cost of one scale_loss + step + zero_grad at every level, against torch's GradScaler and the same optimizer.

    python -m benchmarks.bench_training_step [--sizes 10 161 2000] [--optimizer SGD] [--seconds 4]

Parameters have 16 elements each, and fresh copies of ready-made gradients stand for the backward, whose time is left
out. What is left is the optimizer's own step (the same in every column, shown alone as "optimizer") and what each side
adds to it. All columns of a size take turns in one process, in another order each round, for a column finds in the
caches what the one before it used; figures are medians of the thread's CPU time.
"""
from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from typing import Callable

import torch

from apex_amp import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {"SGD": dict(lr=0.1, momentum=0.9), "Adam": dict(lr=1e-3), "AdamW": dict(lr=1e-3, foreach=True)}


class Parameters(torch.nn.Module):
    """`count` parameters and nothing to compute with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(16)) for _ in range(count))

    def forward(self) -> None:
        pass


def make_iteration(column: str, count: int, optimizer_name: str) -> Callable[[], float]:
    """One iteration of `column` (an opt level, "GradScaler", or "optimizer": its step alone); returns its seconds."""
    model = Parameters(count)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), **OPTIMIZERS[optimizer_name])
    if column in LEVELS:
        model, optimizer = amp.initialize(model, optimizer, opt_level=column, verbosity=0)
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    loss = torch.zeros((), requires_grad=True)

    in_backward = 0.0

    def backward() -> None:
        nonlocal in_backward
        start = time.thread_time()
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()
        in_backward = time.thread_time() - start

    def timed(iteration: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            start = time.thread_time()
            iteration()
            return time.thread_time() - start - in_backward
        return run

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
        return timed(scaler_iteration)
    return timed(amp_iteration if column in LEVELS else plain_iteration)


def measure(count: int, optimizer_name: str, seconds: float) -> dict[str, float]:
    """Median seconds of one iteration for every column."""
    iterations = {column: make_iteration(column, count, optimizer_name)
                  for column in ("optimizer", "GradScaler", *LEVELS)}
    times: dict[str, list[float]] = {column: [] for column in iterations}
    for iteration in iterations.values():
        iteration()
    order = list(iterations)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["optimizer"]) < 5:
        shuffle(order)
        for column in order:
            times[column].append(iterations[column]())
    amp.shutdown()
    return {column: statistics.median(values) for column, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 161, 2000])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD")
    parser.add_argument("--seconds", type=float, default=4.0, help="per size")
    options = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{options.optimizer}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          "one thread; us per iteration (ratio to GradScaler)")
    columns = ("optimizer", "GradScaler", *LEVELS)
    print("parameters  " + "".join(f"{column:>18}" for column in columns))
    for count in options.sizes:
        medians = measure(count, options.optimizer, options.seconds)
        cells = (f"{1e6 * medians[column]:,.0f} ({medians[column] / medians['GradScaler']:.2f})" for column in columns)
        print(f"{count:>10}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
