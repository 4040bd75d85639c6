"""One posterior sample of Pyro models."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from support.profiles import excess_and_share
from support.pyro_models import singular_where_made_up, with_and_without_a_record_that_fails
from support.recorded import recorded_once

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.ops import pyro_model
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.ops.models import Limits
from torch_dpbayes.ops.pyro_model import PyroModel

LEVEL = 1e-4  # of one look at a law
_recorded = recorded_once(pyro_model)


def line(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), 0.8).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def scale(y):
    s = pyro.sample("s", dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.zeros(len(y), dtype=y.dtype), s), obs=y)


def asserted(**options):
    return ops.FiniteRunLangevin(
        **{"steps": 20, "lipschitz": 1.0, "strength": 1.0, "smoothness": 10.0, **options}
    )


# --- potentials against torch.distributions -------------------------------------------------------


def test_potential_and_gradient_of_a_pyro_model():
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    terms = lambda w: torch.distributions.Normal(x @ w, 0.5).log_prob(y)  # noqa: E731
    prior = lambda w: torch.distributions.Normal(0.0, 0.8).log_prob(w).sum()  # noqa: E731
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    model = PyroModel(line)
    data = model.prepare((x, y))

    def agree(target, exact, expected):
        at_start, value = target.potential(target.start), target.potential(w)
        moved = float((exact(w) - exact(target.start)).detach())
        assert float((value - at_start).detach()) == pytest.approx(moved, rel=1e-6, abs=1e-6)
        (slope,) = torch.autograd.grad(value, w)
        for found in (slope, target.gradient(w.detach())):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)

    slopes = torch.stack([torch.autograd.grad(terms(w)[i], w)[0] for i in range(9)])
    for rho, clip in ((0.3, 0.5), (1.0, math.inf)):
        clipped = (slopes * (clip / slopes.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
        expected = -torch.autograd.grad(prior(w), w)[0] - rho * clipped
        target = model.target(data, Limits(rho, clip))
        agree(target, lambda v, rho=rho: -prior(v) - rho * terms(v).sum(), expected)
    low, high = terms(w).detach().quantile(torch.tensor([0.3, 0.7], dtype=w.dtype)).tolist()
    exact = lambda v: -prior(v) - 0.3 * terms(v).clamp(low, high).sum()  # noqa: E731
    target = model.target(data, Limits(0.3, log_likelihood_range=(low, high)))
    agree(target, exact, torch.autograd.grad(exact(w), w)[0])


def median(y):
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Laplace(w, 1.0), obs=y)


@pytest.mark.parametrize("value", [1e10, 1e20, -1e300, math.inf, math.nan])
def test_a_record_as_large_as_it_likes_leaves_the_potential_the_digits_of_the_others(value):
    """Its log likelihood, -1e20 everywhere, has slopes of 1."""
    steps = []
    for y in (torch.tensor([1.0, 2.0, 2.5]), torch.tensor([1.0, 2.0, 2.5, value])):
        model = PyroModel(median)
        target = model.target(model.prepare((y.double(),)), Limits(1.0, lipschitz=1.0))
        here, there = (torch.tensor([w], dtype=torch.float64) for w in (0.0, 1.7))
        steps.append(float(target.potential(there) - target.potential(here)))
    assert abs(steps[1] - steps[0]) <= 1.7 + 1e-9


def test_no_record_decides_whether_the_gradients_of_the_others_count():
    theta = torch.tensor([-30.0], dtype=torch.float64)
    gradients = []
    for data in with_and_without_a_record_that_fails():
        model = PyroModel(singular_where_made_up)
        target = model.target(model.prepare((data,)), Limits(1.0, 1.0))
        point = theta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(target.potential(point), point)
        gradients.append((target.gradient(theta), slope))
    for first, second in zip(*gradients, strict=True):
        assert float((first - second).norm()) <= 2.0


def test_under_add_or_remove_any_number_of_records_up_to_the_stated_one_gives_a_draw():
    accountant = PrivacyAccountant(3.0, 1e-5, neighboring="add_or_remove_one")
    sampler = ops.OnePosteriorSample(line, asserted(), 1.0, 1e-5, accountant, num_data=10)
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    with pytest.raises(ValueError, match="upper bound"):
        sampler.sample(x, y)
    assert sampler.sample(x[:0], y[:0])["w"].isfinite().all()


# --- what is stated, against exact densities ------------------------------------------------------


def test_exact_densities_of_a_constrained_model_never_exceed_the_stated_delta():
    """The scale of a Gaussian lives in (0, ∞); densities are compared in the space that the
    chain moves in.
    """
    grid = torch.linspace(-5, 5, 25, dtype=torch.float64)[:, None]
    certificate, common = ops.Bounded((-3.0, 0.5)), [0.3, -1.0, 2.0]

    def law(records, neighboring):
        setting, model = Setting(0.7, None, neighboring), PyroModel(scale)
        data = model.prepare((torch.tensor(records, dtype=torch.float64),))
        potential = model.target(data, certificate.limits(setting)).potential
        values = np.array([float(potential(theta)) for theta in grid])
        assert np.isfinite(values).all()
        weights = np.exp(values.min() - values)
        return weights / weights.sum(), certificate.event(model, setting)

    p, _ = law([*common, 0.0], "replace_one")
    for records, neighboring in (
        (common, "add_or_remove_one"),
        ([*common, math.nan], "replace_one"),
    ):
        excess, share = excess_and_share(p, *law(records, neighboring))
        assert excess < 1e-9 and share > 0.2


# --- draws ----------------------------------------------------------------------------------------


def one_target_a_weight(targets):
    """Features and targets in which each weight has one target; and a record without features: as
    many records as features could be a matrix of pairs.
    """
    features = torch.eye(len(targets) + 1, len(targets), dtype=targets.dtype)
    return features, torch.cat([targets, torch.zeros(1, dtype=targets.dtype)])


@pytest.mark.slow
@pytest.mark.chance(LEVEL)
def test_draws_by_nuts_follow_the_tempered_posterior_of_a_pyro_model():
    columns = 100
    y = torch.linspace(-2, 2, columns, dtype=torch.float64)
    certificate = ops.Bounded((-200.0, 5.0), warmup_steps=60)
    accountant = PrivacyAccountant(neighboring="replace_one")
    half = accountant.compose(
        certificate.event(PyroModel(line), Setting(0.5, None, "replace_one"))
    ).get_epsilon(1e-5)
    sampler = ops.OnePosteriorSample(line, certificate, half, 1e-5)
    draw = sampler.sample(*one_target_a_weight(y))["w"].numpy()
    precision = 1 / 0.8**2 + sampler.tempering / 0.5**2
    standard = (draw - sampler.tempering * y.numpy() / 0.5**2 / precision) * math.sqrt(precision)
    assert sampler.tempering == pytest.approx(0.5, rel=1e-3)
    assert stats.kstest(standard, "norm").pvalue > LEVEL


@pytest.mark.chance(LEVEL)
def test_asserted_finite_runs_draw_from_the_chains_exact_law():
    """What is drawn is the run that was charged: its steps, their size, its start. So few steps
    towards targets so far away show one more of them, or longer ones.
    """
    columns, steps, h = 300, 3, 0.02
    y = torch.linspace(-60, 60, columns, dtype=torch.float64)
    lam, m = 1 / 0.8**2, 1 / 0.8**2 + 1 / 0.5**2
    constants = {"lipschitz": 1e6, "strength": lam, "smoothness": m}
    run = ops.FiniteRunLangevin(steps, step_size=h, **constants)
    draw = ops.OnePosteriorSample(line, run).sample(*one_target_a_weight(y))["w"]
    shrink = 1 - h * m
    # it starts with a draw from the prior
    variance = sum(2 * h * shrink ** (2 * i) for i in range(steps)) + shrink ** (2 * steps) * 0.8**2
    mean = (1 - shrink**steps) * y.numpy() / 0.5**2 / m
    assert stats.kstest((draw.numpy() - mean) / math.sqrt(variance), "norm").pvalue > LEVEL


def test_a_draw_is_in_the_users_space_and_charged_once():
    sampler = ops.OnePosteriorSample(scale, ops.Bounded(3.0, warmup_steps=3), 1.0, 1e-5)
    draw = sampler.sample(torch.randn(20, dtype=torch.float64))
    assert list(draw) == ["s"] and float(draw["s"]) > 0 and not draw["s"].requires_grad
    assert len(sampler.accountant) == 1 and sampler.accountant.get_epsilon() <= 1.0


CONCAVE = ops.StronglyLogConcave(lipschitz=1.0, strength=1.0, warmup_steps=3)


def test_constants_are_asserted_and_then_latents_have_to_be_unconstrained():
    for certificate in (ops.FiniteRunLangevin(steps=5), ops.StronglyLogConcave()):
        with pytest.raises(dpb.errors.CertificateError):
            ops.OnePosteriorSample(line, certificate)
    sampler = ops.OnePosteriorSample(scale, asserted())
    with pytest.raises(dpb.errors.CertificateError):
        sampler.sample(torch.randn(20, dtype=torch.float64))
    assert len(sampler.accountant) == 0


def tensors_in(sampler):
    """All that its attributes lead to."""
    seen, left = set(), [vars(sampler)]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and not isinstance(value, type | type(math)):
            seen.add(id(value))
            left += vars(value).values() if hasattr(value, "__dict__") else ()
            left += value.values() if isinstance(value, dict) else ()
            left += value if isinstance(value, list | tuple | set) else ()


@pytest.mark.parametrize("certificate", [asserted(step_size=0.1), CONCAVE], ids=["run", "concave"])
def test_no_value_of_a_record_raises_moves_an_asserted_run_far_or_stays(certificate):
    """A step of .1 moves by .1 for each of eight records at most, besides prior and noise."""
    x, y = torch.full((8, 2), 7.5, dtype=torch.float64), torch.full((8,), 1e6).double()
    y[2:6] = torch.tensor([math.nan, math.inf, -math.inf, 1e300])
    sampler = ops.OnePosteriorSample(line, certificate)
    draw = sampler.sample(x, y)["w"]
    assert torch.isfinite(draw).all()
    assert certificate is CONCAVE or float(draw.abs().max()) < 100
    for value in tensors_in(sampler):
        assert not (value == 7.5).any()
        assert value.untyped_storage().data_ptr() not in (x.data_ptr(), y.data_ptr())
