"""DistributedDataParallel around an amp model: equal masters on all ranks, and a no_sync() that scale_loss sees."""
from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .model_cast import cast_of


def install() -> None:
    """Lets every wrapper made from now on make itself known to the amp models inside it."""
    original = DistributedDataParallel.__init__
    if hasattr(original, "_amp_original"):
        return

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # It has given all ranks the first rank's parameters; masters that were loaded or made by each rank must follow.
        for module in self.module.modules():
            cast = cast_of(module)
            if cast is not None:
                cast.ddp = weakref.ref(self)
                for masters in cast.masters:
                    masters.broadcast(self.process_group)

    __init__._amp_original = original
    DistributedDataParallel.__init__ = __init__


def uninstall() -> None:
    DistributedDataParallel.__init__ = getattr(DistributedDataParallel.__init__, "_amp_original",
                                               DistributedDataParallel.__init__)
