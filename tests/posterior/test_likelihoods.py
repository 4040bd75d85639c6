"""What each likelihood predicts, against closed forms, scipy and quadrature."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import simpson
from scipy.special import logsumexp
from scipy.stats import entropy, norm
from support.examples import examples
from torch import nn

from torch_dpbayes import PosteriorSamples, metrics


class Constant(nn.Module):
    """A model that ignores its input: its output is a parameter, one row a record."""

    def __init__(self, output, **scales):
        super().__init__()
        self.output = nn.Parameter(torch.as_tensor(output, dtype=torch.float64))
        for name, value in scales.items():
            setattr(self, name, nn.Parameter(torch.as_tensor(value, dtype=torch.float64)))

    def forward(self, x):
        return self.output[: len(x)] + 0 * x.sum()


def sampled(outputs, *arguments, scales=None, **options):
    """Samples whose outputs are ``outputs[s]``, the model, and inputs."""
    samples = PosteriorSamples(*arguments, burn_in=0, **options)
    for s, output in enumerate(outputs):
        model = Constant(output, **({} if scales is None else {"log_std": scales[s]}))
        samples.collect(model)
    return samples, model, torch.zeros(len(outputs[0]), 1, dtype=torch.float64)


draws = st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))


SHAPES = [*(("categorical", s) for s in ((2,), (3,), (4, 3)))]
SHAPES += [*(("bernoulli", s) for s in ((), (1,), (3,)))]


@given(draws, st.sampled_from(SHAPES))
def test_classes(numbers, of):
    """A logit is two classes, of which the second is predicted."""
    (size, n, seed), (kind, shape) = numbers, of
    generator = np.random.default_rng(seed)
    outputs = generator.normal(scale=2, size=(size, n, *shape))
    samples, model, x = sampled(outputs, *([kind] if shape != (3,) or kind == "bernoulli" else []))
    scores = outputs
    if kind == "bernoulli":
        logits = outputs.reshape(size, n, *(shape if shape != (1,) else ()))
        scores = np.stack([np.zeros_like(logits), logits], -1)
    log_p = scores - logsumexp(scores, -1, keepdims=True)
    p = np.exp(log_p)
    points = p if kind == "categorical" else p[..., 1]
    y = generator.integers(p.shape[-1], size=p.shape[1:-1])
    predicted = samples.predict(model, x)
    assert predicted.numpy() == pytest.approx(points.mean(0))
    chosen = np.take_along_axis(log_p, np.broadcast_to(y, log_p.shape[:-1])[..., None], -1)
    wanted = logsumexp(chosen.reshape(size, n, -1).sum(2), 0) - math.log(size)
    for targets in (torch.tensor(y), torch.tensor(y).double()):
        found = samples.log_likelihood(model, x, targets)
        assert found.numpy() == pytest.approx(wanted)
    if p.ndim == 3:
        nll = metrics.negative_log_likelihood(predicted, torch.tensor(y))
        assert nll == pytest.approx(-wanted.mean())
    total, own = entropy(p.mean(0), axis=-1), entropy(p, axis=-1).mean(0)
    assert samples.predictive_entropy(model, x).numpy() == pytest.approx(total)
    information = samples.mutual_information(model, x).numpy()
    assert information == pytest.approx(total - own, abs=1e-12)
    quantiles = samples.predictive_quantiles(model, x, (0.1, 0.8)).numpy()
    assert quantiles == pytest.approx(np.quantile(points, (0.1, 0.8), axis=0))


FORMS = ["mean and log variance", "[n]", "[n, 1]", "[n, targets]", "learned"]


@pytest.mark.parametrize("form", FORMS)
@examples(24)
@given(draws)
def test_normal(form, numbers):
    size, n, seed = numbers
    generator = np.random.default_rng(seed)
    shape = (n, 2) if form == "[n, targets]" else (n,)
    means, stds = generator.normal(scale=2, size=(size, *shape)), np.full((size, *shape), 0.7)
    outputs, options = means, {"noise_std": 0.7}
    if form == "mean and log variance":
        stds = np.exp(generator.normal(size=(size, n)))
        outputs, options = np.stack([means, 2 * np.log(stds)], -1), {}
    elif form == "[n, 1]":
        outputs = means[..., None]
    elif form == "learned":
        scales = generator.normal(size=size)
        stds = np.exp(np.broadcast_to(scales[:, None], means.shape))
        options = {"noise_std": lambda net: net.log_std.exp(), "scales": scales}
    samples, model, x = sampled(outputs, "normal", **options)
    assert samples.predict(model, x).numpy() == pytest.approx(means.mean(0))
    y = generator.normal(scale=2, size=shape)
    each = norm.logpdf(y, means, stds).reshape(size, n, -1).sum(2)
    found = samples.log_likelihood(model, x, torch.tensor(y))
    assert found.numpy() == pytest.approx(logsumexp(each, 0) - math.log(size))
    quantiles = samples.predictive_quantiles(model, x, (0.1, 0.8)).numpy()
    assert quantiles.shape == (2, *shape)
    for q, at in zip((0.1, 0.8), quantiles, strict=True):
        assert norm.cdf(at, means, stds).mean(0) == pytest.approx(np.full(shape, q), abs=1e-9)

    m, s = means.reshape(size, -1)[:, 0], stds.reshape(size, -1)[:, 0]

    # the entropy by Simpson's rule, fine enough for the narrowest component
    z = np.linspace((m - 12 * s).min(), (m + 12 * s).max(), 20_001)
    log_p = logsumexp(norm.logpdf(z[:, None], m, s), 1) - math.log(size)
    total = -simpson(np.exp(log_p) * log_p, x=z)
    own = norm.entropy(m, s).mean()
    assert samples.predictive_entropy(model, x).flatten()[0].item() == pytest.approx(
        total, abs=0.01
    )
    assert samples.mutual_information(model, x).flatten()[0].item() == pytest.approx(
        max(total - own, 0), abs=0.01
    )


def test_nothing_is_guessed_of_one_or_two_columns():
    for shape in ((4,), (4, 1), (4, 2)):
        samples, model, x = sampled(np.zeros((3, *shape)))
        for call in (samples.predict, samples.mutual_information, samples.predictive_entropy):
            with pytest.raises(
                ValueError, match=r'"categorical"\) for classes.*"normal" for means'
            ):
                call(model, x)
        assert samples.predict(model, x, transform=None).shape == shape
    samples, model, x = sampled(np.zeros((3, 4, 3)))
    assert samples.predict(model, x).shape == (4, 3)


def of(shape, y, *likelihood, call=None, **options):
    """``log_likelihood``, or another ``call``, of outputs of this shape."""

    def refused():
        samples, model, x = sampled(np.zeros((3, *shape)), *likelihood, **options)
        return samples.log_likelihood(model, x, y) if call is None else call(samples, model, x)

    return refused


def quantiles(*at):
    return lambda samples, model, x: samples.predictive_quantiles(model, x, at)


def made(*arguments, **options):
    return lambda: PosteriorSamples(*arguments, **options)


NORMAL = {"noise_std": 1.0}
REFUSED = {
    "one logit": (of((4, 1), torch.zeros(4), "categorical"), 'for one logit write Post.*"bern'),
    "no class": (of((4, 3), torch.full((4,), 3), "categorical"), "whole numbers from 0 to 2"),
    "below 0": (of((4, 3), torch.full((4,), -1), "categorical"), "whole numbers from 0 to 2"),
    "too many": (of((4, 3), torch.zeros(5), "categorical"), "x has 4 records and y has 5"),
    "2 for 0 or 1": (of((4,), torch.full((4,), 2.0), "bernoulli"), "whole numbers from 0 to 1"),
    "a half": (of((4,), torch.full((4,), 0.5), "bernoulli"), "whole numbers from 0 to 1"),
    "one of two": (of((4, 2), torch.zeros(4), "bernoulli"), "pass one target for each"),
    "three columns": (of((4, 3), torch.zeros(4, 3), "normal"), "several targets pass noise_std="),
    "no noise": (of((4,), torch.zeros(4), "normal"), "noise_std=..."),
    "two of one": (of((4, 2), torch.zeros(4, 2), "normal"), "pass one target for each"),
    "no standard deviation": (
        of((4, 1), torch.zeros(4), "normal", noise_std=lambda net: -1.0),
        "given as noise_std returned a value that is not positive",
    ),
    "entropy without noise": (
        of((4,), None, "normal", call=PosteriorSamples.predictive_entropy),
        "this needs the noise too",
    ),
    "quantiles without noise": (
        of((4,), None, "normal", call=quantiles(0.5)),
        "this needs the noise too",
    ),
    **{
        f"quantiles {at}": (
            of((4,), None, "normal", call=quantiles(*at), **NORMAL),
            "strictly between 0 and 1",
        )
        for at in ((), (0.0,), (0.5, 1.0), (math.nan,))
    },
    "poisson": (made("poisson"), r"likelihood=.poisson.: write PosteriorSamples"),
    "noise of classes": (made(noise_std=1.0), 'likelihood="normal"'),
    **{
        f"noise {value}": (made("normal", noise_std=value), "noise_std must be positive")
        for value in (0.0, -1.0, math.inf, math.nan)
    },
    **{
        f"{name} = {value}": (made(**{name: value}), f"{name} must be an integer")
        for name, value in (
            ("burn_in", -1),
            ("burn_in", True),
            ("thin", 0),
            ("thin", 1.5),
            ("max_samples", 1),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    refused, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        refused()


def test_a_mean_is_predicted_without_its_noise():
    samples, model, x = sampled(np.zeros((3, 4)), "normal")
    assert samples.predict(model, x).shape == (4,)


def test_a_likelihood_is_kept_in_the_file(tmp_path):
    samples, model, x = sampled(np.random.normal(size=(3, 4)), "normal", noise_std=0.3)
    samples.save(tmp_path / "samples.pt")
    loaded = PosteriorSamples.load(tmp_path / "samples.pt")
    assert (loaded.likelihood, loaded.noise_std, loaded.burn_in) == ("normal", 0.3, 0)
    entropies = loaded.predictive_entropy(model, x)
    torch.testing.assert_close(entropies, samples.predictive_entropy(model, x))


# -- the second half -------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 200))
def test_without_burn_in_the_second_half_is_kept(thin, max_samples, calls):
    """Evenly spaced, over the last half of the calls to within two spacings, and as many as fit."""
    model, samples = Constant([0.0]), PosteriorSamples("normal", None, thin, max_samples)
    x = torch.zeros(1, 1, dtype=torch.float64)
    for call in range(calls):
        nn.init.constant_(model.output, call)
        samples.collect(model)
        assert 1 <= len(samples) <= max_samples
    kept = [int(s) for s in samples.outputs(model, x).flatten()]
    assert samples.num_collected == calls
    doublings = math.log2(samples.thin / thin)
    assert doublings == int(doublings)
    assert kept == list(range(kept[0], calls, samples.thin)) and kept[0] % samples.thin == 0
    due = len(range(0, calls, samples.thin))
    assert len(kept) == due - due // 2
    if doublings:  # half as many would have left room
        assert len(kept) >= max_samples // 2


def test_a_call_that_is_not_due_copies_nothing(monkeypatch):
    model, samples = Constant([0.0]), PosteriorSamples(thin=5)
    samples.collect(model)
    monkeypatch.setattr(model, "named_parameters", None)
    for _ in range(4):
        samples.collect(model)
    with pytest.raises(TypeError):
        samples.collect(model)


# -- the halves compared ---------------------------------------------------------------------------


@pytest.mark.chance(1e-7)
def test_r_hat_of_predictions():
    generator = np.random.default_rng()
    settled = generator.normal(size=(1000, 3))
    moving = settled + np.linspace(-3, 3, 1000)[:, None]
    samples, model, x = sampled(settled, "normal", max_samples=1000)
    # of independent draws (p̄₁ − p̄₂)²/2W is χ²₁/m: beyond 31/500 once in 4·10⁷
    assert float(samples.r_hat(model, x).max()) < math.sqrt(1 + 31 / 500)
    samples, model, x = sampled(moving, "normal", max_samples=1000)
    found = samples.r_hat(model, x).numpy()
    first, second = moving[:500], moving[500:]
    within = (first.var(0, ddof=1) + second.var(0, ddof=1)) / 2
    between = 500 * np.stack([first.mean(0), second.mean(0)]).var(0, ddof=1)
    assert found == pytest.approx(np.sqrt(499 / 500 + between / 500 / within))
    assert found.min() > 1.5
    still, model, x = sampled(np.zeros((8, 3)), "normal")
    assert float(still.r_hat(model, x).max()) <= 1
    few, model, x = sampled(np.zeros((3, 3)), "normal")
    with pytest.raises(RuntimeError, match="two halves of two samples"):
        few.r_hat(model, x)


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
@pytest.mark.parametrize("of", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_labels_of_every_type_and_in_a_column(kind, of):
    scores = torch.randn(4, 6, 2, dtype=torch.float64)
    outputs = scores if kind == "categorical" else scores[..., 1] - scores[..., 0]
    samples, model, x = sampled(outputs, kind)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    wanted = scores.softmax(-1).mean(0)[torch.arange(6), y].log()
    for labels in (y.to(of), y.to(of)[:, None]):
        assert torch.allclose(samples.log_likelihood(model, x, labels), wanted)


def test_a_function_for_the_noise_is_missed_after_loading(tmp_path):
    """Means of two targets would pass for a mean and a log variance."""
    outputs, path = torch.randn(3, 5, 2, dtype=torch.float64), tmp_path / "samples.pt"
    scales = [0.1, 0.2, 0.3]
    samples, model, x = sampled(
        outputs, "normal", noise_std=lambda net: net.log_std.exp(), scales=scales
    )
    samples.save(path)
    loaded = PosteriorSamples.load(path)
    loaded.save(path)  # which changes nothing
    loaded = PosteriorSamples.load(path)
    with pytest.raises(ValueError, match="was a function"):
        loaded.predict(model, x)
    assert torch.equal(loaded.outputs(model, x), outputs)
    loaded.noise_std = samples.noise_std
    assert torch.equal(loaded.predict(model, x), outputs.mean(0))


@pytest.mark.parametrize("noise_std", [np.float64(0.5), torch.tensor(0.5), 0.5])
def test_any_number_for_the_noise_is_kept(noise_std, tmp_path):
    samples, _, _ = sampled(torch.zeros(2, 3), "normal", noise_std=noise_std)
    samples.save(tmp_path / "samples.pt")
    assert PosteriorSamples.load(tmp_path / "samples.pt").noise_std == 0.5
