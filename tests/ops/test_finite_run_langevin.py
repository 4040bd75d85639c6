"""The finite-run certificate against exact output densities, and the law of its draws against
closed forms.
"""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats
from scipy.interpolate import CubicSpline
from support.examples import examples
from support.one_draw import RELATIONS, glm_of, tensors

from torch_dpbayes import ops
from torch_dpbayes.accounting.gdp import gaussian_delta
from torch_dpbayes.ops.certificates import Setting

EPSILONS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
LEVEL = 1e-4  # of one look at a law


def output_density(glm, records, certificate, setting, h, *, grid, max_grad_norm=None):
    """The density of the last state on a grid, by exact iteration of the library's own step."""
    clip = certificate.max_grad_norm if max_grad_norm is None else max_grad_norm
    target = glm.target(tensors(records), tempering=setting.tempering, max_grad_norm=clip)
    slope = np.array([float(target.gradient(torch.tensor([g], dtype=torch.float64))) for g in grid])
    spacing = grid[1] - grid[0]
    density = stats.norm.pdf(grid, -h * float(target.gradient(target.start)), math.sqrt(2 * h))
    kernel = stats.norm.pdf(grid[None, :], (grid - h * slope)[:, None], math.sqrt(2 * h)) * spacing
    for _ in range(certificate.steps - 1):
        density = density @ kernel
    return density


def grids(h):
    """Wider and wider, fine enough for the trapezoidal rule to be exact to round-off (it
    converges exponentially on Gaussians).
    """
    for width in (6, 12, 25, 50, 100):
        yield np.linspace(-width, width, 1 + int(2 * width * 8 / math.sqrt(2 * h)))


def worst_excess(glm, neighbours, certificate, setting, claimed=None, **options):
    """max over both directions and EPSILONS of exact δ − claimed δ, and of exact δ / claimed
    δ where claimed δ is not tiny.
    """
    mu = certificate.event(claimed or glm, setting).mu
    h = certificate.resolved(claimed or glm, setting)[3]
    for grid in grids(h):
        densities = [
            output_density(glm, records, certificate, setting, h, grid=grid, **options)
            for records in neighbours
        ]
        spacing = grid[1] - grid[0]
        if all(abs(density.sum() * spacing - 1) < 1e-9 for density in densities):
            break
    else:
        raise AssertionError("no grid is wide enough")
    fine = np.linspace(grid[0], grid[-1], 16 * len(grid))
    both = [CubicSpline(grid, density)(fine) for density in densities]
    excess, share = -math.inf, 0.0
    for p, q in (both, both[::-1]):
        for epsilon in EPSILONS:
            exact = float(np.clip(p - math.exp(epsilon) * q, 0, None).sum() * (fine[1] - fine[0]))
            bound = gaussian_delta(mu, epsilon)
            excess = max(excess, exact - bound)
            share = max(share, exact / bound if bound > 1e-3 else 0.0)
    return excess, share


@pytest.mark.parametrize("share", [0.2, 0.9, 0.98])
def test_the_contraction_is_the_worse_of_both_ends(share):
    """On both sides of h = 2/(λ + M); the formula as the paper has it."""
    strength, smoothness, t = 0.8, 2.0, 7
    h = share * 2 / smoothness
    c = max(abs(1 - h * strength), abs(1 - h * smoothness))
    expected = 2 * math.sqrt(h / 2 * (1 - c**t) / (1 + c**t) * (1 + c) / (1 - c))
    setting = Setting(1.0, None, "replace_one")

    def mu(size):
        constants = {"lipschitz": 1.0, "strength": strength, "smoothness": smoothness}
        return ops.FiniteRunLangevin(t, size, **constants).event(None, setting).mu

    assert mu(h) == pytest.approx(expected, rel=1e-8)
    with pytest.raises(ValueError, match="above 2/M"):
        mu(1.001 * 2 / smoothness)


def test_a_strength_at_the_end_of_floats_forgets_nothing():
    for steps in (1, 3):
        stated = [
            ops.FiniteRunLangevin(steps, lipschitz=1.0, strength=s, smoothness=1.0)
            .event(None, Setting(1.0, None, "replace_one"))
            .mu
            for s in (5e-324, 1e-323, 1e-310, 1e-300, 0.0)
        ]
        assert min(stated) >= 2 * math.sqrt(steps / 2)
        assert max(stated) == pytest.approx(min(stated), rel=1e-8)


records = st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), max_size=4)
extreme = st.tuples(st.sampled_from([-1.0, 1.0, 0.4]), st.sampled_from([-1e6, 0.0, 1.0, 1e6]))


@examples(80)
@hypothesis.given(
    family=st.sampled_from(ops.glm.FAMILIES),
    neighboring=st.sampled_from(RELATIONS),
    base=records,
    record=extreme,
    other=extreme,
    lam=st.sampled_from([0.0, 0.5, 2.0]),
    t=st.integers(1, 12),
    stretch=st.sampled_from([0.3, 1.0, 1.9]),
    clip=st.sampled_from([0.5, 1.0, 2.0]),
    rho=st.sampled_from([0.3, 1.0]),
)
def test_exact_output_densities_never_exceed_the_stated_delta(
    family, neighboring, base, record, other, lam, t, stretch, clip, rho
):
    glm = glm_of(family, prior_std=math.inf if lam == 0 else lam**-0.5)
    neighbours = ([*base, record], [*base, other] if neighboring == "replace_one" else base)
    setting = Setting(rho, len(base) + 1, neighboring)
    constants = glm.derived_constants(clip)
    m = constants.prior_smoothness + rho * (len(base) + 1) * constants.record_smoothness
    certificate = ops.FiniteRunLangevin(
        steps=t, step_size=min(stretch / m, 0.5), max_grad_norm=clip
    )
    excess, _ = worst_excess(glm, neighbours, certificate, setting)
    assert excess < 1e-6


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_stated_delta_is_reached_and_an_attack_succeeds_without_either_clip(neighboring):
    def excess_of(glm, first, second, certificate, **options):
        neighbours = ([first], [second] if neighboring == "replace_one" else [])
        return worst_excess(glm, neighbours, certificate, Setting(1.0, 1, neighboring), **options)

    run = ops.FiniteRunLangevin(steps=10)
    for lam in (0.0, 1.0):
        glm = glm_of("gaussian", prior_std=math.inf if lam == 0 else lam**-0.5)
        excess, share = excess_of(glm, (1.0, 1e6), (1.0, -1e6), run)
        assert excess < 1e-6 and share > 0.999
    assert excess_of(glm, (1.0, 8.0), (1.0, -8.0), run, max_grad_norm=1e9)[0] > 0.05
    long, claimed = ops.GLM(prior_std=1.0, max_feature_norm=6.0), ops.GLM(prior_std=1.0)
    slow = ops.FiniteRunLangevin(steps=10, step_size=0.05)
    unclipped = {"claimed": claimed, "max_grad_norm": 1e9}
    assert excess_of(long, (6.0, 1.0), (6.0, 0.0), slow, **unclipped)[0] > 0.05
    assert excess_of(claimed, (6.0, 1.0), (6.0, 0.0), slow)[0] < 1e-6


# --- the law of a draw ----------------------------------------------------------------------------

COLUMNS = 200  # independent one-dimensional posteriors in one run: every record touches one column


def draws(glm, y, certificate, repeats, **options):
    out = []
    for _ in range(repeats):
        sampler = ops.OnePosteriorSample(glm, certificate, **options)
        out.append(sampler.sample(torch.eye(COLUMNS, dtype=torch.float64), y)["weights"])
    return torch.stack(out).numpy(), sampler


@pytest.mark.chance(LEVEL)
@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_draws_of_other_families_follow_the_exact_law_of_the_chain(family):
    glm, rho, t = glm_of(family, prior_std=1.5), 1.0, 60
    y = torch.full((COLUMNS,), 1.0, dtype=torch.float64)
    constants = glm.derived_constants()
    m = constants.prior_smoothness + COLUMNS * constants.record_smoothness
    h = 1.8 / m
    certificate = ops.FiniteRunLangevin(steps=t, step_size=h)
    sample, sampler = draws(glm, y, certificate, 10)
    setting = Setting(rho, COLUMNS, "replace_one")
    grid = np.linspace(-10, 10, 2001)
    density = output_density(glm, [(1.0, 1.0)], certificate, setting, h, grid=grid)
    cumulative = (np.cumsum(density) - density / 2) * (grid[1] - grid[0])
    uniform = np.interp(sample.ravel(), grid, cumulative)
    assert stats.kstest(uniform, "uniform").pvalue > LEVEL
