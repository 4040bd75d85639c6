"""One temperature for predictions: the estimate, what is charged, and what a record can do."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from drawn import Table, sampled
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_softmax, logsumexp
from scipy.stats import norm
from support import steps
from support.examples import examples
from support.refusals import refused
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import PosteriorSamples
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.posterior import calibration
from torch_dpbayes.posterior.likelihoods import Categorical

HUGE = 1e7  # an epsilon at which noise is no matter
LIKELIHOODS = ["categorical", "bernoulli", "normal"]


def problem(likelihood, n=300, seed=0, factor=2.5):
    """Three samples, the model and records; the network's numbers are ``factor`` times too large,
    or its noise too small.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = {"categorical": (n, 4), "bernoulli": (n,), "normal": (n, 2)}[likelihood]
    table = 2 * torch.randn(shape, generator=draw, dtype=torch.float64)
    if likelihood == "normal":
        noise = torch.randn(n, generator=draw, dtype=torch.float64)
        y, factor = table[:, 0] + factor * (table[:, 1] / 2).exp() * noise, 1
    elif likelihood == "categorical":
        y = torch.multinomial(table.softmax(-1), 1, generator=draw)[:, 0]
    else:
        y = torch.bernoulli(table.sigmoid(), generator=draw)
    samples, model, x = thrice(factor * table, likelihood)
    return samples, model, TensorDataset(x, y)


def thrice(table, *likelihood):
    return sampled([0.9 * table, table, 1.1 * table], *likelihood)


def accountant(epsilon=None, relation="add_or_remove_one", **options):
    delta = None if epsilon is None else 1e-5
    return dpb.PrivacyAccountant(epsilon, delta, neighboring=relation, **options)


def calibrated(samples, model, records, epsilon=HUGE, **options):
    options.setdefault("accountant", accountant())
    return samples.calibrate(model, DataLoader(records, batch_size=100), epsilon, 1e-5, **options)


# -- the estimate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_without_noise_it_is_the_root_of_the_bounded_scores(likelihood, tmp_path):
    """By scipy, from the equation: of classes the clipped slope of log p less what the prediction
    expects; normal deviates have a mean square of 1, and a little less where it is cut. A file
    keeps it, and it is found again.
    """
    samples, model, records = problem(likelihood, 12_000)  # which outweigh the prior
    x, y = records.tensors
    outputs = samples.outputs(model, x).numpy()
    if likelihood == "bernoulli":
        outputs = np.stack([np.zeros_like(outputs), outputs], -1)
    log_p = logsumexp(log_softmax(outputs, -1), 0) - math.log(len(samples))
    of_normal = norm.expect(lambda z: min(z * z, 6.25))

    def of_classes(t):
        p = np.exp(log_softmax(log_p / math.exp(t), -1))
        slope = (p * log_p).sum(-1, keepdims=True) - log_p
        clipped = np.clip(slope / math.exp(t), -0.5, 0.5)
        chosen = np.take_along_axis(clipped, y.long().numpy()[:, None], -1)[:, 0]
        return (chosen - (p * clipped).sum(-1)).sum()

    def of_a_mixture(t):
        inside = norm.cdf(y.numpy(), outputs[..., 0], np.exp(outputs[..., 1] / 2 + t)).mean(0)
        return np.minimum(np.square(norm.ppf(inside)), 6.25).mean() - of_normal

    total, unit = (of_a_mixture, 2) if likelihood == "normal" else (of_classes, 1)
    found = calibrated(samples, model, records)
    # five steps on a grid of spacing .005
    assert math.log(found) / unit == pytest.approx(brentq(total, -2, 2), abs=0.01)
    assert found ** (1 / unit) == pytest.approx(2.5, rel=0.15)
    samples.save(tmp_path / "samples.pt")
    again = PosteriorSamples.load(tmp_path / "samples.pt")
    assert found == samples.temperature == again.temperature
    assert calibrated(again, model, records) == pytest.approx(found, rel=0.02)


def test_of_means_with_a_noise_it_is_the_factor_of_its_variance():
    n = 5000
    samples, model, x = sampled(np.zeros((2, n)), "normal", noise_std=2.0)
    y = torch.as_tensor(norm.ppf((np.arange(n) + 0.5) / n, scale=2 * 0.4))
    assert calibrated(samples, model, TensorDataset(x, y)) == pytest.approx(0.4**2, rel=0.02)


@examples(24)
@given(st.floats(-1, 1), st.floats(4, 6))
def test_the_posterior_of_a_curve_of_the_assumed_shape(t, log10_count):
    """S(t') = J (1 − e^{2(t' − t)})/2 with little noise has the mean t. Noise that no number of
    records could be seen in leaves 0, and no result is beyond the grid.
    """

    def score(at):
        return 10**log10_count * (1 - math.exp(2 * (at - t))) / 2

    assert calibration.estimate(score, 1e-3, False)[0] == pytest.approx(t, abs=0.03)
    assert calibration.estimate(lambda t: 0.0, 1e12, False)[0] == pytest.approx(0, abs=0.01)
    for extreme in (1e12, -1e12):
        assert -2.5 <= calibration.estimate(lambda t, s=extreme: s, 1.0, False)[0] <= 2.5


def draw_only(patch, value):
    """Of every standard normal number, so that no warning comes or stays away by chance."""

    def constant(self, size, *, dtype, device, hides=()):
        return value * torch.ones(size, dtype=dtype)

    patch.setattr(GaussianNoise, "standard_normal", constant)


def test_a_warning_says_so_and_no_bar_tells_the_number_of_records(monkeypatch):
    samples, model, records = problem("categorical")
    bars = []
    draw_only(monkeypatch, 0.0)
    monkeypatch.setattr("torch_dpbayes.words.tqdm", lambda steps, *_, **__: bars.append(1) or steps)
    with pytest.warns(UserWarning):
        calibrated(samples, model, records, 0.01)
    assert not bars
    samples.predict(model, records.tensors[0])
    assert bars
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(samples, model, records)


def test_what_the_model_draws_does_not_follow_the_programs_seed():
    samples, model, records = problem("categorical", n=10)
    seen = []
    torch.manual_seed(7)

    def forward(net, batch):
        seen.append(torch.initial_seed())
        return net(batch[0])

    calibrated(samples, model, records, forward=forward)
    assert seen and 7 not in seen


# -- the charge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_the_noise_that_is_added_is_charged(relation, monkeypatch):
    """Every standard normal number is 1: a release less its sum is its noise's std."""
    samples, model, records = problem("categorical")
    held, stds, released = accountant(2.0, relation), [], calibration._released
    draw_only(monkeypatch, 1.0)

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


def scores_of(samples, model, *records):
    """The function whose noisy values are released."""
    held = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "estimate", lambda score, *_: held.append(score) or (0.0, 0.0))
        calibrated(samples, model, TensorDataset(*records))
    return held[0]


@examples(30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(LIKELIHOODS))
def test_a_record_moves_the_sum_by_at_most_one(seed, likelihood):
    """Whatever its label and outputs are, at every temperature; a broken one by nothing."""
    _, model, records = problem(likelihood, 20, seed % 1000)
    (x, y), draw = records.tensors, np.random.default_rng(seed)
    size, table = 10.0 ** draw.uniform(-3, 8), model.output.detach() / 1.1
    table[0] = torch.as_tensor(size * draw.normal(size=table[0].shape))
    classes = {"categorical": 4, "bernoulli": 2}
    y[0] = draw.integers(classes[likelihood]) if likelihood in classes else size * draw.normal()

    def sums(values, labels):
        score = scores_of(*thrice(table, likelihood)[:2], values, labels)
        return np.array([score(t) for t in (-2.0, -0.5, 0.0, 0.7, 2.0)])

    assert np.abs(sums(x, y) - sums(x[1:], y[1:])).max() <= 1 + 1e-9
    others = sums(x[1:], y[1:])
    y[0] = {"normal": math.nan}.get(likelihood, 17)
    assert np.abs(sums(x, y) - others).max() < 1e-9


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_is_one_records(likelihood, value):
    """Nothing is raised, either. ``collect`` refuses such parameters: a model computes them."""

    class Breaks(Table):
        def forward(self, x):
            output = super().forward(x)
            is_first = (x == 0).view(-1, *[1] * (output.dim() - 1))
            is_last = torch.arange(output[0].numel()) == output[0].numel() - 1
            return torch.where(is_first & is_last, value, output)

    samples, model, records = problem(likelihood, 20)
    breaks, (x, y) = Breaks(model.output.detach()), records.tensors
    whole, other = scores_of(samples, breaks, x, y), scores_of(samples, breaks, x[1:], y[1:])
    for t in (-2.0, 0.0, 0.7):
        assert abs(whole(t) - other(t)) <= (1e-9 if math.isnan(value) else 1 + 1e-9)


def test_whatever_a_likelihood_says_of_a_record_its_score_is_at_most_one():
    class Any(Categorical):
        def scores(self, compact, y, t):
            return torch.tensor([7.0, -math.inf, math.nan, 0.5])

    score = calibration.score_of(Any(), torch.zeros(4, 3), torch.zeros(4))
    assert score(0.0) == 1 - 1 + 0 + 0.5


def test_a_model_that_mixes_records_is_run_for_each_alone():
    class Mixing(Table):
        def forward(self, x):
            return super().forward(x) * (1 if len(x) % 2 else -1)

    samples, model, records = problem("categorical", 50)
    x, y = records.tensors
    mixing = Mixing(model.output.detach())
    found = [scores_of(samples, mixing, x[:n], y[:n])(0.3) for n in (50, 49)]
    assert abs(found[0] - found[1]) <= 1


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
        samples.calibrate(model, DataLoader(data), accountant=accountant(1.0))
    assert caught.value.code in ("samples", "model-map") and samples.temperature == 1


def test_an_error_that_a_record_causes_is_charged_and_does_not_show_it():
    """Of an index in an operation in place, whose error names it."""

    class Puts(Table):
        def forward(self, x):
            h = super().forward(x % 10)
            return h.clone().scatter_add_(1, x[:, None], 0 * h[:, :1])

    samples, model, _ = sampled(torch.zeros(2, 10, 3), "categorical")
    model = Puts(model.output.detach())
    with pytest.raises(RuntimeError, match="4711"):
        model(torch.full((1,), 4711))
    held = accountant(1.0)
    records = TensorDataset(torch.full((60,), 4711), torch.randint(3, (60,)))
    with pytest.raises(dpb.DPBayesError) as caught:
        calibrated(samples, model, records, 1.0, accountant=held)
    assert "4711" not in str(caught.value) and len(held)


X, Y = torch.arange(100), torch.randint(4, (100,))
BUFFERED = Table(torch.zeros(100, 4))
BUFFERED.register_buffer("added", torch.zeros(()))
ONE_NUMBER = sampled(torch.zeros(2, 100), "normal")
REFUSED = {  # what is given instead, and the code
    "no accountant": ({"accountant": None}, "argument"),
    "users": ({"accountant": accountant(1.0, unit="user")}, "argument"),
    "a buffer that changed": ({"model": BUFFERED}, "model-buffer"),
    "no targets": ({"data": TensorDataset(X)}, "argument-type"),
    "two targets": ({"data": TensorDataset(X, Y[:, None].repeat(1, 2))}, "samples"),
    "no sample": ({"samples": PosteriorSamples("categorical")}, "state"),
    "means without noise": ({"samples": ONE_NUMBER[0], "model": ONE_NUMBER[1]}, "samples"),
    "a record twice": ({"data": Subset(TensorDataset(X, Y), [0, 0])}, "loader-repeats"),
    "a stream": ({"data": ChainDataset([])}, "loader-iterable"),
    "more than the budget": ({"epsilon": 5.0}, "budget-exceeded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_charges_and_changes_nothing(name):
    samples, model, records = problem("categorical", 100)
    changed, code = REFUSED[name]
    given = {"model": model, "data": records, "accountant": accountant(1.0), "samples": samples}
    given |= changed
    samples, held = given.pop("samples"), given["accountant"]
    with refused(code):
        samples.calibrate(loader=DataLoader(given.pop("data"), batch_size=10), **given)
    assert (held is None or len(held) == 0) and samples.temperature == 1.0


@pytest.mark.filterwarnings("ignore:the noise of this calibration is too large:UserWarning")
def test_a_share_of_the_budget():
    """The noise of the steps leaves room for it, and it is charged when it is used, once."""
    data = TensorDataset(torch.randn(400, 5), torch.randint(3, (400,)))
    engine, samples = dpb.PrivacyEngine(), PosteriorSamples()
    given = {"module": nn.Linear(5, 3), "data_loader": DataLoader(data, batch_size=100)}
    given |= {"optimizer": partial(dpb.optim.DPSGLD, lr=0.5), "calibrate": 0.1}
    given |= {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 3}
    plan = engine.plan(**given)
    net, optimizer, loader = engine.make_private_with_epsilon(**given)
    assert (engine.accountant.epsilon, engine.accountant.delta) == (2.0, 1e-5)
    steps.train(net, optimizer, loader, epochs=3)
    samples.collect(net)
    before, reserved = engine.get_epsilon(1e-5), loader.sampler_of_draws.reserved
    whole = total_multiplier(accountant(2.0), None, None)
    assert reserved == pytest.approx(whole / math.sqrt(0.1))
    with pytest.raises(dpb.DPBayesError):
        samples.calibrate(net, loader, accountant=(other := accountant(1.0)))
    assert len(other) == 0 and engine.get_epsilon(1e-5) == before < 1.97
    samples.calibrate(net, loader)
    assert 1.97 < engine.get_epsilon(1e-5) <= 2.0
    assert plan.epsilon == pytest.approx(engine.get_epsilon(1e-5), rel=1e-3)
    charged = [charge.event for charge in engine.accountant.history[-5:]]
    assert charged == calibration.event_of(reserved).events
    counts = [charge.count for charge in engine.accountant.history]
    temperature = samples.temperature
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        samples.calibrate(net, loader)
    loader.sampler_of_draws.ranks = object()
    with pytest.raises(dpb.DPBayesError):
        samples.calibrate(net, loader, epsilon=5.0)
    assert [charge.count for charge in engine.accountant.history] == counts
    assert samples.temperature == temperature
