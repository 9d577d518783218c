"""Optimizers that read gradients and write state, parameters and the model's half copies in one pass; LARC.

Constructors are those of Apex's optimizers; `state_dict()` has the layout of torch's optimizer of the same rule.
"""
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD
from .larc import LARC

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "LARC"]
