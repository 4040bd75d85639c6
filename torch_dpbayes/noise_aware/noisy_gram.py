r"""What a noisy release says of a matrix of second moments: draws of the matrix given the release.

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
from scipy.optimize import isotonic_regression
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
_MOVES, _EACH = 4, 4  # of the centers of larger ones, by the mean of so many draws


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
    """The same, where matrices are too large for a chain: L is Gaussian, with its spread from EM,
    and its center is moved until matrices have the mean of many columns (:func:`_expected`). The
    trace, a sum that noise hides least, is then drawn given the release.
    """
    size, noise = len(released), noise_std**2
    if size <= _FEW_COLUMNS:
        return gram_draws(released, noise_std, count)
    values, vectors = torch.linalg.eigh(released)
    square, means = _by_em(values, noise)[2], _expected(values, noise_std)
    logs = means.log()

    def drawn(number: int) -> tuple[Tensor, Tensor]:
        variances = 1 / (1 / square + _derivative(logs).square() / noise)
        white = torch.randn(number, size, size, dtype=torch.float64)
        moved = torch.diag(logs) + (white + white.mT) / 2 * variances.sqrt()
        pairs = (torch.linalg.eigh(matrix) for matrix in moved)
        found = torch.stack([(basis * own.exp()) @ basis.T for own, basis in pairs])
        return found, variances.diagonal()

    for _ in range(_MOVES):
        logs = logs + (means / drawn(_EACH)[0].mean(0).diagonal()).log()
    result, free = drawn(count)
    free = free / free.max()
    traces = values.sum() + noise_std * math.sqrt(size) * torch.randn(count, dtype=torch.float64)
    for _ in range(_MOVES):  # what the release leaves free meets the trace
        diagonals = result.diagonal(dim1=1, dim2=2)
        missing = (traces - diagonals.sum(1)) / (2 * diagonals @ free)
        scale = 1 + missing.clamp_min(-0.5)[:, None] * free
        result = scale[:, :, None] * result * scale[:, None]
    return vectors @ result @ vectors.T


def _expected(values: Tensor, noise_std: float) -> Tensor:
    """The diagonal of E[G | Y] in the eigenvectors of Y, for a rotation-invariant prior and many
    columns: y - v² Σ 1/(y - y') over the other eigenvalues (Bun, Allez, Bouchaud and Potters 2016,
    "Rotational invariant estimator for general noisy matrices", with additive Gaussian noise).

    The sum is smoothed, by a line through eigenvalues a few v apart, and does not fall. What cannot
    be told from zero is taken for the mean of such.
    """
    gaps, noise = values[:, None] - values, noise_std**2
    rough = values - noise * (gaps / (gaps.square() + noise / 32)).sum(1)
    kernel = torch.exp(-(gaps / (3 * noise_std)).square() / 2)
    weight = kernel.sum(1)
    middle, height = kernel @ values / weight, kernel @ rough / weight
    spread = kernel @ values.square() / weight - middle.square()
    slope = kernel @ (values * rough) / weight - middle * height
    slope = (slope + noise / weight) / (spread + noise / weight)
    line = isotonic_regression((height + slope * (values - middle)).numpy()).x
    found = torch.from_numpy(line)
    low = found[found < noise_std]
    least = noise_std / (4 * math.sqrt(len(values)))
    return found.clamp_min(max(least, float(low.mean()) if len(low) else 0.0))


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
