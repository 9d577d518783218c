"""apex_amp.legacy: what `import apex` means, in fresh processes, and apex_amp.legacy_torch in this one."""
import importlib
import os
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch

from apex_amp import legacy, legacy_torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run_python(code, *, path=()):
    """Runs `code` in a fresh process that finds this checkout; it must succeed."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), ROOT])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the alias --------------------------------------------------------------------------------------------------------

def test_apex_is_found_by_every_way_python_has_of_finding():
    run_python("""
        import importlib, importlib.metadata, importlib.util, sys
        assert importlib.util.find_spec("apex") is None
        from apex_amp import legacy
        assert legacy.install() and legacy.install() and legacy.is_installed()
        assert importlib.util.find_spec("apex") is not None
        assert importlib.metadata.version("apex") == "0.1"
        assert "apex" in importlib.metadata.packages_distributions()["amp_C"]

        import apex
        import apex_amp
        for name in ("amp", "parallel", "normalization", "fp16_utils"):
            assert getattr(apex, name) is importlib.import_module("apex." + name)
            assert importlib.util.find_spec("apex." + name).name == "apex." + name
        assert apex.amp.initialize is apex_amp.amp.initialize
        assert "state_dict" in apex.amp.__dict__ and apex.amp.__path__ == []
        from apex.parallel import LARC, DistributedDataParallel
        from apex.parallel.LARC import LARC as larc
        assert LARC.LARC is larc is apex_amp.parallel.LARC
        from apex.fp16_utils import *
        assert network_to_half is apex_amp.fp16_utils.network_to_half and "torch" not in apex.fp16_utils.__all__
        import apex_C, torch
        assert apex_C.flatten([torch.ones(2)]).shape == (2,)

        legacy.uninstall()
        assert importlib.util.find_spec("apex") is None and "apex.amp" not in sys.modules
        legacy.uninstall()
    """)


@pytest.mark.parametrize("statement, message", [
    ("from apex import pyprof", "use torch.profiler"),
    ("import apex.pyprof.nvtx", "removed on 2022-07-06"),
    ("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss", "optional CUDA extension"),
    ("from apex.parallel import multiproc", "use torchrun"),
    ("from apex.parallel import Nothing", "no apex.parallel.Nothing"),
    ("import apex; apex.mlp.MLP", "torch.nn.Sequential"),
    ("import apex; apex.parallel.Nothing", "no apex.parallel.Nothing"),
])
def test_names_outside_the_surface_say_what_to_use(statement, message):
    assert legacy.install()
    try:
        with pytest.raises((ModuleNotFoundError, AttributeError), match=message):
            exec(statement, {})
    finally:
        legacy.uninstall()


def make_real_apex(folder):
    (folder / "apex").mkdir()
    (folder / "apex" / "__init__.py").write_text("real = True\n")


def test_a_real_apex_is_shadowed_only_by_force(tmp_path):
    make_real_apex(tmp_path)
    run_python("""
        from apex_amp import legacy
        assert legacy.find_real_apex().endswith("__init__.py")
        assert not legacy.install() and not legacy.is_installed()
        import apex
        assert apex.real
        try:
            legacy.install(force=True)
        except RuntimeError as error:
            assert "imported already" in str(error)
        else:
            raise AssertionError
    """, path=[tmp_path])
    run_python("""
        from apex_amp import legacy
        assert legacy.install(force=True)
        import apex
        apex.amp.initialize
    """, path=[tmp_path])


def test_a_folder_named_apex_is_no_real_apex(tmp_path):
    (tmp_path / "apex").mkdir()
    run_python("""
        from apex_amp import legacy
        assert legacy.install()
        from apex import amp
    """, path=[tmp_path])


def test_child_processes_inherit(tmp_path):
    run_python("""
        import os, subprocess, sys
        from apex_amp import legacy, legacy_torch
        legacy.install(children=True)
        legacy_torch.enable(children=True)
        subprocess.run([sys.executable, "-c", "from apex import amp; import torch._six; amp.initialize"], check=True)
        legacy.uninstall()
        legacy_torch.disable()
        assert legacy.ALIAS_DIR not in os.environ["PYTHONPATH"]
        assert subprocess.run([sys.executable, "-c", "import apex"], stderr=subprocess.DEVNULL).returncode == 1
    """)


# --- legacy torch -----------------------------------------------------------------------------------------------------

@pytest.fixture
def old_torch(tmp_path):
    trusted = tmp_path / "trusted.pt"
    legacy_torch.enable(trusted_files=[str(trusted)])
    yield trusted
    legacy_torch.disable()


def test_everything_is_put_back():
    names = [(torch, "full"), (torch, "load"), (torch, "masked_fill"), (torch.Tensor, "masked_fill_"),
             (torch.Tensor, "masked_select"), (torch.Tensor, "__rsub__")]
    before = [getattr(owner, name) for owner, name in names]
    legacy_torch.enable()
    legacy_torch.enable()
    assert all(getattr(owner, name) is not value for (owner, name), value in zip(names, before))
    legacy_torch.disable()
    legacy_torch.disable()
    assert all(getattr(owner, name) is value for (owner, name), value in zip(names, before))
    with pytest.raises(ImportError):
        importlib.import_module("torch._six")
    with pytest.raises(AttributeError):
        numpy.float


def test_old_modules_and_names(old_torch):
    from torch._six import container_abcs, inf, int_classes, string_classes
    assert isinstance("a", string_classes) and inf == float("inf") and int_classes is int
    assert issubclass(dict, container_abcs.Mapping)
    assert numpy.float is float and numpy.int is int and numpy.object is object
    assert numpy.array([1], dtype=numpy.float).dtype == numpy.float64 and numpy.bool(1)


def test_byte_masks(old_torch):
    x, mask = torch.tensor([1.0, 2.0]), torch.tensor([0, 1], dtype=torch.uint8)
    assert x.masked_fill(mask, -1).tolist() == torch.masked_fill(x, mask, -1).tolist() == [1, -1]
    assert x.masked_fill(mask.bool(), -1).tolist() == [1, -1]
    assert x.masked_select(mask).tolist() == torch.masked_select(x, mask).tolist() == [2]
    assert x.masked_scatter(mask, torch.tensor([5.0])).tolist() == [1, 5]
    assert x.clone().masked_fill_(mask=mask, value=3).tolist() == [1, 3]


def test_subtraction_of_bool_tensors(old_torch):
    mask = torch.tensor([True, False])
    assert (1 - mask).tolist() == [0, 1] and (mask - torch.tensor([False, False])).tolist() == [1, 0]
    assert (1 - torch.tensor([0.5])).item() == 0.5


def test_full_of_an_int_is_float(old_torch):
    assert torch.full((2,), 1).dtype == torch.float32
    assert torch.full((2,), 1, dtype=torch.long).dtype == torch.int64
    assert torch.full((2,), 1, out=torch.empty(2).long()).dtype == torch.int64
    assert torch.full((2,), True).dtype == torch.bool


class Namespace:
    lr = 0.1


def test_whole_objects_load_from_trusted_files_only(old_torch, tmp_path):
    other = tmp_path / "other.pt"
    for path in (old_torch, other):
        torch.save({"args": Namespace()}, path)
    assert torch.load(old_torch)["args"].lr == 0.1
    with open(old_torch, "rb") as file:
        assert torch.load(file)["args"].lr == 0.1
    with pytest.raises(Exception, match="weights_only|Weights only"):
        torch.load(other)
    with pytest.raises(Exception, match="weights_only|Weights only"):
        torch.load(old_torch, weights_only=True)
