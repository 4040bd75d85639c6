"""Privacy profiles of pairs of laws, in closed form."""

import math

from scipy import stats

from torch_dpbayes.accounting.events import MuGaussianDpEvent


def stated(event, epsilon):
    """The profile of an event from its closed form."""
    if isinstance(event, MuGaussianDpEvent):
        return stats.norm.cdf(event.mu / 2 - epsilon / event.mu) - math.exp(
            epsilon
        ) * stats.norm.cdf(-event.mu / 2 - epsilon / event.mu)
    gap = event.epsilon - epsilon
    return 0.0 if gap <= 0 else (1 - math.exp(-gap / 2)) ** 2 / (1 - math.exp(-event.epsilon))
