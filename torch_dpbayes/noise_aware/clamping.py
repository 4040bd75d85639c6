r"""How far a posterior lies from the one that records would give if none were clamped.

A family with a public bound on its records clamps those beyond it, and counts on few of them. How
many there are is not released, but the posterior says what to expect: sums without clamping would
be larger by n·E(x − max_count)₊ and the like, by the model as it was fitted. Where that moves the
mode by a noticeable part of the posterior's width, intervals lie beside the parameters. The fit is
to clamped records, and expects too few of them beyond the bound: the true distance is larger.

**Privacy.** Post-processing of what was released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.stats import norm, poisson
from torch import Tensor

from .modes import mode
from .priors import GaussianPrior
from .summaries import Summary
from .warn import warn

# Of a posterior standard deviation: at this distance 90 % intervals hold 86 % of the parameters,
# and 74 % at twice as much. A share of clamped records would say less: 1 % of counts of mean 2 are
# nothing for 100 records, and 1.5 standard deviations for 10,000.
_NOTICEABLE = 0.5
_SURE = 4.0  # standard deviations, by which the noise may have made the sums too large
_NEVER = 40.0  # standard deviations: no float64 holds the share beyond


class Clamped(NamedTuple):
    """What a fitted model expects of the records beyond a bound.

    Attributes:
        share: of the records.
        lost: what clamping took from the released sums.
    """

    share: float
    lost: Tensor


class Clamping(NamedTuple):
    """A bound that clamps records.

    Attributes:
        records: what is clamped, in the plural.
        bound: its name and its value.
        expected: from θ.
    """

    records: str
    bound: tuple[str, float]
    expected: Callable[[Tensor], Clamped]

    def note(self, summary: Summary, prior: GaussianPrior) -> list[str]:
        """Lines of the statement where the bound is too small; warns of it."""
        at = mode(summary, prior)
        precision = summary.precision(at)[0] + prior.matrix

        def fitted(released: Tensor) -> Tensor:
            return mode(Summary(released, summary.moments, at), prior)

        def distance_of(lost: Tensor) -> float:
            moved = fitted(summary.released + lost) - at
            return math.sqrt(max(float(moved @ precision @ moved), 0.0))

        share, lost = self.expected(at)
        distance = distance_of(lost)
        if not distance > _NOTICEABLE:
            return []
        way = lost / lost.norm()
        least = fitted(summary.released - _SURE * (way @ summary.moments(at)[1] @ way).sqrt() * way)
        if not distance_of(self.expected(least).lost) > _NOTICEABLE:
            return []  # noise alone may have made large sums of records that are within the bound
        name, value = self.bound
        said = (
            f"by this posterior itself {100 * share:.2g} % of {self.records} exceed {name} ="
            f" {value:g} and were clamped"
        )
        warn(
            f"{said}, which moved it by some {distance:.2g} standard deviations: intervals lie"
            f" beside the true parameters. Choose a larger {name}."
        )
        return [f"  CLAMPED     {said}: it is {distance:.2g} of its standard deviations off"]


def clamped_counts(rate: float, max_count: float, num_data: int) -> Clamped:
    """Of Poisson counts x clamped to ``max_count``, Σ x."""
    whole = math.floor(max_count)
    share = float(poisson.sf(whole, rate))
    excess = rate * float(poisson.sf(whole - 1, rate)) - max_count * share
    return Clamped(share, torch.tensor([num_data * max(excess, 0.0)], dtype=torch.float64))


def clamped_residuals(products: Tensor, squares: float, limit: float, num_data: int) -> Clamped:
    """Of normal residuals r clamped to ±``limit``, Σ r x and Σ r².

    Args:
        products: Σ r x if none were clamped, of which those beyond the bound do not change with
            the weights.
        squares: Σ r² likewise.
        limit: c.
        num_data: n.
    """
    variance = squares / num_data
    z = limit / math.sqrt(max(variance, (limit / _NEVER) ** 2))
    share = 2 * float(norm.sf(z))
    excess = variance * (share + 2 * z * float(norm.pdf(z))) - limit**2 * share
    lost = torch.tensor([num_data * max(excess, 0.0)], dtype=torch.float64)
    return Clamped(share, torch.cat([share * products, lost]))
