"""Choices of records have exactly the law that is charged: their joint law against Bernoulli draws,
digits against decimal arithmetic, and decisions with words of one, two and three bits, where nearly
all of them need further words.
"""

import decimal
import itertools
import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.examples import examples

from torch_dpbayes.batches import poisson_sampling
from torch_dpbayes.batches.poisson_sampling import (
    DenseSubset,
    SparseSubset,
    dense_choice,
    poisson_digits,
    sparse_choice,
)

FALSE_ALARM = 1e-6  # of each test


def seeded():
    """Of one seed in one test."""
    return torch.Generator().manual_seed(torch.initial_seed())


def with_words_of(bits, monkeypatch):
    """As if a generator gave words of so many bits."""
    words = poisson_sampling._words
    monkeypatch.setattr(poisson_sampling, "_words", lambda *args: words(*args) >> 63 - bits)
    monkeypatch.setattr(poisson_sampling, "_WORD_BITS", bits)


def with_cells(cells, monkeypatch):
    """As if a random number told so many cells of the unit interval apart."""
    drawn = torch.rand
    monkeypatch.setattr(poisson_sampling, "_CELLS", cells)
    monkeypatch.setattr(
        torch, "rand", lambda *size, **options: (drawn(*size, **options) * cells).floor() / cells
    )


def requires_law(counts, probabilities, tests=1):
    """Chi-square of outcomes with these probabilities; rare ones together, by rising probability,
    so that 40 are expected or more.
    """
    number = sum(counts.values())
    assert set(counts) <= set(probabilities)
    expected, found = [0.0], [0]
    for outcome, p in sorted(probabilities.items(), key=lambda item: item[1]):
        if expected[-1] >= 40:
            expected, found = [*expected, 0.0], [*found, 0]
        expected[-1] += number * p
        found[-1] += counts[outcome]
    if len(found) > 1:
        assert stats.chisquare(found, expected).pvalue > FALSE_ALARM / 2 / tests, counts


def requires_independent(draws, law):
    """Each set of records with its probability, also after another: in pairs by classes of sets."""
    requires_law(Counter(draws), law, tests=2)
    classes = Counter()
    for batch, p in law.items():
        classes[sum(batch) % 3] += p
    pairs = Counter((sum(a) % 3, sum(b) % 3) for a, b in zip(draws[::2], draws[1::2], strict=True))
    in_pairs = {(a, b): classes[a] * classes[b] for a in classes for b in classes}
    requires_law(pairs, in_pairs, tests=2)


def bernoulli_sets(num_data, rate):
    return {
        chosen: rate**size * (1 - rate) ** (num_data - size)
        for size in range(num_data + 1)
        for chosen in itertools.combinations(range(num_data), size)
    }


# -- every record independently with probability q -------------------------------------------------


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(
    ("kind", "num_data", "rate", "bits"),
    [
        (SparseSubset, 5, 0.1, 63),
        (SparseSubset, 2, 0.45, 1),
        (SparseSubset, 3, 0.45, 3),
        (DenseSubset, 4, 0.3, 2),
    ],
)
def test_every_set_of_records_has_its_probability_in_draws_in_a_row(
    kind, num_data, rate, bits, monkeypatch
):
    if kind is DenseSubset:
        monkeypatch.setattr(poisson_sampling, "_CHUNK", 3)
        with_cells(2**bits, monkeypatch)
    elif bits < 63:
        with_words_of(bits, monkeypatch)
    who, stream = kind(num_data, rate), seeded()
    drawn = [tuple(who.draw(stream).tolist()) for _ in range(5000)]
    requires_independent(drawn, bernoulli_sets(num_data, rate))


@pytest.mark.chance(FALSE_ALARM)
def test_records_of_the_largest_data_set():
    """Which takes neither time nor memory for each of its records."""
    num_data, stream = 2**53, seeded()
    who = SparseSubset(num_data, 100 / num_data)
    members = [i for _ in range(400) for i in who.draw(stream).tolist()]
    fewest, most = stats.poisson.interval(1 - FALSE_ALARM / 2, 40_000)
    assert fewest < len(members) < most
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
    least = Fraction(rate) / (1 - Fraction(rate)) * num_data
    assert darts.expected_darts - 1 < least <= darts.expected_darts
    with decimal.localcontext(prec=300):
        hit = 1 - (-Decimal(darts.expected_darts) / num_data).exp()
        stays = Decimal(rate) / hit
        assert 0 < stays < 1
        for bits in (63, 126):
            assert darts.stays.digits(bits) == [math.floor(stays * 2**bits)]


@pytest.mark.parametrize("bits", [1, 63, 189])
def test_digits_of_the_poisson_distribution_function(bits):
    with decimal.localcontext(prec=200):
        terms = itertools.accumulate(1 / Decimal(math.factorial(k)) for k in range(80))
        expected = [math.floor(total * Decimal(-1).exp() * 2**bits) for total in terms]
    found = poisson_digits(bits)
    assert found == expected[: len(found)] and found[-1] == 2**bits - 1
    assert 2**bits - 1 not in found[:-1]


@given(st.floats(1e-9, 1.0) | st.sampled_from([1e-9, 2**-24, 2**-30, 3 * 2**-31, 1.0, 1 / 3]))
@examples(300)
def test_the_rate_of_a_number_for_every_record_is_the_declared_one_and_never_above(rate):
    cells = DenseSubset(5, rate)
    in_force = Fraction(cells.cell) + Fraction(cells.place, 2**77)
    assert Fraction(rate) * (1 - Fraction(1, 10**9)) <= in_force <= Fraction(rate)


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.bfloat16, 0.001), (torch.float16, 0.0001), (torch.float64, 0.3)]
)
def test_records_join_at_the_rate_whatever_the_default_dtype(dtype, rate):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        way, stream = DenseSubset(200_000, rate), seeded()
        joined = sum(len(way.draw(stream)) for _ in range(20))
    finally:
        torch.set_default_dtype(before)
    assert stats.binomtest(joined, 20 * 200_000, rate).pvalue > FALSE_ALARM


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(
    ("choice", "number", "most"),
    [(sparse_choice, 5, 2), (sparse_choice, 5, 0), (dense_choice, 5, 2), (dense_choice, 4, 4)],
)
def test_some_of_them_are_every_set_alike(choice, number, most, monkeypatch):
    if choice is dense_choice:
        with_words_of(1, monkeypatch)  # most keys tie, which is drawn again
    stream = seeded()
    found = Counter(tuple(choice(number, most, stream).tolist()) for _ in range(2000))
    sets = list(itertools.combinations(range(number), most))
    requires_law(found, dict.fromkeys(sets, 1 / len(sets)))
