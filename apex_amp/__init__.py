"""apex.amp for today's PyTorch: mixed-precision training by one word."""
from . import amp
from ._version import __version__

__all__ = ["amp", "__version__"]
