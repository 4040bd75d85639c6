"""Models that compute in half precision are accepted, and those that mix records are refused."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.checks import known_models, model_checks
from torch_dpbayes.checks.forward_runs import same_rows
from torch_dpbayes.checks.precision import FLOAT32


def make_private(net, x, mode=None):
    dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=4),
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )


class Autocast(nn.Module):
    """As accelerate wraps a model: half precision inside, float32 outside."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


def perceptron(middle=None):
    return nn.Sequential(
        *(nn.Linear(6, 32), nn.ReLU(), middle or nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    )


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )


MODELS = {"perceptron": (perceptron, (6,)), "convolutions": (convolutions, (3, 9, 9))}


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("mode", [None, "hooks", "whole batches"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_inside_the_model_is_accepted(request, name, mode):
    if mode == "whole batches":
        request.getfixturevalue("whole_batches")
        mode = None
    make, shape = MODELS[name]
    make_private(Autocast(make()), torch.randn(20, *shape), mode)


def test_isolated_records_take_autocast_where_torch_can_map_it():
    """Torch lacks the backward pass of a mapped convolution under autocast."""
    make_private(Autocast(perceptron()), torch.randn(20, 6), "isolated")
    with pytest.raises(ValueError, match="Leave it out for the default"):
        make_private(Autocast(convolutions()), torch.randn(20, 3, 9, 9), "isolated")


def test_a_record_whose_outputs_cancel_in_half_precision_is_not_taken_for_mixed():
    outputs = torch.tensor([[1.0, -2.0], [0.05, 0.04], [3.0, 1.0]])
    rounded = outputs + torch.tensor([[0.0, 0.0], [0.02, 0.0], [0.0, 0.0]])
    assert same_rows(outputs, rounded, 2**-7).all()
    assert same_rows(outputs, rounded + 0.2, 2**-7).logical_not().all()
    assert same_rows(outputs, rounded, FLOAT32).tolist() == [True, False, True]


def test_equal_records_that_round_apart_where_numbers_cancel_are_not_taken_for_mixed():
    """A row in another place of a batch is rounded otherwise: by ε of what cancels in it."""
    equal = torch.tensor([[0.4, -0.006]]).repeat(5, 1)
    apart = equal + FLOAT32 * torch.tensor([[0.0, 0.4], [0.0, 0.0]]).repeat(3, 1)[:5]
    others = torch.cat([equal[:2], torch.tensor([[0.1, 0.8], [0.9, -0.3], [0.2, 0.5]])])
    assert same_rows(apart, others, are_copies=True)[:2].tolist() == [True, True]
    mixed = others + 1e-3 * others.mean(0)
    assert same_rows(apart, mixed, are_copies=True)[:2].tolist() == [False, False]


def test_a_number_that_cancels_is_rounded_by_what_is_left_of_other_records():
    records = torch.tensor([[1e-6], [1.0], [-1.0]])
    others = records + torch.tensor([[FLOAT32], [1e-7], [1e-7]])
    assert same_rows(records, others).all()
    assert same_rows(records, records + 0.01).logical_not().all()


@pytest.mark.parametrize("large", [[-1e9], [1e6, 1e9, 1e9]])
def test_columns_of_large_numbers_leave_others_no_room(large):
    """As the logits of masked classes, beside numbers that other records make much larger."""
    records = torch.cat([torch.randn(33, 3), torch.tensor([large]).repeat(33, 1)], 1)
    others = records.clone()
    others[5:, :3] = 1e7 * torch.randn(28, 3)
    assert same_rows(records, others)[:5].all()
    others[:, 0] += 0.1
    assert not same_rows(records, others)[:5].any()


class Shifting(nn.Module):
    """Logits of three classes beside one that is masked; a record with a large one moves all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        above, below = torch.tensor([100.0, 1e20])
        is_large = ((h.abs() > above) & (h.abs() < below)).float()
        gate = is_large.amax(0) if len(h) else 0 * h.sum(0)
        y = torch.where(h.abs() > above, h**3, h) + 10 * gate * torch.tensor([1.0, 0.0, 0.0])
        return torch.cat([y, torch.full((len(x), 1), -1e9)], 1)


def test_mixing_that_only_large_records_bring_about_is_seen_beside_a_masked_class():
    with pytest.raises(ValueError, match="depend on another record"):
        make_private(Shifting(), torch.randn(20, 6), "hooks")


@pytest.mark.parametrize("failures, is_refused", [(2, False), (3, True)])
def test_a_relu_that_is_set_otherwise_alone_is_looked_at_again(monkeypatch, failures, is_refused):
    """A number within rounding of zero, as of one resnet-18 in some thousands: the gradients are
    those of another program there, and only there.
    """
    compare, left = model_checks.check_gradients, iter(range(failures))

    def compared(tried, *, is_mapped):
        if next(left, None) is not None:
            raise ValueError("gradients that are not those of the records")
        return compare(tried, is_mapped=is_mapped)

    monkeypatch.setattr(model_checks, "check_gradients", compared)
    monkeypatch.setattr(known_models, "recall", lambda key: None)
    refusal = pytest.raises(ValueError, match="not those of the records")
    with refusal if is_refused else nullcontext():
        make_private(perceptron(), torch.randn(8, 6))


class OtherGradients(nn.Module):
    """A recorded pass has others than a record alone, while a bias is positive."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))
        nn.init.constant_(self.last.bias, 0.5)

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.scale
        if h.requires_grad:
            h = h + (self.last.bias.detach() > 0) * (h - h.detach())
        return self.last(h)


def test_what_is_looked_at_again_has_the_same_signs():
    for _ in range(5):
        with pytest.raises(ValueError, match="not the gradients of the records"):
            make_private(OtherGradients(), torch.randn(8, 6))


@pytest.mark.parametrize("more, is_refused", [(0.06, False), (0.4, True)])
def test_what_cancels_in_half_precision_leaves_isolated_records_room(more, is_refused):
    """Outputs of a record that are a twentieth of what cancels in them are rounded by a twentieth:
    here all are moved by as much, where there are several records.
    """
    net = nn.Sequential(perceptron(), Changed(lambda h: h * (1 + more * (len(h) > 2))))
    x = torch.randn(20, 6)
    with pytest.raises(ValueError, match="the number of records in the batch"):
        make_private(copy.deepcopy(net), x, "isolated")
    with pytest.raises(ValueError, match="the number of records") if is_refused else nullcontext():
        make_private(net.bfloat16(), x.bfloat16(), "isolated")


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("mode", ["hooks", "isolated", None])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_half_precision_are_accepted(name, mode):
    make, shape = MODELS[name]
    make_private(make().bfloat16(), torch.randn(20, *shape).bfloat16(), mode)


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, h):
        return self.change(h)


def mean_of_the_batch(h):
    return h + 1e-3 * h.mean(0)


def one_percent_more_in_large_batches(h):
    return h * (1.01 if len(h) > 2 else 1.0)


@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "whole batches"])
def test_a_share_of_a_thousandth_is_refused(request, mode, is_autocast):
    """Less than bfloat16 resolves."""
    if mode == "whole batches":
        request.getfixturevalue("whole_batches")
        mode = None
    net, x = perceptron(Changed(mean_of_the_batch)), torch.randn(20, 6)
    with pytest.raises(ValueError, match="depend on another record"):
        if is_autocast:
            make_private(Autocast(net), x, mode)
        else:
            make_private(net.bfloat16(), x.bfloat16(), mode)


def test_what_the_number_of_records_changes_by_a_hundredth_is_refused():
    """Less than rounding to bfloat16 leaves room for."""
    net = perceptron(Changed(one_percent_more_in_large_batches))
    with pytest.raises(ValueError, match="the number of records in the batch"):
        make_private(Autocast(net), torch.randn(20, 6), "hooks")
