r"""The posterior from one release of sufficient statistics: the same likelihood, T | θ ~ N(n m(θ),
n S(θ) + V), whose moments are closed forms.

Source: Bernstein and Sheldon (2018), "Differentially private Bayesian inference for exponential
families", with Gaussian noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import GaussianDpEvent
from ..density import Prior, RecordStatistics, UnfitModel
from ..errors import ArgumentTypeError
from ..ops.models import using_pyro
from .budget import budget_of, public_num_data, statement_of_charge
from .covariance import normal_numbers
from .drawing import draw_posterior
from .families import ExponentialFamily, LinearRegression
from .inference import posterior
from .latents import Latents
from .likelihood import Likelihood, Moments, Release, find_mode, ridged
from .result import NoiseAwarePosterior

_LABEL = "noise_aware.sufficient_statistics"
_DRAWS = 2000
_NUMBERS = 10_000_000  # of covariances in memory at a time
_NEWTON_STEPS = 50


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

    with the mean μ and the covariance Σ of one record's statistics. That a sum of n of them is
    Gaussian is the only approximation. A linear regression has products of its features among its
    statistics, which it spends most of a budget on: it is run by
    :func:`~torch_dpbayes.noise_aware.posterior`.

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
    a record is added or removed, and by 2C when one is replaced. A record whose statistics are not
    finite counts as 0. Of a linear regression as for :func:`~torch_dpbayes.noise_aware.posterior`.
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
            "model must be an ExponentialFamily or a LinearRegression, as"
            f" noise_aware.beta_bernoulli(); got {model!r}."
        )
    if (
        not data
        or not all(isinstance(arg, Tensor) and arg.dim() for arg in data)
        or len({len(arg) for arg in data}) > 1
    ):
        raise UnfitModel("the data are tensors of one length, one row a record.")
    count = public_num_data(num_data, len(data[0]), accountant)
    multiplier = total_multiplier(accountant, epsilon, delta)
    with using_pyro, torch.no_grad():
        prior = Prior(model.prior)
        latents = Latents(prior, torch.arange(prior.dimension))
        statistics = RecordStatistics(model.statistics, data)
        likelihood = _ClosedForm(model, latents, count, multiplier, statistics.size)
        accountant.compose(GaussianDpEvent(multiplier), label=_LABEL)
        noise = normal_numbers(statistics.size)
        exact = statistics.clipped_sum(model.max_statistic_norm).cpu() / model.max_statistic_norm
        likelihood.settle(exact + multiplier * noise)
        found = draw_posterior(latents, likelihood, _DRAWS)
    released = [
        f"a sum of {statistics.size} statistics; a record moves it by at most"
        f" {model.max_statistic_norm:g}"
    ]
    statement = [
        "Noise-aware posterior from sufficient statistics",
        *statement_of_charge(accountant, released),
    ]
    return NoiseAwarePosterior(latents, found, likelihood, statement, likelihood.released)


class _ClosedForm(Likelihood):
    """log p(s̃ | θ) in units of the bound, in the form of a synthetic likelihood."""

    simulation_error, num_simulated, count = 0.0, 0, 1

    def __init__(
        self, model: ExponentialFamily, latents: Latents, num_data: int, noise: float, size: int
    ) -> None:
        self._model, self._latents, self._noise, self._size = model, latents, noise, size
        self.num_data, self.centre = num_data, latents.median
        self._require_parameters()

    def _require_parameters(self) -> None:
        try:
            eta = self._model.natural_parameters(self._latents.constrain(self.centre))
        except KeyError as error:
            raise UnfitModel(
                f"natural_parameters reads a site {error} that the prior does not have: its sites"
                f" are {sorted(self._latents.prior.transforms)}."
            ) from error
        if not isinstance(eta, Tensor) or eta.shape != (self._size,):
            found = f"shape {list(eta.shape)}" if isinstance(eta, Tensor) else type(eta).__name__
            raise UnfitModel(
                f"natural_parameters must return a vector [{self._size}], one number for each"
                f" statistic, and returned {found}: write value[None] for a single number."
            )

    def _moments(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Of one record's statistics over C."""
        values = self._latents.constrain(theta)
        mean, covariance = self._model.moments(self._model.natural_parameters(values).double())
        bound = self._model.max_statistic_norm
        return mean / bound, covariance / bound**2

    def local(self, theta: Tensor, releases: Sequence[Release]) -> tuple[None, Moments]:
        """Moments in closed form; the control variate of a record is its own statistic."""
        mean, covariance = self._moments(theta)
        jacobian = jacrev(lambda at: self._moments(at)[0])(theta)
        control = torch.linalg.solve(ridged(covariance), jacobian).T  # F = JᵀS⁻¹J
        information = control @ jacobian
        return None, Moments(mean, jacobian, covariance, 0 * covariance, information, control)

    def moved(self, theta: Tensor, step: Tensor) -> Tensor:
        """θ + step."""
        return theta + step

    def settle(self, released: Tensor) -> None:
        """Finds the mode given what was released."""
        self.released, size = released, len(self.centre)
        release = Release(self.centre, torch.eye(size).double(), released, self._noise)
        self._fit = find_mode(self, [release], self._latents, self.centre, _NEWTON_STEPS)
        self.centre = self._fit.centre
        self.modes, self.precisions = self.centre[None] + self._fit.step, self._fit.precision[None]

    def gaussian(self, theta: Tensor) -> Tensor:
        """With the mean linear and the covariance constant, ``[m]``."""
        found, root = self._fit.moments, torch.linalg.cholesky(self._fit.covariance)
        means = found.mean + (theta - self.centre) @ found.jacobian.T
        apart = (self.released - self.num_data * means).T
        return torch.linalg.solve_triangular(root, apart, upper=False).square().sum(0) / -2

    def __call__(self, theta: Tensor) -> tuple[Tensor, int]:
        """Of every row, ``[m]``; nothing is simulated."""
        rows = max(_NUMBERS // self._size**2, 1)
        return torch.cat([self._values(some) for some in theta.split(rows)]), 0

    def _values(self, theta: Tensor) -> Tensor:
        means, covariances = vmap(self._moments)(theta)
        eye = torch.eye(self._size, dtype=torch.float64)
        factors, failed = torch.linalg.cholesky_ex(
            self.num_data * covariances + self._noise**2 * eye
        )
        apart = (self.released - self.num_data * means)[..., None]
        white = torch.linalg.solve_triangular(factors, apart, upper=False)[..., 0]
        values = -0.5 * white.square().sum(1) - factors.diagonal(dim1=1, dim2=2).log().sum(1)
        return torch.where((failed == 0) & values.isfinite(), values, -math.inf)
