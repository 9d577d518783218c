"""What `apex-amp compare` reports: a table, compare.json, compare.csv, and a picture."""
from __future__ import annotations

import csv
import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

AVERAGED = 5  # first and last losses are means over this many iterations that were not skipped


@dataclass
class LevelResult:
    """One run of the script. `iterations` holds the recorder's events of that name (see apex_amp.cli.record)."""
    opt_level: str
    iterations: list[dict] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None
    _partial_line: str = ""

    def read(self, events: TextIO) -> None:
        """Takes in the events written since the last call."""
        lines = (self._partial_line + events.read()).split("\n")
        self._partial_line = lines.pop()
        for line in lines:
            self.take(json.loads(line))

    def take(self, event: dict) -> None:
        kind = event.pop("event")
        if kind == "iteration":
            self.iterations.append(event)
        elif kind == "initialize":
            self.dropped += [name for name in event["dropped"] if name not in self.dropped]
            for dtype, count in event["parameters"].items():
                self.parameters[dtype] = self.parameters.get(dtype, 0) + count
        else:
            self.peak_bytes, self.error = event["peak_bytes"], event["error"]

    def losses(self, loss_id: str) -> list[float]:
        return [iteration["losses"][loss_id] for iteration in self.iterations if loss_id in iteration["losses"]]

    def mean_loss(self, loss_id: str, which: slice) -> float:
        taken = [iteration["losses"][loss_id] for iteration in self.iterations
                 if loss_id in iteration["losses"] and not iteration["skipped"]]
        return statistics.fmean(taken[which]) if taken else math.nan

    @property
    def loss_ids(self) -> list[str]:
        return sorted({loss_id for iteration in self.iterations for loss_id in iteration["losses"]}, key=int)

    def summary(self) -> dict[str, Any]:
        """The row of the table, as numbers."""
        seconds = [iteration["seconds"] for iteration in self.iterations]
        steady = seconds[1:] or seconds  # the first iteration warms caches and allocators up
        return {
            "opt_level": self.opt_level,
            "iterations": len(self.iterations),
            "first_loss": {i: self.mean_loss(i, slice(None, AVERAGED)) for i in self.loss_ids},
            "last_loss": {i: self.mean_loss(i, slice(-AVERAGED, None)) for i in self.loss_ids},
            "loss_scale": self.iterations[-1]["loss_scale"] if self.iterations else {},
            "skipped": sum(iteration["skipped"] for iteration in self.iterations),
            "seconds_per_iteration": statistics.median(steady) if steady else None,
            "peak_bytes": self.peak_bytes,
            "parameters": self.parameters,
            "overrides_dropped": self.dropped,
            "error": self.error,
        }


def format_progress(result: LevelResult) -> str:
    row = result.summary()
    text = f"{result.opt_level}  iteration {row['iterations']}"
    if result.iterations:
        last = result.iterations[-1]
        text += (f"  loss {_join(last['losses'], '{:.4g}')}  loss scale {_join(last['loss_scale'], '{:g}')}"
                 f"  skipped {row['skipped']}  {row['seconds_per_iteration'] * 1e3:.1f} ms")
    return text + (f"  {_first_line(result.error)}" if result.error else "")


def format_table(results: Sequence[LevelResult]) -> str:
    """The results as text. Several losses stand in one cell, in the order of their loss_id."""
    rows = [["level", "iterations", "first loss", "last loss", "loss scale", "skipped", "ms/iteration", "peak MiB",
             "parameters"]]
    for result in results:
        row = result.summary()
        seconds = row["seconds_per_iteration"]
        rows.append([
            result.opt_level, str(row["iterations"]), _join(row["first_loss"], "{:.4g}"),
            _join(row["last_loss"], "{:.4g}"), _join(row["loss_scale"], "{:g}"), str(row["skipped"]),
            "-" if seconds is None else f"{seconds * 1e3:.1f}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2 ** 20:.0f}",
            ", ".join(f"{count} {dtype}" for dtype, count in row["parameters"].items()) or "-"])
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in rows]
    lines += [f"{result.opt_level} failed: {_first_line(result.error)}" for result in results if result.error]
    lines += [f"{result.opt_level}: at the level's default, not the script's: {', '.join(result.dropped)}"
              for result in results if result.dropped]
    return "\n".join(lines)


def _join(values: dict[str, float], form: str) -> str:
    return " ".join(form.format(value) for _, value in sorted(values.items(), key=lambda item: int(item[0]))) or "-"


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def write_json(results: Sequence[LevelResult], command: Sequence[str], path: str) -> None:
    """{"command", "machine", "torch", "levels": [summary + "series"]}; numbers that aren't finite become null."""
    processor = platform.processor() or platform.machine()
    report = {
        "command": list(command),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "torch": torch.__version__,
        "levels": [{**result.summary(), "series": result.iterations} for result in results],
    }
    with open(path, "w") as file:
        json.dump(_finite(report), file, indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(results: Sequence[LevelResult], path: str) -> None:
    """One row per level, iteration and loss."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["opt_level", "iteration", "loss_id", "loss", "loss_scale", "skipped", "seconds"])
        for result in results:
            for number, iteration in enumerate(result.iterations):
                for loss_id, loss in iteration["losses"].items():
                    writer.writerow([result.opt_level, number, loss_id, loss, iteration["loss_scale"][loss_id],
                                     int(iteration["skipped"]), iteration["seconds"]])


def write_picture(results: Sequence[LevelResult], path: str) -> bool:
    """Loss curves and loss scales as a PNG; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, scale_axes = figure.subplots(1, 2)
    for color, result in enumerate(results):
        for number, loss_id in enumerate(result.loss_ids):
            label = result.opt_level if len(result.loss_ids) == 1 else f"{result.opt_level} loss {loss_id}"
            # Later levels are thinner, so that curves that agree all stay visible.
            style: dict[str, Any] = dict(color=f"C{color}", linestyle=("-", "--", ":", "-.")[number % 4], label=label,
                                         linewidth=1.5 * (len(results) - color), alpha=0.7)
            loss_axes.plot(result.losses(loss_id), **style)
            scale_axes.plot([iteration["loss_scale"][loss_id] for iteration in result.iterations
                             if loss_id in iteration["loss_scale"]], **style)
    loss_axes.set(title="loss", xlabel="iteration")
    scale_axes.set(title="loss scale", xlabel="iteration")
    scale_axes.set_yscale("log", base=2)
    if loss_axes.lines:
        loss_axes.legend()
    figure.savefig(path, dpi=120)
    return True
