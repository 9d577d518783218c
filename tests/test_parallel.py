"""apex_amp.parallel: single-process rules here, collectives in two gloo processes."""
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex_amp import parallel

WORLD_SIZE = 2


# --- SyncBatchNorm in one process -------------------------------------------------------------------------------------

def test_convert_syncbn_model_keeps_parameters_buffers_and_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(4, affine=False)),
                          nn.InstanceNorm2d(4)).eval()
    before = dict([*model.named_parameters(), *model.named_buffers()])
    converted = parallel.convert_syncbn_model(model, process_group="group")
    assert converted is model and isinstance(model[1], parallel.SyncBatchNorm)
    assert isinstance(model[2][0], parallel.SyncBatchNorm) and isinstance(model[3], nn.InstanceNorm2d)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert not model[1].training and model[1].process_group == "group"
    assert isinstance(parallel.convert_syncbn_model(nn.BatchNorm2d(3)), parallel.SyncBatchNorm)


def test_sync_batchnorm_channel_last_z_and_relu():
    x, z = torch.randn(6, 5, 4, 3), torch.randn(6, 5, 4, 3)
    plain = nn.BatchNorm2d(3)
    expected = torch.relu(plain(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) + z)
    actual = parallel.SyncBatchNorm(3, channel_last=True, fuse_relu=True)(x, z)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(parallel.SyncBatchNorm(3, channel_last=True)(x[:, 0, 0]), nn.BatchNorm1d(3)(x[:, 0, 0]))


# --- flattening -------------------------------------------------------------------------------------------------------

def test_flatten_and_unflatten_round_trip():
    tensors = [torch.randn(2, 3), torch.randn(0), torch.randn(())]
    flat = parallel.flatten(tensors)
    assert flat.shape == (7,)
    assert all(torch.equal(a, b) for a, b in zip(parallel.unflatten(flat, tensors), tensors))


def test_split_by_type_keeps_order():
    tensors = [torch.zeros(1), torch.zeros(1).half(), torch.ones(1)]
    assert [len(group) for group in parallel.split_by_type(tensors).values()] == [2, 1]


# --- two processes ----------------------------------------------------------------------------------------------------

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def batch_of(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank + 10))


def mean_gradient_of(net):
    single = copy.deepcopy(net)
    single.zero_grad()
    for rank in range(WORLD_SIZE):
        single(batch_of(rank)).sum().backward()
    return single.used.weight.grad / WORLD_SIZE


def check_ddp(rank):
    torch.manual_seed(rank)  # DDP broadcasts rank 0's parameters
    net = Net()
    for keywords, factor in [
        (dict(delay_allreduce=True), 1.0),
        (dict(delay_allreduce=True, message_size=1, gradient_predivide_factor=float(WORLD_SIZE)), 1.0),
        (dict(delay_allreduce=True, gradient_average=False), float(WORLD_SIZE)),
        (dict(delay_allreduce=True, allreduce_always_fp32=True), 1.0),
    ]:
        model = parallel.DistributedDataParallel(copy.deepcopy(net), **keywords)
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        model(batch_of(rank)).sum().backward()
        torch.testing.assert_close(model.module.used.weight.grad, mean_gradient_of(model.module) * factor)

    local = copy.deepcopy(model.module)
    local.zero_grad()
    local(batch_of(rank)).sum().backward()
    model.zero_grad()
    model.disable_allreduce()
    model(batch_of(rank)).sum().backward()
    torch.testing.assert_close(model.module.used.weight.grad, local.used.weight.grad)
    model.zero_grad()
    model.enable_allreduce()
    model(batch_of(rank)).sum().backward()
    torch.testing.assert_close(model.module.used.weight.grad, mean_gradient_of(model.module))

    with pytest.warns(UserWarning, match="num_allreduce_streams, prof"):
        parallel.DistributedDataParallel(nn.Linear(1, 1), num_allreduce_streams=2, prof=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        parallel.DistributedDataParallel(nn.Linear(1, 1), gradient_predivide_factor=0)


def check_sync_batchnorm(rank):
    whole = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(2))
    plain = nn.BatchNorm1d(3)
    expected = plain(whole)
    (expected * weights).sum().backward()

    mine = slice(rank * 4, rank * 4 + 4)
    module = parallel.SyncBatchNorm(3, process_group=parallel.create_syncbn_process_group(WORLD_SIZE))
    x = whole.detach()[mine].clone().requires_grad_()
    actual = module(x)
    (actual * weights[mine]).sum().backward()
    torch.testing.assert_close(actual, expected[mine])
    torch.testing.assert_close(x.grad, whole.grad[mine])
    torch.testing.assert_close(module.running_mean, plain.running_mean)
    torch.testing.assert_close(module.running_var, plain.running_var)
    dist.all_reduce(module.weight.grad)
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)

    alone = parallel.SyncBatchNorm(3, momentum=None, process_group=parallel.create_syncbn_process_group(1))
    torch.testing.assert_close(alone(x), nn.BatchNorm1d(3)(x))
    assert parallel.create_syncbn_process_group(0) is None
    with pytest.raises(ValueError, match="must divide the world size"):
        parallel.create_syncbn_process_group(3)


def check_flat_calls(rank):
    tensors = [torch.full((2,), rank + 1.0), torch.full((1, 2), rank + 3.0, dtype=torch.float64),
               torch.full((), rank + 1.0)]
    parallel.flat_dist_call(tensors, dist.all_reduce)
    assert [t.flatten()[0].item() for t in tensors] == [1.5, 3.5, 1.5]
    mine = [torch.full((2,), float(rank))]
    parallel.flat_dist_call(mine, dist.broadcast, (1,))
    assert mine[0].tolist() == [1, 1]

    torch.manual_seed(rank)
    net = nn.Linear(2, 1)
    reducer = parallel.Reducer(net)
    torch.manual_seed(0)
    torch.testing.assert_close(net.weight, nn.Linear(2, 1).weight)
    net.weight.grad = torch.full_like(net.weight, rank)
    reducer.reduce()
    assert net.weight.grad.unique().item() == 0.5 and net.bias.grad is None
    gradients = [torch.full((2,), float(rank)), [torch.full((3,), float(rank))]]
    parallel.Reducer(gradients).reduce()
    assert gradients[0][0] == gradients[1][0][0] == 0.5


def check_everything(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    try:
        check_ddp(rank)
        check_sync_batchnorm(rank)
        check_flat_calls(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_collectives_in_two_processes(tmp_path):
    torch.multiprocessing.spawn(check_everything, (str(tmp_path),), nprocs=WORLD_SIZE)
