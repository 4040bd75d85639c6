"""Posterior samples of a network, and their predictions."""

from .samples import PosteriorSamples

__all__ = ["PosteriorSamples"]


def __dir__() -> list[str]:
    return __all__
