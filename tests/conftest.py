"""What every test runs under: fixed seeds and threads, and a torch that is found as it was left."""
from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch
import torch.utils.checkpoint
import torch.utils.data

ROOT = Path(__file__).resolve().parent.parent
THREADS = 1  # small tensors gain nothing from more and lose much on busy cores; tests of threads set their own

# A shell's background job has SIGINT ignored, and so would the processes in which tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start find the package too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Everything in torch that amp may replace a name in.
PATCHABLE = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch.linalg, torch.fft, torch.special, torch.jit,
             torch.autograd.Function, torch.nn.Module, torch.optim.Optimizer, torch.utils.checkpoint,
             torch.utils.data._utils.worker, torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU, torch.nn.RNNCell,
             torch.nn.LSTMCell, torch.nn.GRUCell)


def replaced_by_dynamo(value: object) -> bool:
    """Whether torch put it there itself: it wraps some names when torch._dynamo is imported and first compiles."""
    return getattr(value, "__globals__", {}).get("__name__", "").startswith(("torch._dynamo", "torch._compile"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def repeatable() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def torch_left_as_found():
    """Ends amp after each test, and fails the test after which something in torch is not what it was before."""
    before = [(owner, dict(vars(owner))) for owner in PATCHABLE]
    default_dtype = torch.get_default_dtype()
    yield
    amp = sys.modules.get("apex_amp.amp")
    if amp is not None:
        amp.shutdown()
    left = [f"{owner.__name__}.{name}" for owner, names in before for name, value in names.items()
            if (now := vars(owner).get(name, value)) is not value and not replaced_by_dynamo(now)]
    gained = [f"{owner.__name__}.{name}" for owner, names in before if isinstance(owner, type)
              for name in vars(owner).keys() ^ names.keys()
              if name not in ("___needs_generation_tag_patch", "__slotnames__")]  # Dynamo's, and what copyreg caches
    assert not left, f"the test left these names of torch patched: {left}"
    assert not gained, f"the test left these attributes added to or gone from torch's classes: {gained}"
    assert torch.get_default_dtype() is default_dtype, "the test left another default dtype"
