"""Noise-aware posteriors: the likelihood of noisy releases is simulated.

Each file needs only those above it:

* ``records``: a model's records, private and simulated; ``latents``: its prior;
* ``hamiltonian``: chains of parameters, and of a matrix given its noisy release (``noisy_gram``);
* ``covariates``: public, or a distribution that is released once;
* ``likelihood``: moments of simulated scores, and the likelihood of what was released;
* ``budget``: how the budget is split; ``run``: the releases;
* ``drawing``: draws from the posterior; ``checks``: p values; ``result``: the posterior;
* ``last_layer``: layers of thousands of parameters;
* ``models``: the kinds of models; ``inference``: the public functions;
* ``families``, ``sufficient_statistics``: closed forms instead of simulation;
* ``covariance``: one noisy matrix, for whitening features before another run.

Only ``run.Mechanism``, ``sufficient_statistics`` (for conjugate families), ``last_layer`` and
``covariance`` read private rows; what they return gets noise in the same line or the next.
"""

from .covariance import NoisyCovariance, covariance
from .families import (
    ExponentialFamily,
    LinearRegression,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
)
from .inference import Forecast, plan, posterior, posterior_for_module
from .result import NoiseAwarePosterior
from .sufficient_statistics import sufficient_statistics

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
