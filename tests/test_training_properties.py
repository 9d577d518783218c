"""Random training loops at every level against an FP32 loop and the loss scale's rule, both written in plain Python.

The loops' numbers are exact in every type (see training.py), so parameters must be equal to the last bit.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import torch
from hypothesis import given, settings, strategies as st

from apex_amp import amp
from tests.training import INF, LEVELS, Dot, backward, values

START, LEAST, INTERVAL = 256.0, 32.0, 3
SIZE = 4


@dataclass
class Block:
    """One scale_loss block: a loss over the chosen models, by one scaler; `bad` models' gradients are not finite."""
    x: list[float]
    models: list[int]
    loss_id: int
    delay: bool
    bad: list[int]


@dataclass
class Iteration:
    blocks: list[Block]
    zero: str


integer_vectors = st.lists(st.integers(-2, 2).map(float), min_size=SIZE, max_size=SIZE)
blocks = st.builds(Block, x=integer_vectors, models=st.sampled_from([[0], [1], [0, 1]]), loss_id=st.integers(0, 1),
                   delay=st.booleans(), bad=st.sampled_from([[], [], [], [], [0], [1], [0, 1]]))
loops = st.lists(st.builds(Iteration, st.lists(blocks, min_size=1, max_size=3),
                           zero=st.sampled_from(["optimizer", "model", "zeros"])), min_size=1, max_size=5)


@dataclass
class ReferenceScaler:
    scale: float = START
    clean: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.clean = max(LEAST, self.scale / 2), 0
        else:
            self.clean += 1
            if self.clean == INTERVAL:
                self.scale, self.clean = min(START, self.scale * 2), 0


@dataclass
class ReferenceModel:
    """A model's FP32 parameters and gradients, with what the blocks left to be decided about its optimizer."""
    weights: list[torch.Tensor]
    grads: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(SIZE)] * 2)
    skip: bool = False
    left_by: int | None = None
    left_bad: bool = False


class ReferenceLoop:
    """FP32 training that leaves out the steps that amp must skip; one optimizer a model."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.models = [ReferenceModel([torch.full((SIZE,), 1.0), torch.full((SIZE,), 2.0)]) for _ in range(2)]
        self.scalers = [ReferenceScaler(), ReferenceScaler()]

    def decide(self, loss_id: int, models: list[ReferenceModel], overflow: bool) -> None:
        if self.dynamic:
            self.scalers[loss_id].update(overflow)
        for model in models:
            model.skip |= overflow
            model.left_by, model.left_bad = None, False

    def block(self, block: Block) -> None:
        models = [self.models[i] for i in block.models]
        bad = [i in block.bad for i in block.models]
        for model in models:  # what another scaler left scaled is finished first, and that scaler answers for it
            if model.left_by not in (None, block.loss_id):
                self.decide(model.left_by, [model], model.left_bad)
        for model, is_bad in zip(models, bad):
            if not is_bad:
                model.grads = [grad + torch.tensor(block.x) for grad in model.grads]
        if block.delay:
            for model, is_bad in zip(models, bad):
                model.left_by, model.left_bad = block.loss_id, model.left_bad or is_bad
        else:
            self.decide(block.loss_id, models, any(bad) or any(model.left_bad for model in models))

    def step(self, model: ReferenceModel, rate: float) -> bool:
        if model.left_by is not None:
            self.decide(model.left_by, [model], model.left_bad)
        skipped, model.skip = model.skip, False
        if not skipped:
            model.weights = [weight - rate * grad for weight, grad in zip(model.weights, model.grads)]
        model.grads = [torch.zeros(SIZE)] * 2
        return skipped


def run_block(block: Block, models: list[Dot], optimizers: list[torch.optim.Optimizer]) -> None:
    x = torch.tensor(block.x)
    losses = [models[i](torch.where(x == x, INF, x) if i in block.bad else x) for i in block.models]
    backward("amp", sum(losses), [optimizers[i] for i in block.models], loss_id=block.loss_id,
             delay_unscale=block.delay)


@settings(max_examples=150)
@given(level=st.sampled_from(LEVELS), loop=loops, dynamic=st.booleans(), rate=st.sampled_from([0.125, 0.25]),
       options=st.sampled_from([dict(), dict(foreach=True), dict(fused=True)]))
def test_random_loops_agree_with_fp32(level: str, loop: list[Iteration], dynamic: bool, rate: float,
                                      options: dict) -> None:
    reference = ReferenceLoop(dynamic)
    models = [Dot(SIZE), Dot(SIZE)]
    if level == "O3" and options.get("fused"):
        options = {}  # the FP16 parameters of a fused optimizer are torch's own matter
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate, **options) for model in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, num_losses=2, verbosity=0, loss_scale="dynamic" if dynamic else START,
        min_loss_scale=LEAST, max_loss_scale=START)
    with mock.patch("apex_amp.amp.scaler.GROWTH_INTERVAL", INTERVAL):
        for iteration in loop:
            for block in iteration.blocks:
                reference.block(block)
                run_block(block, models, optimizers)
            for model, optimizer, wanted in zip(models, optimizers, reference.models):
                skipped = reference.step(wanted, rate)
                optimizer.step()
                assert amp.last_step_skipped(optimizer) == skipped
                assert torch.equal(values(model), torch.cat(wanted.weights))
                if iteration.zero == "model":
                    model.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=iteration.zero == "optimizer")
            if dynamic:
                assert [amp.loss_scale(i) for i in range(2)] == [scaler.scale for scaler in reference.scalers]
                unskipped = [amp.state_dict()[f"loss_scaler{i}"]["unskipped"] for i in range(2)]
                assert unskipped == [scaler.clean for scaler in reference.scalers]
    amp.shutdown()


@settings(max_examples=40)
@given(level=st.sampled_from(LEVELS), name=st.sampled_from(["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"]),
       accumulate=st.integers(1, 3), bad=st.sets(st.integers(0, 7)), clip=st.booleans())
def test_small_networks_stay_near_fp32(level: str, name: str, accumulate: int, bad: set[int], clip: bool) -> None:
    """A perceptron with BatchNorm, clipped or not, overflows planted: losses follow FP32's without those iterations."""
    def run(level: str | None) -> list[float]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
                                    torch.nn.Linear(16, 3))
        x, labels = torch.randn(24, 6), torch.randint(3, (24,))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.02, **({} if name == "SGD" else {"eps": 1e-3}))
        if level is not None:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
        losses = []
        for index in range(8):
            if level is not None and index in bad:
                backward(level, model.eval()(x).sum() * INF, optimizer)
                model.train()
                optimizer.step()
                optimizer.zero_grad()
            for part in range(accumulate):
                rows = slice(part * 8, part * 8 + 8)
                loss = torch.nn.functional.cross_entropy(model(x[rows]).float(), labels[rows]) / accumulate
                backward(level, loss, optimizer)
                losses.append(loss.item() * accumulate)
            if clip:
                trained = model.parameters() if level is None else amp.master_params(optimizer)
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        amp.shutdown()
        return losses

    got, wanted = torch.tensor(run(level)), torch.tensor(run(None))
    tolerance = {"O0": 1e-6, "O1": 0.02, "O2": 0.02}.get(level, 0.1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
