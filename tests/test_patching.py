"""Install, uninstall, what a patched name still is, early-bound names, users' own functions."""
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp import _C
from apex_amp.amp import cast_lists, cast_state, patching
from cast_fixtures import casts

HALF, FLOAT = torch.float16, torch.float32
torch.compile(torch.neg, backend="eager")(torch.ones(1))  # the first compilation replaces names of torch itself
ORIGINALS = {"mm": torch.mm, "softmax": torch.softmax, "linear": F.linear, "matmul": torch.Tensor.matmul}


def cast_to_half() -> None:
    cast_state.set_cast_devices({"cpu"})
    cast_state.set_default_cast_type(HALF)


def torch_names() -> dict[tuple[str, str], int]:
    owners = [torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch._VF, torch.jit,
              torch.nn.modules.rnn, torch.utils.checkpoint, torch.utils.data._utils.worker,
              torch.autograd.function.BackwardCFunction, torch.cuda.CUDAGraph, torch.jit._script]
    return {(owner.__name__, name): id(value) for owner in owners for name, value in vars(owner).items()}


def test_uninstall_restores_every_name_and_installing_twice_is_installing_once() -> None:
    before, callbacks = torch_names(), list(gc.callbacks)
    patching.install()
    installed = torch_names()
    patching.install()
    assert torch_names() == installed and patching.is_installed()
    assert sum(before.get(key) != value for key, value in installed.items()) > 500
    patching.uninstall()
    patching.uninstall()
    assert torch_names() == before and gc.callbacks == callbacks and not patching.is_installed()
    assert "__add__" not in vars(torch.Tensor) and (torch.ones(2) + torch.ones(2).half()).dtype == FLOAT


def test_installed_without_a_cast_type_is_plain_torch() -> None:
    patching.install()
    try:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT
        assert torch.exp(torch.ones(2).half()).dtype == HALF
    finally:
        patching.uninstall()


def test_a_function_held_after_uninstall_acts_as_the_original(casts: None) -> None:
    held, method = torch.mm, torch.Tensor.matmul
    patching.uninstall()
    assert held(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT
    assert method(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT
    patching.install()
    assert torch.mm is held  # one object per name, for good
    cast_state.set_default_cast_type(HALF)
    assert held(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF


def test_somebody_elses_patch_stays(casts: None) -> None:
    ours = torch.exp

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return ours(x)

    torch.exp = theirs
    try:
        patching.uninstall()
        assert torch.exp is theirs and torch.exp(torch.ones(1).half()).dtype == HALF
    finally:
        torch.exp = ours.__wrapped__


def test_a_patched_name_keeps_its_identity(casts: None) -> None:
    for function, original in ((torch.mm, ORIGINALS["mm"]), (F.linear, ORIGINALS["linear"]),
                               (torch.Tensor.matmul, ORIGINALS["matmul"])):
        assert function.__wrapped__ is original and function.__name__ == original.__name__
        assert function.__qualname__ == original.__qualname__ and function.__doc__ == original.__doc__
        assert function == original and original == function and hash(function) == hash(original)
        assert {original: 1}[function] == 1 and function != torch.exp
        assert callable(function) and original.__name__ in repr(function)
    assert torch.mm.__module__ == "torch" or torch.mm.__module__ == ORIGINALS["mm"].__module__
    assert list(inspect.signature(F.cross_entropy).parameters)[:2] == ["input", "target"]
    assert torch.conv1d is not F.conv1d and torch.conv1d == F.conv1d
    assert torch.overrides.resolve_name(torch.exp) == "torch.exp"


def test_binding_is_the_originals(casts: None) -> None:
    class Holder:
        builtin = torch.exp
        function = F.cross_entropy
        method = torch.Tensor.exp

    x = torch.zeros(2).half()
    assert Holder().builtin(x).dtype == FLOAT  # builtins do not bind
    assert inspect.ismethod(Holder().function)
    assert x.exp().dtype == FLOAT and x.exp.__self__ is x


def test_patched_names_pickle_without_this_package(casts: None) -> None:
    functions = [torch.mm, F.linear, F.interpolate, torch.Tensor.matmul, torch.linalg.norm, torch.Tensor.__add__]
    assert pickle.loads(pickle.dumps(functions)) == functions
    assert all(copy.deepcopy(function) is function and copy.copy(function) is function for function in functions)
    code = ("import pickle, sys, torch; f = pickle.load(sys.stdin.buffer); "
            "assert f[0] is torch.mm and f[2] is torch.nn.functional.interpolate and 'apex_amp' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(functions), check=True)

    @patching.half_function
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(local)
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    with pytest.raises(TypeError, match="no module holds it"):
        pickle.dumps(decorated.__closure__[0].cell_contents)  # the CastFunction inside


@pytest.fixture
def user_module() -> Iterator[types.ModuleType]:
    """A module that bound torch's names before amp came."""
    module = types.ModuleType("user_module")
    sys.modules["user_module"] = module
    exec("import torch\nfrom torch import mm\nfrom torch.nn.functional import linear, softmax\n"
         "from torch.jit import script\n"
         "class Layer(torch.nn.Module):\n"
         "    act = torch.tan\n"
         "    def __init__(self):\n        super().__init__()\n        self.up = torch.nn.functional.interpolate\n"
         "layer = Layer()\n", module.__dict__)
    yield module
    del sys.modules["user_module"]


def test_early_bound_names_are_rebound_and_put_back(user_module: Any) -> None:
    before = (user_module.mm, user_module.linear, user_module.Layer.act, user_module.layer.up)
    patching.install()
    try:
        assert user_module.mm is torch.mm and user_module.Layer.act is torch.tan
        assert user_module.layer.up is F.interpolate and user_module.linear == F.linear
        assert isinstance(user_module.linear, _C.CastFunction)
        cast_to_half()
        assert user_module.layer.act(torch.ones(1).half()).dtype == FLOAT
        pickle.dumps(user_module.layer.up)
    finally:
        patching.uninstall()
    after = (user_module.mm, user_module.linear, user_module.Layer.act, user_module.layer.up)
    assert all(a is b for a, b in zip(before, after))


def test_rebinding_reads_no_attribute(user_module: Any) -> None:
    class Lazy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read")

    user_module.lazy = Lazy()
    patching.install()
    patching.uninstall()


def test_registered_functions(casts: None) -> None:
    library = types.ModuleType("library")
    library.boxes = lambda a, b=None, k=None: (a, b, k)  # type: ignore[attr-defined]
    library.mix = lambda *tensors: tensors  # type: ignore[attr-defined]
    library.fast = library.slow = lambda items, w=None: (items, w)  # type: ignore[attr-defined]
    originals = dict(vars(library))
    patching.register_float_function(library, "boxes")
    patching.register_promote_function(library, "mix")
    patching.register_half_function(library, "fast")
    patching.register_bfloat16_function(library, "slow")
    half, full, integer = torch.ones(1).half(), torch.ones(1), torch.tensor([1])
    try:
        a, b, k = library.boxes(half, b=half, k=integer)
        assert a.dtype == b.dtype == FLOAT and k is integer
        assert {t.dtype for t in library.mix(half, full)} == {FLOAT}
        items, w = library.fast([full, half, [full]], w=full)
        assert [items[0].dtype, items[1].dtype, items[2][0].dtype, w.dtype] == [HALF] * 4
        assert library.slow((full,))[0][0].dtype == torch.bfloat16
        with cast_state.disable_casts():
            assert library.boxes(half)[0] is half
        assert cast_state.current_cast_type() == HALF  # registering left the casts on
        patching.uninstall()
        assert {name: vars(library)[name] for name in originals} == originals
        assert not isinstance(library.boxes, _C.CastMethod)
    finally:
        for key in [key for key in patching._registered if key[0] is library]:
            del patching._registered[key]
    with pytest.raises(ValueError, match="No function named nothing in module"):
        patching.register_float_function(library, "nothing")


def test_a_registered_policy_wins_over_the_lists(casts: None) -> None:
    try:
        patching.register_float_function(torch, "mm")
        assert torch.mm(torch.ones(2, 2).half(), torch.ones(2, 2)).dtype == FLOAT
    finally:
        patching.uninstall()
        del patching._registered[torch, "mm"]


def test_lists_are_read_when_patches_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_lists, "FP32", [name for name in cast_lists.FP32 if name != "softmax"])
    monkeypatch.setattr(cast_lists, "LOW_PRECISION", [*cast_lists.LOW_PRECISION, "softmax"])
    patching.install()
    try:
        cast_to_half()
        assert F.softmax(torch.ones(2), -1).dtype == HALF
    finally:
        patching.uninstall()


@patching.half_function
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x


class _Doubling(torch.autograd.Function):
    @staticmethod
    @patching.float_function
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == FLOAT
        return x * 2

    @staticmethod
    @patching.float_function
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Module(nn.Module):
    @patching.float_function
    def forward(self, x: torch.Tensor) -> torch.dtype:
        """Docs."""
        return x.dtype

    @patching.float_function
    @staticmethod
    def static(x: torch.Tensor) -> torch.dtype:
        return x.dtype

    @patching.float_function
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.dtype:
        assert cls is _Module
        return x.dtype


def test_decorators_on_methods_and_custom_functions(casts: None) -> None:
    half = torch.ones(1).half().requires_grad_()
    module = _Module()
    assert module(half) == FLOAT and module.static(half) == FLOAT and module.of_class(half) == FLOAT
    assert module.forward.__doc__ == "Docs." and list(inspect.signature(module.forward).parameters) == ["x"]
    _Doubling.apply(half).sum().backward()
    assert half.grad is not None and half.grad.dtype == HALF and half.grad == 2
    patching.uninstall()
    assert module(half) == HALF


def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) * torch.softmax(y.matmul(y), -1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_sees_plain_torch(casts: None) -> None:
    x = torch.ones(2, 2)
    assert torch.allclose(torch.jit.script(gate)(x, x), torch.e * torch.full((2, 2), 0.5))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))
    assert scripted(x).dtype == FLOAT
    assert torch.mm(x, x).dtype == HALF  # patched again
    with pytest.raises(Exception):
        torch.jit.script(lambda x: open(x))
    assert torch.mm(x, x).dtype == HALF


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_records_the_casts(casts: None) -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), (torch.ones(1, 2),))
    assert traced(torch.ones(1, 2)).dtype == FLOAT
    assert "aten::to" in str(traced.inlined_graph)


def test_symbolic_tracing_and_export(casts: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    graph = torch.fx.symbolic_trace(model)
    assert graph(torch.ones(1, 2)).dtype == FLOAT
    for strict in (False, True):
        program = torch.export.export(model, (torch.ones(1, 2),), strict=strict)
        patched = program.module()(torch.ones(1, 2))
        with cast_state.disable_casts():
            assert torch.equal(program.module()(torch.ones(1, 2)), patched)
        half_nodes = [node for node in program.graph.nodes
                      if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dtype == HALF]
        assert half_nodes


def test_torch_function_modes_see_the_original(casts: None) -> None:
    seen: list[Any] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((function, args[0].dtype))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    with Watch():
        torch.mm(x, x)
    assert seen[-1][0] is ORIGINALS["mm"] and seen[-1][1] == HALF


def test_functions_release_what_they_hold(casts: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    wrapped: Any = patching.half_function(function)
    function.cycle = wrapped  # type: ignore[attr-defined]
    argument = torch.ones(3)
    result = wrapped(argument)
    watched = [weakref.ref(value) for value in (function, wrapped, argument, result)]
    del function, wrapped, argument, result
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_calls_from_many_threads_while_patches_come_and_go() -> None:
    stop, errors = threading.Event(), []
    x = torch.ones(4, 4)

    def work() -> None:
        while not stop.is_set():
            try:
                assert torch.softmax(x @ x + x, -1).shape == (4, 4)
            except Exception as error:  # noqa: BLE001 (reported below)
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        patching.install()
        cast_state.set_default_cast_type(HALF)
        patching.uninstall()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_importing_and_installing_stays_light() -> None:
    code = """
import sys, torch
before = (torch.mm, torch.Tensor.matmul, len(vars(torch)))
from apex_amp.amp import patching, cast_state
assert before == (torch.mm, torch.Tensor.matmul, len(vars(torch))) and type(torch.mm) is type(len)
patching.install()
assert 'torch._dynamo' not in sys.modules
patching.uninstall()
import torch._dynamo
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "", result.stderr
