"""The law of every kernel against closed forms of posteriors: noise, acceptance, free moves.

A right kernel fails one look with probability CHANCE at most, and is looked at twice.
"""

import math
from functools import partial

import pytest
import torch
from pyro.infer import MCMC
from scipy.stats import kstest, norm
from support.conjugate_chains import (
    CHANCE,
    GROUPS,
    LEVEL,
    MAKERS,
    ROWS,
    Drift,
    Gaussian,
    Hierarchy,
    Tosses,
    binomial_bounds,
    counts,
    family,
    hmc,
    p_value,
    penalty,
    smallest,
)
from support.recorded import recorded_once

from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import exponential_family, proposals
from torch_dpbayes.mcmc import kernel as kernel_module
from torch_dpbayes.mcmc.kernel import Candidate

pytestmark = pytest.mark.usefixtures("double")
_recorded = recorded_once(kernel_module, exponential_family)


WALK = torch.tensor([[0.2, 0.0], [0.15, 0.1]]).double()
FULL_MASS = torch.tensor([[2.0, 0.8], [0.8, 1.0]]).double()
PRIVATE_COUNT = {"neighboring": "add_or_remove_one", "noise_multiplier": 0.5}
TWO = partial(Gaussian, 2)

LAWS = {
    "penalty, tosses": (Tosses, penalty),
    "family, private number of records": (Tosses, partial(family, **PRIVATE_COUNT)),
}
MORE_LAWS = {
    "penalty, asymmetric proposal": (Gaussian, partial(penalty, proposal=Drift())),
    "penalty, correlated walk": (TWO, partial(penalty, proposal_scale=WALK)),
    "HMC, groups": (Hierarchy, partial(hmc, num_steps=3)),
    "HMC, without reuse": (Gaussian, partial(hmc, num_steps=5, reuse_gradients=False)),
    "HMC, full mass": (TWO, partial(hmc, mass_matrix=FULL_MASS, step_size=0.12)),
    "family, groups": (Hierarchy, family),
}


@pytest.mark.chance(CHANCE)
@pytest.mark.parametrize("case", LAWS)
def test_the_posterior_is_stationary(case):
    target, make = LAWS[case]
    assert p_value(make(target()), target(), 160, 3) > LEVEL


@pytest.mark.slow
@pytest.mark.chance(CHANCE)
@pytest.mark.parametrize("case", MORE_LAWS)
def test_the_posterior_is_stationary_for_all_moves(case):
    target, make = MORE_LAWS[case]
    assert p_value(make(target()), target()) > LEVEL


@pytest.mark.slow
def test_warm_up_reaches_the_acceptance_rate_it_aims_at():
    kernel = penalty(Gaussian(), proposal_scale=0.001, noise_multiplier=0.1, target_accept_prob=0.3)
    MCMC(kernel, 1000, 1500, disable_progbar=True).run(*Gaussian().args)
    draws = kernel.get_samples()["mean"][:, 0]
    assert 0.15 < float((draws[1:] != draws[:-1]).double().mean()) < 0.45


# -- the noise, and what it costs ------------------------------------------------------------------


@pytest.mark.chance(2 * CHANCE)
@pytest.mark.parametrize("ratio", [-1.0, 0.0, 0.7])
def test_the_noise_of_a_ratio_is_paid_for_by_half_its_variance(ratio):
    """Then a move is accepted with E min(1, e^(R + σξ − σ²/2)) = Φ(R/σ − σ/2) + e^R·Φ(−R/σ − σ/2),
    e^R times as often as the move back (Ceperley and Dewing 1999).
    """
    bound, multiplier, rest, draws = 0.5, 3.0, 0.2, 4000
    kernel, std = family(Gaussian(), noise_multiplier=multiplier), multiplier * bound
    kernel.setup(0, *Gaussian().args)
    candidate = Candidate(torch.zeros(1), 0.0, ratio - rest, rest, bound, {})
    accepted = sum(kernel._metropolis(candidate)[0] for _ in range(draws)) / draws

    def share(r):
        return norm.cdf(r / std - std / 2) + math.exp(r) * norm.cdf(-r / std - std / 2)

    assert share(ratio) == pytest.approx(math.exp(ratio) * share(-ratio))
    low, high = binomial_bounds(share(ratio), CHANCE, draws)
    assert low < accepted < high


class There(Drift):
    """Always to one place; no acceptance."""

    def propose(self, params):
        return {"mean": torch.full_like(params["mean"], 0.4)}, -math.inf


PRIVATE = {"neighboring": "add_or_remove_one", "max_statistic_norm": 0.25}
STATED = {"neighboring": "add_or_remove_one", "num_data": len(ROWS)}
OF_THE_RATIO = {  # the clip bound of a record, and what it moves a ratio by at a distance of .3
    "penalty": (penalty, {}, 20.0, 20.0 * 0.3),
    "family, private number of records": (family, PRIVATE, 0.25, 0.25 * 0.3 + 0.075),
    "family, stated number of records": (family, STATED, 20.0, 20.0 * 0.3),
}


@pytest.mark.chance(CHANCE)
@pytest.mark.parametrize("case", OF_THE_RATIO)
def test_noisy_ratios_scatter_as_charged_around_the_exact_one(case):
    """log p(x | .4) − log p(x | .1) = .3x − .075."""
    make, options, bound, sensitivity = OF_THE_RATIO[case]
    options = {"proposal": There(), "noise_multiplier": 0.5, **options}
    kernel = make(Gaussian(), **options, **({} if make is penalty else {"proposal_scale": None}))
    kernel.setup(0, *Gaussian().args)
    params = {"mean": torch.tensor([0.1])}
    for _ in range(300):
        assert kernel.sample(params)["mean"] == 0.1
    exact = float((0.3 * ROWS[:, 0].clamp(-bound, bound) - 0.075).sum())
    found = kernel.diagnostics()["noisy log ratios"]
    assert kstest(found, norm(exact, 0.5 * sensitivity).cdf).pvalue > CHANCE
    assert counts(kernel.accountant) == {0.5: 300}
    kernel._standard_normal = lambda **_: 1.0
    kernel.sample(params)
    last = kernel.diagnostics()["noisy log ratios"][-1]
    assert last == pytest.approx(exact + 0.5 * sensitivity, rel=1e-6)


@pytest.mark.chance(CHANCE)
def test_gradient_noise_is_what_is_charged():
    kernel = hmc(Gaussian(), 1)
    kernel.setup(0, *Gaussian().args)
    exact = float((ROWS[:, 0] - 0.1).sum())  # the prior's part is exact
    found = [float(kernel._noisy_sum(torch.tensor([0.1]))) for _ in range(300)]
    assert kstest(found, norm(exact, 0.2 * Gaussian.slope).cdf).pvalue > CHANCE
    kernel._gaussian = lambda size, **_: torch.ones(size)
    assert float(kernel._noisy_sum(torch.tensor([0.1]))) == pytest.approx(exact + 4.0, rel=1e-9)


@pytest.mark.parametrize("matrix", [FULL_MASS, FULL_MASS.diagonal()], ids=["full", "diagonal"])
def test_momenta_have_the_law_of_their_energy(matrix):
    mass, standard = proposals.Mass(0.1, matrix), torch.randn(2)
    momentum = mass.vector(standard)
    assert mass.kinetic_energy(momentum) == pytest.approx(float(standard.square().sum()) / 2)
    whole = matrix if matrix.dim() == 2 else torch.diag(matrix)
    torch.testing.assert_close(mass.velocity(momentum), torch.linalg.solve(whole, momentum))


# -- free moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_paid_moves_are_those_of_latents_that_records_read(name):
    kernel = MAKERS[name](Hierarchy())
    kernel.setup(0, *Hierarchy.args)
    assert kernel._read.tolist() == [0, 1, 2] and kernel._unread.tolist() == [3]
    if name != "family":
        bound = kernel._ratio(torch.zeros(4), torch.tensor([3.0, 4.0, 0.0, 100.0]))[1]
        assert bound == 5.0 * kernel._slope
        kernel._terms = None
    params = kernel.initial_params
    for _ in range(5):
        before, params = params, kernel.sample(params)
        assert params["mu"] != before["mu"]
        # paid moves start from the prior after the free one
        assert kernel._log_prior == pytest.approx(kernel._prior.log_density(kernel._theta))
    if name == "family":
        kernel = family(Hierarchy(), proposal_scale=torch.ones(GROUPS + 1))
        with pytest.raises(ValueError, match="records read 3"):
            kernel.setup(0, *Hierarchy.args)


def uniforms():
    while True:
        yield from torch.rand(1000).tolist()


@pytest.mark.chance(CHANCE)
@pytest.mark.parametrize("scale", [0.02, 30.0], ids=["narrow", "wide"])
def test_slices_keep_a_law_with_two_modes(scale):
    """An even mixture of N(-2s, s²/4) and N(s, s²)."""

    def log_density(theta):
        x = float(theta[0]) / scale
        return math.log(2 * math.exp(-2 * (x + 2) ** 2) + math.exp(-((x - 1) ** 2) / 2) + 1e-300)

    ends, unread, uniform = [], torch.tensor([0]), uniforms()
    for _ in range(1000):
        x = -2 + torch.randn(1) / 2 if torch.rand(()) < 0.5 else 1 + torch.randn(1)
        theta = scale * x.double()
        value = log_density(theta)
        for _ in range(2):
            theta, value = proposals.free_move(log_density, theta, value, unread, uniform)
        assert value == pytest.approx(log_density(theta))
        ends.append(float(theta[0]) / scale)
    x = torch.tensor(ends)
    assert smallest([(norm.cdf(2 * (x + 2)) + norm.cdf(x - 1)) / 2]) > LEVEL


# -- kept gradients --------------------------------------------------------------------------------


def test_the_kept_gradient_is_the_one_where_the_chain_stays():
    """And each iteration draws ``num_steps`` others."""
    target, kernel, drawn = Gaussian(), hmc(Gaussian(), 3), {}
    original = kernel._noisy_sum

    def noted(theta):
        gradient = original(theta)
        drawn[gradient] = theta.clone()  # tensors are keys by identity
        return gradient

    kernel._noisy_sum = noted
    kernel.setup(0, *target.args)
    params, accepted = target.draw(), set()
    for k in range(40):
        before, params = params, kernel.sample(params)
        accepted.add(torch.equal(before["mean"], params["mean"]))
        assert torch.equal(drawn[kernel._gradient], params["mean"])
        assert len(drawn) == 3 * (k + 1) + 1
        assert counts(kernel.accountant) == {0.25: k + 1, 0.2: len(drawn)}
    assert accepted == {True, False}
    kernel.sample(target.draw())  # another chain begins with another gradient
    assert counts(kernel.accountant) == {0.25: 41, 0.2: 3 * 41 + 2}


def test_short_steps_keep_the_energy(monkeypatch):
    """Of trajectories without noise; a leapfrog of second order is off by .002 here."""
    noiseless = {"jitter": 0, "ratio_noise_multiplier": 0, "grad_noise_multiplier": 0}
    target, kernel, found = Gaussian(), hmc(Gaussian(), 20, step_size=0.01, **noiseless), []
    monkeypatch.setattr(kernel, "_metropolis", lambda c: (True, found.append(c)))
    kernel.setup(0, *target.args)
    for _ in range(8):
        kernel.sample(target.draw())
    assert max(abs(candidate.log_ratio + candidate.rest) for candidate in found) < 0.05


def test_without_reuse_an_iteration_is_num_steps_plus_1_gradients():
    kernel = hmc(Gaussian(), 2, reuse_gradients=False)
    MCMC(kernel, num_samples=3, warmup_steps=2, disable_progbar=True).run(*Gaussian().args)
    assert counts(kernel.accountant) == {0.25: 5, 0.2: 5 * 3}


class Noting(Drift):
    """Notes what was charged by when it is asked."""

    event = events.GaussianDpEvent(11.0)

    def propose(self, params):
        self.seen.append(dict(counts(self.accountant)))
        return super().propose(params)


def test_an_iteration_is_one_ratio_and_the_proposals_event_charged_before_it_begins():
    for make in (penalty, family):
        proposal = Noting()
        options = {"proposal": proposal, "noise_multiplier": 7.0}
        kernel = make(Gaussian(), **options, **({"proposal_scale": None} if make is family else {}))
        proposal.seen, proposal.accountant = [], kernel.accountant
        MCMC(kernel, num_samples=6, warmup_steps=4, disable_progbar=True).run(*Gaussian().args)
        assert proposal.seen == [{7.0: k, 11.0: k} for k in range(1, 11)]
        assert counts(kernel.accountant) == proposal.seen[-1]
