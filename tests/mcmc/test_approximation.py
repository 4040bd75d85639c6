"""Starts and shapes from a released approximation leave a kernel's law as it is."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest, norm
from support.conjugate_chains import (
    LEVEL,
    Gaussian,
    gaussian,
    gaussian_prior,
    hmc,
    p_value,
    penalty,
)

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import ExponentialFamilyPenalty
from torch_dpbayes.mcmc.approximation import in_coordinates_of
from torch_dpbayes.mcmc.density import Prior

pytestmark = pytest.mark.usefixtures("double")

COVARIANCE = torch.tensor([[0.09, -0.05], [-0.05, 0.04]], dtype=torch.float64)


def draws(count=4000, shift=0.0):
    """Of a Gaussian that is not the posterior."""
    factor = torch.linalg.cholesky(COVARIANCE)
    return {"mean": shift + torch.randn(count, 2) @ factor.T}


@pytest.mark.thorough
@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", [penalty, hmc], ids=["penalty", "HMC"])
def test_the_posterior_stays_invariant(make):
    target = Gaussian(2)
    options = {"approximation": draws(shift=3.0)}
    if make is hmc:
        options |= {"num_steps": 2, "step_size": 0.5}
    else:
        options |= {"proposal_scale": 0.8}
    assert p_value(make(target, **options), target) > LEVEL


def exponential_family(target, **options):
    """x ~ N(mean, 1): s(x) = x, η = mean, A = ‖mean‖²/2."""
    settings = {
        "sufficient_statistics": lambda x: x,
        "natural_parameters": lambda theta: theta["mean"],
        "log_normalizer": lambda theta: theta["mean"].square().sum() / 2,
        "max_statistic_norm": target.slope,
        "noise_multiplier": 0.25,
        "target_accept_prob": None,
        "accountant": dpb.PrivacyAccountant(neighboring="replace_one"),
        **options,
    }
    return ExponentialFamilyPenalty(lambda: gaussian_prior(2), **settings)


@pytest.mark.thorough
def test_the_posterior_stays_invariant_for_an_exponential_family():
    target = Gaussian(2)
    kernel = exponential_family(target, approximation=draws(shift=3.0), proposal_scale=0.8)
    assert p_value(kernel, target) > LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize("make", [penalty, exponential_family])
def test_starts_are_its_draws(make):
    target, given = Gaussian(2), draws(300, shift=5.0)
    found = []
    kernel = make(target, approximation=given, proposal_scale=0.5)
    for _ in range(60):
        kernel.setup(0, *target.args)
        found.append(kernel.initial_params["mean"])
    assert all(bool((given["mean"] == start).all(1).any()) for start in found)
    assert len({tuple(start.tolist()) for start in found}) > 20


def test_a_start_of_the_user_goes_before():
    target, start = Gaussian(2), {"mean": torch.tensor([0.25, -0.5])}
    kernel = penalty(target, approximation=draws())
    kernel.initial_params = start
    kernel.setup(0, *target.args)
    assert torch.equal(kernel.initial_params["mean"], start["mean"])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", [penalty, exponential_family])
def test_steps_of_the_random_walk_have_its_shape(make):
    target, given = Gaussian(2), draws()
    kernel = make(target, approximation=given, proposal_scale=0.5)
    for _ in range(2):  # each chain sets up anew
        kernel.setup(0, *target.args)
    steps = torch.stack([kernel._moves.step(torch.randn(2)) for _ in range(3000)])
    shape = torch.linalg.cholesky(given["mean"].T.cov()) * 0.5
    whitened = torch.linalg.solve_triangular(shape, steps.T, upper=False)
    for row in (*whitened, (whitened[0] + whitened[1]) / math.sqrt(2)):
        assert kstest(row, norm.cdf).pvalue > LEVEL


def test_the_mass_matrix_is_the_inverse_of_its_covariance():
    target, given = Gaussian(2), draws()
    kernel = hmc(target, num_steps=1, approximation=given)
    kernel.setup(0, *target.args)
    velocity = kernel._mass.velocity(torch.tensor([1.0, -2.0]))
    expected = given["mean"].T.cov() @ torch.tensor([1.0, -2.0])
    torch.testing.assert_close(velocity, expected)


def test_a_kernel_with_one_travels_to_other_processes(tmp_path):
    ledger = dpb.PrivacyAccountant(1e6, 1e-5, path=tmp_path / "budget.db")
    kernel = penalty(Gaussian(2), approximation=draws(100), accountant=ledger)
    kernel.model = gaussian
    copy = pickle.loads(pickle.dumps(kernel))
    copy.setup(0, *Gaussian(2).args)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "given, message",
    [
        ({"other": torch.randn(100, 2)}, r"values for the latents \['mean'\]"),
        ({"mean": torch.randn(100, 3)}, "needs the unconstrained shape"),
        ({"mean": torch.randn(15, 2)}, "has 15 finite draws of 2 coordinates"),
        ({"mean": torch.full((100, 2), math.nan)}, "has 0 finite draws"),
        ({"mean": torch.ones(100, 2)}, "does not move in every coordinate"),
    ],
)
def test_draws_that_do_not_fit_are_refused(given, message):
    target = Gaussian(2)
    with pytest.raises(ValueError, match=message):
        penalty(target, approximation=given).setup(0, *target.args)


def test_two_shapes_are_one_too_many():
    target = Gaussian(2)
    with pytest.raises(ValueError, match="leave out mass_matrix"):
        hmc(target, num_steps=1, approximation=draws(), mass_matrix=torch.ones(2))
    with pytest.raises(ValueError, match="leave out its shape"):
        penalty(target, approximation=draws(), proposal_scale=torch.ones(2))
    with pytest.raises(ValueError, match="leave out its shape"):
        exponential_family(target, approximation=draws(), proposal_scale=torch.ones(2))
    with pytest.raises(TypeError, match="got float"):
        penalty(target, approximation=0.5)


def test_coordinates_are_the_sites_sorted_by_name_in_unconstrained_space():

    def model():
        pyro.sample("b", dist.LogNormal(0.0, 1.0))
        pyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    given = {"b": torch.rand(90) + 0.5, "a": torch.randn(90, 2)}
    rows, covariance = in_coordinates_of(Prior(model), given)
    expected = torch.cat([given["a"], given["b"].log()[:, None]], 1)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(covariance, expected.T.cov())
