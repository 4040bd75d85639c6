"""``from_run`` on runs whose law is known in closed form: linear models, whose log likelihood is
quadratic.
"""

import math
import warnings

import pytest
import torch
from scipy.stats import binom

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import from_run
from torch_dpbayes.noise_aware.normal_form import NormalForm

DOUBLE = torch.float64
ERROR_RATE = 1e-5


def made_steps(optimizer, count):
    """As if ``optimizer`` itself had made the steps that are simulated."""
    (group,) = optimizer.param_groups
    numbers = [optimizer._numbers_of(group, optimizer._multiplier(group))]
    optimizer._last_numbers = numbers, count


class Runs:
    """Stationary iterates of many data sets at once, by the optimizers' own update equations."""

    def __init__(
        self,
        kind,
        *,
        dimension=2,
        steps=3000,
        every=4,
        datasets=60,
        drift=0.0,
        information=2500.0,
        burn_in=400,
        **settings,
    ):
        settings = {
            "lr": 0.2, "num_data": 10_000, "expected_batch_size": 10_000, "max_grad_norm": 1.0,
            "assume_independent_records": True, "prior_std": 1.0, "sampling": "poisson",
        } | settings  # fmt: skip
        self.net = torch.nn.Linear(dimension, 1, bias=False, dtype=DOUBLE)
        self.optimizer = kind(self.net.parameters(), **settings)
        self.every, self.steps = every, steps
        count, lr = settings["num_data"], settings["lr"]
        rate = settings["expected_batch_size"] / count
        std = self.optimizer.effective_noise_multiplier / rate
        self.curvature = information * torch.linspace(1.0, 0.4, dimension, dtype=DOUBLE)
        self.truth = torch.randn(datasets, dimension, dtype=DOUBLE)
        self.mode = self.truth + torch.randn_like(self.truth) / self.curvature.sqrt()
        momentum = settings.get("momentum", 0.0)
        theta = (self.curvature * self.mode) / (self.curvature + 1)
        velocity, kept = torch.zeros_like(theta), []
        for step in range(steps + burn_in):
            moving = self.mode + drift * step
            gradient = self.curvature * (theta - moving) + theta + std * torch.randn_like(theta)
            gradient += ((1 - rate) / rate * self.curvature).sqrt() * torch.randn_like(theta)
            velocity = momentum * velocity - lr / count * gradient
            theta = theta + velocity
            if step >= burn_in and step % every == 0:
                kept.append(theta)
        self.iterates = torch.stack(kept, dim=1)
        made_steps(self.optimizer, steps + burn_in)

    def samples(self, dataset):
        samples = dpb.PosteriorSamples(max_samples=len(self.iterates[0]))
        for iterate in self.iterates[dataset]:
            with torch.no_grad():
                self.net.weight.copy_(iterate[None])
            samples.collect(self.net)
        return samples

    def posterior(self, dataset):
        return from_run(self.samples(dataset), self.optimizer, steps_per_sample=self.every)


CELLS = {
    "sgld": (dpb.optim.DPSGLD, {}),
    "hot momentum": (dpb.optim.DPSGHMC, {"momentum": 0.9, "noise_multiplier": 300.0, "lr": 0.1}),
    "poisson": (
        dpb.optim.DPSGLD,
        {"noise_multiplier": 5.0, "expected_batch_size": 1000, "lr": 0.3},
    ),
}


def counts_of_coverage(runs, datasets):
    """How often central 50 and 90 % intervals hold the truth, one parameter a data set."""
    inside = [0, 0]
    for k in range(datasets):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                draws = runs.posterior(k).sample(1000)["weight"][:, 0]
            except ValueError as error:  # one run in ten thousand, which counts as one missed
                assert "contradict each other" in str(error)
                continue
        i = k % draws.shape[1]
        share = float((draws[:, i] < runs.truth[k, i]).double().mean())
        inside[0] += abs(share - 0.5) < 0.25
        inside[1] += abs(share - 0.5) < 0.45
    return inside


def require_coverage(inside, datasets, tolerance, tests):
    level = ERROR_RATE / tests
    for hits, nominal in zip(inside, (0.5, 0.9), strict=True):
        low, high = nominal - tolerance, min(nominal + tolerance, 1.0)
        assert binom.cdf(hits, datasets, low) > level, (hits, nominal)
        assert binom.sf(hits - 1, datasets, high) > level, (hits, nominal)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", CELLS)
def test_intervals_cover(cell):
    kind, how = CELLS[cell]
    runs = Runs(kind, datasets=40, **how)
    require_coverage(counts_of_coverage(runs, 40), 40, 0.04, 2 * len(CELLS))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_intervals_cover_often(cell):
    kind, how = CELLS[cell]
    runs = Runs(kind, datasets=400, dimension=4, steps=6000, **how)
    require_coverage(counts_of_coverage(runs, 400), 400, 0.04, 2 * len(CELLS))


def test_far_away_no_run_is_likely():
    """There the curvature's error would explain it, and as many draws of the prior as a wide one
    has: a log likelihood would fall off there by 3·log 2 at most.
    """
    likelihood = Runs(dpb.optim.DPSGLD, datasets=1).posterior(0)._likelihood
    far = likelihood.centre + torch.tensor([[1e3, 1e3], [2e3, 2e3]], dtype=DOUBLE)
    assert float(likelihood.log_likelihood(far).diff()) < -100


def test_the_temperature_is_taken_out():
    runs = Runs(*CELLS["hot momentum"][:1], datasets=1, steps=8000, **CELLS["hot momentum"][1])
    hot = runs.iterates[0].std(0)
    temperature = runs.optimizer.effective_temperature
    assert temperature > 3
    cool = (runs.curvature + 1).rsqrt()
    torch.testing.assert_close(hot, temperature**0.5 * cool, rtol=0.25, atol=0.0)
    post = runs.posterior(0)
    noise = post._likelihood.noise.diagonal()
    ideal = (1 + runs.curvature**2 / (runs.curvature + noise)).rsqrt()
    torch.testing.assert_close(post.stddev["weight"][0], ideal, rtol=0.3, atol=0.0)
    assert bool((post.stddev["weight"][0] < 0.8 * hot).all())


# 4ha > f²: iterates oscillate about the mode, and forget where they were at the rate f/2
LITTLE_FRICTION = {"momentum": 0.99, "lr": 0.1, "steps": 8000, "every": 10, "burn_in": 2000}


MINIBATCHES = {"momentum": 0.9, "lr": 0.1, "expected_batch_size": 1000, "every": 10}


@pytest.mark.thorough
@pytest.mark.parametrize("how", [CELLS["hot momentum"][1], LITTLE_FRICTION, MINIBATCHES])
def test_the_noise_of_the_mean_and_of_the_curvature_are_those_of_the_law(how):
    datasets = 200
    runs = Runs(dpb.optim.DPSGHMC, datasets=datasets, **how)
    forms = []
    for k in range(datasets):
        try:
            forms.append((k, runs.posterior(k)._likelihood))
        except ValueError as error:  # of short runs one in ten thousand
            assert "contradict each other" in str(error)
    assert len(forms) >= datasets - 2
    # b̃ = (F+P)θ̄ − P·m₀ observes Fθ_L with variance V, and F̂ observes F with variance v²R²
    modes = runs.mode[[k for k, _ in forms]]
    forms = [form for _, form in forms]
    centres = torch.stack([f.centre for f in forms])
    apart = (runs.curvature + 1) * centres - runs.curvature * modes
    stated = torch.stack([f.noise.diagonal() for f in forms]).mean(0)
    ratio = apart.square().mean(0) / stated
    assert bool((ratio > 0.5).all()) and bool((ratio < 1.8).all())
    found = torch.stack([f.curvature.diagonal() for f in forms])
    errors = [(f.most_curvature(1.0) - f.curvature).diagonal() for f in forms]
    stated = torch.stack(errors).square().mean(0)
    ratio = (found - runs.curvature).square().mean(0) / stated
    assert bool((ratio > 0.4).all()) and bool((ratio < 2.0).all())
    # seven errors: the law of a finite run is off by one or two
    bias = (found.mean(0) - runs.curvature) / (found.std(0) / math.sqrt(len(forms)))
    assert bool((bias.abs() < 7).all())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:in its softest direction:UserWarning")
def test_leaving_the_noise_out_covers_too_little():
    """A run so short that averaging noise is larger than the records' own."""
    datasets = 60
    runs = Runs(
        dpb.optim.DPSGLD,
        datasets=datasets,
        steps=1500,
        noise_multiplier=6000.0,
        lr=0.8,
        every=3,
    )
    squares = torch.zeros(2, dtype=DOUBLE)
    for k in range(datasets):
        full = runs.posterior(k)._likelihood
        for j, noise in enumerate((full.noise, 0 * full.noise)):
            form = NormalForm(full.centre, full._gradient, noise, full.curvature, full._shape, 1e-9)
            precision, product = form.precision(full.centre)
            covariance = torch.linalg.inv(precision + torch.eye(2, dtype=DOUBLE))
            apart = (covariance @ product - runs.truth[k]) / covariance.diagonal().sqrt()
            squares[j] += apart.square().mean() / datasets
    assert float(squares[0]) < 2.0
    assert float(squares[1]) > 4.0


@pytest.mark.thorough
def test_a_real_run_on_a_linear_model():
    count = 400
    x = torch.randn(count, 2, dtype=DOUBLE)
    y = x @ torch.tensor([0.5, -0.3], dtype=DOUBLE) + math.sqrt(0.5) * torch.randn(
        count, dtype=DOUBLE
    )
    net = torch.nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=lambda params, **how: dpb.optim.DPSGLD(params, lr=0.2, **how),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=count
        ),
        max_grad_norm=20.0,
        noise_multiplier=0.0,
    )
    samples = dpb.PosteriorSamples(burn_in=100, max_samples=2000)
    for _ in range(800):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs)[:, 0], targets).backward()
            optimizer.step()
        samples.collect(net)
    charged = len(engine.accountant)
    post = from_run(samples, optimizer, steps_per_sample=1)
    assert len(engine.accountant) == charged == 800
    precision = 2 * x.T @ x + torch.eye(2, dtype=DOUBLE)  # MSELoss is a variance of ½
    exact = torch.linalg.solve(precision, 2 * x.T @ y)
    exact_std = torch.linalg.inv(precision).diagonal().sqrt()
    # 700 iterates are worth 175 independent ones. In 160 runs the means were off by at most .25
    # posterior sds; the ratio of the sds had the mean 1.02 and the standard deviation .058.
    assert float(((post.mean["weight"][0] - exact) / exact_std).abs().max()) < 1.5
    torch.testing.assert_close(post.stddev["weight"][0], exact_std, rtol=0.4, atol=0.0)
    assert "iterates of DPSGLD" in post.guarantee()
    assert "  NOT KNOWN   nothing that was released says how many gradients" in post.guarantee()


# --- refused --------------------------------------------------------------------------------------


def test_a_short_run_with_little_friction_is_refused():
    """Three hundred steps are few cycles of an oscillation that is hardly damped."""
    runs = Runs(dpb.optim.DPSGHMC, datasets=5, **LITTLE_FRICTION | {"steps": 300, "every": 1})
    for k in range(5):
        with pytest.raises(ValueError, match="independent samples"):
            runs.posterior(k)


def test_a_run_that_the_prior_alone_explains_is_refused(monkeypatch):
    """When that is: test_normal_form.py."""
    runs = Runs(dpb.optim.DPSGLD, datasets=1)
    runs.posterior(0)
    monkeypatch.setattr(NormalForm, "plateau", lambda self, prior: self.centre)
    with pytest.raises(ValueError, match="so little of the curvature that the prior alone"):
        runs.posterior(0)


def test_a_run_that_still_moves_is_refused():
    runs = Runs(dpb.optim.DPSGLD, datasets=1, drift=1e-3)
    with pytest.raises(ValueError, match=r"independent samples|not converged"):
        runs.posterior(0)


def test_too_few_or_too_dependent_samples_are_refused():
    runs = Runs(dpb.optim.DPSGLD, datasets=1, steps=40, every=4)
    with pytest.raises(ValueError, match="samples"):
        runs.posterior(0)
    # so much noise on so small steps that the whole run is one place: a cold run looks like this
    cold = Runs(
        dpb.optim.DPSGLD, datasets=1, steps=300, every=1, lr=1e-5, temperature=0.0,
        noise_multiplier=10.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"independent samples|not converged"):
        cold.posterior(0)


def test_minibatch_noise_that_outweighs_all_is_refused():
    runs = Runs(
        dpb.optim.DPSGLD, datasets=1, expected_batch_size=20, lr=0.5, temperature=0.0,
        noise_multiplier=0.05, information=250.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"minibatch|independent"):
        runs.posterior(0)


def test_a_thermostat_under_minibatch_noise_is_refused():
    """The noise of a release has the variance σ² + κF: much of it, hardly any, none."""
    for size, is_refused in ((1000, True), (9900, False), (10_000, False)):
        runs = Runs(
            dpb.optim.DPSGNHT, datasets=1, expected_batch_size=size, lr=0.1, momentum=0.9,
            noise_multiplier=0.0,
        )  # fmt: skip
        if is_refused:
            with pytest.raises(ValueError, match="run DPSGHMC"):
                runs.posterior(0)
        else:
            runs.posterior(0)


def test_samples_of_another_model_are_refused():
    runs = Runs(dpb.optim.DPSGLD, datasets=1, steps=200)
    other = torch.nn.Linear(3, 1, bias=False, dtype=DOUBLE)
    optimizer = dpb.optim.DPSGLD(
        other.parameters(),
        lr=0.2,
        assume_independent_records=True,
        num_data=10_000,
        expected_batch_size=10_000,
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="shapes"):
        from_run(runs.samples(0), optimizer, steps_per_sample=runs.every)


def collected(**how):
    net = torch.nn.Linear(2, 1, bias=False)
    kind = how.pop("kind", dpb.optim.DPSGLD)
    settings = {
        "lr": 0.1, "num_data": 100, "expected_batch_size": 100, "max_grad_norm": 1.0,
        "assume_independent_records": True,
        "noise_multiplier": 1.0,
    } | how  # fmt: skip
    samples = dpb.PosteriorSamples()
    samples.collect(net)
    return samples, kind(net.named_parameters(), **settings)


def test_runs_without_a_known_law_are_refused():
    for how, error, match in (
        ({"kind": dpb.optim.DPSGFS}, TypeError, "law"),
        (
            {"log_prior": lambda parameters: -parameters["weight"].square().sum()},
            ValueError,
            "prior",
        ),
        ({"prior_std": math.inf}, ValueError, "improper"),
        ({"noise_multiplier": 0.0, "temperature": 0.0}, ValueError, "no noise"),
    ):
        samples, optimizer = collected(**how)
        with pytest.raises(error, match=match):
            from_run(samples, optimizer, steps_per_sample=1)
    samples, optimizer = collected()
    with pytest.raises(TypeError, match="PosteriorSamples"):
        from_run([1.0], optimizer, steps_per_sample=1)
    with pytest.raises(ValueError, match="steps_per_sample"):
        from_run(samples, optimizer, steps_per_sample=0)
    with pytest.raises(ValueError, match="1 samples say too little"):
        from_run(samples, optimizer, steps_per_sample=1)


def linear_run(change=None, *, steps=60, every=1, resumed=False):
    """Samples of a linear model with two weights after ``steps`` steps, ``change(optimizer)`` in
    the middle of them, and the optimizer.
    """
    x = torch.randn(50, 2, dtype=DOUBLE)
    y = x @ torch.ones(2, dtype=DOUBLE) + torch.randn(50, dtype=DOUBLE)
    net = torch.nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=lambda params, **how: dpb.optim.DPSGLD(params, lr=0.05, **how),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 50),
        max_grad_norm=5.0,
        noise_multiplier=0.0,
    )
    samples = dpb.PosteriorSamples(max_samples=1000)
    for step in range(steps):
        if step == steps // 2 and change is not None:
            change(optimizer)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs)[:, 0], targets).backward()
            optimizer.step()
        samples.collect(net)
    if resumed:
        optimizer.load_state_dict(optimizer.state_dict())
    return samples, optimizer


def set_lr(optimizer):
    optimizer.param_groups[0]["lr"] = 0.02


def set_prior(optimizer):
    optimizer.param_groups[0]["prior_std"] = 0.5


@pytest.mark.parametrize("change", [set_lr, set_prior], ids=["lr", "prior"])
def test_settings_that_were_changed_by_hand_are_seen(change):
    samples, optimizer = linear_run(change)
    assert optimizer.equal_steps == 30
    with pytest.raises(ValueError, match="only the last 30 were made"):
        from_run(samples, optimizer, steps_per_sample=1)
    samples, optimizer = linear_run()
    assert optimizer.equal_steps == 60
    change(optimizer)  # after the last step
    with pytest.raises(ValueError, match="only the last 0 were made"):
        from_run(samples, optimizer, steps_per_sample=1)


def test_equal_steps_outlast_a_checkpoint():
    _, optimizer = linear_run(set_lr, resumed=True)
    assert optimizer.equal_steps == 30


def test_samples_that_span_more_steps_than_were_made_are_refused():
    samples, optimizer = linear_run()
    with pytest.raises(ValueError, match="span 118 steps"):
        from_run(samples, optimizer, steps_per_sample=2)


def test_a_rate_that_was_constant_while_samples_were_collected_is_let_pass():
    """A warm-up at another rate does no harm."""
    samples, optimizer = linear_run(set_lr)
    late = dpb.PosteriorSamples(max_samples=1000)
    late._samples = samples._samples[30:]
    with pytest.raises(ValueError, match=r"independent samples|not converged"):
        from_run(late, optimizer, steps_per_sample=1)  # as it is no more than a few of them
