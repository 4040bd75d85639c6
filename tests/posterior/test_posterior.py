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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import nn

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


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_the_average_over_loaded_models(name, monkeypatch):
    build, shape = MODELS[name]
    model = build()
    samples, states = collected(model)
    x = inputs(model, shape, 1 if name == "linear" else 7)
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    before = copy.deepcopy(model)
    attributes = [set(vars(module)) for module in model.modules()]
    parameters = dict(model.named_parameters())
    monkeypatch.setattr(outputs, "_ROWS", 3)
    monkeypatch.setattr(outputs, "_NUMBERS", 1)
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
    samples.predictive_entropy(model, x), samples.mutual_information(model, x)
    with pytest.raises(ZeroDivisionError):
        samples.predict(model, x, transform=lambda z: z / (1 // 0))
    # the model is as it was
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(p is parameters[name] and p.grad is None for name, p in model.named_parameters())
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.state_dict().items())


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


def test_mutual_information_at_its_extremes():
    model, samples, x = constant(
        [[1000.0, 0.0], [0.0, 1000.0]], "categorical"
    )  # certain, and of opposite opinion
    assert samples.mutual_information(model, x).item() == pytest.approx(math.log(2))
    model, samples, x = constant([[0.3, 0.0, 1.0]] * 5)  # of one opinion
    assert samples.mutual_information(model, x).item() == pytest.approx(0, abs=1e-12)
    model, samples, x = constant([[0.0, 0.0, 0.0]])
    assert samples.predictive_entropy(model, x).item() == pytest.approx(math.log(3))


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
    with_bias, _ = collected(nn.Linear(1, 2).double(), 6)
    for other, says in (
        ([chain(draws())], "pass PosteriorSamples that hold samples one by one"),
        (PosteriorSamples(), "0 samples"),
        (chain(np.ones((6, 3))), r"weight was \[2, 1\] and is \[3, 1\]"),
        (with_bias, "added bias"),
        (chain(draws(5)), "5 samples"),
        (chain(draws(12), thin=2), "thin=2"),
    ):
        with pytest.raises(ValueError, match=f"chain 2 is .*{says}"):
            first.to_arviz(other)
    assert first.to_arviz(chain(draws(), torch.float32))["posterior"]["weight"].dtype == np.float64
    taken, _ = collected(nn.ParameterDict({"draw": nn.Parameter(torch.zeros(2))}))
    with pytest.raises(ValueError, match="A parameter is called 'draw', which ArviZ uses"):
        taken.to_arviz()
