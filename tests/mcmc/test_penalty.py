"""DPPenalty: what an iteration releases."""

import math

import pytest
import torch
from pyro.infer import MCMC
from scipy.stats import kstest, norm
from support.conjugate_chains import (
    LEVEL,
    ROWS,
    Drift,
    Gaussian,
    PenaltyWithoutPenalty,
    counts,
    much_noise,
    penalty,
    thinned_p_value,
)

from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPPenalty
from torch_dpbayes.mcmc.owners import SoleOwner

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.slow
def test_a_whole_chain_without_the_penalty_has_not():
    target = Gaussian()
    assert thinned_p_value(much_noise(target, kernel=PenaltyWithoutPenalty), target, 8000) < LEVEL


def test_a_penalty_iteration_is_one_ratio_and_the_proposals_event():
    target, proposal = Gaussian(), Drift()
    proposal.event = events.GaussianDpEvent(11.0)
    kernel = penalty(target, noise_multiplier=7.0, proposal=proposal)
    MCMC(kernel, num_samples=6, warmup_steps=4, disable_progbar=True).run(*target.args)
    assert counts(kernel.accountant) == {7.0: 10, 11.0: 10}


def test_the_noise_is_what_is_charged():
    """Noisy ratios at a fixed proposal scatter by multiplier · slope · distance."""

    class There(Drift):
        def propose(self, params):
            return {"mean": torch.tensor([0.4])}, 0.0

    class Refuses(DPPenalty):
        def _metropolis(self, log_ratio, rest, bound, multiplier):
            return super()._metropolis(log_ratio, -math.inf, bound, multiplier)

    target = Gaussian()
    kernel = penalty(target, kernel=Refuses, proposal=There(), noise_multiplier=0.5)
    kernel.setup(0, *target.args)
    params = {"mean": torch.tensor([0.1])}
    for _ in range(1000):
        assert kernel.sample(params)["mean"] == 0.1
    exact = norm.logpdf(ROWS[:, 0], 0.4).sum() - norm.logpdf(ROWS[:, 0], 0.1).sum()
    assert (
        kstest(
            kernel.diagnostics()["noisy log ratios"], norm(exact, 0.5 * target.slope * 0.3).cdf
        ).pvalue
        > LEVEL
    )


@pytest.mark.parametrize("ratio", [-1.0, 0.0, 0.7])
def test_the_noise_of_a_ratio_is_paid_for_by_half_its_variance(ratio):
    """Then a move is accepted with E min(1, e^(R + σξ − σ²/2)) = Φ(R/σ − σ/2) + e^R·Φ(−R/σ − σ/2),
    e^R times as often as the move back (Ceperley and Dewing 1999).
    """
    bound, multiplier, rest, draws = 0.5, 3.0, 0.2, 200_000
    std = multiplier * bound
    accepted, _ = SoleOwner().accepts(
        ratio - rest + std * torch.randn(draws), torch.rand(draws).log(), rest, bound, multiplier
    )

    def share(r):
        return norm.cdf(r / std - std / 2) + math.exp(r) * norm.cdf(-r / std - std / 2)

    assert share(ratio) == pytest.approx(math.exp(ratio) * share(-ratio))
    expected = share(ratio)
    error = float(accepted.double().mean()) - expected
    assert abs(error) < norm.isf(LEVEL / 2) * math.sqrt(expected * (1 - expected) / draws)
