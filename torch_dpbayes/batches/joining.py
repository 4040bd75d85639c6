"""Who joins a batch: choices at random that have exactly the law that is charged.

Words of 63 independent bits from a generator are all that they use, and whole numbers all that they
compute with: no logarithm is rounded, and no record is special, the first and the last one
included.

**Every record independently with probability q**, :class:`Darts`. With x = L/N, for a whole number
L of which 1 - e⁻ˣ ≥ q, throw T ~ Poisson(L) darts at the N records, each at any of them with
probability 1/N. The numbers of darts in the N records are then independent Poisson(x) variables:
n₁, n₂ … of them have the probability

    e⁻ᴸ Lᵀ/T! · T!/(n₁! … n_N!) · N⁻ᵀ = Π e⁻ˣ xⁿ/n!,        T = n₁ + … + n_N.

So records are hit independently, each with probability 1 - e⁻ˣ. Each of those that are hit stays
with probability q / (1 - e⁻ˣ), independently again: every record joins independently of all others
with probability q, which is neither rounded nor dependent on N. About L ≈ qN darts are thrown,
whatever N is.

Three things are left to be drawn exactly. *A place for a dart*: a word modulo N, words at or above
the largest multiple of N drawn again. *T*: the sum of L independent Poisson(1) numbers, each the
number of values F(0), F(1), … of that distribution function at or below a uniform number. *Who
stays*: those whose uniform number is below q / (1 - e⁻ˣ). For the last two a uniform number is
compared with real ones by their binary digits, as many as it takes (:class:`Passed`).

**Any m records of N**, :func:`some_of`: the first m different ones of independent uniform places.
A permutation of the records changes nothing in how they are drawn, so every set of m is as likely
as any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

MOST_RECORDS = 2**53
_BITS = 63  # of a word
_CELLS = 2**24  # of the unit interval: the values of torch.rand in float32
_PLACES = 2**53  # in a cell
_PIECE = 2**18  # records that are looked at together


def _words(number: int, generator: torch.Generator) -> NDArray[np.int64]:
    """Independent whole numbers, uniform in [0, 2⁶³)."""
    words = torch.empty(number, dtype=torch.int64, device="cpu")
    return words.random_(generator=generator).numpy()


def uniform(number: int, values: int, generator: torch.Generator) -> NDArray[np.int64]:
    """``number`` independent whole numbers below ``values``, each with the same probability."""
    end = 2**_BITS // values * values  # 2⁶³ where that can be divided evenly
    found = _words(number, generator)
    while end < 2**_BITS and (again := found >= end).any():
        found[again] = _words(int(again.sum()), generator)
    return found % values


def _different(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each once, in rising order."""
    places.sort()
    is_new = np.ones(len(places), dtype=bool)
    np.not_equal(places[1:], places[:-1], out=is_new[1:])
    return places[is_new]


def some_of(number: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """``most`` of ``number`` positions, every such set with the same probability, in rising order,
    at a cost that depends on ``most`` alone while it is well below ``number``.
    """
    found = _different(uniform(most, number, generator))
    while len(found) < most:  # as many as are missing are never too many
        more = uniform(most - len(found), number, generator)
        found = _different(np.concatenate([found, more]))
    return torch.from_numpy(found)


class Passed:
    """How many of some real numbers in (0, 1) lie at or below a uniform one, exactly.

    The uniform number is drawn by words. ⌊2ᵇx⌋ are the first b digits of x after the point: where
    those of the uniform number are others, they decide, and where they are the same, another word
    does.

    Args:
        digits: b -> ⌊2ᵇx⌋ for every x, rising; of infinitely many x those up to the first whose b
            digits are all ones.
    """

    def __init__(self, digits: Callable[[int], list[int]]) -> None:
        self._digits = functools.cache(digits)
        self._first = np.array(self._digits(_BITS), dtype=np.int64)

    def draw(self, number: int, generator: torch.Generator) -> NDArray[np.int64]:
        """Of so many independent uniform numbers."""
        words = _words(number, generator)
        passed = self._first.searchsorted(words)
        is_open = self._first.take(passed, mode="clip") == words
        if is_open.any():
            for i in np.flatnonzero(is_open):
                passed[i] = self._by_more_digits(int(words[i]), generator)
        return passed

    def _by_more_digits(self, drawn: int, generator: torch.Generator) -> int:
        bits = _BITS
        while True:
            drawn, bits = drawn << _BITS | int(_words(1, generator)[0]), bits + _BITS
            digits = self._digits(bits)
            if drawn not in digits:
                return sum(other < drawn for other in digits)


def _bounds_of_exp(x: Fraction) -> Iterator[tuple[Fraction, Fraction]]:
    """Closer and closer bounds of e⁻ˣ, 0 < x ≤ 1: sums of its alternating, falling terms."""
    term = above = Fraction(1)
    for i in range(1, 1_000_000, 2):
        term *= x / i
        below = above - term
        term *= x / (i + 1)
        above = below + term
        yield below, above


def _digits_of(f: Callable[[Fraction], Fraction], x: Fraction, bits: int) -> int:
    """⌊2ᵇ f(e⁻ˣ)⌋ for a monotone f and a rational x in (0, 1], of which f(e⁻ˣ) is irrational."""
    for below, above in _bounds_of_exp(x):
        digits = math.floor(2**bits * f(below))
        if digits == math.floor(2**bits * f(above)):
            return digits
    raise AssertionError("the bounds meet")


@functools.cache  # for all data sets
def _digits_of_poisson(bits: int) -> list[int]:
    """Of F(0), F(1), … for Poisson(1): F(k) = e⁻¹ Σ_{i≤k} 1/i!."""
    digits, terms, k = [0], Fraction(0), 0
    while digits[-1] < 2**bits - 1:
        terms += Fraction(1, math.factorial(k))
        digits.append(_digits_of(terms.__mul__, Fraction(1), bits))
        k += 1
    return digits[1:]


class Darts:
    """Positions of records that join independently with probability exactly q, in rising order, at
    a cost that grows with qN alone.

    Args:
        num_data: N > 0.
        rate: q ≤ 1/2.
    """

    def __init__(self, num_data: int, rate: float) -> None:
        self._num_data, q = num_data, Fraction(rate)
        # 1 - e⁻ˣ ≥ q for x ≥ q / (1 - q) ≥ -log(1 - q)
        self._number = math.ceil(q / (1 - q) * num_data)
        x = Fraction(self._number, num_data)
        self._darts = Passed(_digits_of_poisson)
        self._stays = Passed(lambda bits: [_digits_of(lambda e: q / (1 - e), x, bits)])

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A batch."""
        thrown = int(self._darts.draw(self._number, generator).sum())
        hit = _different(uniform(thrown, self._num_data, generator))
        return torch.from_numpy(hit[self._stays.draw(len(hit), generator) == 0])


class Cells:
    """Positions of records that join independently with a probability in force that is at most 2⁻⁷⁷
    below q, and never above, in rising order, from a number for every record.

    Args:
        num_data: N.
        rate: q ≤ 1.
    """

    def __init__(self, num_data: int, rate: float) -> None:
        self._num_data = num_data
        cell, rest = divmod(rate * _CELLS, 1.0)
        # the rate in force is cell + place·2⁻⁵³·2⁻²⁴
        self._cell, self._place = cell / _CELLS, int(rest * _PLACES)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A batch."""
        # float32 numbers tell 2²⁴ cells apart; only records in the one that q divides need their
        # place in it
        found, divided = [], []
        for start in range(0, max(1, self._num_data), _PIECE):
            size = min(_PIECE, self._num_data - start)
            cells = torch.rand(size, dtype=torch.float32, generator=generator, device="cpu")
            here = (cells <= self._cell).nonzero().reshape(-1)
            found.append(here + start)
            divided.append(cells[here] == self._cell)
        joining, is_divided = torch.cat(found), torch.cat(divided)
        if is_divided.any():
            places = torch.randint(_PLACES, (len(joining),), generator=generator, device="cpu")
            joining = joining[~is_divided | (places < self._place)]
        return joining
