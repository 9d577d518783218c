"""Times the multi-tensor ops against torch's best way, interleaved in one run.

python -m benchmarks.bench_multi_tensor [--device cpu] [--threads 2] [--repeats 15] [--json FILE]

GB/s counts the bytes an op must move at least: each list it reads or writes once. The ratio is torch's median time
over ours, with the ratio that the project asks for on the CPU beside it.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from apex_amp import multi_tensor
from benchmarks.report import describe_machine

SHAPES = [(1, 25_000_000), (161, 155_000), (10_000, 2_500), (10, 100)]  # tensors, elements of each


class Case(NamedTuple):
    name: str
    bytes_per_element: int
    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    wanted: tuple[float, ...]  # CPU ratio for each of SHAPES


def cases(tensors: int, size: int, device: torch.device) -> Iterator[Case]:
    masters = [torch.randn(size, device=device) for _ in range(tensors)]
    grads = [master.half() for master in masters]
    found_inf, one = torch.zeros(1, device=device), torch.ones(1, device=device)

    def torch_unscale() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(masters, found_inf, one)

    def torch_unscale_half() -> None:
        torch._foreach_copy_(masters, grads)
        torch_unscale()

    yield Case("unscale + check, half to float", 6,
               lambda: multi_tensor.multi_tensor_scale(grads, masters, found_inf, one), torch_unscale_half,
               (2.5, 4, 5, 1))
    yield Case("unscale + check, float in place", 8,
               lambda: multi_tensor.multi_tensor_unscale_(masters, found_inf, one), torch_unscale, (1, 1, 2, 1))
    yield Case("l2norm, float", 4, lambda: multi_tensor.multi_tensor_l2norm(masters),
               lambda: torch.stack(torch._foreach_norm(masters)).norm(), (1, 1, 2, 1))
    yield Case("copy, float to half", 6, lambda: multi_tensor.multi_tensor_copy(masters, grads),
               lambda: torch._foreach_copy_(grads, masters), (1, 1, 1, 1))


def interleaved_seconds(functions: list[Callable[[], Any]], repeats: int, device: torch.device,
                        settle: Callable[[], Any] = lambda: None) -> list[float]:
    """Each function's median time; one call of each is a round, so that slow moments of the machine hit all.

    `settle` runs before each call, untimed.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[list[float]] = [[] for _ in functions]
    for round_number in range(repeats + 1):
        for function, sample in zip(functions, times):
            settle()
            wait()
            start = time.perf_counter()
            function()
            wait()
            if round_number:  # the first warms up
                sample.append(time.perf_counter() - start)
    return [statistics.median(sample) for sample in times]


def measure(device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    # Read before each call of a large op: else each would pay for writing the cached output of the other back to
    # memory, and those that store past the caches, as ours do, leave nothing to pay for.
    neutral = torch.ones(32_000_000, device=device)
    for column, (tensors, size) in enumerate(SHAPES):
        elements = tensors * size
        large = elements > 1_000_000
        for case in cases(tensors, size, device):
            ours, torchs = interleaved_seconds([case.ours, case.torchs], repeats if large else 200 * repeats, device,
                                               neutral.sum if large else lambda: None)
            yield {"op": case.name, "tensors": tensors, "size": size, "ms": ours * 1e3, "torch_ms": torchs * 1e3,
                   "gb_per_s": case.bytes_per_element * elements / ours / 1e9, "ratio": torchs / ours,
                   "wanted": case.wanted[column] if device.type == "cpu" else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu (default) or cuda")
    parser.add_argument("--threads", default=2, type=int, help="CPU threads (default: 2)")
    parser.add_argument("--repeats", default=15, type=int, help="rounds per op and shape (default: 15)")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe_machine(options.device)
    print(f"{machine['device']}, {machine['cpu']}, {options.threads} threads, torch {torch.__version__}")
    print("| op | tensors x elements | ms | GB/s | torch ms | ratio | wanted |\n|---|---|---|---|---|---|---|")
    rows = []
    for row in measure(options.device, options.repeats):
        rows.append(row)
        wanted = "" if row["wanted"] is None else f"{row['wanted']:g}"
        print(f"| {row['op']} | {row['tensors']:,} x {row['size']:,} | {row['ms']:.3f} | {row['gb_per_s']:.1f} "
              f"| {row['torch_ms']:.3f} | {row['ratio']:.2f} | {wanted} |", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "threads": options.threads, "torch": torch.__version__, "rows": rows}, file,
                      indent=1)


if __name__ == "__main__":
    main()
