"""Bounded and StronglyLogConcave: stated profiles against exact densities; the law of a draw."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats
from support.examples import examples
from support.one_draw import COLUMNS, RELATIONS, conjugate, glm_of, tensors
from support.profiles import stated

from torch_dpbayes import ops
from torch_dpbayes.accounting.events import BoundedRangeDpEvent

EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.5, 3.0)


SIGNIFICANCE = 1e-6 / 6  # one in a million runs of this file fails by chance


GRID = np.linspace(-14, 14, 20001)


def density(potential):
    """exp(−U) on the grid, normalised."""
    values = np.array(
        [float(potential(torch.tensor([w], dtype=torch.float64))) for w in GRID[::20]]
    )
    values = np.interp(GRID, GRID[::20], values)
    weights = np.exp(values.min() - values)
    return weights / weights.sum()


def deltas(p, q):
    """The exact δ at EPSILONS, the worse direction."""
    return [
        max(np.clip(a - math.exp(e) * b, 0, None).sum() for a, b in ((p, q), (q, p)))
        for e in EPSILONS
    ]


def potential_of(glm, records, certificate, setting, **options):
    if isinstance(certificate, ops.StronglyLogConcave):
        options = {"max_grad_norm": certificate.max_grad_norm, **options}
        return glm.target(tensors(records), tempering=setting.tempering, **options).potential
    target = glm.target(tensors(records), tempering=setting.tempering, max_grad_norm=math.inf)
    low, high = options.get("clip", certificate.log_likelihood_range)
    return lambda w: target.clipped_potential(w, low, high)


def worst_excess(glm, neighbours, certificate, setting, **options):
    exact = deltas(
        *(
            density(potential_of(glm, records, certificate, setting, **options))
            for records in neighbours
        )
    )
    claimed = [stated(certificate.event(glm, setting), epsilon) for epsilon in EPSILONS]
    return max(e - s for e, s in zip(exact, claimed)), max(
        e / s for e, s in zip(exact, claimed) if s > 1e-3
    )


@pytest.mark.first_cases(8)
@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("family", ops.glm.FAMILIES)
@pytest.mark.parametrize(
    "certificate",
    [
        ops.Bounded((-2.0, 0.5)),
        ops.StronglyLogConcave(),
        ops.StronglyLogConcave(max_grad_norm=0.3),
    ],
    ids=["bounded", "concave", "concave-clipped"],
)
@examples(6)
@hypothesis.given(
    base=st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), max_size=3),
    record=st.tuples(st.sampled_from([-1.0, 1.0, 0.4]), st.sampled_from([-1e6, 0.0, 1.0, 1e6])),
    other=st.tuples(st.sampled_from([-1.0, 1.0, 0.1]), st.sampled_from([-1e6, 0.0, 1.0, 1e6])),
    std=st.sampled_from([0.5, 2.0]),
    rho=st.sampled_from([0.3, 1.0]),
)
def test_exact_densities_never_exceed_the_stated_delta(
    certificate, family, neighboring, base, record, other, std, rho
):
    glm = glm_of(family, prior_std=std)
    neighbours = ([*base, record], [*base, other] if neighboring == "replace_one" else base)
    assert (
        worst_excess(
            glm, neighbours, certificate, ops.certificates.Setting(rho, None, neighboring)
        )[0]
        < 1e-5
    )


# a logistic curve this steep is a step: its clipped log likelihood is at one end or the other
STEEP = 1e4


@pytest.mark.parametrize(
    ("neighboring", "base"), [("replace_one", 0), ("add_or_remove_one", 0), ("replace_one", 1)]
)
def test_bounded_is_reached_by_a_step_likelihood(neighboring, base):
    glm = ops.GLM(prior_std=1.0, max_feature_norm=STEEP)
    neighbours = (
        [(STEEP, 1.0)] * (base + 1),
        [(STEEP, 1.0)] * base + ([(STEEP, 0.0)] if neighboring == "replace_one" else []),
    )
    excess, share = worst_excess(
        glm, neighbours, ops.Bounded(1.0), ops.certificates.Setting(1.0, None, neighboring)
    )
    assert excess < 1e-3 and share > 0.9  # the step of the grid at 0


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_strong_concavity_is_reached_by_straight_lines(neighboring):
    glm = glm_of("gaussian", prior_std=2.0)
    neighbours = ([(1.0, 1e6)], [(1.0, -1e6)] if neighboring == "replace_one" else [])
    excess, share = worst_excess(
        glm,
        neighbours,
        ops.StronglyLogConcave(max_grad_norm=0.3),
        ops.certificates.Setting(1.0, None, neighboring),
    )
    assert excess < 1e-5 and share > 0.99


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_attack_succeeds_without_the_clips(neighboring):
    glm = glm_of("gaussian", prior_std=2.0)
    neighbours = ([(1.0, 3.0)], [(1.0, -3.0)] if neighboring == "replace_one" else [])
    setting = ops.certificates.Setting(1.0, None, neighboring)
    assert (
        worst_excess(
            glm, neighbours, ops.Bounded((-1.0, 0.0)), setting, clip=(-math.inf, math.inf)
        )[0]
        > 0.1
    )
    assert (
        worst_excess(glm, neighbours, ops.StronglyLogConcave(), setting, max_grad_norm=1e9)[0] > 0.1
    )


@pytest.mark.parametrize("relation", RELATIONS)
def test_stated_ranges(relation):
    twice = 2 if relation == "replace_one" else 1
    glm, setting = ops.GLM(prior_std=0.5), ops.certificates.Setting(0.3, None, relation)
    assert ops.Bounded((-4.0, 1.0)).event(glm, setting).epsilon == pytest.approx(twice * 5 * 0.3)
    assert ops.Bounded(2.0).event(glm, setting).epsilon == pytest.approx(twice * 2 * 0.3)
    assert ops.StronglyLogConcave(max_grad_norm=0.7).event(glm, setting).mu == pytest.approx(
        twice * 0.7 * 0.3 / 2
    )


def test_a_finite_run_costs_at_most_as_much_as_an_exact_draw():
    glm = ops.GLM(prior_std=0.5)
    exact = (
        ops.StronglyLogConcave().event(glm, ops.certificates.Setting(1.0, None, "replace_one")).mu
    )
    runs = [
        ops.OnePosteriorSample(glm, ops.FiniteRunLangevin(steps=t), num_data=1000).event.mu
        for t in (1, 10, 100, 10**4, 10**7)
    ]
    assert runs == sorted(runs) and runs[-1] <= exact * (1 + 1e-6)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.1, 1e-8), (3.0, 1e-3)])
def test_the_tempering_inverts_the_bounded_range_profile(epsilon, delta):
    sampler = ops.OnePosteriorSample(ops.GLM(), ops.Bounded(10.0), epsilon=epsilon, delta=delta)
    b = sampler.event.epsilon
    assert stated(sampler.event, epsilon) <= delta
    assert stated(BoundedRangeDpEvent(b * 1.001), epsilon) > delta
    assert b > epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    "certificate",
    [ops.Bounded((-80.0, 5.0)), ops.StronglyLogConcave(max_grad_norm=1e4)],
    ids=["bounded", "concave"],
)
def test_draws_by_nuts_follow_the_posterior(certificate):
    glm, y, mean, precision = conjugate()
    standard = []
    for _ in range(5):
        draw = (
            ops.OnePosteriorSample(glm, certificate)
            .sample(torch.eye(COLUMNS, dtype=torch.float64), y)["weights"]
            .numpy()
        )
        standard.append((draw - mean) * math.sqrt(precision))
    assert stats.kstest(np.concatenate(standard), "norm").pvalue > SIGNIFICANCE
