r"""The synthetic likelihood: what private releases would have been, simulated.

With releases :math:`T_k = \sum_i c_k(x_i) + z_k \xi_k` of clipped whitened scores
:math:`c_k(x) = \mathrm{clip}_1(A_k u(x; \theta_k)/C_k)`, all of them together are

.. math::
    T \mid \theta \sim N\big(n\,m(\theta),\ n\,S(\theta) + V\big), \qquad m = E_\theta\, c(x),
    \quad S = \mathrm{Cov}_\theta\, c(x), \quad V = \mathrm{diag}(z_k^2)

by the central limit theorem (Wood 2010, "Statistical inference for noisy nonlinear ecological
dynamic systems"; Gallant and Tauchen 1996, "Which moments to match?"). Both moments come from M
records that are simulated at a centre θ_c and weighted by :math:`p(x|\theta)/p(x|\theta_c)`, one
record's ratio. As E u(x; θ_c) = 0 there, u is a control variate, and ∂m/∂θ = Cov(c, u). What the
control variate leaves, S_res, adds n²S_res/M to the covariance.

**Privacy.** Post-processing: functions of what was released and of public numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..density import InvalidPoint, RecordDensity
from .covariates import Covariates
from .latents import Latents
from .records import ModelRecords, clipped, log_likelihoods, scores

_LONGEST_STEP = 0.5  # standard deviation of a record's log ratio from one centre to the next
_CONVERGED = 0.05  # posterior standard deviations
_HALVINGS = 20
_LONGEST_MOVE = 2.0  # posterior standard deviations, from a centre to a mode
LARGEST_ERROR = 0.1  # of the simulation, in posterior standard deviations
_LEAST_WORTH = 0.1  # of the simulated records, which their weights may leave
_USUAL_SHARE = 0.1  # of records that carry the information; of normal scores it is d/(d + 2)
_MOST_CENTRES = 60  # at which records are simulated anew
_LEAST_TOLD = 1e-6  # of a posterior's precision; less is nothing
_RIDGE = 1e-10  # relative, of matrices that may be singular


class Release(NamedTuple):
    """T = Σ clip₁(Wu(x; θ)) + noise.

    Attributes:
        theta: where scores are taken, ``[D]``.
        whitening: W = A/C, ``[d, d]``.
        value: T, ``[d]``.
        noise_std: z.
    """

    theta: Tensor
    whitening: Tensor
    value: Tensor
    noise_std: float


class Simulated(NamedTuple):
    """Records simulated at a centre.

    Attributes:
        centre: θ_c, ``[D]``.
        density: of the records.
        scores: u(x; θ_c), ``[M, d]``.
    """

    centre: Tensor
    density: RecordDensity
    scores: Tensor


class Simulator:
    """Simulates records, with the same random numbers at every θ.

    Args:
        records: the model.
        covariates: what their covariates are.
        num_data: n, public.
        count: M.
        seed: of the random numbers.
    """

    def __init__(
        self, records: ModelRecords, covariates: Covariates, num_data: int, count: int, seed: int
    ) -> None:
        self.records, self.covariates = records, covariates
        self.num_data, self.count, self.seed = num_data, count, seed

    def at(self, theta: Tensor, count: int | None = None, batch: int = 0) -> Simulated:
        """Records at θ; another ``batch`` has other random numbers."""
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
            found.append(clipped(own, release.whitening))
        return torch.cat(found, 1)


class Moments(NamedTuple):
    """Of statistics c at a centre: m, J = ∂m/∂θ, S, S_res, F = Cov(u), and B of c on u."""

    mean: Tensor
    jacobian: Tensor
    covariance: Tensor
    residual: Tensor
    information: Tensor
    control: Tensor


def moments(
    statistics: Tensor, found: Tensor, is_paired: bool, use_control: bool = True
) -> Moments:
    """Moments of ``statistics`` ``[M, q]`` whose records have the scores ``found`` ``[M, d]``."""
    if is_paired:
        apart = (statistics[0::2] - statistics[1::2]) / math.sqrt(2)
        inner = (found[0::2] - found[1::2]) / math.sqrt(2)
    else:
        apart, inner = statistics - statistics.mean(0), found
    count = len(apart)
    information = inner.T @ inner / count
    jacobian = apart.T @ inner / count
    covariance = apart.T @ apart / count
    control = torch.zeros_like(jacobian)
    if use_control:
        ridge = _RIDGE * information.diagonal().mean() + 1e-300
        eye = torch.eye(len(information), dtype=torch.float64)
        control = torch.linalg.solve(information + ridge * eye, jacobian.T).T
    residual = covariance - control @ jacobian.T
    mean = statistics.mean(0) - control @ found.mean(0)
    return Moments(mean, jacobian, covariance, residual, information, control)


class Fit(NamedTuple):
    """The mode of what releases say, and the Gaussian there.

    Attributes:
        centre: θ_c, ``[D]``.
        precision: Λ of the read coordinates.
        prior_precision: P of them.
        moments: at the centre.
        covariance: nS + V + n²S_res/M of all releases, ``[K·d, K·d]``.
        step: to the mode, as far as the moments here tell.
        last_step: its length in posterior standard deviations.
        simulated: the records.
        slope: ∇ log p(θ) of the prior at the centre.
    """

    centre: Tensor
    precision: Tensor
    prior_precision: Tensor
    moments: Moments
    covariance: Tensor
    step: Tensor
    last_step: float
    simulated: Simulated
    slope: Tensor


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
    simulator: Simulator,
    releases: Sequence[Release],
    latents: Latents,
    start: Tensor,
    most_steps: int,
) -> Fit:
    r"""Gauss-Newton steps, records drawn anew at each centre.

    .. math::
        \Lambda = P + n^2 J^\top \Sigma^{-1} J, \qquad
        \mathrm{step} = \Lambda^{-1}\big(n J^\top \Sigma^{-1}(T - n m) + \nabla\log p\big)
    """
    records, n = simulator.records, simulator.num_data
    value = torch.cat([r.value for r in releases])
    variances = noise_variances(releases)
    theta, damping, before = start, 1.0, math.inf
    for number in range(most_steps + 1):
        simulated = simulator.at(theta)
        statistics = simulator.statistics(simulated, releases)
        found = moments(statistics, simulated.scores, simulator.covariates.is_paired)
        covariance = n * found.covariance + n**2 / len(simulated.scores) * found.residual
        covariance = covariance + torch.diag(variances)
        slope, prior_precision = latents.slope_and_precision(theta)
        precision, pulled = posterior_precision(found, covariance, prior_precision, n)
        gradient = pulled.T @ (value - n * found.mean) + slope
        step = torch.linalg.solve(precision, gradient)
        length = math.sqrt(max(float(step @ precision @ step), 0.0))
        if length < _CONVERGED or number == most_steps:
            break
        if length > before:
            damping = max(damping / 2, 1 / 8)
        before = length
        ratio = math.sqrt(max(float(step @ found.information @ step), 0.0))
        scale = damping * min(1.0, _LONGEST_STEP / max(ratio, 1e-300))
        theta = _valid(records, theta, scale * step)
    fields = (theta, precision, prior_precision, found, covariance, step, length, simulated, slope)
    return Fit(*fields)


class LawDifferences(NamedTuple):
    """What m and J are under laws of the covariates, less what they are under the mean law.

    Attributes:
        means: ``[L, K·d]``.
        jacobians: ``[L, K·d, d]``.
    """

    means: Tensor
    jacobians: Tensor


def law_differences(
    centre: Tensor, simulators: Sequence[Simulator], releases: Sequence[Release]
) -> LawDifferences | None:
    """At a centre, with the same random numbers under each law; the first of ``simulators`` has the
    mean law. None if that is the only one.
    """
    found = []
    for simulator in simulators if len(simulators) > 1 else ():
        simulated = simulator.at(centre)
        statistics = simulator.statistics(simulated, releases)
        found.append(moments(statistics, simulated.scores, False))
    if not found:
        return None
    middle = found[0]
    return LawDifferences(
        torch.stack([each.mean - middle.mean for each in found[1:]]),
        torch.stack([each.jacobian - middle.jacobian for each in found[1:]]),
    )


def with_laws(
    fit: Fit, laws: LawDifferences | None, theta_covariance: Tensor, num_data: int
) -> Fit:
    r"""The fit with what T varies by because the law l is not known and θ varies by C:

    .. math::
        \frac{n^2}{L}\sum_l (m_l - m)(m_l - m)^\top + (J_l - J)\,C\,(J_l - J)^\top
    """
    if laws is None:
        return fit
    share = num_data**2 * (1 + 1 / len(laws.means)) / len(laws.means)  # m is of as many draws, too
    root = laws.jacobians @ torch.linalg.cholesky(theta_covariance)
    added = laws.means.T @ laws.means + torch.einsum("lqd,lrd->qr", root, root)
    covariance = fit.covariance + share * added
    precision, _ = posterior_precision(fit.moments, covariance, fit.prior_precision, num_data)
    return fit._replace(covariance=covariance, precision=precision)


def _valid(records: ModelRecords, theta: Tensor, step: Tensor) -> Tensor:
    """θ + step, or half of the step and so on, where the model can be evaluated."""
    prior = records.density.prior
    for _ in range(_HALVINGS):
        moved = records.with_read(theta, theta[records.read] + step)
        if records.density.has_gradients(moved.to(prior.device, prior.dtype)):
            return moved
        step = step / 2
    return theta


class Likelihood(Protocol):
    """Of what was released, up to a constant, for rows of θ ``[m, D]``."""

    centre: Tensor
    """Near the mode, ``[D]``."""
    modes: Tensor
    """Of the Gaussians ``[L, d]`` that are the posterior together, about."""
    precisions: Tensor
    """Of these, ``[L, d, d]``."""
    num_simulated: int
    simulation_error: float
    """In posterior standard deviations, at most."""

    def gaussian(self, theta: Tensor) -> Tensor:
        """With means linear and covariances constant, ``[m]``; differentiable."""

    def __call__(self, theta: Tensor) -> Tensor:
        """``[m]``; differentiable."""

    def with_new_centres(self, theta: Tensor) -> tuple[Tensor, int]:
        """The same far away, too, and for how many rows it is unsure."""


class SyntheticLikelihood(Likelihood):
    r"""log p(T | θ), up to a constant, near and far from the mode.

    Near the mode all that T says of θ is in the d numbers :math:`J^\top\Sigma^{-1}T`: m is linear
    there and Σ constant, and T | θ is Gaussian. These are what the likelihood is of. Its mean and
    covariance away from the centre come from ``few`` of the records,

    .. math::
        m(\theta) = m + J(\theta - \theta_c) + \big[m_s(\theta) - m_s - J_s(\theta - \theta_c)\big]

    with m and J from all of them; S(θ) likewise by S's factor over S_s's. Where the weights of the
    few are worth less than a tenth of them, records are simulated anew around that θ.

    Under a law l of the covariates m(θ) is larger by m_l − m + (J_l − J)(θ − θ_c). Posteriors under
    the laws are averaged: the likelihood is that of a mixture,

    .. math::
        \frac 1 L\sum_l p(T|\theta, l)/Z_l, \qquad Z_l = \int p(T|\theta, l)\,p(\theta)\,d\theta

    with Z_l of the Gaussian. Without it laws would count by how well they suit T, of which so few
    draws of a matrix tell nothing: one or two would count alone.

    Args:
        simulator: of the records.
        releases: T.
        fit: at the mode.
        laws: what differs under each law of the covariates; None where it is known.
        few: how many records weights are computed of.
        most_batches: of further records for the mean at the centre.
    """

    def __init__(
        self,
        simulator: Simulator,
        releases: Sequence[Release],
        fit: Fit,
        laws: LawDifferences | None = None,
        *,
        few: int,
        most_batches: int,
    ) -> None:
        self._simulator, self._releases = simulator, list(releases)
        self._few = few = _enough(fit.simulated.scores, few)
        n, found = simulator.num_data, fit.moments
        value = torch.cat([r.value for r in releases])
        variances = noise_variances(releases)
        _, pulled = posterior_precision(found, fit.covariance, fit.prior_precision, n)
        # in units of the posterior, without directions that the releases say nothing of, so that
        # the statistic's covariance is the identity at the centre
        root = torch.linalg.cholesky(fit.precision)
        white = torch.linalg.solve_triangular(root, pulled.T, upper=False)
        told, vectors = torch.linalg.eigh(white @ fit.covariance @ white.T)
        kept = told > max(_LEAST_TOLD, float(told[-1]) * _LEAST_TOLD)
        if not bool(kept.any()):
            kept[-1] = True
        self._projection = (vectors[:, kept] * told[kept].clamp_min(1e-300).rsqrt()).T @ white
        mean, residual, count = self._refined(fit, root, most_batches)
        self.noise = self._projection @ (variances[:, None] * self._projection.T)
        self.noise = self.noise + n**2 / count * residual
        self._released = self._projection @ value
        self.num_simulated = count
        error = n**2 / count * residual * told[kept].outer(told[kept]).sqrt()
        self.simulation_error = math.sqrt(max(float(torch.linalg.eigvalsh(error)[-1]), 0.0))
        jacobian = self._projection @ found.jacobian
        covariance = self._projection @ found.covariance @ self._projection.T
        read = simulator.records.read
        self.centre = fit.centre
        self._linear = mean, jacobian
        self._root = torch.linalg.cholesky(n * covariance + self.noise)
        self._settle_laws(fit, laws)
        self._near = _Around(
            simulator, self._statistics, fit.simulated, few, read, mean, jacobian, covariance
        )
        self._others: list[_Around] = []
        at_centre = self._of_many(self._near, self.centre[None])[0]
        self._offset = float(self.gaussian(self.centre[None])) - float(at_centre)

    def _settle_laws(self, fit: Fit, laws: LawDifferences | None) -> None:
        n, (mean, jacobian) = self._simulator.num_data, self._linear
        self._shifts, self._tilts = torch.zeros_like(mean)[None], torch.zeros_like(jacobian)[None]
        if laws is not None:
            self._shifts = laws.means @ self._projection.T
            self._tilts = self._projection @ laws.jacobians
        slopes = torch.linalg.solve_triangular(
            self._root, n * (jacobian + self._tilts), upper=False
        )
        apart = self._released - n * (mean + self._shifts)
        white = torch.linalg.solve_triangular(self._root, apart.T, upper=False).T
        gradients = torch.einsum("lqd,lq->ld", slopes, white) + fit.slope
        self.precisions = fit.prior_precision + slopes.mT @ slopes
        factors = torch.linalg.cholesky(self.precisions)
        steps = torch.cholesky_solve(gradients[:, :, None], factors)[:, :, 0]
        shortened = min(1.0, _LONGEST_MOVE / max(fit.last_step, 1e-300))
        self.modes = fit.centre[self._simulator.records.read] + shortened * steps
        self._log_evidence = (
            ((gradients * steps).sum(1) - white.square().sum(1)) / 2
            - factors.diagonal(dim1=1, dim2=2).log().sum(1)
            + math.log(len(steps))
        )
        self._white = white, slopes

    def covariance(self) -> Tensor:
        """Of the posterior, about, ``[d, d]``."""
        within = torch.cholesky_inverse(torch.linalg.cholesky(self.precisions)).mean(0)
        apart = self.modes - self.modes.mean(0)
        return within + apart.T @ apart / len(apart)

    def _statistics(self, simulated: Simulated) -> Tensor:
        return self._simulator.statistics(simulated, self._releases) @ self._projection.T

    def _refined(self, fit: Fit, root: Tensor, most: int) -> tuple[Tensor, Tensor, int]:
        """The mean at the centre, projected, of as many records as keep the simulation's error
        below a tenth of the posterior's deviation; S_res, projected; how many.
        """
        n, found = self._simulator.num_data, fit.moments
        mean = self._projection @ found.mean
        residual = self._projection @ found.residual @ self._projection.T
        count = size = len(fit.simulated.scores)
        wanted = float(torch.linalg.eigvalsh(residual)[-1]) * n**2 / LARGEST_ERROR**2  # at most
        control = self._projection @ found.control
        for batch in range(1, most):
            if count >= wanted:
                break
            more = self._simulator.at(fit.centre, batch=batch)
            left = self._statistics(more) - more.scores @ control.T
            mean, count = (count * mean + size * left.mean(0)) / (count + size), count + size
        return mean, residual, count

    def gaussian(self, theta: Tensor) -> Tensor:
        """With m linear and S constant, of every row, ``[m]`` for ``[m, D]``; differentiable."""
        read = self._simulator.records.read
        white, slopes = self._white
        moved = torch.einsum("lqd,md->mlq", slopes, theta[:, read] - self.centre[read])
        return ((white - moved).square().sum(2) / -2 - self._log_evidence).logsumexp(1)

    def __call__(self, theta: Tensor) -> Tensor:
        """Of every row, ``[m]`` for ``[m, D]``, from the records at the mode; differentiable. At
        the mode it is what :meth:`gaussian` is there.
        """
        return self._of_many(self._near, theta)[0] + self._offset

    def with_new_centres(self, theta: Tensor) -> tuple[Tensor, int]:
        """The same, and of how many rows no simulated records are near enough. Records are
        simulated anew where those at the mode are worth too little.
        """
        values = torch.empty(len(theta), dtype=torch.float64)
        worth = torch.zeros(len(theta), dtype=torch.float64)
        left = torch.arange(len(theta))
        centres = [self._near, *self._others]
        while len(left):
            around = centres.pop(0) if centres else None
            if around is None:
                if len(self._others) >= _MOST_CENTRES:
                    break
                apart = (theta[left] - self._near.centre).square().sum(1)
                around = self._new(theta[left[int(apart.argsort()[len(apart) // 2])]])
                self._others.append(around)
            found, own = self._of_many(around, theta[left])
            better = own > worth[left]
            values[left[better]], worth[left[better]] = found[better], own[better]
            left = left[worth[left] < _LEAST_WORTH]
        return values + self._offset, len(left)

    def _new(self, theta: Tensor) -> _Around:
        found = self._simulator.at(theta, self._few)
        statistics = self._statistics(found)
        own = moments(statistics, found.scores, self._simulator.covariates.is_paired)
        return _Around(
            self._simulator,
            self._statistics,
            found,
            self._few,
            self._simulator.records.read,
            own.mean,
            own.jacobian,
            own.covariance,
        )

    def _of_many(self, around: _Around, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihoods ``[m]``, and what part of the records the weights are worth."""
        means, covariances, worth = around(theta)
        n, read = self._simulator.num_data, self._simulator.records.read
        factors, failed = torch.linalg.cholesky_ex(n * covariances + self.noise)
        moved = torch.einsum("lqd,md->mql", self._tilts, theta[:, read] - self.centre[read])
        apart = self._released[:, None] - n * (means[:, :, None] + self._shifts.T + moved)
        white = torch.linalg.solve_triangular(factors, apart, upper=False)
        values = (white.square().sum(1) / -2 - self._log_evidence).logsumexp(1)
        values = values - factors.diagonal(dim1=1, dim2=2).log().sum(1)
        return torch.where((failed == 0) & values.isfinite(), values, -math.inf), worth


def _enough(found: Tensor, few: int) -> int:
    """How many records tell moments as well as ``few`` do of usual scores: more where few of them
    carry most of the information, as rare events do.
    """
    root = torch.linalg.cholesky(_ridged(found.T @ found / len(found)))
    sizes = torch.linalg.solve_triangular(root, found.T, upper=False).square().sum(0)
    share = float(sizes.sum().square() / sizes.square().sum()) / len(found)
    return min(len(found), math.ceil(few * max(1.0, _USUAL_SHARE / max(share, 1e-12))))


class _Around:
    """Moments of the projected statistics at any θ, from records that were simulated at one."""

    def __init__(
        self,
        simulator: Simulator,
        statistics: Any,
        simulated: Simulated,
        few: int,
        read: Tensor,
        mean: Tensor,
        jacobian: Tensor,
        covariance: Tensor,
    ) -> None:
        self.centre, self._read = simulated.centre, read
        density, own = simulated.density, simulated.scores
        if len(own) > few:
            dims = density.row_dims.values()
            rows = [row.narrow(dim, 0, few) for row, dim in zip(density.rows(), dims, strict=True)]
            density, own = density.with_rows(rows), own[:few]
        some = Simulated(simulated.centre, density, own)
        self._density, self._records = density, simulator.records
        self._own = statistics(some)
        self._base = log_likelihoods(density, self.centre)
        of_some = moments(self._own, own, is_paired=False, use_control=False)
        self._mean = mean - of_some.mean
        self._slope = jacobian - of_some.jacobian
        root = torch.linalg.cholesky(_ridged(covariance))
        of_root = torch.linalg.cholesky(_ridged(of_some.covariance))
        self._stretch = torch.linalg.solve_triangular(of_root, root, upper=False, left=False)
        size = self._own.shape[1]
        self._upper = torch.triu_indices(size, size)
        self._products = self._own[:, self._upper[0]] * self._own[:, self._upper[1]]

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m ``[m, d]`` and S ``[m, d, d]`` at θ ``[m, D]``, and what part of the records the
        weights are worth, ``[m]``. Not a number where the model cannot be evaluated.
        """
        terms = torch.stack([_terms(each, self._density, self._records) for each in theta])
        ratios = (terms - self._base).nan_to_num(0.0, 0.0, 0.0)
        invalid = terms.detach().isnan().all(1)
        weights = torch.softmax(ratios, 1)
        worth = 1 / weights.detach().square().sum(1) / weights.shape[1]
        means = weights @ self._own
        flat = weights @ self._products
        size = self._own.shape[1]
        second = flat.new_zeros(len(theta), size, size)
        second[:, self._upper[0], self._upper[1]] = flat
        second = second + torch.triu(second, 1).mT
        covariances = second - means[:, :, None] * means[:, None, :]
        covariances = self._stretch @ covariances @ self._stretch.T
        delta = theta[:, self._read] - self.centre[self._read]
        means = means + self._mean + delta @ self._slope.T
        return torch.where(invalid[:, None], math.nan, means), covariances, worth


def _ridged(matrix: Tensor) -> Tensor:
    level = matrix.diagonal().mean().clamp_min(1e-300)
    return matrix + _RIDGE * level * torch.eye(len(matrix), dtype=matrix.dtype)


def _terms(theta: Tensor, density: RecordDensity, records: ModelRecords) -> Tensor:
    """log p(x; θ) of every record, differentiable."""
    if not theta.requires_grad:
        try:
            return log_likelihoods(density, theta)
        except InvalidPoint:
            return theta.new_full((density.num_records,), math.nan)
    result: Tensor = _Terms.apply(theta, density, records)
    return result


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, density: RecordDensity, records: ModelRecords) -> Tensor:
        point = theta.detach()
        own = torch.zeros(density.num_records, len(theta), dtype=torch.float64)
        try:
            own[:, records.read] = scores(records, density, point)
            values = log_likelihoods(density, point)
        except InvalidPoint:
            values = point.new_full((density.num_records,), math.nan)
        ctx.save_for_backward(own)
        return values

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors
        return outer[0] @ own, None, None
