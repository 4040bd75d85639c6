r"""The posterior given a run of a private optimizer that was made for another purpose.

At stationarity the iterates of a sampler at temperature T have the covariance T(F+P)⁻¹. It says
what F is, and their mean says where F(θ̄ − θ_L) + P(θ̄ − m₀) = 0 but for the noise that was
averaged. How surely they say it follows from the autocorrelation of the iterates, which is that of
an autoregression of second order. Both go into the normal form
(:mod:`~torch_dpbayes.noise_aware.normal_form`); derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from scipy.stats import chi2
from torch import Tensor

from ..accounting.events import positive_count
from ..optim import DPSGHMC, DPSGLD, DPSGNHT
from ..optim.base import PrivateOptimizer
from ..posterior import PosteriorSamples
from .normal_form import CLIPPED_UNKNOWN, NOT_HEARD, NormalForm
from .posterior import NoiseAwarePosterior
from .priors import GaussianPrior
from .warn import warn

_KINDS = (DPSGLD, DPSGHMC, DPSGNHT)
_PARTS = 4
# probability that a stationary run is refused, if the correlations of its iterates were known; of
# twenty relaxation times it is 1e-4
_SURELY = 1e-6
_LITTLE = 0.1  # minibatch noise beside the Gaussian, of which a thermostat may see the average
_FEW, _TOO_FEW = 9.0, 4.0  # independent samples' worth in the softest direction


def from_run(
    samples: PosteriorSamples, optimizer: PrivateOptimizer, *, steps_per_sample: int
) -> NoiseAwarePosterior:
    r"""The posterior given the iterates of a private run: temperature and averaging noise are taken
    out of their spread, for models that are linear in what was trained.

    With eigenvalues c of the iterates' covariance, h = η/N, friction f = hσ²/2T (1 for DP-SGLD, 1 −
    momentum for DP-SGHMC, α* for DP-SGNHT) and κ = (1−q)/q, the curvature F̂ = a − P solves

    .. math:: c\,a\Big(1 - \frac{ha}{2(2-f)}\Big) = T + \frac{h\kappa}{2f}(a - P),

    which counts the minibatch noise (not for DP-SGNHT, which is refused where there is much of it)
    and the length of the steps. In a direction of curvature a the iterates' autocorrelation is

    .. math:: C(0) = 1, \quad C(1) = 1 - \frac{ha}{2-f}, \quad
              C(k) = (2-f-ha)\,C(k-1) - (1-f)\,C(k-2).

    With S_p = S/Σ_k (1 − abs(k)/S) C(km)^p for S iterates, m steps apart, their mean has the
    variance c/S_1, and c the relative error √(2/S_2): with little friction c is known less surely.

    Nothing in the iterates says how many gradients were clipped. Where many were, as with a
    ``max_grad_norm`` that suits a deep network, the mean may be off by more than its width: train
    with one that next to none exceed, and ask
    :func:`~torch_dpbayes.private_clipped_fraction`, which is charged.

    Args:
        samples: of a run of ``optimizer`` at a constant learning rate, past its burn-in. They have
            to be more than four times as many as parameters: ``PosteriorSamples(max_samples=...)``.
        optimizer: the one that made the samples: a ``DPSGLD``, ``DPSGHMC`` or ``DPSGNHT`` with one
            parameter group and a Gaussian prior. From the first sample to its last step nothing may
            have changed its learning rate, prior or noise: it counts such steps (``equal_steps``).
        steps_per_sample: steps between two calls of ``samples.collect``.

    Returns:
        A posterior whose sites are the parameters, by name.

    Raises:
        ValueError: the run does not say enough, or contradicts what a stationary run on a quadratic
            would be: too few or too dependent samples (cold runs, deep networks), a mean that still
            moves, minibatch noise that outweighs all else, or under ``DPSGNHT`` a tenth of the
            Gaussian; or a curvature so unsure that the prior would explain the run. Judged by the
            samples alone. Or the samples have other shapes than the optimizer's parameters.

    **Privacy.** Post-processing: the samples were paid for, nothing else of the data is used, and
    nothing is charged.
    """
    run = _constants(samples, optimizer, steps_per_sample)
    names, shapes = list(samples.shapes()), samples.shapes()
    values = torch.cat(
        [torch.from_numpy(samples.draws_of(n)).double().reshape(len(samples), -1) for n in names],
        dim=1,
    )
    count, size = values.shape
    if count < samples_needed(size):
        raise ValueError(
            f"{count} samples say too little about the spread of {size} parameters: collect at"
            f" least {samples_needed(size)}, or train a last layer alone."
        )
    point = values.mean(0)
    spread, vectors = torch.linalg.eigh(torch.cov(values.T).reshape(size, size))
    total = _precisions(spread, run)
    if isinstance(optimizer, DPSGNHT):
        _require_even_temperature(optimizer, float(total.max()), run)
    correlation = _autocorrelation(total, run, count)
    of_mean, of_spread = _worth(correlation), _worth(correlation.square())
    least = float(torch.minimum(of_mean, of_spread).min())
    if least < max(_TOO_FEW, independent_samples_needed(size)):
        raise ValueError(
            f"in its softest direction the run is worth {least:.2g} independent samples: run it"
            " longer, or with a larger temperature or learning rate (a deep network needs"
            " another method)."
        )
    _require_stationary((values - point) @ vectors, correlation, spread)
    if least < max(_FEW, 4 * (size + 2)):
        warn(
            f"in its softest direction the run is worth only {least:.2g} independent samples: the"
            " posterior is wide, and intervals may cover a few percent less than they say.",
        )
    # the mean of the inverse of a sample covariance is larger than the inverse
    total = total * (1 - (size + 1) / of_spread)
    curvature = (total - run.precision).clamp_min(0.02 * float(total.mean()))
    # a is about T/(c − hκ/2f), so an error of c weighs more where minibatch noise is part of it
    of_minibatches = run.step * run.subsampling / (2 * run.friction)
    error = total * spread / (spread - of_minibatches) * (2 / of_spread).sqrt()
    noise = total.square() * spread / of_mean

    def matrix(eigenvalues: Tensor) -> Tensor:
        return (vectors * eigenvalues) @ vectors.T

    likelihood = NormalForm(
        point,
        -run.precision * (point - run.mean),
        matrix(noise),
        matrix(curvature),
        matrix(error),
        1.0,
    )
    prior = GaussianPrior(
        torch.full((size,), run.mean, dtype=torch.float64),
        torch.full((size,), run.precision, dtype=torch.float64),
    )
    if likelihood.plateau(prior) is not None:
        raise ValueError(NOT_HEARD)
    accountant = optimizer.accountant
    delta = 1e-5 if accountant.delta is None else accountant.delta
    statement = [
        f"Noise-aware posterior from {count} iterates of {type(optimizer).__name__}",
        (
            "  charged     by the run alone; its accountant holds epsilon ="
            f" {accountant.get_epsilon(delta):.5g} at delta = {delta:g} ({accountant.neighboring})"
        ),
        f"  proved      what {type(optimizer).__name__} and its accountant state; nothing is added",
        (
            "  ASSUMED     for the width, not for privacy: the iterates are stationary, as tested,"
            f" {steps_per_sample} steps between two collect() calls"
        ),
        (
            "  ASSUMED     for the width, not for privacy: the samples are of this optimizer's last"
            " steps, which are known to have the same lr, noise and prior"
        ),
        (
            "  ASSUMED     for the width, not for privacy: the log likelihood is quadratic over the"
            " iterates, the model is right, and clipping changes few gradients"
        ),
        CLIPPED_UNKNOWN,
    ]
    return NoiseAwarePosterior(
        likelihood.without_plateau(),
        prior,
        _NamedCoordinates(shapes),
        statement,
        transcript=samples,
    )


def samples_needed(dimension: int) -> int:
    """How many iterates say enough about the spread of so many parameters."""
    return 4 * (dimension + 2)


def independent_samples_needed(dimension: int) -> int:
    """What these have to be worth in every direction."""
    return 2 * (dimension + 2)


class _Run(NamedTuple):
    """Public constants."""

    temperature: float
    noise_std: float  # zC/q, on a sum over all records
    step: float  # h
    friction: float
    subsampling: float  # κ; 0 where a thermostat takes up the little there is
    steps_between: int
    precision: float
    mean: float


def _constants(
    samples: PosteriorSamples, optimizer: PrivateOptimizer, steps_per_sample: int
) -> _Run:
    if not isinstance(samples, PosteriorSamples):
        raise TypeError(
            f"samples must be PosteriorSamples, got {type(samples).__name__}: collect the iterates"
            " of the run."
        )
    if type(optimizer) not in _KINDS:
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(
            f"the law of the iterates is known for {names}, not for {type(optimizer).__name__}."
        )
    steps = positive_count(steps_per_sample, "steps_per_sample")
    groups = [g for g in optimizer.param_groups if any(p.requires_grad for p in g["params"])]
    if len(groups) != 1 or optimizer.has_own_log_prior:
        raise ValueError("from_run needs one parameter group, with a Gaussian prior (prior_std=).")
    (group,) = groups
    trained = [tuple(p.shape) for p in group["params"] if p.requires_grad]
    collected = [tuple(shape) for shape in samples.shapes().values()]
    if sorted(trained) != sorted(collected):
        raise ValueError(
            f"the samples have the shapes {collected}, but the optimizer trains {trained}: pass the"
            " optimizer that made them."
        )
    needed = (len(samples) - 1) * samples.thin * steps
    if optimizer.equal_steps < needed:
        raise ValueError(
            f"the samples span {needed} steps, but only the last {optimizer.equal_steps} were made"
            " with this optimizer's present learning rate, noise and prior: collect at constant"
            " ones."
        )
    if not group["lr"] > 0:
        raise ValueError("lr is 0, so the iterates do not move: set a positive one.")
    if not math.isfinite(group["prior_std"]):
        raise ValueError("the prior is improper (prior_std is infinite): state prior_std.")
    multiplier, temperature = optimizer.effective_noise_multiplier, optimizer.effective_temperature
    if not multiplier > 0 or not temperature > 0:
        raise ValueError("the run has no noise, so its iterates are no samples.")
    rate = optimizer.expected_batch_size / optimizer.num_data
    noise_std = multiplier * optimizer.max_grad_norm / rate
    step = float(group["lr"]) / optimizer.num_data
    return _Run(
        temperature=temperature,
        noise_std=noise_std,
        step=step,
        friction=step * noise_std**2 / (2 * temperature),
        subsampling=0.0 if isinstance(optimizer, DPSGNHT) else (1 - rate) / rate,
        steps_between=steps * samples.thin,
        precision=float(group["prior_std"]) ** -2,
        mean=float(group["prior_mean"]),
    )


def _precisions(spread: Tensor, run: _Run) -> Tensor:
    """F + P in each direction, from the variances of the iterates."""
    gamma = run.step * run.subsampling / (2 * run.friction)
    beta = run.step / (2 * (2 - run.friction))
    ahead, level = spread - gamma, run.temperature - gamma * run.precision
    if not bool((ahead > 0).all()) or not level > 0:
        raise ValueError(
            "minibatch noise alone explains the spread of the iterates: use larger batches or a"
            " smaller learning rate."
        )
    # where steps are too long for a stationary law, the root is the longest that there is one for
    discriminant = (ahead.square() - 4 * spread * beta * level).clamp_min(0.0)
    return 2 * level / (ahead + discriminant.sqrt())


def _require_even_temperature(optimizer: DPSGNHT, stiffest: float, run: _Run) -> None:
    """One thermostat holds the average over the directions, but minibatch noise heats stiff ones
    more than soft ones.
    """
    rate = optimizer.expected_batch_size / optimizer.num_data
    if (1 - rate) / rate * stiffest > _LITTLE * run.noise_std**2:
        raise ValueError(
            "one thermostat cannot hold every direction at its temperature under so much minibatch"
            " noise: run DPSGHMC, or larger batches."
        )


def _autocorrelation(total: Tensor, run: _Run, count: int) -> Tensor:
    """C(km) for k < count, one column for each direction."""
    momentum = 1 - run.friction
    step = run.step * total
    zero, one = torch.zeros_like(total), torch.ones_like(total)
    # (C(k+1), C(k)) from (C(k), C(k−1)), and C(−1) = C(1)
    one_step = torch.stack(
        [
            torch.stack([1 + momentum - step, -momentum * one], dim=1),
            torch.stack([one, zero], dim=1),
        ],
        dim=1,
    )
    between = torch.linalg.matrix_power(one_step, run.steps_between)
    pair = torch.stack([one, 1 - step / (1 + momentum)], dim=1)[..., None]
    found = []
    for _ in range(count):
        found.append(pair[:, 0, 0])
        pair = between @ pair
    return torch.stack(found)


def _worth(correlation: Tensor) -> Tensor:
    """How many independent numbers have a mean as sure as that of numbers so correlated."""
    return len(correlation) ** 2 / _variances_of_sums(correlation)[-1]


def _variances_of_sums(correlation: Tensor) -> Tensor:
    """Σ_{i,j<n} C(i−j) for n = 0, 1, …"""
    # from n to n + 1 it grows by 1 + 2·(C(1) + … + C(n))
    growth = 2 * correlation.cumsum(0) - correlation[0]
    return torch.cat([torch.zeros_like(growth[:1]), growth.cumsum(0)])


def _require_stationary(values: Tensor, correlation: Tensor, spread: Tensor) -> None:
    """Sums of the first quarter, half and three quarters are as far from 0 as their law says.

    Args:
        values: centred, in the eigenvectors of their covariance.
        correlation: their autocorrelation, by direction.
        spread: their variance, by direction.
    """
    count = len(values)
    cuts = torch.arange(1, _PARTS) * count // _PARTS
    of_sums = _variances_of_sums(correlation)

    def covariance(s: Tensor, t: Tensor) -> Tensor:  # of sums of the first s and t, not centred
        return (of_sums[s] + of_sums[t] - of_sums[(s - t).abs()]) / 2

    share, everything = (cuts / count).double(), torch.tensor(count)
    centred = (
        covariance(cuts[:, None], cuts[None, :])
        - share[:, None, None] * covariance(everything, cuts)[None]
        - share[None, :, None] * covariance(everything, cuts)[:, None]
        + share[:, None, None] * share[None, :, None] * of_sums[-1]
    ).permute(2, 0, 1)
    sums = values.cumsum(0)[cuts - 1].T / spread.sqrt()[:, None]
    statistic = float((sums * torch.linalg.solve(centred, sums)).sum())
    if chi2.sf(statistic, sums.numel()) < _SURELY:
        raise ValueError(
            "the iterates of earlier and later parts of the run contradict each other: it has not"
            " converged. Lengthen the burn-in or the run."
        )


class _NamedCoordinates:
    """Tensors one after another."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = dict(shapes)

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Tensors by name."""
        pieces = theta.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: piece.reshape(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def unconstrained(self, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """The vector; no Jacobian."""
        flat = [torch.as_tensor(values[name]).double().reshape(-1) for name in self._shapes]
        return torch.cat(flat), 0.0
