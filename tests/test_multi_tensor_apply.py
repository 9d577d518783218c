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


# ---- the optimizers' functions ----

def optimizer_lists(count: int) -> list[list[torch.Tensor]]:
    """Gradients, parameters and state: sizes differ, state is not negative."""
    torch.manual_seed(0)
    lists = [[torch.randn(size) for size in (5, 40, 1)] for _ in range(count)]
    return lists[:2] + [[tensor.abs() for tensor in tensors] for tensors in lists[2:]]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_adam_takes_a_step_number_and_state_of_any_dtype(state_dtype: torch.dtype) -> None:
    grads, params, exp_avgs, exp_avg_sqs = optimizer_lists(4)
    moments = [[tensor.to(state_dtype) for tensor in tensors] for tensors in (exp_avgs, exp_avg_sqs)]
    twins = [param.clone().requires_grad_() for param in params]
    theirs = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.2)
    for twin, grad, first, second in zip(twins, grads, *moments):
        twin.grad = grad
        theirs.state[twin] = {"step": torch.tensor(2.0), "exp_avg": first.float().clone(),
                               "exp_avg_sq": second.float().clone()}
    theirs.step()
    flag = torch.ones(1, dtype=torch.int32)
    multi_tensor_applier(amp_C.multi_tensor_adam, flag, [grads, params, *moments], 0.1, 0.9, 0.999, 1e-8, 3,
                         1, 1, 0.2)
    for param, twin, first in zip(params, twins, moments[0]):
        torch.testing.assert_close(param, twin.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(first, theirs.state[twin]["exp_avg"].to(state_dtype))
    assert flag.item() == 1


@pytest.mark.parametrize("skip", [0, 1])
def test_sgd_writes_model_copies_unless_noop_flag_is_set(skip: int) -> None:
    grads, params, buffers = optimizer_lists(3)
    copies = [torch.zeros_like(param, dtype=torch.float16) for param in params]
    old = [param.clone() for param in params]
    expected = [param - 0.1 * (0.9 * buffer + 0.5 * grad) for grad, param, buffer in zip(grads, params, buffers)]
    flag = torch.tensor([skip], dtype=torch.int32)
    multi_tensor_applier(amp_C.multi_tensor_sgd, flag, [grads, params, buffers, copies], 0.0, 0.9, 0.0, 0.1,
                         False, False, False, 0.5)
    for param, before, after, copied in zip(params, old, expected, copies):
        torch.testing.assert_close(param, before if skip else after)
        assert torch.equal(copied, torch.zeros_like(copied) if skip else param.half())


def test_lamb_in_one_call_and_in_two_stages() -> None:
    lists = optimizer_lists(4)
    twins = [[tensor.clone() for tensor in tensors] for tensors in lists]
    flag, norm = torch.zeros(1, dtype=torch.int32), amp_C.multi_tensor_l2norm(0, None, [lists[0]])[0]
    multi_tensor_applier(amp_C.multi_tensor_lamb, flag, lists, 0.1, 0.9, 0.999, 1e-6, 3, 1, 0.2, 1, 1, norm,
                         1.0, False)
    updates = [torch.empty_like(grad) for grad in twins[0]]
    multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag, [*twins, updates], torch.full((3,), 0.2),
                         2, 0.9, 0.999, 1e-6, norm, 1.0)
    norms = [amp_C.multi_tensor_l2norm(0, flag, [tensors], True)[1] for tensors in (twins[1], updates)]
    multi_tensor_applier(amp_C.multi_tensor_lamb_stage2_cuda, flag, [twins[1], updates], *norms, 0.1, 0.2)
    for tensors, others in zip(lists, twins):
        for one, other in zip(tensors, others):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
