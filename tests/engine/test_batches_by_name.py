"""Batches that are mappings, and models that take their inputs by name."""

import collections
from functools import partial

import pytest
import torch
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, default_collate

import torch_dpbayes as dpb

MODES = [None, "vmap", "hooks"]


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *, features, mask=None):
        return self.linear(features if mask is None else features * mask[:, None])


class ByPlace(ByName):
    def forward(self, x):
        return self.linear(x)


class Whole(ByName):
    def forward(self, batch):
        return self.linear(batch["features"])


class Mixing(ByName):
    def forward(self, features, **_):
        return self.linear(features - features.mean(0))


def records():
    return [{"features": torch.randn(4), "mask": torch.rand(()), "label": i % 3} for i in range(40)]


def made(net, data, mode=None, **options):
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1, temperature=0.0),
        data_loader=DataLoader(data, 40, **options.pop("loader", {})),
        max_grad_norm=1.0,
        noise_multiplier=1e-6,
        **recorded(mode),
        **options,
    )


def step(net, optimizer, batch, *args, **inputs):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(*args, **inputs), batch["label"]).backward()
    optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("collate", [None, lambda r: collections.UserDict(default_collate(r))])
def test_a_model_by_name_releases_what_the_same_model_by_place_does(mode, collate):
    data, of_all = records(), []
    # what is no dict is looked into by name only
    for kind in (ByName, ByPlace, Whole if collate is None else ByPlace):
        torch.manual_seed(0)  # only of the initial parameters, which are to be the same
        net, optimizer, loader = made(kind(), data, mode, loader={"collate_fn": collate})
        (batch,) = loader
        given = {"features": batch["features"]}
        of_all.append(
            step(net, optimizer, batch, **given)
            if kind is ByName
            else step(net, optimizer, batch, batch if kind is Whole else given["features"])
        )
    for by_name, by_place, whole in zip(*of_all, strict=True):
        # the noise is 1e-6·C/B
        torch.testing.assert_close(by_name, by_place, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole, by_place, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", [None, "vmap"])
def test_a_model_by_name_sees_one_record_at_a_time(mode):
    data = records()
    net, optimizer, loader = made(Mixing(), data, mode)
    (batch,) = loader
    before = net.linear.weight.detach().clone()
    step(net, optimizer, batch, **{"features": batch["features"]})
    # minus its own mean a record is zero, and so is the gradient of the weight but for the prior's
    torch.testing.assert_close(net.linear.weight, before * (1 - 0.1 / 40), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_examples_may_be_given_by_name(mode):
    data = [(torch.randn(1), torch.randn(4), i % 3) for i in range(40)]
    for examples in (None, {"features": torch.randn(2, 4)}):
        net, optimizer, loader = made(ByName(), data, mode, example_inputs=examples)
        (batch,) = loader
        step(net, optimizer, {"label": batch[2]}, features=batch[1])
        assert len(optimizer.accountant) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_trial_of_a_batch_leaves_the_model_as_it_was(mode):
    class Counting(ByPlace):
        def __init__(self):
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x):
            if not torch.is_grad_enabled() and isinstance(x, dict):
                self.passes += 1
            return super().forward(x)

    before = torch.get_rng_state()
    net, _, _ = made(Counting(), records(), mode)
    assert net.passes == 0
    torch.set_rng_state(before)
