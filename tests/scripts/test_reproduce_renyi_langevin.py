"""The parts of scripts/reproductions/reproduce_renyi_langevin.py against quadrature and
differential equations, and what its quick run has to show.
"""

import csv
import math

import numpy as np
import pytest
import reproduce_renyi_langevin as script
from scipy.integrate import quad, solve_ivp
from scipy.special import logsumexp
from scipy.stats import norm

# of a reproduction, not of the library
pytestmark = pytest.mark.thorough

pytest.importorskip("matplotlib")

SIGMAS = 6.0  # two-sided 2e-9; eight comparisons


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("order", [1.2, 2.0, 6.0])
@pytest.mark.parametrize(("excess", "shift"), [(0.15, 0.0), (0.1, -1.3), (-0.1, 0.4), (0.0, 2.0)])
def test_divergences_of_gaussians_equal_quadrature(order, excess, shift):
    q, p = norm(shift, math.sqrt(1 + excess)), norm(0.0, 1.0)

    def integrated(first, second):
        value, error = quad(
            lambda x: math.exp(order * first.logpdf(x) + (1 - order) * second.logpdf(x)),
            -60,
            60,
            points=(-10, 0, 10),
            limit=500,
        )
        assert error < 1e-7 * value
        return math.log(value) / (order - 1)

    found = script.renyi(np.array([excess]), np.array([shift]), order)
    assert [float(one[0]) for one in found] == pytest.approx(
        [integrated(q, p), integrated(p, q)], rel=1e-6, abs=1e-9
    )


def test_divergence_is_infinite_where_the_integral_is():
    # β/var(first) + (1−β)/var(second) ≤ 0
    assert script.renyi(np.array([1.0]), np.array([0.0]), 2.0)[0][0] == math.inf
    assert math.isfinite(script.renyi(np.array([0.999]), np.array([0.0]), 2.0)[0][0])
    assert script.renyi(np.array([-0.5]), np.array([0.0]), 2.0)[1][0] == math.inf
    assert math.isfinite(script.renyi(np.array([-0.499]), np.array([0.0]), 2.0)[1][0])


@pytest.mark.parametrize("sampler", ["underdamped", "underdamped, critical"])
@pytest.mark.parametrize(("precision", "step_size", "steps"), [(1.0, 0.3, 7), (10.0, 1.2, 4)])
def test_law_of_the_underdamped_chain_solves_its_moment_equations(
    sampler, precision, step_size, steps
):
    """Moments of (x, v, x at the start of the step) under the continuous equation with the
    frozen gradient.
    """
    friction, mass = script.FRICTIONS[sampler], script.INVERSE_MASS
    drift = np.array([[0.0, 1.0, 0.0], [0.0, -friction, -mass * precision], [0.0, 0.0, 0.0]])
    diffusion = np.diag([0.0, 2 * friction * mass, 0.0])

    def moments(_, flat):
        mean, covariance = flat[:3], flat[3:].reshape(3, 3)
        return np.concatenate(
            [drift @ mean, (drift @ covariance + covariance @ drift.T + diffusion).ravel()]
        )

    mean, covariance = np.array([1.0, 0.0]), np.diag([0.0, mass])
    freeze = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    for _ in range(steps):
        start = np.concatenate([freeze @ mean, (freeze @ covariance @ freeze.T).ravel()])
        end = solve_ivp(moments, (0, step_size), start, rtol=1e-11, atol=1e-13).y[:, -1]
        mean, covariance = end[:2], end[3:].reshape(3, 3)[:2, :2]
    found = script.law(sampler, step_size, steps, np.array([precision]))
    assert float(found.forgotten[0]) == pytest.approx(mean[0], rel=1e-7)
    assert float(found.excess[0]) == pytest.approx(covariance[0, 0] * precision - 1, rel=1e-7)


def test_law_of_the_overdamped_chain_is_its_recursion():
    mean, variance, h = np.ones(10), np.zeros(10), 0.13
    for _ in range(9):
        mean, variance = (
            (1 - h * script.PRECISIONS) * mean,
            (1 - h * script.PRECISIONS) ** 2 * variance + 2 * h,
        )
    found = script.law("overdamped", h, 9, script.PRECISIONS)
    np.testing.assert_allclose(found.forgotten, mean, rtol=1e-12)
    np.testing.assert_allclose(found.excess, variance * script.PRECISIONS - 1, rtol=1e-10)


GRID = np.linspace(-80, 80, 40_001)


def integrated(mean, variance, order):
    """D_β(Q‖P) and D_β(P‖Q) of N(mean, variance) and N(0, 1) by quadrature, infinite where
    the integrand grows towards the ends of the grid.
    """
    q, p = norm.logpdf(GRID, mean, math.sqrt(variance)), norm.logpdf(GRID)
    both = []
    for first, second in ((q, p), (p, q)):
        logs = order * first + (1 - order) * second
        wide = logs.argmax() in (0, len(logs) - 1)
        both.append(
            math.inf if wide else float(logsumexp(logs) + math.log(GRID[1] - GRID[0])) / (order - 1)
        )
    return np.array(both)


def by_quadrature(forgotten, variance, order):
    """Both divergences of chain and target, for the coordinate in which it is worst that all
    records pull; ``variance`` in those of the target.
    """
    far = script.NUM_DATA * script.CLIP * np.abs(forgotten) / np.sqrt(script.PRECISIONS)
    centred = np.array([integrated(0.0, v, order) for v in variance])
    pulled = np.array([integrated(m, v, order) for m, v in zip(far, variance, strict=True)])
    return np.max(
        [np.where(np.arange(10)[:, None] == j, pulled, centred).sum(0) for j in range(10)], axis=0
    )


def recursion(step_size, steps):
    """Distance still to go, and variance · precision, of the overdamped chain; 10,000 steps
    are the end.
    """
    mean, variance = np.ones(10), np.zeros(10)
    for _ in range(min(steps, 10_000)):
        mean, variance = (
            (1 - step_size * script.PRECISIONS) * mean,
            (1 - step_size * script.PRECISIONS) ** 2 * variance + 2 * step_size,
        )
    return mean, variance * script.PRECISIONS


@pytest.mark.parametrize(
    ("step_size", "steps", "larger"),
    [(0.05, script.LONG, 0), (0.01, script.LONG, 0), (0.02, 100, 1)],
)
@pytest.mark.slow
def test_epsilon_for_the_true_divergence_takes_the_larger_direction(step_size, steps, larger):
    """Of the two a certificate needs both: that of the smaller one states an ε that does not
    hold.
    """

    def stated(divergence, order):
        certificate = script.ops.RenyiClose(
            strongly, script.ops.Overdamped(steps, step_size), divergence, order, script.DELTA
        )
        return certificate.single_guarantee(
            script.model(), script.Setting(1.0, script.NUM_DATA, "replace_one")
        )[0]

    strongly = script.ops.StronglyLogConcave(script.CLIP)
    epsilon, order, divergence = script.close_epsilon("overdamped", step_size, steps)
    moments = recursion(step_size, steps)
    both = by_quadrature(*moments, order)
    assert both[larger] > 1.02 * both[1 - larger]
    assert divergence == pytest.approx(both[larger], rel=1e-6)
    assert epsilon == pytest.approx(stated(both[larger], order), rel=1e-6)
    others = [max(by_quadrature(*moments, beta)) for beta in script.ORDERS[::6]]
    assert all(
        epsilon <= stated(value, beta)
        for value, beta in zip(others, script.ORDERS[::6], strict=True)
        if value < 50
    )


def test_the_directions_differ_at_the_start():
    for steps, finite in ((1, False), (517, False), (518, True)):
        to_target, to_chain = script.divergences("overdamped", 0.002, steps, 8.0)
        still, variance = recursion(0.002, steps)
        assert to_target == pytest.approx(by_quadrature(still, variance, 8.0)[0], rel=1e-6)
        assert math.isfinite(to_chain) == finite == (variance.min() > 1 - 1 / 8)
        assert steps > 1 or round(to_target) == 333  # as docs/reproductions says


@pytest.mark.parametrize("hard", ["chain to target", "target to chain"])
@pytest.mark.slow
def test_fewest_steps_bring_both_directions_below_the_goal(hard):
    """A goal hardly above the bias is hard from chain to target, one that is met while the
    variance still grows is hard the other way.
    """
    order, grid = 8.0, 12
    sizes = np.geomspace(1e-6, 1, grid) * 2 / script.LARGEST
    largest = sizes[sizes < 2 / (order * script.LARGEST)][-1]
    bias = by_quadrature(np.zeros(10), 1 / (1 - largest * script.PRECISIONS / 2), order)[0]
    goal = 1.1 * bias if hard == "chain to target" else 100.0
    found = script.run_needed("overdamped", goal, order, script.DIMENSION, grid)
    assert found["best step size"] == pytest.approx(largest)
    assert max(by_quadrature(*recursion(largest, found["steps"]), order)) <= goal
    before = by_quadrature(*recursion(largest, found["steps"] - 1), order)
    assert (before > goal).tolist() == [hard == "chain to target", hard == "target to chain"]
    for size in sizes:
        assert max(by_quadrature(*recursion(size, found["steps"] - 1), order)) > goal


def test_other_constants_are_other_runs(monkeypatch):
    before = {script.reproduction.key(job) for full in (False, True) for job in script.jobs(full)}
    frictions = {**script.FRICTIONS, "underdamped": 3.0}
    for name, value in {
        "CLIP": 0.5,
        "DELTA": 1e-6,
        "ORDERS": (2.0,),
        "INVERSE_MASS": 0.2,
        "FRICTIONS": frictions,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(script, name, value)
            assert before.isdisjoint(script.reproduction.key(job) for job in script.jobs(False)), (
                name
            )


@pytest.mark.slow
def test_quick_run_shows_what_the_readme_says(tmp_path, capsys):
    csv_file, picture, results = (
        tmp_path / "rows.csv",
        tmp_path / "picture.png",
        tmp_path / "runs.jsonl",
    )
    arguments = [
        "--quick",
        "--results",
        str(results),
        "--csv",
        str(csv_file),
        "--picture",
        str(picture),
    ]
    rows = script.main(arguments)
    assert "FiniteRun" in capsys.readouterr().out
    with csv_file.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    stored = results.read_text()
    table = csv_file.read_text()
    script.main(arguments)
    assert csv_file.read_text() == table
    assert results.read_text() == stored  # nothing was run again

    # the library's draws have the computed law, which is far from the target's at the larger step
    for row in rows.of("simulation"):
        assert (
            abs(row["mean, in standard errors"]) < SIGMAS
            and abs(row["variance, in standard errors"]) < SIGMAS
        )
        if row["step_size"] in (0.15, 1.0):
            assert abs(row["variance / target"] - 1) * math.sqrt(row["draws"] / 2) > 2 * SIGMAS

    # no certificate is below the exact guarantee, and the one for finite runs equals it up to
    # 2/(λ+M)
    certified = rows.of("certificate") + [row for row in rows.of("privacy", sampler="overdamped")]
    assert len(certified) > 50
    for row in certified:
        assert row["FiniteRun mu"] >= row["exact mu"]
        if row["step_size"] <= script.EDGE:
            assert row["FiniteRun mu"] == pytest.approx(row["exact mu"], rel=1e-7)
    for row in rows.of("privacy"):
        assert row["RenyiClose epsilon"] >= row["exact epsilon"]
    # at 2/M nothing is forgotten
    assert max(row["FiniteRun mu"] / row["exact mu"] for row in certified) > 100

    # stationary bias: quadratic in h, in either direction; from chain to target finite below h =
    # 2/(βκ_max) only
    for sampler in script.SAMPLERS:
        for order in script.BIAS_ORDERS:
            found = rows.of("bias", sampler=sampler, order=order)
            small = script.Rows(row for row in found if 1e-9 < row["D(chain to target)"] < 1e-5)
            assert len(small) >= 3
            if sampler == "overdamped":
                assert script.finite_until(sampler, order) == pytest.approx(
                    2 / (order * script.LARGEST)
                )
            for direction in ("D(chain to target)", "D(target to chain)"):
                assert small.slope("step_size", direction) == pytest.approx(2, abs=0.05)
            for row in found:
                assert row["D(chain to target)"] >= row["D(target to chain)"]
                assert math.isfinite(row["D(target to chain)"])
                assert math.isfinite(row["D(chain to target)"]) == (
                    row["step_size"] < script.finite_until(sampler, order)
                )
                if sampler == "overdamped":
                    bias = row["step_size"] * script.PRECISIONS / 2
                    if bias.max() < 1e-3 / order:
                        assert row["D(chain to target)"] == pytest.approx(
                            order / 4 * (bias**2).sum(), rel=0.01
                        )

    # the steps: fewer with the critical friction; inverse to the root of the divergence, up to a
    # logarithm; and to that of 1/dimension
    few = {
        sampler: rows.of("needed", sampler=sampler, dimension=10)
        for sampler in ("overdamped", *script.FRICTIONS)
    }
    for sampler, found in few.items():
        steep = script.Rows(row for row in found if row["goal"] < 0.05)
        assert -0.65 < steep.slope("goal", "steps") < -0.5
        for row in found:
            assert row["steps"] >= few["underdamped, critical"].at("steps", goal=row["goal"])
        many = rows.of("needed", sampler=sampler, dimension=1000)
        assert 8 < many.at("steps", goal=1e-4) / found.at("steps", goal=1e-4) < 13
