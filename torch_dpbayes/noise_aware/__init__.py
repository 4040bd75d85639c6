"""Posteriors that know their noise: what private releases say about the parameters, and how
surely.
"""

from .chains import kernel_from
from .comparison import MethodComparison, MethodForecast, compare_methods
from .covariance import NoisyCovariance, covariance
from .families import (
    ExponentialFamily,
    LinearRegression,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
)
from .from_run import from_run
from .laplace import laplace, laplace_for_module
from .posterior import NoiseAwarePosterior
from .sufficient_statistics import sufficient_statistics

__all__ = [
    "ExponentialFamily",
    "LinearRegression",
    "MethodComparison",
    "MethodForecast",
    "NoiseAwarePosterior",
    "NoisyCovariance",
    "beta_bernoulli",
    "compare_methods",
    "covariance",
    "dirichlet_categorical",
    "from_run",
    "gamma_poisson",
    "kernel_from",
    "laplace",
    "laplace_for_module",
    "sufficient_statistics",
]


def __dir__() -> list[str]:
    return sorted(__all__)
