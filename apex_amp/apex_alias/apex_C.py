"""`apex_C`, Apex's extension for flattening, answered by apex_amp.parallel."""
from apex_amp.parallel import flatten, unflatten  # noqa: F401
