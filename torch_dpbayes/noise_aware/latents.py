r"""The latents of a model as one vector θ, and its prior.

If a latent's distribution depends on other latents, its prior in θ may be narrow in one place and
wide in another (Neal's funnel), and no sampler with one step size moves well there. In non-centred
coordinates ξ, :math:`\theta_j = m_j(\theta_{<j}) + s_j(\theta_{<j})\,\xi_j`, the prior has no
funnel. But the more information the data have, the more curved is the likelihood in ξ, so
coordinates in between are best (Papaspiliopoulos, Roberts and Sköld 2007, "A general framework for
the parametrization of hierarchical models"). Here they are those of Pyro's ``LocScaleReparam``, for
every latent on the real line with a location and a scale.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from torch import Tensor
from torch.distributions import Independent, LogNormal, constraints
from torch.func import vmap

from ..density import Prior, without_value_checks
from ..density.pyro_runs import public_randomness, trace_at
from ..density.recording import of_rows, recorded

_DRAWS = 500  # of a prior, for its quantiles
_STEP = 1e-4  # for finite differences of a prior's gradient, in units of its deviation
# in units of a prior's deviations; a prior with heavy tails has negative curvatures
_LEAST_CURVATURE = 0.1


class Latents:
    """The prior of a model's latents in unconstrained space, θ ``[D]``, in float64.

    Attributes:
        read: indices of the coordinates that records depend on, ``[d]``.
        is_hierarchical: whether latents depend on each other, or their density is not that of the
            sites' draws, because of the model's own factors or weights.
        draws: draws of θ, ``[500, D]``.
        median, stddev: of these draws; ``stddev`` is by :func:`half_distance`.

    **Privacy.** A function of the prior alone.
    """

    def __init__(self, prior: Prior, read: Tensor) -> None:
        self.prior, self.read = prior, read
        with public_randomness(), without_value_checks():
            sites = prior.trace().nodes
            self.is_hierarchical = (
                bool(prior.factors)
                or any(_is_weighted(sites[name]) for name in prior.transforms)
                or not prior.are_sites_independent()
            )
        self.draws = self.sample(_DRAWS)
        self.median = self.draws.quantile(0.5, 0)
        self.stddev = half_distance(self.draws).clamp_min(1e-9)

    def sample(self, count: int) -> Tensor:
        """Draws of θ, ``[count, D]``."""
        return self.prior.samples(count).to("cpu", torch.float64)

    @cached_property
    def _gaussian(self) -> tuple[Tensor, Tensor]:
        """Mean and precision of the read coordinates of a hierarchical prior."""
        scored = self.draws[:, self.read]
        correlations = _correlations(scored)
        covariance = self.stddev[self.read][:, None] * correlations * self.stddev[self.read]
        return self.median[self.read], torch.linalg.inv(covariance)

    def slope_and_precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """∇ log p(θ) in the read coordinates, and −∇² log p(θ), made positive definite. For a
        hierarchical prior, those of the Gaussian with its quantiles and rank correlations.
        """
        if self.is_hierarchical:
            mean, precision = self._gaussian
            return -precision @ (theta[self.read] - mean), precision
        width, count = self.stddev[self.read], len(self.read)
        moved = theta.repeat(2 * count + 1, 1)
        place = torch.arange(count)
        moved[place, self.read] += _STEP * width
        moved[count + place, self.read] -= _STEP * width
        _, found = self.prior.log_densities_and_gradients(self._own(moved))
        gradients = found.to("cpu", torch.float64)[:, self.read] * width
        up, down, slope = gradients.split([count, count, 1])
        curvature = (down - up) / (2 * _STEP)
        values, vectors = torch.linalg.eigh((curvature + curvature.T) / 2)
        positive = (vectors * values.clamp_min(_LEAST_CURVATURE)) @ vectors.T
        return slope[0] / width, positive / width[:, None] / width

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ) of every row, Jacobians included, ``[m]``."""
        return self.prior.log_densities(self._own(theta)).to("cpu", torch.float64)

    def with_unread(self, theta: Tensor) -> Tensor:
        """Rows ``[m, D]``; coordinates that no record reads are drawn from the prior. If it is
        not hierarchical, they are independent of the others.
        """
        if len(self.read) == theta.shape[1]:
            return theta
        result = self.sample(len(theta))
        result[:, self.read] = theta[:, self.read]
        return result

    def _own(self, theta: Tensor) -> Tensor:
        return theta.detach().to(self.prior.device, self.prior.dtype)

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values of the sites for one θ ``[D]``."""
        return self.prior.constrain(theta.to(self.prior.device, self.prior.dtype))

    def values(self, theta: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Values of the sites for weighted draws of θ, ``[m, ...]``."""
        # a draw without weight may be so far away that its value is infinite
        theta = torch.where(weights[:, None] > 0, theta, theta[:1])
        found = vmap(self.prior.constrain)(self._own(theta))
        return {name: value.detach().cpu() for name, value in found.items()}

    def unconstrain(self, values: dict[str, Any]) -> tuple[Tensor, float]:
        """θ for values of every site, and the log Jacobian determinant of the map there."""
        moved, total = {}, 0.0
        for name, transform in self.prior.transforms.items():
            value = torch.as_tensor(values[name]).to(self.prior.device, self.prior.dtype)
            moved[name] = transform(value)
            total += float(transform.log_abs_det_jacobian(value, moved[name]).sum())
        return self.prior.flatten(moved).to("cpu", torch.float64), total


def half_distance(draws: Tensor) -> Tensor:
    """Half the distance between the 15.9 % and 84.1 % quantiles of each column, ``[D]``."""
    low, high = torch.quantile(draws, draws.new_tensor([0.1587, 0.8413]), dim=0)
    return (high - low) / 2


class NonCentred:
    """Coordinates ξ of a hierarchical prior, between centred and non-centred ones. They depend on a
    typical θ and the likelihood's ``information`` on each coordinate, ``[D]``.
    """

    def __init__(self, prior: Prior, theta: Tensor, information: Tensor) -> None:
        config = _reparametrisation(prior, theta, information)
        self.prior = own = Prior(poutine.reparam(prior.run, config=config), factors=prior.factors)

        def of_one(xi: Tensor) -> tuple[Tensor, Tensor]:
            sites = trace_at(own.run, own.constrain(xi), (), {}).nodes
            theta = [t(sites[name]["value"]).reshape(-1) for name, t in prior.transforms.items()]
            return torch.cat(theta), own.log_density_with(xi, (), {})

        with torch.no_grad(), public_randomness(), without_value_checks():
            self._graph = recorded(of_one, own.sample())

    def __call__(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """θ and log p(ξ) of every row, ``[m, D]`` and ``[m]``; differentiable."""
        with without_value_checks():
            theta, log_density = of_rows(self._graph, xi.to(self.prior.device, self.prior.dtype))
        return theta.to(xi), log_density.to(xi)


def _reparametrisation(prior: Prior, theta: Tensor, information: Tensor) -> dict[str, Any]:
    """Pyro's reparametrisation of each site on the real line, or of a site's logarithm. Its degree
    of centring is the likelihood's share of the information, s²I/(1 + s²I), with the prior's scale
    s.
    """
    found: dict[str, Any] = {}
    values = prior.constrain(theta.to(prior.device, prior.dtype))
    with public_randomness(), without_value_checks(), torch.no_grad():
        sites = trace_at(prior.run, values, (), {}).nodes
    for name, own in prior.unflatten(information.to(prior.device, prior.dtype)).items():
        law = sites[name]["fn"]
        while isinstance(law, Independent | ExpandedDistribution):
            law = law.base_dist
        # poutine.scale weights the site itself, not its new coordinates
        if _is_weighted(sites[name]) or not (hasattr(law, "loc") and hasattr(law, "scale")):
            continue
        share = own * law.scale.square()
        if isinstance(law, LogNormal):
            found |= {
                name: TransformReparam(),
                f"{name}_base": LocScaleReparam(share / (1 + share)),
            }
        elif law.support is constraints.real:
            found[name] = LocScaleReparam(share / (1 + share))
    return found


def _is_weighted(site: dict[str, Any]) -> bool:
    """Whether poutine.scale changes the density, by a number or a tensor."""
    return bool((torch.as_tensor(site["scale"]) != 1).any())


def _correlations(draws: Tensor) -> Tensor:
    """Correlations of normal scores of draws ``[m, d]``, shrunk as far as chance explains them."""
    count, size = draws.shape
    ranks = draws.argsort(0).argsort(0).to(torch.float64)
    found = torch.corrcoef(torch.special.ndtri((ranks + 0.5) / count).T).reshape(size, size)
    eye = torch.eye(size, dtype=torch.float64)
    square = float((found - eye).square().sum())
    chance = min(1.0, size * (size - 1) / count / square) if square else 1.0
    return (1 - chance) * found + chance * eye
