"""`apex-amp doctor`: what is built, what isn't and why, and a self test of a few seconds on each device."""
from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence

import torch

from .. import __version__, legacy

DESCRIPTION = """\
Say what apex_amp was built with and runs on, test its kernels and casts on each device, and name the one next command
where something is wrong. Exit status: 0 healthy, 1 not."""

REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir apex-amp"


class Report:
    """Prints findings as they come and keeps the first remedy."""

    def __init__(self) -> None:
        self.remedy: str | None = None
        self.healthy = True

    def fact(self, subject: str, text: str) -> None:
        print(f"  {subject:<14}{text}", flush=True)

    def wrong(self, subject: str, text: str, remedy: str | None = None) -> None:
        self.fact(subject, "WRONG: " + text)
        self.healthy = False
        self.remedy = self.remedy or remedy


def main(argv: Sequence[str]) -> int:
    """The command; `argv` is what stands after `apex-amp doctor`."""
    argparse.ArgumentParser(prog="apex-amp doctor", description=DESCRIPTION, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    report = Report()
    print("build")
    describe_versions(report)
    if describe_extension(report):
        print("self test")
        devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        for device in devices:
            for check in (check_kernels, check_casts, check_training_step):
                run_check(report, check, torch.device(device))
    if report.healthy:
        print("healthy")
        return 0
    print("not healthy" + (f"; next: {report.remedy}" if report.remedy else ""))
    return 1


def describe_versions(report: Report) -> None:
    report.fact("apex_amp", f"{__version__} in {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}")
    report.fact("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    report.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
    real_apex = legacy.find_real_apex()
    report.fact("apex", f"`import apex` is {real_apex}; `apex-amp run --force` puts apex_amp in its place"
                if real_apex else "none installed; `apex-amp run SCRIPT` answers `import apex`")


def describe_extension(report: Report) -> bool:
    """Says how _C was built; False where it can't be loaded."""
    try:
        from .. import _C
    except ImportError as error:
        report.wrong("extension", f"apex_amp._C can't be loaded: {error}", REBUILD)
        return False
    info = _C.build_info()
    built_against = info["torch_version"]
    if built_against.partition("+")[0] != torch.__version__.partition("+")[0]:
        report.wrong("extension", f"built against torch {built_against}, runs on {torch.__version__}", REBUILD)
    report.fact("CPU kernels", f"built, using {info['cpu_isa']}, {torch.get_num_threads()} threads")
    if info["cuda"]:
        report.fact("CUDA kernels", f"built with CUDA {info['cuda_version']} for {info['cuda_architectures']}")
    elif torch.version.cuda is None:
        report.fact("CUDA kernels", "not built: this torch has no CUDA")
    else:
        report.fact("CUDA kernels", "not built: no CUDA toolkit of torch's major version was found at install time. "
                    "Everything works on CUDA through torch's own foreach kernels, with more launches and memory "
                    f"traffic; for the fused ones install the CUDA {torch.version.cuda} toolkit and run: {REBUILD}")
    if not torch.cuda.is_available():
        report.fact("GPUs", "none" if torch.version.cuda is None else "none visible to torch")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        report.fact(f"GPU {index}", f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
                    f"{properties.total_memory / 2 ** 30:.0f} GiB")
    return True


def run_check(report: Report, check: Callable[[torch.device], str], device: torch.device) -> None:
    subject = f"{device}"
    try:
        report.fact(subject, "ok: " + check(device))
    except Exception as error:  # whatever goes wrong is the finding
        report.wrong(subject, f"{(check.__doc__ or '').rstrip('.')}: {type(error).__name__}: {error}", REBUILD)


def check_kernels(device: torch.device) -> str:
    """Multi-tensor kernels against torch."""
    from .. import multi_tensor
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 1000, 65537)
    source = [torch.randn(size, generator=generator).to(device, torch.float16) for size in sizes]
    found_inf = torch.zeros(1, device=device)
    target = [torch.empty_like(tensor, dtype=torch.float32) for tensor in source]
    multi_tensor.multi_tensor_scale(source, target, found_inf, 0.5)
    for given, got in zip(source, target):
        torch.testing.assert_close(got, given.float() * 0.5, rtol=0, atol=0)
    norm, _ = multi_tensor.multi_tensor_l2norm(source, per_tensor=True)
    expected = torch.cat([tensor.double() for tensor in source]).norm()
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    if found_inf.item():
        raise AssertionError("an overflow was found in finite tensors")
    source[-1][-1] = float("inf")
    multi_tensor.multi_tensor_scale(source, target, found_inf, 0.5)
    if not found_inf.item():
        raise AssertionError("an inf in the last element was not found")
    return "kernels (scale, l2norm, inf found)"


def check_casts(device: torch.device) -> str:
    """Casts of opt level O1."""
    from .. import amp
    model = torch.nn.Linear(8, 8).to(device)
    model = amp.initialize(model, opt_level="O1", verbosity=0)
    try:
        hidden = model(torch.randn(4, 8, device=device))
        probabilities = torch.softmax(hidden, -1)
        if (hidden.dtype, probabilities.dtype) != (torch.float16, torch.float32):
            raise AssertionError(f"linear, softmax gave {hidden.dtype}, {probabilities.dtype}; "
                                 "expected torch.float16, torch.float32")
    finally:
        amp.shutdown()
    return "casts at O1 (linear in half, softmax in float)"


def check_training_step(device: torch.device) -> str:
    """A training step of opt level O2 and a skipped one."""
    from .. import amp
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        inputs = torch.randn(16, 8, device=device)
        losses = []
        for factor in (1.0, float("inf"), 1.0):
            scale_before, weight_before = amp.loss_scale(), model.weight.clone()
            loss = model(inputs).square().mean()
            losses.append(loss.item())
            with amp.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moved, backed_off = not torch.equal(model.weight, weight_before), amp.loss_scale() < scale_before
            if (moved, backed_off) != ((True, False) if factor == 1.0 else (False, True)):
                raise AssertionError(f"loss times {factor}: parameters moved: {moved}, scale reduced: {backed_off}")
        if not losses[-1] < losses[0]:
            raise AssertionError(f"the loss went from {losses[0]} to {losses[-1]}")
    finally:
        amp.shutdown()
    return "training at O2 (step, overflow skipped, loss falls)"
