"""Whether chains have mixed, from their draws alone: these are released, so all of this is
post-processing.

Pyro's split R-hat and effective sample size of the worst coordinate, in unconstrained space, and
the path: the sum of squared jumps over the variance of the draws, averaged over chains. A random
walk that has not felt the posterior has a path of about 6 whatever its length; one that is worth n
samples, of up to 4n.

Both are also taken of the draws' distances from their median, whose mean is the spread. A chain
that has seen one of two modes, or one arm of a banana, looks mixed (rates in the documentation).

Both estimates flatter short chains, so the bounds are above what one would ask of the truth. On
autoregressive chains (100 draws, one chain, 200 runs each) they warn of every chain that is worth 1
sample, of 97 % worth 5 and 85 % worth 10, of none worth 50 or 100; with ten coordinates of 100,
100, 100, 5 and 0 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

LARGEST_R_HAT, LEAST_EFFECTIVE = 1.2, 20.0
_FEWEST_DRAWS = 40  # of all chains together, below which nothing can be said
_FEWEST_OF_A_CHAIN = 4


class Mixing(NamedTuple):
    """Figures of the worst coordinate; NaN where there are too few draws.

    Attributes:
        r_hat: split R-hat over all chains.
        effective_sample_size: of all chains together.
        path: squared jumps over the variance, of an average chain.
    """

    r_hat: float
    effective_sample_size: float
    path: float

    def as_dict(self) -> dict[str, float]:
        """By the names of ``kernel.diagnostics()``."""
        return {
            "R-hat": self.r_hat,
            "effective sample size": self.effective_sample_size,
            "path over spread": self.path,
        }

    def complaint(self) -> str | None:
        """What to say of chains that have not mixed."""
        if math.isnan(self.r_hat) or (
            self.r_hat <= LARGEST_R_HAT and self.effective_sample_size >= LEAST_EFFECTIVE
        ):
            return None
        return (
            f"the chains have not mixed: R-hat {self.r_hat:.3g}, {self.effective_sample_size:.2g}"
            f" effective samples, path over spread {self.path:.2g}. Their intervals cannot be"
            " trusted: ask mcmc.plan(...).expected_sample_size, or use noise_aware.posterior."
        )


class ReadAtTheEnd(dict[str, Any]):
    """The transforms of a kernel, for Pyro. To look names up in them is all that it asks of a
    kernel in every run, also the second of one ``MCMC``, after all chains have ended.

    Args:
        transforms: by site.
        at_the_end: what to do then.
    """

    def __init__(self, transforms: Mapping[str, Any], at_the_end: Callable[[], None]) -> None:
        super().__init__(transforms)
        self._at_the_end = at_the_end

    def __contains__(self, name: object) -> bool:
        self._at_the_end()
        return super().__contains__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def mixing_of(
    chains: Sequence[Mapping[str, Tensor]], transforms: Mapping[str, Any] | None
) -> Mixing:
    """Figures of chains of one run.

    Args:
        chains: draws by site, (draws, ...); of unequal lengths where some were ended early.
        transforms: by site, to unconstrained space.
    """
    rows = [_unconstrained(chain, transforms or {}) for chain in chains]
    length = min((len(row) for row in rows), default=0)
    if length < _FEWEST_OF_A_CHAIN or length * len(rows) < _FEWEST_DRAWS:
        return Mixing(math.nan, math.nan, math.nan)
    draws = torch.stack([row[len(row) - length :] for row in rows])
    variance = draws.var(1).sum(1).mean()
    path = (draws[:, 1:] - draws[:, :-1]).square().sum((1, 2)).mean() / variance
    folded = (draws - draws.flatten(0, 1).median(0).values).abs()
    both = torch.cat([draws, folded], 2)
    r_hat = split_gelman_rubin(both, 0, 1)
    effective = effective_sample_size(both, 0, 1)
    # a coordinate that never moved has neither
    return Mixing(
        float(r_hat.nan_to_num(nan=math.inf).max()),
        float(effective.nan_to_num(nan=0.0).min()),
        float(path.nan_to_num(nan=0.0)),
    )


def _unconstrained(chain: Mapping[str, Tensor], transforms: Mapping[str, Any]) -> Tensor:
    sites = []
    for name in sorted(chain):
        value = chain[name].detach().cpu().double()
        moved = transforms[name](value) if name in transforms else value
        sites.append(moved.reshape(len(value), -1))
    return torch.cat(sites, 1)
