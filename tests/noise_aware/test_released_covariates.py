"""Laws of covariates: what shortened rows have, the release's own noise, and sensitivities."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import inference, posterior
from torch_dpbayes.noise_aware.covariates import (
    FeatureShape,
    Released,
    feature_shape,
    noisy_moments,
)
from torch_dpbayes.noise_aware.likelihood import law_differences
from torch_dpbayes.noise_aware.noisy_gram import gram_draws
from torch_dpbayes.noise_aware.records import ModelRecords


def linear(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def records_of(x):
    return ModelRecords(
        linear,
        (x, torch.zeros(len(x), dtype=torch.float64)),
        data_plate="data",
        count_is_public=True,
        public=(),
        chunk=1000,
    )


def law_of(mean, covariance, seed=1, bound=2.0, constants=None):
    size = len(mean) + len(constants or {})
    records = records_of(torch.zeros(50, size, dtype=torch.float64))
    shape = feature_shape(records, bound, constants or {})
    return Released(records, seed, shape, (mean, covariance))


def test_shortened_rows_have_the_released_moments():
    """Without the fit half of the rows would be longer than R before, and too short after."""
    mean = torch.tensor([0.3, 0.0, -0.2], dtype=torch.float64)
    wanted = torch.diag(torch.tensor([0.30, 0.15, 0.05], dtype=torch.float64))
    bound = 2.0
    (rows,) = law_of(mean, wanted, bound=bound).rows(60_000, 0).values()
    assert float(rows.norm(dim=1).max()) <= bound * (1 + 1e-9)
    assert float((rows.norm(dim=1) > bound * 0.999).double().mean()) > 0.05  # many are shortened
    # 10,000 rows fit the law, 60,000 check it: 5 standard errors
    assert torch.allclose(rows.mean(0) / bound, mean, atol=0.03)
    assert torch.allclose(torch.cov(rows.T) / bound**2, wanted, atol=0.02)


def test_constant_columns_are_set_and_do_not_count():
    constants = {1: 5.0}
    mean, wanted = torch.zeros(2, dtype=torch.float64), 0.1 * torch.eye(2, dtype=torch.float64)
    (rows,) = law_of(mean, wanted, constants=constants).rows(1000, 0).values()
    assert bool((rows[:, 1] == 5.0).all())
    shape = FeatureShape(1.0, constants, (3,))
    raw = torch.randn(100, 3, dtype=torch.float64)
    short = shape.shortened(raw)
    assert bool((short[:, 1] == 5.0).all()) and float(short[:, [0, 2]].norm(dim=1).max()) <= 1
    raw[0, 0] = math.nan
    assert bool((shape.shortened(raw)[0] == torch.tensor([0.0, 5.0, 0.0])).all())


def test_draws_of_a_gram_matrix_are_those_of_its_posterior():
    """Matrices from the prior, with noise: ranks of the truth among draws are uniform, by
    their mean and variance over 30 matrices; a failure is looked at once more.
    """

    def scores_of(number):
        torch.manual_seed(number)
        found = []
        for _ in range(30):
            size, noise = 5, 0.1
            spread = math.log(10.0) * abs(float(torch.randn(()))) / math.sqrt(size / 2)
            white = torch.randn(size, size, dtype=torch.float64)
            gram = torch.linalg.matrix_exp(spread * (white + white.T) / 2)
            white = torch.randn(size, size, dtype=torch.float64)
            draws = gram_draws(gram + noise * (white + white.T) / 2, noise, 25)
            u = torch.randn(size, dtype=torch.float64)
            less = (torch.einsum("i,kij,j->k", u, draws, u) < u @ gram @ u).sum()
            found.append((float(less) + float(torch.rand(()))) / 26)
        ranks = torch.tensor(found)
        of_mean = (float(ranks.mean()) - 0.5) * math.sqrt(12 * 30)
        # the variance of (r - 1/2)² is 1/180
        of_square = (float((ranks - 0.5).square().mean()) - 1 / 12) * math.sqrt(180 * 30)
        return max(abs(of_mean), abs(of_square))

    # P(|N| > 3.3) twice, and again: 4e-6
    assert scores_of(0) < 3.3 or scores_of(1) < 3.3


def test_hidden_directions_get_less_than_the_noise_adds():
    """The trace is nearer to the truth than that of the release's positive part."""
    torch.manual_seed(3)
    size, noise = 20, 0.0025
    values = torch.logspace(0, -3, size, dtype=torch.float64)
    values = values / values.sum()
    white = torch.randn(size, size, dtype=torch.float64)
    released = torch.diag(values) + noise * (white + white.T) / 2
    draws = gram_draws(released, noise, 20)
    of_positive_part = float(torch.linalg.eigvalsh(released).clamp_min(0.0).sum())
    trace = float(draws.diagonal(dim1=1, dim2=2).sum(1).mean())
    assert abs(trace - 1) < abs(of_positive_part - 1) / 2


def test_noise_of_covariates_widens_a_posterior(monkeypatch):
    """Noise hides small directions of the features: the mean law alone tells too much of them."""
    stddev = []
    for patched in (False, True):
        torch.manual_seed(1)
        scales = torch.logspace(0, -1, 8, dtype=torch.float64)
        x = torch.randn(1000, 8, dtype=torch.float64) * scales / scales.norm()
        y = x @ torch.randn(8, dtype=torch.float64) + torch.randn(1000, dtype=torch.float64)
        if patched:
            one = lambda fit, under, releases: law_differences(fit, under[:1], releases)  # noqa: E731
            monkeypatch.setattr(inference, "law_differences", one)
        accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5)
        found = posterior(linear, x, y, accountant=accountant, num_data=1000, num_simulated=8000)
        stddev.append(float(found.unconstrained_stddev.mean()))
    assert stddev[0] > 1.1 * stddev[1]


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_moments_move_by_their_sensitivity(neighboring):
    shape = FeatureShape(1.0, {}, (3,))
    rows = shape.shortened(torch.randn(30, 3, dtype=torch.float64))
    silent = lambda size: torch.zeros(size, dtype=torch.float64)  # noqa: E731
    before = noisy_moments(rows, shape, (1.0, 1.0), silent)
    other = rows.clone()
    if neighboring == "replace_one":
        other[0] = torch.tensor([0.0, 0.0, 1.0])
        limits = 2.0, math.sqrt(2)
    else:
        other, limits = rows[1:], (1.0, 1.0)
    after = noisy_moments(other, shape, (1.0, 1.0), silent)
    assert float((before.total - after.total).norm()) <= limits[0]
    assert float((before.products - after.products).norm()) <= limits[1]


def test_covariates_of_unknown_kind_are_refused():
    def model(x, g, y):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w * x * g.sum(1), 1.0), obs=y)

    x, y = torch.randn(2, 100, dtype=torch.float64)
    g = torch.randint(3, (100, 2))
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match="no category, one whole number"):
        posterior(model, x, g, y, accountant=accountant)
    with pytest.raises(ValueError, match="name all of them"):
        posterior(model, x, g, y, accountant=accountant, public=("x",))
    with pytest.raises(ValueError, match="takes one tensor for each"):
        posterior(model, x, g, y, accountant=accountant, covariates=x)
    assert not len(accountant)
    found = posterior(
        model, x, g, y, accountant=accountant, covariates=(x[:20], g[:20]), num_simulated=8000
    )
    assert len(found._likelihood.modes) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_few_digits_move_sums_by_the_bound_at_most(dtype):
    """Rounding a row that was shortened may make it longer: of float16 below 1e-7 by a third."""
    for bound in (1e-7, 0.7, 1.0):
        shape = FeatureShape(bound, {}, (50,))
        for row in shape.shortened(10 * torch.randn(200, 50).to(dtype)).split(1):
            found = noisy_moments(row, shape, (0.0, 0.0), lambda size: torch.zeros(size).double())
            assert float(found.total.norm()) <= 1 and float(found.products.norm()) <= 1
