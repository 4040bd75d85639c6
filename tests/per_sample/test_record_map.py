"""Models that run for one record at a time: what the map computes, and what it prevents."""

import contextlib
import random
import threading
import types
from unittest import mock

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from helpers import assert_sum, clipped, delivered, entropy, gradients_of_records, private, sum_of
from support.steps import in_parts
from support.vmap_rule import Centred
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    get_overridable_functions,
    handle_torch_function,
    wrap_torch_function,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zoo import Of, around, head

from torch_dpbayes.errors import DPBayesError
from torch_dpbayes.per_sample import contributions, layers
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.function_kinds import is_torchs
from torch_dpbayes.per_sample.record_map import CannotBeMapped, RecordMap, as_traced

ZERO = torch.zeros(1)
X, Y = torch.randn(7, 6), torch.randint(3, (7,))
SOURCE_OF = {"bookkeeping": BookkeepingGradientSource, "vmap": VmapGradientSource}
SOURCES = pytest.mark.parametrize("make", SOURCE_OF.values(), ids=SOURCE_OF)
MODES = pytest.mark.parametrize("mode", SOURCE_OF)


def refused(work, *codes):
    with pytest.raises(DPBayesError) as error:
        work()
    assert error.value.code in codes, error.value


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
            return net.last(torch.embedding(net.table, x).mean(1))
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


# -- what does not stay inside, or looks -----------------------------------------------------------

KEPT: list[Tensor] = []


def keep_what_is_filled(net, h):
    net.kept = torch.empty_like(h)
    net.kept[:] = h


def keep_in_a_cycle(net, h):
    net.__dict__["cycle"] = box = [h]
    box.append(box)


@pytest.mark.parametrize(
    ("keep", "mode"),
    [
        (lambda net, h: setattr(net, "kept", h), "vmap"),
        (lambda net, h: KEPT.append(h), "bookkeeping"),
        (keep_in_a_cycle, "bookkeeping"),
        (keep_what_is_filled, "bookkeeping"),
    ],
    ids=["attribute", "global", "cycle", "filled"],
)
def test_a_tensor_that_outlives_the_pass_is_refused(keep, mode):
    def function(net, x):
        h = net.first(x)
        keep(net, h)
        return net.head(h.tanh())

    net = Of(function, first=nn.Linear(6, 6), head=head())
    try:
        refused(lambda: private(net, X, Y, grad_sample_mode=mode), "model-kept")
    finally:
        KEPT.clear()


@pytest.mark.parametrize(
    "use",
    [
        lambda records, t, left: t + left,
        lambda records, t, left: records.call_batched(torch.sin, [left]),  # as a layer does
        lambda records, t, left: left,
    ],
    ids=["function", "layer", "output"],
)
@pytest.mark.parametrize(
    "copied",
    [
        lambda t: nn.Parameter(t, requires_grad=False),
        torch.func.grad(lambda t: t.square().sum()),
        torch.func.vmap(torch.square),
    ],
    ids=["parameter", "gradient", "map"],
)
def test_a_tensor_of_an_earlier_pass_is_refused(copied, use):
    """No function returned it to the model, so nothing saw that it stays."""
    left, rows = list[Tensor](), [torch.randn(2, 3)]
    RecordMap(2)(lambda slices: [left.append(copied(slices[0])) or slices[0]], rows)
    records = RecordMap(2)
    refused(lambda: records(lambda slices: [use(records, slices[0], left[0])], rows), "model-kept")


def test_a_view_of_other_rows_of_the_same_memory_is_refused():
    view, left, data = torch.func.vmap(lambda t: t.view_as(t)), list[Tensor](), torch.randn(4, 3)
    RecordMap(2)(lambda slices: [left.append(view(slices[0])) or slices[0]], [data[:2]])
    other = RecordMap(2)
    refused(lambda: other(lambda slices: [view(slices[0]) + left[0]], [data[2:]]), "model-kept")


@pytest.mark.parametrize(
    "transformed",
    [
        torch.func.grad(lambda t: t.square().sum()),
        lambda t: torch.func.vjp(torch.square, t * 1)[1](torch.ones(3))[0],
        lambda t: torch.func.vmap(lambda row: row)(2 * t),
        lambda t: 2 * t * torch.func.vmap(lambda row: row * 1)(torch.ones(3)),
    ],
    ids=["grad", "vjp", "map", "map of a constant"],
)
def test_what_a_transform_inside_a_pass_returns_may_be_used(transformed):
    rows = torch.randn(2, 3)
    (found,) = RecordMap(2)(lambda slices: [transformed(slices[0]) * 1], [rows])
    assert torch.allclose(found / rows, (found / rows)[0, 0])


class Generated(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context = Centred.forward, Centred.setup_context
    backward = Centred.backward


class Centring(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out - out.mean(0) if func is torch.ops.aten.sin.default else out


@torch.library.custom_op("torch_dpbayes_tests::with_a_rule", mutates_args=())
def with_a_rule(h: Tensor) -> Tensor:
    return h.clone()


with_a_rule.register_autograd(lambda ctx, g: g)
with_a_rule.register_vmap(
    lambda info, in_dims, h: (h - h.mean(in_dims[0], keepdim=True), in_dims[0])
)


def by_dispatch_mode(h):
    with Centring():
        return torch.sin(h)


def by_callback(h):
    return h * F.triplet_margin_with_distance_loss(
        h, h, h, distance_function=lambda a, b: (a - b).sum(-1)
    )


def hooked(h):
    return h.register_hook(lambda g: g) and h


def hooked_node(h):
    h.grad_fn.register_hook(lambda given, found: None)
    return h


def catching(h):
    """One record's index decides what all of them return; in place nothing is put in its stead."""
    try:
        return h + h.clone().scatter_(1, (h[:, :1] * 0 + 9).long(), 1.0)
    except RuntimeError:
        return -h


@wrap_torch_function(lambda h: (h,))
def handed_on(h):
    return Centred.apply(h)


def test_functions_of_torch_are_torchs():
    """Those that are made by others, as F.max_pool2d, too; a class is none of them."""
    found = {f for functions in get_overridable_functions().values() for f in functions}
    assert F.max_pool2d in found
    assert all(is_torchs(f) for f in found if not isinstance(f, type))


class Asked:
    """Torch asks it for a number, out of sight of the map."""

    def __index__(self):
        return 0


class Named(Centred):
    """By its word a class of torch's."""

    __module__ = "torch.nn"


class Compared(float):
    def __lt__(self, other):
        return False


class Measured(list):
    def __len__(self):
        return 1


class Multiplied(float):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return Centred.apply(args[0])


class Hashed:
    def __hash__(self):
        pytest.fail("this code ran")


@wrap_torch_function(lambda h: (h,))
def put_in_tensor(h):
    return Centred.apply(h)


def of_tensor(h):
    with mock.patch.object(Tensor, "put_in_tensor", put_in_tensor, create=True):
        return put_in_tensor(h)


def without_the_map(h):
    """It ends the map's own mode, and leaves one that sees nothing in its place."""
    TorchFunctionMode().__exit__(None, None, None)
    TorchFunctionMode().__enter__()
    return h


TRAINED = torch.ones(1, 6, requires_grad=True)


def seeded_within(h):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return h * torch.rand_like(h)


REFUSED = {
    "vmap rule": Centred.apply,
    "generated vmap rule": Generated.apply,
    "dispatch mode": by_dispatch_mode,
    "function that a torch function calls": by_callback,
    "object that torch asks for a number": lambda h: h[:, Asked() :],
    "vmap rule with a name of torch's": lambda h: Named.apply(h),
    "number that torch compares": lambda h: F.dropout(h, Compared(0.0)),
    "list that torch measures": lambda h: h + F.interpolate(h[:, None], size=Measured([6]))[:, 0],
    "number with functions of its own": lambda h: h * Multiplied(1.0),
    "class with functions of its own": lambda h: torch.mul(h, Multiplied),
    "function of the caller's in Tensor": of_tensor,
    "mode that the model ends": without_the_map,
    "operator with a batching rule": lambda h: with_a_rule(h),
    "function of the caller's that torch hands on": handed_on,
    "operator packet": lambda h: torch.ops.torch_dpbayes_tests.with_a_rule(h),
    "memory beside it": lambda h: h + h.detach().clone().resize_(1, 12)[:, 6:],
    "hook on a tensor": hooked,
    "hook on a tensor that requires grad": lambda h: hooked(h) if h.requires_grad else h,
    "hook on a node": hooked_node,
    "index_fill": lambda h: h.index_fill(1, (h[0, :1] > 0).long(), 3.0),
    "index_fill with a value": lambda h: h + torch.zeros(1, 6).index_fill(1, AT, h[0, 0]),
    "sum that grows": lambda h: (
        h + h.detach()[0, :1].clone().addbmm_(h.detach()[:, :, None], h.detach()[:, None])[0]
    ),
    "table by its operator": lambda h: h + torch.ops.aten.embedding(h.T, (h[0, :1] > 0).long()),
    "table that is changed": lambda h: h + F.embedding(AT[:1], h.T, max_norm=0.1),
    "pivots of a record": lambda h: (
        h + torch.linalg.ldl_solve(torch.eye(6), (h[0] > 0).int() + 1, h.detach().T).T
    ),
    "segments of any length": lambda h: (
        h + torch.segment_reduce(h, "sum", lengths=(h[:1, 0] > 0).long(), unsafe=True)
    ),
    "segments by offsets": lambda h: (
        h + torch.segment_reduce(h.detach()[0], "sum", offsets=(h[0, :2] > 0).long() * 7)[0]
    ),
    "place of a number among others": lambda h: h + torch.searchsorted(h[0, 0], h[0, 1]),
    "the same by its operator": lambda h: (
        h + torch.ops.aten.searchsorted(sorted_sequence=h[0], self=h[0])
    ),
    "the same by name": lambda h: h + torch.searchsorted(input=h[0, 1], sorted_sequence=h[0, 0]),
    "reflectors of a vector": lambda h: h + torch.linalg.householder_product(h[0], h[0, 0]),
    "sums of several types": lambda h: (
        h
        + torch._compute_linear_combination((h > 0).long(), h.detach()[0].outer(h.detach()[0][:1]))
    ),
    "distances of numbers": lambda h: h + torch._euclidean_dist(h[0], h[0]).sum(),
    "caught error": catching,
    "validity of all records": lambda h: -h if torch._is_any_true(h > 1e6) else h,
    "generator": lambda h: h * torch.rand(h.shape, generator=torch.Generator()),
    "seed": lambda h: (torch.manual_seed(0), h * torch.rand_like(h))[1],
    "fork": seeded_within,
    "seed at the end": lambda h: (torch.tanh(h), torch.manual_seed(0))[0],
    "old checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=True),
    "grad_fn": lambda h: h if h.grad_fn is None else h.tanh(),
    "if": lambda h: h - h.mean(0) if h.max() > 1e6 else h,
    "item": lambda h: h / max(1.0, h.norm().item()),
    "equal": lambda h: h if torch.equal(h, h.round()) else -h,
    "allclose": lambda h: h if h.allclose(h.round()) else -h,
    "in": lambda h: -h if 0.0 in h else h,
    "numpy": lambda h: h - h.mean(0) if (h.detach().numpy() > 1e6).any() else h,
    "a trained tensor in a list": lambda h: torch.stack([h, TRAINED]).sum(0),
    "functionalize": lambda h: torch.func.functionalize(lambda t: t * 2)(h),
    "statistics in a constant": lambda h: (
        h + torch.batch_norm_update_stats(h.detach().T, ZERO, 1 - ZERO, 1.0)[0] + ZERO
    ),
    "number of places": lambda h: h * torch.argwhere(h[0] > h[0, 0]).shape[0],
    "counts of any number": lambda h: h + torch.bincount((h[0] > 0).long(), minlength=2).sum(),
    "packed sequence": lambda h: (
        h + nn.utils.rnn.pack_padded_sequence(h, (h == h).sum(1).cpu(), True)[0].sum()
    ),
    "one_hot without num_classes": lambda h: h + F.one_hot(h.argmax(-1)).sum(),
}


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


@pytest.mark.parametrize(("mode", "code"), [("bookkeeping", "step-changed"), ("vmap", "model-map")])
def test_a_setting_of_a_layer_takes_no_values_of_earlier_records(mode, code):
    net = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    net, optimizer, loader = private(net, torch.randn(8, 6), grad_sample_mode=mode, batch_size=4)
    batches = iter(loader)
    (x,) = next(batches)
    net(x).square().mean().backward()
    optimizer.step()
    before, net[1].eps = net[1].eps, x.square().sum()
    refused(lambda: net(*next(batches)), code)
    if mode == "bookkeeping":  # torch would read a property of the class
        net[1].eps = before
        net[1].__class__ = type("Alike", (nn.LayerNorm,), {})
        refused(lambda: net(*next(iter(loader))), code)


def mixing(h):
    return Centred.apply(h)


@pytest.mark.parametrize("function", [Hashed(), mixing])
def test_no_function_of_the_callers_runs_without_the_mode(function):
    """Nor is it hashed; one of a module can be found by its name, as torch's are."""

    def handed_on(rows):
        return [handle_torch_function(function, rows, rows[0])]

    refused(lambda: RecordMap(7)(handed_on, [X]), "model-map")


def test_a_dispatch_mode_of_the_model_sees_no_batch():
    """Neither in a layer, which runs on all records, nor after the pass."""

    def around_a_layer(net, x):
        with Centring():
            return net.layer(x)

    net = Of(around_a_layer, layer=nn.Linear(6, 3))
    refused(lambda: private(net, X, Y), "model-map")
    mode = Centring()

    def left(rows):
        mode.__enter__()
        return rows

    try:
        refused(lambda: RecordMap(7)(left, [X]), "model-map")
    finally:
        mode.__exit__(None, None, None)


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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "bookkeeping") for name in REFUSED), ("vmap rule", "vmap"), ("item", "vmap")],
)
def test_what_sees_more_than_one_record_is_refused(name, mode):
    """By make_private, or in the first pass where the model cannot run on synthetic records."""
    net = nn.Sequential(nn.Linear(6, 6), Of(lambda _, h: REFUSED[name](h)), head())
    code = "loss-outside" if name == "a trained tensor in a list" else "model-map"
    refused(lambda: private(net, X, Y, grad_sample_mode=mode)[0](*delivered(X)), code)


@SOURCES
@pytest.mark.parametrize("place", ["in the model", "around the loop"])
def test_hooks_on_saved_tensors_are_not_called(make, place):
    called = []

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(called.append, called.append)

    def function(h):
        with hooks() if place == "in the model" else contextlib.nullcontext():
            return h.tanh()

    make(net := around(function))
    x, y = delivered(torch.randn(5, 6), torch.randint(3, (5,)))
    with hooks() if place == "around the loop" else contextlib.nullcontext():
        entropy(net, x, y).backward()
    assert not called


@SOURCES
def test_text_of_a_tensor_holds_no_record(make):
    texts = []
    net = around(lambda h: texts.append(f"{h!r}, {[h]}") or torch.tanh(h))
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(6))
        net.first.bias.zero_()
    source = make(net)
    net(*delivered(torch.full((5, 6), 7.25)))
    source.discard(())
    source.remove()
    net(torch.full((5, 6), 7.25))
    mapped, plain = texts
    assert "7.25" in plain and "7.25" not in mapped and mapped.count("size=(1, 6)") == 2


@SOURCES
@pytest.mark.parametrize("model", [around, head], ids=["a model", "one layer"])
def test_a_mode_around_the_model_is_refused(make, model):
    class Ours(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    source = make(net := model())
    (x,) = delivered(torch.randn(4, 6))
    with torch.device("cpu"):  # one of torch's
        net(x)
    source.discard(())
    for mode in (Ours, Centring):
        (x,) = delivered(torch.randn(4, 6))
        with pytest.raises(CannotBeMapped), mode():
            net(x)
    (x,) = delivered(torch.randn(4, 6))
    with pytest.raises(CannotBeMapped, match="transform of the caller"):
        torch.func.vmap(lambda _: net(x))(torch.ones(2))


def test_rows_that_torch_puts_behind_others_leave_the_map():
    """A convolution with a weight for each record has the records in dimension 1."""
    weights = torch.randn(4, 3, 2, 1, 1, requires_grad=True)
    record_map = RecordMap(4)

    def function(slices):
        return [record_map.call_batched(torch.clone, [F.conv2d(*slices)])]

    (found,) = record_map(function, [torch.ones(4, 1, 2, 1, 1), weights])
    torch.testing.assert_close(found.flatten(1), weights.flatten(2).sum(2))


def test_a_layer_with_code_of_its_own_stays_in_the_map():
    convolution, linear, centred = nn.Conv2d(2, 3, 3), nn.Linear(27, 2), nn.Linear(2, 2)
    norm = nn.LayerNorm(2)
    norm.normalized_shape = type("Own", (tuple,), {})((2,))
    centred.forward = lambda h: h - h.mean(0)
    convolution._conv_forward = types.MethodType(type(convolution)._conv_forward, convolution)
    linear.weight = type("Own", (nn.Parameter,), {})(linear.weight.detach())
    net = nn.Sequential(convolution, nn.Flatten(1), linear, centred, norm, nn.Linear(2, 2))
    assert [layer.name for layer in BookkeepingGradientSource(net)._layers] == ["5"]


EXCHANGED = {
    "forward of all layers": (nn.Linear, "forward"),
    "forward of one layer": (None, "forward"),
    "a function of Python": (F, "layer_norm"),
    "a function of C++": (F, "linear"),
    "what a function calls": (torch, "layer_norm"),
}


@pytest.mark.parametrize("when", ["before make_private", "around a pass", "in the model"])
@pytest.mark.parametrize("what", EXCHANGED)
def test_code_in_the_place_of_torchs_sees_one_record(what, when, monkeypatch):
    """Layers run torch's functions of C++ on the whole batch; any other code stays in the map."""
    place, name = EXCHANGED[what]
    seen = []

    @contextlib.contextmanager
    def exchanged(layer):
        before = getattr(layer if place is None else place, name)

        def watching(*given):
            seen.append(len(next(t for t in given if isinstance(t, torch.Tensor))))
            return before(*given)

        with monkeypatch.context() as patch:
            patch.setattr(layer if place is None else place, name, watching)
            yield

    def function(net, x):
        with exchanged(net.layer) if when == "in the model" else contextlib.nullcontext():
            return net.layer(net.norm(x)).tanh()

    net = Of(function, norm=nn.LayerNorm(6), layer=nn.Linear(6, 3))
    early = exchanged(net.layer) if when == "before make_private" else contextlib.nullcontext()
    late = exchanged(net.layer) if when == "around a pass" else contextlib.nullcontext()
    with early:
        BookkeepingGradientSource(net)
        x, y = delivered(X, Y)
        with contextlib.suppress(DPBayesError), late:
            entropy(net, x, y).backward()
    assert 7 not in seen
    assert seen or when != "before make_private" or "forward" not in what  # it does run


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


def test_a_model_that_resets_the_compiler_is_refused():
    def function(slices):
        torch.compiler.reset()
        return slices

    with pytest.raises(CannotBeMapped, match="resets"):
        RecordMap(3)(function, [torch.ones(3, 1, 2)])
    assert not torch.compiler.is_compiling()


def test_an_operator_of_transformers_is_not_run_but_what_it_stands_for(monkeypatch):
    """An operator of the caller's by that name could mix records by a rule of its own."""
    import transformers.integrations.moe  # noqa: F401 - defines it

    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        pytest.skip("transformers is older than this operator")
    monkeypatch.setattr(F, "grouped_mm", torch.addcmul)
    x, ones = torch.randn(5, 4), torch.ones(4)
    operator = torch.ops.transformers.grouped_mm_fallback
    (found,) = RecordMap(5)(lambda rows: [operator(*rows, ones, ones)], [x])
    assert torch.equal(found, x + 1)
