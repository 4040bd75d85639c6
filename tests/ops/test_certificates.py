"""Stated profiles of certificates against exact densities of draws from neighbouring data."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import optimize, stats
from support.examples import examples
from support.one_draw import RELATIONS, glm_of, tensors
from support.profiles import renyi_of_gaussians, stated

from torch_dpbayes import ops
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    MuGaussianDpEvent,
)
from torch_dpbayes.ops.certificates import Setting

EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 3.0)
GRID = np.linspace(-14, 14, 20001)


def worse_delta(p, q, epsilon):
    return max(np.clip(a - math.exp(epsilon) * b, 0, None).sum() for a, b in ((p, q), (q, p)))


# --- exact draws ----------------------------------------------------------------------------------


def density(potential):
    """exp(−U) on the grid, normalised."""
    coarse = GRID[::20]
    values = [float(potential(torch.tensor([w], dtype=torch.float64))) for w in coarse]
    values = np.interp(GRID, coarse, values)
    weights = np.exp(values.min() - values)
    return weights / weights.sum()


def potential_of(glm, records, certificate, setting, is_clipped):
    data = tensors(records)
    if is_clipped:
        return certificate.density(glm, data, setting).potential
    return glm.target(data, tempering=setting.tempering, max_grad_norm=1e9).potential


def worst_excess(glm, neighbours, certificate, setting, is_clipped=True):
    """Of the exact δ over the stated one, and their largest ratio where it is not tiny."""
    p, q = (
        density(potential_of(glm, records, certificate, setting, is_clipped))
        for records in neighbours
    )
    both = [(worse_delta(p, q, e), stated(certificate.event(glm, setting), e)) for e in EPSILONS]
    excess = max(exact - claimed for exact, claimed in both)
    return excess, max(exact / claimed for exact, claimed in both if claimed > 1e-3)


def neighbours_of(base, record, other, neighboring):
    return [*base, record], [*base, other] if neighboring == "replace_one" else base


RECORD = st.tuples(st.sampled_from([-1.0, 1.0, 0.4]), st.sampled_from([-1e6, 0.0, 1.0, 1e6]))


@pytest.mark.parametrize("certificate", [ops.Bounded((-2.0, 0.5)), ops.StronglyLogConcave(0.3)])
@examples(24)
@hypothesis.given(
    family=st.sampled_from(ops.glm.FAMILIES),
    neighboring=st.sampled_from(RELATIONS),
    base=st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), max_size=3),
    record=RECORD,
    other=RECORD,
    std=st.sampled_from([0.5, 2.0]),
    rho=st.sampled_from([0.3, 1.0]),
)
def test_exact_densities_never_exceed_the_stated_delta(
    certificate, family, neighboring, base, record, other, std, rho
):
    glm = glm_of(family, prior_std=std)
    neighbours = neighbours_of(base, record, other, neighboring)
    assert worst_excess(glm, neighbours, certificate, Setting(rho, None, neighboring))[0] < 1e-5


STEEP = 1e4  # a logistic curve so steep is a step: its log likelihood is at one end or the other


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_stated_deltas_are_reached_and_an_attack_succeeds_without_the_clips(neighboring):
    setting = Setting(1.0, None, neighboring)
    step = ops.GLM(prior_std=1.0, max_feature_norm=STEEP)
    neighbours = neighbours_of([], (STEEP, 1.0), (STEEP, 0.0), neighboring)
    excess, share = worst_excess(step, neighbours, ops.Bounded(1.0), setting)
    assert excess < 1e-3 and share > 0.9  # the step of the grid at 0
    line, concave = glm_of("gaussian", prior_std=2.0), ops.StronglyLogConcave(0.3)
    neighbours = neighbours_of([], (1.0, 1e6), (1.0, -1e6), neighboring)
    excess, share = worst_excess(line, neighbours, concave, setting)
    assert excess < 1e-5 and share > 0.99
    neighbours = neighbours_of([], (1.0, 3.0), (1.0, -3.0), neighboring)
    for certificate in (ops.Bounded((-1.0, 0.0)), ops.StronglyLogConcave()):
        assert worst_excess(line, neighbours, certificate, setting, is_clipped=False)[0] > 0.1


# --- close to an exact draw -----------------------------------------------------------------------


CONCAVE = ops.StronglyLogConcave()


def renyi_close(event, divergence, order, delta):
    eta = max(float(divergence), 0.0)  # in the test of rare sets it may round below
    return ops.RenyiClose(CONCAVE, ops.Overdamped(1, 1.0), eta, order, delta).epsilon_given(event)


def total_variation_close(event, xi, delta):
    return ops.TotalVariationClose(CONCAVE, xi, delta).epsilon_given(event)


def pairs():
    """Targets on neighbouring data sets, as probabilities of small cells, with the event of
    an exact draw.
    """
    edges = np.linspace(-12, 12, 4001)
    for mu in (0.3, 1.0):
        cells = [np.diff(stats.norm.cdf(edges - shift)) for shift in (0.0, mu)]
        yield *cells, MuGaussianDpEvent(mu)
    share = np.full(200, 1 / 200)
    for b in (0.3, 1.0):
        # a step of height b in the log ratio: the exponential mechanism with two outcomes
        for heavy in (0.5, 0.2, 0.02):
            low = heavy / (heavy + (1 - heavy) * math.exp(b))
            cells = [np.concatenate([p * share, (1 - p) * share]) for p in (heavy, low)]
            yield *cells, BoundedRangeDpEvent(b)


# --- a Rényi divergence of finite order -----------------------------------------------------------


def gaussian_chain(mu, order, std, shift, delta):
    """A chain N(−shift, std²) beside N(0, 1), its neighbour N(μ + shift, std²) beside N(μ, 1): the
    stated ε, and the exact event of the pair. None where the divergence is infinite.
    """
    both = (shift, std, 0, 1), (0, 1, shift, std)
    eta = max(renyi_of_gaussians(*laws, order) for laws in both)
    if math.isinf(eta):
        return None
    epsilon = renyi_close(MuGaussianDpEvent(mu), eta, order, delta)
    return epsilon, MuGaussianDpEvent((mu + 2 * shift) / std)


@pytest.mark.parametrize("order", [3.0, 20.0, 300.0])
@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_gaussian_chains_never_exceed_the_stated_pair(mu, order):
    shares = []
    for std in (0.9, 1 - 0.1 / order, 1.0, 1 + 0.1 / order):
        for shift in (0.0, 0.01, 0.1):
            for delta in (1e-3, 1e-6):
                if (chain := gaussian_chain(mu, order, std, shift, delta)) is not None:
                    epsilon, event = chain
                    assert stated(event, epsilon) <= delta
                    shares.append(stated(event, epsilon) / delta)
    assert order < 300 or max(shares) > 0.3


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
    for divergence in (0.01, 1.0):
        for delta in (1e-2, 1e-6):
            best = min(total(s, f) for s in shares for f in (0.2, 0.5, 0.8))
            found = renyi_close(event, divergence, order, delta)
            assert best * (1 - 1e-7) <= found <= best * 1.05


def two_point_divergence(p, q, order):
    """D_β of a coin with probability p of heads from one with q, both of them tiny."""
    heads = order * math.log(p) - (order - 1) * math.log(q)
    tails = order * math.log1p(-p) - (order - 1) * math.log1p(-q)
    return np.logaddexp(heads, tails) / (order - 1)


@pytest.mark.parametrize("order", [1.5, 5.0, 10.0])
@pytest.mark.parametrize(("b", "delta"), [(0.2, 0.3), (2.0, 1e-2), (11.0, 7e-4)])
def test_a_rare_set_that_all_three_steps_favour_stays_below_the_stated_pair(b, delta, order):
    # P of it; P' is less by e^-b, and the log ratio spans b
    for rare in np.geomspace(1e-4, 0.4, 6):
        other = rare * math.exp(-b) / (1 - rare + rare * math.exp(-b))
        for up in (1.0, 1.5, 4.0, 12.0):
            for down in (1.0, 1.5, 14.0, 200.0):
                q, q_other = min(rare * up, 0.9), other / down
                laws = ((q, rare), (rare, q), (other, q_other), (q_other, other))
                eta = max(two_point_divergence(*pair, order) for pair in laws)
                epsilon = renyi_close(BoundedRangeDpEvent(b), eta, order, delta)
                assert epsilon > 700 or q - math.exp(epsilon) * q_other <= delta * (1 + 1e-9)


def test_a_close_pair_tends_to_the_exact_one():
    delta = 1e-6
    for event in (MuGaussianDpEvent(0.5), BoundedRangeDpEvent(0.8)):
        exact = optimize.brentq(lambda e: stated(event, e) - delta, 0, 10)  # noqa: B023
        assert exact <= renyi_close(event, 1e-9, 1e5, delta) <= exact * 1.02
        assert total_variation_close(event, 1e-13, delta) == pytest.approx(exact, rel=1e-3)
        values = [renyi_close(event, eta, 100.0, delta) for eta in (0.0, 0.1, 0.5)]
        assert values == sorted(values)


# --- total variation ------------------------------------------------------------------------------


@pytest.mark.parametrize("xi", [1e-7, 1e-5, 1e-4])
def test_total_variation_is_reached_and_not_exceeded(xi):
    delta = 1e-3
    for p, other, event in pairs():
        every = [stated(event, e) + (1 + math.exp(e)) * xi for e in np.linspace(0, 12, 1000)]
        try:
            epsilon = total_variation_close(event, xi, delta)
        except ValueError:
            assert min(every) > delta * (1 - 1e-6)
            continue
        assert stated(event, epsilon) + (1 + math.exp(epsilon)) * xi <= delta * (1 + 1e-9)
        # mass ξ moved onto the cells where p exceeds e^ε·other, and as much away from there: the
        # worst pair there is
        best = p > math.exp(epsilon) * other
        if isinstance(event, MuGaussianDpEvent) and other[best].sum() > xi:
            exact = (p[best].sum() + xi) - math.exp(epsilon) * (other[best].sum() - xi)
            assert 0.98 * delta <= exact <= delta * (1 + 1e-6)
