"""csrc/multi_tensor_cuda.cu, compiled for the host and run on emulated blocks and threads (tests/cuda_on_cpu).

Each test runs twice: as it is, and with every memory access checked for races and bounds.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apex_amp import multi_tensor_updates
from cuda_on_cpu.emulator import (CHECKED_FLAGS, DRIVER_WITH_SMALL_PARAMETERS, ELEMENTWISE_CHUNK, HERE, KERNELS,
                                  NORM_CHUNK, TILE, Emulator, KernelFault, compile_all, link)

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (*HALF_TYPES, torch.float32)
ALL_TYPES = (*FLOAT_TYPES, torch.float64)
NONFINITE = (torch.inf, -torch.inf, torch.nan)
EDGE_SIZES = (0, 1, 7, 8, 9, TILE - 1, TILE + 1, ELEMENTWISE_CHUNK - 1, ELEMENTWISE_CHUNK, ELEMENTWISE_CHUNK + 1)
SMALL_SIZES = (1, 0, 9, TILE + 3)
GUARD, GUARD_ELEMENTS = 7.0, 16


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the builds are linked from; kernels come with and without instrumentation."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    sources = {"emulator": HERE / "emulator.cpp", "plain": KERNELS, "checked": KERNELS, "driver": HERE / "driver.cpp",
               "optimizer_driver": HERE / "optimizer_driver.cpp", "self_test": HERE / "self_test.cu"}
    objects = {name: folder / f"{name}.o" for name in sources}
    compile_all([(source, objects[name], CHECKED_FLAGS if name in ("checked", "self_test") else ())
                 for name, source in sources.items()])
    return objects


@pytest.fixture(scope="session")
def emulators(objects: dict[str, Path]) -> dict[str, Emulator]:
    def build(kernels: str) -> Emulator:
        parts = [objects["emulator"], objects["driver"], objects["optimizer_driver"], objects[kernels]]
        return Emulator(link(parts, objects[kernels].with_suffix(".so")))
    return {kernels: build(kernels) for kernels in ("plain", "checked")}


@pytest.fixture(params=["plain", "checked"])
def cuda(emulators: dict[str, Emulator], request: pytest.FixtureRequest) -> Emulator:
    emulator = emulators[request.param]
    emulator.configure()
    return emulator


def padded(values: Tensor, offset: int = 0) -> Tensor:
    """A copy of `values` at an element offset in memory that has guards around it."""
    memory = torch.full((offset + values.numel() + GUARD_ELEMENTS,), GUARD, dtype=values.dtype)
    view = memory[offset:offset + values.numel()]
    view.copy_(values)
    return view


def assert_guards_untouched(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        begin, end = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
        assert (memory[:begin] == GUARD).all() and (memory[end:] == GUARD).all()


def random_list(sizes: Iterable[int], dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    return [padded(torch.randn(size, dtype=torch.float64).to(dtype), offset) for size in sizes]


def empty_list(sizes: Iterable[int], dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    return [padded(torch.full((size,), torch.nan, dtype=dtype), offset) for size in sizes]


def register_type(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def scaled(src: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """torch's arithmetic: the scale in FP32, one product, one rounding."""
    registers = register_type(src.dtype, dtype)
    return (src.to(registers) * torch.tensor(scale).to(registers)).to(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, of equal signs of zero, and NaN where NaN is expected."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual[~nan].view(bits), expected[~nan].view(bits))


# ---- scale and copy ----

@pytest.mark.parametrize("dtypes", list(itertools.product(ALL_TYPES, ALL_TYPES)), ids=str)
def test_scale_matches_torch_for_every_dtype_pair(cuda: Emulator, dtypes: tuple) -> None:
    src, dst = random_list(EDGE_SIZES, dtypes[0]), empty_list(EDGE_SIZES, dtypes[1])
    found_inf = torch.zeros(1)
    cuda.multi_tensor_scale(src, dst, found_inf, 0.37)
    for source, target in zip(src, dst):
        assert_same_bits(target, scaled(source, 0.37, dtypes[1]))
    assert_guards_untouched(dst)
    assert found_inf.item() == 0


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (3, 5), (4, 8)], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16),
                                    (torch.float16, torch.float16), (torch.float64, torch.float32)], ids=str)
def test_scale_at_any_alignment(cuda: Emulator, dtypes: tuple, offsets: tuple) -> None:
    src, dst = random_list(EDGE_SIZES, dtypes[0], offsets[0]), empty_list(EDGE_SIZES, dtypes[1], offsets[1])
    cuda.multi_tensor_scale(src, dst, torch.zeros(1), 3.0)
    for source, target in zip(src, dst):
        assert_same_bits(target, scaled(source, 3.0, dtypes[1]))
    assert_guards_untouched(dst)


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_scale_in_place(cuda: Emulator, dtype: torch.dtype) -> None:
    tensors = random_list(EDGE_SIZES, dtype)
    expected = [scaled(tensor, 0.11, dtype) for tensor in tensors]
    cuda.multi_tensor_scale(tensors, tensors, torch.zeros(1), 0.11)
    for tensor, result in zip(tensors, expected):
        assert_same_bits(tensor, result)


def test_scale_reads_its_factor_on_the_device(cuda: Emulator) -> None:
    src, dst = random_list(SMALL_SIZES, torch.float16), empty_list(SMALL_SIZES, torch.float32)
    cuda.multi_tensor_scale(src, dst, torch.zeros(1), torch.tensor([0.25]))
    for source, target in zip(src, dst):
        assert_same_bits(target, scaled(source, 0.25, torch.float32))


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT_TYPES, FLOAT_TYPES)), ids=str)
def test_copy_matches_torch_for_every_dtype_pair(cuda: Emulator, dtypes: tuple) -> None:
    src, dst = random_list(EDGE_SIZES, dtypes[0]), empty_list(EDGE_SIZES, dtypes[1])
    cuda.multi_tensor_copy(src, dst)
    for source, target in zip(src, dst):
        assert_same_bits(target, source.to(dtypes[1]))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_conversions_of_all_patterns_and_their_midpoints(emulators: dict[str, Emulator], dtype: torch.dtype) -> None:
    """The emulator brings its own half types: they must round as torch's do, or no other test here means anything."""
    patterns = torch.arange(-2**15, 2**15, dtype=torch.int16).view(dtype)
    widened = torch.empty(patterns.shape)
    emulators["plain"].multi_tensor_copy([patterns], [widened])
    assert_same_bits(widened, patterns.float())

    finite = widened[widened.isfinite()].sort().values
    midpoints = (finite[:-1] + finite[1:]) / 2
    halfway_to_infinity = finite[-1] + (finite[-1] - finite[-2]) / 2
    edges = torch.cat([midpoints, halfway_to_infinity.reshape(1), -halfway_to_infinity.reshape(1)])
    floats = torch.cat([edges, torch.nextafter(edges, torch.tensor(torch.inf)),
                        torch.nextafter(edges, torch.tensor(-torch.inf)), torch.tensor([1e-45, 3e38, -0.0])])
    narrowed = torch.empty(floats.shape, dtype=dtype)
    emulators["plain"].multi_tensor_copy([floats], [narrowed])
    assert_same_bits(narrowed, floats.to(dtype))


# ---- found_inf ----

@pytest.mark.parametrize("value", NONFINITE, ids=str)
@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_nonfinite_is_found_at_every_position(cuda: Emulator, dtype: torch.dtype, value: float) -> None:
    size = ELEMENTWISE_CHUNK + 21
    for position in (0, size // 2, ELEMENTWISE_CHUNK - 1, ELEMENTWISE_CHUNK, size - 5, size - 1):
        tensors = random_list((5, size, 0, 3), dtype)
        tensors[1][position] = value
        found_inf, per_tensor = torch.zeros(1), torch.zeros(9)
        cuda.multi_tensor_scale(tensors, tensors, found_inf, 0.5, per_tensor, index=(8, 2, 5, 0))
        assert found_inf.item() == 1, position
        assert per_tensor.nonzero().flatten().tolist() == [2], position


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_all_nonfinite_and_the_last_tensor_alone(cuda: Emulator, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, dtype=dtype), torch.full((3 * ELEMENTWISE_CHUNK,), torch.nan, dtype=dtype)]
    found_inf, per_tensor = torch.zeros(1), torch.zeros(2)
    cuda.multi_tensor_scale(tensors, tensors, found_inf, 1.0, per_tensor)
    assert found_inf.item() == 1
    assert per_tensor.tolist() == [0, 1]


def test_found_inf_is_never_cleared_and_sees_inputs_only(cuda: Emulator) -> None:
    src, dst = [torch.full((9,), 60000.0)], [torch.empty(9, dtype=torch.float16)]
    found_inf = torch.zeros(1)
    cuda.multi_tensor_scale(src, dst, found_inf, 2.0)
    assert dst[0].isinf().all() and found_inf.item() == 0
    found_inf.fill_(3.0)
    cuda.multi_tensor_scale(src, dst, found_inf, 1.0)
    assert found_inf.item() == 3


def test_flags_are_optional(cuda: Emulator) -> None:
    tensors = [torch.full((9,), torch.inf)]
    cuda.multi_tensor_scale(tensors, tensors, None, 1.0)
    assert tensors[0].isinf().all()


# ---- axpby ----

@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT_TYPES, FLOAT_TYPES, FLOAT_TYPES)), ids=str)
def test_axpby_matches_torch_for_every_dtype_triple(cuda: Emulator, dtypes: tuple) -> None:
    sizes = (*SMALL_SIZES, ELEMENTWISE_CHUNK + 1)
    x, y, out = random_list(sizes, dtypes[0]), random_list(sizes, dtypes[1], 1), empty_list(sizes, dtypes[2])
    cuda.multi_tensor_axpby(x, y, out, torch.zeros(1), 0.3, torch.tensor([-1.7]))
    for tensors in zip(x, y, out):
        expected = tensors[0].float() * torch.tensor(0.3) + tensors[1].float() * torch.tensor(-1.7)
        assert_same_bits(tensors[2], expected.to(dtypes[2]))
    assert_guards_untouched(out)


@pytest.mark.parametrize("target", [0, 1], ids=["out=x", "out=y"])
def test_axpby_in_place(cuda: Emulator, target: int) -> None:
    lists = [random_list(SMALL_SIZES, torch.float32), random_list(SMALL_SIZES, torch.float32)]
    expected = [x * 2 + y * 3 for x, y in zip(*lists)]
    cuda.multi_tensor_axpby(*lists, lists[target], torch.zeros(1), 2.0, 3.0)
    for tensor, result in zip(lists[target], expected):
        assert_same_bits(tensor, result)


@pytest.mark.parametrize("check,found", [("x", (1, 0)), ("y", (0, 1)), ("both", (1, 1))])
def test_axpby_checks_the_arguments_it_is_told_to(cuda: Emulator, check: str, found: tuple) -> None:
    for place, expected in enumerate(found):
        x, y = random_list((77,), torch.float16), random_list((77,), torch.float32)
        (x, y)[place][0][76] = torch.inf
        found_inf = torch.zeros(1)
        cuda.multi_tensor_axpby(x, y, y, found_inf, 1.0, 1.0, check)
        assert found_inf.item() == expected


# ---- many tensors ----

def test_more_tensors_than_a_launch_takes(cuda: Emulator) -> None:
    sizes = [(i * 37) % 90 for i in range(1100)]
    src, dst = random_list(sizes, torch.float16), empty_list(sizes, torch.float32)
    src[1050] = padded(torch.tensor([1.0, torch.nan], dtype=torch.float16))
    dst[1050] = padded(torch.zeros(2))
    found_inf, per_tensor = torch.zeros(1), torch.zeros(1100)
    cuda.multi_tensor_scale(src, dst, found_inf, 0.5, per_tensor)
    assert cuda.launches == 2
    assert found_inf.item() == 1 and per_tensor.nonzero().flatten().tolist() == [1050]
    for source, target in zip(src, dst):
        assert_same_bits(target, scaled(source, 0.5, torch.float32))


def test_launches_stay_small_where_the_driver_is_old(cuda: Emulator) -> None:
    sizes = [i % 5 for i in range(300)]
    src, dst = random_list(sizes, torch.float32), empty_list(sizes, torch.float16)
    cuda.configure(driver_version=DRIVER_WITH_SMALL_PARAMETERS)
    cuda.multi_tensor_scale(src, dst, torch.zeros(1), 0.5)
    assert cuda.launches == 3
    for source, target in zip(src, dst):
        assert_same_bits(target, scaled(source, 0.5, torch.float16))


def test_empty_lists_and_tensors_launch_nothing(cuda: Emulator) -> None:
    found_inf = torch.zeros(1)
    cuda.multi_tensor_scale([], [], found_inf, 1.0)
    cuda.multi_tensor_copy([torch.empty(0)], [torch.empty(0)])
    assert cuda.launches == 0 and found_inf.item() == 0


def test_a_refused_launch_is_reported_and_ends_the_op(cuda: Emulator) -> None:
    tensors = random_list([4] * 2100, torch.float32)
    cuda.configure(refused_launch=2)
    with pytest.raises(RuntimeError, match="driver_scale: unspecified launch failure"):
        cuda.multi_tensor_scale(tensors, tensors, torch.zeros(1), 1.0)
    assert cuda.launches == 2


def test_offsets_beyond_32_bits(emulators: dict[str, Emulator], tmp_path: Path) -> None:
    """The last block of 2**32 + 5 elements in a sparse file; a 32-bit offset would touch the first elements."""
    tensor = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 5, dtype=torch.float16)
    tensor[:5] = tensor[-5:] = 1.0
    cuda = emulators["checked"]
    cuda.configure(first_block=2**32 // ELEMENTWISE_CHUNK)
    cuda.multi_tensor_scale([tensor], [tensor], torch.zeros(1), 2.0)
    assert tensor[:5].tolist() == [1.0] * 5 and tensor[-5:].tolist() == [2.0] * 5


@pytest.mark.parametrize("schedule,seed", [("reverse", 0), ("random", 1), ("random", 2)])
def test_the_order_of_blocks_and_threads_changes_nothing(cuda: Emulator, schedule: str, seed: int) -> None:
    sizes = (3 * NORM_CHUNK + 5, 9, 0, NORM_CHUNK)
    src = random_list(sizes, torch.float16)
    src[3][77] = torch.inf

    def results() -> list[Tensor]:
        dst, found_inf, per_tensor = empty_list(sizes, torch.float32), torch.zeros(1), torch.zeros(len(sizes))
        cuda.multi_tensor_scale(src, dst, found_inf, 0.5, per_tensor)
        return [*dst, found_inf, per_tensor, *cuda.multi_tensor_l2norm(src[:3])]

    forward = results()
    cuda.configure(schedule, seed)
    for result, expected in zip(results(), forward):
        assert_same_bits(result, expected)


# ---- optimizers ----

def adam_case(n: int) -> tuple:
    return 2, True, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
                     "adam_w_mode": n % 2 == 0, "bias_correction": True}


def sgd_case(n: int) -> tuple:
    return 1, False, {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1, "nesterov": False,
                      "first_run": n % 2 == 0, "wd_after_momentum": n > 1}


def lamb_case(n: int) -> tuple:
    return 2, True, {"lr": 0.01, "grad_norm": 3.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1,
                     "adam_w_mode": n % 2 == 0, "bias_correction": True, "grad_averaging": True, "max_grad_norm": 1.0,
                     "use_nvlamb": False}


def novograd_case(n: int) -> tuple:
    return 1, True, {"lr": 0.01, "grad_norms": None, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
                     "bias_correction": True, "grad_averaging": True, "reg_inside_moment": n % 2 == 0, "l2_norm": n > 1,
                     "init_zero": False}


def adagrad_case(n: int) -> tuple:
    return 1, True, {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1, "adagrad_w_mode": n % 2 == 0}


RULES = {"adam": adam_case, "sgd": sgd_case, "lamb": lamb_case, "novograd": novograd_case, "adagrad": adagrad_case}
UPDATE_DTYPES = [(torch.float32, torch.float32, None), (torch.float16, torch.float32, torch.float16),
                 (torch.float32, torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16, None)]


def update_arguments(rule: str, n: int, sizes: tuple, dtypes: tuple, found_inf: float) -> tuple[list, dict]:
    """The lists of one call (state, then params and what else is written, in any order that is always the same) and its
    arguments by name."""
    torch.manual_seed(n)
    state_lists, counts, options = RULES[rule](n)
    grad, param, copy = dtypes
    arguments = {"grads": random_list(sizes, grad, 1), "params": random_list(sizes, param)}
    names = {"adam": ("exp_avgs", "exp_avg_sqs"), "lamb": ("exp_avgs", "exp_avg_sqs"), "sgd": ("momentum_buffers",),
             "novograd": ("exp_avgs",), "adagrad": ("sums",)}[rule]
    for name in names[:state_lists]:
        arguments[name] = [tensor.abs_() for tensor in random_list(sizes, torch.float32, 3)]
    if rule == "novograd":
        arguments["averaged_norms"] = [torch.tensor(2.0) for _ in sizes]
        options = {**options, "grad_norms": torch.arange(1.0, 1.0 + len(sizes))}
    if counts:
        arguments["steps"] = [torch.tensor(float(i)) for i in range(len(sizes))]
    arguments["model_params"] = None if copy is None else empty_list(sizes, copy, 1)
    written = [name for name in arguments if name != "grads" and arguments[name] is not None]
    return written, {**arguments, "found_inf": torch.tensor([found_inf]), "inv_scale": torch.tensor([0.25]), **options}


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("rule", RULES)
def test_optimizers_have_the_bits_of_the_cpu_executor(cuda: Emulator, rule: str, n: int) -> None:
    dtypes = UPDATE_DTYPES[n]
    sizes = (9, 1, 0, ELEMENTWISE_CHUNK + 3) if n else (5, NORM_CHUNK + 5)
    written, on_cuda = update_arguments(rule, n, sizes, dtypes, found_inf=0.0)
    _, on_cpu = update_arguments(rule, n, sizes, dtypes, found_inf=0.0)
    getattr(cuda, f"multi_tensor_{rule}")(*on_cuda.values())
    getattr(multi_tensor_updates, f"multi_tensor_{rule}")(*on_cpu.values())
    for name in written:
        for actual, expected in zip(on_cuda[name], on_cpu[name]):
            if rule == "lamb" and name in ("params", "model_params"):  # sums of squares in another order
                torch.testing.assert_close(actual, expected, rtol=1e-6 if actual.dtype == torch.float32 else 1e-2,
                                           atol=1e-6)
            else:
                assert_same_bits(actual, expected)
        if on_cuda[name][-1].dim():
            assert_guards_untouched(on_cuda[name])


@pytest.mark.parametrize("rule", RULES)
def test_optimizers_skip_where_found_inf_is_set(cuda: Emulator, rule: str) -> None:
    sizes = (1, 0, NORM_CHUNK + 1)
    written, arguments = update_arguments(rule, 0, sizes, UPDATE_DTYPES[1], found_inf=1.0)
    before = {name: [tensor.clone() for tensor in arguments[name]] for name in written}
    getattr(cuda, f"multi_tensor_{rule}")(*arguments.values())
    for name in written:
        for actual, expected in zip(arguments[name], before[name]):
            assert_same_bits(actual, expected)


def test_check_only_looks(cuda: Emulator) -> None:
    tensors = random_list((5, ELEMENTWISE_CHUNK + 21, 0, 3), torch.float16)
    found_inf, per_tensor = torch.zeros(1), torch.zeros(4)
    cuda.multi_tensor_check(tensors, found_inf, per_tensor)
    assert found_inf.item() == 0
    tensors[1][-1] = torch.nan
    cuda.multi_tensor_check(tensors, found_inf, per_tensor)
    assert found_inf.item() == 1 and per_tensor.tolist() == [0, 1, 0, 0]


# ---- l2norm ----

NORM_SIZES = (1, 0, 7, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, 3 * NORM_CHUNK + 11)


def norms_in_double(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors])


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_l2norm_matches_float64(cuda: Emulator, dtype: torch.dtype) -> None:
    tensors = random_list(NORM_SIZES, dtype)
    total, per_tensor = cuda.multi_tensor_l2norm(tensors)
    squares = norms_in_double(tensors)
    torch.testing.assert_close(total, squares.sum().sqrt().float().reshape(1), rtol=1.2e-7, atol=0)
    torch.testing.assert_close(per_tensor, squares.sqrt().float(), rtol=1.2e-7, atol=0)


def test_l2norm_of_large_and_nonfinite_values(cuda: Emulator) -> None:
    assert cuda.multi_tensor_l2norm([torch.full((4,), 1e30)])[0].item() == pytest.approx(2e30)
    assert cuda.multi_tensor_l2norm([torch.tensor([1.0, torch.inf])])[0].item() == torch.inf
    assert cuda.multi_tensor_l2norm([torch.tensor([torch.nan])])[0].isnan().all()


def test_l2norm_of_nothing_is_zero(cuda: Emulator) -> None:
    assert cuda.multi_tensor_l2norm([])[0].item() == 0
    total, per_tensor = cuda.multi_tensor_l2norm([torch.empty(0)] * 3)
    assert total.item() == 0 and per_tensor.tolist() == [0] * 3


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_norms_do_not_depend_on_alignment_neighbours_or_launches(cuda: Emulator, dtype: torch.dtype) -> None:
    values = random_list((2 * NORM_CHUNK + 13,), dtype)[0]
    alone = cuda.multi_tensor_l2norm([values])[1]
    for offset in (1, 2, 3):
        assert_same_bits(cuda.multi_tensor_l2norm([padded(values, offset)])[1], alone)
    cuda.configure(driver_version=DRIVER_WITH_SMALL_PARAMETERS)
    crowd = [*random_list([3] * 200, dtype), values, torch.empty(0, dtype=dtype)]
    assert_same_bits(cuda.multi_tensor_l2norm(crowd)[1][200:201], alone)
    assert cuda.launches == 4  # two for chunks, one to add up those of a long tensor, one for the total


# ---- update_scale ----

@pytest.mark.parametrize("scale,tracker,found_inf,expected", [
    (8.0, 0, 0.0, (8.0, 1)), (8.0, 2, 0.0, (16.0, 0)), (8.0, 2, 1.0, (4.0, 0)), (8.0, 2, 0.5, (4.0, 0)),
    (64.0, 2, 0.0, (64.0, 0)), (1.0, 0, 1.0, (1.0, 0)),
], ids=str)
def test_update_scale(cuda: Emulator, scale: float, tracker: int, found_inf: float, expected: tuple) -> None:
    scale_tensor, tracker_tensor = torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32)
    cuda.update_scale_(scale_tensor, tracker_tensor, torch.tensor([found_inf]), 2.0, 0.5, 3, 1.0, 64.0)
    assert (scale_tensor.item(), tracker_tensor.item()) == expected


# ---- the checker bites ----

def scale_with_tails(cuda: Emulator) -> None:
    sizes = (1, 13, TILE + 3, ELEMENTWISE_CHUNK + 9)
    src, dst = random_list(sizes, torch.float16), empty_list(sizes, torch.float32)
    cuda.multi_tensor_scale(src, dst, torch.zeros(1), 0.5)


def scale_two_infinite_chunks(cuda: Emulator) -> None:
    tensors = [torch.full((2 * ELEMENTWISE_CHUNK,), torch.inf)]
    cuda.multi_tensor_scale(tensors, tensors, torch.zeros(1), 1.0, torch.zeros(1))


def norm(cuda: Emulator) -> None:
    cuda.multi_tensor_l2norm(random_list((NORM_CHUNK + 5, 100), torch.float16))


# name: (text of the kernels' source, what it is replaced by, what is run, what the checker must say)
FAULTS: dict[str, tuple[str, str, Callable[[Emulator], None], str]] = {
    "missing barrier": ("  __syncthreads();\n", "", norm, "race on shared memory"),
    "reused buffer": ("  sum = block_sum(sum);\n", "  sum = block_sum(block_sum(sum));\n", norm,
                      "race on shared memory"),
    "vector past the end": ("begin + kVector <= size", "begin + kVector <= size + 1", scale_with_tails,
                            "out of bounds"),
    "tail read past the end": ("begin + k < size ?", "begin + k <= size ?", scale_with_tails, "out of bounds: reads"),
    "tail written past the end": ("if (begin + k < size)", "if (begin + k <= size)", scale_with_tails,
                                  "out of bounds: writes"),
    "racing flag": ("atomicExch(found_inf.any, 1.0f)", "*found_inf.any = 1.0f", scale_two_infinite_chunks,
                    "race on global memory"),
    "chunk without an end": ("left < chunk_size ? left : chunk_size", "left", scale_with_tails,
                             "race on global memory"),
    "threads that leave": ("  double sum = 0;\n  for (int first", "  if (threadIdx.x * kVector >= chunk.size) return;\n"
                           "  double sum = 0;\n  for (int first", norm, "deadlock"),
}


# The faults are in what all elements share: a few of them will do, which compile sooner.
FEW_ELEMENTS = "DO(ScaleElement) DO(AxpbyElement) DO(CopyElement) DO(CheckElement)"
WITHOUT_OPTIMIZERS = [f"-DAPEX_AMP_FOR_EACH_ELEMENT(DO)={FEW_ELEMENTS}", "-DAPEX_AMP_FOR_EACH_COUNT(DO)="]


@pytest.fixture(scope="session")
def faulty(objects: dict[str, Path]) -> dict[str, Emulator]:
    folder = objects["driver"].parent
    source = KERNELS.read_text()
    jobs = []
    for name, (text, replacement, _, _) in FAULTS.items():
        assert text in source, f"the fault {name!r} patches text that is no longer there: {text!r}"
        copy = folder / f"{name}.cu"
        copy.write_text(source.replace(text, replacement))
        jobs.append((copy, copy.with_suffix(".o"), [*CHECKED_FLAGS, "-O0", *WITHOUT_OPTIMIZERS]))
    compile_all(jobs)
    return {built.stem: Emulator(link([objects["emulator"], objects["driver"], built], built.with_suffix(".so")))
            for _, built, _ in jobs}


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_caught(faulty: dict[str, Emulator], name: str) -> None:
    _, _, run, message = FAULTS[name]
    with pytest.raises(KernelFault, match=message):
        run(faulty[name])


@pytest.fixture(scope="session")
def self_test(objects: dict[str, Path]) -> Emulator:
    return Emulator(link([objects["emulator"], objects["self_test"]], objects["self_test"].with_suffix(".so")))


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_collectives(self_test: Emulator, schedule: str) -> None:
    out = torch.zeros(257, dtype=torch.int32)
    self_test.configure(schedule)
    self_test.run("self_collectives", out)
    thread = torch.arange(64, dtype=torch.int32)
    lane = thread % 32
    assert torch.equal(out[:64], torch.where(lane < 31, thread + 1, thread))
    assert torch.equal(out[64:128], thread - lane + (lane ^ 16))
    assert (out[128:192] == torch.tensor(0xAAAAAAAA - 2**32)).all()
    assert (out[192:256] != 0).all()
    assert out[256].item() == 64


@pytest.mark.parametrize("kernel,writable,message", [
    ("reads_unwritten", True, "reads shared memory that nothing wrote"),
    ("lane_missing", True, "deadlock: 0 at a barrier, 33 done, 31 in a warp collective"),
    ("lane_not_named", True, "lane 31 is in a collective whose mask 7fffffff lacks it"),
    ("leaves_early", True, "32 threads left before a barrier that 32 others wait at"),
    ("blocks_collide", True, "race on global memory: writes after thread 0 of block number 1 wrote"),
    ("writes_its_input", False, "writes 4 bytes into an input"),
])
def test_faults_of_kernels_are_named(self_test: Emulator, kernel: str, writable: bool, message: str) -> None:
    self_test.configure()
    with pytest.raises(KernelFault, match=message):
        self_test.run(f"self_{kernel}", torch.zeros(64, dtype=torch.int32), writable)
    self_test.run("self_collectives", torch.zeros(257, dtype=torch.int32))  # the fault left nothing behind
