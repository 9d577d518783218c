"""Builds apex_amp._C against the torch that is installed beside it.

APEX_AMP_CUDA=1 demands the CUDA kernels, 0 leaves them out; unset, they are built when torch has
CUDA and an nvcc of the same major version is found, whether or not a GPU is visible.
TORCH_CUDA_ARCH_LIST chooses the GPU architectures (default: sm_80, sm_90, sm_100 and PTX).
MAX_JOBS limits the compilers that run at once.
"""
import glob
import os
import shutil
import site
import subprocess
import sys
import sysconfig

from setuptools import setup

try:
    import torch
except ImportError:
    # pip builds in an isolated environment that hides site-packages; the extension must be built
    # against the torch it will be loaded beside, so look there before giving up.
    sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    try:
        import torch
    except ImportError:
        sys.exit("apex_amp: torch 2.11 or later must be installed before apex_amp is built "
                 "(pip install torch; with uv, add --no-build-isolation)")

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension


def find_cuda_home():
    """The CUDA toolkit's folder, from CUDA_HOME, CUDA_PATH or the nvcc on PATH; None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if home is None and nvcc:
        # The nvcc on PATH may be a script somewhere else: ask it.
        dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        top = next((line for line in dry_run.splitlines() if line.startswith("#$ TOP=")), None)
        home = os.path.realpath(top.partition("=")[2]) if top else None
    return home if home and os.path.exists(os.path.join(home, "bin", "nvcc")) else None


def reason_against_cuda(cuda_home):
    """Why the CUDA kernels can't be built, in words; None when they can."""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if cuda_home is None:
        return f"no nvcc was found (torch wants CUDA {torch.version.cuda}; set CUDA_HOME or PATH)"
    text = subprocess.run([os.path.join(cuda_home, "bin", "nvcc"), "--version"],
                          capture_output=True, text=True).stdout
    release = text.partition("release ")[2].partition(",")[0]
    if release.partition(".")[0] != torch.version.cuda.partition(".")[0]:
        return f"nvcc is {release or 'unreadable'} and torch was built with CUDA {torch.version.cuda}"
    return None


def cuda_include_dirs(cuda_home):
    """Headers that a slim toolkit lacks but torch's own CUDA packages carry."""
    if os.path.exists(os.path.join(cuda_home, "include", "cusparse.h")):
        return []
    major = torch.version.cuda.partition(".")[0]
    return glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", f"cu{major}", "include"))


def extension():
    """The extension module, and the line that says what it holds and why."""
    switch = os.environ.get("APEX_AMP_CUDA", "")
    if switch not in ("", "0", "1"):
        sys.exit(f"apex_amp: APEX_AMP_CUDA must be 0 or 1, got {switch!r}")
    cuda_home = find_cuda_home()
    reason = "APEX_AMP_CUDA=0" if switch == "0" else reason_against_cuda(cuda_home)
    if switch == "1" and reason:
        sys.exit(f"apex_amp: APEX_AMP_CUDA=1, but {reason}")

    # Contraction and reordering off: CPU and CUDA must agree bit for bit.
    # -fopenmp: at::parallel_for is silently serial in a unit built without it.
    cxx = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden",
           "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas"]
    sources = [f"csrc/{unit}.cpp" for unit in ("bindings", "optimizer_bindings", "tensor_attributes", "cast_function",
                                             "multi_tensor_cpu")]
    common = dict(name="apex_amp._C", depends=["setup.py", *sorted(glob.glob("csrc/*.h"))],
                  extra_link_args=["-fopenmp"])
    if reason:
        return (CppExtension(sources=sources, extra_compile_args={"cxx": cxx}, **common),
                f"building CPU kernels only ({reason})")

    torch.utils.cpp_extension.CUDA_HOME = cuda_home  # what it found by itself at import may be wrong
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
    cuda = CUDAExtension(
        sources=sources + ["csrc/multi_tensor_cuda.cu"],
        include_dirs=cuda_include_dirs(cuda_home),
        define_macros=[("APEX_AMP_CUDA", None), ("APEX_AMP_CUDA_ARCHITECTURES", f'"{architectures}"')],
        # --threads: the architectures are compiled side by side.
        extra_compile_args={"cxx": cxx, "nvcc": ["-O3", "-std=c++17", "-fmad=false", "--expt-relaxed-constexpr",
                                                 "--threads=4"]},
        **common)
    return cuda, f"building CPU and CUDA kernels ({architectures}, {cuda_home})"


class BuildWhenChanged(BuildExtension):
    """Builds only what changed, also across plain, wheel and editable builds of one checkout.

    torch's BuildExtension links every time, since it cannot know which headers and which torch a
    module depends on. Here both are listed: the headers by `extension`, the rest by a file that is
    rewritten when torch, a flag or the compiler changes.
    """

    def finalize_options(self):
        forced = self.force
        super().finalize_options()
        build = self.get_finalized_command("build")
        self.force = bool(forced or build.force)
        # An editable build would compile everything once more in a folder that is thrown away.
        self.build_temp = os.path.join(build.build_base, f"temp.{self.plat_name}-{sys.implementation.cache_tag}")

    def build_extensions(self):
        print(f"apex_amp: {SUMMARY}", file=sys.stderr)
        for ext in self.extensions:
            ext.depends.append(self.write_configuration(ext))
        super().build_extensions()

    def write_configuration(self, ext):
        """The path of the file that holds what `ext` is built with; its time moves when that does."""
        variables = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
        configuration = repr((torch.__version__, torch.__file__, vars(ext), [os.environ.get(v) for v in variables]))
        path = os.path.join(self.build_temp, "configuration.txt")
        os.makedirs(self.build_temp, exist_ok=True)
        if not os.path.exists(path) or open(path).read() != configuration:
            with open(path, "w") as file:
                file.write(configuration)
        return path


EXTENSION, SUMMARY = extension()
setup(ext_modules=[EXTENSION], cmdclass={"build_ext": BuildWhenChanged})
