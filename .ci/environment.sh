# Sourced by tests/run, benchmarks/run and .ci/run from the repository's root: sets $python to an interpreter that has
# what both need, and builds apex_amp in place.
#
# APEX_AMP_PYTHON=INTERPRETER uses that one as it is. Without it a virtual environment is made in .venv, once, and made
# anew when what it depends on changes.

fail() {
    echo "apex_amp: $*" >&2
    exit 1
}

has_nvidia_gpu() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

check_tools() {
    command -v python3 >/dev/null || fail "python3 (3.10 or later) was not found"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "python3 3.10 or later is needed, found $(python3 --version)"
    python3 -c 'import ensurepip' 2>/dev/null ||
        fail "this python3 cannot make virtual environments (Debian and Ubuntu: install python3-venv)"
    python3 -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "Python's C headers were not found (Debian and Ubuntu: install python3-dev)"
    command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler was found (Debian and Ubuntu: install g++)"
}

make_environment() {
    local torch="torch==2.13.0" stamp
    if has_nvidia_gpu; then torch="torch>=2.11,<2.15"; fi  # the newest that pyproject.toml allows
    stamp="$(python3 --version) $torch $PWD $(cat pyproject.toml)"
    if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then return; fi
    echo "apex_amp: making the environment in .venv (once; some minutes) ..." >&2
    check_tools
    python3 -m venv --clear .venv
    # torch first: apex_amp is built against the torch that is there.
    .venv/bin/python -m pip install --quiet "$torch" setuptools wheel ninja numpy
    .venv/bin/python -m pip install --quiet --editable ".[test,benchmark]"
    echo "$stamp" > .venv/stamp
}

if [ -n "${APEX_AMP_PYTHON:-}" ]; then
    python="$APEX_AMP_PYTHON"
    command -v "$python" >/dev/null || fail "APEX_AMP_PYTHON=$python: no such interpreter"
else
    make_environment
    python="$PWD/.venv/bin/python"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
build_log="$(mktemp)"
"$python" setup.py build_ext --inplace >"$build_log" 2>&1 || { cat "$build_log" >&2; fail "the build failed"; }
grep '^apex_amp:' "$build_log" >&2 || true
rm -f "$build_log"
