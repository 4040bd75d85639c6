"""The posterior from one release of sufficient statistics, for the models that have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad, jacrev

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from ..mcmc.density import Prior, RecordStatistics, UnfitModel
from ..noise import GaussianNoise
from ..ops.glm import GLM
from ..ops.models import using_pyro
from .arguments import public_num_data
from .families import ExponentialFamily, LinearRegression
from .mechanism import matrix_event, noisy_matrix
from .planning import matrix_multiplier, total_multiplier
from .posterior import NoiseAwarePosterior, PyroCoordinates
from .priors import PyroPrior
from .response import denoised
from .summaries import Moments, Summary

_LABEL = "noise_aware.sufficient_statistics"
_SHARE_OF_SQUARES = 0.05  # of the budget, for Σ y², which says little but the level of the noise
_CPU = torch.device("cpu")


def sufficient_statistics(
    model: ExponentialFamily | LinearRegression,
    *data: Tensor,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
) -> NoiseAwarePosterior:
    r"""The posterior given noisy sufficient statistics, which are released once.

    .. math:: \tilde s = \sum_i s(x_i) + N(0, V), \qquad \tilde s \mid \theta \sim
    N(n\,\mu(\theta),\ n\,\Sigma(\theta) + V)

    with the mean μ and the covariance Σ of one record's statistics. That a sum of n of them is
    Gaussian is the only approximation.

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
    a record is added or removed, and by 2C when one is replaced. For linear regression three: Σ x
    xᵀ (R² or √2·R²), Σ y x (YR or 2YR) and Σ (y² − Y²/2) (Y²/2 or Y²).
    """
    if accountant is None:
        accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
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
    with using_pyro:
        if isinstance(model, LinearRegression):
            return _linear_regression(model, data, count, multiplier, accountant)
        return _exponential_family(model, data, count, multiplier, accountant)


def _exponential_family(
    model: ExponentialFamily,
    data: Sequence[Tensor],
    count: int,
    multiplier: float,
    accountant: PrivacyAccountant,
) -> NoiseAwarePosterior:
    prior = Prior(model.prior)
    statistics = RecordStatistics(model.statistics, data)
    size = statistics.size  # the posterior keeps what follows, and must not keep the records
    bound = model.max_statistic_norm
    std = multiplier * bound

    def moments(theta: Tensor) -> tuple[Tensor, Tensor]:
        values = prior.constrain(theta.to(prior.dtype))
        eta = model.natural_parameters(values).to(torch.float64)
        noise = std**2 * torch.eye(size, dtype=torch.float64)
        return (
            count * grad(model.log_normalizer)(eta),
            count * jacrev(grad(model.log_normalizer))(eta) + noise,
        )

    latents = PyroPrior(prior)
    centre = latents.gaussian().mean
    if len(moments(centre)[0]) != size:
        raise UnfitModel(
            "natural_parameters and statistics have different lengths: each statistic needs its"
            " parameter."
        )
    accountant.compose(GaussianDpEvent(multiplier), label=_LABEL)
    released = statistics.clipped_sum(bound).to(_CPU) + std * _normal(size)
    return _posterior(
        released,
        moments,
        centre,
        latents,
        prior,
        accountant,
        [f"each record moves the statistics by at most {bound:g}"],
    )


def _linear_regression(
    model: LinearRegression,
    data: Sequence[Tensor],
    count: int,
    multiplier: float,
    accountant: PrivacyAccountant,
) -> NoiseAwarePosterior:
    records = GLM("gaussian", model.prior_std, model.max_feature_norm, noise_std=1.0).records(
        *_features_and_targets(data)
    )
    size = records.x.shape[1]
    prior = Prior(model.prior(size))
    bounds = (
        model.max_feature_norm**2,
        model.max_feature_norm * model.target_bound,
        model.target_bound**2 / 2,
    )
    # Noise of the Gram matrix counts with ‖w‖²/2, of which shrinking saves about a half; the shares
    # make the sum of both variances least.
    weight = math.sqrt(size) * model.prior_std * bounds[0] / 2
    share = (1 - _SHARE_OF_SQUARES) * min(max(weight / (weight + bounds[1]), 0.1), 0.5)
    of_gram = matrix_multiplier(multiplier, share, accountant.neighboring)
    of_vector, of_square = (
        multiplier / math.sqrt(part) for part in (1 - share - _SHARE_OF_SQUARES, _SHARE_OF_SQUARES)
    )
    stds = of_gram * bounds[0], of_vector * bounds[1], of_square * bounds[2]
    parts: list[DpEvent] = [
        matrix_event(of_gram, accountant.neighboring),
        GaussianDpEvent(of_vector),
        GaussianDpEvent(of_square),
    ]
    latents = PyroPrior(prior)
    centre = latents.gaussian().mean
    accountant.compose(ComposedDpEvent(parts), label=_LABEL)

    y = records.y.double().clamp(-model.target_bound, model.target_bound)
    gram, gram_std = denoised(
        noisy_matrix(records.gram(), stds[0], _normal(size * size).reshape(size, size)), stds[0]
    )
    products = records.weighted_sum(y).to(_CPU) + stds[1] * _normal(size)
    squares = (
        (y.square() - bounds[2]).sum(dtype=torch.float64).to(_CPU)
        + stds[2] * _normal(1)
        + count * bounds[2]
    )
    released = torch.cat([products, squares])
    eye = torch.eye(size, dtype=torch.float64)

    def moments(theta: Tensor) -> tuple[Tensor, Tensor]:
        """Of Σ y x and Σ y² given θ, σ and the noisy Gram matrix, whose own noise is one more
        part of the covariance.
        """
        values = prior.constrain(theta)
        w, variance = values["weights"], values["noise_std"].square()
        moved = gram @ w
        explained, length = w @ moved, w.square().sum()
        of_products = (
            variance * gram
            + stds[1] ** 2 * eye
            + gram_std**2 / 2 * (length * eye + torch.outer(w, w))
        )
        of_square = (
            stds[2] ** 2
            + 2 * count * variance.square()
            + 4 * variance * explained
            + gram_std**2 * length.square()
        )
        both = (2 * variance * moved + gram_std**2 * length * w)[:, None]
        covariance = torch.cat(
            [torch.cat([of_products, both], 1), torch.cat([both.T, of_square.reshape(1, 1)], 1)]
        )
        return torch.cat([moved, (explained + count * variance)[None]]), covariance

    proved = [
        (
            f"each record moves sums of x xᵀ, y x and y² by at most {bounds[0]:g}, {bounds[1]:g}"
            f" and {2 * bounds[2]:g}"
        ),
    ]
    return _posterior(released, moments, centre, latents, prior, accountant, proved)


def _features_and_targets(data: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    features, targets = GLM("gaussian", noise_std=1.0).prepare(tuple(data))
    return features, targets


def _posterior(
    released: Tensor,
    moments: Moments,
    centre: Tensor,
    latents: PyroPrior,
    prior: Prior,
    accountant: PrivacyAccountant,
    proved: Sequence[str],
) -> NoiseAwarePosterior:
    delta = 1e-5 if accountant.delta is None else accountant.delta
    statement = [
        "Noise-aware posterior from one release of sufficient statistics",
        (
            "  charged     before it; the accountant now holds epsilon ="
            f" {accountant.get_epsilon(delta):.5g} at delta = {delta:g} ({accountant.neighboring})"
        ),
        *(f"  proved      {line}" for line in proved),
        (
            "  ASSUMED     for the width, not for privacy: the model is right, few records are"
            " clipped, and sums over them are Gaussian"
        ),
    ]
    return NoiseAwarePosterior(
        Summary(released, moments, centre),
        latents,
        PyroCoordinates(prior),
        statement,
        transcript=released,
    )


def _normal(size: int) -> Tensor:
    return GaussianNoise().standard_normal(size, dtype=torch.float64, device=_CPU)
