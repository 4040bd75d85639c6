"""Losses that make a record's outputs depend on each other."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_dpbayes.noise_aware import laplace_for_module
from torch_dpbayes.noise_aware.coupled_outputs import couples_outputs

RECORDS, FEATURES = 6, 3


def of_reference(outputs, targets):
    return functional.cross_entropy(functional.pad(outputs, (0, 1)), targets, reduction="none")


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


def absolute(outputs, targets):
    return (outputs - targets).abs().sum(1)


def of_total(outputs, targets):
    return (outputs.sum(1) - targets.sum(1)).square()


BCE = partial(functional.binary_cross_entropy_with_logits, reduction="none")
CROSS_ENTROPY = partial(functional.cross_entropy, reduction="none")
CLASSES = torch.randint(3, (RECORDS,))


@pytest.mark.parametrize(
    "loss, outputs, targets, coupled",
    [
        (CROSS_ENTROPY, 3, CLASSES, True),
        (of_reference, 2, CLASSES, True),
        (of_total, 2, torch.randn(RECORDS, 2), True),
        (squared, 2, torch.randn(RECORDS, 2), False),
        (absolute, 2, torch.randn(RECORDS, 2), False),
        (lambda outputs, targets: BCE(outputs[:, 0], targets), 1, torch.ones(RECORDS), False),
        (lambda outputs, targets: outputs.no_such_thing(), 2, CLASSES, False),
    ],
)
def test_what_couples_outputs_is_seen(loss, outputs, targets, coupled):
    net = nn.Linear(FEATURES, outputs)
    assert couples_outputs(net, loss, torch.randn(RECORDS, FEATURES), targets) is coupled


def test_neither_records_nor_module_are_touched():
    """It sees zeros alone; running means of a batch norm and the mode stay."""
    seen = []
    net = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def loss(outputs, targets):
        seen.append(targets)
        return CROSS_ENTROPY(outputs, targets)

    assert couples_outputs(net, loss, torch.randn(RECORDS, FEATURES), CLASSES + 1)
    inputs, turned = torch.randn(RECORDS, FEATURES), [torch.zeros(3, 1)]
    state = torch.get_rng_state()
    assert not couples_outputs(net, loss, inputs, CLASSES + 1, turned)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training and not any(target.any() for target in seen)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("count", [0, 1, 50])
def test_the_number_of_records_does_not_count(count):
    net, inputs = nn.Linear(FEATURES, 3), torch.randn(count, FEATURES)
    assert couples_outputs(net, CROSS_ENTROPY, inputs, torch.ones(count, dtype=torch.long))


def test_what_is_no_tensor_does_not_reach_the_module():
    class Net(nn.Module):
        def forward(self, inputs):
            raise AssertionError("it was asked of the records themselves")

    inputs = {"x": torch.randn(RECORDS, FEATURES), "words": ["who", "is", "in", "it"]}
    assert not couples_outputs(Net(), CROSS_ENTROPY, inputs, CLASSES)


class Weights(nn.Module):
    """Two classes of which one vector holds what tells them apart."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        return torch.stack([x @ self.weight, 2 * x[:, 0]], dim=1)


def test_trained_values_do_not_count():
    """They may have been fitted to the records."""
    net = nn.Linear(FEATURES, 2)
    loss = lambda outputs, targets: outputs[:, 0] * outputs[:, 1].clamp_min(5.0)  # noqa: E731
    assert not couples_outputs(net, loss, torch.randn(RECORDS, FEATURES), CLASSES)
    with torch.no_grad():
        net.bias.fill_(9.0)
    assert not couples_outputs(net, loss, torch.randn(RECORDS, FEATURES), CLASSES)
    assert bool((net.bias == 9).all())


def test_what_fails_is_not_warned_of():
    class Failing(nn.Module):
        def forward(self, x):
            assert bool((x != 0).all())

    assert not couples_outputs(Failing(), CROSS_ENTROPY, torch.ones(RECORDS, FEATURES), CLASSES)


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
    assert warned(nn.Linear(FEATURES, 2), of_reference)
    assert warned(Weights(), CROSS_ENTROPY)
    assert not warned(nn.Linear(FEATURES, 2), of_reference, "full")
    assert not warned(nn.Linear(FEATURES, 3), CROSS_ENTROPY)
    one = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0))
    assert not warned(one, lambda outputs, targets: BCE(outputs, targets.float()))


class Twice(nn.Module):
    """Of its two biases a softmax of all four outputs tells one number, of its weights all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x):
        return torch.cat([self.layer(x), self.layer(x.square())], dim=1)


def of_groups(outputs, targets):
    """Which of two groups, and which of its classes: three softmaxes."""
    group = targets % 2
    members = torch.where((group == 0)[:, None], outputs[:, 2:5], outputs[:, 5:8])
    return CROSS_ENTROPY(outputs[:, :2], group) + CROSS_ENTROPY(members, targets % 3)


def of_steps(outputs, targets):
    """A softmax at each of several steps, the last dimension."""
    return CROSS_ENTROPY(outputs, targets[:, None].expand(-1, outputs.shape[2])).sum(1)


def of_first_steps(outputs, targets):
    return of_steps(outputs.transpose(1, 2), targets)


def with_norm(width, outputs):
    """Of what goes into the norm records tell differences, whatever the loss is."""
    norm = nn.LayerNorm(width, elementwise_affine=False)
    return nn.Sequential(nn.Linear(FEATURES, width), norm, nn.Tanh(), nn.Linear(width, outputs))


@pytest.mark.first_cases(5)
@pytest.mark.parametrize(
    "net, loss, silent",
    [
        (with_norm(4, 3), CROSS_ENTROPY, True),
        (nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 4)), of_first_steps, True),
        (with_norm(3, 3), of_reference, False),
        (Twice(), CROSS_ENTROPY, False),
        (nn.Linear(FEATURES, 8), of_groups, False),
        (with_norm(4, 2), of_reference, False),
        (nn.Sequential(nn.Linear(FEATURES, 6), nn.Unflatten(1, (3, 2))), of_steps, False),
        (nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 1)), of_steps, True),
        (nn.Linear(FEATURES, 10), CROSS_ENTROPY, True),
        (nn.Linear(FEATURES, 3), partial(CROSS_ENTROPY, label_smoothing=0.1), True),
    ],
)
def test_only_contrasts_of_the_outputs_themselves_silence_it(net, loss, silent):
    assert warned(net, loss) is not silent
