"""Guards that no other test is refused by: each is met by a model, or a fault, of its own."""

import pytest
import torch
import torch.nn.functional as F
from support.model_zoo import make_private
from torch import nn

from torch_dpbayes.checks import decision_checks
from torch_dpbayes.clipping import contributions


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.own = nn.Linear(4, 8), nn.Linear(8, 3), forward

    def forward(self, x):
        return self.own(self, x)


def deciding_twice(net, x):
    h = net.first(x)
    if x.isnan().any():
        h = h.clone()
    if x.isinf().any():
        h = h.clone()
    return net.last(h)


@pytest.mark.thorough
def test_more_decisions_than_can_be_tested(monkeypatch):
    make_private(Model(deciding_twice), (4,), grad_sample_mode="hooks")
    monkeypatch.setattr(decision_checks, "_MOST_DECISIONS", 1)
    with pytest.raises(ValueError, match="decisions on the batch at more than 1 lines"):
        make_private(Model(deciding_twice), (4,), grad_sample_mode="hooks")


@pytest.mark.usefixtures("whole_batches")
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_an_output_without_gradient(mode):
    detached = Model(lambda net, x: net.last(net.first(x)).detach())
    with pytest.raises(ValueError, match="has no gradient"):
        make_private(detached, (4,), grad_sample_mode=mode)


def test_a_weight_that_is_used_outside_its_layer_only():
    outside = Model(lambda net, x: net.last(F.linear(x, net.first.weight, net.first.bias)))
    with pytest.raises(ValueError, match=r"'first.weight' got no per-record gradient"):
        make_private(outside, (4,), grad_sample_mode="hooks")


def test_a_weight_that_is_used_a_little_outside_its_layer():
    """What is recorded in the layer misses a twentieth of the gradient."""

    def forward(net, x):
        h = torch.tanh(net.first(x))
        return net.last(h) + 0.05 * F.linear(h, net.last.weight)

    with pytest.raises(ValueError, match="that are not the gradients of the records"):
        make_private(Model(forward), (4,), grad_sample_mode="hooks")


def test_a_kernel_that_adds_up_something_else(monkeypatch):
    """Broken on purpose: the sum of clipped gradients is half as large again."""
    right = contributions.Outer._add_product

    def wrong(self, factor, out):
        right(self, 1.5 * factor, out)

    net = Model(lambda net, x: net.last(torch.tanh(net.first(x))))
    monkeypatch.setattr(contributions.Outer, "_add_product", wrong)
    with pytest.raises(ValueError, match="error of this library"):
        make_private(net, (4,))


def test_outputs_beside_a_loss_that_are_mixed():
    """The loss of a batch may be another mean than that of single records; its outputs may not."""

    def centred(net, x):
        h = net.last(torch.tanh(net.first(x)))
        return h.square().mean(), h - h.mean(0)

    with pytest.raises(ValueError, match="gives other outputs where every record runs alone"):
        make_private(Model(centred), (4,))
