"""One training run of the main job: a small convolutional net on scikit-learn's handwritten digits.

`train` holds the loop once; what differs between an opt level, torch.amp and plain FP32 is a `Precision`.
"""
from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Callable, ContextManager

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

BATCH_SIZE = 32
OPT_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
NATIVE_TYPES = {"torch.amp float16": torch.float16, "torch.amp bfloat16": torch.bfloat16}


@dataclass
class Digits:
    """Images are float32 [N, 1, 8, 8] in 0..1, labels int64 [N]; a quarter of the 1,797 is held out."""
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(device: torch.device) -> Digits:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_images, test_images = (torch.tensor(part / 16, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(*(tensor.to(device) for tensor in (train_images, train_labels, test_images, test_labels)))


class DigitsNet(nn.Module):
    """[N, 1, 8, 8] -> logits [N, 10]; `width` is the number of channels of the first convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.fc1 = nn.Linear(2 * width * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Precision:
    """Plain FP32 without amp, and the four places where mixed precision changes a training loop."""
    loss_scale = 1.0

    def initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        return model, optimizer

    def forward_context(self) -> ContextManager:
        return contextlib.nullcontext()

    def backward_and_step(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
        """True if the step was skipped."""
        loss.backward()
        optimizer.step()
        return False

    def master_params(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return []

    def close(self) -> None:
        pass


class ApexAmp(Precision):
    """An opt level of apex_amp, O0 to O5."""

    def __init__(self, opt_level: str) -> None:
        from apex_amp import amp
        self.amp, self.opt_level = amp, opt_level

    def initialize(self, model, optimizer):
        return self.amp.initialize(model, optimizer, opt_level=self.opt_level, verbosity=0)

    def backward_and_step(self, loss, optimizer):
        with self.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return self.amp.last_step_skipped(optimizer)

    @property
    def loss_scale(self):
        return self.amp.loss_scale()

    def master_params(self, optimizer):
        return list(self.amp.master_params(optimizer))

    def close(self):
        self.amp.shutdown()


class NativeAmp(Precision):
    """torch.autocast, with torch.amp.GradScaler where the type is float16."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def forward_context(self):
        return torch.autocast(self.device.type, dtype=self.dtype)

    def backward_and_step(self, loss, optimizer):
        before = self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before

    @property
    def loss_scale(self):
        return self.scaler.get_scale()


def make_precision(row: str, device: torch.device) -> Precision:
    """`row` is an opt level, a key of NATIVE_TYPES, or "FP32" for the loop without amp."""
    if row == "FP32":
        return Precision()
    return NativeAmp(NATIVE_TYPES[row], device) if row in NATIVE_TYPES else ApexAmp(row)


@dataclass
class TrainResult:
    """What one seed of one row gave. The two histories have one value per iteration."""
    test_accuracy: float = 0.0
    train_loss: float = 0.0
    skipped_steps: int = 0
    final_loss_scale: float = 1.0
    epoch_ms_per_iteration: list[float] = field(default_factory=list)
    weight_bytes: int = 0
    master_bytes: int = 0
    loss_history: list[float] = field(default_factory=list)
    loss_scale_history: list[float] = field(default_factory=list)


def train(row: str, seed: int, epochs: int, width: int, device: torch.device,
          on_epoch: Callable[[], None] = lambda: None) -> TrainResult:
    """Trains from scratch with SGD, momentum and a one-cycle schedule, and tests on the held-out quarter.

    `train_loss` is the mean over the last epoch, `test_accuracy` a fraction; `on_epoch` is called after each epoch,
    outside the timed part.
    """
    torch.manual_seed(seed)
    digits = load(device)
    precision = make_precision(row, device)
    model = DigitsNet(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    model, optimizer = precision.initialize(model, optimizer)
    try:
        return _train(precision, model, optimizer, digits, epochs, on_epoch)
    finally:
        precision.close()


def _train(precision: Precision, model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits, epochs: int,
           on_epoch: Callable[[], None]) -> TrainResult:
    result = TrainResult()
    batches_per_epoch = len(digits.train_labels) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * batches_per_epoch)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(digits.train_labels)).to(digits.train_labels.device)
        start = _now(order.device)
        for indices in order[:batches_per_epoch * BATCH_SIZE].split(BATCH_SIZE):
            optimizer.zero_grad()
            with precision.forward_context():
                loss = F.cross_entropy(model(digits.train_images[indices]), digits.train_labels[indices])
            result.skipped_steps += precision.backward_and_step(loss, optimizer)
            schedule.step()
            losses.append(loss.detach())
            result.loss_scale_history.append(precision.loss_scale)
        result.epoch_ms_per_iteration.append((_now(order.device) - start) * 1000 / batches_per_epoch)
        on_epoch()

    result.loss_history = torch.stack(losses).float().tolist()
    result.train_loss = sum(result.loss_history[-batches_per_epoch:]) / batches_per_epoch
    result.final_loss_scale = precision.loss_scale
    result.test_accuracy = accuracy(precision, model, digits)
    weights = list(model.parameters())
    result.weight_bytes = _bytes(weights)
    own = {id(weight) for weight in weights}
    result.master_bytes = _bytes([master for master in precision.master_params(optimizer) if id(master) not in own])
    return result


@torch.no_grad()
def accuracy(precision: Precision, model: nn.Module, digits: Digits) -> float:
    """The fraction of the held-out digits that `model` names right."""
    model.eval()
    with precision.forward_context():
        predictions = model(digits.test_images).argmax(dim=1)
    return (predictions == digits.test_labels).float().mean().item()


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _now(device: torch.device) -> float:
    """Seconds, after everything started on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
