"""`apex`, answered by apex_amp (see apex_amp.legacy)."""
from apex_amp import legacy as _legacy

__version__ = "0.1"  # what every Apex said; scripts compare it
_legacy.become_face(__name__)
