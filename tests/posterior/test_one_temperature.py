"""One temperature for predictions: the estimate, what is charged, and what a record can do."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_softmax, logsumexp
from scipy.stats import binom, norm
from support.examples import examples
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.posterior import PosteriorSamples, calibration

HUGE, N = 1e7, 2000  # an epsilon at which noise is no matter


class Outputs(nn.Module):
    """Returns row x of a table, times its parameter."""

    def __init__(self, table):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("table", table)

    def forward(self, x):
        return self.scale * self.table[x]


def problem(likelihood, n=N, seed=0, factor=2.5):
    """Samples, model and records; the network's numbers are ``factor`` times too large, or its
    noise too small.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = {"categorical": (n, 4), "bernoulli": (n,), "normal": (n, 2)}[likelihood]
    table = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if likelihood == "categorical":
        y = torch.multinomial(table.softmax(-1), 1, generator=generator)[:, 0]
        table = table * factor
    elif likelihood == "bernoulli":
        y = torch.bernoulli(table.sigmoid(), generator=generator)
        table = table * factor
    else:
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        y = table[:, 0] + factor * (table[:, 1] / 2).exp() * noise
    samples, model = collected(likelihood, table)
    return samples, model, TensorDataset(torch.arange(n), y)


def collected(likelihood, table):
    samples, model = PosteriorSamples(likelihood, burn_in=0), Outputs(table)
    for scale in (0.9, 1.0, 1.1):
        with torch.no_grad():
            model.scale.fill_(scale)
        samples.collect(model)
    return samples, model


def accountant(relation="add_or_remove_one", epsilon=None):
    delta = None if epsilon is None else 1e-5
    return dpb.PrivacyAccountant(epsilon, delta, neighboring=relation)


def calibrated(samples, model, records, epsilon=HUGE, **options):
    options.setdefault("accountant", accountant())
    return samples.calibrate(model, DataLoader(records, batch_size=100), epsilon, 1e-5, **options)


def average(samples, model, likelihood):
    """log p of each class, averaged over the samples by numpy."""
    outputs = samples.outputs(model, torch.arange(len(model.table))).numpy()
    if likelihood == "bernoulli":
        outputs = np.stack([np.zeros_like(outputs), outputs], -1)
    return logsumexp(log_softmax(outputs, -1), 0) - math.log(len(samples))


# -- the estimate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_without_noise_it_is_the_root_of_the_bounded_scores(likelihood):
    """By scipy, from the equation: the clipped slope of log p less what the prediction expects."""
    samples, model, records = problem(likelihood, 20_000)  # which outweigh the prior
    log_p, y = average(samples, model, likelihood), records.tensors[1].long().numpy()

    def total(t):
        p = np.exp(log_softmax(log_p / math.exp(t), -1))
        slope = (p * log_p).sum(-1, keepdims=True) - log_p
        clipped = np.clip(slope / math.exp(t), -0.5, 0.5)
        return (np.take_along_axis(clipped, y[:, None], -1)[:, 0] - (p * clipped).sum(-1)).sum()

    found = calibrated(samples, model, records)
    # five steps on a grid of spacing .005
    assert math.log(found) == pytest.approx(brentq(total, -2, 2), abs=0.01)
    assert found == samples.temperature == pytest.approx(2.5, rel=0.15)


def test_of_normal_targets_it_is_the_factor_of_the_variance():
    """The probability integral transform of the mixture has variance 1/12 there."""
    samples, model, records = problem("normal", 20_000)
    outputs = samples.outputs(model, records.tensors[0]).numpy()
    y = records.tensors[1].numpy()

    def excess(t):
        std = np.exp(outputs[..., 1] / 2 + t)
        return (norm.cdf(y, outputs[..., 0], std).mean(0) - 0.5).__pow__(2).mean() - 1 / 12

    found = calibrated(samples, model, records)
    assert math.log(found) / 2 == pytest.approx(brentq(excess, -2, 2), abs=0.01)
    assert math.sqrt(found) == pytest.approx(2.5, rel=0.15)
    alone = PosteriorSamples("normal", burn_in=0, noise_std=2.0)  # means and a scale of its own
    x = torch.zeros(N, dtype=torch.long)
    net = Outputs(torch.zeros(1, dtype=torch.float64))
    alone.collect(net)
    targets = torch.as_tensor(norm.ppf((np.arange(N) + 0.5) / N, scale=3.0))
    assert calibrated(alone, net, TensorDataset(x, targets)) == pytest.approx(2.25, rel=0.02)


@given(st.floats(-1, 1), st.floats(4, 6))
def test_the_posterior_of_a_curve_of_the_assumed_shape(t, log10_count):
    """S(t') = J (1 − e^{2(t' − t)})/2 with little noise has the mean t."""
    count = 10**log10_count

    def score(at):
        return count * (1 - math.exp(2 * (at - t))) / 2

    assert calibration.estimate(score, 1e-3)[0] == pytest.approx(t, abs=0.03)


def test_noise_alone_leaves_the_predictions_as_they_are():
    """Noise that no number of records could be seen in; and no result is beyond the grid."""
    assert calibration.estimate(lambda t: 0.0, 1e12)[0] == pytest.approx(0, abs=0.01)
    for extreme in (1e12, -1e12):
        assert -2.5 <= calibration.estimate(lambda t, s=extreme: s, 1.0)[0] <= 2.5


@pytest.mark.chance(1e-3)  # binomial tails of 1 % and, with J = z, of 90 %
def test_how_often_noise_is_said_to_leave_it_undetermined():
    """Scores whose J is 200 times the noise determine it, where J is as large as it they do not."""
    draw, passed = np.random.default_rng(), {}
    for count, t in ((200.0, 0.0), (1.0, 0.5)):
        passed[count] = 0
        for _ in range(60):
            sample = math.sqrt(count) * draw.normal()

            def score(at, count=count, t=t, sample=sample):
                return count * (1 - math.exp(2 * (at - t))) / 2 + sample

            passed[count] += calibration.estimate(score, 1.0)[1] > calibration.UNDETERMINED
    assert binom.sf(passed[200.0] - 1, 60, 0.01) > 5e-4 < binom.cdf(passed[1.0], 60, 0.9)


def test_a_warning_says_so_and_no_bar_tells_the_number_of_records(monkeypatch):
    samples, model, records = problem("categorical", 300)
    bars = []
    monkeypatch.setattr("torch_dpbayes.words.tqdm", lambda steps, *_, **__: bars.append(1) or steps)
    with pytest.warns(UserWarning, match="leaves the temperature undetermined: log T ="):
        calibrated(samples, model, records, 0.01)
    assert not bars
    samples.predict(model, records.tensors[0])
    assert bars
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(samples, model, records)


# -- the charge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_the_noise_that_is_added_is_charged(relation, monkeypatch):
    """Every standard normal number is 1: a release less its sum is its noise's std."""
    monkeypatch.setattr(
        GaussianNoise,
        "standard_normal",
        lambda self, size, *, dtype, device, hides=(): torch.ones(size, dtype=dtype),
    )
    samples, model, records = problem("categorical", 300)
    held, stds, released = accountant(relation, 2.0), [], calibration._released

    def spy(total, multiplier, noise):
        value = released(total, multiplier, noise)
        stds.append(value - total)
        return value

    monkeypatch.setattr(calibration, "_released", spy)
    total = total_multiplier(held, 1.0, 1e-5)
    calibrated(samples, model, records, 1.0, accountant=held)
    charged = [charge.event.noise_multiplier for charge in held.history]
    assert stds == pytest.approx(charged) and all(charge.count == 1 for charge in held.history)
    assert sum(z**-2 for z in charged) == pytest.approx(total**-2)
    assert held.get_epsilon(1e-5) == pytest.approx(1.0, rel=2e-3)


@examples(30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["categorical", "bernoulli", "normal"]))
def test_a_record_moves_the_sum_by_at_most_one(seed, likelihood):
    """Whatever its label and outputs are, at every temperature; a broken one by nothing."""
    _, model, records = problem(likelihood, 20, seed % 1000)
    draw = np.random.default_rng(seed)
    x, y = records.tensors
    size = 10.0 ** draw.uniform(-3, 8)
    table = model.table.clone()
    table[0] = torch.as_tensor(size * draw.normal(size=table[0].shape))
    y[0] = {"categorical": draw.integers(4), "bernoulli": draw.integers(2)}.get(
        likelihood, size * draw.normal()
    )

    def sums(values, labels, table=table):
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                calibration, "estimate", lambda score, total: seen.append(score) or (0.0, 0.0)
            )
            calibrated(*collected(likelihood, table), TensorDataset(values, labels))
        return np.array([seen[0](t) for t in (-2.0, -0.5, 0.0, 0.7, 2.0)])

    assert np.abs(sums(x, y) - sums(x[1:], y[1:])).max() <= 1 + 1e-9
    broken = table.clone()
    broken[0] = draw.choice([math.nan, math.inf])
    for own, label in ((broken, y[0]), (table, {"normal": math.nan}.get(likelihood, 17))):
        labels = y.clone()
        labels[0] = label
        difference = sums(x, labels, own) - sums(x[1:], y[1:])
        if bool(torch.isinf(own).any()):
            assert np.abs(difference).max() <= 1 + 1e-9
        else:
            assert np.abs(difference).max() < 1e-9


def test_a_model_that_mixes_records_is_run_for_each_alone():
    class Mixing(Outputs):
        def forward(self, x):
            return super().forward(x) * (1 if len(x) % 2 else -1)

    samples, model, records = problem("categorical", 50)
    mixing, held = Mixing(model.table), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            calibration, "estimate", lambda score, total: held.append(score) or (0.0, 0.0)
        )
        for count in (50, 49):
            calibrated(samples, mixing, TensorDataset(*(t[:count] for t in records.tensors)))
    assert abs(held[0](0.3) - held[1](0.3)) <= 1


class Keeps(nn.Module):
    """Passes records on by a number, a buffer, a tensor of its own, or texts of the whole batch."""

    def __init__(self, how):
        super().__init__()
        self.how, self.sum, self.last = how, 0.0, None
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x, words=None):
        if self.how == "a number":
            self.sum += float(x.mean())
        elif self.how == "a buffer":
            self.mean += x.mean(0)
        elif self.how == "a tensor":
            self.last = x * 2
        return (x + self.sum + self.mean) @ self.weight


class WithTexts(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, "rare" if index == 3 else "common", y


@pytest.mark.parametrize("how", ["a number", "a buffer", "a tensor", "texts"])
def test_a_model_that_passes_records_on_is_refused(how):
    model, samples = Keeps(how), PosteriorSamples("categorical", burn_in=0)
    samples.collect(model)
    kind = WithTexts if how == "texts" else TensorDataset
    data = kind(torch.randn(60, 2), torch.randint(3, (60,)))
    with pytest.raises(dpb.DPBayesError) as caught:
        samples.calibrate(model, DataLoader(data), accountant=dpb.PrivacyAccountant(1.0, 1e-5))
    assert caught.value.code in ("samples", "model-map") and samples.temperature == 1


def test_an_error_that_a_record_causes_is_charged_and_does_not_show_it():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 3)

        def forward(self, x):
            return self.table(x)

    model, samples = Reads(), PosteriorSamples("categorical", burn_in=0)
    samples.collect(model)
    tokens = torch.zeros(60, dtype=torch.long)
    tokens[7] = 4711
    accountant = dpb.PrivacyAccountant(1.0, 1e-5)
    loader = DataLoader(TensorDataset(tokens, torch.randint(3, (60,))))
    with pytest.raises(dpb.DPBayesError) as caught:
        samples.calibrate(model, loader, accountant=accountant)
    assert "4711" not in str(caught.value) and len(accountant)


def test_another_accountant_than_the_runs_is_refused():
    net = nn.Linear(2, 3)
    data = DataLoader(TensorDataset(torch.randn(60, 2), torch.randint(3, (60,))), 20)
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
    )
    samples = PosteriorSamples("categorical", burn_in=0)
    for x, y in loader:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    samples.collect(net)
    other = dpb.PrivacyAccountant(1.0, 1e-5)
    with pytest.raises(ValueError, match="another accountant"):
        samples.calibrate(net, loader, accountant=other)
    assert not len(other)


def test_what_is_refused_charges_and_changes_nothing():
    samples, model, records = problem("categorical", 100)
    held = accountant(epsilon=1.0)
    held.compose(dpb.accounting.events.GaussianDpEvent(total_multiplier(held, None, None)))
    with pytest.raises(ValueError, match="nothing is left for this run"):
        calibrated(samples, model, records, 0.5, accountant=held)
    with pytest.raises(dpb.PrivacyBudgetExceeded, match="epsilon=5 is of everything on it"):
        calibrated(samples, model, records, 5.0, accountant=held)
    assert len(held) == 1 and samples.temperature == 1.0

    def refused(message, kind=ValueError, *, data=records, own=samples, net=model, **options):
        held = accountant(epsilon=1.0)
        options.setdefault("accountant", held)
        with pytest.raises(kind, match=message):
            own.calibrate(net, DataLoader(data, batch_size=10), **options)
        assert len(held) == 0

    x, y = records.tensors
    kept = model.table.clone()
    model.table += 1
    refused("Buffer 'table' changed since the first collect")
    model.table.copy_(kept)
    refused("pass the loader that make_private returned, or accountant=", accountant=None)
    refused("protects users", accountant=dpb.PrivacyAccountant(1.0, 1e-5, unit="user"))
    refused("one tensor of targets", TypeError, data=TensorDataset(x))
    refused("one target a record", data=TensorDataset(x, y[:, None].repeat(1, 2)))
    refused("There is no posterior sample yet", RuntimeError, own=PosteriorSamples("categorical"))
    refused("several times", data=torch.utils.data.Subset(records, [0, 0]))
    mean = PosteriorSamples("normal", burn_in=0)
    mean.collect(net := Outputs(torch.zeros(100)))
    refused("this needs the noise too", own=mean, net=net)
    with pytest.raises(ValueError, match="DataLoader over a map-style data set"):
        samples.calibrate(model, x, accountant=accountant(epsilon=1.0))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(x[0], y[0])] * 2)

    with pytest.raises(ValueError, match="DataLoader over a map-style data set"):
        samples.calibrate(model, DataLoader(Stream()), accountant=accountant(epsilon=1.0))


def trained(**options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 5, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=nn.Linear(5, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=100),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=3,
        **options,
    )
    samples = PosteriorSamples()
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            samples.collect(net)
    return engine, net, loader, samples


def test_a_share_of_the_budget():
    """The noise of the steps leaves room for it, and it is charged when it is used."""
    engine, net, loader, samples = trained(calibrate=0.1)
    before = engine.get_epsilon(1e-5)
    whole = total_multiplier(accountant(epsilon=2.0), None, None)
    assert loader.sampler_of_draws.reserved == pytest.approx(whole / math.sqrt(0.1))
    samples.calibrate(net, loader)
    assert before < 1.97 < engine.get_epsilon(1e-5) <= 2.0
    charged = [charge.event for charge in engine.accountant.history[-5:]]
    assert charged == calibration.event_of(loader.sampler_of_draws.reserved).events
    state = [charge.count for charge in engine.accountant.history]
    temperature = samples.temperature
    with pytest.raises(dpb.PrivacyBudgetExceeded, match="its share, calibrate=, is used up"):
        samples.calibrate(net, loader)
    assert [charge.count for charge in engine.accountant.history] == state
    assert samples.temperature == temperature
    loader.sampler_of_draws.ranks = object()
    with pytest.raises(ValueError, match="shared by several ranks"):
        samples.calibrate(net, loader, epsilon=5.0)


def test_without_a_share_nothing_is_left():
    _, net, loader, samples = trained()
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        samples.calibrate(net, loader, epsilon=2.5)
    engine = dpb.PrivacyEngine()
    call = dict(
        module=nn.Linear(5, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 5), torch.zeros(40)), batch_size=10),
        target_delta=1e-5,
        epochs=3,
    )
    plan = engine.plan(**call, target_epsilon=1.0, calibrate=0.1)
    assert plan.epsilon == pytest.approx(1.0, rel=0.01)
    assert "calibration           reserved: noise multiplier" in str(plan)


# -- what uses it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "normal"])
def test_predictions_use_it(likelihood, tmp_path):
    samples, model, records = problem(likelihood, 200)
    x, y = records.tensors
    raw = samples.predict(model, x), samples.mutual_information(model, x)
    calibrated(samples, model, records)
    temperature = samples.temperature
    assert temperature > 1.5
    samples.save(tmp_path / "samples.pt")
    for again in (samples, PosteriorSamples.load(tmp_path / "samples.pt")):
        assert again.temperature == temperature
        assert calibrated(again, model, records) == pytest.approx(temperature, rel=0.02)
        again._temperature = temperature
        log_likelihood = again.log_likelihood(model, x, y).numpy()
        if likelihood == "normal":
            outputs = samples.outputs(model, x).numpy()
            std = np.sqrt(temperature) * np.exp(outputs[..., 1] / 2)
            each = norm.logpdf(y.numpy(), outputs[..., 0], std)
            assert log_likelihood == pytest.approx(logsumexp(each, 0) - math.log(3))
            low, high = again.predictive_quantiles(model, x, (0.05, 0.95))
            covered = dpb.metrics.interval_coverage(low, high, y)
            assert covered == pytest.approx(0.9, abs=0.08)
            assert torch.equal(again.predict(model, x), raw[0])
            continue
        log_p = log_softmax(average(samples, model, likelihood) / temperature, -1)
        chosen = np.take_along_axis(log_p, y.long().numpy()[:, None], -1)[:, 0]
        assert log_likelihood == pytest.approx(chosen)
        p = again.predict(model, x).numpy()
        wanted = np.exp(log_p)
        assert p == pytest.approx(wanted if likelihood == "categorical" else wanted[:, 1])
        entropies = again.predictive_entropy(model, x).numpy()
        assert entropies == pytest.approx(-(wanted * log_p).sum(-1))
        assert torch.equal(again.mutual_information(model, x), raw[1])
