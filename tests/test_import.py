"""What importing the package does: nothing to torch, nothing on the screen, and not for long."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

LONGEST_IMPORT = 0.050


def run(code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


def test_importing_changes_nothing_and_prints_nothing():
    done = run("""
import sys, torch, torch.nn.functional
owners = [torch, torch.Tensor, torch.linalg, torch.nn.functional, torch.nn.Module, torch.optim.Optimizer,
          torch.nn.parallel.DistributedDataParallel]
before = [dict(vars(owner)) for owner in owners]
state = torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), list(sys.path), list(sys.meta_path)
import apex_amp, apex_amp.amp
for owner, names in zip(owners, before):
    changed = [name for name in names.keys() | vars(owner).keys() if vars(owner).get(name) is not names.get(name)]
    assert not changed, (owner, changed)
assert state == (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(),
                 list(sys.path), list(sys.meta_path))
assert not {"apex", "amp_C", "torch._dynamo", "pytest"} & set(sys.modules)
""", "-W", "error")
    assert done.stdout == "" and done.stderr == ""


def test_import_time_beyond_torch(tmp_path):
    """The quickest of a few fresh processes, in their own time: other work on the machine only ever adds to it.

    With compiled byte code, as an installed package has it.
    """
    code = "import time, torch; start = time.process_time(); import apex_amp.amp; print(time.process_time() - start)"
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(run(code, **cached).stdout) for _ in range(4)) < LONGEST_IMPORT


def test_public_names():
    from apex_amp import amp

    words = {"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts", "shutdown",
             "half_function", "bfloat16_function", "float_function", "promote_function", "register_half_function",
             "register_bfloat16_function", "register_float_function", "register_promote_function", "overflow_report",
             "last_step_skipped", "loss_scale", "sync_masters", "clear_weight_cache", "cast_report", "init"}
    assert words <= set(amp.__all__)
    assert all(callable(getattr(amp, word)) and getattr(amp, word).__doc__ for word in words)
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        amp.initialise


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_levels_that_cast_the_model_patch_no_function_and_load_no_compiler(level):
    done = run(f"""
import sys, torch
before = dict(vars(torch)), dict(vars(torch.nn.functional)), dict(vars(torch.Tensor))
from apex_amp import amp
amp.initialize(torch.nn.Linear(2, 2), opt_level={level!r}, verbosity=0)
for owner, names in zip((torch, torch.nn.functional, torch.Tensor), before):
    assert all(vars(owner).get(name) is value for name, value in names.items())
assert "torch._dynamo" not in sys.modules
""")
    assert done.stdout == ""


def test_a_compiled_model_casts_in_a_process_that_patched_nothing():
    done = run("""
import torch
from apex_amp import amp
model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O2", verbosity=0)
compiled = torch.compile(model, backend="eager", fullgraph=True)
print(compiled(torch.ones(1, 2, dtype=torch.float64)).dtype)
amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
print(compiled(torch.ones(1, 2, dtype=torch.float64)).dtype)
""")
    assert done.stdout.split() == ["torch.float32"] * 2
