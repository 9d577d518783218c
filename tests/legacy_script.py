"""A training script as people wrote it for Apex, touching every name of the legacy surface, tier by tier.

Run by tests/test_legacy_script.py through `apex-amp run`; it names no module of apex_amp.
"""
import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    import apex
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


class Net(nn.Module):
    def __init__(self, norm=lambda size: nn.BatchNorm1d(size)):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), norm(16), nn.Linear(16, 2)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return x, (x.sum(1) > 0).long()


def train(model, optimizer, steps=20, forward=None):
    """Trains with the three lines; the loss must fall. Returns the first and the last loss."""
    x, y = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy((forward or model)(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    return losses


def tier1(opt_level):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level,
                                      loss_scale="dynamic" if opt_level == "O2" else None)
    train(model, optimizer)
    assert all(param.dtype == torch.float32 for param in amp.master_params(optimizer)) or opt_level == "O3"
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(checkpoint, os.path.join(folder, "checkpoint.pt"))
        checkpoint = torch.load(os.path.join(folder, "checkpoint.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    assert amp.state_dict() == checkpoint["amp"]
    assert set(checkpoint["amp"]["loss_scaler0"]) == {"loss_scale", "unskipped"}


def tier2(opt_level):
    from apex.parallel import DistributedDataParallel as DDP, Reducer, SyncBatchNorm
    from apex.parallel.distributed import flat_dist_call
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        group = apex.parallel.create_syncbn_process_group(1)
        model = apex.parallel.convert_syncbn_model(Net(), process_group=group)
        assert isinstance(model.norm, SyncBatchNorm)
        assert apex.parallel.optimized_sync_batchnorm.SyncBatchNorm is SyncBatchNorm
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
        parallel = DDP(model, message_size=250000000, delay_allreduce=True,
                       gradient_predivide_factor=float(dist.get_world_size()))
        assert isinstance(parallel, apex.parallel.DistributedDataParallel) and parallel.module is model
        train(model, optimizer, forward=parallel)
        tensors = [torch.ones(2), torch.ones(3).half()]
        flat_dist_call(tensors, dist.all_reduce)
        assert tensors[1].tolist() == [1, 1, 1]
        Reducer(nn.Linear(1, 1)).reduce()
        dist.destroy_process_group()


def tier3(opt_level):
    from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
    for make in (lambda params: FusedAdam(params, lr=0.05, bias_correction=False, betas=(0.9, 0.99), weight_decay=0.01),
                 lambda params: FusedSGD(params, lr=0.5, momentum=0.9, nesterov=True),
                 lambda params: FusedLAMB(params, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01),
                 lambda params: FusedNovoGrad(params, lr=0.05, betas=(0.95, 0), reg_inside_moment=True,
                                              bias_correction=False, grad_averaging=False)):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=opt_level, verbosity=0)
        train(model, optimizer, steps=40)


def tier4(opt_level):
    import apex.normalization
    from apex.normalization import FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
    from apex.normalization.fused_layer_norm import (FusedLayerNorm as BertLayerNorm, FusedLayerNormAffineFunction,
                                                     fused_layer_norm, fused_layer_norm_affine, fused_rms_norm,
                                                     fused_rms_norm_affine, mixed_dtype_fused_layer_norm_affine)
    assert apex.normalization.FusedLayerNorm is BertLayerNorm
    for norm in (lambda size: BertLayerNorm(size, eps=1e-12), FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm):
        torch.manual_seed(0)
        model = Net(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        train(model, optimizer)
    x, weight, bias = torch.randn(4, 8), torch.rand(8), torch.rand(8)
    expected = F.layer_norm(x, (8,), weight, bias, 1e-6)
    for actual in (fused_layer_norm_affine(x, weight, bias, (8,)),
                   mixed_dtype_fused_layer_norm_affine(x, weight, bias, (8,)),
                   FusedLayerNormAffineFunction.apply(x, weight, bias, (8,), 1e-6),
                   fused_layer_norm(x, (8,)) * weight + bias):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(fused_rms_norm_affine(x, weight, (8,)), fused_rms_norm(x, (8,)) * weight)


def tier5(opt_level):
    from apex.amp import _amp_state
    from apex.amp._amp_state import _amp_state as same_state
    assert same_state is _amp_state is amp._amp_state
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2 ** 20
    assert _amp_state.loss_scalers[0].loss_scale() == amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0 ** 20
    _amp_state.loss_scalers[0]._loss_scale = 2 ** 10
    assert amp._amp_state.opt_properties.options["cast_model_type"] == torch.float16
    assert amp._amp_state.opt_properties.master_weights is True and amp._amp_state.opt_properties.opt_level == "O2"
    train(model, optimizer)
    assert hasattr(optimizer, "_amp_stash")
    amp._amp_state.handle._deactivate()
    assert "state_dict" in amp.__dict__ and hasattr(amp, "__path__") and apex.__file__
    assert importlib.metadata.version("apex") and importlib.util.find_spec("apex") is not None
    assert amp._initialize.applier([torch.ones(1), {"a": 2}], lambda t: t.half())[0].dtype == torch.float16


def tier6(opt_level):
    import amp_C
    import apex_C
    from apex.multi_tensor_apply import multi_tensor_applier
    assert multi_tensor_applier.available
    overflow_buf = torch.zeros(1, dtype=torch.int32)
    grads = [torch.randn(5), torch.randn(3, 2)]
    out = [torch.empty_like(grad) for grad in grads]
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, out], 0.5)
    assert all(torch.equal(o, g * 0.5) for o, g in zip(out, grads)) and overflow_buf.item() == 0
    multi_tensor_applier(amp_C.multi_tensor_axpby, overflow_buf, [grads, grads, out], 1.0, 2.0, -1)
    torch.testing.assert_close(out[0], grads[0] * 3)
    norm, per_tensor = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow_buf, [grads], True)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm().reshape_as(norm))
    assert per_tensor.numel() == 2
    grads[1][0, 0] = float("nan")
    amp_C.multi_tensor_scale(65536, overflow_buf, [grads, out], 1.0)
    assert overflow_buf.item() == 1
    flat = apex_C.flatten(grads)
    assert [view.shape for view in apex_C.unflatten(flat, grads)] == [grad.shape for grad in grads]
    for name in ("multi_tensor_lamb", "multi_tensor_lamb_stage1_cuda", "multi_tensor_lamb_stage2_cuda",
                 "multi_tensor_adam", "multi_tensor_sgd"):
        assert callable(getattr(amp_C, name)), name


def tier7(opt_level):
    @amp.half_function
    def half_product(a, b):
        return a @ b

    @amp.float_function
    def float_sum(a):
        return a.sum()

    @amp.promote_function
    def pair(a, b):
        return a.dtype, b.dtype

    class Library:
        @staticmethod
        def sigmoid_like(x):
            return x.dtype

        @staticmethod
        def product_like(x):
            return x.dtype

    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(Library, "product_like")
    amp.register_promote_function(Library, "sigmoid_like")
    amp.lists.functional_overrides.FP32_FUNCS.remove("softplus")
    amp.lists.functional_overrides.FP16_FUNCS.append("softplus")
    handle = amp.init(enabled=True, verbose=False)
    x = torch.randn(4, 4)
    assert half_product(x, x).dtype == torch.float16 and float_sum(x.half()).dtype == torch.float32
    assert pair(x, x.half()) == (torch.float32, torch.float32)
    assert torch.sigmoid(x.half()).dtype == torch.float32 and Library.product_like(x) == torch.float16
    assert F.softplus(x).dtype == torch.float16 and torch.mm(x, x).dtype == torch.float16
    with amp.disable_casts():
        assert torch.mm(x, x).dtype == torch.float32
    model = Net()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), num_loss=2)
    inputs, labels = batch()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        for part in (loss * 0.25, loss * 0.75):
            with optimizer.scale_loss(part) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    handle._deactivate()
    assert torch.mm(x, x).dtype == torch.float32
    inert = amp.init(enabled=False)
    with inert.scale_loss(loss, None) as unscaled:
        assert unscaled is loss


def tier8(opt_level):
    from apex.contrib.optimizers import FP16_Optimizer as FP16_Optimizer_of_contrib
    from apex.fp16_utils import (BN_convert_float, FP16_Optimizer, FP16Model, convert_network,
                                 master_params_to_model_params, model_grads_to_master_grads, network_to_half,
                                 prep_param_lists, to_python_float)
    from apex.optimizers import FP16_Optimizer as FP16_Optimizer_of_2018
    x, y = batch()
    for cls, arguments in ((FP16_Optimizer, dict(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2 ** 16})),
                           (FP16_Optimizer_of_2018, dict(static_loss_scale=128.0)),
                           (FP16_Optimizer_of_contrib, dict(dynamic_loss_scale=True))):
        torch.manual_seed(0)
        model = network_to_half(Net())
        optimizer = cls(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), **arguments)
        losses = []
        for _ in range(30):
            loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.clip_master_grads(5.0)
            optimizer.step()
            losses.append(to_python_float(loss))
        assert losses[-1] < 0.8 * losses[0], losses
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        optimizer.loss_scale = 64.0
        assert optimizer.loss_scale == 64.0

    from apex.optimizers import FusedAdam
    torch.manual_seed(0)
    model = Net().half()
    optimizer = FP16_Optimizer_of_2018(FusedAdam(model.parameters(), lr=0.05, bias_correction=False, max_grad_norm=1.0),
                                       dynamic_loss_scale=True)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(x.half()).float(), y)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses

    model = convert_network(Net(), torch.float16)
    model_params, master_params = prep_param_lists(model)
    F.cross_entropy(model(x.half()).float(), y).backward()
    model_grads_to_master_grads(model_params, master_params)
    torch.optim.SGD(master_params, lr=0.1).step()
    master_params_to_model_params(model_params, master_params)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model_params, master_params))
    assert FP16Model(Net())(x).dtype == torch.float16
    assert BN_convert_float(Net().half()).norm.weight.dtype == torch.float32


def tier9(opt_level):
    from apex.parallel.LARC import LARC
    torch.manual_seed(0)
    model = Net()
    optimizer = LARC(optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), trust_coefficient=0.05,
                     clip=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    train(model, optimizer, steps=40)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tiers", type=int, nargs="+")
    parser.add_argument("--opt-level", default="O1")
    options = parser.parse_args()
    for tier in options.tiers:
        globals()[f"tier{tier}"](options.opt_level)
        print(f"tier {tier} at {options.opt_level}: ok", flush=True)
