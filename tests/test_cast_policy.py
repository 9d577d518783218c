"""Which function runs in which type: coverage of torch.autocast and of the original, and what calls give."""
from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex_amp import _C
from apex_amp.amp import cast_lists, cast_state
from cast_fixtures import casts

pytestmark = pytest.mark.usefixtures(casts.__name__)

HALF, FLOAT = torch.float16, torch.float32
OURS = {"fp32_by_dtype": "fp32", "promote_by_kernel": "promote"}  # two ways to the same end
AUTOCAST = {"LOWER_PRECISION_FP": "low_precision", "FP32": "fp32", "FP32_SET_OPT_DTYPE": "fp32",
            "DIFFERENT_REDISPATCH_SIGNATURE": "fp32", "PROMOTE": "promote"}

# Operators that Python reaches under another name.
PYTHON_NAMES = {
    "_thnn_fused_lstm_cell": "lstm_cell", "_thnn_fused_gru_cell": "gru_cell", "nll_loss2d": "nll_loss",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention", "linalg_vecdot": "vecdot",
    "linalg_multi_dot": "multi_dot", "linalg_vector_norm": "vector_norm", "linalg_matrix_norm": "matrix_norm",
}
# Where this package and autocast differ on purpose.
DIFFERENCES = {
    "grid_sampler": "fp32 as in the original: half coordinates are off by pixels in images wider than 1024",
}


def autocast_policies() -> dict[str, str]:
    """The policy of each operator in torch's installed ATen/autocast_mode.h."""
    header = os.path.join(os.path.dirname(torch.__file__), "include", "ATen", "autocast_mode.h")
    with open(header) as file:
        text = file.read()
    policies = {}
    for macro, policy in AUTOCAST.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", text)
        assert body, f"torch {torch.__version__} has no AT_FORALL_{macro}: read its header again"
        pattern = r"ADD_NS\((\w+)\)" if macro.startswith("DIFFERENT") else r"_\((\w+)"
        for operator in re.findall(pattern, body.group(1)):
            policies[operator] = policy
    return policies


def python_name(operator: str) -> str:
    return "interpolate" if "upsample" in operator else PYTHON_NAMES.get(operator, operator)


def patched_policy(name: str) -> str | None:
    """The policy of a name in the first namespace that has it patched."""
    for owner in (torch, torch.nn.functional, torch.linalg, torch.Tensor, torch._VF):
        function = vars(owner).get(name)
        if isinstance(function, (_C.CastFunction, _C.CastMethod)):
            return OURS.get(function.policy, function.policy)
    return None


def test_every_autocast_policy_is_ours_too() -> None:
    theirs = autocast_policies()
    assert len(theirs) > 100
    table = [(operator, patched_policy(python_name(operator)), policy) for operator, policy in theirs.items()]
    print(f"{'operator':40} {'ours':15} autocast")
    for operator, ours, policy in table:
        print(f"{operator:40} {ours!s:15} {policy}")
    differing = {operator for operator, ours, policy in table if ours != policy}
    assert differing == set(DIFFERENCES)


# The lists of the original. None: torch's own kernels do it.
ORIGINAL: dict[str | None, str] = {
    "low_precision": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm "
                     "addmv addr matmul mm mv addbmm baddbmm bmm linear __matmul__ rnn_relu rnn_tanh gru lstm "
                     "rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell",
    "fp32": "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm "
            "prod std sum var renorm interpolate grid_sample softplus softmin log_softmax softmax layer_norm "
            "group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss "
            "cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss "
            "multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss "
            "soft_margin_loss triplet_margin_loss ctc_loss __pow__ __rpow__ cpu",
    "promote": "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne cat stack __add__ __div__ "
               "__eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ "
               "__sub__ __truediv__",
    "match_self": "addcdiv_ addcmul_ atan2_ addmm_ addbmm_ baddbmm_ addmv_ addr_",
    None: "__iadd__ __idiv__ __imul__ __isub__ __itruediv__ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_",
    "fp32_in_place": "__ipow__ acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ "
                     "pow_ cumprod_ cumsum_ renorm_",
    "banned": "binary_cross_entropy",
}


def test_every_policy_of_the_original_is_ours_too() -> None:
    for policy, names in ORIGINAL.items():
        for name in names.split():
            assert patched_policy(name) == policy, name


def test_every_listed_name_exists_somewhere() -> None:
    """A misspelt name would patch nothing."""
    listed = [name for key, value in vars(cast_lists).items() if key.isupper() and key != "NAMESPACES"
              for name in value]
    missing = [name for name in listed if patched_policy(name) is None and
               not any(name in vars(owner) for owner in (torch.fft, torch.special, torch.sparse))]
    assert missing == []


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 8, generator=generator).half(), torch.randn(4, 8, generator=generator)


LOW_PRECISION_CALLS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda h, f: h @ f.t(), lambda h, f: f @ h.t(), lambda h, f: f @ f.t(), lambda h, f: f.matmul(f.t()),
    lambda h, f: torch.mm(f, h.t()), lambda h, f: torch.einsum("ij,kj->ik", h, f),
    lambda h, f: torch.einsum("ij,kj->ik", [f, f]), lambda h, f: F.linear(f, h),
    lambda h, f: F.linear(input=f, weight=f),
    lambda h, f: F.prelu(f, torch.tensor([0.2])), lambda h, f: F.scaled_dot_product_attention(h, f, h),
    lambda h, f: F.scaled_dot_product_attention(h, h, f, attn_mask=torch.zeros(4, 4)),
    lambda h, f: F.scaled_dot_product_attention(query=f, key=h, value=h),
    lambda h, f: torch.bmm(h[None], f.t()[None]), lambda h, f: torch.baddbmm(f[None, :, :4], h[None], f.t()[None]),
    lambda h, f: torch.addmv(f[:, 0], h, f[0]), lambda h, f: torch.linalg.multi_dot([h, f.t(), h]),
    lambda h, f: torch.linalg.vecdot(h, f), lambda h, f: torch.linalg.matmul(f, h.t()),
    lambda h, f: F.conv1d(f[None], h[:, :, None].expand(4, 8, 1)[:, :4]),
]
FP32_CALLS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda h: h.exp(), lambda h: torch.exp(h), lambda h: h ** 2, lambda h: 2 ** h, lambda h: h.pow(2),
    lambda h: h.sum(), lambda h: h.sum(0), lambda h: h.sum(dim=0), lambda h: torch.sum(h, dim=(0, 1), keepdim=True),
    lambda h: h.norm(),
    lambda h: torch.norm(h), lambda h: torch.linalg.norm(h), lambda h: torch.linalg.vector_norm(h), lambda h: h.std(),
    lambda h: h.softmax(-1), lambda h: torch.softmax(h, -1), lambda h: F.softmax(h, dim=-1), lambda h: F.softmin(h, -1),
    lambda h: F.log_softmax(h, -1), lambda h: torch.special.log_softmax(h, -1), lambda h: nn.Softmax(-1)(h),
    lambda h: F.layer_norm(h, (8,)), lambda h: nn.LayerNorm(8)(h), lambda h: F.rms_norm(h, (8,)),
    lambda h: F.group_norm(h, 2), lambda h: h.logsumexp(0), lambda h: torch.cumsum(h, 0), lambda h: h.prod(),
    lambda h: F.cross_entropy(h, torch.zeros(4, dtype=torch.long)), lambda h: F.mse_loss(h, h),
    lambda h: torch.cdist(h, h), lambda h: F.interpolate(h[None], 4),
    lambda h: F.grid_sample(h[None, None], h.new_zeros(1, 2, 2, 2), align_corners=False),
    lambda h: torch.linalg.inv(h[:, :4]), lambda h: torch.linalg.svdvals(h), lambda h: torch.matrix_exp(h[:, :4]),
    lambda h: h.cpu(), lambda h: torch.quantile(h, 0.5), lambda h: h.nanquantile(0.5),
    lambda h: torch.special.log_ndtr(h), lambda h: torch.special.zeta(0 * h + 3, 0 * h + 2),
    lambda h: torch.linalg.vander(h), lambda h: torch.histogram(h, 4)[0], lambda h: torch.histc(h, 4, -1e9, 1e9),
    lambda h: F.avg_pool3d(h[None, None].expand(1, 1, 2, 4, 8), 2), lambda h: F.rrelu(h, 0.25, 0.25),
    lambda h: torch.view_as_real(torch.complex(h, h)), lambda h: torch.view_as_real(torch.polar(h.abs(), h)),
    lambda h: torch.view_as_real(torch.view_as_complex(h.reshape(4, 4, 2)) * 1j),
]
PROMOTE_CALLS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda h, f: h + f, lambda h, f: f - h, lambda h, f: h * f, lambda h, f: h / f, lambda h, f: torch.add(h, f),
    lambda h, f: h * torch.tensor(2.0), lambda h, f: torch.max(h, f), lambda h, f: torch.minimum(f, h),
    lambda h, f: torch.where(f > 0, h, f), lambda h, f: torch.addcmul(f, h, f), lambda h, f: torch.atan2(h, f),
    lambda h, f: torch.cross(h[:, :3], f[:, :3], dim=1), lambda h, f: torch.dot(h[0], f[0]),
    lambda h, f: torch.vdot(h[0], f[0]), lambda h, f: torch.tensordot(h, f.t(), 1), lambda h, f: torch.cat([h, f]),
    lambda h, f: torch.cat((h, f), dim=1), lambda h, f: torch.stack(tensors=[f, h]), lambda h, f: torch.hstack([h, f]),
    lambda h, f: torch.vstack((h, f)), lambda h, f: torch.concat([h, f]), lambda h, f: torch.lerp(h, f, 0.5),
    lambda h, f: h.lerp(f, h), lambda h, f: F.bilinear(h, f, torch.ones(3, 8, 8)), lambda h, f: torch.inner(h, f),
    lambda h, f: h.index_add(0, torch.tensor([0]), f[:1]), lambda h, f: h.index_copy(0, torch.tensor([0]), f[:1]),
    lambda h, f: h.index_put((torch.tensor([0]),), f[0]), lambda h, f: h.masked_scatter(f > 0, f),
    lambda h, f: h.scatter_add(0, torch.zeros(1, 8, dtype=torch.long), f[:1]), lambda h, f: torch.kron(h, f),
    lambda h, f: h.scatter(0, torch.zeros(1, 8, dtype=torch.long), f[:1]), lambda h, f: h.clamp(min=f),
    lambda h, f: h.put(torch.tensor([0]), f[0, :1]), lambda h, f: torch.put(f, torch.tensor([0]), h[0, :1]),
    lambda h, f: F.embedding_bag(torch.tensor([[0, 1]]), f, mode="sum", per_sample_weights=h[:1, :2]),
    lambda h, f: torch.block_diag(h, f), lambda h, f: torch.logaddexp(h, f), lambda h, f: torch.outer(h[0], f[0]),
]
IN_PLACE_CALLS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x.add_(y), lambda x, y: x.sub_(y), lambda x, y: x.mul_(y), lambda x, y: x.div_(y),
    lambda x, y: x.copy_(y), lambda x, y: x.__iadd__(y), lambda x, y: x.__imul__(y), lambda x, y: x.lerp_(y, 0.5),
    lambda x, y: x.atan2_(y),
    lambda x, y: x.addcmul_(y, y), lambda x, y: x.addmm_(y[:, :4], y[:4]), lambda x, y: x.masked_scatter_(y > 0, y),
    lambda x, y: x.index_put_((torch.tensor([0]),), y[0]), lambda x, y: x.index_add_(0, torch.tensor([0]), y[:1]),
    lambda x, y: x.scatter_add_(0, torch.zeros(1, 8, dtype=torch.long), y[:1]), lambda x, y: x.clamp_(min=y),
    lambda x, y: x.put_(torch.tensor([0, 1]), y[0, :2]), lambda x, y: assigned(x, torch.tensor([0, 1]), y[:2]),
    lambda x, y: assigned(x, x > 0, y[0, 0]), lambda x, y: assigned(x, slice(0, 2), y[:2]),
    lambda x, y: x.index_copy_(0, torch.tensor([0]), y[:1]), lambda x, y: x.fmod_(y), lambda x, y: x.copysign_(y),
    lambda x, y: assigned(x, 0, y[0]), lambda x, y: assigned(x, y > 0, y[y > 0]),
    lambda x, y: assigned(x, (slice(None), torch.tensor([1, 2])), y[:, :2]),
]


def assigned(target: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    target[index] = value
    return target


def reference(call: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    with cast_state.disable_casts():
        return call(*(argument.float() for argument in arguments))


@pytest.mark.parametrize("call", LOW_PRECISION_CALLS)
def test_low_precision_calls(call: Callable[..., torch.Tensor]) -> None:
    half, full = tensors()
    result = call(half, full)
    assert result.dtype == HALF
    torch.testing.assert_close(result.float(), reference(call, half, full), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("call", FP32_CALLS)
def test_fp32_calls(call: Callable[..., torch.Tensor]) -> None:
    half, _ = tensors()
    result = call(half)
    assert result.dtype == FLOAT
    torch.testing.assert_close(result, reference(call, half))


@pytest.mark.parametrize("call", PROMOTE_CALLS)
def test_promoting_calls(call: Callable[..., torch.Tensor]) -> None:
    half, full = tensors()
    result = call(half, full)
    assert result.dtype == FLOAT
    torch.testing.assert_close(result, reference(call, half, full))
    assert call(half, half.clone()).dtype in (HALF, FLOAT)


@pytest.mark.parametrize("call", [
    lambda h, f: h + f, lambda h, f: f - h, lambda h, f: torch.mul(h, f), lambda h, f: torch.div(f, h),
    lambda h, f: f.add_(h), lambda h, f: f.__imul__(h)])
def test_kernels_that_read_mixed_types_get_no_copies(call: Callable[..., torch.Tensor]) -> None:
    half, full = tensors()
    expected = reference(call, half, full.clone())
    before = _C.cast_counters()["casts"]
    result = call(half, full)
    assert result.dtype == FLOAT and torch.equal(result, expected)
    assert _C.cast_counters()["casts"] == before


def test_zero_dimensional_tensors_promote_too() -> None:
    half, _ = tensors()
    scale = torch.tensor(3.0, requires_grad=True)
    for result in (half * scale, scale * half, torch.add(half, scale), half.mul(scale)):
        assert result.dtype == FLOAT
    (half * scale).sum().backward()
    torch.testing.assert_close(scale.grad, half.float().sum())


@pytest.mark.parametrize("call", [
    lambda h, f: h < f, lambda h, f: f >= h, lambda h, f: h == f, lambda h, f: torch.ne(h, f),
    lambda h, f: torch.isclose(h, f), lambda h, f: torch.searchsorted(f.sort().values, h)])
def test_mixed_comparisons(call: Callable[..., torch.Tensor]) -> None:
    half, full = tensors()
    assert torch.equal(call(half, full), reference(call, half, full))


@pytest.mark.parametrize("call", IN_PLACE_CALLS)
@pytest.mark.parametrize("own", [HALF, FLOAT])
def test_in_place_calls_keep_the_type_of_self(call: Callable[..., torch.Tensor], own: torch.dtype) -> None:
    half, full = tensors()
    target, other = (half, full) if own == HALF else (full, half)
    expected = reference(call, target.clone(), other)
    result = call(target, other)
    assert result is target and target.dtype == own
    torch.testing.assert_close(target.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("call, name", [
    (lambda x: x.exp_(), "exp"), (lambda x: torch.exp_(x), "exp"), (lambda x: x.pow_(2), "pow"),
    (lambda x: x.__ipow__(2), "pow"), (lambda x: x.cumsum_(0), "cumsum")])
def test_fp32_in_place_is_refused_on_half_only(call: Callable[..., torch.Tensor], name: str) -> None:
    half, full = tensors()
    with pytest.raises(NotImplementedError, match=rf"x = x\.{name}\("):
        call(half)
    assert call(full).dtype == FLOAT
    with cast_state.disable_casts():
        assert call(half).dtype == HALF


def test_bce_is_refused_on_half_with_the_way_out() -> None:
    probability = torch.full((3,), 0.5)
    advice = r"(?s)BCEWithLogitsLoss.*register_float_function\(torch, 'sigmoid'\)"
    with pytest.raises(NotImplementedError, match=advice):
        F.binary_cross_entropy(probability.half(), probability)
    assert F.binary_cross_entropy(probability, probability).dtype == FLOAT


def test_a_number_that_half_cannot_hold_makes_the_call_fp32() -> None:
    half, full = tensors()
    mask = full > 0
    filled = half.masked_fill(mask, -1e9)
    assert filled.dtype == FLOAT and filled[mask].eq(-1e9).all()
    assert half.masked_fill(mask, value=-60000.0).dtype == HALF
    assert half.masked_fill(mask, float("-inf")).dtype == HALF
    assert F.pad(half, (1, 1), value=1e5).dtype == half.new_full((2,), -1e9).dtype == FLOAT
    assert F.hardtanh(half, -1e9, 1e9).dtype == FLOAT
    assert half.clamp(min=-1e9).dtype == FLOAT
    assert half.bfloat16().masked_fill(mask, -1e9).dtype == torch.bfloat16


def test_in_place_fill_saturates_and_warns_once() -> None:
    half, full = tensors()
    mask = full > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            half.masked_fill_(mask, -1e9)
    assert len(caught) == 1 and "masked_fill_" in str(caught[0].message)
    with pytest.warns(UserWarning, match="-1000000000.0 does not fit"):
        assert half.clone().fill_diagonal_(-1e9)[1, 1] == torch.finfo(HALF).min
        assert half.clone().scatter_(0, torch.zeros(1, 8, dtype=torch.long), -1e9)[0, 0] == torch.finfo(HALF).min
    assert half.dtype == HALF and half[mask].eq(torch.finfo(HALF).min).all()


def test_float64_integers_and_complex_are_left_alone() -> None:
    double = torch.randn(3, 3, dtype=torch.float64)
    half = torch.randn(3, 3).half()
    assert (double @ double).dtype == torch.float64
    assert F.linear(double, double).dtype == torch.float64
    assert (half + double).dtype == torch.float64
    with pytest.raises(RuntimeError):  # left to torch whole, which refuses it
        torch.mm(half, double)
    assert (half * torch.tensor(2.0, dtype=torch.float64)).dtype == HALF
    assert torch.mm(torch.ones(3, 3), half * 1).dtype == HALF
    integers = torch.ones(3, 3, dtype=torch.int64)
    assert (integers @ integers).dtype == torch.int64 and integers.sum().dtype == torch.int64
    assert torch.exp(torch.ones(3, dtype=torch.complex64)).dtype == torch.complex64
    assert torch.cat([integers, integers]).dtype == torch.int64


def test_only_listed_device_types_are_cast() -> None:
    cast_state.set_cast_devices({"cuda"})
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT
    cast_state.set_cast_devices({"meta"})
    assert torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta")).dtype == HALF


def test_out_decides_and_is_not_cast() -> None:
    half, full = tensors()
    for dtype in (HALF, FLOAT):
        out = torch.empty(4, 4, dtype=dtype)
        assert torch.mm(half, full.t(), out=out) is out and out.dtype == dtype
        torch.testing.assert_close(out.float(), reference(lambda h, f: h @ f.t(), half, full), rtol=2e-2, atol=2e-2)
    out = torch.empty(4, 8, dtype=HALF)
    assert torch.exp(half, out=out) is out and torch.isfinite(out).all()


@pytest.mark.parametrize("function", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("input_type", [HALF, FLOAT])
@pytest.mark.parametrize("weight_type", [HALF, FLOAT])
def test_normalization_by_predicted_weights(function: Callable[..., torch.Tensor], input_type: torch.dtype,
                                            weight_type: torch.dtype) -> None:
    """AdaIN: half weights and biases that a network predicted, beside FP32 statistics."""
    x, weight, bias = torch.randn(4, 3, 5).to(input_type), torch.rand(3).to(weight_type), torch.rand(3).to(weight_type)
    mean, variance = torch.zeros(3), torch.ones(3)
    normalized = function(x, mean, variance, weight, bias, True)
    assert normalized.dtype == input_type
    expected = reference(lambda *inputs: function(*inputs, True), x, torch.zeros(3), torch.ones(3), weight, bias)
    torch.testing.assert_close(normalized.float(), expected, rtol=4e-3, atol=4e-3)


def test_spectral_functions_run_in_float() -> None:
    half = torch.randn(2, 32).half()
    window = torch.hann_window(8)
    assert torch.fft.rfft(half).dtype == torch.complex64
    spectrum = torch.stft(half, 8, window=window, return_complex=True)
    assert torch.equal(spectrum, half.stft(8, window=window, return_complex=True))
    assert torch.istft(spectrum, 8, window=window.half()).dtype == FLOAT
    assert callable(torch.fft.fft) and not callable(torch.fft)  # the module keeps its place


@pytest.mark.parametrize("call", [
    lambda s, d: torch.mm(s, d), lambda s, d: s @ d, lambda s, d: torch.sparse.mm(s, d), lambda s, d: torch.spmm(s, d),
    lambda s, d: torch.dsmm(s, d), lambda s, d: torch.sparse.addmm(d, s, d)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_products_run_in_float(call: Callable[..., torch.Tensor], layout: torch.layout) -> None:
    half, full = tensors()
    sparse = torch.eye(4).to_sparse(layout=layout)
    assert call(sparse, full).dtype == call(sparse, half).dtype == FLOAT


@pytest.mark.parametrize("call", [
    lambda h: torch.linalg.vector_norm(h, dtype=HALF), lambda h: torch.sum(h, 0, dtype=HALF),
    lambda h: torch.norm(h, dtype=HALF), lambda h: F.softmax(h, -1, dtype=HALF)])
def test_an_explicit_dtype_decides(call: Callable[..., torch.Tensor]) -> None:
    half, _ = tensors()
    assert call(half).dtype == HALF


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("train", [False, True])
def test_recurrent_modules(kind: str, train: bool) -> None:
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(5, 4, num_layers=2, bidirectional=True, batch_first=True)
    cell = getattr(nn, kind + "Cell")(8, 3)
    x, lengths = torch.randn(3, 6, 5), torch.tensor([6, 2, 4])

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        y, state = rnn(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        p, packed_state = nn.utils.rnn.pad_packed_sequence(rnn(packed, state)[0])
        c = cell(y[:, 0], None)
        c = cell(y[:, 1], c)
        mixed = rnn(x.to(y.dtype), [part.float() for part in state] if isinstance(state, tuple) else state.float())
        torch.testing.assert_close(mixed[0], rnn(x, state)[0], rtol=1e-2, atol=1e-2)
        return [y, p, c[0] if isinstance(c, tuple) else c]

    with torch.set_grad_enabled(train):
        results = run(x)
        with cast_state.disable_casts():
            expected = run(x)
    for result, value in zip(results, expected):
        assert result.dtype == HALF
        torch.testing.assert_close(result.float(), value, rtol=2e-2, atol=1e-2)
    if train:
        sum(result.float().sum() for result in results).backward()
        assert all(p.grad is not None and p.grad.dtype == FLOAT for p in [*rnn.parameters(), *cell.parameters()])


@pytest.mark.parametrize("train", [False, True])
def test_attention_modules(train: bool) -> None:
    """In eval without grad they take their fused path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(train)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(train)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    encoder = nn.TransformerEncoder(layer, 2).train(train)

    def run() -> list[torch.Tensor]:
        return [layer(x), attention(x, x, x)[0], encoder(x, src_key_padding_mask=padding)[~padding]]

    with torch.set_grad_enabled(train), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run()
        with cast_state.disable_casts():
            expected = run()
    for result, value in zip(results, expected):
        torch.testing.assert_close(result.float(), value, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm,
                                  nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_normalized_weights_train(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Conv2d(1, 2, 3)), nn.Flatten(), wrap(nn.Linear(8, 1)))
    model(torch.randn(4, 1, 4, 4)).float().pow(2).mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_subclasses_keep_their_type() -> None:
    class Named(torch.Tensor):
        pass

    value = torch.randn(3, 3).as_subclass(Named)
    result = value @ value
    assert type(result) is Named and result.dtype == HALF
    assert type(result.exp()) is Named and result.exp().dtype == FLOAT


def test_arguments_are_not_mutated() -> None:
    half, full = tensors()
    items, named = [half, full], {"weight": full}
    torch.cat(items)
    F.linear(half, **named)
    assert items[0] is half and items[1] is full and named["weight"] is full and full.dtype == FLOAT


def test_errors_come_from_torch_unchanged() -> None:
    with pytest.raises(TypeError, match="mat2"):
        torch.mm(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="shape"):
        torch.ones(2, 3) @ torch.ones(2, 3)

    class Right:
        def __radd__(self, other: object) -> str:
            return "radd"

    assert torch.ones(2) + Right() == "radd"


def test_bfloat16_level() -> None:
    cast_state.set_default_cast_type(torch.bfloat16)
    _, full = tensors()
    assert (full @ full.t()).dtype == torch.bfloat16
    assert (full.half() + full.bfloat16()).dtype == FLOAT
    assert torch.mm(full.half(), full.t()).dtype == torch.bfloat16
