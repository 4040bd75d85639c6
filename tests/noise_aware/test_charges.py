"""The noise that is added is the noise that is charged: by every door, under both relations; and no
record moves a release by more than its sensitivity.

Where every standard normal number is 1, a release less its exact sum is its noise's standard
deviation. μ² of all releases, by the sensitivity of each, has to be μ² of the events on the
accountant and of the budget.
"""

import math

import pyro.distributions as dist
import pytest
import torch
from small_models import SHORT, coins, records_of
from support.pyro_models import weights
from torch.nn.functional import one_hot

import torch_dpbayes as dpb
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.noise_aware import (
    LinearRegression,
    NoisyCovariance,
    beta_bernoulli,
    covariance,
    dirichlet_categorical,
    gamma_poisson,
    inference,
    last_layer,
    posterior,
    posterior_for_module,
    sufficient_statistics,
)
from torch_dpbayes.noise_aware.covariance import _second_moments, with_symmetric_noise
from torch_dpbayes.noise_aware.covariates import feature_shape
from torch_dpbayes.noise_aware.run import Mechanism, run

pytestmark = [
    pytest.mark.usefixtures("few_draws", "double"),
    pytest.mark.filterwarnings("ignore:the draws are unreliable"),
]
RELATIONS = ("add_or_remove_one", "replace_one")
EPSILON, DELTA, N = 1.0, 1e-5, 400


@pytest.fixture
def drawn(monkeypatch):
    """How many numbers of noise each release takes; all of them are 1."""
    sizes = []

    def ones(self, size, *, dtype, device, hides=()):
        sizes.append(size)
        return torch.ones(size, dtype=dtype, device=device)

    monkeypatch.setattr(GaussianNoise, "standard_normal", ones)
    return sizes


class Released(Exception):
    """All releases were made."""


@pytest.fixture
def transcript_of(monkeypatch):
    """What a door releases; of most the posterior is not computed."""
    found = []

    def noted(*args):
        found.append(run(*args)[0])
        raise Released

    def call(door, *args, **options):
        try:
            return door(*args, **options).transcript
        except Released:
            return found.pop()

    monkeypatch.setattr(inference, "run", noted)
    return call


def accountant(relation):
    return dpb.PrivacyAccountant(EPSILON, DELTA, neighboring=relation)


def squared_mu_of(history, relation):
    """Σ (sensitivity / z)² of Gaussian events; the accountant's sensitivity is 1, or 2."""
    unit = 1 if relation == "add_or_remove_one" else 4
    return sum(
        charge.count * unit / event.noise_multiplier**2
        for charge in history
        for event in getattr(charge.event, "events", [charge.event])
    )


def squared_mu_of_budget(relation):
    factor = 1 if relation == "add_or_remove_one" else 4
    return factor / total_multiplier(accountant(relation), None, None) ** 2


def squared_mu_of_run(transcript, relation):
    """By the sensitivities of the documentation; of categories for two arguments and floats."""
    is_swap = relation == "replace_one"
    found = sum((4 if is_swap else 1) / r.noise_std**2 for r in transcript.scores)
    found += 1.0 / transcript.clipped[1] ** 2
    for moments in transcript.moments:
        found += (4 if is_swap else 1) / moments.total_std**2
        found += (2 if is_swap else 1) / moments.products_std**2
    if transcript.categories is not None:
        found += (10 if is_swap else 5) / transcript.categories.std**2
    return found


def is_noise_of(release, exact, std, atol=1e-2):
    """Rows are shortened by what rounding may add."""
    apart = release - exact
    torch.testing.assert_close(apart, torch.full_like(apart, std), rtol=0, atol=atol)


def check_moments(releases, x):
    for moments in releases:
        own = (x - moments.centre) @ moments.whitening.T
        own = own / own.norm(dim=1, keepdim=True).clamp_min(1.0)
        is_noise_of(moments.total, own.sum(0), moments.total_std)
        is_noise_of(
            (moments.products - own.T @ own).diagonal(),
            torch.zeros(x.shape[1]),
            moments.products_std,
        )


def model(x, g, h, y):
    coins(weights("a", 3)[g] + x @ weights("w", 2) + torch.tensor([0.0, 1.0])[h], y)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_run_charges_the_noise_of_all_of_its_releases(relation, drawn, transcript_of):
    x, g, h = torch.randn(N, 2), torch.randint(3, (N,)), torch.randint(2, (N,))
    y = torch.randint(2, (N,)).double()
    spent = accountant(relation)
    options = {"accountant": spent, "num_data": N, "num_simulated": 500}
    found = transcript_of(posterior, model, x, g, h, y, **options)
    short = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    check_moments(found.moments, short)
    # a release of scores, by a mechanism of its own, of rows that are shortened by hand
    rows = short, g, h, y
    marks = torch.cat([one_hot(g, 3), one_hot(h, 2)], 1).double()
    sums, std = found.categories.sums, found.categories.std
    is_noise_of(sums, torch.cat([marks.sum(0)[:, None], marks.T @ rows[0]], 1), std)
    is_noise_of(found.categories.combinations, torch.bincount(2 * g + h, minlength=6), std)
    records = records_of(model, *rows, count_is_public=relation == "replace_one")
    own = Mechanism(records, feature_shape(records, 1.0, {}), {}, N, 1)
    for release in found.scores:
        is_noise_of(
            release.value, own.clipped_sum(release.theta, release.whitening), release.noise_std
        )
    count = own.clipped_count(found.scores[-1], 0.0)
    assert found.clipped[0] - found.clipped[1] == pytest.approx(count, abs=1.01)
    assert sorted(drawn) == sorted(3 * [2, 4] + [15, 6, 1, 1] + 7 * [5])
    expected = pytest.approx(squared_mu_of_budget(relation), rel=1e-6)
    assert squared_mu_of_run(found, relation) == expected
    assert squared_mu_of(spent.history, relation) == expected


MODULE = {"likelihood": "categorical", "prior_std": 1.0, "num_simulated": 500}
LARGE = MODULE | {"num_releases": 5}
LINEAR = LinearRegression(dist.LogNormal(torch.zeros(()).double(), 1.0), 1.0, 0.5)
LAYER = torch.nn.Linear(3, 3).double()
# the door, what it takes before features, and the bound of these
DOORS = {
    "module": (posterior_for_module, LAYER, MODULE | SHORT, 1.0),
    "large module": (posterior_for_module, LAYER, LARGE, 1.0),
    "linear regression": (sufficient_statistics, LINEAR, {}, 0.5),
}


@pytest.mark.parametrize("name", DOORS)
def test_doors_charge_the_noise_of_their_releases(name, drawn, transcript_of, monkeypatch):
    door, model, options, bound = DOORS[name]
    is_large, relation = name == "large module", "replace_one"
    if is_large:
        monkeypatch.setattr(inference, "SMALLEST", 0)
        monkeypatch.setattr(last_layer, "_KEPT", 4)
    monkeypatch.setattr(inference, "_SIMULATED", 500)
    x, y = torch.randn(N, 3) / 2, torch.randint(3, (N,))
    y = y.double() if name == "linear regression" else y
    spent = accountant(relation)
    found = transcript_of(door, model, x, y, accountant=spent, **options)
    short = x / (x.norm(dim=1, keepdim=True) / bound).clamp_min(1.0)
    check_moments(found.moments, short / bound)
    assert len(found.scores) == options.get("num_releases", 7)
    if is_large:
        # at W = 0 the scores of a class are those of frequencies, and add up to 0
        gap = found.scores[0].value - found.scores[0].noise_std
        torch.testing.assert_close(gap.sum(0), torch.zeros_like(gap[0]), rtol=0, atol=1e-8)
        count = found.clipped[0] - found.clipped[1]
        assert count == pytest.approx(round(count), abs=1e-6)
        assert len(drawn) == 3 * 2 + 5 + 1
    expected = pytest.approx(squared_mu_of_budget(relation), rel=1e-6)
    assert squared_mu_of_run(found, relation) == expected
    assert squared_mu_of(spent.history, relation) == expected


FAMILIES = {
    "Bernoulli": (beta_bernoulli(), torch.tensor([0.0, 1.0, 1.0]), lambda x: x[:, None] - 0.5, 0.5),
    "Poisson": (
        gamma_poisson(1.0, 1.0, 8.0),
        torch.tensor([0.0, 3.0, 20.0]),
        lambda x: x.clamp(0, 8)[:, None] - 4,
        4.0,
    ),
    "categorical": (
        dirichlet_categorical([1.0, 1.0, 1.0]),
        torch.tensor([0, 2, 2]),
        lambda x: one_hot(x, 3) - 1 / 3,
        math.sqrt(2 / 3),
    ),
}


@pytest.mark.parametrize(("name", "relation"), [*zip(FAMILIES, [*RELATIONS, RELATIONS[0]])])
def test_sufficient_statistics_charge_their_noise(name, relation, drawn):
    (family, x, statistics, bound), spent = FAMILIES[name], accountant(relation)
    released = sufficient_statistics(family, x, accountant=spent, num_data=3).transcript
    noise = released - statistics(x).double().sum(0) / bound
    std = float(noise[0])
    assert noise.tolist() == pytest.approx([std] * len(noise), rel=1e-6)
    mu = (1.0 if relation == "add_or_remove_one" else 2.0) / std
    assert mu**2 == pytest.approx(squared_mu_of(spent.history, relation), rel=1e-6)
    assert mu**2 == pytest.approx(squared_mu_of_budget(relation), rel=1e-6)


DOORS_OF_ANY_KIND = {
    "posterior": lambda x, y, own: posterior(dpb.ops.GLM(), x, y, accountant=own),
    "large module": lambda x, y, own: posterior_for_module(
        LAYER, x, y.long(), accountant=own, likelihood="categorical", prior_std=1.0
    ),
    "sufficient_statistics": lambda x, y, own: sufficient_statistics(
        beta_bernoulli(), y, accountant=own
    ),
    "covariance": lambda x, y, own: covariance(x, accountant=own),
}


@pytest.mark.parametrize("name", DOORS_OF_ANY_KIND)
def test_nothing_is_drawn_where_the_charge_is_refused(name, drawn, monkeypatch):
    """Another thread may have spent the budget since it was looked at."""
    monkeypatch.setattr(inference, "SMALLEST", 0 if name == "large module" else 50)
    own = accountant("replace_one")

    def refuse(*args, **kwargs):
        raise dpb.PrivacyBudgetExceeded("no")

    monkeypatch.setattr(own, "compose", refuse)
    x, y = torch.randn(N, 3) / 2, torch.randint(2, (N,)).double()
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        DOORS_OF_ANY_KIND[name](x, y, own)
    assert not drawn


# -- one noisy second-moment matrix ----------------------------------------------------------------


def exact(x, bound):
    """The sum of the second moments of records that are shortened, one at a time."""
    total = torch.zeros(x.shape[-1], x.shape[-1])
    for record in x.split(1):
        record = record.reshape(-1, x.shape[-1])
        moments = record.T @ record
        total += moments * min(1.0, bound**2 / float(moments.trace()))
    return total


@pytest.mark.parametrize("shape", [(50, 4), (50, 3, 4)])
def test_a_covariance_is_the_sum_of_shortened_second_moments(shape):
    x = torch.randn(shape) * torch.tensor([2.0, 1.0, 1.0, 0.1])
    options = {"noise_multiplier": 1e-9, "max_feature_norm": 1.7}
    found = covariance(x, accountant=dpb.PrivacyAccountant(), **options)
    torch.testing.assert_close(found.matrix, exact(x, 1.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_covariance_charges_its_noise(relation):
    """Of 300 releases of nothing: variances of the diagonal (zR²)², off it half of it, by
    chi-square; it fails in fewer than one run in 10⁶. A replaced record moves a sum of positive
    semi-definite matrices by √2 of the bound.
    """
    spent, draws = dpb.PrivacyAccountant(neighboring=relation), []
    for _ in range(300):
        options = {"accountant": spent, "noise_multiplier": 5.0, "max_feature_norm": 2.0}
        found = covariance(torch.zeros(2, 3), **options)
        assert found.noise_std == 20.0
        draws.append(found.matrix)
    draws = torch.stack(draws)
    of_diagonal = draws.diagonal(dim1=1, dim2=2).square().sum() / 400.0
    off = draws[:, [0, 0, 1], [1, 2, 2]].square().sum() / 200.0
    for statistic in (of_diagonal, off):
        assert abs(float(statistic) - 900) < 5 * math.sqrt(2 * 900)
    mu = (1.0 if relation == "add_or_remove_one" else math.sqrt(2)) / 5.0
    assert squared_mu_of(spent.history, relation) == pytest.approx(300 * mu**2, rel=1e-9)


def test_the_whitening_is_its_inverse_root():
    matrix = torch.diag(torch.tensor([9.0, 1.0, 0.04]))
    found = NoisyCovariance(matrix, 0.01).whitening(floor=0.0)
    wanted = (matrix.diagonal() + 0.01 * math.sqrt(6)).rsqrt()
    torch.testing.assert_close(found, torch.diag(wanted / wanted.max()).float())
    floored = NoisyCovariance(matrix, 0.01).whitening(floor=0.3).diagonal()
    assert float(floored[0] / floored[2]) == pytest.approx(
        math.sqrt((0.04 + 0.3 * 10.04 / 3) / (9 + 0.3 * 10.04 / 3)), rel=1e-5
    )


HOSTILE = {
    "infinite": [math.inf] * 4,
    "not a number": [math.nan, 1.0, 1.0, 1.0],
    "huge": [1e300] * 4,
    "tiny": [1.5e-162] * 4,
    "one feature": [1e9, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.parametrize("bound", [1e-300, 0.5, 1e200])
def test_no_record_moves_the_moments_by_more_than_its_bound(record, bound):
    others = torch.randn(5, 3, 4)
    without = _second_moments(others, bound)
    hostile = torch.tensor([[HOSTILE[record]] * 3])
    moved = _second_moments(torch.cat([others, hostile]), bound) - without
    assert float(torch.linalg.matrix_norm(moved)) <= 1 + 1e-9
    assert bool(without.isfinite().all())


def test_both_triangles_have_the_same_noise():
    """Rounding makes sums unsymmetric: a difference of the triangles would tell of records."""
    exact = torch.randn(4, 4)
    released = with_symmetric_noise(exact, 1e-3)
    assert torch.equal(released, released.T)
