"""What the front doors check and say alike."""

from __future__ import annotations

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import positive_count
from .planning import LARGEST_FULL_CURVATURE

_MOST = 0.5  # of a budget; an accountant that held more left little to the run


def budget_of(
    accountant: PrivacyAccountant | None, epsilon: float | None, delta: float | None
) -> PrivacyAccountant:
    """The caller's accountant, or one of its own for neighbours that replace a record."""
    if accountant is None:
        return PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    if not isinstance(accountant, PrivacyAccountant):
        raise TypeError(f"accountant must be a PrivacyAccountant, got {accountant!r}")
    return accountant


def little_left(
    accountant: PrivacyAccountant, epsilon: float | None, delta: float | None
) -> str | None:
    """That earlier charges took most of the budget, and what to do; None where they did not.

    Args:
        accountant: before the run is charged.
        epsilon: for everything on the accountant. None: its own budget.
        delta: likewise.
    """
    epsilon = accountant.epsilon if epsilon is None else epsilon
    delta = accountant.delta if delta is None else delta
    if epsilon is None or delta is None or not len(accountant):
        return None
    held = accountant.get_epsilon(delta)
    if held <= _MOST * epsilon:
        return None
    return (
        f"the accountant held epsilon = {held:.5g} of {epsilon:g} before this run. State epsilon="
        " in each run, or pass a new accountant."
    )


def require_small(count: int, instead: str, what: str = "parameters") -> None:
    """Refuses matrices that do not fit into memory, or would not be inverted in a day.

    Args:
        count: of rows.
        instead: what to do.
        what: there are so many of.
    """
    if count > LARGEST_FULL_CURVATURE:
        raise ValueError(
            f"{count} {what} need a matrix of {count}² numbers; at most {LARGEST_FULL_CURVATURE}"
            f" {what} are possible: {instead}."
        )


def shortened_rows(max_feature_norm: float) -> str:
    """A statement's line of what rows of features are."""
    return (
        f"  features    rows longer than {max_feature_norm:g} (max_feature_norm) are shortened to"
        " it: the weights are those of shortened rows"
    )


def public_num_data(stated: int | None, found: int, accountant: PrivacyAccountant) -> int:
    """The number of records that may be used without a charge: stated under
    add-or-remove-one, counted under replace-one.
    """
    if stated is not None:
        stated = positive_count(stated, "num_data")
    if accountant.neighboring == "replace_one":
        if stated is not None and stated != found:
            raise ValueError(
                f"num_data = {stated} was stated, but there are {found} records; under replace-one"
                " leave it out."
            )
        return max(found, 1)
    if stated is None:
        raise ValueError(
            "this accountant's neighbours add or remove a record, so the number of records is"
            " private itself: state num_data=, a public number near it, or use"
            " PrivacyAccountant(neighboring='replace_one')."
        )
    return stated
