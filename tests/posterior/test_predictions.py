"""The outputs under every sample, against models that are loaded one at a time."""

import copy
import weakref
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawn import walked
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from support.refusals import refused
from support.training import made_private
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import PosteriorSamples, ops
from torch_dpbayes.posterior import outputs

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.decode = nn.Linear(3, 4, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x):
        return torch.tanh(self.embed(x)) @ self.decode.weight + x[:, :1]


def frozen_base():
    base = nn.Linear(3, 8).requires_grad_(False)
    return nn.Sequential(base, nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 4))


def cnn(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))


def one_at_a_time(model, states, x):
    found = []
    for state in states:
        other = copy.deepcopy(model)
        other.load_state_dict(state)
        found.append(other.eval()(x.clone()).detach())
    return torch.stack(found)


MODELS = {
    "cnn": (lambda: cnn(nn.BatchNorm2d(4)), (1, 4, 4)),
    "frozen base": (frozen_base, (3,)),
    "tied": (Tied, (3,)),
    "writes into its input": (lambda: nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 4)), (3,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_the_average_over_loaded_models(name, monkeypatch):
    """And leave the model as it was."""
    build, shape = MODELS[name]
    model, x = build(), torch.randn(7, *shape)
    samples, states = walked(model)
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    before = copy.deepcopy(model)
    attributes, parameters = [set(vars(m)) for m in model.modules()], list(model.parameters())
    monkeypatch.setattr(outputs, "_ROWS", 3)
    monkeypatch.setattr(outputs, "_NUMBERS", 1)
    expected = one_at_a_time(model, states, x)
    close(samples.outputs(model, x), expected)
    close(samples.predict(model, x, transform=None), expected.mean(0))
    close(samples.predict(model, x), expected.softmax(-1).mean(0))
    # a dimension counted from the front
    cubes = samples.predict(model, x, transform=lambda z: z.softmax(1) ** 3)
    close(cubes, (expected.softmax(-1) ** 3).mean(0))
    with pytest.raises(ZeroDivisionError):
        samples.predict(model, x, transform=lambda z: z / (1 // 0))
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(p is q and p.grad is None for p, q in zip(model.parameters(), parameters))
    close(model.state_dict(), before.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [GradSampleHooks, GradSampleModule])
def test_opacus_hooks_keep_nothing_of_a_prediction(wrap):
    model, x = cnn(nn.GroupNorm(2, 4)), torch.randn(7, 1, 4, 4)
    wrapped = wrap(model)
    target = wrapped if isinstance(wrapped, nn.Module) else model
    samples, states = walked(target)
    plain = [{k.removeprefix("_module."): v for k, v in s.items()} for s in states]
    close(samples.outputs(target.train(), x), one_at_a_time(model, plain, x))
    for module in model.modules():
        assert not getattr(module, "activations", [])
    for p in model.parameters():
        assert p.grad is None and p.grad_sample is None and p._forward_counter == 0
    nn.functional.cross_entropy(target(x), torch.zeros(7, dtype=torch.long)).backward()
    for p in model.parameters():
        close(p.grad_sample.mean(0), p.grad)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 0.1), (torch.bfloat16, 0.3)])
def test_dtypes_and_shapes_of_predictions(dtype, value):
    """A thousand equal numbers, summed in the dtype itself, would be off by far more."""
    model, x = nn.Linear(3, 4).to(dtype), torch.randn(5, 3, dtype=dtype)
    samples, _ = walked(model)
    assert samples.predict(model, x).dtype == dtype
    assert samples.predict(model, x[:0]).shape == (0, 4)
    assert samples.predict(model, x, transform=lambda z: z.argmax(-1) == 0).dtype == torch.float32
    assert samples.mutual_information(model, x).shape == (5,)
    assert samples.predictive_quantiles(model, x, [0.5]).dtype == dtype
    points = torch.full((1000, 3), value, dtype=dtype)
    assert torch.equal(outputs.average(iter(points)), points[0])


def test_the_model_may_be_frozen_or_cast_after_training():
    model, x = frozen_base(), torch.randn(5, 3)
    samples, _ = walked(model)
    expected = samples.predict(model, x)
    model.requires_grad_(False)
    assert torch.equal(samples.predict(model, x), expected)
    close(samples.predict(model.double(), x.double()), expected.double())


# -- batches ---------------------------------------------------------------------------------------


class ByName(nn.Linear):
    def forward(self, *, features):
        return super().forward(features)


@pytest.mark.parametrize(
    "quantity",
    [
        PosteriorSamples.predict,
        PosteriorSamples.outputs,
        PosteriorSamples.mutual_information,
        partial(PosteriorSamples.predictive_quantiles, quantiles=(0.1, 0.9)),
    ],
)
def test_batches_give_what_one_tensor_gives(quantity):
    """By name the model gets what it takes."""
    net, named, x = nn.Linear(4, 3), ByName(4, 3), torch.randn(37, 4)
    named.load_state_dict(net.state_dict())
    samples, _ = walked(net)
    whole = quantity(samples, net, x)
    parts = [{"features": part, "label": torch.zeros(len(part))} for part in (x[:20], x[20:])]
    for model, batches in (
        (net, DataLoader(TensorDataset(x, torch.zeros(37)), 8)),
        (net, [x[:20], x[20:]]),
        (named, parts),
        (named, map(UserDict, parts)),
    ):
        torch.testing.assert_close(quantity(samples, model, batches), whole)


def test_only_a_batch_and_one_samples_output_are_held():
    """Both are made as they are asked for, and none outlives its turn."""
    net, made = nn.Linear(4, 3), {"batches": [], "outputs": []}
    samples, _ = walked(net)

    def noted(tensor, what):
        assert sum(one() is not None for one in made[what]) <= 3
        made[what].append(weakref.ref(tensor))
        return tensor

    def batches():
        for _ in range(20):
            yield noted(torch.randn(8, 4), "batches")

    for transform in ("likelihood", None):
        predicted = samples.predict(
            net, batches(), transform, forward=lambda model, x: noted(model(x), "outputs")
        )
        assert predicted.shape == (160, 3)
    assert [len(them) for them in made.values()] == [40, 480]


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


X, LINEAR = torch.randn(5, 4), partial(nn.Linear, 4, 3)
REFUSED = [  # the model collected, what it predicts, and the code
    *((LINEAR, x, "argument-type") for x in (torch.zeros(()), "data", {"x": X}, [[0.0, 1.0]])),
    (LINEAR, np.zeros((5, 4)), "argument-type"),
    (LINEAR, lambda: made_private()[2], "argument-type"),
    (LINEAR, [], "samples"),
    (partial(ByName, 4, 3), [{"image": X}], "argument-type"),
    (partial(Pair, 4, 3), X, "argument-type"),
    (lambda: nn.Sequential(LINEAR(), nn.Flatten(0)), X, "samples"),
    (partial(nn.Linear, 4, 1), X, "samples"),
]


@pytest.mark.parametrize(("build", "x", "code"), REFUSED)
def test_what_cannot_be_predicted_is_refused(build, x, code):
    samples, _ = walked(model := build())
    with refused(code):
        samples.predict(model, x() if callable(x) else x)


def test_other_models_and_transforms_are_refused():
    samples, _ = walked(model := frozen_base())
    wider = nn.Sequential(*model[:3], nn.Linear(8, 5)).requires_grad_(False)
    for other, transform in (
        (wider, None),
        (copy.deepcopy(model).requires_grad_(True), None),
        (model, lambda z: z.mean(0)),
    ):
        with pytest.raises(dpb.DPBayesError):
            samples.predict(other, torch.zeros(5, 3), transform)


# -- draws of other methods ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shape", "likelihood", "options"),
    [
        (ops.GLM(), (4,), "bernoulli", {}),
        (ops.GLM("gaussian", noise_std=0.5), (4,), "normal", {"noise_std": 0.5}),
        (ops.Softmax(3), (3, 4), "categorical", {}),
    ],
)
def test_draws_of_a_linear_model(model, shape, likelihood, options):
    """The average of the model's own predictions, one draw at a time."""
    x = 2 * torch.randn(40, 4)  # longer than the model's bound
    draws = [{"weights": torch.randn(shape, dtype=torch.float64)} for _ in range(5)]
    wanted = torch.stack([model.predict(draw, x) for draw in draws]).mean(0)
    for given in (draws, {"weights": torch.stack([d["weights"] for d in draws])}):
        samples = PosteriorSamples.from_draws(given, likelihood, **options)
        assert torch.allclose(samples.predict(model.module(4), x), wanted, atol=1e-6)
        assert len(samples) == 5


@pytest.mark.parametrize("draws", [{}, [], {"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}])
def test_numbers_of_draws_that_differ_are_refused(draws):
    with pytest.raises(dpb.DPBayesError):
        PosteriorSamples.from_draws(draws)


def test_an_object_with_logits_counts_as_its_logits():
    class Named(nn.Linear):
        def forward(self, words=None, labels=None):
            return SimpleNamespace(loss=None, logits=super().forward(words))

    named, plain, x = Named(3, 4), nn.Linear(3, 4), torch.randn(5, 3)
    plain.load_state_dict(named.state_dict())
    samples = PosteriorSamples(burn_in=0)
    samples.collect(named)
    expected = samples.predict(plain, x)
    for batches in (x, [(x, x[:, 0])], [{"words": x, "labels": x[:, 0]}]):
        close(samples.predict(named, batches), expected)
    regression = PosteriorSamples("normal", burn_in=0, noise_std=0.5)
    regression.collect(named)
    y = torch.randn(5, 4)
    found = [regression.log_likelihood(model, x, y) for model in (named, plain)]
    close(*found)
