"""Epsilon and delta of a history by privacy loss distributions: upper bounds, and lower ones.

Upper bounds merge close levels at their least private member, discretise so that privacy only
looks worse, and add what the computation does not see. Lower bounds round the other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from .bounded import RandomizedResponses, largest_sum, least_delta, least_epsilon
from .choices import SMALLEST_DELTA
from .composition import (
    ACCURACY,
    Composition,
    can_be_parted,
    choose_window,
    compose,
    epsilon_in_parts,
    tail_of,
)
from .failures import (
    apart,
    beside_failures,
    failing,
    left_of,
    with_failures,
)
from .gaussian import advantage_sum, gaussian_delta, gaussian_epsilon, sampled_epsilon
from .levels import EXACT_LEVELS, directions, merge, only_mu
from .pairs import (
    Concentrated,
    Failure,
    Gaussian,
    NonPrivate,
    Pair,
    Repeated,
    Sampled,
    added,
    dominating_mu,
    largest_loss,
)

_ROUGH_ACCURACY = 1e-2  # of a first bound in the better direction
_COARSE_ACCURACY = 1e-3  # of that of an extension of many levels
_LOWER_RATIO = 1.005
# shares of delta, and of epsilon, from which on a composition in parts is tighter
_ROUND_OFF, _OF_EPSILON = 1e-4, 4e-3
_FAR_LOSS, _FAR_MU = 500.0, 1e4  # beyond these the loss is not put on a grid

ZCDP_REFUSAL = (
    "zero-concentrated differential privacy has no privacy loss distribution: use"
    " PrivacyAccountant(method='rdp'), or, if the release is a Gaussian, charge"
    " MuGaussianDpEvent(sqrt(2 * rho)), which costs less."
)


REPEATED_REFUSAL = (
    "a selection is priced by Renyi curves: use PrivacyAccountant(method='rdp'), or charge"
    " accounting.selection.selection_event(...), which takes the better of both prices."
)


def require_loss_distribution(pair: Pair) -> None:
    """Raise where a pair is known by its Renyi curve only."""
    if isinstance(pair, Concentrated):
        raise ValueError(ZCDP_REFUSAL)
    if isinstance(pair, Repeated):
        raise ValueError(REPEATED_REFUSAL)


def _refused(counts: Mapping[Pair, int]) -> bool:
    for pair in counts:
        require_loss_distribution(pair)
    return any(isinstance(pair, NonPrivate) for pair in counts)


def upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """An upper bound on epsilon at ``delta``, for releases whose parameters were fixed in advance.

    Args:
        counts: how often each pair was released.
        delta: the probability with which the loss may pass epsilon.
    """
    if _refused(counts):
        return math.inf
    return beside_failures(
        counts,
        delta,
        lambda others, left: least_epsilon(others, lambda c: _upper_epsilon(c, left)),
    )


def _upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    if (exact := RandomizedResponses.of(counts)) is not None:
        return exact.epsilon(delta)
    if advantage_sum(counts) <= delta:  # (0, delta)-privacy adds up
        return 0.0
    if sum(counts.values()) == 1 and isinstance(only := next(iter(counts)), Sampled):
        return sampled_epsilon(only, delta)
    counts, largest = without_extremes(counts)
    if largest:
        return (largest + _upper_epsilon(counts, delta)) * (1 + 1e-15)
    levels = merge(counts)
    if (mu := only_mu(levels)) is not None:
        return gaussian_epsilon(mu, delta)
    try:
        return _worse(levels, lambda c: c.upper_epsilon(delta), delta=delta)
    except OverflowError:
        return math.inf


def _worse(
    levels: Mapping[Pair, int],
    ask: Callable[[Composition], float],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
) -> float:
    """The answer in the worse direction, which a rough bound on the other one often shows."""
    worst, interval = math.nan, None
    for reverse in directions(levels):
        if not math.isnan(worst):
            (rough,) = compose(
                levels,
                delta=delta,
                epsilon=epsilon,
                accuracy=_ROUGH_ACCURACY,
                interval=interval,
                reverse=reverse,
            )
            if ask(rough) <= worst:
                continue
        (fine,) = compose(levels, delta=delta, epsilon=epsilon, reverse=reverse)
        interval = None if delta is None else 4 * fine.interval
        found = ask(fine)
        if delta is not None and _lacks_digits(levels, fine, found):
            with suppress(OverflowError):  # losses too far apart: it stays loose
                found = epsilon_in_parts(levels, delta, reverse, found)
        worst = found if math.isnan(worst) else _worst([worst, found])
    return math.inf if math.isnan(worst) else worst


def _lacks_digits(levels: Mapping[Pair, int], found: Composition, epsilon: float) -> bool:
    return (
        len(levels) <= EXACT_LEVELS
        and can_be_parted(levels)
        and 0 < epsilon < math.inf
        and (
            found.interval > _OF_EPSILON * epsilon or found.share_of_round_off(epsilon) > _ROUND_OFF
        )
    )


class Extension:
    """The function from steps to an upper bound on epsilon of ``counts`` and ``steps`` times
    ``more``.

    A call costs one inverse FFT. The bound is tightest near ``guess`` steps.
    """

    def __init__(
        self,
        counts: Mapping[Pair, int],
        more: Mapping[Pair, int],
        delta: float,
        guess: int,
        corners: int = 0,
        accuracy: float = ACCURACY,
    ) -> None:
        self._delta = delta
        self._counts, self._more = dict(counts), dict(more)
        self._directions: list[tuple[Composition, Composition]] = []
        self._beyond = False
        joint = added(counts, more, guess)
        # of these a bound that needs no grid is asked for each time
        self._gridless = set(map(type, joint)) <= {Gaussian, Failure} or without_extremes(
            apart(joint)[1]
        ) != (apart(joint)[1], 0.0)
        if self._gridless:
            return
        failures, others = apart(added(counts, more, guess))
        delta = max(left_of(delta, min(failing(failures), delta)), SMALLEST_DELTA)
        base, step = merge(apart(counts)[1]), merge(apart(more)[1])
        joint = merge(others)
        tail = tail_of(delta, 4 * sum(joint.values()))

        def composed(reverse: bool, accuracy: float) -> tuple[Composition, Composition]:
            window = choose_window(
                joint, reverse, tail, log_delta=math.log(delta), accuracy=accuracy
            )
            before = Composition(window, base, reverse, tail)
            return before, before.like(step)

        try:
            # the better direction does not decide: it may stay rough
            if len(base) > EXACT_LEVELS and accuracy < _COARSE_ACCURACY:
                rough = [composed(reverse, _COARSE_ACCURACY) for reverse in directions(joint)]
                rough.sort(key=lambda pair: pair[0].upper_epsilon(delta))
                self._directions = [*rough[:-1], composed(rough[-1][0].reverse, accuracy)]
            else:
                self._directions = [composed(reverse, accuracy) for reverse in directions(joint)]
        except OverflowError:
            self._beyond = True

    def extend(self, counts: Mapping[Pair, int], more: Mapping[Pair, int]) -> None:
        """``counts`` were released too, and ``more`` is to be asked for from now on. The grid
        stays what it was.
        """
        self._counts, self._more = added(self._counts, counts), dict(more)
        new, step = merge(apart(counts)[1]), merge(apart(more)[1])
        try:
            self._directions = [
                (base.followed_by(base.like(new), 1) if new else base, base.like(step))
                for base, _ in self._directions
            ]
        except OverflowError:
            self._beyond = True

    def __call__(self, steps: int) -> float:
        if self._gridless:
            return upper_epsilon(added(self._counts, self._more, steps), self._delta)
        if self._beyond:
            return math.inf

        def price(_: dict[Pair, int], delta: float) -> float:
            try:
                joint = [
                    before.followed_by(after, steps) if steps else before
                    for before, after in self._directions
                ]
                return _worst([c.upper_epsilon(delta) for c in joint])
            except OverflowError:
                return math.inf

        return beside_failures(added(self._counts, self._more, steps), self._delta, price)


def without_extremes(counts: Mapping[Pair, int]) -> tuple[dict[Pair, int], float]:
    """What a distribution on a grid can tell apart, and what is to be added to its epsilon for the
    rest, which costs far more than any guarantee is worth: bounded losses count at their largest
    (basic composition), and beside such a Gaussian other releases count as Gaussians without
    amplification.
    """
    far: dict[Pair, int] = {
        pair: n for pair, n in counts.items() if _FAR_LOSS < largest_loss(pair) < math.inf
    }
    near: dict[Pair, int] = {pair: n for pair, n in counts.items() if pair not in far}
    if (
        math.fsum(n * pair.mu**2 for pair, n in near.items() if isinstance(pair, Gaussian))
        > _FAR_MU**2
    ):
        squared = math.fsum(n * dominating_mu(pair) ** 2 for pair, n in near.items())
        near = {Gaussian(math.sqrt(squared) * (1 + 1e-15)): 1}
    return near, largest_sum(far)


def _worst(values: list[float]) -> float:
    """The largest; ``max`` would pass over a NaN that does not come first."""
    return math.inf if any(map(math.isnan, values)) else max(values)


def lower_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """A lower bound: no accountant that knows no more than the events can prove less than this."""
    if _refused(counts):
        return math.inf
    failures, others = apart(counts)
    if failures:
        failed = failing(failures, upper=False)
        if failed > delta:
            return math.inf
        delta = max((delta - failed) / (1 - failed) * (1 + 1e-15), SMALLEST_DELTA)
    if (near := without_extremes(others)[0]) != others:  # leaving the others out only lowers it
        others = (
            {pair: n for pair, n in others.items() if isinstance(pair, Gaussian)}
            if _FAR_MU < (only_mu(near) or 0.0)
            else near
        )
    levels = merge(others, _LOWER_RATIO, upper=False)
    if (mu := only_mu(levels)) is not None:
        return gaussian_epsilon(mu, delta) * (1 - 1e-9)
    accuracy = ACCURACY / (100 if len(levels) <= 4 else 10 if len(levels) <= EXACT_LEVELS else 3)
    try:
        # either direction is a lower bound: the one that looks worse
        rough = compose(levels, delta=delta, accuracy=_ROUGH_ACCURACY)
        reverse = max(rough, key=lambda c: c.upper_epsilon(delta)).reverse
        (fine,) = compose(levels, delta=delta, accuracy=accuracy, reverse=reverse, mixed=False)
        return fine.lower_epsilon(delta)
    except OverflowError:
        return 0.0


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """An upper bound on delta at ``epsilon``."""
    if _refused(counts):
        return 1.0
    return with_failures(counts, lambda others: least_delta(others, epsilon, _upper_delta))


def _upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    if (exact := RandomizedResponses.of(counts)) is not None:
        return exact.delta(epsilon)
    counts, largest = without_extremes(counts)
    if largest:
        return _upper_delta(counts, (epsilon - largest) * (1 - 1e-15)) if epsilon > largest else 1.0
    levels = merge(counts)
    if (mu := only_mu(levels)) is not None:
        return max(0.0, min(1.0, gaussian_delta(mu, epsilon) * (1 + 1e-10)))
    try:
        return min(1.0, _worse(levels, lambda c: c.upper_delta(epsilon), epsilon=epsilon))
    except OverflowError:
        return 1.0
