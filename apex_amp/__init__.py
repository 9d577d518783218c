"""apex.amp for today's PyTorch: mixed-precision training by one word."""
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

__all__ = ["amp", "__version__"]
