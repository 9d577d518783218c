"""What a cast decision costs: patched torch functions against plain torch, torch.autocast and a Python wrapper.

    python -m benchmarks.bench_cast_dispatch [--repeats N] [--dtype bfloat16|float16]

Every row is timed in all columns in turn, `repeats` times over, in one process; the table gives the
median over the repeats and half the distance between the quartiles, in microseconds per call. Shapes are
small so that dispatch shows: at most 64 in any dimension.

Both caches of casts are cleared after each backward, as they are after each iteration of a training loop.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from apex_amp.amp import cast_state, patching

Work = Callable[[], object]


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, written with matmul and softmax."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, dim=-1)
        x = x + self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def function_rows(dtype: torch.dtype) -> dict[str, Work]:
    x, weight, bias = torch.randn(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
    low, low_weight, low_bias = (tensor.detach().to(dtype) for tensor in (x, weight, bias))
    return {
        "linear, all low precision": lambda: F.linear(low, low_weight, low_bias),
        "linear, FP32 parameters (cached)": lambda: F.linear(low, weight, bias),
        "mm, all low precision": lambda: torch.mm(low, low),
        "mm, two uncached casts": lambda: torch.mm(x, x),
        "add": lambda: torch.add(x, x),
        "x + x": lambda: x + x,
        "x @ x, low precision": lambda: low @ low,
        "softmax": lambda: F.softmax(x, -1),
        "exp": lambda: torch.exp(x),
        "cat": lambda: torch.cat([x, x]),
    }


def model_rows() -> dict[str, Work]:
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    block = TransformerBlock()
    rows: dict[str, Work] = {}
    for name, model, x in (("MLP", mlp, torch.randn(16, 64)), ("transformer block", block, torch.randn(2, 16, 64))):
        def forward(model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
            return model(x)

        def train(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).float().sum().backward()
            torch.clear_autocast_cache()
            cast_state.clear_weight_cache()

        rows[f"{name}, forward"], rows[f"{name}, forward + backward"] = forward, train
    return rows


def time_per_call(work: Work, seconds: float = 0.01) -> float:
    """Microseconds of this thread's CPU time per call, over about `seconds`: other processes don't count.

    As many calls go before, untimed: installing the patches leaves cold caches to whoever comes next.
    """
    for _ in range(2):
        elapsed, calls = _run_for(seconds, work)
    return elapsed / calls * 1e6


def _run_for(seconds: float, work: Work) -> tuple[float, int]:
    calls, start = 0, time.thread_time()
    while (elapsed := time.thread_time() - start) < seconds:
        for _ in range(10):
            work()
        calls += 10
    return elapsed, calls


@contextlib.contextmanager
def patched(cast_type: torch.dtype | None) -> Iterator[None]:
    patching.install()
    cast_state.set_default_cast_type(cast_type)
    try:
        yield
    finally:
        patching.uninstall()


def scanning(function: Callable[..., object]) -> Callable[..., object]:
    """The wrapper of the original: a Python closure that looks for tensors to cast, and finds none."""
    def wrapper(*args: object, **kwargs: object) -> object:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype == torch.float64:
                break
        return function(*args, **kwargs)
    return wrapper


def python_wrapper_cost() -> list[float]:
    x = torch.randn(8, 8)
    wrapped = scanning(torch.add)
    return [time_per_call(lambda: wrapped(x, x)) - time_per_call(lambda: torch.add(x, x)) for _ in range(21)]


def measure(dtype: torch.dtype, repeats: int) -> dict[str, dict[str, list[float]]]:
    rows = {**function_rows(dtype), **model_rows()}
    columns: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "plain": contextlib.nullcontext,
        "autocast": lambda: torch.autocast("cpu", dtype),
        "ours": lambda: patched(dtype),
        "ours, inactive": lambda: patched(None),
    }
    times: dict[str, dict[str, list[float]]] = {name: {column: [] for column in columns} for name in rows}
    for _ in range(repeats):
        for column, context in columns.items():
            with context():
                for name, work in rows.items():
                    if "FP32 parameters" in name and column in ("plain", "ours, inactive"):
                        continue  # plain torch refuses mixed types
                    times[name][column].append(time_per_call(work))
    return times


def cell(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    quartiles = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.2f} ±{(quartiles[2] - quartiles[0]) / 2:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    times = measure(getattr(torch, options.dtype), options.repeats)
    columns = list(next(iter(times.values())))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread, "
          f"{options.dtype}, {options.repeats} repeats\n")
    print("| us per call | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name, row in times.items():
        print(f"| {name} | " + " | ".join(cell(row[column]) for column in columns) + " |")
    print(f"\nA Python wrapper that scans its arguments adds {cell(python_wrapper_cost())} us to a call.")


if __name__ == "__main__":
    main()
