"""The diagonal form: what it is charged, what it says of simulated releases, and of records whose
posterior is known. Two-sided tests at a significance of 1e-6 each.
"""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binom, chi2

import torch_dpbayes as dpb
from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware import diagonal as module
from torch_dpbayes.noise_aware import laplace, laplace_for_module
from torch_dpbayes.noise_aware.diagonal import DiagonalCurvature, DiagonalSurrogate
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.records import DensitySums, GLMSums
from torch_dpbayes.noise_aware.transcript import GradientRelease
from torch_dpbayes.ops import GLM, Softmax

DOUBLE = torch.float64
SIGNIFICANCE = 1e-6
SIZE = 3000
BCE = partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="none")


def share_inside_is_right(mixture, truth, level=0.7, misfit=0.0):
    """Whether central intervals hold the truth as often as they say, but for ``misfit``."""
    below = torch.special.ndtr((truth - mixture._means) / mixture._stds)
    ranks = (mixture._weights * below).sum(0)
    inside = int(((ranks - 0.5).abs() < level / 2).sum())
    low = binom.ppf(SIGNIFICANCE / 2, len(truth), level - misfit)
    high = binom.ppf(1 - SIGNIFICANCE / 2, len(truth), level + misfit)
    return bool(low <= inside <= high)


def is_calibrated(*, noise_std=6.0, rate=1.0, believed_rate=None, curvature_std=0.5, way=0.5):
    """Parameters from the prior, the maxima of their likelihoods and the releases from theirs."""
    truth = 3 * torch.randn(SIZE, dtype=DOUBLE)
    curvature = 20 * (0.4 * torch.randn(SIZE, dtype=DOUBLE) - 0.08).exp()
    best = truth + torch.randn(SIZE, dtype=DOUBLE) / curvature.sqrt()
    releases = []
    for std in (1.5 * noise_std, noise_std):
        point = truth + way * torch.randn(SIZE, dtype=DOUBLE)
        value = curvature * (point - best) + std * torch.randn(SIZE, dtype=DOUBLE)
        value += (curvature * (1 / rate - 1)).sqrt() * torch.randn(SIZE, dtype=DOUBLE)
        releases.append(GradientRelease(point, value, std, believed_rate or rate))
    released = curvature + curvature_std * torch.randn(SIZE, dtype=DOUBLE)
    found = DiagonalSurrogate(
        releases,
        DiagonalCurvature(released, curvature_std, 1.0, 1e3, 1e4),
        GaussianPrior(torch.zeros(SIZE, dtype=DOUBLE), torch.full((SIZE,), 1 / 9, dtype=DOUBLE)),
    )
    return share_inside_is_right(found, truth, misfit=0.02)


def test_diagonal_intervals_count_the_privacy_noise(monkeypatch):
    assert is_calibrated()
    monkeypatch.setattr(
        module, "noise_variances", lambda releases: torch.full((2,), 1e-3, dtype=DOUBLE)
    )
    monkeypatch.setattr(DiagonalSurrogate, "_off_diagonal", lambda *given: 0.0)
    assert not is_calibrated()


def test_the_privacy_noise_counts_once_in_the_diagonal_form(monkeypatch):
    honest = module.noise_variances
    assert is_calibrated(noise_std=12.0)
    monkeypatch.setattr(module, "noise_variances", lambda releases: 2 * honest(releases))
    assert not is_calibrated(noise_std=12.0)


def test_the_noise_of_sampling_records_counts_in_the_diagonal_form():
    assert is_calibrated(noise_std=1.0, rate=0.2)
    assert not is_calibrated(noise_std=1.0, rate=0.2, believed_rate=1.0)


def test_a_noisy_diagonal_is_not_taken_as_exact(monkeypatch):
    far = {"noise_std": 2.0, "curvature_std": 10.0, "way": 2.0}
    assert is_calibrated(**far)
    monkeypatch.setattr(
        DiagonalCurvature,
        "__init__",
        lambda self, released, *given: self.__dict__.update(
            _means=released.clamp_min(1.0).log(), _stds=torch.zeros_like(released)
        ),
    )
    monkeypatch.setattr(DiagonalSurrogate, "_off_diagonal", lambda *given: 0.0)
    assert not is_calibrated(**far)


def one_hot(count, size, prior_std=1.0):
    """Every record has one feature: the posterior's coordinates are independent."""
    truth = prior_std * torch.randn(size, dtype=DOUBLE)
    x = torch.eye(size, dtype=DOUBLE)[torch.randint(0, size, (count,))]
    return x, (torch.rand(count, dtype=DOUBLE) < (x @ truth).sigmoid()).double(), truth


def test_with_a_huge_budget_the_diagonal_form_has_the_posterior_of_the_data():
    """Of small weights: how the curvature changes on the way to large ones counts as noise."""
    x, y, _ = one_hot(20_000, 10, prior_std=0.3)
    post = laplace(GLM(), x, y, epsilon=500.0, delta=1e-5, curvature="diagonal")
    w = torch.zeros(10, dtype=DOUBLE)
    for _ in range(50):  # Newton's method; the Gaussian at the mode is that of 2,000 records
        p = (x @ w).sigmoid()
        precision = (p * (1 - p)) @ x + 1
        w = w - (x.T @ (p - y) + w) / precision
    assert bool(((post.mean["weights"] - w).abs() < 0.5 / precision.sqrt()).all())
    torch.testing.assert_close(post.stddev["weights"], precision.rsqrt(), rtol=0.15, atol=0.0)


def test_what_records_do_not_read_is_as_wide_as_the_prior():
    """The noise of its gradients and curvatures is no sign of anything."""

    def model(x):
        rate = pyro.sample("rate", dist.Normal(torch.zeros(()), 1.0))
        scale = pyro.sample("scale", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("effect", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(rate, scale.exp()), obs=x)

    x = torch.randn(5000)
    post = laplace(model, x, epsilon=8.0, delta=1e-5, max_grad_norm=4.0, curvature="diagonal")
    effects = post.stddev["effect"]
    # each is as wide as quantiles of a few hundred draws say: six standard errors of thirty
    assert float(effects.mean()) == pytest.approx(1.0, abs=0.1)
    assert float(post.stddev["rate"]) < 0.1


@pytest.mark.thorough
def test_diagonal_intervals_cover_what_they_say():
    """Six sets of records with 200 parameters."""
    for_all = []
    for _ in range(6):
        x, y, truth = one_hot(20_000, 200)
        post = laplace(GLM(), x, y, epsilon=2.0, delta=1e-5, curvature="diagonal")
        ranks = (post.sample(400)["weights"] < truth).double().mean(0)
        for_all.append(((ranks - 0.5).abs() < 0.45).double())
    inside = torch.cat(for_all)
    error = 6 * math.sqrt(0.9 * 0.1 / len(inside))
    assert abs(float(inside.mean()) - 0.9) < 0.04 + error


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_the_charge_of_the_diagonal_form_is_that_of_the_noise(neighboring):
    x, y, _ = one_hot(300, 50)
    accountant = dpb.PrivacyAccountant(2.0, 1e-5, neighboring=neighboring)
    glm = GLM(prior_std=10.0)
    options = {"accountant": accountant, "num_data": 300, "max_grad_norm": 1.0}
    post = laplace(glm, 3 * x, y, curvature="diagonal", **options)
    events = [event for charge in accountant.history for event in [charge.event] * charge.count]
    sums, transcript = GLMSums(glm, 3 * x, y, 1.0), post.transcript
    assert len(events) == len(transcript.gradients) + len(transcript.diagonals)
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    stated = {round(event.noise_multiplier, 9) for event in events}
    total, count = 0.0, 0
    for release in transcript.gradients:
        assert round(release.noise_std, 9) in stated
        exact = sums.gradient_sum(release.theta)
        total += float(((release.value - exact) / release.noise_std).square().sum())
        count += 50
    for release in transcript.diagonals:
        assert round(cheaper * release.noise_std / 0.25, 9) in stated  # p(1 − p) is at most ¼
        exact = sums.curvature_diagonal(release.theta)
        total += float(((release.value - exact) / release.noise_std).square().sum())
        count += 50
    assert chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count)


def test_one_record_moves_the_diagonal_by_no_more_than_the_bound():
    def model(x):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(4, dtype=DOUBLE), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    theta, clip = torch.randn(4, dtype=DOUBLE), 0.7
    rows = [5 * torch.randn(1, 4, dtype=DOUBLE) for _ in range(3)]
    rows += [value * torch.eye(4, dtype=DOUBLE)[:1] for value in (1e9, math.nan, math.inf)]
    general = [
        DensitySums(RecordDensity(model, (row,)), clip).curvature_diagonal(theta) for row in rows
    ]
    linear = [GLMSums(GLM(), row, torch.ones(1), None).curvature_diagonal(theta) for row in rows]
    for parts, bound in ((general, clip**2), (linear, 0.25)):
        moved = torch.stack(parts)
        assert float(moved.norm(dim=1).max()) <= bound
        assert float(moved.min()) >= 0
        assert float(torch.cdist(moved, moved).max()) <= math.sqrt(2) * bound
    assert float(torch.stack(general).norm(dim=1).max()) > 0.99 * clip**2


@pytest.mark.thorough
def test_more_parameters_than_a_full_curvature_allows():
    x = torch.randn(40, 4100, dtype=DOUBLE)
    y = (x[:, 0] > 0).double()
    net = torch.nn.Sequential(torch.nn.Linear(4100, 1, dtype=DOUBLE), torch.nn.Flatten(0))
    run = partial(
        laplace_for_module,
        net,
        x,
        y,
        loss=BCE,
        prior_std=1.0,
        max_grad_norm=1.0,
        epsilon=1.0,
        delta=1e-5,
    )
    with pytest.raises(ValueError, match='curvature="diagonal"'):
        run()
    post = run(curvature="diagonal")
    draws = post.sample(3)
    assert draws["0.weight"].shape == (3, 1, 4100)
    assert post.method == "mixture"
    assert repr(post).startswith("DiagonalPosterior(")
    assert "off the diagonal" in post.guarantee()
    assert bool(post.stddev["0.weight"].isfinite().all())
    assert math.isfinite(post.log_density(post.mean))
    assert len(post.unconstrained_stddev) == 4101


def test_what_the_diagonal_form_refuses():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match="'full' or 'diagonal'"):
        laplace(GLM(), x, y, accountant=accountant, curvature="diag")
    with pytest.raises(ValueError, match="full curvature only"):
        laplace(Softmax(3), x, y.long(), accountant=accountant, curvature="diagonal")
    assert len(accountant) == 0


def test_a_large_softmax_is_not_sent_to_a_diagonal_form_that_it_does_not_have():
    x, y = torch.zeros(4, 2001), torch.zeros(4).long()
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match=r"4002 .*: a Softmax has no diagonal form") as no:
        laplace(Softmax(3), x, y, accountant=accountant)
    assert "laplace_for_module(torch.nn.Linear" in str(no.value)
    with pytest.raises(ValueError, match=r'4001 parameters.*: write curvature="diagonal"'):
        laplace(GLM(), torch.zeros(4, 4001), y.double(), accountant=accountant)
    assert len(accountant) == 0
