"""Audits from scores and from repeated releases, on mechanisms whose truth is known."""

from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from scipy import special, stats

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import (
    FailureDpEvent,
    GaussianDpEvent,
    PureDpEvent,
    SampledWithoutReplacementDpEvent,
)
from torch_dpbayes.accounting.gdp import gaussian_epsilon
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.audit import from_scores, repeated
from torch_dpbayes.audit.bounds import (
    Guesses,
    independent_epsilon_lower_bound,
    independent_mu_lower_bound,
)

DELTA = 1e-5


def fresh():
    return np.random.default_rng(torch.randint(2**62, ()).item())


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.5])
def test_independent_guesses_are_bounded_exactly(truth):
    """How often the bound is too high is a sum of binomial probabilities."""
    made, numbers = 300, range(301)
    for accuracy, bound in (
        (stats.norm.cdf(truth / 2), lambda n: independent_mu_lower_bound(Guesses(made, made, n))),
        (
            (np.exp(truth) + 0.01) / (np.exp(truth) + 1),
            lambda n: independent_epsilon_lower_bound(Guesses(made, made, n), 0.01),
        ),
    ):
        first = next(n for n in numbers if bound(n) > truth)
        wrong = stats.binom.sf(first - 1, made, accuracy)
        # right, and not by much more than it has to be
        assert 0.02 < wrong <= 0.05


def endless():
    """An accountant that states nothing."""
    accountant = PrivacyAccountant()
    accountant.compose(FailureDpEvent(0.5))
    return accountant


def gaussian_release(rng, mu, is_in):
    seen = rng.normal() + mu * is_in
    return mu * seen - mu**2 / 2


def response(rng, epsilon, is_in):
    return (2.0 * is_in - 1.0) * (1 if rng.random() < special.expit(epsilon) else -1)


def test_repeats_come_near_the_truth():
    """More than six standard deviations of what 20,000 repeats show below and above it."""
    rng = fresh()
    result = repeated(
        partial(gaussian_release, rng, 1.0),
        epsilon=gaussian_epsilon(1.0, DELTA),
        delta=DELTA,
        repeats=20_000,
        confidence=1 - 1e-7,
    )
    assert 0.75 * result.epsilon < result.epsilon_lower_bound <= result.epsilon
    result = repeated(
        partial(response, rng, 1.0),
        epsilon=1.0,
        delta=0.0,
        repeats=20_000,
        confidence=1 - 1e-7,
        bound="basic",
    )
    assert 0.8 < result.epsilon_lower_bound <= 1.0


@pytest.mark.thorough
def test_scores_of_several_releases_add_up():
    """Two Gaussians of μ = 1 are worth more than one of them, and never more than both."""
    rng = fresh()
    coins = rng.random(20_000) < 0.5
    first, second = (rng.normal(size=20_000) + coins for _ in range(2))
    price = partial(gaussian_epsilon, delta=DELTA)
    audit = partial(from_scores, epsilon=price(0.5), delta=DELTA, confidence=1 - 1e-7)
    one, both = audit(first, coins), audit(first + second, coins)
    assert one.epsilon_lower_bound < both.epsilon_lower_bound < price(2**0.5)
    assert one.epsilon_lower_bound < price(1.0)
    assert both.is_refuted


def test_randomised_response_is_not_refuted_for_being_no_gaussian():
    """Its ε at δ would be a far smaller Gaussian's; the accountant's whole curve knows. With half
    of the charge left out, the curve is refuted.
    """
    rng = fresh()
    accountant = PrivacyAccountant()
    accountant.compose(PureDpEvent(1.0))
    audit = partial(repeated, delta=DELTA, repeats=20_000, confidence=1 - 1e-7)
    result = audit(partial(response, rng, 1.0), accountant=accountant)
    assert result.epsilon_lower_bound > result.epsilon and not result.is_refuted
    assert "no Gaussian's" in str(result) and "not refuted" in str(result)
    assert audit(partial(response, rng, 2.0), accountant=accountant).is_refuted
    assert not audit(partial(response, rng, 1.0), accountant=accountant, bound="basic").is_refuted


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: repeated(float, epsilon=1, delta=DELTA, repeats=4),
            "4 repeats give no lower bound",
        ),
        (lambda: repeated(float, epsilon=1, delta=0), 'bound="basic"'),
        (lambda: from_scores([1.0], [1], epsilon=1, delta=DELTA), "coins of bool"),
        (
            lambda: from_scores([1.0], [True, False], epsilon=1, delta=DELTA),
            "vectors of one length",
        ),
        (lambda: from_scores([np.nan], [True], epsilon=1, delta=DELTA), "not a number"),
        (
            lambda: from_scores([1.0], [True], epsilon=1, delta=DELTA, num_guesses=2),
            "from 1 to 1, got 2",
        ),
        (
            lambda: from_scores(
                [1.0, 2.0],
                [True, False],
                epsilon=1,
                delta=DELTA,
                num_guesses=1,
                bound="independent",
            ),
            "is for guesses on all canaries",
        ),
        (lambda: from_scores([1.0], [True], delta=DELTA), "pass accountant=, or epsilon="),
        (
            lambda: repeated(float, delta=DELTA, epsilon=1, accountant=PrivacyAccountant()),
            "pass accountant=, or epsilon=",
        ),
        (
            lambda: from_scores([1.0], [True], delta=DELTA, accountant=endless()),
            "the accountant states no ε",
        ),
    ],
)
def test_what_makes_no_audit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "event",
    [
        SampledWithoutReplacementDpEvent(100, 10, GaussianDpEvent(2.0)),
        RandomAllocationDpEvent(10, GaussianDpEvent(2.0)),
        TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 2.0),
    ],
)
def test_guesses_on_batches_that_are_no_poisson_draws_are_not_called_independent(event):
    accountant = PrivacyAccountant()
    accountant.compose(GaussianDpEvent(2.0))
    accountant.compose(event)
    with pytest.raises(ValueError, match=r"was charged a .*DpEvent: pass bound=.gaussian"):
        from_scores(
            [0.0, 1.0], [True, False], accountant=accountant, delta=DELTA, bound="independent"
        )
