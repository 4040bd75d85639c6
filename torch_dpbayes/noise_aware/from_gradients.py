"""The posterior given noisy gradients at many points, and nothing else: the curvature is the slope
of their regression on the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from scipy.stats import chi2, norm
from torch import Tensor

from ..mcmc.density import RecordDensity
from .hidden_directions import num_like_walks
from .modes import mode
from .normal_form import CLIPPED_UNKNOWN, NOT_HEARD, NormalForm, roots, sure_part
from .posterior import NoiseAwarePosterior, PyroCoordinates
from .priors import GaussianPrior, PyroPrior
from .records import require_unweighted
from .response import MISFIT
from .transcript import GradientRelease, Transcript
from .turned import OfTold, Turn
from .warn import warn

_RELEASES_PER_PARAMETER = 4
_DEVIATIONS = 3.0  # by which a curvature may be larger than estimated, where noise grows with it
_ROUNDS = 3  # between the curvature and the noise of sampling, which is a multiple of it
_SURELY = 1e-6  # probability that a run which has arrived is refused
_CONTRADICTS = 1e-4  # tail probability of gradients on the way, if the mode was another one
_MOST_ROUNDS = 8
# posterior standard deviations by which a likelihood that is not quite quadratic may move the mean
_LITTLE = 0.3
_QUARTERS = 4


def posterior_from_gradients(
    releases: Sequence[GradientRelease], density: RecordDensity, statement: Sequence[str]
) -> NoiseAwarePosterior:
    """What the later half of ``releases``, all at one rate and noise, says about a Pyro model. The
    earlier half says whether the prior alone may explain it. Nothing says how many gradients were
    clipped: that few were is for whoever chose the bound to see to.

    Args:
        releases: in their order.
        density: the model; its records are not used.
        statement: what was charged, in words.

    Raises:
        ValueError: too few releases, releases without noise, halves that contradict each other, or
            weighted records.
    """
    require_unweighted(density)
    latents = PyroPrior(density.prior)
    gaussian = latents.gaussian()
    turn = Turn(density.zero_sums(), density.read, gaussian.mean)
    form, notes = _likelihood(
        [turned(r, turn) for r in releases], turn.of_prior(gaussian).of(turn.told)
    )
    assumed = [
        (
            "  ASSUMED     for the width, not for privacy: the log likelihood is quadratic where"
            " the later half of the steps was"
        ),
        (
            "  ASSUMED     for the width, not for privacy: the model is right, and clipping changes"
            " few gradients"
        ),
        CLIPPED_UNKNOWN,
    ]
    return NoiseAwarePosterior(
        OfTold(form, turn),
        latents,
        PyroCoordinates(density.prior),
        [*statement, *assumed, *([] if turn.told.all() else [turn.note()]), *notes],
        transcript=Transcript(list(releases)),
    )


def _likelihood(
    releases: Sequence[GradientRelease], prior: GaussianPrior
) -> tuple[NormalForm, list[str]]:
    """What a run says, and lines about it for a statement. Warns where it says little."""
    earlier, later = releases[: len(releases) // 2], releases[len(releases) // 2 :]
    form, untold = regression(later, prior.mean)
    plateau, notes, share_beyond = form.plateau(prior), [], _SURELY
    if plateau is None:
        places = [mode(form.without_plateau(), prior)]
    else:
        places = [plateau, prior.mean]
    if any(is_contradicted(place, earlier, form) for place in places):
        # the curvature along the way is more than nothing: it is taken to be like the others', and
        # its error to grow no further than to the distance that half of all posteriors exceed
        (form, untold), share_beyond = regression(later), 0.5
        notes += [
            "  ON THE WAY  gradients contradict that the prior alone explains the run",
            (
                "  ASSUMED     for the width, not for privacy: the log likelihood is concave on the"
                " way to the end of the run, and its curvature there like that in other directions"
            ),
        ]
    elif plateau is not None:
        warn(NOT_HEARD)
        notes.append(
            "  NOT HEARD   so little is known of the curvature that the prior alone explains the"
            " run: the mean is the prior's rather than the records'"
        )
        return form, notes
    if untold:
        warn(
            f"the gradients do not tell {untold} of {len(form.centre)} directions:"
            " intervals may be too narrow there. Give the model no parameters that make up for"
            " each other, or make more steps."
        )
        notes.append(
            f"  NOT TOLD    {untold} directions have no more curvature than iterates"
            " seem to have that nothing draws back: intervals may be too narrow there"
        )
    return form.without_plateau(share_beyond), notes


def steps_needed(dimension: int) -> int:
    """Of a run, whose later half is regressed."""
    return 2 * _RELEASES_PER_PARAMETER * (dimension + 1)


def turned(release: GradientRelease, turn: Turn) -> GradientRelease:
    """What it says of the coordinates that records tell. The noise is the same in all of them."""
    return replace(release, theta=turn.some(release.theta), value=turn.some(release.value))


def regression(
    releases: Sequence[GradientRelease], prior_mean: Tensor | None = None
) -> tuple[NormalForm, int]:
    r"""Least squares of g̃_k on θ_k, with a symmetric slope, in coordinates in which the noise of a
    release, W = σ²I + κF with κ = (1−q)/q, is the same in all directions:

    .. math:: A\hat F' + \hat F'A = X^\top Y + Y^\top X, \quad A = X^\top X, \quad
              \hat F = W^{1/2}\hat F'W^{1/2},

    X and Y the centred W^{1/2}θ_k and W^{-1/2}g̃_k. In A's eigenvectors the entries of F̂' have the
    variance 1/a_i on the diagonal and 1/(a_i + a_j) ≤ 1/(2√(a_i a_j)) off it, that is, R =
    W^{1/2}A^{-1/2}W^{1/2} and v = 1. W is that of the F̂ before.

    Args:
        releases: at one noise and rate.
        prior_mean: from there to θ̄ the curvature may be another one than everywhere else, as of a
            logistic regression with large weights, which says less of their length than of the
            rest: it is not taken to be like the other directions'. None: it is.

    Returns:
        What the releases say, and how many directions they do not tell: there the estimate is no
        larger than where nothing draws the iterates back.

    Raises:
        ValueError: as :func:`posterior_from_gradients`.
    """
    size, count = len(releases[0].theta), len(releases)
    if 2 * count < steps_needed(size):
        raise ValueError(
            f"the curvature of {size} parameters needs {steps_needed(size)} steps, got about"
            f" {2 * count}:"
            " make more steps (with more noise each, for the same budget)."
        )
    if len({(r.noise_std, r.sample_rate) for r in releases}) > 1:
        raise ValueError(
            "the later half of the steps has different noise or sampling rates: make as many steps"
            " again with the same ones."
        )
    if not releases[0].noise_std > 0:
        raise ValueError(
            "the steps were made without noise, and a noise-aware posterior is of noisy ones: pass"
            " a noise_multiplier above 0 to a new DPSVI, or take its guide as it is."
        )
    points = torch.stack([r.theta for r in releases])
    values = torch.stack([r.value for r in releases])
    rate, own = releases[0].sample_rate, releases[0].noise_std ** 2
    point, gradient = points.mean(0), values.mean(0)
    x, y = points - point, values - gradient
    subsampling = (1 - rate) / rate
    each = own * torch.eye(size, dtype=torch.float64)
    for _ in range(_ROUNDS):
        estimate, error = _symmetric_slope(x, y, each)
        curvature, shape, std = sure_part(
            estimate, error, 1.0, None if prior_mean is None else point - prior_mean
        )
        each = own * torch.eye(size, dtype=torch.float64) + subsampling * curvature
    wrong = MISFIT * gradient  # by a quadratic log likelihood, on the way that is left
    noise = each / count + wrong.outer(wrong)
    found = NormalForm(point, gradient, noise, curvature, shape, std)
    _, inverse = roots(error)
    untold = num_like_walks(torch.linalg.eigvalsh(inverse @ estimate @ inverse))
    # A small estimate makes the noise of sampling small, and with it its own error. So that such a
    # run is not refused, the noise is taken for what it would be at the largest curvature.
    largest = each
    for _ in range(_MOST_ROUNDS if subsampling else 0):
        _slope, shape = _symmetric_slope(x, y, largest)
        most = curvature + _DEVIATIONS * shape
        largest = own * torch.eye(size, dtype=torch.float64) + subsampling * most
    _require_agreement(points, values, largest, found)
    return found, untold


def is_contradicted(place: Tensor, earlier: Sequence[GradientRelease], form: NormalForm) -> bool:
    r"""Whether gradients on the way show that the log likelihood has its maximum elsewhere.

    Where it is concave, −∇·(θ_k − θ_L) is not negative for any θ_k. From ``place`` on, gradients
    that still draw towards the end of the run say that it is not θ_L: what is far below 0 is

    .. math::
        s = \sum_k w_k\, \tilde g_k^\top x_k, \quad x_k = \theta_k - \text{place}, \qquad
        w_k = \frac{\max(0, x_k^\top \hat F(\bar\theta - \theta_k))}{x_k^\top W x_k}, \qquad
        \operatorname{Var} s = \sum_k w_k^2\, x_k^\top W x_k + u^\top F u, \quad
        u = \sum_k w_k x_k,

    with weights that suit the quadratic log likelihood around the end. The last term is the
    sampling noise, which all releases have in common.

    Args:
        place: ``[d]``.
        earlier: releases that ``form`` is not of.
        form: what later ones say; F is counted as large as it may be.
    """
    points, values = (torch.stack([getattr(r, n) for r in earlier]) for n in ("theta", "value"))
    most = form.most_curvature(_DEVIATIONS)
    own = torch.tensor([r.noise_std**2 for r in earlier], dtype=torch.float64)
    rates = torch.tensor([r.sample_rate for r in earlier], dtype=torch.float64)
    away = points - place
    noise = own * away.square().sum(1) + (1 - rates) / rates * ((away @ most) * away).sum(1)
    signal = (away @ form.curvature * (form.centre - points)).sum(1)
    weights = torch.where(noise > 0, signal.clamp_min(0) / noise, 0.0)
    common = weights @ away
    variance = float(weights.square() @ noise + common @ most @ common)
    found = float(weights @ (away * values).sum(1))
    return variance > 0 and bool(norm.cdf(found / math.sqrt(variance)) < _CONTRADICTS)


def _symmetric_slope(x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """F̂ and R for centred points and gradients, whose noise has the covariance W."""
    half, inverse = roots(noise)
    x, y = x @ half, y @ inverse
    scatter, vectors = torch.linalg.eigh(x.T @ x)
    scatter = scatter.clamp_min(1e-12 * float(scatter[-1]))
    both = vectors.T @ (x.T @ y + y.T @ x) @ vectors
    slope = vectors @ (both / (scatter[:, None] + scatter)) @ vectors.T
    shape = (vectors / scatter.sqrt()) @ vectors.T
    return half @ slope @ half, half @ shape @ half


def _require_agreement(points: Tensor, values: Tensor, each: Tensor, found: NormalForm) -> None:
    """The means of each quarter are on the line that all of them lie on."""
    statistic, count = 0.0, 0
    gradient = values.mean(0)
    for some, theirs in zip(points.chunk(_QUARTERS), values.chunk(_QUARTERS), strict=True):
        moved = some.mean(0) - found.centre
        apart = theirs.mean(0) - gradient - found.curvature @ moved
        noise = each / len(some) + found.of_curvature_error(moved)
        covariance = noise + _LITTLE**2 * found.curvature
        statistic += float(apart @ torch.linalg.solve(covariance, apart))
        count += len(apart)
    if chi2.sf(statistic, count) < _SURELY:
        raise ValueError(
            "earlier and later releases contradict each other: the run has not arrived where the"
            " log likelihood is quadratic. Make more steps, or decay the learning rate."
        )
