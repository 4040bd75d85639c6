"""What the tests of per-sample gradients share: batches as the loader delivers them, clipped sums,
and the same sums by ordinary autograd, one record at a time.
"""

import math
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import refusals, training
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.per_sample import arithmetic, layers
from torch_dpbayes.per_sample.arithmetic import Machine
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.operations import Delivery

SOURCE_OF = {"bookkeeping": BookkeepingGradientSource, "vmap": VmapGradientSource}
SOURCES = pytest.mark.parametrize("make", SOURCE_OF.values(), ids=SOURCE_OF)
MODES = pytest.mark.parametrize("mode", SOURCE_OF)
# what these would choose, on the CPU
H200, T4 = Machine(2**14, True, True), Machine(2**12, True, False)


def delivered(*tensors, shown=None):
    """A batch as the private loader delivers it."""
    n = len(tensors[0])
    return Delivery(n if shown is None else shown)(tensors, n)


def trained(net):
    return [(name, p) for name, p in net.named_parameters() if p.requires_grad]


def sum_of(source, net, clip, **options):
    """The clipped sum of the last backward pass, with the pass forgotten; it replaces NaN."""
    named = trained(net)
    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    out = [torch.full((p.numel(),), math.nan, dtype=dtype, device=p.device) for _, p in named]
    source.add_clipped_sum(named, clip, out, beta=0.0, **options)
    source.discard([p for _, p in named])
    return torch.cat(out)


def gradients_of_records(net, loss, tensors):
    """(records, numbers): the gradient of ``loss(net, *one)`` of each record as a batch of one."""
    parameters = [p for _, p in trained(net)]
    rows = []
    for i in range(len(tensors[0])):
        for p in parameters:
            p.grad = None
        loss(net, *(t[i : i + 1] for t in tensors)).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
        rows.append(torch.cat([g.flatten() for g in found]))
    for p in parameters:
        p.grad = None
    return torch.stack(rows)


def clipped_rows(gradients, clip, norm=None):
    """The sum of rows, each clipped by its norm; those that are not finite count as zero."""
    norm = gradients.norm(dim=1) if norm is None else norm
    factor = torch.where(norm.isfinite(), (clip / norm).clamp(max=1.0), 0.0)
    return (torch.where(norm.isfinite()[:, None], gradients, 0.0) * factor[:, None]).sum(0)


def middle_norm(gradients):
    """A clip norm that half of the records reach: of the others the length is seen, too."""
    norms = gradients.norm(dim=1)
    return max(float(norms[norms.isfinite()].median()), 1e-6)


def assert_sum(source, net, gradients=None, clip=0.3, *, records=None, atol=3e-5):
    """The last backward pass has the sum of these gradients, or of the records' cross entropies.
    Norms include rounding errors, so the sum may be shorter; ``test_clipped_sums`` is exact.
    """
    found = sum_of(source, net, clip)
    if gradients is None:
        source.remove()
        gradients = gradients_of_records(net, entropy, records)
    torch.testing.assert_close(found, clipped_rows(gradients, clip), rtol=1e-3, atol=atol)


def private(net, *data, clip=0.5, batch_size=None, **options):
    """Model, optimizer and loader of full batches: a step subtracts lr times the mean of clipped
    gradients, and almost no noise.
    """
    optimizer = partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=math.inf)
    given = {"optimizer": optimizer, "noise_multiplier": 1e-5, **options}
    return training.private(
        net, TensorDataset(*data), batch_size or len(data[0]), max_grad_norm=clip, **given
    )


def refused(work, code):
    with refusals.refused(code):
        work()


def vector(net):
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def entropy(net, *batch):
    return F.cross_entropy(net(*batch[:-1]).flatten(1), batch[-1])


# -- linear losses of given weights ----------------------------------------------------------------


def loss_of(net, x, weights):
    return (net(x).flatten(1) * weights).sum(1).mean()


@torch.no_grad()
def weights_of(net, x, spread):
    """Of the outputs in a linear loss: record i's gradient is about spread**i times the first
    one's.
    """
    out = net(x).flatten(1)
    size = spread ** torch.arange(len(x), device=x.device, dtype=out.dtype)
    return torch.randn_like(out) * size[:, None]


def clipped(source, net, x, weights, clip, **options):
    """Clipped sum and norms, each of a backward pass of its own: norms() may leave behind what the
    sum would have to find out.
    """

    def backward():
        batch = delivered(x, weights) if source.follows else (x, weights)
        loss_of(net, *batch).backward()

    backward()
    total = sum_of(source, net, clip, **options)
    backward()
    norms = source.norms(trained(net))
    source.discard([p for _, p in trained(net)])
    return total, norms


@contextmanager
def on(machine, *, tf32=False):
    """Layers take the ways of this machine; None: their own."""
    with ExitStack() as stack:
        if machine is not None:
            stack.enter_context(mock.patch.object(arithmetic, "machine_of", lambda _: machine))
            stack.enter_context(mock.patch.object(arithmetic, "allows_tf32", lambda _: tf32))
        yield


@contextmanager
def forced(way, is_kept=False):
    """Layers take this way, whatever their shapes; None: that of the shapes."""
    with ExitStack() as stack:
        for name, choice in (("choose_linear", way), ("choose_convolution", (way, is_kept))):
            if way is not None:
                stack.enter_context(mock.patch.object(layers, name, lambda *_, c=choice: c))
        yield
