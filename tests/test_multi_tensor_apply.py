"""The call shapes of Apex's multi_tensor_applier and amp_C."""
from __future__ import annotations

import pytest
import torch

from apex_amp import multi_tensor_apply as amp_C
from apex_amp.multi_tensor_apply import MultiTensorApply, multi_tensor_applier, multi_tensor_applier_l2norm


def buffer(dtype=torch.int32, shape=(1,)):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("dtype,shape", [(torch.int32, (1,)), (torch.int32, ()), (torch.float32, (1,))])
def test_scale_raises_the_overflow_buffer_and_never_clears_it(dtype, shape):
    overflow = buffer(dtype, shape)
    masters = [torch.empty(3), torch.empty(2)]
    grads = [torch.ones(3).half(), torch.ones(2).half()]
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, masters], 0.5)
    assert [m.tolist() for m in masters] == [[0.5] * 3, [0.5] * 2] and overflow.item() == 0
    bad = [torch.ones(3), torch.tensor([1.0, float("inf")])]
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [bad, masters], 0.5)
    assert overflow.item() == 1
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [masters[:1], masters[:1]], 0.5)
    assert overflow.item() == 1


@pytest.mark.parametrize("arg_to_check,raised", [(0, (1, 0)), (1, (0, 1)), (-1, (1, 1))])
def test_axpby_checks_the_argument_it_is_told_to(arg_to_check, raised):
    good, bad = torch.ones(4), torch.tensor([1.0, float("nan"), 1.0, 1.0])
    for (x, y), expected in zip(((bad, good), (good, bad)), raised):
        overflow, out = buffer(), torch.empty(4)
        multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, [[x], [y], [out]], 2.0, 3.0, arg_to_check)
        assert overflow.item() == expected and out[0].item() == 5.0


def test_l2norm_returns_apex_s_pair():
    tensors = [torch.full((3,), 2.0), torch.full((4,), 1.0)]
    norm, per_tensor = multi_tensor_applier_l2norm(amp_C.multi_tensor_l2norm, buffer(), [tensors])
    assert norm.shape == (1,) and norm.item() == 4.0 and per_tensor.shape == (0,)
    norm, per_tensor = multi_tensor_applier(amp_C.multi_tensor_l2norm, buffer(), [tensors], True)
    torch.testing.assert_close(per_tensor, torch.tensor([12.0**0.5, 2.0]))


def test_parameters_are_written_in_grad_mode_as_apex_does():
    parameter = torch.nn.Parameter(torch.ones(3))
    multi_tensor_applier(amp_C.multi_tensor_scale, buffer(), [[torch.ones(3)], [parameter]], 2.0)
    assert parameter.tolist() == [2.0] * 3


def test_the_applier_passes_its_chunk_size_on():
    calls = []
    applier = MultiTensorApply(1024)
    applier.check_avail()
    assert applier(lambda *args: calls.append(args) or "result", "flag", [["a"]], 1, 2) == "result"
    assert calls == [(1024, "flag", [["a"]], 1, 2)] and MultiTensorApply.available


@pytest.mark.parametrize("call,error,message", [
    (lambda: amp_C.multi_tensor_scale(1, buffer(), [[torch.ones(1)]], 1.0), ValueError,
     r"expected 2 lists \(src, dst\), got 1"),
    (lambda: amp_C.multi_tensor_scale(1, buffer(torch.int64), [[], []], 1.0), TypeError,
     "noop_flag: expected an int32 .* got torch.int64 of shape"),
    (lambda: amp_C.multi_tensor_scale(1, None, [[], []], 1.0), TypeError, "noop_flag: .* got NoneType"),
    (lambda: amp_C.multi_tensor_axpby(1, buffer(), [[], [], []], 1.0, 1.0, 2), ValueError,
     r"arg_to_check: expected 0 \(x\), 1 \(y\) or -1 \(both\), got 2"),
])
def test_wrong_calls_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_call_leaves_the_overflow_buffer_alone():
    overflow = buffer()
    with pytest.raises(TypeError, match=r"src\[0\]"):
        amp_C.multi_tensor_scale(1, overflow, [[torch.ones(3, dtype=torch.int32)], [torch.ones(3)]], 1.0)
    assert overflow.item() == 0
