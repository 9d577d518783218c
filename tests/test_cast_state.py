"""Where casts are on: scopes, threads, backward, recompute, data workers; and the report."""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_amp import amp
from apex_amp.amp import cast_state, patching
from apex_amp.amp.cast_report import cast_report
from cast_fixtures import casts

pytestmark = pytest.mark.usefixtures(casts.__name__)

HALF, FLOAT = torch.float16, torch.float32
X = torch.eye(2)


def dtype_here() -> torch.dtype:
    return (X @ X).dtype


def test_scopes_nest_and_survive_exceptions() -> None:
    assert dtype_here() == HALF and cast_state.current_cast_type() == HALF
    with cast_state.cast_scope(torch.bfloat16):
        assert dtype_here() == torch.bfloat16
        with pytest.raises(ZeroDivisionError), cast_state.disable_casts():
            assert dtype_here() == FLOAT and cast_state.current_cast_type() is None
            with cast_state.disable_casts():
                assert dtype_here() == FLOAT
            assert dtype_here() == FLOAT
            raise ZeroDivisionError
        assert dtype_here() == torch.bfloat16
    assert dtype_here() == HALF


def test_the_innermost_forward_decides_but_never_lifts_an_explicit_off() -> None:
    with cast_state.cast_scope(None, forward=True):  # an O0 model's forward
        assert dtype_here() == FLOAT
        with cast_state.cast_scope(HALF, forward=True):  # an O1 model inside it
            assert dtype_here() == HALF
        assert dtype_here() == FLOAT
    with cast_state.disable_casts(), cast_state.cast_scope(HALF, forward=True):
        assert dtype_here() == FLOAT
        with cast_state.cast_scope(HALF):  # explicit too, and further in
            assert dtype_here() == HALF


def test_bad_cast_types_are_refused() -> None:
    for bad in (torch.float32, torch.int8, "float16", 1):
        with pytest.raises(ValueError, match="float16, torch.bfloat16 or None, got"):
            cast_state.cast_scope(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="float16, torch.bfloat16 or None, got"):
            cast_state.set_default_cast_type(bad)  # type: ignore[arg-type]


def test_a_scope_object_serves_one_with_statement_at_a_time() -> None:
    scope = cast_state.disable_casts()
    with scope, pytest.raises(RuntimeError, match="entered already"):
        with scope:
            pass
    with scope:
        assert dtype_here() == FLOAT
    assert dtype_here() == HALF


def test_interleaved_generators_leave_the_state_as_it_was() -> None:
    def types(cast_type: torch.dtype | None) -> Iterator[torch.dtype]:
        with cast_state.cast_scope(cast_type):
            yield dtype_here()
            yield dtype_here()

    first, second, third = types(torch.bfloat16), types(None), types(torch.bfloat16)
    assert [next(first), next(second), next(third)] == [torch.bfloat16, FLOAT, torch.bfloat16]
    second.close()
    assert dtype_here() == torch.bfloat16
    first.close()
    assert dtype_here() == torch.bfloat16  # the third's
    third.close()
    assert dtype_here() == HALF


def test_a_scope_is_left_in_the_thread_that_entered_it() -> None:
    scope = cast_state.disable_casts()
    scope.__enter__()
    refused: list[BaseException] = []

    def leave() -> None:
        try:
            scope.__exit__(None, None, None)
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(refused) == 1 and dtype_here() == FLOAT
    scope.__exit__(None, None, None)
    assert dtype_here() == HALF
    with pytest.raises(RuntimeError, match="not entered"):
        scope.__exit__(None, None, None)


def test_a_decorated_generator_is_in_its_scope_only_while_it_runs() -> None:
    @cast_state.disable_casts()
    def types() -> Iterator[torch.dtype]:
        yield dtype_here()
        yield dtype_here()

    generator = types()
    assert [next(generator), dtype_here(), next(generator), dtype_here()] == [FLOAT, HALF, FLOAT, HALF]


def test_tensors_saved_through_hooks_keep_their_types() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(2, 2, dtype=HALF, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():  # .cpu() is an fp32 function
        loss = layer(x).float().sum()
    loss.backward()
    assert x.grad is not None and layer.weight.grad is not None


def test_the_default_holds_in_every_thread_and_scopes_in_their_own() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def sleeper() -> None:
        with cast_state.disable_casts():
            inside.set()
            leave.wait(10)
            seen.append(dtype_here())
        seen.append(dtype_here())

    thread = threading.Thread(target=sleeper)
    thread.start()
    inside.wait(10)
    assert dtype_here() == HALF
    leave.set()
    thread.join()
    assert seen == [FLOAT, HALF]


class _Product(torch.autograd.Function):
    seen: list[torch.dtype] = []

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        _Product.seen.append(dtype_here())
        return gradient


def test_the_backward_of_a_custom_function_casts_as_its_forward_did() -> None:
    _Product.seen.clear()
    x = torch.ones(2, requires_grad=True)
    with cast_state.disable_casts():
        off = _Product.apply(x)
    on = _Product.apply(x)
    with cast_state.disable_casts():
        on.sum().backward()
    off.sum().backward()
    assert _Product.seen == [HALF, FLOAT]


class _TorchDecorated(torch.autograd.Function):
    """Decorated by torch before any cast came."""
    seen: list[torch.dtype] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _TorchDecorated.seen += [x.dtype, dtype_here()]
        return x * 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _TorchDecorated.seen.append(dtype_here())
        return gradient


class _TorchDecoratedInPlace(_TorchDecorated):
    """As torch's documentation does it without `cast_inputs`: forward and backward in the surrounding state."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1


def test_functions_decorated_by_torch_see_these_casts() -> None:
    x = torch.ones(2, dtype=HALF, requires_grad=True)

    def seen(function: Any) -> list[torch.dtype]:
        _TorchDecorated.seen = []
        function.apply(x).sum().backward()
        return _TorchDecorated.seen

    assert seen(_TorchDecorated) == [FLOAT, FLOAT, FLOAT]
    assert seen(_TorchDecoratedInPlace) == [HALF]
    with cast_state.disable_casts():
        assert seen(_TorchDecorated) == [HALF, FLOAT, FLOAT]
    assert torch.amp.custom_fwd is amp.custom_fwd  # for those that are decorated from now on
    begun_here = _TorchDecorated.apply(x)
    patching.uninstall()
    begun_outside = _TorchDecorated.apply(x)
    begun_here.sum().backward()
    assert torch.amp.custom_fwd is not amp.custom_fwd
    assert seen(_TorchDecorated) == [HALF, FLOAT, FLOAT]
    patching.install()
    begun_outside.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_casts_as_the_forward_did(reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    seen: list[torch.dtype] = []
    block[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))

    def gradients(saving: bool) -> list[torch.Tensor]:
        cast_state.clear_weight_cache()
        block.zero_grad()
        with cast_state.cast_scope(torch.bfloat16, forward=True):
            h = block(x)
            h = checkpoint(block, h, use_reentrant=reentrant) if saving else block(h)
        h.float().pow(2).sum().backward()
        return [p.grad.clone() for p in block.parameters()]

    expected = gradients(saving=False)
    for saved, value in zip(gradients(saving=True), expected):
        torch.testing.assert_close(saved, value, rtol=2e-2, atol=1e-3)
    assert set(seen) == {torch.bfloat16} and len(seen) == 5


class _Worker(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return dtype_here() == FLOAT and cast_state.current_cast_type() is None


def test_data_workers_run_plain_torch() -> None:
    loader = torch.utils.data.DataLoader(_Worker(), num_workers=1, multiprocessing_context="fork")
    assert all(bool(plain) for plain in loader)
    assert dtype_here() == HALF


def kept_as_default(x: torch.Tensor, activation: object = torch.exp) -> None:
    """Holds the original of a patched function where patching does not look."""


PARTIAL = functools.partial(torch.softmax, dim=-1)
TABLE = {"tan": torch.tan}


class _Reported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(self.fc(x))).softmax(-1)


def test_the_report_names_functions_modules_types_and_casts() -> None:
    report = cast_report(_Reported(), X)
    rows = [(row.module, row.function.rpartition(".")[2], row.policy, row.outputs, row.casts, row.cache_hits)
            for row in report.rows]
    assert rows == [("fc", "linear", "low_precision", ("float16",), 3, 0),
                    ("fc", "linear", "low_precision", ("float16",), 0, 2),
                    ("norm", "layer_norm", "fp32", ("float32",), 1, 0),
                    ("", "softmax", "fp32_by_dtype", ("float32",), 0, 0)]
    assert report.rows[1].inputs == ("float16", "float32", "float32")
    assert "low_precision" in str(report) and str(report).splitlines()[0].startswith("module")
    places = "\n".join(report.unpatched)
    assert "kept_as_default" in places and "functools.partial" in places and "test_cast_state.TABLE" in places


def test_a_failing_forward_ends_the_report(request: pytest.FixtureRequest) -> None:
    with pytest.raises(RuntimeError):
        cast_report(nn.Linear(2, 2), torch.ones(3, 5))
    seen: list[object] = []
    F.linear(X, X)
    assert seen == [] and not torch.nn.modules.module._global_forward_pre_hooks


@pytest.fixture(autouse=True)
def state_is_left_as_it_was() -> Iterator[None]:
    yield
    assert cast_state.current_cast_type() in (HALF, None)


def test_disable_casts_is_a_decorator_too():
    @amp.disable_casts()
    def product(x):
        """Of x with itself."""
        return torch.mm(x, x)

    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    x = torch.ones(2, 2)
    assert product.__doc__ == "Of x with itself."
    assert product(x).dtype is product(x).dtype is torch.float32 and torch.mm(x, x).dtype is torch.float16
    assert model(x).dtype is torch.float16


@pytest.mark.parametrize("hooks", [
    torch.autograd.graph.save_on_cpu,
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.cpu(), lambda packed: packed)])
def test_saved_tensor_hooks_give_back_what_was_saved(hooks: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with hooks():
        loss = model(x).sum()
    loss.backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected))
