"""apex_amp.normalization against the formulas in float64."""
import pytest
import torch

from apex_amp import normalization as N

SHAPES = [(8,), (3, 8), (1, 1)]


def layer_norm_reference(x, shape, weight=None, bias=None, eps=1e-5):
    dims = tuple(range(-len(shape), 0))
    x = x.double()
    y = (x - x.mean(dims, keepdim=True)) / (x.var(dims, unbiased=False, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def rms_norm_reference(x, shape, weight=None, eps=1e-5):
    x = x.double()
    y = x / (x.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def tolerance(dtype):
    return dict(rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def make(shape, dtype, seed=0):
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_functions_follow_the_formula_and_the_dtype_rule(dtype, weight_dtype, shape):
    x = make(shape, dtype)
    weight, bias = make(shape, weight_dtype, 1)[0], make(shape, weight_dtype, 2)[0]
    coarser = max(dtype, weight_dtype, key=lambda d: torch.finfo(d).eps)
    layer_norm = layer_norm_reference(x, shape, weight, bias)
    rms_norm = rms_norm_reference(x, shape, weight)
    for actual, expected, result_dtype in [
        (N.fused_layer_norm(x, shape, 1e-5), layer_norm_reference(x, shape), dtype),
        (N.fused_layer_norm_affine(x, weight, bias, shape, 1e-5), layer_norm, dtype),
        (N.mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape, 1e-5), layer_norm, weight_dtype),
        (N.fused_rms_norm(x, shape, 1e-5), rms_norm_reference(x, shape), dtype),
        (N.fused_rms_norm_affine(x, weight, shape, 1e-5), rms_norm, dtype),
        (N.mixed_dtype_fused_rms_norm_affine(x, weight, shape, 1e-5), rms_norm, weight_dtype),
    ]:
        assert actual.dtype == result_dtype
        torch.testing.assert_close(actual.double(), expected, **tolerance(coarser))


@pytest.mark.parametrize("cls, reference", [
    (N.FusedLayerNorm, layer_norm_reference), (N.MixedFusedLayerNorm, layer_norm_reference),
    (N.FusedRMSNorm, rms_norm_reference), (N.MixedFusedRMSNorm, rms_norm_reference)])
@pytest.mark.parametrize("shape", SHAPES)
def test_modules_and_their_gradients(cls, reference, shape):
    module = cls(shape, eps=1e-3)
    with torch.no_grad():
        module.weight.copy_(make(shape, torch.float32, 1)[0])
    x = make(shape, torch.float32).requires_grad_()
    module(x).square().sum().backward()

    x64 = x.detach().double().requires_grad_()
    weight64 = module.weight.detach().double().requires_grad_()
    reference(x64, shape, weight64, eps=1e-3).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.weight.grad.double(), weight64.grad, rtol=1e-4, atol=1e-4)


def test_mixed_modules_return_the_dtype_of_their_weight():
    x = make((8,), torch.float16)
    assert N.FusedLayerNorm(8)(x).dtype == N.FusedRMSNorm(8)(x).dtype == torch.float16
    assert N.MixedFusedLayerNorm(8)(x).dtype == N.MixedFusedRMSNorm(8)(x).dtype == torch.float32


def test_modules_take_an_int_and_have_torchs_state_dict():
    module = N.FusedLayerNorm(8, eps=1e-12)  # as BERT ports construct it
    module.load_state_dict(torch.nn.LayerNorm(8).state_dict())
    assert isinstance(module, torch.nn.LayerNorm) and module.eps == 1e-12
    assert N.FusedLayerNorm(8, elementwise_affine=False).weight is None
    assert set(N.FusedRMSNorm(8).state_dict()) == {"weight"}


@pytest.mark.parametrize("cls", [N.MixedFusedLayerNorm, N.MixedFusedRMSNorm])
def test_mixed_modules_are_always_affine(cls):
    with pytest.raises(RuntimeError, match="always affine"):
        cls(8, elementwise_affine=False)
    with pytest.warns(UserWarning, match="ignored"):
        cls(8, elementwise_affine=True)


def test_autograd_classes_are_the_functions():
    x, weight, bias = make((8,), torch.float32), torch.rand(8), torch.rand(8)
    calls = [
        (N.FusedLayerNormFunction, N.fused_layer_norm, (x, (8,), 1e-5)),
        (N.FusedLayerNormAffineFunction, N.fused_layer_norm_affine, (x, weight, bias, (8,), 1e-5)),
        (N.FusedLayerNormAffineMixedDtypesFunction, N.mixed_dtype_fused_layer_norm_affine,
         (x, weight, bias, (8,), 1e-5)),
        (N.FusedRMSNormFunction, N.fused_rms_norm, (x, (8,), 1e-5)),
        (N.FusedRMSNormAffineFunction, N.fused_rms_norm_affine, (x, weight, (8,), 1e-5)),
        (N.FusedRMSNormAffineMixedDtypesFunction, N.mixed_dtype_fused_rms_norm_affine, (x, weight, (8,), 1e-5)),
    ]
    for cls, function, arguments in calls:
        assert torch.equal(cls.apply(*arguments), function(*arguments))
    assert torch.equal(N.manual_rms_norm(x, (8,), weight, 1e-5), N.fused_rms_norm_affine(x, weight, (8,), 1e-5))
