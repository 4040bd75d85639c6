"""One posterior sample of Pyro models."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from support.one_draw import RELATIONS
from support.profiles import stated
from support.pyro_models import singular_where_made_up, with_and_without_a_record_that_fails

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.ops.pyro_model import PyroModel

LEVEL = 1e-4  # of one look at a law


def line(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), 0.8).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def target_of(model, *data, **options):
    model = PyroModel(model)
    return model.target(model.prepare(data), **options)


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
    for rho in (0.3, 1.0):
        for clip in (0.5, math.inf):
            target = model.target(data, tempering=rho, max_grad_norm=clip)
            exact = -prior(w) - rho * terms(w).sum()
            slopes = torch.stack([torch.autograd.grad(terms(w)[i], w)[0] for i in range(9)])
            clipped = (slopes * (clip / slopes.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
            expected = -torch.autograd.grad(prior(w), w)[0] - rho * clipped
            assert torch.allclose(target.gradient(w.detach()), expected, rtol=1e-5, atol=1e-5)
            assert float(target.potential(w).detach()) == pytest.approx(
                float(exact.detach()), rel=1e-6
            )
            assert torch.allclose(
                torch.autograd.grad(target.potential(w), w)[0], expected, rtol=1e-5, atol=1e-5
            )
        low, high = terms(w).detach().quantile(torch.tensor([0.3, 0.7], dtype=w.dtype)).tolist()
        exact = -prior(w) - rho * terms(w).clamp(low, high).sum()
        value = model.target(data, tempering=rho, log_likelihood_range=(low, high)).potential(w)
        assert float(value.detach()) == pytest.approx(float(exact.detach()), rel=1e-6)
        (slope,), (expected,) = (torch.autograd.grad(u, w) for u in (value, exact))
        assert torch.allclose(slope, expected, rtol=1e-5, atol=1e-5)


def test_no_record_decides_whether_the_gradients_of_the_others_count():
    theta = torch.tensor([-30.0], dtype=torch.float64)
    gradients = []
    for data in with_and_without_a_record_that_fails():
        target = target_of(singular_where_made_up, data, tempering=1.0, max_grad_norm=1.0)
        point = theta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(target.potential(point), point)
        gradients.append((target.gradient(theta), slope))
    for first, second in zip(*gradients, strict=True):
        assert float((first - second).norm()) <= 2.0


def test_under_add_or_remove_any_number_of_records_up_to_the_stated_one_gives_a_draw():
    for count in (0, 4, 11):
        accountant = PrivacyAccountant(3.0, 1e-5, neighboring="add_or_remove_one")
        sampler = ops.OnePosteriorSample(line, asserted(), 1.0, 1e-5, accountant, num_data=10)
        x, y = torch.randn(count, 4, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
        if count <= 10:
            assert sampler.sample(x, y)["w"].isfinite().all()
            continue
        with pytest.raises(ValueError, match="upper bound"):
            sampler.sample(x, y)


# --- what is stated, against exact densities ------------------------------------------------------


@pytest.mark.parametrize(("neighboring", "bad"), [*zip(RELATIONS, (math.nan, 1e6))])
def test_exact_densities_of_a_constrained_model_never_exceed_the_stated_delta(neighboring, bad):
    """The scale of a Gaussian lives in (0, ∞); densities are compared in the space that the
    chain moves in.
    """
    grid = torch.linspace(-5, 5, 61, dtype=torch.float64)[:, None]
    certificate, setting = ops.Bounded((-3.0, 0.5)), Setting(0.7, None, neighboring)
    event = certificate.event(PyroModel(scale), setting)
    common = [0.3, -1.0, 2.0]
    first = torch.tensor([*common, 0.0], dtype=torch.float64)
    other = [*common, bad] if neighboring == "replace_one" else common
    densities = []
    for data in (first, torch.tensor(other, dtype=torch.float64)):
        model = PyroModel(scale)
        potential = certificate.density(model, model.prepare((data,)), setting).potential
        values = np.array([float(potential(theta)) for theta in grid])
        assert np.isfinite(values).all()
        weights = np.exp(values.min() - values)
        densities.append(weights / weights.sum())
    p, q = densities
    reached = 0.0
    for epsilon in (0.0, 0.2, 0.5, 1.0, 2.0):
        exact = max(np.clip(a - math.exp(epsilon) * b, 0, None).sum() for a, b in ((p, q), (q, p)))
        claimed = stated(event, epsilon)
        assert exact <= claimed + 1e-9
        reached = max(reached, exact / claimed if claimed > 1e-3 else 0)
    assert reached > 0.2


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
    columns, steps, h = 100, 3, 0.02
    y = torch.linspace(-60, 60, columns, dtype=torch.float64)
    lam, m = 1 / 0.8**2, 1 / 0.8**2 + 1 / 0.5**2
    certificate = ops.FiniteRunLangevin(
        steps=steps, step_size=h, lipschitz=1e6, strength=lam, smoothness=m
    )
    shrink = 1 - h * m
    # it starts with a draw from the prior
    variance = sum(2 * h * shrink ** (2 * i) for i in range(steps)) + shrink ** (2 * steps) * 0.8**2
    mean = (1 - shrink**steps) * y.numpy() / 0.5**2 / m
    standard = []
    for _ in range(3):
        draw = ops.OnePosteriorSample(line, certificate).sample(*one_target_a_weight(y))["w"]
        standard.append((draw.numpy() - mean) / math.sqrt(variance))
    assert stats.kstest(np.concatenate(standard), "norm").pvalue > LEVEL


def test_a_draw_is_in_the_users_space_and_charged_once():
    sampler = ops.OnePosteriorSample(scale, ops.Bounded(3.0, warmup_steps=3), 1.0, 1e-5)
    draw = sampler.sample(torch.randn(20, dtype=torch.float64))
    assert list(draw) == ["s"] and float(draw["s"]) > 0 and not draw["s"].requires_grad
    assert len(sampler.accountant) == 1 and sampler.accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded):
        sampler.sample(torch.randn(20, dtype=torch.float64))


CONCAVE = ops.StronglyLogConcave(lipschitz=1.0, strength=1.0, warmup_steps=3)


def test_constants_are_asserted_and_said_to_be():
    for certificate in (asserted(), CONCAVE):
        text = ops.OnePosteriorSample(line, certificate).guarantee()
        assert "ASSUMED     constants asserted by the caller" in text
    for certificate in (ops.FiniteRunLangevin(steps=5), ops.StronglyLogConcave()):
        with pytest.raises(dpb.errors.CertificateError):
            ops.OnePosteriorSample(line, certificate)


@pytest.mark.parametrize("certificate", [asserted(), CONCAVE], ids=["run", "concave"])
def test_constrained_latents_are_refused_where_constants_are_asserted(certificate):
    sampler = ops.OnePosteriorSample(scale, certificate)
    with pytest.raises(dpb.errors.CertificateError):
        sampler.sample(torch.randn(20, dtype=torch.float64))
    assert len(sampler.accountant) == 0
    draw = ops.OnePosteriorSample(line, certificate).sample(torch.randn(9, 2), torch.randn(9))
    assert draw["w"].shape == (2,)


def test_a_model_that_mixes_records_is_refused_before_the_charge():
    def centred(y):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m + y.mean(), 1.0), obs=y)

    sampler = ops.OnePosteriorSample(centred, ops.Bounded(1.0, warmup_steps=2))
    with pytest.raises(ValueError, match="log likelihood of a record changes"):
        sampler.sample(torch.randn(20))
    assert len(sampler.accountant) == 0


def test_no_data_stay_in_the_sampler():
    x, y = torch.randn(9, 2), torch.full((9,), 123456.0)
    sampler = ops.OnePosteriorSample(line, asserted())
    sampler.sample(x, y)
    seen, left = {}, [vars(sampler)]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            assert not (value == 123456.0).any() and value.data_ptr() != x.data_ptr()
        elif id(value) not in seen and not isinstance(value, type | type(math)):
            seen[id(value)] = value
            left += (
                value.values()
                if isinstance(value, dict)
                else getattr(value, "__dict__", {}).values()
            )
            left += value if isinstance(value, list | tuple | set) else ()


def test_no_value_of_a_record_raises_where_constants_are_asserted():
    for certificate in (asserted(steps=3), CONCAVE):
        x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
        y[2:6] = torch.tensor([math.nan, math.inf, -math.inf, 1e300])
        draw = ops.OnePosteriorSample(line, certificate).sample(x, y)["w"]
        assert torch.isfinite(draw).all()


def test_asserted_runs_clip_gradients_at_the_asserted_norm():
    """One step of 0.1 moves by 0.1 at most, besides a draw from the prior and noise; not by 1e5."""
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1,), 1e6, dtype=torch.float64)
    run = ops.FiniteRunLangevin(1, step_size=0.1, lipschitz=1.0, strength=1.0, smoothness=9.0)
    assert float(ops.OnePosteriorSample(line, run).sample(x, y)["w"].abs()) < 100
