"""apex.amp for today's PyTorch: mixed-precision training by one word."""
import importlib as _importlib
from typing import Any as _Any

import torch  # before _C, which links to its libraries

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"apex_amp._C, the compiled part of apex_amp, cannot be loaded beside torch {torch.__version__} ({error}). "
        "It was not built, or it was built for another torch or Python: build it again with "
        "'pip install --force-reinstall --no-deps .' (in a checkout: 'python setup.py build_ext --inplace')") from None

from . import amp
from ._version import __version__

# Loaded at first use: a script that only says `amp` does not wait for them.
_LAZY = ("fp16_utils", "multi_tensor", "multi_tensor_apply", "normalization", "optimizers", "parallel")

__all__ = ["amp", "__version__", *_LAZY]


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
