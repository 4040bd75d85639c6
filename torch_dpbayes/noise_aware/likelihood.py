r"""The synthetic likelihood: the simulated law of private releases.

With releases :math:`T_k = \sum_i c_k(x_i) + z_k \xi_k` of clipped whitened scores
:math:`c_k(x) = \mathrm{clip}_1(A_k u(x; \theta_k)/C_k)`, all of them together are

.. math::
    T \mid \theta \sim N\big(n\,m(\theta),\ n\,S(\theta) + V\big), \qquad m = E_\theta\, c(x),
    \quad S = \mathrm{Cov}_\theta\, c(x), \quad V = \mathrm{diag}(z_k^2)

by the central limit theorem (Wood 2010, "Statistical inference for noisy nonlinear ecological
dynamic systems"; Gallant and Tauchen 1996, "Which moments to match?"). Both moments come from M
records that are simulated at a centre θ_c and weighted by :math:`p(x|\theta)/p(x|\theta_c)`, one
record's ratio. There E u(x; θ_c) = 0, so u is a control variate, and ∂m/∂θ = Cov(c, u). The
residual covariance after this control variate, S_res, adds n²S_res/M to the covariance.

**Privacy.** Post-processing: functions of releases and of public numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..density import InvalidPoint, RecordDensity
from .covariates import Covariates
from .latents import Latents
from .records import ModelRecords, clipped, log_likelihoods, scores

_LONGEST_STEP = 0.5  # standard deviation of a record's log ratio from one centre to the next
_CONVERGED, _MOST_STEPS = 0.05, 60  # posterior standard deviations; Gauss-Newton steps
_HALVINGS = 20
LONGEST_MOVE = 2.0  # posterior standard deviations, from a centre to a mode
LARGEST_ERROR = 0.1  # of the simulation, in posterior standard deviations
_LEAST_WORTH = 0.1  # least effective sample size, as a share of the simulated records
_USUAL_SHARE = 0.1  # of records that have the information; for normal scores it is d/(d + 2)
_NEGLIGIBLE = 1e-8  # relative size of squares of scores; float32 rounds them to 1e-14
_PLACES = 5  # draws of a prior, at which scores are compared with those at the centre
_RATIOS = 512  # largest number of records whose log ratios determine a move
_MOST_CENTRES = 60  # largest number of further centres at which records are simulated
_LEAST_SHARE = 1e-6  # least share of a posterior's precision; less counts as 0
_NUMBERS = 10_000_000  # of covariances in memory at a time
_RIDGE = 1e-10  # relative, for matrices that may be singular


class Release(NamedTuple):
    """T = Σ clip₁(Wu(x; θ)) + noise."""

    theta: Tensor  # where scores are computed, [D]
    whitening: Tensor  # W = A/C, [d, d]
    value: Tensor  # T, [d]
    noise_std: float  # z
    is_count: bool = False  # T is the number of records with ‖Wu‖ > 1, with noise


class Simulated(NamedTuple):
    """Records simulated at a centre."""

    centre: Tensor  # θ_c, [D]
    density: RecordDensity
    scores: Tensor  # u(x; θ_c), [M, d]


class Moments(NamedTuple):
    """Moments of statistics c at a centre."""

    mean: Tensor  # m
    jacobian: Tensor  # J = ∂m/∂θ
    covariance: Tensor  # S
    residual: Tensor  # S_res
    information: Tensor  # F = Cov(u)
    control: Tensor  # B, the regression of c on u

    def projected(self, onto: Tensor) -> Moments:
        """The moments of the statistics ``onto @ c``."""
        mean, jacobian, control = (onto @ x for x in (self.mean, self.jacobian, self.control))
        covariance, residual = (onto @ x @ onto.T for x in (self.covariance, self.residual))
        return Moments(mean, jacobian, covariance, residual, self.information, control)


def moments(statistics: Tensor, found: Tensor, is_paired: bool) -> Moments:
    """Moments of the ``statistics`` ``[M, q]`` of M records with scores ``found`` ``[M, d]``."""
    if is_paired:
        apart = (statistics[:-1:2] - statistics[1::2]) / math.sqrt(2)
        inner = (found[:-1:2] - found[1::2]) / math.sqrt(2)
    else:
        apart, inner = statistics - statistics.mean(0), found
    mean, jacobian, information, control = _first_moments(statistics, found, apart, inner)
    covariance = apart.T @ apart / len(apart)
    residual = covariance - control @ jacobian.T
    return Moments(mean, jacobian, covariance, residual, information, control)


def _first_moments(
    statistics: Tensor, found: Tensor, apart: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, J, F and B. The covariance of all statistics takes longer than these."""
    information, jacobian = inner.T @ inner / len(apart), apart.T @ inner / len(apart)
    control = torch.linalg.solve(ridged(information), jacobian.T).T
    return statistics.mean(0) - control @ found.mean(0), jacobian, information, control


class Simulator:
    """Simulates M = ``count`` records, with the same random numbers at every θ."""

    def __init__(
        self, records: ModelRecords, covariates: Covariates, num_data: int, count: int, seed: int
    ) -> None:
        self.records, self.covariates = records, covariates
        self.num_data, self.count, self.seed = num_data, count, seed

    def at(self, theta: Tensor, count: int | None = None, batch: int = 0) -> Simulated:
        """Records simulated at θ. Each ``batch`` has its own random numbers."""
        count = self.count if count is None else count
        rows = self.covariates.rows(count, batch)
        density = self.records.simulate(theta, rows, count, self.seed + batch)
        return Simulated(theta, density, scores(self.records, density, theta))

    def statistics(self, simulated: Simulated, releases: Sequence[Release]) -> Tensor:
        """c_k(x) of all releases side by side, ``[M, K·d]``."""
        found = []
        for release in releases:
            own = simulated.scores
            if not torch.equal(release.theta, simulated.centre):
                own = scores(self.records, simulated.density, release.theta)
            if release.is_count:
                white = own @ release.whitening.T
                found.append((white.norm(dim=1, keepdim=True) > 1).to(white))
            else:
                found.append(clipped(own, release.whitening))
        return torch.cat(found, 1)

    def local(self, theta: Tensor, releases: Sequence[Release]) -> tuple[Simulated, Moments]:
        """Records at θ, and the moments of their statistics."""
        simulated = self.at(theta)
        statistics = self.statistics(simulated, releases)
        return simulated, moments(statistics, simulated.scores, self.covariates.is_paired)

    def moved(self, theta: Tensor, step: Tensor) -> Tensor:
        """θ + step. The step is halved until the model can be evaluated there."""
        read, density = self.records.read, self.records.density
        for _ in range(_HALVINGS):
            moved = theta.index_add(0, read, step)
            if density.has_gradients(moved.to(density.prior.device, density.prior.dtype)):
                return moved
            step = step / 2
        return theta


def is_bent(simulated: Simulated, records: ModelRecords) -> bool:
    """Whether a direction of θ that moves no record at the centre moves some at a draw of the
    prior. Then the θ that give the same records lie on a curve, like those with the same ``tau *
    z``.
    """
    gram = simulated.scores.T @ simulated.scores
    scales = torch.where(gram.diagonal() > 0, gram.diagonal().rsqrt(), 1.0)
    values, vectors = torch.linalg.eigh(scales[:, None] * gram * scales)
    still = vectors[:, values <= _NEGLIGIBLE * values[-1]]
    for theta in records.density.prior.samples(_PLACES) if still.shape[1] else ():
        try:
            found = scores(records, simulated.density, theta) * scales
        except InvalidPoint:
            continue
        if (found @ still).square().sum() > _NEGLIGIBLE * found.square().sum():
            return True
    return False


class Moves:
    """How far θ is from a centre, measured by records, in coordinates of θ: log ratios of records
    simulated at the centre, regressed on their scores. To first order it is θ − θ_c; it is 0 if θ
    gives the same records.
    """

    def __init__(self, simulated: Simulated) -> None:
        self._centre, self._density = simulated.centre, simulated.density
        self._count = min(_RATIOS, len(simulated.scores))
        self._inverse = _regression(simulated.scores[: self._count])

    def __call__(self, theta: Tensor) -> Tensor:
        """The moves of every row ``[m, d]``; differentiable."""
        prior = self._density.prior
        points = torch.cat([self._centre[None], theta]).to(prior.device, prior.dtype)
        found = self._density.log_likelihoods_of_first(points, self._count).to(theta)
        return (found[1:] - found[0]) @ self._inverse


def _regression(found: Tensor) -> Tensor:
    """The matrix that maps log ratios of records with these scores to a move, ``[M, d]``. A ratio
    that is the same for all records gives no move.
    """
    apart = found - found.mean(0)
    sizes = torch.where((apart != 0).any(0), apart.norm(dim=0), 1.0)
    return torch.linalg.pinv(apart / sizes, rtol=math.sqrt(_NEGLIGIBLE)).T / sizes


class Fit(NamedTuple):
    """The posterior mode given releases, and the Gaussian there."""

    centre: Tensor  # θ_c, [D]
    precision: Tensor  # Λ of the read coordinates
    prior_precision: Tensor  # P of them
    moments: Moments  # at the centre
    covariance: Tensor  # nS + V + n²S_res/M of all releases, [K·d, K·d]
    last_step: float  # length of the next step, in posterior standard deviations
    simulated: Any  # the records; None for closed forms
    slope: Tensor  # ∇ log p(θ) of the prior at the centre


def noise_variances(releases: Sequence[Release]) -> Tensor:
    """The diagonal of V."""
    return torch.cat([torch.full_like(r.value, r.noise_std**2) for r in releases])


def posterior_precision(
    found: Moments, covariance: Tensor, prior_precision: Tensor, num_data: int
) -> tuple[Tensor, Tensor]:
    """Λ = P + n²JᵀΣ⁻¹J, and nΣ⁻¹J."""
    pulled = num_data * torch.cholesky_solve(
        found.jacobian, torch.linalg.cholesky(covariance), upper=False
    )
    likelihood = num_data * found.jacobian.T @ pulled
    return prior_precision + (likelihood + likelihood.T) / 2, pulled


def find_mode(
    source: Any,
    releases: Sequence[Release],
    latents: Latents,
    start: Tensor,
    most_steps: int = _MOST_STEPS,
) -> Fit:
    r"""Gauss-Newton steps, with new records at each centre. ``source`` of the moments is a
    :class:`Simulator`, or closed forms with the same ``local``, ``moved`` and attributes.

    .. math::
        \Lambda = P + n^2 J^\top \Sigma^{-1} J, \qquad
        \mathrm{step} = \Lambda^{-1}\big(n J^\top \Sigma^{-1}(T - n m) + \nabla\log p\big)
    """
    n, value = source.num_data, torch.cat([r.value for r in releases])
    variances = noise_variances(releases)
    theta, damping, before = start, 1.0, torch.zeros(len(latents.read), dtype=torch.float64)
    for number in range(most_steps + 1):
        simulated, found = source.local(theta, releases)
        covariance = n * found.covariance + n**2 / source.count * found.residual
        covariance = covariance + torch.diag(variances)
        slope, prior_precision = latents.slope_and_precision(theta)
        precision, pulled = posterior_precision(found, covariance, prior_precision, n)
        gradient = pulled.T @ (value - n * found.mean) + slope
        step = torch.linalg.solve(precision, gradient)
        length = math.sqrt(max(float(step @ precision @ step), 0.0))
        if length < _CONVERGED or number == most_steps:
            break
        if float(step @ precision @ before) < 0:  # the last step was too long
            damping = max(damping / 2, 1 / 8)
        before = step
        ratio = math.sqrt(max(float(step @ found.information @ step), 0.0))
        scale = damping * min(1.0, _LONGEST_STEP / max(ratio, 1e-300))
        theta = source.moved(theta, scale * step)
    return Fit(theta, precision, prior_precision, found, covariance, length, simulated, slope)


class LawDifferences(NamedTuple):
    """The differences of m and J between laws of the covariates and the mean law."""

    means: Tensor  # [L, K·d]
    jacobians: Tensor  # [L, K·d, d]


def law_differences(
    fit: Fit, simulators: Sequence[Any], releases: Sequence[Release]
) -> LawDifferences:
    """Differences at the mode, with the same random numbers under each law. The first of
    ``simulators`` has the mean law. Zeros if it is the only one.
    """
    if len(simulators) == 1:
        return LawDifferences(0 * fit.moments.mean[None], 0 * fit.moments.jacobian[None])
    under = []
    for simulator in simulators:
        simulated = simulator.at(fit.centre)
        own, found = simulator.statistics(simulated, releases), simulated.scores
        under.append(_first_moments(own, found, own - own.mean(0), found)[:2])
    means, jacobians = (torch.stack(found) for found in zip(*under, strict=True))
    return LawDifferences(means[1:] - means[0], jacobians[1:] - jacobians[0])


class Likelihood(ABC):
    r"""log p(T | θ) of the releases, up to a constant, for rows of θ ``[m, D]``.

    Under a law l of the covariates m(θ) is larger by m_l − m + (J_l − J)(θ − θ_c). Posteriors under
    the laws are averaged: the likelihood is that of a mixture,

    .. math::
        \frac 1 L\sum_l p(T|\theta, l)/Z_l, \qquad Z_l = \int p(T|\theta, l)\,p(\theta)\,d\theta

    with Z_l from the Gaussian. Without Z_l, laws would be weighted by how well they fit T. So few
    draws of a matrix cannot estimate this: only one or two would count.

    ``noise`` is V plus the simulation's error, and ``found`` are the moments of T at the centre.

    Attributes:
        centre: a θ near the mode, ``[D]``.
        modes, precisions: of the Gaussians that together approximate the posterior, ``[L, d]`` and
            ``[L, d, d]``.
        simulation_error: the largest error, in posterior standard deviations.
        far: number of rows of the last call for which no simulated records were near enough.
        is_bent: whether the θ that give the same records lie on a curve, so that no Gaussian
            approximates the posterior.
    """

    num_simulated, simulation_error, far, is_bent = 0, 0.0, 0, False

    def __init__(
        self,
        fit: Fit,
        read: Tensor,
        num_data: int,
        released: Tensor,
        noise: Tensor,
        found: Moments,
        laws: LawDifferences,
    ) -> None:
        self.centre, self._read, self._n = fit.centre, read, num_data
        self._released, self._noise, self._laws, n = released, noise, laws, num_data
        root = torch.linalg.cholesky(n * found.covariance + noise)
        slopes = torch.linalg.solve_triangular(
            root, n * (found.jacobian + laws.jacobians), upper=False
        )
        apart = released - n * (found.mean + laws.means)
        white = torch.linalg.solve_triangular(root, apart.T, upper=False).T
        gradients = torch.einsum("lqd,lq->ld", slopes, white) + fit.slope
        self.precisions = fit.prior_precision + slopes.mT @ slopes
        factors = torch.linalg.cholesky(self.precisions)
        steps = torch.cholesky_solve(gradients[:, :, None], factors)[:, :, 0]
        shortened = min(1.0, LONGEST_MOVE / max(fit.last_step, 1e-300))
        self.modes = fit.centre[read] + shortened * steps
        self._log_evidence = (
            ((gradients * steps).sum(1) - white.square().sum(1)) / 2
            - factors.diagonal(dim1=1, dim2=2).log().sum(1)
            + math.log(len(steps))
        )
        self._white = white, slopes

    @abstractmethod
    def __call__(self, theta: Tensor) -> Tensor:
        """The log-likelihood of every row, ``[m]``."""

    def gaussian(self, theta: Tensor) -> Tensor:
        """The log-likelihood of every row with m linear and S constant, ``[m]``; differentiable."""
        white, slopes = self._white
        moved = torch.einsum("lqd,md->mlq", slopes, self._moved(theta))
        return ((white - moved).square().sum(2) / -2 - self._log_evidence).logsumexp(1)

    def covariance(self) -> Tensor:
        """An approximate covariance of the posterior, ``[d, d]``."""
        within = torch.cholesky_inverse(torch.linalg.cholesky(self.precisions)).mean(0)
        apart = self.modes - self.modes.mean(0)
        return within + apart.T @ apart / len(apart)

    def _moved(self, theta: Tensor) -> Tensor:
        return theta[:, self._read] - self.centre[self._read]

    def _of_rows(self, theta: Tensor, moments_of: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The log-likelihood of every row with m and S of ``moments_of``, and what else it returns
        for a row. Few covariances are in memory at a time.
        """
        rows, found = max(_NUMBERS // len(self._released) ** 2, 1), []
        for some in theta.split(rows):
            means, covariances, *others = moments_of(some)
            found.append((self._with_moments(some, means, covariances), *others))
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def _with_moments(self, theta: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
        """The log-likelihood of every row with its own m ``[m, q]`` and S ``[m, q, q]``."""
        n = self._n
        factors, failed = torch.linalg.cholesky_ex(n * covariances + self._noise)
        moved = torch.einsum("lqd,md->mql", self._laws.jacobians, self._moved(theta))
        apart = self._released[:, None] - n * (means[:, :, None] + self._laws.means.T + moved)
        white = torch.linalg.solve_triangular(factors, apart, upper=False)
        values = (white.square().sum(1) / -2 - self._log_evidence).logsumexp(1)
        values = values - factors.diagonal(dim1=1, dim2=2).log().sum(1)
        return torch.where((failed == 0) & values.isfinite(), values, -math.inf)


class SyntheticLikelihood(Likelihood):
    r"""The synthetic likelihood, with moments from records that are simulated near and far from the
    mode.

    Near the mode m is linear, Σ is constant and T | θ is Gaussian, so the d numbers
    :math:`J^\top\Sigma^{-1}T` are sufficient for θ. The likelihood is that of these numbers. Here Σ
    includes the covariance of nm between laws of the covariates: a release far from the mode tells
    little if its mean depends on the law. It is estimated from the first half of ``laws``; the
    mixture is over the others, because the numbers hide how the first ones differ. Mean
    and covariance away from the centre come from ``few`` of the records,

    .. math::
        m(\theta) = m + J(\theta - \theta_c) + \big[m_s(\theta) - m_s - J_s(\theta - \theta_c)\big]

    with m and J from all records; S(θ) likewise, by the factor of S over that of S_s. If the
    effective size of the few is below a tenth of their number, records are simulated again around
    that θ. The mean at the centre uses at most ``most_batches`` batches of records. If the θ that
    give the same records lie on a curve, θ − θ_c may be large without any effect: then
    :class:`Moves` replaces it.
    """

    def __init__(
        self,
        simulator: Simulator,
        releases: Sequence[Release],
        fit: Fit,
        laws: LawDifferences,
        *,
        few: int,
        most_batches: int,
    ) -> None:
        self._simulator, self._releases = simulator, list(releases)
        self._few, n = _enough(fit.simulated.scores, few), simulator.num_data
        half = len(laws.means) // 2
        between = _shrunk(n * laws.means[:half], fit.covariance)
        _, pulled = posterior_precision(
            fit.moments, fit.covariance + between, fit.prior_precision, n
        )
        # in units of the posterior, without directions in which the releases have no information:
        # the statistic's covariance is the identity at the centre
        white = torch.linalg.solve_triangular(
            torch.linalg.cholesky(fit.precision), pulled.T, upper=False
        )
        shares, vectors = torch.linalg.eigh(white @ fit.covariance @ white.T)
        kept = shares >= min(max(_LEAST_SHARE, float(shares[-1]) * _LEAST_SHARE), float(shares[-1]))
        onto = (vectors[:, kept] * shares[kept].clamp_min(1e-300).rsqrt()).T @ white
        self._projection = onto
        found = fit.moments.projected(onto)
        mean, self.num_simulated = self._refined(fit, found, most_batches)
        found = found._replace(mean=mean)
        error = n**2 / self.num_simulated * found.residual
        variances = noise_variances(releases)
        noise = onto @ (variances[:, None] * onto.T) + error
        released = onto @ torch.cat([r.value for r in releases])
        laws = LawDifferences(laws.means[half:] @ onto.T, onto @ laws.jacobians[half:])
        super().__init__(fit, simulator.records.read, n, released, noise, found, laws)
        root = torch.linalg.cholesky(self.precisions.mean(0))
        moved = torch.linalg.solve_triangular(root, n * found.jacobian.T, upper=False)
        error = moved @ error @ moved.T
        self.simulation_error = math.sqrt(max(float(torch.linalg.eigvalsh(error)[-1]), 0.0))
        near = simulator.at(fit.centre, self._few)
        self.is_bent = is_bent(near, simulator.records)
        self._moves = Moves(near) if self.is_bent else super()._moved
        self._centres = [self._around(near, found)]

    def _statistics(self, simulated: Simulated) -> Tensor:
        return self._simulator.statistics(simulated, self._releases) @ self._projection.T

    def _refined(self, fit: Fit, found: Moments, most: int) -> tuple[Tensor, int]:
        """The mean at the centre, and its number of records: enough to keep the simulation's error
        below a tenth of the posterior's deviation.
        """
        mean, n = found.mean, self._simulator.num_data
        count = size = len(fit.simulated.scores)
        wanted = float(torch.linalg.eigvalsh(found.residual)[-1]) * n**2 / LARGEST_ERROR**2
        for batch in range(1, most):
            if count >= wanted:
                break
            more = self._simulator.at(fit.centre, batch=batch)
            left = self._statistics(more) - more.scores @ found.control.T
            mean, count = (count * mean + size * left.mean(0)) / (count + size), count + size
        return mean, count

    def __call__(self, theta: Tensor) -> Tensor:
        """The log-likelihood of every row; far from all simulated records more are simulated."""
        values, worth = torch.zeros(2, len(theta), dtype=torch.float64)
        left, used = torch.arange(len(theta)), 0
        while len(left) and used <= _MOST_CENTRES:
            if used == len(self._centres):
                apart = (theta[left] - self.centre).square().sum(1)
                middle = theta[left[int(apart.argsort()[len(apart) // 2])]]
                self._centres.append(self._around(self._simulator.at(middle, self._few)))
            found, own = self._of_rows(theta[left], self._centres[used])
            used += 1
            better = own > worth[left]
            values[left[better]], worth[left[better]] = found[better], own[better]
            left = left[worth[left] < _LEAST_WORTH]
        self.far = len(left)
        return values

    def _moved(self, theta: Tensor) -> Tensor:
        return self._moves(theta)

    def _around(self, simulated: Simulated, found: Moments | None = None) -> _Around:
        own = self._statistics(simulated)
        if found is None:
            found = moments(own, simulated.scores, self._simulator.covariates.is_paired)
        return _Around(simulated, own, self._read, found, self.is_bent)


def _shrunk(draws: Tensor, unit: Tensor) -> Tensor:
    """The covariance of ``draws`` with mean 0, which may be few, shrunk towards a multiple of
    ``unit``: oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero 2010, equation 23).
    """
    if len(draws) == 0:
        return 0 * unit
    root, count, size = torch.linalg.cholesky(unit), len(draws), len(unit)
    white = torch.linalg.solve_triangular(root, draws.T, upper=False)
    found = white @ white.T / count
    level, square = found.trace() / size, found.square().sum()
    spread = (square - size * level**2).clamp_min(1e-300)
    share = (1 - 2 / size) * square + (size * level) ** 2
    share = (share / ((count + 1 - 2 / size) * spread)).nan_to_num(1.0).clamp_max(1.0)
    found = (1 - share) * found + share * level * torch.eye(size, dtype=unit.dtype)
    return root @ found @ root.T


def _enough(found: Tensor, few: int) -> int:
    """The number of records that gives moments as exact as ``few`` do for usual scores: more if few
    records, for example rare events, have most of the information.
    """
    root = torch.linalg.cholesky(ridged(found.T @ found / len(found)))
    sizes = torch.linalg.solve_triangular(root, found.T, upper=False).square().sum(0)
    share = float(sizes.sum().square() / sizes.square().sum()) / len(found)
    return min(len(found), math.ceil(few * max(1.0, _USUAL_SHARE / max(share, 1e-12))))


class _Around:
    """Moments of the projected statistics at any θ, from some records simulated at one θ, whose
    statistics are ``own``. At this θ the moments are those ``found`` from more records.
    """

    def __init__(
        self, simulated: Simulated, own: Tensor, read: Tensor, found: Moments, is_bent: bool
    ) -> None:
        self._centre, self._read, self._density = simulated.centre, read, simulated.density
        self._base = log_likelihoods(self._density, self._centre[None])
        of_some = moments(own, simulated.scores, is_paired=False)
        self._mean, self._own = found.mean, own - own.mean(0)
        self._slope = found.jacobian - of_some.jacobian
        root = torch.linalg.cholesky(ridged(found.covariance))
        of_root = torch.linalg.cholesky(ridged(of_some.covariance))
        self._stretch = torch.linalg.solve_triangular(of_root, root, upper=False, left=False)
        self._regression = _regression(simulated.scores) if is_bent else None
        self._upper = torch.triu_indices(own.shape[1], own.shape[1])
        first, second = (self._own[:, each] for each in self._upper)
        self._products = first * second

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m ``[m, d]`` and S ``[m, d, d]`` at θ ``[m, D]``, and the effective sample size as a
        share of the records, ``[m]``. m is NaN if the model cannot be evaluated.
        """
        terms = log_likelihoods(self._density, theta)
        ratios = (terms - self._base).nan_to_num(0.0, 0.0, 0.0)
        weights = torch.softmax(ratios, 1)
        worth = 1 / weights.square().sum(1) / weights.shape[1]
        moved, size = weights @ self._own, self._own.shape[1]
        second = torch.zeros(len(theta), size, size, dtype=torch.float64)
        second[:, self._upper[0], self._upper[1]] = weights @ self._products
        second = second + torch.triu(second, 1).mT
        covariances = second - moved[:, :, None] * moved[:, None, :]
        covariances = self._stretch @ covariances @ self._stretch.T
        delta = theta[:, self._read] - self._centre[self._read]
        if self._regression is not None:
            delta = ratios @ self._regression
        means = moved + self._mean + delta @ self._slope.T
        return means.where(~terms.isnan().all(1, keepdim=True), math.nan), covariances, worth


def ridged(matrix: Tensor) -> Tensor:
    """``matrix`` plus a small multiple of the identity, so that it can be inverted."""
    level = matrix.diagonal().mean().clamp_min(1e-290)
    return matrix + _RIDGE * level * torch.eye(len(matrix), dtype=matrix.dtype)
