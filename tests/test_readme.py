"""The README's programs run, and what it points to is there."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from apex_amp.amp.arguments import OPT_LEVELS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_one_after_another():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    names = {"torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
             "inputs": torch.randn(4, 8), "targets": torch.randn(4, 2), "loss_fn": torch.nn.functional.mse_loss}
    before = model[0].weight.detach().clone()
    for block in PYTHON_BLOCKS:
        exec(block, names)
    assert len(PYTHON_BLOCKS) >= 3 and not torch.equal(model[0].weight.float(), before)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))
                                        | set(re.findall(r"\b(?:benchmarks|tests)/[\w.]+\w", README))))
def test_paths_exist(path):
    assert (ROOT / path).exists()


def test_table_of_levels_is_that_of_the_code():
    rows = [[cell.strip(' `"') for cell in line.strip("|").split("|")]
            for line in README.partition("## Opt levels")[2].partition("\n## ")[0].splitlines()
            if line.startswith("| `")]
    assert len(rows) == 6
    for name, *cells in rows:
        values = [str(getattr(options, name)).removeprefix("torch.") for options in OPT_LEVELS.values()]
        assert cells == values, name
