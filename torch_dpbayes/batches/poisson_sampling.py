"""Random subsets of the records, with exactly the distribution that is charged.

Random numbers are words of 63 independent bits, and all arithmetic on them is integer arithmetic:
nothing is rounded, and the algorithm is the same for every record.

**Each record independently with probability q**, :class:`SparseSubset`. Let x = L/N for a whole
number L with 1 - e⁻ˣ ≥ q. Throw T ~ Poisson(L) darts at the N records, each at a uniform one. The
numbers of darts n₁, …, n_N on the records are independent Poisson(x) variables, as their joint
probability is

    e⁻ᴸ Lᵀ/T! · T!/(n₁! … n_N!) · N⁻ᵀ = Π e⁻ˣ xⁿ/n!,        T = n₁ + … + n_N.

So records are hit independently, each with probability 1 - e⁻ˣ. A record that is hit stays with
probability q / (1 - e⁻ˣ), again independently. Every record therefore joins with probability q,
which is not rounded and does not depend on N. For any N, about L ≈ qN darts are thrown.

Three draws must be exact. *The record of a dart* is a word modulo N; words at or above the largest
multiple of N are drawn again. *T* is the sum of L independent Poisson(1) numbers. Each of these is
the number of values F(0), F(1), … of the Poisson(1) distribution function at or below a uniform
number. *A hit stays* if a uniform number is below q / (1 - e⁻ˣ). The last two draws compare a
uniform number with real numbers digit by digit, with as many digits as necessary
(:class:`ExactInversion`).

**m of N records**, :func:`sparse_choice`: the first m different positions in a sequence of
independent uniform ones. This is invariant under permutations of the records, so all sets of m
records are equally likely.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

MAX_RECORDS = 2**53  # larger whole numbers are not exact in float64
_WORD_BITS = 63
_CELLS = 2**24  # cells of the unit interval: the values of torch.rand in float32
_PLACES = 2**53  # places in a cell
_CHUNK = 2**18  # a dense subset draws so many records at once: 1 MiB of float32


def _words(count: int, generator: torch.Generator) -> NDArray[np.int64]:
    """Independent whole numbers, uniform in [0, 2⁶³)."""
    words = torch.empty(count, dtype=torch.int64, device="cpu")
    return words.random_(generator=generator).numpy()


def uniform(count: int, values: int, generator: torch.Generator) -> NDArray[np.int64]:
    """``count`` independent whole numbers, uniform in [0, values)."""
    end = 2**_WORD_BITS // values * values
    drawn = _words(count, generator)
    while end < 2**_WORD_BITS and (again := drawn >= end).any():
        drawn[again] = _words(int(again.sum()), generator)
    return drawn % values


def _distinct(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different positions, in rising order; several times as fast as ``np.unique``."""
    positions.sort()
    is_new = np.ones(len(positions), dtype=bool)
    np.not_equal(positions[1:], positions[:-1], out=is_new[1:])
    return positions[is_new]


def sparse_choice(num_data: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """``size`` of ``num_data`` positions in rising order; all such sets are equally likely. Costs
    O(size) if ``size`` is well below ``num_data``.
    """
    chosen = _distinct(uniform(size, num_data, generator))
    while len(chosen) < size:  # draws at most the missing number, so never too many
        more = uniform(size - len(chosen), num_data, generator)
        chosen = _distinct(np.concatenate([chosen, more]))
    return torch.from_numpy(chosen)


def dense_choice(num_data: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Like :func:`sparse_choice`, in O(num_data): the positions with the smallest of independent
    random keys. If a tie leaves these positions undecided, all keys are drawn again.
    """
    while True:
        keys = torch.from_numpy(_words(num_data, generator))
        smallest, chosen = torch.topk(keys, size, largest=False)
        if int((keys <= smallest.max()).sum()) == size:
            return chosen.sort().values


class ExactInversion:
    """Count exactly how many of some real numbers in (0, 1) are at or below a uniform number.

    The digits of the uniform number are drawn word by word. If they differ from the first digits of
    each real number, they decide; if they are equal to some, another word is drawn.

    ``digits``: b -> ⌊2ᵇx⌋ for every real number x, in rising order; if there are infinitely many
    x, up to the first one whose b digits are all ones.
    """

    def __init__(self, digits: Callable[[int], list[int]]) -> None:
        self.digits = functools.cache(digits)
        self._first = np.array(self.digits(_WORD_BITS), dtype=np.int64)

    def draw(self, count: int, generator: torch.Generator) -> NDArray[np.int64]:
        """The counts for ``count`` independent uniform numbers."""
        words = _words(count, generator)
        passed = self._first.searchsorted(words)
        is_open = self._first.take(passed, mode="clip") == words
        if is_open.any():
            for i in np.flatnonzero(is_open):
                passed[i] = self._by_more_digits(int(words[i]), generator)
        return passed

    def _by_more_digits(self, drawn: int, generator: torch.Generator) -> int:
        bits = _WORD_BITS
        while True:
            drawn = drawn << _WORD_BITS | int(_words(1, generator)[0])
            bits += _WORD_BITS
            digits = self.digits(bits)
            if drawn not in digits:
                return sum(other < drawn for other in digits)


def _digits_of(f: Callable[[Fraction], Fraction], x: Fraction, bits: int) -> int:
    """⌊2ᵇ f(e⁻ˣ)⌋ for a monotone f and a rational x in (0, 1] with irrational f(e⁻ˣ)."""
    above = term = Fraction(1)
    i = 0
    while True:  # the series of e⁻ˣ alternates with falling terms: partial sums are bounds
        below = above - (term := term * x / (i + 1))
        above = below + (term := term * x / (i + 2))
        i += 2
        if (digits := math.floor(2**bits * f(below))) == math.floor(2**bits * f(above)):
            return digits


@functools.cache  # all data sets use the same digits
def poisson_digits(bits: int) -> list[int]:
    """Digits of F(0), F(1), … for Poisson(1): F(k) = e⁻¹ Σ_{i≤k} 1/i!."""
    digits, terms, k = [0], Fraction(0), 0
    while digits[-1] < 2**bits - 1:
        terms += Fraction(1, math.factorial(k))
        digits.append(_digits_of(terms.__mul__, Fraction(1), bits))
        k += 1
    return digits[1:]


class SparseSubset:
    """Each position joins independently with probability exactly q ≤ 1/2, in O(qN)."""

    def __init__(self, num_data: int, rate: float) -> None:
        self._num_data, q = num_data, Fraction(rate)
        # 1 - e⁻ˣ ≥ q for x ≥ q / (1 - q) ≥ -log(1 - q)
        self.expected_darts = math.ceil(q / (1 - q) * num_data)
        x = Fraction(self.expected_darts, num_data)
        self._darts = ExactInversion(poisson_digits)
        self.stays = ExactInversion(lambda bits: [_digits_of(lambda e: q / (1 - e), x, bits)])

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A batch, in rising order."""
        thrown = int(self._darts.draw(self.expected_darts, generator).sum())
        hit = _distinct(uniform(thrown, self._num_data, generator))
        return torch.from_numpy(hit[self.stays.draw(len(hit), generator) == 0])


class DenseSubset:
    """Each position joins independently, by its own random number, in O(N).

    The actual rate is at most 2⁻⁷⁷ below q, and never above. A float32 number selects one of 2²⁴
    cells of the unit interval. Only records in the cell that contains q also draw a place in it.
    """

    def __init__(self, num_data: int, rate: float) -> None:
        self._num_data = num_data
        cell, rest = divmod(rate * _CELLS, 1.0)
        # the actual rate is cell + place·2⁻⁵³·2⁻²⁴
        self.cell, self.place = cell / _CELLS, int(rest * _PLACES)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A batch, in rising order."""
        found, divided = [], []
        for start in range(0, max(1, self._num_data), _CHUNK):
            size = min(_CHUNK, self._num_data - start)
            cells = torch.rand(size, dtype=torch.float32, generator=generator, device="cpu")
            here = (cells <= self.cell).nonzero().reshape(-1)
            found.append(here + start)
            divided.append(cells[here] == self.cell)
        joining, is_divided = torch.cat(found), torch.cat(divided)
        if is_divided.any():
            places = torch.randint(_PLACES, (len(joining),), generator=generator, device="cpu")
            joining = joining[~is_divided | (places < self.place)]
        return joining
