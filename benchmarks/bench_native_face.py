"""What a region and a GradScaler step cost, against torch.autocast and torch.amp.GradScaler.

    python -m benchmarks.bench_native_face [--repeats N]

Both classes are timed in turn, `repeats` times over, in one process and on one thread; the table gives the
median over the repeats and half the distance between the quartiles, in microseconds of CPU time per call, and
the median of the ratios of the pairs. The optimizer that is stepped does nothing, and gradients are small: what
is measured is the face, its launches and its bookkeeping.
"""
from __future__ import annotations

import argparse
import gc
import platform
import statistics

import torch
from torch import nn

from apex_amp import amp
from apex_amp.amp.patching import lifted
from benchmarks.bench_cast_dispatch import Work, cell, time_per_call

PARAMETERS = (10, 161, 2000)
DTYPE = torch.bfloat16


class Standing(torch.optim.SGD):
    """Its step costs and changes nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


def region_rows(autocast: type[torch.autocast]) -> dict[str, Work]:
    kept = autocast("cpu", DTYPE)

    def make_and_enter() -> None:
        with autocast("cpu", DTYPE):
            pass

    def enter() -> None:
        with kept:
            pass

    def nested() -> None:
        with kept, autocast("cpu", enabled=False):
            pass

    @autocast("cpu", DTYPE)
    def decorated() -> None:
        pass

    return {"region, made and entered": make_and_enter, "region, entered again": enter,
            "disabled region inside one": nested, "decorated function": decorated}


def scaler_rows(scaler_class: type[torch.amp.GradScaler]) -> dict[str, Work]:
    rows: dict[str, Work] = {}
    for count in PARAMETERS:
        parameters = [nn.Parameter(torch.ones(64)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones(64)
        scaler, optimizer = scaler_class("cpu", init_scale=1.0), Standing(parameters, lr=0.1)
        scaler.scale(torch.ones(()))

        def step(scaler: torch.amp.GradScaler = scaler, optimizer: Standing = optimizer) -> None:
            scaler.step(optimizer)
            scaler.update()

        rows[f"step and update, {count} gradients"] = step
    return rows


def measure(repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """Row -> times of ours and of torch's, pair by pair."""
    with amp.autocast("cpu", DTYPE):  # patches torch: part of a process's first region, not of every one
        pass
    ours = {**region_rows(amp.autocast), **scaler_rows(amp.GradScaler)}
    theirs = {**region_rows(torch.autocast), **scaler_rows(torch.amp.GradScaler)}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ours}
    for _ in range(repeats):
        for name, (own, other) in times.items():
            own.append(time_per_call(ours[name]))
            with lifted():
                other.append(time_per_call(theirs[name]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    times = measure(options.repeats)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread, "
          f"{options.repeats} repeats\n")
    print("| us per call | apex_amp | torch.amp | torch.amp / apex_amp |\n|---|---|---|---|")
    for name, (ours, theirs) in times.items():
        ratio = statistics.median(b / a for a, b in zip(ours, theirs))
        print(f"| {name} | {cell(ours)} | {cell(theirs)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
