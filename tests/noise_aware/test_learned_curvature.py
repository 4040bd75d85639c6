"""The surrogate that learns curvature from how gradients differ, against the joint law of all
releases and against simulated transcripts. Two-sided tests at a significance of 1e-6 each; every
defect that the formula guards against is put in on purpose, and has to be found.
"""

import math

import pytest
import torch
from scipy.stats import chi2

from torch_dpbayes.noise_aware import laplace
from torch_dpbayes.noise_aware import surrogate as module
from torch_dpbayes.noise_aware.learned_curvature import LearnedCurvatureSurrogate
from torch_dpbayes.noise_aware.response import LinearResponse
from torch_dpbayes.noise_aware.surrogate import Surrogate
from torch_dpbayes.noise_aware.transcript import GradientRelease
from torch_dpbayes.ops import GLM

DOUBLE = torch.float64
SIZE = 4
SIGNIFICANCE = 1e-6
EYE = torch.eye(SIZE, dtype=DOUBLE)
CURVATURE = torch.diag(torch.tensor([4.0, 10.0, 25.0, 60.0], dtype=DOUBLE)) + 1.5


def symmetric(std):
    noise = std * torch.randn(SIZE, SIZE, dtype=DOUBLE)
    return (noise + noise.T) / 2


def releases_of(curvature, best, points, stds, rate=1.0):
    root = torch.linalg.cholesky(curvature)
    found = []
    for point, std in zip(points, stds):
        value = curvature @ (point - best) + std * torch.randn(SIZE, dtype=DOUBLE)
        value += math.sqrt((1 - rate) / rate) * root @ torch.randn(SIZE, dtype=DOUBLE)
        found.append(GradientRelease(point, value, std, rate))
    return found


def surrogate(releases, curvature, std, kind=LearnedCurvatureSurrogate):
    return kind(releases, LinearResponse(curvature), curvature, std, releases[-1].theta)


def test_it_is_the_joint_law_of_all_releases():
    points = torch.randn(3, SIZE, dtype=DOUBLE)
    stds = [5.0, 3.0, 2.0]
    best = torch.randn(SIZE, dtype=DOUBLE)
    curvature = 10 * CURVATURE
    releases = releases_of(curvature, best, points, stds)
    std = 4.0
    found = surrogate(releases, curvature, std)

    def joint(theta):
        """Of all their numbers, with E integrated out; the records' own part, which all releases
        share, has the learned curvature for its covariance.
        """
        apart = points - theta
        covariance = found.curvature.repeat(3, 3)
        for j in range(3):
            for k in range(3):
                block = apart[j] @ apart[k] * EYE + apart[k].outer(apart[j])
                rows, columns = (slice(SIZE * i, SIZE * (i + 1)) for i in (j, k))
                covariance[rows, columns] += std**2 / 2 * block + (j == k) * stds[j] ** 2 * EYE
        law = torch.distributions.MultivariateNormal((apart @ curvature).reshape(-1), covariance)
        return law.log_prob(torch.cat([r.value for r in releases]))

    assert torch.linalg.eigvalsh(found.curvature).min() > 0.5 * std  # no floor was needed
    thetas = torch.randn(6, SIZE, dtype=DOUBLE)
    expected = torch.stack([joint(theta) for theta in thetas])
    values = found.log_likelihood(thetas)
    one_by_one = torch.stack([found.log_likelihood(theta) for theta in thetas])
    torch.testing.assert_close(values, one_by_one)
    assert float(found.log_likelihood(thetas[:1] + 1e200)) == -math.inf  # and no chain raises
    missing = 3 * SIZE / 2 * math.log(2 * math.pi)  # a constant that is left out
    torch.testing.assert_close(values - missing, expected, rtol=1e-6, atol=1e-5)


def is_calibrated(*, noise_std=6.0, rate=1.0, curvature_std=0.0, believed_std=None, scale=1.0):
    data_sets, total, curvature = 300, 0.0, scale * CURVATURE
    believed_std = curvature_std if believed_std is None else believed_std
    root = torch.linalg.cholesky(curvature)
    for _ in range(data_sets):
        truth = torch.randn(SIZE, dtype=DOUBLE)
        best = truth + torch.linalg.solve(root.T, torch.randn(SIZE, dtype=DOUBLE))
        points = [truth + 1.0, truth + 0.8]
        releases = releases_of(curvature, best, points, [1.5 * noise_std, noise_std], rate)
        found = surrogate(releases, curvature + symmetric(curvature_std), believed_std)
        precision, product = found.precision(truth)
        precision = precision + EYE
        error = torch.linalg.solve(precision, product) - truth
        total += float(error @ precision @ error)
    count = data_sets * SIZE
    return bool(chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count))


def test_intervals_count_the_privacy_noise_of_learned_curvatures(monkeypatch):
    assert is_calibrated()
    monkeypatch.setattr(
        module, "noises", lambda releases, dtype: torch.tensor([[1e-3, 0.0]] * 2, dtype=dtype)
    )
    assert not is_calibrated()


@pytest.mark.thorough
def test_the_privacy_noise_counts_once_with_learned_curvatures(monkeypatch):
    honest = module.noises
    assert is_calibrated(noise_std=50.0, scale=10.0)
    monkeypatch.setattr(module, "noises", lambda releases, dtype: 3 * honest(releases, dtype))
    assert not is_calibrated(noise_std=50.0, scale=10.0)


@pytest.mark.thorough
def test_the_noise_of_sampling_records_counts_with_learned_curvatures(monkeypatch):
    assert is_calibrated(noise_std=1.0, rate=0.2)
    monkeypatch.setattr(
        module,
        "noises",
        lambda releases, dtype: torch.tensor([[r.noise_std**2, 0.0] for r in releases]).to(dtype),
    )
    assert not is_calibrated(noise_std=1.0, rate=0.2)


def test_what_is_left_of_the_curvatures_noise_counts():
    far = {"scale": 10.0, "noise_std": 2.0, "curvature_std": 10.0}
    assert is_calibrated(**far)
    assert not is_calibrated(**far, believed_std=1e-3)


def test_a_curvature_hidden_by_noise_leaves_no_second_mode_at_the_start():
    """Forty away from the start, along a direction whose curvature is a quarter of its noise."""
    curvature = torch.diag(torch.tensor([0.5, 10.0, 25.0, 60.0], dtype=DOUBLE))
    best = torch.tensor([40.0, 1.0, 0.0, 0.0], dtype=DOUBLE)
    points = [best * share for share in (0.0, 0.5, 0.8, 0.95)]
    releases = releases_of(curvature, best, points, [1.0] * 4)
    believed = curvature + 0.5 * EYE
    values = {}
    for kind in (Surrogate, LearnedCurvatureSurrogate):
        found = surrogate(releases, believed, 2.0, kind)
        values[kind] = float(found.log_likelihood(best) - found.log_likelihood(0 * best))
    assert values[LearnedCurvatureSurrogate] > 30
    assert values[Surrogate] < 15


def like_adult(count=32_000):
    """Positive, unlike features and weights six prior standard deviations out."""
    uniform = torch.rand(count, 4, dtype=DOUBLE)
    gain = (uniform[:, 2] < 0.08) * 0.8
    loss = (uniform[:, 3] < 0.05) * 0.9
    x = torch.stack(
        [
            0.2 + 0.5 * uniform[:, 0],
            (0.6 + 0.15 * torch.randn(count, dtype=DOUBLE)).clamp(0, 1),
            gain,
            loss,
            (0.4 + 0.12 * torch.randn(count, dtype=DOUBLE)).clamp(0, 1),
            (uniform[:, 1] < 0.67).double(),
            torch.ones(count, dtype=DOUBLE),
        ],
        dim=1,
    ) / math.sqrt(5 / 3 + 2)
    truth = torch.tensor([8.0, 10.0, 4.5, 2.7, 6.5, 2.2, -17.0], dtype=DOUBLE)
    return x, (torch.rand(count, dtype=DOUBLE) < (x @ truth).sigmoid()).double(), truth


@pytest.mark.thorough
def test_a_prior_that_is_six_deviations_off_does_not_win_where_thousands_of_records_speak():
    x, y, truth = like_adult()
    post = laplace(GLM(prior_std=3.0), x, y, epsilon=1.0, delta=1e-5)
    error = (post.mean["weights"] - truth).square().mean().sqrt()
    assert float(error) < 0.4 * float(truth.square().mean().sqrt())  # at the prior it is 1
    assert float(post.stddev["weights"].mean()) < 2.0
