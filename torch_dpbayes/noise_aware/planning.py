"""How a budget is split between gradients and curvature: a function of public numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import calibrated
from ..accounting.events import (
    GaussianDpEvent,
    Neighboring,
    check_delta,
    check_epsilon,
    neighboring_relation,
)

LARGEST_FULL_CURVATURE = 4000  # parameters
_ROUNDING = 1e-9  # the parts' prices add up to the whole but for this
_STEPS = 16
# of the gradients' shares from one step to the next: the first ones only serve to arrive
_GROWTH = 1.4
_DIAGONAL = 0.15  # of the budget
_LENGTHS = 0.01
_CLIPPED = 0.01
_LEVELS = 0.25  # of what a curvature costs
# A gradient's square in units of the bound's; and shares of a level that its error has where the
# level is not known, and where noise hides more than that
_TYPICAL, _UNSURE, _LOST = 0.2, 0.1, 0.3
# n/(zd), at which what clipping adds to the error and what it takes of the noise are the same on
# Adult with seven columns; on Abalone they are the same at 300 and on breast cancer beyond 30
_ENOUGH_TOLD = 500
_CURVATURES = 3  # releases of a general model's curvature, which changes on the way


@dataclass(frozen=True, slots=True)
class Plan:
    """The noise multipliers (noise standard deviation / clip bound) of a run, all of them fixed
    before its first release.

    ``curvature_multipliers`` are those of curvatures at the points of the last so many steps.
    """

    gradient_multipliers: tuple[float, ...]
    curvature_multipliers: tuple[float, ...] = ()
    gram_multipliers: tuple[float, ...] = ()
    """Of the Gram matrix of the features as they are, and as the run then takes them."""
    length_multipliers: tuple[float, ...] = ()
    """Of the histogram of the features' lengths."""
    level_multipliers: tuple[float, ...] = ()
    """Of the sums over each site of the diagonal of each curvature; none where these would not
    help."""
    clipped_multipliers: tuple[float, ...] = ()
    """Of the number of clipped gradients."""
    curvature_steps: tuple[int, ...] = ()
    """Steps at which a curvature is released, after the gradient and at the same point."""


def total_multiplier(
    accountant: PrivacyAccountant, epsilon: float | None, delta: float | None
) -> float:
    """The noise multiplier of the one Gaussian release that would use the budget up.

    Args:
        accountant: what it holds already counts.
        epsilon: for everything on the accountant. None: its own budget.
        delta: likewise.

    Raises:
        ValueError: there is no budget, or nothing left of it.
    """
    epsilon = accountant.epsilon if epsilon is None else epsilon
    delta = accountant.delta if delta is None else delta
    if epsilon is None or delta is None:
        raise ValueError(
            "a budget is needed, both numbers of it: epsilon=1.0, delta=1e-5, or an accountant that"
            " has them."
        )
    check_epsilon(epsilon)
    check_delta(delta)
    try:
        found = calibrated(
            GaussianDpEvent,
            epsilon,
            delta,
            1,
            accountant.neighboring,
            accountant.history,
            accountant.method,
        )
    except ValueError as error:
        if not len(accountant) or math.isinf(held := accountant.get_epsilon(delta)):
            raise
        raise ValueError(
            f"nothing is left for this run: the accountant holds epsilon = {held:.5g} of"
            f" {epsilon:g}. State epsilon= in each run, or pass a new accountant."
        ) from error
    return found * (1 + _ROUNDING)


def logistic_bound(
    multiplier: float, dimension: int, num_data: int, max_feature_norm: float
) -> float:
    """Where a logistic regression's gradients are clipped if the user does not say: at half of what
    they can be, which halves the noise, unless there is so little noise that the error of a model
    which is not quite right counts for more: clipped scores have their zero elsewhere then.

    Args:
        multiplier: of the one release that would use all of the budget.
        dimension: d.
        num_data: the public number of records.
        max_feature_norm: the largest norm of a gradient.
    """
    is_told = num_data >= _ENOUGH_TOLD * multiplier * dimension
    return max_feature_norm if is_told else max_feature_norm / 2


def glm_plan(
    multiplier: float, dimension: int, num_data: int, neighboring: Neighboring, *, quadratic: bool
) -> Plan:
    """The split for a generalised linear model: two Gram matrices, gradients, and a Hessian at the
    last point where it is worth its price.

    Args:
        multiplier: of the one release that would use all of the budget.
        dimension: d.
        num_data: the public number of records.
        neighboring: decides how much a matrix costs.
        quadratic: the Hessian is a multiple of the Gram matrix.
    """
    gain = num_data / (multiplier * dimension)
    gram = _within(2 / math.sqrt(gain), 0.04, 0.30)
    hessian = 0.0 if quadratic or gain < 20 else _within(1.5 / math.sqrt(gain), 0.04, 0.15)
    hessians = [matrix_multiplier(multiplier, hessian, neighboring)] if hessian else []
    return Plan(
        _gradients(multiplier, 1 - gram - hessian - _LENGTHS),
        tuple(hessians),
        (matrix_multiplier(multiplier, gram / 2, neighboring),) * 2,
        (matrix_multiplier(multiplier, _LENGTHS, neighboring),),
        curvature_steps=(_STEPS - 1,) if hessian else (),
    )


def general_plan(
    multiplier: float,
    dimension: int,
    num_data: int,
    neighboring: Neighboring,
    *,
    clips: bool,
    has_groups: bool = False,
) -> Plan:
    """The split for any other model: curvatures at the start, on the way and at the end, each
    dearer than the one before, and where gradients are clipped the number of those that are.

    The level of a group's curvature, its mean over all groups, has 1/√d of a matrix' noise. A sum
    of its own, over all of them, has 1/d of it: where noise hides the level, a part of what
    matrices cost goes there. Under still more noise a run says little of single groups, far from
    where its quadratic holds, and a level that is known well would make that worse: of 20 groups, n
    = 1,000 and ε = .3, 90 % intervals held .82 ± .03 with it and .88 ± .01 without (42 and 100 data
    sets, c9d7580 and before).

    Args:
        multiplier: of the one release that would use all of the budget.
        dimension: d.
        num_data: n, the public number of records.
        neighboring: decides how much a matrix costs.
        clips: curvatures are of clipped gradients.
        has_groups: every record reads the parameters of one group.
    """
    gain = num_data / (multiplier * dimension)
    share = _within(4 / math.sqrt(gain), 0.10, 0.40)
    noise = matrix_multiplier(multiplier, share, neighboring) / math.sqrt(dimension)
    is_unsure = _UNSURE < noise / (_TYPICAL * num_data / dimension) < _LOST
    of_levels = _LEVELS * share if has_groups and clips and is_unsure else 0.0
    clipped = _CLIPPED if clips else 0.0

    def matrices(part: float) -> tuple[float, ...]:
        weights = [0.15, 0.25, 0.60] if part else []
        return tuple(matrix_multiplier(multiplier, part * w, neighboring) for w in weights)

    return Plan(
        _gradients(multiplier, 1 - share - clipped),
        matrices(share - of_levels),
        level_multipliers=matrices(of_levels),
        clipped_multipliers=_of_count(multiplier, clipped, neighboring),
        curvature_steps=(0, _STEPS // 2, _STEPS - 2),
    )


def diagonal_plan(multiplier: float, neighboring: Neighboring, *, clips: bool) -> Plan:
    """The split for the diagonal form. Where there are thousands of parameters noise hides how
    their curvatures differ, and their level is told by a small part of the budget.
    """
    weights = [0.10, 0.10, 0.20, 0.60]
    diagonals = tuple(matrix_multiplier(multiplier, _DIAGONAL * w, neighboring) for w in weights)
    clipped = _CLIPPED if clips else 0.0
    return Plan(
        _gradients(multiplier, 1 - _DIAGONAL - clipped),
        diagonals,
        clipped_multipliers=_of_count(multiplier, clipped, neighboring),
        curvature_steps=(0, _STEPS // 4, _STEPS // 2, _STEPS - 2),
    )


def _of_count(multiplier: float, share: float, neighboring: Neighboring) -> tuple[float, ...]:
    return (matrix_multiplier(multiplier, share, neighboring),) if share else ()


def _gradients(multiplier: float, share: float) -> tuple[float, ...]:
    weights = [_GROWTH**k for k in range(_STEPS)]
    return tuple(_at_share(multiplier, share * w / sum(weights)) for w in weights)


def matrix_multiplier(multiplier: float, share: float, neighboring: Neighboring) -> float:
    """A matrix's price is less than a gradient's under replace-one: see :func:`matrix_event`."""
    is_swap = neighboring_relation(neighboring) == "replace_one"
    return _at_share(multiplier, share) / (math.sqrt(2) if is_swap else 1.0)


def _at_share(multiplier: float, share: float) -> float:
    return multiplier / math.sqrt(share)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
