"""Posteriors that know their noise: what private releases say about the parameters, and how surely."""

from .laplace import laplace, laplace_for_module
from .posterior import NoiseAwarePosterior

__all__ = ["NoiseAwarePosterior", "laplace", "laplace_for_module"]
