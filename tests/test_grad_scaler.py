"""amp.GradScaler against torch.amp.GradScaler: the same scales, gradients, errors and files, step by step."""
from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from apex_amp import amp

Scaler = type[torch.amp.GradScaler]
INF, NAN = float("inf"), float("nan")


def outcome(script: Callable[[Scaler], Any], scaler: Scaler) -> Any:
    """What a script returns, or the kind and words of what it raises."""
    try:
        return script(scaler)
    except Exception as error:
        return type(error), str(error)


def check_as_torch(script: Callable[[Scaler], Any]) -> Any:
    """Runs a script with both classes and compares what comes out; returns it."""
    ours, expected = outcome(script, amp.GradScaler), outcome(script, torch.amp.GradScaler)
    if isinstance(expected, tuple) and isinstance(expected[0], type):
        assert ours == expected
    else:
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    return ours


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.ones(2, 3) if gradient is None else torch.ones(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        made.append(parameter)
    return made


def ready(scaler_class: Scaler, **options: Any) -> torch.amp.GradScaler:
    """A scaler that has scaled a loss."""
    scaler = scaler_class("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler


def sgd(*gradients: torch.Tensor | None, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters(*gradients), lr=0.5, **options)


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]


# ------------------------------------------------------------------------------------------------
# Scale, gradients and parameters over many steps

@given(st.lists(st.sampled_from([1.0, 3.5, INF, -INF, NAN]), min_size=1, max_size=12),
       st.sampled_from([dict(), dict(growth_interval=2), dict(init_scale=3.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=3)]))
def test_scales_and_parameters_step_by_step(numbers: list[float], options: dict[str, Any]) -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler, optimizer, trace = scaler_class("cpu", **options), sgd(None, None, momentum=0.9), []
        for number in numbers:
            optimizer.zero_grad()
            loss = sum((parameter * number).sum() for parameter in values_with_grad(optimizer))
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            trace += [scaled.detach(), *gradients(optimizer), *(v.clone() for v in values(optimizer)),
                      scaler.get_scale(), scaler._get_growth_tracker()]
        return trace

    check_as_torch(script)


def values_with_grad(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_mixed_dtypes_shapes_and_missing_gradients(bad: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in (
        ((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 2), torch.float64), ((), torch.float32), ((0, 4), torch.float32))]
    if bad is not None:
        mixed[2][0, 1] = bad

    def script(scaler_class: Scaler) -> Any:
        scaler, optimizer = ready(scaler_class, init_scale=4.0), sgd(*map(torch.clone, mixed), None)
        scaler.unscale_(optimizer)
        found = [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()]
        scaler.step(optimizer)
        scaler.update()
        return gradients(optimizer), values(optimizer), found, scaler.get_scale()

    check_as_torch(script)


def test_views_and_strided_gradients() -> None:
    def script(scaler_class: Scaler) -> Any:
        buffer = torch.arange(48.0)
        strided = [buffer[:12].view(3, 4).t(), buffer[12:].view(1, 4, 3, 3).contiguous(memory_format=torch.channels_last),
                   torch.ones(6)[::2]]
        scaler, optimizer = ready(scaler_class, init_scale=2.0), sgd(*strided)
        scaler.unscale_(optimizer)
        return gradients(optimizer), buffer

    check_as_torch(script)


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients(bad: bool) -> None:
    def script(scaler_class: Scaler) -> Any:
        gradient = torch.sparse_coo_tensor([[0, 0, 2]], [[1.0, 2.0], [3.0, 4.0], [5.0, INF if bad else 6.0]], (4, 2),
                                            check_invariants=True)
        parameter = nn.Parameter(torch.ones(4, 2))
        parameter.grad = gradient
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), ready(scaler_class, init_scale=2.0)
        scaler.step(optimizer)
        scaler.update()
        return parameter.detach(), parameter.grad.to_dense(), scaler.get_scale()

    check_as_torch(script)


def test_sparse_half_duplicates_are_summed_before_the_check() -> None:
    """Each value fits float16, their sum does not: only a fused optimizer may bring such gradients."""
    def script(scaler_class: Scaler) -> Any:
        gradient = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[60000.0], [60000.0]]).half(), (2, 1),
                                            check_invariants=True)
        scaler, optimizer = ready(scaler_class), _Recorder(parameters(gradient))
        scaler.step(optimizer)
        return optimizer.seen[0]["found_inf"]

    assert check_as_torch(script) == 1


@pytest.mark.parametrize("bad", [False, True])
def test_complex_gradients_are_unscaled_and_checked(bad: bool) -> None:
    gradient = torch.tensor([2 + 4j, complex(6, INF) if bad else 6j, 8], dtype=torch.complex64)
    optimizer, scaler = sgd(gradient.clone()), ready(amp.GradScaler, init_scale=2.0)
    scaler.step(optimizer)
    scaler.update()
    if bad:
        assert values(optimizer)[0].tolist() == [1, 1, 1] and scaler.get_scale() == 1.0
    else:
        torch.testing.assert_close(values(optimizer)[0], 1 - 0.5 * gradient / 2)


def test_half_gradients_are_refused() -> None:
    def script(scaler_class: Scaler) -> Any:
        ready(scaler_class).unscale_(sgd(torch.ones(2, dtype=torch.float16)))

    assert check_as_torch(script) == (ValueError, "Attempting to unscale FP16 gradients.")


def test_many_tensors_find_one_nan() -> None:
    def script(scaler_class: Scaler) -> Any:
        mixed = [torch.full((3,), float(i), dtype=(torch.float32, torch.bfloat16)[i % 2]) for i in range(501)]
        mixed[-1][-1] = NAN
        scaler, optimizer = ready(scaler_class), sgd(*mixed)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), values(optimizer)

    check_as_torch(script)


# ------------------------------------------------------------------------------------------------
# Several optimizers, fused optimizers

@pytest.mark.parametrize("bad", ["neither", "first", "second", "both"])
def test_several_optimizers_step_alone_and_share_the_scale(bad: str) -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = ready(scaler_class)
        first = sgd(torch.full((2,), INF if bad in ("first", "both") else 2.0))
        second = torch.optim.Adam(parameters(torch.full((2,), NAN if bad in ("second", "both") else 2.0)))
        scaler.unscale_(second)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        return values(first), values(second), scaler.get_scale()

    check_as_torch(script)


class _Recorder(torch.optim.SGD):
    """Takes `grad_scale` and `found_inf` as torch's fused optimizers do, and notes what it got."""
    _step_supports_amp_scaling = True

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)
        self.seen: list[dict[str, Any]] = []

    def step(self, closure: Any = None) -> None:
        scale = self.grad_scale
        self.seen.append({"found_inf": self.found_inf.item(), "grad_scale": None if scale is None else scale.item(),
                          "gradients": [gradient.clone() for gradient in gradients(self)]})


@pytest.mark.parametrize("unscales_first", [False, True])
@pytest.mark.parametrize("number", [3.0, INF])
def test_optimizers_that_skip_by_themselves_get_scale_and_flag(number: float, unscales_first: bool) -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler, optimizer = ready(scaler_class), _Recorder(parameters(torch.full((2,), number)))
        if unscales_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return optimizer.seen, scaler.get_scale(), hasattr(optimizer, "found_inf"), hasattr(optimizer, "grad_scale")

    check_as_torch(script)


@pytest.mark.parametrize("name, options", [("Adam", {}), ("AdamW", {}), ("SGD", dict(momentum=0.9)), ("Adagrad", {})])
def test_torchs_fused_optimizers(name: str, options: dict[str, Any]) -> None:
    def script(scaler_class: Scaler) -> Any:
        parameter = nn.Parameter(torch.ones(4))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, fused=True, **options)
        scaler, trace = scaler_class("cpu", init_scale=8.0), []
        for number in (1.0, INF, 2.0):
            optimizer.zero_grad()
            scaler.scale((parameter * number).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            trace += [parameter.detach().clone(), scaler.get_scale()]
        return trace

    check_as_torch(script)


def test_what_step_returns_and_passes_on() -> None:
    class Named(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return args, kwargs

    def script(scaler_class: Scaler) -> Any:
        clean, bad = Named(parameters(torch.ones(2))), Named(parameters(torch.full((2,), INF)))
        scaler, off = ready(scaler_class), scaler_class("cpu", enabled=False)
        return [scaler.step(clean, 1, key=2), scaler.step(bad, 1), off.step(bad, closure=3)]

    assert script(amp.GradScaler) == script(torch.amp.GradScaler) == [((1,), {"key": 2}), None, ((), {"closure": 3})]


# ------------------------------------------------------------------------------------------------
# The order of calls

def test_every_order_of_calls_ends_as_torchs() -> None:
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "scale": lambda scaler, optimizer: scaler.scale(torch.ones(2)),
        "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
        "step": lambda scaler, optimizer: scaler.step(optimizer),
        "update": lambda scaler, optimizer: scaler.update(),
        "new scale": lambda scaler, optimizer: scaler.update(8.0),
        "closure": lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 0.0),
    }
    orders = [("unscale",), ("step",), ("update",), ("new scale",), ("scale", "update"), ("scale", "new scale"),
              ("scale", "unscale", "unscale"), ("scale", "step", "unscale"), ("scale", "step", "step"), ("scale", "closure"),
              ("scale", "unscale", "step", "update"), ("scale", "step", "update", "update"),
              ("scale", "step", "update", "step", "update"), ("scale", "unscale", "update", "unscale")]
    raised = 0
    for order in orders:
        def script(scaler_class: Scaler, order: tuple[str, ...] = order) -> Any:
            scaler, optimizer = scaler_class("cpu"), sgd(torch.ones(2))
            for name in order:
                calls[name](scaler, optimizer)
            return scaler.get_scale(), values(optimizer), gradients(optimizer)

        result = check_as_torch(script)
        raised += isinstance(result[0], type)
    assert raised == 10


def test_no_gradients_at_all() -> None:
    def script(scaler_class: Scaler) -> Any:
        ready(scaler_class).step(sgd(None))

    assert check_as_torch(script)[1] == "No inf checks were recorded for this optimizer."


@pytest.mark.parametrize("new_scale", [32.0, torch.tensor(16.0), torch.tensor([4.0]), torch.ones(2), torch.ones((), requires_grad=True),
                                       torch.ones((), device="meta")], ids=str)
def test_update_with_a_new_scale(new_scale: float | torch.Tensor) -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = ready(scaler_class)
        scaler.update(new_scale)
        return scaler.get_scale(), scaler._get_growth_tracker()

    check_as_torch(script)


# ------------------------------------------------------------------------------------------------
# Scaling outputs

def test_nested_outputs_keep_their_shape() -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = scaler_class("cpu", init_scale=4.0)
        nested = scaler.scale([torch.ones(2), (torch.ones(1), [torch.ones(())]), (t for t in (torch.ones(3),))])
        return [type(nested), type(nested[1]), type(nested[1][1])], nested[0], nested[1], list(nested[2])

    ours, expected = script(amp.GradScaler), script(torch.amp.GradScaler)
    assert ours[0] == expected[0] == [list, tuple, list]
    torch.testing.assert_close(ours[1:], expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(1), 2.0]], ids=str)
def test_what_can_not_be_scaled(outputs: Any) -> None:
    check_as_torch(lambda scaler_class: scaler_class("cpu").scale(outputs))


# ------------------------------------------------------------------------------------------------
# Options, files, copies

@pytest.mark.parametrize("options", [dict(growth_factor=1.0), dict(backoff_factor=1.0), dict(growth_factor=0.5, enabled=False)], ids=str)
def test_bad_options(options: dict[str, Any]) -> None:
    check_as_torch(lambda scaler_class: scaler_class("cpu", **options).is_enabled())


def test_getters_and_setters() -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = scaler_class("cpu", init_scale=8.0)
        before = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        scaler.set_growth_factor(3.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(1)
        optimizer = sgd(torch.ones(2))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        return before, scaler.state_dict(), scaler.is_enabled()

    assert check_as_torch(script)[1]["scale"] == 24.0


def test_disabled_passes_everything_through() -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler, optimizer, loss = scaler_class("cpu", enabled=False), sgd(torch.full((2,), 3.0)), torch.ones(2)
        assert scaler.scale(loss) is loss
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.load_state_dict({})
        return values(optimizer), scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()

    check_as_torch(script)


def test_without_cuda_a_cuda_scaler_warns_and_is_off() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available") as ours:
        assert not amp.GradScaler().is_enabled()
    assert ours[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not amp.GradScaler(enabled=False).is_enabled()


def advanced(scaler_class: Scaler) -> torch.amp.GradScaler:
    """A scaler some steps into training."""
    scaler, optimizer = scaler_class("cpu", init_scale=2.0**10, growth_interval=5), sgd(torch.ones(2))
    for number in (1.0, INF, 1.0, 1.0):
        optimizer.param_groups[0]["params"][0].grad.fill_(number)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("source", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
@pytest.mark.parametrize("target", [amp.GradScaler, torch.amp.GradScaler], ids=["to ours", "to torch's"])
@pytest.mark.parametrize("started", [False, True])
def test_files_go_both_ways(source: Scaler, target: Scaler, started: bool) -> None:
    file = io.BytesIO()
    torch.save(advanced(source).state_dict(), file)
    file.seek(0)
    loaded = ready(target) if started else target("cpu")
    loaded.load_state_dict(torch.load(file))
    expected = {"scale": 2.0**9, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 2}
    assert loaded.state_dict() == expected


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}])
def test_files_that_are_refused(state: dict[str, Any]) -> None:
    check_as_torch(lambda scaler_class: scaler_class("cpu").load_state_dict(state))


@pytest.fixture(params=[copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))], ids=["deepcopy", "pickle"])
def copied(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    yield request.param


def test_a_copy_goes_on_from_there(copied: Callable[[Any], Any]) -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = advanced(scaler_class)
        twin, optimizer = copied(scaler), sgd(torch.ones(2))
        assert type(twin) is scaler_class
        for _ in range(3):
            twin.scale(torch.ones(()))
            twin.step(optimizer)
            twin.update()
        return twin.state_dict(), scaler.state_dict()

    assert check_as_torch(script)[0]["scale"] == 2.0**10


def test_a_copy_in_the_middle_of_an_iteration_is_refused() -> None:
    def script(scaler_class: Scaler) -> Any:
        scaler = ready(scaler_class)
        scaler.unscale_(sgd(torch.ones(2)))
        return pickle.dumps(scaler)

    assert check_as_torch(script)[0] is AssertionError
