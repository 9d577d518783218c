"""`apex-amp compare`: one script, once per opt level, side by side."""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from .record import Settings
from .report import LevelResult, format_progress, format_table, write_csv, write_json, write_picture
from .run import add_legacy_options, make_legacy_environment

DESCRIPTION = """\
Run a script that uses amp.initialize and amp.scale_loss once per opt level, each in a process of its own with the same
seed, and compare loss, loss scale, skipped steps, time per iteration, peak memory and parameter dtypes. The script is
not edited: the level is overridden from outside. At a level other than its own, what the script overrides of a level's
properties (loss_scale, keep_batchnorm_fp32, ...) is left at that level's defaults."""

EPILOG = """\
--opt-levels, --steps and --out may also follow SCRIPT; a script that has options of these names gets its own behind --
  apex-amp compare train.py --lr 0.1 --opt-levels O0 O1 O2 --steps 100
  apex-amp compare --steps 100 train.py -- --steps 5000

An iteration begins where the script enters amp.scale_loss with the loss_id that it used first. Written to DIR:
compare.json, compare.csv, compare.png (where matplotlib is installed) and what the script printed, LEVEL.log."""

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
POLL_SECONDS = 0.2


def make_parser(**keywords: object) -> argparse.ArgumentParser:
    """The options that may stand before and behind SCRIPT."""
    parser = argparse.ArgumentParser(
        prog="apex-amp compare", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        usage="apex-amp compare [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)  # type: ignore[arg-type]
    parser.add_argument("--opt-levels", metavar="LEVEL", type=parse_levels, default=list(LEVELS[:4]),
                        help="levels to run, in this order (default: O0 O1 O2 O3)")
    parser.add_argument("--steps", metavar="N", type=positive_int, help="stop each run after N iterations")
    parser.add_argument("--out", metavar="DIR", default="apex_amp_compare",
                        help="folder for the report (default: apex_amp_compare)")
    return parser


def parse_levels(text: str) -> list[str]:
    levels = text.split(",")
    for level in levels:
        if level not in LEVELS:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(LEVELS)} (the letter O), got {level!r}")
    return levels


def positive_int(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Options from before and behind SCRIPT; `command` is the rest: script (or -m and module) and its arguments."""
    parser = make_parser()
    parser.add_argument("--seed", type=int, default=0, help="seed of random, numpy and torch in each run (default: 0)")
    add_legacy_options(parser)
    parser.add_argument("-m", dest="is_module", action="store_true", help="what follows is a module's name")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS",
                        help="the script and its arguments")
    options = parser.parse_args(join_levels(argv))
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("no SCRIPT given")
    behind = options.command[1:]
    separator = behind.index("--") if "--" in behind else len(behind)
    _, arguments = make_parser(add_help=False).parse_known_args(behind[:separator], options)
    options.command = (["-m"] if options.is_module else []) + [
        options.command[0], *arguments, *behind[separator + 1:]]
    if not options.is_module and not os.path.exists(options.command[0]):
        parser.error(f"there is no script {options.command[0]!r}")
    return parser, options


def join_levels(argv: Sequence[str]) -> list[str]:
    """`--opt-levels O0 O1` as `--opt-levels O0,O1`, so that SCRIPT may follow it."""
    joined: list[str] = []
    for token in argv:
        follows_option = len(joined) >= 2 and joined[-2] == "--opt-levels"
        if follows_option and re.fullmatch(r"[O0]\d", token) and re.fullmatch(r"[O0]\d(,[O0]\d)*", joined[-1]):
            joined[-1] += "," + token
        else:
            joined.append(token)
    return joined


def main(argv: Sequence[str]) -> int:
    """The command; `argv` is what stands after `apex-amp compare`. 0: every level ran; 1: one failed; 130: Ctrl-C."""
    parser, options = parse(argv)
    make_legacy_environment(parser, options)
    os.makedirs(options.out, exist_ok=True)
    results: list[LevelResult] = []
    interrupted = False
    for level in options.opt_levels:
        result = LevelResult(level)
        results.append(result)
        try:
            run_level(result, options)
        except KeyboardInterrupt:
            result.error = "interrupted"
            interrupted = True
        show_progress(result, final=True)
        if interrupted:
            break
    print()
    print(format_table(results))
    write_json(results, options.command, os.path.join(options.out, "compare.json"))
    write_csv(results, os.path.join(options.out, "compare.csv"))
    pictured = write_picture(results, os.path.join(options.out, "compare.png"))
    print(f"\nreport: {options.out}{os.sep}compare.json, compare.csv"
          + (", compare.png" if pictured else " (no picture: matplotlib is not installed)"))
    if interrupted:
        return 130
    return 1 if any(result.error for result in results) else 0


def run_level(result: LevelResult, options: argparse.Namespace) -> None:
    """Runs the script at `result.opt_level` in a process of its own and fills `result` while it runs."""
    events_path = os.path.join(options.out, f"{result.opt_level}.events")
    settings = Settings(result.opt_level, options.steps, options.seed, os.path.abspath(events_path))
    command = [sys.executable, "-m", "apex_amp.cli.record", json.dumps(asdict(settings)), *options.command]
    log_path = os.path.join(options.out, f"{result.opt_level}.log")
    open(events_path, "w").close()
    with open(log_path, "w") as log, open(events_path) as events:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                result.read(events)
                show_progress(result)
        except KeyboardInterrupt:
            stop(process)
            raise
        finally:
            result.read(events)
            os.remove(events_path)
    if process.returncode < 0:
        result.error = f"ended by signal {-process.returncode}; see {log_path}"
    elif process.returncode and not result.error:
        result.error = f"ended with status {process.returncode}; see {log_path}"


def stop(process: subprocess.Popen) -> None:
    """Ends the script, which has had the terminal's Ctrl-C too, giving it a moment to end by itself."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def show_progress(result: LevelResult, final: bool = False) -> None:
    """One line per level, rewritten while it runs where the output is a terminal."""
    if sys.stdout.isatty():
        print("\r\033[K" + format_progress(result), end="\n" if final else "", flush=True)
    elif final:
        print(format_progress(result), flush=True)
