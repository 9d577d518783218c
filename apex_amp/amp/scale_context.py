"""scale_loss: the window around a backward, in which gradients are scaled."""
from __future__ import annotations

import contextlib
import numbers
from typing import Any, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from ._state import Setup, process
from .amp_optimizer import Stash, stash_of, unscale
from .cast_state import clear_weight_cache
from .gradients import is_distributed
from .model_cast import cast_of


@contextlib.contextmanager
def scale_loss(loss: torch.Tensor, optimizers: Any, loss_id: int = 0, model: Any = None, delay_unscale: bool = False,
               delay_overflow_check: bool = False) -> Iterator[torch.Tensor]:
    """Yields `loss.float() * loss_scale`; at exit the gradients of this backward are unscaled and checked.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Gradients that were there before are kept and added to, as `backward()` does in FP32. If one of the new ones is inf
    or NaN, the next `step()` of every optimizer given here changes nothing, and a dynamic loss scale is halved. An
    exception inside the block leaves gradients, loss scale and casts as they were before it.

    Args:
        loss: a floating tensor, of any shape that the backward called on the yielded tensor accepts.
        optimizers: one optimizer, or a list or tuple of all those whose parameters this backward reaches; all from one
            call of `amp.initialize`.
        loss_id: which of the `num_losses` loss scalers of that call to use.
        model: ignored; the original's signature had it.
        delay_unscale: leaves the gradients scaled in `.grad`, to be finished by a later block of the same optimizers
            before `step()`.
        delay_overflow_check: unscales, but leaves loss scale and skipping alone; the caller reads the scaler's
            `found_inf`.

    Raises:
        RuntimeError: no `amp.initialize` yet, an optimizer that it never saw, optimizers of different calls, or a block
            inside another one of the same optimizer.
        IndexError: `loss_id` out of range.
        TypeError: `loss` is not a floating tensor.
    """
    listed = [optimizers]
    if isinstance(optimizers, (list, tuple)):
        listed = list({id(optimizer): optimizer for optimizer in optimizers}.values())
    stashes = _stashes(listed)
    if stashes is None:
        yield loss
        return
    setup = stashes[0].setup
    scaler = _scaler(setup, loss_id)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        got = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"amp.scale_loss: loss must be a floating tensor, got {got}")

    if scaler.is_identity and all(stash.masters is None and stash.gradients.left_scaled is None for stash in stashes):
        try:
            yield loss.float()
        finally:
            if not delay_unscale:
                clear_weight_cache()
        return

    if any(stash.end_block is not None for stash in stashes):
        raise RuntimeError("amp.scale_loss: a block of this optimizer is open already, and gradients of both would mix "
                           "in .grad: leave it first, or add the losses")
    scaler.to(loss.device)
    for optimizer, stash in zip(listed, stashes):
        stash.finish_left_scaled(optimizer, unless_by=scaler)
    for stash in stashes:
        stash.gradients.catch_up()
    taken: set[int] | None = set() if len(listed) > 1 else None

    def end_early() -> None:
        for stash in stashes:
            stash.end_block = None
        setup.warn("optimizer.step() inside the amp.scale_loss block: the gradients there were unscaled for it, later "
                   "ones will not be. Call it after the block")
        unscale(scaler, stashes)

    try:
        for optimizer, stash in zip(listed, stashes):
            stash.gradients.open(optimizer.param_groups, scaler, stash.skip_is_pending(), taken)
            stash.end_block = end_early
        yield scaler.scale(loss)
    except BaseException as error:
        for stash in reversed(stashes):
            stash.end_block = None
            stash.gradients.put_back(error)
        clear_weight_cache()
        raise

    ended = stashes[0].end_block is None
    for stash in stashes:
        stash.end_block = None
    if ended:
        pass
    elif delay_unscale or _reduction_is_pending(setup):
        for stash in stashes:
            stash.gradients.keep_scaled(scaler)
    else:
        unscale(scaler, stashes, decide=not delay_overflow_check)
    if not delay_unscale:
        clear_weight_cache()


def _stashes(optimizers: list) -> list[Stash] | None:
    """amp's state of each optimizer; None where the latest initialize had enabled=False."""
    stashes = [stash_of(optimizer) for optimizer in optimizers]
    if None in stashes or not stashes:
        if process.latest is None and not any(stashes):
            if process.was_initialized:
                return None
            raise RuntimeError("amp.scale_loss was called before amp.initialize: first "
                               "model, optimizer = amp.initialize(model, optimizer, opt_level=...)")
        if not stashes:
            raise RuntimeError("amp.scale_loss needs the optimizers whose gradients this backward makes, got an empty "
                               "list")
        index = stashes.index(None)
        which = f"optimizers[{index}]" if len(optimizers) > 1 else "the optimizer"
        raise RuntimeError(f"amp.scale_loss: {which} ({type(optimizers[index]).__name__}) did not go through "
                           "amp.initialize. Pass it there together with its model, and use the optimizer that "
                           "initialize returns")
    if len(stashes) > 1 and any(stash.setup is not stashes[0].setup for stash in stashes):
        raise RuntimeError("amp.scale_loss: these optimizers come from different calls of amp.initialize, whose loss "
                           "scales differ; use one scale_loss block for each call")
    return stashes


def _scaler(setup: Setup, loss_id: int) -> Any:
    scalers = setup.loss_scalers
    if not isinstance(loss_id, (int, numbers.Integral)) or not 0 <= loss_id < len(scalers):
        raise IndexError(f"amp.scale_loss: loss_id must be an integer from 0 to {len(scalers) - 1}, got {loss_id!r}. "
                         "Tell amp.initialize how many losses there are: num_losses=...")
    return scalers[loss_id]


def _reduction_is_pending(setup: Setup) -> bool:
    """True inside DistributedDataParallel's no_sync(): what this rank has is not what all ranks will have."""
    if not is_distributed():
        return False
    for model in setup.alive_models():
        wrapper = cast_of(model).ddp
        ddp = wrapper() if wrapper is not None else None
        if isinstance(ddp, DistributedDataParallel) and not ddp.require_backward_grad_sync:
            return True
    return False
