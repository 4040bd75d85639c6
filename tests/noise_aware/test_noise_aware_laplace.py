"""The posterior of ``noise_aware.laplace`` from one end of ε to the other, and what it refuses."""

import math
import pickle
import re
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from scipy.stats import kstest
from support.pyro_models import singular_where_made_up, with_and_without_a_record_that_fails

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.noise_aware import laplace, laplace_for_module, planning
from torch_dpbayes.noise_aware.posterior import NoiseAwarePosterior, told_and_surprise
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.sampling import Chains
from torch_dpbayes.ops import GLM

DOUBLE = torch.float64


def logistic_data(count=4000, dimension=3):
    x = torch.randn(count, dimension, dtype=DOUBLE)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    theta = torch.tensor([1.0, -0.5, 0.3], dtype=DOUBLE)[:dimension]
    return x, (torch.rand(count, dtype=DOUBLE) < (x @ theta).sigmoid()).double()


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def posterior_of_the_data(x, y, prior_std=1.0):
    """Mode and covariance by Newton's method; at thousands of records that is the posterior
    to a per mille.
    """
    w = torch.zeros(x.shape[1], dtype=DOUBLE)
    own = prior_std**-2
    for _ in range(50):
        mean = (x @ w).sigmoid()
        precision = (x.T * (mean * (1 - mean))) @ x + own * torch.eye(len(w), dtype=DOUBLE)
        step = torch.linalg.solve(precision, x.T @ (mean - y) + own * w)
        w = w - step / step.norm().clamp_min(1.0)
    return w, torch.linalg.inv(precision).diagonal().sqrt()


BCE = partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="none")


def linear_module():
    return torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False, dtype=DOUBLE), torch.nn.Flatten(0))


WAYS = {
    "glm": lambda x, y, **how: laplace(GLM(), x, y, **how).mean["weights"],
    "pyro": lambda x, y, **how: laplace(model, x, y, max_grad_norm=1.0, **how).mean["w"],
    "module": (
        lambda x, y, **how: laplace_for_module(
            linear_module(), x, y, loss=BCE, prior_std=1.0, max_grad_norm=1.0, **how
        ).mean["0.weight"][0]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_with_a_huge_budget_the_mean_is_that_of_the_data(way):
    x, y = logistic_data()
    expected, stddev = posterior_of_the_data(x, y)
    found = WAYS[way](x, y, epsilon=500.0, delta=1e-5)
    assert bool(((found - expected).abs() < 0.2 * stddev).all())


def test_with_a_huge_budget_draws_are_those_of_the_datas_posterior():
    x, y = logistic_data()
    expected, stddev = posterior_of_the_data(x, y)
    post = laplace(GLM(), x, y, epsilon=500.0, delta=1e-5)
    torch.testing.assert_close(post.stddev["weights"], stddev, rtol=0.05, atol=0.0)
    draws = post.sample(4000)["weights"]
    assert draws.shape == (4000, 3)
    assert bool(((draws.mean(0) - expected).abs() < 0.3 * stddev).all())


def test_a_budget_too_small_returns_the_prior_and_says_so():
    x, y = logistic_data(200)
    with pytest.warns(UserWarning, match="budget is too small"):
        post = laplace(GLM(prior_std=2.0), x, y, epsilon=0.01, delta=1e-5)
    torch.testing.assert_close(
        post.stddev["weights"], torch.full((3,), 2.0, dtype=DOUBLE), rtol=0.15, atol=0.0
    )


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("way", ["glm", "sufficient_statistics", "diagonal", "pyro"])
def test_a_run_on_what_an_earlier_one_left_says_so(way):
    x, y = logistic_data(50)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")

    def run():
        if way == "sufficient_statistics":
            beta = dpb.noise_aware.beta_bernoulli()
            return dpb.noise_aware.sufficient_statistics(beta, y, accountant=accountant)
        how = {"curvature": "diagonal"} if way == "diagonal" else {}
        if way == "pyro":
            return laplace(model, x, y, accountant=accountant, max_grad_norm=1.0)
        return laplace(dpb.ops.GLM(), x, y, accountant=accountant, **how)

    accountant.compose(GaussianDpEvent(7.4651))
    assert 0.999 < accountant.get_epsilon() < 1.0
    with pytest.warns(UserWarning, match="too small for these records") as found:
        run()
    said = [str(w.message) for w in found if "too small" in str(w.message)]
    assert all("held epsilon = 0.99" in line and "State epsilon=" in line for line in said)
    assert not any("More records" in line for line in said)


@pytest.mark.parametrize("epsilon", [None, 0.5])
def test_a_run_with_nothing_left_is_refused(epsilon):
    x, y = logistic_data(50)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    accountant.compose(GaussianDpEvent(7.4651))
    least = GaussianDpEvent(1e7)
    accountant.compose(least, accountant.remaining(least))
    before = len(accountant)
    with pytest.raises(ValueError, match=r"nothing is left for this run.*State epsilon= in each"):
        laplace(dpb.ops.GLM(), x, y, accountant=accountant, epsilon=epsilon)
    assert len(accountant) == before


def test_a_run_on_most_of_a_budget_blames_the_records():
    x, y = logistic_data(30)
    accountant = dpb.PrivacyAccountant(0.1, 1e-5, neighboring="replace_one")
    accountant.compose(GaussianDpEvent(1e4))
    with pytest.warns(UserWarning, match="More records or a larger epsilon"):
        laplace(dpb.ops.GLM(), x, y, accountant=accountant)


@pytest.mark.thorough
def test_draws_are_what_pyros_predictive_and_arviz_take():
    x, y = logistic_data()
    accountant = dpb.PrivacyAccountant(2.0, 1e-5)
    post = laplace(model, x, y, accountant=accountant, max_grad_norm=1.0, num_data=4000)
    assert isinstance(post, NoiseAwarePosterior)
    predicted = Predictive(model, posterior_samples=post.sample(50))(x[:7])["y"]
    assert predicted.shape == (50, 7)
    assert post.to_arviz(20).posterior["w"].shape == (1, 20, 3)
    assert "epsilon = 1.9" in post.guarantee() or "epsilon = 2" in post.guarantee()
    assert "ASSUMED" in post.guarantee()
    further = {"w": post.mean["w"] + 3 * post.stddev["w"]}
    assert post.log_density(post.mean) > post.log_density(further) + 3


@pytest.mark.parametrize("radius", [1.0, 3.0])
@pytest.mark.parametrize("curvature", ["full", "diagonal"])
def test_gradients_of_a_logistic_regression_are_clipped_where_noise_counts_for_more(
    radius, curvature
):
    x, y = torch.randn(2000, 2), torch.randint(2, (2000,))
    for times, expected in ((1.01, radius / 2), (0.99, radius)):
        multiplier = times * 2000 / (500 * 2)
        one = dpb.PrivacyAccountant(neighboring="replace_one")
        one.compose(GaussianDpEvent(multiplier))
        epsilon = one.get_epsilon(1e-5)
        glm = GLM(max_feature_norm=radius)
        post = laplace(glm, x, y, epsilon=epsilon, delta=1e-5, curvature=curvature)
        assert f"moves a gradient sum by at most {expected:g}, a curv" in post.guarantee()
        assert planning.logistic_bound(multiplier, 2, 2000, radius) == expected


def test_latents_with_a_support_come_back_in_it():
    def counts(y):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0, dtype=DOUBLE), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    y = torch.poisson(torch.full((3000,), 1.7, dtype=DOUBLE))
    post = laplace(counts, y, epsilon=100.0, delta=1e-5, max_grad_norm=5.0)
    shape, rate = 2 + float(y.sum()), 1 + len(y)  # the conjugate posterior
    assert abs(float(post.mean["rate"]) - shape / rate) < 0.5 * math.sqrt(shape) / rate
    assert float(post.stddev["rate"]) == pytest.approx(math.sqrt(shape) / rate, rel=0.15)
    inside = post.log_density({"rate": torch.tensor(1.7, dtype=DOUBLE)}) - post.log_density(
        {"rate": torch.tensor(1.75, dtype=DOUBLE)}
    )
    gamma = dist.Gamma(torch.tensor(shape, dtype=DOUBLE), rate)
    assert inside == pytest.approx(
        float(gamma.log_prob(torch.tensor(1.7)) - gamma.log_prob(torch.tensor(1.75))), abs=1.0
    )


@pytest.mark.parametrize("count", [1, 2])
def test_next_to_no_records(count):
    x, y = logistic_data(count)
    with pytest.warns(UserWarning, match="budget is too small"):
        stddev = laplace(GLM(), x, y, epsilon=0.1, delta=1e-5).stddev["weights"]
    assert bool(stddev.isfinite().all())


def test_no_records_at_all():
    x, y = logistic_data(1)
    accountant = dpb.PrivacyAccountant(0.1, 1e-5)
    with pytest.warns(UserWarning, match="budget is too small"):
        post = laplace(GLM(), x[:0], y[:0], accountant=accountant, num_data=100)
    assert bool(post.stddev["weights"].isfinite().all())


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("way", WAYS)
def test_under_add_or_remove_no_records_are_like_any_number(way):
    x, y = logistic_data(1)
    accountant = dpb.PrivacyAccountant(0.1, 1e-5, neighboring="add_or_remove_one")
    mean = WAYS[way](x[:0], y[:0], accountant=accountant, num_data=100)
    assert bool(mean.isfinite().all())


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("kind", ["separable", "constant column", "same rows", "not numbers"])
def test_awkward_records_raise_nothing_and_give_finite_draws(kind):
    x, y = logistic_data()
    if kind == "separable":
        y = (x[:, 0] > 0).double()
    elif kind == "constant column":
        x[:, 1] = 0.0
    elif kind == "same rows":
        x[:] = x[0]
    else:
        x[::2] = math.nan
        y[1::3] = math.inf
    post = laplace(GLM(prior_std=3.0), x, y, epsilon=1.0, delta=1e-5)
    draws = post.sample(100)["weights"]
    assert bool(draws.isfinite().all())


def test_large_weights_have_the_width_of_the_data():
    """Nearly all targets are certain; the budget is one that noise does not show beside."""
    x = torch.randn(10_000, 3, dtype=DOUBLE)
    x = x / x.norm(dim=1, keepdim=True)
    y = torch.rand(10_000, dtype=DOUBLE) < (x @ torch.tensor([20.0, -10.0, 5.0]).double()).sigmoid()
    mean, stddev = posterior_of_the_data(x, y.double(), 10.0)
    with pytest.warns(UserWarning, match="linear predictors have a standard deviation of about"):
        post = laplace(GLM(prior_std=10.0), x, y.double(), epsilon=1000.0, delta=1e-5)
    assert "  LARGE       " in post.guarantee()
    torch.testing.assert_close(post.stddev["weights"], stddev, rtol=0.35, atol=0.0)
    assert bool(((post.mean["weights"] - mean).abs() < 4 * stddev).all())


def test_weights_of_ordinary_size_are_not_called_large():
    post = laplace(GLM(), *logistic_data(), epsilon=1.0, delta=1e-5)
    assert "LARGE" not in post.guarantee()


def test_records_that_can_be_separated_are_named():
    """There is no finite estimate: the prior alone holds the weights."""
    x, _ = logistic_data(10_000)
    x = x / x.norm(dim=1, keepdim=True)
    with pytest.warns(UserWarning, match="a smaller prior_std holds the weights"):
        laplace(GLM(prior_std=10.0), x, (x[:, 0] > 0).double(), epsilon=1.0, delta=1e-5)


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("bound", [math.inf, math.nan, 0.0, -1.0, 1e-40, "1"])
def test_a_clip_bound_that_is_none_is_refused_before_anything_is_charged(bound):
    x, y = logistic_data(50)
    for family in ({"family": "gaussian", "noise_std": 1.0}, {}):
        accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
        with pytest.raises((ValueError, TypeError), match="max_grad_norm"):
            laplace(GLM(**family), x, y, accountant=accountant, max_grad_norm=bound)
        assert len(accountant) == 0


def test_an_accountant_that_is_none_is_refused():
    with pytest.raises(TypeError, match="accountant must be a PrivacyAccountant, got 'ledger'"):
        laplace(GLM(), *logistic_data(50), accountant="ledger")


def test_a_posterior_of_a_glm_outlasts_a_pickle():
    post = laplace(GLM(), *logistic_data(500), epsilon=1.0, delta=1e-5)
    again = pickle.loads(pickle.dumps(post))
    assert again.guarantee() == post.guarantee()
    values = {"weights": torch.ones(3, dtype=DOUBLE)}
    assert again.log_density(values) == post.log_density(values)


@pytest.mark.thorough
def test_where_no_gradients_can_be_computed_is_decided_without_the_records():
    for data in with_and_without_a_record_that_fails():
        accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
        with pytest.raises(ValueError, match="cannot be evaluated at the median"):
            laplace(singular_where_made_up, data, max_grad_norm=1.0, accountant=accountant)
        assert len(accountant) == 0


def test_what_is_refused_before_anything_is_charged():
    x, y = logistic_data(50)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5)
    replace = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match="state num_data"):
        laplace(GLM(), x, y, accountant=accountant)
    with pytest.raises(ValueError, match="num_data = 49"):
        laplace(GLM(), x, y, accountant=replace, num_data=49)
    with pytest.raises(ValueError, match="improper"):
        laplace(GLM(prior_std=math.inf), x, y, accountant=replace)
    with pytest.raises(ValueError, match="state max_grad_norm"):
        laplace(GLM("poisson", max_count=5.0), x, y, accountant=replace)
    with pytest.raises(ValueError, match="state max_grad_norm"):
        laplace(model, x, y, accountant=replace)
    with pytest.raises(ValueError, match="last layer"):
        laplace_for_module(
            torch.nn.Linear(100, 100),
            x,
            y,
            loss=BCE,
            prior_std=1.0,
            max_grad_norm=1.0,
            accountant=replace,
        )
    with pytest.raises(TypeError, match="laplace_for_module"):
        laplace(torch.nn.Linear(3, 1), x, y, accountant=replace, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="budget"):
        laplace(GLM(), x, y)
    with pytest.raises(TypeError, match="features and targets"):
        laplace(GLM(), x, accountant=replace)
    assert len(accountant) == len(replace) == 0


def test_large_curvatures_are_refused_before_they_are_allocated():
    x, y = torch.zeros(2, 200_000), torch.zeros(2)
    with pytest.raises(ValueError, match="diagonal"):
        laplace(GLM(), x, y, epsilon=1.0, delta=1e-5)


def test_frozen_layers_take_no_part():
    x, y = logistic_data()
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 40, dtype=DOUBLE),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 1, dtype=DOUBLE),
        torch.nn.Flatten(0),
    )
    net[0].requires_grad_(False)
    post = laplace_for_module(
        net, x, y, loss=BCE, prior_std=0.5, max_grad_norm=6.0, epsilon=3.0, delta=1e-5
    )
    assert set(post.mean) == {"2.weight", "2.bias"}
    assert post.sample(3)["2.weight"].shape == (3, 1, 40)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("is_training", [True, False])
def test_frozen_batch_norm_keeps_its_statistics(is_training):
    x, y = logistic_data()
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(3, dtype=DOUBLE),
        torch.nn.Linear(3, 1, dtype=DOUBLE),
        torch.nn.Flatten(0),
    ).train(is_training)
    net[0].requires_grad_(False).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    post = laplace_for_module(
        net, x, y, loss=BCE, prior_std=0.5, max_grad_norm=2.0, epsilon=3.0, delta=1e-5
    )
    assert set(post.mean) == {"1.weight", "1.bias"}
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(ValueError, match="BatchNorm"):
        net.requires_grad_(True).train()
        laplace_for_module(
            net, x, y, loss=BCE, prior_std=0.5, max_grad_norm=2.0, epsilon=3.0, delta=1e-5
        )


@pytest.mark.thorough
def test_many_weights_under_a_wide_prior_do_not_start_a_chain_of_hours():
    x = torch.randn(500, 80, dtype=DOUBLE)
    post = laplace(
        GLM(prior_std=3.0),
        x / x.norm(dim=1, keepdim=True),
        (x[:, 0] > 0).double(),
        epsilon=3.0,
        delta=1e-5,
    )
    assert post.method in ("importance", "gaussian")
    assert bool(post.sample(10)["weights"].isfinite().all())
    assert "Gaussian" in post.guarantee() or "importance" in post.guarantee()


def normal(x):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def test_a_run_arrives_from_three_prior_standard_deviations_away():
    """Far from the mode, gradients about zero instead of their mean would pass for curvature."""
    x = torch.randn(2000, 2, dtype=DOUBLE) + torch.tensor([3.0, 0.0])
    post = laplace(normal, x, epsilon=5.0, delta=1e-5, max_grad_norm=4.0)  # warnings are errors
    error = (post.mean["mean"] - x.sum(0) / 2001) * 2001**0.5  # in posterior standard deviations
    assert float(error.abs().max()) < 5.0  # .2 are usual, and were 20


def test_no_records():
    with pytest.warns(UserWarning, match="budget is too small"):
        post = laplace(
            GLM(), torch.zeros(0, 3, dtype=DOUBLE), torch.zeros(0), epsilon=1, delta=1e-5
        )
    assert float(post.stddev["weights"].min()) > 0.9
    with pytest.raises(ValueError, match="there are no records"):
        laplace(normal, torch.zeros(0, 2), epsilon=1.0, delta=1e-5, max_grad_norm=4.0)


@pytest.mark.thorough
def test_a_record_under_large_noise_leaves_the_prior():
    """A curvature that is nothing but noise must not pass for one that makes the record sure: its
    mean eigenvalue is at most C²/2, and the noise on the gradients has a deviation of 38.
    """
    for _ in range(4):
        x = torch.randn(1, 2, dtype=DOUBLE)
        with pytest.warns(UserWarning, match="budget is too small"):
            post = laplace(normal, x, epsilon=1.0, delta=1e-5, max_grad_norm=4.0)
        assert float(post.stddev["mean"].min()) > 0.9  # .4 to .8, taken for a Gaussian curvature


@pytest.mark.thorough
def test_a_dear_curvature_of_a_linear_model_leaves_the_prior_too():
    for _ in range(4):
        x, y = logistic_data(200)
        with pytest.warns(UserWarning, match="budget is too small"):
            post = laplace(GLM(prior_std=4.0), x, y, epsilon=0.01, delta=1e-5)
        assert float(post.stddev["weights"].min()) > 0.9 * 4


def test_a_run_that_has_arrived_says_so():
    x, y = logistic_data()
    assert "the last releases agree" in laplace(GLM(), x, y, epsilon=8.0, delta=1e-5).guarantee()


def test_a_run_that_has_not_arrived_says_so(monkeypatch):
    """Counts that are far from where the run starts, and two steps to get there."""
    monkeypatch.setattr(planning, "_STEPS", 2)
    x = torch.randn(20_000, 2, dtype=DOUBLE)
    x = x / x.norm(dim=1, keepdim=True)
    y = torch.poisson((x @ torch.tensor([2.0, -2.0], dtype=DOUBLE)).exp())
    glm = GLM("poisson", prior_std=5.0, max_count=300.0)
    with pytest.warns(UserWarning, match="has not arrived"):
        post = laplace(glm, x, y, max_grad_norm=20.0, epsilon=8.0, delta=1e-5)
    assert "NOT REACHED" in post.guarantee()


def test_how_likely_releases_are_under_the_prior_is_uniform_where_they_are_of_it():
    """And near 0 for parameters far outside of it, however unlike the directions are."""
    prior = GaussianPrior(torch.randn(5, dtype=DOUBLE), torch.rand(5, dtype=DOUBLE) + 0.3)
    root = torch.randn(5, 5, dtype=DOUBLE)
    precision = root @ torch.diag(torch.logspace(-3, 3, 5, dtype=DOUBLE)) @ root.T
    precision = precision + 1e-9 * torch.eye(5, dtype=DOUBLE)
    error = torch.linalg.inv(torch.linalg.cholesky(precision)).T

    def found(theta):
        best = theta + error @ torch.randn(5, dtype=DOUBLE)
        return told_and_surprise(precision, precision @ best, prior)

    spread = prior.precision.rsqrt()
    both = [found(prior.mean + spread * torch.randn(5, dtype=DOUBLE)) for _ in range(400)]
    assert {told for told, _ in both} <= {1, 2, 3, 4, 5}
    assert kstest([chance for _, chance in both], "uniform").pvalue > 1e-6


def test_a_prior_that_the_records_contradict_is_named():
    x, _ = logistic_data(20_000)
    weights = torch.tensor([3.0, -2.0, 1.0], dtype=DOUBLE)
    y = (torch.rand(len(x), dtype=DOUBLE) < (x @ weights).sigmoid()).double()
    said = [
        laplace(GLM(prior_std=std), x, y, epsilon=8.0, delta=1e-5).guarantee() for std in (0.2, 3.0)
    ]
    assert all("of 3 directions the releases tell 3 better" in one for one in said)
    assert ["the releases contradict the prior" in one for one in said] == [True, False]


# -- hierarchical models -----------------------------------------------------------------------


def groups(group, y=None):
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), dtype=DOUBLE)))
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
    with pyro.plate("groups", 6):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)


def grouped_data(count=4000):
    group = torch.randint(0, 6, (count,))
    effect = torch.linspace(-1.5, 1.0, 6, dtype=DOUBLE)
    return group, torch.bernoulli(effect[group].sigmoid())


def test_without_a_budget_a_hierarchical_posterior_is_its_prior():
    """Of the scale, into whose narrow part candidates around a mode do not come, and of the mean;
    draws of 64 chains are autocorrelated, and one in eight is taken.
    """
    post = laplace(groups, *grouped_data(200), epsilon=1e-3, delta=1e-5, max_grad_norm=1.0)
    assert post.method == "hamiltonian"
    draws = post.sample(1000)
    assert kstest(draws["scale"][::8], "halfnorm").pvalue > 1e-6
    assert kstest(draws["mean"][::8], "norm").pvalue > 1e-6
    ratio = (draws["effect"] - draws["mean"][:, None]) / draws["scale"][:, None]
    assert kstest(ratio[::8].flatten(), "norm").pvalue > 1e-6


def test_with_a_huge_budget_a_hierarchical_posterior_is_that_of_the_data():
    """Groups of some 660 records: their log odds, and their widths from the second derivative."""
    group, y = grouped_data()
    post = laplace(groups, group, y, epsilon=500.0, delta=1e-5, max_grad_norm=1.0)
    share = torch.stack([y[group == g].mean() for g in range(6)])
    count = torch.bincount(group, minlength=6)
    stddev = (count * share * (1 - share)).rsqrt()
    apart = (post.mean["effect"] - share.logit()) / stddev
    assert bool((apart.abs() < 0.5).all())  # the prior and the bend of the likelihood
    torch.testing.assert_close(post.stddev["effect"], stddev, rtol=0.2, atol=0.0)


def test_only_what_records_depend_on_is_released():
    post = laplace(groups, *grouped_data(), epsilon=5.0, delta=1e-5, max_grad_norm=1.0)
    assert all(len(g.value) == 6 for g in post.transcript.gradients)
    assert all(c.value.shape == (6, 6) for c in post.transcript.curvatures)
    assert "records tell 6 of 8 unconstrained coordinates" in post.guarantee()
    assert post.sample(10)["scale"].shape == (10,)


def test_chains_that_do_not_agree_are_told(monkeypatch):
    post = laplace(groups, *grouped_data(), epsilon=5.0, delta=1e-5, max_grad_norm=1.0)
    monkeypatch.setattr(Chains, "r_hat", property(lambda self: 2.0))
    with pytest.warns(UserWarning, match="do not agree \\(R-hat = 2.00\\)"):
        post.sample(10)


@pytest.mark.parametrize("given", [torch.nn.Linear, torch.relu, 3])
def test_a_module_is_an_instance_of_one(given):
    x = torch.randn(20, 3)
    with pytest.raises(TypeError, match=r"instance of a torch\.nn\.Module, as torch\.nn\.Linear"):
        laplace_for_module(
            given, x, x[:, 0], loss=BCE, prior_std=1.0, max_grad_norm=1.0, epsilon=1.0, delta=1e-5
        )


@pytest.mark.parametrize("kind", ["glm", "softmax", "pyro", "family"])
def test_log_density_says_which_values_it_takes(kind):
    x, budget = torch.randn(50, 3, dtype=DOUBLE), {"epsilon": 500.0, "delta": 1e-5}
    y = (x[:, 0] > 0).double()
    made = {
        "glm": lambda: laplace(GLM(), x, y, **budget),
        "softmax": lambda: laplace(dpb.ops.Softmax(2), x, y.long(), **budget),
        "pyro": lambda: laplace(model, x, y, max_grad_norm=5.0, **budget),
        "family": lambda: dpb.noise_aware.sufficient_statistics(
            dpb.noise_aware.dirichlet_categorical([1.0, 1.0]), y, **budget
        ),
    }
    post = made[kind]()
    draws = post.sample(5)
    one = {name: values[0] for name, values in draws.items()}
    name, shape = next((name, list(values.shape)) for name, values in one.items())
    expected = rf"one value of every site, .*{re.escape(f'{name} {shape}')}.*"
    with pytest.raises(ValueError, match=rf"{expected}; got .*{re.escape(f'{[5, *shape]}')}"):
        post.log_density(draws)
    with pytest.raises(ValueError, match=rf"{expected}; got w0 \[2\]\."):
        post.log_density({"w0": torch.zeros(2)})
    with pytest.raises(ValueError, match=rf"{expected}; got none\."):
        post.log_density({})
    assert math.isfinite(post.log_density({**one, "another": 1.0}))
