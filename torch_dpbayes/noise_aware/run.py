"""The private run: divides the budget among the releases, and releases sums of scores, each at the
mode given the earlier releases.

**Privacy.** All events are charged before the first release, with noise multipliers that are
functions of public numbers. The point, whitening and clip bound of a release are functions of
earlier releases. Only the releases depend on records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent, positive_count
from ..errors import ArgumentError, ArgumentTypeError
from .covariance import normal_numbers
from .covariates import (
    FeatureShape,
    NoisyCategories,
    NoisyMoments,
    all_numbers,
    has_combinations,
    in_units,
    noisy_categories,
    noisy_moments,
    shortened_rows,
)
from .latents import Latents
from .likelihood import Release, Simulator, find_mode, moments, posterior_precision
from .records import ModelRecords, clipped, scores

NUM_RELEASES, _MOST_RELEASES = 7, 50
_NUM_MOMENTS = 3  # releases of moments of rows of numbers
# ratio of the shares of successive releases: the first ones only tell how to whiten the last
_GROWTH = 1.8
_CLIPPED = 0.005  # of the budget, for the number of clipped records at the end
_LEAST_SHARE, _MOST_SHARE = 0.04, 0.30  # of the budget, for the law of the covariates
_CATEGORIES = 0.02  # of the budget, for counts of categories
# shares of the budget for rows of numbers: for their mean, and for their sums by category
_MEAN_SHARE, _SUMS_SHARE = 0.2, 0.3
QUANTILES = (0.5, 0.8, 0.95, 1.0)  # of simulated norms: the candidates for the clip bound
# a larger clip bound may cost a twentieth of the width, 1.05² in variance: if a model is not quite
# right, clipping moves the θ at which its scores sum to zero
_SPARED = 0.10
# standard deviation of a record's log ratio under the prior. If the parameters themselves are about
# 200 deviations of a log ratio from the prior's median, simulated derivatives are too noisy, the
# search for the mode ends elsewhere, and the draws are unreliable, which a run says. At some
# thousands one run did not.
_FARTHEST = 1e3
_ROWS = 50_000  # of private records whose scores are in memory at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """The noise multipliers of a run: noise deviation / sensitivity to one added record."""

    total: float  # of a single release with the whole budget, 1/μ
    scores: tuple[float, ...]  # of the clipped sums of scores
    together: float  # of one release that costs as much as all of these
    moments: tuple[tuple[float, float], ...]  # of the means and the products of rows of numbers
    categories: float | None  # of all sums by category
    clipped: float  # of the number of clipped records
    event: DpEvent  # the charge


def plan_run(
    accountant: PrivacyAccountant,
    epsilon: float | None,
    delta: float | None,
    *,
    dimension: int,
    num_data: int,
    num_releases: int,
    has_numbers: bool,
    num_ones: int,
) -> Plan:
    """Split the budget. Rows of numbers get the share 2/√κ, between .04 and .30, where κ = n/(z·d)
    and z is the multiplier of the whole budget. ``has_numbers``: covariates are private rows of
    numbers. ``num_ones``: squared length of the vector that a record adds to sums by category.
    """
    if positive_count(num_releases, "num_releases") > _MOST_RELEASES:
        raise ArgumentError(f"num_releases = {num_releases}: use at most {_MOST_RELEASES}.")
    total = total_multiplier(accountant, epsilon, delta)
    events: list[DpEvent] = []

    def noise(share: float, moved: float = 2.0) -> float:
        """The multiplier of a release with this share of the budget. Replacing a record moves the
        release by ``moved``, adding one by 1. The accountant assumes that ``moved`` is 2.
        """
        events.append(GaussianDpEvent(total / math.sqrt(share)))
        is_swap = accountant.neighboring == "replace_one"
        return total / math.sqrt(share) * (moved / 2 if is_swap else 1.0)

    moments, categories = list[tuple[float, float]](), None
    of_rest, of_sums = 1 - _CLIPPED, 0.0
    if has_numbers:
        gain = num_data / (total * dimension)
        share = min(max(2 / math.sqrt(gain), _LEAST_SHARE), _MOST_SHARE)
        of_sums = _SUMS_SHARE * share if num_ones else 0.0
        for part in growing(_NUM_MOMENTS):
            of_products = noise(part * (share * (1 - _MEAN_SHARE) - of_sums), math.sqrt(2))
            moments.append((noise(part * share * _MEAN_SHARE), of_products))
        of_rest -= share
    if num_ones:
        categories = math.sqrt(num_ones) * noise(_CATEGORIES + of_sums, math.sqrt(2))
        of_rest -= _CATEGORIES
    scores = tuple(noise(of_rest * part) for part in growing(num_releases))
    together = sum(z**-2 for z in scores) ** -0.5
    clipped = noise(_CLIPPED, 1.0)
    return Plan(
        total, scores, together, tuple(moments), categories, clipped, ComposedDpEvent(events)
    )


def growing(count: int) -> list[float]:
    """Shares of successive releases, which add up to 1."""
    weights = [_GROWTH**k for k in range(count)]
    return [w / sum(weights) for w in weights]


def budget_of(
    accountant: PrivacyAccountant | None, epsilon: float | None, delta: float | None
) -> PrivacyAccountant:
    """The caller's accountant, or a new one for replace-one."""
    if accountant is None:
        return PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    if not isinstance(accountant, PrivacyAccountant):
        raise ArgumentTypeError(f"accountant must be a PrivacyAccountant, got {accountant!r}.")
    return accountant


def public_num_data(stated: int | None, found: int, accountant: PrivacyAccountant) -> int:
    """The number of records: as stated if it is private (add or remove one), else as found."""
    if stated is not None:
        stated = positive_count(stated, "num_data")
    if accountant.neighboring == "replace_one":
        if stated is not None and stated != found:
            raise ArgumentError(
                f"num_data = {stated} was stated, but there are {found} records; under replace-one"
                " leave it out."
            )
        return max(found, 1)
    if stated is None:
        raise ArgumentError(
            "this accountant's neighbours add or remove a record, so the number of records is"
            " private: pass a public estimate as num_data=, or use"
            " PrivacyAccountant(neighboring='replace_one')."
        )
    return stated


def require_near(spread: float, bound: float | None) -> None:
    """Refuse rows that are too long for the prior. ``spread``: standard deviation of a record's log
    ratio under the prior. ``bound``: max_feature_norm; None if rows are public.
    """
    if spread <= _FARTHEST:
        return
    what, advice = "public rows are too long", "divide them by a public constant"
    if bound is not None:
        what = f"max_feature_norm = {bound:g} is too large"
        advice = "pass the norm that most rows have"
    raise ArgumentError(
        f"{what} for this prior, whose mode is then too far away: {advice}, or"
        " use a narrower prior."
    )


def statement_of_charge(accountant: PrivacyAccountant, releases: Sequence[str]) -> list[str]:
    """Lines that state the charge, and how far one record moves each release."""
    delta = 1e-5 if accountant.delta is None else accountant.delta
    return [
        (
            "  charged     before the first release; the accountant now holds epsilon ="
            f" {accountant.get_epsilon(delta):.5g} at delta = {delta:g} ({accountant.neighboring})"
        ),
        *(f"  released    {line}" for line in releases),
    ]


def statement_of_releases(
    count: int, bound: float | None, categories: Mapping[int, int]
) -> list[str]:
    """Lines that state what a run releases. ``bound``: rows of numbers are shortened to it."""
    lines = [f"{count} clipped sums; a record moves each by at most 1 in units of its clip bound"]
    if bound is not None:
        lines.append(
            f"means and products of features; rows longer than {bound:g} (max_feature_norm) are"
            " shortened to it, and parameters are those of shortened rows"
        )
    if categories:
        sums = "" if bound is None else ", sums of covariates in each"
        more = ", counts of their combinations" if has_combinations(categories) else ""
        lines.append(f"counts of each category{sums}{more}")
    return [*lines, "the number of clipped records"]


@dataclass(frozen=True)
class Transcript:
    """Everything that a run released, in the order of the releases."""

    moments: Sequence[NoisyMoments]  # of rows of numbers
    categories: NoisyCategories | None
    scores: tuple[Release, ...] = ()  # the clipped sums
    clipped: tuple[float, float] = (0.0, 0.0)  # the noisy number at the end, and its noise


class Mechanism:
    r"""Draws the noise of a run that was charged. Only this class reads private rows. ``seed``: of
    the draws that whiten rows.

    **Privacy.** :math:`\sum_i \mathrm{clip}_1(A\,u(x_i; \theta)/C)` moves by at most 1 when a
    record is added or removed, and by 2 when one is replaced; the number of clipped records by 1. A
    record whose density or score is not finite counts as 0.
    """

    def __init__(
        self,
        records: ModelRecords,
        shape: FeatureShape | None,
        categories: Mapping[int, int],
        num_data: int,
        seed: int,
    ) -> None:
        self._num_data, self._seed = num_data, seed
        self._records, self._shape, self._categories = records, shape, categories
        self._rows = shortened_rows(records, records.density.rows(), shape)

    def covariates(self, plan: Plan) -> Transcript:
        """Release statistics of the covariates."""
        records, rows, categories = self._records, None, None
        moments = list[NoisyMoments]()
        if self._shape is not None:
            rows = in_units(all_numbers(records, self._rows), self._shape)
            moments = noisy_moments(rows, plan.moments, self._num_data, self._seed)
        if plan.categories is not None:
            columns = [self._rows[k].reshape(-1).long().cpu() for k in self._categories]
            categories = noisy_categories(columns, self._categories, rows, plan.categories)
        return Transcript(moments, categories)

    def scores(self, theta: Tensor, whitening: Tensor, multiplier: float) -> Release:
        """The noisy clipped sum of whitened scores."""
        exact = self.clipped_sum(theta, whitening)
        noisy = exact + multiplier * normal_numbers(len(exact))
        return Release(theta, whitening, noisy, multiplier)

    def clipped_count(self, release: Release, multiplier: float) -> float:
        """The noisy number of records that were clipped in a release."""
        exact = sum(
            int(((own @ release.whitening.T).norm(dim=1) > 1).sum())
            for own in self._scores(release.theta)
        )
        return exact + multiplier * float(normal_numbers(1))

    def clipped_sum(self, theta: Tensor, whitening: Tensor) -> Tensor:
        """The sum for A/C = ``whitening``, ``[d]`` in float64. Private data."""
        total = torch.zeros(len(whitening), dtype=torch.float64)
        for own in self._scores(theta):
            total += clipped(own, whitening).sum(0)
        return total

    def _scores(self, theta: Tensor) -> Iterator[Tensor]:
        """The scores of all records, in chunks."""
        density = self._records.density
        for start in range(0, density.num_records, _ROWS):
            rows = [row[start : start + _ROWS] for row in self._rows]
            yield scores(self._records, density.with_rows(rows), theta)


class Scale(NamedTuple):
    """How scores at a point are whitened and clipped, and their expected moments."""

    whitening: Tensor
    clip_bound: float
    variances: Tensor


def choose_scale(
    simulator: Simulator,
    latents: Latents,
    theta: Tensor,
    multiplier: float,
    max_grad_norm: float | None,
) -> Scale:
    r"""Whitening and clip bound at θ, by simulation.

    .. math::
        A = \Big(F + \lambda P\Big)^{-1/2}, \qquad \lambda = \frac{n + z^2 d}{n^2}

    gives the noise the shape of the posterior. In directions where n²F/(n + z²d) is below the
    prior's precision P, the records have less information than the prior, so A does not scale them
    up further. C is the largest of a few quantiles of ‖Au‖ at which the geometric mean of the
    posterior variances is at most a tenth above its least value. ``multiplier`` is z of all
    releases of scores together. ``max_grad_norm`` replaces both: C for ‖u‖ itself, with A = I.
    """
    simulated = simulator.at(theta)
    own, n = simulated.scores, simulator.num_data
    size = own.shape[1]
    information = own.T @ own / len(own)
    _, prior_precision = latents.slope_and_precision(theta)
    values, vectors = torch.linalg.eigh(
        information + (n + multiplier**2 * size) / n**2 * prior_precision
    )
    root = (vectors * values.clamp_min(1e-300).rsqrt()) @ vectors.T
    expected, eye = {}, torch.eye(size, dtype=torch.float64)
    norms = (own @ root.T).norm(dim=1)
    positive, candidates = norms[norms > 0], [1.0]
    if max_grad_norm is not None:
        root, candidates = eye, [float(max_grad_norm)]
    elif len(positive):
        candidates = positive.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    for bound in candidates:  # posterior variances if all releases of scores were at this point
        found = moments(clipped(own, root / bound), own, simulator.covariates.is_paired)
        covariance = n * found.covariance + multiplier**2 * eye
        precision, _ = posterior_precision(found, covariance, prior_precision, n)
        expected[bound] = torch.cholesky_inverse(torch.linalg.cholesky(precision)).diagonal()
    chosen = largest_bound({c: float(v.log().mean()) for c, v in expected.items()})
    return Scale(root / chosen, chosen, expected[chosen])


def largest_bound(levels: Mapping[float, float]) -> float:
    """The largest clip bound whose mean log variance in ``levels`` is close to the least."""
    most = min(levels.values()) + math.log1p(_SPARED)
    return max(bound for bound, level in levels.items() if level <= most)


def run(
    mechanism: Mechanism,
    transcript: Transcript,
    simulator: Simulator,
    latents: Latents,
    plan: Plan,
    max_grad_norm: float | None,
) -> tuple[Transcript, Tensor]:
    """Release the scores, each at the mode given the earlier ones, and return the last mode."""
    theta, releases = latents.median, list[Release]()
    for multiplier in plan.scores:
        scale = choose_scale(simulator, latents, theta, plan.together, max_grad_norm)
        releases.append(mechanism.scores(theta, scale.whitening, multiplier))
        theta = find_mode(simulator, releases, latents, theta).centre
    clipped = mechanism.clipped_count(releases[-1], plan.clipped), plan.clipped
    return replace(transcript, scores=tuple(releases), clipped=clipped), theta
