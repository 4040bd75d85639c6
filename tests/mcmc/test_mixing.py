"""What is said of chains from their draws: on chains whose law is known, and at the end of runs."""

import itertools
import math
import warnings

import pyro
import pytest
import torch
from support.conjugate_chains import Gaussian, family

from torch_dpbayes.mcmc import MCMC
from torch_dpbayes.mcmc.mixing import complaint_of, mixing_of

pytestmark = pytest.mark.usefixtures("double")


def autoregressive(chains, draws, dimension, worth):
    """Stationary chains that are together worth ``worth`` independent draws, (chains, draws,
    dimension).
    """
    share = worth / (chains * draws)
    phi = (1 - share) / (1 + share)
    state, found = torch.randn(chains, dimension), []
    for _ in range(draws):
        state = phi * state + math.sqrt(1 - phi**2) * torch.randn(chains, dimension)
        found.append(state)
    return torch.stack(found, 1)


@pytest.mark.chance(0.015, looks=3)
def test_well_mixed_runs_are_passed_in_silence_and_stuck_ones_named():
    """Walks that have not felt a posterior, chains that stay where they began, chains that never
    moved, and one whose means mix and whose distances from them do not. None of 200 runs failed.
    """
    for k in range(30):
        chains = [{"x": chain} for chain in autoregressive(1 + k % 3, 300, 1 + k % 4, 300)]
        assert complaint_of(mixing_of(chains, None)) is None
        walk = [{"x": torch.randn(100, 12).cumsum(0)} for _ in range(1 + k % 3)]
        apart = [{"x": 10.0 * chain + 0.1 * torch.randn(100, 2)} for chain in range(3)]
        still = [{"x": torch.randn(1, 3).expand(60, 3)}]
        spread = torch.where(torch.arange(400) < 250, 0.1, 1.0)[:, None]
        for stuck in (walk, apart, still, [{"x": spread * torch.randn(400, 1)}]):
            assert "have not mixed" in complaint_of(mixing_of(stuck, None))
    for few in ([{"x": torch.zeros(9, 2)}], []):  # of these nothing is said
        found = mixing_of(few, None)
        assert math.isnan(found["R-hat"]) and complaint_of(found) is None


# Walks below are in four dimensions: one of 60 draws looks mixed in a single dimension in one run
# of 540, by the chance that it turns round.


@pytest.mark.filterwarnings("ignore:num_chains=2 is more than")
@pytest.mark.parametrize("runner, chains", [(MCMC, 2), (pyro.infer.MCMC, 1)])
def test_every_run_that_has_not_mixed_ends_with_one_warning(runner, chains, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    target = Gaussian(4)
    kernel = family(target, proposal_scale=1e-4)
    runner = runner(kernel, 60, 0, num_chains=chains, disable_progbar=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="have not mixed: R-hat") as caught:
            runner.run(*target.args)
        assert len([w for w in caught if "mixed" in str(w.message)]) == 1
    assert len(kernel._draws_of_last_run()) == chains
    assert complaint_of(kernel.diagnostics()) is not None


@pytest.mark.filterwarnings("ignore:num_chains=2 is more than")
def test_chains_of_one_run_are_judged_together_and_runs_apart(monkeypatch):
    """Each chain alone looks mixed: both stay where they start, and start apart."""
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    target, kernel = Gaussian(), family(Gaussian())
    setup, centre = kernel.setup, itertools.count(1)

    def moved(*args, **kwargs):
        kernel.centre = 5.0 * next(centre)
        setup(*args, **kwargs)

    def sample(params):
        kernel._theta, kernel._started = kernel.centre + torch.randn(1), True
        kernel._record(True, 0.0)
        return {"mean": kernel._theta}

    monkeypatch.setattr(kernel, "sample", sample)
    monkeypatch.setattr(kernel, "setup", moved)
    for _ in range(2):  # one chain each: apart, but of different runs
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            MCMC(kernel, 200, 0, disable_progbar=True).run(*target.args)
    with pytest.warns(UserWarning, match="have not mixed"):
        MCMC(kernel, 200, 0, num_chains=2, disable_progbar=True).run(*target.args)


def test_what_is_reported_of_a_run():
    """The rate of acceptances after warm-up."""
    target, path = Gaussian(), []
    kernel = family(target)

    def hook(kernel, params, *_):
        path.append(params["mean"])

    MCMC(kernel, 60, 5, hook_fn=hook, disable_progbar=True).run(*target.args)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(path[4:])]
    assert kernel.diagnostics()["acceptance rate"] == pytest.approx(sum(moved) / 60)
    assert len(kernel.diagnostics()["noisy log ratios"]) == 65
