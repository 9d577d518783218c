"""Fixtures of the casting tests."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apex_amp.amp import cast_state, patching


@pytest.fixture
def casts() -> Iterator[None]:
    """Patches installed, casting CPU tensors to float16; torch as it was afterwards."""
    assert not patching.is_installed(), "another test left torch patched"
    patching.install()
    cast_state.set_cast_devices({"cpu"})
    cast_state.set_default_cast_type(torch.float16)
    yield
    patching.uninstall()
