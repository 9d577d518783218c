"""`amp_C`, Apex's extension of multi-tensor kernels, answered by apex_amp.multi_tensor_apply."""
from apex_amp.multi_tensor_apply import *  # noqa: F403
