"""Predictions over loaders, of models that return and take what they like, in bounded memory."""

from collections import UserDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb


@dataclass
class Output:
    logits: torch.Tensor


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale=1.0):
        return Output(self.linear(x) * scale)


def collected(net, samples=5):
    kept = dpb.PosteriorSamples(burn_in=0)
    for _ in range(samples):
        with torch.no_grad():
            for p in net.parameters():
                p.normal_()
        kept.collect(net)
    return kept


QUANTITIES = {
    "predict": dpb.PosteriorSamples.predict,
    "outputs": dpb.PosteriorSamples.outputs,
    "predictive_entropy": dpb.PosteriorSamples.predictive_entropy,
    "mutual_information": dpb.PosteriorSamples.mutual_information,
    "predictive_quantiles": partial(
        dpb.PosteriorSamples.predictive_quantiles, quantiles=(0.1, 0.9)
    ),
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_loader_gives_what_one_tensor_gives(name):
    net, x = nn.Linear(4, 3), torch.randn(37, 4)
    samples, quantity = collected(net), QUANTITIES[name]
    whole = quantity(samples, net, x)
    data = TensorDataset(x, torch.zeros(37))
    torch.testing.assert_close(quantity(samples, net, DataLoader(data, 8)), whole)
    torch.testing.assert_close(quantity(samples, net, [x[:20], x[20:]]), whole)


@pytest.mark.parametrize("wrap", [dict, UserDict])
def test_batches_by_name_give_the_model_what_it_takes(wrap):
    class ByName(nn.Linear):
        def forward(self, *, features):
            return super().forward(features)

    net, x = ByName(4, 3), torch.randn(10, 4)
    samples = collected(net)
    expected = samples.predict(net, x, forward=lambda model, rows: model(features=rows))
    batches = [wrap({"features": x[i : i + 5], "label": torch.zeros(5)}) for i in (0, 5)]
    torch.testing.assert_close(samples.predict(net, batches), expected)
    with pytest.raises(TypeError, match=r'forward=lambda model, batch: model\(batch\["..."\]\)'):
        samples.predict(net, [wrap({"image": x})])


def test_models_that_return_something_else_are_told_how_to_be_called():
    net, x = Wrapped(), torch.randn(10, 4)
    samples = collected(net)
    with pytest.raises(TypeError, match=r"pass forward=lambda model, x: model\(x\).logits"):
        samples.predict(net, x)
    found = samples.predict(net, x, forward=lambda model, rows: model(rows, scale=2.0).logits)
    scores = [x @ s["linear.weight"].T + s["linear.bias"] for s in samples._samples]
    expected = torch.stack([torch.softmax(2 * score, -1) for score in scores]).mean(0)
    torch.testing.assert_close(found, expected)


def test_what_is_no_batch_is_refused():
    net = nn.Linear(4, 3)
    samples = collected(net)
    for wrong in (torch.zeros(()), "data", 3.0, {"x": torch.zeros(2, 4)}, [[0.0, 1.0]]):
        with pytest.raises(TypeError, match="x must be a tensor"):
            samples.predict(net, wrong)
    with pytest.raises(ValueError, match="holds no batch"):
        samples.predict(net, [])
    _, _, private = dpb.PrivacyEngine().make_private(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 4), torch.zeros(20).long()), 5),
        max_grad_norm=1.0,
    )
    with pytest.raises(TypeError, match="draws records at random"):
        samples.predict(net, private)


def test_only_a_batch_at_a_time_is_held():
    """The inputs are made as they are asked for, and none outlives its turn."""
    alive, most = [0], [0]

    class Counted(torch.Tensor):
        def __del__(self):
            alive[0] -= 1

    def batches():
        for _ in range(20):
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            yield torch.randn(8, 4).as_subclass(Counted)

    net = nn.Linear(4, 3)
    samples = collected(net)

    def plain(model, rows):
        return model(rows.as_subclass(torch.Tensor))

    assert samples.predict(net, batches(), forward=plain).shape == (160, 3)
    assert most[0] <= 3
