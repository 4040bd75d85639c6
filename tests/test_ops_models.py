"""Pyro models and torch modules under the certificates, and hybrid runs."""

import math
import threading
import time
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.ops.pyro_model import PyroModel, model_of_module

SIGNIFICANCE = 1e-6 / 20  # one in a million runs of this file fails by chance
RELATIONS = ("replace_one", "add_or_remove_one")


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
        for relative in (False, True):
            target = model.target(data, tempering=rho, max_grad_norm=math.inf)
            base = terms(target.start) if relative else 0.0
            exact = -prior(w) - rho * (terms(w) - base).clamp(-2.0, -0.1).sum()
            value = target.clipped_potential(w, -2.0, -0.1, relative)
            assert float(value.detach()) == pytest.approx(float(exact.detach()), rel=1e-6)
            assert torch.allclose(
                torch.autograd.grad(value, w)[0], torch.autograd.grad(exact, w)[0], rtol=1e-6
            )


def test_a_module_and_a_glm_of_the_same_model_agree():
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,)).float()
    net = nn.Linear(3, 1, bias=False)
    loss = lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(-1), y, reduction="none")  # noqa: E731
    module = target_of(model_of_module(net, loss, 0.7), x, y, tempering=0.4, max_grad_norm=math.inf)
    glm = ops.GLM(prior_std=0.7, max_feature_norm=100.0).target(
        (x, y), tempering=0.4, max_grad_norm=math.inf
    )
    zero = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        w = torch.randn(3, dtype=torch.float64)
        assert float(module.potential(w) - module.potential(zero)) == pytest.approx(
            float(glm.potential(w) - glm.potential(zero)), abs=1e-3
        )
        assert torch.allclose(module.gradient(w), glm.gradient(w), atol=1e-3)


# --- what is stated, against exact densities ------------------------------------------------------


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize(
    "certificate",
    [ops.Bounded((-3.0, 0.5)), ops.Bounded((-2.0, 0.0), temper="posterior")],
    ids=["likelihood", "posterior"],
)
def test_exact_densities_of_a_constrained_model_never_exceed_the_stated_delta(
    certificate, neighboring
):
    """The scale of a Gaussian lives in (0, ∞); densities are compared in the space that the
    chain moves in.
    """
    grid = torch.linspace(-5, 5, 61, dtype=torch.float64)[:, None]
    setting = Setting(0.7, None, neighboring)
    span = certificate.event(PyroModel(scale), setting).epsilon
    common = [0.3, -1.0, 2.0]
    reached = 0.0
    for bad in (math.nan, 1e6):
        first = torch.tensor([*common, 0.0], dtype=torch.float64)
        second = torch.tensor(
            [*common, bad] if neighboring == "replace_one" else common, dtype=torch.float64
        )
        densities = []
        for data in (first, second):
            model = PyroModel(scale)
            potential = certificate.density(model, model.prepare((data,)), setting).potential
            values = np.array([float(potential(theta)) for theta in grid])
            assert np.isfinite(values).all()
            weights = np.exp(values.min() - values)
            densities.append(weights / weights.sum())
        p, q = densities
        for epsilon in (0.0, 0.2, 0.5, 1.0, 2.0):
            exact = max(
                np.clip(a - math.exp(epsilon) * b, 0, None).sum() for a, b in ((p, q), (q, p))
            )
            stated = (1 - math.exp(-max(span - epsilon, 0) / 2)) ** 2 / (1 - math.exp(-span))
            assert exact <= stated + 1e-9
            reached = max(reached, exact / stated if stated > 1e-3 else 0)
    assert reached > 0.2


# --- draws ----------------------------------------------------------------------------------------


def test_asserted_finite_runs_draw_from_the_chains_exact_law():
    columns, steps, h = 100, 30, 0.1
    y = torch.linspace(-2, 2, columns, dtype=torch.float64)
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
        draw = ops.OnePosteriorSample(line, certificate).sample(
            torch.eye(columns, dtype=torch.float64), y
        )["w"]
        standard.append((draw.numpy() - mean) / math.sqrt(variance))
    assert stats.kstest(np.concatenate(standard), "norm").pvalue > SIGNIFICANCE


def test_draws_by_nuts_follow_the_tempered_posterior_of_a_pyro_model():
    columns = 100
    y = torch.linspace(-2, 2, columns, dtype=torch.float64)
    certificate = ops.Bounded((-200.0, 5.0), warmup_steps=60)
    accountant = PrivacyAccountant(neighboring="replace_one")
    half = accountant.compose(
        certificate.event(PyroModel(line), Setting(0.5, None, "replace_one"))
    ).get_epsilon(1e-5)
    sampler = ops.OnePosteriorSample(line, certificate, half, 1e-5)
    draw = sampler.sample(torch.eye(columns, dtype=torch.float64), y)["w"].numpy()
    precision = 1 / 0.8**2 + sampler.tempering / 0.5**2
    standard = (draw - sampler.tempering * y.numpy() / 0.5**2 / precision) * math.sqrt(precision)
    assert sampler.tempering == pytest.approx(0.5, rel=1e-3)
    assert stats.kstest(standard, "norm").pvalue > SIGNIFICANCE


def test_a_draw_is_in_the_users_space_and_charged_once():
    sampler = ops.OnePosteriorSample(scale, ops.Bounded(3.0, warmup_steps=3), 1.0, 1e-5)
    draw = sampler.sample(torch.randn(20, dtype=torch.float64))
    assert list(draw) == ["s"] and float(draw["s"]) > 0 and not draw["s"].requires_grad
    assert len(sampler.accountant) == 1 and sampler.accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded):
        sampler.sample(torch.randn(20, dtype=torch.float64))


def test_other_samplers_take_pyro_models_too():
    y = torch.randn(20, dtype=torch.float64)
    targets = ops.Bounded(3.0), ops.Bounded.from_lipschitz(1.0, 2.0), ops.Bounded(3.0)
    for chain, target in zip(
        (ops.Overdamped(3, 0.01), ops.Underdamped(3, 0.1), ops.NoseHoover(3, 0.01)), targets
    ):
        draw = ops.OnePosteriorSample(scale, ops.RenyiClose(target, chain, divergence=0.1)).sample(
            y
        )["s"]
        assert torch.isfinite(draw)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


cross_entropy = partial(F.cross_entropy, reduction="none")


def test_a_draw_of_a_module_goes_back_into_the_module():
    net = network()
    before = {name: p.clone() for name, p in net.named_parameters()}
    sampler = ops.OnePosteriorSample.for_module(
        net, ops.Bounded(3.0, warmup_steps=2), 1.0, 1e-5, loss=cross_entropy, prior_std=1.0
    )
    draw = sampler.sample(torch.randn(30, 3), torch.randint(0, 2, (30,)))
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    missing = net.load_state_dict(draw, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys
    assert "clipped into [-3, 0]" in sampler.guarantee()


def test_no_label_raises():
    """cross_entropy fails at a label outside its classes: such a record has to count as one
    at the end of the range.
    """
    x = torch.randn(10, 3)
    y = torch.randint(0, 2, (10,))
    y[4] = 7
    sampler = ops.OnePosteriorSample.for_module(
        network(), ops.Bounded(3.0, warmup_steps=2), loss=cross_entropy, prior_std=1.0
    )
    assert all(torch.isfinite(value).all() for value in sampler.sample(x, y).values())


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
            cross_entropy,
            "BatchNorm",
        ),
        (network(), F.cross_entropy, "one number a record"),
        (nn.Linear(3, 2).requires_grad_(False), cross_entropy, "frozen"),
    ],
)
def test_unfit_modules_are_refused_before_the_charge(net, loss, message):
    accountant = PrivacyAccountant(neighboring="replace_one")
    with pytest.raises(ValueError, match=message):
        ops.OnePosteriorSample.for_module(
            net, ops.Bounded(3.0, warmup_steps=2), accountant=accountant, loss=loss, prior_std=1.0
        ).sample(torch.randn(30, 3), torch.randint(0, 2, (30,)))
    assert len(accountant) == 0


def test_a_module_needs_its_own_front_door_and_proper_numbers():
    with pytest.raises(TypeError, match="for_module"):
        ops.OnePosteriorSample(network(), ops.Bounded(1.0))
    with pytest.raises(ValueError, match="prior_std"):
        ops.OnePosteriorSample.for_module(
            network(), ops.Bounded(1.0), loss=cross_entropy, prior_std=math.inf
        )


def test_constants_of_pyro_models_are_labelled_and_wanted():
    text = ops.OnePosteriorSample(line, asserted()).guarantee()
    assert (
        "ASSUMED     constants asserted by the caller, not checked" in text
        and "assumed     nothing" not in text
    )
    text = ops.OnePosteriorSample(
        line, ops.StronglyLogConcave(lipschitz=1.0, strength=2.0)
    ).guarantee()
    assert "neither checked nor enforced" in text and "the draw is exact" in text
    for certificate in (ops.FiniteRunLangevin(steps=5), ops.StronglyLogConcave()):
        with pytest.raises(ValueError, match="not a GLM"):
            ops.OnePosteriorSample(line, certificate)


@pytest.mark.parametrize(
    "certificate",
    [asserted(), ops.StronglyLogConcave(lipschitz=1.0, strength=1.0, warmup_steps=2)],
    ids=["run", "concave"],
)
def test_constrained_latents_are_refused_where_constants_are_asserted(certificate):
    sampler = ops.OnePosteriorSample(scale, certificate)
    with pytest.raises(ValueError, match="all of R"):
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


def test_the_size_of_the_data_is_checked_for_pyro_models_too():
    with pytest.raises(ValueError, match="upper bound"):
        ops.OnePosteriorSample(line, asserted(), accountant=PrivacyAccountant(), num_data=5).sample(
            torch.randn(9, 2), torch.randn(9)
        )


def test_no_data_stay_in_the_sampler():
    x, y = torch.randn(9, 2), torch.full((9,), 123456.0)
    sampler = ops.OnePosteriorSample(line, asserted())
    sampler.sample(x, y)

    def tensors(value, seen):
        if id(value) in seen or isinstance(value, torch.Tensor | type(math)):
            return [value] if isinstance(value, torch.Tensor) else []
        seen[id(value)] = value
        inner = (
            list(value.values())
            if isinstance(value, dict)
            else list(value)
            if isinstance(value, list | tuple | set)
            else []
        )
        if hasattr(value, "__dict__") and not isinstance(value, type):
            inner += list(vars(value).values())
        return [t for item in inner for t in tensors(item, seen)]

    assert not any(
        (t == 123456.0).any() or t.data_ptr() == x.data_ptr() for t in tensors(vars(sampler), {})
    )


@pytest.mark.parametrize(
    "certificate",
    [asserted(steps=3), ops.StronglyLogConcave(lipschitz=1.0, strength=1.0, warmup_steps=3)],
    ids=["run", "concave"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_no_value_of_a_record_raises_where_constants_are_asserted(certificate, value):
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    y[3] = value
    assert torch.isfinite(ops.OnePosteriorSample(line, certificate).sample(x, y)["w"]).all()


def test_draws_in_threads_do_not_meet_in_pyro():
    x, y = torch.randn(8, 2), torch.randn(8)
    problems = []

    def draw(certificate):
        try:
            ops.OnePosteriorSample(line, certificate).sample(x, y)
        except Exception as error:
            problems.append(error)

    threads = [
        threading.Thread(target=draw, args=(c,))
        for c in (ops.Bounded(1.0, warmup_steps=20), asserted(steps=3)) * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# --- other charges at the same time ---------------------------------------------------------------


def problem(n=60, d=3):
    x = torch.randn(n, d)
    return x, (torch.rand(n) < x[:, 0].sigmoid()).float()


class Interrupted(PrivacyAccountant):
    """Another process charges just before this one's charge is recorded."""

    def compose(self, event, count=1, label=None, adaptive=False):
        if label is not None and label.startswith("one posterior sample"):
            super().compose(GaussianDpEvent(2.0), 3)
        return super().compose(event, count, label, adaptive)


def test_a_charge_that_comes_in_between_stops_the_draw():
    drawn = []

    class Noting(ops.FiniteRunLangevin):
        def draw(self, *arguments):
            drawn.append(1)
            return super().draw(*arguments)

    accountant = Interrupted(neighboring="replace_one")
    sampler = ops.OnePosteriorSample(ops.GLM(), Noting(steps=5), 1.0, 1e-5, accountant, num_data=60)
    sampler.tempering  # noqa: B018  solved before the other charge
    with pytest.raises(PrivacyBudgetExceeded, match="Nothing was drawn, but the charge stays"):
        sampler.sample(*problem())
    assert not drawn and len(accountant) == 4


class Slow(PrivacyAccountant):
    """So slow that all threads have looked before the first has charged."""

    def compose(self, event, count=1, label=None, adaptive=False):
        time.sleep(0.1)
        return super().compose(event, count, label, adaptive)


def test_of_many_threads_one_gets_the_draw():
    accountant = Slow(neighboring="replace_one")
    sampler = ops.OnePosteriorSample(
        ops.GLM(), ops.FiniteRunLangevin(steps=5), 1.0, 1e-5, accountant, num_data=60
    )
    sampler.tempering  # noqa: B018
    results = []

    def run():
        try:
            results.append(sampler.sample(*problem()))
        except PrivacyBudgetExceeded:
            results.append(None)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and sum(result is not None for result in results) == 1
    assert len(accountant) == 1 and accountant.get_epsilon(1e-5) <= 1.0


# --- hybrid ---------------------------------------------------------------------------------------


def test_of_a_job_that_came_later_or_a_registered_schedule_no_target_is_promised(tmp_path):
    path = tmp_path / "budget.db"
    PrivacyAccountant(5.0, 1e-5, neighboring="replace_one", path=path).compose(
        GaussianDpEvent(100.0)
    ).close()
    later = PrivacyAccountant(neighboring="replace_one", path=path)
    planned = PrivacyAccountant(5.0, 1e-5, neighboring="replace_one").register(
        [(GaussianDpEvent(100.0), 3)]
    )
    for accountant in (later, planned):
        with pytest.raises(ValueError, match="budget as a whole"):
            ops.OnePosteriorSample(
                ops.GLM(), ops.FiniteRunLangevin(steps=5), 1.0, 1e-5, accountant
            ).sample(*problem())
        with pytest.raises(ValueError, match="budget as a whole"):
            run_hybrid(accountant=accountant)
        held = len(accountant)
        ops.OnePosteriorSample(
            ops.GLM(prior_std=0.1), ops.FiniteRunLangevin(steps=5), accountant=accountant
        ).sample(*problem())
        assert len(accountant) == held + 1 and accountant.get_epsilon() <= 5.0
    later.close()


def run_hybrid(**options):
    x, y = options.pop("data", None) or problem(200)
    settings = {
        "certificate": ops.FiniteRunLangevin(steps=50),
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.05),
        "epsilon": 2.0,
        "delta": 1e-5,
        "epochs": 2,
        "batch_size": 40,
    }
    return ops.hybrid(options.pop("model", None) or ops.GLM(), x, y, **{**settings, **options})


@pytest.mark.parametrize("share", [0.2, 0.9, None])
@pytest.mark.parametrize("optimizer", [dpb.optim.DPSGLD, dpb.optim.DPSGNHT])
@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_start_and_chain_together_keep_the_target(share, optimizer, neighboring, method):
    accountant = PrivacyAccountant(neighboring=neighboring, method=method)
    run = run_hybrid(
        start_share=share,
        optimizer=partial(optimizer, lr=0.05),
        accountant=accountant,
        num_data=200,
    )
    assert accountant.get_epsilon(1e-5) <= 2.0
    assert len(accountant) == 1 + 2 * 5 and run.accountant is accountant
    assert len(run.samples) == 5 and run.start["weights"].shape == (3,)
    start = (
        PrivacyAccountant(neighboring=neighboring, method=method)
        .compose(accountant.history[0].event)
        .get_epsilon(1e-5)
    )
    if share is not None:
        assert start <= share * 2.0 * (1 + 1e-9)
    chance = run.samples.predict(run.module, 50 * torch.randn(4, 3), transform=torch.sigmoid)
    assert chance.shape == (4,) and ((chance > 0) & (chance < 1)).all()


def test_a_chain_that_wants_more_noise_than_needed_leaves_the_rest_to_the_best_split():
    run = run_hybrid(start_share=None)
    half = run_hybrid(start_share=0.5)
    assert run.accountant.get_epsilon() == pytest.approx(2.0, rel=1e-6)
    assert run.accountant.history[0].event.mu > half.accountant.history[0].event.mu
    chains = [r.accountant.history[1].event for r in (run, half)]
    assert chains[0] == chains[1]  # the chain's own noise decides either way


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("budget", [(), (2.0, 1e-5)])
def test_a_budget_for_a_noisy_chain_is_used_up(budget, method):
    """By Renyi curves everything costs more, the noise of the chain has to be calibrated by
    the same ones.
    """
    accountant = PrivacyAccountant(*budget, neighboring="replace_one", method=method)
    run_hybrid(optimizer=partial(dpb.optim.DPSGLD, lr=30.0), start_share=0.5, accountant=accountant)
    assert 0.995 * 2.0 <= accountant.get_epsilon(1e-5) <= 2.0


def test_a_noisy_chain_leaves_nothing_to_the_best_split():
    with pytest.raises(ValueError, match="reserved for later"):
        run_hybrid(optimizer=partial(dpb.optim.DPSGLD, lr=30.0), start_share=None)


def test_the_chain_begins_at_the_start():
    class Still(dpb.optim.DPSGLD):
        def _update(self, parts):
            pass

    run = run_hybrid(optimizer=partial(Still, lr=0.05))
    assert any("records are independent" in statement for statement in run.accountant.notes)
    (weights,) = run.module.parameters()
    assert torch.allclose(weights.reshape(-1).double(), run.start["weights"], rtol=1e-6)


# Features that touch one column a record make every column a one-dimensional problem of its own: d
# independent chains in one run.
LAWS = {
    "gaussian": (lambda u, y: (u - y) / 0.5**2, {"noise_std": 0.5}, 0.9),
    "bernoulli": (lambda u, y: stats.logistic.cdf(u) - y, {}, 1.8),
    "poisson": (lambda u, y: np.exp(u) - y, {"max_count": 4.0}, 1.8),
}


def chains_law(slope, y, prior_std, h, steps=600):
    """The distribution function, on a grid, of full-batch Langevin dynamics of one record:
    the exact kernel, iterated until nothing changes.
    """
    grid = np.linspace(-5, 5, 601)
    kernel = stats.norm.pdf(
        grid[None, :],
        (grid - h * (grid / prior_std**2 + slope(grid, y)))[:, None],
        math.sqrt(2 * h),
    ) * (grid[1] - grid[0])
    density = np.full(len(grid), 0.1)
    for _ in range(steps):
        density = density @ kernel
        density /= density.sum() * (grid[1] - grid[0])
    return grid, (np.cumsum(density) - density / 2) * (grid[1] - grid[0])


@pytest.mark.parametrize(("family", "spare"), [*((family, 0) for family in LAWS), ("gaussian", 30)])
def test_the_chain_samples_the_posterior_of_the_model(family, spare):
    """Loss, scale, clip and prior of the chain are those of the GLM: the last state against
    its law, which no start changes after 200 steps.
    """
    slope, extra, lr = LAWS[family]
    neighboring = "add_or_remove_one" if spare else "replace_one"
    d, stds = 120, (0.12, 0.9)
    values = {"gaussian": (-3.0, 3.0), "bernoulli": (0.0, 1.0), "poisson": (0.0, 1.0, 3.0)}[family]
    groups = [(v, s) for s in stds for v in values]
    y, prior = (column.repeat_interleave(d // len(groups)) for column in torch.tensor(groups).T)
    found = []
    for _ in range(3):
        run = run_hybrid(
            model=ops.GLM(family, prior_std=prior.double(), **extra),
            data=(torch.eye(d), y),
            epsilon=1e8,
            start_share=0.5,
            max_grad_norm=100.0,
            certificate=ops.FiniteRunLangevin(steps=20, max_grad_norm=100.0),
            epochs=200,
            batch_size=d + spare,
            optimizer=partial(dpb.optim.DPSGLD, lr=lr * (1 + spare / d)),
            accountant=PrivacyAccountant(neighboring=neighboring),
            num_data=d + spare,
        )
        found.append(run.module.linear.weight.detach().double().reshape(len(groups), -1))
    for (v, s), weights in zip(groups, torch.cat(found, dim=1).numpy(), strict=True):
        assert (
            stats.kstest(np.interp(weights, *chains_law(slope, v, s, lr / d)), "uniform").pvalue
            > SIGNIFICANCE
        )
        if s == stds[0]:  # without its prior the chain would be somewhere else
            assert (
                stats.kstest(
                    np.interp(weights, *chains_law(slope, v, 10.0, lr / d)), "uniform"
                ).pvalue
                < SIGNIFICANCE
            )


@pytest.mark.parametrize("family", LAWS)
@pytest.mark.parametrize("optimizer", [dpb.optim.DPSGLD, dpb.optim.DPSGNHT])
def test_hybrid_runs_of_every_family_are_private_and_predict(family, optimizer):
    x, y = torch.randn(200, 3), torch.randint(0, 4, (200,)).float()
    run = run_hybrid(
        model=ops.GLM(family, **LAWS[family][1]),
        data=(x, y),
        optimizer=partial(optimizer, lr=0.05),
        certificate=ops.FiniteRunLangevin(steps=50),
    )
    assert 1.0 < run.accountant.get_epsilon() <= 2.0
    assert torch.isfinite(run.samples.predict(run.module, x, transform=None)).all()
    assert "ASSUMED" not in run.guarantee


@pytest.mark.parametrize("family", LAWS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_no_value_of_a_record_stops_a_hybrid_run(family, value):
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    x[3, 1], y[7] = value, value
    run = run_hybrid(model=ops.GLM(family, **LAWS[family][1]), data=(x, y), batch_size=40, epochs=3)
    assert torch.isfinite(run.module.linear.weight).all() and len(run.accountant) == 4


# --- hybrid runs and others that charge the same accountant ---------------------------------------


def test_start_and_chain_are_charged_before_anything_is_drawn():
    seen = []

    class Noting(ops.FiniteRunLangevin):
        def draw(self, *arguments):
            seen.append(len(accountant))
            return super().draw(*arguments)

    class Busy(dpb.optim.DPSGLD):
        """While the chain runs, somebody else charges the same accountant, which has no budget."""

        def _update(self, parts):
            accountant.compose(GaussianDpEvent(0.5))
            super()._update(parts)

    accountant = PrivacyAccountant(neighboring="replace_one")
    run_hybrid(accountant=accountant, certificate=Noting(steps=5), optimizer=partial(Busy, lr=0.05))
    assert seen == [11] and len(accountant) == 21
    ours = PrivacyAccountant(neighboring="replace_one")
    for charge in accountant.history:
        if charge.label is not None:
            ours.compose(charge.event, charge.count)
    assert len(ours) == 11 and ours.get_epsilon(1e-5) <= 2.0


@pytest.mark.parametrize("share", [0.5, None])
def test_a_charge_that_comes_in_between_stops_a_hybrid_run(share):
    drawn = []

    class Noting(ops.FiniteRunLangevin):
        def draw(self, *arguments):
            drawn.append(1)
            return super().draw(*arguments)

    class Interrupted(PrivacyAccountant):
        def compose(self, event, count=1, label=None, adaptive=False):
            if label is not None and label.startswith("hybrid"):
                super().compose(GaussianDpEvent(1.0), 3)
            return super().compose(event, count, label, adaptive)

    accountant = Interrupted(neighboring="replace_one")
    with pytest.raises(PrivacyBudgetExceeded, match="Nothing was drawn, but the charge stays"):
        run_hybrid(accountant=accountant, certificate=Noting(steps=5), start_share=share)
    assert not drawn and len(accountant) == 3 + 11

    class Early(ops.FiniteRunLangevin):
        """Others charge after the noise was calibrated."""

        def statement(self, *arguments):
            raise AssertionError

        def event(self, *arguments):
            if len(late) == 0 and len(built) == 2:
                late.compose(GaussianDpEvent(1.0), 3)
            return super().event(*arguments)

    late, built = PrivacyAccountant(neighboring="replace_one"), []

    class Telling(dpb.optim.DPSGLD):
        def __init__(self, *arguments, **options):
            built.append(self)  # one to calibrate with, one for the chain
            super().__init__(*arguments, **options)

    with pytest.raises(PrivacyBudgetExceeded, match="would pass the target"):
        run_hybrid(
            accountant=late,
            certificate=Early(steps=5),
            optimizer=partial(Telling, lr=0.05),
            start_share=share,
        )
    assert len(late) == 3


def test_where_records_are_added_or_removed_their_number_changes_nothing_that_is_charged():
    """The bound decides the sampling rate, the steps and the noise; the rows that are missing
    have no gradient.
    """
    histories = []
    for n in (1, 50, 99, 100):
        accountant = PrivacyAccountant()
        run_hybrid(accountant=accountant, data=problem(n), num_data=100, batch_size=20, epochs=1)
        histories.append(accountant.history)
    assert (
        len(set(histories)) == 1
        and histories[0][1].event.sampling_probability == 0.2
        and histories[0][1].count == 5
    )
    for options in (
        {"data": problem(101)},
        {
            "model": network(),
            "loss": cross_entropy,
            "prior_std": 1.0,
            "certificate": ops.Bounded(1.0),
        },
    ):
        accountant = PrivacyAccountant()
        with pytest.raises(ValueError, match="num_data"):
            run_hybrid(accountant=accountant, num_data=100, **options)
        assert len(accountant) == 0
    with pytest.raises(ValueError, match="num_data"):
        run_hybrid(accountant=PrivacyAccountant())


def test_a_hybrid_run_in_a_file_leaves_its_charges_there(tmp_path):
    path = tmp_path / "budget.db"
    with PrivacyAccountant(5.0, 1e-5, neighboring="replace_one", path=path) as accountant:
        run_hybrid(accountant=accountant)
        pair = ops.TotalVariationClose(
            ops.Bounded(0.2), xi=1e-9, delta=1e-6, sampler=ops.Overdamped(5, 0.01)
        )
        ops.OnePosteriorSample(ops.GLM(), pair, accountant=accountant).sample(*problem())
    with PrivacyAccountant(neighboring="replace_one", path=path) as later:
        assert later.history == accountant.history and [
            charge.count for charge in later.history
        ] == [1, 10, 1, 1]
        assert 0 < later.get_epsilon() <= 3.0


def test_a_chain_takes_no_step_that_was_not_charged():
    class Cooling(dpb.optim.DPSGLD):
        def _update(self, parts):
            super()._update(parts)
            self.param_groups[0]["lr"] *= 2  # less noise of its own

    accountant = PrivacyAccountant(neighboring="replace_one")
    with pytest.raises(PrivacyBudgetExceeded, match="charged beforehand"):
        run_hybrid(accountant=accountant, optimizer=partial(Cooling, lr=0.05))
    assert accountant.get_epsilon(1e-5) <= 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_share": 1.0}, "start_share"),
        ({"start_share": 0.0}, "start_share"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 300}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"loss": cross_entropy}, "leave out loss"),
        ({"model": nn.Linear(3, 1)}, "needs loss"),
        ({"optimizer": partial(dpb.optim.DPSGNHT, lr=1e9)}, "lr"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_nothing_is_charged_when_a_hybrid_run_cannot_begin(options, message):
    accountant = PrivacyAccountant(neighboring="replace_one")
    with pytest.raises(ValueError, match=message):
        run_hybrid(accountant=accountant, **options)
    assert len(accountant) == 0


def test_a_hybrid_run_of_a_module():
    net = network()
    x = torch.randn(100, 3)
    run = run_hybrid(
        model=net,
        data=(x, (x[:, 0] > 0).long()),
        certificate=ops.Bounded(2.0, warmup_steps=2),
        loss=cross_entropy,
        prior_std=1.0,
        epochs=1,
    )
    assert run.module is net and set(run.start) == set(dict(net.named_parameters()))
    assert run.accountant.get_epsilon() <= 2.0 and run.samples.predict(net, x).shape == (100, 2)
