r"""The posterior from one release of sufficient statistics: the same likelihood, T | θ ~ N(n m(θ),
n S(θ) + V), whose moments are closed forms.

Source: Bernstein and Sheldon (2018), "Differentially private Bayesian inference for exponential
families", with Gaussian noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import GaussianDpEvent
from ..density import Prior, RecordStatistics, UnfitModel
from ..density.pyro_runs import using_pyro
from ..errors import ArgumentTypeError
from .budget import budget_of, public_num_data, statement_of_charge
from .checks import note_draws
from .covariance import normal_numbers
from .drawing import draw_posterior
from .families import ExponentialFamily, LinearRegression
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

_LABEL = "noise_aware.sufficient_statistics"
_DRAWS = 2000
_NUMBERS = 10_000_000  # of covariances in memory at a time


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
    would take most of the budget: it is run by
    :func:`~torch_dpbayes.noise_aware.posterior`.

    Args:
        model: :func:`beta_bernoulli`, :func:`gamma_poisson`, :func:`dirichlet_categorical`, an
            :class:`ExponentialFamily` of your own, or :class:`LinearRegression`.
        data: tensors of one length, one row a record; features ``[n, d]`` and targets ``[n]`` for
            linear regression.
        epsilon: the accountant's total ε after the release. None: the accountant's budget.
        delta: likewise.
        accountant: where it is charged. None: a new one, for neighbours that replace one record.
        num_data: n, a public constant. None: taken from the data under replace-one, where it is
            public.

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
    if (
        not data
        or not all(isinstance(arg, Tensor) and arg.dim() for arg in data)
        or len({len(arg) for arg in data}) > 1
    ):
        raise UnfitModel("the data must be tensors of equal length with one row per record.")
    count = public_num_data(num_data, len(data[0]), accountant)
    multiplier = total_multiplier(accountant, epsilon, delta)
    with using_pyro, torch.no_grad():
        prior = Prior(model.prior)
        latents = Latents(prior, torch.arange(prior.dimension))
        statistics = RecordStatistics(model.statistics, data)
        size = statistics.size
        family = _Family(model, latents, count, size)
        whole = torch.eye(size, dtype=torch.float64)
        # what fails with made-up statistics fails before the charge
        made_up = Release(latents.median, whole, torch.zeros(size, dtype=whole.dtype), multiplier)
        _OfFamily(family, latents, made_up)(latents.draws) + latents.log_density(latents.draws)
        accountant.compose(GaussianDpEvent(multiplier), label=_LABEL)
        exact = statistics.clipped_sum(model.max_statistic_norm).cpu() / model.max_statistic_norm
        released = exact + multiplier * normal_numbers(size)
        likelihood = _OfFamily(family, latents, made_up._replace(value=released))
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


class _Family:
    """Moments of one record's statistics over the bound C, in closed form."""

    count = 1  # simulated records, of whose error there is none

    def __init__(
        self, model: ExponentialFamily, latents: Latents, num_data: int, size: int
    ) -> None:
        self._model, self._latents, self.num_data = model, latents, num_data
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

    def moments(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance."""
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
        """θ + step."""
        return theta + step


class _OfFamily(Likelihood):
    """log p(s̃ | θ) with the family's moments, in units of the bound."""

    def __init__(self, family: _Family, latents: Latents, release: Release) -> None:
        fit = find_mode(family, [release], latents, latents.median)
        noise = torch.diag(noise_variances([release]))
        laws = law_differences(fit, [family], [release])
        self._family, n = family, family.num_data
        super().__init__(fit, latents.read, n, release.value, noise, fit.moments, laws)

    def __call__(self, theta: Tensor) -> Tensor:
        """The log density of every row."""
        rows = max(_NUMBERS // len(self._released) ** 2, 1)
        of_many = vmap(self._family.moments)
        return torch.cat([self._with_moments(some, *of_many(some)) for some in theta.split(rows)])
