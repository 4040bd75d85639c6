"""The theory in scripts/reproduce_penalty.py against closed forms and simulations of its own, and what its quick run has to show."""

import csv
import importlib.util
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import digamma, polygamma
from scipy.stats import chi2, norm, t

import torch_dpbayes as dpb

pytest.importorskip("matplotlib")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LEVEL = 1e-6 / 100  # one in a million runs of this file fails by chance


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))  # where the scripts find their shared part, and processes this one
    try:
        spec = importlib.util.spec_from_file_location("reproduce_penalty", SCRIPTS / "reproduce_penalty.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["reproduce_penalty"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))


def test_moments_of_the_posterior(script):
    heads, tails = script.PRIOR + 300, script.PRIOR + 700
    mean, spread = script.posterior_moments(1000)
    assert mean == pytest.approx(digamma(heads) - digamma(tails), rel=1e-6)
    assert spread == pytest.approx(math.sqrt(polygamma(1, heads) + polygamma(1, tails)), rel=1e-6)


@pytest.mark.parametrize("kernel", ["ratios", "statistics"])
def test_both_kernels_compute_the_likelihood_of_the_tosses(script, kernel):
    chain = script.kernel_for(kernel, 0.0, 0.2, dpb.PrivacyAccountant(neighboring="replace_one"), "fixed")
    start = {"chance": torch.tensor(-0.4, dtype=torch.float64)}
    chain.initial_params = start
    chain.setup(0, script.data(50))
    for _ in range(20):
        chain.sample(start)
    x = script.data(50).numpy()

    def log_likelihood(odds):
        return (x * odds - np.logaddexp(0, odds)).sum()

    possible = [log_likelihood(-0.4 + step) - log_likelihood(-0.4) for step in (-0.2, 0.2)]
    for ratio in chain.diagnostics()["noisy log ratios"]:
        assert min(abs(ratio - value) for value in possible) < 1e-9


def simulated(script, sigma, scale, chains, length):
    """A penalty chain written again, many at a time: acceptances, and log odds in standard deviations from their mean, (length, chains)."""
    random = np.random.default_rng()
    mean, spread = script.posterior_moments(1000)
    law = script.posterior(1000).rvs(chains, random_state=random)
    odds = np.log(law / (1 - law))
    accepted, states = [], []
    for _ in range(length):
        move = scale * random.standard_normal(chains)
        ratio = script.log_posterior(odds + move, 1000) - script.log_posterior(odds, 1000)
        std = sigma * np.abs(move) / scale
        accept = np.log(random.random(chains)) < ratio + std * random.standard_normal(chains) - std**2 / 2
        odds = np.where(accept, odds + move, odds)
        accepted.append(accept)
        states.append((odds - mean) / spread)
    return np.array(accepted), np.array(states)


@pytest.mark.parametrize(("sigma", "scale"), [(0.8, 0.3), (3.0, 1.5)])
def test_quadrature_and_eigenvalues_equal_simulation(script, sigma, scale):
    scale *= script.posterior_moments(1000)[1]
    accepted, states = simulated(script, sigma, scale, 20_000, 30)
    rate = accepted.mean(axis=0)
    limit = norm.isf(LEVEL / 2)
    assert abs(rate.mean() - script.expected(1000, sigma, scale)[0]) < limit * rate.std() / math.sqrt(len(rate))
    averages = states.mean(axis=0), (states**2).mean(axis=0)
    for found, variance in zip(averages, script.spread_of_averages(1000, sigma, scale, 30), strict=True):
        squared = (found - found.mean()) ** 2
        assert abs(squared.mean() - variance) < limit * squared.std() / math.sqrt(len(found))


def test_small_steps_of_one_length_are_accepted_with_twice_phi(script):
    for sigma in (0.5, 2.4, 5.0):
        assert script.expected(1000, sigma, 1e-4 * 0.069, "fixed")[0] == pytest.approx(2 * norm.cdf(-sigma / 2), rel=1e-3)
        rate, squared = script.expected(1000, sigma, 1e-4 * 0.069)
        assert script.small_steps(sigma, 1) == pytest.approx((rate, sigma**2 * squared / (1e-4 * 0.069) ** 2), rel=2e-3)
    best = script.best_sigma(None)
    assert norm.pdf(best / 2) * best == pytest.approx(4 * norm.cdf(-best / 2), rel=1e-3)  # where the derivative of σ²Φ(−σ/2) is 0
    rates = [script.small_steps(script.best_sigma(dimension), dimension)[0] for dimension in (1, 2, 5, 100, None)]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0.4 and rates[-1] == pytest.approx(0.234, abs=1e-3)


@pytest.mark.parametrize("noise_multiplier", [30.0, 400.0, 5000.0])
def test_iterations_by_the_closed_form_of_gaussians(script, noise_multiplier):
    def excess(mu):
        return norm.cdf(mu / 2 - script.EPSILON / mu) - math.exp(script.EPSILON) * norm.cdf(-mu / 2 - script.EPSILON / mu) - script.DELTA

    mu = brentq(excess, 0.01, 5)
    exact = (mu * noise_multiplier / 2) ** 2  # a replaced record moves the sum by twice the clip bound
    assert script.affordable(noise_multiplier) == pytest.approx(exact, rel=2e-3, abs=1)
    assert script.affordable(noise_multiplier) <= exact
    theirs = script.affordable_by_advanced_composition(noise_multiplier)
    assert 0 <= theirs < exact / 40


def by_chance(measured, expected, error, count, observations):
    """Whether a rate measured over ``count`` independent parts is as expected; a rate of few events has an error of its own."""
    error = max(error, math.sqrt(expected * (1 - expected) / observations))
    return abs(measured - expected) < t.isf(LEVEL / 2, count - 1) * error


@pytest.mark.slow
def test_quick_run_shows_what_the_readme_says(script, tmp_path, capsys):
    csv_file, picture, results = tmp_path / "rows.csv", tmp_path / "picture.png", tmp_path / "runs.jsonl"
    arguments = ["--quick", "--results", str(results), "--csv", str(csv_file), "--picture", str(picture)]
    rows = script.main(arguments)
    assert "MultiOwner" not in capsys.readouterr().err  # no process failed
    with csv_file.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    stored, table = results.read_text(), csv_file.read_text()
    script.main(arguments)
    assert (results.read_text(), csv_file.read_text()) == (stored, table)  # nothing was run again

    # Theorem 1: iterations ∝ n^2α, and the distance they go together ∝ n whatever α; exact accounting affords over 50 times as many
    for power in script.POWERS:
        found = rows.of("affordable", power=power)
        assert script.Rows(row for row in found if row["exact"] >= 100).slope("records", "exact") == pytest.approx(2 * power, abs=0.01)
        assert script.Rows(row for row in found if row["exact"] >= 100).slope("records", "reach, exact") == pytest.approx(1, abs=0.03)
        assert all(row["exact"] > 50 * row["theirs"] for row in found)

    # Proposition 1: acceptance falls with σ, and is what quadrature says; states keep the posterior's law
    for kernel in script.KERNELS:
        for steps, scale in script.STEPS:
            found = rows.of("acceptance", kernel=kernel, steps=steps, scale=scale)
            assert [row["sigma"] for row in found] == [0.6, 2.4, 4.8]
            for row in found:
                observations = row["chains"] * row["length"]
                assert by_chance(row["acceptance"], row["expected acceptance"], row["acceptance, error"], row["chains"], observations)
                if steps == "Gaussian":
                    freedom = 2 / row["second moment, expected error"] ** 2  # of the chi square with the same mean and variance
                    assert chi2.cdf(row["second moment"] * freedom, freedom) > LEVEL / 2
                    assert chi2.sf(row["second moment"] * freedom, freedom) > LEVEL / 2
            for more, less in pairwise(found):
                assert more["expected acceptance"] > less["expected acceptance"]
                assert more["acceptance"] > less["acceptance"]
    assert all(np.diff([script.expected(1000, sigma, 0.05)[0] for sigma in np.geomspace(0.05, 10, 30)]) < 0)

    # at ε = 1: the budget is used, the centred statistic affords four times the iterations, and the error falls as 1/n
    for row in rows.of("chain"):
        assert 0.99 < row["epsilon"] <= 1
        scaled = row["chains"] * row["squared error of the mean"] / row["expected squared error"]
        assert chi2.cdf(scaled, row["chains"]) > LEVEL / 2 and chi2.sf(scaled, row["chains"]) > LEVEL / 2
    errors = {kernel: script.Rows(row for row in rows.of("error", kernel=kernel) if row["records"] >= 30_000) for kernel in script.KERNELS}
    for ratios, statistics in zip(*errors.values(), strict=True):
        assert statistics["iterations"] == pytest.approx(4 * ratios["iterations"], abs=4)
        assert ratios["expected squared error"] / statistics["expected squared error"] == pytest.approx(4, rel=0.05)
    for found in errors.values():
        assert found.slope("records", "expected squared error") == pytest.approx(-1, abs=0.02)

    # owners: their noise adds up, and each pays for its own
    for row in rows.of("owners"):
        assert by_chance(row["acceptance"], row["expected acceptance"], row["acceptance, error"], 20, row["length"])
    one, three = rows.of("owners")
    assert three["iterations"] == pytest.approx(one["iterations"] / 3, abs=1)
    assert three["epsilon of each owner"] == pytest.approx(one["epsilon of each owner"])
    assert three["expected acceptance"] < one["expected acceptance"]

    # an iteration on the statistics costs the same for any number of records
    def growth(kernel):
        few, many = rows.of("seconds", kernel=kernel)
        return many["seconds an iteration"] / few["seconds an iteration"]

    assert growth("ratios") > 2 * growth("statistics")
