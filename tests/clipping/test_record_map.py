"""Records run one at a time: what the map computes, what it prevents, and what cannot be run so."""

import gc
import logging
import threading
import types
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.clipping import isolated, record_map
from torch_dpbayes.clipping.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.clipping.gradient_source import HooksGradientSource
from torch_dpbayes.clipping.isolated import IsolatedGradientSource
from torch_dpbayes.clipping.nested import Nested
from torch_dpbayes.clipping.record_map import CannotBeMapped, RecordMap, one_record_only


class Call(nn.Module):
    """A linear layer before and after ``function``."""

    def __init__(self, function, width=6):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Positions(nn.Module):
    """Position embeddings as BERT and GPT-2 have them: not repeated for every record."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position, self.last = (
            nn.Linear(6, 4),
            nn.Embedding(5, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.last(
            torch.tanh(
                self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
            ).mean(1)
        )


class ClassToken(nn.Module):
    """A parameter that is broadcast over the batch, and one that is shared in a functional call."""

    def __init__(self):
        super().__init__()
        self.token, self.embedding = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 6)
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embedding(x)], 1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(F.linear(x[:, 0], self.embedding.weight))


class Patches(nn.Module):
    """Patches folded into dimension 0: several rows of one record in convolutions and norms."""

    def __init__(self):
        super().__init__()
        # groups of two values often have hardly a variance, and no two ways the same gradient
        self.patch, self.norm = nn.Conv2d(2, 16, 2), nn.GroupNorm(2, 16)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        n = len(x)
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return self.head(self.norm(self.patch(x)).reshape(n, -1))


class Steps(nn.Module):
    """Time folded into dimension 0 of a linear layer, and one layer used at every step."""

    def __init__(self):
        super().__init__()
        self.lift, self.cell, self.head = nn.Linear(6, 4), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        n, steps = x.shape[:2]
        x = torch.tanh(self.lift(x.reshape(n * steps, -1))).reshape(n, steps, -1)
        h = x.new_zeros(n, 4)
        for k in range(steps):
            h = torch.tanh(self.cell(torch.cat([x[:, k], h], 1)))
        return self.head(h)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = DPMultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, mask) + F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


FLAT, SEQUENCE, IMAGE = (6,), (5, 6), (2, 4, 4)
MODELS = {
    "mlp": (lambda: Call(torch.relu), FLAT),
    "one layer": (lambda: nn.Linear(6, 3), FLAT),
    "one layer twice": (
        lambda: (lambda net: nn.Sequential(net, nn.Tanh(), net, nn.Linear(6, 3)))(nn.Linear(6, 6)),
        FLAT,
    ),
    "layer norm": (lambda: Call(nn.LayerNorm(6)), FLAT),
    "rms norm": (lambda: Call(nn.RMSNorm(6)), FLAT),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.InstanceNorm2d(4, affine=True),
            nn.MaxPool2d(2),
            nn.Flatten(1),
            nn.Linear(16, 3),
        ),
        IMAGE,
    ),
    "sequence convolution": (
        lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.Flatten(1), nn.Linear(16, 3)),
        SEQUENCE,
    ),
    "positions": (Positions, SEQUENCE),
    "class token": (ClassToken, SEQUENCE),
    "patches": (Patches, IMAGE),
    "time folded": (Steps, SEQUENCE),
    "lstm": (Recurrent, SEQUENCE),
    "Opacus' attention": (Attention, SEQUENCE),
    "fused attention": (Fused, SEQUENCE),
    "torch's encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
            nn.Flatten(1),
            nn.Linear(30, 3),
        ),
        SEQUENCE,
    ),
    "embedding": (Tokens, None),
    "one row of a record": (lambda: Call(lambda h: torch.stack([torch.tanh(h[0])] * len(h))), FLAT),
}


def records(shape, n=7):
    return torch.randint(20, (n, 4)) if shape is None else torch.randn(n, *shape)


def clipped_sum(source, net, x, y, clip):
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    out = [torch.zeros(p.numel()) for _, p in named]
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    n = source.add_clipped_sum(named, clip, out)
    source.discard([p for _, p in named])
    return torch.cat(out), n


def truth(net, x, y, clip):
    """Every record run by itself, with ordinary autograd."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    total = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    for i in range(len(x)):
        g = torch.cat(
            [
                t.flatten()
                for t in torch.autograd.grad(
                    F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), parameters
                )
            ]
        )
        total += g * min(1.0, clip / float(g.norm()))
    return total


def sources(net):
    yield BookkeepingGradientSource(
        net, is_mapped=True, unrecorded=["embedding.weight"] if isinstance(net, ClassToken) else []
    )
    yield IsolatedGradientSource(net)


@pytest.mark.parametrize("name", MODELS)
def test_the_clipped_sum_is_that_of_records_run_by_themselves(name):
    make, shape = MODELS[name]
    net, x, y = make(), records(shape), torch.randint(3, (7,))
    expected = truth(net, x, y, clip := 0.3)
    for source in sources(net):
        found, n = clipped_sum(source, net, x, y, clip)
        source.remove()
        assert n == 7
        assert torch.allclose(found, expected, atol=1e-5 * clip * 7), (
            type(source).__name__,
            (found - expected).abs().max(),
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_public_way_out_of_vmap_gives_the_same(name, monkeypatch):
    make, shape = MODELS[name]
    net, x, y = make(), records(shape), torch.randint(3, (7,))
    expected = truth(net, x, y, 0.3)
    monkeypatch.setattr(RecordMap.__init__, "__kwdefaults__", {"leaves": True, "use_steps": False})
    for source in sources(net):
        found, _ = clipped_sum(source, net, x, y, 0.3)
        source.remove()
        assert torch.allclose(found, expected, atol=1e-5), type(source).__name__


def make_private(net, x, y, mode=None, **options):
    factory = partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=float("inf"))
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=factory,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        max_grad_norm=options.pop("clip", 1.0),
        noise_multiplier=1e-4,
        grad_sample_mode=mode,
        **options,
    )


BOTH = pytest.mark.parametrize("mode", ["bookkeeping", "isolated"])


@pytest.mark.first_cases(5)
@BOTH
@pytest.mark.parametrize("name", [name for name in MODELS if name != "one row of a record"])
def test_make_private_keeps_records_apart_by_construction(name, mode):
    make, shape = MODELS[name]
    x, y = records(shape), torch.randint(3, (7,))
    net, optimizer, loader = make_private(make(), x, y, mode)
    assert optimizer.independence.startswith("by construction")
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b).backward()
        optimizer.step()


# -- what mixes records on whole batches does not here ---------------------------------------------


class Sorting(nn.Module):
    """Sorts its rows by length, as packed sequences do, and puts them back."""

    def __init__(self):
        super().__init__()
        self.encode, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        length, order = (x.abs().sum(-1) > 0).sum(1).sort(descending=True, stable=True)
        keep = (torch.arange(x.shape[1])[None] < length[:, None]).unsqueeze(-1)
        h = torch.tanh(self.encode(x[order])) * keep
        return self.head((h.sum(1) / length.clamp(min=1)[:, None])[order.argsort()])


class Grouped(nn.Module):
    """Groups its rows by a category that stands in the first feature."""

    def __init__(self):
        super().__init__()
        self.encode, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        order = torch.argsort(x[:, 0].round(), stable=True)
        return self.head(torch.tanh(self.encode(x[order]))[torch.argsort(order)])


def released(net, x, y, mode):
    start = [p.detach().clone() for p in net.parameters()]
    net, optimizer, loader = make_private(net, x, y, mode, clip=0.05)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b).backward()
        optimizer.step()
    return (
        torch.cat([(s - p.detach()).flatten() for s, p in zip(start, net.parameters())])
        * len(x)
        / 0.05
    )


@BOTH
@pytest.mark.parametrize("make, shape", [(Sorting, (6, 3)), (Grouped, (4,))])
def test_one_record_moves_the_sum_of_a_sorting_model_by_its_own_gradient(make, shape, mode):
    x = torch.cat([torch.randn(1, *shape), torch.randn(1, *shape).expand(64, *shape)]).clone()
    if shape == (6, 3):
        x[0, 5] = 0
    else:
        x[:, 0], x[0, 0] = 0, 1
    y, first = torch.tensor([0] + [0, 1] * 32), make()
    net = make()
    net.load_state_dict(first.state_dict())
    with torch.no_grad():
        for model in (first, net):
            model.head.bias.copy_(torch.tensor([8.0, 0.0]))
    distance = (released(first, x, y, mode) - released(net, x[1:], y[1:], mode)).norm()
    assert distance < 1.01


@pytest.mark.first_cases(1)
@BOTH
def test_an_operation_outside_the_map_would_be_seen(mode, monkeypatch):
    """The test above and the check itself, broken on purpose: one operation of the model sees
    the whole batch.
    """
    inside = record_map.RecordMap.__call__

    def leaking(self, function, tensors):
        if len(tensors[0]) > 1:
            tensors = [
                t - t.mean(0) if t.is_floating_point() and t.dim() == 3 else t for t in tensors
            ]
        return inside(self, function, tensors)

    monkeypatch.setattr(record_map.RecordMap, "__call__", leaking)
    with pytest.raises(ValueError, match="mixes records"):
        make_private(Call(torch.relu), torch.randn(7, 6), torch.randint(3, (7,)), mode)


MIXING = {
    "centring": lambda h: h - h.mean(0),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h,
    "softmax over the batch": lambda h: h.softmax(0),
    "roll": lambda h: h.roll(1, 0),
    "running sum": lambda h: h.cumsum(0),
    "the batch size": lambda h: h / len(h),
    "the largest record": lambda h: h / h.abs().amax(),
}


@pytest.mark.first_cases(9)
@BOTH
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_is_another_one_for_single_records_is_refused(name, mode):
    with pytest.raises(ValueError, match=r"mixes records|number of records|another record"):
        make_private(Call(MIXING[name]), torch.randn(7, 6), torch.randint(3, (7,)), mode)


# -- what does not stay inside ---------------------------------------------------------------------

KEPT: list[torch.Tensor] = []


class Keeps(Call):
    def __init__(self, how):
        super().__init__(torch.tanh)
        self.how, self.box, self.last_one = how, [], None

    def forward(self, x):
        h = self.first(x)
        if self.how == "attribute":
            self.last_one = h
        elif self.how == "list":
            self.box.append(h)
        elif self.how == "global":
            KEPT.append(h)
        elif self.how == "input":
            self.last_one = x
        else:
            self.__dict__["cycle"] = box = [h]
            box.append(box)
        return self.last(torch.tanh(h))


@pytest.mark.first_cases(1)
@BOTH
@pytest.mark.parametrize("how", ["attribute", "list", "global", "input", "cycle"])
def test_a_tensor_that_outlives_the_pass_is_refused(how, mode):
    try:
        with pytest.raises(ValueError, match=r"keeps a tensor|stays|was added|changed"):
            make_private(Keeps(how), torch.randn(7, 6), torch.randint(3, (7,)), mode)
    finally:
        KEPT.clear()


def test_a_reference_cycle_within_the_pass_is_none_of_it():
    class Cycle(Call):
        def forward(self, x):
            box = [self.first(x)]
            box.append(box)
            return self.last(torch.tanh(box[0]))

    gc.disable()
    try:
        _, optimizer, _ = make_private(Cycle(None), torch.randn(7, 6), torch.randint(3, (7,)))
    finally:
        gc.enable()
    assert optimizer.independence.startswith("by construction")


class Own(torch.autograd.Function):
    """Identity, whose vmap rule subtracts the mean over the batch."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class Generated(torch.autograd.Function):
    """Mixes what comes back, in dimension 0, which is one record's in a map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * (g.norm() * 0 + 1)


def test_a_vmap_rule_of_the_users_own_is_refused():
    net = Call(Own.apply)
    source = BookkeepingGradientSource(net, is_mapped=True)
    with pytest.raises(CannotBeMapped, match=r"autograd\.Function of its own"):
        net(torch.randn(4, 6))
    source.remove()


def test_a_generated_vmap_rule_is_tested_only():
    """Another function inside it might have a rule of its own, which nobody sees."""
    _, optimizer, _ = make_private(Call(Generated.apply), torch.randn(7, 6), torch.randint(3, (7,)))
    assert optimizer.independence.startswith("tested")


class Centring(TorchDispatchMode):
    """Subtracts the mean over the batch, wherever ``torch.sin`` is computed below the map."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out - out.mean(0) if func is torch.ops.aten.sin.default else out


class Calling(torch.Tensor):
    """Calls a function with a vmap rule of its own, where torch functions are seen no more."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return Own.apply(args[0]) if func is Tensor.add else func(*args, **(kwargs or {}))


class Below(torch.Tensor):
    """Whatever is computed with it, it sees below the map."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(a.inner if isinstance(a, Below) else a for a in args), **(kwargs or {}))
        return out - out.mean(0)


@torch.library.custom_op("torch_dpbayes_tests::with_a_rule", mutates_args=())
def with_a_rule(h: Tensor) -> Tensor:
    return h.clone()


with_a_rule.register_autograd(lambda ctx, g: g)
with_a_rule.register_vmap(
    lambda info, in_dims, h: (h - h.mean(in_dims[0], keepdim=True), in_dims[0])
)
LARGEST = [1.0]


@torch.library.custom_op("torch_dpbayes_tests::that_remembers", mutates_args=())
def that_remembers(h: Tensor) -> Tensor:
    """Called for one record after another, and divides each by the largest value so far."""
    LARGEST.append(max(LARGEST[-1], float(h.abs().max())))
    return h / LARGEST[-1]


that_remembers.register_autograd(lambda ctx, g: g)


def by_dispatch_mode(h):
    with Centring():
        return torch.sin(h)


def by_callback(h):
    given = []

    def distance(a, b):
        given.append(Own.apply(a))
        return (a - b).sum(-1)

    F.triplet_margin_with_distance_loss(h, h, h, distance_function=distance)
    return given[0]


def by_resizing(h):
    return h + 0 * h.detach().clone().resize_(1, 2 * h.shape[1])[:, h.shape[1] :]


UNSEEN = {
    "dispatch mode": (by_dispatch_mode, "dispatch mode"),
    "function that a torch function calls": (by_callback, "a function to call"),
    "operator with a batching rule": (lambda h: with_a_rule(h), "not torch's own"),
    "operator packet": (
        lambda h: torch.ops.torch_dpbayes_tests.with_a_rule(h),
        "not torch's own",
    ),
    "operator with a memory": (lambda h: that_remembers(h), "not torch's own"),
    "class with torch functions": (
        lambda h: h.add(torch.zeros(6).as_subclass(Calling)),
        "a class of tensors",
    ),
    "class with dispatch": (lambda h: h * Below(torch.ones(6)), "a class of tensors"),
    "class in a list": (
        lambda h: torch.cat([h, Below(torch.ones(1, 6))]).sum(0, keepdim=True),
        "a class of tensors",
    ),
    "class by name": (
        lambda h: torch.add(h, other=Below(torch.ones(6))),
        "a class of tensors",
    ),
    "memory beside it": (by_resizing, "changes the size"),
}


@pytest.mark.parametrize("make", [BookkeepingGradientSource, IsolatedGradientSource])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_sees_whole_batches_below_the_map_is_refused(name, make):
    function, word = UNSEEN[name]
    net = Call(function)
    source = make(net, **({"is_mapped": True} if make is BookkeepingGradientSource else {}))
    with pytest.raises(CannotBeMapped, match=word):
        net(torch.randn(4, 6))
    source.remove()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["operator with a memory", "function that a torch function calls"])
def test_a_model_that_hides_something_from_the_map_is_tested_only(name):
    """These do nothing to a batch as a whole."""
    LARGEST[:] = [1e6]
    _, optimizer, _ = make_private(Call(UNSEEN[name][0]), torch.randn(7, 6), torch.randint(3, (7,)))
    assert optimizer.independence.startswith("tested on made-up records: ")


@BOTH
def test_text_of_a_tensor_holds_no_record(mode):
    texts = []

    def function(h):
        texts.append(f"{h!r}, {[h]}")
        return torch.tanh(h)

    x = torch.full((5, 6), 7.25)
    source = BookkeepingGradientSource if mode == "bookkeeping" else IsolatedGradientSource
    net = Call(function)
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(6))
        net.first.bias.zero_()
    source = source(net, **({"is_mapped": True} if mode == "bookkeeping" else {}))
    net(x)
    source.discard(())
    source.remove()
    net(x)
    mapped, plain = texts
    assert "7.25" in plain and "7.25" not in mapped
    assert mapped.count("size=(1, 6)") == 2


class HalfOf(nn.Parameter):
    """A parameter with a class of its own."""


def exchanged_convolution():
    """A convolution with a function of its class exchanged, which sees the whole batch there."""
    layer = nn.Conv2d(2, 3, 3)
    before = layer._conv_forward
    layer._conv_forward = lambda x, *rest: before(x - x.mean(0) * (len(x) > 40), *rest)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(1), nn.Linear(27, 2))


def test_a_layer_with_code_of_its_own_stays_in_the_map():
    """One record moved the sum by 9 C."""
    x, y = torch.randn(51, 2, 5, 5), torch.arange(51) % 2
    x[0] *= 1000
    first, net = exchanged_convolution(), exchanged_convolution()
    net.load_state_dict(first.state_dict())
    distance = (released(first, x, y, None) - released(net, x[1:], y[1:], None)).norm()
    assert distance < 1.01


@BOTH
def test_a_function_mode_around_the_model_is_refused(mode):
    class Own(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, y = torch.randn(8, 6), torch.arange(8) % 3
    net, _, _ = make_private(Call(torch.tanh), x, y, mode, clip=0.05)
    with torch.device("cpu"):  # one of torch's
        net(x)
    with pytest.raises(CannotBeMapped, match="runs under Own, a TorchFunctionMode"), Own():
        net(x)


@pytest.mark.parametrize("place, name", [(nn.Linear, "forward"), (F, "linear")])
def test_a_function_that_was_exchanged_for_all_layers_stays_in_the_map(place, name, monkeypatch):
    """One record moved the sum by 4 C, as with a library that rounds to the range of a batch."""
    x, y = torch.randn(51, 6), torch.arange(51) % 3
    x[0] *= 1000
    before = getattr(place, name)

    def exchanged(*args):  # the layer or its input, and what comes after
        given = list(args)
        k = 1 if place is nn.Linear else 0
        given[k] = given[k] - given[k].mean(0) * (len(given[k]) > 40)
        return before(*given)

    monkeypatch.setattr(place, name, exchanged)
    first, net = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2))
    net.load_state_dict(first.state_dict())
    distance = (released(first, x, y, None) - released(net, x[1:], y[1:], None)).norm()
    assert distance < 1.01


def test_a_parameter_with_a_class_of_its_own_stays_in_the_map():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[0].weight = HalfOf(net[0].weight.detach())
    source = BookkeepingGradientSource(net, is_mapped=True)
    assert [layer.name for layer in source._layers] == ["2"]
    source.remove()


class OwnCall(Call):
    def __call__(self, x):
        return super().__call__(x * 1.0)


def test_what_surrounds_forward_is_not_by_construction():
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    _, optimizer, _ = make_private(OwnCall(torch.tanh), x, y)
    assert "__call__ of its own" in optimizer.independence
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        _, optimizer, _ = make_private(Call(torch.tanh), x, y)
    finally:
        handle.remove()
    assert "hooks for all modules" in optimizer.independence


def test_a_list_of_numbers_is_one_for_each_record():
    class Lengths(Call):
        def forward(self, x, lengths):
            return super().forward(x) * max(lengths)

    source = BookkeepingGradientSource(net := Lengths(torch.tanh), is_mapped=True)
    with pytest.raises(CannotBeMapped, match="several numbers"):
        net(torch.randn(4, 6), [1, 2, 3, 4])
    source.remove()


def test_a_loss_that_was_given_must_be_used():
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, _, loader = make_private(Call(torch.tanh), x, y, loss=F.cross_entropy)
    for a, _ in loader:
        with pytest.raises(RuntimeError, match="private_loss"):
            net(a)


def test_attention_with_operands_of_several_dimensions_stays_within_a_record():
    q, k = torch.randn(3, 1, 2, 4, 4), torch.randn(3, 2, 5, 4)
    other = k.clone()
    other[0] += 100

    def attend(inside):
        return [F.scaled_dot_product_attention(inside[0], inside[1], inside[1])]

    first, second = RecordMap(3)(attend, [q, k])[0], RecordMap(3)(attend, [q, other])[0]
    assert torch.equal(first[1:], second[1:]) and not torch.equal(first[0], second[0])


def test_isolated_records_that_come_out_differently_when_run_again_are_refused(monkeypatch):
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    monkeypatch.setattr(isolated, "_NUMBERS_HELD", 2 * sum(p.numel() for p in net.parameters()))
    source = IsolatedGradientSource(net)
    F.cross_entropy(net(torch.randn(5, 6)), torch.randint(3, (5,))).backward()
    net.eval()
    with pytest.raises(RuntimeError, match="gave other outputs"):
        source.per_record_gradients(net[0].weight)
    source.remove()


@pytest.mark.parametrize("held, runs", [(2**25, 1), (0, 5 + 5)])
def test_isolated_records_of_one_chunk_run_once(held, runs, monkeypatch):
    """What is done to the model or its output meanwhile does not matter then."""
    monkeypatch.setattr(isolated, "_NUMBERS_HELD", held)
    calls = []

    def count(h):
        calls.append(1)
        return torch.tanh(h)

    net, x, y = Call(count), torch.randn(5, 6), torch.randint(3, (5,))
    expected = truth(net, x, y, 0.3)
    calls.clear()
    source = IsolatedGradientSource(net)
    out = net(x)
    F.cross_entropy(out, y).backward()
    out.detach().zero_()
    named = list(net.named_parameters())
    sums = [torch.zeros(p.numel()) for _, p in named]
    assert source.add_clipped_sum(named, 0.3, sums) == 5
    assert len(calls) == runs
    assert torch.allclose(torch.cat(sums), expected, atol=1e-6)
    source.remove()


BOX: list[torch.Tensor] = []


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("held", [2**25, 0])
def test_isolated_records_may_leave_nothing_behind_in_any_pass(held, monkeypatch):
    """The first pass keeps nothing, as a check would see it; later ones keep everything."""
    monkeypatch.setattr(isolated, "_NUMBERS_HELD", held)
    is_keeping = []

    def keep(h):
        BOX.extend([h] * len(is_keeping))
        return torch.tanh(h)

    net, x, y = Call(keep), torch.randn(3, 6), torch.randint(3, (3,))
    source = IsolatedGradientSource(net)
    named = list(net.named_parameters())
    try:
        clipped_sum(source, net, x, y, 0.3)
        out = net(x)
        F.cross_entropy(out, y).backward()
        is_keeping.append(1)
        sums = [torch.zeros(p.numel()) for _, p in named]
        if held == 0:  # which are run again
            with pytest.raises(RuntimeError, match="keeps a tensor"):
                source.add_clipped_sum(named, 0.3, sums)
            BOX.clear()
        source.discard(())
        with pytest.raises(RuntimeError, match="keeps a tensor"):
            F.cross_entropy(net(x), y).backward()
            source.add_clipped_sum(named, 0.3, sums)
        source.discard(())
        with pytest.raises(RuntimeError, match="keeps a tensor"):
            net(x)
            source.discard(())
            net(x)
    finally:
        BOX.clear()
        source.remove()


@pytest.mark.parametrize("make", [BookkeepingGradientSource, IsolatedGradientSource])
def test_hooks_on_saved_tensors_are_refused(make):
    net = Call(torch.tanh)
    source = make(net, **({"is_mapped": True} if make is BookkeepingGradientSource else {}))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
        with pytest.raises(RuntimeError, match="saved tensors"):
            net(torch.randn(4, 6))
    source.discard(())
    source.remove()

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
            return self.last(torch.tanh(self.first(x)))

    net.forward = types.MethodType(forward, net)
    source = make(net, **({"is_mapped": True} if make is BookkeepingGradientSource else {}))
    with pytest.raises(RuntimeError, match="saved tensors"):
        net(torch.randn(4, 6))
    source.remove()


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_backward_hook_would_not_run_and_is_refused(register):
    net = Call(torch.tanh)
    source = BookkeepingGradientSource(net, is_mapped=True)
    handle = getattr(net.first, register)(lambda *_: None)
    with pytest.raises(CannotBeMapped, match="backward hook"):
        net(torch.randn(4, 6))
    handle.remove()
    source.discard(())
    net(torch.randn(4, 6))
    source.remove()


@BOTH
def test_dropout_differs_between_records(mode):
    net = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.5))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(1.0)
    net, _, _ = make_private(net, torch.randn(7, 6), torch.randint(3, (7,)), mode)
    out = net(torch.randn(2, 6)).detach()
    assert 100 < int((out[0] != out[1]).sum()) < 300  # 200 ± 10


def test_isolated_gradients_use_the_random_numbers_of_the_forward_pass():
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    source = IsolatedGradientSource(net)
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    out = net(x)
    F.cross_entropy(out, y).backward()
    bias = source.per_record_gradients(net[2].bias)
    assert torch.allclose(bias, out.detach().softmax(1) - F.one_hot(y, 3), atol=1e-6)
    # the outer product of that with what came through the dropout
    hidden = source.per_record_gradients(net[2].weight)
    restored = torch.stack(
        [torch.linalg.lstsq(b[:, None], h).solution[0] for b, h in zip(bias, hidden)]
    )
    assert torch.allclose(restored @ net[2].weight.T + net[2].bias, out, atol=1e-4)
    source.remove()


# -- what a layer's call may stand in ----------------------------------------------------------


class Functional(Call):
    """The first layer with another weight."""

    def forward(self, x):
        weight = {"weight": self.first.weight.clamp(min=0)}
        return self.last(torch.tanh(torch.func.functional_call(self.first, weight, (x,))))


class Mapped(Call):
    def forward(self, x):
        return self.last(torch.tanh(torch.func.vmap(self.first)(x)))


class Derivative(Call):
    def forward(self, x):
        return self.last(torch.func.grad(lambda x: torch.tanh(self.first(x)).sum())(x))


class Tangent(Call):
    def forward(self, x):
        return self.last(torch.tanh(sum(torch.func.jvp(self.first, (x,), (x,)))))


class MappedAttention(Fused):
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.first_cases(4)
@pytest.mark.filterwarnings("ignore")  # attention is slow in torch's own map, jvp old
@pytest.mark.parametrize("use_steps", [True, False])
@pytest.mark.parametrize(
    "make, shape",
    [
        *((kind, FLAT) for kind in (Functional, Mapped, Derivative, Tangent)),
        (lambda _: MappedAttention(), SEQUENCE),
    ],
)
@BOTH
def test_layers_inside_transforms_and_functional_calls(make, shape, mode, use_steps, monkeypatch):
    monkeypatch.setattr(
        RecordMap.__init__, "__kwdefaults__", {"leaves": True, "use_steps": use_steps}
    )
    net, x, y = make(None), records(shape), torch.randint(3, (7,))
    expected = truth(net, x, y, 0.3)
    net, optimizer, loader = make_private(net, x, y, mode, clip=0.3)
    assert optimizer.independence.startswith("by construction")
    for a, b in loader:
        assert torch.allclose(
            clipped_sum(optimizer.release.source, net, a, b, 0.3)[0], expected, atol=1e-5
        )
        F.cross_entropy(net(a), b).backward()
        optimizer.step()


UNMAPPABLE = {
    "one_hot": (lambda h: h + F.one_hot(h.argmax(-1)).sum(), "num_classes"),
    "checkpoint": (lambda h: checkpoint(torch.tanh, h, use_reentrant=False), "checkpoint"),
    "old checkpoint": (lambda h: checkpoint(torch.tanh, h, use_reentrant=True), "use_reentrant"),
    "requires_grad_": (lambda h: h.detach().requires_grad_() + h, "torch.func.grad"),
    "grad_fn": (lambda h: h if h.grad_fn is None else h * 1.0, "grad_fn"),
}


class Named(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", UNMAPPABLE)
@pytest.mark.filterwarnings("ignore")  # of the old checkpoint
def test_what_cannot_run_for_one_record_is_named_with_a_remedy(name):
    function, word = UNMAPPABLE[name]
    net = nn.Sequential(nn.Linear(6, 6), Named(function), nn.Linear(6, 3))
    with pytest.raises(ValueError, match=f"(?s)module '1': .*{word}"):
        make_private(net, torch.randn(7, 6), torch.randint(3, (7,)), "isolated")


def test_a_backward_pass_that_cannot_run_for_one_record_says_so(monkeypatch):
    net = Call(torch.tanh)
    source = IsolatedGradientSource(net)
    F.cross_entropy(net(torch.randn(4, 6)), torch.randint(3, (4,))).backward()
    original = RecordMap.again

    def fail(self, function, tensors):
        raise RuntimeError("Cannot access data pointer\nand so on")

    monkeypatch.setattr(RecordMap, "again", fail)
    with pytest.raises(CannotBeMapped, match=r"backward pass cannot be run .*pointer$"):
        source.per_record_gradients(net.first.weight)
    monkeypatch.setattr(RecordMap, "again", original)
    source.remove()


def test_hooks_on_grad_fn_are_refused():
    def hooked(h):
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda given, _: tuple(None if g is None else g for g in given))
        return torch.tanh(h)

    for make in (partial(BookkeepingGradientSource, is_mapped=True), IsolatedGradientSource):
        source = make(net := Call(hooked))
        with pytest.raises(CannotBeMapped, match="grad_fn"):
            net(torch.randn(4, 6))
        source.remove()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("mode", [None, "bookkeeping", "isolated", "hooks"])
def test_the_old_weight_norm_is_refused(mode):
    net = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"module '0' has torch's old weight_norm.*parametriz"):
        make_private(net, torch.randn(7, 6), torch.randint(3, (7,)), mode)


@BOTH
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_new_weight_norm_works(mode):
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    net = nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    expected = truth(net, x, y, 0.3)
    net, optimizer, _ = make_private(net, x, y, mode)
    assert optimizer.independence.startswith("by construction")
    found, _ = clipped_sum(optimizer.release.source, net, x, y, 0.3)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("mode", [None, "isolated", "hooks"])
def test_an_input_that_is_changed_in_place_is_called_so(mode):
    class Doubles(Call):
        def forward(self, x):
            x *= 2
            return super().forward(x)

    with pytest.raises(ValueError, match=r"changes its input in place.*write x = x"):
        make_private(Doubles(torch.tanh), torch.randn(7, 6), torch.randint(3, (7,)), mode)


# -- passes that end early, and threads --------------------------------------------------------

SOURCES = pytest.mark.parametrize(
    "make",
    [
        partial(BookkeepingGradientSource, is_mapped=True),
        BookkeepingGradientSource,
        IsolatedGradientSource,
        HooksGradientSource,
    ],
    ids=["mapped", "whole", "isolated", "hooks"],
)


@SOURCES
def test_a_pass_that_raised_is_none(make):
    fails = []

    def function(h):
        if fails:
            raise KeyError("no luck")
        return torch.tanh(h)

    net, x, y = Call(function), torch.randn(7, 6), torch.randint(3, (7,))
    expected = truth(net, x, y, 0.3)
    source = make(net)
    fails.append(1)
    for _ in range(2):
        with pytest.raises(KeyError):
            net(x * 2)
    fails.clear()
    assert torch.allclose(clipped_sum(source, net, x, y, 0.3)[0], expected, atol=1e-5)
    out = net(x)
    fails.append(1)
    with pytest.raises(KeyError):
        net(x * 2)  # while another pass waits, nothing can be told apart
    fails.clear()
    F.cross_entropy(out, y).backward()
    with pytest.raises(RuntimeError, match="2 times"):
        source.norms(list(net.named_parameters()))
    source.discard(())
    source.remove()


@SOURCES
def test_evaluation_in_another_thread_does_not_matter(make):
    inside, done = threading.Event(), threading.Event()
    is_training = threading.local()

    def function(h):
        if hasattr(is_training, "wait"):
            inside.set()
            assert done.wait(20)
        return torch.tanh(h)

    net, x, y = Call(function), torch.randn(7, 6), torch.randint(3, (7,))
    expected, source = truth(net, x, y, 0.3), make(net)
    others: list[object] = []

    def evaluate():
        assert inside.wait(20)
        try:
            with torch.no_grad():
                others.append(net(x))
            try:
                net(x)
            except RuntimeError as error:
                others.append(str(error))
        finally:
            done.set()

    thread = threading.Thread(target=evaluate)
    thread.start()
    is_training.wait = True
    found, n = clipped_sum(source, net, x, y, 0.3)
    thread.join()
    source.remove()
    assert n == 7 and torch.allclose(found, expected, atol=1e-5)
    assert len(others) == 2 and "another thread" in others[1]
    with torch.no_grad():
        del is_training.wait
        assert torch.allclose(others[0], net(x), atol=1e-6)


# -- the loss inside -------------------------------------------------------------------------------

LOSSES = {
    "cross entropy": lambda out, y: F.cross_entropy(out, y),
    "class weights": lambda out, y: F.cross_entropy(
        out, y, weight=torch.tensor([1000.0, 1.0, 1.0]), reduction="sum"
    ),
    "without reduction": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "centred outputs": lambda out, y: F.cross_entropy(out - out.mean(0), y),
}


@pytest.mark.first_cases(8)
@BOTH
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_was_given_runs_for_each_record_alone(name, mode, reduction):
    x, y, loss = torch.randn(7, 6), torch.randint(3, (7,)), LOSSES[name]
    net, optimizer, loader = make_private(
        Call(torch.tanh), x, y, mode, loss=loss, clip=0.05, loss_reduction=reduction
    )
    parameters = list(net.parameters())
    net.eval()
    total = torch.zeros(sum(p.numel() for p in parameters))
    for i in range(7):
        g = torch.autograd.grad(loss(net(x[i : i + 1]), y[i : i + 1]).sum(), parameters)
        g = torch.cat([t.flatten() for t in g])
        total += g * min(1.0, 0.05 / max(float(g.norm()), 1e-12))
    net.train()
    start = torch.cat([p.detach().flatten().clone() for p in parameters])
    for a, b in loader:
        optimizer.zero_grad()
        net.private_loss(a, b).backward()
        optimizer.step()
    moved = (start - torch.cat([p.detach().flatten() for p in parameters])) * 7
    assert torch.allclose(moved, total, atol=0.05 * 2e-3)
    assert "loss not seen" not in optimizer.independence


@BOTH
def test_a_loss_must_come_back_as_it_is(mode):
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, optimizer, loader = make_private(Call(torch.tanh), x, y, mode, loss=F.cross_entropy)
    for a, b in loader:
        with pytest.raises(RuntimeError, match="another gradient than 1"):
            (net.private_loss(a, b) * 2).backward()


def test_private_loss_in_eval_mode_is_the_loss():
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, _, _ = make_private(Call(torch.tanh), x, y, loss=F.cross_entropy)
    net.eval()
    with torch.no_grad():
        assert torch.allclose(net.private_loss(x, y), F.cross_entropy(net(x), y))


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = "fine"


class WithLoss(Call):
    """A model that computes its own loss, as those of transformers do."""

    def forward(self, x, labels):
        logits = super().forward(x)
        return Output(F.cross_entropy(logits, labels), logits)


@BOTH
def test_a_loss_that_the_model_computes(mode):
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net = WithLoss(torch.tanh)
    without = Call(torch.tanh)
    without.load_state_dict(net.state_dict())
    expected = truth(without, x, y, 0.05)
    factory = partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=float("inf"))
    loader = DataLoader(TensorDataset(x, y, torch.zeros(7)), batch_size=7)
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=factory,
        data_loader=loader,
        max_grad_norm=0.05,
        noise_multiplier=1e-4,
        grad_sample_mode=mode,
    )
    start = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    for a, b, _ in loader:
        optimizer.zero_grad()
        out = net(a, b)
        assert out.logits.shape == (7, 3) and out.note == "fine"
        assert torch.allclose(out.loss, F.cross_entropy(out.logits, b))
        out.loss.backward()
        optimizer.step()
    moved = (start - torch.cat([p.detach().flatten() for p in net.parameters()])) * 7
    assert torch.allclose(moved, expected, atol=0.05 * 2e-3)


@dataclass
class Input:
    x: torch.Tensor
    factor: torch.Tensor  # of no dimension: the same for all records


class TakesDataclass(Call):
    def forward(self, given):
        return super().forward(given.x) * given.factor


class TakesNumber(Call):
    def forward(self, x, factor):
        return super().forward(x) * factor


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("mode", ["bookkeeping", "isolated", "hooks"])
@pytest.mark.parametrize("is_dataclass", [False, True])
def test_example_inputs_of_every_kind_that_a_model_takes(is_dataclass, mode):
    x, y, factor = torch.randn(7, 6), torch.randint(3, (7,)), torch.tensor(0.5)
    net = (TakesDataclass if is_dataclass else TakesNumber)(torch.tanh)
    two = (Input(x[:2], factor),) if is_dataclass else (x[:2], factor)
    net, optimizer, loader = make_private(net, x, y, mode, example_inputs=two)
    assert optimizer.independence.startswith("by construction") is (mode != "hooks")
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(Input(a, factor)) if is_dataclass else net(a, factor), b).backward()
        optimizer.step()


class WithScalar(Call):
    """Outputs, and a loss or a statistic of each record."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h), self.function(h)


@BOTH
def test_a_scalar_beside_outputs_is_a_loss(mode):
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net = WithScalar(lambda h: 0.1 * h.square().sum())
    parameters = list(net.parameters())
    total = 0.0
    for i in range(7):
        out, penalty = net(x[i : i + 1])
        loss = F.cross_entropy(out, y[i : i + 1]) + penalty
        g = torch.cat([t.flatten() for t in torch.autograd.grad(loss, parameters)])
        total = total + g * min(1.0, 0.3 / float(g.norm()))
    net, optimizer, loader = make_private(net, x, y, mode, clip=0.3)
    start = torch.cat([p.detach().flatten().clone() for p in parameters])
    for a, b in loader:
        out, penalty = net(a)
        (F.cross_entropy(out, b) + penalty).backward()
        optimizer.step()
        moved = (start - torch.cat([p.detach().flatten() for p in parameters])) * 7
        assert torch.allclose(moved, total, atol=0.3 * 2e-3)
        out, penalty = net(a)
        with pytest.raises(RuntimeError, match="weigh its terms in forward"):
            (F.cross_entropy(out, b) + 0.1 * penalty).backward()


@BOTH
def test_a_scalar_that_is_no_loss_does_not_matter(mode):
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, optimizer, loader = make_private(WithScalar(lambda h: h.detach().abs().mean()), x, y, mode)
    for a, b in loader:
        out, mean = net(a)
        assert mean.shape == () and out.shape == (7, 3)
        F.cross_entropy(out, b).backward()
        optimizer.step()


def test_outputs_without_tensors_say_what_to_return():
    def gaussian(h):
        return torch.distributions.Normal(h, 1.0, validate_args=False)

    x, y = torch.randn(7, 6), torch.randint(3, (7,))

    class Distributed(Call):
        def forward(self, x):
            return gaussian(super().forward(x))

    for mode in (None, "bookkeeping", "isolated"):
        with pytest.raises(ValueError, match=r"must be a tensor|return tensors"):
            make_private(Distributed(torch.tanh), x, y, mode)
    for mode in ("bookkeeping", "isolated"):
        with pytest.raises(ValueError, match="no gradient: return a tensor"):
            make_private(nn.Sequential(Call(torch.tanh), Whole()), x, y, mode)

    class Beside(Call):
        def forward(self, x):
            out = super().forward(x)
            return out, gaussian(out)

    for mode in ("bookkeeping", "isolated"):
        net, optimizer, loader = make_private(Beside(torch.tanh), x, y, mode)
        assert optimizer.independence.startswith("by construction")
        _, distribution = net(x)
        with pytest.raises(RuntimeError, match=r"returned a Normal.*its parameters"):
            distribution.rsample()


class Whole(nn.Module):
    def forward(self, x):
        return x.argmax(1)


# -- what cannot be mapped -------------------------------------------------------------------------


def test_a_model_that_cannot_be_mapped_is_tested_and_says_so(caplog):
    class Looks(nn.Module):
        def forward(self, x):
            out = torch.zeros(len(x), 6)
            out[:] = torch.tanh(x)  # one tensor, into which every record would write
            return out

    net = nn.Sequential(nn.Linear(6, 6), Looks(), nn.Linear(6, 3))
    with caplog.at_level(logging.WARNING, "torch_dpbayes"):
        _, optimizer, _ = make_private(net, torch.randn(7, 6), torch.randint(3, (7,)))
    assert optimizer.independence.startswith("tested on made-up records")
    assert (
        "module '1'" in optimizer.independence
        and "loss" in optimizer.independence
        and "module '1'" in caplog.text
    )
    with pytest.raises(ValueError, match="module '1'"):
        make_private(
            nn.Sequential(nn.Linear(6, 6), Looks(), nn.Linear(6, 3)),
            torch.randn(7, 6),
            torch.randint(3, (7,)),
            "isolated",
        )
    with pytest.raises(ValueError, match="loss="):
        make_private(
            nn.Sequential(nn.Linear(6, 6), Looks(), nn.Linear(6, 3)),
            torch.randn(7, 6),
            torch.randint(3, (7,)),
            loss=F.cross_entropy,
        )


DECISIONS = {
    "if": lambda h: h - h.mean(0) if h.max() > 1e6 else h,
    "item": lambda h: h / max(1.0, h.norm().item()),
    "any": lambda h: h * 0 if any(h[:, 0] == 3.0) else h,
    "int": lambda h: h[:, : 6 + int((h > 1e6).sum())],
    "numpy": lambda h: h * float(h.detach().numpy().size > 0),
    "equal": lambda h: h if not torch.equal(h, h * 2) else -h,
    "in": lambda h: h if 12345.0 not in h else -h,
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_model_in_which_one_record_may_decide_for_all_is_not_by_construction(name):
    with pytest.raises(ValueError, match=r"(?s)module 'Call'.*one record may decide"):
        make_private(Call(DECISIONS[name]), torch.randn(7, 6), torch.randint(3, (7,)), "isolated")


class CutsGradients(torch.autograd.Function):
    """Lets through only what is larger than 0.01, in each row by itself."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (g.abs() > 0.01)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_a_backward_pass_that_is_not_linear_sees_gradients_as_if_records_were_alone(mode):
    """A mean loss hands every record a gradient divided by the number of records, which such
    a pass must not see.
    """
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    first = Call(CutsGradients.apply)
    last = Call(CutsGradients.apply)
    last.load_state_dict(first.state_dict())
    whole, less = (released(net, x[k:], y[k:], mode) for k, net in ((0, first), (1, last)))
    assert (whole - less).norm() < 1.01


def test_arguments_need_a_row_for_every_record():
    class Two(Call):
        def forward(self, x, other):
            return super().forward(x + other)

    net = Two(torch.tanh)
    source = BookkeepingGradientSource(net, is_mapped=True)
    with pytest.raises(CannotBeMapped, match="row for every record"):
        net(torch.randn(4, 6), torch.randn(1, 6))
    source.discard(())
    with pytest.raises(CannotBeMapped, match="SimpleNamespace"):
        net(torch.randn(4, 6), types.SimpleNamespace(x=torch.randn(4, 6)))
    source.remove()


@BOTH
def test_empty_batches_give_noise_only(mode):
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, optimizer, _ = make_private(Call(torch.tanh), x, y, mode)
    out = net(x[:0])
    assert out.shape == (0, 3)
    F.cross_entropy(out, y[:0], reduction="sum").backward()
    named = list(net.named_parameters())
    sums = [torch.zeros(p.numel()) for _, p in named]
    assert optimizer.release.source.add_clipped_sum(named, 1.0, sums) == 0
    assert not torch.cat(sums).any()


@BOTH
def test_an_empty_batch_that_needs_a_stand_in_gets_a_target_as_well(mode):
    """A reshape with -1 fails on no records."""
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net = Call(lambda h: h.reshape(len(h), -1))
    net, optimizer, _ = make_private(net, x, y, mode, loss=F.cross_entropy)
    net.private_loss(x[:0], y[:0]).backward()
    named = list(net.named_parameters())
    sums = [torch.zeros(p.numel()) for _, p in named]
    assert optimizer.release.source.add_clipped_sum(named, 1.0, sums) == 0
    assert not torch.cat(sums).any()


@BOTH
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y) * 2.0,
        lambda out, y: 1.0 + F.cross_entropy(out, y, label_smoothing=0.1) / 3,
    ],
)
def test_losses_that_compute_with_numbers_take_empty_batches(mode, loss):
    """torch maps no scalar times a number over no records."""
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    net, optimizer, _ = make_private(Call(torch.tanh), x, y, mode, loss=loss)
    named = list(net.named_parameters())
    value = net.private_loss(x[:0], y[:0])
    assert value == 0  # not the made-up record's
    value.backward()
    sums = [torch.zeros(p.numel()) for _, p in named]
    assert optimizer.release.source.add_clipped_sum(named, 1.0, sums) == 0
    assert not torch.cat(sums).any()
    optimizer.release.source.discard([p for _, p in named])
    net.private_loss(x, y).backward()
    assert optimizer.release.source.add_clipped_sum(named, 1.0, sums) == 7
    assert torch.cat(sums).any()


def test_chunks_of_isolated_records_add_up(monkeypatch):
    net, x, y = (
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
        torch.randn(7, 6),
        torch.randint(3, (7,)),
    )
    found = []
    for held in (2**24, 2 * sum(p.numel() for p in net.parameters())):
        monkeypatch.setattr(isolated, "_NUMBERS_HELD", held)
        source = IsolatedGradientSource(net)
        net[1].p = 0.0
        found.append(clipped_sum(source, net, x, y, 0.2)[0])
        source.remove()
    assert torch.allclose(*found, atol=1e-6)


def test_nested_values_are_taken_apart_and_put_together():
    value = (
        {"a": torch.ones(2), "b": [torch.zeros(2), 3, None]},
        Output(torch.ones(1), torch.zeros(1)),
    )
    nested = Nested(value)
    assert len(nested.tensors) == 4 and not nested.strangers
    again = nested.rebuilt([t + 1 for t in nested.tensors])
    assert torch.equal(again[0]["a"], torch.full((2,), 2.0)) and again[0]["b"][1:] == [3, None]
    assert torch.equal(again[1].loss, torch.full((1,), 2.0)) and again[1].note == "fine"
    assert Nested(object()).strangers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_the_clipped_sum_on_a_gpu(name):
    make, shape = MODELS[name]
    net, x, y = (
        make().cuda().double() if shape else make().cuda(),
        records(shape).cuda(),
        torch.randint(3, (7,)).cuda(),
    )
    x = x.double() if shape else x
    expected = truth(net, x, y, 0.3)
    for source in sources(net):
        named = list(net.named_parameters())
        out = [torch.zeros(p.numel(), dtype=p.dtype, device="cuda") for _, p in named]
        F.cross_entropy(net(x), y).backward()
        assert source.add_clipped_sum(named, 0.3, out) == 7
        source.remove()
        assert torch.allclose(torch.cat(out), expected, atol=1e-5), type(source).__name__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["bookkeeping", "isolated", "hooks"])
def test_a_private_run_on_a_gpu(mode):
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)).cuda()
    net, optimizer, loader = make_private(net, x, y, mode)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a.cuda()), b.cuda()).backward()
        optimizer.step()
    assert len(optimizer.accountant) == 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("form", ["rows", "offsets", "all offsets"])
def test_bags_of_one_record_are_those_of_torch(mode, is_padded, form):
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    options = {"mode": mode, "padding_idx": -2 if is_padded else None}
    indices = torch.randint(7, (4, 5) if form == "rows" else (20,))
    if is_padded:
        indices.flatten()[:5] = 5  # a bag with nothing in it
    if form != "rows":
        options["include_last_offset"] = form == "all offsets"
        last = [20] if form == "all offsets" else []
        options["offsets"] = torch.tensor([0, 5, 6, 6, 17, *last])
    if mode == "sum":
        options["per_sample_weights"] = torch.randn(indices.shape, dtype=torch.float64)
    expected = F.embedding_bag(indices, weight, **options)
    factor = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((expected * factor).sum(), weight)
    with one_record_only():
        found = F.embedding_bag(indices, weight, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * factor).sum(), weight)[0], gradient)
