"""Models that run for one record at a time: what the map computes, and where its numbers lie."""

import contextlib
import random
import threading

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from helpers import (
    MODES,
    SOURCE_OF,
    SOURCES,
    assert_sum,
    clipped,
    delivered,
    entropy,
    gradients_of_records,
    private,
    refused,
    sum_of,
)
from support.steps import in_parts
from torch import nn
from zoo import Of, around, head

from torch_dpbayes.errors import DPBayesError
from torch_dpbayes.per_sample import contributions, layers
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.record_map import CannotBeMapped, RecordMap, as_traced

ZERO = torch.zeros(1)
X, Y = torch.randn(7, 6), torch.randint(3, (7,))


@pytest.mark.chance(1e-6)
@SOURCES
@pytest.mark.parametrize("kind", [nn.Dropout, nn.RReLU, nn.RNN, nn.GRU, nn.LSTM])
def test_random_numbers_differ_between_records(make, kind):
    """Of one record that comes twice; recurrent layers have dropout between two."""
    if is_recurrent := issubclass(kind, nn.RNNBase):
        layer = kind(6, 400, num_layers=2, dropout=0.5, batch_first=True)
        net = Of(lambda net, x: net.layer(x)[0][:, -1], layer=layer)
    else:
        net = nn.Sequential(nn.Linear(6, 400), kind(0.2, 0.6) if kind is nn.RReLU else kind(0.5))
        nn.init.zeros_(net[0].weight)
        nn.init.constant_(net[0].bias, -1.0)
    source = make(net)
    (x,) = delivered(torch.randn(*[1] * is_recurrent, 6).expand(2, *[1] * is_recurrent, 6))
    out = net(x)
    out.mean().backward()
    differing = int((out[0] != out[1]).sum())
    assert differing > 100 and (kind is not nn.Dropout or differing < 300)  # 200 ± 10
    if kind is nn.RReLU:
        slopes = -out.flatten().detach().as_subclass(torch.Tensor)
        assert scipy.stats.kstest(slopes.numpy(), "uniform", args=(0.2, 0.4)).pvalue > 1e-7
    source.remove()


# -- faults of this library that the comparison finds ----------------------------------------------


def leaking(run):
    def run_all(self, function, tensors, *copies):
        if len(tensors[0]) > 1:
            tensors = [
                t - t.mean(0) if t.is_floating_point() and t.dim() == 3 else t for t in tensors
            ]
        return run(self, function, tensors, *copies)

    return run_all


LINEAR = layers.KINDS[nn.Linear]
DOUBLED = LINEAR._replace(kernel=lambda m, calls: LINEAR.kernel(m, [(a, 2 * g) for a, g in calls]))
MOVED = LINEAR._replace(run=lambda *given: LINEAR.run(*given) + 10.0)


@pytest.mark.parametrize(
    ("fault", "mode", "code"),
    [
        (lambda p: p.setattr(RecordMap, "__call__", leaking(RecordMap.__call__)), *found)
        for found in (("bookkeeping", "model-mixes"), ("vmap", "model-mixes"))
    ]
    + [
        (lambda p: p.setitem(layers.KINDS, nn.Linear, DOUBLED), None, "model-mixes"),
        (lambda p: p.setitem(layers.KINDS, nn.Linear, MOVED), None, "model-mixes"),
    ]
    + [
        (
            lambda p, k=k: p.setattr(contributions.Outer, "norm", lambda self: k * self.norms),
            None,
            "model-norms",
        )
        for k in (0.5, 1.5)
    ],
    ids=["map", "map by vmap", "kernel", "run", "small norm", "large norm"],
)
def test_a_fault_of_this_library_would_be_found(fault, mode, code, monkeypatch):
    fault(monkeypatch)
    net = around() if mode or code == "model-norms" else head()
    refused(lambda: private(net, X, Y, grad_sample_mode=mode), code)


def test_an_input_of_a_layer_that_is_changed_before_the_backward_pass_is_refused():
    def function(net, x):
        h = net.first(x).tanh()
        out = net.head(h)
        h.mul_(2)
        return out

    net = Of(function, first=nn.Linear(6, 6), head=head())
    refused(lambda: private(net, X, Y), "step-changed")


@MODES
@pytest.mark.parametrize("padding", [None, 2, -3, "torch.embedding", "nn.Embedding"])
def test_a_token_beyond_its_table_counts_as_zero_and_padding_is_not_trained(padding, mode):
    """In the map each record has a copy of the table, and the copies lie one behind another."""

    passes = []

    def function(net, x):
        passes.append(1)
        if padding == "torch.embedding":
            return net.last(torch.embedding(weight=net.table, indices=x).mean(1))
        if padding == "nn.Embedding":
            return net.last(net.table(x).mean(1))
        return net.last(F.embedding(x, net.table, padding).mean(1))

    table = nn.Embedding(5, 6) if padding == "nn.Embedding" else nn.Parameter(torch.randn(5, 6))
    net = Of(function, table=table, last=head())
    x, y = torch.randint(5, (7, 4)), torch.randint(3, (7,))
    gradients = gradients_of_records(net, entropy, (x[1:], y[1:]))
    source = SOURCE_OF[mode](net)
    for wrong in (5, 9, -1):
        x[0, 0] = wrong
        a, b = delivered(x, y)
        passes.clear()
        loss = entropy(net, a, b)
        assert len(passes) == 1  # as without such a record
        passes.clear()
        loss.backward()
        assert_sum(source, net, gradients)


@MODES
def test_a_token_beyond_a_table_that_is_the_whole_model_counts_as_zero(mode):
    net, x, y = nn.Embedding(5, 3), torch.randint(5, (7,)), torch.randint(3, (7,))
    gradients = gradients_of_records(net, entropy, (x[1:], y[1:]))
    source, x[0] = SOURCE_OF[mode](net), 9
    entropy(net, *delivered(x, y)).backward()
    assert_sum(source, net, gradients)


# -- what the program writes into ------------------------------------------------------------------

AT = torch.tensor([0, 1])
WRITE = {  # each into memory of which torch does not say that several records share it
    "index": lambda t, x: t.__setitem__((slice(None), AT), x[:, :2]),
    "mask": lambda t, x: t.masked_fill_(x > 0, 3.0),
    "entries": lambda t, x: t.__setitem__(x > 0, 3.0),
    "rows": lambda t, x: t.T.__setitem__(x[0] > 0, x.mean()),
}
SHARED = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")


@SHARED
@MODES
@pytest.mark.parametrize("how", WRITE)
@pytest.mark.parametrize(
    "constant", [lambda x: torch.zeros(len(x), 6), lambda x: torch.zeros(6).expand_as(x)]
)
def test_a_constant_that_the_model_is_given_is_written_into_for_each_record(constant, how, mode):
    def stateful(net, x, state):
        WRITE[how](state, x)
        return net.last(net.first(x) + state)

    def loss(net, x, y):
        return F.cross_entropy(net(x, constant(x)), y)

    net = Of(stateful, first=nn.Linear(6, 6), last=head())
    gradients = gradients_of_records(net, loss, (X, Y))
    source = SOURCE_OF[mode](net)
    loss(net, *delivered(X, Y)).backward()
    assert_sum(source, net, gradients)


@SHARED
@MODES
def test_what_a_pass_writes_into_parameters_stays_out_of_them(mode):
    def function(net, x):
        with torch.no_grad():
            WRITE["index"](net.shift, x)
        return net.last(x + net.shift)

    net = Of(function, shift=nn.Parameter(torch.zeros(1, 6)), last=head())
    source = SOURCE_OF[mode](net)
    entropy(net, *delivered(X, Y)).backward()
    assert not net.shift.any()
    refused(lambda: sum_of(source, net, 0.3), "step-changed")


@SOURCES
@pytest.mark.parametrize("is_vouched", [False, True])
def test_a_record_contributes_alone_what_it_does_beside_others(make, is_vouched):
    """For a batch of one, torch has another gradient of a norm whose output is transposed. It is
    not the right one: such a model is not refused for it, either.
    """

    def function(net, x):
        return net.norm(net.first(x)).flatten(2).mT.flatten(1)

    norm = nn.InstanceNorm2d(4, affine=True)
    net = Of(function, first=nn.Conv2d(2, 4, 1), norm=norm)
    x, weights = torch.randn(3, 2, 2, 2), torch.randn(3, 16)
    private(net, x, torch.zeros(3).long())
    source = make(net, assume_independent=is_vouched)
    found, norms = clipped(source, net, x, weights, 0.3)
    alone = [clipped(source, net, x[k : k + 1], weights[k : k + 1], 0.3) for k in range(3)]
    torch.testing.assert_close(found, sum(total for total, _ in alone))
    torch.testing.assert_close(norms, torch.cat([norm for _, norm in alone]))


@pytest.mark.chance(1e-6)
@MODES
def test_a_random_number_that_is_read_is_one_for_all_records(mode):
    """If it is not read, each record has its own."""
    sizes = set()

    def function(net, x):
        read, others = torch.rand(1), torch.rand(1, 30)
        sizes.add(read.untyped_storage().nbytes())
        return net.last(x) * (1 if read > 0.5 else -1), read.expand(len(x)), others

    net = Of(function, last=head())
    net, _, loader = private(net, X, Y, grad_sample_mode=mode)
    for a, b in loader:
        logits, read, others = net(a)
        F.cross_entropy(logits, b).backward()
        assert len({*read.tolist()}) == 1 and len({*others[:, 0].tolist()}) > 1
    assert sizes == {4}


def test_a_choice_by_chance_is_not_refused_by_chance():
    """Two runs for a record may choose the same, and another than in the map."""

    def function(net, x):
        return net.last(x) * (1 - 2 * torch.multinomial(torch.ones(len(x), 2), 1))

    def by_python(net, x):
        sign = 1 if torch._C._functorch.is_batchedtensor(x) else -1  # it may come out so
        return net.last(x) * sign * random.choice([1])

    for program in [function] * 60 + [by_python]:
        private(Of(program, last=head()), X, Y)


def test_a_tensor_that_is_made_of_numbers_has_them():
    """``t.new`` makes one of numbers, or one that is not filled."""
    weights, seen = torch.ones(2), []

    def of_one(rows):
        x = rows[0]
        seen.extend(t.shape for t in (x.new(3, 2), x.new(torch.Size([3])), x.new()))
        return [x.new([1.0, 2.0]) + x.new(weights) + x.new(2)]

    assert RecordMap(2)(of_one, [torch.ones(2, 1)])[0].tolist() == [[2.0, 3.0]] * 2
    assert weights.all() and seen == [(3, 2), (3,), (0,)]


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(1)), random.random, np.random.rand])
@MODES
def test_parts_of_a_batch_draw_no_number_for_all_records(draw, mode):
    """Each would have another one, and a new record may move others from one to another."""
    net = Of(lambda net, x: net.last(x) * draw(), last=head())
    net, optimizer, loader = private(net, X, Y, grad_sample_mode=mode)
    with in_parts(loader, optimizer, 4) as parts:
        refused(lambda: net(next(iter(parts))[0]), "model-map")


@pytest.mark.parametrize(
    ("function", "rest"),
    [
        (torch.cudnn_batch_norm, (True, 0.1, 1e-5)),
        (torch.miopen_batch_norm, (True, 0.1, 1e-5)),
        (torch.batch_norm_gather_stats, (0.1, 1e-5, 2)),
        (torch.batch_norm_gather_stats_with_counts, (0.1, 1e-5, ZERO)),
    ],
)
def test_norms_that_only_gpus_have_write_no_statistics(function, rest):
    """For all records into one memory, unseen."""
    with pytest.raises(CannotBeMapped, match="reads several records"):
        RecordMap(2)(lambda x: [function(*x, *[ZERO] * 4, *rest)[0]], [torch.ones(2, 3, 1)])


@MODES
def test_no_parameter_is_a_running_mean(mode):
    """Torch writes into it unseen, and sometimes only if the record is alone."""

    def function(net, x):
        with torch.no_grad():
            F.batch_norm(x.reshape(6, 1), net.mean, torch.ones_like(x[0, :1]), training=True)
        return net.last(x + net.mean)

    net = Of(function, mean=nn.Parameter(torch.zeros(1)), last=head())
    refused(lambda: private(net, X, Y, grad_sample_mode=mode)[0](*delivered(X)), "model-map")


# -- where numbers lie -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_where_numbers_lie_does_not_depend_on_other_records(n):
    """Strides and offsets do not tell, nor does what is written into a copy, or into a view."""
    seen = []

    def of_one(slices):
        x, weight, copy = slices
        rows = F.conv1d(x, weight)
        one = F.conv1d(x[:1], weight, weight[:, 0, 0])
        seen.append((x.stride(), rows.stride(), one.stride(), rows[1:].storage_offset()))
        number, row = x.flatten()[:1].squeeze().flatten(), x[0, 0].expand(2, 7).squeeze()[1:]
        seen.append((number.stride(), number.dim_order(), row.contiguous() is row))
        rows.flatten(0, 1).add_(1.0)
        rows.mT.add_(1.0)
        return [rows, copy, outside]

    outside = torch.zeros(3)
    x, weight = torch.randn(2, 2, 7, n).movedim(-1, 0), torch.randn(n, 3, 2, 3)
    shared = torch.randn(3).as_strided((n, 3), (0, 1))
    before = shared.clone()
    rows, copy, own = RecordMap(n)(of_one, [x, weight], [shared])
    own[0].add_(1.0)
    torch.testing.assert_close(rows[0], F.conv1d(x[0], weight[0]) + 2.0)
    assert torch.equal(copy, before) and not outside.any()
    assert seen == [((14, 7, 1), (15, 5, 1), (15, 5, 1), 0), ((1,), (0,), True)]


@pytest.mark.parametrize("dims", [None, 2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_attention_returns_lies_in_one_order(dropout, dims):
    """Positions before heads, whichever kernel computes it; reshaping heads then copies nothing.
    A mask of the record's own does not lead to another kernel.
    """

    def of_one(slices):
        mask = None if dims is None else (slices[0].abs() >= 0.0)[(0,) * (4 - dims)][..., :1]
        found = F.scaled_dot_product_attention(*slices, mask, dropout_p=dropout)
        assert found.stride()[1:] == (4, 12, 1)
        assert found.transpose(1, 2).is_contiguous()
        return [found]

    given = torch.randn(3, 2, 1, 3, 5, 4).unbind(0)
    (found,) = RecordMap(2)(of_one, given)
    if not dropout:
        expected = F.scaled_dot_product_attention(*(t.squeeze(1) for t in given))
        torch.testing.assert_close(found.squeeze(1), expected)


@pytest.mark.parametrize("offset", [(0,), ()])
def test_a_view_begins_where_its_tensor_does(offset):
    """An offset counts from memory that records may share, and one view has one gradient."""

    def of_one(slices):
        return [slices[-1][2:].as_strided((1,), (1,), *offset)]

    shared = torch.randn(3).as_strided((2, 3), (0, 1))
    refused(lambda: RecordMap(2)(of_one, [shared], () if offset else [shared]), "model-map")


def test_counts_of_a_constant_run():
    """Their size is the same for all records; the argument may be named, as in torch."""
    numbers = torch.tensor([2, 0, 2])
    for counts in (
        lambda t: torch.bincount(t),
        lambda t: torch.bincount(input=t, minlength=3),
        lambda t: torch.argwhere(input=t).sum(0).expand(3),
    ):
        (found,) = RecordMap(2)(lambda rows, of=counts: [rows[0] * of(numbers)], [torch.ones(2, 3)])
        assert torch.equal(found, counts(numbers).expand(2, 3).float())


NOT_FILLED = {
    "empty": lambda x: torch.empty(3),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((3,), (1,)),
    "empty_permuted": lambda x: torch.empty_permuted((1, 3), (1, 0)),
    "operator": lambda x: torch.ops.aten.empty.memory_format([3]),
    "new": lambda x: x.new(3),
    "new_empty": lambda x: x.new_empty(3),
    "new_empty_strided": lambda x: x.new_empty_strided((3,), (1,)),
}


@pytest.mark.parametrize("name", NOT_FILLED)
def test_memory_that_is_not_filled_holds_no_record(name):
    """Here torch fills it with NaN, in the place of what other records left there."""
    torch.use_deterministic_algorithms(True)
    try:
        assert not NOT_FILLED[name](torch.zeros(3)).isfinite().any()
        (found,) = RecordMap(4)(lambda rows: [NOT_FILLED[name](rows[0])], [torch.ones(4, 3)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.shape[0] == 4 and not found.any()


OF_SHARES = {
    "bernoulli": torch.bernoulli,
    "poisson": torch.poisson,
    "normal": lambda x: torch.normal(x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x[..., None] * torch.eye(6)).sum(-1),
    "cross entropy": lambda x: F.binary_cross_entropy(x, x, reduction="none"),
    "covariance": lambda x: (
        x + torch.distributions.MultivariateNormal(x, torch.diag_embed(x)).log_prob(x)[:, None]
    ),
    "checked distribution": lambda x: torch.distributions.Normal(x, x, True).log_prob(x),
}


@MODES
@pytest.mark.parametrize("name", OF_SHARES)
def test_a_function_may_fail_on_values_that_no_record_has(name, mode):
    """As on those of synthetic records."""
    net = Of(lambda net, x: net.last(OF_SHARES[name](x)), last=head())
    x, y = torch.rand(8, 6).clamp(min=0.1), torch.randint(3, (8,))
    net, optimizer, loader = private(net, x, y, grad_sample_mode=mode)
    before = [p.detach().clone() for p in net.parameters()]
    for batch in loader:
        entropy(net, *batch).backward()
        optimizer.step()
    moved = torch.cat([(p - b).flatten() for p, b in zip(net.parameters(), before, strict=True)])
    assert 0.01 < float(moved.detach().norm()) < 0.51  # lr and clip norm are 1 and .5


def test_rows_that_torch_puts_behind_others_leave_the_map():
    """A convolution with a weight for each record has the records in dimension 1."""
    weights = torch.randn(4, 3, 2, 1, 1, requires_grad=True)
    record_map = RecordMap(4)

    def function(slices):
        return [record_map.call_batched(torch.clone, [F.conv2d(*slices)])]

    (found,) = record_map(function, [torch.ones(4, 1, 2, 1, 1), weights])
    torch.testing.assert_close(found.flatten(1), weights.flatten(2).sum(2))


# -- passes that end early, and threads ------------------------------------------------------------


@SOURCES
def test_a_pass_that_raised_is_none(make):
    fails = [1]

    def function(h):
        if fails:
            raise KeyError("no luck")
        return torch.tanh(h)

    source = make(net := around(function))
    for _ in range(2):
        with pytest.raises(KeyError):
            net(*delivered(X))
    fails.clear()
    entropy(net, *delivered(X, Y)).backward()
    assert_sum(source, net, records=(X, Y))


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_passes_in_another_thread(is_evaluated):
    """Evaluation does not matter; a second pass in training mode has no step."""
    others = []

    def other_pass():
        with torch.set_grad_enabled(not is_evaluated), contextlib.suppress(DPBayesError):
            net(X)

    def function(h):
        if not others:
            others.append(threading.Thread(target=other_pass))
            others[0].start()
            others[0].join(20)
        return torch.tanh(h)

    net = around(function)
    source = BookkeepingGradientSource(net)
    entropy(net, *delivered(X, Y)).backward()
    assert not others[0].is_alive()
    if is_evaluated:
        assert_sum(source, net, records=(X, Y))
    else:
        refused(lambda: sum_of(source, net, 0.3), "step-passes")


def test_maps_of_two_threads_leave_the_compilers_flag_as_it_was():
    """The first that began ends first."""
    began, ended, seen = threading.Event(), threading.Event(), []

    def first():
        with as_traced():
            assert began.wait(10)
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    with as_traced():
        began.set()
        assert ended.wait(10)
        seen.append(torch.compiler.is_compiling())
    thread.join()
    assert seen == [True] and not torch.compiler.is_compiling()
