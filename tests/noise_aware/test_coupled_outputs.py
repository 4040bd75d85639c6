"""Losses that make a record's outputs depend on each other."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_dpbayes.noise_aware import laplace_for_module
from torch_dpbayes.noise_aware.coupled_outputs import coupled_outputs

RECORDS, FEATURES = 6, 3


def of_reference(outputs, targets):
    return functional.cross_entropy(functional.pad(outputs, (0, 1)), targets, reduction="none")


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


def absolute(outputs, targets):
    return (outputs - targets).abs().sum(1)


def with_pull(outputs, targets):
    """A softmax whose logarithm of the normaliser is held near zero."""
    return CROSS_ENTROPY(outputs, targets) + outputs.logsumexp(1).square()


def of_total(outputs, targets):
    return (outputs.sum(1) - targets.sum(1)).square()


BCE = partial(functional.binary_cross_entropy_with_logits, reduction="none")
CROSS_ENTROPY = partial(functional.cross_entropy, reduction="none")
NLL = partial(functional.nll_loss, reduction="none")
CLASSES = torch.randint(3, (RECORDS,))
REAL = torch.randn(RECORDS, 2)


def of(net, loss, targets, inputs=None):
    return coupled_outputs(
        net, loss, torch.randn(RECORDS, FEATURES) if inputs is None else inputs, targets
    )


@pytest.mark.parametrize(
    "loss, outputs, targets, told",
    [
        (CROSS_ENTROPY, 3, CLASSES, 2),
        (CROSS_ENTROPY, 40, CLASSES, 39),
        (partial(CROSS_ENTROPY, label_smoothing=0.1), 3, CLASSES, 2),
        (with_pull, 3, CLASSES, 3),
        (of_reference, 2, CLASSES, 2),
        (of_total, 2, REAL, 1),
        (squared, 2, REAL, None),
        (absolute, 2, REAL, None),
        (lambda outputs, targets: BCE(outputs[:, 0], targets), 1, torch.ones(RECORDS), None),
        (lambda outputs, targets: outputs.no_such_thing(), 2, CLASSES, None),
        (lambda outputs, targets: (outputs / 0).square().sum(1), 2, CLASSES, None),
    ],
)
def test_what_couples_outputs_is_seen(loss, outputs, targets, told):
    found = of(nn.Linear(FEATURES, outputs), loss, targets)
    if told is None:
        assert found is None
        return
    assert found.layer == "" and int(found.told.sum()) == told
    eye = torch.eye(outputs, dtype=torch.float64)
    torch.testing.assert_close(found.basis.T @ found.basis, eye)
    if told == outputs - 1:  # what does not count is what they have in common
        common = found.basis[:, ~found.told][:, 0].abs()
        torch.testing.assert_close(
            common, torch.full_like(common, outputs**-0.5), rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_in_front_of_a_logarithm_of_probabilities_is_the_one_that_is_coupled(dtype):
    net = nn.Sequential(
        nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(dim=1)
    ).to(dtype)
    found = of(net, NLL, CLASSES, torch.randn(RECORDS, FEATURES, dtype=dtype))
    assert found.layer == "2" and found.told.tolist().count(False) == 1


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_scale = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return torch.cat([self.mean(x), self.log_scale(x)], dim=1)


def of_normal(outputs, targets):
    z = (targets - outputs[:, 0]) * (-outputs[:, 1]).exp()
    return z.square() / 2 + outputs[:, 1]


class Weights(nn.Module):
    """Classes without a linear layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, FEATURES))

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize(
    "net, loss, targets",
    [
        (TwoHeads(), of_normal, torch.randn(RECORDS)),
        (Weights(), CROSS_ENTROPY, CLASSES),
        (nn.Linear(FEATURES, 1001), CROSS_ENTROPY, CLASSES),
    ],
    ids=["two heads", "no layer", "a thousand outputs"],
)
def test_coupled_outputs_that_no_layer_can_be_turned_for(net, loss, targets):
    found = of(net, loss, targets)
    assert found is not None and found.layer is None


def test_neither_records_nor_module_are_touched():
    """It sees zeros alone; running means of a batch norm, hooks and the mode stay."""
    seen = []
    net = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def loss(outputs, targets):
        seen.append(targets)
        return CROSS_ENTROPY(outputs, targets)

    assert of(net, loss, CLASSES + 1) is not None
    assert net.training and not any(target.any() for target in seen)
    assert all(not m._forward_hooks and p.requires_grad for m in net for p in m.parameters())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("count", [0, 1, 50])
def test_the_number_of_records_does_not_count(count):
    inputs, targets = torch.randn(count, FEATURES), torch.ones(count, dtype=torch.long)
    assert of(nn.Linear(FEATURES, 3), CROSS_ENTROPY, targets, inputs) is not None


def test_what_is_no_tensor_does_not_reach_the_module():
    class Net(nn.Module):
        def forward(self, inputs):
            raise AssertionError("it was asked of the records themselves")

    inputs = {"x": torch.randn(RECORDS, FEATURES), "words": ["who", "is", "in", "it"]}
    assert of(Net(), CROSS_ENTROPY, CLASSES, inputs) is None


def warned(net, loss, curvature="diagonal"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        laplace_for_module(
            net,
            torch.randn(200, FEATURES),
            torch.randint(2, (200,)),
            loss=loss,
            prior_std=1.0,
            max_grad_norm=1.0,
            epsilon=500.0,
            delta=1e-5,
            curvature=curvature,
        )
    return any("couples a record's outputs" in str(warning.message) for warning in caught)


def test_a_diagonal_is_warned_of_where_outputs_stay_coupled():
    assert warned(Weights(), CROSS_ENTROPY)
    assert warned(nn.Linear(FEATURES, 2), of_reference)
    assert not warned(Weights(), CROSS_ENTROPY, "full")
    assert not warned(nn.Linear(FEATURES, 2), of_reference, "full")
    assert not warned(nn.Linear(FEATURES, 3), CROSS_ENTROPY)
    one = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0))
    assert not warned(one, lambda outputs, targets: BCE(outputs, targets.float()))
