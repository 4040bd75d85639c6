"""Privacy profiles of pairs of laws, in closed form."""

import math

import numpy as np
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


def excess_and_share(p, q, event):
    """Of the exact δ of two laws of cells over the stated one, in the worse direction; and their
    largest ratio where it is not tiny.
    """
    excess, share = -math.inf, 0.0
    for epsilon in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0):
        odds, claimed = math.exp(epsilon), stated(event, epsilon)
        exact = max(np.clip(a - odds * b, 0, None).sum() for a, b in ((p, q), (q, p)))
        excess = max(excess, exact - claimed)
        share = max(share, exact / claimed if claimed > 1e-3 else 0.0)
    return excess, share
