"""The posterior from one release of sufficient statistics, for the models that have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jacrev

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from ..mcmc.density import Prior, RecordStatistics, UnfitModel
from ..noise import GaussianNoise
from ..ops.glm import GLM
from ..ops.models import using_pyro
from .arguments import budget_of, little_left, public_num_data, require_small, shortened_rows
from .clamping import Clamped, Clamping, clamped_counts, clamped_residuals
from .families import CentredCounts, ExponentialFamily, LinearRegression, Values
from .mechanism import matrix_event, noisy_matrix
from .modes import mode
from .noisy_gram import NoisyGram, estimated
from .planning import matrix_multiplier, total_multiplier
from .posterior import NoiseAwarePosterior, PyroCoordinates
from .priors import GaussianPrior, PyroPrior
from .summaries import Summary

_LABEL = "noise_aware.sufficient_statistics"
# Of the budget. The first round (Σ x xᵀ; Σ y x and Σ y²) only serves to arrive; the second one has
# the residuals about its estimate. They are smaller than y, few of them are clipped whatever the
# weights are, and noise of the Gram matrix counts for them only as far as the estimate is off.
_SHARE_OF_GRAM, _FIRST_SHARES, _SECOND_SHARES = 0.14, (0.10, 0.03), (0.70, 0.03)
_REACH = 4.0  # standard deviations, to which residuals are clipped: next to none are
_CPU = torch.device("cpu")


def sufficient_statistics(
    model: ExponentialFamily | LinearRegression,
    *data: Tensor,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
) -> NoiseAwarePosterior:
    r"""The posterior given noisy sufficient statistics, which are released once (for linear
    regression twice: the second time as residuals about the first estimate).

    .. math::
        \tilde s = \sum_i s(x_i) + N(0, V), \qquad \tilde s \mid \theta \sim
        N(n\,\mu(\theta),\ n\,\Sigma(\theta) + V)

    with the mean μ and the covariance Σ of one record's statistics. That a sum of n of them is
    Gaussian is the only approximation. A warning, and a line of ``guarantee()``, says where by the
    posterior itself a bound of :func:`gamma_poisson` or :class:`LinearRegression` clamps more
    records than it can do without.

    Source: Bernstein and Sheldon (2018) for exponential families, (2019) for linear regression.

    Args:
        model: :func:`beta_bernoulli`, :func:`gamma_poisson`, :func:`dirichlet_categorical`, an
            :class:`ExponentialFamily` of your own, or :class:`LinearRegression`.
        data: tensors of one length, one row a record; features ``[n, d]`` and targets ``[n]`` for
            linear regression.
        epsilon: of everything on the accountant after the release. None: the accountant's budget.
        delta: likewise.
        accountant: where it is charged. None: one of its own, for neighbours that replace one
            record.
        num_data: n, a public constant. None: taken from the data under replace-one, where it is
            public.

    Raises:
        ValueError, TypeError: the model or the data do not fit. Nothing is charged.
        PrivacyBudgetExceeded: the release would pass the accountant's budget.

    **Privacy.** One Gaussian release, ``GaussianDpEvent(z)``, of a sum that moves by at most C when
    a record is added or removed, and by 2C when one is replaced. For linear regression five:
    Σ x xᵀ (R² or √2·R²), Σ y x (YR or 2YR) and Σ (y² − Y²/2) (Y²/2 or Y²), and then the last two of
    the residuals clip(y − x·w₀, ±c) in place of y, with w₀ and c ≤ Y from the first three.
    """
    accountant = budget_of(accountant, epsilon, delta)
    if not isinstance(model, ExponentialFamily | LinearRegression):
        raise TypeError(
            "model must be an ExponentialFamily or a LinearRegression, as"
            f" noise_aware.beta_bernoulli(); got {model!r}"
        )
    if (
        not data
        or not all(isinstance(arg, Tensor) and arg.dim() for arg in data)
        or len({len(arg) for arg in data}) > 1
    ):
        raise UnfitModel("the data are tensors of one length, one row a record.")
    count = public_num_data(num_data, len(data[0]), accountant)
    multiplier = total_multiplier(accountant, epsilon, delta)
    held_before = little_left(accountant, epsilon, delta)
    with using_pyro:
        if isinstance(model, LinearRegression):
            return _linear_regression(model, data, count, multiplier, accountant, held_before)
        return _exponential_family(model, data, count, multiplier, accountant, held_before)


def _exponential_family(
    model: ExponentialFamily,
    data: Sequence[Tensor],
    count: int,
    multiplier: float,
    accountant: PrivacyAccountant,
    held_before: str | None,
) -> NoiseAwarePosterior:
    prior = Prior(model.prior)
    statistics = RecordStatistics(model.statistics, data)
    size = statistics.size  # the posterior keeps what follows, and must not keep the records
    bound = model.max_statistic_norm
    std = multiplier * bound
    moments = _Moments(prior, model.natural_parameters, model.log_normalizer, count, size, std)
    latents = PyroPrior(prior)
    centre = latents.gaussian().mean
    moments.require_parameters(centre)
    accountant.compose(GaussianDpEvent(multiplier), label=_LABEL)
    released = statistics.clipped_sum(bound).to(_CPU) + std * _normal(size)
    return _posterior(
        Summary(released, moments, centre),
        latents,
        prior,
        accountant,
        [f"  proved      each record moves the statistics by at most {bound:g}"],
        _clamping_of_counts(model, prior, count),
        held_before,
    )


@dataclass(frozen=True)
class _Moments:
    """Of Σ s(x) with its noise, given θ."""

    prior: Prior
    natural_parameters: Callable[[Values], Tensor]
    log_normalizer: Callable[[Tensor], Tensor]
    count: int
    size: int
    std: float

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        eta = self._parameters(theta).to(torch.float64)
        noise = self.std**2 * torch.eye(self.size, dtype=torch.float64)
        return (
            self.count * grad(self.log_normalizer)(eta),
            self.count * jacrev(grad(self.log_normalizer))(eta) + noise,
        )

    def require_parameters(self, theta: Tensor) -> None:
        """Refuses natural parameters that are not one for each statistic."""
        try:
            eta = self._parameters(theta)
        except KeyError as error:
            raise UnfitModel(
                f"natural_parameters reads a site {error} that the prior does not have: its sites"
                f" are {sorted(self.prior.transforms)}."
            ) from error
        if not isinstance(eta, Tensor) or eta.shape != (self.size,):
            found = f"shape {list(eta.shape)}" if isinstance(eta, Tensor) else type(eta).__name__
            raise UnfitModel(
                f"natural_parameters must return a vector [{self.size}], one number for each"
                f" statistic, and returned {found}: write value[None] for a single number."
            )

    def _parameters(self, theta: Tensor) -> Tensor:
        return self.natural_parameters(self.prior.constrain(theta.to(self.prior.dtype)))


def _clamping_of_counts(model: ExponentialFamily, prior: Prior, count: int) -> Clamping | None:
    """None for families other than :func:`~torch_dpbayes.noise_aware.gamma_poisson`."""
    if not isinstance(model.statistics, CentredCounts):
        return None
    max_count = model.statistics.max_count

    def expected(theta: Tensor) -> Clamped:
        return clamped_counts(float(prior.constrain(theta)["rate"]), max_count, count)

    return Clamping("counts", ("max_count", max_count), expected)


def _linear_regression(
    model: LinearRegression,
    data: Sequence[Tensor],
    count: int,
    multiplier: float,
    accountant: PrivacyAccountant,
    held_before: str | None,
) -> NoiseAwarePosterior:
    records = GLM("gaussian", model.prior_std, model.max_feature_norm, noise_std=1.0).records(
        *_features_and_targets(data)
    )
    size = records.x.shape[1]
    require_small(
        size,
        'use fewer, or laplace with a GLM of known noise_std and curvature="diagonal"',
        "features",
    )
    prior = Prior(model.prior(size))
    of_gram = matrix_multiplier(multiplier, _SHARE_OF_GRAM, accountant.neighboring)
    of_products, of_squares = (multiplier / math.sqrt(share) for share in _FIRST_SHARES)
    of_residuals, of_their_squares = (multiplier / math.sqrt(share) for share in _SECOND_SHARES)
    parts: list[DpEvent] = [
        matrix_event(of_gram, accountant.neighboring),
        *(
            GaussianDpEvent(part)
            for part in (of_products, of_squares, of_residuals, of_their_squares)
        ),
    ]
    latents = PyroPrior(prior)
    gaussian = latents.gaussian()
    accountant.compose(ComposedDpEvent(parts), label=_LABEL)

    std = of_gram * model.max_feature_norm**2
    gram = estimated(
        noisy_matrix(records.gram(), std, _normal(size * size).reshape(size, size)), std, count
    )

    def round_of(w: Tensor, limit: float, vector: float, square: float) -> Summary:
        """Σ r x and Σ r² of the residuals r = y − x·w, released."""
        r = records.y.double() - records.predictors(w.to(records.y.device))
        r = r.clamp(-limit, limit)
        stds = vector * model.max_feature_norm * limit, square * limit**2 / 2
        products = records.weighted_sum(r).to(_CPU) + stds[0] * _normal(size)
        squares = (r.square() - limit**2 / 2).sum(dtype=torch.float64).to(_CPU)
        squares = squares + stds[1] * _normal(1) + count * limit**2 / 2
        moments = partial(_moments_of_residuals, prior, gram, count, w, stds)
        return Summary(torch.cat([products, squares]), moments, gaussian.mean)

    origin = torch.zeros(size, dtype=torch.float64)
    first = round_of(origin, model.target_bound, of_products, of_squares)
    centre = mode(first, gaussian)
    middle, limit = _residuals(first, gaussian, centre, prior, model)
    second = round_of(middle, limit, of_residuals, of_their_squares)
    about_records = [
        (
            "  proved      each record moves sums of x xᵀ, r x and r² of residuals r by at most"
            f" {model.max_feature_norm**2:g}, {model.max_feature_norm * model.target_bound:g} and"
            f" {model.target_bound**2:g}, and then {model.max_feature_norm * limit:.3g} and"
            f" {limit**2:.3g}"
        ),
        shortened_rows(model.max_feature_norm),
    ]

    def expected(theta: Tensor) -> Clamped:
        sums = second.moments(theta)[0]
        return clamped_residuals(sums[:-1], float(sums[-1]), limit, count)

    # a smaller limit than that follows from the data's spread, and is not the user's
    is_bound = limit == model.target_bound
    clamping = Clamping("residuals", ("target_bound", limit), expected) if is_bound else None
    return _posterior(second, latents, prior, accountant, about_records, clamping, held_before)


def _moments_of_residuals(
    prior: Prior,
    gram: NoisyGram,
    count: int,
    origin: Tensor,
    stds: tuple[float, float],
    theta: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of Σ r x and Σ r², r = y − x·origin, given θ, σ and the noisy Gram matrix, whose own noise is
    one more part of the covariance.
    """
    values = prior.constrain(theta)
    apart, variance = values["weights"] - origin, values["noise_std"].square()
    eye = torch.eye(len(apart), dtype=torch.float64)
    moved, error = gram.matrix @ apart, gram.error_covariance(apart)
    explained = apart @ moved
    of_products = variance * gram.matrix + stds[0] ** 2 * eye + error
    of_squares = (
        stds[1] ** 2
        + 2 * count * variance.square()
        + 4 * variance * explained
        + apart @ error @ apart
    )
    both = (2 * variance * moved + error @ apart)[:, None]
    covariance = torch.cat(
        [torch.cat([of_products, both], 1), torch.cat([both.T, of_squares.reshape(1, 1)], 1)]
    )
    return torch.cat([moved, (explained + count * variance)[None]]), covariance


def _residuals(
    first: Summary, gaussian: GaussianPrior, centre: Tensor, prior: Prior, model: LinearRegression
) -> tuple[Tensor, float]:
    """The weights about which residuals are taken, and how large these are let be: four standard
    deviations, as far as the first round tells.
    """
    covariance = torch.linalg.inv(first.precision(centre)[0] + torch.diag(gaussian.precision))
    spread = prior.unflatten(covariance.diagonal().clamp_min(0.0).sqrt())
    upper = prior.constrain(centre + 2 * covariance.diagonal().clamp_min(0.0).sqrt())
    variance = float(upper["noise_std"]) ** 2
    variance += float((model.max_feature_norm * spread["weights"]).square().max())
    limit = min(_REACH * math.sqrt(variance), model.target_bound)
    return prior.constrain(centre)["weights"], limit


def _features_and_targets(data: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    features, targets = GLM("gaussian", noise_std=1.0).prepare(tuple(data))
    return features, targets


def _posterior(
    summary: Summary,
    latents: PyroPrior,
    prior: Prior,
    accountant: PrivacyAccountant,
    about_records: Sequence[str],
    clamping: Clamping | None,
    held_before: str | None,
) -> NoiseAwarePosterior:
    delta = 1e-5 if accountant.delta is None else accountant.delta
    statement = [
        "Noise-aware posterior from sufficient statistics",
        (
            "  charged     before the first release; the accountant now holds epsilon ="
            f" {accountant.get_epsilon(delta):.5g} at delta = {delta:g} ({accountant.neighboring})"
        ),
        *about_records,
        (
            "  ASSUMED     for the width, not for privacy: the model is right, few records are"
            " clipped, and sums over them are Gaussian"
        ),
    ]
    if clamping is not None:
        statement += clamping.note(summary, latents.gaussian())
    return NoiseAwarePosterior(
        summary,
        latents,
        PyroCoordinates(prior),
        statement,
        transcript=summary.released,
        little_left=held_before,
    )


def _normal(size: int) -> Tensor:
    return GaussianNoise().standard_normal(size, dtype=torch.float64, device=_CPU)
