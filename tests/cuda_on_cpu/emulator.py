"""Builds csrc/multi_tensor_cuda.cu for the host and runs its kernels on emulated blocks and threads."""
from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
KERNELS = CSRC / "multi_tensor_cuda.cu"

# -fno-gnu-unique, -Bsymbolic: several builds are loaded into one process and must not share their statics.
# -U_FORTIFY_SOURCE: its longjmp refuses to change stacks, which is how fibers are switched.
FLAGS = ["g++", "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique",
         "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unknown-pragmas", f"-I{HERE}", f"-I{CSRC}"]
# ThreadSanitizer's instrumentation without its library: emulator.cpp answers the calls.
CHECKED_FLAGS = ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]

DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
CHECKS = {"x": 1, "y": 2, "both": 3}
SCHEDULES = {"forward": 0, "reverse": 1, "random": 2}
NORM_CHUNK, ELEMENTWISE_CHUNK, TILE = 32768, 16384, 2048  # kNormChunk, kElementwiseChunk, kTile
CURRENT_DRIVER, DRIVER_WITH_SMALL_PARAMETERS = 13000, 12000


class KernelFault(AssertionError):
    """A kernel did what no CUDA device may be asked to do."""


def compile_source(source: Path, target: Path, flags: Sequence[str] = ()) -> None:
    done = subprocess.run([*FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", str(target)], capture_output=True,
                          text=True)
    if done.returncode:
        raise RuntimeError(f"the host compiler refused {source}:\n{done.stderr}")


def compile_all(jobs: Sequence[tuple]) -> None:
    """Calls compile_source(*job) for each, on two cores."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: compile_source(*job), jobs))


def link(objects: Sequence[Path], target: Path) -> Path:
    subprocess.run(["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(target)], check=True)
    return target


class Emulator:
    """One build of the emulator and kernels, loaded."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.emulator_take_report.restype = ctypes.c_char_p
        self.configure()

    def configure(self, schedule: str = "forward", seed: int = 0, driver_version: int = CURRENT_DRIVER,
                  first_block: int = 0, refused_launch: int = 0) -> None:
        """The order of blocks and threads, the driver to pretend, and the first block that runs in a launch.

        Launch number `refused_launch`, counted from 1 and from this call, fails.
        """
        self.library.emulator_configure(SCHEDULES[schedule], ctypes.c_uint(seed), driver_version,
                                        ctypes.c_uint64(first_block), ctypes.c_uint64(refused_launch))

    @property
    def launches(self) -> int:
        """Since the last configure()."""
        return self.library.emulator_launch_count()

    @contextmanager
    def buffers(self, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor | None] = ()):
        """Kernels inside may read `inputs` and `outputs` and write `outputs`, and nothing else."""
        self.library.emulator_clear_buffers()
        # Outputs last: a tensor that is both is writable.
        for writable, tensors in enumerate((inputs, outputs)):
            for tensor in tensors:
                if tensor is not None and tensor.numel():
                    self.library.emulator_add_buffer(_pointer(tensor), ctypes.c_size_t(tensor.nbytes), writable)
        yield
        report = self.library.emulator_take_report().decode()
        if report:
            raise KernelFault(report)

    def call(self, name: str, *arguments) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        error = function(*arguments)
        if error:
            raise RuntimeError(f"{name}: {error.decode()}")

    def run(self, name: str, tensor: Tensor, writable: bool = True) -> None:
        """A kernel of self_test.cu."""
        with self.buffers([tensor], [tensor] if writable else []):
            getattr(self.library, name)(_pointer(tensor))

    def multi_tensor_scale(self, src, dst, found_inf, scale, per_tensor=None, index=None) -> None:
        with self.buffers([*src, *_tensors(scale)], [*dst, found_inf, per_tensor]):
            self.call("driver_scale", *_table([src, dst], index), _pointer(found_inf), _pointer(per_tensor),
                      *_scalar(scale))

    def multi_tensor_axpby(self, x, y, out, found_inf, a, b, check="x", per_tensor=None) -> None:
        with self.buffers([*x, *y, *_tensors(a, b)], [*out, found_inf, per_tensor]):
            self.call("driver_axpby", *_table([x, y, out]), _pointer(found_inf), _pointer(per_tensor), *_scalar(a),
                      *_scalar(b), CHECKS[check])

    def multi_tensor_copy(self, src, dst) -> None:
        with self.buffers(src, dst):
            self.call("driver_copy", *_table([src, dst]))

    def multi_tensor_l2norm(self, tensors) -> tuple[Tensor, Tensor]:
        """(total, one norm per tensor)."""
        table = _table([tensors])
        self.library.driver_norm_scratch_size.restype = ctypes.c_int64
        scratch = torch.full((self.library.driver_norm_scratch_size(*table),), torch.nan, dtype=torch.float64)
        sums = torch.full((len(tensors),), torch.nan, dtype=torch.float64)
        total, per_tensor = torch.full((1,), torch.nan), torch.full((len(tensors),), torch.nan)
        with self.buffers(tensors, [scratch, sums]):
            self.call("driver_square_sums", *table, _pointer(scratch), _pointer(sums))
        with self.buffers([sums], [total, per_tensor]):
            self.call("driver_finish_norms", _pointer(sums), ctypes.c_int64(len(tensors)), _pointer(total),
                      _pointer(per_tensor))
        return total, per_tensor

    def multi_tensor_check(self, tensors, found_inf, per_tensor=None) -> None:
        with self.buffers(tensors, [found_inf, per_tensor]):
            self.call("driver_check", *_table([tensors]), _pointer(found_inf), _pointer(per_tensor))

    # The optimizers' rules, with the arguments of multi_tensor_updates.

    def multi_tensor_adam(self, grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr,
                          beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction) -> None:
        factors = self._count_adam(steps, found_inf, beta1, beta2, bias_correction)
        self._update("driver_adam", [grads], [params, exp_avgs, exp_avg_sqs], model_params, found_inf, inv_scale,
                     [lr, beta1, beta2, eps, weight_decay, adam_w_mode], factors)

    def multi_tensor_sgd(self, grads, params, momentum_buffers, model_params, found_inf, inv_scale, *options) -> None:
        self._update("driver_sgd", [grads], [params, momentum_buffers], model_params, found_inf, inv_scale, options)

    def multi_tensor_lamb(self, grads, params, exp_avgs, exp_avg_sqs, steps, model_params, found_inf, inv_scale, lr,
                          grad_norm, beta1, beta2, *options) -> None:
        factors = self._count_adam(steps, found_inf, beta1, beta2, bias_correction=options[3])
        table = _table([grads])
        self.library.driver_norm_scratch_size.restype = ctypes.c_int64
        scratch = torch.full((2 * self.library.driver_norm_scratch_size(*table),), torch.nan, dtype=torch.float64)
        sums = torch.zeros(2 * len(grads), dtype=torch.float64)
        self._update("driver_lamb", [grads], [params, exp_avgs, exp_avg_sqs], model_params, found_inf, inv_scale,
                     [lr, grad_norm, beta1, beta2, *options], factors, scratch, sums)

    def multi_tensor_novograd(self, grads, params, exp_avgs, averaged_norms, steps, model_params, found_inf, inv_scale,
                              lr, grad_norms, beta1, beta2, eps, weight_decay, bias_correction, grad_averaging,
                              reg_inside_moment, l2_norm, init_zero) -> None:
        factors = torch.full((len(steps), 2), torch.nan)
        with self.buffers([found_inf, inv_scale, grad_norms], [*steps, *averaged_norms, factors]):
            self.call("driver_count_novograd", *_table([steps, averaged_norms]), _pointer(found_inf),
                      _pointer(inv_scale), _pointer(grad_norms), ctypes.c_double(beta1), ctypes.c_double(beta2),
                      ctypes.c_double(eps), bias_correction, init_zero, l2_norm, _pointer(factors))
        self._update("driver_novograd", [grads], [params, exp_avgs], model_params, found_inf, inv_scale,
                     [lr, beta1, weight_decay, reg_inside_moment], factors)

    def multi_tensor_adagrad(self, grads, params, sums, steps, model_params, found_inf, inv_scale, lr, lr_decay, eps,
                             weight_decay, adagrad_w_mode) -> None:
        factors = torch.full((len(steps), 2), torch.nan)
        with self.buffers([found_inf], [*steps, factors]):
            self.call("driver_count_adagrad", *_table([steps]), _pointer(found_inf), ctypes.c_double(lr_decay),
                      _pointer(factors))
        self._update("driver_adagrad", [grads], [params, sums], model_params, found_inf, inv_scale,
                     [lr, eps, weight_decay, adagrad_w_mode], factors)

    def _count_adam(self, steps, found_inf, beta1, beta2, bias_correction) -> Tensor:
        factors = torch.full((len(steps), 2), torch.nan)
        with self.buffers([found_inf], [*steps, factors]):
            self.call("driver_count_adam", *_table([steps]), _pointer(found_inf), ctypes.c_double(beta1),
                      ctypes.c_double(beta2), bias_correction, _pointer(factors))
        return factors

    def _update(self, name, reads, writes, model_params, found_inf, inv_scale, options, factors=None, *scratch) -> None:
        writes = writes if model_params is None else [*writes, model_params]
        numbers = (ctypes.c_double * len(options))(*map(float, options))
        options_tensor = torch.frombuffer(numbers, dtype=torch.float64)
        inputs = [*sum(reads, []), found_inf, inv_scale, factors, options_tensor]
        with self.buffers(inputs, [*sum(writes, []), *scratch]):
            self.call(name, *_table([*reads, *writes]), model_params is not None, _pointer(found_inf),
                      _pointer(inv_scale), numbers, _pointer(factors), *map(_pointer, scratch))

    def update_scale_(self, scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
                      min_scale, max_scale) -> None:
        with self.buffers([found_inf], [scale, growth_tracker]):
            self.call("driver_update_scale", _pointer(scale), _pointer(growth_tracker), _pointer(found_inf),
                      ctypes.c_float(growth_factor), ctypes.c_float(backoff_factor), growth_interval,
                      ctypes.c_float(min_scale), ctypes.c_float(max_scale))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _tensors(*scalars: float | Tensor) -> list[Tensor]:
    return [scalar for scalar in scalars if isinstance(scalar, Tensor)]


def _scalar(scalar: float | Tensor) -> tuple[ctypes.c_float, ctypes.c_void_p]:
    if isinstance(scalar, Tensor):
        return ctypes.c_float(torch.nan), _pointer(scalar)
    return ctypes.c_float(scalar), ctypes.c_void_p(None)


def _table(lists: Sequence[Sequence[Tensor]], index: Sequence[int] | None = None) -> tuple:
    """The arguments of TABLE_PARAMETERS in driver.cpp."""
    count = len(lists[0])
    assert all(len(tensors) == count and len({t.dtype for t in tensors}) <= 1 for tensors in lists)
    dtypes = [DTYPES[tensors[0].dtype] if tensors else 0 for tensors in lists]
    pointers = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    return (ctypes.c_int64(count),
            (ctypes.c_int64 * count)(*(tensor.numel() for tensor in lists[0])),
            (ctypes.c_int64 * count)(*(range(count) if index is None else index)),
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_uint8 * len(dtypes))(*dtypes))
