"""Kernels for ``pyro.infer.MCMC``: differentially private chains that sample the exact posterior."""

from .hmc import DPHMC
from .penalty import DPPenalty, Proposal
from .record_density import RecordDensity, clipped_ratio_sum

__all__ = ["DPHMC", "DPPenalty", "Proposal", "RecordDensity", "clipped_ratio_sum"]
