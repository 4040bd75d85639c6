"""A released approximation of the posterior, from which a kernel takes starts and the shape of its
moves. Whatever it is, the kernel's law is that of the exact posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ArgumentTypeError
from .density import Prior, UnfitModel
from .density.pyro_runs import public_randomness

_DRAWS = 2000
_FEWEST = 10  # draws for each coordinate, to have a covariance


class Sampled(Protocol):
    """What can be sampled by site, as a noise-aware posterior can."""

    def sample(self, num_samples: int) -> Mapping[str, Tensor]:
        """``num_samples`` draws by site, (num_samples, ...), in the supports of the model's
        distributions.
        """
        ...


Approximation = Sampled | Mapping[str, Tensor]


def draws_of(approximation: Approximation) -> dict[str, Tensor]:
    """Draws by site, in the supports of the model's distributions."""
    if isinstance(approximation, Mapping):
        draws = approximation
    elif callable(getattr(approximation, "sample", None)):
        with public_randomness():
            draws = approximation.sample(_DRAWS)
    else:
        raise ArgumentTypeError(
            "approximation is a noise-aware posterior, or draws by site, {name: (draws, ...)}; got"
            f" {type(approximation).__name__}."
        )
    return {name: torch.as_tensor(values).detach().clone() for name, values in draws.items()}


def in_coordinates_of(prior: Prior, draws: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The draws as rows of θ, and their covariance.

    Raises:
        ValueError: they are of other sites or shapes than the model's, too few, or not finite.
    """
    moved = {
        name: prior.transforms[name](values.to(prior.device, prior.dtype))
        if name in prior.transforms
        else values
        for name, values in draws.items()
    }
    prior.flatten({name: values[0] for name, values in moved.items()})  # checks sites and shapes
    rows = torch.cat([moved[name].reshape(len(moved[name]), -1) for name in sorted(moved)], 1)
    rows = rows[rows.isfinite().all(1)]
    if len(rows) < _FEWEST * prior.dimension + 2:
        raise UnfitModel(
            f"the approximation has {len(rows)} finite draws of {prior.dimension} coordinates: give"
            f" at least {_FEWEST * prior.dimension + 2}."
        )
    covariance = torch.atleast_2d(rows.double().T.cov())
    if not bool(torch.linalg.eigvalsh(covariance)[0] > 0):
        raise UnfitModel(
            "the approximation does not move in every coordinate: give draws whose covariance is"
            " positive definite."
        )
    return rows, covariance.to(prior.dtype)
