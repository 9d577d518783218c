"""Mixed-precision training by one word; see `initialize`."""
from .autocast import autocast, custom_bwd, custom_fwd, get_autocast_dtype, is_autocast_enabled
from .cast_state import clear_weight_cache, disable_casts
from .frontend import (initialize, last_step_skipped, load_state_dict, loss_scale, master_params, overflow_report,
                       shutdown, state_dict, sync_masters)
from .grad_scaler import GradScaler
from .patching import (bfloat16_function, float_function, half_function, promote_function, register_bfloat16_function,
                       register_float_function, register_half_function, register_promote_function)
from .scale_context import scale_loss
from .legacy_handle import _amp_state, init, lists

__all__ = [
    "bfloat16_function", "clear_weight_cache", "disable_casts", "float_function", "half_function", "init",
    "initialize", "last_step_skipped", "lists", "load_state_dict", "loss_scale", "master_params", "overflow_report",
    "promote_function", "register_bfloat16_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "shutdown", "state_dict", "sync_masters",
]
