"""Posterior samples of a network, and what they predict."""

from .outputs import softmax
from .samples import PosteriorSamples

__all__ = ["PosteriorSamples", "softmax"]


def __dir__() -> list[str]:
    return __all__
