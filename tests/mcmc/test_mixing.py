"""What is said of chains from their draws: on chains whose law is known, and at the end of runs."""

import itertools
import math
import warnings

import pyro
import pytest
import torch
from support.conjugate_chains import Gaussian, hmc, penalty

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
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


@pytest.mark.thorough
def test_200_well_mixed_runs_are_passed_in_silence():
    for k in range(200):
        chains = [{"x": chain} for chain in autoregressive(1 + k % 3, 300, 1 + k % 4, 300)]
        found = mixing_of(chains, None)
        assert complaint_of(found) is None, found


@pytest.mark.thorough
def test_200_stuck_runs_are_named():
    """Walks that have not felt a posterior, chains that stay where they began, and chains that
    never moved.
    """
    for k in range(200):
        walk = [{"x": torch.randn(100, 12).cumsum(0)} for _ in range(1 + k % 3)]
        apart = [{"x": 10.0 * chain + 0.1 * torch.randn(100, 2)} for chain in range(3)]
        still = [{"x": torch.randn(1, 3).expand(60, 3)}]
        for chains in (walk, apart, still):
            found = mixing_of(chains, None)
            assert "have not mixed" in complaint_of(found), found


def test_split_r_hat_and_effective_size_by_their_formulas():
    chains = [{"x": chain} for chain in autoregressive(3, 100, 1, 60)]
    x = torch.stack([chain["x"][:, 0] for chain in chains])

    def r_hat(values):
        halves = values.numpy().reshape(6, 50)
        within = halves.var(1, ddof=1).mean()
        between = 50 * halves.mean(1).var(ddof=1)
        return math.sqrt((49 / 50 * within + between / 50) / within)

    # of the draws, or of how far they lie from the median, whichever is worse
    expected = max(r_hat(x), r_hat((x - x.median()).abs()))
    assert mixing_of(chains, None)["R-hat"] == pytest.approx(expected, rel=1e-9)
    independent = [{"x": torch.randn(2000, 1)} for _ in range(2)]
    assert mixing_of(independent, None)["effective sample size"] == pytest.approx(4000, rel=0.5)


def test_of_a_few_draws_nothing_is_said():
    found = mixing_of([{"x": torch.zeros(9, 2)}], None)
    assert math.isnan(found["R-hat"]) and complaint_of(found) is None
    assert complaint_of(mixing_of([], None)) is None


# Walks below are in two dimensions: one of 60 draws in a single dimension looks mixed in one run of
# 700, by the chance that it turns round.


def run(kernel, target, **options):
    runner = MCMC(
        kernel, **{"num_samples": 60, "warmup_steps": 0, "disable_progbar": True, **options}
    )
    runner.run(*target.args)
    return runner


def test_a_run_that_has_not_mixed_ends_with_a_warning_and_one_of_two_chains_with_one():
    target = Gaussian(2)
    kernel = penalty(target, proposal_scale=1e-4)
    with pytest.warns(UserWarning, match="have not mixed: R-hat") as caught:
        run(kernel, target)
    assert len([w for w in caught if "mixed" in str(w.message)]) == 1
    with warnings.catch_warnings():
        # Pyro's, where there are fewer processors than chains
        warnings.filterwarnings("ignore", "num_chains=2 is more than")
        with pytest.warns(UserWarning, match="have not mixed: R-hat") as caught:
            run(kernel, target, num_chains=2)
    assert len([w for w in caught if "mixed" in str(w.message)]) == 1
    assert kernel.diagnostics()["R-hat"] > 1.2


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("by_name", [False, True])
def test_every_run_of_one_mcmc_is_judged_and_on_its_own(by_name):
    target = Gaussian(2)
    kernel = penalty(target, proposal_scale=1e-4)
    runner = MCMC(kernel, num_samples=60, warmup_steps=0, disable_progbar=True)
    data = target.args[0]
    for _ in range(3):
        with pytest.warns(UserWarning, match="have not mixed") as caught:
            runner.run(x=data) if by_name else runner.run(data)
        assert len([w for w in caught if "mixed" in str(w.message)]) == 1
        assert len(kernel._draws_of_last_run()) == 1


def test_pyros_own_mcmc_is_judged_chain_by_chain():
    target = Gaussian(2)
    kernel = penalty(target, proposal_scale=1e-4)
    runner = pyro.infer.MCMC(kernel, num_samples=60, warmup_steps=0, disable_progbar=True)
    with pytest.warns(UserWarning, match="have not mixed") as caught:
        runner.run(*target.args)
    assert len([w for w in caught if "mixed" in str(w.message)]) == 1


def test_a_chain_that_is_at_the_right_place_with_a_wrong_spread_is_named():
    """Its means mix, its distances from them do not."""
    for _ in range(100):
        spread = torch.full((400, 1), 0.1)
        spread[250:] = 1.0
        assert complaint_of(mixing_of([{"x": spread * torch.randn(400, 1)}], None)) is not None


@pytest.mark.thorough
def test_chains_of_one_run_are_judged_together_and_runs_apart(monkeypatch):
    """Each chain alone looks mixed: both stay where they start, and start apart."""
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    target, kernel = Gaussian(), penalty(Gaussian())

    def sample(params):
        theta = 5.0 * centre[0] + torch.randn(1)
        kernel._theta, kernel._started = theta, True
        kernel._record(type("Outcome", (), {"accepted": True, "log_ratio": 0.0})())
        return {"mean": theta}

    centre = [0]
    monkeypatch.setattr(kernel, "sample", sample)
    setup = kernel.setup
    monkeypatch.setattr(
        kernel, "setup", lambda *a, **k: centre.__setitem__(0, centre[0] + 1) or setup(*a, **k)
    )
    for _ in range(2):  # one chain each: apart, but of different runs
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(kernel, target, num_samples=200)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "num_chains=2 is more than")
        with pytest.warns(UserWarning, match="have not mixed"):
            run(kernel, target, num_samples=200, num_chains=2)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", [penalty, lambda target: hmc(target, 2)], ids=["penalty", "HMC"])
def test_the_acceptance_rate_is_right_after_a_run(make):
    target = Gaussian()
    kernel, path = make(target), []
    run(kernel, target, warmup_steps=5, hook_fn=lambda k, params, *_: path.append(params["mean"]))
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(path[4:])]
    assert kernel.diagnostics()["acceptance rate"] == pytest.approx(sum(moved) / 60)
    assert len(kernel.diagnostics()["noisy log ratios"]) == 65


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("history", [(), ((0.01, 1.0, 10),)], ids=["Gaussian", "Poisson before"])
def test_the_progress_bar_ends_on_the_final_epsilon(history):
    target = Gaussian()
    accountant = dpb.PrivacyAccountant(1000.0, 1e-5)
    for q, z, count in history:
        accountant.compose(events.PoissonSampledDpEvent(q, events.GaussianDpEvent(z)), count)
    kernel, shown = penalty(target, accountant=accountant), []
    run(kernel, target, hook_fn=lambda k, *_: shown.append(k.logging()["epsilon"]))
    final = f"{accountant.get_epsilon():.3g}"
    if shown[-1].startswith(">"):  # where composing takes long, it says so
        assert history and float(shown[-1][1:]) <= float(final)
    else:
        assert shown[-1] == final
