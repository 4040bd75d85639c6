"""Posteriors that know their noise, by simulating what would have been released.

Each file needs only those above it:

* ``records``: a model's records, private and simulated; ``latents``: its prior;
* ``covariates``: public, or a law that is released once;
* ``likelihood``: moments of simulated scores, and the likelihood of what was released;
* ``budget``: how the budget is split; ``run``: the releases;
* ``drawing``: draws from the posterior; ``checks``: p values; ``result``: the posterior;
* ``models``: by name; ``inference``: the front doors; ``planning``: before anything is spent;
* ``families``, ``sufficient_statistics``: closed forms in place of simulation.

Private rows are read by ``run.Mechanism`` and ``records.PrivateRecords``, of conjugate families by
``sufficient_statistics``, and nowhere else; what they return gets noise in the same line or the
next one.
"""

from .families import (
    ExponentialFamily,
    LinearRegression,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
)
from .inference import posterior, posterior_for_module
from .planning import plan
from .result import NoiseAwarePosterior
from .sufficient_statistics import covariance, sufficient_statistics

__all__ = [
    "ExponentialFamily",
    "LinearRegression",
    "NoiseAwarePosterior",
    "beta_bernoulli",
    "covariance",
    "dirichlet_categorical",
    "gamma_poisson",
    "plan",
    "posterior",
    "posterior_for_module",
    "sufficient_statistics",
]


def __dir__() -> list[str]:
    return sorted(__all__)
