"""What the multi-tensor ops compute, to the last bit, against float64 and torch's own conversions."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from apex_amp import multi_tensor

HALF_TYPES = [torch.float16, torch.bfloat16]
FLOAT_TYPES = [*HALF_TYPES, torch.float32]
ALL_TYPES = [*FLOAT_TYPES, torch.float64]
# Around the vector block (32), the grain at which threads share (32768), and a norm's chunk (32768).
SMALL_SIZES = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 65, 1000]
SIZES = [*SMALL_SIZES, 32767, 32768, 32769, 100_003]
NON_FINITE = [math.inf, -math.inf, math.nan]


def randn(size, dtype, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size)).mul(3).to(dtype)


def float32(x):
    return torch.tensor(x, dtype=torch.float32).double()


def rounded_product(x, factor, *dtypes):
    """x * factor, the factor rounded to FP32, the product rounded once to FP32 (kept where a dtype is float64)."""
    product = x.double() * float32(factor)
    return product if torch.float64 in dtypes else product.float()


def same(a, b):
    """Equal element by element, signs of zeros included, any NaN for any NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) \
        and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def all_patterns(dtype):
    return torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def found(value=0.0):
    return torch.full((1,), value)


# ---- scale, axpby, copy -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("src_type,dst_type", list(itertools.product(ALL_TYPES, ALL_TYPES)))
def test_scale_rounds_the_fp32_product_once(src_type, dst_type):
    src = [randn(size, src_type) for size in SIZES]
    dst = [torch.full((size,), 9.0, dtype=dst_type) for size in SIZES]
    found_inf, flags = found(), torch.zeros(len(SIZES))
    multi_tensor.multi_tensor_scale(src, dst, found_inf, 0.3, flags)
    for x, out in zip(src, dst):
        expected = rounded_product(x, 0.3, src_type, dst_type)
        # torch takes float64 to the half types through float, and so do we
        assert same(out, expected.float().to(dst_type) if dst_type in HALF_TYPES else expected.to(dst_type))
    assert found_inf.item() == 0 and not flags.any()


@pytest.mark.parametrize("types", list(itertools.product(FLOAT_TYPES, FLOAT_TYPES, FLOAT_TYPES)))
def test_axpby_rounds_both_products_and_the_sum(types):
    x_type, y_type, out_type = types
    xs, ys = [randn(n, x_type) for n in SMALL_SIZES], [randn(n, y_type, seed=1) for n in SMALL_SIZES]
    outs = [torch.full((n,), 9.0, dtype=out_type) for n in SMALL_SIZES]
    multi_tensor.multi_tensor_axpby(xs, ys, outs, found(), 0.3, -1.7)
    for x, y, out in zip(xs, ys, outs):
        # a double sum of two floats, rounded to float, is their correctly rounded sum
        total = rounded_product(x, 0.3).double() + rounded_product(y, -1.7).double()
        assert same(out, total.float().to(out_type))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("split", [10**9, 31], ids=["vector", "scalar"])  # 31: too short for a vector block
def test_every_half_pattern_widens_exactly(dtype, split):
    src = all_patterns(dtype)
    dst = torch.empty(src.shape)
    multi_tensor.multi_tensor_copy(src.split(split), dst.split(split))
    assert same(dst, src.float())


def floats_around_ties(dtype):
    """For each finite pattern: the float itself, the tie above it, and the tie's neighbours; then the extremes."""
    values = all_patterns(dtype)
    values = values[values.isfinite()].double()
    ulp = torch.exp2(values.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()) * torch.finfo(dtype).eps
    ties = (values + ulp / 2).float()
    infinity = torch.tensor(math.inf)
    extremes = torch.tensor([*NON_FINITE, 0.0, -0.0, 3.4e38, -3.4e38, 65519.99, 65520.0, 1e-45, -1e-45])
    neighbours = [torch.nextafter(ties, infinity), torch.nextafter(ties, -infinity)]
    return torch.cat([values.float(), ties, *neighbours, extremes])


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("split", [10**9, 31], ids=["vector", "scalar"])  # 31: too short for a vector block
def test_floats_round_to_nearest_even_half(dtype, split):
    src = floats_around_ties(dtype)
    dst = torch.empty(src.shape, dtype=dtype)
    multi_tensor.multi_tensor_copy(src.split(split), dst.split(split))
    assert same(dst, src.to(dtype))
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            assert same(dst, torch.from_numpy(src.numpy().astype(np.float16)))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_denormals_and_negative_zero_survive(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([smallest, -smallest, 3 * smallest, 0.0, -0.0], dtype=torch.float64).to(dtype).repeat(9)
    out = torch.empty_like(x)
    multi_tensor.multi_tensor_scale([x], [out], found(), 1.0)
    assert same(out, x) and out[0] != 0
    multi_tensor.multi_tensor_scale([x], [out], found(), -1.0)
    assert same(out, -x)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_unscale_works_in_place_with_a_tensor_scale(dtype):
    grads = [randn(n, dtype) for n in SIZES]
    before = [grad.clone() for grad in grads]
    multi_tensor.multi_tensor_unscale_(grads, found(), torch.tensor([1 / 3]))
    for grad, old in zip(grads, before):
        assert same(grad, rounded_product(old, 1 / 3, dtype).to(dtype))


def test_the_scale_is_rounded_to_fp32_first():
    x, out = torch.tensor([3.0], dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    multi_tensor.multi_tensor_scale([x], [out], found(), 0.1)
    assert out.item() == 3.0 * np.float64(np.float32(0.1)) != 3.0 * 0.1


def test_axpby_may_write_over_either_argument():
    x, y = randn(1000, torch.float32), randn(1000, torch.float32, seed=1)
    expected = 2.0 * x + 3.0 * y
    for target in ("x", "y"):
        xs, ys = [x.clone()], [y.clone()]
        multi_tensor.multi_tensor_axpby(xs, ys, xs if target == "x" else ys, found(), 2.0, torch.tensor(3.0))
        assert torch.equal((xs if target == "x" else ys)[0], expected)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("src_type,dst_type", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)])
def test_large_lists_are_streamed_right(src_type, dst_type, offset):
    """Past the size where output bypasses the caches, at any alignment; the elements around stay."""
    torch.set_num_threads(2)
    sizes = [6_000_000, 33, 5, 6_000_001]
    src = [randn(n, src_type) for n in sizes]
    whole = [torch.full((n + offset + 1,), 9.0, dtype=dst_type) for n in sizes]
    multi_tensor.multi_tensor_scale(src, [w[offset:-1] for w in whole], found(), 0.3)
    for x, w in zip(src, whole):
        assert torch.equal(w[offset:-1], (x.float() * torch.tensor(0.3)).to(dst_type))
        assert (w[:offset] == 9).all() and w[-1] == 9


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_views(offset):
    src = randn(5000, torch.float16)[offset:]
    whole = torch.full((6000,), 9.0)
    dst = whole[2 * offset:2 * offset + src.numel()]
    multi_tensor.multi_tensor_scale([src], [dst], found(), 0.5)
    assert torch.equal(dst, src.float() * 0.5)
    assert (whole[:2 * offset] == 9).all() and (whole[2 * offset + src.numel():] == 9).all()


# ---- the check ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", NON_FINITE)
def test_non_finite_values_are_found_anywhere(dtype, value):
    torch.set_num_threads(2)
    sizes = [1, 40, 0, 70_001, 3]
    for tensor, size in enumerate(sizes):
        for position in {0, size // 2, size - 2, size - 1} & set(range(size)):
            grads = [torch.ones(n, dtype=dtype) for n in sizes]
            grads[tensor][position] = value
            found_inf, flags = found(), torch.zeros(len(sizes))
            multi_tensor.multi_tensor_unscale_(grads, found_inf, 0.5, flags)
            assert found_inf.item() == 1
            assert flags.tolist() == [float(i == tensor) for i in range(len(sizes))]


@pytest.mark.parametrize("check,bad_list,raised", [("x", 0, True), ("x", 1, False), ("y", 0, False), ("y", 1, True),
                                                   ("both", 0, True), ("both", 1, True)])
def test_axpby_checks_what_it_is_told_to(check, bad_list, raised):
    for size in (1, 100):
        lists = [[torch.ones(3), torch.ones(size)], [torch.ones(3), torch.ones(size)]]
        lists[bad_list][1][-1] = math.nan
        found_inf, flags = found(), torch.zeros(2)
        multi_tensor.multi_tensor_axpby(*lists, [torch.empty(3), torch.empty(size)], found_inf, 1.0, 1.0, check, flags)
        assert found_inf.item() == raised and flags.tolist() == [0, raised]


def test_the_check_looks_at_inputs_only():
    found_inf, out = found(), torch.empty(1, dtype=torch.float16)
    multi_tensor.multi_tensor_scale([torch.tensor([70000.0])], [out], found_inf, 1.0)
    assert out.item() == math.inf and found_inf.item() == 0
    multi_tensor.multi_tensor_scale([torch.tensor([math.inf])], [out], found_inf, 0.0)
    assert out.isnan().item() and found_inf.item() == 1


@pytest.mark.parametrize("value", [1.0, -2.0, 0.25])
def test_found_inf_is_never_cleared(value):
    found_inf, flags = found(value), torch.tensor([0.0, value])
    multi_tensor.multi_tensor_unscale_([torch.ones(3), torch.ones(3)], found_inf, 0.5, flags)
    assert found_inf.item() == value and flags.tolist() == [0.0, value]


def test_every_finite_half_passes_the_check():
    for dtype in HALF_TYPES:
        values = all_patterns(dtype)
        found_inf = found()
        multi_tensor.multi_tensor_unscale_([values[values.isfinite()].clone()], found_inf, 1.0)
        assert found_inf.item() == 0
        flags = torch.zeros(values.numel())
        multi_tensor.multi_tensor_unscale_(list(values.clone().unbind()), found_inf, 1.0, flags)
        assert torch.equal(flags != 0, ~values.isfinite())


# ---- l2norm -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_l2norm_against_float64(dtype):
    tensors = [randn(n, dtype) for n in SIZES]
    total, norms = multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)
    expected = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(norms.double(), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(total.double(), expected.norm(), rtol=1e-7, atol=0)
    assert total.dtype == norms.dtype == torch.float32 and total.shape == () and norms.shape == (len(SIZES),)
    assert torch.equal(multi_tensor.multi_tensor_l2norm(tensors), total)


def test_l2norm_is_precise_where_an_fp32_sum_is_not():
    n = 20_000_000
    x = torch.full((n,), 0.1)
    expected = math.sqrt(n) * np.float64(np.float32(0.1))
    assert abs(multi_tensor.multi_tensor_l2norm([x]).item() / expected - 1) < 1e-7


def test_l2norm_does_not_overflow_or_underflow_in_between():
    big, small = torch.full((1000,), 1e30), torch.full((1000,), 1e-30)
    assert multi_tensor.multi_tensor_l2norm([big]).item() == pytest.approx(math.sqrt(1000) * 1e30, rel=1e-6)
    assert multi_tensor.multi_tensor_l2norm([small]).item() == pytest.approx(math.sqrt(1000) * 1e-30, rel=1e-6)


@pytest.mark.parametrize("value,expected", [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_l2norm_carries_non_finite_values(value, expected):
    total, norms = multi_tensor.multi_tensor_l2norm([torch.ones(40), torch.tensor([value])], per_tensor=True)
    np.testing.assert_equal([total.item(), norms[1].item()], [expected, expected])
    assert norms[0].item() == pytest.approx(math.sqrt(40))


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_a_norms_bits_depend_on_its_tensor_only(dtype):
    """Not on threads, alignment or neighbours."""
    sizes = [100_003, 5, 33_000, 250_001, 1]
    tensors = [randn(n, dtype) for n in sizes]
    torch.set_num_threads(1)
    total, norms = multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        again, each = multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)
        assert torch.equal(again, total) and torch.equal(each, norms)
    for i, tensor in enumerate(tensors):
        assert multi_tensor.multi_tensor_l2norm([tensor]) == norms[i]
        for offset in (1, 3):
            moved = torch.empty(tensor.numel() + offset, dtype=dtype)[offset:].copy_(tensor)
            assert multi_tensor.multi_tensor_l2norm([moved]) == norms[i]


def test_l2norm_of_nothing_is_zero():
    assert multi_tensor.multi_tensor_l2norm([]).item() == 0
    total, norms = multi_tensor.multi_tensor_l2norm([], per_tensor=True)
    assert total.item() == 0 and norms.shape == (0,)
    total, norms = multi_tensor.multi_tensor_l2norm([torch.empty(0), torch.empty(3, 0)], per_tensor=True)
    assert total.item() == 0 and norms.tolist() == [0, 0]


# ---- update_scale_ ------------------------------------------------------------------------------------------------

def plain_update(scale, tracker, overflow, growth, backoff, interval, minimum, maximum):
    if overflow:
        return max(minimum, min(maximum, scale * backoff)), 0
    if tracker + 1 < interval:
        return scale, tracker + 1
    return max(minimum, min(maximum, scale * growth)), 0


@pytest.mark.parametrize("update", [multi_tensor.update_scale_, multi_tensor._torch_update_scale_],
                         ids=["compiled", "torch"])
@pytest.mark.parametrize("minimum,maximum", [(2.0**-10, 2.0**24), (2048.0, 8192.0)])
def test_update_scale_follows_the_plain_state_machine(update, minimum, maximum):
    generator = torch.Generator().manual_seed(0)
    scale, tracker = torch.tensor([4096.0]), torch.zeros(1, dtype=torch.int32)
    expected = (4096.0, 0)
    seen = set()
    for overflow in (torch.rand(300, generator=generator) < 0.15).tolist():
        update(scale, tracker, torch.tensor([-3.0 if overflow else 0.0]), 2.0, 0.5, 4, minimum, maximum)
        expected = plain_update(*expected, overflow, 2.0, 0.5, 4, minimum, maximum)
        assert (scale.item(), tracker.item()) == expected
        seen.add(scale.item())
    assert len(seen) > 2


def test_update_scale_agrees_with_torch_without_limits():
    ours, torchs = [(torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)) for _ in range(2)]
    for overflow in [0, 0, 1, 0, 0, 0, 1, 1, 0, 0]:
        multi_tensor.update_scale_(*ours, torch.tensor(float(overflow)), 2.0, 0.5, 2, 0.0, math.inf)
        torch._amp_update_scale_(*torchs, torch.tensor(float(overflow)), 2.0, 0.5, 2)
        assert ours == torchs


def test_the_count_restarts_at_growth_even_at_the_maximum():
    scale, tracker = torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    multi_tensor.update_scale_(scale, tracker, torch.tensor(0.0), 2.0, 0.5, 2, 1.0, 8.0)
    assert (scale.item(), tracker.item()) == (8.0, 0)
