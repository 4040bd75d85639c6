"""What each likelihood predicts, against closed forms, scipy and quadrature."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from drawn import sampled
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import simpson
from scipy.special import log_softmax, logsumexp
from scipy.stats import binom, entropy, norm
from support.examples import examples
from support.refusals import refused

from torch_dpbayes import PosteriorSamples, metrics
from torch_dpbayes.errors import ArgumentError

draws = st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))
SHAPES = [("categorical", shape) for shape in ((2,), (3,), (4, 3))]
SHAPES += [("bernoulli", shape) for shape in ((), (1,), (3,))]


@given(
    draws, st.sampled_from(SHAPES), st.sampled_from([1.0, 2.5]), st.sampled_from([0.0, 2.0, 1e3])
)
def test_classes(numbers, of, temperature, scale):
    """A logit is two classes, of which the second is predicted."""
    (size, n, seed), (kind, shape) = numbers, of
    generator = np.random.default_rng(seed)
    outputs = generator.normal(scale=scale, size=(size, n, *shape))
    samples, model, x = sampled(outputs, *([kind] if shape != (3,) or kind == "bernoulli" else []))
    scores = outputs
    if kind == "bernoulli":
        logits = outputs.reshape(size, n, *(shape if shape != (1,) else ()))
        scores = np.stack([np.zeros_like(logits), logits], -1)
    log_p = scores - logsumexp(scores, -1, keepdims=True)
    p, log_mean = np.exp(log_p), logsumexp(log_p, 0) - math.log(size)
    # the average is what is tempered
    tempered, samples.temperature = log_softmax(log_mean / temperature, -1), temperature
    points, average = (q if kind == "categorical" else q[..., 1] for q in (p, np.exp(tempered)))
    y = generator.integers(p.shape[-1], size=p.shape[1:-1])
    predicted = samples.predict(model, x)
    assert predicted.numpy() == pytest.approx(average)
    held = log_p if temperature == 1 else tempered[None]
    chosen = np.take_along_axis(held, np.broadcast_to(y, held.shape[:-1])[..., None], -1)
    wanted = logsumexp(chosen.reshape(len(held), n, -1).sum(2), 0) - math.log(len(held))
    for dtype in (torch.int64, torch.float32, *([torch.bool] if y.max() < 2 else [])):
        labels = torch.tensor(y).to(dtype)
        for targets in (labels, labels[:, None]) if y.ndim == 1 else (labels,):
            found = samples.log_likelihood(model, x, targets)
            assert found.numpy() == pytest.approx(wanted)
    if p.ndim == 3 and scale < 1e3:  # whose smallest probabilities are 0
        nll = metrics.negative_log_likelihood(predicted, torch.tensor(y))
        assert nll == pytest.approx(-wanted.mean())
    entropies = samples.predictive_entropy(model, x).numpy()
    assert entropies == pytest.approx(entropy(np.exp(tempered), axis=-1))
    total, own = entropy(p.mean(0), axis=-1), entropy(p, axis=-1).mean(0)
    information = samples.mutual_information(model, x).numpy()
    assert information == pytest.approx(total - own, abs=1e-12)
    quantiles = samples.predictive_quantiles(model, x, np.array([0.1, 0.8])).numpy()
    assert quantiles == pytest.approx(np.quantile(points, (0.1, 0.8), axis=0))


FORMS = ["mean and log variance", "[n]", "[n, 1]", "[n, targets]"]


@examples(100)
@given(draws, st.sampled_from(FORMS), st.sampled_from([1.0, 2.5]))
def test_normal(numbers, form, temperature):
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
    samples, model, x = sampled(outputs, "normal", **options)
    samples.temperature, stds = temperature, stds * math.sqrt(temperature)
    assert samples.predict(model, x).numpy() == pytest.approx(means.mean(0))
    y = generator.normal(scale=2, size=shape)
    each = norm.logpdf(y, means, stds).reshape(size, n, -1).sum(2)
    found = samples.log_likelihood(model, x, torch.tensor(y))
    assert found.numpy() == pytest.approx(logsumexp(each, 0) - math.log(size))
    quantiles = samples.predictive_quantiles(model, x, (0.1, 0.8)).numpy()
    assert quantiles.shape == (2, *shape)
    for q, at in zip((0.1, 0.8), quantiles, strict=True):
        assert norm.cdf(at, means, stds).mean(0) == pytest.approx(np.full(shape, q), abs=1e-9)

    # the entropy by Simpson's rule, fine enough for the narrowest component
    m, s = means.reshape(size, -1)[:, 0], stds.reshape(size, -1)[:, 0]
    z = np.linspace((m - 12 * s).min(), (m + 12 * s).max(), 20_001)
    log_p = logsumexp(norm.logpdf(z[:, None], m, s), 1) - math.log(size)
    total = -simpson(np.exp(log_p) * log_p, x=z)
    own = norm.entropy(m, s).mean()
    entropy_found = samples.predictive_entropy(model, x).flatten()[0].item()
    assert entropy_found == pytest.approx(total, abs=0.01)
    if temperature == 1:
        information = samples.mutual_information(model, x).flatten()[0].item()
        assert information == pytest.approx(max(total - own, 0), abs=0.01)


@pytest.mark.chance(1e-7)
@pytest.mark.filterwarnings("ignore:the two halves")
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
    still, model, x = sampled(np.zeros((8, 3)), "normal")
    assert float(still.r_hat(model, x).max()) <= 1


@pytest.mark.chance(1e-5)
def test_halves_that_disagree_are_said():
    """At the stated level of independent samples, of predictions that all move together."""

    def alarms(drift):
        path = drift * np.linspace(-1, 1, 30)
        found = 0
        for noise in np.random.default_rng().normal(size=(50, 30)):
            samples, model, x = sampled((path + noise).repeat(3).reshape(30, 3), "normal")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                samples.r_hat(model, x)
            found += len(caught)
        return found

    assert alarms(0.0) <= binom.isf(1e-5, 50, 0.01)
    assert alarms(6.0) > 25


# -- refusals --------------------------------------------------------------------------------------


def of(shape, *likelihood, call=PosteriorSamples.predict, y=None, **options):
    """``call``, or ``log_likelihood`` of ``y``, of outputs of this shape."""

    def attempt():
        samples, model, x = sampled(np.zeros((3, *shape)), *likelihood, **options)
        return call(samples, model, x) if y is None else samples.log_likelihood(model, x, y)

    return attempt


def quantiles(*at):
    return partial(PosteriorSamples.predictive_quantiles, quantiles=at)


ENTROPY, INFORMATION = PosteriorSamples.predictive_entropy, PosteriorSamples.mutual_information
REFUSED = {
    "samples": [
        of((4,)),  # nothing is guessed of it
        of((4, 1)),
        of((4, 2), call=INFORMATION),
        of((4, 1), "categorical"),
        of((4, 3), "categorical", y=torch.zeros(5)),
        *(of((4, 3), "categorical", y=torch.full((4,), bad)) for bad in (3, -1)),
        *(of((4,), "bernoulli", y=torch.full((4,), bad)) for bad in (2.0, 0.5)),
        of((4, 2), "bernoulli", y=torch.zeros(4)),
        of((4, 3), "normal"),
        of((4, 2), "normal", y=torch.zeros(4, 2)),
        of((4,), "normal", y=torch.zeros(4)),  # without noise
        *(of((4,), "normal", call=call) for call in (ENTROPY, quantiles(0.5))),
    ],
    "argument": [
        *(
            of((4,), "normal", call=quantiles(*at), noise_std=1.0)
            for at in ((), (0.0,), (0.5, 1.0), (math.nan,))
        ),
        partial(PosteriorSamples, "poisson"),
        partial(PosteriorSamples, noise_std=1.0),
        *(partial(PosteriorSamples, "normal", noise_std=bad) for bad in (0.0, math.nan)),
        partial(PosteriorSamples, burn_in=-1),
        partial(PosteriorSamples, thin=1.5),
        partial(PosteriorSamples, max_samples=1),
    ],
    "state": [
        of((4,), "normal", call=lambda s, m, x: PosteriorSamples().predict(m, x)),
        of((4,), "normal", call=PosteriorSamples.r_hat),
    ],
}


@pytest.mark.parametrize(
    ("code", "call"), [(code, call) for code, calls in REFUSED.items() for call in calls]
)
def test_what_does_not_fit_is_refused(code, call):
    with refused(code):
        call()


@pytest.mark.parametrize("noise_std", [-1.0, 0.0, math.nan, lambda net: torch.tensor(0.3)])
def test_a_noise_that_is_set_later_is_checked(noise_std):
    samples, model, x = sampled(torch.randn(3, 4), "normal", noise_std=1.0)
    samples.noise_std = noise_std
    with pytest.raises(ArgumentError):
        samples.log_likelihood(model, x, torch.zeros(4))
