r"""Draw matrices of second moments given a noisy release of them.

The release is Y = G + E, with E symmetric Gaussian of standard deviation v on the diagonal and v/√2
off it; G is positive definite. Its logarithm L = log G has the rotation-invariant Gaussian prior of
Leonard and Hsu (1992, "Bayesian inference for a covariance matrix", Annals of Statistics 20), with
an unknown level m and spread s, D = d(d+1)/2:

.. math::
    -\log p(L, m, s \mid Y) = \frac{\|Y - e^L\|_F^2}{2v^2} + \frac{\|L - mI\|_F^2}{2s^2}
    + D \log s + \frac{d s^2}{4\tau_0^2} + \text{const}

Equal eigenvalues are s = 0. A spread is learned from the eigenvalues that stand out of the noise,
and with it how small those may be that do not: a point estimate, or a draw of Y's own noise, gives
hidden directions the eigenvalues of the noise, and so information that records do not have. The
logarithms are spread like a semicircle of standard deviation s√(d/2), whose prior is half normal
with the scale τ₀ = log 10, a decade.

Near the eigenvectors U of Y the derivative of L ↦ e^L is diagonal, :math:`f_{ij} = (e^{l_i} -
e^{l_j})/(l_i - l_j)` (Daleckii and Krein), so that entries of UᵀLU have about the variances
:math:`1/(s^{-2} + f^2/v^2)`, half of it off the diagonal. Hamiltonian steps with these as inverse
masses move L; m and s have conditional distributions in closed form.

**Privacy.** Post-processing of a release.
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq
from torch import Tensor

from .hamiltonian import States, trajectory

_DECADE = math.log(10.0)  # τ₀
_EM_STEPS = 30
_WARM_UP, _APART = 100, 10  # trajectories before the first draw, and from one to the next
_LEAPFROG_STEPS = 8
_ACCEPTANCE = 0.8  # that the step size is adapted to in the warm-up (Beskos et al. 2013: .65 to .8)
_GRID = 200
# so many have chains: of two, of which noise hides one, the Gaussian tells thrice too much
_FEW_COLUMNS = 50
# of the eigenvalues of larger ones: steps, simulations, and the steepest power law they start as
_FITTING_STEPS, _SIMULATED, _STEEPEST = 10, 4, 4.0


def gram_draws(released: Tensor, noise_std: float, count: int) -> Tensor:
    """Matrices ``[count, d, d]`` from the posterior given Y and v."""
    size, noise = len(released), noise_std**2
    values, vectors = torch.linalg.eigh(released)
    logs, level, square, variances = _by_em(values, noise)
    eye, diagonal = torch.eye(size, dtype=torch.float64), torch.diag(values)

    def potential(matrices: Tensor) -> tuple[Tensor, Tensor]:
        """−log p and its gradient, in the eigenvectors of Y."""
        if not bool(matrices.isfinite().all()):  # a step far too long
            return torch.full((1,), math.inf, dtype=torch.float64), matrices
        own, basis = torch.linalg.eigh(matrices[0])
        misfit = (basis * own.exp()) @ basis.T - diagonal
        apart = matrices - level * eye
        slope = basis @ (basis.T @ misfit @ basis * _derivative(own)) @ basis.T
        value = misfit.square().sum() / (2 * noise) + apart.square().sum() / (2 * square)
        return value[None], slope / noise + apart / square

    def in_units(matrices: Tensor) -> Tensor:
        return variances.sqrt() * matrices

    result, step, place = [], 1.0, torch.diag(logs)[None]
    for number in range(_WARM_UP + _APART * count):
        white = torch.randn(1, size, size, dtype=torch.float64)
        now, chances = trajectory(
            States(place, *potential(place)),
            (white + white.mT) / 2,
            step,
            _LEAPFROG_STEPS,
            potential,
            in_units,
            in_units,
        )
        place = now.at
        if number < _WARM_UP:
            step *= math.exp((float(chances) - _ACCEPTANCE) / math.sqrt(1 + number / 4))
        level, square = _hyperparameters(place[0])
        if number >= _WARM_UP and (number - _WARM_UP) % _APART == _APART - 1:
            result.append(vectors @ torch.linalg.matrix_exp(place[0]) @ vectors.T)
    return torch.stack(result)


def quick_gram_draws(released: Tensor, noise_std: float, count: int) -> Tensor:
    """The same, where matrices are too large for a chain, with an exact mean.

    Write G = O diag(c) Oᵀ with O uniform. In the eigenvectors of Y, G then has the law of
    Uᵀ diag(c) U, with U the eigenvectors of diag(c) + E, given that this has the eigenvalues y of
    Y. Many columns nearly fix c (:func:`_spectrum`), and simulated eigenvalues are near y. Of what
    they miss, a direction takes the share that is not noise; the rest moves all directions alike,
    so that the trace is right.
    """
    size = len(released)
    if size <= _FEW_COLUMNS:
        return gram_draws(released, noise_std, count)
    values, vectors = torch.linalg.eigh(released)
    own = _spectrum(values, noise_std)
    noisy = torch.diag(own) + noise_std * _symmetric_noise(count, size)
    found, bases = (
        torch.stack(parts) for parts in zip(*map(torch.linalg.eigh, noisy), strict=True)
    )
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
    return vectors @ result @ vectors.T


def _spectrum(values: Tensor, noise_std: float) -> Tensor:
    """Eigenvalues c of G, such that those of diag(c) + E are the values of Y on average.

    They start as a power law with the traces of G and of G², and are moved by what is missing
    beyond what one release scatters by (the discrepancy principle; Morozov 1966).
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
        """Along the last dimension, by a line through eigenvalues a few v apart."""
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
    """E ``[count, d, d]`` in units of v."""
    white = torch.randn(count, size, size, dtype=torch.float64)
    return (white + white.mT) / 2


def _by_em(values: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eigenvalues of L, m, s² and the variances of L's entries, by EM with L Gaussian at its mode,
    which has the eigenvectors of Y.
    """
    size = len(values)
    free = size * (size + 1) / 2
    logs = values.clamp_min(math.sqrt(noise)).log()
    level, square = logs.mean(), logs.var(correction=0) + 1 / free
    for _ in range(_EM_STEPS):
        own = logs.exp()
        curvature = (own.square() + (own * (own - values)).clamp_min(0.0)) / noise + 1 / square
        step = (own * (own - values) / noise + (logs - level) / square) / curvature
        logs = logs - step.clamp(-1.0, 1.0)
        variances = 1 / (1 / square + _derivative(logs).square() / noise)
        level = logs.mean()
        upper = torch.triu(variances).sum()
        square = ((logs - level).square().sum() + upper) / free
    return logs, level, square, variances


def _derivative(logs: Tensor) -> Tensor:
    """f ``[d, d]`` at eigenvalues of L; sinh(x)/x has a limit where two are the same."""
    half, mean = (logs[:, None] - logs) / 2, (logs[:, None] + logs) / 2
    ratio = torch.where(half.abs() < 1e-4, 1 + half.square() / 6, half.sinh() / half)
    return mean.exp() * ratio


def _hyperparameters(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """m and s² given L: a flat prior of m; of s the density above, on a grid around its mode."""
    size = len(matrix)
    free = size * (size + 1) / 2
    trace = matrix.trace() / size
    apart = matrix - trace * torch.eye(size, dtype=torch.float64)
    total = apart.square().sum()  # m integrated out, one of D is used up
    middle = (total / free).clamp_min(1e-300)
    grid = torch.linspace(-6.0, 6.0, _GRID, dtype=torch.float64) / math.sqrt(free) + 0.5 * math.log(
        middle
    )
    squares = (2 * grid).exp()
    # ds = s d log s
    density = -total / (2 * squares) - (free - 2) * grid - size * squares / (4 * _DECADE**2)
    square = squares[torch.multinomial(density.softmax(0), 1)[0]]
    level = trace + (square / size).sqrt() * torch.randn((), dtype=torch.float64)
    return level, square
