r"""The latents of a hierarchical Pyro model in coordinates in which its prior has no funnel.

Where a latent's distribution depends on other latents, its prior in θ may be narrow in one place
and wide in another (Neal's funnel), and no sampler with one step size gets around in it. In
non-centred coordinates ξ,

.. math:: \theta_j = m_j(\theta_{<j}) + s_j(\theta_{<j})\, \xi_j

with the place m and the scale s of each latent given those that the model samples before it, the
prior is nearly standard normal; the likelihood is then the more bent, the more the data tell. So
samplers want both kinds of coordinates.

Place and scale are read off the site's distribution: ``loc`` and ``scale`` of one on the real line,
``loc`` and ``scale_tril`` of a multivariate normal, and otherwise quantiles of the unconstrained
value (normal ones at −1, 0 and 1 standard deviation). A distribution that tells none of them stays
as it is: the map is a bijection whatever m and s are, and densities remain exact.

Sources: Papaspiliopoulos, Roberts and Sköld (2007), "A general framework for the parametrization
of hierarchical models"; Betancourt and Girolami (2015), "Hamiltonian Monte Carlo for hierarchical
models".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import MultivariateNormal, TransformedDistribution, constraints
from torch.fx import GraphModule

from ..density import Prior, without_value_checks
from ..density.pyro_runs import public_randomness
from ..density.recording import of_rows, recorded

_SHARES = (0.15865525393145707, 0.5, 0.8413447460685429)


class NonCentred:
    """ξ for the θ of a prior, and back, for many at once.

    Args:
        prior: whose coordinates θ are.

    **Privacy.** A function of the prior alone.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._outer: GraphModule | None = None
        self._inner: GraphModule | None = None

    def outer(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """θ and log |∂θ/∂ξ| of every row, ``[m, d]`` and ``[m]``; differentiable."""
        with without_value_checks():
            if self._outer is None:
                self._outer = self._recorded(self._outer_of_one, xi[0])
            theta, log_jacobian = of_rows(self._outer, xi)
        return theta, log_jacobian

    def inner(self, theta: Tensor) -> Tensor:
        """ξ of every row, ``[m, d]``."""
        with without_value_checks():
            if self._inner is None:
                self._inner = self._recorded(self._inner_of_one, theta[0])
            (xi,) = of_rows(self._inner, theta)
        return xi

    def _recorded(self, function: Callable[..., Any], example: Tensor) -> GraphModule:
        with torch.no_grad(), public_randomness():
            return recorded(lambda row: function(row), example.detach())

    def _outer_of_one(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        placing = _Placing(self._prior, xi)
        with poutine.block(), placing:
            self._prior.run()
        parts = [placing.unconstrained[name].reshape(-1) for name in self._prior.transforms]
        return torch.cat(parts), placing.log_jacobian

    def _inner_of_one(self, theta: Tensor) -> tuple[Tensor]:
        unconstrained, values = self._prior.unflatten(theta), self._prior.constrain(theta)
        with poutine.block(), poutine.trace() as noted, poutine.condition(data=values):
            self._prior.run()
        parts = []
        for name, transform in self._prior.transforms.items():
            where = _Location.of(noted.trace.nodes[name]["fn"], transform, unconstrained[name])
            parts.append(where.without(unconstrained[name]).reshape(-1))
        return (torch.cat(parts),)


def is_hierarchical(prior: Prior) -> bool:
    """Whether the distribution of a latent depends on other latents, or seems to where two runs of
    the model differ.
    """
    with public_randomness(), without_value_checks():
        first, second = prior.trace(), prior.trace()
        for name in prior.transforms:
            value = first.nodes[name]["value"]
            one, other = (trace.nodes[name]["fn"].log_prob(value) for trace in (first, second))
            if not torch.equal(one, other):
                return True
    return False


class _Placing(Messenger):
    """Gives every latent the value at its ξ, given those before it."""

    def __init__(self, prior: Prior, xi: Tensor) -> None:
        super().__init__()
        self._transforms, self._xi = prior.transforms, prior.unflatten(xi)
        self.unconstrained: dict[str, Tensor] = {}
        self.log_jacobian = xi.new_zeros(())

    def _pyro_sample(self, site: Any) -> None:
        name = site["name"]
        if name not in self._xi:
            return
        xi, transform = self._xi[name], self._transforms[name]
        where = _Location.of(site["fn"], transform, xi)
        self.unconstrained[name] = where.added_to(xi)
        self.log_jacobian = self.log_jacobian + where.log_jacobian(xi)
        site["value"] = transform.inv(self.unconstrained[name])


@dataclass(frozen=True)
class _Location:
    """m and s of one site, in unconstrained space; s is a number for each coordinate, or
    triangular.
    """

    place: Tensor
    scale: Tensor
    is_triangular: bool = False

    @staticmethod
    def of(distribution: Any, transform: Any, like: Tensor) -> _Location:
        """What a distribution tells."""
        while not hasattr(distribution, "loc") and hasattr(distribution, "base_dist"):
            if isinstance(distribution, TransformedDistribution):
                break
            distribution = distribution.base_dist
        if isinstance(distribution, MultivariateNormal):
            return _Location(distribution.loc, distribution.scale_tril, True)
        is_real = distribution.support is constraints.real
        if is_real and hasattr(distribution, "loc") and hasattr(distribution, "scale"):
            return _Location(distribution.loc, distribution.scale)
        try:
            low, middle, high = (
                transform(distribution.icdf(torch.full_like(like, share))) for share in _SHARES
            )
        except NotImplementedError:
            return _Location(torch.zeros_like(like), torch.ones_like(like))
        return _Location(middle, (high - low) / 2)

    def added_to(self, xi: Tensor) -> Tensor:
        """m + sξ."""
        if self.is_triangular:
            return self.place + (self.scale @ xi[..., None])[..., 0]
        return self.place + self.scale * xi

    def without(self, theta: Tensor) -> Tensor:
        """(θ − m)/s."""
        apart = theta - self.place
        if self.is_triangular:
            return torch.linalg.solve_triangular(self.scale, apart[..., None], upper=False)[..., 0]
        return apart / self.scale

    def log_jacobian(self, like: Tensor) -> Tensor:
        """log |s|."""
        if self.is_triangular:
            entries = self.scale.diagonal(dim1=-2, dim2=-1).expand(like.shape)
        else:
            entries = self.scale.expand(like.shape)
        return entries.log().sum()
