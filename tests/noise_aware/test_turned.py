"""Latents of which records tell only differences, in coordinates that set apart what they have in
common.
"""

import math
from functools import partial
from importlib import import_module
from itertools import permutations
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware import laplace, laplace_for_module
from torch_dpbayes.noise_aware.newton import run_general
from torch_dpbayes.noise_aware.normal_form import NormalForm
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.records import DensitySums, SoftmaxSums
from torch_dpbayes.noise_aware.turned import OfTold, Turn, TurnedMixture
from torch_dpbayes.ops import Softmax
from torch_dpbayes.ops.pyro_model import model_of_module

DOUBLE = torch.float64
LOSS = partial(functional.cross_entropy, reduction="none")
CLASSES, FEATURES, SIZE = 4, 3, 17
# twelve weights in the middle, one coordinate that is not read, and another group of two
PLACES = [torch.arange(2, 14).reshape(CLASSES, FEATURES), torch.tensor([[16], [1]])]
READ = torch.arange(SIZE) != 14


def turn(mean=None):
    return Turn(PLACES, READ, torch.zeros(SIZE, dtype=DOUBLE) if mean is None else mean)


def matrix_of(found):
    """Q."""
    return found.of(torch.eye(SIZE, dtype=DOUBLE))


def softmax_data(size, weights):
    x = torch.randn(size, weights.shape[1], dtype=DOUBLE)
    x = x / x.norm(dim=1, keepdim=True)
    return x, torch.distributions.Categorical(logits=x @ weights.T).sample()


def test_it_is_a_reflection_that_sets_the_mean_apart():
    found = turn()
    q, eye = matrix_of(found), torch.eye(SIZE, dtype=DOUBLE)
    torch.testing.assert_close(q @ q, eye)
    torch.testing.assert_close(q, q.T)
    theta = torch.randn(5, SIZE, dtype=DOUBLE)
    torch.testing.assert_close(found.of(theta), theta @ q)
    for rows in PLACES:
        means = theta[:, rows].mean(1) * len(rows) ** 0.5
        torch.testing.assert_close(found.of(theta)[:, rows[0]], means)
    assert (~found.told).nonzero().flatten().tolist() == [2, 3, 4, 14, 16]
    others = [0, 14, 15]
    assert torch.equal(found.of(theta)[:, others], theta[:, others])


def test_what_is_told_and_back():
    mean = torch.randn(SIZE, dtype=DOUBLE)
    found = turn(mean)
    q, told = matrix_of(turn()), found.told
    theta = torch.randn(3, SIZE, dtype=DOUBLE)
    some = found.some(theta)
    torch.testing.assert_close(some, (theta @ q)[:, told])
    whole = found.whole(some)
    torch.testing.assert_close(found.some(whole), some)
    torch.testing.assert_close((whole @ q)[:, ~told], (mean @ q)[~told].expand(3, -1))
    torch.testing.assert_close(found.whole_vector(some), some @ q[told])
    symmetric = theta.T @ theta
    torch.testing.assert_close(found.of_matrix(symmetric), q @ symmetric @ q)
    torch.testing.assert_close(found.some_of_matrix(symmetric), (q @ symmetric @ q)[told][:, told])
    inner = some.T @ some
    torch.testing.assert_close(found.whole_matrix(inner), q[:, told] @ inner @ q[told])


def test_a_prior_is_turned():
    found, q = turn(), matrix_of(turn())
    mean, precision = torch.randn(SIZE, dtype=DOUBLE), 1 + torch.rand(SIZE, dtype=DOUBLE)
    independent = found.of_prior(GaussianPrior(mean, precision))
    exact = q @ (1 / precision).diag() @ q
    torch.testing.assert_close(independent.mean, q @ mean)
    torch.testing.assert_close(1 / independent.precision, exact.diagonal())
    assert independent.is_diagonal
    root = torch.randn(SIZE, SIZE, dtype=DOUBLE)
    covariance = root @ root.T + torch.eye(SIZE, dtype=DOUBLE)
    given = GaussianPrior(mean, 1 / covariance.diagonal(), covariance)
    correlated = found.of_prior(given)
    torch.testing.assert_close(correlated.covariance, q @ covariance @ q)
    theta = torch.randn(4, SIZE, dtype=DOUBLE)
    apart = correlated.log_density(found.of(theta)) - given.log_density(theta)
    torch.testing.assert_close(apart, apart[:1].expand(4))


def test_estimates_of_a_prior_that_entries_share_are_averaged():
    """Over all orders of the entries: of variances and of their correlations."""
    mean, precision = torch.randn(3, dtype=DOUBLE), 1 + torch.rand(3, dtype=DOUBLE)
    root = torch.randn(3, 3, dtype=DOUBLE)
    covariance = root @ root.T + torch.eye(3, dtype=DOUBLE)
    found = Turn([torch.arange(3)[:, None]], torch.ones(3, dtype=torch.bool), mean)
    orders = [list(order) for order in permutations(range(3))]
    for given in (
        GaussianPrior(mean, precision),
        GaussianPrior(mean, 1 / covariance.diagonal(), covariance),
    ):
        covariances = torch.stack([given.covariance[order][:, order] for order in orders])
        shared = GaussianPrior(mean.mean().expand(3), 1 / precision, covariances.mean(0))
        expected, averaged = found.of_prior(shared), found.of_alike(given)
        torch.testing.assert_close(averaged.mean, expected.mean)
        torch.testing.assert_close(averaged.precision, expected.precision)
        # in contrasts such a prior has no correlations
        assert averaged.is_diagonal
        torch.testing.assert_close(averaged.covariance, expected.covariance)


def test_the_tangent_is_that_of_the_likelihood():
    found = turn(torch.randn(SIZE, dtype=DOUBLE))
    size = int(found.told.sum())
    root = torch.randn(size, size, dtype=DOUBLE)
    curvature = root @ root.T + torch.eye(size, dtype=DOUBLE)
    point, gradient = torch.randn(2, size, dtype=DOUBLE)
    form = NormalForm(point, gradient, 0 * curvature, curvature, curvature, 0.0)
    likelihood = OfTold(form, found)
    theta = torch.randn(SIZE, dtype=DOUBLE)
    precision, product = likelihood.precision(theta)
    slope = torch.autograd.functional.jacobian(likelihood.log_likelihood, theta)
    torch.testing.assert_close(product - precision @ theta, slope)
    torch.testing.assert_close(
        precision, -torch.autograd.functional.hessian(likelihood.log_likelihood, theta)
    )
    torch.testing.assert_close(found.some(likelihood.centre), point)


def test_nothing_is_lost_of_the_gradient_and_hessian_of_a_softmax():
    weights = torch.randn(CLASSES, FEATURES, dtype=DOUBLE)
    x, labels = softmax_data(50, weights)
    sums = SoftmaxSums(Softmax(CLASSES), x, labels)
    phi = torch.randn(sums.dimension, dtype=DOUBLE)

    def loss(theta):
        logits = (x * (1 - 1e-6)) @ theta.reshape(CLASSES, FEATURES).T
        return functional.cross_entropy(logits, labels, reduction="sum")

    theta = sums.turn.whole(phi) + torch.randn(FEATURES, dtype=DOUBLE).repeat(CLASSES)
    gradient = torch.autograd.functional.jacobian(loss, theta)
    hessian = torch.autograd.functional.hessian(loss, theta)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(sums.turn.whole_vector(sums.gradient_sum(phi)), gradient)
    close(sums.turn.whole_matrix(sums.curvature_sum(phi)), hessian)


def test_sums_are_those_of_the_turned_gradients_of_each_record():
    """Each of them clipped before it is turned."""
    bound = 0.5
    layers = nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, CLASSES)
    x, labels = torch.randn(30, 2, dtype=DOUBLE), torch.randint(CLASSES, (30,))
    model = model_of_module(nn.Sequential(*layers).double(), LOSS, 1.0)
    density = RecordDensity(model, (x, labels), count_is_public=True)
    size = density.prior.dimension
    found = Turn(density.zero_sums(), density.read, torch.randn(size, dtype=DOUBLE))
    assert int((~found.told).sum()) == 3 + 1
    phi = torch.randn(int(found.told.sum()), dtype=DOUBLE)

    def losses(theta):
        values = density.prior.unflatten(theta)
        hidden = (x @ values["0.weight"].T + values["0.bias"]).tanh()
        return LOSS(hidden @ values["2.weight"].T + values["2.bias"], labels)

    rows = torch.autograd.functional.jacobian(losses, found.whole(phi))
    clipped = rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    count = int((rows.norm(dim=1) > bound).sum())
    assert count
    expected = found.some(clipped)
    # nothing is left out
    torch.testing.assert_close(expected.norm(dim=1), clipped.norm(dim=1))
    sums = DensitySums(density, bound, found)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(sums.gradient_sum(phi), expected.sum(0))
    close(sums.curvature_diagonal(phi), expected.square().sum(0))
    close(sums.curvature_sum(phi), expected.T @ expected)
    assert sums.clipped_count(phi) == count and sums.is_valid(phi)
    assert sums.dimension == len(phi)
    # biases and weights of each layer, without what classes have in common
    assert torch.bincount(sums.site).tolist() == [3, 6, 3, 9]
    assert torch.equal(sums.site, sums.site.sort().values)


def test_what_no_record_reads_adds_up_to_nothing():
    """And is not counted among the sites."""

    def model(x, labels):
        levels = pyro.sample("levels", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        prior = dist.Normal(levels[:, None].expand(3, 2), 1.0).to_event(2)
        weights = pyro.sample("weights", prior)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ weights.T), obs=labels)

    data = torch.randn(30, 2), torch.randint(3, (30,))
    density = RecordDensity(model, data, count_is_public=True)
    (places,) = density.zero_sums()
    assert places.shape == (3, 2)
    found = Turn([places], density.read, torch.zeros(9, dtype=DOUBLE))
    assert DensitySums(density, 1.0, found).site.tolist() == [0] * 4


def test_what_records_do_not_tell_is_where_the_prior_has_it():
    """Seventeen means within six standard errors."""
    mean = torch.randn(SIZE, dtype=DOUBLE)
    found, q = turn(mean), matrix_of(turn())
    told, centre = found.told, torch.randn(SIZE, dtype=DOUBLE)
    inner = SimpleNamespace(
        mean=centre[told],
        variance=torch.ones_like(centre[told]),
        log_density=lambda some: -0.5 * (some - centre[told]).square().sum(-1),
        draws=lambda count: centre[told] + torch.randn(count, int(told.sum()), dtype=DOUBLE),
    )
    prior = found.of_prior(GaussianPrior(mean, torch.ones_like(mean)))
    mixture = TurnedMixture(inner, prior, found)
    # all variances are 1, before and after
    expected = q @ torch.where(told, centre, q @ mean)
    torch.testing.assert_close(mixture.mean, expected)
    torch.testing.assert_close(mixture.variance, torch.ones_like(mean))
    draws = mixture.draws(4000)
    assert bool((draws.mean(0) - expected).abs().lt(6 / math.sqrt(4000)).all())
    densities = mixture.log_density(draws) - mixture.log_density(expected)
    torch.testing.assert_close(densities, -0.5 * (draws - expected).square().sum(1))


# --- posteriors -----------------------------------------------------------------------------------


def no_rare_class():
    """Weights with which 4,000 records tell how classes differ to .06."""
    return 2 * torch.rand(3, 2, dtype=DOUBLE) - 1


def posterior(curvature, n=4000):
    x, labels = softmax_data(n, no_rare_class())
    return laplace_for_module(
        nn.Linear(2, 3, bias=False),
        x.float(),
        labels,
        loss=LOSS,
        prior_std=1.0,
        max_grad_norm=1.42,
        epsilon=8.0,
        delta=1e-5,
        curvature=curvature,
    )


def require_width(draws, std):
    """Six standard errors of candidates that are drawn more than once."""
    error = 6 / math.sqrt(2 * len(draws) * 0.3)
    assert bool((draws.std(0) / std - 1).abs().lt(error).all())


@pytest.mark.parametrize("curvature", ["full", "diagonal"])
def test_what_classes_have_in_common_is_as_wide_as_the_prior(curvature):
    """And what tells them apart is not."""
    post = posterior(curvature)
    draws = post.sample(4000)["weight"]
    require_width(draws.mean(1), 1 / math.sqrt(3))
    assert bool(((draws[:, 0] - draws[:, 1]).std(0) < 0.5).all())
    (rows,) = post.transcript.turned
    assert rows.shape == (3, 2)
    assert all(len(release.theta) == 4 for release in post.transcript.gradients)
    assert "records tell 4 of 6 unconstrained coordinates" in post.guarantee()


def test_a_run_is_checked_in_the_coordinates_of_its_releases(monkeypatch):
    asked = []

    def run(*args):
        surrogate, transcript = run_general(*args)
        surrogate.agreement = lambda *found: asked.append((surrogate, *found)) or 1.0
        return surrogate, transcript

    # the package's name for it is the function's
    monkeypatch.setattr(import_module("torch_dpbayes.noise_aware.laplace"), "run_general", run)
    post = posterior("full", n=300)
    ((surrogate, mode, precision),) = asked
    found = Turn(post.transcript.turned, torch.ones(6, dtype=torch.bool), torch.zeros(6))
    torch.testing.assert_close(mode, found.some(post._mode))
    torch.testing.assert_close(precision, surrogate.precision(mode)[0])


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_what_changes_no_probability_of_a_softmax_is_as_wide_as_the_prior(epsilon):
    """The noise of its gradients and curvatures is no sign of anything."""
    x, labels = softmax_data(3000, torch.randn(3, 2, dtype=DOUBLE))
    post = laplace(Softmax(3, prior_std=3.0), x, labels, epsilon=epsilon, delta=1e-5)
    require_width(post.sample(2000)["weights"].mean(1), 3 / math.sqrt(3))
    assert "records tell 4 of 6 unconstrained coordinates" in post.guarantee()


def of_numbers():
    return dist.Normal(torch.ones(3, 2), 1.0)


def of_a_scale():
    """Of all weights, close to 1."""
    return dist.Normal(torch.ones(3, 2), pyro.sample("scale", dist.LogNormal(0.0, 0.05)))


def of_a_centre():
    """Of all classes, for each feature."""
    centre = pyro.sample("centre", dist.Normal(torch.ones(2), 1.0).to_event(1))
    return dist.Normal(centre.expand(3, 2), 1.0)


def of_levels():
    """Of each class."""
    levels = pyro.sample("levels", dist.Normal(torch.ones(3), 1.0).to_event(1))
    return dist.Normal(levels[:, None].expand(3, 2), 1.0)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize(
    "prior, std",
    [(of_numbers, 1.0), (of_a_scale, 1.0), (of_a_centre, 2.0), (of_levels, math.sqrt(2))],
)
def test_what_classes_of_a_pyro_model_have_in_common_is_where_the_prior_has_it(prior, std):
    """Within six standard errors of three classes' quantiles, each of 200 draws or more: .07 of
    widths and .09 of widths in the middle; correlations of a centre have about as much.
    """

    def model(x, labels):
        weights = pyro.sample("weights", prior().to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ weights.T), obs=labels)

    x, labels = softmax_data(4000, no_rare_class())
    post = laplace(
        model,
        x.float(),
        labels,
        epsilon=8.0,
        delta=1e-5,
        max_grad_norm=1.42,
        curvature="diagonal",
    )
    (rows,) = post.transcript.turned
    assert rows.shape == (3, 2)
    draws = post.sample(4000)["weights"]
    common = draws.mean(1) * math.sqrt(3) / std
    assert bool((common.std(0) - 1).abs().lt(6 * 0.07 / math.sqrt(3) + 0.07).all())
    assert bool((draws.mean((0, 1)) - 1).abs().lt(6 * 0.09 * std / math.sqrt(3) + 0.06).all())
    assert bool(((draws[:, 0] - draws[:, 1]).std(0) < 0.5).all())


@pytest.mark.parametrize("curvature", ["full", "diagonal"])
def test_priors_of_other_widths_are_kept(curvature):
    """One class is held at zero by its prior."""
    stds = torch.tensor([[0.01], [1.0], [1.0]]).expand(3, 2)

    def model(x, labels):
        weights = pyro.sample("weights", dist.Normal(0 * stds, stds).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ weights.T), obs=labels)

    x, labels = softmax_data(20_000, torch.zeros(3, 2, dtype=DOUBLE))
    post = laplace(
        model,
        x.float(),
        labels,
        epsilon=8.0,
        delta=1e-5,
        max_grad_norm=1.42,
        curvature=curvature,
    )
    draws = post.sample(4000)["weights"]
    assert bool((draws[:, 0].std(0) < 0.015).all()) and bool((draws[:, 0].abs() < 0.1).all())
    assert bool((draws[:, 1:].std(0) < 0.1).all())


def test_few_records_leave_a_narrow_prior_as_it_is():
    """They can have a quarter of its precision; of what is drawn for their level .82 of its width
    was left when that was at least the prior's precision.
    """
    ratios = []
    for _ in range(5):
        x, labels = softmax_data(50, 0.1 * torch.randn(3, 3, dtype=DOUBLE))
        post = laplace(Softmax(3, prior_std=0.1), x, labels, epsilon=8.0, delta=1e-5)
        ratios.append(float(post.sample(1000)["weights"].std(0).mean()) / 0.1)
    assert sum(ratios) / 5 > 0.93


def test_moments_draws_and_density_of_a_turned_diagonal_agree():
    post = posterior("diagonal", n=300)
    draws = post.sample(20_000)["weight"].flatten(1).double()
    mean, std = post.mean["weight"].flatten(), post.stddev["weight"].flatten()
    error = 6 / math.sqrt(20_000)
    assert bool(((draws.mean(0) - mean) / std).abs().lt(error).all())
    assert bool((draws.std(0) / std - 1).abs().lt(3 * error).all())
    torch.testing.assert_close(post.unconstrained_stddev.float(), std, rtol=1e-4, atol=0.0)
    # of any density the mean of (x − mean)·score is −1 in each coordinate
    points = draws.requires_grad_()
    (score,) = torch.autograd.grad(post._mixture.log_density(points).sum(), points)
    products = (points.detach() - mean) * score
    assert bool((products.mean(0) + 1).abs().lt(6 * products.std(0) / math.sqrt(20_000)).all())
