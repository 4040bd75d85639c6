r"""Models with a few sufficient statistics, and the posterior from one release of their sums. The
likelihood is T | θ ~ N(n m(θ), n S(θ) + V) as elsewhere, but with moments in closed form.

Source: Bernstein and Sheldon (2018), "Differentially private Bayesian inference for exponential
families", with Gaussian noise.
"""

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
from torch.func import grad, jacrev, vmap

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import GaussianDpEvent
from ..density import RecordStatistics, UnfitModel, prior_without_data
from ..density.pyro_runs import using_pyro
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_clip_bound, check_positive
from .checks import note_draws
from .covariance import normal_numbers
from .drawing import draw_posterior
from .inference import posterior
from .latents import Latents
from .likelihood import (
    Likelihood,
    Moments,
    Release,
    find_mode,
    law_differences,
    noise_variances,
    ridged,
)
from .result import NoiseAwarePosterior
from .run import budget_of, public_num_data, statement_of_charge

_LABEL = "noise_aware.sufficient_statistics"
_DRAWS = 2000
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExponentialFamily:
    r"""p(x | θ) = h(x)·exp(η(θ)·s(x) − A(η(θ))).

    Args:
        prior: Pyro model of θ alone, without arguments, observations and parameters.
        statistics: a function from one record (its row of every argument) to the vector s(x); it
            runs by ``torch.func.vmap``. If you centre statistics at a public value, they need a
            smaller bound and less noise.
        natural_parameters: a function from θ, a dict of the prior's values by site, to the vector
            η.
        log_normalizer: A as a function of η, twice differentiable: its derivatives are the mean and
            the covariance of s(x).
        max_statistic_norm: C, the public bound to which ‖s(x)‖ is clipped. The moments ignore
            clipping: choose a bound that few records exceed.
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
        partial(pyro.sample, "probability", dist.Beta(alpha * one, beta * one)),
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
        partial(pyro.sample, "rate", dist.Gamma(shape * one, rate * one)),
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
        partial(pyro.sample, "probabilities", dist.Dirichlet(parameters)),
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
        prior_std: prior standard deviation of every weight.
        max_feature_norm: R; longer rows are scaled down to it, and the weights refer to scaled
            rows.

    Raises:
        ValueError: ``max_feature_norm`` or ``prior_std`` is not a positive number, or
            ``noise_std_prior`` is not a distribution of one positive number.
    """

    noise_std_prior: Any
    prior_std: float = 1.0
    max_feature_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prior_std", "max_feature_norm"):
            check_clip_bound(name, getattr(self, name), "a public number")
        if not _is_of_a_positive_number(self.noise_std_prior):
            raise ArgumentError(
                "noise_std_prior must be a Pyro distribution of one positive number, such as"
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


def sufficient_statistics(
    model: ExponentialFamily | LinearRegression,
    *data: Tensor,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
) -> NoiseAwarePosterior:
    r"""The posterior given noisy sufficient statistics, which are released once.

    .. math::
        \tilde s = \sum_i s(x_i) + N(0, z^2 C^2 I), \qquad \tilde s \mid \theta \sim
        N(n\,\mu(\theta),\ n\,\Sigma(\theta) + z^2 C^2 I)

    with the mean μ and the covariance Σ of one record's statistics. The only approximation is that
    the sum is Gaussian. The statistics of a linear regression include products of features, which
    would need most of the budget: for this model
    :func:`~torch_dpbayes.noise_aware.posterior` runs instead.

    Args:
        model: :func:`beta_bernoulli`, :func:`gamma_poisson`, :func:`dirichlet_categorical`, an
            :class:`ExponentialFamily` of your own, or :class:`LinearRegression`.
        data: tensors of one length, with one row per record; features ``[n, d]`` and targets
            ``[n]`` for linear regression.
        epsilon: the accountant's total ε after the release. None: the accountant's budget.
        delta: δ of this ε. None: the accountant's.
        accountant: where the release is charged. None: a new one for replace-one.
        num_data: n, a public constant. None: the number in the data, only under replace-one, where
            it is public.

    Raises:
        ValueError, TypeError: the model or the data do not fit. Nothing is charged.
        PrivacyBudgetExceeded: the release would exceed the accountant's budget.

    **Privacy.** One Gaussian release, ``GaussianDpEvent(z)``, of a sum that moves by at most C when
    a record is added or removed, and by 2C when one is replaced. A record whose statistics are not
    finite counts as 0. Linear regression: as for :func:`~torch_dpbayes.noise_aware.posterior`.
    """
    accountant = budget_of(accountant, epsilon, delta)
    if isinstance(model, LinearRegression):
        return posterior(
            model,
            *data,
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            num_data=num_data,
            max_feature_norm=model.max_feature_norm,
        )
    if not isinstance(model, ExponentialFamily):
        raise ArgumentTypeError(
            "model must be an ExponentialFamily or a LinearRegression, such as"
            f" noise_aware.beta_bernoulli(); got {model!r}."
        )
    lengths = {len(arg) if isinstance(arg, Tensor) and arg.dim() else None for arg in data}
    if len(lengths) != 1 or None in lengths:
        raise UnfitModel("the data must be tensors of equal length with one row per record.")
    count = public_num_data(num_data, len(data[0]), accountant)
    multiplier = total_multiplier(accountant, epsilon, delta)
    with using_pyro, torch.no_grad():
        prior = prior_without_data(model.prior)
        latents = Latents(prior, torch.arange(prior.dimension))
        statistics = RecordStatistics(model.statistics, data)
        size = statistics.size
        whole = torch.eye(size, dtype=torch.float64)
        # errors of the model occur here, with synthetic statistics, before the charge
        made_up = Release(latents.median, whole, torch.zeros(size, dtype=whole.dtype), multiplier)
        tried = _OfFamily(model, latents, count, made_up)
        tried(latents.draws) + latents.log_density(latents.draws)
        accountant.compose(GaussianDpEvent(multiplier), label=_LABEL)
        exact = statistics.clipped_sum(model.max_statistic_norm).cpu() / model.max_statistic_norm
        released = exact + multiplier * normal_numbers(size)
        likelihood = _OfFamily(model, latents, count, made_up._replace(value=released))
        found = draw_posterior(latents, likelihood, _DRAWS)
        values = latents.values(found.theta, found.weights)
    lines = [
        f"a sum of {size} statistics; a record moves it by at most {model.max_statistic_norm:g}"
    ]
    statement = [
        "Noise-aware posterior from sufficient statistics",
        *statement_of_charge(accountant, lines),
        *note_draws(found, "use a prior with fewer modes or lighter tails.", level=4),
    ]
    return NoiseAwarePosterior(found, values, statement, released, density=(latents, likelihood))


class _OfFamily(Likelihood):
    """log p(s̃ | θ) with one record's moments in closed form, in units of the bound C."""

    count = 1  # number of simulated records; closed forms have no simulation error

    def __init__(
        self, model: ExponentialFamily, latents: Latents, num_data: int, release: Release
    ) -> None:
        self._model, self._latents, self.num_data = model, latents, num_data
        size = len(release.value)
        try:
            eta = model.natural_parameters(latents.constrain(latents.median))
        except KeyError as error:
            raise UnfitModel(
                f"natural_parameters reads a site {error} that the prior does not have: its sites"
                f" are {sorted(latents.prior.transforms)}."
            ) from error
        if not isinstance(eta, Tensor) or eta.shape != (size,):
            found = f"shape {list(eta.shape)}" if isinstance(eta, Tensor) else type(eta).__name__
            raise UnfitModel(
                f"natural_parameters must return a vector [{size}], one number for each"
                f" statistic, and returned {found}: write value[None] for a single number."
            )
        fit = find_mode(self, [release], latents, latents.median)
        noise = torch.diag(noise_variances([release]))
        laws = law_differences(fit, [self], [release])
        super().__init__(fit, latents.read, num_data, release.value, noise, fit.moments, laws)

    def __call__(self, theta: Tensor) -> Tensor:
        return self._of_rows(theta, vmap(self.moments))[0]

    def moments(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        values = self._latents.constrain(theta)
        mean, covariance = self._model.moments(self._model.natural_parameters(values).double())
        bound = self._model.max_statistic_norm
        return mean / bound, covariance / bound**2

    def local(self, theta: Tensor, releases: Sequence[Release]) -> tuple[None, Moments]:
        """The control variate of a record is its own statistic."""
        mean, covariance = self.moments(theta)
        jacobian = jacrev(lambda at: self.moments(at)[0])(theta)
        control = torch.linalg.solve(ridged(covariance), jacobian).T  # F = JᵀS⁻¹J
        information = control @ jacobian
        return None, Moments(mean, jacobian, covariance, 0 * covariance, information, control)

    def moved(self, theta: Tensor, step: Tensor) -> Tensor:
        return theta + step


# -- functions of families at module level, so that posteriors can be pickled ----------------------


def _natural(name: str, link: Callable[[Tensor], Tensor], values: Values) -> Tensor:
    return link(values[name]).reshape(-1)


def _centred(largest: float, what: str, x: Tensor) -> Tensor:
    return _one_number(x, what).double().clamp(0.0, largest) - largest / 2


def _centred_indicators(size: int, label: Tensor) -> Tensor:
    label = _one_number(label, "labels (of one-hot rows: rows.argmax(1))")
    found = (label == torch.arange(size, device=label.device)).double()
    return found - found.sum() / size


def _one_number(row: Tensor, what: str) -> Tensor:
    """A record that is a single number, with any dimensions of size 1."""
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
