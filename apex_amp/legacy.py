"""Makes `import apex`, `import amp_C` and `import apex_C` resolve to this package.

The folder `apex_alias` beside this file holds an `apex` package (with its distribution metadata), an `amp_C` and an
`apex_C`. `install()` puts it on sys.path, so Python's own machinery finds them: import statements, importlib,
find_spec, importlib.metadata, and processes that a script starts. Behind `apex.` every module is a face: a module of
its own name whose attributes are those of a module of this package.
"""
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import operator
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from . import legacy_torch

ALIAS_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "apex_alias")
_TOP_LEVEL = ("apex", "amp_C", "apex_C")

# Apex's module -> the module (or module:object) of this package that answers for it; "": a package without names.
_FACES = {
    "apex.amp": "apex_amp.amp",
    "apex.amp.amp": "apex_amp.amp",
    "apex.amp.frontend": "apex_amp.amp",
    "apex.amp._amp_state": "apex_amp.amp.legacy_handle:_amp_state",
    "apex.amp._initialize": "apex_amp.amp.legacy_handle",
    "apex.amp.handle": "apex_amp.amp.legacy_handle",
    "apex.amp.opt": "apex_amp.amp.legacy_handle",
    "apex.amp.scaler": "apex_amp.amp.scaler",
    "apex.amp.lists": "apex_amp.amp.legacy_handle:lists",
    "apex.amp.lists.functional_overrides": "apex_amp.amp.legacy_handle:lists.functional_overrides",
    "apex.amp.lists.torch_overrides": "apex_amp.amp.legacy_handle:lists.torch_overrides",
    "apex.amp.lists.tensor_overrides": "apex_amp.amp.legacy_handle:lists.tensor_overrides",
    "apex.contrib": "",
    "apex.contrib.optimizers": "apex_amp.optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "apex_amp.fp16_utils",
    "apex.contrib.optimizers.fused_adam": "apex_amp.legacy_optimizers",
    "apex.contrib.optimizers.fused_lamb": "apex_amp.optimizers",
    "apex.contrib.optimizers.fused_sgd": "apex_amp.optimizers",
    "apex.fp16_utils": "apex_amp.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "apex_amp.fp16_utils",
    "apex.fp16_utils.fp16util": "apex_amp.fp16_utils",
    "apex.fp16_utils.loss_scaler": "apex_amp.fp16_utils",
    "apex.multi_tensor_apply": "apex_amp.multi_tensor_apply",
    "apex.multi_tensor_apply.multi_tensor_apply": "apex_amp.multi_tensor_apply",
    "apex.normalization": "apex_amp.normalization",
    "apex.normalization.fused_layer_norm": "apex_amp.normalization",
    "apex.optimizers": "apex_amp.optimizers",
    "apex.optimizers.fp16_optimizer": "apex_amp.fp16_utils",
    "apex.optimizers.fused_adam": "apex_amp.legacy_optimizers",
    "apex.optimizers.fused_lamb": "apex_amp.optimizers",
    "apex.optimizers.fused_novograd": "apex_amp.optimizers",
    "apex.optimizers.fused_sgd": "apex_amp.optimizers",
    "apex.parallel": "apex_amp.parallel",
    "apex.parallel.LARC": "apex_amp.parallel",
    "apex.parallel.distributed": "apex_amp.parallel",
    "apex.parallel.optimized_sync_batchnorm": "apex_amp.parallel",
    "apex.parallel.sync_batchnorm": "apex_amp.parallel",
}

# Names that a face has beyond or instead of its module's: Apex changed them, and scripts of every age are run.
_EXTRA_NAMES = {
    "apex.optimizers": {"FP16_Optimizer": "apex_amp.fp16_utils", "FusedAdam": "apex_amp.legacy_optimizers"},
    "apex.contrib.optimizers": {"FP16_Optimizer": "apex_amp.fp16_utils", "FusedAdam": "apex_amp.legacy_optimizers"},
}

# What lies outside the surface: what it was, what became of it in Apex, what to use.
_GONE = {
    "apex.RNN": "Apex's fused recurrent cells; use torch.nn.LSTM, GRU and RNN, which amp casts",
    "apex.contrib": "an optional CUDA extension of NVIDIA Apex; see torch.nn.functional.scaled_dot_product_attention, "
                    "cross_entropy and group_norm, torch.nn.utils.clip_grad_norm_, and torch.ao.pruning for its parts",
    "apex.fused_dense": "NVIDIA Apex's fused linear layers (CUDA extension); use torch.nn.Linear under torch.compile",
    "apex.mlp": "NVIDIA Apex's fused MLP (CUDA extension); use torch.nn.Sequential of Linear and ReLU under "
                "torch.compile",
    "apex.optimizers.FusedLARS": "NVIDIA Apex's fused LARS; use apex.parallel.LARC around FusedSGD",
    "apex.optimizers.FusedMixedPrecisionLamb": "NVIDIA Apex's LAMB for half models; use FusedLAMB at opt_level O2",
    "apex.parallel.multiproc": "Apex's process launcher; use torchrun",
    "apex.pyprof": "a profiler that Apex removed on 2022-07-06; use torch.profiler, and torch.cuda.nvtx for ranges",
    "apex.reparameterization": "weight normalization that Apex removed on 2022-07-06; use "
                               "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "NVIDIA Apex's Megatron layers; they live on in Megatron-LM (megatron.core)",
}


def install(force: bool = False, children: bool = False) -> bool:
    """Let `apex`, `amp_C` and `apex_C` resolve to this package in this process.

    Args:
        force: also in front of an Apex that is installed; it is never shadowed otherwise.
        children: also in Python processes that this one starts (through PYTHONPATH).

    Returns:
        Whether `apex` is this package now; False where a real Apex was left in place.

    Raises:
        RuntimeError: `force`, but a real Apex has been imported already.
    """
    if is_installed():
        return True
    real = find_real_apex()
    if real is not None and not force:
        return False
    if "apex" in sys.modules:
        raise RuntimeError(f"apex_amp.legacy.install(force=True): {real} is imported already; call install first")
    if real is not None:
        sys.path.insert(0, ALIAS_DIR)
    else:
        sys.path.append(ALIAS_DIR)
    importlib.invalidate_caches()
    if children:
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = ALIAS_DIR + (os.pathsep + inherited if inherited else "")
    return True


def uninstall() -> None:
    """Undo `install()`: `apex` is found no more. Names that a script has already imported go on working."""
    if not is_installed():
        return
    sys.path[:] = [entry for entry in sys.path if entry != ALIAS_DIR]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if ALIAS_DIR in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in inherited if entry != ALIAS_DIR)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _FaceFinder)]
    for name in [n for n in sys.modules if n in _TOP_LEVEL or n.startswith("apex.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def is_installed() -> bool:
    """Whether `apex` resolves to this package."""
    return ALIAS_DIR in sys.path


def find_real_apex() -> str | None:
    """Where an `apex` that isn't this package is installed or imported from; None without one."""
    module = sys.modules.get("apex")
    if module is not None and not isinstance(module, Face):
        return getattr(module, "__file__", None) or repr(module)
    spec = importlib.machinery.PathFinder.find_spec("apex", [p for p in sys.path if p != ALIAS_DIR])
    return spec.origin if spec is not None and spec.loader is not None and spec.origin else None


class Face(types.ModuleType):
    """A module of Apex's name whose attributes come from this package."""

    def __getattr__(self, name: str) -> object:
        full_name = f"{self.__name__}.{name}"
        if full_name in _FACES:
            return importlib.import_module(full_name)
        target = _EXTRA_NAMES.get(self.__name__, {}).get(name)
        if target is not None:
            return getattr(importlib.import_module(target), name)
        target = self.__dict__.get("_target")
        if target is not None and not name.startswith("__"):
            try:
                return getattr(target, name)
            except AttributeError:
                pass
        raise AttributeError(_no_such_name(full_name))


def become_face(name: str) -> None:
    """Turns the top-level module `name`, being imported from `apex_alias`, into a face."""
    legacy_torch.enable_if_inherited()
    sys.modules[name].__class__ = Face
    if not any(isinstance(finder, _FaceFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FaceFinder())


class _FaceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the faces below `apex.`, while `apex` itself is one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("apex.") or not isinstance(sys.modules.get("apex"), Face):
            return None
        if name not in _FACES:
            # Without name=: `from apex import x` swallows an error that has the name it looks for, and its words.
            raise ModuleNotFoundError(_no_such_name(name))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        if not _FACES[spec.name]:
            return Face(spec.name)
        module_name, _, attribute = _FACES[spec.name].partition(":")
        target = importlib.import_module(module_name)
        if attribute:
            return operator.attrgetter(attribute)(target)
        face = Face(spec.name, target.__doc__)
        names = getattr(target, "__all__", None) or [n for n in vars(target) if not n.startswith("_")]
        # apex.parallel.LARC was a module, whatever the target has under that name.
        elsewhere = _EXTRA_NAMES.get(spec.name, {})
        exported = [n for n in names if f"{spec.name}.{n}" not in _FACES and n not in elsewhere]
        # Copied, not only forwarded: scripts look into `amp.__dict__`.
        face.__dict__.update({n: getattr(target, n) for n in exported}, __all__=[*exported, *elsewhere], _target=target)
        return face

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _no_such_name(full_name: str) -> str:
    known = [gone for gone in _GONE if full_name == gone or full_name.startswith(gone + ".")]
    if known:
        return f"apex_amp has no {full_name}: it was {_GONE[max(known, key=len)]}"
    parent = full_name.rpartition(".")[0]
    return (f"apex_amp has no {full_name}: no {parent} of Apex that scripts are known to use had this name. "
            f"The README's table of Apex's names lists what there is")
