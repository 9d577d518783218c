"""The public API as a type checker sees it: a user's program under mypy --strict, right and wrong."""
from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TRAINING = """
    import torch
    from apex_amp import amp

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic",
                                      keep_batchnorm_fp32=True, keep_fp32_modules=(torch.nn.LayerNorm,))
    loss = model(torch.ones(3, 4)).sum()
    with amp.scale_loss(loss, optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    with amp.disable_casts():
        model(torch.ones(3, 4))
    scale: float = amp.loss_scale()
    skipped: bool = amp.last_step_skipped(optimizer)
    checkpoint = amp.state_dict()
    amp.load_state_dict(checkpoint)
    amp.register_half_function(torch, "outer")
    amp.sync_masters(model)
    amp.clear_weight_cache()
    amp.shutdown()
"""

MISTAKES = """
    import torch
    from apex_amp import amp

    model = torch.nn.Linear(4, 2)
    amp.initialize(model, opt_level=1)  # error: arg-type
    amp.initialize(model, level="O1")  # error: call-arg
    amp.loss_scale("first")  # error: arg-type
    amp.no_such_name  # error: attr-defined
"""


def mypy(tmp_path: Path, source: str) -> list[tuple[int, str]]:
    """Line and error code of each of mypy's findings in `source`."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(source))
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"),
                           "--cache-dir", str(ROOT / ".mypy_cache"), "--no-error-summary", str(program)],
                          capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^.*program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    return [(int(line), code) for line, code in found]


@pytest.mark.slow
def test_training_program_is_typed(tmp_path):
    assert mypy(tmp_path, TRAINING) == []


@pytest.mark.slow
def test_mistakes_are_found(tmp_path):
    expected = [(number, line.partition("# error: ")[2]) for number, line in enumerate(MISTAKES.splitlines(), 1)
                if "# error: " in line]
    assert mypy(tmp_path, MISTAKES) == expected
