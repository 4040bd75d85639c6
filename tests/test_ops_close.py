"""Certificates of draws that are close to exact: exact densities of neighbours against what
is stated, and the laws of the samplers.
"""

import math

import numpy as np
import pytest
import torch
from scipy import linalg, optimize, stats

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    MuGaussianDpEvent,
    PureDpEvent,
)
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.ops import sampling_error
from torch_dpbayes.ops.models import Density

EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 2.5)
SIGNIFICANCE = 1e-6 / 6  # one in a million runs of this file fails by chance


def stated(event, epsilon):
    """The profile of an event from its closed form."""
    if isinstance(event, MuGaussianDpEvent):
        return stats.norm.cdf(event.mu / 2 - epsilon / event.mu) - math.exp(
            epsilon
        ) * stats.norm.cdf(-event.mu / 2 - epsilon / event.mu)
    gap = event.epsilon - epsilon
    return 0.0 if gap <= 0 else (1 - math.exp(-gap / 2)) ** 2 / (1 - math.exp(-event.epsilon))


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
        wider = sampling_error.ratio_bounded(event, eta)
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
    assert sampling_error.ratio_bounded(BoundedRangeDpEvent(b), eta).epsilon == pytest.approx(
        span, rel=1e-6
    )


# --- Rényi divergence of a finite order -----------------------------------------------------------


def renyi_of_gaussians(mean, std, other_mean, other_std, order):
    """D_β(N(mean, std²) ‖ N(other_mean, other_std²)); infinite where the first has too wide a
    tail.
    """
    mixed = order * other_std**2 + (1 - order) * std**2
    if mixed <= 0:
        return math.inf
    shift = order * (mean - other_mean) ** 2 / (2 * mixed)
    return shift + math.log(other_std / std) + math.log(other_std**2 / mixed) / (2 * (order - 1))


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
                epsilon = sampling_error.renyi_close(MuGaussianDpEvent(mu), eta, order, delta)
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
                epsilon = sampling_error.renyi_close(BoundedRangeDpEvent(b), eta, order, delta)
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
        epsilon = sampling_error.renyi_close(MuGaussianDpEvent(1e-6), one_way, order, delta)
        assert worse_delta(p, cut, epsilon) >= tau > 50 * delta


def test_a_close_pair_tends_to_the_exact_one():
    for event, exact in ((MuGaussianDpEvent(0.5), None), (BoundedRangeDpEvent(0.8), None)):
        delta = 1e-6
        exact = optimize.brentq(lambda e: stated(event, e) - delta, 0, 10)  # noqa: B023
        near = sampling_error.renyi_close(event, 1e-9, 1e5, delta)
        assert exact <= near <= exact * 1.02
        assert sampling_error.total_variation_close(event, 1e-13, delta) == pytest.approx(
            exact, rel=1e-3
        )
        values = [sampling_error.renyi_close(event, eta, 100.0, delta) for eta in (0.0, 0.1, 0.5)]
        assert values == sorted(values)


# --- total variation ------------------------------------------------------------------------------


@pytest.mark.parametrize("xi", [1e-7, 1e-5, 1e-4])
def test_total_variation_is_reached_and_not_exceeded(xi):
    delta = 1e-3
    for p, other, event in pairs():
        try:
            epsilon = sampling_error.total_variation_close(event, xi, delta)
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


# --- samplers -------------------------------------------------------------------------------------

COLUMNS, REPEATS = 500, 4
CURVATURE = np.array([0.7, 2.0])


def quadratic():
    kappa = torch.as_tensor(CURVATURE).repeat(COLUMNS)
    return Density(
        torch.zeros(2 * COLUMNS, dtype=torch.float64),
        lambda x: (kappa * x * x).sum() / 2,
        lambda x: kappa * x,
    )


def overdamped_variance(kappa, h):
    return 1 / (kappa * (1 - h * kappa / 2))


def underdamped_variance(kappa, h, gamma, u):
    """Of the chain with frozen gradients: the moments of one step by Van Loan's matrix
    exponential, then a Lyapunov equation.
    """
    drift = np.array([[0.0, 1.0], [0.0, -gamma]])
    noise = np.array([[0.0, 0.0], [0.0, 2 * gamma * u]])
    block = linalg.expm(np.block([[-drift, noise], [np.zeros((2, 2)), drift.T]]) * h)
    flow = block[2:, 2:].T
    covariance = flow @ block[:2, 2:]
    push = linalg.expm(
        np.block([[drift, np.array([[0.0], [-u * kappa]])], [np.zeros((1, 3))]]) * h
    )[:2, 2:]
    step = flow + push @ np.array([[1.0, 0.0]])
    return linalg.solve_discrete_lyapunov(step, covariance)[0, 0]


def thermostat_variance(kappa, h, friction):
    """At the friction at which the half-step kinetic energy is 1: that for which the noise
    was made.
    """
    step = np.array([[1 - h * kappa, 1 - friction], [-h * kappa, 1 - friction]])
    return linalg.solve_discrete_lyapunov(step, 2 * friction * h * np.ones((2, 2)))[0, 0]


SAMPLERS = [
    (ops.Overdamped(60, 0.3), lambda k: overdamped_variance(k, 0.3)),
    (
        ops.Underdamped(120, 0.5, friction=2.0, inverse_mass=0.5),
        lambda k: underdamped_variance(k, 0.5, 2.0, 0.5),
    ),
    (
        ops.Underdamped(150, 0.2, friction=1.5, inverse_mass=1.0),
        lambda k: underdamped_variance(k, 0.2, 1.5, 1.0),
    ),
    (ops.NoseHoover(300, 0.1, friction=0.3), lambda k: thermostat_variance(k, 0.1, 0.3)),
]


@pytest.mark.parametrize(
    ("sampler", "variance"),
    SAMPLERS,
    ids=["overdamped", "underdamped", "underdamped-fine", "nose-hoover"],
)
def test_samplers_have_the_stationary_law_of_their_chain(sampler, variance):
    draws = np.stack(
        [
            sampler.draw(quadratic(), GaussianNoise()).numpy().reshape(COLUMNS, 2)
            for _ in range(REPEATS)
        ]
    )
    for column, kappa in enumerate(CURVATURE):
        x = draws[..., column].ravel() / math.sqrt(variance(kappa))
        n = len(x)
        # Σx² is chi-squared, which sees an error of 21 % in the variance at this significance; KS
        # sees the shape
        assert (
            stats.chi2.cdf(np.sum(x**2), n) > SIGNIFICANCE / 16
            and stats.chi2.sf(np.sum(x**2), n) > SIGNIFICANCE / 16
        )
        assert stats.kstest(x, "norm").pvalue > SIGNIFICANCE / 8


def test_the_exact_step_of_underdamped_dynamics_has_the_moments_of_the_equation():
    """One step from rest, where W_x and W_v alone move: nothing but their variance is tested,
    at step sizes on both sides of the series.
    """
    zero = Density(
        torch.zeros(20_000, dtype=torch.float64), lambda x: 0 * x.sum(), torch.zeros_like
    )
    for h in (1e-3, 0.03, 1.0):
        gamma, u = 2.0, 0.7
        x = ops.Underdamped(1, h, gamma, u).draw(zero, GaussianNoise()).numpy()
        gone = (1 - math.exp(-gamma * h)) / gamma
        drift = np.array([[0.0, 1.0], [0.0, -gamma]])
        block = linalg.expm(
            np.block([[-drift, np.diag([0.0, 2 * gamma * u])], [np.zeros((2, 2)), drift.T]]) * h
        )
        # with the velocity that it starts with
        variance = (block[2:, 2:].T @ block[:2, 2:])[0, 0] + u * gone**2
        assert abs(np.mean(x**2) / variance - 1) < 5.5 * math.sqrt(2 / len(x))


def test_small_times_lose_no_digits():
    from decimal import Decimal, getcontext

    from torch_dpbayes.ops.langevin import _second_order, _spread

    getcontext().prec = 60
    for t in (1e-6, 1e-4, 9e-4, 1.1e-3, 9e-3, 1.1e-2, 0.3, 5.0):
        d = Decimal(t)
        assert _second_order(t) == pytest.approx(float(d - 1 + (-d).exp()), rel=1e-7)
        assert _spread(t) == pytest.approx(
            float(d - 2 * (1 - (-d).exp()) + (1 - (-2 * d).exp()) / 2), rel=1e-7
        )


# --- as certificates ------------------------------------------------------------------------------


def problem(n=60, d=3):
    x = torch.randn(n, d)
    return x, (torch.rand(n) < x[:, 0].sigmoid()).float()


TARGETS = [
    ops.StronglyLogConcave(),
    ops.Bounded(3.0),
    ops.Bounded.from_lipschitz(1.0, 2.0, temper="posterior"),
]
CHAINS = [
    ops.Overdamped(5, 0.01),
    ops.Underdamped(5, 0.1, inverse_mass=0.05),
    ops.NoseHoover(5, 0.01),
]


@pytest.mark.parametrize("target", TARGETS, ids=["concave", "bounded", "lipschitz"])
@pytest.mark.parametrize("sampler", CHAINS, ids=["overdamped", "underdamped", "nose-hoover"])
def test_a_ratio_bounded_draw_is_tempered_charged_and_labelled(target, sampler):
    certificate = ops.RenyiClose(target, sampler, divergence=0.02)
    release = ops.OnePosteriorSample(ops.GLM(), certificate, epsilon=1.0, delta=1e-5)
    draw = release.sample(*problem())
    assert draw["weights"].shape == (3,) and torch.isfinite(draw["weights"]).all()
    assert release.accountant.get_epsilon(1e-5) <= 1.0 and release.accountant.get_epsilon(
        1e-5
    ) == pytest.approx(1.0, rel=1e-3)
    exact = ops.OnePosteriorSample(ops.GLM(), target, epsilon=1.0, delta=1e-5)
    assert release.tempering < exact.tempering
    text = release.guarantee()
    assert (
        "in both directions, on every data set" in text
        and "ASSUMED" in text
        and "the No-U-Turn sampler" not in text
    )
    with pytest.raises(PrivacyBudgetExceeded):
        release.sample(*problem())


PAIRS = [
    ops.RenyiClose(
        ops.StronglyLogConcave(), ops.Overdamped(5, 0.01), divergence=0.02, order=50.0, delta=1e-6
    ),
    ops.TotalVariationClose(ops.StronglyLogConcave(), xi=1e-9, delta=1e-6),
    ops.TotalVariationClose(ops.Bounded(0.2), xi=1e-9, delta=1e-6, sampler=ops.Underdamped(5, 0.1)),
]


@pytest.mark.parametrize("certificate", PAIRS, ids=["renyi", "variation", "variation-chain"])
def test_a_pair_with_delta_is_never_charged_as_less(certificate):
    setting = ops.certificates.Setting(1.0, None, "replace_one")
    glm = ops.GLM(prior_std=0.2)
    epsilon, delta = certificate.single_guarantee(glm, setting)
    assert delta == 1e-6 and epsilon > optimize.brentq(
        lambda e: stated(certificate.target.event(glm, setting), e) - delta, 0, 40
    )
    release = ops.OnePosteriorSample(glm, certificate)
    assert f"({epsilon:.5g}, 1e-06)" in release.guarantee()
    assert release.event == ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(1e-6)])
    assert release.accountant.compose(release.event).get_epsilon(1e-6) == pytest.approx(
        epsilon, rel=1e-9
    )
    assert release.accountant.get_epsilon(0.9e-6) == math.inf


@pytest.mark.parametrize("certificate", PAIRS, ids=["renyi", "variation", "variation-chain"])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_a_pair_with_delta_is_tempered_charged_and_used_up(certificate, method):
    accountant = PrivacyAccountant(1.0, 1e-5, neighboring="replace_one", method=method)
    release = ops.OnePosteriorSample(ops.GLM(), certificate, epsilon=1.0, accountant=accountant)
    assert torch.isfinite(release.sample(*problem())["weights"]).all()
    assert 0 < release.tempering <= 1
    if release.tempering < 1:
        assert accountant.get_epsilon() == pytest.approx(1.0, rel=1e-3)
        with pytest.raises(PrivacyBudgetExceeded):
            release.sample(*problem())
    assert accountant.get_epsilon() <= 1.0 and accountant.get_epsilon(0.9e-6) == math.inf
    many = PrivacyAccountant(1e3, 1e-5, neighboring="replace_one", method=method)
    # each uses up a tenth of delta, and their losses are bounded
    assert many.remaining(release.event) == 10
    with pytest.raises(ValueError, match="cannot be met"):  # a delta below that of the certificate
        ops.OnePosteriorSample(ops.GLM(), certificate, 1.0, 0.9e-6).tempering  # noqa: B018


def test_a_distance_that_is_too_large_for_a_full_likelihood_is_met_by_tempering():
    certificate = ops.TotalVariationClose(ops.StronglyLogConcave(), xi=2e-7, delta=1e-6)
    release = ops.OnePosteriorSample(ops.GLM(prior_std=2.0), certificate, 30.0, 1e-5)
    assert 0 < release.tempering < 1 and math.isfinite(
        certificate.single_guarantee(ops.GLM(prior_std=2.0), release._setting())[0]
    )
    with pytest.raises(ValueError, match="too large"):
        ops.OnePosteriorSample(ops.GLM(prior_std=2.0), certificate).event  # noqa: B018
    far = ops.RenyiClose(
        ops.StronglyLogConcave(), ops.Overdamped(5, 0.01), divergence=1e4, order=50.0, delta=1e-6
    )
    for epsilon, message in ((None, "no finite epsilon"), (1.0, "no finite epsilon|cannot be met")):
        with pytest.raises(ValueError, match=message):
            ops.OnePosteriorSample(ops.GLM(), far, epsilon, 1e-5).event  # noqa: B018


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("order", [20.0, 300.0])
def test_many_close_draws_never_exceed_what_the_accountant_says(order, method):
    """k chains whose laws are Gaussians beside the Gaussian targets, released together: their
    exact delta is that of a Gaussian with sqrt(k) mu.
    """
    std, shift, mu, delta = 1 - 0.1 / order, 0.01, 0.3, 1e-7
    eta = max(
        renyi_of_gaussians(shift, std, 0, 1, order), renyi_of_gaussians(0, 1, shift, std, order)
    )
    event = ComposedDpEvent(
        [
            PureDpEvent(sampling_error.renyi_close(MuGaussianDpEvent(mu), eta, order, delta)),
            FailureDpEvent(delta),
        ]
    )
    for count in (1, 4, 16):
        accountant = PrivacyAccountant(method=method).compose(event, count)
        exact = MuGaussianDpEvent(math.sqrt(count) * (mu + 2 * shift) / std)
        for epsilon in (0.1, 1.0, 3.0, 8.0):
            assert stated(exact, epsilon) <= accountant.get_delta(epsilon) * (1 + 1e-9)
        assert stated(exact, accountant.get_epsilon(1e-5)) <= 1e-5


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda t, s: ops.RenyiClose(t, s, divergence=-0.1), ValueError, "divergence"),
        (lambda t, s: ops.RenyiClose(t, s, divergence=math.inf), ValueError, "divergence"),
        (lambda t, s: ops.RenyiClose(t, s, divergence=0.1, order=1.0), ValueError, "order"),
        (lambda t, s: ops.RenyiClose(t, s, divergence=0.1, order=20.0), ValueError, "delta="),
        (
            lambda t, s: ops.RenyiClose(t, s, divergence=0.1, delta=1e-6),
            ValueError,
            "leave out delta",
        ),
        (
            lambda t, s: ops.RenyiClose(ops.FiniteRunLangevin(steps=1), s, divergence=0.1),
            TypeError,
            "exact draw",
        ),
        (lambda t, s: ops.RenyiClose(t, t, divergence=0.1), TypeError, "sampler"),
        (lambda t, s: ops.RenyiClose(t, ops.Overdamped, divergence=0.1), TypeError, "sampler"),
        (lambda t, s: ops.TotalVariationClose(t, xi=0.0, delta=1e-5), ValueError, "xi"),
        (lambda t, s: ops.TotalVariationClose(t, xi=6e-6, delta=1e-5), ValueError, "delta / 2"),
        (lambda t, s: ops.TotalVariationClose(t, xi=1e-6, delta=2.0), ValueError, "delta"),
        (lambda t, s: ops.Overdamped(0, 0.1), ValueError, "steps"),
        (lambda t, s: ops.Underdamped(5, 0.1, friction=0.0), ValueError, "friction"),
        (lambda t, s: ops.NoseHoover(5, 0.1, friction=1.5), ValueError, "friction"),
        (lambda t, s: ops.NoseHoover(5, math.nan), ValueError, "step_size"),
        (
            lambda t, s: ops.OnePosteriorSample(
                ops.GLM(prior_std=math.inf), ops.RenyiClose(t, s, divergence=0.1)
            ),
            ValueError,
            "prior",
        ),
    ],
)
def test_bad_input_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make(ops.Bounded(1.0), ops.Overdamped(5, 0.1))
