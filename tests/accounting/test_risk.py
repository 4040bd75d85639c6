"""What an attacker can tell: closed forms, every kind of guarantee, calibration, pictures."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats
from support.ledgers import later_job

from torch_dpbayes import PrivacyAccountant, get_noise_multiplier
from torch_dpbayes.accounting import renyi as renyi_curves
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    ZCDpEvent,
)

STEP = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2))


def near(value, truth, excess=1e-3):
    return truth * (1 - 1e-9) <= value <= truth * (1 + excess)


@pytest.mark.parametrize(("neighboring", "mu"), [("add_or_remove_one", 1.0), ("replace_one", 2.0)])
@pytest.mark.parametrize("size", [1, 3])
def test_a_gaussian_release(neighboring, mu, size):
    accountant = PrivacyAccountant(neighboring=neighboring).compose(GaussianDpEvent(2.0), 4)
    risk = accountant.risk(prior=0.2, false_positive_rate=0.01, records_per_person=size)
    mu *= size
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
    assert near(risk.zcdp_rho, mu**2 / 2, 1e-9) and risk.zcdp_order == math.inf
    alone = PrivacyAccountant(neighboring=neighboring).compose(GaussianDpEvent(2.0 / size), 4)
    assert near(risk.epsilon, alone.get_epsilon(1e-5) * (1 - 1e-8))


def test_truncated_concentration_bounds_the_renyi_divergence():
    accountant = PrivacyAccountant().compose(STEP, 200)
    risk = accountant.risk()
    assert 2 < risk.zcdp_order < math.inf
    counts = accountant._history.counts
    last = risk.zcdp_order
    orders = np.array([1.0001, 1.05, 1.15, 1.55, 2.25, 0.7 + 0.3 * last, last])
    found = renyi_curves.curve(counts, orders.tolist())
    assert np.all(found <= risk.zcdp_rho * (1 + 1e-9) * orders)
    assert np.max(found / orders) >= risk.zcdp_rho * 0.98
    # what holds at all orders has no gain from sampling
    assert risk.zcdp_rho < 200 / (2 * 1.2**2) / 10


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
    risk = budget.risk()
    assert risk.epsilon == 3.0 and risk.zcdp_rho == budget._history.filter.limit
    gaussian = PrivacyAccountant(3.0, 1e-5).compose(GaussianDpEvent(9.0), adaptive=True).risk()
    assert gaussian.gdp_mu == pytest.approx(math.sqrt(2 * gaussian.zcdp_rho), rel=1e-3)
    nothing = PrivacyAccountant().risk(prior=0.3, false_positive_rate=0.02)
    assert (nothing.advantage, nothing.epsilon, nothing.gdp_mu, nothing.zcdp_rho) == (0, 0, 0, 0)
    assert nothing.posterior == pytest.approx(0.3) and nothing.best_guess == pytest.approx(0.7)


def test_what_fails_or_has_no_noise():
    risk = PrivacyAccountant().compose(NonPrivateDpEvent()).risk()
    assert (risk.advantage, risk.true_positive_rate, risk.best_guess) == (1.0, 1.0, 1.0)
    assert math.inf == risk.epsilon == risk.gdp_mu == risk.zcdp_rho
    assert json.loads(json.dumps(risk.as_dict()))["gdp_mu"] is None
    event = ComposedDpEvent([PureDpEvent(1.0), FailureDpEvent(1e-6)])
    risk = PrivacyAccountant().compose(event).risk(false_positive_rate=0.01)
    assert near(risk.true_positive_rate, 1e-6 + (1 - 1e-6) * math.e * 0.01)
    assert risk.zcdp_rho == math.inf
    # (1, 1e-6) and once more
    two = PrivacyAccountant().compose(event).risk(false_positive_rate=0.01, records_per_person=2)
    step = risk.true_positive_rate
    assert near(two.true_positive_rate, 1e-6 + (1 - 1e-6) * math.e * step)
    pure = PrivacyAccountant().compose(PureDpEvent(0.01)).risk()
    assert pure.zcdp_order == math.inf and near(pure.zcdp_rho, 0.01**2 / 2, 1e-9)
    concentrated = PrivacyAccountant(method="rdp").compose(ZCDpEvent(0.1, 0.05)).risk()
    assert near(concentrated.zcdp_rho, 0.15, 1e-6)


def test_the_page_shows_what_is_printed():
    page = Path(__file__).parents[2] / "docs/how_to/what_epsilon_means.md"
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    assert str(PrivacyAccountant().compose(step, 10_000).risk()) in page.read_text()


@pytest.mark.thorough
def test_the_text_says_what_was_asked():
    accountant = PrivacyAccountant().compose(STEP, 20)
    text = str(accountant.risk(prior=0.1, false_positive_rate=0.02, records_per_person=2))
    assert all(part in text for part in ("2 records", "took part", "prior of 0.1", "rate of 0.02"))
    replaced = PrivacyAccountant(neighboring="replace_one").compose(STEP, 20)
    assert "one record or another" in str(replaced.risk())
    lines = accountant.summary().splitlines()
    assert any(line.startswith("  risk ") for line in lines)
    of_people = accountant.summary(records_per_person=3)
    epsilon = accountant.risk(records_per_person=3).epsilon
    assert f"3 records each: epsilon <= {epsilon:.5g}" in of_people


@pytest.mark.parametrize(
    "wrong",
    [{"prior": 0}, {"prior": 1}, {"false_positive_rate": 0}, {"false_positive_rate": 1.5},
     {"prior": math.nan}, {"records_per_person": 0}, {"records_per_person": 1.5}, {"delta": 0}],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrivacyAccountant().compose(STEP).risk(**wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "target",
    [{"target_advantage": 0.15},
     {"target_true_positive_rate": 0.02, "false_positive_rate": 0.004}],
)  # fmt: skip
def test_calibration_to_attacks_is_safe_and_close(target, neighboring):
    noise = get_noise_multiplier(
        **target, sample_rate=0.05, steps=50, neighboring=neighboring, history=[(STEP, 5)]
    )

    def found(noise):
        accountant = PrivacyAccountant(neighboring=neighboring).compose(STEP, 5)
        accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(noise)), 50)
        risk = accountant.risk(false_positive_rate=target.get("false_positive_rate", 0.1))
        return risk.advantage if "target_advantage" in target else risk.true_positive_rate

    wanted = target.get("target_advantage", target.get("target_true_positive_rate"))
    assert wanted * 0.999 <= found(noise) <= wanted


@pytest.mark.parametrize(
    "targets",
    [{}, {"target_epsilon": 1.0}, {"target_advantage": 0.1, "target_delta": 1e-5},
     {"target_advantage": 1.0}, {"target_advantage": 0.0}, {"target_true_positive_rate": 0.1},
     {"target_true_positive_rate": 0.1, "false_positive_rate": 0.1},
     {"target_true_positive_rate": 0.1, "false_positive_rate": 0.01, "target_advantage": 0.1}],
)  # fmt: skip
def test_one_target_is_needed(targets):
    with pytest.raises((ValueError, TypeError)):
        get_noise_multiplier(**targets, sample_rate=0.1, steps=10)


def test_a_history_that_is_too_risky_already():
    with pytest.raises(ValueError, match="already"):
        get_noise_multiplier(
            target_advantage=0.1, sample_rate=0.1, steps=1, history=[(GaussianDpEvent(1.0), 1)]
        )


@pytest.mark.thorough
def test_the_command_reports_and_draws_it(tmp_path, capsys):
    with PrivacyAccountant(3.0, 1e-5, path=tmp_path / "a.db") as accountant:
        accountant.compose(STEP, 10)
    picture = tmp_path / "risk.png"
    assert main([str(tmp_path / "a.db"), "--json", "--plot-risk", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["risk"] == accountant.risk().as_dict()
    assert picture.stat().st_size > 5000
    assert main([str(tmp_path / "a.db"), "--records-per-person", "2"]) == 0
    told = capsys.readouterr().out
    assert str(accountant.risk(records_per_person=2)) in told


def test_the_picture_shows_the_bound():
    from matplotlib import pyplot

    accountant = PrivacyAccountant().compose(STEP, 10)
    axes = accountant.plot_risk(false_positive_rate=0.01)
    x, y = axes.lines[0].get_data()
    assert y == pytest.approx(accountant.risk().true_positive_rates(x))
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert accountant.plot_risk(pyplot.figure().gca()).figure is not axes.figure
    pyplot.close("all")
