"""What an attacker can tell: trade-off curves against closed forms; the risk of a history."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from support.examples import examples
from support.ledgers import later_job

from torch_dpbayes.accounting import PrivacyAccountant, bounds, events
from torch_dpbayes.accounting.dominating_pairs import Failure, Gaussian, NonPrivate, Pure, Sampled
from torch_dpbayes.accounting.risk import Profile, TradeOff, profiles, trade_offs

RATES = np.array([1e-12, 1e-9, 1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.999])
powers_of_ten = st.floats(-2.0, 0.7).map(lambda x: 10**x)


def curves(counts, method="pld"):
    return trade_offs(*profiles(frozenset(counts.items()), method))


def gaussian(rates, mu):
    return stats.norm.cdf(stats.norm.ppf(rates) + mu)


def tightly(bound, truth, excess=1e-3):
    assert np.all(truth * (1 - 1e-9) <= bound), bound / truth - 1
    assert np.all(bound <= truth * (1 + excess)), bound / truth - 1


@given(epsilon=powers_of_ten)
@examples(25)
def test_randomised_response(epsilon):
    (curve,) = curves({Pure(epsilon): 1})
    truth = np.minimum(np.exp(epsilon) * RATES, 1 - np.exp(-epsilon) * (1 - RATES))
    tightly(curve(RATES), truth, 1e-3)
    (two,) = curves({Pure(epsilon): 2})
    # both answers speak for the record, or one of them
    right = special.expit(epsilon)
    vertices = np.array([(1 - right) ** 2, 1 - right**2])
    tightly(two(vertices), np.array([right**2, 1 - (1 - right) ** 2]), 2e-3)


def test_the_advantage_is_that_of_a_composition_made_for_it():
    counts = {Sampled("symmetric", 1e-3, 0.7): 30}
    (curve,) = curves(counts)
    tightly(curve.advantage, bounds.upper_delta(counts, 0.0), 2e-5)


def test_what_fails_or_reveals_everything():
    (curve,) = curves({NonPrivate(): 1, Gaussian(1.0): 3})
    assert curve.advantage == 1 and curve(1e-9) == 1
    assert curve.mu(0.5) == math.inf
    (curve,) = curves({Failure(0.01): 1})
    assert np.all(curve(RATES) >= 0.01 + 0.99 * RATES)
    assert np.all(curve(RATES) <= (0.01 + RATES) * (1 + 1e-9))
    assert curve.mu(0.005) == math.inf and curve.mu(0.02) == 0
    (curve,) = curves({Failure(0.01): 1, Gaussian(1.0): 1})
    tightly(curve.advantage, 0.01 + 0.99 * special.erf(1 / math.sqrt(8)), 1e-6)
    (curve,) = curves({Gaussian(1e9): 1})
    assert curve(1e-9) == 1
    (curve,) = curves({Pure(1e6): 3})
    assert curve(0.5) == 1
    (curve,) = curves({})
    tightly(curve(RATES), RATES, 1e-9)


def test_lines_that_do_not_form_a_profile_are_bounds_all_the_same():
    """Of a profile that is nowhere convex the envelope takes the lowest lines."""
    epsilons = np.array([0.0, 0.5, 1.0, 800.0])
    profile = Profile(epsilons, np.array([0.3, 0.32, 0.01, 1e-9]))
    curve = TradeOff.of_profiles(profile, profile)
    x = np.linspace(0.0, 1.0, 101)
    lines = [math.exp(e) * x + d for e, d in zip(epsilons[:3], profile.deltas[:3], strict=True)]
    lines += [1 - math.exp(-e) * (1 - x - d) for e, d in zip(epsilons, profile.deltas, strict=True)]
    tightly(curve(x), np.minimum(np.min(lines, axis=0), 1.0), 1e-9)


# --- the risk of a history ------------------------------------------------------------------------

STEP = events.PoissonSampledDpEvent(0.05, events.GaussianDpEvent(1.2))


@pytest.mark.parametrize(("neighboring", "mu"), [("add_or_remove_one", 1.0), ("replace_one", 2.0)])
def test_a_gaussian_release(neighboring, mu):
    accountant = PrivacyAccountant(neighboring=neighboring).compose(events.GaussianDpEvent(2.0), 4)
    risk = accountant.risk(prior=0.2, false_positive_rate=0.01)
    rate = stats.norm.cdf(stats.norm.ppf(0.01) + mu)
    tightly(risk.advantage, special.erf(mu / math.sqrt(8)))
    tightly(risk.true_positive_rate, rate)
    tightly(risk.posterior_odds, 0.25 * rate / 0.01)
    tightly(risk.posterior, 0.2 * rate / (0.2 * rate + 0.8 * 0.01))
    threshold = math.log(4) / mu + mu / 2  # where the posterior is one half
    guess = 0.2 * stats.norm.sf(threshold - mu) + 0.8 * stats.norm.cdf(threshold)
    tightly(risk.best_guess, guess)
    # an exact mu passes, and nothing below what delta hides of it
    assert risk.gdp_mu == pytest.approx(mu, rel=1e-3)
    assert risk.epsilon == accountant.get_epsilon(1e-5)


def test_the_numbers_are_those_of_the_stronger_attack():
    """Against thresholds on one sampled release."""
    q, z, prior = 0.3, 0.5, 0.2
    event = events.PoissonSampledDpEvent(q, events.GaussianDpEvent(z))
    risk = PrivacyAccountant().compose(event).risk(prior=prior)
    at = np.linspace(-3.0, 4.0, 4001)
    out, kept = stats.norm.sf(at / z), stats.norm.cdf(at / z)
    inside = (1 - q) * out + q * stats.norm.sf((at - 1) / z)
    missed = (1 - q) * kept + q * stats.norm.cdf((at - 1) / z)
    guesses, some = [], slice(500, -500, 100)
    for curve, true, false in zip(risk.curves, (inside, kept), (out, missed), strict=True):
        tightly(curve(false[some]), true[some], 2e-3)
        assert np.all(true <= gaussian(false, risk.gdp_mu) + risk.delta)
        guesses.append(np.max(prior * true + (1 - prior) * (1 - false)))
    assert guesses[0] != pytest.approx(guesses[1], rel=1e-2)
    tightly(risk.best_guess, max(guesses), 1e-3)


def test_each_guarantee_has_its_own_risk(tmp_path):
    fixed = PrivacyAccountant().compose(STEP, 20)
    budget = PrivacyAccountant(3.0, 1e-5).compose(STEP, 20, adaptive=True)
    renyi = PrivacyAccountant(method="rdp").compose(STEP, 20)
    with PrivacyAccountant(path=tmp_path / "a.db") as first:
        first.compose(STEP)
    later = later_job(path=tmp_path / "a.db").compose(STEP)
    assert fixed.risk().advantage == pytest.approx(fixed.get_delta(0.0), rel=1e-4)
    # of one order alone the bound at another epsilon may say more than that at 0
    assert 0.2 < budget.risk().advantage <= budget.get_delta(0.0)
    assert renyi.risk().advantage == pytest.approx(renyi.get_delta(0.0), rel=0.2)
    assert later.risk().advantage == 1.0
    assert fixed.risk().advantage < budget.risk().advantage
    assert budget.risk().epsilon == 3.0
    gaussian = PrivacyAccountant(3.0, 1e-5).compose(events.GaussianDpEvent(9.0), adaptive=True)
    limit = gaussian._session.filter.limit
    assert gaussian.risk().gdp_mu == pytest.approx(math.sqrt(limit), rel=1e-3)
    nothing = PrivacyAccountant().risk(prior=0.3, false_positive_rate=0.02)
    assert (nothing.advantage, nothing.epsilon, nothing.gdp_mu) == (0, 0, 0)
    assert nothing.posterior == pytest.approx(0.3) and nothing.best_guess == pytest.approx(0.7)


def test_what_fails_or_has_no_noise():
    risk = PrivacyAccountant().compose(events.NonPrivateDpEvent()).risk()
    assert (risk.advantage, risk.true_positive_rate, risk.best_guess) == (1.0, 1.0, 1.0)
    assert math.inf == risk.epsilon == risk.gdp_mu
    assert json.loads(json.dumps(risk.as_dict()))["gdp_mu"] is None
    event = events.ComposedDpEvent([events.PureDpEvent(1.0), events.FailureDpEvent(1e-6)])
    risk = PrivacyAccountant().compose(event).risk(false_positive_rate=0.01)
    tightly(risk.true_positive_rate, 1e-6 + (1 - 1e-6) * math.e * 0.01)


def test_the_page_shows_what_is_printed():
    page = Path(__file__).parents[2] / "docs/how_to/what_epsilon_means.md"
    step = events.PoissonSampledDpEvent(0.01, events.GaussianDpEvent(1.0))
    assert str(PrivacyAccountant().compose(step, 10_000).risk()) in page.read_text()


def test_the_picture_shows_the_bound():
    from matplotlib import pyplot

    accountant = PrivacyAccountant().compose(STEP, 10)
    axes = accountant.plot_risk(false_positive_rate=0.01)
    x, y = axes.lines[0].get_data()
    assert y == pytest.approx(accountant.risk().true_positive_rates(x))
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert accountant.plot_risk(pyplot.figure().gca()).figure is not axes.figure
    pyplot.close("all")
