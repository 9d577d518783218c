"""The main job: trains the digits at each opt level, one fresh process per level, and reports.

Writes results.json and picture.png into --out and prints the table; Ctrl-C reports the runs that had ended.
"""
from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable

import torch
from tqdm import tqdm

from benchmarks.report import Row, describe_machine, write_results
from benchmarks.train_digits import OPT_LEVELS, TrainResult, train

NATIVE_TWIN = {"O1": "torch.amp float16", "O4": "torch.amp bfloat16"}
CPU_WIDTH, GPU_WIDTH = 8, 128  # a CPU without half arithmetic is 2 to 16 times slower in float16 than in float32


@dataclass
class Options:
    """What every run of the job shares."""
    seeds: int
    epochs: int
    width: int
    device: torch.device


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__.partition("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--opt-levels", nargs="+", choices=OPT_LEVELS, default=["O0", "O1", "O2", "O3"],
                        help="levels to train at; O1 and O4 bring the row of torch.amp with them")
    parser.add_argument("--seeds", type=_positive, default=5, metavar="N", help="runs per level, with seeds 0 to N-1")
    parser.add_argument("--epochs", type=_positive, default=50, metavar="N", help="passes over the 1,347 digits")
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to train: cpu, cuda or cuda:INDEX")
    parser.add_argument("--width", type=_positive, metavar="N",
                        help=f"channels of the first convolution ({CPU_WIDTH} on a CPU and {GPU_WIDTH} on a GPU if not given)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), metavar="DIR",
                        help="folder for results.json and picture.png")
    parser.add_argument("--quick", action="store_true", help="at most 2 seeds and 5 epochs: under 90 seconds on 2 cores")
    parsed = parser.parse_args(arguments)
    parsed.opt_levels = sorted(set(parsed.opt_levels))
    parsed.width = parsed.width or (CPU_WIDTH if parsed.device.type == "cpu" else GPU_WIDTH)
    if parsed.quick:
        parsed.seeds, parsed.epochs = min(parsed.seeds, 2), min(parsed.epochs, 5)
    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        if device.type not in ("cpu", "cuda"):
            raise ValueError("the job knows cpu and cuda")
        torch.empty(0, device=device)
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {error}") from None
    return device


def resident_bytes(field: str) -> int | None:
    """A memory figure of this process (VmRSS: now; VmHWM: the highest); None where the system does not say."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def start_memory_watch(device: torch.device) -> Callable[[], int | None]:
    """Returns what tells the peak of bytes from here on: allocated on a GPU; on a CPU, resident beyond those of now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return functools.partial(torch.cuda.max_memory_allocated, device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    except OSError:
        return lambda: None
    start = resident_bytes("VmHWM")
    return lambda: None if start is None else resident_bytes("VmHWM") - start


def run_row(connection: Connection, name: str, options: Options) -> None:
    """In a process of its own: trains `name` with every seed; sends "epoch", (TrainResult, peak bytes) or an error's text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        for seed in range(options.seeds):
            peak = start_memory_watch(options.device)
            result = train(name, seed, options.epochs, options.width, options.device,
                           on_epoch=lambda: connection.send("epoch"))
            connection.send((result, peak()))
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        connection.close()


def messages(name: str, options: Options):
    """Starts a process for `name` and yields what it sends until it ends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_row, args=(sender, name, options), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            try:
                yield receiver.recv()
            except EOFError:
                return
    finally:
        process.terminate()
        process.join()


def main(arguments: list[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    options = Options(parsed.seeds, parsed.epochs, parsed.width, parsed.device)
    parsed.out.mkdir(parents=True, exist_ok=True)
    names = [name for level in parsed.opt_levels for name in (level, NATIVE_TWIN.get(level)) if name]
    rows: list[Row] = []
    failures: list[str] = []
    interrupted = False
    bar = tqdm(total=len(names) * options.seeds * options.epochs, unit="epoch", file=sys.stderr)
    try:
        for name in names:
            rows.append(Row(name))
            for message in messages(name, options):
                if isinstance(message, str) and message != "epoch":
                    failures.append(f"{name} failed:\n{message}")
                elif message == "epoch":
                    bar.set_description(f"{name}, seed {len(rows[-1].results)}", refresh=False)
                    bar.update()
                else:
                    rows[-1].add(*message)
            if len(rows[-1].results) < options.seeds and not failures:
                failures.append(f"{name} failed: its process ended after {len(rows[-1].results)} of {options.seeds} seeds")
    except KeyboardInterrupt:
        interrupted = True
    bar.close()

    print(write_results([row for row in rows if row.results], describe_machine(options.device), vars(options), parsed.out))
    for failure in failures:
        print(failure, file=sys.stderr)
    if interrupted:
        print("interrupted: this is what had ended by then", file=sys.stderr)
        return 130
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
