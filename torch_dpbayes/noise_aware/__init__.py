"""Noise-aware posteriors: the likelihood of noisy releases is simulated.

Each file imports only files above it:

* ``records``: a model's records, private and simulated; ``latents``: its prior;
* ``hamiltonian``: steps of chains; ``covariance``: a noisy covariance matrix, and draws of the
  exact one given it;
* ``covariates``: public covariates, or their distribution, which is released once;
* ``likelihood``: moments of simulated scores, and the likelihood of the releases;
* ``run``: the split of the budget, and the releases;
* ``drawing``: draws from the posterior; ``checks``: p values; ``result``: the posterior;
* ``last_layer``: layers of thousands of parameters;
* ``models``: the supported models; ``inference``: the public functions;
* ``sufficient_statistics``: closed forms instead of simulation.

Only ``run.Mechanism``, ``sufficient_statistics`` (for conjugate families), ``last_layer`` and
``covariance`` read private rows; their results get noise in the same line or the next.
"""

from .covariance import NoisyCovariance, covariance
from .inference import Forecast, plan, posterior, posterior_for_module
from .result import NoiseAwarePosterior
from .sufficient_statistics import (
    ExponentialFamily,
    LinearRegression,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
    sufficient_statistics,
)

__all__ = [
    "ExponentialFamily",
    "Forecast",
    "LinearRegression",
    "NoiseAwarePosterior",
    "NoisyCovariance",
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
