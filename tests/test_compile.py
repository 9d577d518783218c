"""torch.compile over casts: right types with fullgraph, recompiles on a toggle, trains. Pins Dynamo's internals."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp.amp import cast_state, patching
from cast_fixtures import casts

pytestmark = pytest.mark.usefixtures(casts.__name__)

HALF, FLOAT = torch.float16, torch.float32
torch.compile(torch.neg, backend="eager")(torch.ones(1))  # the first compilation replaces names of torch itself
WEIGHT = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scoped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with cast_state.disable_casts():
        inside = x @ x, torch.mm(x, x)
        with cast_state.cast_scope(HALF, forward=True):
            inside += (x @ x, torch.mm(x, x))
    with cast_state.cast_scope(torch.bfloat16, forward=True):
        return (*inside, torch.mm(x, x), x.matmul(x), x @ x)


def assigned(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(4, 4)
    result[torch.tensor([0, 1])] = torch.mm(x, x)[:2]
    return result


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "function": lambda x: torch.mm(x, x),
    "linear": lambda x: F.linear(x, WEIGHT),
    "method": lambda x: x.matmul(x),
    "operator": lambda x: x @ x,
    "class method": lambda x: torch.Tensor.matmul(x, x),
    "softmax": lambda x: F.softmax(F.linear(x, WEIGHT), -1),
    "layer_norm": lambda x: F.layer_norm(F.linear(x, WEIGHT), (4,)),
    "cat": lambda x: torch.cat([F.linear(x, WEIGHT), x]),
    "mixed add": lambda x: torch.add(F.linear(x, WEIGHT), x) + F.linear(x, WEIGHT) * torch.ones(()),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, WEIGHT),
    "masked_fill": lambda x: torch.masked_fill(torch.mm(x, x), x > 0, -1e9),
    "in place": lambda x: torch.mm(x, x).add_(x).masked_fill_(x > 0, -1e9),
    "item assignment": assigned,
    "double": lambda x: torch.mm(x.double(), x.double()),
    "out": lambda x: torch.exp(torch.mm(x, x), out=torch.empty(4, 4)),
    "loss": lambda x: F.cross_entropy(F.linear(x, WEIGHT), torch.zeros(4, dtype=torch.long)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], torch.mm(x, x)[None], x[None]),
    "scopes": scoped,
}


def types(result: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in result] if isinstance(result, tuple) else [result.dtype]


def values(result: Any) -> list[torch.Tensor]:
    return [tensor.float() for tensor in (result if isinstance(result, tuple) else (result,))]


def check_follows_eager(call: Callable[[torch.Tensor], Any], backend: str) -> None:
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for cast_type in (HALF, None, torch.bfloat16, HALF):
        cast_state.set_default_cast_type(cast_type)
        expected, result = call(X), compiled(X)
        assert types(result) == types(expected), cast_type
        for a, b in zip(values(result), values(expected)):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    with cast_state.disable_casts():
        assert types(compiled(X)) == types(call(X))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_follows_the_cast_state(name: str, backend: str) -> None:
    check_follows_eager(CALLS[name], backend)


@pytest.mark.parametrize("name", ["method", "softmax", "scopes"])
def test_inductor_and_its_caches_follow_the_cast_state(name: str) -> None:
    check_follows_eager(CALLS[name], "inductor")


def test_patches_that_come_and_go_drop_compiled_code() -> None:
    compiled = torch.compile(CALLS["operator"], backend="aot_eager", fullgraph=True)
    assert compiled(X).dtype == HALF
    patching.uninstall()
    assert compiled(X).dtype == FLOAT
    patching.install()
    cast_state.set_default_cast_type(HALF)
    assert compiled(X).dtype == HALF


def test_a_toggle_recompiles_once_per_state() -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(CALLS["linear"], backend="eager", fullgraph=True)
    for cast_type in (HALF, None, HALF, None, HALF):
        cast_state.set_default_cast_type(cast_type)
        compiled(X)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_uses_the_updated_weights(backend: str) -> None:
    def losses(compile: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = torch.compile(model, backend=backend, fullgraph=True) if compile else model
        history = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(X).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    compiled, eager = losses(compile=True), losses(compile=False)
    assert compiled == pytest.approx(eager, rel=2e-2)


def test_user_functions_and_attributes_of_modules() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.exp

        @patching.float_function
        def project(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.act(x), scale(x, factor=2.0), self.project(x)

    @patching.half_function
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    layer = Layer()
    for x in (X, X.half()):
        assert types(torch.compile(layer, backend="aot_eager", fullgraph=True)(x)) == types(layer(x))


def test_a_scope_in_compiled_code_leaves_eager_code_alone() -> None:
    torch.compile(scoped, backend="eager", fullgraph=True)(X)
    assert cast_state.current_cast_type() == HALF and (X @ X).dtype == HALF

    def failing(x: torch.Tensor) -> torch.Tensor:
        with cast_state.disable_casts():
            return torch.mm(x, x[:3])

    with pytest.raises(Exception):
        torch.compile(failing, backend="eager", fullgraph=True)(X)
    assert cast_state.current_cast_type() == HALF


def test_regions_of_one_device_type_leave_those_of_others() -> None:
    cast_state.set_cast_devices({"cpu", "meta"})
    y = X.to("meta")

    def products() -> tuple[torch.Tensor, ...]:
        return torch.mm(X, X), X @ X, torch.mm(y, y), y @ y

    def nested(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with cast_state.cast_region(torch.bfloat16, "meta", True):
            results = products()
            with cast_state.cast_region(None, "cpu", True):
                results += products()
            with cast_state.disable_casts(), cast_state.cast_region(HALF, "meta", True):
                results += products()
            return (*results, *products(), x + x)

    for cast_type in (HALF, None):
        cast_state.set_default_cast_type(cast_type)
        expected = types(nested(X))
        assert expected[:8] == [cast_type or FLOAT] * 2 + [torch.bfloat16] * 2 + [FLOAT] * 2 + [torch.bfloat16] * 2
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            assert types(torch.compile(nested, backend=backend, fullgraph=True)(X)) == expected
