"""The parts of scripts/reproductions/reproduce_dp_hmc.py against closed forms, and what its quick
run has to show.
"""

import csv
import math
import warnings

import numpy as np
import pytest
import reproduce_dp_hmc as script
import torch
from dp_accounting import dp_event as theirs
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from reproduction import key
from scipy.integrate import quad
from scipy.stats import chi, kstest, norm
from support.kernel_distance import squared_mmd_from_the_laws

from torch_dpbayes.mcmc import RecordDensity

# of a reproduction, not of the library
pytestmark = pytest.mark.thorough

SIGMAS = 5.0  # two-sided 6e-7, for about thirty comparisons in this file


@pytest.mark.parametrize("name", ["banana", "Gaussian"])
@pytest.mark.slow
def test_model_gradients_and_posterior_are_of_one_density(name):
    """Pyro's model (weighted rows), the gradients of the batch samplers, and the law that
    exact draws are from.
    """
    problem = script.Problem(name, 0, 200)
    density = RecordDensity(problem.model, (problem.data,))

    def log_density(theta):
        prior = -(problem.straight(theta).square().sum() / (2 * problem.prior_std**2))
        return (
            prior
            - (problem.straight(theta) - problem.data).square().div(problem.variances).sum()
            * problem.weight
            / 2
        )

    first, second = problem.draws(2)
    values = []
    for theta in (first, second):
        flat = density.prior.flatten(problem.by_site(theta))
        values.append(float(density.log_likelihoods(flat).sum()) + density.prior.log_density(flat))
        point = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(log_density(point), point)
        _, of_prior = density.prior.log_density_and_gradient(flat)
        torch.testing.assert_close(density.clipped_gradient_sum(flat, 1e12) + of_prior, gradient)
        torch.testing.assert_close(
            -problem.weight * problem.gradients(theta, torch.arange(200)).sum(0) + of_prior,
            gradient,
        )
    assert values[0] - values[1] == pytest.approx(
        float(log_density(first) - log_density(second)), abs=1e-6
    )
    exact = [
        float(
            -(
                (problem.straight(theta) - problem._mean).square() / problem.posterior_variances
            ).sum()
            / 2
        )
        for theta in (first, second)
    ]
    assert exact[0] - exact[1] == pytest.approx(values[0] - values[1], abs=1e-6)

    draws = problem.draws(100_000)
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - problem.mean).abs() < SIGMAS * error).all())
    assert (
        kstest(
            ((problem.straight(draws) - problem._mean) / problem.posterior_variances.sqrt())
            .flatten()
            .numpy(),
            "norm",
        ).pvalue
        > 1e-6
    )
    assert script.measured(problem, draws[:8000].reshape(4, 2000, -1))[
        "variance ratio"
    ] == pytest.approx(1, abs=SIGMAS * math.sqrt(2 / 4000))


def test_weighted_rows_are_equal_records():
    """Clipped sums over rows that stand for several records, with bounds as much larger, are
    the sums over those records.
    """
    few, many = script.Problem("banana", 0, 1000), script.Problem("banana", 0, 1000)
    many.data, many.weight = few.data.repeat(100, 1), 1.0
    sparse, dense = (RecordDensity(problem.model, (problem.data,)) for problem in (few, many))
    theta, moved = (sparse.prior.flatten(few.by_site(point)) for point in few.draws(2))
    torch.testing.assert_close(
        sparse.clipped_gradient_sum(theta, 0.05 * few.weight),
        dense.clipped_gradient_sum(theta, 0.05),
    )
    kernel = script.make_kernel(few, script.HMC, script.dpb.PrivacyAccountant())
    settings = script.SETTINGS["banana"].hmc
    assert kernel._max_norm == pytest.approx(settings["max_grad_norm"] * few.weight)
    assert kernel._grad_multiplier * kernel._max_norm == pytest.approx(
        settings["grad_noise_multiplier"] * settings["max_grad_norm"]
    )
    assert kernel._ratio_multiplier * kernel._slope == pytest.approx(
        settings["ratio_noise_multiplier"] * settings["log_ratio_slope"]
    )
    difference = sparse.log_likelihoods(moved) - sparse.log_likelihoods(theta)
    torch.testing.assert_close(
        difference.repeat(100),
        few.weight * (dense.log_likelihoods(moved) - dense.log_likelihoods(theta)),
    )


@pytest.mark.parametrize("name", ["banana", "Gaussian"])
def test_chains_are_measured_by_their_second_halves_against_the_posterior(name):
    problem = script.Problem(name, 0, 200)
    draws = problem.draws(8000)
    draws += problem.mean - draws.mean(0)
    chains = torch.cat(
        [
            torch.full((4, 2000, draws.shape[1]), 7.0, dtype=torch.float64),
            draws.reshape(4, 2000, -1),
        ],
        1,
    )
    found = script.measured(problem, chains)
    assert found["mean error"] < 1e-10 and float((problem.truth - problem.mean).norm()) > 1e-4
    assert found["MMD"] < 0.1 and found["R-hat"] < 1.05
    moved = script.measured(problem, chains + torch.ones(draws.shape[1]))
    assert moved["mean error"] == pytest.approx(math.sqrt(draws.shape[1])) and moved["MMD"] > 0.5
    chains[0, -1] = math.nan
    assert set(script.measured(problem, chains).values()) == {math.inf}


def test_mmd_is_the_unbiased_estimate():
    a, b = torch.randn(5, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    width = float(torch.cdist(a, b).median())

    def average(x, y):
        pairs = [(i, j) for i in range(len(x)) for j in range(len(y)) if x is not y or i != j]
        return sum(
            math.exp(-(float((x[i] - y[j]).norm()) ** 2) / (2 * width**2)) for i, j in pairs
        ) / len(pairs)

    assert script.mmd(a, b) == pytest.approx(
        math.sqrt(abs(average(a, a) + average(b, b) - 2 * average(a, b))), rel=1e-6
    )


def test_mmd_of_two_gaussians():
    a, b = (
        torch.randn(1000, 3, dtype=torch.float64),
        torch.randn(1000, 3, dtype=torch.float64) + 1.0,
    )
    expected = squared_mmd_from_the_laws(a, b, torch.cdist(a, b).median().item())
    assert script.mmd(a, b) ** 2 == pytest.approx(expected, abs=0.015)
    assert script.mmd(a, a + 0) < 0.06


def penalty_acceptance(dimension):
    """On N(0, I/n) the log ratio of a move of length ρ is N(−nρ²/2, nρ²), the noise adds a
    variance of (zcρ)² and takes half of it off the mean.
    """
    settings = script.SETTINGS["Gaussian"].penalty
    scale = (
        math.sqrt(
            script.NUM_DATA + (settings["noise_multiplier"] * settings["log_ratio_slope"]) ** 2
        )
        * settings["proposal_scale"]
    )
    return quad(
        lambda length: 2 * norm.cdf(-scale * length / 2) * chi.pdf(length, dimension), 0, 30
    )[0]


@pytest.mark.parametrize("dimension", [2, 30])
def test_expected_acceptance_of_the_penalty_is_a_closed_form(dimension):
    assert script.expected_acceptance(script.PENALTY, dimension) == pytest.approx(
        penalty_acceptance(dimension), abs=SIGMAS * 0.5 / math.sqrt(1e5)
    )


@pytest.mark.slow
def test_iterations_are_those_of_the_paper_and_theirs_spend_less():
    """At ε = 4: 94, 507, 56 and 43 a chain; dp_accounting's own composition of what DP-SGLD
    spends.
    """
    rows = {(row["model"], row["algorithm"]): row for row in script.accounting([4.0])}
    counts = [
        rows[model, algorithm]["theirs"]
        for model in ("banana", "Gaussian")
        for algorithm in (script.HMC, script.PENALTY)
    ]
    assert counts == [94, 507, 56, 43]
    for (model, algorithm), row in rows.items():
        if algorithm == script.PENALTY:
            assert row["ours"] == row["theirs"]
        elif algorithm == script.HMC:  # kL + 1 gradients for k(L + 1)
            steps, ratio = (
                script.SETTINGS[model].hmc["num_steps"],
                (0.55 / 0.10 if model == "banana" else 0.25 / 0.1) ** 2,
            )
            assert row["ours"] / row["theirs"] == pytest.approx(
                (ratio + steps + 1) / (ratio + steps), abs=0.02
            )
        else:
            assert 4 * 0.98 < row["ours"] / row["theirs"] < 4 * 1.1
            accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
            event = theirs.PoissonSampledDpEvent(
                0.01,
                theirs.GaussianDpEvent(
                    float(script.langevin_noise(model, f"{algorithm} as published"))
                ),
            )
            accountant.compose(event, 4 * row["theirs"])
            assert row["theirs spend"] == pytest.approx(accountant.get_epsilon(1e-6), rel=0.02)
            assert row["theirs spend"] < 1.9


def test_other_settings_are_other_runs(monkeypatch):
    class Enough(Exception):
        pass

    def stop(function, jobs, *_):
        raise Enough([key(job) for job in jobs])

    def keys():
        with pytest.raises(Enough) as enough:
            script.main(["--quick"])
        return enough.value.args[0]

    monkeypatch.setattr(script, "run_jobs", stop)
    before = keys()
    assert len(set(before)) == len(before) > 10
    monkeypatch.setattr(script, "DELTA", 2 * script.DELTA)
    assert not set(before) & set(keys())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--report"], "no such runs"),
        (["--epsilons", "0.3"], "does not afford"),
        (["--records", "300"], "divide 100000"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_is(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.main([*arguments, "--results", str(tmp_path / "runs.jsonl")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs.jsonl").exists()


@pytest.mark.slow
def test_quick_run_shows_what_the_figures_claim(tmp_path, capsys):
    files = [
        "--results",
        str(tmp_path / "runs.jsonl"),
        "--csv",
        str(tmp_path / "rows.csv"),
        "--pictures",
        str(tmp_path),
    ]
    rows = script.main(["--quick", "--starts", "truth", *files])
    printed = capsys.readouterr().out
    assert "not private" in printed and "--quick" in printed and "commit" in printed
    found = {
        figure: [row for row in rows if row["figure"] == figure]
        for figure in ("1", "3", "dimension", "variance", "accounting")
    }

    # theirs has half the variance; 15 snapshots of 1000 coordinates, 50 steps at η = 0.1 apart
    for row in found["variance"]:
        assert row["exact"] == pytest.approx((0.5 if row["theirs"] else 1.0) / 0.95, abs=1e-3)
        assert abs(row["variance ratio"] / row["exact"] - 1) < SIGMAS * math.sqrt(2 / 15_000) + 1e-3

    acceptance = {}
    # four chains from exact draws; rejections cling together: twice the binomial variance
    for row in found["dimension"]:
        error = math.sqrt(2 * row["expected"] * (1 - row["expected"]) / (4 * row["iterations"]))
        assert abs(row["acceptance"] - row["expected"]) < SIGMAS * error
        acceptance[row["algorithm"], row["dimension"]] = row["acceptance"]
    # from 0.75 to 0.28 and from 0.85 to 0.40: more than 10 standard errors
    for algorithm in (script.HMC, script.PENALTY):
        assert acceptance[algorithm, 2] > acceptance[algorithm, 30] + 0.2

    for row in found["1"]:
        assert row["MMD of exact draws"] < 0.06
        # hardly leaves its starts
        if row["model"] == "Gaussian" and row["algorithm"] in (script.HMC, script.PENALTY):
            assert row["R-hat"] > 1.5 and row["MMD"] > 0.1
    # theirs: .72, .29 to .38
    for model, algorithm, low, high in (
        ("banana", script.HMC, 0.5, 0.85),
        ("Gaussian", script.PENALTY, 0.15, 0.5),
    ):
        rates = [
            row["acceptance"]
            for row in found["1"]
            if (row["model"], row["algorithm"]) == (model, algorithm)
        ]
        assert low < np.mean(rates) < high

    clipped = {(row["algorithm"], row["slope"]): row for row in found["3"]}
    for algorithm in (script.HMC, script.PENALTY):
        assert (
            clipped[algorithm, 0.2]["clipped"] > 0.8 and clipped[algorithm, 10.0]["clipped"] < 0.2
        )
        assert (
            clipped[algorithm, 0.2]["variance ratio"]
            > 2 * clipped[algorithm, 10.0]["variance ratio"]
        )

    with (tmp_path / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    for name in ("dp_hmc.png", "dp_hmc_runs.png", "dp_hmc_limits.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    stored = (tmp_path / "runs.jsonl").read_text()
    spent = [
        run.result["spent"]
        for run in script.stored_runs(tmp_path / "runs.jsonl").values()
        if run.job["figure"] == "1"
    ]
    assert {value is None or value <= 4 for value in spent} == {True} and any(
        value and value > 3.99 for value in spent
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = script.main(
            ["--quick", "--starts", "truth", "--results", str(tmp_path / "runs.jsonl")]
        )
    assert (tmp_path / "runs.jsonl").read_text() == stored and len(again) == len(rows)
