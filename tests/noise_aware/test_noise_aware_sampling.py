"""Draws from data-free densities against densities whose moments are known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest

from torch_dpbayes.mcmc.density import Prior
from torch_dpbayes.noise_aware.posterior import FlatCoordinates, NoiseAwarePosterior
from torch_dpbayes.noise_aware.priors import GaussianPrior, PyroPrior
from torch_dpbayes.noise_aware.sampling import Chains, WeightedDraws

ONE = torch.ones((), dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)
TRIGAMMA_9 = float(torch.special.polygamma(1, torch.tensor(9.0, dtype=torch.float64)))
DIGAMMA_9 = float(torch.special.digamma(torch.tensor(9.0, dtype=torch.float64)))


def log_gammas(theta):
    """Two independent logarithms of Gamma(9, 1): skewed, with known moments."""
    return (9 * theta - theta.exp()).sum(-1)


@pytest.mark.parametrize(
    "start, precision", [(2.1, 9.0), (0.0, 30.0)], ids=["near", "far and narrow"]
)
def test_weighted_draws_have_the_moments_of_the_density(start, precision):
    found = WeightedDraws(log_gammas, torch.full((2,), start, dtype=torch.float64), precision * EYE)
    assert found.are_good
    error = (TRIGAMMA_9 / found.worth) ** 0.5
    mean = found.weights @ found.values
    assert bool(((mean - DIGAMMA_9).abs() < 6 * error).all())
    variance = found.weights @ (found.values - mean).square()
    assert bool(((variance / TRIGAMMA_9 - 1).abs() < 12 / found.worth**0.5).all())
    assert found.resampled(7).shape == (7, 2)


def test_a_plateau_below_a_narrow_peak_is_found():
    """A likelihood that prefers one place in a hundred by a factor of twenty, which is a sixth of
    the mass, as a run of few records leaves it. Without candidates of the prior all draws are of
    the peak, and worth most of their number.
    """
    prior = GaussianPrior(torch.zeros(1).double(), torch.ones(1).double())

    def log_density(theta):
        peak = -((theta[:, 0] - 0.5) / 0.01).square() / 2
        return prior.log_density(theta) + torch.logaddexp(peak + 3.0, 0 * peak)

    grid = torch.linspace(-8, 8, 160_001).double()
    mass = torch.softmax(log_density(grid[:, None]), dim=0)
    mean, square = float(mass @ grid), float(mass @ grid.square())
    start, precision = torch.full((1,), 0.5).double(), torch.full((1, 1), 1e4).double()
    # alone, one run in thirty has a candidate so far out in its tails that it tells
    runs = [WeightedDraws(log_density, start, precision) for _ in range(9)]
    squares = [float(alone.weights @ alone.values[:, 0].square()) for alone in runs]
    missed = [alone.are_good for alone, s in zip(runs, squares, strict=True) if s < 0.5 * square]
    assert sum(missed) >= 5  # false alarms: 5e-6
    found = WeightedDraws(log_density, start, precision, prior=prior)
    assert found.are_good
    error = found.worth**-0.5  # six standard errors each
    assert float(found.weights @ found.values[:, 0]) == pytest.approx(mean, abs=6 * error)
    assert float(found.weights @ found.values[:, 0].square()) == pytest.approx(
        square, abs=6 * 3**0.5 * error
    )


def test_a_posterior_has_candidates_of_its_prior():
    """The same density, by the door that users have."""

    class PeakAndPlateau:
        centre = torch.full((1,), 0.5).double()

        def log_likelihood(self, theta):
            peak = -((theta[..., 0] - 0.5) / 0.01).square() / 2
            return torch.logaddexp(peak + 3.0, 0 * peak)

        def precision(self, theta):
            return torch.full((1, 1), 1e4).double(), 1e4 * self.centre

    prior = GaussianPrior(torch.zeros(1).double(), torch.ones(1).double())
    post = NoiseAwarePosterior(PeakAndPlateau(), prior, FlatCoordinates("weights"), [])
    # five sixths of N(0, 1); the peak alone has .01
    assert float(post.sample(4000)["weights"].std()) > 0.7


def test_in_many_dimensions_a_few_candidates_tell_that_a_proposal_is_no_good():
    """What they could teach is not used there. One that is good has all candidates."""
    size, rows = 60, []

    def log_density(theta, precision):
        rows.append(len(theta))
        return -0.5 * precision * theta.square().sum(-1)

    start, eye = torch.zeros(size).double(), torch.eye(size).double()
    assert not WeightedDraws(lambda theta: log_density(theta, 4.0), start, eye).are_good
    assert sum(rows) <= 800 and sum(rows) == len(rows) * 400
    found = WeightedDraws(lambda theta: log_density(theta, 1.05), start, eye)
    assert found.are_good and len(found.values) == 4000
    variances = found.variances * 1.05  # of about a fourth of the draws, six standard errors
    assert bool(((variances - 1).abs() < 6 * (2 / 1000) ** 0.5).all())


def test_a_density_that_no_candidate_meets_is_worth_nothing():
    found = WeightedDraws(
        lambda theta: torch.full(theta.shape[:1], -torch.inf, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        EYE,
    )
    assert not found.are_good


@pytest.mark.parametrize("start, precision", [(2.1, 9.0), (-1.0, 100.0)], ids=["near", "far"])
def test_hamiltonian_chains_have_the_moments_of_the_density(start, precision):
    chains = Chains(log_gammas, start + torch.randn(64, 2).double() / 10, precision * EYE)
    draws = chains.draws(2000)
    assert draws.shape == (2000, 2)
    assert chains.r_hat < 1.2
    # two means and two variances, of draws that are worth a quarter of their number: 6 errors each
    assert bool(((draws.mean(0) - DIGAMMA_9).abs() < 6 * (TRIGAMMA_9 / 500) ** 0.5).all())
    assert bool((draws.var(0) / TRIGAMMA_9 - 1).abs().lt(6 * (3 / 500) ** 0.5).all())


def test_chains_that_disagree_are_told():
    """Two modes that no chain can cross between."""
    two = lambda theta: torch.logaddexp(  # noqa: E731
        -0.5 * ((theta - 40) ** 2).sum(-1), -0.5 * ((theta + 40) ** 2).sum(-1)
    )
    chains = Chains(two, 40 * torch.randn(64, 2).double(), EYE)
    chains.draws(100)
    assert chains.r_hat > 2


def funnel():
    scale = pyro.sample("scale", dist.HalfNormal(ONE))
    with pyro.plate("groups", 12):
        pyro.sample("effect", dist.Normal(0 * ONE, scale))


def log_scales(frames):
    """Of chains on the prior, which start where the scale is near 1."""
    prior = PyroPrior(Prior(funnel))
    starts = torch.cat([torch.randn(64, 12), 0.1 * torch.randn(64, 1)], 1).double()
    precision = torch.eye(13, dtype=torch.float64)
    chains = Chains(prior.log_density, starts, precision, prior.frames if frames else ())
    return chains.draws(640)[:, 12].exp(), chains.r_hat


def test_chains_get_into_a_funnel_and_out_again():
    """Draws are autocorrelated: one in ten of them is taken for independent."""
    scales, r_hat = log_scales(frames=True)
    assert r_hat < 1.3
    assert kstest(scales[::10], "halfnorm").pvalue > 1e-6


@pytest.mark.thorough
def test_without_the_other_coordinates_they_do_not():
    scales, _ = log_scales(frames=False)
    assert kstest(scales[::10], "halfnorm").pvalue < 1e-2 or float(scales.min()) > 0.01
