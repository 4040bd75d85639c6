r"""A noisy second-moment matrix of features: its release, for whitening features before a private
run, and draws of the exact matrix given a release.

The release is Y = G + E, with E symmetric Gaussian of standard deviation v on the diagonal and v/√2
off it; G is positive definite. If there are several, Y = AGAᵀ + E, their terms add up. The
logarithm L = log G has the rotation-invariant Gaussian prior of Leonard and Hsu (1992, "Bayesian
inference for a covariance matrix", Annals of Statistics 20), with an unknown level m and spread s,
D = d(d+1)/2:

.. math::
    -\log p(L, m, s \mid Y) = \frac{\|Y - e^L\|_F^2}{2v^2} + \frac{\|L - mI\|_F^2}{2s^2}
    + D \log s + \frac{d s^2}{4\tau_0^2} + \frac{(m + \log d)^2}{8\tau_0^2} + \text{const}

s = 0 means equal eigenvalues. The eigenvalues above the noise determine s, and s determines how
small the eigenvalues below the noise may be. A point estimate, or Y minus a draw of the noise,
would have eigenvalues of the noise's size in hidden directions: information that records do not
have. The log-eigenvalues have about a semicircle law with standard deviation s√(d/2). The prior of
this standard deviation is half normal with the scale τ₀ = log 10, a decade. The level of rows of
norm 1, the largest norm, is −log d if all eigenvalues are equal; usual norms may be a decade below.
With a flat prior of m the posterior would be improper: Y = E, without any record, has a density.

Near the eigenvectors U of Y the derivative of L ↦ e^L is diagonal, :math:`f_{ij} = (e^{l_i} -
e^{l_j})/(l_i - l_j)` (Daleckii and Krein). So entries of UᵀLU have about the variances
:math:`1/(s^{-2} + f^2 \sum_Y q_i q_j/v^2)` with :math:`q_i = \lVert AUe_i\rVert^2`, half of this
off the diagonal. Hamiltonian steps with these variances
as inverse masses move L. m and s have conditional distributions in closed form; then s and L − mI
change by a common random factor (Yu and Meng 2011, "To center or not to center").

**Privacy.** Draws are post-processing of a release.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import GaussianDpEvent
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import GaussianNoise, check_positive
from .hamiltonian import States, trajectory
from .records import short

_ROWS = 2_000
_DECADE = math.log(10.0)  # τ₀
_WARM_UP, _APART = 100, 10  # trajectories before the first draw, and between draws
_LEAPFROG_STEPS = 8
_CHAINS = 4  # a step of four takes 1.6 times as long as one of one, at ten columns
_FACTOR = 0.5  # deviation of its logarithm
_ACCEPTANCE = 0.8  # target of the step size in the warm-up (Beskos et al. 2013: .65 to .8)
_GRID = 200
# chains up to this size: quick draws overstate the information, threefold for two columns of which
# noise hides one
_FEW_COLUMNS = 50
# fit of the eigenvalues of larger matrices: steps, simulations, the steepest power law at the start
_FITTING_STEPS, _SIMULATED, _STEEPEST = 10, 4, 4.0


class NoisyCovariance(NamedTuple):
    """The release of :func:`covariance`.

    Attributes:
        matrix: ``[d, d]`` in float64, symmetric, not always positive definite.
        noise_std: standard deviation of the noise of a diagonal entry.
    """

    matrix: Tensor
    noise_std: float

    def whitening(self, floor: float = 0.3) -> Tensor:
        r"""The matrix that makes the features' variances, as the release shows them, about equal.

        .. math::
            W \propto \big(S_+ + \max(\phi \, \mathrm{tr} S / d, \; \sigma \sqrt{2d}) \,
            I\big)^{-1/2}

        :math:`\sigma\sqrt{2d}` is the operator norm of the noise. W is symmetric; its largest
        eigenvalue is 1. Multiply rows of float32 by it: ``x @ W``.

        Args:
            floor: φ, a share of the mean eigenvalue. It limits how far features with little
                variance are scaled up.

        Returns:
            ``[d, d]`` in float32.

        Raises:
            ArgumentError: ``floor`` is negative or not finite.

        **Privacy.** Post-processing of the release.
        """
        if floor != 0:
            floor = check_positive("floor", floor, "or 0")
        values, vectors = torch.linalg.eigh(self.matrix)
        size = len(values)
        added = max(floor * float(values.sum()) / size, self.noise_std * math.sqrt(2 * size))
        scales = (values.clamp_min(0.0) + added).rsqrt()
        return ((vectors * (scales / scales.max())) @ vectors.T).float()


def covariance(
    x: Tensor,
    *,
    accountant: PrivacyAccountant,
    noise_multiplier: float = 10.0,
    max_feature_norm: float = 1.0,
) -> NoisyCovariance:
    r"""Release the sum of the records' second moments, with noise.

    Gradient descent learns slowly in directions in which features vary little, and clipping and
    noise are the same for all directions. Whitening by a private covariance makes the variances
    about equal.

    .. math::
        S = \sum_i \tilde x_i^\top \tilde x_i + z R^2 E, \qquad
        \tilde x_i = x_i \min(1, R / \lVert x_i \rVert_F)

    with symmetric E, whose entries are N(0, 1) on the diagonal and N(0, 1/2) off it. ::

        accountant = dpb.PrivacyAccountant(epsilon=3, delta=1e-5)
        W = dpb.noise_aware.covariance(x, accountant=accountant).whitening()
        data = TensorDataset(x @ W, y)  # and PrivacyEngine(accountant)

    Source: Dwork et al. (2014), "Analyze Gauss", algorithm 1.

    Args:
        x: ``[n, d]``, or ``[n, positions, d]``; each whole record is scaled down. A record with a
            number that is not finite counts as zero.
        accountant: charged before the release. The run that follows should use it, too.
        noise_multiplier: z. The release is (1/z)-GDP: at z = 10 it costs 1 % of the μ² of a run
            with μ = 1.
        max_feature_norm: R, a public number. Records with a larger norm are scaled down to it.

    Raises:
        ArgumentError, ArgumentTypeError: a shape or a number is out of range. Nothing is charged.
        PrivacyBudgetExceeded: the release would exceed the budget. Nothing is released.

    **Privacy.** A record's part is positive semi-definite with a trace of at most R², so its
    Frobenius norm is at most R²: one Gaussian event of multiplier z. Two such parts differ by at
    most √2·R² in Frobenius norm, which is the sensitivity if neighbours replace one record.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
        raise ArgumentTypeError("x must be a dense floating-point tensor.")
    if x.dim() not in (2, 3) or 0 in x.shape[1:]:  # the number of records may be private
        raise ArgumentError(f"x must be [n, d] or [n, positions, d], got {['n', *x.shape[1:]]}.")
    if not isinstance(accountant, PrivacyAccountant):
        raise ArgumentTypeError(
            f"accountant must be a dpb.PrivacyAccountant, got {type(accountant).__name__}."
        )
    noise_multiplier = check_positive("noise_multiplier", noise_multiplier)
    max_feature_norm = check_positive("max_feature_norm", max_feature_norm)
    unit = max_feature_norm * max_feature_norm
    if not sys.float_info.min <= unit * noise_multiplier < math.inf:
        raise ArgumentError(
            f"max_feature_norm = {max_feature_norm:g} is out of range: its square overflows or"
            " underflows"
        )
    # under replace-one the accountant assumes twice the bound, but matrices move by √2 times it
    factor = math.sqrt(2) if accountant.neighboring == "replace_one" else 1.0
    event = GaussianDpEvent(noise_multiplier * factor)
    accountant.compose(event, label="noise_aware.covariance")
    total = _second_moments(x.detach(), max_feature_norm).cpu()
    released = with_symmetric_noise(total, noise_multiplier)
    return NoisyCovariance(unit * released, unit * noise_multiplier)


def normal_numbers(size: int) -> Tensor:
    """Fresh standard normal numbers, ``[size]``."""
    return GaussianNoise().standard_normal(size, dtype=torch.float64, device=torch.device("cpu"))


def with_symmetric_noise(exact: Tensor, std: float) -> Tensor:
    """A symmetric matrix ``[d, d]`` with noise of standard deviation ``std`` on the diagonal and
    ``std``/√2 off it: the mean of a Gaussian matrix and its transpose.
    """
    draws = normal_numbers(exact.numel()).reshape(exact.shape)
    # mirror one triangle: rounding makes sums asymmetric, and the difference of the two triangles
    # would have no noise
    upper = torch.triu(exact + std * (draws + draws.T) / 2)
    return upper + torch.triu(upper, 1).T


def _second_moments(x: Tensor, max_norm: float) -> Tensor:
    """The sum over scaled-down records, in units of ``max_norm``². Private data."""
    size = x.shape[-1]
    total = torch.zeros(size, size, dtype=torch.float64, device=x.device)
    for rows in x.split(_ROWS):
        records = rows.double().flatten(1) / max_norm
        is_finite = records.square().sum(1, keepdim=True).isfinite()
        positions = torch.where(is_finite, short(records), 0.0).reshape(-1, size)
        total += positions.T @ positions
    return total


# -- the matrix given a release --------------------------------------------------------------------


class Look(NamedTuple):
    """A noisy matrix Y = A·G·Aᵀ + E."""

    released: Tensor  # Y
    noise_std: float  # v, of E's diagonal
    onto: Tensor  # A


def gram_draws(looks: Sequence[Look], count: int) -> Tensor:
    """Draws of G, ``[count, d, d]``, from its posterior, by a few chains. They start where the last
    look tells.
    """
    released, noise_std, onto = looks[-1]
    size, eye = len(released), torch.eye(len(released), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(released)
    back = torch.linalg.solve(onto, vectors)
    values, vectors = torch.linalg.eigh((back * values.clamp_min(noise_std)) @ back.T)
    logs = values.clamp_min(torch.finfo(torch.float64).tiny).log()
    level = logs.mean().expand(_CHAINS, 1, 1)
    square = (logs.var(correction=0) + 1 / size**2).expand(_CHAINS, 1, 1)
    at_start = torch.diag(logs.exp())
    given = [(a @ vectors / v**0.5, y / v) for y, v, a in looks]
    pull_at_start = sum(a.T @ (a @ at_start @ a.T - y) @ a for a, y in given)
    squares = [a.T @ a for a, _ in given]
    curvature = _derivative(logs).square() * sum(
        torch.outer(b, b) for b in map(torch.diag, squares)
    )

    def prior(matrices: Tensor) -> tuple[Tensor, Tensor]:
        apart = matrices - level * eye
        return (apart.square() / (2 * square)).sum((1, 2)), apart / square

    def potential(matrices: Tensor) -> tuple[Tensor, Tensor]:
        """−log p and its gradient, in the eigenvectors at the start. The misfit is a polynomial in
        G − (G at the start), because squares of Y have fewer digits.
        """
        is_finite = matrices.isfinite().all(2).all(1)  # if not, the step is far too long
        matrices = torch.where(is_finite[:, None, None], matrices, eye)
        own, basis = torch.linalg.eigh(matrices)
        moved = (basis * own.exp()[:, None]) @ basis.mT - at_start
        pulled = sum(b @ moved @ b for b in squares)
        value, slope = prior(matrices)
        value = value + (moved * (pulled / 2 + pull_at_start)).sum((1, 2))
        inner = (basis.mT @ (pulled + pull_at_start) @ basis) * _derivative(own)
        return torch.where(is_finite, value, math.inf), slope + basis @ inner @ basis.mT

    # not at equal eigenvalues, where s = 0 holds the chains
    apart = (1 / square + curvature).rsqrt() * _symmetric_noise(_CHAINS, size)
    result, step, place = [], 1.0, torch.diag(logs) + apart
    value, slope = potential(place)
    for number in range(_WARM_UP + _APART * math.ceil(count / _CHAINS)):
        units = (1 / square + curvature).rsqrt().mul
        states, momenta = States(place, value, slope), _symmetric_noise(_CHAINS, size)
        now, chances = trajectory(states, momenta, step, _LEAPFROG_STEPS, potential, units, units)
        place, old = now.at, prior(now.at)
        if number < _WARM_UP:
            step *= math.exp((float(chances.mean()) - _ACCEPTANCE) / math.sqrt(1 + number / 4))
        level, square = _hyperparameters(place)
        changes = zip(now[1:], old, prior(place), strict=True)
        # s and L − mI by the same factor: given L, s would move by little
        before = place, square, *(of_both - left + new for of_both, left, new in changes)
        factor = (_FACTOR * torch.randn_like(square)).exp()
        place, square = level * eye + factor * (place - level * eye), factor**2 * square
        after = place, square, *potential(place)
        gain = size * (before[1] - square) / (4 * _DECADE**2) + factor.log()
        gain = gain.flatten() + before[2] - after[2]
        kept = gain > torch.rand_like(gain).log()
        place, square, value, slope = (
            torch.where(kept.reshape(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip(after, before, strict=True)
        )
        if number >= _WARM_UP and (number - _WARM_UP) % _APART == _APART - 1:
            result.append(vectors @ torch.linalg.matrix_exp(place) @ vectors.T)
    return torch.cat(result)[:count]


def quick_gram_draws(looks: Sequence[Look], count: int) -> Tensor:
    """Draws of G given the last look, for matrices that are too large for a chain, with an exact
    mean. They are draws of AGAᵀ, transformed back; below, A = I.

    Write G = O diag(c) Oᵀ with O uniform. In the eigenvectors of Y, G then has the law of
    Uᵀ diag(c) U, where U are the eigenvectors of diag(c) + E, given that diag(c) + E has the
    eigenvalues y of Y. Many columns nearly determine c (:func:`_spectrum`), and simulated
    eigenvalues are near y. Each diagonal entry moves by the part of y − (its simulated eigenvalue)
    that is not noise. The remaining differences are spread equally, so that the trace is right.
    """
    released, noise_std, onto = looks[-1]
    size = len(released)
    if size <= _FEW_COLUMNS:
        return gram_draws(looks, count)
    values, vectors = torch.linalg.eigh(released)
    own = _spectrum(values, noise_std)
    noisy = torch.diag(own) + noise_std * _symmetric_noise(count, size)
    found, bases = torch.linalg.eigh(noisy)
    result = bases.mT @ (own[:, None] * bases)
    diagonals = result.diagonal(dim1=1, dim2=2)
    spread = (result.square().sum(1) - diagonals.square()).mean(0)
    # Cov(G | Y) is v² times the derivative of E[G | Y] (Tweedie's formula)
    share = (2 * spread / (noise_std**2 * (size - 1))).clamp_max(1.0)
    apart, rest = values - found, 1 - share
    common = (apart @ rest / rest.sum().clamp_min(1e-9))[:, None]
    moved = (share * apart + rest * common) / diagonals
    scale = (1 + moved).clamp_min(0.25).sqrt()
    result = scale[:, :, None] * result * scale[:, None]
    middle = result.mean(0)
    result = result + (torch.diag(middle.diagonal()) - middle)
    back = torch.linalg.solve(onto, vectors)
    return back @ result @ back.T


def _spectrum(values: Tensor, noise_std: float) -> Tensor:
    """Eigenvalues c of G, such that the eigenvalues of diag(c) + E are on average those of Y.

    They start as a power law with the traces of G and of G². Each step adds the part of the
    difference that exceeds the scatter of one release (discrepancy principle; Morozov 1966).
    """
    size, noise = len(values), noise_std**2
    ranks = torch.arange(size, 0, -1, dtype=torch.float64)
    trace = max(float(values.sum()), noise_std * math.sqrt(size))
    squares = float(values.square().sum()) - noise * size * (size + 1) / 2

    def law(power: float) -> Tensor:
        return trace * ranks**-power / (ranks**-power).sum()

    def excess(power: float) -> float:
        return float(law(power).square().sum()) - squares

    low, high = 0.0, _STEEPEST
    own = law(
        brentq(excess, low, high) if excess(low) < 0 < excess(high) else high * (excess(low) < 0)
    )
    kernel = torch.exp(-((values[:, None] - values) / (3 * noise_std)).square() / 2)
    weight = kernel.sum(1)
    middle = kernel @ values / weight
    spread = kernel @ values.square() / weight - middle.square()

    def smooth(numbers: Tensor) -> Tensor:
        """Smooth along the last dimension, by local lines through eigenvalues within a few v."""
        height = numbers @ kernel / weight
        slope = (numbers * values @ kernel / weight - middle * height) / (spread + noise / weight)
        return height + slope * (values - middle)

    errors = noise_std * _symmetric_noise(_SIMULATED, size)
    for _ in range(_FITTING_STEPS):
        found = torch.linalg.eigvalsh(torch.diag(own) + errors)
        missing = smooth(values - found.mean(0))
        scatter = smooth(found - found.mean(0)).square().sum(0) / (_SIMULATED - 1)
        scatter = (scatter * (1 + 1 / _SIMULATED)).sqrt()
        moved = missing.sign() * (missing.abs() - scatter).clamp_min(0.0) / own
        own = (own * moved.clamp(-0.5, 0.5).exp()).sort().values
    return own


def _symmetric_noise(count: int, size: int) -> Tensor:
    """Symmetric matrices ``[count, d, d]`` with variance 1 on the diagonal, 1/2 off it."""
    white = torch.randn(count, size, size, dtype=torch.float64)
    return (white + white.mT) / 2


def _derivative(logs: Tensor) -> Tensor:
    """f ``[..., d, d]`` at eigenvalues of L; for equal ones, the limit of sinh(x)/x."""
    rows, columns = logs[..., :, None], logs[..., None, :]
    half, roots = (rows - columns) / 2, (logs / 2).exp()
    roots = roots[..., :, None] * roots[..., None, :]
    exact = (rows.exp() - columns.exp()) / (2 * half)
    return torch.where(half.abs() < 1e-4, roots * (1 + half.square() / 6), exact)


def _hyperparameters(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Draws of m and s², ``[C, 1, 1]``, given each L; s is drawn on a grid around its mode without
    priors.
    """
    size = matrices.shape[1]
    free = size * (size + 1) / 2
    trace, wide = matrices.diagonal(dim1=1, dim2=2).mean(1)[:, None], 4 * _DECADE**2
    apart = matrices - trace[:, None] * torch.eye(size, dtype=torch.float64)
    total = apart.square().sum((1, 2))[:, None]  # m is integrated out, which leaves D − 1
    # a single number tells nothing of s: then the mode of the prior
    middle = (total / free).clamp_min(1e-300) if size > 1 else total + wide / 2
    grid = torch.linspace(-6.0, 6.0, _GRID, dtype=torch.float64) / math.sqrt(free)
    grid = grid + 0.5 * middle.log()
    squares, missed = (2 * grid).exp(), trace + math.log(size)
    spread = squares / size + wide  # the variance of the trace
    # ds = s d log s
    density = -total / (2 * squares) - (free - 2) * grid - size * squares / wide
    density = density - spread.log() / 2 - missed.square() / (2 * spread)
    square = squares.gather(1, torch.multinomial(density.softmax(1), 1))
    share = 1 / (1 + size * wide / square)  # of the prior in the level
    level = trace - share * missed + (share * wide).sqrt() * torch.randn_like(share)
    return level[..., None], square[..., None]
