"""What initialize does to a model.

Its dtypes, what goes in and out of forward, and that it stays its author's class.
"""
from __future__ import annotations

import abc
import collections
import copy
import dataclasses
import gc
import inspect
import types
import weakref
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from apex_amp import amp
from apex_amp.amp.model_cast import cast_floating

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CAST_LEVELS = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def initialize(model: nn.Module, opt_level: str, **keywords: Any) -> nn.Module:
    return amp.initialize(model, opt_level=opt_level, verbosity=0, **keywords)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Net(nn.Module):
    """One of each kind of parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.plain_bn = nn.BatchNorm2d(4, affine=False)
        self.norm = nn.LayerNorm(4)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.offsets = nn.ParameterDict({"first": nn.Parameter(torch.zeros(4))})
        self.register_buffer("mean", torch.full((4,), 0.25))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("phase", torch.tensor(1j))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain_bn(self.bn(self.conv(x))).mean((2, 3))
        x = self.norm(x * self.gains[0] + self.offsets["first"] - self.mean * self.scratch)
        return self.heads[1](self.heads[0](x))


class Echo(nn.Module):
    """Returns what it got, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return args[0] if args else kwargs


# --- dtypes -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_of_parameters_and_buffers(level):
    model = initialize(Net(), level)
    low = CAST_LEVELS.get(level, torch.float32)
    fp32 = {"bn", "plain_bn"} if level in ("O2", "O5") else set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        expected = {"count": torch.int64, "third": torch.float64, "phase": torch.complex64}.get(name, low)
        if name.split(".")[0] in ("bn", "plain_bn"):
            expected = torch.int64 if name.endswith("num_batches_tracked") else torch.float32 if fp32 else low
        assert tensor.dtype == expected, name
    assert model(torch.randn(2, 1, 5, 5)).dtype == {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_keep_batchnorm_fp32_overrides_the_level(level):
    assert initialize(Net(), level, keep_batchnorm_fp32=True).bn.weight.dtype == torch.float32
    assert initialize(Net(), level, keep_batchnorm_fp32="False").bn.running_mean.dtype == CAST_LEVELS[level]


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("listed", [
    [nn.LayerNorm, "heads.1"], [nn.LayerNorm, "heads"], (nn.ModuleList, "conv", "norm"),
])
def test_keep_fp32_modules_run_in_fp32_between_low_precision_ones(level, listed):
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    model = initialize(model, level, keep_fp32_modules=listed)
    assert model.norm.weight.dtype is torch.float32 or nn.LayerNorm not in listed
    assert model.heads[1].weight.dtype is torch.float32
    seen = []
    model.heads[1].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    x = torch.randn(8, 1, 5, 5)
    torch.testing.assert_close(model(x), reference(x), rtol=0.05, atol=0.05)
    assert seen[0][0] is torch.float32


def test_nested_keep_fp32_modules_cast_only_at_their_outer_edge():
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model = initialize(nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 2)), "O2",
                       keep_fp32_modules=[nn.LayerNorm, "1"])
    seen = []
    for module in block:
        module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model(torch.randn(3, 4))
    assert seen == [torch.float32] * 3 + [torch.float16]


def test_a_parameter_of_an_fp32_and_a_cast_module_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="'0' and '1' share a parameter"):
        initialize(model, "O2", keep_fp32_modules=["1"])
    assert model[0].weight.dtype is torch.float32 and type(model) is nn.Sequential


def test_transformer_fast_path_with_fp32_layernorm():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = layer(x)
        layer = initialize(layer, "O2", keep_fp32_modules=[nn.LayerNorm])
        torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_shared_parameters_and_buffers_stay_shared(level):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    for module in model:
        module.register_buffer("table", torch.ones(2))
    model[1].table = model[0].table
    optimizer = sgd(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    assert model[1].weight is model[0].weight and model[1].table is model[0].table
    assert len(list(amp.master_params(optimizer))) == 1
    with amp.scale_loss(model(torch.arange(5)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    state = model.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert torch.equal(state["0.weight"].to(CAST_LEVELS[level]), model[0].weight)


# --- what goes into and comes out of forward --------------------------------------------------------------------------

Pair = namedtuple("Pair", "ids values")


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    values: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    ids: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class SlotsBatch:
    ids: torch.Tensor
    values: torch.Tensor


class TaggedTuple(tuple):
    """Its constructor takes other arguments than tuple's."""

    def __new__(cls, tag: str, *items: Any):
        made = super().__new__(cls, items)
        made.tag = tag
        return made


class TaggedList(list):
    tag = "kept"


class ModelOutput(OrderedDict):
    """As in transformers: keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class StoreMapping(collections.abc.MutableMapping):
    """Keeps its items in a dict of its own, which a shallow copy would share."""

    def __init__(self, items: dict) -> None:
        self._store = items

    __getitem__ = lambda self, key: self._store[key]  # noqa: E731
    __setitem__ = lambda self, key, value: self._store.__setitem__(key, value)  # noqa: E731
    __delitem__ = lambda self, key: self._store.__delitem__(key)  # noqa: E731
    __iter__ = lambda self: iter(self._store)  # noqa: E731
    __len__ = lambda self: len(self._store)  # noqa: E731


class GraphData:
    """As in torch_geometric: `to` hands its argument to every tensor, in place, and returns the object."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self.store = {"ids": ids, "values": [values]}

    def to(self, *args: Any) -> GraphData:
        self.store["ids"] = self.store["ids"].to(*args)
        self.store["values"][0] = self.store["values"][0].to(*args)
        return self


class TextBatch:
    """As in torchtext: attributes, and a `to` that makes a new object."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self.ids, self.values = ids, values

    def to(self, dtype: torch.dtype) -> TextBatch:
        return TextBatch(self.ids, self.values.to(dtype))


def items_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, GraphData):
        return batch.store["ids"], batch.store["values"][0]
    if isinstance(batch, collections.abc.Mapping):
        return batch["ids"], batch["values"]
    return (batch.ids, batch.values) if hasattr(batch, "ids") else (batch[0], batch[1])


BATCHES = [
    lambda i, v: (i, v), lambda i, v: [i, v], Pair, lambda i, v: {"ids": i, "values": v},
    Batch, FrozenBatch, SlotsBatch,
    lambda i, v: TaggedTuple("kept", i, v), lambda i, v: TaggedList([i, v]), lambda i, v: UserDict(ids=i, values=v),
    lambda i, v: OrderedDict(ids=i, values=v), lambda i, v: ModelOutput(ids=i, values=v),
    lambda i, v: collections.defaultdict(list, ids=i, values=v),
    lambda i, v: types.MappingProxyType({"ids": i, "values": v}), lambda i, v: StoreMapping({"ids": i, "values": v}),
    GraphData, TextBatch,
]


@pytest.mark.parametrize("make", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_keep_their_class_and_the_caller_keeps_his(make, dtype):
    ids, values = torch.arange(3), torch.full((2,), 1 / 3, dtype=dtype)
    batch = make(ids, values)
    model = initialize(Echo(), "O2")
    output = model({"nested": [batch]})["nested"][0]
    (seen,), _ = model.seen
    inner_ids, inner_values = items_of(seen["nested"][0])
    assert type(seen["nested"][0]) is type(batch) is type(output)
    assert inner_ids is ids and inner_values.dtype is torch.float16
    assert items_of(output)[0] is ids and items_of(output)[1].dtype is torch.float32
    assert items_of(batch)[1] is values and values.dtype is dtype
    assert getattr(output, "tag", "kept") == "kept" and getattr(output, "note", "kept") == "kept"
    if isinstance(batch, ModelOutput):
        assert output.values is output["values"]
    if isinstance(batch, collections.defaultdict):
        assert output.default_factory is list


def test_packed_sequences_and_torch_return_types():
    packed = pack_padded_sequence(torch.randn(3, 2, 4), [3, 2])
    cast = cast_floating(packed, torch.float16)
    assert type(cast) is PackedSequence and cast.data.dtype is torch.float16 and cast.batch_sizes.dtype is torch.int64
    result = cast_floating(torch.max(torch.randn(2, 3), 1), torch.float16)
    assert type(result).__name__ == "max"
    assert result.values.dtype is torch.float16 and result.indices.dtype is torch.int64


@pytest.mark.parametrize("value", [
    None, 1, 2.5, "text", b"bytes", {1, 2}, torch.tensor(True), torch.tensor(1j), torch.Size([2]), [torch.tensor(1)],
    range(3), (), {}, object(), torch.float32, nn.Linear(1, 1), Batch, Batch(torch.tensor(1), torch.tensor(2)),
])
def test_what_holds_nothing_floating_passes_as_the_same_object(value):
    assert cast_floating(value, torch.float16) is value


def test_a_to_method_that_fails_or_returns_none_is_a_clear_error():
    class ReturnsNone:
        def to(self, dtype: torch.dtype) -> None:
            pass

    class TakesDevicesOnly:
        def to(self, device: torch.device) -> torch.Tensor:
            return torch.ones(1).to(device=device)

    with pytest.raises(TypeError, match="ReturnsNone.to.* returned None"):
        initialize(Echo(), "O2")(ReturnsNone())
    with pytest.raises(TypeError, match="(?s)TakesDevicesOnly.to.*must take a dtype"):
        initialize(Echo(), "O2")({"batch": TakesDevicesOnly()})


@pytest.mark.parametrize("level", LEVELS)
def test_keyword_arguments_and_cast_model_outputs(level):
    model = initialize(Echo(), level)
    x = torch.randn(2)
    model(x=x, flag=True)
    seen = model.seen[1]
    assert seen["x"].dtype is CAST_LEVELS.get(level, torch.float32) and seen["flag"] is True
    outputs = initialize(Echo(), level, cast_model_outputs=torch.bfloat16)({"x": x, "ids": torch.arange(2)})
    assert outputs["x"].dtype is torch.bfloat16 and outputs["ids"].dtype is torch.int64


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_gradients_flow_through_the_casts(level):
    x = torch.randn(3, 4, requires_grad=True)
    model = initialize(nn.Linear(4, 2), level)
    model(x).sum().backward()
    assert x.grad.dtype is torch.float32
    torch.testing.assert_close(x.grad, model.weight.detach().float().sum(0).expand(3, 4), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_made_another_dtype_takes_inputs_of_that_one(level, dtype):
    model = nn.Linear(3, 2)
    exact, x = copy.deepcopy(model).to(dtype), torch.randn(4, 3)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0,
                                      loss_scale=8.0 if level in ("O1", "O2") else None)
    model.to(dtype)
    torch.testing.assert_close(model(x.to(dtype)).double(), exact(x.to(dtype)).double(), rtol=1e-2, atol=1e-2)
    if next(amp.master_params(optimizer)) is not model.weight:
        assert torch.equal(model.weight, exact.weight)
    if dtype is not torch.float64:
        loss = model(x.to(dtype)).float().square().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert model(x.to(dtype)).float().square().sum() < loss and model.weight.dtype is dtype


# --- it stays its author's class --------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
def test_an_amp_model_looks_like_its_class(level):
    plain = Net()
    model = initialize(Net(), level)
    assert isinstance(model, Net) and type(model).__name__ == "Net" and type(model).__module__ == __name__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(plain.forward)
    assert inspect.signature(type(model)) == inspect.signature(Net)
    assert str(inspect.signature(type("Child", (type(model),), {}))) == "(*args: 'Any', **kwargs: 'Any') -> 'Any'"
    assert repr(model).splitlines()[:3] == repr(plain).splitlines()[:3]
    fresh = type(model)()
    assert type(fresh) is Net and fresh.conv.weight.dtype is torch.float32 and "_amp_cast" not in vars(fresh)


def test_registries_and_metaclasses_do_not_hear_of_the_generated_class():
    registered = []

    class Meta(abc.ABCMeta):
        def __new__(mcs, name: str, bases: tuple, namespace: dict, **keywords: Any):
            registered.append(name)
            return super().__new__(mcs, name, bases, namespace, **keywords)

    class Base(nn.Module, metaclass=Meta):
        def __init_subclass__(cls, *, key: str) -> None:
            registered.append(key)

    class Child(Base, key="child"):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    before = list(registered)
    model = initialize(Child(), "O2")
    assert registered == before
    assert isinstance(model, Child) and isinstance(Child(), Child) and isinstance(Child(), Base)
    assert model(torch.ones(1, dtype=torch.float64)).dtype is torch.float32
    with pytest.raises(TypeError, match="key"):
        type("Other", (Base,), {})


def test_slots_setattr_guards_and_forward_on_the_instance():
    class Guarded(nn.Module):
        __slots__ = ("extra",)

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.extra = 5

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in ("layer", "extra", "training") and not name.startswith("_"):
                raise AttributeError(f"frozen: {name}")
            super().__setattr__(name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Guarded()
    model.__dict__["forward"] = lambda x: 2 * model.layer(x)
    x = torch.randn(4, 3)
    expected = model(x)
    model = initialize(model, "O2")
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    assert model.extra == 5 and model(x).dtype is torch.float32
    amp.shutdown()
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    assert type(model) is Guarded


def test_forward_put_on_the_instance_afterwards_survives_a_copy():
    model = initialize(nn.Linear(3, 2), "O2")
    inner = model.forward
    model.forward = lambda x: inner(x) + 1
    x = torch.randn(2, 3)
    assert torch.equal(copy.deepcopy(model)(x), model(x)) and torch.equal(copy.copy(model)(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_run_once_and_see_the_callers_tensors(level):
    model = nn.Linear(3, 2)
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, output: calls.append(output.dtype))
    model.register_full_backward_hook(lambda module, grad_input, grad_output: calls.append("backward"))
    model = initialize(model, level)
    model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert calls == [torch.float32, {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32), "backward"]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_lazy_modules(level):
    model = initialize(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)), level)
    assert model(torch.randn(5, 3)).shape == (5, 2)
    assert model[0].weight.dtype is CAST_LEVELS.get(level, torch.float32)
    root = initialize(nn.LazyLinear(2), level)
    for _ in range(2):
        assert root(torch.randn(5, 3, dtype=torch.float64 if level != "O1" else torch.float32)).shape == (5, 2)
    assert type(root).__name__ == "Linear" and isinstance(root, nn.Linear)


def test_lazy_parameters_can_have_no_masters():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="lazy module.*run one forward"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert type(model) is nn.Sequential and type(optimizer) is torch.optim.SGD
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_scripted_submodules_train_and_save_fp32(level):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=128.0, verbosity=0)
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, before[name]), name
    with amp.scale_loss(model(torch.randn(8, 3)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(not torch.equal(value, before[name]) for name, value in saved.items())
    for value in model.state_dict().values():
        value.zero_()
    model.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    for parameter, master in zip(model.parameters(), amp.master_params(optimizer)):
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_an_amp_model_can_be_scripted_and_traced(level):
    model = initialize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), level).eval()
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
        weights = model[0].weight.dtype
        output = torch.jit.script(model)(x.to(weights))
        torch.testing.assert_close(output.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_fx_graph_modules():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    x = torch.randn(2, 3)
    expected = traced(x)
    model = initialize(traced, "O2")
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


def test_extra_state_is_kept():
    class WithExtra(nn.Linear):
        extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    model = initialize(nn.Sequential(WithExtra(2, 2)), "O2")
    model[0].extra = 7
    other = nn.Sequential(WithExtra(2, 2))
    other.load_state_dict(model.state_dict())
    assert other[0].extra == 7
    model.load_state_dict({**other.state_dict(), "0._extra_state": 9})
    assert model[0].extra == 9


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_replicas_compute_with_their_own_weights(level):
    model = initialize(nn.Linear(3, 2), level)
    replica = model._replicate_for_data_parallel()
    replica._parameters = {name: torch.zeros_like(parameter) for name, parameter in model._parameters.items()}
    for name, parameter in replica._parameters.items():
        object.__setattr__(replica, name, parameter)
    assert replica(torch.randn(2, 3)).float().abs().sum() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_deleted_models_are_freed_with_their_generated_class(level):
    class Local(nn.Linear):
        pass

    model = Local(3, 2)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.randn(2, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    dead = [weakref.ref(item)
            for item in (model, twin, optimizer, type(model), model.weight, next(amp.master_params(optimizer)))]
    del model, optimizer, twin, scaled_loss, Local
    gc.collect()
    assert [ref() for ref in dead] == [None] * 6


def test_a_copy_goes_on_casting_when_its_original_is_gone():
    model = initialize(nn.Linear(3, 2), "O1")
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert twin(torch.randn(2, 3)).dtype is torch.float16
    amp.shutdown()
    assert type(twin) is nn.Linear


# --- torch.compile ----------------------------------------------------------------------------------------------------

class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, batch: dict[str, Any], scale: torch.Tensor) -> dict[str, Any]:
        values = self.net(batch["values"]) * scale
        return {"pair": Pair(batch["ids"], values), "loss": values.float().square().mean()}


def train_nested(forward: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batch = {"ids": torch.arange(6), "values": torch.randn(6, 4, generator=generator)}
        output = forward(batch, scale=torch.tensor(0.5))
        assert output["pair"].ids.dtype is torch.int64 and batch["values"].dtype is torch.float32
        optimizer.zero_grad()
        with amp.scale_loss(output["loss"], optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def build_nested(level: str, compiled_before: bool = False) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Nested()
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled_before else model
    if compiled_before:  # traced already, as the plain model
        forward({"ids": torch.arange(6), "values": torch.randn(6, 4)}, scale=torch.tensor(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward, optimizer = amp.initialize(forward, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    return forward, model, optimizer


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_it_trains_as_uncompiled(level, backend, fresh_dynamo):
    expected = train_nested(*build_nested(level))
    _, model, optimizer = build_nested(level)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for actual, value in zip(train_nested(compiled, model, optimizer), expected):
        torch.testing.assert_close(actual, value, rtol=1e-2, atol=2e-3)
    saved = copy.deepcopy(compiled.state_dict())
    assert all(name.startswith("_orig_mod.net.") and value.dtype is torch.float32 for name, value in saved.items())
    train_nested(compiled, model, optimizer)
    compiled.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in compiled.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_compiled_already(level, fresh_dynamo):
    expected = train_nested(*build_nested(level))
    compiled, model, optimizer = build_nested(level, compiled_before=True)
    assert type(compiled).__name__ == "OptimizedModule" and compiled._orig_mod is model
    for actual, value in zip(train_nested(compiled, model, optimizer), expected):
        torch.testing.assert_close(actual, value, rtol=1e-2, atol=2e-3)
    amp.sync_masters(compiled)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_writes_into_state_dict_values_reach_a_compiled_forward_by_sync_masters(level, fresh_dynamo):
    _, model, optimizer = build_nested(level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = {"ids": torch.arange(6), "values": torch.randn(6, 4)}
    assert compiled(batch, scale=torch.tensor(0.5))["loss"] > 0
    for value in model.state_dict().values():
        value.zero_()
    amp.sync_masters(compiled)
    assert compiled(batch, scale=torch.tensor(0.5))["loss"] == 0
    assert not any(master.any() for master in amp.master_params(optimizer))
