"""What a sampler's distance from its target costs, against exact pairs of laws."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from support.profiles import (
    renyi_of_gaussians,
    stated,
)

from torch_dpbayes.accounting.events import BoundedRangeDpEvent, MuGaussianDpEvent
from torch_dpbayes.ops.certificates.renyi_close import ratio_bounded, renyi_close
from torch_dpbayes.ops.certificates.total_variation_close import total_variation_close

EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 2.5)


def worse_delta(p, q, epsilon):
    return max(np.clip(a - math.exp(epsilon) * b, 0, None).sum() for a, b in ((p, q), (q, p)))


# --- the ratio of densities bounded ---------------------------------------------------------------


def pairs():
    """Targets on neighbouring data sets, as probabilities of small cells, with the event of
    an exact draw.
    """
    edges = np.linspace(-12, 12, 4001)
    for mu in (0.3, 1.0):
        yield (
            np.diff(stats.norm.cdf(edges)),
            np.diff(stats.norm.cdf(edges - mu)),
            MuGaussianDpEvent(mu),
        )
    for b in (0.3, 1.0):
        # a step of height b in the log ratio: the exponential mechanism with two outcomes
        for heavy in (0.5, 0.2, 0.02):
            low = heavy / (heavy + (1 - heavy) * math.exp(b))
            share = np.full(200, 1 / 200)
            yield (
                np.concatenate([heavy * share, (1 - heavy) * share]),
                np.concatenate([low * share, (1 - low) * share]),
                BoundedRangeDpEvent(b),
            )


def lifted(p, chosen_first, mass, eta):
    """p times e^η on the first cells of an order, of total ``mass`` at most, and times less
    elsewhere; every log ratio is within ±η.
    """
    order = np.argsort(chosen_first, kind="stable")
    inside = np.zeros(len(p), dtype=bool)
    inside[order[np.cumsum(p[order]) <= mass]] = True
    share = p[inside].sum()
    result = np.where(inside, math.exp(eta), (1 - math.exp(eta) * share) / (1 - share)) * p
    assert abs(np.log(result[p > 0] / p[p > 0])).max() <= eta * (1 + 1e-9)
    return result


@pytest.mark.parametrize("eta", [0.01, 0.2, 0.8])
def test_no_densities_within_the_ratio_exceed_the_stated_delta(eta):
    exceeded_without = 0.0
    for p, other, event in pairs():
        wider = ratio_bounded(event, eta)
        gain = np.log(np.maximum(p, 1e-300) / np.maximum(other, 1e-300))
        for mass in np.geomspace(1e-3, 1, 12) / (1 + math.exp(eta)):
            q, q_other = lifted(p, -gain, mass, eta), lifted(other, gain, mass, eta)
            for epsilon in EPSILONS:
                exact = worse_delta(q, q_other, epsilon)
                assert exact <= stated(wider, epsilon) + 1e-9
                exceeded_without = max(exceeded_without, exact - stated(event, epsilon))
    assert exceeded_without > 0.1 * eta  # the event of an exact draw would have been too optimistic


def test_the_ratio_bound_is_reached():
    """b + 4η is the span of the log ratio of Q to Q' where each is lifted on another rare
    set, and μ + 2m dominates no less.
    """
    eta, b = 0.3, 0.5
    rare = 1e-3
    p = np.array([rare, rare, 1 - 2 * rare])
    other = p * np.exp([b, 0.0, 0.0])
    other /= other.sum()
    factor = np.exp([-eta, eta, 0.0])
    q, q_other = p * factor, other / factor
    q[2], q_other[2] = 1 - q[:2].sum(), 1 - q_other[:2].sum()
    for new, old in ((q, p), (q_other, other)):
        assert abs(np.log(new / old)).max() <= eta * (1 + 1e-9)
    span = np.ptp(np.log(q_other / q))
    assert span == pytest.approx(b + 4 * eta, rel=1e-6)
    assert ratio_bounded(BoundedRangeDpEvent(b), eta).epsilon == pytest.approx(span, rel=1e-6)


@pytest.mark.parametrize("order", [3.0, 20.0, 300.0])
@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_gaussian_chains_never_exceed_the_stated_pair(mu, order):
    shares = []
    for std in (0.9, 1 - 0.1 / order, 1.0, 1 + 0.1 / order):
        for shift in (0.0, 0.01, 0.1):
            eta = max(
                renyi_of_gaussians(shift, std, 0, 1, order),
                renyi_of_gaussians(0, 1, shift, std, order),
            )
            if math.isinf(eta):
                continue
            for delta in (1e-3, 1e-6):
                epsilon = renyi_close(MuGaussianDpEvent(mu), eta, order, delta)
                # Q = N(-shift, std²), Q' = N(mu + shift, std²)
                exact = stated(MuGaussianDpEvent((mu + 2 * shift) / std), epsilon)
                assert exact <= delta
                shares.append(exact / delta)
    assert order < 300 or max(shares) > 0.3


def two_point_divergence(p, q, order):
    """D_β of a coin with probability p of heads from one with q, both given by that of heads,
    which is tiny.
    """
    return (
        np.logaddexp(
            order * math.log(p) - (order - 1) * math.log(q),
            order * math.log1p(-p) - (order - 1) * math.log1p(-q),
        )
    ) / (order - 1)


@pytest.mark.parametrize("order", [1.5, 5.0, 10.0])
@pytest.mark.parametrize(("b", "delta"), [(0.2, 0.3), (2.0, 1e-2), (11.0, 7e-4)])
def test_a_rare_set_that_all_three_steps_favour_stays_below_the_stated_pair(b, delta, order):
    # P of it; P' is less by e^-b, and the log ratio spans b
    for rare in np.geomspace(1e-4, 0.4, 12):
        other = rare * math.exp(-b) / (1 - rare + rare * math.exp(-b))
        for up in (1.0, 1.5, 4.0, 12.0):
            for down in (1.0, 1.5, 14.0, 200.0):
                q, q_other = min(rare * up, 0.9), other / down
                eta = max(
                    two_point_divergence(*pair, order)
                    for pair in ((q, rare), (rare, q), (other, q_other), (q_other, other))
                )
                epsilon = renyi_close(BoundedRangeDpEvent(b), eta, order, delta)
                assert epsilon > 700 or q - math.exp(epsilon) * q_other <= delta * (1 + 1e-9)


def test_one_direction_of_closeness_certifies_nothing():
    """Q' = P' without a rare set: D_β(Q'‖P') is tiny at every order, D_β(P'‖Q') infinite, and
    Q = P gives the rare set away.
    """
    tau, delta = 1e-3, 1e-5
    p = np.array([tau, 1 - tau])
    cut = np.array([0.0, 1.0])
    for order in (2.0, 50.0, 1e4):
        one_way = -math.log1p(-tau)  # log Σ cut^β p^{1−β} / (β − 1), at every order
        epsilon = renyi_close(MuGaussianDpEvent(1e-6), one_way, order, delta)
        assert worse_delta(p, cut, epsilon) >= tau > 50 * delta


def test_a_close_pair_tends_to_the_exact_one():
    for event, exact in ((MuGaussianDpEvent(0.5), None), (BoundedRangeDpEvent(0.8), None)):
        delta = 1e-6
        exact = optimize.brentq(lambda e: stated(event, e) - delta, 0, 10)  # noqa: B023
        near = renyi_close(event, 1e-9, 1e5, delta)
        assert exact <= near <= exact * 1.02
        assert total_variation_close(event, 1e-13, delta) == pytest.approx(exact, rel=1e-3)
        values = [renyi_close(event, eta, 100.0, delta) for eta in (0.0, 0.1, 0.5)]
        assert values == sorted(values)


# --- total variation ------------------------------------------------------------------------------


@pytest.mark.parametrize("xi", [1e-7, 1e-5, 1e-4])
def test_total_variation_is_reached_and_not_exceeded(xi):
    delta = 1e-3
    for p, other, event in pairs():
        try:
            epsilon = total_variation_close(event, xi, delta)
        except ValueError:
            assert min(
                stated(event, e) + (1 + math.exp(e)) * xi for e in np.linspace(0, 12, 3000)
            ) > delta * (1 - 1e-6)
            continue
        assert stated(event, epsilon) + (1 + math.exp(epsilon)) * xi <= delta * (1 + 1e-9)
        # mass ξ moved onto the cells where p exceeds e^ε·other, and as much away from there: the
        # worst pair there is
        best = p > math.exp(epsilon) * other
        if isinstance(event, MuGaussianDpEvent) and other[best].sum() > xi:
            exact = (p[best].sum() + xi) - math.exp(epsilon) * (other[best].sum() - xi)
            assert 0.98 * delta <= exact <= delta * (1 + 1e-6)
            without = optimize.brentq(lambda e: stated(event, e) - delta, 0, 10)  # noqa: B023
            if xi == 1e-4:
                best = p > math.exp(without) * other
                assert (p[best].sum() + xi) - math.exp(without) * (
                    other[best].sum() - xi
                ) > 1.1 * delta
