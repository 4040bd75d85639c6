"""Plans hold what they promise, and their split of the noise is the best one for leapfrog
trajectories simulated without the library.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from scipy.optimize import brentq
from scipy.stats import norm

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty, plan

TARGET = {"target_epsilon": 2.0, "target_delta": 1e-5}
OF_HMC = {"num_steps": 4, "log_ratio_slope": 2.0, "max_grad_norm": 0.5}


def gaussian_delta(mu, epsilon):
    """Dong, Roth and Su (2022), Corollary 2.13."""
    return norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)


LARGEST_MU = brentq(lambda mu: gaussian_delta(mu, 2.0) - 1e-5, 1e-3, 10)


def mu(plan, num_steps=0, num_chains=1, reuse=True, sensitivity=1):
    z_l, *z_g = plan.noise_multipliers.values()
    squared = plan.num_iterations / z_l**2
    if z_g:
        squared += (
            plan.num_iterations * num_steps + (num_chains if reuse else plan.num_iterations)
        ) / z_g[0] ** 2
    return sensitivity * math.sqrt(squared)


@pytest.mark.parametrize("neighboring, sensitivity", [("add_or_remove_one", 1), ("replace_one", 2)])
def test_the_noise_spends_the_budget_and_no_more(neighboring, sensitivity):
    for kernel in (DPPenalty, ExponentialFamilyPenalty):
        found = plan(kernel, num_iterations=300, neighboring=neighboring, **TARGET)
        assert set(found.noise_multipliers) == {"noise_multiplier"}
        assert 0.999 * LARGEST_MU < mu(found, sensitivity=sensitivity) <= LARGEST_MU
        assert 1.99 < found.epsilon <= 2.0
    for reuse in (True, False):
        found = plan(
            DPHMC,
            num_iterations=300,
            num_chains=5,
            reuse_gradients=reuse,
            neighboring=neighboring,
            **OF_HMC,
            **TARGET,
        )
        assert 0.999 * LARGEST_MU < mu(found, 4, 5, reuse, sensitivity) <= LARGEST_MU


@pytest.mark.parametrize("neighboring, sensitivity", [("add_or_remove_one", 1), ("replace_one", 2)])
def test_the_iterations_are_the_most_that_fit(neighboring, sensitivity):
    found = plan(DPPenalty, noise_multiplier=20.0, neighboring=neighboring, **TARGET)
    assert (
        mu(found, sensitivity=sensitivity)
        <= LARGEST_MU
        < mu(found._replace(num_iterations=found.num_iterations + 1), sensitivity=sensitivity)
    )
    noise = {"ratio_noise_multiplier": 20.0, "grad_noise_multiplier": 30.0}
    for reuse in (True, False):
        found = plan(
            DPHMC,
            num_steps=4,
            num_chains=3,
            reuse_gradients=reuse,
            neighboring=neighboring,
            **noise,
            **TARGET,
        )
        more = found._replace(num_iterations=found.num_iterations + 1)
        assert (
            mu(found, 4, 3, reuse, sensitivity) <= LARGEST_MU < mu(more, 4, 3, reuse, sensitivity)
        )
    assert plan(DPPenalty, noise_multiplier=0.1, **TARGET).num_iterations == 0
    assert (
        plan(
            DPHMC, num_steps=4, ratio_noise_multiplier=20.0, grad_noise_multiplier=0.1, **TARGET
        ).num_iterations
        == 0
    )


def test_the_paper_s_numbers_of_iterations():
    """Räisä et al. (2021) at ε = 4, δ = 1e-6, n = 100,000, 4 chains; z = 2τ√n with their τ,
    and the relation taken once.
    """
    z = lambda tau: 2 * tau * math.sqrt(100_000)  # noqa: E731
    setting = {"target_epsilon": 4.0, "target_delta": 1e-6, "neighboring": "replace_one"}
    hmc = {
        "ratio_noise_multiplier": z(0.10),
        "grad_noise_multiplier": z(0.55),
        "num_steps": 25,
        "reuse_gradients": False,
    }
    assert plan(DPHMC, **hmc, **setting).num_iterations // 4 == 94
    assert plan(DPPenalty, noise_multiplier=z(0.17), **setting).num_iterations // 4 == 507


def model(x):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "kernel, settings",
    [
        (DPPenalty, {"proposal_scale": 0.1, "log_ratio_slope": 2.0}),
        (DPHMC, {"step_size": 0.1, **OF_HMC}),
    ],
)
def test_a_run_costs_what_was_planned_after_what_was_charged_before(kernel, settings):
    accountant = dpb.PrivacyAccountant(2.0, 1e-5).compose(events.GaussianDpEvent(5.0), 3)
    of_hmc = {name: settings[name] for name in OF_HMC} if kernel is DPHMC else {}
    found = plan(
        kernel, num_iterations=24, num_chains=2, history=accountant.history, **of_hmc, **TARGET
    )
    made = kernel(model, accountant=accountant, **settings, **found.noise_multipliers)
    for _ in range(2):
        MCMC(made, num_samples=9, warmup_steps=3, disable_progbar=True).run(torch.randn(30))
    assert accountant.get_epsilon() == pytest.approx(found.epsilon, rel=1e-9)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        MCMC(made, num_samples=1, warmup_steps=0, disable_progbar=True).run(torch.randn(30))


def distance_moved(split, slope, norm, num_steps, dimension, budget, draws):
    """Largest expected squared distance of an iteration on N(0, I), over the step sizes, at
    the noise that ``budget`` = 1/z_l² + L/z_g² leaves.
    """
    start, momentum, kicks, last = draws
    ratio = math.sqrt((1 + num_steps / split**2) / budget)
    most = 0.0
    for step in torch.logspace(-2.5, 0.2, 28).tolist():
        p, q = momentum.clone(), start.clone()
        gradient = q + split * ratio * norm * kicks[0]
        for kick in kicks[1:]:
            p = p - step / 2 * gradient
            q = q + step * p
            gradient = q + split * ratio * norm * kick
            p = p - step / 2 * gradient
        distance = (q - start).norm(dim=1)
        std = ratio * slope * distance
        log_probability = ((start**2 - q**2 + momentum**2 - p**2).sum(1) - std**2) / 2 + std * last
        most = max(most, float((log_probability.exp().clamp(max=1) * distance**2).mean()))
    return most


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("slope", [0.5, 3.0])
@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.parametrize("budget", [0.03, 3.0])
def test_the_split_between_ratio_and_gradients_is_the_best_one(slope, num_steps, budget):
    """In 6 dimensions; the same draws for all splits, so that what they differ by is not noise."""
    found = plan(
        DPHMC,
        num_iterations=100,
        num_steps=num_steps,
        log_ratio_slope=slope,
        max_grad_norm=1.0,
        **TARGET,
    ).noise_multipliers
    planned = found["grad_noise_multiplier"] / found["ratio_noise_multiplier"]
    draws = (
        torch.randn(2000, 6),
        torch.randn(2000, 6),
        torch.randn(num_steps + 1, 2000, 6),
        torch.randn(2000),
    )
    moved = {
        factor: distance_moved(factor * planned, slope, 1.0, num_steps, 6, budget, draws)
        for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
    }
    assert moved[1.0] > 0.93 * max(moved.values())
    assert max(moved[0.25], moved[4.0]) < 0.8 * moved[1.0]


@pytest.mark.parametrize(
    "kernel, arguments, message",
    [
        (DPHMC, {"num_iterations": 5}, "num_steps must be"),
        (DPHMC, {"num_iterations": 5, "num_steps": 2}, "log_ratio_slope and max_grad_norm"),
        (DPHMC, {"num_steps": 2, "ratio_noise_multiplier": 5.0}, "either num_iterations, or"),
        (DPHMC, {"num_steps": 2, "noise_multiplier": 5.0}, "says nothing about a DPHMC"),
        (DPHMC, {"num_iterations": 5, **OF_HMC, "max_grad_norm": -1.0}, "max_grad_norm"),
        (DPPenalty, {"num_iterations": 5, "num_steps": 2}, "says nothing about a DPPenalty"),
        (DPPenalty, {"num_iterations": 5, "noise_multiplier": 5.0}, "either num_iterations, or"),
        (DPPenalty, {}, "either num_iterations, or"),
        (DPPenalty, {"num_iterations": 0}, "num_iterations"),
        (DPPenalty, {"noise_multiplier": 0.0}, "noise_multiplier is 0"),
        (DPPenalty, {"num_iterations": 5, "num_chains": 0}, "num_chains"),
        (
            DPPenalty,
            {"num_iterations": 5, "history": [(events.GaussianDpEvent(0.1), 1)]},
            "before costs more",
        ),
        (
            DPPenalty,
            {"noise_multiplier": 5.0, "history": [(events.GaussianDpEvent(0.1), 1)]},
            "before costs more",
        ),
        (
            DPPenalty,
            {"noise_multiplier": 5.0, "history": [(events.GaussianDpEvent(9.0), 1, None, True)]},
            "adaptive",
        ),
        (MCMC, {"num_iterations": 5}, "kernel must be"),
    ],
)
def test_arguments_that_make_no_plan_are_refused(kernel, arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(kernel, **arguments, **TARGET)


def test_an_owner_plans_as_one_who_has_all_records():
    budget = {"target_epsilon": 2.0, "target_delta": 1e-6, "num_iterations": 300}
    hmc = {"num_steps": 5, "log_ratio_slope": 1.0, "max_grad_norm": 2.0}
    assert plan(dpb.mcmc.MultiOwnerPenalty, **budget) == plan(dpb.mcmc.DPPenalty, **budget)
    assert plan(dpb.mcmc.MultiOwnerHMC, **budget, **hmc) == plan(dpb.mcmc.DPHMC, **budget, **hmc)
