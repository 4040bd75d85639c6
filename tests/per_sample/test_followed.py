"""What a batch shows before its backward pass, and after; and that it comes back into no other."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_sum, delivered, gradients_of_records
from support.refusals import refused
from torch import Tensor, nn

from torch_dpbayes.errors import LossError
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.derived import Derived, holds_records
from torch_dpbayes.per_sample.followed import Followed
from torch_dpbayes.per_sample.operations import Delivery
from torch_dpbayes.per_sample.plain_functions import FUNCTIONS


def batch(records=3, shown=5):
    """A private model, and a batch of other than the expected size."""
    net = nn.Linear(6, 4)
    source = BookkeepingGradientSource(net)
    x, y = torch.randn(records, 6), torch.randint(4, (records,))
    return net, source, x, y, *delivered(x, y, shown=shown)


@pytest.mark.parametrize("records", [0, 1, 3, 8])
def test_the_number_of_records_does_not_show_before_backward(records):
    net, _, x, y, a, b = batch(records)
    out = net(a)
    whole = ((a, 6), (b, None), (out, 4), (out.argmax(1), None), (torch.zeros_like(b), None))
    for t, width in whole:
        shape = (5,) if width is None else (5, width)
        assert t.shape == t.size() == shape and len(t) == t.shape[0] == t.size(0) == 5
        assert t.numel() == 5 * (width or 1)
    loss = F.cross_entropy(out, b)
    assert loss.shape == () and "values after backward" in repr(out)
    loss.backward()
    assert len(a) == len(b) == len(out) == records
    assert out.shape == (records, 4) and "after backward" not in repr(out)


def test_a_compiler_is_given_no_values():
    given = []

    def backend(graph, inputs):
        given.extend(inputs)
        return graph.forward

    net, _, _, _, a, b = batch()
    loss = torch.compile(lambda out, y: F.cross_entropy(out.tanh(), y), backend=backend)
    loss(net(a), b).backward()
    assert not given


def test_an_ordinary_tensor_that_is_given_the_batch_has_no_values():
    x, t = delivered(torch.randn(4, 3), torch.zeros(4)), torch.zeros(2)
    t.data = x[0]
    with pytest.raises(RuntimeError, match="has no values before backward"):
        t.sum()


def test_values_after_backward_are_those_of_torch():
    net, source, x, y, a, b = batch()
    out = net(a)
    each = F.cross_entropy(out, b, reduction="none")
    loss, hits, squares = each.mean(), (out.argmax(1) == b).float().mean(), out.square()
    top, spread = out.detach().amax(), out.detach().std(0)
    scaled, total = 2 * loss.detach() * spread, torch.zeros(()) + loss.detach()
    loss.backward()
    with source.paused(), torch.no_grad():
        true = net(x)
    for found, expected in (
        (a, x),
        (b, y),
        (out, true),
        (each, F.cross_entropy(true, y, reduction="none")),
        (loss, F.cross_entropy(true, y)),
        (hits, (true.argmax(1) == y).float().mean()),
        (squares, true.square()),
        (top, true.amax()),
        (spread, true.std(0)),
        (scaled, 2 * F.cross_entropy(true, y) * true.std(0)),
        (total, F.cross_entropy(true, y)),
        (out.softmax(1), true.softmax(1)),
    ):
        found = found.detach() if isinstance(found, Followed) else found
        torch.testing.assert_close(found.as_subclass(Tensor), expected, rtol=1e-5, atol=1e-6)
    assert loss.item() == pytest.approx(float(F.cross_entropy(true, y)), rel=1e-5)
    assert b.tolist() == y.tolist() and (out.detach().numpy() == true.numpy()).all()
    assert f"{loss:.4f}" == f"{loss.item():.4f}" and len(list(out)) == 3
    assert torch.equal(pickle.loads(pickle.dumps(b)), y) and torch.equal(copy.deepcopy(b), y)
    with pytest.raises(LossError, match="detach"):
        torch.vmap(torch.sum)(a)
    torch.testing.assert_close(torch.vmap(torch.sum)(a.detach()).as_subclass(Tensor), x.sum(1))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: torch.tensor([t, t]),
        lambda t: torch.as_tensor([t]),
        lambda t: torch.zeros(2).new_tensor([t, t]),
        lambda t: torch.full((3,), t),
        lambda t: torch.zeros(3).add_(torch.ones(3), alpha=t),
        lambda t: torch.zeros(3).addcmul_(torch.ones(3), torch.ones(3), value=t),
        lambda t: torch._foreach_add([torch.zeros(3)], [torch.ones(3)], alpha=t),
        lambda t: torch.arange(1, t),
    ],
)
def test_torch_makes_no_unmarked_tensor_of_values(read):
    net, _, _, _, a, b = batch()
    loss, count = F.cross_entropy(net(a), b), b.sum()
    loss.backward()
    for t in (loss.detach(), count.detach() + 2):
        with refused("loss-mixes"):
            read(t)
        assert float(t) == t.item() and int(t) == int(t.item()) and (t > 0) is not False
        assert not torch.equal(t, t + 1) and torch.allclose(t, t) and t in torch.stack([t, t])


def test_every_view_of_memory_that_a_batch_was_written_into_is_marked():
    net, _, _, _, a, b = batch()
    F.cross_entropy(net(a), b).backward()
    base = torch.zeros(4)
    views = [base[1:], base.view(2, 2), base.detach(), base]
    base[:1].copy_(a.mean())
    assert all(isinstance(v * 1, Derived) for v in views)


def test_what_collectives_write_is_marked(tmp_path):
    net, _, _, _, a, b = batch()
    F.cross_entropy(net(a), b).backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        for write in (
            lambda out, t: dist.gather(t, [out]),
            lambda out, t: dist.all_to_all_single(out, t),
            lambda out, t: dist.all_gather([out], t),
        ):
            out, mean = torch.zeros(1), a.mean()[None]
            write(out, mean)
            assert torch.equal(out, mean) and holds_records(out) and isinstance(out * 1, Derived)
    finally:
        dist.destroy_process_group()


def test_running_statistics_are_refused_before_backward_and_marked_afterwards():
    net, _, _, _, a, b = batch()
    norm = nn.BatchNorm1d(a.shape[1])
    with torch.no_grad(), refused("loss-mixes"):
        norm(a)  # has no values to take them from, as in update_bn(loader, net)
    net, _, _, _, a, b = batch()
    F.cross_entropy(net(a), b).backward()
    assert norm(a).isfinite().all() and holds_records(norm.running_mean)


def test_a_second_loss_of_a_pass_is_refused_in_a_sentence():
    net, _, _, _, x, y = batch()
    F.cross_entropy(out := net(x), y).backward()
    with refused("loss-twice"):
        out.square().mean().backward()


def test_a_metric_that_fails_says_why_after_backward():
    net, _, _, _, a, b = batch()
    out = net(a)
    metric = torch.linalg.cholesky(-out.detach().T @ out.detach())
    F.cross_entropy(out, b).backward()
    with pytest.raises(RuntimeError, match="positive-definite"):
        metric.sum().item()


def test_tensors_of_two_loaders_do_not_meet():
    (x,), (other,) = (delivered(torch.randn(3, 6)) for _ in range(2))
    for use in (lambda: x + other, lambda: x + 1):  # nor is what was refused of use any more
        with refused("loss-mixes"):
            use()


def test_batches_keep_their_types_and_what_is_no_row_is_of_several_records():
    net, _, x, y, _, _ = batch()
    given = Delivery(3)({"x": x, "rest": [(y, "text"), None], "mean": x.mean(0)}, 3)
    assert isinstance(given["x"], Followed) and isinstance(given["rest"][0][0], Followed)
    assert given["rest"][0][1] == "text" and given["rest"][1] is None
    assert isinstance(given["mean"], Derived)
    with pytest.raises(LossError):
        net(given["x"] - given["mean"])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.numpy().__imul__(255),
        lambda x: x.data.sub_(x.mean(0)),
        lambda x: x.mul_(3.0),
        lambda x: x[0].fill_(1e3),
    ],
)
def test_a_batch_that_is_written_to_after_backward_changes_no_sum(write):
    """Norms were taken of the rows that the sum will be made of: values are copies."""
    net, source, x, y, a, b = batch()
    F.cross_entropy(net(a), b).backward()
    write(a)
    assert not torch.equal(a.detach(), x)  # and what is written stays
    assert_sum(source, net, records=(x, y), atol=1e-6)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_labels_change_no_divisor(ignored):
    """A record whose label is ignored has a loss of zero, and counts."""
    net, source, x, y, _, _ = batch(8)
    y[0], y[1] = ignored, 1

    def of_one(net, x, y):
        return F.cross_entropy(net(x), y, ignore_index=ignored, reduction="none").mean()

    with source.paused():
        gradients = gradients_of_records(net, of_one, (x, y))
        value = float(of_one(net, x, y).detach())
    a, b = delivered(x, y)
    loss = F.cross_entropy(net(a), b, ignore_index=ignored)
    loss.backward()
    assert_sum(source, net, gradients, 0.5, atol=1e-6)
    assert float(loss) == pytest.approx(value, rel=1e-5)


HOWS = [{"reduction": how} for how in ("mean", "sum", "none")]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: how["reduction"])
def test_functions_in_place_of_torchs_give_its_results(how):
    scores, labels, weight = torch.randn(5, 4), torch.tensor([0, 3, -100, 2, 1]), torch.rand(4)
    tokens, table, means = torch.randint(6, (3, 4)), torch.randn(6, 2), torch.randn(4)
    of_classes = [(scores, labels), (scores, labels, weight)]
    cases = [
        *((f, given, how) for f in (F.cross_entropy, F.nll_loss) for given in of_classes),
        (F.cross_entropy, (scores, labels), {"label_smoothing": 0.1, "reduction": "none"}),
        (F.gaussian_nll_loss, (scores, means, scores.exp()), {**how, "full": True}),
        (F.binary_cross_entropy, (weight, torch.rand(4)), how),
        (F.binary_cross_entropy, (weight, torch.rand(4), torch.rand(4)), how),
        *((F.embedding_bag, (tokens, table), {"mode": mode}) for mode in ("sum", "mean", "max")),
        (F.rms_norm, (scores, (4,), weight), {}),
    ]
    for torchs, args, options in cases:
        found = FUNCTIONS[torchs](*args, **options)
        torch.testing.assert_close(found, torchs(*args, **options))
