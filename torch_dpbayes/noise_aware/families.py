"""Models whose records enter through sums of a few statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.func import grad, jacrev

from ..density import UnfitModel
from ..errors import ArgumentError
from ..noise import check_clip_bound, check_positive

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExponentialFamily:
    r"""p(x | θ) = h(x)·exp(η(θ)·s(x) − A(η(θ))).

    Args:
        prior: Pyro model of θ alone, without arguments and observations.
        statistics: a function from one record (its row of every argument) to the vector s(x); it
            runs by ``torch.func.vmap``. If you centre statistics at a public value, they need a
            smaller bound and less noise.
        natural_parameters: a function from θ, a dict of the prior's values by site, to the vector
            η.
        log_normalizer: A as a function of η, twice differentiable: its derivatives are the mean and
            the covariance of s(x).
        max_statistic_norm: C, to which ‖s(x)‖ is clipped; public. The moments ignore clipping: take
            a bound that few exceed.
    """

    prior: Callable[[], Any]
    statistics: Callable[..., Tensor]
    natural_parameters: Callable[[Values], Tensor]
    log_normalizer: Callable[[Tensor], Tensor]
    max_statistic_norm: float

    def __post_init__(self) -> None:
        check_clip_bound(
            "max_statistic_norm",
            self.max_statistic_norm,
            "the clip bound of a record's sufficient statistics",
        )

    def moments(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of s(x) for natural parameters η."""
        mean = grad(self.log_normalizer)
        return mean(eta), jacrev(mean)(eta)


@dataclass(frozen=True)
class _ClampedPoisson(ExponentialFamily):
    """Counts that are clamped, with the moments of clamped counts."""

    max_count: float = math.inf

    def moments(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of min(x, c) − c/2. With q_k = P(x < c − k), E[x; x < c] = λ q₁ and E[x(x − 1); x
        < c] = λ² q₂.
        """
        rate, c = eta.exp(), self.max_count
        least = torch.tensor([c, c - 1, max(c - 2, 0.0)], dtype=rate.dtype)
        q = torch.special.gammaincc(least, rate).split(1)
        mean = rate * q[1] + c * (1 - q[0])
        square = rate.square() * q[2] + rate * q[1] + c**2 * (1 - q[0])
        return mean - c / 2, (square - mean.square()).clamp_min(0.0)[None]


def beta_bernoulli(alpha: float = 1.0, beta: float = 1.0) -> ExponentialFamily:
    """x ∈ {0, 1} with probability ``"probability"`` ~ Beta(alpha, beta). The statistic x − ½
    has the bound ½; other x are clamped.
    """
    check_positive("alpha", alpha, "of the Beta prior")
    check_positive("beta", beta, "of the Beta prior")
    one = torch.ones((), dtype=torch.float64)
    return ExponentialFamily(
        partial(_one_site, "probability", dist.Beta, alpha * one, beta * one),
        partial(_centred, 1.0, "outcomes 0 and 1"),
        partial(_natural, "probability", torch.logit),
        _bernoulli_normalizer,
        0.5,
    )


def gamma_poisson(shape: float, rate: float, max_count: float) -> ExponentialFamily:
    """Counts with mean ``"rate"`` ~ Gamma(shape, rate). Counts are clamped to [0, max_count],
    which the posterior includes. They are centred at max_count/2, which is then their bound.
    """
    for name, value in (("shape", shape), ("rate", rate), ("max_count", max_count)):
        check_positive(name, value, "a public number")
    if max_count != math.floor(max_count):
        raise ArgumentError(f"max_count must be a whole number, got {max_count!r}.")
    one = torch.ones((), dtype=torch.float64)
    return _ClampedPoisson(
        partial(_one_site, "rate", dist.Gamma, shape * one, rate * one),
        partial(_centred, float(max_count), "counts"),
        partial(_natural, "rate", torch.log),
        _poisson_normalizer,
        max_count / 2,
        float(max_count),
    )


def dirichlet_categorical(concentration: Sequence[float] | Tensor) -> ExponentialFamily:
    """Labels 0 to K−1 with ``"probabilities"`` ~ Dirichlet(concentration). The indicators are
    centred at 1/K; other labels count as zero.
    """
    parameters = torch.as_tensor(concentration, dtype=torch.float64).detach().clone()
    if parameters.dim() != 1 or len(parameters) < 2 or not bool((parameters > 0).all()):
        raise ArgumentError(
            f"concentration must be at least two positive numbers, got {concentration!r}."
        )
    size = len(parameters)
    return ExponentialFamily(
        partial(_one_site, "probabilities", dist.Dirichlet, parameters),
        partial(_centred_indicators, size),
        partial(_natural, "probabilities", torch.log),
        _categorical_normalizer,
        math.sqrt(1 - 1 / size),
    )


@dataclass(frozen=True)
class LinearRegression:
    r"""y ~ N(x·w, σ²), w ~ N(0, ``prior_std``²·I), σ unknown: sites ``"weights"`` and
    ``"noise_std"``.

    Args:
        noise_std_prior: prior of σ: a Pyro distribution of one positive number, in float64.
        prior_std: of every weight.
        max_feature_norm: R; longer rows are scaled down to it, and the weights refer to scaled
            rows.

    Raises:
        ValueError: ``max_feature_norm`` or ``prior_std`` is not a positive number, or
            ``noise_std_prior`` is not a distribution of one.
    """

    noise_std_prior: Any
    prior_std: float = 1.0
    max_feature_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prior_std", "max_feature_norm"):
            check_clip_bound(name, getattr(self, name), "a public number")
        if not _is_of_a_positive_number(self.noise_std_prior):
            raise ArgumentError(
                "noise_std_prior must be a Pyro distribution of one positive number, as"
                " dist.LogNormal(loc, scale) or dist.HalfNormal(scale); got"
                f" {self.noise_std_prior!r}."
            )

    def __call__(self, features: Tensor, targets: Tensor) -> None:
        """The Pyro model."""
        zeros = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
        weights = pyro.sample("weights", dist.Normal(zeros, self.prior_std).to_event(1))
        noise_std = pyro.sample("noise_std", self.noise_std_prior)
        with pyro.plate("data", len(targets)):
            mean = features.to(weights.dtype) @ weights
            pyro.sample("targets", dist.Normal(mean, noise_std), obs=targets)


# --- their parts, which posteriors keep and which can be pickled ----------------------------------


def _one_site(name: str, distribution: Callable[..., Any], *parameters: Tensor) -> None:
    pyro.sample(name, distribution(*parameters))


def _natural(name: str, link: Callable[[Tensor], Tensor], values: Values) -> Tensor:
    return link(values[name]).reshape(-1)


def _centred(largest: float, what: str, x: Tensor) -> Tensor:
    return _one_number(x, what).double().clamp(0.0, largest) - largest / 2


def _centred_indicators(size: int, label: Tensor) -> Tensor:
    label = _one_number(label, "labels (of one-hot rows: rows.argmax(1))")
    found = (label == torch.arange(size, device=label.device)).double()
    return found - found.sum() / size


def _one_number(row: Tensor, what: str) -> Tensor:
    """A record that is a single number, whatever its dimensions are."""
    if row.numel() != 1:
        shape = ", ".join(map(str, ("n", *row.shape)))
        raise UnfitModel(
            f"each record of this family is one number: pass {what} as a tensor [n], not [{shape}]."
        )
    return row.reshape(())


def _bernoulli_normalizer(eta: Tensor) -> Tensor:
    return (torch.nn.functional.softplus(eta) - eta / 2).sum()


def _poisson_normalizer(eta: Tensor) -> Tensor:
    return eta.exp().sum()


def _categorical_normalizer(eta: Tensor) -> Tensor:
    return eta.logsumexp(0) - eta.mean()


def _is_of_a_positive_number(distribution: Any) -> bool:
    if not isinstance(distribution, TorchDistributionMixin) or distribution.shape() != ():
        return False
    support = distribution.support
    low = torch.as_tensor(getattr(support, "lower_bound", -math.inf))
    return not support.is_discrete and bool((low >= 0).all())
