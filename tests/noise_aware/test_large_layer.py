"""A large last layer: what it charges and releases, the law that it simulates, and its draws."""

import math

import pytest
import torch
from scipy import stats
from small_models import assert_like
from torch import nn
from torch.nn.functional import one_hot

from torch_dpbayes.errors import ArgumentError
from torch_dpbayes.noise_aware import inference, last_layer, posterior_for_module
from torch_dpbayes.noise_aware.covariance import Look, quick_gram_draws
from torch_dpbayes.noise_aware.covariates import shortened_draws
from torch_dpbayes.noise_aware.last_layer import _basis, _Law, _private_sums
from torch_dpbayes.noise_aware.likelihood import Release

# chains of a few states are enough for most tests
pytestmark = pytest.mark.filterwarnings("ignore:the draws are unreliable")
DOUBLE = torch.float64
N, D, K = 600, 3, 3


@pytest.fixture(autouse=True)
def small_layers_count_as_large(monkeypatch):
    monkeypatch.setattr(inference, "SMALLEST", 0)


@pytest.fixture
def short_chains(monkeypatch, short_gram_chains):
    monkeypatch.setattr(last_layer, "_CHAINS", 2)
    monkeypatch.setattr(last_layer, "_KEPT", 4)
    monkeypatch.setattr(last_layer, "_SIMULATED", 500)
    monkeypatch.setattr(last_layer, "_CHECKED_STEPS", 10)


def records(n=N, d=D, classes=K):
    return torch.randn(n, d, dtype=DOUBLE) / 2, torch.randint(classes, (n,))


def rows_with(covariance, count, bound=1.0):
    return bound * shortened_draws(0 * covariance[0], covariance / bound**2, count)


def run(x, y, module=None, **options):
    usual = {"epsilon": 1.0, "delta": 1e-5, "likelihood": "categorical", "prior_std": 1.0}
    module = nn.Linear(D, K).double() if module is None else module
    return posterior_for_module(module, x, y, **(usual | options))


def sums_alone(x, residuals, white):
    """The sum of the scores of single records, each clipped, and how many are."""
    scores = residuals[:, :, None] * (x * white)[:, None]
    norms = scores.flatten(1).norm(dim=1)
    return (scores / norms.clamp_min(1.0)[:, None, None]).sum(0), int((norms > 1).sum())


def test_sums_are_those_of_records_that_are_clipped_alone():
    """What is no class adds nothing."""
    x, y = records(40)
    point, white = torch.randn(K, D, dtype=DOUBLE), torch.tensor([2.0, 5.0, 1.0]).double()
    y[:4] = torch.tensor([-1, K, 10**9, -(10**9)])
    x[6] = 0.0  # one at least is not clipped
    residuals = one_hot(y[4:], K) - (x[4:] @ point.T).softmax(1)
    expected, clipped = sums_alone(x[4:], residuals, white)
    found, count = _private_sums(x, y, point, white)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # a millionth less of each
    assert count == clipped and 0 < clipped < 36
    for k in range(8):
        kept = torch.arange(40) != k
        others = _private_sums(x[kept], y[kept], point, white)[0]
        assert float((found - others).norm()) <= 1.0


def test_a_run_of_any_records_tells_what_its_draws_are_worth(short_chains):
    """Names and shapes are the layer's, and draws of few states are unreliable."""
    x, y = torch.randn(N, 2), records()[1]
    x[0], x[1, 0], x[2], y[3] = math.nan, math.inf, 1e30, 10**9
    net = nn.Sequential(nn.Linear(2, D), nn.Tanh(), nn.Linear(D, K, bias=False))
    net[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="the draws are unreliable") as told:
        posterior = run(x, y, net)
    assert any(w.filename == __file__ for w in told)
    draws = posterior.sample(7)
    assert {name: value.shape for name, value in draws.items()} == {"2.weight": (7, K, D)}
    assert bool(draws["2.weight"].isfinite().all())
    far = 30 * torch.randn(4, 2)
    features = net[1](net[0](far)).detach()
    short = features / features.norm(dim=1, keepdim=True).clamp_min(1.0)
    torch.manual_seed(1)
    wanted = (short @ posterior.sample(100)["2.weight"].mT).softmax(-1).mean(0)
    torch.manual_seed(1)
    assert torch.allclose(posterior.predict(net, far), wanted, atol=1e-5)
    assert posterior.effective_sample_size <= 8 and posterior.r_hat > 0
    said = posterior.guarantee()
    assert "NOT SURE" in said and f"R-hat = {posterior.r_hat:.2f}" in said
    with pytest.raises(ArgumentError, match="no density"):
        posterior.log_density({"2.weight": torch.zeros(K, D)})


@pytest.mark.chance(1e-3)
def test_residuals_of_a_right_law_have_uniform_p_values(monkeypatch):
    """Of releases made by the law at a true point, with second moments of features that differ like
    those that are drawn of them; with three times the noise they are small.
    """
    monkeypatch.setattr(last_layer, "_CHECKED_STEPS", 6)  # the truth is near
    size, p_values, of_more_noise = 4, list[float](), list[float]()
    rows = rows_with(torch.eye(size, dtype=DOUBLE) / 12, 150)
    for _ in range(50):
        apart = 0.01 * torch.randn(16, size, size, dtype=DOUBLE)
        law = law_of(rows, 2, apart=(apart + apart.mT) / 2, std=4.0)
        point = 2 * torch.randn(1, K, size)
        law.settle(point)
        change = law._unknown.sqrt() * torch.triu(torch.randn(size, size))
        change = change + torch.triu(change, 1).T
        shift = (law._scale.float() * (law._linears @ change)).permute(1, 2, 0)
        noise = torch.linalg.cholesky(law._noise) @ torch.randn(K, size, 2, 1)
        law._values = torch.zeros_like(law._values)
        nothing = law._residual(law._expected(point))[0]  # −n m
        for factor, found in ((1, p_values), (3, of_more_noise)):
            wanted = shift + factor * noise[..., 0] - nothing
            law._values = law._basis @ wanted.permute(2, 0, 1)
            found.append(law.p_value(point[0]))
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    assert sum(p < 0.01 for p in of_more_noise) > 33


def test_what_is_not_known_of_second_moments_correlates_the_releases():
    """Against the covariance as a matrix, from the changes of single entries."""
    apart = torch.randn(16, D, D, dtype=DOUBLE)
    rows = rows_with(torch.eye(D, dtype=DOUBLE) / 9, 300)
    law = law_of(rows, 2, apart=(apart + apart.mT) / 50)
    law.settle(torch.randn(4, K, D))
    moves = []
    for a, b in zip(*torch.triu_indices(D, D), strict=True):
        change = torch.zeros(D, D)
        change[a, b] = change[b, a] = law._unknown[a, b].sqrt()
        moves.append((law._scale.float() * (law._linears @ change)).permute(1, 2, 0).flatten())
    moves = torch.stack(moves)
    covariance = torch.block_diag(*law._noise.flatten(0, 1)) + moves.T @ moves
    residual = torch.randn(2, K, D, 2)
    expected = torch.linalg.solve(covariance, residual.flatten(1).T).T.view_as(residual)
    found = law._solved(residual)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.usefixtures("many_gram_chains")
def test_features_in_clusters_are_no_fit(monkeypatch):
    """Scores of corners are not those of the Gaussian features that are simulated."""
    monkeypatch.setattr(last_layer, "_KEPT", 8)
    monkeypatch.setattr(last_layer, "_SIMULATED", 1000)
    n = 20_000
    corners = torch.randint(2, (n, 2)) * 2 - 1
    x = torch.cat([0.6 * corners, 0.02 * torch.randn(n, 1)], 1).double()
    y = torch.where(corners[:, 0] > 0, torch.where(corners[:, 1] > 0, 0, 1), 2)
    with pytest.warns(UserWarning, match="the releases contradict each other under this model"):
        posterior = run(x, y, epsilon=8.0)
    assert "NOT A FIT" in posterior.guarantee()


# -- the law ---------------------------------------------------------------------------------------


def law_of(rows, releases=2, n=2000, std=20.0, apart=None, prior_std=2.0, classes=K):
    d = rows.shape[1]
    white = 1.5 + torch.rand(d, dtype=DOUBLE)
    apart = torch.zeros(1, d, d, dtype=DOUBLE) if apart is None else apart
    law = _Law(rows.float(), white, apart, n, classes, prior_std)
    for number in range(releases):
        value = std * torch.randn(classes, d, dtype=DOUBLE)
        point = torch.randn(classes, d, dtype=DOUBLE) * (number > 0)
        law.add(Release(point, white / (0.7 + number), value, std))
    return law


def scores_of(rows, release):
    """c(x, k) ``[M, K, K, d]``, by the formula of the front page."""
    p = (rows @ release.theta.T).softmax(1)
    apart = torch.eye(p.shape[1], dtype=DOUBLE) - p[:, None]
    scores = apart[..., None] * (rows * release.whitening)[:, None, None]
    return scores / scores.flatten(2).norm(dim=2).clamp_min(1.0)[..., None, None]


def mean_of(rows, release, point):
    p = (rows @ point.T).softmax(1)
    return torch.einsum("mk,mkab->ab", p, scores_of(rows, release)) / len(rows)


def test_the_density_is_that_of_the_formula():
    rows = rows_with(torch.eye(D, dtype=DOUBLE) / 9, 300)
    law = law_of(rows)
    points = torch.randn(2, K, D)
    law.settle(points)
    for point, value in zip(points.double(), law.potential(points)[0], strict=True):
        apart = [r.value - 2000 * mean_of(rows.double(), r, point) for r in law.releases]
        apart = torch.stack([law._basis.double().T @ each for each in apart], -1)
        expected = torch.einsum("kdi,kdij,kdj->", apart, law._inverse.double(), apart) / 2
        expected = expected + point.square().sum() / (2 * 2.0**2)
        assert float(value) == pytest.approx(float(expected), rel=1e-4)


def test_chains_follow_the_gradient_of_the_density():
    law = law_of(rows_with(torch.eye(D, dtype=DOUBLE) / 9, 300))
    for scale in (0.1, 1.0, 10.0):
        points = scale * torch.randn(2, K, D)
        law.settle(points)
        values, gradients = law.potential(points.requires_grad_())
        (own,) = torch.autograd.grad(values.sum(), points)
        torch.testing.assert_close(gradients, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))


def test_the_covariance_is_that_of_labels_and_of_what_second_moments_leave():
    """Both by sums over all classes; labels that are drawn instead leave an error of a percent."""
    m, n, std = 20_000, 2000, 5.0
    rows = rows_with(torch.eye(D, dtype=DOUBLE) / 9, m)
    law = law_of(rows, 2, n, std)
    point = 3 * torch.randn(K, D, dtype=DOUBLE)
    law.settle(point[None])
    x = rows.double()
    p = (x @ point.T).softmax(1)
    each = [
        torch.einsum("ca,mkcd->mkad", law._basis.double(), scores_of(x, r)) for r in law.releases
    ]
    means = [torch.einsum("mk,mkad->mad", p, c) for c in each]
    # q, c's mean over classes without Ax, and what is linear in x
    white = [x * r.whitening for r in law.releases]
    firsts = [mean / w[:, None] for mean, w in zip(means, white, strict=True)]
    rests = []
    for q, w in zip(firsts, white, strict=True):
        flat = q[..., 0]  # the same for all columns
        linear = x @ torch.linalg.lstsq(x, flat).solution
        rests.append((flat - linear)[..., None] * w[:, None])
    expected = torch.empty(K, D, 2, 2, dtype=DOUBLE)
    for j in range(2):
        for k in range(2):
            apart = torch.einsum("mk,mkad,mkad->ad", p, each[j], each[k]) / m
            apart = apart - (means[j] * means[k]).mean(0) + (rests[j] * rests[k]).mean(0)
            simulated = n**2 / m * (rests[j] * rests[k]).mean(0)
            expected[..., j, k] = n * apart + simulated + std**2 * (j == k)
    found = torch.linalg.inv(law._inverse.double())
    assert float(((found - expected) / expected.diagonal(dim1=2, dim2=3).amax()).abs().max()) < 0.05


@pytest.mark.chance(1e-5)
def test_what_is_not_known_of_second_moments_is_counted():
    """Against mean scores of Gaussian features with other second moments: what is counted is 1.13
    times as much, with a standard deviation of .09.
    """
    count, n, m = 60, 2000, 4000
    gram = torch.diag(torch.tensor([0.2, 0.12, 0.08], dtype=DOUBLE))
    noise = 0.01 * torch.randn(count, D, D, dtype=DOUBLE)
    apart = (noise + noise.mT) / 2
    rows = rows_with(gram, m, 9.0)
    point = torch.randn(K, D, dtype=DOUBLE)
    inverses = []
    torch.manual_seed(seed := int(torch.randint(2**40, ())))
    for known in (torch.zeros_like(apart), apart):
        torch.manual_seed(seed)  # of the whitening, and of labels
        law = law_of(rows, 0, n, apart=known)
        # hardly clipped: of clipped scores less is known than what is linear in features tells
        value = torch.zeros(K, D, dtype=DOUBLE)
        law.add(Release(value, law._scale / 20, value, 1e-3))
        law.settle(point[None])
        inverses.append(torch.linalg.inv(law._inverse.double())[..., 0, 0])
    found = inverses[1] - inverses[0]
    normal = torch.randn(m, D, dtype=DOUBLE)
    normal = normal @ torch.linalg.inv(torch.linalg.cholesky(normal.T @ normal / m)).T
    means = []
    for each in apart:
        root = torch.linalg.cholesky(gram + each)
        mean = n * mean_of(normal @ root.T, law.releases[0], point)
        means.append(law._basis.double().T @ mean)
    variances = torch.stack(means).var(0)
    # of the same draws, so that only the linear part of q, and few numbers, make a difference
    assert 0.7 < float(found.sum() / variances.sum()) < 1.75


@pytest.mark.parametrize("quantile, noise", [(1.0, 0.01), (0.5, 100.0)])
def test_the_clip_bound_is_large_where_noise_is_small(quantile, noise):
    """The largest of the simulated norms, or less than the third quartile."""
    rows = rows_with(torch.eye(D, dtype=DOUBLE) / 9, 2000)
    law = law_of(rows, 0)
    point = torch.zeros(K, D, dtype=DOUBLE)
    norms = law._lengths * math.sqrt(1 - 1 / K)  # of scores at frequencies that are equal
    bound = law.clip_bound(point, noise)
    if quantile == 1.0:
        assert bound == pytest.approx(float(norms.max()), rel=1e-5)
    else:
        assert bound <= float(norms.quantile(0.81))


def test_classes_are_independent_in_the_basis():
    """E[diag(p) − ppᵀ] is diagonal there."""
    p = (3 * torch.randn(2, K, 400)).softmax(1)
    curvature = torch.stack(
        [torch.diag(q) - torch.outer(q, q) for q in p.transpose(1, 2).flatten(0, 1)]
    )
    basis = _basis(p)
    turned = basis.T @ curvature.mean(0) @ basis
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0, atol=1e-6)


@pytest.mark.chance(1e-3)
def test_chains_sample_the_density():
    """Two classes and one feature: only the difference of weights matters to the releases, so
    moments of it and of the sum are those of a grid.
    """
    rows = rows_with(torch.eye(1, dtype=DOUBLE) / 4, 500)
    law = law_of(rows, 1, 100, 12.0, classes=2, prior_std=3.0)
    start = torch.zeros(2, 1, dtype=DOUBLE)
    law.settle(start[None])
    states = last_layer._chains(law, start, 30, 60)
    axis = torch.linspace(-12, 12, 121)
    grid = torch.cartesian_prod(axis, axis)[:, :, None]
    weights = (-law.potential(grid)[0]).softmax(0)
    apart, both = grid[:, 0, 0] - grid[:, 1, 0], grid.sum((1, 2))
    found = states[..., 0].flatten(0, 1).double()
    for values, own in ((apart, found[:, 0] - found[:, 1]), (both, found.sum(1))):
        # in 40 runs errors of means had a deviation of 2 %, those of deviations one of 5 %
        assert_like(own, values.double(), weights, of_mean=0.12, of_std=0.2)


@pytest.mark.chance(1e-9)
@pytest.mark.parametrize("step", [0.6, 6.0])
def test_chains_leave_a_gaussian_density_its_variance(step, monkeypatch):
    """Releases that tell nothing leave the prior; leapfrog steps with momenta drawn at their ends
    are a tenth too wide, and not stable where they are longer than 2. Twenty runs had a deviation
    of .7 %.
    """
    monkeypatch.setattr(last_layer, "_STEP", step)
    rows = rows_with(torch.eye(D, dtype=DOUBLE) / 9, 100)
    law = law_of(rows, 1, 1, 1e6, classes=40)
    start = torch.zeros(40, D, dtype=DOUBLE)
    law.settle(start[None])
    states = last_layer._chains(law, start, 40, 30)
    assert bool((states[:, 0] != states[:, -1]).any((1, 2)).all())
    assert float(states.double().square().mean()) == pytest.approx(2.0**2, rel=0.05)


@pytest.mark.chance(1e-4)
@pytest.mark.parametrize("rate", [0.0, 0.08])
def test_quick_draws_of_many_columns_are_as_far_from_their_mean_as_the_truth(rate):
    """Squares of rows, over three releases: of visible directions, those near the noise, and hidden
    ones, in the eigenvectors of the release. Equal eigenvalues are seen.
    """
    size, noise_std, errors, spreads, of_traces = 150, 0.01, [], [], []
    truth = torch.diag((-rate * torch.arange(size, 0, -1, dtype=DOUBLE)).exp())
    for _ in range(3):
        noise = torch.randn(size, size, dtype=DOUBLE)
        released = truth + noise_std * (noise + noise.T) / 2
        basis = torch.linalg.eigh(released)[1]
        look = Look(released, noise_std, torch.eye(size, dtype=DOUBLE))
        draws = basis.T @ quick_gram_draws([look], 16) @ basis
        apart = basis.T @ truth @ basis - draws.mean(0)
        errors.append(apart.square().sum(0))
        spreads.append(draws.var(0).sum(0))
        traces = draws.diagonal(dim1=1, dim2=2).sum(1) / (noise_std * math.sqrt(size))
        of_traces.append(traces.var())
        apart_by = traces.mean() - truth.trace() / (noise_std * math.sqrt(size))
        assert abs(float(apart_by)) < 6
    assert 0.35 < float(torch.stack(of_traces).mean()) < 2.5
    rows = [slice(-6, None), slice(-30, -6), slice(None, -30)]
    error, spread = (torch.stack(found).mean(0) for found in (errors, spreads))
    if rate:
        assert all(0.7 < float(error[own].mean() / spread[own].mean()) < 1.4 for own in rows)
    else:
        assert float(error.sum() + spread.sum()) < 0.05 * size**2 * noise_std**2


@pytest.mark.chance(1e-4)
@pytest.mark.usefixtures("many_gram_chains")
def test_draws_of_few_columns_do_not_tell_what_noise_hides():
    """The least eigenvalue of two columns has a mean of .04; that of the Gaussian's draws is .15.
    Its mean over 40 draws had a deviation of .01.
    """
    released = torch.diag(torch.tensor([0.95, 0.05], dtype=DOUBLE))
    draws = quick_gram_draws([Look(released, 0.1, torch.eye(2, dtype=DOUBLE))], 64)
    assert float(torch.linalg.eigvalsh(draws)[:, 0].mean()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_intervals_cover(epsilon):
    """90 % intervals of contrasts of logits at new features, truths from the prior: on average over
    24 data sets.
    """
    d, size, n, covered = 20, 4, 5000, []
    scales = torch.logspace(0, -0.5, d, dtype=DOUBLE)
    options = {"prior_std": 3.0, "num_simulated": 2500}
    for _ in range(24):
        x = torch.randn(n + 100, d, dtype=DOUBLE) * scales / (1.2 * scales.norm())
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
        means = x @ (3 * torch.randn(d, size, dtype=DOUBLE))
        y = torch.multinomial(means[:n].softmax(1), 1)[:, 0]
        found = run(x[:n], y, nn.Linear(d, size, bias=False).double(), epsilon=epsilon, **options)
        drawn = torch.einsum("nd,skd->snk", x[n:], found.sample(1000)["weight"])
        first, second = torch.rand(100, size).topk(2, dim=1).indices.T
        rows, true = torch.arange(100), means[n:]
        drawn, true = (of[..., rows, first] - of[..., rows, second] for of in (drawn, true))
        low, high = drawn.quantile(torch.tensor([0.05, 0.95], dtype=DOUBLE), dim=0)
        covered.append(float(((low < true) & (true < high)).double().mean()))
    # one data set's share has a standard deviation of .055 (seen), the mean of .011
    assert sum(covered) / len(covered) == pytest.approx(0.90, abs=0.045)
