"""Before the charge, an error from the model, shapes, types and arguments; after it none, whatever
the records are.
"""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from small_models import BUDGET, SHORT, coins, linear, logistic
from support.pyro_models import gaussian, weights
from support.vmap_rule import Centred
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.errors import ArgumentError, ArgumentTypeError, UnfitModel
from torch_dpbayes.noise_aware import (
    LinearRegression,
    beta_bernoulli,
    covariance,
    dirichlet_categorical,
    gamma_poisson,
    inference,
    latents,
    posterior,
    posterior_for_module,
    records,
    sufficient_statistics,
)
from torch_dpbayes.noise_aware.models import LastLayer

pytestmark = pytest.mark.usefixtures("double")
N = 60
COUNTS_MATTER = True


def data(n=N):
    return torch.randn(n, 2).double() / 2, torch.randint(2, (n,)).double()


class Unsampled(dist.Normal):
    def sample(self, sample_shape=()):
        raise NotImplementedError

    rsample = sample


def observed(mean, y):
    pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))


def frozen_bias():
    layer = nn.Linear(2, 3).double()
    layer.bias.requires_grad_(False)
    return layer


class WithARule(nn.Module):
    def forward(self, x):
        return Centred.apply(x)


def family(statistics):
    def log_partition(e):
        return (e**2).sum() / 2

    return dpb.noise_aware.ExponentialFamily(
        lambda: weights("m"), statistics, lambda v: v["m"][None], log_partition, 1.0
    )


def random_sign(y):
    return torch.where(torch.rand(()) < 0.5, -y, y)[None]


X, Y = data()
WITHOUT_A_NUMBER = replace(family(lambda y: y[None]), log_normalizer=torch.square)
BRANCHING = replace(
    family(lambda y: y[None]),
    natural_parameters=lambda v: v["m"][None] if v["m"] > 9 else -v["m"][None],
)
LABELS = torch.randint(3, (N,))
REGRESSION = LinearRegression(dist.HalfNormal(torch.ones((), dtype=torch.float64)), 1.0, 1e7)
NET, SOFTMAX = nn.Linear(2, 1).double(), nn.Linear(2, 3).double()


def with_number(k, y):
    gaussian(y, weights("m") * abs(k))


def with_exposure(x, y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate * x), obs=y)


def two_kinds(x, g, y):
    gaussian(y, weights("w") * x * g)


def crossed(g, h, k, y):  # fails at the largest three, which no simulation may draw
    each = [weights(name, 2)[own // 20] for name, own in zip("abc", (g, h, k), strict=True)]
    gaussian(y, each[0] * each[1] * each[2] * weights("last", 1)[g * h * k // 39**3])


def of_several(g, y):
    gaussian(y, weights("a", 3)[g].sum(-1))


def call(door, *args, **options):
    return door, args, options


def of_logistic(**options):
    return posterior, (logistic, X, Y), options


def of_layer(module, x, y, likelihood="bernoulli", prior_std=1.0, **options):
    settings = {"likelihood": likelihood, "prior_std": prior_std}
    return posterior_for_module, (module, x, y), settings | options


def of_large_layer(module, x, y, **options):
    return of_layer(module, x, y, "categorical", **options)


def of_covariance(**options):
    return covariance, (X,), options


def of_site(site):
    def model(y):
        m = weights("m")
        with pyro.plate("data", len(y)):
            site(m, y)

    return posterior, (model, Y), {}


def held(*budget, neighboring="replace_one"):
    return PrivacyAccountant(*budget, neighboring=neighboring)


UNFIT = {
    "no sample": of_site(lambda m, y: pyro.sample("y", Unsampled(m, 1.0), obs=y)),
    "factor": of_site(lambda m, y: pyro.factor("f", -((y - m) ** 2) / 2)),
    "derived": of_site(lambda m, y: observed(m, y.exp() + 1)),
    "weighted records": of_site(lambda m, y: poutine.scale(observed, 2.0)(m, y)),
    "missing values": of_site(lambda m, y: poutine.mask(observed, ~y.isnan())(m, y)),
    "values that depend on others": call(posterior, crossed, *[LABELS] * 3, Y),
    "matrix of categories": call(posterior, of_several, torch.randint(3, (N, 2)), Y),
    "whole numbers": call(posterior, with_number, torch.randint(9, (N,)), Y),
    "complex": call(posterior, with_number, X[:, 0] * 1j, Y),
    "rates below 0": call(posterior, with_exposure, Y + 1, Y),
    "no records": call(posterior, logistic, X[:0], Y[:0]),
    "all constant": of_logistic(constant_columns=[0, 1]),
    "lengths": call(sufficient_statistics, beta_bernoulli(), Y, Y[:3]),
    "statistics of rows": call(sufficient_statistics, beta_bernoulli(), X),
    "statistics of whole batches": call(
        sufficient_statistics, family(lambda y: Centred.apply(y[None])), Y
    ),
    "random statistics": call(sufficient_statistics, family(random_sign), Y),
    "features of whole batches": of_layer(nn.Sequential(WithARule(), NET), X, Y),
    "outputs": of_layer(SOFTMAX, X, Y, "bernoulli"),
    "whole inputs": of_layer(NET, X.long(), Y),
    "targets": of_layer(NET, X, Y[:5]),
    "two layers": of_layer(nn.Sequential(nn.Linear(2, 2).double(), NET), X, Y),
    "layer not last": of_layer(nn.Sequential(NET, nn.Sigmoid()), X, Y),
    "frozen bias": of_large_layer(frozen_bias(), X, LABELS),
    "a scale of its own": of_large_layer(Scaled(2, 3), X, LABELS),
    "size": of_large_layer(nn.Linear(801, 100), torch.zeros(2, 801), LABELS[:2]),
    "width": of_large_layer(nn.Linear(2001, 2), torch.zeros(2, 2001), LABELS[:2]),
}
BAD_VALUES = {
    "improper GLM": call(posterior, dpb.ops.GLM(prior_std=math.inf), X, Y),
    "Softmax labels": call(posterior, dpb.ops.Softmax(3), X, Y),
    "num_data": of_logistic(num_data=7),
    "releases": of_logistic(num_releases=0),
    "many releases": of_logistic(num_releases=10**6),
    "simulated": of_logistic(num_simulated=0),
    "public name": of_logistic(public="z"),
    "public target": of_logistic(public="y"),
    "public NaN": call(posterior, logistic, X * math.nan, Y, public="x"),
    "public rows that may be more": of_logistic(
        public="x", num_data=N, accountant=PrivacyAccountant(1.0, 1e-5)
    ),
    "public in part": call(posterior, two_kinds, Y, LABELS, Y, public=("x",)),
    "one sample of two": call(posterior, two_kinds, Y, LABELS, Y, covariates=Y),
    "sample shape": of_logistic(covariates=X[:, :1]),
    "no sample rows": of_logistic(covariates=X[:0]),
    "clip bound": of_logistic(max_grad_norm=-1),
    "norm": of_logistic(max_feature_norm=0.0),
    "column": of_logistic(constant_columns=[5]),
    "no list of columns": of_logistic(constant_columns=1),
    "likelihood": of_layer(NET, X, Y, "poisson"),
    "prior_std": of_layer(NET, X, Y, prior_std=math.inf),
    "option of a large layer": of_layer(
        nn.Linear(501, 2), torch.zeros(N, 501), LABELS, "categorical", public=[0]
    ),
    "more parameters than a regression may have": of_layer(
        nn.Linear(501, 1).double(), torch.zeros(N, 501).double(), Y, "normal"
    ),
    "fewer labels": of_large_layer(SOFTMAX, X, LABELS[1:]),
    "norm of features": of_large_layer(SOFTMAX, X, LABELS, max_feature_norm=-1.0),
    "releases of a layer": of_large_layer(SOFTMAX, X, LABELS, num_releases=51),
    "vector": call(covariance, Y),
    "no columns": call(covariance, X[:, :0]),
    "no noise": of_covariance(noise_multiplier=0.0),
    "noise NaN": of_covariance(noise_multiplier=math.nan),
    "norm is true": of_covariance(max_feature_norm=True),
    "square is infinite": of_covariance(max_feature_norm=1e200),
    "square is zero": of_covariance(max_feature_norm=1e-200),
    "no budget": of_logistic(accountant=None),
    "half a budget": of_logistic(accountant=None, epsilon=1.0),
    "negative epsilon": of_logistic(accountant=None, epsilon=-1.0, delta=1e-5),
    "large delta": of_logistic(accountant=None, epsilon=1.0, delta=2.0),
    "accountant without a budget": of_logistic(accountant=held()),
    "private count": of_logistic(accountant=PrivacyAccountant(1.0, 1e-5)),
}
BAD_TYPES = {
    "public type": of_logistic(public=1.5),
    "sample type": of_logistic(covariates="x"),
    "family": call(sufficient_statistics, logistic, X, Y),
    "no module": of_layer(3, X, Y),
    "float labels": of_large_layer(SOFTMAX, X, Y),
    "no accountant": of_logistic(accountant=3),
    "no accountant of a covariance": of_covariance(accountant="mine"),
    "whole features": call(covariance, X.long()),
}
REFUSED = {
    UnfitModel: UNFIT,
    ArgumentError: BAD_VALUES,
    ArgumentTypeError: BAD_TYPES,
    RuntimeError: {
        "a vector for A": call(sufficient_statistics, WITHOUT_A_NUMBER, Y),
        "one at a time": call(sufficient_statistics, BRANCHING, Y),
    },
    dpb.PrivacyBudgetExceeded: {
        "above the accountant's": of_logistic(accountant=held(1.0, 1e-5), epsilon=2.0)
    },
}


@pytest.mark.usefixtures("recorded_once")
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in REFUSED.items() for name in cases]
)
def test_bad_arguments_are_refused_before_the_charge(kind, name, monkeypatch):
    door, args, options = REFUSED[kind][name]
    if options.get("likelihood") == "categorical":  # as a large layer
        monkeypatch.setattr(inference, "SMALLEST", 0)
    monkeypatch.setattr(records, "_MOST_CATEGORIES", 50)
    monkeypatch.setattr(latents, "_DRAWS", 10)
    monkeypatch.setattr(inference, "_FEW", 64)  # one graph is recorded then, not two
    options = {"accountant": held(1.0, 1e-5)} | options
    with pytest.raises(kind) as caught:
        door(*args, **options)
    assert type(caught.value) is kind
    assert kind is ArgumentTypeError or not len(options["accountant"] or ())


def test_families_check_their_numbers():
    for make, numbers in (
        (beta_bernoulli, (0.0, 1.0)),
        (gamma_poisson, (1.0, 1.0, 2.5)),
        (dirichlet_categorical, ([1.0],)),
    ):
        with pytest.raises(ArgumentError):
            make(*numbers)


def of_groups(x, g, h, y):
    a = weights("a", 3)
    coins(a[g] + a[h] * x[:, 0], y)


def first(tensor, *values):
    moved = tensor.clone()
    moved[: len(values)] = torch.tensor(values)
    return moved


ODD = first(X, [math.inf] * 2, [1e300] * 2, [0.0] * 2, [1.0] * 2)
ODD_Y = first(Y, 0.0, 1.0, 2.0, math.nan)
STATED = {"num_data": 50}
# nothing raises, and draws are finite
RECORDS = {
    "some rows": (
        of_groups,
        (ODD, first(LABELS, 1, 2, 0, 1, 7), LABELS.index_fill(0, torch.tensor(5), -1), ODD_Y),
        BUDGET,
    ),
    "one row of a group": (of_groups, (X[:1], LABELS[:1], LABELS[:1], Y[:1]), BUDGET),
    # two rows of two columns are told from pairs by no error, either
    "no rows, of a private number": (logistic, data(0), STATED),
    "two rows, of a private number": (logistic, data(2), STATED),
}


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_record_raises(name):
    model, args, options = RECORDS[name]
    if options is STATED:
        options = STATED | {"accountant": PrivacyAccountant(1.0, 1e-5)}
    found = posterior(model, *args, **options, **SHORT)
    assert all(bool(value.isfinite().all()) for value in found.sample(100).values())
    assert options is BUDGET or len(options["accountant"])


@pytest.mark.parametrize("shape", [(0, 3), (0, 2, 3)])
def test_a_covariance_of_no_records_is_no_error(shape):
    accountant = PrivacyAccountant(8.0, 1e-5)
    found = covariance(torch.empty(shape), accountant=accountant)
    assert found.matrix.shape == (3, 3) and len(accountant) == 1


def test_a_network_takes_no_records():
    """A convolution cannot be mapped over none of them."""
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2))
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


LONG = {"max_feature_norm": 1e7}
SAID = {
    "use epsilon, delta": [
        of_large_layer(SOFTMAX, X, LABELS, num_draws=3),
        call(dpb.noise_aware.plan, logistic, X, Y, max_grad_norm=1),
    ],
    "leave out max_grad_norm=": [
        of_large_layer(nn.Linear(300, 2), torch.zeros(2, 300), LABELS[:2], max_grad_norm=1.0)
    ],
    "divide them by a public constant": [of_logistic(covariates=X * 1e7)],
    "pass the norm that most rows have": [
        call(posterior, dpb.ops.GLM(**LONG), X, Y),
        of_layer(NET, X, Y, **LONG),
        of_logistic(**LONG),
        of_logistic(**LONG, constant_columns=[0]),
        call(sufficient_statistics, REGRESSION, X, Y),
        of_large_layer(nn.Linear(2, 20).double(), X, LABELS, **LONG),
    ],
}


@pytest.mark.parametrize(
    ("advice", "k"), [(said, k) for said in SAID for k in range(len(SAID[said]))]
)
def test_a_refusal_says_what_to_write(advice, k):
    door, args, options = SAID[advice][k]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=advice):
        door(*args, **options | {"accountant": held(1.0, 1e-5)})


@pytest.mark.usefixtures("few_draws")
def test_a_large_norm_is_no_error_if_rows_are_public():
    glm = dpb.ops.GLM(max_feature_norm=1e7)
    assert (
        posterior(glm, X, Y, public="features", **BUDGET, **SHORT).mean["weights"].isfinite().all()
    )


@pytest.mark.parametrize(("norm", "spread"), [(1.0, 1.0), (100.0, 100.0)])
def test_a_usual_log_ratio_under_the_prior_grows_with_the_rows(norm, spread):
    """R·s/σ for a linear model: with rows of norm R·√.9. Scores that are not linear in the rows,
    as for a known deviation of each record, are no reason for a refusal.
    """

    def of(model, *rows):
        own = inference.Setup(model, (*rows, Y), **BUDGET, max_feature_norm=norm)
        start = own.latents.median
        return own._spread(start, own.assumed_law().rows(500, 0))

    def with_intercept(x, y):
        gaussian(y, x @ weights("w", 2) + weights("b"))

    def with_deviations(x, e, y):
        observed_with(x @ weights("w", 2), e, y)

    def observed_with(mean, std, y):
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, std.abs()), obs=y)

    assert of(linear, X) == pytest.approx(spread, rel=0.35)
    assert of(with_intercept, X) == pytest.approx(spread, rel=0.35)
    assert of(with_deviations, X, X[:, 0]) == 0.0
