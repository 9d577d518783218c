"""amp.initialize as a user meets it: shapes of what it takes and returns, every keyword, every refusal, many calls."""
from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apex_amp import amp
from apex_amp.amp.cast_state import current_cast_type

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
half, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
# Per level: (weights, BatchNorm, output of forward, masters, loss scale)
TABLE = {
    "O0": (float32, float32, float32, False, 1.0), "O1": (float32, float32, half, False, 2.0 ** 16),
    "O2": (half, float32, float32, True, 2.0 ** 16), "O3": (half, half, float32, False, 1.0),
    "O4": (float32, float32, bfloat16, False, 1.0), "O5": (bfloat16, float32, float32, True, 1.0),
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def snapshot(*objects: Any) -> list:
    """What a refused initialize must leave alone."""
    taken = []
    for item in objects:
        tensors = item.state_dict() if isinstance(item, nn.Module) else {}
        copies = {name: (value.dtype, value.clone()) for name, value in tensors.items()}
        taken.append((type(item), sorted(vars(item)), copies))
    return [*taken, torch.mm, torch.nn.functional.softmax, nn.parallel.DistributedDataParallel.__init__,
            current_cast_type()]


def assert_untouched(before: list, *objects: Any) -> None:
    for old, new in zip(before, snapshot(*objects)):
        if isinstance(old, tuple):
            assert old[:2] == new[:2] and old[2].keys() == new[2].keys()
            assert all(old[2][k][0] is new[2][k][0] and torch.equal(old[2][k][1], new[2][k][1]) for k in old[2])
        else:
            assert old is new


# --- what it takes and returns ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
def test_the_table_of_levels(level):
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    weights, batchnorm, output, masters, scale = TABLE[level]
    assert model[0].weight.dtype is weights
    assert model[1].weight.dtype is batchnorm and model[1].running_mean.dtype is batchnorm
    assert model(torch.randn(3, 4)).dtype is output and amp.loss_scale() == scale
    params = list(amp.master_params(optimizer))
    own = [any(param is parameter for parameter in model.parameters()) for param in params]
    assert own == [True] * 6 if not masters else own == [False, False, True, True, False, False]
    assert {param.dtype for param in params} == {half if level == "O3" else float32}
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}


def test_the_default_level_is_O1():
    assert amp.initialize(make()[0], verbosity=0)(torch.randn(3, 4)).dtype is half


@pytest.mark.parametrize("level", LEVELS)
def test_returns_come_in_the_shape_of_the_arguments(level):
    (a, a_optimizer), (b, b_optimizer) = make(), make()
    keywords = {"opt_level": level, "verbosity": 0}
    assert amp.initialize(a, **keywords) is a
    for models in ([a, b], (a, b), [a], a):
        for optimizers in ([a_optimizer, b_optimizer], (a_optimizer, b_optimizer), [b_optimizer], a_optimizer, []):
            returned = amp.initialize(models, optimizers, **keywords)
            assert returned[0] is models and returned[1] is optimizers and len(returned) == 2
    assert amp.initialize([a], None, **keywords) == [a]


@pytest.mark.parametrize("level", LEVELS)
def test_O0_and_no_other_level_is_plain_training_bit_for_bit(level):
    plain, plain_optimizer = make()
    for seed in range(4):
        plain_optimizer.zero_grad()
        plain(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        plain_optimizer.step()
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    for seed in range(4):
        step(model, optimizer, seed)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    assert same == (level == "O0")
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0.05, atol=0.05)


def test_enabled_false_passes_everything_through():
    model, optimizer = make()
    before = snapshot(model, optimizer)
    wrapped = nn.DataParallel(model)
    assert amp.initialize(wrapped, enabled=False, opt_level="nonsense") is wrapped
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert_untouched(before, model, optimizer)
    with amp.scale_loss(loss := model(torch.randn(8, 4)).sum(), optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert amp.state_dict() == {} and amp.loss_scale() == 1.0 and amp.overflow_report() == []
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})


# --- keywords ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("given, scale", [("dynamic", 2.0 ** 16), (128.0, 128.0), ("128.0", 128.0), (1, 1.0)])
def test_loss_scale(level, given, scale):
    amp.initialize(*make(), opt_level=level, loss_scale=given, verbosity=0)
    assert amp.loss_scale() == scale


@pytest.mark.parametrize("keywords, start", [
    ({"max_loss_scale": 1024.0}, 1024.0), ({"min_loss_scale": 128.0}, 2.0 ** 16),
    ({"max_loss_scale": 2.0 ** 20}, 2.0 ** 16),
])
def test_limits_of_a_dynamic_scale(keywords, start):
    amp.initialize(*make(), opt_level="O1", verbosity=0, **keywords)
    assert amp.loss_scale() == start


@pytest.mark.parametrize("integer", [int, np.int64])
def test_num_losses(integer):
    model, optimizer = amp.initialize(*make(), opt_level="O1", num_losses=integer(3), verbosity=0)
    with amp.scale_loss(model(torch.randn(2, 4)).sum(), optimizer, loss_id=integer(2)) as scaled:
        scaled.backward()
    assert sorted(amp.state_dict()) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    with pytest.raises(IndexError, match="from 0 to 2, got 3"):
        amp.loss_scale(3)


@pytest.mark.parametrize("level, keywords, weights, masters", [
    ("O0", {"cast_model_type": half}, half, False),
    ("O0", {"cast_model_type": bfloat16, "master_weights": True}, bfloat16, True),
    ("O2", {"cast_model_type": bfloat16}, bfloat16, True), ("O2", {"master_weights": False}, half, False),
    ("O3", {"master_weights": True}, half, True), ("O3", {"cast_model_type": float32}, float32, False),
    ("O5", {"cast_model_type": half}, half, True), ("O2", {"cast_model_type": False}, float32, False),
    ("O1", {"cast_model_type": float32}, float32, False), ("O1", {"patch_torch_functions": False}, float32, False),
    ("O1", {"patch_torch_functions_type": half}, float32, False),
])
def test_overrides(level, keywords, weights, masters):
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0, **keywords)
    assert model[0].weight.dtype is weights
    assert (next(amp.master_params(optimizer)) is not model[0].weight) == masters
    casts_functions = level == "O1" and "patch_torch_functions_type" in keywords
    assert model(torch.randn(3, 4)).dtype is (half if casts_functions else float32)
    step(model, optimizer)


@pytest.mark.parametrize("verbosity", [0, 1])
def test_verbosity_and_apexs_words(capsys, verbosity):
    amp.initialize(*make(), opt_level="O2", verbosity=verbosity)
    printed = capsys.readouterr().out
    if verbosity == 0:
        assert printed == ""
    else:
        assert printed.startswith("Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master "
                                  "weights.\n")
        assert "keep_batchnorm_fp32        : True\n" in printed and "loss_scale                 : dynamic\n" in printed


def test_models_that_are_half_already_when_a_script_asks_for_it(monkeypatch):
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    model = nn.Linear(4, 2).half()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert next(amp.master_params(optimizer)).dtype is float32 and model(torch.randn(3, 4)).dtype is float32
    step(model, optimizer)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"opt_level": "01"}, RuntimeError, "Unexpected optimization level '01'.*letter O, not the number zero"),
    ({"opt_level": "O6"}, RuntimeError, "Options are 'O0', 'O1'"),
    ({"opt_level": 1}, RuntimeError, "Unexpected optimization level 1"),
    ({"opt_level": ["O1"]}, RuntimeError, "Unexpected optimization level"),
    ({"opt_level": "O1", "cast_model_type": half}, RuntimeError, "cast_model_type=torch.float16 makes no sense at "
                                                                 "O1.*'O2' or 'O3'"),
    ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32=True makes no sense at O1"),
    ({"opt_level": "O4", "master_weights": True}, RuntimeError, "master_weights=True makes no sense at O4"),
    ({"opt_level": "O1", "master_weights": False}, RuntimeError, "master_weights=False makes no sense at O1"),
    ({"opt_level": "O1", "patch_torch_functions_type": bfloat16}, RuntimeError, "O4 to torch.bfloat16; choose the "
                                                                                "level"),
    ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "patch_torch_functions=True makes no sense at "
                                                                       "O2"),
    ({"opt_level": "O0", "patch_torch_functions_type": half}, RuntimeError, "patch_torch_functions_type=torch.float16 "
                                                                            "makes no sense"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, ValueError, "'True' or 'False', or None, got 'yes'"),
    ({"loss_scale": "static"}, ValueError, "loss_scale must be 'dynamic' or a number, got 'static'"),
    ({"loss_scale": 0.0}, ValueError, "positive and finite, got 0.0"),
    ({"loss_scale": float("nan")}, ValueError, "finite, got nan"),
    ({"num_losses": 0}, ValueError, "num_losses must be an integer of at least 1, got 0"),
    ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "min_loss_scale <= max_loss_scale, got 8.0 and 4.0"),
    ({"cast_model_outputs": "half"}, TypeError, "cast_model_outputs must be a floating torch.dtype or None, got "
                                                "'half'"),
    ({"opt_level": "O2", "cast_model_type": torch.int8}, TypeError, "cast_model_type must be a floating torch.dtype"),
    ({"opt_level": "O2", "keep_fp32_modules": ["nowhere"]}, ValueError, "no module is called 'nowhere'"),
    ({"opt_level": "O2", "keep_fp32_modules": nn.LayerNorm}, TypeError, "must be a list of module types or names"),
    ({"opt_level": "O2", "keep_fp32_modules": [int]}, TypeError, "module types or names, got <class 'int'>"),
    ({"verbosity": "loud"}, ValueError, "loud"),
]


@pytest.mark.parametrize("keywords, error, message", REFUSED)
def test_refused_keywords_change_nothing(keywords, error, message):
    model, optimizer = make()
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, **{"verbosity": 0, **keywords})
    assert_untouched(before, model, optimizer)
    with pytest.raises(RuntimeError, match="before amp.initialize"):
        amp.state_dict()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)  # and it can go on
    step(model, optimizer)


@pytest.mark.parametrize("models, optimizers, error, message", [
    (lambda m, o: None, lambda m, o: o, TypeError, "models must be a torch.nn.Module, or a list or tuple of them, got "
                                                   "NoneType"),
    (lambda m, o: {"a": m}, lambda m, o: o, TypeError, "got dict"),
    (lambda m, o: [m, "model"], lambda m, o: o, TypeError, r"models\[1\] must be a torch.nn.Module, got str"),
    (lambda m, o: m, lambda m, o: m, TypeError, "optimizers must be an optimizer, got Sequential"),
    (lambda m, o: o, lambda m, o: m, TypeError, "models must be a torch.nn.Module, got SGD"),
    (lambda m, o: m, lambda m, o: [o, o], ValueError, r"optimizers\[1\] \(SGD\) was passed twice"),
    (lambda m, o: nn.DataParallel(m), lambda m, o: o, RuntimeError, "DataParallel.*AFTER they have been returned from "
                                                                    "amp.initialize"),
    (lambda m, o: torch.jit.script(nn.Linear(1, 1)), lambda m, o: o, RuntimeError, "ScriptModule.*first, then "
                                                                                   "torch.jit.script"),
    (lambda m, o: nn.Sequential(copy.deepcopy(m), nn.Linear(2, 2).half()), lambda m, o: o, RuntimeError,
     "Found parameter 1.weight with dtype torch.float16, expected torch.float32"),
    (lambda m, o: nn.BatchNorm1d(2, affine=False).bfloat16(), lambda m, o: o, RuntimeError, "Found buffer "
                                                                                            "running_mean"),
])
def test_refused_objects_change_nothing(models, optimizers, error, message):
    model, optimizer = make()
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=message):
        amp.initialize(models(model, optimizer), optimizers(model, optimizer), opt_level="O2", verbosity=0)
    assert_untouched(before, model, optimizer)


@pytest.mark.parametrize("call", [
    lambda m, o: amp.state_dict(), lambda m, o: amp.load_state_dict({}), lambda m, o: amp.loss_scale(),
    lambda m, o: amp.overflow_report(), lambda m, o: amp.scale_loss(torch.ones(()), o).__enter__(),
])
def test_calls_before_initialize(call):
    with pytest.raises(RuntimeError, match="before amp.initialize"):
        call(*make())


def test_questions_about_an_optimizer_that_initialize_never_saw():
    amp.initialize(*make(), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="SGD.*did not go through amp.initialize"):
        amp.last_step_skipped(make()[1])


# --- many calls -------------------------------------------------------------------------------------------------------

def depth(item: Any) -> int:
    return len(type(item).__mro__)


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_initialize_again_at_any_level_is_as_if_it_were_the_first(first, second):
    model, optimizer = amp.initialize(*make(), opt_level=first, loss_scale=128.0, verbosity=0)
    depths = depth(model), depth(optimizer)
    for seed in range(2):
        step(model, optimizer, seed)
    weights = copy.deepcopy(model.state_dict())
    fresh, fresh_optimizer = make()
    fresh.load_state_dict(weights)
    for parameter, master in zip(fresh.parameters(), amp.master_params(optimizer)):
        fresh_optimizer.state[parameter]["momentum_buffer"] = optimizer.state[master]["momentum_buffer"].clone()
    fresh, fresh_optimizer = amp.initialize(fresh, fresh_optimizer, opt_level=second, loss_scale=128.0, verbosity=0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=second, loss_scale=128.0, verbosity=0)
    assert (depth(model), depth(optimizer)) == depths
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights.values())) or second == "O3"
    losses = [(step(model, optimizer, seed), step(fresh, fresh_optimizer, seed)) for seed in range(2, 5)]
    assert losses == [(loss, loss) for loss, _ in losses] or first == "O3"
    pairs = zip(model.state_dict().values(), fresh.state_dict().values())
    assert all(torch.equal(a, b) for a, b in pairs) or first == "O3"


@pytest.mark.parametrize("level", LEVELS)
def test_fifty_times_does_not_stack_anything(level):
    model, optimizer = make()
    for _ in range(50):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    once, once_optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    for key in ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_forward_pre_hooks", "_forward_hooks"):
        assert len(getattr(model[0], key)) == len(getattr(once[0], key))
    assert depth(model) == depth(once) and depth(optimizer) == depth(once_optimizer)
    assert len(model._amp_cast.masters) == len(once._amp_cast.masters)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_alone_again_keeps_exact_masters_in_step_with_its_model(level):
    model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale=128.0, verbosity=0)
    step(model, optimizer)
    exact = copy.deepcopy(model.state_dict())
    _, optimizer = amp.initialize([], optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    assert all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())
    assert len(model._amp_cast.masters) == 1
    step(model, optimizer)
    assert not torch.equal(model.state_dict()["0.weight"], exact["0.weight"])
    assert torch.equal(model.state_dict()["0.weight"].to(model[0].weight.dtype), model[0].weight)


def test_a_model_alone_again_leaves_its_former_optimizer_plain():
    model, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    model = amp.initialize(model, opt_level="O0", verbosity=0)
    assert type(optimizer) is torch.optim.SGD
    assert [id(p) for p in amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="SGD.*did not go through amp.initialize"):
        step(model, optimizer)


def test_two_models_at_two_levels_live_side_by_side():
    runs = {level: amp.initialize(*make(), opt_level=level, loss_scale=128.0, verbosity=0) for level in LEVELS}
    together = {level: [] for level in LEVELS}
    for seed in range(3):
        for level, (model, optimizer) in runs.items():
            together[level].append(step(model, optimizer, seed))
    amp.shutdown()
    for level in LEVELS:
        model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale=128.0, verbosity=0)
        assert [step(model, optimizer, seed) for seed in range(3)] == together[level]
        amp.shutdown()


def test_the_latest_call_alive_decides_outside_forwards():
    outer = amp.initialize(make()[0], opt_level="O4", verbosity=0)
    inner = amp.initialize(make()[0], opt_level="O1", verbosity=0)
    assert current_cast_type() is half
    del inner
    gc.collect()
    assert current_cast_type() is bfloat16
    del outer
    gc.collect()
    assert current_cast_type() is None


@pytest.mark.parametrize("level", LEVELS)
def test_shutdown_and_again(level):
    patched = torch.mm, torch.nn.functional.softmax, nn.parallel.DistributedDataParallel.__init__
    model, optimizer = make()
    for _ in range(3):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        step(model, optimizer)
        amp.shutdown()
        assert type(model) is nn.Sequential and type(optimizer) is torch.optim.SGD
        assert all(parameter.dtype is float32 for parameter in model.parameters())
        assert model(torch.randn(3, 4)).dtype is float32
        assert (torch.mm, torch.nn.functional.softmax, nn.parallel.DistributedDataParallel.__init__) == patched
        assert "_amp_cast" not in vars(model) and "_amp_stash" not in vars(optimizer)
        assert not vars(model[0])["_state_dict_hooks"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_notebook_that_runs_its_cell_again_and_again_keeps_nothing(level):
    dead = []
    for _ in range(3):
        model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
        step(model, optimizer)
        dead.append([weakref.ref(item) for item in (model, optimizer, type(model))])
    del model, optimizer
    gc.collect()
    assert [[ref() is None for ref in refs[:2]] for refs in dead] == [[True, True]] * 3
