"""Any optimizer, learning-rate scheduler and wrapper goes on working after amp.initialize, with FP32's results."""
from __future__ import annotations

import copy
import gc
import pickle
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from apex_amp import amp
from tests.training import INF, LEVELS, MASTERS, Dot, backward, initialize, integers, train, values

OPTIMIZERS = [
    ("SGD", dict(lr=0.125)),
    ("SGD", dict(lr=0.125, momentum=0.5, nesterov=True)),
    ("SGD", dict(lr=0.125, momentum=0.5, foreach=True)),
    ("SGD", dict(lr=0.125, momentum=0.5, fused=True)),
    ("SGD", dict(lr=0.125, maximize=True, weight_decay=0.25)),
    ("Adam", dict(lr=0.125)),
    ("Adam", dict(lr=0.125, amsgrad=True, foreach=True)),
    ("Adam", dict(lr=0.125, fused=True)),
    ("AdamW", dict(lr=0.125, foreach=True)),
    ("AdamW", dict(lr=0.125, fused=True)),
    ("RMSprop", dict(lr=0.125, momentum=0.5)),
    ("RMSprop", dict(lr=0.125, foreach=True, centered=True)),
    ("Adagrad", dict(lr=0.125)),
    ("Adagrad", dict(lr=0.125, fused=True)),
    ("Adadelta", dict(lr=0.125)),
    ("NAdam", dict(lr=0.125)),
    ("RAdam", dict(lr=0.125)),
    ("Adamax", dict(lr=0.125)),
    ("ASGD", dict(lr=0.125)),
    ("Rprop", dict(lr=0.125)),
    ("Adafactor", dict(lr=0.125)),
]


def identifier(value: object) -> str | None:
    return "-".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else None


def make(name: str, options: dict, parameters) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(list(parameters), **options)


@pytest.mark.parametrize("level, name, options", [
    (level, name, options) for level in LEVELS for name, options in OPTIMIZERS
    # torch's fused Adagrad keeps the FP32 state that it made for FP32 parameters and then refuses half ones
    if not (level == "O3" and name == "Adagrad" and "fused" in options)], ids=identifier)
def test_every_torch_optimizer_trains_and_skips(level: str, name: str, options: dict) -> None:
    """With overflows among the steps: parameters and optimizer state are those of FP32 without the bad iterations."""
    inputs = integers(6)

    def run(level: str | None) -> tuple[torch.Tensor, dict]:
        model = Dot()
        optimizer = make(name, options, model.parameters())
        if level is None and half:
            model.half()
            model.register_forward_pre_hook(lambda _, args: (args[0].half(),))
        model, optimizer = initialize(level, model, optimizer)
        for index, x in enumerate(inputs):
            if level is not None and index in (0, 3):
                before = values(model)
                backward(level, model(x) * INF, optimizer)
                optimizer.step()
                torch.testing.assert_close(values(model), before, rtol=0, atol=0, equal_nan=True)
                assert amp.last_step_skipped(optimizer)
                optimizer.zero_grad()
            backward(level, model(x), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return values(model), optimizer.state_dict()["state"]

    half = level == "O3"  # whose oracle is a plain half model, with all that an epsilon of 1e-8 does to it
    (got, state), (wanted, wanted_state) = run(level), run(None)
    # Gradients are exact, so at O2 and O5 the masters are FP32's; the model has them rounded to 11 or 8 bits.
    tolerance = {"O2": 2.0 ** -11, "O5": 2.0 ** -8}.get(level, 0)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0, equal_nan=True)
    for index, entries in wanted_state.items():
        for key, value in entries.items():
            torch.testing.assert_close(state[index][key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_sparse_gradients(level: str) -> None:
    inputs = [torch.tensor([0, 2, 2]), torch.tensor([1, 1, 1]), torch.tensor([3, 0, 2])]

    def run(level: str | None) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
        with torch.no_grad():
            model[0].weight.copy_(torch.randint(-8, 8, (5, 4)) / 8)
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        for index, x in enumerate(inputs):
            for _ in range(2):
                backward(level, model(x).sum(), optimizer)
            if level is not None and index == 1:
                backward(level, model(x).sum() * INF, optimizer)
                optimizer.step()
                assert amp.last_step_skipped(optimizer) and amp.overflow_report() == ["0.weight"]
                optimizer.zero_grad()
                for _ in range(2):
                    backward(level, model(x).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=index == 0)
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_adam_next_to_another_optimizer(level: str) -> None:
    model = nn.ModuleList([nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)])
    model.forward = lambda x: model[1](model[0](x))
    optimizers = [torch.optim.SparseAdam(model[0].parameters(), lr=0.125), torch.optim.Adam(model[1].parameters())]
    model, optimizers = initialize(level, model, optimizers)
    before = values(model)
    backward(level, model(torch.tensor([0, 2])).sum(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    changed = values(model) != before
    assert changed[:4].all() and not changed[4:8].any() and changed[-1]


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_float64_and_complex_parameters(level: str, dtype: torch.dtype) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = nn.ParameterList([nn.Parameter(torch.arange(4).to(dtype)), nn.Parameter(torch.ones(4))])
        model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
        for bad in (False, True, False):
            if bad and level is None:
                continue
            loss = (model[0].abs().square().sum() + model[1].sum()).float()
            backward(level, loss * INF if bad else loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return torch.view_as_real(model[0].detach()) if dtype.is_complex else model[0].detach()

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_add_param_group_before_and_after(level: str, when: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=3)
        optimizer = torch.optim.SGD([model.weights[0]], lr=0.125)
        if when == "before":
            optimizer.add_param_group({"params": list(model.weights[1:]), "lr": 0.25})
        model, optimizer = initialize(level, model, optimizer)
        for index in range(3):
            optimizer.zero_grad()
            model.zero_grad()
            backward(level, model(torch.ones(4)), optimizer)
            optimizer.step()
            if index == 0 and when == "after":
                optimizer.add_param_group({"params": (weight for weight in model.weights[1:]), "lr": 0.25})
        return values(model)

    assert torch.equal(run(level), run(None))


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_added_between_backward_and_step_start_with_the_next_backward(level: str) -> None:
    """Their gradients are scaled, and no block knew that they are the optimizer's."""
    model = Dot(parameters=2)
    model, optimizer = initialize(level, model, torch.optim.SGD([model.weights[0]], lr=0.125))
    before = values(model)
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.add_param_group({"params": model.weights[1:]})
    optimizer.step()
    assert torch.equal(values(model) - before, torch.tensor([-0.125] * 4 + [0] * 4))
    optimizer.zero_grad()
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert torch.equal(values(model) - before, torch.tensor([-0.25] * 4 + [-0.125] * 4))


@pytest.mark.parametrize("level", MASTERS)
def test_a_parameter_added_twice_is_refused_as_torch_does(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": list(model.parameters())})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_named_parameters_and_group_identity(level: str) -> None:
    model = Dot(parameters=3)
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD(named[:2], lr=0.125)
    groups = optimizer.param_groups
    first = groups[0]
    model, optimizer = initialize(level, model, optimizer)
    assert optimizer.param_groups is groups and groups[0] is first
    optimizer.add_param_group({"params": named[2:]})
    assert [group["param_names"] for group in groups] == [["weights.0", "weights.1"], ["weights.2"]]
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert torch.equal(values(model), values(Dot(parameters=3)) - 0.125)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_state_loaded_before_or_after_initialize(level: str, loaded: str) -> None:
    inputs = integers(4)
    source = Dot()
    source_optimizer = torch.optim.SGD(source.parameters(), lr=0.125, momentum=0.5)
    train(None, source, source_optimizer, inputs[:2])

    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        model.load_state_dict(source.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        if loaded == "before":
            optimizer.load_state_dict(copy.deepcopy(source_optimizer.state_dict()))
        model, optimizer = initialize(level, model, optimizer)
        if loaded == "after":
            optimizer.load_state_dict(copy.deepcopy(source_optimizer.state_dict()))
        for x in inputs[2:]:
            optimizer.zero_grad()
            backward(level, model(x), optimizer)
            optimizer.step()
        return values(model)

    torch.testing.assert_close(run(level), run(None), rtol=2.0 ** -8 if level == "O5" else 0, atol=0)


# --- closures -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_runs_once_and_its_overflow_skips_the_step(level: str, keyword: bool) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.Adam(model.parameters(), lr=0.125))
    calls = []

    def step(bad: bool) -> torch.Tensor:
        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(torch.ones(4))
            backward(level, loss * INF if bad else loss, optimizer)
            return loss

        return optimizer.step(closure=closure) if keyword else optimizer.step(closure)

    before = values(model)
    loss = step(bad=True)
    assert loss.item() == 12 and calls == [True]
    assert torch.equal(values(model), before) and not any(optimizer.state.values())
    assert amp.last_step_skipped(optimizer)
    assert step(bad=False).item() == 12 and calls == [True, True]
    assert (values(model) < before).all() and not amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_runs_also_when_the_step_is_skipped_already(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    before = values(model)
    backward(level, model(torch.ones(4)) * INF, optimizer)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(4))
        backward(level, loss, optimizer)
        return loss

    assert optimizer.step(closure).item() == 12
    assert torch.equal(values(model), before) and amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_lbfgs_with_a_static_scale(level: str) -> None:
    def run(level: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        x = torch.randn(16, 3)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
        model, optimizer = initialize(level, model, optimizer, loss_scale=16.0)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x).float() - y).square().mean()
            backward(level, loss, optimizer)
            return loss

        return [optimizer.step(closure).item() for _ in range(5)]

    losses, wanted = run(level), run(None)
    assert losses[0] == pytest.approx(wanted[0], rel=2e-2)
    assert losses[-1] < 1e-2 * losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_refuses_a_dynamic_scale_before_anything_happens(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.LBFGS(model.parameters()), loss_scale="dynamic")
    with pytest.raises(RuntimeError, match="static loss_scale"):
        optimizer.step(lambda: pytest.fail("the closure ran"))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_raises_at_an_overflow_that_comes_after_it_moved_the_parameters(level: str) -> None:
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.LBFGS(model.parameters(), lr=0.125, max_iter=3))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(4)).square()
        backward(level, loss * INF if len(calls) == 2 else loss, optimizer)
        return loss

    with pytest.raises(RuntimeError, match="can't be undone"):
        optimizer.step(closure)
    calls.clear()
    calls.append(1)
    before = values(model)
    optimizer.step(closure)  # the first call of this step overflows: a step that is skipped
    assert torch.equal(values(model), before) and amp.last_step_skipped(optimizer)


class SharpnessAware(torch.optim.Optimizer):
    """The usual SAM: climbs with the gradient at hand, calls the closure there, then descends from where it started."""

    def __init__(self, parameters, base, **options) -> None:
        super().__init__(parameters, dict(rho=0.5, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=group["rho"])
        self.zero_grad()
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        return loss


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_that_moves_the_parameters_before_it_calls_the_closure(level: str) -> None:
    def run(level: str | None) -> torch.Tensor:
        model = Dot()
        optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.125)
        model, optimizer = initialize(level, model, optimizer, loss_scale=16.0)
        for x in (torch.ones(4), torch.tensor([1.0, 0, 2, 0])):
            def closure() -> torch.Tensor:
                loss = (model(x) / 8).square()
                backward(level, loss, optimizer)
                return loss

            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        return values(model)

    torch.testing.assert_close(run(level), run(None), rtol=2e-3, atol=0)
    assert not torch.equal(run(None), values(Dot()))


# --- optimizers of the user's own -------------------------------------------------------------------------------------

class PlainSgd:
    """Not a torch optimizer: what code in the wild calls one has param_groups and step."""

    def __init__(self, parameters, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.state = {}
        self.steps = 0

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self) -> None:
        self.steps += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-group["lr"])
                        torch._C._increment_version([parameter])

    def state_dict(self) -> dict:
        return {"steps": self.steps}


class WithOwnState(PlainSgd):
    def __getstate__(self) -> tuple:
        return self.param_groups, self.steps

    def __setstate__(self, state: tuple) -> None:
        self.param_groups, self.steps = state
        self.state = {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [PlainSgd, WithOwnState])
def test_an_optimizer_that_is_no_torch_optimizer(level: str, kind: type) -> None:
    inputs = integers(3)
    model = Dot()
    got = train(level, model, kind(model.parameters(), 0.125), inputs)
    reference = Dot()
    assert torch.equal(got, train(None, reference, torch.optim.SGD(reference.parameters(), lr=0.125), inputs))


class AsHorovodWrites(torch.optim.SGD):
    def zero_grad(self, *args, **kwargs) -> None:
        super(self.__class__, self).zero_grad(*args, **kwargs)

    def step(self, closure=None):
        return super(self.__class__, self).step(closure)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_asks_for_its_own_class(level: str) -> None:
    inputs = integers(3)
    model, reference = Dot(), Dot()
    optimizer = AsHorovodWrites(model.parameters(), lr=0.125)
    got = train(level, model, optimizer, inputs)
    assert torch.equal(got, train(None, reference, torch.optim.SGD(reference.parameters(), lr=0.125), inputs))
    assert optimizer.__class__ is AsHorovodWrites


@pytest.mark.parametrize("level", LEVELS)
def test_a_subclass_of_an_amp_optimizers_type_makes_ordinary_optimizers(level: str) -> None:
    model = Dot()
    _, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    plain, parameter = Dot(), torch.nn.Parameter(torch.ones(2))
    ordinary = type("Child", (type(optimizer),), {})(plain.parameters(), lr=0.125)
    ordinary.add_param_group({"params": parameter})
    ordinary = copy.deepcopy(ordinary)
    for group in ordinary.param_groups:
        for own in group["params"]:
            own.grad = torch.ones_like(own)
    before = copy.deepcopy(ordinary.param_groups[1]["params"][0])
    ordinary.step()
    assert torch.equal(ordinary.param_groups[1]["params"][0], before - 0.125)
    ordinary.zero_grad()
    assert ordinary.param_groups[1]["params"][0].grad is None


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [PlainSgd, WithOwnState, torch.optim.SGD])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_of_an_optimizer_step_their_own_parameters(level: str, kind: type, copier) -> None:
    """A skip that was pending is pending in the copy too."""
    model = Dot()
    model, optimizer = initialize(level, model, kind(model.parameters(), 0.125), loss_scale="dynamic",
                                  max_loss_scale=1024.0)
    backward(level, model(torch.ones(4)) * INF, optimizer)
    twin_model, twin = copier((model, optimizer))
    assert type(twin).__name__ == kind.__name__ and isinstance(twin, kind)
    before = values(model)
    twin.step()
    optimizer.step()
    for owner, its_optimizer in ((twin_model, twin), (model, optimizer)):
        assert torch.equal(values(owner), before)
        its_optimizer.zero_grad()
        owner.zero_grad()
    if copier is copy.deepcopy:
        backward(level, twin_model(torch.ones(4)), twin)
        twin.step()
        assert torch.equal(values(twin_model), before - 0.125)
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_step_that_the_user_put_on_the_instance_stays_the_step(level: str, with_scheduler: bool) -> None:
    def doubled(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return plain_step(self, closure)

    plain_step = torch.optim.SGD.step
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer.step = types.MethodType(doubled, optimizer)
    if with_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    before = values(model)
    train(level, model, optimizer, [torch.ones(4)])
    assert torch.equal(values(model), before - 0.25)
    if level in ("O1", "O2"):
        backward(level, model(torch.ones(4)) * INF, optimizer)
        optimizer.step()
        assert torch.equal(values(model), before - 0.25)


class Wrapper:
    """LARC's shape: an object that scales gradients, then steps the optimizer that it wraps."""

    def __init__(self, optimizer) -> None:
        self.optim = optimizer

    @property
    def param_groups(self):
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value) -> None:
        self.optim.param_groups = value

    def zero_grad(self, *args, **kwargs) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, group: dict) -> None:
        self.optim.add_param_group(group)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        self.optim.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_wrapper_optimizers(level: str, wrapped: str) -> None:
    inputs = integers(4)

    def run(level: str | None) -> torch.Tensor:
        model = Dot(parameters=3)
        optimizer = torch.optim.SGD(list(model.weights[:2]), lr=0.125, momentum=0.5)
        if wrapped == "before":
            optimizer = Wrapper(optimizer)
        model, optimizer = initialize(level, model, optimizer)
        if wrapped == "after":
            optimizer = Wrapper(optimizer)
        for index, x in enumerate(inputs):
            optimizer.zero_grad()
            model.zero_grad()
            if level is not None and index == 2:
                backward(level, model(x) * INF, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            backward(level, model(x), optimizer)
            optimizer.step()
            if index == 1:
                optimizer.add_param_group({"params": [model.weights[2]]})
        return values(model)

    torch.testing.assert_close(run(level), run(None), rtol=2.0 ** -8 if level == "O5" else 0, atol=0)


# --- hooks ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("registered", ["before", "after"])
def test_step_hooks_run_once_a_step_and_not_on_a_skip(level: str, registered: str) -> None:
    calls: list[str] = []
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
        optimizer.register_step_post_hook(lambda *args: calls.append("after"))

    if registered == "before":
        register()
    model, optimizer = initialize(level, model, optimizer)
    if registered == "after":
        register()
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    backward(level, model(torch.ones(4)) * INF, optimizer)
    optimizer.step()
    assert calls == []
    optimizer.zero_grad()
    backward(level, model(torch.ones(4)), optimizer)
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("kind, options", [(torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_steps_of_an_optimizer_that_amp_does_not_know_are_seen(level: str, kind: type, options: dict) -> None:
    """torch's fused kernels move no version counter: neither a cached cast nor the model's weights may stay behind."""
    model = torch.nn.Linear(2, 2)
    model, amp_optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    unknown = kind([parameter for group in amp_optimizer.param_groups for parameter in group["params"]], lr=0.5,
                   **options)
    x = torch.ones(1, 2)
    for _ in range(2):
        before = model(x).detach()
        for parameter in amp.master_params(amp_optimizer):
            parameter.grad = torch.ones_like(parameter)
        unknown.step()
        assert (model(x) < before - 1).all()
    amp.shutdown()
    assert not _global_optimizer_post_hooks


def test_a_global_step_hook_runs_once() -> None:
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(1))
    try:
        model = Dot()
        train("O2", model, torch.optim.SGD(model.parameters(), lr=0.125), integers(2))
    finally:
        handle.remove()
    assert calls == [1, 1]


# --- schedulers -------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.125, 0.25, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.25, total_steps=12),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)]),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.25, 3),
}


def scheduled_run(level: str | None, make_scheduler, when: str, bad_first: bool) -> tuple[list[float], torch.Tensor]:
    """Five iterations, the scheduler stepped after each.

    Under amp the first may overflow, which skips its step only.
    """
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    schedulers = [make_scheduler(optimizer)] if when in ("before", "both") else []
    model, optimizer = initialize(level, model, optimizer)
    if when == "while a skip is pending" and level is not None and bad_first:
        backward(level, model(torch.ones(4)) * INF, optimizer)
    if when != "before":
        schedulers.append(make_scheduler(optimizer))
    rates = []
    for index in range(5):
        bad = index == 0 and bad_first
        if not (bad and level is None):
            if not (bad and when == "while a skip is pending"):
                optimizer.zero_grad()
                backward(level, model(torch.ones(4)) * (INF if bad else 1), optimizer)
            optimizer.step()
        elif level is None:
            optimizer._opt_called = True
        for scheduler in schedulers:
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, values(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after", "both", "while a skip is pending"])
def test_every_scheduler_without_one_warning(level: str, name: str, when: str) -> None:
    for bad_first in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rates, got = scheduled_run(level, SCHEDULERS[name], when, bad_first)
        mine = [str(warning.message) for warning in caught if "epoch parameter" not in str(warning.message)]
        assert not mine, mine[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted_rates, wanted = scheduled_run(None, SCHEDULERS[name], when, bad_first)
        assert rates == wanted_rates
        torch.testing.assert_close(got, wanted, rtol=2.0 ** -10 if level == "O2" else 0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_schedulers_of_copies(level: str, copier) -> None:
    """The step of a copied optimizer runs once, is the copy's, and a new scheduler for it warns of nothing."""
    model = Dot()
    model, optimizer = initialize(level, model, torch.optim.SGD(model.parameters(), lr=0.125))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    twin = copier(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(twin, 1, 0.5)
        for _ in range(2):
            parameters = list(amp.master_params(twin))
            before = [parameter.detach().clone() for parameter in parameters]
            rate = twin.param_groups[0]["lr"]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            twin.step()
            scheduler.step()
            for parameter, old in zip(parameters, before):
                assert torch.equal(parameter.detach(), old - rate)
    assert torch.equal(values(model), values(Dot()))


@pytest.mark.parametrize("level", LEVELS)
def test_a_scheduler_after_shutdown_and_after_another_initialize(level: str) -> None:
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round_number in range(3):
            model, optimizer = initialize(level, model, optimizer)
            before = values(model)
            optimizer.zero_grad()
            backward(level, model(torch.ones(4)), optimizer)
            optimizer.step()
            scheduler.step()
            assert torch.equal(values(model), before - 0.125)
            if round_number == 1:
                amp.shutdown()
                assert type(optimizer) is torch.optim.SGD and type(model) is Dot
                optimizer.zero_grad()
                model(torch.ones(4)).backward()
                optimizer.step()
                scheduler.step()
                assert torch.equal(values(model), before - 0.25)


def test_an_amp_optimizer_is_freed_with_its_last_user() -> None:
    model = Dot()
    model, optimizer = initialize("O2", model, torch.optim.SGD(model.parameters(), lr=0.125))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward("O2", model(torch.ones(4)), optimizer)
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer, scheduler, model
    gc.collect()
    assert reference() is None
