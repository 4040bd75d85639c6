"""Code of others in a model that runs for one record at a time: it sees no other record, keeps none
of them, and stays where the map sees it.
"""

import contextlib
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import SOURCES, delivered, entropy, private, refused
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
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.function_kinds import is_torchs
from torch_dpbayes.per_sample.record_map import CannotBeMapped, RecordMap

ZERO = torch.zeros(1)
X, Y = torch.randn(7, 6), torch.randint(3, (7,))
AT = torch.tensor([0, 1])


# -- what outlives a pass --------------------------------------------------------------------------

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


VIEW = torch.func.vmap(lambda t: t.view_as(t))


@pytest.mark.parametrize(
    "use",
    [
        lambda records, t, left: t + left,
        lambda records, t, left: VIEW(t) + left,
        lambda records, t, left: records.call_batched(torch.sin, [left]),  # as a layer does
        lambda records, t, left: left,
    ],
    ids=["function", "view", "layer", "output"],
)
@pytest.mark.parametrize(
    "copied",
    [
        lambda t: nn.Parameter(t, requires_grad=False),
        torch.func.grad(lambda t: t.square().sum()),
        torch.func.vmap(torch.square),
        VIEW,
    ],
    ids=["parameter", "gradient", "map", "view"],
)
@pytest.mark.parametrize("is_same", [True, False])
def test_a_tensor_of_an_earlier_pass_is_refused(copied, use, is_same):
    """No function returned it to the model, so nothing saw that it stays. Other rows may lie in the
    same memory.
    """
    left, data, records = list[Tensor](), torch.randn(4, 3), RecordMap(2)
    RecordMap(2)(lambda slices: [left.append(copied(slices[0])) or slices[0]], [data[:2]])
    rows = [data[:2] if is_same else data[2:]]
    refused(lambda: records(lambda slices: [use(records, slices[0], left[0])], rows), "model-kept")


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


# -- what looks at several records -----------------------------------------------------------------


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
    "reset of the compiler": lambda h: (h.tanh(), torch.compiler.reset())[0],
}


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
    assert not torch.compiler.is_compiling()


# -- hooks, texts, modes and functions -------------------------------------------------------------


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
