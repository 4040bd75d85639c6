"""Kernels for ``pyro.infer.MCMC``: differentially private chains, which sample the exact posterior
if nothing is clipped.

Each algorithm has one file, with the same parts in the same order: formula, source, arguments and
privacy of the class; its settings; the state that is not pickled; ``_prepare`` (the model and
the data), ``_start``, ``_charges`` and ``_candidate``, if they differ from the base class. For a
new kernel copy ``penalty.py``.

* ``kernel``: what all kernels share; ``proposals``: how a move is proposed;
* ``chains``: Pyro's runner for several chains; ``mixing``: whether they have mixed;
* ``multi_owner``: records of several owners;
* ``planning``: noise for a budget, and how far a chain gets with it.
"""

from .chains import MCMC
from .exponential_family import ExponentialFamilyPenalty
from .hmc import DPHMC
from .multi_owner import MultiOwnerHMC, MultiOwnerPenalty
from .penalty import DPPenalty
from .planning import Plan, plan
from .proposals import Proposal

__all__ = [
    "DPHMC",
    "MCMC",
    "DPPenalty",
    "ExponentialFamilyPenalty",
    "MultiOwnerHMC",
    "MultiOwnerPenalty",
    "Plan",
    "Proposal",
    "plan",
]


def __dir__() -> list[str]:
    return sorted(__all__)
