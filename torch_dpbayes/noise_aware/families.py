"""Models whose records enter through sums of a few statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..mcmc.checks import check_clip_bound, check_positive

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExponentialFamily:
    r"""p(x | θ) = h(x)·exp(η(θ)·s(x) − A(η(θ))).

    Args:
        prior: Pyro model of θ alone, without arguments and observations.
        statistics: from one record, its row of every argument, to the vector s(x), mapped over the
            records by ``torch.func.vmap``. Statistics that are centred at a public value need a
            smaller bound, and so less noise.
        natural_parameters: from θ, a dict of the prior's values by site, to the vector η.
        log_normalizer: A as a function of η, twice differentiable: its derivatives are the mean and
            the covariance of s(x).
        max_statistic_norm: C, to which ‖s(x)‖ is clipped; public.
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


def beta_bernoulli(alpha: float = 1.0, beta: float = 1.0) -> ExponentialFamily:
    """x ∈ {0, 1} with probability ``"probability"`` ~ Beta(alpha, beta). The statistic x − ½
    has the bound ½; other x are clamped.
    """
    check_positive("alpha", alpha, "of the Beta prior")
    check_positive("beta", beta, "of the Beta prior")

    def prior() -> None:
        one = torch.ones((), dtype=torch.float64)
        pyro.sample("probability", dist.Beta(alpha * one, beta * one))

    return ExponentialFamily(
        prior,
        lambda x: x.double().clamp(0.0, 1.0) - 0.5,
        lambda values: torch.logit(values["probability"])[None],
        lambda eta: (torch.nn.functional.softplus(eta) - eta / 2).sum(),
        0.5,
    )


def gamma_poisson(shape: float, rate: float, max_count: float) -> ExponentialFamily:
    """Counts with mean ``"rate"`` ~ Gamma(shape, rate). Counts are clamped to [0, max_count] and
    centred at its half, so that the bound is max_count/2.
    """
    for name, value in (("shape", shape), ("rate", rate), ("max_count", max_count)):
        check_positive(name, value, "a public number")

    def prior() -> None:
        one = torch.ones((), dtype=torch.float64)
        pyro.sample("rate", dist.Gamma(shape * one, rate * one))

    return ExponentialFamily(
        prior,
        lambda x: x.double().clamp(0.0, max_count) - max_count / 2,
        lambda values: values["rate"].log()[None],
        lambda eta: (eta.exp() - eta * max_count / 2).sum(),
        max_count / 2,
    )


def dirichlet_categorical(concentration: Sequence[float] | Tensor) -> ExponentialFamily:
    """Labels 0 to K−1 with ``"probabilities"`` ~ Dirichlet(concentration). The indicators are
    centred at 1/K; other labels count as nothing.
    """
    parameters = torch.as_tensor(concentration, dtype=torch.float64).detach().clone()
    if parameters.dim() != 1 or len(parameters) < 2 or not bool((parameters > 0).all()):
        raise ValueError(
            f"concentration must be at least two positive numbers, got {concentration!r}."
        )
    size = len(parameters)

    def prior() -> None:
        pyro.sample("probabilities", dist.Dirichlet(parameters))

    def statistics(label: Tensor) -> Tensor:
        found = (label == torch.arange(size, device=label.device)).double()
        return found - found.sum() / size

    return ExponentialFamily(
        prior,
        statistics,
        lambda values: values["probabilities"].log(),
        lambda eta: eta.logsumexp(0) - eta.mean(),
        math.sqrt(1 - 1 / size),
    )


@dataclass(frozen=True)
class LinearRegression:
    r"""y ~ N(x·w, σ²), w ~ N(0, ``prior_std``²·I), σ unknown: sites ``"weights"`` and
    ``"noise_std"``.

    Args:
        prior_std: of every weight.
        noise_std_prior: a Pyro distribution of σ, in float64; ``None`` for a half-normal one with
            ``target_bound`` as its scale.
        max_feature_norm: R; longer rows are scaled down to it, and the weights are those of scaled
            rows. An intercept is a column of ones of the caller's.
        target_bound: Y; responses are clamped to [−Y, Y]. One that reaches few of them costs
            little.
    """

    target_bound: float
    prior_std: float = 1.0
    max_feature_norm: float = 1.0
    noise_std_prior: Any = None

    def __post_init__(self) -> None:
        for name in ("target_bound", "prior_std", "max_feature_norm"):
            check_clip_bound(name, getattr(self, name), "a public number")

    def prior(self, dimension: int) -> Callable[[], None]:
        """The Pyro model of its parameters."""
        scale = torch.tensor(self.target_bound, dtype=torch.float64)
        noise_prior = (
            dist.HalfNormal(scale) if self.noise_std_prior is None else self.noise_std_prior
        )
        zeros = torch.zeros(dimension, dtype=torch.float64)

        def model() -> None:
            pyro.sample("weights", dist.Normal(zeros, self.prior_std).to_event(1))
            pyro.sample("noise_std", noise_prior)

        return model
