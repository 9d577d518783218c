"""The registered ops: torch.library's own checks, whole-graph compilation, and tensors that stand for others."""
from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from apex_amp import multi_tensor, multi_tensor_updates, optimizers

ops = torch.ops.apex_amp


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4), (5,), (0,), ())]


def flags():
    return torch.zeros(4)


def counter():
    return torch.zeros(1, dtype=torch.int32)


def counters():
    return [torch.full((), 3.0) for _ in tensors()]


HALF, FLOAT = torch.float16, torch.float32
SAMPLES = [
    (ops.multi_tensor_scale.default, lambda f: (tensors(HALF), tensors(), f, 2.0)),
    (ops.multi_tensor_scale.tensor, lambda f: (tensors(HALF), tensors(), f, torch.tensor(2.0), flags())),
    (ops.multi_tensor_unscale_.default, lambda f: (tensors(), f, 0.5, flags())),
    (ops.multi_tensor_unscale_.tensor, lambda f: (tensors(HALF), f, torch.tensor([0.5]))),
    (ops.multi_tensor_axpby.default, lambda f: (tensors(), tensors(HALF), tensors(HALF), f, 1.0, 2.0, "both", flags())),
    (ops.multi_tensor_axpby.tensor,
     lambda f: (tensors(), tensors(), tensors(), f, torch.tensor(1.0), torch.tensor(2.0), "y")),
    (ops.multi_tensor_check.default, lambda f: (tensors(HALF), f, flags())),
    (ops.multi_tensor_copy.default, lambda f: (tensors(), tensors(HALF))),
    (ops.multi_tensor_l2norm.default, lambda f: (tensors(HALF),)),
    (ops.multi_tensor_l2norm_per_tensor.default, lambda f: (tensors(),)),
    (ops.update_scale_.default, lambda f: (torch.tensor(4.0), counter(), f, 2.0, 0.5, 10, 1.0, 1e4)),
]


def squares():
    return [tensor.square() for tensor in tensors()]


def update_samples(overload):
    """The optimizers' rules in one overload: lr (and LAMB's norm) tensors or numbers, steps tensors or a number."""
    def number(value):
        return torch.tensor(value) if overload.startswith("tensor") else value

    def steps():
        return 4.0 if overload.endswith("number") else counters()

    def state(count):
        return [squares() for _ in range(count)]

    def scaled(f):
        return tensors(HALF), f, torch.tensor([0.5])  # model_params, found_inf, inv_scale

    samples = {
        "adam": lambda f: (tensors(HALF), tensors(), *state(2), steps(), *scaled(f), number(0.125), 0.9, 0.99, 1e-8,
                           0.1, True, True),
        "lamb": lambda f: (tensors(HALF), tensors(), *state(2), steps(), *scaled(f), number(0.125), number(2.0), 0.9,
                           0.99, 1e-6, 0.1, True, True, True, 1.0, False),
        "adagrad": lambda f: (tensors(), tensors(HALF), *state(1), steps(), None, None, None, number(0.125), 0.1,
                              1e-10, 0.1, False),
        "sgd": lambda f: (tensors(HALF), tensors(), *state(1), *scaled(f), number(0.125), 0.9, 0.0, 0.1, True, False,
                          False),
        "novograd": lambda f: (tensors(HALF), tensors(), *state(1), counters(), counters(), *scaled(f), number(0.125),
                               torch.ones(4), 0.9, 0.99, 1e-8, 0.1, True, True, False, True, False),
    }
    packets = [(getattr(ops, f"multi_tensor_{rule}"), sample) for rule, sample in samples.items()]
    return [(getattr(packet, overload), sample) for packet, sample in packets if overload in packet.overloads()]


for each in ("tensor", "default", "tensor_number", "number"):
    SAMPLES += update_samples(each)


@pytest.mark.parametrize("op,sample", SAMPLES, ids=[str(op) for op, _ in SAMPLES])
def test_opcheck(op, sample):
    opcheck(op, sample(torch.zeros(1)))


def test_every_registered_op_has_a_sample():
    registered = {(schema.name, schema.overload_name) for schema in torch._C._jit_get_all_schemas()
                  if schema.name.startswith(("apex_amp::multi_tensor", "apex_amp::update_scale"))}
    assert registered == {(op._schema.name, op._schema.overload_name) for op, _ in SAMPLES}



def every_function(grads, masters, found_inf, per_tensor, inv_scale, scale, tracker):
    multi_tensor.multi_tensor_scale(grads, masters, found_inf, inv_scale, per_tensor)
    multi_tensor.multi_tensor_unscale_(masters, found_inf, 0.5)
    multi_tensor.multi_tensor_axpby(grads, masters, masters, found_inf, 1.5, inv_scale, check="both")
    total, norms = multi_tensor.multi_tensor_l2norm(masters, per_tensor=True)
    multi_tensor.multi_tensor_copy(masters, grads)
    multi_tensor.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2, 1.0, 2.0**24)
    return total, norms, multi_tensor.multi_tensor_l2norm(grads)


def arguments(poisoned):
    grads = tensors(HALF)
    if poisoned:
        grads[1][-1] = float("inf")
    return grads, tensors(), torch.zeros(1), flags(), torch.tensor(2.0), torch.tensor(8.0), counter()


def flat(*values):
    return [leaf for value in values
            for leaf in (flat(*value) if isinstance(value, (list, tuple)) else [value])]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_whole_with_the_bits_of_eager(backend):
    compiled = torch.compile(every_function, fullgraph=True, backend=backend)
    for poisoned in (False, True):
        eager_args, compiled_args = arguments(poisoned), arguments(poisoned)
        expected = flat(every_function(*eager_args), *eager_args)
        got = flat(compiled(*compiled_args), *compiled_args)
        for ours, eager in zip(got, expected):
            assert torch.equal(ours.nan_to_num(7.0), eager.nan_to_num(7.0))
        assert compiled_args[2].item() == poisoned


def every_update(grads, params, states, steps, model_params, found_inf, lr):
    first, second, momentum, total, norms = states
    multi_tensor_updates.multi_tensor_adam(grads, params, first, second, steps, model_params, found_inf, None, lr, 0.9,
                                           0.99, 1e-8, 0.1, True, True)
    norm, per_tensor = multi_tensor.multi_tensor_l2norm(grads, per_tensor=True)
    multi_tensor_updates.multi_tensor_lamb(grads, params, first, second, steps, None, found_inf, None, 0.125, norm,
                                           0.9, 0.99, 1e-6, 0.1, True, True, True, 1.0, False)
    multi_tensor_updates.multi_tensor_sgd(grads, params, momentum, model_params, found_inf, None, lr, 0.9, 0.0, 0.1,
                                          False, True, False)
    multi_tensor_updates.multi_tensor_sgd(grads, params, None, None, None, None, lr, 0.0, 0.0, 0.1, False, False, False)
    multi_tensor_updates.multi_tensor_adagrad(grads, params, total, 7, None, None, None, lr, 0.1, 1e-10, 0.1, False)
    multi_tensor_updates.multi_tensor_novograd(grads, params, first, norms, steps, None, found_inf, None, lr,
                                               per_tensor, 0.9, 0.99, 1e-8, 0.1, True, True, False, True, False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_update_rules_compiled_whole_have_the_bits_of_eager(backend, overflow):
    def arguments():
        states = [tensors(), squares(), tensors(), squares(), counters()]
        return tensors(HALF), tensors(), states, counters(), tensors(HALF), torch.full((1,), overflow), 0.125

    expected, got = arguments(), arguments()
    every_update(*expected)
    torch.compile(every_update, fullgraph=True, backend=backend)(*got)
    assert all(map(torch.equal, flat(*got[1:3]), flat(*expected[1:3])))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_a_step_compiled_whole_is_the_eager_step(name):
    def make():
        params = [tensor.requires_grad_() for tensor in tensors()]
        return params, getattr(optimizers, name)(params, lr=0.125, weight_decay=0.1)

    torch._dynamo.reset()  # all names share one lambda, which Dynamo compiles eight times only
    (params, optimizer), (twins, eager) = make(), make()
    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        for param, twin in zip(params, twins):
            param.grad, twin.grad = twin.detach().clone(), twin.detach().clone()
        step()
        eager.step()
    assert all(map(torch.equal, params, twins))


def test_a_compiled_graph_holds_the_ops_and_a_tensor_scale_stays_a_tensor():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    args = arguments(False)
    torch.compile(every_function, fullgraph=True, backend=backend)(*args)
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert not any(str(target).endswith((".item", "_local_scalar_dense")) for target in targets)
    assert [str(t) for t in targets if "apex_amp" in str(t)][:2] == ["apex_amp.multi_tensor_scale",
                                                                     "apex_amp.multi_tensor_unscale_"]


def test_fake_tensors_get_shapes_without_memory():
    with FakeTensorMode():
        grads = tensors(HALF)
        multi_tensor.multi_tensor_unscale_(grads, torch.zeros(1), torch.tensor(0.5))
        total, norms = multi_tensor.multi_tensor_l2norm(grads, per_tensor=True)
    assert total.shape == () and norms.shape == (4,) and total.dtype == norms.dtype == FLOAT


def test_a_dispatch_mode_sees_the_call():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    grads = tensors()
    before = [grad.clone() for grad in grads]
    with Recorder():
        multi_tensor.multi_tensor_unscale_(grads, torch.zeros(1), 0.5)
    assert seen[-1] == ops.multi_tensor_unscale_.default
    assert all(torch.equal(grad, old * 0.5) for grad, old in zip(grads, before))


def test_make_fx_records_the_ops():
    def unscaled_norm(grads, found_inf):
        multi_tensor.multi_tensor_unscale_(grads, found_inf, 0.5)
        return multi_tensor.multi_tensor_l2norm(grads)

    recorded = make_fx(unscaled_norm)(tensors(), torch.zeros(1))
    targets = [node.target for node in recorded.graph.nodes if node.op == "call_function"]
    assert targets == [ops.multi_tensor_unscale_.default, ops.multi_tensor_l2norm.default]


def test_the_registered_op_bumps_versions_too():
    out, found_inf = torch.zeros(3), torch.zeros(1)
    ops.multi_tensor_scale([torch.tensor([1.0, 2.0, float("nan")])], [out], found_inf, 2.0)
    assert out._version > 0 and found_inf._version > 0 and out[:2].tolist() == [2.0, 4.0]


def test_a_subclass_without_kernels_is_named():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(f"no rule for {func}")

    with pytest.raises(NotImplementedError, match="no rule for apex_amp.multi_tensor_unscale_"):
        multi_tensor.multi_tensor_unscale_([Wrapper(torch.ones(3))], torch.zeros(1), 0.5)
