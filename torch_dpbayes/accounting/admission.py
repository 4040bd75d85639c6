"""What still fits a budget, decided by the cheapest bound that can decide it.

1. *An additive bound.* Renyi divergences at a few orders add up, and a budget allows each order a
   divergence that follows from the budget alone. A charge fits if one order keeps its limit. That
   costs microseconds: the divergence of a release is computed once for each cell of a geometric
   grid of noise multipliers (rounded down) and sampling rates (rounded up). Nothing that is
   reported is computed from these roundings.
2. *A certificate.* Near the limit a composition shows that so many more releases of some kinds fit
   together. Charges that they dominate are taken out of it.
3. *A composition.* Only it refuses, so that no charge is refused that the reported epsilon would
   have allowed.

A filter takes the place of all three where parameters may depend on earlier outputs: one order, one
limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from . import bounds, renyi
from .bounds import Extension
from .choices import Method
from .filters import Budget, Filter, orders_of
from .pairs import Array, Gaussian, NonPrivate, Pair, Sampled, added, covers, dominating_mu, take
from .search import MOST_STEPS, largest

_GRID = 1.02  # ratio of the cells in which the additive bound rounds
_EXACT_COSTS = 16  # so many different releases are priced as they are before rounding starts
_SLACK = 1.01  # the least by which a reserve for falling noise lies below it
_FEW = 4  # levels that are composed afresh for every count tried
_MANY = 48  # levels beyond which compositions merge
_FAR_FROM_EDGE = 256  # steps that are known to fit, of which a small share is to be reserved
_SHRINK = 8  # how much less a certificate is expected to hold than the one before
_COARSE = 100  # corners of a first, cheap composition of many levels


class _Family:
    """Releases that differ in their noise only: what was seen of them lately, to guess what
    comes next.
    """

    __slots__ = ("falling", "last", "slack", "used")

    def __init__(self, last: Pair) -> None:
        self.last, self.used, self.falling, self.slack = last, 0, False, _SLACK

    def floor(self, pair: Pair) -> Pair:
        """What to reserve so that the next releases are covered too. While noise falls, a
        little less of it.
        """
        return weaker(pair, self.slack) if self.falling else pair

    def fell_through(self) -> None:
        self.slack = min(self.slack**2, 1.2)

    def used_up(self) -> None:
        self.slack = max(math.sqrt(self.slack), _SLACK)


class Admission:
    """What is left of one budget after what was charged.

    Args:
        budget: epsilon and delta.
        method: how compositions are priced.
        filter: the rule for parameters that may depend on earlier outputs, or ``None``.
    """

    def __init__(self, budget: Budget, method: Method, filter: Filter | None = None) -> None:
        (self._epsilon, self._delta), self._method, self._filter = budget, method, filter
        if filter is None:
            self._orders = orders_of(budget, 0.15, 1.6, 12)
            limits = renyi.allowed(*budget, self._orders)
        else:
            self._orders = () if filter.kind == "gaussian" else (filter.order,)
            limits = np.array([filter.limit])
        self._of_gaussian = np.array(self._orders) / 2 if self._orders else np.ones(1)
        self._limits = limits * (1 - 1e-9)  # sums of costs carry round-off
        self._costs: dict[Hashable, Array] = {}
        self._families: dict[Hashable, _Family] = {}
        self._certificate: dict[Pair, int] = {}
        self._fine: tuple[dict[Pair, int], Extension] | None = None
        self._guess = 0
        self._spent = np.zeros(len(self._limits))

    # --- keeping up -------------------------------------------------------------------------------

    def restart(self, counts: Mapping[Pair, int]) -> None:
        """What was charged is ``counts``, whatever was said before."""
        self._certificate.clear()
        self._spent = np.zeros(len(self._limits))
        for pair, count in counts.items():
            self._spent = self._spent + count * self._cost(pair)

    def spend(self, pair: Pair, count: int) -> None:
        """So many releases were charged that :meth:`admits` or :meth:`room` let through."""
        self._spent = self._spent + count * self._cost(pair)
        family = self._family(pair)
        if pair != family.last:
            family.falling = covers(pair, family.last)
            family.last = pair
        family.used += count

    def others_spent(self, counts: Mapping[Pair, int], net: Mapping[Pair, int]) -> None:
        """Other processes charged ``net``, which is negative where they gave something back;
        ``counts`` is the sum of everything.
        """
        freed = {pair: -count for pair, count in net.items() if count < 0}
        certificate = self._certificate.copy()
        covered = all(
            take(freed, p, count) or take(certificate, p, count)
            for p, count in net.items()
            if count > 0
        )
        if freed:
            self.restart(counts)
        else:
            for pair, count in net.items():
                self._spent = self._spent + count * self._cost(pair)
        self._certificate = certificate if covered else {}

    def _family(self, pair: Pair) -> _Family:
        key: Hashable = pair
        if isinstance(pair, Sampled):
            key = (pair.kind, pair.rate)
        elif isinstance(pair, Gaussian):
            key = Gaussian
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = _Family(pair)
        return family

    def slack(self, pair: Pair) -> float:
        """By how much the noise of a reserve should be lower than that of ``pair``: 1 unless
        noise is falling.
        """
        family = self._family(pair)
        return family.slack if family.falling else 1.0

    def reserved(self, pair: Pair, fell_through: bool) -> None:
        """A reserve for the family of ``pair`` ended: because noise fell below it, or because
        it was used up.
        """
        family = self._family(pair)
        if fell_through:
            family.fell_through()
        else:
            family.used_up()

    # --- deciding ---------------------------------------------------------------------------------

    def admits(self, counts: Mapping[Pair, int], need: Mapping[Pair, int]) -> bool:
        """Whether ``need`` fits after ``counts``."""
        if self._certificate and self._take_certified(need, 1):
            return True
        spent = self._spent
        for pair, count in need.items():
            spent = spent + count * self._cost(pair)
        if (spent <= self._limits).any():
            self._certificate.clear()
            return True
        return self._certify(counts, need)

    def room(
        self,
        counts: Mapping[Pair, int],
        reserved: Mapping[Pair, int],
        unit: Mapping[Pair, int],
        wanted: int,
    ) -> int:
        """How many times ``unit`` fits after ``counts`` and ``reserved``: exact if 0, else
        perhaps less, and at most ``wanted``.
        """
        cheap = self._cheap(reserved, unit)
        if cheap >= min(wanted, _FAR_FROM_EDGE):
            return min(cheap, wanted)
        certified = self._certified(unit)
        if not certified:
            base = added(counts, reserved)
            if not self._certify(base, unit):
                return cheap
            for pair, count in unit.items():
                self._certificate[pair] = self._certificate.get(pair, 0) + count
            certified = self._certified(unit)
        return min(max(cheap, certified), wanted)

    def certain(self, pair: Pair) -> int:
        """How many more of ``pair`` fit that need no composition."""
        unit = {pair: 1}
        return max(self._cheap({}, unit), self._certified(unit))

    def take(self, unit: Mapping[Pair, int], times: int) -> None:
        """``times`` times ``unit`` is now reserved."""
        if not self._take_certified(unit, times):
            self._certificate.clear()

    def remaining(self, counts: Mapping[Pair, int], unit: Mapping[Pair, int]) -> int:
        """How many times ``unit`` fits after ``counts``, exactly."""
        if any(isinstance(pair, NonPrivate) for pair in unit):
            return 0
        if any(isinstance(pair, NonPrivate) for pair in counts):
            return 0
        cheap = self._cheap({}, unit)
        if cheap >= MOST_STEPS:
            return cheap
        start = max(cheap + cheap // 4, 1)
        if self._method == "pld" and self._filter is None and len(added(counts, unit)) > _FEW:
            price = Extension(counts, unit, self._delta, start)
            start = max(largest(lambda steps: price(steps) - self._epsilon, start=start), 1)
        return max(largest(self._excess(counts, unit), start=start), cheap)

    def _cheap(self, reserved: Mapping[Pair, int], unit: Mapping[Pair, int]) -> int:
        left, each = self._limits - self._spent, np.zeros(len(self._limits))
        for pair, count in reserved.items():
            left = left - count * self._cost(pair)
        for pair, count in unit.items():
            each = each + count * self._cost(pair)
        possible = (left > 0) & np.isfinite(each)
        if not possible.any():
            return 0
        with np.errstate(over="ignore"):
            return int(
                min(
                    np.max(left[possible] / np.maximum(each[possible], 1e-300)) * (1 - 1e-12),
                    MOST_STEPS,
                )
            )

    def _cost(self, pair: Pair) -> Array:
        if isinstance(pair, Gaussian):
            return pair.mu**2 * self._of_gaussian
        key: Hashable = pair
        cost = self._costs.get(key)
        if cost is None and isinstance(pair, Sampled) and len(self._costs) >= _EXACT_COSTS:
            cell = math.floor(math.log(pair.noise) / math.log(_GRID))
            rate = min(
                _GRID ** math.ceil(math.log(pair.rate) / math.log(_GRID)) * (1 + 1e-12), 1 - 1e-12
            )
            rate = max(rate, pair.rate)
            key = (pair.kind, rate, cell)
            cost = self._costs.get(key)
            if cost is None:
                pair = Sampled(pair.kind, rate, min(pair.noise, _GRID**cell * (1 - 1e-12)))
        if cost is None:
            if self._orders:
                cost = renyi.curve({pair: 1}, self._orders)
            else:
                cost = np.array([dominating_mu(pair) ** 2])
            if len(self._costs) < 100_000:
                self._costs[key] = cost
        return cost

    def _certified(self, unit: Mapping[Pair, int]) -> int:
        return min(
            (
                max((left for p, left in self._certificate.items() if covers(p, pair)), default=0)
                // n
                for pair, n in unit.items()
            ),
            default=0,
        )

    def _take_certified(self, need: Mapping[Pair, int], times: int) -> bool:
        if len(need) == 1:
            ((pair, count),) = need.items()
            return take(self._certificate, pair, count * times) is not None
        certificate = self._certificate.copy()
        if all(take(certificate, pair, count * times) for pair, count in need.items()):
            self._certificate = certificate
            return True
        return False

    def _certify(self, counts: Mapping[Pair, int], need: Mapping[Pair, int]) -> bool:
        """Whether ``need`` fits; and a new certificate for what is to be expected after it."""
        if any(isinstance(pair, NonPrivate) for pair in need):
            return False
        base = added(counts, need)
        expected: dict[Pair, int] = {}
        for pair, count in need.items():
            family = self._family(pair)
            old = [p for p in self._certificate if self._family(p) is family]
            if old:
                self.reserved(pair, fell_through=not covers(old[0], pair))
            expected[family.floor(pair)] = max(family.used, count)
        for family in self._families.values():
            if family.used and all(self._family(pair) is not family for pair in need):
                expected[family.floor(family.last)] = family.used
            family.used = 0
        least = min(expected.values())
        unit = {pair: max(1, min(round(used / least), 1000)) for pair, used in expected.items()}
        self._guess = self._guess // _SHRINK or max(
            sum(base.values()) // (_SHRINK * sum(unit.values())), 1
        )
        steps = self._steps(base, unit)
        self._certificate = {pair: steps * count for pair, count in unit.items() if steps > 0}
        self._guess = max(steps, 1)
        return steps >= 0

    def _steps(self, base: dict[Pair, int], unit: dict[Pair, int]) -> int:
        """How many times ``unit`` certainly fits after ``base``; -1 if ``base`` itself does not."""
        excess = self._excess(base, unit)
        if self._method == "rdp" or self._filter is not None or len(added(base, unit)) <= _FEW:
            return largest(excess, start=self._guess) if excess(0) <= 0 else -1
        if len(base) <= _MANY:
            price = Extension(base, unit, self._delta, self._guess)
            steps = largest(lambda n: price(n) - self._epsilon, start=self._guess)
            if steps > 8:  # the last ones are left to the bound that is reported
                return steps - 1 - steps // 500
            return largest(excess, start=max(steps, 1)) if excess(0) <= 0 else -1
        if self._fine is None:
            price = Extension(base, unit, self._delta, self._guess, _COARSE, accuracy=1e-3)
            steps = largest(lambda n: price(n) - self._epsilon, start=self._guess)
            if steps > 16:
                return steps
        steps = largest(self._fine_excess(base, unit), start=self._guess)
        return steps if steps > 0 or excess(0) <= 0 else -1

    def _excess(self, base: Mapping[Pair, int], unit: Mapping[Pair, int]) -> Callable[[int], float]:
        """What is reported after ``base`` and so many times ``unit``, minus the limit."""

        def excess(steps: int) -> float:
            counts = added(base, unit, steps) if steps else base
            if self._filter is not None:
                return self._filter.cost(counts) - self._filter.limit
            if self._method == "rdp":
                return renyi.upper_epsilon(counts, self._delta) - self._epsilon
            return bounds.upper_epsilon(counts, self._delta) - self._epsilon

        return excess

    def _fine_excess(self, base: dict[Pair, int], unit: dict[Pair, int]) -> Callable[[int], float]:
        """A composition of many levels at full resolution, which is kept and extended by what
        was charged since.
        """
        if self._fine is not None:
            known, price = self._fine
            since = {
                pair: count - known.get(pair, 0)
                for pair, count in base.items()
                if count != known.get(pair, 0)
            }
            if all(count > 0 for count in since.values()) and all(pair in base for pair in known):
                price.extend(since, unit)
            else:
                self._fine = None
        if self._fine is None:
            price = Extension(base, unit, self._delta, max(self._guess, sum(base.values()) // 50))
        self._fine = (base, price)
        return lambda steps: price(steps) - self._epsilon


def weaker(pair: Pair, slack: float) -> Pair:
    """``pair`` with its noise lowered by ``slack``."""
    if isinstance(pair, Sampled):
        return Sampled(pair.kind, pair.rate, pair.noise / slack)
    return Gaussian(pair.mu * slack) if isinstance(pair, Gaussian) else pair
