"""Kernels for ``pyro.infer.MCMC``: differentially private chains that sample the exact
posterior.
"""

from .density import RecordDensity, clipped_ratio_sum
from .exponential_family import ExponentialFamilyPenalty
from .hmc import DPHMC
from .multi_owner import MultiOwnerHMC, MultiOwnerPenalty
from .penalty import DPPenalty
from .planning import Plan, plan
from .proposals import Proposal

__all__ = [
    "DPHMC",
    "DPPenalty",
    "ExponentialFamilyPenalty",
    "MultiOwnerHMC",
    "MultiOwnerPenalty",
    "Plan",
    "Proposal",
    "RecordDensity",
    "clipped_ratio_sum",
    "plan",
]
