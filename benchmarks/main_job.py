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
from typing import Callable, Iterator

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
    threads: int
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
    parser.add_argument("--width", type=_positive, metavar="N", default=argparse.SUPPRESS,
                        help=f"channels of the first convolution (default: {CPU_WIDTH} on a CPU, {GPU_WIDTH} on a GPU)")
    parser.add_argument("--threads", type=_positive, default=1, metavar="N",
                        help="CPU threads; a net this small gains little from more, and loses much on busy cores")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), metavar="DIR",
                        help="folder for results.json and picture.png")
    parser.add_argument("--quick", action="store_true", help="at most 2 seeds and 5 epochs: 90 seconds on 2 cores")
    parsed = parser.parse_args(arguments)
    parsed.opt_levels = sorted(set(parsed.opt_levels))
    if "width" not in parsed:
        parsed.width = CPU_WIDTH if parsed.device.type == "cpu" else GPU_WIDTH
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


def peak_resident_bytes() -> int:
    """The most memory that this process has had in RAM since /proc/self/clear_refs was written."""
    return int(re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def start_memory_watch(device: torch.device) -> Callable[[], int | None]:
    """Returns what tells the peak of bytes from here on: allocated on a GPU; on a CPU, resident beyond those of now.

    It tells None on a CPU whose system keeps no such figure (it is Linux's).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return functools.partial(torch.cuda.max_memory_allocated, device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far becomes that of now
        start = peak_resident_bytes()
    except OSError:
        return lambda: None
    return lambda: peak_resident_bytes() - start


def run_row(connection: Connection, name: str, options: Options) -> None:
    """Trains `name` with every seed, in a process of its own.

    Sends "epoch" after each epoch, (TrainResult, peak bytes) after each seed, and an error's text if there is one.
    """
    try:
        torch.set_num_threads(options.threads)
        for seed in range(options.seeds):
            peak = start_memory_watch(options.device)
            result = train(name, seed, options.epochs, options.width, options.device,
                           on_epoch=lambda: connection.send("epoch"))
            connection.send((result, peak()))
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        connection.close()


def messages(name: str, options: Options) -> Iterator[str | tuple[TrainResult, int | None]]:
    """Starts a process for `name` and yields what `run_row` sends until it ends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_row, args=(sender, name, options), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the parent alone to act on
    process.start()
    signal.signal(signal.SIGINT, handler)
    sender.close()
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        pass
    finally:
        process.terminate()
        process.join()


def run_all(names: list[str], options: Options, rows: list[Row], failures: list[str]) -> None:
    """Fills `rows` and `failures` as the runs end, so that both are worth something after an exception."""
    with tqdm(total=len(names) * options.seeds * options.epochs, unit="epoch") as bar:
        for name in names:
            row = Row(name)
            rows.append(row)
            error = None
            for message in messages(name, options):
                if not isinstance(message, str):
                    row.add(*message)
                elif message == "epoch":
                    bar.set_description(f"{name}, seed {len(row.results)}", refresh=False)
                    bar.update()
                else:
                    error = message
            if len(row.results) < options.seeds:
                failures.append(f"{name} failed with seed {len(row.results)}: {error or 'its process ended early'}")


def main(arguments: list[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    options = Options(parsed.seeds, parsed.epochs, parsed.width, parsed.threads, parsed.device)
    names = [name for level in parsed.opt_levels for name in (level, NATIVE_TWIN.get(level)) if name]
    parsed.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failures: list[str] = []
    exit_status = 0
    try:
        run_all(names, options, rows, failures)
    except KeyboardInterrupt:
        failures.append("interrupted: the table holds what had ended by then")
        exit_status = 130

    ended = [row for row in rows if row.results]
    if ended:
        print(write_results(ended, describe_machine(options.device), vars(options), parsed.out))
    for failure in failures:
        print(failure, file=sys.stderr)
    return exit_status or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
