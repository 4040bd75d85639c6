"""What an attacker can tell: closed forms, every kind of guarantee, calibration, pictures."""

import json
import math
from pathlib import Path

import pytest
from scipy import special, stats
from support.ledgers import later_job

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
)

STEP = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2))


def near(value, truth, excess=1e-3):
    return truth * (1 - 1e-9) <= value <= truth * (1 + excess)


@pytest.mark.parametrize(("neighboring", "mu"), [("add_or_remove_one", 1.0), ("replace_one", 2.0)])
def test_a_gaussian_release(neighboring, mu):
    accountant = PrivacyAccountant(neighboring=neighboring).compose(GaussianDpEvent(2.0), 4)
    risk = accountant.risk(prior=0.2, false_positive_rate=0.01)
    rate = stats.norm.cdf(stats.norm.ppf(0.01) + mu)
    assert near(risk.advantage, special.erf(mu / math.sqrt(8)))
    assert near(risk.true_positive_rate, rate)
    assert near(risk.posterior_odds, 0.25 * rate / 0.01)
    assert near(risk.posterior, 0.2 * rate / (0.2 * rate + 0.8 * 0.01))
    threshold = math.log(4) / mu + mu / 2  # where the posterior is one half
    guess = 0.2 * stats.norm.sf(threshold - mu) + 0.8 * stats.norm.cdf(threshold)
    assert near(risk.best_guess, guess)
    # an exact mu passes, and nothing below what delta hides of it
    assert risk.gdp_mu == pytest.approx(mu, rel=1e-3)
    assert risk.epsilon == accountant.get_epsilon(1e-5)


def test_each_guarantee_has_its_own_risk(tmp_path):
    fixed = PrivacyAccountant().compose(STEP, 20)
    budget = PrivacyAccountant(3.0, 1e-5).compose(STEP, 20, adaptive=True)
    renyi = PrivacyAccountant(method="rdp").compose(STEP, 20)
    with PrivacyAccountant(path=tmp_path / "a.db") as first:
        first.compose(STEP)
    later = later_job(path=tmp_path / "a.db").compose(STEP)
    accountants = {
        "fixed": fixed, "budget": budget, "renyi": renyi, "later": later
    }  # fmt: skip
    advantage = {name: accountant.risk().advantage for name, accountant in accountants.items()}
    assert advantage["fixed"] == pytest.approx(fixed.get_delta(0.0), rel=1e-4)
    # of one order alone the bound at another epsilon may say more than that at 0
    assert 0.2 < advantage["budget"] <= budget.get_delta(0.0)
    assert advantage["renyi"] == pytest.approx(renyi.get_delta(0.0), rel=0.2)
    assert advantage["later"] == 1.0
    assert advantage["fixed"] < advantage["budget"]
    assert budget.risk().epsilon == 3.0
    gaussian = PrivacyAccountant(3.0, 1e-5).compose(GaussianDpEvent(9.0), adaptive=True)
    limit = gaussian._history.filter.limit
    assert gaussian.risk().gdp_mu == pytest.approx(math.sqrt(limit), rel=1e-3)
    nothing = PrivacyAccountant().risk(prior=0.3, false_positive_rate=0.02)
    assert (nothing.advantage, nothing.epsilon, nothing.gdp_mu) == (0, 0, 0)
    assert nothing.posterior == pytest.approx(0.3) and nothing.best_guess == pytest.approx(0.7)


def test_what_fails_or_has_no_noise():
    risk = PrivacyAccountant().compose(NonPrivateDpEvent()).risk()
    assert (risk.advantage, risk.true_positive_rate, risk.best_guess) == (1.0, 1.0, 1.0)
    assert math.inf == risk.epsilon == risk.gdp_mu
    assert json.loads(json.dumps(risk.as_dict()))["gdp_mu"] is None
    event = ComposedDpEvent([PureDpEvent(1.0), FailureDpEvent(1e-6)])
    risk = PrivacyAccountant().compose(event).risk(false_positive_rate=0.01)
    assert near(risk.true_positive_rate, 1e-6 + (1 - 1e-6) * math.e * 0.01)


def test_the_page_shows_what_is_printed():
    page = Path(__file__).parents[2] / "docs/how_to/what_epsilon_means.md"
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
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
