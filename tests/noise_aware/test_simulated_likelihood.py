"""The synthetic likelihood against closed forms: a Gaussian mean, whose posterior given all
releases is known exactly, and moments by quadrature.
"""

import math
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from small_models import linear, moments_of, records_of
from support.pyro_models import gaussian, weights

from torch_dpbayes.density.program import Program
from torch_dpbayes.noise_aware import drawing, inference, posterior
from torch_dpbayes.noise_aware.covariates import PublicRows, Released
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import (
    LawDifferences,
    Moves,
    Release,
    Simulator,
    SyntheticLikelihood,
    _shrunk,
    find_mode,
    is_bent,
    law_differences,
    moments,
)

pytestmark = pytest.mark.usefixtures("recorded_once", "double")
PRIOR_STD, NOISE_STD, N = 2.0, 1.5, 4000


def gaussian_mean(y):
    gaussian(y, pyro.sample("mean", dist.Normal(0.0, PRIOR_STD)), scale=NOISE_STD)


def simulator_of(count=20_000, seed=3, n=N):
    records = gaussian_records()
    return Simulator(records, Released(records, 0), n, count, seed)


def release_at(place, bound, value=0.0, noise=1.0):
    """Of scores that are clipped at ``bound``."""
    return Release(torch.tensor([place]), torch.eye(1) / bound, torch.tensor([value]), noise)


@cache
def gaussian_records():
    return records_of(gaussian_mean, torch.zeros(100), chunk=4000)


@cache
def gaussian_latents():
    return Latents(gaussian_records().density.prior, gaussian_records().read)


def likelihood_of(releases, count=20_000, few=4000, most_batches=1, n=N):
    """With the fit that it is made of."""
    simulator = simulator_of(count, n=n)
    fit = find_mode(simulator, releases, gaussian_latents(), torch.zeros(1), 20)
    laws = law_differences(fit, [simulator], releases)
    made = SyntheticLikelihood(simulator, releases, fit, laws, few=few, most_batches=most_batches)
    return made, fit


def exact_posterior(releases, bound):
    """Mean and deviation of θ given T_k = Σ (x_i − θ_k)/(s²C) + noise, all linear in Σ x_i."""
    values = torch.tensor([float(r.value) for r in releases])
    places = torch.tensor([float(r.theta) for r in releases])
    variances = torch.tensor([r.noise_std**2 for r in releases])
    scale = NOISE_STD**2 * bound
    # each release is an observation of the mean of x with its own noise; those share x
    observed = places + values * scale / N
    of_noise = variances * (scale / N) ** 2
    weights = 1 / of_noise
    mean, variance = (weights * observed).sum() / weights.sum(), 1 / weights.sum()
    precision = 1 / (variance + NOISE_STD**2 / N)
    total = precision + PRIOR_STD**-2
    return float(precision * mean / total), float(total**-0.5)


@pytest.mark.chance(1e-4)
def test_posterior_of_a_gaussian_mean_is_exact(monkeypatch):
    """At a budget where the noise and the records count alike."""
    x = 0.7 + NOISE_STD * torch.randn(N)
    bound = 40.0 / NOISE_STD  # 40 standard deviations of a score: nothing is clipped
    monkeypatch.setattr(inference, "_DRAWS", 1000)
    found = posterior(
        gaussian_mean, x, epsilon=0.3, delta=1e-5, max_grad_norm=bound, num_simulated=8000
    )
    mean, std = exact_posterior(found.transcript.scores, bound)
    # 1000 draws and the simulation's own error: 4.5 standard deviations of either
    assert abs(float(found.mean["mean"]) - mean) < 0.25 * std
    assert float(found.stddev["mean"]) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("noises", [(0.5, 0.7), (3.0, 200.0), (2000.0, 3000.0)])
def test_the_mode_and_its_width_are_those_of_the_closed_form(noises):
    """Scores that are not clipped, and two releases of which one may tell more; the prior counts
    where noise is large.
    """
    bound = 4.0
    places, truth = (0.2, -0.5), 1.0
    releases = [
        release_at(place, bound, N * (truth - place) / NOISE_STD**2 / bound, noise)
        for place, noise in zip(places, noises, strict=True)
    ]
    made, fit = likelihood_of(releases)
    mean, std = exact_posterior(releases, bound)
    assert float(fit.precision) ** -0.5 == pytest.approx(std, rel=0.05)
    assert float(made.precisions) ** -0.5 == pytest.approx(std, rel=0.05)
    assert float(made.modes) == pytest.approx(mean, abs=0.1 * std)


def test_the_error_of_the_simulation_is_counted():
    """nS + V + n²S_res/M, and the likelihood's width by it: most of what is clipped is left by the
    control variate, and M is n/8.
    """
    release = release_at(0.4, 0.2, 20.0, 10.0)
    made, fit = likelihood_of([release], count=500)
    found, n, prior = fit.moments, N, PRIOR_STD**-2
    wanted = n * found.covariance + n**2 / 500 * found.residual + 10.0**2
    assert float(n**2 / 500 * found.residual) > 0.3 * float(wanted)
    torch.testing.assert_close(fit.covariance, wanted)
    precision = float((n * found.jacobian) ** 2 / wanted) + prior
    assert float(fit.precision) == pytest.approx(precision, rel=1e-6)
    assert float(made.precisions) == pytest.approx(precision, rel=1e-6)
    assert made.simulation_error > 0.1
    # with more batches M is larger, and the mean has the control variate's error alone
    more, _ = likelihood_of([release], count=500, most_batches=40)
    assert more.num_simulated == 20_000 and more.simulation_error < made.simulation_error / 4


def test_moments_of_clipped_scores_are_those_of_quadrature():
    """And the control variate removes most of the error of their mean: it leaves a tenth of the
    variance.
    """
    place, centre, bound = 0.4, 0.1, 0.5  # in units of the scores: a third are clipped
    release, count, seeds = release_at(place, bound), 2000, 30

    def expected(function):
        def integrand(x):
            score = (x - place) / NOISE_STD**2 / bound
            own = (x - centre) / NOISE_STD**2
            return function(max(-1.0, min(1.0, score)), own) * stats.norm.pdf(x, centre, NOISE_STD)

        return integrate.quad(integrand, centre - 12, centre + 12, limit=400)[0]

    mean = expected(lambda c, u: c)
    jacobian = expected(lambda c, u: c * u)
    variance = expected(lambda c, u: c * c) - mean**2
    left = variance - jacobian**2 * NOISE_STD**2
    found = []
    for seed in range(seeds):
        simulator = simulator_of(count, seed)
        simulated = simulator.at(torch.tensor([centre]))
        own = moments(simulator.statistics(simulated, [release]), simulated.scores, False)
        found.append([float(t) for t in (own.mean, own.jacobian, own.covariance, own.residual)])
    found = torch.tensor(found)
    wanted = torch.tensor([mean, jacobian, variance, left])
    assert abs(float(found[:, 0].mean()) - mean) < 5 * math.sqrt(left / count / seeds)
    torch.testing.assert_close(found.mean(0), wanted, rtol=0, atol=0.02)
    assert float(found[:, 0].std()) < 0.6 * math.sqrt(variance / count)


def clipped_moment(theta, bound, power):
    """E of a clipped score's power, of scores at 0 and records at θ."""
    return integrate.quad(
        lambda x: (
            max(-1.0, min(1.0, x / NOISE_STD**2 / bound)) ** power
            * stats.norm.pdf(x, theta, NOISE_STD)
        ),
        theta - 12,
        theta + 12,
        limit=400,
    )[0]


def exact_log_likelihood(theta, release, bound, n):
    mean = clipped_moment(theta, bound, 1)
    variance = n * (clipped_moment(theta, bound, 2) - mean**2) + release.noise_std**2
    return -((float(release.value) - n * mean) ** 2) / variance / 2 - math.log(variance) / 2


# records, clip bound, release and its noise, how it is simulated; distances, and the room in units
# of the log likelihood: 4000 records tell m to 1 %, of one that falls by hundreds
ELSEWHERE = {
    "many records": (N, 0.5, N / 40, 30.0, {"count": 40_000, "most_batches": 2}, 0.6, None),
    # half a unit of few records' is the variance's
    "few records": (30, 0.5, 0.75, 0.5, {"count": 40_000, "most_batches": 2}, 1.5, 0.15),
    # four deviations of a record away, where the best of records at the mode are not
    "far": (N, 6.0, 0.0, 500.0, {"few": 2000}, 6.0, 0.3),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_away_from_the_centre_moments_are_reweighted_or_simulated_anew(name):
    n, bound, value, noise, options, reach, room = ELSEWHERE[name]
    release = release_at(0.0, bound, value, noise)
    likelihood, fit = likelihood_of([release], n=n, **options)
    apart = torch.tensor([0.0, reach] if name == "far" else [0.0, -1.0, -0.5, 0.5, 1.0])
    points = fit.centre + (apart if name == "far" else reach * apart)[:, None]
    found = likelihood(points)
    wanted = torch.tensor([exact_log_likelihood(float(t), release, bound, n) for t in points])
    assert likelihood.far == 0
    room = 0.05 * float(wanted.max() - wanted.min()) if room is None else room
    torch.testing.assert_close(found - found[0], wanted - wanted[0], rtol=0, atol=room)


def test_a_release_whose_mean_depends_on_the_law_has_little_weight():
    releases = [release_at(0.0, 4.0, 300.0, 30.0), release_at(0.5, 4.0, 100.0, 30.0)]
    (alone, _), (both, fit) = likelihood_of(releases[1:]), likelihood_of(releases)
    half = torch.tensor([[10.0, 0.0], [-10.0, 0.0]]).repeat(100, 1)
    laws = LawDifferences(torch.cat([half, 0 * half]), torch.zeros(400, 2, 1))
    made = SyntheticLikelihood(simulator_of(), releases, fit, laws, few=4000, most_batches=1)
    assert both.precisions.item() > 1.5 * alone.precisions.item()
    assert made.precisions[0].item() == pytest.approx(alone.precisions.item(), rel=0.05)


def test_a_law_of_the_covariates_moves_the_mean_and_its_slope():
    """Of a mixture over two laws: that of the likelihoods with means moved by them, by hand."""
    release = release_at(0.0, 4.0, 300.0, 30.0)
    alone, fit = likelihood_of([release])
    shifts = torch.tensor([[0.01], [-0.02]])
    tilts = torch.tensor([[[0.02]], [[-0.03]]])
    laws = LawDifferences(shifts.repeat(2, 1), tilts.repeat(2, 1, 1))  # first half: for weights
    made = SyntheticLikelihood(simulator_of(), [release], fit, laws, few=4000, most_batches=1)
    assert made.simulation_error == pytest.approx(alone.simulation_error, rel=0.2)
    found = fit.moments
    std = float(fit.covariance) ** 0.5
    points = fit.centre + torch.linspace(-0.2, 0.2, 5)[:, None]

    def expected(theta):
        each = []
        for shift, tilt in zip(shifts.flatten(), tilts.flatten(), strict=True):
            moved = float(theta - fit.centre)
            slope = float(found.jacobian + tilt)
            start = float(found.mean + shift)
            log_p = stats.norm.logpdf(300.0, N * (start + slope * moved), std)
            # Z_l, of the Gaussian prior and a mean that is linear
            middle = N * (start - slope * float(fit.centre))
            log_z = stats.norm.logpdf(300.0, middle, math.hypot(std, N * slope * PRIOR_STD))
            each.append(log_p - log_z)
        return float(torch.tensor(each).logsumexp(0))

    wanted = torch.tensor([expected(theta) for theta in points])
    for own in (made.gaussian(points), made(points)):
        torch.testing.assert_close(own - own[2], (wanted - wanted[2]).double(), rtol=0.02, atol=0.1)


@pytest.mark.chance(1e-6)
def test_pairs_give_moments_given_the_covariates():
    """Rows of x far apart: S is what y varies by given x, not what x makes c vary by, which is 19
    times as much. S of 20,000 records has a relative error of 2.1 %.
    """

    x = 3 * torch.randn(500)
    records = records_of(linear, x[:, None], torch.zeros(500), public=("x",))
    rows = PublicRows({0: x[:, None]}, is_paired=True, seed=0)
    simulator = Simulator(records, rows, 500, 20_001, 1)  # the last has no partner
    simulated = simulator.at(torch.zeros(1))
    found = moments(
        simulator.statistics(simulated, [release_at(1.0, 1000.0)]), simulated.scores, True
    )
    # c = x(y − x)/1000 with y ~ N(0, 1): mean −x², variance x² given x
    square = float(x.square().mean())
    assert float(found.covariance) * 1e6 == pytest.approx(square, rel=0.11)
    assert float(found.mean) * 1e3 == pytest.approx(-square, rel=0.03)


# -- records tell fewer numbers than there are parameters, as those of mu + tau * z ----------------

GROUPS, NOISE = 4, 20.0
GROUP = torch.arange(N) % GROUPS


def levels(prior):
    """A model of groups' levels, ``prior`` of mu and tau."""

    def model(g, y):
        mu, tau = weights("mu"), pyro.sample("tau", dist.LogNormal(-1.0, 1.0))
        with pyro.plate("groups", GROUPS):
            level = prior(mu, tau)
        gaussian(y, level[g])

    return model


noncentred = levels(lambda mu, tau: mu + tau * weights("z"))
# a sum of two is not told apart either, but θ of the same records lie on a line
redundant = levels(lambda mu, tau: mu + 0.5 * weights("z") + tau.log())


def simulator_of_levels(model):
    records = records_of(model, GROUP, torch.zeros(N), public=("g",), chunk=2000)
    rows = PublicRows({0: GROUP}, is_paired=False, seed=0)
    return Simulator(records, rows, N, 4000, 1)


@pytest.mark.parametrize(("model", "expected"), [(noncentred, True), (redundant, False)])
def test_a_curve_of_parameters_that_mean_the_same_records_is_seen(model, expected):
    simulator = simulator_of_levels(model)
    theta = Latents(simulator.records.density.prior, simulator.records.read).median
    for place in (theta, theta + 0.3):  # where z is about 0, and elsewhere
        assert is_bent(simulator.at(place), simulator.records) == expected


def test_moves_along_the_curve_are_none():
    simulator = simulator_of_levels(noncentred)
    prior = simulator.records.density.prior
    z = torch.tensor([0.5, -1.0, 1.5, 0.2])
    theta, same, moved = (
        prior.flatten({"mu": torch.tensor(mu), "tau": torch.tensor(log_tau), "z": own})
        for mu, log_tau, own in ((0.3, -0.5, z), (0.3, 0.5, z / math.e), (0.4, -0.5, z))
    )
    simulated = simulator.at(theta)
    moves = Moves(simulated)(torch.stack([theta, same, moved]))
    assert float(moves[:2].abs().max()) < 1e-9
    told = simulated.scores @ torch.stack([moves[2], moved - theta], 1)
    torch.testing.assert_close(told[:, 0], told[:, 1], rtol=1e-6, atol=1e-6)


# at mu = 0, tau = 1, z = 1: what a record of a group with level l adds is l − 1, by these
PLACE = torch.tensor([0.0, 0.0, *[1.0] * GROUPS]).double()
OF_LEVEL = torch.cat([torch.ones(2, GROUPS), torch.eye(GROUPS)]).double() * N / GROUPS
LEVEL, BOUND = torch.tensor([0.3, -0.2, 0.1, 0.5]).double(), 1e3


def likelihood_of_sum():
    """Of an unclipped sum of scores, which is Gaussian given mu and tau."""
    simulator = simulator_of_levels(noncentred)
    latents = Latents(simulator.records.density.prior, simulator.records.read)
    whitening = torch.eye(len(PLACE)) / BOUND
    release = Release(PLACE, whitening, OF_LEVEL @ (LEVEL - 1) / BOUND, NOISE / BOUND)
    fit = find_mode(simulator, [release], latents, latents.median)
    laws = law_differences(fit, [simulator], [release])
    made = SyntheticLikelihood(simulator, [release], fit, laws, few=1000, most_batches=1)
    return latents, made


def test_the_likelihood_of_the_same_records_is_the_same():
    """Whatever its parameters are; it falls by 1/2 in a deviation."""
    _, likelihood = likelihood_of_sum()
    same = likelihood.centre.repeat(5, 1)
    factors = torch.linspace(-2, 2, 5)
    same[:, 1] += factors
    same[:, 2:] *= torch.exp(-factors)[:, None]
    for found in (likelihood(same), likelihood.gaussian(same)):
        torch.testing.assert_close(found, found[2].expand(5), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.chance(1e-3)
def test_tau_of_levels_that_are_not_centred_has_its_posterior():
    """Against quadrature."""
    found = drawing.draw_posterior(*likelihood_of_sum(), 2000)
    assert drawing.is_reliable(found) and "chains" in found.method
    log_tau = torch.linspace(-6, 2, 201)
    mu = torch.linspace(-3, 3, 201)
    square, eye = OF_LEVEL @ OF_LEVEL.T, torch.eye(len(PLACE))
    own = square * GROUPS / N + NOISE**2 * eye + (2 * log_tau).exp()[:, None, None] * square
    law = torch.distributions.MultivariateNormal((mu[:, None] - 1) * OF_LEVEL.sum(1), own[:, None])
    log_p = law.log_prob(OF_LEVEL @ (LEVEL - 1)) - mu.square() / 2 - (log_tau[:, None] + 1) ** 2 / 2
    p = log_p.flatten().softmax(0).reshape(log_p.shape).sum(1)
    (mean, std), own = moments_of(log_tau, p), moments_of(found.theta[:, 1], found.weights)
    assert own[0] == pytest.approx(mean, abs=5 * std / math.sqrt(found.effective))
    assert own[1] == pytest.approx(std, rel=0.25)


def test_terms_of_many_parameters_where_vmap_cannot_and_where_one_fails():
    """A number of θ is read, and it must not be negative."""

    def few(theta, row):
        if theta.item() < 0:
            raise RuntimeError
        return row * theta

    rows, thetas = torch.arange(128.0)[None], torch.tensor([[2.0], [-1.0]])
    found = Program(few, rows, few).of_thetas(thetas, [rows[0]], 64)
    assert torch.equal(found[0], 2 * rows[0]) and bool(found[1].isnan().all())


def test_a_covariance_of_few_draws_is_nearer_to_the_truth_in_its_units():
    """A third of the error of the draws' own covariance; of many draws nothing is changed."""
    unit = torch.diag(torch.tensor([1.0, 4.0] * 20).double())
    draws = torch.randn(32, 40).double() * unit.diagonal().sqrt()
    own = draws.T @ draws / 32
    assert float((_shrunk(draws, unit) - unit).norm()) < float((own - unit).norm()) / 3
    many = torch.tensor([[3.0], [-1.0]]).double() * torch.randn(2, 20_000).double()
    exact = many @ many.T / 20_000
    torch.testing.assert_close(_shrunk(many.T, unit[:2, :2]), exact, rtol=0, atol=0.05)
    assert not _shrunk(draws[:0], unit).any()
    torch.testing.assert_close(_shrunk(draws[:1, :1], unit[:1, :1]), draws[:1, :1] ** 2)
