"""One posterior sample: a draw from a posterior is private by itself, if its certificate holds."""

from .certificates import Bounded, Certificate, FiniteRunLangevin, StronglyLogConcave
from .glm import GLM
from .one_posterior_sample import OnePosteriorSample

__all__ = ["GLM", "Bounded", "Certificate", "FiniteRunLangevin", "OnePosteriorSample", "StronglyLogConcave"]
