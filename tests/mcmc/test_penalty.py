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
