"""The package as it is built and installed."""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, cwd: Path = ROOT, **options) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=600, **options)


def setup(*arguments: str) -> str:
    done = run(sys.executable, "setup.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def import_without_extension(folder: Path, extension: bytes | None) -> str:
    """The error of an import of a copy of the package whose _C is absent, or is a file with these bytes."""
    shutil.copytree(ROOT / "apex_amp", folder / "apex_amp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if extension is not None:
        (folder / "apex_amp" / "_C.so").write_bytes(extension)
    source = """
        import sys
        sys.path.insert(0, ".")
        sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
        import apex_amp
    """
    done = run(sys.executable, "-c", textwrap.dedent(source), cwd=folder)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("extension, reason", [(None, "cannot import name '_C'"), (b"not a library", "_C.so")])
def test_missing_extension_says_how_to_build(tmp_path, extension, reason):
    message = import_without_extension(tmp_path, extension)
    assert message.startswith("ImportError: apex_amp._C, the compiled part of apex_amp, cannot be loaded beside torch ")
    assert reason in message and "python setup.py build_ext --inplace" in message


@pytest.mark.slow
def test_second_build_of_unchanged_sources_does_nothing():
    setup("build_ext", "--inplace")
    built = [*(ROOT / "build").rglob("*.o"), *(ROOT / "build").rglob("*.so"), *(ROOT / "apex_amp").glob("*.so")]
    assert len(built) >= 5
    before = {path: path.stat().st_mtime_ns for path in built}
    output = setup("build_ext", "--inplace")
    assert {path: path.stat().st_mtime_ns for path in built} == before
    assert not re.search(r"\b(g\+\+|c\+\+|nvcc|copying|ninja)\b", output), output


@pytest.mark.slow
def test_build_says_what_and_why():
    output = setup("build_ext", "--inplace")
    assert re.search(r"^apex_amp: building CPU (kernels only \(.+\)|and CUDA kernels \(.+\))$", output, re.MULTILINE)


@pytest.mark.parametrize("variables, message", [
    ({"APEX_AMP_CUDA": "yes"}, "APEX_AMP_CUDA must be 0 or 1, got 'yes'"),
    ({"APEX_AMP_CUDA": "1", "CUDA_HOME": "/nowhere"}, "APEX_AMP_CUDA=1, but "),
])
def test_build_refuses(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run(sys.executable, "setup.py", "--version")
    assert done.returncode == 1 and f"apex_amp: {message}" in done.stderr


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    done = run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w",
               str(tmp_path), ".")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, = tmp_path.glob("apex_amp-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if re.fullmatch(r"apex_amp/_C\..*so", name)]
    assert "apex_amp/py.typed" in names and "apex_amp/amp/__init__.py" in names
    assert {name.partition("/")[0] for name in names} == {"apex_amp", wheel.name.rsplit("-", 3)[0] + ".dist-info"}


@pytest.mark.slow
def test_sdist_holds_what_a_build_needs(tmp_path):
    setup("sdist", "--dist-dir", str(tmp_path))
    archive, = tmp_path.glob("apex_amp-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "apex_amp/py.typed",
              *(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()),
              *(str(path.relative_to(ROOT)) for path in (ROOT / "apex_amp").rglob("*.py"))}
    assert needed <= names, needed - names
    assert not [name for name in names if name.endswith(".so") or name.startswith((".venv", "build/"))]
