"""Stated profiles of certificates against exact densities of draws from neighbouring data."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import optimize, stats
from scipy.interpolate import CubicSpline
from support.examples import examples
from support.one_draw import RELATIONS, glm_of, tensors
from support.profiles import excess_and_share, stated

from torch_dpbayes import ops
from torch_dpbayes.accounting.events import BoundedRangeDpEvent, MuGaussianDpEvent
from torch_dpbayes.accounting.gdp import gaussian_delta
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.ops.certificates.certificate import exact_delta
from torch_dpbayes.ops.models import Limits

BASES = st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), max_size=4)
RECORDS = st.tuples(st.sampled_from([-1.0, 1.0, 0.4]), st.sampled_from([-1e6, 0.0, 1.0, 1e6]))
CASES = {
    "family": st.sampled_from(ops.glm.FAMILIES),
    "neighboring": st.sampled_from(RELATIONS),
    "base": BASES,
    "record": RECORDS,
    "other": RECORDS,
    "rho": st.sampled_from([0.3, 1.0]),
}


def neighbours_of(base, record, other, neighboring):
    return [*base, record], [*base, other] if neighboring == "replace_one" else base


# --- exact draws ----------------------------------------------------------------------------------


def of_exact_draws(glm, neighbours, certificate, setting):
    coarse, laws = torch.linspace(-14, 14, 1001, dtype=torch.float64), []
    for records in neighbours:
        density = glm.target(tensors(records), certificate.limits(setting))
        potentials = torch.vmap(density.potential)(coarse[:, None])
        fine = np.interp(np.linspace(-14, 14, 20001), coarse, potentials.flatten())
        weights = np.exp(fine.min() - fine)
        laws.append(weights / weights.sum())
    return excess_and_share(*laws, certificate.event(glm, setting))


@pytest.mark.parametrize("certificate", [ops.Bounded((-2.0, 0.5)), ops.StronglyLogConcave(0.3)])
@examples(24)
@hypothesis.given(**CASES, std=st.sampled_from([0.5, 2.0]))
def test_exact_densities_never_exceed_the_stated_delta(
    certificate, family, neighboring, base, record, other, std, rho
):
    glm = glm_of(family, prior_std=std)
    neighbours = neighbours_of(base, record, other, neighboring)
    assert of_exact_draws(glm, neighbours, certificate, Setting(rho, None, neighboring))[0] < 1e-5


STEEP = 1e4  # a logistic curve so steep is a step: its log likelihood is at one end or the other


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_stated_deltas_are_reached(neighboring):
    setting = Setting(1.0, None, neighboring)
    step = ops.GLM(prior_std=1.0, max_feature_norm=STEEP)
    neighbours = neighbours_of([], (STEEP, 1.0), (STEEP, 0.0), neighboring)
    excess, share = of_exact_draws(step, neighbours, ops.Bounded(1.0), setting)
    assert excess < 1e-3 and share > 0.9  # the step of the grid at 0
    line, concave = glm_of("gaussian", prior_std=2.0), ops.StronglyLogConcave(0.3)
    neighbours = neighbours_of([], (1.0, 1e6), (1.0, -1e6), neighboring)
    excess, share = of_exact_draws(line, neighbours, concave, setting)
    assert excess < 1e-5 and share > 0.99


# --- a finite run ---------------------------------------------------------------------------------


def density_of_a_run(glm, records, run, setting, grid):
    """Of the last state on a grid, by exact iteration of the library's own step."""
    clip, h = run.max_grad_norm, run.resolved(glm, setting)[3]
    target = glm.target(tensors(records), Limits(setting.tempering, clip))
    points = torch.from_numpy(grid)[:, None]
    slope = torch.stack([target.gradient(point) for point in points]).numpy()
    density = stats.norm.pdf(grid, -h * float(target.gradient(target.start)), math.sqrt(2 * h))
    kernel = stats.norm.pdf(grid, grid[:, None] - h * slope, math.sqrt(2 * h))
    for _ in range(run.steps - 1):
        density = density @ kernel * (grid[1] - grid[0])
    return density


def of_runs(glm, neighbours, run, setting):
    h = run.resolved(glm, setting)[3]
    for width in (6, 12, 25, 50, 100):
        # fine enough for the trapezoidal rule, which converges exponentially on Gaussians
        grid = np.linspace(-width, width, 1 + int(2 * width * 8 / math.sqrt(2 * h)))
        laws = [density_of_a_run(glm, records, run, setting, grid) for records in neighbours]
        if all(abs(law.sum() * (grid[1] - grid[0]) - 1) < 1e-9 for law in laws):
            break
    else:
        raise AssertionError("no grid is wide enough")
    fine = np.linspace(-width, width, 64 * len(grid))
    logs = (np.log(np.maximum(law, 1e-300)) for law in laws)  # for Gaussians a spline is exact
    p, q = (np.exp(CubicSpline(grid, log)(fine)) * (fine[1] - fine[0]) for log in logs)
    return excess_and_share(p, q, run.event(glm, setting))


@examples(80)
@hypothesis.given(
    **CASES,
    lam=st.sampled_from([0.0, 0.5, 2.0]),
    steps=st.integers(1, 12),
    stretch=st.sampled_from([0.3, 1.0, 1.9]),
    clip=st.sampled_from([0.5, 1.0, 2.0]),
)
@hypothesis.example(  # where a coarse grid exceeds δ by 1.5e-6
    **{"family": "gaussian", "neighboring": "replace_one", "base": [], "rho": 1.0},
    **{"record": (-1.0, -1e6), "other": (-1.0, 1e6), "lam": 0.0, "steps": 1, "stretch": 1.0},
    clip=2.0,
)
def test_exact_output_densities_of_runs_never_exceed_the_stated_delta(
    family, neighboring, base, record, other, lam, steps, stretch, clip, rho
):
    glm = glm_of(family, prior_std=math.inf if lam == 0 else lam**-0.5)
    setting = Setting(rho, len(base) + 1, neighboring)
    constants = glm.derived_constants(clip)
    m = constants.prior_smoothness + rho * (len(base) + 1) * constants.record_smoothness
    run = ops.FiniteRunLangevin(steps, step_size=min(stretch / m, 0.5), max_grad_norm=clip)
    assert of_runs(glm, neighbours_of(base, record, other, neighboring), run, setting)[0] < 1e-6


@pytest.mark.parametrize("std", [math.inf, 1.0])
@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_delta_of_a_run_is_reached(neighboring, std):
    glm, run = glm_of("gaussian", prior_std=std), ops.FiniteRunLangevin(steps=10)
    neighbours = neighbours_of([], (1.0, 1e6), (1.0, -1e6), neighboring)
    excess, share = of_runs(glm, neighbours, run, Setting(1.0, 1, neighboring))
    assert excess < 1e-6 and share > 0.999


def mu_of_a_run(steps, size=None, *, strength, smoothness):
    constants = {"lipschitz": 1.0, "strength": strength, "smoothness": smoothness}
    run = ops.FiniteRunLangevin(steps, size, **constants)
    return run.event(None, Setting(1.0, None, "replace_one")).mu


@pytest.mark.parametrize("share", [0.2, 0.9, 0.98])
def test_the_contraction_is_the_worse_of_both_ends(share):
    """On both sides of h = 2/(λ + M); the formula as the paper has it."""
    strength, smoothness, t = 0.8, 2.0, 7
    h = share * 2 / smoothness
    c = max(abs(1 - h * strength), abs(1 - h * smoothness))
    expected = 2 * math.sqrt(h / 2 * (1 - c**t) / (1 + c**t) * (1 + c) / (1 - c))
    constants = {"strength": strength, "smoothness": smoothness}
    assert mu_of_a_run(t, h, **constants) == pytest.approx(expected, rel=1e-8)
    with pytest.raises(ValueError, match="above 2/M"):
        mu_of_a_run(t, 1.001 * 2 / smoothness, **constants)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_strength_at_the_end_of_floats_forgets_nothing(steps):
    strengths = (5e-324, 1e-323, 1e-310, 1e-300, 0.0)
    found = [mu_of_a_run(steps, strength=s, smoothness=1.0) for s in strengths]
    assert min(found) >= 2 * math.sqrt(steps / 2)
    assert max(found) == pytest.approx(min(found), rel=1e-8)


LEVEL = 1e-4  # of one look at a law
COLUMNS = 200  # independent one-dimensional posteriors in one run: every record touches one column


@pytest.mark.chance(LEVEL)
def test_draws_follow_the_exact_law_of_the_chain():
    glm, steps = glm_of("bernoulli", prior_std=1.5), 60
    constants = glm.derived_constants()
    h = 1.8 / (constants.prior_smoothness + COLUMNS * constants.record_smoothness)
    run = ops.FiniteRunLangevin(steps, step_size=h)
    x, y = torch.eye(COLUMNS, dtype=torch.float64), torch.ones(COLUMNS, dtype=torch.float64)
    draws = [ops.OnePosteriorSample(glm, run).sample(x, y)["weights"] for _ in range(10)]
    setting, grid = Setting(1.0, COLUMNS, "replace_one"), np.linspace(-10, 10, 1001)
    density = density_of_a_run(glm, [(1.0, 1.0)], run, setting, grid)
    cumulative = (np.cumsum(density) - density / 2) * (grid[1] - grid[0])
    uniform = np.interp(torch.cat(draws).numpy(), grid, cumulative)
    assert stats.kstest(uniform, "uniform").pvalue > LEVEL


# --- close to an exact draw -----------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-9, 1.0, 1e5])
def test_the_profile_of_an_exact_draw_is_the_accountants(mu):
    points = np.linspace(0.0, 3 * mu + mu**2 / 2, 5)
    wanted = [gaussian_delta(mu, epsilon) for epsilon in points]
    assert exact_delta(MuGaussianDpEvent(mu), points) == pytest.approx(wanted, rel=1e-12, abs=0)


@pytest.mark.parametrize("order", [1.5, 4.0, 30.0])
@pytest.mark.parametrize("event", [MuGaussianDpEvent(0.7), BoundedRangeDpEvent(2.5)], ids=str)
def test_the_pair_of_a_close_draw_is_the_best_of_three_steps(event, order):
    """Q(S) <= e^a P(S) + d1, P(S) <= e^c P'(S) + d2, P'(S) <= e^b Q'(S) + d3 at any split of
    d = d1 + e^a d2 + e^(a+c) d3, the steps from a divergence by Canonne, Kamath and Steinke (2020).
    """

    def step(part):
        spread = order * math.log(1 - 1 / order) - math.log((order - 1) * part)
        return max(0.0, divergence + spread / (order - 1))

    def total(second, first):
        a = step(delta * (1 - second) * first)
        left = delta * second * math.exp(-a)
        c = optimize.brentq(lambda e: stated(event, e) - left, 0, 80) if left < half else 0.0
        return a + c + step(delta * (1 - second) * (1 - first) * math.exp(-a - c))

    half = stated(event, 0.0)
    shares = (0.003, 0.01, 0.05, 0.15, 0.33, 0.5, 0.7, 0.9, 0.97)
    for divergence, delta in ((0.01, 1e-2), (0.01, 1e-6), (1.0, 1e-6)):
        best = min(total(s, f) for s in shares for f in (0.2, 0.5, 0.8))
        walk, concave = ops.Overdamped(1, 1.0), ops.StronglyLogConcave()
        close = ops.RenyiClose(concave, walk, divergence, order, delta)
        assert best * (1 - 1e-7) <= close.epsilon_given(event) <= best * 1.05


@pytest.mark.parametrize("xi", [1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize(
    "event", [*map(MuGaussianDpEvent, (0.3, 1.0)), *map(BoundedRangeDpEvent, (0.3, 2.0))], ids=str
)
def test_total_variation_is_reached_and_not_exceeded(event, xi):
    """Of Gaussians by the worst pair: mass ξ moved onto the cells where p exceeds e^ε·other, and
    as much away from there.
    """
    delta = 1e-3
    close = ops.TotalVariationClose(ops.StronglyLogConcave(), xi, delta)
    try:
        epsilon = close.epsilon_given(event)
    except ValueError:
        totals = [stated(event, e) + (1 + math.exp(e)) * xi for e in np.linspace(0, 12, 1000)]
        assert min(totals) > delta * (1 - 1e-6)
        return
    assert stated(event, epsilon) + (1 + math.exp(epsilon)) * xi <= delta * (1 + 1e-9)
    if isinstance(event, MuGaussianDpEvent):
        edges = np.linspace(-12, 12, 4001)
        p, other = (np.diff(stats.norm.cdf(edges - shift)) for shift in (0.0, event.mu))
        best = p > math.exp(epsilon) * other
        if other[best].sum() > xi:
            exact = (p[best].sum() + xi) - math.exp(epsilon) * (other[best].sum() - xi)
            assert 0.98 * delta <= exact <= delta * (1 + 1e-6)
