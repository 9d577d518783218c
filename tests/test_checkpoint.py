"""Saving and resuming: state_dict, whole models, copies, and a run that goes on bit for bit in a fresh process."""
from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from apex_amp import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
MASTER_LEVELS = ["O2", "O5"]
SCALED_LEVELS = ["O1", "O2"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=2e-3, eps=1e-5),
}
# The iteration whose loss is planted to be inf.
OVERFLOW_AT = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.register_buffer("gain", torch.full((4,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)) * self.gain)


def build(level: str | None, optimizer: str = "sgd", seed: int = 3,
          **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; level None is plain torch."""
    torch.manual_seed(seed)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    if level is None:
        return model, made
    return amp.initialize(model, made, opt_level=level, verbosity=0, **keywords)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, iterations: range,
          plant_overflow: bool = False) -> list[float]:
    losses = []
    for iteration in iterations:
        generator = torch.Generator().manual_seed(iteration)
        x, target = torch.randn(8, 1, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), target)
        losses.append(loss.item())
        if plant_overflow and iteration == OVERFLOW_AT:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return losses


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def assert_same(left: Any, right: Any) -> None:
    """Equal bit for bit, dtypes and types of numbers included."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right):
            assert_same(a, b)
    else:
        assert type(left) is type(right) and left == right


# --- resuming ---------------------------------------------------------------------------------------------------------

def resume_from(directory: str) -> None:
    """What the fresh process does, for every checkpoint in `directory` (path: level-optimizer.pt)."""
    for path in sorted(Path(directory).glob("*-start.pt")):
        level, optimizer_name, _ = path.stem.split("-")
        model, optimizer = build(level, optimizer_name, seed=99)
        load(model, optimizer, torch.load(path))  # weights_only=True is torch's default
        train(model, optimizer, range(4, 8))
        torch.save(training_state(model, optimizer), str(path).replace("-start", "-resumed"))


def run_python(code: str, directory: Path, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, env={**os.environ, **environment},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fresh_process_continues_bit_for_bit(tmp_path):
    going_on = {}
    for level, name in itertools.product(LEVELS, OPTIMIZERS):
        model, optimizer = build(level, name)
        train(model, optimizer, range(4), plant_overflow=level in SCALED_LEVELS)
        torch.save(training_state(model, optimizer), tmp_path / f"{level}-{name}-start.pt")
        train(model, optimizer, range(4, 8))
        going_on[level, name] = copy.deepcopy(training_state(model, optimizer))
    run_python(f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
               f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
               "import test_checkpoint; test_checkpoint.resume_from('.')", tmp_path)
    for (level, name), state in going_on.items():
        assert_same(torch.load(tmp_path / f"{level}-{name}-resumed.pt"), state)
    assert going_on["O2", "sgd"]["amp"]["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 5}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loading_at_any_iteration(level, name):
    for at in range(5):
        model, optimizer = build(level, name)
        train(model, optimizer, range(at), plant_overflow=level in SCALED_LEVELS)
        checkpoint = torch.load(saved(training_state(model, optimizer)))
        train(model, optimizer, range(at, 5), plant_overflow=level in SCALED_LEVELS)
        expected = copy.deepcopy(training_state(model, optimizer))
        model, optimizer = build(level, name, seed=99)
        train(model, optimizer, range(2))  # a run that is under way already is set back
        load(model, optimizer, checkpoint)
        train(model, optimizer, range(at, 5), plant_overflow=level in SCALED_LEVELS)
        assert_same(training_state(model, optimizer), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_loading_before_initialize_is_the_same(level):
    if level == "O3":
        pytest.skip("momentum is half there: it has no FP32 state to load before")
    model, optimizer = build(level)
    train(model, optimizer, range(3))
    checkpoint = torch.load(saved(training_state(model, optimizer)))
    train(model, optimizer, range(3, 6))
    expected = copy.deepcopy(training_state(model, optimizer))
    model, optimizer = build(None, seed=99)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.load_state_dict(checkpoint["amp"])
    train(model, optimizer, range(3, 6))
    assert_same(training_state(model, optimizer), expected)


@pytest.mark.parametrize("first, second", [(a, b) for a, b in itertools.product(LEVELS, LEVELS) if a != b])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moving_between_levels_has_no_loss_spike(first, second, name):
    model, optimizer = build(first, name)
    train(model, optimizer, range(10))
    checkpoint = torch.load(saved(training_state(model, optimizer)))
    expected = train(model, optimizer, range(10, 14))
    model, optimizer = build(second, name, seed=99)
    load(model, optimizer, checkpoint)
    assert train(model, optimizer, range(10, 14)) == pytest.approx(expected, abs=0.02)
    assert amp.loss_scale() == {"O0": 1.0, "O3": 1.0, "O4": 1.0, "O5": 1.0}.get(second, 2.0 ** 16)


@pytest.mark.parametrize("level", LEVELS)
def test_the_originals_checkpoint_files_load(level):
    """Apex at O2 saved FP32 copies of half weights; scripts of its time also saved half ones."""
    model, optimizer = build(level)
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(8)
        weights = {name: value.half().to(dtype) if value.is_floating_point() else value
                   for name, value in Net().state_dict().items()}
        model.load_state_dict(weights)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}})
        for name, value in model.state_dict().items():
            assert torch.equal(value.double(), weights[name].double()) or level in ("O5",), name
        if level in ("O1", "O2"):
            assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}}
    train(model, optimizer, range(2))


def test_another_number_of_losses_loads_what_fits_and_says_what_it_left():
    model, optimizer = build("O1", num_losses=2)
    three = {f"loss_scaler{i}": {"loss_scale": 2.0 ** (5 + i), "unskipped": i} for i in range(3)}
    amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=1)
    with pytest.warns(UserWarning, match="not loaded: .'loss_scaler2'."):
        amp.load_state_dict(three)
    assert amp.state_dict() == {key: three[key] for key in ("loss_scaler0", "loss_scaler1")}
    with pytest.warns(UserWarning, match="left at their start: .'loss_scaler1'."):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert amp.loss_scale(0) == 8.0 and amp.loss_scale(1) == 64.0


@pytest.mark.parametrize("bad, error, message", [
    (None, TypeError, "got NoneType"), ({"model": {}}, RuntimeError, "unexpected key 'model'"),
    ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}, "loss_scaler1": 2.0}, RuntimeError, "'loss_scaler1' holds "
                                                                                               "2.0"),
])
def test_a_checkpoint_of_another_kind_is_refused_whole(bad, error, message):
    build("O1", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(error, match=message):
        amp.load_state_dict(bad)
    assert amp.state_dict() == before


# --- state_dict and load_state_dict of a model ------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_loads_into_a_plain_fp32_model(level):
    model, optimizer = build(level)
    train(model, optimizer, range(3))
    plain, _ = build(None, seed=99)
    assert_same(list(plain.state_dict()), list(model.state_dict()))
    plain.load_state_dict(torch.load(saved(model.state_dict())))
    model.eval(), plain.eval()
    x = torch.randn(4, 1, 6, 6)
    with amp.disable_casts():
        torch.testing.assert_close(model(x).float(), plain(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_state_dict_is_the_masters(level):
    model, optimizer = build(level)
    train(model, optimizer, range(3))
    masters = dict(zip((name for name, _ in model.named_parameters()), amp.master_params(optimizer)))
    state = model.state_dict()
    for name, master in masters.items():
        assert state[name].dtype is torch.float32 and state[name].data_ptr() == master.data_ptr()
        assert not torch.equal(master, master.to(model.fc.weight.dtype).float()) or name in ("bn.weight", "bn.bias")
    assert state["gain"].dtype is torch.float32
    assert all(value is dict(model.named_parameters())[name] for name, value in model.state_dict(keep_vars=True).items()
               if name in masters)
    assert_same(model.fc.state_dict(), {"weight": state["fc.weight"], "bias": state["fc.bias"]})


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_state_dict_sees_parameters_written_since_the_last_step(level):
    model, optimizer = build(level)
    with torch.no_grad():
        model.conv.weight.fill_(0.5)
    assert torch.all(model.state_dict()["conv.weight"] == 0.5)
    assert torch.all(model.conv.state_dict()["weight"] == 0.5)


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
def test_writing_into_state_dict_values_reaches_the_next_forward(level, mode):
    model, optimizer = build(level)
    x = torch.randn(2, 1, 6, 6)
    for value in model.state_dict().values():
        value.zero_()
    with {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
        assert not model(x).any()
    assert not any(parameter.any() for parameter in model.parameters())
    train(model, optimizer, range(2))
    assert model.fc.bias.any()


@pytest.mark.parametrize("level", LEVELS)
def test_load_state_dict_strict_partial_and_through_submodules(level):
    model, optimizer = build(level)
    torch.manual_seed(50)
    source = {name: value.bfloat16().half().float() if value.is_floating_point() else value
              for name, value in Net().state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"fc.weight": source["fc.weight"]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**source, "fc.weight": torch.ones(9, 9)})
    result = model.load_state_dict({"fc.bias": source["fc.bias"], "other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]
    model.conv.load_state_dict({"weight": source["conv.weight"], "bias": source["conv.bias"]})
    nn.ModuleDict({"module": model}).load_state_dict({f"module.{name}": value for name, value in source.items()})
    assert_same(dict(model.state_dict()), source)
    expected = [source[name] for name, _ in model.named_parameters()]
    assert_same([parameter.detach().float() for parameter in model.parameters()], expected)
    assert_same([master.detach().float() for master in amp.master_params(optimizer)], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_assign_is_refused_where_it_would_replace_low_precision_parameters(level):
    model, optimizer = build(level)
    source = Net().state_dict()
    if level in ("O2", "O3", "O5"):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="assign=True.*without assign, or before amp.initialize"):
            model.load_state_dict(source, assign=True)
        assert_same(model.state_dict(), before)
    else:
        model.load_state_dict(source, assign=True)
        assert_same(dict(model.state_dict()), dict(source))


def test_frozen_parameters_of_no_optimizer_are_saved_as_float():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    original = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    state = model.state_dict()
    assert torch.equal(state["0.weight"], original["0.weight"].half().float())
    assert torch.equal(state["1.weight"], original["1.weight"])


# --- copies and whole-model pickles -----------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_and_optimizer_copied_together_train_on(level, name):
    model, optimizer = build(level, name)
    train(model, optimizer, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(twin.state_dict())
    train(model, optimizer, range(2, 5))
    assert_same(twin.state_dict(), before)
    train(twin, twin_optimizer, range(2, 5))
    assert_same(twin.state_dict(), model.state_dict())
    assert_same(twin_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_kept_through_state_dict_follows_exactly(level):
    """As timm's ModelEma does; the oracle averages the FP32 values outside any model."""
    model, optimizer = build(level)
    average = copy.deepcopy(model).eval()
    oracle = {key: value.clone() for key, value in model.state_dict().items()}
    for iteration in range(6):
        train(model, optimizer, range(iteration, iteration + 1))
        values = model.state_dict()
        with torch.no_grad():
            for key, value in average.state_dict().items():
                value.copy_(value * 0.999 + 0.001 * values[key])
                oracle[key].copy_(oracle[key] * 0.999 + 0.001 * values[key])
    state = average.state_dict()
    followed = [key for key, _ in model.named_parameters()] if level != "O3" else []
    assert_same({key: state[key] for key in followed}, {key: oracle[key] for key in followed})
    plain, _ = build(None)
    plain.load_state_dict(state)
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(average(x).float(), plain.eval()(x).float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("level", LEVELS)
def test_averaged_model_warns_where_it_averages_half_parameters(level):
    torch.manual_seed(0)
    model = nn.Sequential(Net())
    model, optimizer = amp.initialize(model, OPTIMIZERS["sgd"](model.parameters()), opt_level=level, verbosity=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        averaged = AveragedModel(model)
        copy.deepcopy(model)
    assert len([w for w in caught if "AveragedModel" in str(w.message)]) == (level in ("O2", "O3", "O5"))
    averaged.update_parameters(model)
    train(model, optimizer, range(2))
    averaged.update_parameters(model)
    assert averaged(torch.randn(2, 1, 6, 6)).shape == (2, 3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_pickled_models(level, protocol):
    model, optimizer = build(level)
    train(model, optimizer, range(2))
    again = pickle.loads(pickle.dumps(model, protocol))
    assert type(again) is (type(model) if level in ("O2", "O3", "O5") else Net)
    assert_same(again.state_dict(), model.state_dict())
    x = torch.randn(2, 1, 6, 6)
    assert torch.equal(again.eval()(x), model.eval()(x))
    for value in again.state_dict().values():
        value.zero_()
    assert model.state_dict()["fc.weight"].any()


@pytest.mark.parametrize("level", LEVELS)
def test_whole_models_and_optimizers_saved_together_train_on(level):
    model, optimizer = build(level)
    train(model, optimizer, range(2))
    again, again_optimizer = torch.load(saved((model, optimizer)), weights_only=False)
    if level in ("O0", "O1", "O4"):
        again, again_optimizer = amp.initialize(again, again_optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, range(2, 4))
    train(again, again_optimizer, range(2, 4))
    assert_same(again.state_dict(), model.state_dict())


USER_MODULE = """
import torch
class Model(torch.nn.Linear):
    scale = 2.0
    def forward(self, x):
        return super().forward(x) * self.scale
"""


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_saved_model_loads_where_this_package_is_not_installed(level, tmp_path):
    (tmp_path / "user_module.py").write_text(USER_MODULE)
    sys.path.insert(0, str(tmp_path))
    try:
        sys.modules.pop("user_module", None)
        from user_module import Model
        model = amp.initialize(Model(3, 2), opt_level=level, verbosity=0)
        torch.save(model, tmp_path / "model.pt")
    finally:
        sys.path.remove(str(tmp_path))
    printed = run_python("import sys; sys.modules['apex_amp'] = None\n"
                         "import torch; model = torch.load('model.pt', weights_only=False)\n"
                         "print(type(model).__name__, '_amp_cast' in vars(model), model(torch.ones(1, 3)).tolist())",
                         tmp_path, PYTHONPATH=str(tmp_path))
    amp.shutdown()
    assert printed.strip() == f"Model False {model(torch.ones(1, 3)).tolist()}"


def test_a_saved_O2_model_loads_in_a_fresh_process(tmp_path):
    (tmp_path / "user_module.py").write_text(USER_MODULE)
    sys.path.insert(0, str(tmp_path))
    try:
        sys.modules.pop("user_module", None)
        from user_module import Model
        torch.manual_seed(0)
        model = Model(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        torch.save(model, tmp_path / "model.pt")
    finally:
        sys.path.remove(str(tmp_path))
    printed = run_python("import torch; model = torch.load('model.pt', weights_only=False)\n"
                         "print(model.weight.dtype, model(torch.ones(1, 3, dtype=torch.float64)).dtype)\n"
                         "torch.save(model.state_dict(), 'state.pt')", tmp_path)
    assert printed.split() == ["torch.float16", "torch.float32"]
    assert_same(dict(torch.load(tmp_path / "state.pt")), dict(model.state_dict()))


class OwnDeepcopy(nn.Linear):
    def __deepcopy__(self, memo: dict) -> OwnDeepcopy:
        made = type(self)(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made


class OwnCopyOfDict(nn.Linear):
    def __deepcopy__(self, memo: dict) -> OwnCopyOfDict:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class OwnGetstate(nn.Linear):
    def __getstate__(self) -> dict:
        return self.__dict__


class OwnReduce(nn.Linear):
    def __reduce__(self) -> tuple:
        return type(self), (self.in_features, self.out_features), self.__dict__


class OwnNew(nn.Linear):
    def __new__(cls, *args: Any) -> OwnNew:
        made = super().__new__(cls)
        made.__dict__["made_by_new"] = True
        return made


@pytest.mark.parametrize("kind", [OwnDeepcopy, OwnCopyOfDict, OwnGetstate, OwnReduce, OwnNew])
@pytest.mark.parametrize("level", LEVELS)
def test_models_with_copying_code_of_their_own(kind, level):
    torch.manual_seed(0)
    model = kind(3, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    x = torch.randn(4, 3)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert isinstance(again, kind)
        assert_same(again.state_dict(), model.state_dict())
        torch.testing.assert_close(again(x).float(), model(x).float(), rtol=1e-2, atol=1e-2)
    assert isinstance(model, kind) and type(model) is not kind and model._amp_cast is not None
