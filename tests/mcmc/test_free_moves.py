"""Latents that no record reads move for free: the law stays exact, and plans, noise and charges are
those of the others.
"""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from scipy.stats import kstest, norm
from support.conjugate_chains import LEVEL

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty, proposals

pytestmark = pytest.mark.usefixtures("double")

GROUPS, RECORDS, PRIOR_STD, SPREAD, SLOPE = 3, 9, 1.5, 0.7, 20.0
GROUP = torch.arange(RECORDS) % GROUPS
ROWS = torch.linspace(-1.0, 2.0, RECORDS, dtype=torch.float64)


def hierarchy():
    mean = pyro.sample("mu", dist.Normal(0.0, PRIOR_STD))
    with pyro.plate("groups", GROUPS):
        return pyro.sample("level", dist.Normal(mean, SPREAD))


def model(group, y):
    level = hierarchy()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level[group], 1.0), obs=y)


def closed_form():
    """Mean and covariance of (level, mu)."""
    precision = torch.zeros(GROUPS + 1, GROUPS + 1, dtype=torch.float64)
    counts = torch.bincount(GROUP).double()
    precision[:GROUPS, :GROUPS] = torch.diag(SPREAD**-2 + counts)
    precision[:GROUPS, -1] = precision[-1, :GROUPS] = -(SPREAD**-2)
    precision[-1, -1] = PRIOR_STD**-2 + GROUPS * SPREAD**-2
    covariance = torch.linalg.inv(precision)
    sums = torch.zeros(GROUPS, dtype=torch.float64).index_add(0, GROUP, ROWS)
    return covariance @ torch.cat([sums, torch.zeros(1)]), covariance


def penalty(kernel=DPPenalty, **options):
    settings = {"proposal_scale": 0.5, "log_ratio_slope": SLOPE, "noise_multiplier": 0.08}
    return kernel(
        model,
        **{**settings, **options},
        accountant=dpb.PrivacyAccountant(),
        target_accept_prob=None,
    )


def hmc(kernel=DPHMC, **options):
    settings = {"step_size": 0.25, "num_steps": 3, "log_ratio_slope": SLOPE, "max_grad_norm": SLOPE}
    noise = {"ratio_noise_multiplier": 0.06, "grad_noise_multiplier": 0.06}
    return kernel(
        model,
        **{**settings, **noise, **options},
        accountant=dpb.PrivacyAccountant(),
        target_accept_prob=None,
    )


def family(kernel=ExponentialFamilyPenalty):
    """Statistics of each group: its number of records and their sum."""

    def statistics(group, y):
        one = (torch.arange(GROUPS) == group).double()
        return torch.cat([one, one * y])

    return kernel(
        hierarchy,
        sufficient_statistics=statistics,
        natural_parameters=lambda theta: torch.cat([-(theta["level"] ** 2) / 2, theta["level"]]),
        log_normalizer=lambda theta: torch.zeros(()),
        max_statistic_norm=5.0,
        noise_multiplier=0.2,
        num_data=RECORDS,
        proposal_scale=0.5,
        accountant=dpb.PrivacyAccountant(),
        target_accept_prob=None,
    )


MAKERS = {"penalty": penalty, "HMC": hmc, "family": family}


def uniforms(draws):
    """Of exact draws: of each coordinate, and of directions across them."""
    mean, covariance = closed_form()
    directions = torch.cat([torch.eye(GROUPS + 1), torch.ones(1, GROUPS + 1)])
    contrast = torch.full((1, GROUPS + 1), -1.0 / GROUPS)
    contrast[0, -1] = 1.0
    directions = torch.cat([directions, contrast]).double()
    centred = (draws - mean) @ directions.T
    stds = (directions @ covariance * directions).sum(1).sqrt()
    return [norm.cdf(column) for column in (centred / stds).T]


def smallest(values):
    return min(kstest(v, "uniform").pvalue for u in values for v in (u, abs(2 * u - 1)))


def stationary_p_value(kernel, draws=300, iterations=3):
    """Smallest p-value after ``iterations`` from exact draws."""
    mean, covariance = closed_form()
    factor = torch.linalg.cholesky(covariance)
    kernel.setup(0, GROUP, ROWS)
    ends = []
    for _ in range(draws):
        x = mean + factor @ torch.randn(GROUPS + 1)
        params = {"level": x[:GROUPS], "mu": x[GROUPS]}
        for _ in range(iterations):
            params = kernel.sample(params)
        ends.append(torch.cat([params["level"], params["mu"][None]]))
    assert 0.15 < kernel.diagnostics()["acceptance rate"] < 0.9
    return smallest(uniforms(torch.stack(ends)))


def thinned_p_value(kernel, draws=1500):
    """Smallest p-value of a chain from far away, thinned to two autocorrelation times."""
    start = {"level": torch.zeros(GROUPS), "mu": torch.tensor(4.0)}
    runner = MCMC(
        kernel, num_samples=draws, warmup_steps=200, initial_params=start, disable_progbar=True
    )
    runner.run(GROUP, ROWS)
    samples = runner.get_samples()
    rows = torch.cat([samples["level"], samples["mu"][:, None]], 1)
    worth = float(effective_sample_size(rows[None], 0, 1).nan_to_num(nan=1.0).min())
    thin = max(1, math.ceil(2 * draws / max(worth, 40.0)))
    return smallest(uniforms(rows[::thin]))


def holds(p_value):
    """A right kernel fails once in LEVEL²: it is looked at again."""
    return p_value() > LEVEL**0.5 or p_value() > LEVEL**0.5


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_posterior_is_stationary(make):
    assert holds(lambda: stationary_p_value(make()))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_chain_from_far_away_finds_the_posterior(make):
    assert holds(lambda: thinned_p_value(make()))


# -- and what is wrong is seen ---------------------------------------------------------------------


def test_without_free_moves_an_unread_latent_stays_where_it_began():
    kernel = penalty()
    kernel._move_for_free = lambda: None
    with pytest.warns(UserWarning, match="have not mixed"):
        assert thinned_p_value(kernel) < LEVEL


@pytest.mark.filterwarnings("ignore:the chains have not mixed")
def test_a_free_move_that_forgets_the_others_is_seen(monkeypatch):
    """A draw of the prior, whatever the read latents are."""

    def forgets(log_density, theta, value, unread, uniform):
        moved = theta.clone()
        moved[unread] = PRIOR_STD * torch.randn(len(unread))
        return moved, log_density(moved)

    monkeypatch.setattr("torch_dpbayes.mcmc.kernel.free_move", forgets)
    assert stationary_p_value(penalty()) < LEVEL


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_paid_moves_start_from_the_prior_after_the_free_one(make):
    kernel = make()
    kernel.setup(0, GROUP, ROWS)
    params = kernel.initial_params
    for _ in range(10):
        params = kernel.sample(params)
        assert kernel._log_prior == pytest.approx(kernel._prior.log_density(kernel._theta))


# -- the move by itself ----------------------------------------------------------------------------


def moves(log_density, draw, count):
    def numbers():
        while True:
            yield float(torch.rand(()))

    uniform, ends = numbers(), []
    for _ in range(count):
        theta = draw()
        unread = torch.tensor([0])
        theta, value = proposals.free_move(log_density, theta, log_density(theta), unread, uniform)
        assert value == pytest.approx(log_density(theta))
        ends.append(theta)
    return torch.stack(ends)


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0], ids=["narrow", "medium", "wide"])
def test_slices_keep_a_law_with_two_modes(scale):
    """An even mixture of N(-2s, s²/4) and N(s, s²)."""

    def log_density(theta):
        x = theta[0] / scale
        first, second = -((x + 2) ** 2) * 2 + math.log(2), -((x - 1) ** 2) / 2
        return float(torch.logaddexp(first, second))

    def draw():
        x = -2 + torch.randn(1) / 2 if torch.rand(()) < 0.5 else 1 + torch.randn(1)
        return scale * x

    def p_value():
        x = moves(log_density, draw, 600)[:, 0] / scale
        return smallest([(norm.cdf(2 * (x + 2)) + norm.cdf(x - 1)) / 2])

    assert holds(p_value)


def test_a_point_is_taken_only_if_doubling_from_there_leads_to_the_same_interval():
    """It stops early where an interval inside has both ends outside of the slice."""

    def at(x):
        return math.sin(3 * x) + math.sin(7.1 * x)

    found = []
    for _ in range(2000):
        here, level = 10 * float(torch.rand(())), -1.5 * float(torch.rand(()))
        if at(here) <= level:
            continue
        numbers = iter(torch.rand(100).tolist())
        low, high = proposals._doubled(at, here, level, numbers)
        there = low + float(torch.rand(())) * (high - low)
        left, right, stops = low, high, False
        while right - left > 1.1 * proposals._WIDTH:
            middle = (left + right) / 2
            left, right = (left, middle) if there < middle else (middle, right)
            stops |= at(left) <= level and at(right) <= level
        assert proposals._could_come_back(at, here, there, level, low, high) == (not stops)
        found.append(stops)
    assert 20 < sum(found) < len(found)


# -- what is planned, hidden and charged -----------------------------------------------------------


@pytest.mark.parametrize("make", [penalty, hmc], ids=["penalty", "HMC"])
def test_what_an_iteration_charges_and_how_far_it_counts(make):
    kernel = make()
    kernel.setup(0, GROUP, ROWS)
    assert kernel._read.tolist() == [0, 1, 2] and kernel._unread.tolist() == [3]
    one, other = torch.zeros(4), torch.tensor([3.0, 4.0, 0.0, 100.0])
    assert kernel._distance(one, other) == 5.0
    before = kernel.initial_params
    kernel.sample(before)
    assert sum(charge.count for charge in kernel.accountant.history) == (
        1 if make is penalty else 5
    )


def test_shapes_are_those_of_the_latents_that_records_read():
    for kernel in (
        penalty(proposal_scale=torch.ones(GROUPS)),
        hmc(mass_matrix=torch.ones(GROUPS)),
    ):
        kernel.setup(0, GROUP, ROWS)
    for kernel in (
        penalty(proposal_scale=torch.ones(GROUPS + 1)),
        hmc(mass_matrix=torch.ones(GROUPS + 1)),
    ):
        with pytest.raises(ValueError, match="records read 3"):
            kernel.setup(0, GROUP, ROWS)


def test_a_model_of_which_all_latents_are_read_moves_none_for_free(monkeypatch):
    monkeypatch.setattr("torch_dpbayes.mcmc.kernel.free_move", lambda *_: pytest.fail("moved"))

    def flat(group, y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    make = partial(DPPenalty, proposal_scale=0.1, log_ratio_slope=1.0, noise_multiplier=1.0)
    kernel = make(flat, accountant=dpb.PrivacyAccountant())
    kernel.setup(0, GROUP, ROWS)
    kernel.sample(kernel.initial_params)
