"""How the multi-tensor ops take their arguments: layouts, devices, versions, and errors that leave everything be."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex_amp import _C, multi_tensor
from apex_amp.multi_tensor import (multi_tensor_axpby, multi_tensor_copy, multi_tensor_l2norm, multi_tensor_scale,
                                   multi_tensor_unscale_, update_scale_)


def found() -> Tensor:
    return torch.zeros(1)


# ---- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6, 8, 10),
    "channels_last": lambda: torch.randn(4, 6, 8, 10).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(10, 8, 6, 4).permute(3, 2, 1, 0),
    "strided": lambda: torch.randn(4, 6, 8, 20)[..., ::2],
    "sliced": lambda: torch.randn(4, 6, 9, 10)[:, :, 1:],
}


@pytest.mark.parametrize("src_layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("dst_layout", LAYOUTS)
def test_any_strides_read_and_written(src_layout, dst_layout):
    src = torch.randn(4, 1, 8, 1).expand(4, 6, 8, 10) if src_layout == "expanded" else LAYOUTS[src_layout]()
    dst = LAYOUTS[dst_layout]()
    strides, pointer = dst.stride(), dst.data_ptr()
    multi_tensor_scale([src], [dst], found(), 0.5)
    assert torch.equal(dst, src * 0.5)
    assert (dst.stride(), dst.data_ptr()) == (strides, pointer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_in_place_and_in_a_norm(layout):
    grad = LAYOUTS[layout]()
    before = grad.clone()
    found_inf = found()
    multi_tensor_unscale_([grad], found_inf, 0.5)
    assert torch.equal(grad, before * 0.5) and found_inf.item() == 0
    torch.testing.assert_close(multi_tensor_l2norm([grad]), grad.norm())
    grad[-1, -1, -1, -1] = float("inf")
    multi_tensor_unscale_([grad], found_inf, 0.5)
    assert found_inf.item() == 1


def test_a_strided_write_leaves_the_gaps_alone():
    whole = torch.zeros(10)
    multi_tensor_copy([torch.ones(5)], [whole[::2]])
    assert whole.tolist() == [1.0, 0.0] * 5


def test_scalars_tuples_and_empty_lists():
    x, out = torch.tensor(3.0), torch.empty((), dtype=torch.float16)
    multi_tensor_scale((x,), (out,), torch.tensor(0.0), 2)
    assert out.item() == 6.0
    multi_tensor_scale([], [], found(), 2.0, torch.empty(0))
    multi_tensor_copy([torch.empty(0, 3)], [torch.empty(0, 3)])


def test_mixed_dtypes_in_one_list_keep_their_places():
    kinds = [torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16]
    src = [torch.full((3,), float(i + 1), dtype=kind) for i, kind in enumerate(kinds)]
    dst = [torch.empty(3, dtype=kind) for kind in reversed(kinds)]
    src[2][1] = float("inf")
    flags = torch.zeros(5)
    multi_tensor_scale(src, dst, found(), 2.0, flags)
    assert [t[0].item() for t in dst] == [2, 4, 6, 8, 10]
    assert flags.tolist() == [0, 0, 1, 0, 0]
    assert multi_tensor_l2norm(dst[:2], per_tensor=True)[1].tolist() == pytest.approx([12**0.5, 48**0.5])


def test_copy_on_write_tensors_are_separated_before_a_write():
    original = torch.ones(4)
    lazy = torch._lazy_clone(original)
    multi_tensor_unscale_([lazy], found(), 0.5)
    assert original.tolist() == [1.0] * 4 and lazy.tolist() == [0.5] * 4


# ---- lists long enough for several threads ---------------------------------------------------------------------------

LONG = 5000


def long_list(odd: int, oddity: object) -> list[Tensor]:
    """LONG tensors [i, i], but `oddity` in the place of number `odd`."""
    result: list = [torch.full((2,), float(i)) for i in range(LONG)]
    result[odd] = oddity
    return result


@pytest.mark.parametrize("odd", [0, 1, 2600, LONG - 1])
@pytest.mark.parametrize("kind", ["plain", "half", "empty", "strided", "lazy", "negated"])
def test_long_lists_are_scaled_whatever_one_of_their_tensors_is(odd, kind):
    lazy_source = torch.tensor([1.0, 2.0])
    oddity = {"plain": lambda: torch.tensor([1.0, 2.0]), "half": lambda: torch.tensor([1.0, 2.0]).half(),
              "empty": lambda: torch.empty(0), "strided": lambda: torch.tensor([1.0, 7.0, 2.0])[::2],
              "lazy": lambda: torch._lazy_clone(lazy_source),
              "negated": lambda: torch._neg_view(torch.tensor([-1.0, -2.0]))}[kind]()
    grads, flags = long_list(odd, oddity), torch.zeros(LONG)
    grads[3][0] = float("inf")
    before = [grad._version for grad in grads]
    multi_tensor_unscale_(grads, found(), 0.5, flags)
    assert all(grad[-1].item() == i / 2 for i, grad in enumerate(grads) if i != odd)
    assert grads[odd].tolist() == ([] if kind == "empty" else [0.5, 1.0])
    assert flags.nonzero().tolist() == [[3]] and lazy_source.tolist() == [1.0, 2.0]
    assert all(grad._version > version for grad, version in zip(grads, before))


@pytest.mark.parametrize("odd", [1, 2600, LONG - 1])
@pytest.mark.parametrize("oddity,message", [
    (None, "expected a torch.Tensor, got NoneType"),
    (torch.ones(2, dtype=torch.int64), "expected float16, bfloat16, float32 or float64, got int64"),
    (torch.ones(2, requires_grad=True), "expected a tensor that doesn't require grad"),
    (torch.ones(1).expand(2), "expected elements that don't share memory"),
], ids=["None", "int64", "requires grad", "expanded"])
def test_one_wrong_tensor_in_a_long_list_is_named(odd, oddity, message):
    grads = long_list(odd, oddity)
    with pytest.raises((TypeError, ValueError), match=rf"grads\[{odd}\]: {message}"):
        multi_tensor_unscale_(grads, found(), 0.5)
    assert all(grad.tolist() == [i, i] and grad._version == 0 for i, grad in enumerate(grads) if i != odd)


def test_a_wrong_shape_in_a_long_list_is_named():
    dst = long_list(4999, torch.ones(3))
    with pytest.raises(ValueError, match=r"dst\[4999\]: expected shape \[2\] like src\[4999\], got \[3\]"):
        multi_tensor_copy(long_list(0, torch.zeros(2)), dst)


# ---- versions and autograd ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_every_written_version_moves_and_no_other(layout):
    x, y, out = LAYOUTS[layout](), LAYOUTS[layout](), LAYOUTS[layout]()
    x_version, y_version, out_version = x._version, y._version, out._version
    multi_tensor_axpby([x], [y], [out], found(), 1.0, 1.0)
    assert (x._version, y._version) == (x_version, y_version) and out._version > out_version
    for write in (lambda: multi_tensor_copy([x], [out]), lambda: multi_tensor_scale([x], [out], found(), 1.0),
                  lambda: multi_tensor_unscale_([out], found(), 1.0)):
        before = out._version
        write()
        assert out._version > before
    multi_tensor_l2norm([x])
    assert x._version == x_version


def test_found_inf_s_version_moves_only_when_it_is_raised():
    found_inf, flags = found(), torch.zeros(1)
    multi_tensor_unscale_([torch.ones(3)], found_inf, 1.0, flags)
    assert (found_inf._version, flags._version) == (0, 0)
    multi_tensor_unscale_([torch.tensor([float("nan")])], found_inf, 1.0, flags)
    assert found_inf._version > 0 and flags._version > 0


def test_the_scale_s_version_moves_only_when_the_scale_does():
    scale, tracker, found_inf = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32), found()
    update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2, 1.0, 8.0)
    assert scale._version == 0 and tracker._version > 0 and found_inf._version == 0
    update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2, 1.0, 8.0)
    assert scale.item() == 8.0 and scale._version > 0 and found_inf._version == 0


def test_backward_notices_that_a_saved_tensor_was_written():
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * x).sum()
    multi_tensor_unscale_([x], found(), 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_are_written_under_no_grad_and_their_norm_has_no_gradient():
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        multi_tensor_copy([torch.full((3,), 2.0)], [parameter])
    assert parameter.tolist() == [2.0] * 3 and parameter.requires_grad
    assert not multi_tensor_l2norm([parameter]).requires_grad


def test_inference_tensors_are_written():
    with torch.inference_mode():
        x = torch.ones(3)
        multi_tensor_unscale_([x], torch.zeros(1), 0.5)
        assert x.tolist() == [0.5] * 3


# ---- errors -------------------------------------------------------------------------------------------------------

def ones(*shape: int, **kwargs) -> Tensor:
    return torch.ones(*(shape or (3,)), **kwargs)


BAD_CALLS = {
    "no list": (lambda f: multi_tensor_scale([ones()], ones(), f, 1.0), TypeError,
                "multi_tensor_scale: dst: expected a list of tensors, got Tensor"),
    "lengths": (lambda f: multi_tensor_scale([ones(), ones()], [ones()], f, 1.0), ValueError,
                "dst: expected 2 tensors like src, got 1"),
    "shapes": (lambda f: multi_tensor_scale([ones(), ones()], [ones(), ones(4)], f, 1.0), ValueError,
               r"dst\[1\]: expected shape \[3\] like src\[1\], got \[4\]"),
    "None": (lambda f: multi_tensor_unscale_([ones(), None], f, 1.0), TypeError,
             r"grads\[1\]: expected a torch.Tensor, got NoneType"),
    "integers": (lambda f: multi_tensor_copy([ones()], [ones(dtype=torch.int64)]), TypeError,
                 r"dst\[0\]: expected float16, bfloat16 or float32, got int64"),
    "complex": (lambda f: multi_tensor_l2norm([ones(dtype=torch.complex64)]), TypeError,
                r"tensors\[0\]: expected float16, bfloat16, float32 or float64, got complex64"),
    "float64 in axpby": (lambda f: multi_tensor_axpby([ones()], [ones(dtype=torch.float64)], [ones()], f, 1.0, 1.0),
                         TypeError, r"y\[0\]: expected float16, bfloat16 or float32, got float64"),
    "sparse": (lambda f: multi_tensor_unscale_([ones(3, 3).to_sparse()], f, 1.0), ValueError,
               r"grads\[0\]: expected a dense tensor, got layout Sparse"),
    "devices": (lambda f: multi_tensor_scale([ones()], [ones(device="meta")], f, 1.0), ValueError,
                r"dst\[0\]: expected device cpu like src\[0\], got meta"),
    "requires grad": (lambda f: multi_tensor_unscale_([ones(), ones(requires_grad=True)], f, 1.0), ValueError,
                      r"grads\[1\]: expected a tensor that doesn't require grad, or a call under torch.no_grad\(\)"),
    "expanded": (lambda f: multi_tensor_copy([ones()], [ones(1).expand(3)]), ValueError,
                 r"dst\[0\]: expected elements that don't share memory.*strides \[0\]"),
    "found_inf's dtype": (lambda f: multi_tensor_scale([ones()], [ones()], f.int(), 1.0), TypeError,
                          "found_inf: expected dtype float32, got int32"),
    "found_inf's size": (lambda f: multi_tensor_scale([ones()], [ones()], torch.zeros(2), 1.0), ValueError,
                         r"found_inf: expected a contiguous tensor of 1 element\(s\), got shape \[2\]"),
    "found_inf a float": (lambda f: multi_tensor_scale([ones()], [ones()], 0.0, 1.0), TypeError,
                          "found_inf: expected a torch.Tensor, got float"),
    "flags' size": (lambda f: multi_tensor_scale([ones()], [ones()], f, 1.0, torch.zeros(2)), ValueError,
                    "found_inf_per_tensor: expected a contiguous tensor of 1 element"),
    "scale's type": (lambda f: multi_tensor_scale([ones()], [ones()], f, "2"), TypeError,
                     "scale: expected a float or a float32 tensor of one element, got str"),
    "scale's dtype": (lambda f: multi_tensor_unscale_([ones()], f, ones(1).double()), TypeError,
                      "inv_scale: expected dtype float32, got float64"),
    "check": (lambda f: multi_tensor_axpby([ones()], [ones()], [ones()], f, 1.0, 1.0, "z"), ValueError,
              'check: expected "x", "y" or "both", got "z"'),
    "growth_tracker's dtype": (lambda f: update_scale_(ones(1), ones(1), f, 2.0, 0.5, 1, 1.0, 2.0), TypeError,
                               "update_scale_: growth_tracker: expected dtype int32, got float32"),
    "growth_interval": (lambda f: update_scale_(ones(1), ones(1).int(), f, 2.0, 0.5, 0, 1.0, 2.0), ValueError,
                        r"growth_interval: expected a number from 1 to 2\*\*31 - 1, got 0"),
    "limits": (lambda f: update_scale_(ones(1), ones(1).int(), f, 2.0, 0.5, 1, 4.0, 2.0), ValueError,
               "min_scale: expected at most max_scale = 2, got 4"),
}


@pytest.mark.parametrize("call,error,message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(found())


@pytest.mark.parametrize("spoil", ["last tensor", "found_inf", "flags", "scale"])
def test_nothing_is_written_before_all_checks_pass(spoil):
    grads = [torch.full((3,), float("inf")), torch.ones(3)]
    found_inf, flags, scale = found(), torch.zeros(2), torch.tensor(0.5)
    last = torch.ones(3, dtype=torch.int32) if spoil == "last tensor" else torch.ones(3)
    with pytest.raises((TypeError, ValueError)):
        multi_tensor_unscale_([*grads, last], found_inf.half() if spoil == "found_inf" else found_inf,
                              scale.double() if spoil == "scale" else scale,
                              flags if spoil == "flags" else torch.zeros(3))
    assert grads[1].tolist() == [1.0] * 3 and grads[1]._version == 0
    assert found_inf.item() == 0 and not flags.any()


def test_nested_lists_are_refused_by_name():
    with pytest.raises(TypeError, match=r"src\[0\]: expected a torch.Tensor, got list"):
        multi_tensor_scale([[ones()]], [[ones()]], found(), 1.0)


# ---- devices without kernels ---------------------------------------------------------------------------------------

def random_lists(*dtypes: torch.dtype) -> list[list[Tensor]]:
    return [[torch.randn(shape).to(dtype) for shape in ((), (0,), (5,), (3, 4), (1000,))] for dtype in dtypes]


@pytest.mark.parametrize("check", ["x", "y", "both"])
@pytest.mark.parametrize("poison", [None, "x", "y"])
def test_the_plain_torch_axpby_agrees_with_the_kernels(check, poison):
    x, y, out = random_lists(torch.float16, torch.float32, torch.bfloat16)
    if poison:
        (x if poison == "x" else y)[3][1, 1] = float("nan")
    results = []
    for axpby in (multi_tensor._torch_axpby, multi_tensor_axpby):
        outs, found_inf, flags = [t.clone() for t in out], found(), torch.zeros(len(x))
        axpby(x, y, outs, found_inf, 0.3, torch.tensor([-2.0]) if axpby is multi_tensor_axpby else -2.0, check, flags)
        results.append([*outs, found_inf, flags])
    for mine, kernels in zip(*results):
        assert torch.equal(mine.nan_to_num(7.0), kernels.nan_to_num(7.0))


@pytest.mark.parametrize("scale", [0.3, torch.tensor([0.3])], ids=["float", "tensor"])
def test_the_plain_torch_scale_agrees_with_the_kernels(scale):
    for dtypes in ((torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        src, dst = random_lists(*dtypes)
        src[4][-1] = float("inf")
        expected, found_inf, flags = [t.clone() for t in dst], [found(), found()], torch.zeros(2, len(src))
        multi_tensor_scale(src, expected, found_inf[0], scale, flags[0])
        multi_tensor._torch_scale(src, dst, found_inf[1], scale, flags[1])
        # torch multiplies float64 by the float as it is, the kernels by the float rounded to FP32
        for mine, kernels in zip(dst, expected):
            torch.testing.assert_close(mine, kernels, rtol=1e-7 if mine.dtype == torch.float64 else 0, atol=0)
        assert torch.equal(*found_inf) and torch.equal(flags[0], flags[1]) and flags[0].tolist() == [0, 0, 0, 0, 1]


def test_the_plain_torch_norm_and_copy_agree_with_the_kernels():
    tensors = sum(random_lists(torch.float16, torch.float32, torch.float64), [])
    for mine, kernels in zip(multi_tensor._torch_l2norm_per_tensor(tensors), multi_tensor_l2norm(tensors, True)):
        torch.testing.assert_close(mine, kernels, rtol=1e-6, atol=0)
    src, dst = random_lists(torch.float32, torch.float16)
    multi_tensor._torch_copy(src, dst)
    assert all(torch.equal(d, s.half()) for s, d in zip(src, dst))


def test_tensors_without_memory_take_the_dispatcher():
    meta = [torch.ones(3, device="meta")]
    assert _C.multi_tensor_copy(meta, meta) is False and _C.multi_tensor_l2norm(meta, False) is None
    assert multi_tensor_l2norm(meta).device.type == "meta"
    multi_tensor_scale(meta, meta, torch.zeros(1, device="meta"), 2.0)


def test_build_info_says_what_was_built():
    info = _C.build_info()
    assert set(info) == {"cuda", "cuda_version", "cuda_architectures", "torch_version", "cpu_isa"}
    assert torch.__version__.startswith(info["torch_version"]) and info["cpu_isa"] in ("avx2", "scalar")
    assert info["cuda"] == (info["cuda_version"] is not None) == (info["cuda_architectures"] is not None)
