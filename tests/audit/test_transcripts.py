"""Audits from scores and from repeated releases, on mechanisms whose truth is known; reports; and
the library audits itself.
"""

from dataclasses import replace
from functools import partial

import matplotlib
import pytest
from audit_power import FAULTS, STATED, audited_with
from scipy import special
from support.audits import charged, fresh

from torch_dpbayes.accounting.events import GaussianDpEvent, PureDpEvent
from torch_dpbayes.audit import AuditResult, from_scores, repeated
from torch_dpbayes.audit.bounds import Guesses, gaussian_epsilon

DELTA = 1e-5


def gaussian_release(rng, mu, is_in):
    seen = rng.normal() + mu * is_in
    return mu * seen - mu**2 / 2


def response(rng, epsilon, is_in):
    return (2.0 * is_in - 1.0) * (1 if rng.random() < special.expit(epsilon) else -1)


@pytest.mark.chance(1e-6)
def test_repeats_come_near_the_truth():
    """More than six standard deviations of what 20,000 repeats show below and above it."""
    rng, options = fresh(), {"repeats": 20_000, "confidence": 1 - 1e-7}
    stated = {"epsilon": gaussian_epsilon(1.0, DELTA), "delta": DELTA}
    result = repeated(partial(gaussian_release, rng, 1.0), **stated, **options)
    assert 0.75 * result.epsilon < result.epsilon_lower_bound <= result.epsilon
    stated = {"epsilon": 1.0, "delta": 0.0, "bound": "basic"}
    result = repeated(partial(response, rng, 1.0), **stated, **options)
    assert 0.8 < result.epsilon_lower_bound <= 1.0


@pytest.mark.chance(1e-6)
def test_log_likelihood_ratios_of_several_releases_add_up():
    """Three Gaussians together show more than one, and what all of them reveal is not exceeded.
    With two of the three charges left out, the bound refutes all, and one alone not.
    At 1 − 10⁻⁷: five standard deviations of the number of right guesses.
    """
    rng, mu, number = fresh(), 0.9, 6000
    included = rng.random(number) < 0.5
    ratios = [mu * (rng.normal(size=number) + mu * included) - mu**2 / 2 for _ in range(3)]
    options = {"delta": DELTA, "bound": "independent", "confidence": 1 - 1e-7}
    of_one = charged(GaussianDpEvent(1 / mu))
    of_all = charged(*3 * [GaussianDpEvent(1 / mu)])
    one = from_scores(ratios[0], included, accountant=of_one, **options)
    everything = from_scores(sum(ratios), included, accountant=of_all, **options)
    truth = gaussian_epsilon(mu * 3**0.5, DELTA)
    assert everything.epsilon == pytest.approx(truth, rel=1e-3)
    assert one.epsilon_lower_bound < everything.epsilon_lower_bound < truth
    assert everything.epsilon_lower_bound > 0.6 * truth
    assert not one.is_refuted and not everything.is_refuted
    assert from_scores(sum(ratios), included, accountant=of_one, **options).is_refuted


@pytest.mark.chance(1e-6)
def test_randomised_response_is_not_refuted_for_being_no_gaussian():
    """Its ε at δ is a far smaller Gaussian's; the accountant's whole curve knows. With half of the
    charge left out, the curve is refuted.
    """
    rng, accountant = fresh(), charged(PureDpEvent(1.0))
    stated = {"delta": DELTA, "accountant": accountant}
    audit = partial(repeated, **stated, repeats=20_000, confidence=1 - 1e-7)
    result = audit(partial(response, rng, 1.0))
    assert result.epsilon_lower_bound > result.epsilon and not result.is_refuted
    assert "not Gaussian" in str(result) and "not refuted" in str(result)
    assert audit(partial(response, rng, 2.0)).is_refuted
    assert not audit(partial(response, rng, 1.0), bound="basic").is_refuted


def test_a_report_and_its_picture():
    threat, guesses = "white-box: all is seen", Guesses(1000, 250, 200)
    stands = AuditResult(1.25, 2.0, 1e-5, 0.99, threat, "gaussian", guesses, "replace")
    passed = replace(stands, epsilon=1.0, neighboring=None)
    assert passed.is_refuted and not stands.is_refuted
    matplotlib.use("Agg")
    for result, word in ((stands, "not refuted"), (passed, "REFUTED")):
        assert word in str(result)
        ax = result.plot()
        bars = [bar.get_width() for bar in ax.patches]
        assert bars == [result.epsilon, result.epsilon_lower_bound]
        assert ax.get_xlabel() == str(result) and result.plot(ax) is ax
        matplotlib.pyplot.close(ax.figure)


CAUGHT = [name for name in FAULTS if name[0] not in "12"]  # of one or two charges, not always


@pytest.mark.chance(0.01, looks=4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUGHT)
def test_faults_are_caught(fault):
    """They double μ at least, of which the bound shows three fifths and more in all but one of a
    hundred thousand runs; a sound run, whose canaries are records 100 times longer than the clip
    norm, is refuted in one of a hundred, and shows more than a third of ε.
    """
    (result,) = audited_with(fault)
    assert result.epsilon == pytest.approx(STATED)
    assert result.is_refuted is not fault.startswith("none")
    assert result.epsilon_lower_bound > STATED / 3 or fault == "none, by differences"
