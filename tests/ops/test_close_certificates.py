"""RenyiClose and TotalVariationClose."""

import math

import pytest
import torch
from scipy import optimize
from support.one_draw import problem
from support.profiles import (
    renyi_of_gaussians,
    stated,
)

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    FailureDpEvent,
    MuGaussianDpEvent,
    PureDpEvent,
)
from torch_dpbayes.ops.certificates.renyi_close import renyi_close

TARGETS = [
    ops.StronglyLogConcave(),
    ops.Bounded(3.0),
]


CHAINS = [
    ops.Overdamped(5, 0.01),
    ops.Underdamped(5, 0.1, inverse_mass=0.05),
]


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS, ids=["concave", "bounded"])
@pytest.mark.parametrize("sampler", CHAINS, ids=["overdamped", "underdamped"])
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


@pytest.mark.parametrize(
    "certificate",
    [
        pytest.param(PAIRS[0], id="renyi"),
        pytest.param(PAIRS[1], id="variation", marks=pytest.mark.thorough),  # takes a long chain
        pytest.param(PAIRS[2], id="variation-chain"),
    ],
)
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
            PureDpEvent(renyi_close(MuGaussianDpEvent(mu), eta, order, delta)),
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
