"""A private Bayesian last layer on fixed features, and features that no record's neighbours have a
say in.
"""

from .features import frozen_features, group_normalised
from .methods import SGHMC, NoiseAware, OneDraw
from .private_linear import HeadPosterior, PrivateLinear
from .scattering import Scattering
from .whitening import Whitening, private_whitening

__all__ = [
    "SGHMC",
    "HeadPosterior",
    "NoiseAware",
    "OneDraw",
    "PrivateLinear",
    "Scattering",
    "Whitening",
    "frozen_features",
    "group_normalised",
    "private_whitening",
]


def __dir__() -> list[str]:
    return sorted(__all__)
