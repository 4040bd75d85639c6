"""The baselines of scripts/reproductions/reproduce_privacy_for_free.py against quadrature and
definitions, and what its quick run has to show.
"""

import csv
import math

import numpy as np
import pytest
import reproduce_privacy_for_free as script
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import chi2, norm

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import MuGaussianDpEvent

# of a reproduction, not of the library
pytestmark = pytest.mark.thorough

pytest.importorskip("matplotlib")


def records(size, dimension):
    x = torch.randn(size, dimension)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1)
    y = torch.bernoulli(torch.full((size,), 0.5))
    return script.Data(x, y, x[:1], y[:1])


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-4), (10.0, 1e-5)])
def test_mu_is_the_accountants(epsilon, delta):
    accountant = dpb.PrivacyAccountant(neighboring="replace_one").compose(
        MuGaussianDpEvent(script.gaussian_mu(epsilon, delta))
    )
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-4)


def spent_by_objective_perturbation(noise, epsilon, strength):
    """δ(ε) by quadrature over the length of the noise, in units of its deviation; ``noise``:
    that deviation / clip norm.
    """
    s = 2 / noise
    rest = epsilon - math.log1p(script.CURVATURE / strength) - s**2 / 2
    value, error = quad(
        lambda length: length * math.exp(-(length**2) / 2) * -math.expm1(rest - s * length),
        max(rest / s, 0),
        rest / s + 40,
        epsabs=0,
    )
    assert error < 1e-6 * value
    return value


@pytest.mark.parametrize(("epsilon", "strength"), [(0.1, 20.0), (1.0, 1.0), (10.0, 0.05)])
def test_noise_of_objective_perturbation_equals_quadrature_over_the_noise(epsilon, strength):
    delta = 1e-5
    assert spent_by_objective_perturbation(
        script.objective_noise(epsilon, delta, strength), epsilon, strength
    ) == pytest.approx(delta, rel=1e-5)
    # at their Λ their noise is more
    published = 2 * script.CURVATURE / epsilon
    assert script.objective_noise(epsilon, delta, published) < script.published_objective_noise(
        epsilon, delta
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_baselines_add_the_noise_that_their_epsilon_needs(monkeypatch, epsilon):
    """What they hand to the minimiser, and what they add to what it returns."""
    data, level, repeats, handed = (
        records(1000, 20)._replace(x_test=torch.eye(20)),
        1e-6 / 18,
        200,
        [],
    )

    def minimiser(_, strength, linear=None, clip=1.0):
        handed.append((strength, linear, clip))
        return torch.zeros(20, dtype=torch.float64)

    monkeypatch.setattr(script, "minimiser", minimiser)

    def deviation_is(expected, noise):
        squares = float(noise.square().sum()) / expected**2
        return chi2.cdf(squares, noise.numel()) > level and chi2.sf(squares, noise.numel()) > level

    def noise_of(method):
        handed.clear()
        function, options = script.METHODS[method]
        fits = [function(data, epsilon, **options) for _ in range(repeats)]
        (((strength, clip), *_),) = [{(strength, clip) for strength, _, clip in handed}]
        return fits, strength, clip, [linear for _, linear, _ in handed]

    _, strength, clip, noise = noise_of("objective perturbation")
    near = script.objective_noise(epsilon, data.delta, strength)
    least = brentq(
        lambda noise: spent_by_objective_perturbation(noise, epsilon, strength) - data.delta,
        0.7 * near,
        1.5 * near,
    )
    assert deviation_is(least * clip, torch.stack(noise))

    _, strength, clip, noise = noise_of("objective perturbation, published constants")
    assert strength >= 2 * script.CURVATURE / epsilon
    assert deviation_is(
        2 * clip * math.sqrt(8 * math.log(2 / data.delta) + 4 * epsilon) / epsilon,
        torch.stack(noise),
    )

    fits, strength, clip, noise = noise_of("output perturbation")
    assert noise == [None] * repeats
    assert deviation_is(
        2 * clip / strength / script.gaussian_mu(epsilon, data.delta),
        torch.stack([fit.scores for fit in fits]),
    )


def test_tables_are_means_with_standard_errors_of_the_same_repeats():
    def runs(method, epsilon, accuracies):
        job = {
            "what": "accuracy",
            "data": "Two Gaussians",
            "method": method,
            "epsilon": epsilon,
            "settings": "",
        }
        results = [{"accuracy": value, "nll": 0.5, "spent": epsilon} for value in accuracies]
        return [
            script.reproduction.Run({**job, "repeat": repeat}, result, 0.0, "", "")
            for repeat, result in enumerate(results)
        ]

    free, ours, theirs = [80.0, 84.0, 82.0], [79.0, 81.0, 81.0], [77.0, 83.0, 79.0]
    made = (
        runs(script.NON_PRIVATE, 1.0, free)
        + runs("DP-SGLD", 1.0, ours)
        + runs(script.OBJECTIVE, 1.0, theirs)
    )
    # two repeats of three: no candidate
    made += runs("DP-SGNHT", 1.0, [70.0, 71.0, 72.0]) + runs("hybrid DP-SGNHT", 1.0, [90.0, 92.0])
    rows = script.summary(made, (1.0,))
    assert [row["method"] for row in rows] == [
        script.NON_PRIVATE,
        "hybrid DP-SGNHT",
        "DP-SGLD",
        "DP-SGNHT",
        script.OBJECTIVE,
    ]
    row = next(row for row in rows if row["method"] == "DP-SGLD")
    gaps = [-1.0, -3.0, -1.0]
    assert row["accuracy"] == pytest.approx(241 / 3, abs=1e-4) and row["sd"] == pytest.approx(
        np.std(ours, ddof=1), abs=1e-4
    )
    assert row["worst"] == 79 and row["repeats"] == 3
    assert row["gap"] == pytest.approx(-5 / 3, abs=1e-4) and row["se"] == pytest.approx(
        np.std(gaps, ddof=1) / math.sqrt(3), abs=1e-4
    )
    apart = np.array(ours) - theirs
    compared = script.comparisons(made, rows, (1.0,))
    assert (
        f"best objective perturbation | {apart.mean():+.2f} ±"
        f" {apart.std(ddof=1) / math.sqrt(3):.2f} (DP-SGLD) |" in compared
    )
    assert (
        f"best of ours − non-private | -1.67 ± {np.std(gaps, ddof=1) / math.sqrt(3):.2f}"
        " (DP-SGLD) |" in compared
    )
    assert "hybrid" not in compared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--stored"], "none of these runs"),
        (["--quick", "--data-root", "."], "--quick makes its data up"),
        (
            ["--full", "--data-root", "."],
            "no abalone/abalone.data and no adult/adult.data and no adult/adult.test",
        ),
        (["--quick", "--repeats", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_is(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        script.main([*arguments, "--folder", str(tmp_path / "new")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_curvature_is_the_largest_second_derivative_of_a_records_loss():
    u = torch.linspace(-5, 5, 1001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.softplus(-u).sum(), u, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), u)
    assert script.CURVATURE == pytest.approx(float(second.max()), rel=1e-9)


@pytest.mark.parametrize("flip", ["label", "features"])
def test_objective_perturbation_is_private_in_one_dimension(flip):
    """The density of the minimiser is that of b = −∇(Σℓ + Λθ²/2) times |db/dθ|; records that
    pull apart make δ(ε) as large as it gets.
    """
    epsilon, delta, strength, clip = 1.0, 1e-3, 1.0, 0.5
    others = [(1.0, 1.0), (-1.0, 1.0)]
    changed = (1.0, 0.0) if flip == "label" else (-1.0, 1.0)

    def density(theta, data, sigma):
        b, slope = strength * theta, strength
        for x, y in data:
            p = 1 / (1 + math.exp(-x * theta))
            b += x * min(max(p - y, -clip), clip)
            slope += x * x * p * (1 - p) if abs(p - y) < clip else 0.0
        return norm.pdf(-b, scale=sigma) * slope

    def spent(sigma):
        def excess(theta):
            return max(
                density(theta, [*others, (1.0, 1.0)], sigma)
                - math.exp(epsilon) * density(theta, [*others, changed], sigma),
                0.0,
            )

        return quad(excess, -60, 60, points=np.linspace(-20, 20, 21), limit=1000)[0]

    sigma = clip * script.objective_noise(epsilon, delta, strength)
    assert spent(sigma) <= delta
    assert spent(sigma / 4) > delta


@pytest.mark.parametrize("clip", [0.2, 0.5, 1.0])
def test_minimiser_has_no_gradient_by_the_definition_of_clipping(clip):
    data = records(300, 4)
    b, strength = 3 * torch.randn(4, dtype=torch.float64), 0.7
    w = script.minimiser(data, strength, b, clip)
    x = data.x.double()
    gradients = x * (torch.sigmoid(x @ w) - data.y)[:, None]
    clipped = gradients * (clip / gradients.norm(dim=1, keepdim=True)).clamp_max(1)
    assert float((clipped.sum(0) + strength * w + b).norm()) < 1e-5


def test_replacing_a_record_moves_the_minimiser_by_no_more_than_output_perturbation_hides():
    clip, strength = 0.5, 0.3
    for _ in range(20):
        data = records(5, 2)
        other = data._replace(x=torch.cat([-data.x[:1], data.x[1:]]))
        moved = script.minimiser(data, strength, None, clip) - script.minimiser(
            other, strength, None, clip
        )
        assert float(moved.norm()) <= 2 * clip / strength + 1e-6


def test_files_are_read_and_rows_have_norm_at_most_one(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ADULT_TRAINING", 2)
    (tmp_path / "abalone").mkdir()
    (tmp_path / "adult").mkdir()
    (tmp_path / "abalone" / "abalone.data").write_text(
        "M,0.455,0.365,0.095,0.514,0.2245,0.101,0.15,15\n" * 4 + "I,9,9,9,9,9,9,9,9\n"
    )
    line = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White,"
        " Male, 2174, 0, 40, United-States, "
    )
    (tmp_path / "adult" / "adult.data").write_text((line + "<=50K\n") * 2 + "\n")
    (tmp_path / "adult" / "adult.test").write_text(
        "|1x3 Cross validator\n" + line.replace("State-gov", "?") + ">50K.\n\n"
    )
    abalone, adult = (script.load(name, 0, str(tmp_path)) for name in ("Abalone", "Adult"))
    assert (len(abalone.x), len(abalone.x_test), abalone.dimension) == (4, 1, 9)
    assert abalone.y.sum() + abalone.y_test.sum() == 4
    assert adult.x.shape == (2, 105)
    assert adult.y.tolist() == [0, 0] and adult.y_test.tolist() == [1]
    assert (adult.x[0] > 0).sum() == 8 + 1 + 4  # no capital loss
    assert (adult.x_test[0] > 0).sum() == 7 + 1 + 4  # an unknown employer
    monkeypatch.setattr(script, "ADULT_TRAINING", 3)
    script.table.cache_clear()
    script.load.cache_clear()
    with pytest.raises(ValueError, match="2 records, not 3"):
        script.load("Adult", 0, str(tmp_path))
    for data in (abalone, adult, script.load("Two Gaussians", 0, None)):
        assert float(torch.cat([data.x, data.x_test]).norm(dim=1).max()) <= 1 + 1e-6


@pytest.mark.slow
def test_quick_run_shows_what_the_readme_says(tmp_path, capsys):
    rows = script.main(["--quick", "--folder", str(tmp_path)])
    assert "objective perturbation" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    stored = (tmp_path / "runs.jsonl").read_text()
    table = (tmp_path / "rows.csv").read_text()
    script.main(["--quick", "--folder", str(tmp_path)])
    assert (tmp_path / "rows.csv").read_text() == table
    assert (tmp_path / "runs.jsonl").read_text() == stored  # nothing was run again
    assert script.main(["--quick", "--stored", "--folder", str(tmp_path)]) == rows
    with (tmp_path / "regression.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == list(script.CHAINS)
    runs = list(script.reproduction.stored_runs(tmp_path / "runs.jsonl").values())

    # nobody spends more than was asked for; the constants of the paper leave most of it
    for row in rows:
        if row["method"] != script.NON_PRIVATE:
            assert row["relation"] == "replace_one"
            assert row["spent"] <= row["epsilon"] * (1 + 1e-6)
            if "paper's constants" in row["method"]:
                assert row["spent"] < 0.2 * row["epsilon"]

    # exact accounting is better in every repeat: by chance once in 2^16
    accuracy = {
        tuple(done.job[name] for name in ("method", "epsilon", "repeat")): done.result["accuracy"]
        for done in runs
        if "method" in done.job
    }
    pairs = [(m, e, r) for m in ("DP-SGLD", "DP-SGNHT") for e in (0.5, 2.0) for r in range(4)]
    assert len(pairs) == 16
    for method, epsilon, repeat in pairs:
        assert (
            accuracy[method, epsilon, repeat]
            > accuracy[f"{method}, paper's constants", epsilon, repeat]
        )

    # at ε = 10 privacy costs little: means of 4 repeats on 40,000 test records, whose standard
    # errors are about 0.2 points
    gaps = {row["method"]: row["gap"] for row in rows if row["epsilon"] == 10.0}
    assert max(gaps[method] for method in script.OURS if method in gaps) > -1.5
    assert max(gaps.values()) < 1.0

    # the linear regression: full batches and quadratic potentials, so the variance is T/(1 − ηκ/2)
    # in each direction, and T is known
    x, _, _, _ = script.line_data(0)
    curvatures = torch.linalg.eigvalsh(x.double().T @ x.double() / len(x)).numpy()
    lines = {
        (done.job["name"], done.job["repeat"]): done.result
        for done in runs
        if done.job["what"] == "line"
    }
    repeats, kept = 3, 0.9 * 1000
    for name in ("DP-SGLD", "DP-SGLD as published"):
        results = [lines[name, repeat] for repeat in range(repeats)]
        # of an autoregression of order 1, in each direction
        keep = 1 - results[0]["lr"] * curvatures
        expected = (
            results[0]["temperature"]
            / (1 - results[0]["lr"] * curvatures / 2)
            * (1 - (1 + keep) / (1 - keep) / kept)
        )
        error = math.sqrt(np.sum(2 * (1 + keep**2) / (1 - keep**2)) / kept / repeats) / 2
        found = np.mean([result["variance"] for result in results]) / expected.mean()
        assert found == pytest.approx(1, abs=5 * error)  # two-sided 6e-7; twice
        assert 5 * error < 0.4
        assert results[0]["spent"] <= 10
    assert lines["DP-SGLD", 0]["temperature"] == pytest.approx(1)
    assert lines["DP-SGLD as published", 0]["temperature"] > 10
    # the thermostat holds the temperature where theirs explodes
    for repeat in range(repeats):
        assert 0.6 < lines["DP-SGNHT", repeat]["variance"] < 1.6
        assert lines["DP-SGNHT as published", repeat]["variance"] == math.inf
        assert lines["DP-SGNHT", repeat]["spent"] <= 10
