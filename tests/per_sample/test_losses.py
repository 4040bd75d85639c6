"""Usual losses run unchanged in the plain loop, with the gradients of one record at a time."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    clipped_rows,
    delivered,
    gradients_of_records,
    middle_norm,
    private,
    sum_of,
    vector,
)
from losses import USUAL, K, classes, inputs, net_of
from torch import nn

from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.plain_functions import FUNCTIONS

pytestmark = [
    # torch runs these for one record after another
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
SOURCES = {"bookkeeping": BookkeepingGradientSource, "vmap": VmapGradientSource}


def found_and_expected(name, mode, is_vouched=False):
    usual = USUAL[name]
    net, data = usual.model(), usual.data()
    gradients = gradients_of_records(net, usual.loss, data)
    clip = middle_norm(gradients)
    expected = clipped_rows(gradients, clip)
    source = SOURCES[mode](net, loss_reduction=usual.loss_reduction, assume_independent=is_vouched)
    usual.loss(net, *(data if is_vouched else delivered(*data))).backward()
    found = sum_of(source, net, clip)
    source.remove()
    return found, expected


@pytest.mark.parametrize(
    ("name", "mode", "is_vouched"),
    [
        (name, mode, is_vouched)
        for k, name in enumerate(USUAL)
        for mode, is_vouched in itertools.product(SOURCES, (False, True))
        if mode == "bookkeeping" or k % 6 == 0
    ],
)
def test_a_usual_loss_runs_as_it_is(name, mode, is_vouched):
    """Followed, or of whole batches that are vouched for."""
    found, expected = found_and_expected(name, mode, is_vouched)
    assert found.isfinite().all()
    if not USUAL[name].draws:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# -- one loss of several, and what is written around it --------------------------------------------


def step_of(loop, *, loss=F.cross_entropy):
    """What ``loop(net, opt, x, y)`` moved the parameters by, and what the loss would have."""
    net = net_of(K)()
    data = inputs(), classes()
    gradients = gradients_of_records(net, lambda n, x, y: loss(n(x), y), data)
    clip = middle_norm(gradients)
    expected = clipped_rows(gradients, clip)
    net, optimizer, loader = private(net, *data, clip=clip)
    start = vector(net)
    for x, y in loader:
        loop(net, optimizer, x, y)
    assert len(optimizer.accountant) == 1
    return (start - vector(net)) * len(data[0]), expected.double()


def finish(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accuracy_before(net, optimizer, x, y):
    out = net(x)
    loss = F.cross_entropy(out, y)
    hits = (out.argmax(1) == y).float().mean()
    finish(optimizer, loss)
    assert hits.item() == float((out.argmax(1) == y).float().mean())


def metrics_without_gradients(net, optimizer, x, y):
    out = net(x)
    loss = F.cross_entropy(out, y)
    with torch.no_grad():
        spread = (out - out.mean(0)).square().mean().sqrt()
        scaled = 2 * loss * spread
    finish(optimizer, loss)
    expected = (out - out.mean(0)).square().mean().sqrt()
    assert float(spread) == pytest.approx(float(expected))
    assert float(scaled) == pytest.approx(float(2 * loss * expected))


def a_running_total_of_tensors(net, optimizer, x, y):
    loss = F.cross_entropy(net(x), y)
    total = torch.zeros(()) + loss.detach()
    finish(optimizer, loss)
    assert float(total) == pytest.approx(float(loss))


def values_after(net, optimizer, x, y):
    out = net(x)
    loss = F.cross_entropy(out, y)
    finish(optimizer, loss)
    assert f"{loss:.3f}" == f"{loss.item():.3f}" == f"{float(loss):.3f}"
    assert torch.isfinite(loss).all() and len(y.tolist()) == len(out.detach().numpy())


def losses_added_to_zeros(net, optimizer, x, y):
    finish(optimizer, torch.zeros(()) + F.cross_entropy(net(x), y))


def a_disabled_scaler(net, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "loop",
    [
        accuracy_before,
        metrics_without_gradients,
        a_running_total_of_tensors,
        values_after,
        losses_added_to_zeros,
        a_disabled_scaler,
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_usual_loop_runs_as_it_is(loop):
    found, expected = step_of(loop)
    assert float((found - expected).norm()) < 1e-3 * float(expected.norm())


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_labels_change_no_divisor(ignored):
    """A record whose label is ignored has a loss of zero, and counts."""
    net, x, y = net_of(K)(), inputs(), classes()
    y[0], y[1] = ignored, 1

    def of_one(net, x, y):
        return F.cross_entropy(net(x), y, ignore_index=ignored, reduction="none").mean()

    expected = clipped_rows(gradients_of_records(net, of_one, (x, y)), 0.5)
    source = BookkeepingGradientSource(net)
    a, b = delivered(x, y)
    loss = F.cross_entropy(net(a), b, ignore_index=ignored)
    loss.backward()
    torch.testing.assert_close(sum_of(source, net, 0.5), expected, rtol=1e-4, atol=1e-6)
    with source.paused():
        assert float(loss) == pytest.approx(float(of_one(net, x, y).detach()), rel=1e-5)


# -- loss=, inside the map -------------------------------------------------------------------------

GIVEN = {
    "cross entropy": F.cross_entropy,
    "another one for each record": lambda out, y: (
        torch.where(out.mean() > 0, 2.0, 1.0) * F.cross_entropy(out, y)
    ),
    "numbers": lambda out, y: 1.0 + F.cross_entropy(out, y, label_smoothing=0.1) / 3,
}


@pytest.mark.parametrize("mode", SOURCES)
@pytest.mark.parametrize("name", GIVEN)
def test_a_given_loss_runs_for_each_record_alone(name, mode):
    net, data, loss = net_of(K)(), (inputs(), classes()), GIVEN[name]
    gradients = gradients_of_records(net, lambda n, x, y: loss(n(x), y), data)
    clip = middle_norm(gradients)
    expected = clipped_rows(gradients, clip)
    net, optimizer, loader = private(net, *data, loss=loss, grad_sample_mode=mode)
    source = optimizer.release.source
    for x, y in loader:
        net.private_loss(x, y).backward()
        torch.testing.assert_close(sum_of(source, net, clip), expected, rtol=1e-4, atol=1e-6)


def test_a_given_loss_in_eval_mode_is_that_of_the_batch():
    net, data = net_of(K)(), (inputs(), classes())
    net, _, _ = private(net, *data, loss=F.cross_entropy)
    net.eval()
    with torch.no_grad():
        found = net.private_loss(*data)
        torch.testing.assert_close(found, F.cross_entropy(net(data[0]), data[1]))


class WithLoss(nn.Module):
    """Computes its own loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = net_of(K)()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net_of(K)()

    def forward(self, x):
        out = self.net(x)
        return out, 0.1 * out.square().sum()


OWN = {
    "all of it": (WithLoss, lambda net, x, y: net(x, y)["loss"]),
    "a part of it": (
        Penalised,
        lambda net, x, y: (lambda out, more: F.cross_entropy(out, y) + 0.5 * more)(*net(x)),
    ),
}


@pytest.mark.parametrize("mode", SOURCES)
@pytest.mark.parametrize("is_vouched", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_a_scalar_that_the_model_returns_is_a_loss_of_each_record(name, is_vouched, mode):
    make, loss_of = OWN[name]
    net, data = make(), (inputs(), classes())
    expected = clipped_rows(gradients_of_records(net, loss_of, data), 0.5)
    with torch.no_grad():
        true = torch.stack([loss_of(net, *(t[i : i + 1] for t in data)) for i in range(8)]).mean()
    source = SOURCES[mode](net, assume_independent=is_vouched)
    loss = loss_of(net, *(data if is_vouched else delivered(*data)))
    loss.backward()
    torch.testing.assert_close(sum_of(source, net, 0.5), expected, rtol=1e-4, atol=1e-6)
    assert float(loss.detach()) == pytest.approx(float(true), rel=1e-5)


@pytest.mark.parametrize("mode", SOURCES)
@pytest.mark.parametrize("is_vouched", [False, True])
def test_empty_batches_add_nothing(mode, is_vouched):
    for name in ("cross entropy", "Normal", "segmentation", "language model, two terms", "elbo"):
        usual = USUAL[name]
        net, data = usual.model(), tuple(t[:0] for t in usual.data())
        source = SOURCES[mode](net, assume_independent=is_vouched)
        batch = data if is_vouched else delivered(*data, shown=3)
        loss = usual.loss(net, *batch)
        loss.backward()
        named = list(net.named_parameters())
        out = [torch.zeros(p.numel()) for _, p in named]
        assert source.norms(named).shape == (0,)
        assert source.add_clipped_sum(named, 1.0, out) == 0
        assert not torch.cat(out).any()
        source.remove()


def test_functions_in_place_of_torchs_give_its_results():
    scores, labels, weight = torch.randn(5, 4), torch.tensor([0, 3, -100, 2, 1]), torch.rand(4)
    for name in ("cross_entropy", "nll_loss"):
        torchs = getattr(F, name)
        for more in ((), (weight,)):  # by position, too
            for how in ("mean", "sum", "none"):
                found = FUNCTIONS[torchs](scores, labels, *more, reduction=how)
                torch.testing.assert_close(found, torchs(scores, labels, *more, reduction=how))
    smooth = {"label_smoothing": 0.1, "reduction": "none"}
    found = FUNCTIONS[F.cross_entropy](scores, labels, **smooth)
    torch.testing.assert_close(found, F.cross_entropy(scores, labels, **smooth))
    tokens, table = torch.randint(6, (3, 4)), torch.randn(6, 2)
    for mode in ("sum", "mean", "max"):
        found = FUNCTIONS[F.embedding_bag](tokens, table, mode=mode)
        torch.testing.assert_close(found, F.embedding_bag(tokens, table, mode=mode))
    x, gain = torch.randn(3, 6), torch.rand(6)
    torch.testing.assert_close(FUNCTIONS[F.rms_norm](x, (6,), gain), F.rms_norm(x, (6,), gain))
