"""Where the classes of :mod:`~torch_dpbayes.mcmc.density` lay before: pickles of that time name
this module. Import them from there.
"""

from .density import InvalidPoint, Prior, RecordDensity, UnfitModel

__all__ = ["InvalidPoint", "Prior", "RecordDensity", "UnfitModel"]
