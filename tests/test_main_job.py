"""The main job: its training runs, its figures and how it ends."""
from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys

import pytest
import torch

from benchmarks import main_job
from benchmarks.report import Row, describe_machine, table, write_results
from benchmarks.train_digits import OPT_LEVELS, TrainResult, train

CPU = torch.device("cpu")


def test_O0_is_bit_equal_to_the_loop_without_amp():
    with_amp, without = (train(row, seed=3, epochs=2, width=8, device=CPU) for row in ("O0", "FP32"))
    assert with_amp.loss_history == without.loss_history
    assert with_amp.test_accuracy == without.test_accuracy


@pytest.mark.slow
def test_accuracy_is_kept_at_every_level_meant_for_training():
    mean = {}
    for row in ("O0", "O1", "O2", "O4", "O5"):
        results = [train(row, seed, epochs=8, width=8, device=CPU) for seed in range(5)]
        mean[row] = statistics.mean(result.test_accuracy for result in results)
        assert all(result.skipped_steps < 10 for result in results), row
    assert mean["O0"] > 0.97
    assert mean == pytest.approx(dict.fromkeys(mean, mean["O0"]), abs=0.01)


@pytest.mark.parametrize("row, weights, masters, scale", [
    ("O0", 4, 0, 1.0), ("O1", 4, 0, 2.0**16), ("O2", 2, 4, 2.0**16),
    ("O3", 2, 0, 1.0), ("O4", 4, 0, 1.0), ("O5", 2, 4, 1.0),
    ("torch.amp float16", 4, 0, 2.0**16), ("torch.amp bfloat16", 4, 0, 1.0)])
def test_bytes_and_scale_of_a_run(row, weights, masters, scale):
    """Bytes per parameter of weights and masters; BatchNorm, 1 % of the parameters, stays FP32 at O2 and O5."""
    result = train(row, seed=0, epochs=1, width=8, device=CPU)
    parameters = train("FP32", seed=0, epochs=1, width=8, device=CPU).weight_bytes / 4
    assert result.weight_bytes == pytest.approx(weights * parameters, rel=0.01)
    assert result.master_bytes == pytest.approx(masters * parameters, rel=0.01)
    assert result.final_loss_scale == scale / 2**result.skipped_steps
    assert result.loss_history[-1] < result.loss_history[0]
    assert len(result.loss_scale_history) == len(result.loss_history) == 42


def results_of(*levels: str, accuracy=(0.9, 0.8), ms=2.0) -> list[Row]:
    rows = [Row(level) for level in levels]
    for row in rows:
        for value in accuracy:
            row.add(TrainResult(value, 0.5, 1, 128.0, [100.0, ms], 2048, 1024, [1.0, 0.5], [256.0, 128.0]), 2**20)
    return rows


def test_table_gives_the_figures():
    slow, fast = results_of("O0", ms=3.0) + results_of("O3", ms=1.5)
    machine = {**describe_machine(CPU), "emulated_types": ["torch.float16"]}
    lines = table([slow, fast], machine, threads=1).splitlines()
    assert lines[2].split() == ("O0 (accuracy baseline) 0.5000 85.00 ± 7.07 1 128 3.00 1.00x 1.0 2.0 1.0").split()
    assert lines[3].split() == ("O3 (speed baseline) * 0.5000 85.00 ± 7.07 1 128 1.50 2.00x 1.0 2.0 1.0").split()
    assert "emulates" in lines[-1] and "* " not in table([slow], machine, threads=1)


@pytest.mark.slow
def test_job_writes_table_json_and_picture(tmp_path, capsys):
    out = tmp_path / "new"
    status = main_job.main(["--opt-levels", "O1", "O0", "--seeds", "1", "--epochs", "2", "--out", str(out)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    rows = [line.split("  ")[0].rstrip(" *") for line in printed.out.splitlines()[2:5]]
    assert rows == ["O0 (accuracy baseline)", "O1", "torch.amp float16"]
    results = json.loads((out / "results.json").read_text())
    assert list(results["levels"]) == ["O0", "O1"] and list(results["native"]) == ["torch.amp float16"]
    for level in results["levels"].values():
        for name in ("test_accuracy", "train_loss", "skipped_steps", "final_loss_scale"):
            assert len(level[name]) == 1
        assert level["ms_per_iteration"] > 0 and level["peak_memory_bytes"] > 2**20
    assert results["machine"]["device"] == "CPU" and results["versions"]["torch"] == torch.__version__
    assert (out / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_interrupt_leaves_what_had_ended(tmp_path):
    job = subprocess.Popen([sys.executable, "-m", "benchmarks.main_job", "--opt-levels", "O0", "--seeds", "1000",
                            "--epochs", "1", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           start_new_session=True)
    shown = b""
    while b"seed 2" not in shown and job.poll() is None:
        shown += os.read(job.stderr.fileno(), 4096)
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 130 and b"interrupted" in err and b"Traceback" not in err, err
    assert out.startswith(b"level")
    assert len(json.loads((tmp_path / "results.json").read_text())["levels"]["O0"]["test_accuracy"]) >= 2


def test_a_level_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    def messages(name, options):
        yield from ["epoch", (results_of(name)[0].results[0], None)] if name == "O0" else ["RuntimeError: planted"]
    monkeypatch.setattr(main_job, "messages", messages)
    assert main_job.main(["--opt-levels", "O0", "O2", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "O2 failed with seed 0: RuntimeError: planted" in printed.err
    assert list(json.loads((tmp_path / "results.json").read_text())["levels"]) == ["O0"]


def test_run_that_diverged_is_reported(tmp_path):
    row = results_of("O3")[0]
    row.results[0].loss_history[1] = row.results[0].train_loss = math.nan
    printed = write_results([row], describe_machine(CPU), {"threads": 1}, tmp_path)
    level = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["levels"]["O3"]
    assert level["train_loss"] == [None, 0.5] and level["loss_history"] == [[1.0, None], [1.0, 0.5]]
    assert "nan" in printed.splitlines()[2]


@pytest.mark.parametrize("arguments, message", [
    (["--opt-levels", "01"], "invalid choice: '01'"),
    (["--seeds", "0"], "expected a positive whole number, got '0'"),
    (["--epochs", "few"], "expected a positive whole number, got 'few'"),
    (["--device", "tpu"], "'tpu' cannot be used here"),
    (["--device", "cuda:99"], "'cuda:99' cannot be used here"),
])
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_job.parse_arguments(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_quick_is_small_and_levels_come_in_order():
    parsed = main_job.parse_arguments(["--quick", "--opt-levels", "O3", "O0", "O3"])
    assert (parsed.seeds, parsed.epochs, parsed.opt_levels) == (2, 5, ["O0", "O3"])
    assert tuple(main_job.parse_arguments(["--opt-levels", *OPT_LEVELS]).opt_levels) == OPT_LEVELS
