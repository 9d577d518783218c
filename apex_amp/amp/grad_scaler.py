"""torch.amp.GradScaler over the one-pass unscale of this package."""
from __future__ import annotations

from typing import Any

import torch

from ..multi_tensor import multi_tensor_unscale_

_KERNEL_DTYPES = frozenset((torch.bfloat16, torch.float32, torch.float64, torch.float16))


class GradScaler(torch.amp.GradScaler):
    """Gradient scaling as in `torch.amp.GradScaler`, whose arguments, methods, errors and state files are its own.

    `unscale_` (and so `step`) reads and writes each gradient once, all of them in one launch, whatever mix of dtypes
    they have; torch launches once for every dtype. The scale and the verdict stay on the device: with optimizers that take
    `found_inf` (torch's with fused=True, those of `apex_amp.optimizers`) a step waits for nothing.

    Args:
        device: "cuda" or "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval: the dynamic loss scale (defaults 2**16, 2.0, 0.5, 2000).
        enabled: False makes every method a pass-through.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor,
                        allow_fp16: bool) -> dict[torch.device, torch.Tensor]:
        grads, others = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.dtype is torch.float16 and not allow_fp16:
                    raise ValueError("Attempting to unscale FP16 gradients.")
                if grad.is_sparse:
                    if grad.dtype is torch.float16:
                        # Duplicate indices are added first: their sum is what must fit.
                        parameter.grad = grad = grad.coalesce()
                    grad = grad._values()
                (grads if grad.dtype in _KERNEL_DTYPES else others).append(grad)
        with torch.no_grad():
            multi_tensor_unscale_(grads, found_inf, inv_scale)
            for grad in others:  # complex
                multi_tensor_unscale_([torch.view_as_real(grad)], found_inf, inv_scale)
        return {found_inf.device: found_inf} if grads or others else {}
