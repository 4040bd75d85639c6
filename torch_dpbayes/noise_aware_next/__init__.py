"""Posteriors that know their noise, by simulating what would have been released."""

from .posterior import posterior
from .result import NoiseAwarePosterior

__all__ = ["NoiseAwarePosterior", "posterior"]
