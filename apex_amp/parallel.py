"""Apex's `apex.parallel` over torch.distributed: what torch has, torch does.

`DistributedDataParallel` is a subclass of torch's, so `isinstance` checks against either name hold. `Reducer` and
`flat_dist_call` have no counterpart in torch and are written here; `LARC` is apex_amp.optimizers'.
"""
from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .optimizers import LARC

__all__ = [
    "DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group",
    "Reducer", "ReduceOp", "LARC",
    "flat_dist_call", "apply_flat_dist_call", "split_by_type", "flatten", "unflatten",
]

ReduceOp = dist.ReduceOp if dist.is_available() else None

_DEFAULT_MESSAGE_SIZE = 10_000_000
_BYTES_PER_MEBIBYTE = 2 ** 20
# torch 2.13 renamed the argument and warns about the old name.
_DDP_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_NO_BUFFER_EXCHANGE: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Apex's DistributedDataParallel: torch's, taking Apex's arguments.

    As in Apex, parameters are broadcast from rank 0 once, here; buffers are never exchanged.

    Args:
        module: the network, already on the device it trains on.
        message_size: elements in a communication bucket; becomes torch's `bucket_cap_mb`. Default: torch's own.
        delay_allreduce: Apex reduced whatever had a gradient once backward was over, so parameters without one were
            allowed; becomes `find_unused_parameters=True`.
        allreduce_always_fp32: reduce half gradients in float32.
        gradient_average: divide by the world size. Default: True.
        gradient_predivide_factor: divide by this before the all-reduce and by world_size / this after it.
        shared_param, allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
        allreduce_communicators, gradient_average_split_factor, prof: accepted, with a warning when given; torch has
            no counterpart and needs none.

    Raises:
        ValueError: `gradient_predivide_factor` is not positive.
    """

    def __init__(self, module: nn.Module, message_size: int = _DEFAULT_MESSAGE_SIZE, delay_allreduce: bool = False,
                 shared_param: bool | None = None, allreduce_trigger_params: Sequence[Tensor] | None = None,
                 retain_allreduce_buffers: bool = False, allreduce_always_fp32: bool = False,
                 num_allreduce_streams: int = 1, allreduce_communicators: Any = None, gradient_average: bool = True,
                 gradient_predivide_factor: float = 1.0, gradient_average_split_factor: float | None = None,
                 prof: bool = False):
        if not gradient_predivide_factor > 0:
            raise ValueError("DistributedDataParallel: gradient_predivide_factor must be positive, "
                             f"got {gradient_predivide_factor!r}")
        _warn_meaningless("DistributedDataParallel", shared_param=shared_param is not None,
                          allreduce_trigger_params=allreduce_trigger_params is not None,
                          retain_allreduce_buffers=retain_allreduce_buffers,
                          num_allreduce_streams=num_allreduce_streams != 1,
                          allreduce_communicators=allreduce_communicators is not None,
                          gradient_average_split_factor=gradient_average_split_factor is not None, prof=prof)
        bucket_cap_mb = None
        if message_size != _DEFAULT_MESSAGE_SIZE:
            bucket_cap_mb = max(1, message_size * 4 // _BYTES_PER_MEBIBYTE)
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=delay_allreduce,
                         **_NO_BUFFER_EXCHANGE)
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            post_factor = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            self.register_comm_hook(
                None, _scaled_allreduce_hook(allreduce_always_fp32, 1.0 / gradient_predivide_factor, post_factor))

    def disable_allreduce(self) -> None:
        """Keep gradients local from now on, until `enable_allreduce()`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients in every backward again."""
        self.require_backward_grad_sync = True


def _warn_meaningless(where: str, **given: bool) -> None:
    names = [name for name, was_given in given.items() if was_given]
    if names:
        warnings.warn(f"apex_amp.parallel.{where}: {', '.join(names)} has no meaning over torch.distributed "
                      "and is ignored", stacklevel=3)


def _scaled_allreduce_hook(always_fp32: bool, pre_factor: float, post_factor: float) -> Callable:
    """A DDP communication hook: gradients times `pre_factor`, summed over ranks, times `post_factor`."""

    def scaled_allreduce(_state, bucket):  # unannotated: DDP refuses annotations that are strings
        buffer = bucket.buffer()
        reduced = buffer.float() if always_fp32 else buffer
        reduced.mul_(pre_factor)
        work = dist.all_reduce(reduced, async_op=True)

        def finish(_future: torch.futures.Future) -> Tensor:
            reduced.mul_(post_factor)
            return buffer if reduced is buffer else buffer.copy_(reduced)

        return work.get_future().then(finish)

    return scaled_allreduce


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all processes of `process_group`.

    On accelerators it is torch.nn.SyncBatchNorm's. That, and torch's DistributedDataParallel for it, refuse CPU tensors
    once a process group exists; here they work too, over any backend that reduces them.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as torch.nn.SyncBatchNorm.
        channel_last: the channels are the last dimension of the input (inputs of 2 dimensions are unaffected).
        fuse_relu: apply relu to the result (after adding `z`).

    Shape: (N, C, *) or, with channel_last, (N, *, C); the output has the input's shape and dtype.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_group: Any = None, channel_last: bool = False,
                 fuse_relu: bool = False):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalize `input`; `z`, of the output's shape, is added before the relu."""
        channel_last = self.channel_last and input.dim() > 2
        output = self._normalize(input.movedim(-1, 1) if channel_last else input)
        if channel_last:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return nn.functional.relu(output) if self.fuse_relu else output

    def _normalize(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        if not (self.training and dist.is_available() and dist.is_initialized()
                and dist.get_world_size(self.process_group) > 1):
            return super().forward(input)
        self._check_input_dim(input)
        return self._normalize_on_cpu(input)

    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels

    def _normalize_on_cpu(self, input: Tensor) -> Tensor:
        channels, values = input.size(1), input.float()
        other_dims = [d for d in range(input.dim()) if d != 1]
        per_channel = [1, channels] + [1] * (input.dim() - 2)

        local_count = values.new_full((1,), input.numel() // channels)
        totals = self._sum_over_group(torch.cat([values.sum(other_dims), local_count]))
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centered = values - mean.view(per_channel)
        var = self._sum_over_group(centered.square().sum(other_dims)) / count
        self._update_running_stats(mean.detach(), var.detach() * count / (count - 1))

        output = centered * torch.rsqrt(var + self.eps).view(per_channel)
        if self.affine:
            output = output * self.weight.float().view(per_channel) + self.bias.float().view(per_channel)
        return output.to(input.dtype)

    def _sum_over_group(self, tensor: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce  # differentiable, unlike dist.all_reduce
        return all_reduce(tensor, group=self.process_group or dist.group.WORLD)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked += 1
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), factor)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every BatchNorm in `module` by a `SyncBatchNorm` holding the same parameters and buffers.

    Call it before the optimizer is made or after; parameter objects don't change.

    Args:
        module: the model; changed in place, unless it is itself a BatchNorm.
        process_group: the processes to synchronize over. Default: all.
        channel_last: see `SyncBatchNorm`.

    Returns:
        `module`, or its replacement.
    """
    converted = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        converted = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine,
                                  module.track_running_stats, process_group, channel_last)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(converted, name, getattr(module, name))
        converted.training = module.training
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Split all processes into groups of `group_size` consecutive ranks; returns this process's group.

    Every process must call it. 0 means one group of all, for which None is returned.

    Raises:
        ValueError: `group_size` is negative or doesn't divide the world size.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size:
        raise ValueError(f"create_syncbn_process_group: group_size must divide the world size ({world_size}), "
                         f"got {group_size}")
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, world_size, group_size)]
    return groups[dist.get_rank() // group_size]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One contiguous 1-d tensor with the values of `tensors`, which must share dtype and device (`apex_C.flatten`)."""
    return torch._utils._flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of `flat` with the shapes of `tensors`, in order (`apex_C.unflatten`)."""
    return torch._utils._unflatten_dense_tensors(flat, tensors)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """`tensors` grouped by `tensor.type()`, in order of first appearance."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable, extra_args: Sequence | None = None) -> None:
    """`call(flat, *extra_args)` on the flattened `bucket`, written back; an all_reduce is averaged over the ranks."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, result in zip(bucket, unflatten(flat, bucket)):
        tensor.copy_(result)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable, extra_args: Sequence | None = None) -> None:
    """Run a collective (`dist.all_reduce`, `dist.broadcast`, ...) on `tensors` in place, one call per tensor type.

    An all_reduce is averaged over the processes, as Apex did.

    Args:
        tensors: any mix of dtypes.
        call: called as `call(flat_tensor, *extra_args)`.
        extra_args: e.g. `(0,)`, the source rank of a broadcast.
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


class Reducer:
    """Averages gradients over all processes when told to, instead of during backward.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 at once; or gradients, in any
            nesting of iterables.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable):
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call([p.detach() for p in self.module.parameters()], dist.broadcast, (0,))
        else:
            self.grads = list(_tensors_in(module_or_grads_list))

    def reduce(self) -> None:
        """Average the gradients that exist now."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad.detach() for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for item in nested:
            yield from _tensors_in(item)
