"""The `apex-amp` command: run | compare | doctor."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

USAGE = """\
usage: apex-amp COMMAND ...

Mixed-precision training for scripts that use apex.amp.

commands:
  run       run a script written for NVIDIA Apex, unchanged, on this package
  compare   run a script once per opt level (O0, O1, O2, O3) and compare losses, speed and memory
  doctor    say what is built, what is not and why, and test it in a few seconds

`apex-amp COMMAND --help` explains a command. `python -m apex_amp` is the same program.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `apex-amp` and `python -m apex_amp`; exits with the command's status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0)
    if command == "--version":
        from .. import __version__
        print(f"apex-amp {__version__}")
        sys.exit(0)
    if command == "run":
        from .run import main as command_main
    elif command == "compare":
        from .compare import main as command_main
    elif command == "doctor":
        from .doctor import main as command_main
    else:
        sys.exit(f"apex-amp: there is no command {command!r}; the commands are run, compare and doctor")
    sys.exit(command_main(arguments))
