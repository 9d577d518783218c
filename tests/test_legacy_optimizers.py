"""FusedAdam with the arguments of 2019 is clipping followed by today's FusedAdam."""
import copy

import pytest
import torch

from apex_amp import optimizers
from apex_amp.legacy_optimizers import FusedAdam


def make_params():
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (3, 5, 2)]
    for param in params[:2]:
        param.grad = 10 * torch.randn(param.shape, generator=generator)
    return params


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1e6])
def test_step_clips_each_group_first(max_grad_norm):
    params = make_params()
    expected = copy.deepcopy(params)
    for param, twin in zip(params, expected):
        twin.grad = None if param.grad is None else param.grad.clone()
    groups = lambda given: [{"params": given[:1]}, {"params": given[1:]}]  # noqa: E731
    reference = optimizers.FusedAdam(groups(expected), lr=0.1, eps=0.1, bias_correction=False)
    for group in reference.param_groups:
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(group["params"], max_grad_norm)
    reference.step()
    optimizer = FusedAdam(groups(params), lr=0.1, eps=0.1, bias_correction=False, max_grad_norm=max_grad_norm)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, expected))


def test_closure_is_called_once_before_clipping():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param], lr=0.1, max_grad_norm=1.0)
    calls = []

    def closure():
        calls.append(1)
        loss = (param * 100).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 200 and len(calls) == 1
    torch.testing.assert_close(param.grad.norm(), torch.tensor(1.0), rtol=1e-4, atol=0)


def test_groups_added_later_clip_too_and_dropped_arguments_warn():
    with pytest.warns(UserWarning, match="eps_inside_sqrt"):
        optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))], max_grad_norm=2.0, eps_inside_sqrt=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [2.0, 2.0]
