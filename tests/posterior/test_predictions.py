"""The outputs under every sample, against models that are loaded one at a time."""

import copy
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import sampled, walked
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from support.refusals import refused
from support.training import made_private
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import PosteriorSamples, ops
from torch_dpbayes.posterior import outputs


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.decode = nn.Linear(3, 4, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x):
        return torch.tanh(self.embed(x)) @ self.decode.weight + x[:, :1]


def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 4))


def frozen_base():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def cnn(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))


MODELS = {
    "mlp": (mlp, (3,)),
    "mlp in double": (lambda: mlp().double(), (3,)),
    "cnn": (lambda: cnn(nn.BatchNorm2d(4)), (1, 4, 4)),
    "frozen base": (frozen_base, (3,)),
    "tied": (Tied, (3,)),
    "writes into its input": (lambda: nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 4)), (3,)),
}


def one_at_a_time(model, states, x):
    found = []
    for state in states:
        other = copy.deepcopy(model)
        other.load_state_dict(state)
        found.append(other.eval()(x.clone()).detach())
    return torch.stack(found)


close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_the_average_over_loaded_models(name, monkeypatch):
    build, shape = MODELS[name]
    model = build()
    samples, states = walked(model)
    x = torch.randn(7, *shape, dtype=next(model.parameters()).dtype)
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    before = copy.deepcopy(model)
    attributes, parameters = [set(vars(m)) for m in model.modules()], list(model.parameters())
    monkeypatch.setattr(outputs, "_ROWS", 3)
    monkeypatch.setattr(outputs, "_NUMBERS", 1)
    expected = one_at_a_time(model, states, x)
    close(samples.outputs(model, x), expected)
    close(samples.predict(model, x, transform=None), expected.mean(0))
    # a dimension counted from the front
    cubes = samples.predict(model, x, transform=lambda z: z.softmax(1) ** 3)
    close(cubes, (expected.softmax(-1) ** 3).mean(0))
    if expected.shape[-1] > 2:
        close(samples.predict(model, x), expected.softmax(-1).mean(0))
    with pytest.raises(ZeroDivisionError):
        samples.predict(model, x, transform=lambda z: z / (1 // 0))
    # the model is as it was
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(p is q and p.grad is None for p, q in zip(model.parameters(), parameters))
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.state_dict().items())


@pytest.mark.parametrize("wrap", [GradSampleHooks, GradSampleModule])
def test_opacus_hooks_keep_nothing_of_a_prediction(wrap):
    model = cnn(nn.GroupNorm(2, 4))
    wrapped = wrap(model)
    target = wrapped if isinstance(wrapped, nn.Module) else model
    samples, states = walked(target)
    x = torch.randn(7, 1, 4, 4)
    plain = [{k.removeprefix("_module."): v for k, v in s.items()} for s in states]
    expected = one_at_a_time(model, plain, x)
    target.train()
    close(samples.outputs(target, x), expected)
    for module in model.modules():
        assert not getattr(module, "activations", [])
    for p in model.parameters():
        assert p.grad is None and p.grad_sample is None and p._forward_counter == 0
    F.cross_entropy(target(x), torch.zeros(7, dtype=torch.long)).backward()
    for p in model.parameters():
        close(p.grad_sample.mean(0), p.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_and_shape_of_predictions(dtype):
    model, x = nn.Linear(3, 4).to(dtype), torch.randn(5, 3, dtype=dtype)
    samples, _ = walked(model)
    assert samples.predict(model, x).dtype == dtype
    assert samples.predict(model, x[:0]).shape == (0, 4)
    assert samples.predict(model, x, transform=lambda z: z.argmax(-1) == 0).dtype == torch.float32
    assert samples.mutual_information(model, x).shape == (5,)
    assert samples.predictive_quantiles(model, x, [0.5]).dtype == dtype


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 0.1), (torch.bfloat16, 0.3)])
def test_averages_lose_no_small_terms(dtype, value):
    """A thousand equal numbers, summed in the dtype itself, would be off by far more."""
    points = torch.full((1000, 3), value, dtype=dtype)
    assert torch.equal(outputs.average(iter(points)), points[0])


def test_the_model_may_be_frozen_or_cast_after_training():
    model = frozen_base()
    samples, _ = walked(model)
    x = torch.randn(5, 3)
    expected = samples.predict(model, x)
    model.requires_grad_(False)
    assert torch.equal(samples.predict(model, x), expected)
    cast = samples.predict(model.double(), x.double())
    assert cast.dtype == torch.float64
    torch.testing.assert_close(cast.float(), expected)


# -- batches ---------------------------------------------------------------------------------------

QUANTITIES = {
    "predict": PosteriorSamples.predict,
    "outputs": PosteriorSamples.outputs,
    "mutual_information": PosteriorSamples.mutual_information,
    "predictive_quantiles": partial(PosteriorSamples.predictive_quantiles, quantiles=(0.1, 0.9)),
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_loader_gives_what_one_tensor_gives(name):
    net, x = nn.Linear(4, 3), torch.randn(37, 4)
    samples, quantity = walked(net)[0], QUANTITIES[name]
    whole = quantity(samples, net, x)
    data = TensorDataset(x, torch.zeros(37))
    torch.testing.assert_close(quantity(samples, net, DataLoader(data, 8)), whole)
    torch.testing.assert_close(quantity(samples, net, [x[:20], x[20:]]), whole)


class ByName(nn.Linear):
    def forward(self, *, features):
        return super().forward(features)


@pytest.mark.parametrize("wrap", [dict, UserDict])
def test_batches_by_name_give_the_model_what_it_takes(wrap):
    net, x = ByName(4, 3), torch.randn(10, 4)
    samples, _ = walked(net)
    expected = samples.predict(net, x, forward=lambda model, rows: model(features=rows))
    batches = [wrap({"features": x[i : i + 5], "label": torch.zeros(5)}) for i in (0, 5)]
    torch.testing.assert_close(samples.predict(net, batches), expected)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def private_loader():
    return made_private()[2]


X, LINEAR = torch.randn(5, 4), partial(nn.Linear, 4, 3)
REFUSED = {  # the model collected, what it predicts, and the code
    "a number": (LINEAR, torch.zeros(()), "argument-type"),
    "a text": (LINEAR, "data", "argument-type"),
    "a mapping": (LINEAR, {"x": X}, "argument-type"),
    "lists": (LINEAR, [[0.0, 1.0]], "argument-type"),
    "an array": (LINEAR, np.zeros((5, 4)), "argument-type"),
    "a private loader": (LINEAR, private_loader, "argument-type"),
    "no batch": (LINEAR, [], "samples"),
    "another name": (partial(ByName, 4, 3), [{"image": X}], "argument-type"),
    "two tensors": (partial(Pair, 4, 3), X, "argument-type"),
    "no row a record": (lambda: nn.Sequential(LINEAR(), nn.Flatten(0)), X, "samples"),
    "one value": (partial(nn.Linear, 4, 1), X, "samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_predicted_is_refused(name):
    build, x, code = REFUSED[name]
    model = build()
    samples, _ = walked(model)
    with refused(code):
        samples.predict(model, x() if callable(x) else x)


def test_other_models_and_transforms_are_refused():
    model = frozen_base()
    samples, _ = walked(model)
    wider = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 5))
    for other in (wider.requires_grad_(False), model.requires_grad_(True)):
        with pytest.raises(dpb.DPBayesError):
            samples.predict(other, torch.zeros(5, 3))
    model[0].requires_grad_(False)
    with pytest.raises(dpb.DPBayesError):
        samples.predict(model, torch.zeros(5, 3), transform=lambda z: z.mean(0))


# -- draws of other methods ------------------------------------------------------------------------

LIKELIHOODS = {
    "bernoulli": (ops.GLM(), "bernoulli", {}),
    "gaussian": (ops.GLM("gaussian", noise_std=0.5), "normal", {"noise_std": 0.5}),
    "softmax": (ops.Softmax(3), "categorical", {}),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_of_a_linear_model(name):
    """The average of the model's own predictions, one draw at a time."""
    model, likelihood, options = LIKELIHOODS[name]
    x = 2 * torch.randn(40, 4)  # longer than the model's bound
    shape = (3, 4) if name == "softmax" else (4,)
    draws = [{"weights": torch.randn(shape, dtype=torch.float64)} for _ in range(5)]
    wanted = torch.stack([model.predict(draw, x) for draw in draws]).mean(0)
    for given in (draws, {"weights": torch.stack([d["weights"] for d in draws])}):
        samples = PosteriorSamples.from_draws(given, likelihood, **options)
        assert torch.allclose(samples.predict(model.module(4), x), wanted, atol=1e-6)
        assert len(samples) == 5


def test_numbers_of_draws_that_differ_are_refused():
    for draws in ({}, [], {"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}):
        with pytest.raises(dpb.DPBayesError):
            PosteriorSamples.from_draws(draws)
    assert len(sampled(torch.zeros(2, 3))[0]) == 2
