"""Whether chains have mixed, computed from their draws alone. Draws are released, so this is
post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

LARGEST_R_HAT, LEAST_EFFECTIVE = 1.2, 20.0  # both look too good for short chains
_FEWEST_DRAWS = 40  # of all chains together: with fewer, both estimates are unreliable
_FEWEST_OF_A_CHAIN = 4


def mixing_of(
    chains: Sequence[Mapping[str, Tensor]], transforms: Mapping[str, Any] | None
) -> dict[str, float]:
    """Split R-hat and effective sample size of the worst coordinate, in unconstrained space; NaN
    if there are too few draws.

    Both are also computed for the draws' distances from their median, to detect chains whose spread
    changes. Chains that have visited only one of two modes look mixed.

    Args:
        chains: draws by site, (draws, ...). Chains that ended early are shorter.
        transforms: the transform of each site to unconstrained space.
    """
    rows = [_unconstrained(chain, transforms or {}) for chain in chains]
    length = min((len(row) for row in rows), default=0)
    if length < _FEWEST_OF_A_CHAIN or length * len(rows) < _FEWEST_DRAWS:
        return {"R-hat": math.nan, "effective sample size": math.nan}
    draws = torch.stack([row[len(row) - length :] for row in rows])
    folded = (draws - draws.flatten(0, 1).median(0).values).abs()
    both = torch.cat([draws, folded], 2)
    # both are NaN for a coordinate that never moved
    r_hat = split_gelman_rubin(both, 0, 1).nan_to_num(nan=math.inf)
    effective = effective_sample_size(both, 0, 1).nan_to_num(nan=0.0)
    return {"R-hat": float(r_hat.max()), "effective sample size": float(effective.min())}


def complaint_of(mixing: Mapping[str, float]) -> str | None:
    """A warning text if the chains have not mixed, else None."""
    r_hat, effective = mixing["R-hat"], mixing["effective sample size"]
    if math.isnan(r_hat) or (r_hat <= LARGEST_R_HAT and effective >= LEAST_EFFECTIVE):
        return None
    return (
        f"the chains have not mixed: R-hat {r_hat:.3g}, {effective:.2g} effective samples. Do not"
        " trust their intervals: see mcmc.plan(...).expected_sample_size, or use"
        " noise_aware.posterior."
    )


def _unconstrained(chain: Mapping[str, Tensor], transforms: Mapping[str, Any]) -> Tensor:
    sites = []
    for name in sorted(chain):
        value = chain[name].detach().cpu().double()
        moved = transforms[name](value) if name in transforms else value
        sites.append(moved.reshape(len(value), -1))
    return torch.cat(sites, 1)
