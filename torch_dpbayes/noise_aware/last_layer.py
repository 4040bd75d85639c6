r"""The posterior of a last layer of classes with thousands of parameters, by Hamiltonian chains.

For features x, which include a constant 1, and weights W ``[K, d]``, a label t = e_y has the mean μ
= softmax(Wx), and a record's score is :math:`(t - \mu) x^\top`. With a matrix A for the features
and one clip bound C_j for all outputs of a record, a run releases the law of the features and, at
points W_j,

.. math:: T_j = \sum_i c_j(x_i, t_i) + z_j \Xi_j, \qquad c_j(x, t) = s_j (t - \mu_j)(Ax)^\top,
          \quad s_j = \min\Big(\frac{1}{C_j}, \frac{1}{\|t - \mu_j\| \|Ax\|}\Big)

Given W, all T_j together are N(n m(W), n S + V). The moments are simulated as in
:mod:`~torch_dpbayes.noise_aware.likelihood`, but the mean over labels is exact,

.. math:: m_j(W) = \frac1M \sum_x q_j(x) (Ax)^\top, \qquad
          q_j = E[s_j (t - \mu_j) | x, W] = \mu \circ s_j - \langle \mu, s_j \rangle \mu_j,

over M fixed draws of features from their released law. So m is a smooth function of W. Its value
and gradient are products of a matrix of features and a matrix with K columns for each release. The
posterior is wide and not Gaussian. Hamiltonian chains without acceptance sample it:

.. math:: -\log p(W \mid T) = \tfrac12 R^\top (nS + V)^{-1} R + \frac{\|W\|^2}{2 s_0^2} + \dots,
          \qquad R = T - n\,m(W)

nS + V is block diagonal: one block of all releases for each element v_a u_bᵀ of the basis with
eigenvectors v of :math:`E\,\mathrm{Cov}(t | x)` and u of features (Kronecker factors;
Martens and Grosse 2015, arXiv:1503.05671). It is constant, a mean over states of the warm-up:

* simulated features have the second moments G of their law, which determine the part :math:`B_j x`
  of q that is linear in x. This is exact except for the effect of shortening features to the bound,
  which counts as uncertainty. S is the covariance of the rest;
* the simulation's error is n²/M times the covariance of this rest's mean over targets;
* G is known up to the noise of its release. Draws of G given the release vary by ΔG, and n m by
  :math:`n B_j \, \Delta G \, A`. In hundreds of dimensions no draw is near the truth, so chains
  under each draw would miss it. Instead this variance is added to V.

Modes, and the check of the releases, use the full covariance. The entries of ΔG are independent
except for symmetry, with the variances of draws. By the mean of B over the states, ΔG correlates
the releases of all classes and columns, so differences between releases have information on ΔG. The
variance of B is added to V. Conjugate gradients solve for R, with the blocks of the same class and
column as preconditioner. Chains ignore these correlations: if G is known badly, errors of its law
would count as information on W.

**Privacy.** Only ``noisy_moments`` and ``_private_sums`` read private rows. Their results get noise
where they are called.
"""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import positive_count
from ..density import UnfitModel
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_clip_bound
from .checks import note_clipped, note_draws, note_releases
from .covariance import normal_numbers, quick_gram_draws
from .covariates import FeatureShape, in_units, law_draws, noisy_moments, shortened_draws
from .drawing import Draws
from .hamiltonian import mixing
from .likelihood import Release, ridged
from .models import LastLayer
from .records import shorten
from .result import NoiseAwarePosterior
from .run import (
    QUANTILES,
    Transcript,
    budget_of,
    largest_bound,
    plan_run,
    public_num_data,
    require_near,
    statement_of_charge,
    statement_of_releases,
)

# parameters: with more, chains of the general engine do not mix, and take ten times as long
SMALLEST = 50
OF_OTHER_MODELS = frozenset(("public", "covariates", "constant_columns", "max_grad_norm"))
_NUM_RELEASES = 5
_SIMULATED, _PER_FEATURE = 6000, 8  # rows of features; least number of rows per column
_CHAINS, _KEPT = 6, 60  # chains, and states kept of each
_WEIGHTS_KEPT = 800_000  # largest number of weights times states kept
_LAWS = 16  # draws of the features' law given its release
_SETTLINGS, _EACH = 3, 2  # computations of S in the warm-up, and trajectories after each
_LARGEST = 80_000  # weights: more take longer than three minutes
_WIDEST = 2000  # columns of features: the time to draw laws grows with the cube
_LENGTH = 5.0  # of the longest trajectory, in deviations of the posterior
_STEP, _SHORTEST = 0.6, 0.05  # step sizes in the same unit; leapfrog steps are stable below 2
_SETTLED = 4  # points for the average of S in a run
_MODE_STEPS, _ROUNDS = 15, 2  # steps to a mode in a run; how often S is computed again there
_CHECKED_STEPS = 40  # steps to the mode for the check of the releases
_MOST_ITERATIONS, _LEFT = 50, 1e-5  # of conjugate gradients, and their stopping ratio of squares
_LONGEST = 1.0  # largest root mean square change of a logit in a step to the mode
_ROWS = 4096  # private rows at a time
_JUDGED = 200  # weights in the basis for the effective sample size and R-hat


def posterior_of_large_layer(
    layer: LastLayer,
    features: Tensor,
    targets: Tensor,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
    max_feature_norm: float = 1.0,
    num_releases: int = _NUM_RELEASES,
    num_simulated: int | None = None,
) -> NoiseAwarePosterior:
    """:func:`.posterior_for_module` for a layer with many parameters.

    Raises: as for :func:`.posterior`.

    **Privacy.** Charges before the first release, as :func:`.posterior` does. A record's clipped
    score has a norm of at most 1. Features that are not finite count as zeros. A target that is not
    finite, or not a class, has a score of 0. Nothing else depends on records.
    """
    (classes, width), prior_std = layer.linear.weight.shape, layer.prior_std
    if classes * width > _LARGEST or width > _WIDEST:
        raise UnfitModel(
            f"the layer has {classes * width} weights for {width} features, but at most {_LARGEST}"
            f" for {_WIDEST} are supported: use a public projection, or a sampler of dpb.optim."
        )
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() != 1:
        raise ArgumentTypeError("targets must be a tensor of integers, [n].")
    if len(targets) != len(features):
        raise ArgumentError("inputs and targets must have equally many records.")
    bound = check_clip_bound("max_feature_norm", max_feature_norm, "of rows of features")
    require_near(layer.prior_std * bound, bound)
    simulated = _SIMULATED if num_simulated is None else num_simulated
    count = max(positive_count(simulated, "num_simulated"), _PER_FEATURE * width)
    held = budget_of(accountant, epsilon, delta)
    n = public_num_data(num_data, len(features), held)
    plan = plan_run(
        held,
        epsilon,
        delta,
        dimension=width,
        num_data=n,
        num_releases=num_releases,
        has_numbers=True,
        num_ones=0,
    )

    held.compose(plan.event, label="noise_aware.posterior")
    shape = FeatureShape(bound, {}, (width,))
    rows = shape.shortened(features.detach().cpu().double())
    seed = int(torch.randint(2**40, ()))
    size = width + (layer.linear.bias is not None)
    ridge = (n + plan.total**2 * classes * size) / (n * prior_std) ** 2
    own, own_ridge = in_units(rows, shape), classes * ridge / bound**2
    moments = noisy_moments(own, plan.moments, n, seed, own_ridge, quick_gram_draws)
    # the first law is the mean of the others
    (mean, covariance), *drawn = law_draws(moments, n, _LAWS, seed, quick_gram_draws)
    # a constant 1 for the bias
    constant = (0, 0 if layer.linear.bias is None else 1)
    drawn_rows = pad(bound * shortened_draws(mean, covariance, count), constant, value=1.0).float()
    gram = (drawn_rows.T @ drawn_rows / count).double()
    values, basis = torch.linalg.eigh(gram)
    # deviations from the mean of few draws are too small
    unsure = math.sqrt(_LAWS / (_LAWS - 1))
    means, covariances = (torch.stack(found) for found in zip(*drawn, strict=True))
    means = pad(bound * means, constant, value=1.0)
    products = means[:, :, None] * means[:, None] + pad(bound**2 * covariances, 2 * constant)
    apart = unsure * (basis.T @ (products - gram) @ basis)
    white = (values.clamp_min(0.0) / classes + ridge).rsqrt()
    private = pad(rows, constant, value=1.0) @ basis, targets.detach().cpu().long()
    law = _Law(drawn_rows @ basis.float(), white, apart, n, classes, prior_std)
    point = torch.zeros(classes, len(values), dtype=torch.float64)
    clipped = 0
    for z in plan.scores:
        whitening = white / law.clip_bound(point, plan.together)
        exact, clipped = _private_sums(*private, point, whitening)
        noisy = exact + z * normal_numbers(exact.numel()).reshape(exact.shape)
        law.add(Release(point, whitening, noisy, z))
        for _ in range(_ROUNDS):
            law.settle(law.near(point, _SETTLED))
            point = law.mode(point, _MODE_STEPS)
    count_of_clipped = clipped + plan.clipped * float(normal_numbers(1)), plan.clipped
    kept = min(_KEPT, _WEIGHTS_KEPT // point.numel())
    states = _chains(law, point, _CHAINS, kept)
    p_value, (effective, r_hat) = law.p_value(states.mean((0, 1))), mixing(law.standard(states))
    weights = states.flatten(0, 1).double() @ basis.T
    parts = {"weight": weights[..., :width], "bias": weights[..., -1]}
    dtype = layer.linear.weight.dtype
    named = {own: parts[part].to(dtype) for part, own in layer.names.items()}
    theta = torch.cat([named[name].flatten(1) for name in sorted(named)], 1).double()
    equal = torch.full((len(theta),), 1 / len(theta), dtype=torch.float64)
    method = f"{_CHAINS} Hamiltonian chains of {kept} states"
    draws = Draws(theta, equal, 0.0, effective, r_hat, method)
    released = statement_of_releases(num_releases, bound, {})
    statement = [
        f"Noise-aware posterior of a last layer from {num_releases} releases of clipped scores",
        *statement_of_charge(held, released),
        *note_releases([p_value]),
        f"  width       weights vary by {float(weights.std(0).mean()) / prior_std:.3f} of their"
        " prior deviation, on average",
        *note_clipped(count_of_clipped, n),
        *note_draws(
            draws, "chains of a large layer are short. Use fewer features if single weights matter."
        ),
        f"  simulated   {count} rows of features; the width includes their error",
    ]
    transcript = Transcript(moments, None, tuple(law.releases), count_of_clipped)
    return NoiseAwarePosterior(draws, named, statement, transcript, shape=shape)


def _private_sums(
    rows: Tensor, labels: Tensor, point: Tensor, whitening: Tensor
) -> tuple[Tensor, int]:
    """Σ c ``[K, d]`` of private records, and the number of clipped ones. Without noise."""
    total, clipped = torch.zeros_like(point), 0
    for x, y in zip(rows.split(_ROWS), labels.split(_ROWS), strict=True):
        is_class = (y >= 0) & (y < len(point))
        residual = one_hot(torch.where(is_class, y, 0), len(point)) - (x @ point.T).softmax(1)
        residual, white = residual * is_class[:, None], x * whitening
        norms = residual.norm(dim=1) * white.norm(dim=1)
        total += (residual * shorten(norms.square(), 1.0)[:, None]).T @ white
        clipped += int((norms > 1).sum())
    return total, clipped


class _Law:
    """A posterior density, from rows ``[M, d]`` of features drawn from one law, in the basis of
    eigenvectors. Stored tensors have features along the last dimension. ``apart``: draws of the
    second moments given the release, minus those of the rows, ``[L, d, d]``.
    """

    def __init__(
        self,
        rows: Tensor,
        white: Tensor,
        apart: Tensor,
        num_data: int,
        classes: int,
        prior_std: float,
    ) -> None:
        self._unknown = apart.square().mean(0).float()
        # for an entry and its mirror image; on the diagonal both are the same entry
        self._spread = self._unknown - torch.diag(self._unknown.diagonal() / 2)
        self._deviations = torch.full((classes, rows.shape[1]), prior_std)
        self._basis = torch.eye(classes)
        self._x = rows.T.contiguous()
        self._white = self._x * white.float()[:, None]
        self._squares, self._both = self._white.square().T, (self._white * self._x).T
        self._lengths, self._uniform = self._white.norm(dim=0), torch.rand(len(rows))
        self._own = self._x.new_empty(0, classes, len(rows))  # μ_j at the points of releases
        self._shrunk, self._bounds = self._own, self._x.new_empty(0, 1)  # s_j of all labels; C_j
        self._root = torch.linalg.cholesky(ridged((rows.T @ rows / len(rows)).double()))
        self._count, self._n = len(rows), num_data
        self._scale, self._precision = white, prior_std**-2
        self.releases: list[Release] = []

    def add(self, release: Release) -> None:
        bound = float(self._scale[0] / release.whitening[0])
        means = self._expected(release.theta.float())
        norms = (means.square().sum(0) - 2 * means + 1).clamp_min(0.0).sqrt() * self._lengths
        self._own = torch.cat([self._own, means[None]])
        self._shrunk = torch.cat([self._shrunk, 1 / norms.clamp_min(bound)[None]])
        self._bounds = torch.cat([self._bounds, self._bounds.new_full((1, 1), bound)])
        self.releases.append(release)
        self._values = torch.stack([r.value for r in self.releases]).float()

    def clip_bound(self, point: Tensor, total: float) -> float:
        """The largest of a few quantiles of simulated norms at which the geometric mean of the
        posterior variances, given the noise of all releases, is at most a tenth above the least.
        """
        means = self._expected(point.float())
        residual = self._drawn(means) - means
        norms = residual.norm(dim=0) * self._lengths
        residual = _basis(means[None]).T @ residual
        levels = {}
        for bound in torch.quantile(norms, norms.new_tensor(QUANTILES)).tolist():
            scale = 1 / norms.clamp_min(bound)
            variance = (residual * scale).square() @ self._squares / self._count
            slope = (residual.square() * scale) @ self._both / self._count
            information = (self._n * slope) ** 2 / (self._n * variance + total**2)
            levels[bound] = -float((self._precision + information).log().mean())
        return largest_bound(levels)

    def settle(self, points: Tensor) -> None:
        """Compute the covariance of R at points ``[C, K, d]``, and the posterior's scales."""
        number, n = len(self.releases), self._n
        each = self._expected(points.float())
        self._basis = _basis(each)
        shape = (*points.shape[1:], number)
        covariance, slopes = self._x.new_zeros(*shape, number), self._x.new_zeros(shape)
        by_law = torch.zeros_like(covariance)
        linears = self._x.new_zeros(number, *points.shape[1:])
        for expected in each:
            given = self._drawn(expected)
            drawn = given - self._own
            norms = torch.maximum(drawn.norm(dim=1) * self._lengths, self._bounds)
            drawn = self._basis.T @ (drawn / norms[:, None])
            means = self._basis.T @ self._mean_scores(expected[None])[0]
            flat = means.flatten(0, 1)
            linear = torch.cholesky_solve((self._x @ flat.T / self._count).double(), self._root)
            linear = linear.T.float()
            rest = (flat - linear @ self._x).reshape(means.shape)
            linear = linear.reshape(*means.shape[:2], -1)
            linears += linear / len(each)
            own, apart = self._basis.T @ (given - expected), drawn - means + rest
            slopes += ((drawn * own) @ self._both).permute(1, 2, 0)
            for j in range(number):
                product = n * apart[j] * apart + n**2 / self._count * rest[j] * rest
                covariance[..., j] += (product @ self._squares).permute(1, 2, 0)
                by_law[..., j] += (linear[j] * linear @ self._unknown).permute(1, 2, 0)
        scale = 1 / (self._count * len(each))
        noise = torch.tensor([r.noise_std**2 for r in self.releases], dtype=torch.float64)
        without = scale * covariance.double() + torch.diag(noise)
        units = (n * self._scale).square()[:, None, None]
        of_mean = torch.stack([linears[j] * linears @ self._unknown for j in range(number)], -1)
        around = by_law / len(each) - of_mean.permute(1, 2, 0, 3)
        self._linears, self._noise = n * linears, (without + units * around).float()
        root = torch.linalg.cholesky(without + units * by_law / len(each))
        self._inverse, slopes = torch.cholesky_inverse(root).float(), n * scale * slopes
        information = torch.einsum("kdj,kdji,kdi->kd", slopes, self._inverse, slopes)
        precision = self._precision + information.clamp_min(0.0)
        self._deviations = precision.rsqrt()
        self._effective = float((information / precision).sum())

    def potential(self, points: Tensor, *, is_full: bool = False) -> tuple[Tensor, Tensor]:
        """−log p(W | T) ``[C]`` of points ``[C, K, d]``, and gradients; ``is_full``: for modes."""
        means = self._expected(points)
        residual = self._residual(means)
        weighted = self._solved(residual) if is_full else self._conditioned(residual)
        value = (residual * weighted).sum((1, 2, 3), dtype=torch.float64)
        value += self._precision * points.square().sum((1, 2), dtype=torch.float64)
        back = self._basis @ weighted.permute(0, 3, 1, 2)  # [C, J, K, d]
        inner = back @ self._white
        inner = (self._shrunk * (inner - (self._own * inner).sum(2, keepdim=True))).sum(1)
        inner = means * (inner - (means * inner).sum(1, keepdim=True))
        slope = inner @ self._x.T * (-self._n / self._count)
        return value / 2, slope + self._precision * points

    def near(self, point: Tensor, number: int) -> Tensor:
        """Draws of a Gaussian about a point; before the first release, of the prior."""
        at = point.float().repeat(number, 1, 1)
        return at + self.unscaled(torch.randn_like(at))

    def scaled(self, slope: Tensor) -> Tensor:
        """A gradient in units in which the posterior has deviations of about 1."""
        return self._deviations * (self._basis.T @ slope)

    def unscaled(self, step: Tensor) -> Tensor:
        """A step of W from a step in these units."""
        return self._basis @ (self._deviations * step)

    def p_value(self, point: Tensor) -> float:
        """The p-value of the residuals at the mode, near ``point``. The sum of their squares is χ².
        Its degrees of freedom are the number of released values, minus the effective number of
        parameters of W (Spiegelhalter et al. 2002, "Bayesian measures of model complexity and
        fit").
        """
        point = self.mode(point, _CHECKED_STEPS)
        square = 2 * float(self.potential(point[None].float(), is_full=True)[0])
        square -= self._precision * float(point.square().sum())
        return float(chi2.sf(square, self._values.numel() - self._effective))

    def mode(self, point: Tensor, steps: int) -> Tensor:
        """Minimise the potential by scaled steps, which are halved if it increases."""
        at, length = point[None].float(), 1.0
        value, slope = self.potential(at, is_full=True)
        for _ in range(steps):
            step = -self.unscaled(self.scaled(slope))
            added = float((step @ self._x).square().mean().sqrt())
            moved = at + min(length, _LONGEST / max(added, 1e-9)) * step
            own_value, own_slope = self.potential(moved, is_full=True)
            if float(own_value) < float(value):
                at, value, slope, length = moved, own_value, own_slope, min(1.5 * length, 1.0)
            else:
                length /= 2
        return at[0].double()

    def standard(self, states: Tensor) -> Tensor:
        """Evenly chosen weights in the basis, ``[..., m]``, for every state."""
        weights = (self._basis.T @ states).flatten(-2)
        return weights[..., :: math.ceil(weights.shape[-1] / _JUDGED)]

    def _expected(self, points: Tensor) -> Tensor:
        """μ ``[..., K, M]``."""
        return (points @ self._x).softmax(-2)

    def _drawn(self, means: Tensor) -> Tensor:
        """Draws of labels ``[K, M]``, with the same random numbers at every point."""
        labels = (means.cumsum(0) < self._uniform).sum(0).clamp_max(len(means) - 1)
        return one_hot(labels, len(means)).T.float()

    def _mean_scores(self, means: Tensor) -> Tensor:
        """q_j ``[C, J, K, M]`` if labels have the means ``[C, K, M]``."""
        kept = means[:, None] * self._shrunk
        return kept - kept.sum(2, keepdim=True) * self._own

    def _residual(self, expected: Tensor) -> Tensor:
        """R in the basis of classes, ``[C, K, d, J]``."""
        means = self._mean_scores(expected) @ self._white.T
        apart = self._values - (self._n / self._count) * means
        return (self._basis.T @ apart).permute(0, 2, 3, 1)

    def _conditioned(self, given: Tensor) -> Tensor:
        """(nS + V)⁻¹ times ``[C, K, d, J]``."""
        return torch.einsum("kdij,ckdj->ckdi", self._inverse, given)

    def _product(self, given: Tensor) -> Tensor:
        """The covariance of R times ``[C, K, d, J]``."""
        white, flat = self._scale.float(), self._linears.flatten(0, 1)
        slope = flat.T @ (white * given.permute(0, 3, 1, 2)).flatten(1, 2)
        change = self._spread * (slope + slope.mT)
        moved = (white * (self._linears @ change[:, None])).permute(0, 2, 3, 1)
        return torch.einsum("kdij,ckdj->ckdi", self._noise, given) + moved

    def _solved(self, residual: Tensor) -> Tensor:
        """The solutions for all points at once, by conjugate gradients."""

        def dot(first: Tensor, second: Tensor) -> Tensor:
            return (first * second).sum((1, 2, 3), keepdim=True)

        found, left = torch.zeros_like(residual), residual
        direction = self._conditioned(left)
        square = dot(left, direction)
        least = _LEFT * square
        for _ in range(_MOST_ITERATIONS):
            moved = self._product(direction)
            share = square / dot(direction, moved).clamp_min(1e-30)
            found, left = found + share * direction, left - share * moved
            next_direction = self._conditioned(left)
            before, square = square, dot(left, next_direction)
            if bool((square <= least).all()):
                break
            direction = next_direction + square / before.clamp_min(1e-30) * direction
        return found


def _basis(means: Tensor) -> Tensor:
    """Eigenvectors of E Cov(t | x) = E[diag(μ) − μμᵀ], over ``[C, K, M]``."""
    curvature = torch.diag(means.mean((0, 2))) - (means @ means.mT).mean(0) / means.shape[2]
    return torch.linalg.eigh(curvature)[1]


def _chains(law: _Law, mode: Tensor, number: int, kept: int) -> Tensor:
    """States ``[C, kept, K, d]``. Chains start at draws of a Gaussian about the mode. In the
    warm-up S is averaged again over their states.

    Nothing is rejected, because steps would have to shrink with the number of weights. Momenta are
    drawn in the middle of a leapfrog step: if the density is Gaussian, states have the right law
    for any stable step (Leimkuhler and Matthews 2013, "Rational construction of stochastic
    numerical methods for molecular sampling"). Lengths of trajectories are uniform, so that none is
    periodic. If the energy grows by half a unit for each weight, the step is not stable: it is
    halved, and the chain keeps its state.
    """
    at = law.near(mode, number)
    step, states = _STEP, list[Tensor]()
    for sweep in range(_SETTLINGS * _EACH + kept):
        if sweep < _SETTLINGS * _EACH and sweep % _EACH == 0:
            law.settle(at)
            value, slope = law.potential(at)
            slope, moving = law.scaled(slope), torch.randn_like(at)
        before, energy, drawn = (at, slope), value, torch.randn_like(at)
        for count in range(math.ceil(_LENGTH / step * float(torch.rand(())))):
            moving = moving - step / 2 * slope
            at = at + step / 2 * law.unscaled(moving)
            moving = moving if count else drawn
            at = at + step / 2 * law.unscaled(moving)
            value, slope = law.potential(at)
            slope = law.scaled(slope)
            moving = moving - step / 2 * slope
        kinetic = (moving.square() - drawn.square()).flatten(1).sum(1, dtype=torch.float64) / 2
        stable = value - energy + kinetic < mode.numel() / 2
        if not bool(stable.all()):
            step = max(step / 2, _SHORTEST)
        value, stays = torch.where(stable, value, energy), ~stable[:, None, None]
        at, slope = (
            torch.where(stays, old, new) for old, new in zip(before, (at, slope), strict=True)
        )
        states.append(at)
    return torch.stack(states[-kept:], 1)
