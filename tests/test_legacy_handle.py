"""amp.init and its handle, amp._amp_state and amp.lists."""
import collections

import pytest
import torch

from apex_amp import amp
from apex_amp.amp import cast_lists
from apex_amp.amp.legacy_handle import applier


@pytest.fixture(autouse=True)
def no_handle_left():
    yield
    amp._amp_state.handle = None


def make(opt_level="O2", **keywords):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **keywords)


# --- the handle -------------------------------------------------------------------------------------------------------

def test_an_overflow_skips_the_step_of_a_wrapped_optimizer():
    handle = amp.init()
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([param], lr=0.5), num_loss=2)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        for part in (param.sum() * factor, param.sum()):
            with optimizer.scale_loss(part) as scaled_loss:
                scaled_loss.backward()
        with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(part):
            pass
        optimizer.step()
        assert param.tolist() == ([1, 1] if factor != 1.0 else [0, 0])  # two losses of gradient 1, lr 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5 and "SGD" in repr(optimizer)


def test_the_handle_scales_with_the_scale_given_to_init():
    handle = amp.init(loss_scale=128.0)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.5)
    with handle.scale_loss(param.sum(), optimizer) as scaled_loss:
        assert scaled_loss.item() == 128
        scaled_loss.backward()
    assert param.grad.item() == 1


def test_casts_of_the_process_end_with_the_handle():
    x = torch.randn(2, 2)
    handle = amp.init(patch_type=torch.bfloat16)
    assert handle.is_active() and torch.mm(x, x).dtype == torch.bfloat16
    with handle._disable_casts():
        assert not handle.is_active() and torch.mm(x, x).dtype == torch.float32
    handle._clear_cache()
    handle._deactivate()
    assert not handle.is_active() and torch.mm(x, x).dtype == torch.float32


def test_an_inert_handle_changes_nothing():
    handle = amp.init(enabled=False)
    optimizer = handle.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    loss = torch.ones(1)
    with optimizer.scale_loss(loss) as same, handle.scale_loss(loss, optimizer) as also, handle._disable_casts():
        assert same is loss is also
    assert not handle.is_active() and amp._amp_state.handle is handle
    handle._deactivate()


def test_init_refuses_other_types_and_can_allow_banned_functions():
    with pytest.raises(ValueError, match="patch_type"):
        amp.init(patch_type=torch.float32)
    probabilities = torch.rand(3).half()
    amp.init()
    with pytest.raises(Exception, match="BCEWithLogitsLoss"):
        torch.nn.functional.binary_cross_entropy(probabilities, probabilities)


# --- _amp_state -------------------------------------------------------------------------------------------------------

def test_state_before_and_without_amp():
    assert not hasattr(amp._amp_state, "opt_properties") and not hasattr(amp._amp_state, "loss_scalers")
    make(enabled=False)
    assert amp._amp_state.opt_properties.enabled is False and not hasattr(amp._amp_state, "loss_scalers")
    assert amp._amp_state.opt_properties.options == {"enabled": False}


def test_state_shows_and_sets_the_engines():
    make("O2", num_losses=2)
    state = amp._amp_state
    assert [scaler.loss_scale() for scaler in state.loss_scalers] == [2.0 ** 16] * 2
    state.loss_scalers[1]._loss_scale = 8
    state.loss_scalers[1]._unskipped = 5
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 8.0, "unskipped": 5}
    assert state.loss_scalers[1]._unskipped == 5 and state.loss_scalers[1].dynamic
    assert state.opt_properties.opt_level == "O2" and state.opt_properties.options["keep_batchnorm_fp32"] is True
    with pytest.raises(AttributeError, match="opt_properties has no 'nothing'"):
        state.opt_properties.nothing
    state.verbosity = 2
    assert state.verbosity == 2
    state.allow_incoming_model_not_fp32 = True
    make_half = torch.nn.Linear(1, 1).half()
    amp.initialize(make_half, opt_level="O2", verbosity=0)
    state.allow_incoming_model_not_fp32 = False


def test_scaling_by_hand(capsys):
    model, optimizer = make("O2")
    scaler = amp._amp_state.loss_scalers[0]
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False and scaler._unskipped == 1
    own_buffer = torch.ones(1, dtype=torch.int32)
    amp._amp_state.loss_scalers[0]._overflow_buf = own_buffer
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0 ** 15
    amp._amp_state.maybe_print("silent at verbosity 0")
    assert capsys.readouterr().out == ""
    assert optimizer._amp_stash.all_fp16_params == list(model.parameters())
    assert [p.dtype for p in optimizer._amp_stash.all_fp32_from_fp16_params] == [torch.float32] * 2
    optimizer._amp_lazy_init()
    optimizer._lazy_init_maybe_master_weights()


# --- lists ------------------------------------------------------------------------------------------------------------

def test_lists_are_those_that_initialize_reads():
    functional, of_torch = amp.lists.functional_overrides, amp.lists.torch_overrides
    before = list(cast_lists.FP32), list(cast_lists.LOW_PRECISION)
    try:
        functional.FP32_FUNCS.remove("softmax")
        of_torch.FP32_FUNCS.remove("softmax")
        functional.FP16_FUNCS.append("softmax")
        of_torch.FP16_FUNCS += ["softmax", "cosine_similarity"]
        assert "softmax" not in cast_lists.FP32 and cast_lists.LOW_PRECISION.count("softmax") == 1
        assert len(of_torch.FP16_FUNCS) == len(before[1]) + 2 and functional.MODULE is torch.nn.functional
        alive = make("O1")
        assert alive and torch.nn.functional.softmax(torch.ones(2), 0).dtype == torch.float16
    finally:
        cast_lists.FP32[:], cast_lists.LOW_PRECISION[:] = before


def test_applier_reaches_into_nests():
    Pair = collections.namedtuple("Pair", "a b")
    nest = {"x": [torch.ones(1), 3], "y": Pair(torch.ones(1), "text")}
    halved = applier(nest, torch.Tensor.half)
    assert halved["x"][0].dtype == halved["y"].a.dtype == torch.float16
    assert halved["x"][1] == 3 and halved["y"].b == "text" and isinstance(halved["y"], Pair)
