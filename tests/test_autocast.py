"""amp.autocast: regions, what they nest with, and whom they hold for."""
from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_amp import amp
from apex_amp._C import cast_counters
from apex_amp.amp import cast_state, patching

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
X = torch.eye(2)


def dtype_here() -> torch.dtype:
    return (X @ X).dtype


def cpu_region(dtype: torch.dtype = BFLOAT16, **options: Any) -> amp.autocast:
    return amp.autocast("cpu", dtype, **options)


def torch_region(dtype: torch.dtype = BFLOAT16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype, **options)


# ------------------------------------------------------------------------------------------------
# One region

def test_functions_cast_inside_by_torchs_default_type() -> None:
    assert dtype_here() == FLOAT
    with amp.autocast("cpu") as region:
        assert isinstance(region, torch.autocast)
        assert dtype_here() == torch.get_autocast_dtype("cpu")
        assert torch.softmax(X @ X, -1).dtype == FLOAT and torch.add(X @ X, X).dtype == FLOAT
    assert dtype_here() == FLOAT


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_the_type_can_be_chosen(dtype: torch.dtype) -> None:
    with cpu_region(dtype):
        assert dtype_here() == dtype and F.linear(X, X).dtype == dtype


def test_the_same_values_as_torchs_region() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    x, target = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))

    def run(region: Callable[[], Any]) -> list[torch.Tensor]:
        twin = copy.deepcopy(model)
        with region():
            output = twin(x)
            loss = F.cross_entropy(output, target)
        loss.backward()
        return [output, loss, *(p.grad for p in twin.parameters())]

    ours, expected = run(cpu_region), run(torch_region)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_importing_and_making_a_region_patch_nothing() -> None:
    cpu_region()
    cpu_region()(dtype_here)
    assert not patching.is_installed()
    with cpu_region():
        assert patching.is_installed()


def test_regions_end_with_exceptions() -> None:
    with pytest.raises(ZeroDivisionError), cpu_region():
        raise ZeroDivisionError
    assert dtype_here() == FLOAT and amp.is_autocast_enabled("cpu") is False


def test_a_region_object_can_be_entered_again_also_inside_itself() -> None:
    region = cpu_region()
    for _ in range(2):
        with region:
            with region:
                assert dtype_here() == BFLOAT16
            assert dtype_here() == BFLOAT16
        assert dtype_here() == FLOAT


def test_queries() -> None:
    default = torch.get_autocast_dtype("cpu")
    assert not amp.is_autocast_enabled("cpu") and not amp.is_autocast_enabled() and amp.get_autocast_dtype("cpu") == default
    with cpu_region(HALF):
        assert amp.is_autocast_enabled("cpu") and not amp.is_autocast_enabled("cuda")
        assert amp.get_autocast_dtype("cpu") == HALF and amp.get_autocast_dtype() == torch.get_autocast_dtype("cuda")
        with cpu_region(enabled=False):
            assert not amp.is_autocast_enabled("cpu") and amp.get_autocast_dtype("cpu") == default
        with torch_region(BFLOAT16):
            assert amp.is_autocast_enabled("cpu") and amp.get_autocast_dtype("cpu") == BFLOAT16
        with torch_region(BFLOAT16, enabled=False):
            assert not amp.is_autocast_enabled("cpu")


@pytest.mark.parametrize("arguments", [dict(device_type=3), dict(device_type="abacus"), dict(device_type="meta")], ids=str)
def test_bad_arguments_raise_as_in_torch(arguments: dict[str, Any]) -> None:
    with pytest.raises(Exception) as expected:
        torch.autocast(**arguments)
    with pytest.raises(expected.type) as raised:
        amp.autocast(**arguments)
    assert str(raised.value) == str(expected.value)


def test_a_type_that_can_not_be_cast_to_warns_and_switches_off() -> None:
    with pytest.warns(UserWarning, match="CPU Autocast only supports dtypes of"):
        region = amp.autocast("cpu", FLOAT)
    with region:
        assert dtype_here() == FLOAT


def test_without_cuda_a_cuda_region_warns_and_leaves_cpu_tensors_alone() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        cuda = amp.autocast("cuda")
    with cuda:
        assert dtype_here() == FLOAT
        with cpu_region():
            assert dtype_here() == BFLOAT16
    with cpu_region():
        with cuda:
            assert dtype_here() == BFLOAT16
            with torch.autocast("cuda", enabled=False):
                assert dtype_here() == BFLOAT16
        assert dtype_here() == BFLOAT16


# ------------------------------------------------------------------------------------------------
# Decorator

def test_decorated_functions_and_methods() -> None:
    class Model(nn.Module):
        @cpu_region()
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """The model's own words."""
            return (x @ x) * scale

    assert Model()(X, scale=2.0).dtype == BFLOAT16 and dtype_here() == FLOAT
    assert Model.forward.__doc__ == "The model's own words."
    with pytest.raises(TypeError, match="needs a callable, got int"):
        cpu_region()(3)  # type: ignore[arg-type]


def test_a_decorated_function_may_call_itself_and_raise() -> None:
    @cpu_region()
    def descend(depth: int) -> list[torch.dtype]:
        if depth < 0:
            raise ZeroDivisionError
        return [dtype_here()] + (descend(depth - 1) if depth else [])

    assert descend(3) == [BFLOAT16] * 4
    with pytest.raises(ZeroDivisionError):
        descend(-1)
    assert dtype_here() == FLOAT


def test_threads_run_one_decorated_function_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=10)

    @cpu_region()
    def meet() -> torch.dtype:
        barrier.wait()
        return dtype_here()

    def work(_: int) -> list[torch.dtype]:
        seen = []
        for _ in range(20):
            seen += [meet(), dtype_here()]
        return seen

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[BFLOAT16, FLOAT] * 20] * 4


def test_a_region_holds_for_its_thread_only() -> None:
    with ThreadPoolExecutor(1) as pool, cpu_region():
        assert pool.submit(dtype_here).result() == FLOAT
        assert dtype_here() == BFLOAT16


# ------------------------------------------------------------------------------------------------
# Nesting

def test_the_innermost_region_decides() -> None:
    with cpu_region(BFLOAT16):
        with cpu_region(HALF):
            assert dtype_here() == HALF
            with cpu_region(enabled=False):
                assert dtype_here() == FLOAT
                with cpu_region(BFLOAT16):
                    assert dtype_here() == BFLOAT16
            assert dtype_here() == HALF
        assert dtype_here() == BFLOAT16


def test_an_enabled_region_inside_disable_casts_casts_and_the_reverse_does_not() -> None:
    with amp.disable_casts():
        with cpu_region():
            assert dtype_here() == BFLOAT16
    with cpu_region(), amp.disable_casts():
        assert dtype_here() == FLOAT


@pytest.mark.parametrize("outer, inner, expected", [
    (cpu_region(HALF), torch_region(BFLOAT16), BFLOAT16),
    (torch_region(HALF), cpu_region(BFLOAT16), BFLOAT16),
    (cpu_region(HALF), torch_region(enabled=False), FLOAT),
    (torch_region(HALF), cpu_region(enabled=False), FLOAT),
], ids=["torch in ours", "ours in torch", "torch off in ours", "ours off in torch"])
def test_with_torchs_regions_too(outer: torch.autocast, inner: torch.autocast, expected: torch.dtype) -> None:
    with outer:
        assert dtype_here() == HALF
        with inner:
            assert dtype_here() == expected
            with outer:
                assert dtype_here() == HALF
            assert dtype_here() == expected
        assert dtype_here() == HALF
    assert dtype_here() == FLOAT and not torch.is_autocast_enabled("cpu")


def test_torchs_region_is_as_it_was_after_ours() -> None:
    with torch_region(HALF):
        with cpu_region(BFLOAT16):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == HALF


def test_a_region_for_one_device_type_leaves_casts_on_another() -> None:
    meta = torch.empty(2, 2, device="meta")

    def types() -> tuple[torch.dtype, torch.dtype]:
        return dtype_here(), (meta @ meta).dtype

    patching.install()
    with cast_state.cast_region(HALF, "meta", True):
        assert types() == (FLOAT, HALF)
        with cpu_region(BFLOAT16):
            assert types() == (BFLOAT16, HALF)
            assert F.linear(meta, meta).dtype == HALF and torch.einsum("ij,jk->ik", X, X).dtype == BFLOAT16
            with cast_state.cast_region(None, "meta", True):
                assert types() == (BFLOAT16, FLOAT)
            with cpu_region(HALF):
                assert types() == (HALF, HALF)
            with torch_region(enabled=False):
                assert types() == (FLOAT, HALF)
            with cpu_region(enabled=False):
                assert types() == (FLOAT, HALF)
        assert types() == (FLOAT, HALF)
    assert types() == (FLOAT, FLOAT)


# ------------------------------------------------------------------------------------------------
# With initialized models

class Halves(nn.Module):
    """Notes the type its products have in plain code, in torch's and in our disabled block, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [(x @ self.weight).dtype]
        with torch.autocast("cpu", enabled=False):
            self.seen.append((x @ self.weight).dtype)
        with amp.autocast("cpu", enabled=False):
            self.seen.append((x @ self.weight).dtype)
        with torch_region(BFLOAT16):
            self.seen.append((x @ self.weight).dtype)
        with amp.autocast("cpu", BFLOAT16):
            self.seen.append((x @ self.weight).dtype)
        return x @ self.weight


def initialized(opt_level: str) -> Halves:
    return amp.initialize(Halves(), opt_level=opt_level, verbosity=0)


def test_regions_inside_a_forward_at_o1() -> None:
    model = initialized("O1")
    assert model(X).dtype == HALF and model.seen == [HALF, FLOAT, FLOAT, BFLOAT16, BFLOAT16]


@pytest.mark.parametrize("region", [cpu_region, torch_region], ids=["ours", "torch's"])
def test_an_initialized_forward_inside_a_region_is_the_innermost(region: Callable[[], Any]) -> None:
    half, full = initialized("O1"), initialized("O0")
    with region():
        assert half(X).dtype == HALF and half.seen == [HALF, FLOAT, FLOAT, BFLOAT16, BFLOAT16]
        assert full(X).dtype == FLOAT
        assert dtype_here() == BFLOAT16
    assert dtype_here() == FLOAT  # outside, the latest initialize decides


def test_a_disabled_region_holds_for_forwards_inside_as_disable_casts_does() -> None:
    model = initialized("O1")
    with amp.autocast("cpu", enabled=False):
        assert model(X).dtype == FLOAT
    with torch.autocast("cpu", enabled=False):  # it says nothing of ours, and the forward is further in
        assert model(X).dtype == HALF


@pytest.mark.parametrize("region", [cpu_region, torch_region], ids=["ours", "torch's"])
def test_shutdown_inside_a_region(region: Callable[[], Any]) -> None:
    model = initialized("O1")
    with region():
        amp.shutdown()
        if region is torch_region:
            assert dtype_here() == BFLOAT16
    assert dtype_here() == FLOAT and not torch.is_autocast_enabled("cpu")
    assert model(X).dtype == FLOAT
    with cpu_region():
        assert dtype_here() == BFLOAT16
    assert initialized("O1")(X).dtype == HALF


def test_torchs_region_around_the_first_install() -> None:
    with torch_region(HALF):
        with cpu_region(BFLOAT16):
            assert dtype_here() == BFLOAT16
        assert dtype_here() == HALF
    assert dtype_here() == FLOAT and cast_state.current_cast_type() is None


# ------------------------------------------------------------------------------------------------
# Weight cache

def casts_of(work: Callable[[], object]) -> int:
    before = cast_counters()["casts"]
    work()
    return cast_counters()["casts"] - before


def test_a_weight_is_cast_once_in_the_outermost_region() -> None:
    x, weight = torch.ones(2, 2).bfloat16(), nn.Parameter(torch.ones(2, 2))

    def twice_nested() -> None:
        with cpu_region():
            F.linear(x, weight)
            with cpu_region():
                F.linear(x, weight)
            with cpu_region(enabled=False):
                pass
            F.linear(x, weight)

    assert casts_of(twice_nested) == 1
    assert casts_of(twice_nested) == 1  # and anew in the next
    assert cast_counters()["cache_entries"] == 0


def test_cache_enabled_false_casts_at_each_use() -> None:
    x, weight = torch.ones(2, 2).bfloat16(), nn.Parameter(torch.ones(2, 2))
    with cpu_region(cache_enabled=False):
        assert casts_of(lambda: [F.linear(x, weight) for _ in range(3)]) == 3
    torch.set_autocast_cache_enabled(False)
    try:
        with cpu_region():
            assert casts_of(lambda: [F.linear(x, weight) for _ in range(3)]) == 3
    finally:
        torch.set_autocast_cache_enabled(True)


def test_a_weight_written_inside_a_region_is_cast_anew() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with cpu_region():
        F.linear(X, weight)
        with torch.no_grad():
            weight.mul_(3)
        assert F.linear(X, weight).tolist() == [[3, 3], [3, 3]]


def test_evaluation_does_not_take_the_graph_from_training() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with cpu_region():
        with torch.no_grad():
            F.linear(X, weight)
        loss = F.linear(X, weight).sum()
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == FLOAT


# ------------------------------------------------------------------------------------------------
# Code that runs later or elsewhere

@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [None, torch_region(HALF)], ids=["backward outside", "backward in torch's region"])
def test_checkpoints_recompute_in_their_region(reentrant: bool, outside: torch.autocast | None) -> None:
    seen: list[torch.dtype] = []
    linear = nn.Linear(2, 2)

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(dtype_here())
        return linear(x)

    with cpu_region():
        loss = checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant).float().sum()
    if outside is None:
        loss.backward()
    else:
        with outside:
            loss.backward()
    assert seen == [BFLOAT16, BFLOAT16] and linear.weight.grad is not None


def test_backward_may_run_inside_the_region() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def gradients(inside: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with cpu_region():
            loss = model(X).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    for a, b in zip(gradients(True), gradients(False)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Product(torch.autograd.Function):
    """A matrix product that notes the types it meets; its decorators are applied by each test."""
    seen: list[torch.dtype] = []

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        type(ctx)._forward_cls.seen += [a.dtype, dtype_here()]
        return a.mm(b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        type(ctx)._forward_cls.seen += [dtype_here()]
        return gradient.mm(b.t()).to(a.dtype), a.t().mm(gradient).to(b.dtype)


def decorated_product(cast_inputs: torch.dtype | None) -> type[Product]:
    forward = amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)(Product.__dict__["forward"].__func__)
    backward = amp.custom_bwd(device_type="cpu")(Product.__dict__["backward"].__func__)
    return type("Decorated", (Product,), {"forward": staticmethod(forward), "backward": staticmethod(backward), "seen": []})


@pytest.mark.parametrize("region, backward_in, cast_inputs, expected", [
    (None, None, FLOAT, [FLOAT, FLOAT, FLOAT]),
    (cpu_region(), None, None, [BFLOAT16, BFLOAT16, BFLOAT16]),
    (cpu_region(), None, FLOAT, [FLOAT, FLOAT, FLOAT]),
    (cpu_region(), None, HALF, [HALF, FLOAT, FLOAT]),
    (cpu_region(), cpu_region(HALF), FLOAT, [FLOAT, FLOAT, FLOAT]),
    (cpu_region(), torch_region(HALF), None, [BFLOAT16, BFLOAT16, BFLOAT16]),
    (torch_region(), None, None, [BFLOAT16, BFLOAT16, BFLOAT16]),
    (torch_region(), cpu_region(HALF), FLOAT, [FLOAT, FLOAT, FLOAT]),
])
def test_custom_functions_run_backward_as_forward(region: Any, backward_in: Any, cast_inputs: Any, expected: list[torch.dtype]) -> None:
    function = decorated_product(cast_inputs)
    x = X.clone().requires_grad_()

    def forward() -> torch.Tensor:
        a = x if region is None else x.to(BFLOAT16)
        return function.apply(a, a)

    if region is None:
        output = forward()
    else:
        with region:
            output = forward()
    if backward_in is None:
        output.float().sum().backward()
    else:
        with backward_in:
            output.float().sum().backward()
    assert function.seen == expected
    torch.testing.assert_close(x.grad, torch.full((2, 2), 2.0))


def test_custom_forward_casts_what_torchs_does() -> None:
    arguments = (X, X.double(), torch.arange(2), [X, (X,)], {"x": X}, "x", None)

    def types(decorator: Callable[..., Any], region: Callable[[], Any]) -> Any:
        @decorator(device_type="cpu", cast_inputs=HALF)
        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            a, b, c, (d, (e,)), f, *rest = args
            return [t.dtype for t in (a, b, c, d, e, f["x"], kwargs["y"])] + rest

        with region():
            return forward(type("Context", (), {})(), *arguments, y=X)

    assert types(amp.custom_fwd, cpu_region) == types(torch.amp.custom_fwd, torch_region)


def test_no_warnings_on_the_common_path() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cpu_region():
            F.linear(X, nn.Parameter(X.clone())).sum().backward()
