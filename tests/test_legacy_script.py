"""tests/legacy_script.py, written for Apex, runs under `apex-amp run`, each group of tiers in a fresh process."""
import os
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.mark.slow
@pytest.mark.parametrize("opt_level, tiers", [
    ("O0", "1 2 9"), ("O1", "1 2 4 9"), ("O2", "1 2 4 5 9"), ("O1", "3 6"), ("O2", "3"), ("O1", "7"), ("O0", "8")])
def test_tiers(opt_level, tiers):
    done = subprocess.run(
        [sys.executable, "-m", "apex_amp", "run", os.path.join(HERE, "legacy_script.py"), *tiers.split(),
         "--opt-level", opt_level],
        env={**os.environ, "PYTHONPATH": os.path.dirname(HERE)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for tier in tiers.split():
        assert f"tier {tier} at {opt_level}: ok" in done.stdout
