"""PosteriorSamples against models evaluated one sample at a time by ``load_state_dict``,
closed forms, and scipy.
"""

import copy
import math
import os
import resource
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.stats import entropy, norm
from scipy.stats import t as t_distribution
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.posterior import PosteriorSamples, outputs


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(3, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.decode = nn.Linear(3, 4, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x):
        return torch.tanh(self.embed(x)) @ self.decode.weight + x


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        z = self.linear(x)
        return z if float(self.linear.bias[0].detach()) > 0 else 2 * z


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        buffer = x.new_zeros(len(x), 4)
        buffer += self.linear(x)  # vmap cannot write a batched value into an unbatched tensor
        return buffer


def mlp(inputs=3, outputs=4):
    return nn.Sequential(
        nn.Linear(inputs, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, outputs)
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)
    )


def frozen_base():
    model = mlp()
    model[0].requires_grad_(False)
    return model


MODELS = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "mlp": (mlp, (3,)),
    "mlp in double": (lambda: mlp().double(), (3,)),
    "cnn": (cnn, (1, 4, 4)),
    "frozen base": (frozen_base, (3,)),
    "tied": (Tied, (3,)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 3)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 3)),
    "data-dependent": (DataDependent, (3,)),
    "in place": (InPlace, (3,)),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(8, 4)
        ),
        (2, 4),
    ),
}


def walk(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))


def collected(model, count=12, **options):
    """Samples of a random walk, and the state dict of every step."""
    samples, states = PosteriorSamples(**{"burn_in": 0, **options}), []
    for _ in range(count):
        walk(model)
        samples.collect(model)
        states.append(copy.deepcopy(model.state_dict()))
    return samples, states


def one_at_a_time(model, states, x):
    outputs = []
    for state in states:
        other = copy.deepcopy(model)
        other.load_state_dict(state)
        outputs.append(other.eval()(x).detach())
    return torch.stack(outputs)


def inputs(model, shape, n=7):
    return torch.randn(n, *shape, dtype=next(model.parameters()).dtype)


def constant(values, *likelihood, **options):
    """A model without inputs to speak of: its output is its bias. Samples of chosen outputs,
    ``values[s]``.
    """
    model = nn.Linear(1, len(values[0])).double()
    nn.init.zeros_(model.weight)
    samples = PosteriorSamples(*likelihood, burn_in=0, max_samples=max(2, len(values)), **options)
    for value in values:
        with torch.no_grad():
            model.bias.copy_(torch.as_tensor(value, dtype=torch.float64))
        samples.collect(model)
    return model, samples, torch.zeros(1, 1, dtype=torch.float64)


# -- what is kept ----------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(1, 4), st.integers(2, 7), st.integers(0, 80))
def test_kept_calls_are_evenly_spaced_and_bounded(burn_in, thin, max_samples, calls):
    model = nn.Linear(1, 1, bias=False)
    samples = PosteriorSamples(None, burn_in, thin, max_samples)
    for call in range(calls):
        nn.init.constant_(model.weight, call)
        samples.collect(model)
    kept = (
        [int(s) for s in samples.outputs(model, torch.ones(1, 1)).flatten()] if len(samples) else []
    )
    # the smallest power of two that fits: written down without looking at the implementation's way
    # of getting there
    spacing = thin
    while len(range(burn_in, calls, spacing)) > max_samples:
        spacing *= 2
    assert kept == list(range(burn_in, calls, spacing))
    assert samples.thin == spacing
    assert samples.num_collected == calls


def test_a_sample_is_a_copy_with_the_device_and_dtype_of_the_parameters():
    model = mlp().double()
    samples, states = collected(model, 3)
    walk(model)
    for sample, state in zip(samples._samples, states, strict=True):
        for name, value in sample.items():
            assert torch.equal(value, state[name])
            assert (
                value.dtype == torch.float64
                and not value.requires_grad
                and type(value) is torch.Tensor
            )


@pytest.mark.parametrize(
    "options", [{"burn_in": -1}, {"thin": 0}, {"max_samples": 1}, {"thin": 1.5}, {"burn_in": True}]
)
def test_bad_settings(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PosteriorSamples(**options)


def test_collect_refuses_what_is_no_sample():
    samples = PosteriorSamples(burn_in=0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        samples.collect(nn.Linear(1, 1).requires_grad_(False))
    samples.collect(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"weight was \[3, 2\] and is \[3, 4\]"):
        samples.collect(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"missing weight, bias; added 0.weight, 0.bias"):
        samples.collect(nn.Sequential(nn.Linear(2, 3)))
    diverged = nn.Linear(2, 3)
    with torch.no_grad():
        diverged.bias[1] = float("nan")
    with pytest.raises(FloatingPointError, match="'bias' has non-finite values"):
        samples.collect(diverged)
    assert len(samples) == samples.num_collected == 1


def test_collect_refuses_buffers_that_changed_since_make_private():
    model = cnn()
    model._dpbayes_buffers = {name: b.clone() for name, b in model.named_buffers()}
    samples = PosteriorSamples(burn_in=0)
    samples.collect(model)
    model.eval()(torch.randn(5, 1, 4, 4))
    samples.collect(model)
    model.double()
    samples.collect(model)
    model.train()(torch.randn(5, 1, 4, 4).double())
    with pytest.raises(
        ValueError, match=r"'1\.num_batches_tracked' changed since make_private.*GroupNorm"
    ):
        samples.collect(model)
    with pytest.raises(ValueError, match="changed since make_private"):
        PosteriorSamples().collect(model)  # even if nothing was collected before
    assert len(samples) == 3


def test_collect_refuses_buffers_that_changed_since_the_first_call():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.tensor([1.0, float("nan")]))
    samples = PosteriorSamples(burn_in=1)
    samples.collect(model)
    samples.collect(model)
    model.scale[0] = 2
    with pytest.raises(ValueError, match="'scale' changed since the first collect"):
        samples.collect(model)
    model.scale[0] = 1
    samples.collect(model)
    model.register_buffer("added", torch.zeros(()))
    with pytest.raises(ValueError, match="'added' changed"):
        samples.collect(model)


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.first_cases(10)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_predictions_equal_the_average_over_loaded_models(name, rows):
    build, shape = MODELS[name]
    model = build()
    samples, states = collected(model)
    x = inputs(model, shape, rows)
    expected = one_at_a_time(model, states, x)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(samples.outputs(model, x), expected, **tolerance)
    torch.testing.assert_close(
        samples.predict(model, x, transform=None), expected.mean(0), **tolerance
    )
    torch.testing.assert_close(samples.predict(model, x), expected.softmax(-1).mean(0), **tolerance)
    # a dimension counted from the front
    cubes = samples.predict(model, x, transform=lambda z: z.softmax(1) ** 3)
    torch.testing.assert_close(cubes, (expected.softmax(-1) ** 3).mean(0), **tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_predicting_leaves_the_model_as_it_was(name):
    build, shape = MODELS[name]
    model = build()
    samples, _ = collected(model)
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    modes = [module.training for module in model.modules()]
    parameters = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    x = inputs(model, shape)
    for predict in (
        samples.predict,
        samples.predictive_entropy,
        samples.mutual_information,
        samples.outputs,
    ):
        predict(model, x)
    with pytest.raises(ZeroDivisionError):
        samples.predict(model, x, transform=lambda z: z / (1 // 0))
    assert [module.training for module in model.modules()] == modes
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(p is parameters[name] and p.grad is None for name, p in model.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    copy.deepcopy(model)
    assert model.train()(x).requires_grad


@pytest.mark.first_cases(7)
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "in place"])
@pytest.mark.parametrize(("group", "chunk"), [(1, 2), (3, 3), (5, 100), (12, 1), (100, 7)])
def test_groups_and_chunks_change_nothing(name, group, chunk, monkeypatch):
    build, shape = MODELS[name]
    model = build()
    samples, states = collected(model)
    x = inputs(model, shape)
    expected = one_at_a_time(model, states, x)
    monkeypatch.setattr(outputs, "_GROUP", group)
    monkeypatch.setattr(outputs, "_ROWS", chunk)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(samples.outputs(model, x), expected, **tolerance)
    torch.testing.assert_close(samples.predict(model, x), expected.softmax(-1).mean(0), **tolerance)
    samples.likelihood, samples.noise_std = "normal", 1.0
    quantiles = samples.predictive_quantiles(model, x, (0.1, 0.9))
    assert quantiles.shape == (2, 7, expected.shape[-1])
    assert (quantiles[0] < quantiles[1]).all()


@pytest.mark.parametrize("wrap", [GradSampleHooks, GradSampleModule])
def test_opacus_hooks_keep_nothing_of_a_prediction(wrap):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)
    )
    wrapped = wrap(model)
    target = wrapped if isinstance(wrapped, nn.Module) else model
    samples, states = collected(target)
    x = inputs(model, (1, 4, 4))
    expected = one_at_a_time(
        model, [{k.removeprefix("_module."): v for k, v in s.items()} for s in states], x
    )
    target.train()
    torch.testing.assert_close(samples.outputs(target, x), expected, rtol=1e-4, atol=1e-5)
    for module in model.modules():
        assert not getattr(module, "activations", [])
    for p in model.parameters():
        assert p.grad is None and p.grad_sample is None and p._forward_counter == 0
    F.cross_entropy(target(x), torch.zeros(7, dtype=torch.long)).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad, rtol=1e-4, atol=1e-5)


def test_a_prediction_between_forward_and_backward_leaves_the_gradients_alone():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    GradSampleHooks(model)
    samples, _ = collected(model)
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    loss = F.cross_entropy(model(x), y)
    samples.predict(model, torch.randn(4, 3))
    loss.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad, rtol=1e-4, atol=1e-5)


def test_dtype_and_shape_of_predictions():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = nn.Linear(3, 4).to(dtype)
        samples, _ = collected(model)
        x = torch.randn(5, 3, dtype=dtype)
        assert samples.predict(model, x).dtype == dtype
        assert (
            samples.predict(model, x, transform=lambda z: z.argmax(-1) == 0).dtype == torch.float32
        )  # shares of votes
        assert samples.predict(model, x[:0]).shape == (0, 4)
        assert (
            samples.predictive_entropy(model, x).shape
            == samples.mutual_information(model, x).shape
            == (5,)
        )
        samples.likelihood, samples.noise_std = "normal", 1.0
        assert samples.predictive_quantiles(model, x, [0.5]).dtype == dtype


def test_the_model_may_be_frozen_or_cast_after_training():
    model = frozen_base()
    samples, _ = collected(model)
    x = torch.randn(5, 3)
    expected = samples.predict(model, x)
    model.requires_grad_(False)
    assert torch.equal(samples.predict(model, x), expected)
    cast = samples.predict(model.double(), x.double())
    assert cast.dtype == torch.float64
    torch.testing.assert_close(cast.float(), expected)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"added 0.weight, 0.bias.*frozen like it"):
        samples.predict(model, x.double())
    with pytest.raises(ValueError, match=r"3.weight was \[4, 8\] and is \[5, 8\]"):
        samples.predict(mlp(outputs=5)[:4].requires_grad_(False), x)


def test_bad_predictions():
    samples = PosteriorSamples(burn_in=3)
    model = nn.Linear(3, 4)
    samples.collect(model)
    with pytest.raises(RuntimeError, match="called 1 times and burn_in=3"):
        samples.predict(model, torch.zeros(1, 3))
    for one_value in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))):
        samples, _ = collected(one_value)
        with pytest.raises(
            ValueError, match=r'"categorical"\) for classes, "bernoulli" .*"normal" for means'
        ):
            samples.predict(one_value, torch.zeros(5, 3))
    samples, _ = collected(model)
    with pytest.raises(TypeError, match="x must be a tensor"):
        samples.predict(model, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="one row a record"):
        samples.predict(model, torch.zeros(5, 3), transform=lambda z: z.mean(0))

    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model = Two(3, 4)
    samples, _ = collected(model)
    with pytest.raises(TypeError, match="returned a tuple"):
        samples.predict(model, torch.zeros(5, 3))


# -- uncertainty -----------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_entropies_agree_with_scipy(count, classes, seed):
    scores = np.random.default_rng(seed).normal(scale=3, size=(count, classes))
    model, samples, x = constant(scores, "categorical")
    probabilities = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
    total, expected = entropy(probabilities.mean(0)), entropy(probabilities, axis=1).mean()
    assert samples.predictive_entropy(model, x).item() == pytest.approx(total)
    information = samples.mutual_information(model, x).item()
    assert information >= 0
    assert information == pytest.approx(total - expected, abs=1e-12)


def test_mutual_information_at_its_extremes():
    model, samples, x = constant(
        [[1000.0, 0.0], [0.0, 1000.0]], "categorical"
    )  # certain, and of opposite opinion
    assert samples.mutual_information(model, x).item() == pytest.approx(math.log(2))
    model, samples, x = constant([[0.3, 0.0, 1.0]] * 5)  # of one opinion
    assert samples.mutual_information(model, x).item() == pytest.approx(0, abs=1e-12)
    model, samples, x = constant([[0.0, 0.0, 0.0]])
    assert samples.predictive_entropy(model, x).item() == pytest.approx(math.log(3))


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=15),
    st.floats(0.05, 20),
    st.lists(st.floats(0.001, 0.999), min_size=1, max_size=3),
)
def test_quantiles_are_those_of_the_gaussian_mixture(means, noise_std, quantiles):
    model, samples, x = constant([[m] for m in means], "normal", noise_std=noise_std)
    found = samples.predictive_quantiles(model, x, quantiles)
    assert found.shape == (len(quantiles), 1)
    for q, y in zip(quantiles, found.flatten().tolist(), strict=True):
        at = brentq(lambda z, q=q: norm.cdf(z, means, noise_std).mean() - q, -300, 300, xtol=1e-12)
        # where the mixture has a gap, its CDF is flat and every point of the gap solves the
        # equation
        assert y == pytest.approx(at, abs=1e-6) or norm.cdf(
            y, means, noise_std
        ).mean() == pytest.approx(q, abs=1e-9)


def test_quantiles_of_a_conjugate_linear_regression():
    """Exact posterior draws: the predictive CDF lies within the Dvoretzky-Kiefer-Wolfowitz band of
    the closed form.

    Averaging over the noise cannot widen the band. One band for each of 5 inputs, 1e-6 in all.
    """
    count, prior_std, noise_std = 3000, 2.0, math.sqrt(0.5)  # MSELoss as -log p: variance 1/2
    features, targets = (
        torch.randn(20, 2, dtype=torch.float64),
        torch.randn(20, dtype=torch.float64),
    )
    precision = (
        features.T @ features / noise_std**2 + torch.eye(2, dtype=torch.float64) / prior_std**2
    )
    covariance = torch.linalg.inv(precision)
    mean = covariance @ features.T @ targets / noise_std**2
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((count,))
    model = nn.Linear(2, 1, bias=False).double()
    samples = PosteriorSamples("normal", burn_in=0, max_samples=count)
    for draw in draws:
        with torch.no_grad():
            model.weight.copy_(draw)
        samples.collect(model)

    x = torch.randn(5, 2, dtype=torch.float64)
    quantiles = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    band = math.sqrt(math.log(2 * len(x) / 1e-6) / (2 * count))
    variance = noise_std**2 + (x @ covariance * x).sum(1)
    closed_form = torch.distributions.Normal(x @ mean, variance.sqrt())

    def distance(noise):
        samples.noise_std = noise
        found = samples.predictive_quantiles(model, x, quantiles.tolist())
        return (closed_form.cdf(found) - quantiles[:, None]).abs().max().item()

    assert distance(noise_std) < band
    assert distance(3 * noise_std) > band  # it would be noticed


@pytest.mark.parametrize("quantiles", [[], [0.0], [0.5, 1.0], [float("nan")]])
def test_bad_quantiles(quantiles):
    model, samples, x = constant([[0.0]], "normal", noise_std=1.0)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        samples.predictive_quantiles(model, x, quantiles)


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.inf, math.nan])
def test_bad_noise(noise_std):
    with pytest.raises(ValueError, match="noise_std must be positive"):
        PosteriorSamples("normal", noise_std=noise_std)
    with pytest.raises(ValueError, match='likelihood="normal"'):
        PosteriorSamples(noise_std=1.0)


# -- files -----------------------------------------------------------------------------------------


@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(2, 5), st.integers(0, 15), st.integers(0, 15)
)
def test_a_saved_chain_goes_on_as_if_it_had_not_been_interrupted(
    burn_in, thin, max_samples, before, after
):
    model = nn.Linear(2, 1)
    whole, parts = (
        PosteriorSamples(None, burn_in, thin, max_samples),
        PosteriorSamples(None, burn_in, thin, max_samples),
    )
    for call in range(before + after):
        if call == before:
            with tempfile.TemporaryDirectory() as folder:
                parts.save(Path(folder) / "samples.pt")
                parts = PosteriorSamples.load(Path(folder) / "samples.pt")
        walk(model)
        whole.collect(model)
        parts.collect(model)
    assert repr(parts) == repr(whole)
    for a, b in zip(parts._samples, whole._samples, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_file_holds_tensors_and_plain_numbers(tmp_path):
    model = cnn().double()
    samples, _ = collected(model)
    samples.save(tmp_path / "samples.pt")
    samples.save(str(tmp_path / "samples.pt"))
    assert os.listdir(tmp_path) == ["samples.pt"]
    torch.load(tmp_path / "samples.pt", weights_only=True)
    loaded = PosteriorSamples.load(tmp_path / "samples.pt")
    x = inputs(model, (1, 4, 4))
    assert torch.equal(loaded.predict(model, x), samples.predict(model, x))
    with pytest.raises(ValueError, match="not those of the model collected before"):
        loaded.collect(nn.Linear(2, 2))


def test_saving_keeps_the_usual_permissions_and_follows_links(tmp_path):
    samples, _ = collected(nn.Linear(1, 1))
    (tmp_path / "plain").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    samples.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len(PosteriorSamples.load(tmp_path / "link")) == 12


def test_a_failed_save_leaves_the_older_file_alone(tmp_path):
    path = tmp_path / "samples.pt"
    old, _ = collected(nn.Linear(2, 2))
    old.save(path)
    content = path.read_bytes()
    new, _ = collected(nn.Linear(200, 200))
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    # the write fails half-way, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            new.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["samples.pt"]
    assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError):
        new.save(tmp_path / "missing" / "samples.pt")


def test_wrong_files(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        PosteriorSamples.load(path)
    samples, _ = collected(nn.Linear(2, 2))
    samples.save(path)
    whole = path.read_bytes()
    for content in (b"", b"some text", b"\x80\x02}q\x00.", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged or was not written by"):
            PosteriorSamples.load(path)
    torch.save(samples, path)  # a pickle of the object: weights_only refuses to run it
    with pytest.raises(ValueError, match="was not written by"):
        PosteriorSamples.load(path)
    for content in (nn.Linear(2, 2).state_dict(), [1, 2]):
        torch.save(content, path)
        with pytest.raises(ValueError, match="was not written by"):
            PosteriorSamples.load(path)
    path.write_bytes(whole)
    torch.save({**torch.load(path, weights_only=True), "format": "another"}, path)
    with pytest.raises(ValueError, match="holds something else"):
        PosteriorSamples.load(path)


# -- diagnostics -----------------------------------------------------------------------------------


def chain(values, dtype=torch.float64, **options):
    """Samples of one parameter vector, ``values[draw, dimension]``."""
    model = nn.Linear(1, values.shape[1], bias=False).to(dtype)
    samples = PosteriorSamples(burn_in=0, max_samples=max(2, len(values)), **options)
    for value in values:
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(value).unsqueeze(1))
        samples.collect(model)
    return samples


def autoregression(draws, dimensions, coefficient):
    """Independent stationary AR(1) processes of variance 1, one a column."""
    innovations = np.random.default_rng().normal(size=(draws, dimensions))
    innovations[1:] *= math.sqrt(1 - coefficient**2)
    return lfilter([1.0], [1.0, -coefficient], innovations, axis=0)


def figures(diagnosed):
    return np.asarray(
        diagnosed["posterior"]["weight"] if "posterior" in diagnosed else diagnosed["weight"]
    ).ravel()


@pytest.mark.thorough
@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9, -0.3])
def test_effective_sample_size_of_autoregressions(coefficient):
    """ESS = draws·(1−φ)/(1+φ). The mean over 200 processes, at a significance of 1e-6 for
    each of the four, and 3 % for the estimator's own bias.
    """
    chains = [chain(autoregression(2000, 200, coefficient)) for _ in range(2)]
    import arviz  # which takes seconds

    found = figures(arviz.ess(chains[0].to_arviz(chains[1])))
    truth = 4000 * (1 - coefficient) / (1 + coefficient)
    error = t_distribution.isf(0.5e-6, 199) * found.std(ddof=1) / math.sqrt(200)
    assert error < 0.1 * truth
    assert abs(found.mean() - truth) < error + 0.03 * truth


@pytest.mark.thorough
def test_r_hat_of_shifted_chains():
    """Chains at ±s around zero: the variance of their means is 2s², so R-hat is √(1 + 2s²)
    for many draws (Vehtari et al., 2021, equation 4).
    """
    import arviz

    shift = 1.0
    draws = [np.random.default_rng().normal(size=(2000, 50)) for _ in range(2)]
    shifted = chain(draws[0] - shift).to_arviz(chain(draws[1] + shift))
    assert figures(arviz.rhat(shifted)).min() > 1.1
    assert figures(arviz.rhat(shifted, method="identity")).mean() == pytest.approx(
        math.sqrt(1 + 2 * shift**2), rel=0.02
    )
    mixed = chain(draws[0]).to_arviz(chain(draws[1]))
    assert figures(arviz.rhat(mixed)).max() < 1.02


def test_every_parameter_under_its_own_name():
    model = mlp().to(torch.bfloat16)
    chains, states = zip(*[collected(copy.deepcopy(model)) for _ in range(3)])
    data = chains[0].to_arviz(*chains[1:])["posterior"]
    names = [name for name, _ in model.named_parameters()]
    assert (
        sorted(data.data_vars) == sorted(names)
        and dict(data.sizes)["chain"] == 3
        and dict(data.sizes)["draw"] == 12
    )
    for name in names:
        assert data[name].dims[:2] == ("chain", "draw") and data[name].dtype == np.float32
        expected = np.stack(
            [np.stack([state[name].float().numpy() for state in of_chain]) for of_chain in states]
        )
        assert np.array_equal(data[name].values, expected)
    alone = PosteriorSamples.to_arviz(chains[1])["posterior"]
    assert np.array_equal(alone["0.bias"].values[0], data["0.bias"].values[1])
    import arviz

    summary = arviz.summary(chains[0].to_arviz(*chains[1:]), var_names=["3.bias"])
    assert len(summary) == 4 and {"ess_bulk", "r_hat"} <= set(summary.columns)


# arviz 0.23 on matplotlib 3.11
@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:Passing a dict or None as alias_mapping to normalize_kwargs is deprecated"
)
def test_trace_picture(tmp_path):
    import arviz
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    data = chain(np.random.default_rng().normal(size=(30, 2))).to_arviz(
        chain(np.random.default_rng().normal(size=(30, 2)))
    )
    arviz.plot_trace(data, var_names=["weight"])
    pyplot.savefig(tmp_path / "trace.png")
    pyplot.close("all")
    assert (tmp_path / "trace.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("version", "arguments"),
    [("0.23.4", ((), {"posterior"})), ("1.3.0", (({"posterior"},), set()))],
)
def test_both_generations_of_arviz(version, arguments, monkeypatch):
    """0.x takes the group as a keyword, 1.x a dictionary of groups."""
    seen = []

    def from_dict(*args, **kwargs):
        seen.append((tuple(set(a) for a in args), set(kwargs)))
        group = kwargs["posterior"] if kwargs else args[0]["posterior"]
        return {"posterior": SimpleNamespace(data_vars=group)}

    monkeypatch.setitem(
        sys.modules, "arviz", SimpleNamespace(__version__=version, from_dict=from_dict)
    )
    found = chain(np.arange(6.0).reshape(3, 2)).to_arviz()
    assert seen == [arguments]
    assert np.array_equal(
        found["posterior"].data_vars["weight"], np.arange(6.0).reshape(1, 3, 2, 1)
    )


def test_without_arviz(monkeypatch):
    # what Python leaves of a module that must not be found
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ModuleNotFoundError, match="pip install arviz"):
        chain(np.zeros((2, 1))).to_arviz()


def test_chains_that_cannot_be_compared():
    def draws(count=6):
        return np.random.default_rng().normal(size=(count, 2))

    first = chain(draws())
    with pytest.raises(TypeError, match=r"chain 2 is a list: pass PosteriorSamples one by one"):
        first.to_arviz([chain(draws())])
    with pytest.raises(RuntimeError, match="Chain 2 holds no sample yet"):
        first.to_arviz(PosteriorSamples())
    with pytest.raises(ValueError, match=r"Chain 3 .*weight was \[2, 1\] and is \[3, 1\]"):
        first.to_arviz(chain(draws()), chain(np.ones((6, 3))))
    with_bias, _ = collected(nn.Linear(1, 2).double(), 6)
    with pytest.raises(ValueError, match=r"Chain 2 .*added bias"):
        first.to_arviz(with_bias)
    with pytest.raises(ValueError, match=r"Chain 2 holds 5 samples .* the first one 6"):
        first.to_arviz(chain(draws(5)))
    with pytest.raises(ValueError, match=r"6 samples with thin=2, the first one 6 with thin=1"):
        first.to_arviz(chain(draws(12), thin=2))
    assert first.to_arviz(chain(draws(), torch.float32))["posterior"]["weight"].dtype == np.float64
    taken, _ = collected(nn.ParameterDict({"draw": nn.Parameter(torch.zeros(2))}))
    with pytest.raises(ValueError, match="A parameter is called 'draw', which ArviZ uses"):
        taken.to_arviz()


def test_each_chain_is_charged():
    """Two chains on one accountant: the second pays again, and together they cost their
    composition by dp_accounting.
    """
    accountant, steps, kept = dpb.PrivacyAccountant(), [], []
    for _ in range(2):
        net, optimizer, loader = dpb.PrivacyEngine(accountant=accountant).make_private(
            module=nn.Linear(3, 2),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
            data_loader=DataLoader(
                TensorDataset(torch.randn(100, 3), torch.randint(2, (100,))),
                batch_size=20,
                shuffle=True,
            ),
            max_grad_norm=1.0,
            noise_multiplier=4.0,
        )
        samples = PosteriorSamples(burn_in=0)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                samples.collect(net)
        kept.append(samples)
        steps.append(sum(charge.count for charge in accountant.history))
    assert steps == [10, 20]
    spent = accountant.get_epsilon(1e-5)
    data = kept[0].to_arviz(kept[1])
    assert (
        dict(data["posterior"].sizes)["chain"] == 2 and dict(data["posterior"].sizes)["draw"] == 10
    )
    assert (
        accountant.get_epsilon(1e-5) == spent
        and sum(charge.count for charge in accountant.history) == 20
    )
    reference = dp_accounting.pld.PLDAccountant()
    noise = optimizer.effective_noise_multiplier
    reference.compose(
        dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(noise)), 20
    )
    assert spent == pytest.approx(reference.get_epsilon(1e-5), rel=0.01)
