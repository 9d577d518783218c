"""`apex-amp run`: runs a script as `python SCRIPT` would, with `apex` answered by this package."""
from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from typing import cast

from .. import legacy, legacy_torch

DESCRIPTION = """\
Run a training script written for NVIDIA Apex without editing it: `from apex import amp` and Apex's other
public modules resolve to apex_amp. Everything else is as under `python SCRIPT ARGS`: arguments, exit status,
tracebacks. Options of apex-amp stand before SCRIPT; everything after SCRIPT is the script's own."""

EPILOG = """\
examples:
  apex-amp run train.py --opt-level O2 --lr 0.1
  apex-amp run -m mypackage.train --epochs 3
  apex-amp run --legacy-torch train.py
  torchrun --nproc-per-node 4 -m apex_amp run train.py"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apex-amp run", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        usage="apex-amp run [--legacy-torch] [--trust FILE] [--force] (SCRIPT | -m MODULE) [ARGS ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add_legacy_options(parser)
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="what follows is a module's name, as for `python -m`")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS",
                        help="the script and its arguments")
    return parser


def add_legacy_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command running a script has."""
    parser.add_argument("--legacy-torch", action="store_true",
                        help="put back what old scripts need from torch and numpy (torch._six, np.float, byte masks, "
                             "...); the README lists each")
    parser.add_argument("--trust", metavar="FILE", action="append", default=[],
                        help="with --legacy-torch: let torch.load read whole pickled objects from FILE; only for files "
                             "whose origin you trust, since loading one can run code. May be given several times")
    parser.add_argument("--force", action="store_true", help="use apex_amp even where a real Apex is installed")


def main(argv: Sequence[str]) -> int:
    """The command; `argv` is what stands after `apex-amp run`."""
    parser = make_parser()
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no SCRIPT given")
    check_legacy_options(parser, options)
    set_first_path(command[0], options.is_module)  # before apex is looked for: one may lie beside the script
    make_legacy_environment(options)
    run_as_main(command[0], command[1:], options.is_module)
    return 0


def check_legacy_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with a sentence where the options of `add_legacy_options` make no sense."""
    if options.trust and not options.legacy_torch:
        parser.error("--trust needs --legacy-torch")
    for path in options.trust:
        if not os.path.exists(path):
            parser.error(f"--trust {path}: there is no such file")


def make_legacy_environment(options: argparse.Namespace) -> None:
    """Does what the options of `add_legacy_options` ask for, here and in child processes."""
    if not legacy.install(force=options.force, children=True):
        print(f"apex-amp: `apex` is the installed {legacy.find_real_apex()}, not apex_amp; --force runs the script on "
              "apex_amp instead", file=sys.stderr)
    if options.legacy_torch:
        legacy_torch.enable(trusted_files=options.trust, children=True)


def set_first_path(target: str, is_module: bool) -> None:
    """Puts in sys.path[0], instead of this program's, what `python` would for a script, folder, zip or module.

    Exits as `python` does where there is no such script.
    """
    is_container = not is_module and _is_container(target)
    if is_module:
        first_path = os.getcwd()
    elif is_container:
        first_path = os.path.abspath(target)
    elif os.path.isfile(target):
        first_path = os.path.dirname(os.path.realpath(target))
    else:
        # Python's own words and status.
        print(f"{sys.executable}: can't open file {os.path.abspath(target)!r}: [Errno 2] No such file or directory",
              file=sys.stderr)
        sys.exit(2)
    is_safe_path = getattr(sys.flags, "safe_path", False)  # -P and PYTHONSAFEPATH, since Python 3.11
    if not is_safe_path:
        sys.path.pop(0)
    if is_container or not is_safe_path:
        sys.path.insert(0, first_path)


def _is_container(target: str) -> bool:
    return os.path.isdir(target) or zipfile.is_zipfile(target)


def run_as_main(target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Runs a script (file, folder or zip with a `__main__.py`) or a module as `python` would, in a fresh `__main__`.

    `set_first_path` comes before. Exits of the script pass through; an uncaught exception is reported through
    sys.excepthook, without the frames of this package, and goes on silently so that the exit status is Python's own.
    """
    sys.argv[:] = ["-m" if is_module else target, *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if is_module:
            _run_module(target)
        elif _is_container(target):
            _run_module("__main__", alter_argv=False)
        else:
            _run_file(target)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise


def _run_file(path: str) -> None:
    main = sys.modules["__main__"]
    main.__file__ = os.path.abspath(path)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__cached__ = None  # type: ignore[attr-defined]
    if path.endswith(".pyc"):
        main.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", main.__file__)
        code = cast(types.CodeType, main.__loader__.get_code("__main__"))
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        with open(path, "rb") as file:
            code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(name: str, alter_argv: bool = True) -> None:
    # What `python -m`, and `python FOLDER`, call themselves: it runs in the `__main__` that stands in sys.modules.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _without_our_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    hidden = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in hidden:
        traceback = traceback.tb_next
    return traceback
