"""apex_amp.fp16_utils: FP16_Optimizer against FP32 training, and the functions for masters by hand."""
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp import fp16_utils as U


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def make(seed=0, **keywords):
    torch.manual_seed(seed)
    model = U.network_to_half(Net())
    optimizer = U.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5), verbose=False, **keywords)
    return model, optimizer


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss_of(model, seed=0):
    x, y = batch(seed)
    return F.cross_entropy(model(x).float(), y)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step % 3)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(optimizer):
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("keywords", [
    dict(static_loss_scale=128.0), dict(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2 ** 8})])
def test_training_follows_fp32(keywords):
    torch.manual_seed(0)
    reference = Net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.25, momentum=0.5)
    expected = []
    for step in range(20):
        loss = loss_of(reference, step % 3)
        plain.zero_grad()
        loss.backward()
        plain.step()
        expected.append(loss.item())
    model, optimizer = make(**keywords)
    assert train(model, optimizer, 20) == pytest.approx(expected, abs=0.02)
    assert {p.dtype for p in model[1].first.parameters()} == {torch.float16}
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
    for model_param, master in zip(optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params):
        assert torch.equal(model_param, master.half())


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0})
    train(model, optimizer, 1)
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model) * float("inf"))
    assert optimizer.overflow and optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert optimizer.overflow and optimizer.loss_scale == optimizer.cur_scale == 32.0
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer)))
    train(model, optimizer, 1)
    assert not optimizer.overflow
    assert not all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer)))


def test_dynamic_loss_args_set_growth():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=dict(
        init_scale=4.0, scale_factor=4.0, scale_window=2, max_loss_scale=64.0))
    train(model, optimizer, 4)
    assert optimizer.loss_scale == 64.0
    train(model, optimizer, 2)
    assert optimizer.loss_scale == 64.0
    with pytest.raises(TypeError, match="initial_scale"):
        make(dynamic_loss_scale=True, dynamic_loss_args={"initial_scale": 4.0})


def test_several_backwards_are_unscaled_together_or_one_by_one():
    model, optimizer = make(static_loss_scale=16.0)
    losses = lambda: (loss_of(model, 1), loss_of(model, 2))  # noqa: E731
    optimizer.zero_grad(set_grads_to_None=True)
    for loss in losses():
        optimizer.backward(loss)
    one_by_one = [[g.clone() for g in group] for group in optimizer.inspect_master_grad_data()]
    optimizer.zero_grad(set_grads_to_None=True)
    for loss in losses():
        optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    together = optimizer.inspect_master_grad_data()
    reference = Net()
    reference.load_state_dict({k: v.float() for k, v in model[1].state_dict().items()})
    sum(F.cross_entropy(reference(batch(seed)[0]), batch(seed)[1]) for seed in (1, 2)).backward()
    for got, also, param in zip(one_by_one[0], together[0], reference.parameters()):
        torch.testing.assert_close(got, param.grad, rtol=0.02, atol=5e-3)
        torch.testing.assert_close(also, param.grad, rtol=0.02, atol=5e-3)


def test_clip_master_grads_returns_and_bounds_the_norm():
    model, optimizer = make(static_loss_scale=8.0)
    optimizer.backward(loss_of(model))
    grads = [g for group in optimizer.inspect_master_grad_data() for g in group]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    torch.testing.assert_close(optimizer.clip_master_grads(norm.item() / 2), norm)
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]).norm(), norm / 2, rtol=1e-4, atol=0)


def test_closure():
    model, optimizer = make(static_loss_scale=8.0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_resumed_run_is_the_run_that_never_stopped():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 256.0})
    train(model, optimizer, 5)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    resumed_model, resumed = make(seed=1, dynamic_loss_scale=True)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.loss_scale == 256.0
    assert train(resumed_model, resumed, 5, first=5) == train(model, optimizer, 5, first=5)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed), snapshot(optimizer)))


def test_checkpoints_of_apex_and_of_other_models():
    model, optimizer = make(dynamic_loss_scale=True)
    saved = optimizer.state_dict()
    scaler_of_apex = U.LossScaler()
    vars(scaler_of_apex).update(_loss_scale=512.0, _unskipped=3)
    optimizer.load_state_dict({**saved, "loss_scaler": scaler_of_apex})
    assert optimizer.loss_scaler.state_dict() == {"loss_scale": 512.0, "unskipped": 3}
    with pytest.raises(ValueError, match="expected masters of shapes"):
        optimizer.load_state_dict({**saved, "fp32_from_fp16": [saved["fp32_from_fp16"][0][:-1]]})


def test_a_scheduler_of_the_wrapped_optimizer():
    torch.manual_seed(0)
    model = U.network_to_half(Net())
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = U.FP16_Optimizer(inner, static_loss_scale=8.0)
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.param_groups[0]["lr"] = 0.1
    assert inner.param_groups[0]["lr"] == 0.1 and optimizer.state is inner.state


# --- models and masters by hand ---------------------------------------------------------------------------------------

def test_conversions_leave_affine_batchnorm_in_float():
    for model in (U.network_to_half(Net())[1], U.FP16Model(Net()).network, U.convert_network(Net(), torch.float16),
                  U.BN_convert_float(Net().half())):
        assert model.first.weight.dtype == torch.float16
        assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32
    assert U.tofp16()(torch.ones(1)).dtype == torch.float16
    assert U.FP16Model(Net())(torch.randn(4, 4)).dtype == torch.float16


def test_convert_module_takes_gradients_along_and_leaves_integers_and_children():
    module = nn.BatchNorm1d(3)
    module.child = nn.Linear(1, 1)
    module.weight.grad = torch.ones(3)
    U.convert_module(module, torch.bfloat16)
    assert module.weight.dtype == module.weight.grad.dtype == module.running_mean.dtype == torch.bfloat16
    assert module.num_batches_tracked.dtype == torch.int64 and module.child.weight.dtype == torch.float32


@pytest.mark.parametrize("flat_master", [False, True])
def test_masters_by_hand(flat_master):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half()
    model[0].bias.requires_grad_(False)
    model_params, masters = U.prep_param_lists(model, flat_master)
    assert len(model_params) == 3 and len(masters) == (1 if flat_master else 3)
    assert all(master.requires_grad and master.dtype == torch.float32 for master in masters)
    x, y = batch()
    F.cross_entropy(model(x.half()).float(), y).backward()
    before = [param.detach().float() for param in model_params]
    U.model_grads_to_master_grads(model_params, masters, flat_master)
    torch.optim.SGD(masters, lr=0.5).step()
    U.master_params_to_model_params(model_params, masters, flat_master)
    for param, value in zip(model_params, before):
        assert torch.equal(param, (value - 0.5 * param.grad.float()).half())


def test_masters_by_hand_without_gradients_and_with_several_dtypes():
    model = nn.Linear(2, 2).half()
    model_params, masters = U.prep_param_lists(model)
    masters[0].grad = torch.ones_like(masters[0])
    U.model_grads_to_master_grads(model_params, masters)
    assert masters[0].grad is None
    with pytest.raises(TypeError, match="one dtype"):
        U.prep_param_lists(nn.Sequential(nn.Linear(1, 1).half(), nn.Linear(1, 1)), flat_master=True)


def test_loss_scalers_by_hand():
    param = nn.Parameter(torch.ones(3))
    scaler = U.DynamicLossScaler(init_scale=8.0, scale_factor=2.0, scale_window=2)
    scaler.backward((param * torch.tensor([1.0, 2.0, 3.0])).sum())
    assert param.grad.tolist() == [8, 16, 24] and not scaler.has_overflow([param])
    param.grad[2] = float("inf")
    assert scaler.has_overflow([nn.Parameter(torch.ones(1)), param])
    scales = []
    for overflow in (True, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4, 4, 8, 4, 2, 1, 1]
    static = U.LossScaler(4)
    static.update_scale(True)
    assert static.loss_scale == 4 and not static.has_overflow([param])
    assert static.scale_gradient(None, (torch.ones(1),), None)[0].item() == 4
    assert U.to_python_float(torch.tensor(2.5)) == U.to_python_float([2.5]) == 2.5
