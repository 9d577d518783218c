"""Every multi-tensor op on a GPU against the same op on the CPU; test_multi_tensor.py holds the CPU to its oracles."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from apex_amp import multi_tensor

pytestmark = pytest.mark.cuda

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
ALL_TYPES = (*FLOAT_TYPES, torch.float64)
CHUNK = 16384
SHAPES = [(), (0,), (1,), (7,), (3, 5), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (5, CHUNK + 3)]


def random_list(dtype: torch.dtype, offset: int = 0, shapes: list = SHAPES) -> list[Tensor]:
    """Dense tensors on the CPU, `offset` elements from where their memory begins."""
    def tensor(shape: tuple) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.randn(offset + size).to(dtype)[offset:].view(shape)
    return [tensor(shape) for shape in shapes]


def to_cuda(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that keep the storage offset, and so the alignment."""
    def move(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.storage_offset() + tensor.numel(), dtype=tensor.dtype, device="cuda")
        return memory[tensor.storage_offset():].view(tensor.shape).copy_(tensor)
    return [move(tensor) for tensor in tensors]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result.cpu(), reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (4, 8)], ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product(ALL_TYPES, ALL_TYPES)), ids=str)
def test_scale(dtypes: tuple, offsets: tuple) -> None:
    src, dst = random_list(dtypes[0], offsets[0]), random_list(dtypes[1], offsets[1])
    src_cuda, dst_cuda = to_cuda(src), to_cuda(dst)
    found_inf, found_inf_cuda = torch.zeros(1), torch.zeros(1, device="cuda")
    multi_tensor.multi_tensor_scale(src, dst, found_inf, 0.37)
    multi_tensor.multi_tensor_scale(src_cuda, dst_cuda, found_inf_cuda, torch.tensor([0.37], device="cuda"))
    assert_equal([*dst_cuda, found_inf_cuda], [*dst, found_inf])


@pytest.mark.parametrize("check", ["x", "y", "both"])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT_TYPES, FLOAT_TYPES, FLOAT_TYPES)), ids=str)
def test_axpby(dtypes: tuple, check: str) -> None:
    x, y, out = (random_list(dtype) for dtype in dtypes)
    y[-1][-1, -1] = torch.nan
    lists_cuda = [to_cuda(tensors) for tensors in (x, y, out)]
    flags, flags_cuda = [torch.zeros(1), torch.zeros(len(x))], [torch.zeros(1).cuda(), torch.zeros(len(x)).cuda()]
    multi_tensor.multi_tensor_axpby(x, y, out, flags[0], 0.3, -1.7, check, flags[1])
    multi_tensor.multi_tensor_axpby(*lists_cuda, flags_cuda[0], 0.3, -1.7, check, flags_cuda[1])
    assert_equal([*lists_cuda[2], *flags_cuda], [*out, *flags])


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT_TYPES, FLOAT_TYPES)), ids=str)
def test_copy(dtypes: tuple) -> None:
    src, dst = random_list(dtypes[0]), random_list(dtypes[1])
    src_cuda, dst_cuda = to_cuda(src), to_cuda(dst)
    multi_tensor.multi_tensor_copy(src, dst)
    multi_tensor.multi_tensor_copy(src_cuda, dst_cuda)
    assert_equal(dst_cuda, dst)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_half_patterns_each_way(dtype: torch.dtype) -> None:
    patterns = torch.arange(-2**15, 2**15, dtype=torch.int16).view(dtype)
    floats = [torch.empty(2**16, device="cuda")]
    multi_tensor.multi_tensor_copy([patterns.cuda()], floats)
    assert_equal(floats, [patterns.float()])
    neighbours = torch.cat([patterns.float() * (1 + k * 2.0**-12) for k in range(-4, 5)])
    narrowed = [torch.empty(neighbours.shape, dtype=dtype, device="cuda")]
    multi_tensor.multi_tensor_copy([neighbours.cuda()], narrowed)
    assert_equal(narrowed, [neighbours.to(dtype)])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_unscale_names_the_tensors_that_overflowed(dtype: torch.dtype, value: float) -> None:
    shapes = [(i * 37 % 90 + 1,) for i in range(1500)]  # several launches
    for culprit in (0, 777, 1499):
        grads = random_list(dtype, shapes=shapes)
        grads[culprit][-1] = value
        grads_cuda = to_cuda(grads)
        flags, flags_cuda = [torch.zeros(1), torch.zeros(1500)], [torch.zeros(1).cuda(), torch.zeros(1500).cuda()]
        multi_tensor.multi_tensor_unscale_(grads, flags[0], 0.5, flags[1])
        multi_tensor.multi_tensor_unscale_(grads_cuda, flags_cuda[0], 0.5, flags_cuda[1])
        assert_equal([*grads_cuda, *flags_cuda], [*grads, *flags])
        assert flags_cuda[1].nonzero().flatten().tolist() == [culprit]


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_l2norm(dtype: torch.dtype) -> None:
    tensors = random_list(dtype, shapes=[*SHAPES, (1 << 20,), *[(3,)] * 1500])
    total, norms = multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)
    for offset in (0, 1, 3):
        moved = [torch.cat([tensor.new_zeros(offset), tensor.flatten()])[offset:] for tensor in tensors]
        total_cuda, norms_cuda = multi_tensor.multi_tensor_l2norm(to_cuda(moved), per_tensor=True)
        torch.testing.assert_close(total_cuda.cpu(), total, rtol=1.2e-7, atol=0)
        torch.testing.assert_close(norms_cuda.cpu(), norms, rtol=1.2e-7, atol=0)
        again = multi_tensor.multi_tensor_l2norm(to_cuda(tensors), per_tensor=True)
        assert_equal([total_cuda, norms_cuda], [result.cpu() for result in again])


@pytest.mark.parametrize("tracker,found_inf", [(0, 0.0), (2, 0.0), (2, 1.0)])
def test_update_scale(tracker: int, found_inf: float) -> None:
    def updated(device: str) -> list[Tensor]:
        state = [torch.tensor([8.0], device=device), torch.tensor([tracker], dtype=torch.int32, device=device)]
        multi_tensor.update_scale_(*state, torch.tensor([found_inf], device=device), 2.0, 0.5, 3, 1.0, 2.0**24)
        return state
    assert_equal(updated("cuda"), updated("cpu"))


def test_offsets_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    tensor = torch.ones(2**32 + 5, dtype=torch.float16, device="cuda")
    tensor[-1] = torch.inf
    found_inf = torch.zeros(1, device="cuda")
    multi_tensor.multi_tensor_unscale_([tensor], found_inf, 2.0)
    assert found_inf.item() == 1 and tensor[-1].item() == torch.inf
    assert (tensor[:-1] == 2).all()


def test_ops_run_on_the_current_stream_and_in_a_graph() -> None:
    grads = [torch.ones(1000, device="cuda"), torch.ones(70000, device="cuda", dtype=torch.float16)]
    found_inf, inv_scale = torch.zeros(1, device="cuda"), torch.tensor([0.5], device="cuda")

    def step() -> Tensor:
        multi_tensor.multi_tensor_unscale_(grads, found_inf, inv_scale)
        return multi_tensor.multi_tensor_l2norm(grads)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step()
    for grad in grads:
        grad.fill_(8.0)
    graph.replay()
    assert all((grad == 4).all() for grad in grads)
    torch.testing.assert_close(norm.item(), 4 * 71000 ** 0.5, rtol=1e-6, atol=0)


def test_nothing_waits_for_the_device() -> None:
    grads = [torch.ones(1000, device="cuda", dtype=dtype) for dtype in FLOAT_TYPES]
    found_inf, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    tracker = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        multi_tensor.multi_tensor_unscale_(grads, found_inf, scale)
        multi_tensor.multi_tensor_axpby(grads, grads, grads, found_inf, 1.0, scale)
        multi_tensor.multi_tensor_copy(grads, grads)
        multi_tensor.multi_tensor_l2norm(grads, per_tensor=True)
        multi_tensor.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000, 1.0, 2.0**24)
    finally:
        torch.cuda.set_sync_debug_mode("default")
