"""The floors of the house: what imports or includes what. An import points to a lower floor, never up or sideways."""
from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# Lowest first. A package named here stands for all its modules, which may import each other.
FLOORS = [
    ["_C", "_version", "legacy_torch"],
    ["amp.cast_state", "amp.cast_lists", "amp.generated_class"],
    ["amp.custom_function"],
    ["amp._state", "amp.integrations", "amp.traced_casts", "multi_tensor"],
    ["multi_tensor_updates"],
    ["amp.patching", "amp.master_weights", "amp.scaler", "multi_tensor_apply", "normalization"],
    ["amp.model_cast", "amp.gradients", "amp.cast_report", "optimizers"],
    ["amp.overflow", "amp.distributed", "amp.arguments"],
    ["amp.amp_optimizer"],
    ["amp.scale_context"],
    ["amp.frontend", "amp.autocast", "amp.grad_scaler"],
    ["amp.legacy_handle"],
    ["amp.__init__"],
    ["parallel", "fp16_utils", "legacy_optimizers"],
    ["__init__"],
    ["legacy"],
    ["apex_alias", "cli"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

INCLUDES = {
    "elementwise.h": set(),
    "optimizer_elements.h": {"elementwise.h"},
    "multi_tensor.h": {"optimizer_elements.h", "elementwise.h"},
    "multi_tensor_cpu.cpp": {"multi_tensor.h"},
    "multi_tensor_cuda.cu": {"multi_tensor.h"},
    "cast_function.h": set(),
    "cast_function.cpp": {"cast_function.h"},
    "tensor_lists.h": {"multi_tensor.h"},
    "bindings.h": set(),
    "optimizer_bindings.cpp": {"bindings.h", "tensor_lists.h"},
    "tensor_attributes.cpp": {"bindings.h", "tensor_lists.h"},
    "bindings.cpp": {"bindings.h", "cast_function.h", "tensor_lists.h"},
}
TORCH_UNITS = {"bindings.h", "tensor_lists.h", "bindings.cpp", "optimizer_bindings.cpp", "tensor_attributes.cpp",
               "cast_function.cpp"}


def module_names(package: Path) -> dict[str, Path]:
    """Dotted names below the package ("amp.scaler", "amp.__init__") of all its Python files."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}


def imported_modules(name: str, source: str, known: set[str]) -> set[str]:
    """The modules of apex_amp that the module `name` imports: in functions too, but not for type checkers alone."""
    found = set()
    here = ["apex_amp", *name.split(".")][:-1]
    for node in ast.walk(without_type_checking(ast.parse(source))):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [base + [alias.name] for alias in node.names]
        else:
            continue
        found |= {module_of(".".join(target[1:]), known) for target in targets if target[0] == "apex_amp"}
    return found - {name}


def without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [node for node in tree.body
                 if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return tree


def module_of(dotted: str, known: set[str]) -> str:
    """The module that holds the name `dotted`: itself, or the nearest package or module around it."""
    while dotted:
        for candidate in (dotted, f"{dotted}.__init__"):
            if candidate in known:
                return candidate
        dotted = dotted.rpartition(".")[0]
    return "__init__"


def unit_of(module: str) -> str:
    """The entry of FLOORS that the module belongs to."""
    package = module.partition(".")[0]
    return module if module in FLOOR else package if package in FLOOR else module


def violations(sources: dict[str, str]) -> list[str]:
    known = set(sources) | {"_C"}
    found = []
    for name, source in sources.items():
        unit = unit_of(name)
        if unit not in FLOOR:
            found.append(f"{name} has no floor: add it to FLOORS")
            continue
        for target in map(unit_of, imported_modules(name, source, known)):
            if target != unit and FLOOR.get(target, len(FLOORS)) >= FLOOR[unit]:
                found.append(f"{name} imports {target}")
    return sorted(found)


def test_python_imports_point_downward():
    assert violations({name: path.read_text() for name, path in module_names(ROOT / "apex_amp").items()}) == []


@pytest.mark.parametrize("name, source, expected", [
    ("amp._state", "from apex_amp import amp", ["amp._state imports amp.__init__"]),
    ("amp.cast_state", "def f():\n    from . import _state", ["amp.cast_state imports amp._state"]),
    ("amp.scaler", "from .patching import install", ["amp.scaler imports amp.patching"]),
    ("amp._state", "if TYPE_CHECKING:\n    from .scaler import LossScaler", []),
    ("amp.cast_state", "import apex_amp", ["amp.cast_state imports __init__"]),
    ("amp.scaler", "from .. import _C\nfrom ..multi_tensor import multi_tensor_scale\nimport torch", []),
    ("optimizers.fused_adam", "from ._base import Base", []),
    ("amp.surprise", "", ["amp.surprise has no floor: add it to FLOORS"]),
])
def test_the_checker_sees(name, source, expected):
    others = ("__init__", "amp.__init__", "amp._state", "amp.cast_state", "amp.patching", "amp.scaler", "multi_tensor",
              "optimizers.__init__", "optimizers._base")
    assert violations({**dict.fromkeys(others, ""), name: source}) == expected


def includes(path: Path) -> tuple[set[str], set[str]]:
    """The quoted and the angled includes of a C++ file."""
    text = path.read_text()
    return (set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)),
            set(re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.MULTILINE)))


def test_csrc_includes_point_downward():
    for path in CSRC.iterdir():
        assert path.name in INCLUDES, f"csrc/{path.name} has no place: add it to INCLUDES"
        own, system = includes(path)
        assert own <= INCLUDES[path.name], f"csrc/{path.name} includes {own - INCLUDES[path.name]}"
        if path.name not in TORCH_UNITS:
            torch_headers = {name for name in system if re.match(r"(torch|ATen|c10|pybind11)/", name)}
            assert not torch_headers, f"csrc/{path.name} must do without torch, includes {torch_headers}"
