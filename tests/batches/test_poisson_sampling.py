"""Choices of records have exactly the law that is charged: their joint law against Bernoulli draws,
digits against decimal arithmetic, and decisions with words of one, two and three bits, where nearly
all of them need further words.
"""

import decimal
import itertools
import math
import resource
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.children import in_child
from support.examples import examples

from torch_dpbayes.batches import poisson_sampling
from torch_dpbayes.batches.poisson_sampling import (
    DenseSubset,
    ExactInversion,
    SparseSubset,
    poisson_digits,
    sparse_choice,
)

FALSE_ALARM = 1e-6  # of each test


def generator():
    return torch.Generator().manual_seed(torch.initial_seed())


def with_words_of(bits, monkeypatch):
    """As if a generator gave words of so many bits."""
    words = poisson_sampling._words
    monkeypatch.setattr(poisson_sampling, "_words", lambda *args: words(*args) >> 63 - bits)
    monkeypatch.setattr(poisson_sampling, "_WORD_BITS", bits)


def requires_law(counts, probabilities, tests=1):
    """Chi-square of cells with these probabilities; rare ones are one cell together."""
    number = sum(counts.values())
    assert set(counts) <= set(probabilities)
    usual = [cell for cell, p in probabilities.items() if number * p >= 25]
    found = [counts[cell] for cell in usual]
    expected = [number * probabilities[cell] for cell in usual]
    rest = number - sum(expected)
    if rest >= 25:
        found, expected = [*found, number - sum(found)], [*expected, rest]
    else:  # too few to be approximately normal
        assert stats.poisson.sf(number - sum(found) - 1, rest + 1e-9) > FALSE_ALARM / 2 / tests
        found, expected = [*found[1:], found[0] + number - sum(found)], [*expected[1:], expected[0]]
        expected[-1] += rest
    if len(found) == 1:
        return
    statistic = sum((n - e) ** 2 / e for n, e in zip(found, expected, strict=True))
    assert stats.chi2.sf(statistic, len(found) - 1) > FALSE_ALARM / 2 / tests, counts


def bernoulli_sets(num_data, rate):
    return {
        chosen: rate**size * (1 - rate) ** (num_data - size)
        for size in range(num_data + 1)
        for chosen in itertools.combinations(range(num_data), size)
    }


def batches(who, number, stream):
    return [tuple(who.draw(stream).tolist()) for _ in range(number)]


# -- every record independently with probability q -------------------------------------------------


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(
    "num_data, rate",
    [(4, 0.3), (5, 0.1)],
)
@pytest.mark.parametrize("kind", [SparseSubset, DenseSubset])
def test_every_set_of_records_has_its_probability_in_draws_in_a_row(kind, num_data, rate):
    drawn = batches(kind(num_data, rate), 6000, generator())
    law = bernoulli_sets(num_data, rate)
    requires_law(Counter(drawn), law, tests=2)
    sizes = {n: math.comb(num_data, n) * rate**n * (1 - rate) ** (num_data - n) for n in range(9)}
    pairs = Counter((len(a), len(b)) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    requires_law(pairs, {(a, b): sizes[a] * sizes[b] for a in sizes for b in sizes}, tests=2)


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(("bits", "rate"), [(1, 0.45), (2, 0.1), (3, 0.45)])
def test_what_the_first_word_leaves_open_is_decided_exactly(bits, rate, monkeypatch):
    with_words_of(bits, monkeypatch)
    num_data = min(3, 2**bits)
    drawn = batches(SparseSubset(num_data, rate), 3000, generator())
    requires_law(Counter(drawn), bernoulli_sets(num_data, rate))


@pytest.mark.chance(FALSE_ALARM)
def test_records_of_the_largest_data_set():
    num_data = 2**53
    drawn = batches(SparseSubset(num_data, 100 / num_data), 400, generator())
    members = [i for batch in drawn for i in batch]
    assert stats.poisson.interval(1 - FALSE_ALARM / 2, 40_000)[0] < len(members)
    assert len(members) < stats.poisson.interval(1 - FALSE_ALARM / 2, 40_000)[1]
    sixteenths = Counter(i * 16 // num_data for i in members)
    requires_law(sixteenths, dict.fromkeys(range(16), 1 / 16), tests=4)
    # the lowest digits too: all of the 53 are drawn
    requires_law(Counter(i % 16 for i in members), dict.fromkeys(range(16), 1 / 16), tests=4)


@given(
    st.integers(1, 2**53),
    st.floats(2.0**-63, 0.5) | st.sampled_from([2.0**-63, 0.5, 1 / 3, 2.0**-53, 0.125]),
)
@examples(100)
def test_who_is_hit_stays_with_the_probability_that_makes_it_the_rate(num_data, rate):
    """Digits of q / (1 - e⁻ˣ) against decimal arithmetic."""
    darts = SparseSubset(num_data, rate)
    assert (
        darts.expected_darts - 1
        < Fraction(rate) / (1 - Fraction(rate)) * num_data
        <= darts.expected_darts
    )
    with decimal.localcontext(prec=300):
        hit = 1 - (-Decimal(darts.expected_darts) / num_data).exp()
        stays = Decimal(rate) / hit
        assert 0 < stays < 1
        for bits in (63, 126):
            assert darts.stays.digits(bits) == [math.floor(stays * 2**bits)]


@pytest.mark.parametrize("bits", [1, 3, 63, 189])
def test_digits_of_the_poisson_distribution_function(bits):
    with decimal.localcontext(prec=200):
        terms = itertools.accumulate(1 / Decimal(math.factorial(k)) for k in range(80))
        expected = [math.floor(total * Decimal(-1).exp() * 2**bits) for total in terms]
    found = poisson_digits(bits)
    assert found == expected[: len(found)] and found[-1] == 2**bits - 1
    assert 2**bits - 1 not in found[:-1]


def test_a_uniform_number_at_a_boundary_takes_another_word(monkeypatch):
    """Words that are given: the digits of 1/3 and 2/3 are 0101… and 1010…"""
    thirds = ExactInversion(lambda bits: [2**bits // 3, 2 * 2**bits // 3])
    third, further = divmod(2**126 // 3, 2**63)
    given_words = []
    monkeypatch.setattr(
        poisson_sampling,
        "_words",
        lambda number, _: np.array([given_words.pop(0) for _ in range(number)]),
    )
    for words, passed in [
        ([third - 1], 0),
        ([third + 1], 1),
        ([2**63 - 1], 2),
        ([0], 0),
        ([third, further - 1], 0),
        ([third, further + 1], 1),
        ([third, further, 0], 0),
        ([third, further, 2**63 - 1], 1),
    ]:
        given_words[:] = words
        assert thirds.draw(1, None).tolist() == [passed] and not given_words


# -- places and sets -------------------------------------------------------------------------------


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize("number, most", [(5, 2), (4, 4), (6, 1), (5, 0)])
def test_some_of_them_are_every_set_alike(number, most):
    stream = generator()
    found = Counter(tuple(sparse_choice(number, most, stream).tolist()) for _ in range(4000))
    sets = list(itertools.combinations(range(number), most))
    requires_law(found, dict.fromkeys(sets, 1 / len(sets)))


# -- a number for every record ---------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.003, 0.3, 1.0])
def test_pieces_draw_what_a_number_for_every_record_at_once_does(rate, monkeypatch):
    """Draws of runs that were saved by earlier versions go on bit for bit."""
    seed = torch.initial_seed()
    whole = DenseSubset(5000, rate)
    drawn = batches(whole, 20, torch.Generator().manual_seed(seed))
    monkeypatch.setattr(poisson_sampling, "_CHUNK", 700)
    assert batches(whole, 20, torch.Generator().manual_seed(seed)) == drawn


# -- cost ------------------------------------------------------------------------------------------


def cost(num_data):
    """Of a draw, in milliseconds of the processor."""
    darts, stream = SparseSubset(num_data, 256 / num_data), generator()
    start = time.process_time()
    for _ in range(100):
        darts.draw(stream)
    return (time.process_time() - start) * 10


def test_a_draw_from_a_billion_records_takes_no_more_time_and_little_memory():
    """By what the operating system says of a process of its own."""

    def measured():
        cost(10**4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = [(cost(10**4), cost(10**9)) for _ in range(5)]
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return min(a for a, _ in times), min(b for _, b in times), kilobytes / 1e3

    small, large, megabytes = in_child(measured)
    assert large < 3 * small and megabytes < 50, (small, large, megabytes)
