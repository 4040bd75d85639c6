"""Before the charge, an error from the model, shapes, types and arguments; after it none, whatever
the records are.
"""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from support.vmap_rule import Centred
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.errors import ArgumentError, ArgumentTypeError, UnfitModel
from torch_dpbayes.noise_aware import (
    beta_bernoulli,
    covariance,
    dirichlet_categorical,
    gamma_poisson,
    inference,
    posterior,
    posterior_for_module,
    records,
    sufficient_statistics,
)
from torch_dpbayes.noise_aware.models import LastLayer

DOUBLE = torch.float64
ZERO, ONE = torch.zeros((), dtype=DOUBLE), torch.ones((), dtype=DOUBLE)
N = 60
COUNTS_MATTER = True


def data(n=N):
    return torch.randn(n, 2, dtype=DOUBLE) / 2, torch.randint(2, (n,)).double()


def logistic(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def unsampled(y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)):
        pyro.sample("y", Unsampled(m, 1.0), obs=y)


def factor(y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)):
        pyro.factor("f", -((y - m) ** 2) / 2)


def derived(y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y.exp() + 1)


def weighted(y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)), pyro.poutine.scale(scale=2.0):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


def grouped(g, y):
    a = pyro.sample("a", dist.Normal(torch.zeros(3, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[g].sum(-1) if g.dim() > 1 else a[g], 1.0), obs=y)


def crossed(g, h, y):
    a = pyro.sample("a", dist.Normal(torch.zeros(6, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[2 * g + h], 1.0), obs=y)


def masked(y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)), pyro.poutine.mask(mask=~y.isnan()):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


def of_groups(x, g, h, y):
    a = pyro.sample("a", dist.Normal(torch.zeros(3, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[g] + a[h] * x[:, 0], 1.0), obs=y)


def with_number(k, y):
    m = pyro.sample("m", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m * abs(k), 1.0), obs=y)


def two_kinds(x, g, y):
    w = pyro.sample("w", dist.Normal(ZERO, ONE))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w * x * g, 1.0), obs=y)


class Unsampled(dist.Normal):
    def sample(self, sample_shape=()):
        raise NotImplementedError

    rsample = sample


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))


def frozen_bias():
    layer = nn.Linear(2, 3).double()
    layer.bias.requires_grad_(False)
    return layer


def trainable_body():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()


class WithARule(nn.Module):
    def forward(self, x):
        return Centred.apply(x)


def prior_of_m():
    return pyro.sample("m", dist.Normal(ZERO, ONE))


def family(statistics):
    def log_partition(e):
        return (e**2).sum() / 2

    return dpb.noise_aware.ExponentialFamily(
        prior_of_m, statistics, lambda v: v["m"][None], log_partition, 1.0
    )


def random_sign(y):
    return torch.where(torch.rand(()) < 0.5, -y, y)[None]


X, Y = data()
WITHOUT_A_NUMBER = replace(family(lambda y: y[None]), log_normalizer=torch.square)
LABELS = torch.randint(3, (N,))
NET, SOFTMAX = nn.Linear(2, 1).double(), nn.Linear(2, 3).double()


def refused(kind, call, *args, **options):
    return call, args, options, kind


def of_logistic(kind, **options):
    return posterior, (logistic, X, Y), options, kind


def of_layer(kind, module, x, y, likelihood="bernoulli", prior_std=1.0):
    options = {"likelihood": likelihood, "prior_std": prior_std}
    return posterior_for_module, (module, x, y), options, kind


def of_large_layer(kind, module, x, y, **options):
    call, args, fixed, _ = of_layer(kind, module, x, y, "categorical")
    return call, args, fixed | options, kind


def of_wide_layer(kind, size, y):
    return of_layer(kind, nn.Linear(501, size), torch.zeros(N, 501), y, "normal")


REFUSED = {
    "improper GLM": refused(ArgumentError, posterior, dpb.ops.GLM(prior_std=math.inf), X, Y),
    "no sample": refused(UnfitModel, posterior, unsampled, Y),
    "factor": refused(UnfitModel, posterior, factor, Y),
    "derived": refused(UnfitModel, posterior, derived, Y),
    "weighted records": refused(UnfitModel, posterior, weighted, Y),
    "missing values": refused(UnfitModel, posterior, masked, Y),
    "values that depend on others": refused(UnfitModel, posterior, crossed, LABELS, LABELS % 2, Y),
    "matrix of categories": refused(UnfitModel, posterior, grouped, torch.randint(3, (N, 2)), Y),
    "whole numbers": refused(UnfitModel, posterior, with_number, torch.randint(9, (N,)), Y),
    "complex": refused(UnfitModel, posterior, with_number, X[:, 0] * 1j, Y),
    "no records": refused(UnfitModel, posterior, logistic, X[:0], Y[:0]),
    "Softmax labels": refused(ArgumentError, posterior, dpb.ops.Softmax(3), X, Y),
    "num_data": of_logistic(ArgumentError, num_data=7),
    "releases": of_logistic(ArgumentError, num_releases=0),
    "many releases": of_logistic(ArgumentError, num_releases=10**6),
    "simulated": of_logistic(ArgumentError, num_simulated=0),
    "public name": of_logistic(ArgumentError, public="z"),
    "public target": of_logistic(ArgumentError, public="y"),
    "public type": of_logistic(ArgumentTypeError, public=1.5),
    "public NaN": refused(ArgumentError, posterior, logistic, X * math.nan, Y, public="x"),
    "public rows that may be more": of_logistic(
        ArgumentError, public="x", num_data=N, accountant=dpb.PrivacyAccountant(1.0, 1e-5)
    ),
    "public in part": refused(ArgumentError, posterior, two_kinds, Y, LABELS, Y, public=("x",)),
    "one sample of two": refused(ArgumentError, posterior, two_kinds, Y, LABELS, Y, covariates=Y),
    "sample shape": of_logistic(ArgumentError, covariates=X[:, :1]),
    "no sample rows": of_logistic(ArgumentError, covariates=X[:0]),
    "sample type": of_logistic(ArgumentTypeError, covariates="x"),
    "clip bound": of_logistic(ArgumentError, max_grad_norm=-1),
    "norm": of_logistic(ArgumentError, max_feature_norm=0.0),
    "column": of_logistic(ArgumentError, constant_columns=[5]),
    "column type": of_logistic(ArgumentError, constant_columns=1),
    "all constant": of_logistic(UnfitModel, constant_columns=[0, 1]),
    "family": refused(ArgumentTypeError, sufficient_statistics, logistic, X, Y),
    "lengths": refused(UnfitModel, sufficient_statistics, beta_bernoulli(), Y, Y[:3]),
    "statistics of rows": refused(UnfitModel, sufficient_statistics, beta_bernoulli(), X),
    "statistics of whole batches": refused(
        UnfitModel, sufficient_statistics, family(lambda y: Centred.apply(y[None])), Y
    ),
    "a vector for A": refused(RuntimeError, sufficient_statistics, WITHOUT_A_NUMBER, Y),
    "random statistics": refused(UnfitModel, sufficient_statistics, family(random_sign), Y),
    "features of whole batches": of_layer(UnfitModel, nn.Sequential(WithARule(), NET), X, Y),
    "no module": of_layer(ArgumentTypeError, 3, X, Y),
    "likelihood": of_layer(ArgumentError, NET, X, Y, "poisson"),
    "outputs": of_layer(UnfitModel, SOFTMAX, X, Y, "bernoulli"),
    "prior_std": of_layer(ArgumentError, NET, X, Y, prior_std=math.inf),
    "whole inputs": of_layer(UnfitModel, NET, X.long(), Y),
    "targets": of_layer(UnfitModel, NET, X, Y[:5]),
    "two layers": of_layer(UnfitModel, trainable_body(), X, Y),
    "layer not last": of_layer(UnfitModel, nn.Sequential(NET, nn.Sigmoid()), X, Y),
    "option of a large layer": of_large_layer(ArgumentError, SOFTMAX, X, LABELS, public=[0]),
    "frozen bias": of_large_layer(UnfitModel, frozen_bias(), X, LABELS),
    "a scale of its own": of_large_layer(UnfitModel, Scaled(2, 3), X, LABELS),
    "size": of_large_layer(UnfitModel, nn.Linear(801, 100), torch.zeros(2, 801), LABELS[:2]),
    "width": of_large_layer(UnfitModel, nn.Linear(2001, 2), torch.zeros(2, 2001), LABELS[:2]),
    "float labels": of_large_layer(ArgumentTypeError, SOFTMAX, X, Y),
    "mean and log variance": of_wide_layer(UnfitModel, 2, Y),
    "a column of targets": of_wide_layer(ArgumentError, 1, Y[:, None]),
    "fewer columns of targets": of_wide_layer(ArgumentError, 3, X),
    "one target": of_wide_layer(ArgumentError, 1, Y[0]),
    "complex targets": of_wide_layer(ArgumentTypeError, 1, Y + 1j),
    "fewer labels": of_large_layer(ArgumentError, SOFTMAX, X, LABELS[1:]),
    "norm of features": of_large_layer(ArgumentError, SOFTMAX, X, LABELS, max_feature_norm=-1.0),
    "releases of a layer": of_large_layer(ArgumentError, SOFTMAX, X, LABELS, num_releases=51),
    "vector": refused(ArgumentError, covariance, Y),
    "no accountant": refused(ArgumentTypeError, covariance, X, accountant="mine"),
    "no columns": refused(ArgumentError, covariance, X[:, :0]),
    "whole features": refused(ArgumentTypeError, covariance, X.long()),
    "no noise": refused(ArgumentError, covariance, X, noise_multiplier=0.0),
    "noise NaN": refused(ArgumentError, covariance, X, noise_multiplier=math.nan),
    "norm is true": refused(ArgumentError, covariance, X, max_feature_norm=True),
    "square is infinite": refused(ArgumentError, covariance, X, max_feature_norm=1e200),
    "square is zero": refused(ArgumentError, covariance, X, max_feature_norm=1e-200),
}


@pytest.mark.usefixtures("recorded_once")
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_the_charge(name, monkeypatch):
    call, args, options, kind = REFUSED[name]
    if options.get("likelihood") == "categorical":  # as a large layer
        monkeypatch.setattr(inference, "LARGEST_DIMENSION", 0)
        monkeypatch.setattr(inference, "SMALLEST", 0)
    monkeypatch.setattr(records, "_MOST_CATEGORIES", 50)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    with pytest.raises(kind) as caught:
        call(*args, **({"accountant": accountant} | options))
    assert type(caught.value) is kind and not len(accountant)


BUDGETS = {
    "none": {},
    "half": {"epsilon": 1.0},
    "negative": {"epsilon": -1.0, "delta": 1e-5},
    "delta": {"epsilon": 1.0, "delta": 2.0},
    "without budget": {"accountant": dpb.PrivacyAccountant(neighboring="replace_one")},
    "private count": {"accountant": dpb.PrivacyAccountant(1.0, 1e-5)},
    "another type": {"accountant": 3},
    "above the accountant's": {
        "accountant": dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one"),
        "epsilon": 2.0,
    },
}
OTHER_KINDS = {
    "another type": ArgumentTypeError,
    "above the accountant's": dpb.PrivacyBudgetExceeded,
}


@pytest.mark.usefixtures("recorded_once")
@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_are_checked(name):
    with pytest.raises(OTHER_KINDS.get(name, ArgumentError)):
        posterior(logistic, X, Y, **BUDGETS[name])
    assert name == "another type" or not len(BUDGETS[name].get("accountant", ()))


def test_families_check_their_numbers():
    for make in (
        lambda: beta_bernoulli(0.0, 1.0),
        lambda: gamma_poisson(1.0, 1.0, 2.5),
        lambda: dirichlet_categorical([1.0]),
    ):
        with pytest.raises(ArgumentError):
            make()


def first(tensor, *values):
    moved = tensor.clone()
    for number, value in enumerate(values):
        moved[number] = value
    return moved


# of records: nothing raises, and draws are finite
RECORDS = {
    "some rows": (
        logistic,
        first(X, math.inf, 1e300, 0.0, 1.0),
        first(Y, 0.0, 1.0, 2.0, math.nan),
    ),
    "rows of no such group": (
        of_groups,
        first(X, math.nan),
        first(LABELS, 7),
        first(LABELS, -1),
        Y,
    ),
    "one row of a group": (of_groups, X[:1], LABELS[:1], LABELS[:1], Y[:1]),
}
SHORT = {"num_simulated": 500, "num_releases": 2}


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("name", RECORDS)
def test_no_record_raises(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = posterior(*RECORDS[name], epsilon=1.0, delta=1e-5, **SHORT)
    assert all(bool(value.isfinite().all()) for value in found.sample(100).values())


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("count", [0, 2])
def test_under_add_or_remove_no_number_of_records_raises(count):
    """Two rows of two columns are told from pairs by no error, either."""
    accountant = dpb.PrivacyAccountant(1.0, 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = posterior(logistic, *data(count), accountant=accountant, num_data=50, **SHORT)
    assert bool(found.mean["w"].isfinite().all()) and len(accountant)


@pytest.mark.parametrize("shape", [(0, 3), (0, 2, 3)])
def test_a_covariance_of_no_records_is_no_error(shape):
    accountant = dpb.PrivacyAccountant(8.0, 1e-5)
    found = covariance(torch.empty(shape), accountant=accountant)
    assert found.matrix.shape == (3, 3) and len(accountant) == 1


def test_a_network_takes_no_records():
    """A convolution cannot be mapped over none of them."""
    body = [torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten()]
    net = torch.nn.Sequential(*body, torch.nn.Linear(4, 2))
    net[0].requires_grad_(False)
    found = LastLayer(net, "categorical", 1.0).features(torch.empty(0, 1, 4))
    assert found.shape == (0, 4)


@pytest.mark.chance(0.03, looks=4)
@pytest.mark.usefixtures("few_draws")
def test_a_budget_that_is_too_small_gives_the_prior_and_says_so():
    """One run in a hundred does not say it, and of few draws some more."""
    with pytest.warns(UserWarning, match="budget is too small") as told:
        found = posterior(logistic, X, Y, epsilon=1e-6, delta=1e-5, **SHORT)
    assert told[0].filename == __file__
    # of 200 draws, four standard errors
    assert found.stddev["w"].tolist() == pytest.approx([1.0, 1.0], abs=0.2)
    assert found.mean["w"].tolist() == pytest.approx([0.0, 0.0], abs=0.28)
