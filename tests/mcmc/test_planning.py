"""Plans hold what they promise; how far a budget carries a chain, by quadrature and by runs."""

import math
import warnings

import pytest
import torch
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from support.conjugate_chains import Gaussian, family, hmc, penalty
from support.profiles import stated

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty, plan
from torch_dpbayes.mcmc.planning import Plan, squared_distance

pytestmark = pytest.mark.usefixtures("double")

TARGET = {"target_epsilon": 2.0, "target_delta": 1e-5}
OF_HMC = {"num_steps": 4, "log_ratio_slope": 2.0, "max_grad_norm": 0.5}
RELATIONS = [("add_or_remove_one", 1), ("replace_one", 2)]


LARGEST_MU = brentq(lambda mu: stated(events.MuGaussianDpEvent(mu), 2.0) - 1e-5, 1e-3, 10)


def mu(plan, num_steps=0, num_chains=1, reuse=True, sensitivity=1):
    z_l, *z_g = plan.noise_multipliers.values()
    squared = plan.num_iterations / z_l**2
    if z_g:
        first = num_chains if reuse else plan.num_iterations
        squared += (plan.num_iterations * num_steps + first) / z_g[0] ** 2
    return sensitivity * math.sqrt(squared)


@pytest.mark.parametrize("neighboring, sensitivity", RELATIONS)
def test_the_noise_spends_the_budget_on_the_iterations(neighboring, sensitivity):
    wanted = {"neighboring": neighboring, **TARGET}
    for kernel in (DPPenalty, ExponentialFamilyPenalty, dpb.mcmc.MultiOwnerPenalty):
        found = plan(kernel, num_iterations=300, **wanted)
        assert set(found.noise_multipliers) == {"noise_multiplier"}
        assert 0.999 * LARGEST_MU < mu(found, sensitivity=sensitivity) <= LARGEST_MU
        assert 1.99 < found.epsilon <= 2.0
    for kernel, reuse in ((DPHMC, True), (DPHMC, False), (dpb.mcmc.MultiOwnerHMC, True)):
        given = {"num_chains": 5, "reuse_gradients": reuse, **OF_HMC, **wanted}
        found = plan(kernel, num_iterations=300, **given)
        assert 0.999 * LARGEST_MU < mu(found, 4, 5, reuse, sensitivity) <= LARGEST_MU


@pytest.mark.parametrize("make, options", [(family, {}), (hmc, OF_HMC)])
def test_a_run_costs_what_was_planned_after_what_was_charged_before(make, options):
    accountant = dpb.PrivacyAccountant(2.0, 1e-5).compose(events.GaussianDpEvent(5.0), 3)
    kind = ExponentialFamilyPenalty if make is family else DPHMC
    wanted = {"num_iterations": 12, "history": accountant.history}
    found = plan(kind, **wanted, **options, **TARGET)
    relation = {"neighboring": "add_or_remove_one"}
    options = {**relation, **options, **found.noise_multipliers}
    kernel = make(Gaussian(), accountant=accountant, **options)
    runner = MCMC(kernel, 9, 3, disable_progbar=True)
    runner.run(*Gaussian().args)
    assert accountant.get_epsilon() == pytest.approx(found.epsilon, rel=1e-9)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        kernel.setup(0, *Gaussian().args)
        kernel.sample(kernel.initial_params)


# -- how far a budget carries ----------------------------------------------------------------------


def test_the_longest_expected_squared_distance():
    def moved(s, jitter):
        def at(u):
            step = s * (1 + jitter * (2 * u - 1))
            return step**2 * 2 * norm.cdf(-step / 2)

        return quad(at, 0, 1)[0]

    for jitter in (0.0, 0.2, 1.0):
        best = minimize_scalar(lambda s: -moved(s, jitter), bounds=(1, 4), method="bounded")  # noqa: B023
        assert squared_distance(jitter) == pytest.approx(-best.fun, rel=1e-4)


def test_the_reach_is_decided_by_the_budget_and_the_clip_bounds():
    for iterations in (10, 3000):
        wanted = {"num_iterations": iterations, "log_ratio_slope": 0.7, **TARGET}
        reach = plan(DPPenalty, **wanted).reach
        assert reach == pytest.approx(1.326 * LARGEST_MU**2 / 0.7**2, rel=2e-3)
        for steps in (1, 6):
            found = plan(DPHMC, num_steps=steps, max_grad_norm=0.4, **wanted)
            slope = 0.7 + 0.4 * math.sqrt(1 - 1 / (2 * steps))
            # the one gradient more of a chain is paid too
            rel = 2e-3 + 1 / iterations
            assert found.reach == pytest.approx(1.298 * LARGEST_MU**2 / slope**2, rel=rel)


def test_a_budget_that_cannot_mix_is_named_before_it_is_spent():
    found = plan(DPHMC, num_iterations=300, **OF_HMC, **TARGET)
    wide = math.sqrt(found.reach)
    with pytest.warns(UserWarning, match="cannot mix on such a posterior"):
        assert found.expected_sample_size(wide) < 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.expected_sample_size(wide / 20) > 10


def test_sites_are_taken_in_the_order_of_their_names():
    found = plan(DPPenalty, num_iterations=300, log_ratio_slope=1.0, **TARGET)
    by_site = {"b": torch.tensor([0.03, 0.01]), "a": torch.tensor(0.02)}
    assert found.step_size(by_site) == found.step_size(torch.tensor([0.02, 0.03, 0.01]))


def test_where_noise_decides_samples_are_a_quarter_of_reach_over_variance():
    """An Ornstein-Uhlenbeck process of length τ relaxation times is worth τ/2 samples, and
    τ = reach / 2 tr Σ where the moves have the posterior's shape.
    """
    stddev = torch.linspace(0.5, 2.0, 30)
    share = 1.326 / 200.0**2 / (4 * float(stddev.square().sum()))
    found = Plan({"noise_multiplier": 200.0}, 1, 1.0, 1e-6, log_ratio_slope=1.0)
    assert found._tuned(stddev, shaped=True)[1] == pytest.approx(share, rel=0.25)


@pytest.mark.slow
@pytest.mark.chance(0.01, looks=3)
@pytest.mark.parametrize("make", [penalty, hmc])
def test_as_many_effective_samples_as_expected_within_a_factor_of_two(make, noise=0.3):
    """Logarithms of what one run counts have a standard deviation of .17 to .23 (of 60 runs each):
    outside of log 2 in one run of 400 or fewer.
    """
    target, iterations = Gaussian(2), 2000 if make is penalty else 1000
    noises, given = {"noise_multiplier": noise}, {"log_ratio_slope": target.slope}
    if make is hmc:
        noises = {"ratio_noise_multiplier": noise, "grad_noise_multiplier": 2 * noise}
        given = {"num_steps": 3, "log_ratio_slope": 20.0, "max_grad_norm": 20.0}
    kind = DPPenalty if make is penalty else DPHMC
    found = plan(kind, num_iterations=iterations, **given, **TARGET)
    found = found._replace(noise_multipliers=noises)
    stddev = torch.full((2,), target.precision**-0.5)
    scale = {"proposal_scale" if make is penalty else "step_size": found.step_size(stddev)}
    kernel = make(target, **noises, **given, **scale)
    runner = MCMC(kernel, iterations, 0, initial_params=target.draw(), disable_progbar=True)
    runner.run(*target.args)
    counted = float(effective_sample_size(runner.get_samples()["mean"][None], 0, 1).min())
    expected = found.expected_sample_size(stddev)
    assert expected / 2 < counted < 2 * expected


SPENT = [(events.GaussianDpEvent(0.1), 1)]
ADAPTIVE = [(events.GaussianDpEvent(9.0), 1, None, True)]
FOR = {"num_iterations": 5}
WRONG = {
    DPHMC: [
        FOR,
        {**FOR, "num_steps": 2},
        {**FOR, **OF_HMC, "max_grad_norm": -1.0},
        {**FOR, **OF_HMC, "jitter": 2.0},
    ],
    DPPenalty: [
        {**FOR, "num_steps": 2},
        {**FOR, "max_grad_norm": 2.0},
        {"num_iterations": 0},
        {**FOR, "num_chains": 0},
        {**FOR, "history": SPENT},
        {**FOR, "history": ADAPTIVE},
    ],
    MCMC: [FOR],
}


def test_arguments_that_make_no_plan_are_refused():
    for kernel, each in WRONG.items():
        for arguments in each:
            with pytest.raises(dpb.errors.ArgumentError):
                plan(kernel, **arguments, **TARGET)
                pytest.fail(f"accepted: {kernel.__name__}, {arguments}")
    without = plan(DPPenalty, num_iterations=10, **TARGET)
    for found in (without, plan(DPHMC, **FOR, **OF_HMC, **TARGET)._replace(max_grad_norm=None)):
        with pytest.raises(dpb.errors.ArgumentError):
            _ = found.reach
    for value in (0.0, -1.0, math.inf, torch.tensor([0.1, math.nan]), {}):
        with pytest.raises(dpb.errors.ArgumentError):
            without._replace(log_ratio_slope=1.0).expected_sample_size(value)
