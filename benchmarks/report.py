"""The main job's table, results.json and picture."""
from __future__ import annotations

import json
import math
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from apex_amp._version import __version__
from benchmarks.train_digits import OPT_LEVELS, TrainResult

# CPU flags (Linux's names) of which one means that matrix products in the type run on hardware.
HALF_FLAGS = {torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
              torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"}}
ROW_TYPES = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "torch.amp float16": torch.float16,
             "O4": torch.bfloat16, "O5": torch.bfloat16, "torch.amp bfloat16": torch.bfloat16}
ROLES = {"O0": "accuracy baseline", "O3": "speed baseline"}


@dataclass
class Row:
    """A row of the table: an opt level or a form of torch.amp, with one result per seed."""
    name: str
    results: list[TrainResult] = field(default_factory=list)
    peak_memory_bytes: int | None = None

    def add(self, result: TrainResult, peak_memory_bytes: int | None) -> None:
        """The first seed's peak is kept: later seeds run in memory that the first one left behind."""
        if not self.results:
            self.peak_memory_bytes = peak_memory_bytes
        self.results.append(result)

    @property
    def ms_per_iteration(self) -> float:
        """The median over epochs and seeds; each seed's first epoch warms up and counts only if it is the only one."""
        times = [result.epoch_ms_per_iteration[1:] or result.epoch_ms_per_iteration for result in self.results]
        return statistics.median(sum(times, []))

    def column(self, name: str) -> list:
        return [getattr(result, name) for result in self.results]


def describe_machine(device: torch.device) -> dict[str, Any]:
    flags, model = _cpu_flags_and_model()
    emulated = [str(dtype) for dtype, hardware in HALF_FLAGS.items() if device.type == "cpu" and not flags & hardware]
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "cpu": model,
            "system": platform.platform(), "emulated_types": emulated}


def _cpu_flags_and_model() -> tuple[set[str], str]:
    try:
        fields = dict(line.split("\t", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if "\t" in line)
    except OSError:
        return set(), platform.processor()
    values = {name.strip(): value.strip("\t :") for name, value in fields.items()}
    flags = values.get("flags") or values.get("Features") or ""  # x86's and Arm's names
    return set(flags.split()), values.get("model name", platform.machine())


def write_results(rows: list[Row], machine: dict[str, Any], options: dict[str, Any], out: Path) -> str:
    """Writes results.json and picture.png into `out`; returns the table. Every row has a result."""
    results = {"levels": {row.name: _row_json(row) for row in rows if row.name in OPT_LEVELS},
               "native": {row.name: _row_json(row) for row in rows if row.name not in OPT_LEVELS},
               "options": {name: value if isinstance(value, int) else str(value) for name, value in options.items()},
               "machine": machine,
               "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
                            "apex_amp": __version__}}
    (out / "results.json").write_text(json.dumps(results) + "\n")
    draw(rows, out / "picture.png")
    return f"{table(rows, machine, options['threads'])}\n{out / 'results.json'}  {out / 'picture.png'}"


def _row_json(row: Row) -> dict[str, Any]:
    columns = ("test_accuracy", "train_loss", "skipped_steps", "final_loss_scale", "loss_history", "loss_scale_history")
    return {**{name: _finite_or_none(row.column(name)) for name in columns}, "ms_per_iteration": row.ms_per_iteration,
            "peak_memory_bytes": row.peak_memory_bytes, "weight_bytes": row.results[0].weight_bytes,
            "master_bytes": row.results[0].master_bytes}


def _finite_or_none(values: list) -> list:
    """JSON has no NaN and no infinity, and a run at O3 may end in either."""
    return [_finite_or_none(value) if isinstance(value, list) else value if math.isfinite(value) else None
            for value in values]


def table(rows: list[Row], machine: dict[str, Any], threads: int) -> str:
    header = ("level", "train loss", "test accuracy %", "skipped", "loss scale", "ms/iter", "speed vs O0",
              "peak MiB", "weights KiB", "masters KiB")
    base = next((row.ms_per_iteration for row in rows if row.name == "O0"), None)
    emulated = {row.name for row in rows if str(ROW_TYPES.get(row.name)) in machine["emulated_types"]}
    lines = [header] + [_cells(row, base, row.name in emulated) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])])
            for line in lines]
    text.insert(1, "-" * len(text[0]))
    text.append(f"Seeds: {len(rows[0].results)}, on {machine['device']} ({machine['cpu']}, threads: {threads}); "
                "accuracy as mean ± standard deviation, the rest as mean or median over seeds.")
    text.append("Peak: allocated on the GPU." if machine["device"] != "CPU" else
                "Peak: resident memory of the level's own process beyond what it had before the model was made; "
                "with a net this small, mostly PyTorch's own code and buffers.")
    if emulated:
        text.append("* This CPU has no arithmetic for this type and PyTorch emulates it: "
                    "the speed of mixed precision shows on a GPU.")
    return "\n".join(text)


def _cells(row: Row, base_ms: float | None, emulated: bool) -> tuple[str, ...]:
    name = row.name + (f" ({ROLES[row.name]})" if row.name in ROLES else "") + (" *" if emulated else "")
    accuracy = [100 * value for value in row.column("test_accuracy")]
    spread = f" ± {statistics.stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
    peak = "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**20:.1f}"
    speed = "-" if base_ms is None else f"{base_ms / row.ms_per_iteration:.2f}x"
    return (name, f"{statistics.mean(row.column('train_loss')):.4f}", f"{statistics.mean(accuracy):.2f}{spread}",
            f"{statistics.mean(row.column('skipped_steps')):g}",
            f"{statistics.median(row.column('final_loss_scale')):g}", f"{row.ms_per_iteration:.2f}", speed, peak,
            f"{row.results[0].weight_bytes / 1024:.1f}", f"{row.results[0].master_bytes / 1024:.1f}")


def draw(rows: list[Row], path: Path) -> None:
    """Loss curves and loss-scale histories; shade, dashes and marker tell the rows apart in greyscale too."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss_axes, scale_axes) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    styles = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1))]
    markers = "osD^vPX*"
    for index, row in enumerate(rows):
        iterations = len(row.results[0].loss_history)
        shade = plt.get_cmap("viridis")(0.85 * index / max(1, len(rows) - 1))
        look = dict(label=row.name, color=shade, linestyle=styles[index], marker=markers[index], markersize=5,
                    markevery=(index * iterations // (10 * len(rows)), max(1, iterations // 10)))
        mean = [statistics.mean(values) for values in zip(*row.column("loss_history"))]
        loss_axes.plot(range(1, iterations + 1), _running_mean(mean, max(1, iterations // 25)), **look)
        scale_axes.plot(range(1, iterations + 1), row.results[0].loss_scale_history, **look)
    loss_axes.set(title="Training loss (mean of the seeds)", xlabel="iteration", ylabel="cross-entropy", yscale="log")
    scale_axes.set(title="Loss scale (seed 0)", xlabel="iteration", ylabel="loss scale")
    scale_axes.set_yscale("log", base=2)
    for axes in (loss_axes, scale_axes):
        axes.grid(alpha=0.3)
    loss_axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _running_mean(values: list[float], width: int) -> list[float]:
    return [statistics.fmean(values[max(0, end - width):end]) for end in range(1, len(values) + 1)]
