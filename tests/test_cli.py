"""The apex-amp command in fresh processes: run is `python`, compare reports every level, doctor tells the truth."""
import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from apex_amp import cli
from apex_amp.cli import compare
from apex_amp.cli.report import LevelResult, format_table

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def environment():
    return {**os.environ, "PYTHONPATH": ROOT}


def run(*command, cwd=None, **keywords):
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=environment(), capture_output=True,
                          text=True, **keywords)


def apex_amp(*arguments, cwd=None):
    return run("-m", "apex_amp", *arguments, cwd=cwd)


# --- run: the same as python ------------------------------------------------------------------------------------------

PROBE = """
import sys
print(sys.argv, __name__, __file__, __package__, __spec__ is None, sys.path[0])
print(sys.modules["__main__"].__dict__ is globals())
print(sorted(n for n in globals() if not n.startswith("__")))
def fail():
    raise ValueError("from the script")
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
if sys.argv[1:] == ["words"]:
    sys.exit("words on stderr")
if sys.argv[1:] == ["interrupt"]:
    raise KeyboardInterrupt
if sys.argv[1:] == ["fail"]:
    fail()
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "code" / "package").mkdir(parents=True)
    (tmp_path / "code" / "probe.py").write_text(PROBE)
    (tmp_path / "code" / "package" / "__init__.py").write_text("")
    (tmp_path / "code" / "package" / "__main__.py").write_text(PROBE)
    (tmp_path / "code" / "broken.py").write_text("def f(:\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "code" / "probe.py")
    return tmp_path


@pytest.mark.parametrize("command", [
    ["code/probe.py", "--force", "-m", "a b", "--"], ["link.py"], ["code/probe.py", "exit"],
    ["code/probe.py", "words"], ["code/probe.py", "interrupt"], ["code/probe.py", "fail"], ["code/broken.py"],
    ["nothing.py"], ["code/package", "exit"], ["-m", "code.package", "fail"], ["-m", "code.nothing"],
], ids=" ".join)
def test_run_is_what_python_does(project, command):
    expected = run(*command, cwd=project)
    actual = apex_amp("run", *command, cwd=project)
    assert actual.returncode == expected.returncode
    assert actual.stdout == expected.stdout
    assert actual.stderr == expected.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_run_answers_apex_also_behind_torchrun(project):
    script = project / "train.py"
    script.write_text("import os, sys, apex.amp\n"
                      "print('rank', os.environ['RANK'], sys.argv, apex.amp.initialize.__name__)\n")
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "apex_amp", "run",
               script, "--lr", "1")
    assert done.returncode == 0, done.stderr
    expected = [f"rank {rank} [{str(script)!r}, '--lr', '1'] initialize" for rank in "01"]
    assert sorted(done.stdout.splitlines()) == expected


def test_run_with_legacy_torch(project):
    script = project / "old.py"
    script.write_text("import torch._six, torch; print(torch.load('whole.pt').x)")
    (project / "save.py").write_text("import argparse, torch; torch.save(argparse.Namespace(x=5), 'whole.pt')")
    assert run("save.py", cwd=project).returncode == 0
    assert "Weights only" in apex_amp("run", "--legacy-torch", "old.py", cwd=project).stderr
    done = apex_amp("run", "--legacy-torch", "--trust", "whole.pt", "old.py", cwd=project)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert "No module named 'torch._six'" in apex_amp("run", "old.py", cwd=project).stderr


@pytest.mark.parametrize("arguments, words", [
    (["run"], "no SCRIPT given"),
    (["run", "--trust", "x", "s.py"], "--trust needs --legacy-torch"),
    (["run", "--legacy-torch", "--trust", "nothing.pt", "s.py"], "there is no such file"),
    (["trian", "s.py"], "there is no command 'trian'"),
    (["compare"], "no SCRIPT given"),
    (["compare", "nothing.py"], "there is no script 'nothing.py'"),
    (["compare", "--opt-levels", "01", "--", "s.py"], "the letter O"),
    (["compare", "--steps", "0", "s.py"], "expected a positive number"),
])
def test_mistakes_are_sentences(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code not in (0, None) and words in capsys.readouterr().err + str(exit.value.code)


@pytest.mark.parametrize("arguments", [["--help"], [], ["run", "--help"], ["compare", "--help"], ["doctor", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 0 and "apex-amp" in capsys.readouterr().out


# --- compare ----------------------------------------------------------------------------------------------------------

TRAIN = """
import argparse, sys, time, torch
from apex import amp
parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32=True)
if options.mode == "crash" and model[0].weight.dtype == torch.float32:
    raise RuntimeError("no float here")
x = torch.randn(32, 4)
for step in range(options.steps):
    optimizer.zero_grad()
    loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
    if options.mode == "overflow" and step == 3:
        loss = loss * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if options.mode == "slow":
        time.sleep(0.5)
print("script is done", options.steps)
"""


@pytest.fixture
def train_script(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def read_report(folder):
    with open(folder / "compare.json") as file:
        report = json.load(file)
    with open(folder / "compare.csv", newline="") as file:
        return {level["opt_level"]: level for level in report["levels"]}, list(csv.DictReader(file))


@pytest.mark.slow
def test_compare_runs_every_level_and_reports(train_script):
    done = apex_amp("compare", "train.py", "--mode", "overflow", "--opt-levels", "O0", "O1", "O2", "O3", "--steps", "6",
                    "--out", "out", cwd=train_script)
    assert done.returncode == 0, done.stdout + done.stderr
    levels, rows = read_report(train_script / "out")
    assert list(levels) == ["O0", "O1", "O2", "O3"]
    assert [level["iterations"] for level in levels.values()] == [6] * 4
    assert levels["O0"]["parameters"] == levels["O1"]["parameters"] == {"float32": 6}
    assert levels["O2"]["parameters"] == {"float16": 4, "float32": 2} and levels["O3"]["parameters"] == {"float16": 6}
    assert levels["O1"]["skipped"] == levels["O2"]["skipped"] == 1
    assert levels["O1"]["loss_scale"] == {"0": 32768} and levels["O2"]["loss_scale"] == {"0": 128}
    assert levels["O1"]["overrides_dropped"] == ["keep_batchnorm_fp32", "loss_scale"]
    assert levels["O2"]["overrides_dropped"] == []
    first = [level["series"][0]["losses"]["0"] for level in levels.values()]
    assert first == pytest.approx([first[0]] * 4, rel=0.02)  # the same seed
    assert all(level["seconds_per_iteration"] > 0 and level["peak_bytes"] > 2 ** 20 for level in levels.values())
    assert len(rows) == 24 and rows[0]["loss"] == str(first[0])
    assert "script is done" not in (train_script / "out" / "O0.log").read_text()  # stopped after 6 of 8
    table = done.stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[:5]] == ["level", "O0", "O1", "O2", "O3"]


@pytest.mark.slow
def test_compare_a_level_that_crashes_is_a_row(train_script):
    done = apex_amp("compare", "--out", "out", "--opt-levels", "O0", "O2", "train.py", "--mode", "crash", "--",
                    "--steps", "4", cwd=train_script)
    assert done.returncode == 1
    levels, _ = read_report(train_script / "out")
    assert levels["O0"]["error"] == "RuntimeError: no float here" and levels["O0"]["iterations"] == 0
    assert levels["O2"]["error"] is None and levels["O2"]["iterations"] == 4
    assert "O0 failed: RuntimeError: no float here" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert "script is done 4" in (train_script / "out" / "O2.log").read_text()


@pytest.mark.slow
def test_compare_keeps_what_is_there_at_ctrl_c(train_script):
    process = subprocess.Popen(
        [sys.executable, "-m", "apex_amp", "compare", "train.py", "--mode", "slow", "--opt-levels", "O0", "O1",
         "--out", "out"], cwd=train_script, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True)
    events = train_script / "out" / "O0.events"
    deadline = time.monotonic() + 120
    while not (events.exists() and '"iteration"' in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    levels, _ = read_report(train_script / "out")
    assert list(levels) == ["O0"] and levels["O0"]["iterations"] >= 1 and levels["O0"]["error"] == "interrupted"
    assert "Traceback" not in output + errors


@pytest.mark.parametrize("argv, command, steps, out, levels", [
    (["s.py"], ["s.py"], None, "apex_amp_compare", ["O0", "O1", "O2", "O3"]),
    (["--steps", "3", "s.py", "--lr", "1", "-b", "4", "--out", "d"], ["s.py", "--lr", "1", "-b", "4"], 3, "d",
     ["O0", "O1", "O2", "O3"]),
    (["--opt-levels", "O0", "O2", "s.py", "x"], ["s.py", "x"], None, "apex_amp_compare", ["O0", "O2"]),
    (["s.py", "--opt-levels=O1,O4", "x", "--", "--steps", "9"], ["s.py", "x", "--steps", "9"], None, "apex_amp_compare",
     ["O1", "O4"]),
    (["-m", "pkg.train", "-h", "--opt-level", "O2"], ["-m", "pkg.train", "-h", "--opt-level", "O2"], None,
     "apex_amp_compare", ["O0", "O1", "O2", "O3"]),
])
def test_compare_tells_its_options_from_the_scripts(argv, command, steps, out, levels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    _, options = compare.parse(argv)
    assert (options.command, options.steps, options.out, options.opt_levels) == (command, steps, out, levels)


def test_the_table_shows_several_losses_and_leaves_skipped_ones_out_of_the_means():
    result = LevelResult("O1")
    for number, loss in enumerate((4.0, float("inf"), 2.0)):
        result.take({"event": "iteration", "losses": {"0": loss, "2": 1.0}, "loss_scale": {"0": 8.0, "2": 4.0},
                     "skipped": number == 1, "seconds": 0.001 * (number + 1)})
    row = result.summary()
    assert row["first_loss"] == {"0": 3.0, "2": 1.0} and row["skipped"] == 1
    assert row["seconds_per_iteration"] == pytest.approx(0.0025)
    assert "3 1" in format_table([result]) and "8 4" in format_table([result])


# --- doctor -----------------------------------------------------------------------------------------------------------

def test_doctor_finds_this_build_healthy():
    done = apex_amp("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "healthy"
    for words in ("CPU kernels", "ok: kernels", "ok: casts", "ok: training"):
        assert words in done.stdout


def test_doctor_names_the_next_command_when_something_is_wrong(tmp_path):
    sabotage = tmp_path / "sabotage.py"
    sabotage.write_text("""
import sys
from apex_amp import multi_tensor
multi_tensor.multi_tensor_scale = lambda *arguments: None
from apex_amp.cli import main
main(["doctor"])
""")
    done = run(sabotage)
    assert done.returncode == 1
    assert "WRONG: Multi-tensor kernels against torch" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not healthy; next: pip install")
