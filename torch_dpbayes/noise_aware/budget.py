"""Split a budget among the releases of a run: a function of public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    positive_count,
)
from ..errors import ArgumentError, ArgumentTypeError
from .categories import has_combinations

NUM_RELEASES, _MOST_RELEASES = 7, 50
# of the shares from one release of scores to the next: the first ones only serve to arrive
_GROWTH = 1.8
_CLIPPED = 0.005  # of the budget, for the number of clipped records at the end
_LEAST_SHARE, _MOST_SHARE = 0.04, 0.30  # of the budget, for the law of the covariates
_CATEGORIES = 0.02  # of the budget, for counts of categories
# of what is spent on rows of numbers, for their mean and for their sums by category
_MEAN_SHARE, _SUMS_SHARE = 0.2, 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """The noise multipliers (noise standard deviation / sensitivity to one added record) of a run,
    fixed before its first release.
    """

    total: float  # of the one release that would use all of the budget, 1/μ
    scores: tuple[float, ...]  # of the clipped sums of scores
    moments: tuple[float, float] | None  # of the mean and the products of rows of numbers
    categories: float | None  # of all sums by category
    clipped: float  # of the number of clipped records
    event: DpEvent  # what is charged

    @property
    def together(self) -> float:
        """The noise multiplier of one release that costs as much as all releases of scores
        together.
        """
        return float(sum(z**-2 for z in self.scores) ** -0.5)


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
    """The split, with κ = n/(z·d) for the multiplier z of the whole: rows of numbers take 2/√κ of
    the budget, between .04 and .30. ``has_numbers`` where covariates are private rows of numbers;
    what a record adds to sums by category has ``num_ones`` for squared length.
    """
    if positive_count(num_releases, "num_releases") > _MOST_RELEASES:
        raise ArgumentError(f"num_releases = {num_releases}: take at most {_MOST_RELEASES}.")
    total = total_multiplier(accountant, epsilon, delta)
    events: list[DpEvent] = []

    def noise(share: float, moved: float = 2.0) -> float:
        """The multiplier of a release with this share of the budget, which replacing a record moves
        by ``moved`` and adding one by 1. The accountant takes ``moved`` for 2.
        """
        events.append(GaussianDpEvent(total / math.sqrt(share)))
        is_swap = accountant.neighboring == "replace_one"
        return total / math.sqrt(share) * (moved / 2 if is_swap else 1.0)

    moments, categories, of_rest, of_sums = None, None, 1 - _CLIPPED, 0.0
    if has_numbers:
        gain = num_data / (total * dimension)
        share = min(max(2 / math.sqrt(gain), _LEAST_SHARE), _MOST_SHARE)
        of_sums = _SUMS_SHARE * share if num_ones else 0.0
        of_products = noise(share * (1 - _MEAN_SHARE) - of_sums, math.sqrt(2))
        moments = noise(share * _MEAN_SHARE), of_products
        of_rest -= share
    if num_ones:
        categories = math.sqrt(num_ones) * noise(_CATEGORIES + of_sums, math.sqrt(2))
        of_rest -= _CATEGORIES
    weights = [_GROWTH**k for k in range(num_releases)]
    scores = tuple(noise(of_rest * w / sum(weights)) for w in weights)
    clipped = noise(_CLIPPED, 1.0)
    return Plan(total, scores, moments, categories, clipped, ComposedDpEvent(events))


def budget_of(
    accountant: PrivacyAccountant | None, epsilon: float | None, delta: float | None
) -> PrivacyAccountant:
    """The caller's accountant, or one of its own for neighbours that replace a record."""
    if accountant is None:
        return PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    if not isinstance(accountant, PrivacyAccountant):
        raise ArgumentTypeError(f"accountant must be a PrivacyAccountant, got {accountant!r}.")
    return accountant


def public_num_data(stated: int | None, found: int, accountant: PrivacyAccountant) -> int:
    """The number of records that may be used without a charge: stated under add-or-remove-one,
    counted under replace-one.
    """
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
            " private: pass a public number near it as num_data=, or use"
            " PrivacyAccountant(neighboring='replace_one')."
        )
    return stated


def statement_of_charge(accountant: PrivacyAccountant, releases: Sequence[str]) -> list[str]:
    """State in words what was charged, and how far one record moves each release."""
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
    """State in words what a run releases, with rows of numbers shortened to ``bound``, if any."""
    lines = [f"{count} clipped sums; a record moves each by at most 1 in units of its clip bound"]
    if bound is not None:
        lines.append(
            f"mean and products of features; rows longer than {bound:g} (max_feature_norm) are"
            " shortened to it, and parameters are those of shortened rows"
        )
    if categories:
        sums = "" if bound is None else ", sums of covariates in each"
        more = ", counts of their combinations" if has_combinations(categories) else ""
        lines.append(f"counts of each category{sums}{more}")
    return [*lines, "the number of clipped records"]
