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


def renyi_of_gaussians(mean, std, other_mean, other_std, order):
    """D_β(N(mean, std²) ‖ N(other_mean, other_std²)); infinite where the first has too wide a
    tail.
    """
    mixed = order * other_std**2 + (1 - order) * std**2
    if mixed <= 0:
        return math.inf
    shift = order * (mean - other_mean) ** 2 / (2 * mixed)
    return shift + math.log(other_std / std) + math.log(other_std**2 / mixed) / (2 * (order - 1))
