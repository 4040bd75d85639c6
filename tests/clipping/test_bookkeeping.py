"""Book-keeping clipping against Opacus' hooks, and everything that could let an unclipped
gradient through.
"""

import copy
import io
import math
import shutil
import warnings
from collections import UserDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support.examples import examples
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.clipping import layers
from torch_dpbayes.clipping.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.clipping.gradient_source import HooksGradientSource
from torch_dpbayes.noise import GaussianNoise

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FALLBACK = "there is no book-keeping kernel for"


def loss_of(net, x, weights):
    out = net(x)
    return (out.flatten(1) * weights[: len(x)]).sum(1).mean()


def weights_of(net, x, spread):
    """Of the outputs in a linear loss: record i's gradient is about spread**i times the first
    one's.
    """
    with torch.no_grad():
        out = net(x).flatten(1)
    return (
        torch.randn_like(out)
        * spread ** torch.arange(len(x), device=x.device, dtype=out.dtype)[:, None]
    )


def clipped(source, net, x, weights, clip, **options):
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]

    def backward():
        source.discard([p for _, p in named])
        for _, p in named:
            p.grad = None
        loss_of(net, x, weights).backward()

    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    out = [torch.zeros(p.numel(), dtype=dtype, device=p.device) for _, p in named]
    backward()  # once for each: norms() may leave behind what the sum would have to find out
    assert source.add_clipped_sum(named, clip, out, **options) == len(x)
    backward()
    norms = source.norms(named)
    source.discard([p for _, p in named])
    return torch.cat(out), norms


def out_of_place(net):
    """A copy that Opacus' backward hooks can work on."""
    other = copy.deepcopy(net)
    for module in other.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return other


def both(net, x, clip=None, spread=1.2, **options):
    """The clipped sums and norms of hooks and of book-keeping, in this order."""
    other = out_of_place(net)
    weights = weights_of(net, x, spread)
    hooks = HooksGradientSource(other)
    expected = clipped(hooks, other, x, weights, math.inf if clip is None else clip)
    if clip is None:
        clip = float(expected[1].median())  # half are clipped
        expected = clipped(hooks, other, x, weights, clip, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FALLBACK)
        source = BookkeepingGradientSource(net)
    return expected, clipped(source, net, x, weights, clip, **options)


def assert_same(expected, found, dtype=torch.float32):
    relative = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip(expected, found):
        assert float((a - b).norm()) <= relative * max(float(a.norm()), 1e-30)


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.out = (
            nn.Embedding(11, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 11, bias=False),
        )
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embedding(x))))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = (
            DPLSTM(6, 5, batch_first=True, bidirectional=True, num_layers=2),
            nn.Linear(10, 3),
        )

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = DPMultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.attention(x, x, x)[0].mean(1))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.linear(x) * self.scale


class OwnLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.sin(x * self.scale)


def randomised(net):
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        (6,),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        (7, 6),
    ),
    "long sequence, Gram": (
        lambda: nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300)),
        (4, 6),
    ),
    "two dimensions of positions": (lambda: nn.Linear(6, 3), (2, 3, 6)),
    "without bias": (
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)),
        (5, 6),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 16, 3),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Flatten(),
        ),
        (2, 8, 8),
    ),
    "cnn, in place": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)
        ),
        (2, 8, 8),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2)),
        (2, 4, 4),
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (5, 6)),
    "layer norm of two dimensions": (
        lambda: nn.Sequential(nn.LayerNorm((5, 6)), nn.Linear(6, 3)),
        (5, 6),
    ),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6)), (5, 6)),
    "group norm": (
        lambda: nn.Sequential(nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(2, 6)),
        (6, 5),
    ),
    "group norm of vectors": (
        lambda: nn.Sequential(nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(2, 6)),
        (6,),
    ),
    "instance norm 1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)),
        (2, 8),
    ),
    "instance norm 2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        (2, 6, 6),
    ),
    "instance norm 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.InstanceNorm3d(4, affine=True)),
        (2, 4, 4, 4),
    ),
    "a linear layer twice": (lambda: Twice(nn.Linear(6, 6)), (6,)),
    "a linear layer twice on sequences": (lambda: Twice(nn.Linear(6, 6)), (5, 6)),
    "a convolution twice": (lambda: Twice(nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)),
    "a norm twice": (lambda: Twice(nn.LayerNorm(6)), (5, 6)),
    "lstm": (Lstm, (4, 6)),
    "attention": (Attention, (4, 6)),
    "own parameter beside a layer": (Scaled, (6,)),
    "own layer": (lambda: nn.Sequential(nn.Linear(6, 6), OwnLayer(), nn.Linear(6, 3)), (6,)),
    "tied embedding": (Tied, None),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), None),
    "embedding with padding": (
        lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)),
        None,
    ),
}


def made(name, rows=9, dtype=torch.float32, device="cpu"):
    make, shape = MODELS[name]
    net = randomised(make()).to(device, dtype)
    x = torch.randint(11, (rows, 5)) if shape is None else torch.randn(rows, *shape, dtype=dtype)
    return net, x.to(device)


# -- the same sums ---------------------------------------------------------------------------------


@pytest.mark.first_cases(13)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_equal_those_of_hooks(name, dtype, device):
    net, x = made(name, dtype=dtype, device=device)
    reference = copy.deepcopy(net)
    for clip in (1e-3, None, 1e6):  # all, half, none
        net = copy.deepcopy(reference)
        assert_same(*both(net, x, clip), dtype)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@examples(40)
@given(data=st.data())
def test_convolutions_of_every_kind(data):
    dims = data.draw(st.integers(1, 3))
    kind, groups = (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1],
        data.draw(st.sampled_from([1, 2, 4])),
    )
    channels, width = (
        groups * data.draw(st.sampled_from([1, 2, 16 if dims < 3 else 2])),
        groups * data.draw(st.integers(1, 3)),
    )
    if data.draw(st.booleans()):
        width = groups * 16
    kernel = data.draw(st.integers(1, 3))
    padding = data.draw(st.sampled_from([0, 1, "same", "valid"]))
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    stride = 1 if padding == "same" else data.draw(st.integers(1, 2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    dilation = data.draw(st.integers(1, 2))
    bias = data.draw(st.booleans())
    layer = kind(channels, width, kernel, stride, padding, dilation, groups, bias, mode)
    net = randomised(nn.Sequential(nn.Tanh(), layer)).to(dtype)
    x = torch.randn(data.draw(st.integers(1, 4)), channels, *([6] * dims), dtype=dtype)
    weights = weights_of(net, x, 1.3)
    other = copy.deepcopy(net).double()
    layer.weight.requires_grad_(data.draw(st.sampled_from([True, True, not bias])))
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]

    # the truth: Opacus does not know padding modes, and neither mode may be our reference
    def gradients(x, weights):
        per_record = []
        for i in range(len(x)):
            loss = (other(x[i : i + 1].double()).flatten(1) * weights[i].double()).sum()
            grads = torch.autograd.grad(loss, [dict(other.named_parameters())[n] for n, _ in named])
            per_record.append(torch.cat([g.flatten() for g in grads]))
        return torch.stack(per_record)

    # the terms' size, to which rounding is relative
    truth, terms = gradients(x, weights), gradients(x.abs(), weights.abs()).norm(dim=1)
    true_norms = truth.norm(dim=1)
    clip = float(true_norms.median())
    factor = (clip / true_norms).clamp(max=1.0)
    expected = (truth * factor[:, None]).sum(0)
    for way in (None, "gram", "unfold", *(["grouped", "loop"] if dtype == torch.float32 else [])):
        source = (
            BookkeepingGradientSource(net, clipping_kernels=None if way is None else {"1": way})
            if layer.weight.requires_grad
            else None
        )
        source = source or BookkeepingGradientSource(net)
        found, norms = clipped(source, net, x, weights, clip)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        assert float((found - expected).norm()) <= tolerance * float((factor * terms).sum())
        assert ((norms - true_norms).abs() <= 2**-23 * true_norms + tolerance * terms).all()
        source.remove()


@examples(40)
@given(
    positions=st.lists(st.integers(1, 9), max_size=2),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rows=st.integers(1, 6),
    way=st.sampled_from([None, "gram", "instantiate"]),
    frozen=st.sampled_from([None, "weight", "bias"]),
)
def test_linear_layers_of_every_shape(positions, widths, rows, way, frozen):
    net = nn.Sequential(nn.Linear(*widths, dtype=torch.float64))
    if frozen is not None:
        getattr(net[0], frozen).requires_grad_(False)
    x = torch.randn(rows, *positions, widths[0], dtype=torch.float64)
    x[0] = 0.0
    other = copy.deepcopy(net)
    weights = weights_of(net, x, 1.3)
    weights[-1] = 0.0  # a gradient of zero
    source, hooks = (
        BookkeepingGradientSource(net, clipping_kernels={"0": way} if way else None),
        HooksGradientSource(other),
    )
    # their size, to which rounding is relative
    _, terms = clipped(hooks, other, x.abs(), weights.abs(), 1.0)
    for clip in (1e-3, 1.0, 1e5):
        expected, true_norms = clipped(hooks, other, x, weights, clip)
        found, norms = clipped(source, net, x, weights, clip)
        assert float((found - expected).norm()) <= 1e-12 * float(
            ((clip / true_norms).clamp(max=1.0) * terms).sum()
        )
        assert ((norms - true_norms).abs() <= 2**-23 * true_norms + 1e-12 * terms).all()


@pytest.mark.first_cases(19)
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "sequence",
        "long sequence, Gram",
        "cnn",
        "embedding",
        "group norm",
        "tied embedding",
        "lstm",
    ],
)
@pytest.mark.parametrize("options", ["diagonal", "full", "scaled", "scaled by a matrix"])
def test_second_moments_and_scales(name, options):
    net, x = made(name, dtype=torch.float64)
    d = sum(p.numel() for p in net.parameters())
    if d > 2000 and options in ("full", "scaled by a matrix"):
        pytest.skip("d × d is large")
    results = []
    arguments = {}
    if options == "scaled":
        arguments["scale"] = torch.rand(d, dtype=torch.float64) + 0.5
    elif options == "scaled by a matrix":
        arguments["scale"] = torch.rand(d, d, dtype=torch.float64).tril_() / d + torch.eye(
            d, dtype=torch.float64
        )
    weights = weights_of(net, x, 1.2)
    for make in (HooksGradientSource, BookkeepingGradientSource):
        twin = out_of_place(net)
        moment = torch.zeros((d, d) if options == "full" else d, dtype=torch.float64)
        total, _ = clipped(make(twin), twin, x, weights, 0.8, second_moment=moment, **arguments)
        results.append((total, moment))
    assert_same(*results, torch.float64)


@pytest.mark.first_cases(31)
@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [name for name, (_, shape) in MODELS.items() if shape is not None])
def test_a_record_that_is_not_finite_contributes_nothing(name, broken):
    net, x = made(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FALLBACK)
        source = BookkeepingGradientSource(net)
    weights = weights_of(net, x, 1.0)
    without, _ = clipped(source, net, x[1:], weights[1:], 0.5)
    weights[0] = broken
    found, norms = clipped(source, net, x, weights, 0.5)
    # the Gram norm of a huge gradient does not overflow: it is clipped as any other
    if math.isfinite(norms[0]):
        assert broken == 1e30
        assert float((found - without).norm()) == pytest.approx(0.5, rel=1e-4)
    else:
        torch.testing.assert_close(found, without, rtol=1e-4, atol=1e-5)
    weights[0] = 1.0
    x[0] = broken
    if not math.isfinite(broken):
        found, _ = clipped(source, net, x, weights, 0.5)
        torch.testing.assert_close(found, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("exponents", [(-23, 18), (-30, 25), (18, -23)])
def test_a_norm_does_not_underflow_where_its_product_counts(exponents, bias):
    """|a|² underflows in float32 where |a|·|g| is above the clip norm."""
    net = nn.Linear(4, 3, bias=bias)
    source = BookkeepingGradientSource(net)
    a, g = (10.0**e for e in exponents)
    out, _ = clipped(source, net, torch.full((1, 4), a), torch.full((1, 3), g), 1e-12)
    assert float(out.double().norm()) <= 1e-12 * (1 + 1e-5)


def test_positions_that_cancel_are_clipped_all_the_same():
    """Σ_t g_t a_tᵀ is 1e-4 of its terms: in float32 the Gram norm would be rounding error,
    and the record unclipped.
    """
    net = nn.Sequential(nn.Linear(64, 48, bias=False))
    source = BookkeepingGradientSource(net, clipping_kernels={"0": "gram"})
    half, backprops = torch.randn(5, 8, 64), torch.randn(5, 8, 48)
    x = torch.cat([half, half * (1 + 1e-4)], 1)
    weights = torch.cat([backprops, -backprops], 1).flatten(1)
    exact = torch.einsum("ntp,ntd->npd", weights.view(5, 16, 48).double(), x.double()).flatten(1)
    out, norms = clipped(source, net, x, weights, 1e-6)
    expected = (exact * (1e-6 / exact.norm(dim=1))[:, None]).sum(0)
    # what is left of the sum in float32 is good to 2⁻²⁴ of its terms
    assert float((out - expected).norm()) <= 5e-6 * 1e4 * 2**-22
    # before any is set apart
    source._norm = lambda contributions, _: torch.stack([c.norm() for c in contributions]).norm(
        dim=0
    )
    _, norms = clipped(source, net, x, weights, 1e-6)
    torch.testing.assert_close(norms.double(), exact.norm(dim=1), rtol=1e-6, atol=0)


HELD_PRODUCTS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4)), (8, 6), {"0": "gram"}),
    "linear, no bias": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False)), (8, 6), {"0": "gram"}),
    "convolution, Gram": (lambda: nn.Sequential(nn.Conv1d(3, 16, 3)), (3, 10), {"0": "gram"}),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 16, 9)), (3, 16), {"0": "unfold"}),
}


@pytest.mark.parametrize("size", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("name", HELD_PRODUCTS)
def test_a_record_whose_positions_cancel_does_not_swallow_the_others(name, size):
    """Its terms are huge and its gradient is not: added up with those of other records, they
    would take their digits away.
    """
    make, shape, ways = HELD_PRODUCTS[name]
    net = randomised(make())
    source = BookkeepingGradientSource(net, clipping_kernels=ways)
    x, clip = torch.randn(9, *shape), 1.0
    weights = torch.randn_like(net(x).flatten(1))
    source.discard(())
    without, _ = clipped(source, net, x[1:], weights[1:], clip)
    rows = (8, 4) if shape == (8, 6) else (16, -1)
    backprops = weights[0].view(rows)
    if shape == (8, 6):
        x[0] = size * x[0, 0]
        backprops.copy_(torch.randint(-4, 5, rows))
        backprops[7] = -backprops[:7].sum(0)  # exactly; the products with x are rounded
    else:
        x[0] = size
        backprops -= backprops.mean(1, keepdim=True)
    out, norms = clipped(source, net, x, weights, clip)
    assert float((out - without).norm()) <= clip * (1 + 1e-4)
    # it does cancel
    assert float(norms[0]) < 1e-5 * 9 * size * float(weights[0].norm()) * math.sqrt(x[0].numel())


@pytest.mark.parametrize("name", HELD_PRODUCTS)
def test_positions_that_cancel_in_one_layer_of_two(name):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList([make()[0], make()[0]])

        def forward(self, x):
            return torch.cat([branch(t) for branch, t in zip(self.branches, x.unbind(1))], 1)

    make, shape, ways = HELD_PRODUCTS[name]
    net, x = randomised(Branches()), torch.randn(5, 2, *shape)
    source = BookkeepingGradientSource(
        net, clipping_kernels={f"branches.{i}": ways["0"] for i in range(2)}
    )
    weights = torch.randn_like(net(x))
    without, _ = clipped(source, net, x[1:], weights[1:].flatten(1), 1.0)
    x[0, 1] = 1e8
    half = weights[0].chunk(2)[1]  # of the second branch
    half -= half.mean(0 if shape == (8, 6) else 1, keepdim=True)
    out, _ = clipped(source, net, x, weights.flatten(1), 1.0)
    assert float((out - without).norm()) <= 1 + 1e-4


@pytest.mark.parametrize("name", HELD_PRODUCTS)
def test_a_record_that_is_summed_by_itself_is_cut_out_and_instantiated_as_any_other(name):
    make, shape, ways = HELD_PRODUCTS[name]
    net = randomised(make())
    source = BookkeepingGradientSource(net, clipping_kernels=ways)
    x, named = torch.randn(4, *shape), list(net.named_parameters())
    weights = torch.randn_like(net(x).flatten(1))
    source.discard(())
    loss_of(net, x, weights).backward()
    before = [source.per_record_gradients(p) for _, p in named]
    (product,) = source._merged()
    product.set_apart(torch.tensor([False, True, False, True]))
    for (_, p), gradients in zip(named, before):
        torch.testing.assert_close(source.per_record_gradients(p), gradients, rtol=1e-5, atol=1e-5)
    product.keep_only(torch.tensor([True, True, False, False]))
    found = {p: torch.zeros(p.numel()) for _, p in named}
    product.add_sum(torch.tensor([1.0, 2.0, 3.0, 4.0]), found)
    for (_, p), gradients in zip(named, before):
        torch.testing.assert_close(
            found[p], (gradients[0] + 2 * gradients[1]).flatten(), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    "name",
    ["flat", "gram", "instantiate", "unfold", "convolution, Gram", "layer norm", "group norm"],
)
def test_half_frozen_layers(name, frozen):
    make, shape, way = {
        "flat": (lambda: nn.Linear(6, 4), (6,), None),
        "gram": (lambda: nn.Linear(6, 4), (5, 6), "gram"),
        "instantiate": (lambda: nn.Linear(6, 4), (5, 6), "instantiate"),
        "unfold": (lambda: nn.Conv1d(3, 16, 9), (3, 16), "unfold"),
        "convolution, Gram": (lambda: nn.Conv1d(3, 16, 9), (3, 16), "gram"),
        "layer norm": (lambda: nn.LayerNorm(6), (5, 6), None),
        "group norm": (lambda: nn.GroupNorm(3, 6), (6, 5), None),
    }[name]
    net, x = nn.Sequential(randomised(make())).double(), torch.randn(6, *shape, dtype=torch.float64)
    getattr(net[0], frozen).requires_grad_(False)
    other, weights = copy.deepcopy(net), torch.randn_like(net(x).flatten(1))
    trainable = [p for p in other.parameters() if p.requires_grad]
    truth = torch.stack(
        [
            torch.autograd.grad((other(x[i : i + 1]).flatten() * weights[i]).sum(), trainable)[
                0
            ].flatten()
            for i in range(6)
        ]
    )
    clip = float(truth.norm(dim=1).median())
    source = BookkeepingGradientSource(net, clipping_kernels={} if way is None else {"0": way})
    expected = (truth * (clip / truth.norm(dim=1)).clamp(max=1.0)[:, None]).sum(0)
    found, norms = clipped(source, net, x, weights, clip)
    assert_same([expected], [found], torch.float64)
    assert_same([truth.norm(dim=1).float()], [norms])


@pytest.mark.first_cases(32)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*MODELS, *(f"{name}, held" for name in HELD_PRODUCTS)])
def test_what_one_record_adds_is_no_longer_than_the_clip_norm(name, dtype, size):
    if name in MODELS:
        net, x = made(name, 1, dtype)
        ways = None
    else:
        make, shape, ways = HELD_PRODUCTS[name.removesuffix(", held")]
        net, x = randomised(make()).to(dtype), torch.randn(1, *shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FALLBACK)
        source = BookkeepingGradientSource(net, clipping_kernels=ways)
    weights = weights_of(net, x, 1.0) * size
    _, norm = clipped(source, net, x, weights, 1.0)
    if math.isfinite(norm[0]):
        for clip in (0.9, 1e-3):
            out, _ = clipped(source, net, x, weights, clip * float(norm))
            torch.testing.assert_close(
                float(out.double().norm()),
                clip * float(norm),
                rtol=1e-12 if dtype == torch.float64 else 2e-6,
                atol=1e-18,
            )


@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
def test_autocast_and_half_precision(grad_sample_mode, is_autocast):
    """Against the same model, in the same precision, on one record at a time.

    Numbers then differ by one rounding to bfloat16 (2⁻⁸, relative) where autograd writes a weight's
    gradient, in the norm as in the direction. The mean over 8 records divides by a power of two,
    which rounds nothing.
    """
    net, x = made("cnn", rows=8)
    if not is_autocast:
        net, x = net.bfloat16(), x.bfloat16()
    weights = weights_of(net, x, 1.2)
    truth = []
    # backward and the sum inside as well
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        for i in range(8):
            other = copy.deepcopy(net)
            loss_of(other, x[i : i + 1], weights[i : i + 1]).backward()
            truth.append(torch.cat([p.grad.double().flatten() for p in other.parameters()]))
        gradients = torch.stack(truth)
        norm = gradients.norm(dim=1)
        clip = float(norm.median())
        source = (
            HooksGradientSource(net)
            if grad_sample_mode == "hooks"
            else BookkeepingGradientSource(net)
        )
        found, norms = clipped(source, net, x, weights, clip)
    assert found.dtype == norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), norm, rtol=2**-8, atol=0)
    expected = (gradients * (clip / norm).clamp(max=1.0)[:, None]).sum(0)
    assert float((found - expected).norm()) <= 2**-7 * float(norm.clamp(max=clip).sum())


@pytest.mark.parametrize("way", ["gram", "instantiate"])
def test_autocast_around_backward_and_step_alone_changes_nothing(way):
    """For one layer, whose output gradient autograd computes without products."""
    net, x = nn.Sequential(nn.Linear(6, 3)), torch.randn(9, 5, 6)
    twin, weights = copy.deepcopy(net), weights_of(net, x, 1.2)
    expected = clipped(
        BookkeepingGradientSource(twin, clipping_kernels={"0": way}), twin, x, weights, 0.5
    )
    source, named = (
        BookkeepingGradientSource(net, clipping_kernels={"0": way}),
        list(net.named_parameters()),
    )
    loss = loss_of(net, x, weights)
    out = [torch.zeros(p.numel()) for _, p in named]
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
        source.add_clipped_sum(named, 0.5, out)
        norms = source.norms(named)
    assert_same(expected, (torch.cat(out), norms))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_reduced_products_are_not_used_for_norms_and_sums(monkeypatch, precision):
    matmul = torch.backends.mkldnn.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch cannot tell")
    seen = []
    monkeypatch.setattr(layers.Outer, "_add_product", lambda *_: seen.append(matmul.fp32_precision))
    kind = layers.KINDS[nn.Linear]
    noting = kind._replace(kernel=lambda *a: seen.append(matmul.fp32_precision) or kind.kernel(*a))
    monkeypatch.setitem(layers.KINDS, nn.Linear, noting)
    net, x = made("linear")
    source = BookkeepingGradientSource(net)
    weights = weights_of(net, x, 1.0)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        clipped(source, net, x, weights, 1.0)
        assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before
    assert seen == ["ieee"] * 6


def run(grad_sample_mode, net, data, seed):
    loader = DataLoader(data, batch_size=15, generator=torch.Generator().manual_seed(seed[0]))
    factory = partial(dpb.optim.DPSGLD, lr=0.1, generator=torch.Generator().manual_seed(seed[1]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FALLBACK)
        net, optimizer, loader = dpb.PrivacyEngine().make_private(
            module=net,
            optimizer=factory,
            data_loader=loader,
            max_grad_norm=0.5,
            grad_sample_mode=grad_sample_mode,
        )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.thorough
def test_a_whole_run_is_that_of_hooks(monkeypatch):
    # else rounding changes the noise
    monkeypatch.setattr(GaussianNoise, "next_stream", lambda noise, device, hides: noise.generator)
    monkeypatch.setattr(GaussianNoise, "require_usable", lambda noise, device: None)
    monkeypatch.setattr("torch_dpbayes.noise.use_position", lambda *_: None)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    data = TensorDataset(torch.randn(60, 1, 6, 6, dtype=torch.float64), torch.randint(3, (60,)))
    seed = (torch.seed() % 2**31, torch.seed() % 2**31 + 1)
    a, b = (run(mode, copy.deepcopy(net), data, seed) for mode in ("hooks", "bookkeeping"))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- one backward pass, and nothing unclipped ------------------------------------------------------


def test_autograd_computes_no_weight_gradient_and_no_gradient_of_the_input():
    net, x = made("cnn")
    source = BookkeepingGradientSource(net)
    out = net(x)
    seen, stack = set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # the anchor
        assert "AccumulateGrad" not in type(node).__name__ or node.variable.numel() == 1
        stack += [n for n, _ in node.next_functions]
    out.sum().backward()
    assert all(p.grad is None for p in net.parameters()) and x.grad is None
    assert source.per_record_gradients(net[0].weight).shape == (9, 16, 2, 3, 3)


def private(net=None, rows=40, shape=(6,), batch_size=40, **options):
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) if net is None else net
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(3, (rows,)))
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=factory,
        data_loader=DataLoader(data, batch_size=batch_size),
        max_grad_norm=0.5,
        **options,
    )


def expect(message, net, optimizer, loader, work):
    """``work`` raises, or the step after it; then a clean step follows."""
    x, y = next(iter(loader))
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=message):
        work(x, y)
        optimizer.step()
    assert len(optimizer.accountant) == 0
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert len(optimizer.accountant) == 1


def test_a_weight_used_outside_its_module():
    net, optimizer, loader = private()

    def work(x, y):
        F.cross_entropy(net(x) + F.linear(x, net[0].weight)[:, :3], y).backward()

    expect("0.weight.*ordinary gradient", net, optimizer, loader, work)


def test_a_penalty_in_the_loss():
    net, optimizer, loader = private()
    expect(
        "prior_std= instead of a penalty",
        net,
        optimizer,
        loader,
        lambda x, y: (F.cross_entropy(net(x), y) + net[2].weight.square().sum()).backward(),
    )


def test_p_grad_set_by_hand():
    net, optimizer, loader = private()

    def work(x, y):
        F.cross_entropy(net(x), y).backward()
        net[0].bias.grad = torch.zeros(8)

    expect("0.bias.*ordinary gradient", net, optimizer, loader, work)


def test_parts_of_the_model_beside_the_model():
    net, optimizer, loader = private()
    expect(
        "call the whole model",
        net,
        optimizer,
        loader,
        lambda x, y: F.cross_entropy(net(x) + net[0](x.roll(1, 0))[:, :3], y).backward(),
    )


def test_weights_changed_between_forward_and_backward():
    net, optimizer, loader = private()

    def work(x, y):
        loss = F.cross_entropy(net(x), y)
        with torch.no_grad():
            net[0].weight.add_(0.0)
        loss.backward()

    expect("'weight' of layer '0' was changed between", net, optimizer, loader, work)


def test_inputs_changed_in_place():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, is_clumsy=False):
            h = self.first(x) * 1.0
            g = self.last(h)
            if is_clumsy:
                h += 1.0
            return g

    net, optimizer, loader = private(Adding())

    def work(x, y):
        F.cross_entropy(net(x, is_clumsy=True), y).backward()

    expect("input of layer 'last' was changed in place", net, optimizer, loader, work)


@pytest.mark.parametrize("kind", ["linear", "convolution", "twice"])
def test_batches_overwritten_between_backward_and_step(kind):
    """A loop may fill its buffer with the next batch before step(), whose records must not be
    mixed into this one's.
    """
    shape = (4,)
    if kind == "linear":
        net = nn.Sequential(nn.Linear(4, 3))
    elif kind == "twice":
        net = nn.Sequential(Twice(nn.Linear(4, 4)), nn.Linear(4, 3))
    else:
        net, shape = (
            nn.Sequential(
                nn.Conv2d(2, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
            ),
            (2, 5, 5),
        )
    net, optimizer, loader = private(net, shape=shape)

    def work(x, y):
        F.cross_entropy(net(x), y).backward()
        x.mul_(2.0)

    expect(r"changed in place between backward\(\) and step\(\)", net, optimizer, loader, work)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
def test_modules_put_in_later(grad_sample_mode):
    for change in (
        lambda net: net.__setitem__(1, nn.BatchNorm1d(8, affine=False)),
        lambda net: net.append(nn.BatchNorm1d(3, affine=False)),
    ):
        net, optimizer, loader = private(grad_sample_mode=grad_sample_mode)
        x, y = next(iter(loader))
        change(net)
        with pytest.raises(
            RuntimeError, match=r"module '[13]' (changed|was added) since the model was checked"
        ):
            net(x)
        assert len(optimizer.accountant) == 0


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_not_passed_over(kind):
    net, optimizer, loader = private()

    def work(x, y):
        loss = F.cross_entropy(net(x), y)
        handle = getattr(net[0].weight, kind)(lambda g: None)
        try:
            loss.backward()
        finally:
            handle.remove()

    expect("'weight' of layer '0' has a hook", net, optimizer, loader, work)


def test_a_hook_that_comes_after_the_backward_pass_changes_nothing():
    """Nor does it in torch, which would call it in the next one."""
    net, x = made("linear")
    source, weights, named = (
        BookkeepingGradientSource(net),
        weights_of(net, x, 1.2),
        list(net.named_parameters()),
    )
    expected, _ = clipped(source, net, x, weights, 0.5)
    loss_of(net, x, weights).backward()
    net[0].weight.register_hook(lambda g: 0 * g)
    out = [torch.zeros(p.numel()) for _, p in named]
    source.add_clipped_sum(named, 0.5, out)
    assert torch.equal(torch.cat(out), expected)


def test_a_pass_of_an_earlier_batch_joins_no_later_one():
    net, optimizer, loader = private()
    x, y = next(iter(loader))
    earlier = F.cross_entropy(net(x), y)
    with pytest.raises(RuntimeError, match=r"call backward\(\) once"):
        optimizer.step()
    expect(
        "through one of an earlier batch",
        net,
        optimizer,
        loader,
        lambda x, y: (earlier + F.cross_entropy(net(x), y)).backward(),
    )


@pytest.mark.parametrize("way", ["functional_call", "load_state_dict", "setattr"])
def test_exchanged_parameters(way):
    """The gradient would be that of other tensors than the optimizer's."""
    net, optimizer, loader = private()
    values = {name: 2.0 * p.detach() for name, p in net.named_parameters()}
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match="a parameter was added, exchanged or unfrozen"):
        if way == "functional_call":
            torch.func.functional_call(net, values, (x,))
        elif way == "load_state_dict":
            net.load_state_dict(values, assign=True)
            net(x)
        else:
            net[0].weight = nn.Parameter(values["0.weight"])
            net(x)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert len(optimizer.accountant) == 0


def test_own_layers_are_run_again_as_they_were_run():
    """Attributes, Python arguments and further tensors of a layer that torch.func computes for."""

    class Named(UserDict):
        factor = property(lambda self: self["factor"])

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.register = nn.Parameter(torch.ones(6)), 1.0
            self.register_buffer("shift", torch.randn(6))

        def forward(self, x, other, power, *, sign=None):
            y = torch.sin(self.register * x * self.scale + self.shift) ** power * other.factor
            return -y if sign else y

    class Using(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.last, self.power = Own(), nn.Linear(6, 3), 2

        def forward(self, x):
            return self.last(
                self.own(x, Named(factor=torch.tanh(x)), self.power, sign=self.power > 2)
            )

    net, x = randomised(Using()), torch.randn(4, 6)
    with pytest.warns(UserWarning, match=FALLBACK):
        source = BookkeepingGradientSource(net)
    weights = weights_of(net, x, 1.0)
    net.power, net.own.register = 3, 1.7
    truth = []
    with source.paused():
        for i in range(4):
            truth.append(
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(
                            (net(x[i : i + 1]) * weights[i]).sum(), list(net.parameters())
                        )
                    ]
                )
            )
    found, norms = clipped(source, net, x, weights, 1e6)
    torch.testing.assert_close(norms, torch.stack(truth).norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, torch.stack(truth).sum(0), rtol=1e-5, atol=1e-5)


def test_a_layer_that_hands_its_input_on():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x

    net, weights = nn.Sequential(Off(), nn.Linear(6, 3)), torch.randn(4, 3)
    with pytest.warns(UserWarning, match=FALLBACK):
        source = BookkeepingGradientSource(net)
    for x in (torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)):
        # a hook left on x would see the second pass
        results = [clipped(source, net, x, weights, 0.5) for _ in range(2)]
        assert_same(*results)
        assert not results[0][0][:6].any() and x.grad_fn is None


def test_two_backward_passes_and_gradients_of_gradients():
    for work, message in (
        (lambda net, x, y: [F.cross_entropy(net(x), y).backward(retain_graph=True)] and None, None),
        (
            lambda net, x, y: (lambda loss: (loss.backward(retain_graph=True), loss.backward()))(
                F.cross_entropy(net(x), y)
            ),
            "ran twice",
        ),
        (lambda net, x, y: F.cross_entropy(net(x), y).backward(create_graph=True), "create_graph"),
        (
            lambda net, x, y: [F.cross_entropy(net(x), y).backward() for _ in range(2)],
            "run forward 2 times",
        ),
    ):
        net, optimizer, loader = private()
        if message is not None:
            expect(message, net, optimizer, loader, partial(work, net))
        else:
            x, y = next(iter(loader))
            work(net, x, y)
            optimizer.step()


def test_an_exception_in_the_middle_of_backward_leaves_nothing():
    net, optimizer, loader = private()

    def work(x, y):
        loss = F.cross_entropy(net(x), y)

        def fail(*_):
            raise RuntimeError("out of luck")

        node = loss.grad_fn
        while "Relu" not in node.name():
            node = next(following for following, _ in node.next_functions if following is not None)
        node.register_hook(fail)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "out of luck" in str(error)
        assert net[2].weight.grad is None

    expect("'0.weight' has no per-record gradient", net, optimizer, loader, work)


def test_evaluation_in_between_records_nothing():
    net, optimizer, loader = private()
    x, y = next(iter(loader))
    loss = F.cross_entropy(net(x), y)
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    net.eval()
    net(x)
    net.train()
    loss.backward()
    optimizer.step()
    assert len(optimizer.accountant) == 1


def test_a_backward_pass_in_eval_mode_is_not_stepped_on():
    net, optimizer, loader = private()

    def work(x, y):
        net.eval()
        F.cross_entropy(net(x), y).backward()
        net.train()
        assert net[0].weight.grad is not None  # an ordinary gradient, as anywhere

    expect("ordinary gradient", net, optimizer, loader, work)


def test_copies_and_files_carry_nothing_and_need_make_private():
    net, optimizer, loader = private()
    x, y = next(iter(loader))
    loss = F.cross_entropy(net(x), y)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            torch.testing.assert_close(other(x), net(x))
        with pytest.raises(RuntimeError, match="copy of a private one"):
            other(x)
        assert other[0].forward.__self__.module is other[0]
        again, optimizer2, loader2 = private(other)
        assert again[0].weight is not net[0].weight
        for a, b in loader2:
            F.cross_entropy(again(a), b).backward()
            optimizer2.step()
    loss.backward()
    optimizer.step()
    assert len(optimizer.accountant) == 1


def test_everything_is_taken_off_again():
    net = nn.Sequential(nn.Linear(6, 3))
    before = {key: str(value) for key, value in net[0].__dict__.items()}
    source = BookkeepingGradientSource(net)
    assert "forward" in net[0].__dict__
    source.remove()
    assert {key: str(value) for key, value in net[0].__dict__.items()} == before
    assert not net._forward_hooks and not net._forward_pre_hooks
    net(torch.randn(2, 6)).sum().backward()
    assert net[0].weight.grad is not None


def test_keyword_arguments_and_user_hooks():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(input=self.first(input=x))

    net, x = randomised(Keyword()), torch.randn(5, 6)
    twin = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    twin.load_state_dict(
        {{"f": "0", "l": "1"}[k[0]] + k[k.index(".") :]: v for k, v in net.state_dict().items()}
    )
    for module in (net.last, twin[1]):
        module.register_forward_pre_hook(lambda m, a, k=None: None)
        module.register_forward_hook(lambda m, a, out: 2 * out)
    weights = weights_of(net, x, 1.0)
    per_record = []
    for i in range(5):
        grads = torch.autograd.grad(
            (twin(x[i : i + 1]) * weights[i]).sum(), list(twin.parameters())
        )
        per_record.append(torch.cat([g.flatten() for g in grads]))
    truth = torch.stack(per_record)
    found, _ = clipped(BookkeepingGradientSource(net), net, x, weights, 0.5)
    torch.testing.assert_close(
        found,
        (truth * (0.5 / truth.norm(dim=1)).clamp(max=1.0)[:, None]).sum(0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_sum_or_raises(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = (
                nn.Linear(6, 6),
                nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
                nn.Linear(6, 3),
            )
            self.saves = True

        def forward(self, x):
            h = self.first(x)
            h = (
                checkpoint(self.middle, h, use_reentrant=reentrant)
                if self.saves
                else self.middle(h)
            )
            return self.last(h)

    net, x = randomised(Checkpointed()), torch.randn(5, 6)
    plain = copy.deepcopy(net)
    plain.saves = False
    weights = weights_of(plain, x, 1.0)
    assert_same(
        clipped(BookkeepingGradientSource(plain), plain, x, weights, 0.5),
        clipped(BookkeepingGradientSource(net), net, x, weights, 0.5),
    )


def test_frozen_layers_and_freezing_later():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].requires_grad_(False)
    net, optimizer, loader = private(net)
    for step in range(2):
        before = net[0].weight.detach().clone(), net[2].weight.detach().clone()
        net[0].weight.requires_grad_(step == 0)
        for x, y in loader:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        assert torch.equal(net[0].weight, before[0]) == (step == 1) and torch.equal(
            net[2].weight, before[1]
        )
    net[2].requires_grad_(True)
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match=r"unfrozen|ordinary gradient"):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert len(optimizer.accountant) == 2


@pytest.mark.parametrize("what", ["0.weight", "0.bias", "2"])
def test_freezing_between_backward_and_step(what):
    """What is frozen stays where it is; the others' sum is clipped by the norm over all."""
    net, optimizer, loader = private()
    for x, y in loader:
        F.cross_entropy(net(x), y).backward()
        part = net[2] if what == "2" else dict(net.named_parameters())[what]
        part.requires_grad_(False)
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.step()
        assert all(torch.equal(p, b) != p.requires_grad for p, b in zip(net.parameters(), before))


def test_parts_of_a_draw():
    whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    parts = copy.deepcopy(whole)
    data = TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))
    results = []
    for net, size in ((whole, None), (parts, 7)):
        factory = partial(dpb.optim.DPSGLD, lr=0.1, temperature=0.0)
        net, optimizer, loader = dpb.PrivacyEngine().make_private(
            module=net,
            optimizer=factory,
            data_loader=DataLoader(data, batch_size=24),
            max_grad_norm=0.5,
        )
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=size or 100, optimizer=optimizer
        )
        with manager as batches:
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
def test_the_clipped_fraction_is_counted_in_both_modes(grad_sample_mode):
    net, optimizer, loader = private(grad_sample_mode=grad_sample_mode)
    x, y = loader.dataset.tensors
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    other.load_state_dict(net.state_dict())
    norms = []
    for i in range(len(x)):
        grads = torch.autograd.grad(
            F.cross_entropy(other(x[i : i + 1]), y[i : i + 1]), list(other.parameters())
        )
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
    for share in (0.2, 0.7):
        ordered = torch.stack(norms).double().sort().values
        near = int(40 * (1 - share)) - 3
        widest = near + int(ordered.diff()[near : near + 6].argmax())  # beyond rounding
        bound = float(ordered[widest] + ordered[widest + 1]) / 2
        found = dpb.private_clipped_fraction(
            net, optimizer, loader, noise_multiplier=1e-4, max_grad_norm=bound
        )
        assert found == pytest.approx(float((torch.stack(norms) > bound).float().mean()), abs=1e-3)
    F.cross_entropy(net(x), y)  # as in any loop: nothing of the counts is left behind
    assert len(optimizer.accountant) == 2


class Refusing(nn.Module):
    """Fails on zero rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x.view(len(x), -1))


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Refusing, (6,)),
        (Attention, (4, 6)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3),
                nn.InstanceNorm2d(4, affine=True),
                nn.Flatten(1),
                nn.Linear(16, 3),
            ),
            (2, 4, 4),
        ),
    ],
)
def test_models_that_cannot_take_empty_batches_get_a_stand_in(make, shape, grad_sample_mode):
    net, optimizer, loader = private(
        make(), rows=20, shape=shape, batch_size=1, grad_sample_mode=grad_sample_mode
    )
    sizes = []
    while 0 not in sizes:
        for x, y in loader:
            sizes.append(len(x))
            before = [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            out = net(x)
            assert len(out) == len(x)
            F.cross_entropy(out, y).backward()
            optimizer.step()
            assert all(
                not torch.equal(p, b) and torch.isfinite(p).all()
                for p, b in zip(net.parameters(), before)
            )
    assert len(optimizer.accountant) == len(sizes)


@pytest.mark.parametrize(
    "name",
    [name for name in MODELS if name != "attention" and not name.startswith("instance norm")],
)
def test_empty_batches_add_nothing(name):
    net, x = made(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FALLBACK)
        source = BookkeepingGradientSource(net)
    named = list(net.named_parameters())
    net(x[:0]).sum().backward()
    out = [torch.zeros(p.numel()) for _, p in named]
    assert source.norms(named).shape == (0,)
    assert source.add_clipped_sum(named, 1.0, out) == 0 and all((o == 0).all() for o in out)


def test_layers_that_see_another_number_of_records():
    net = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(6, 4), nn.Unflatten(0, (-1, 5)), nn.Linear(4, 3)
    )
    source = BookkeepingGradientSource(net)
    net(torch.randn(3, 5, 6)).mean().backward()
    with pytest.raises(RuntimeError, match="disagree on the number of records"):
        source.add_clipped_sum(
            list(net.named_parameters()), 1.0, [torch.zeros(p.numel()) for p in net.parameters()]
        )


def test_inference_tensors_are_copied_for_their_changes_cannot_be_seen():
    net = nn.Sequential(nn.Linear(6, 3))
    source, weights = BookkeepingGradientSource(net), torch.randn(4, 3)
    with torch.inference_mode():
        x = torch.randn(4, 6)
    expected = clipped(source, net, x.clone(), weights, 0.5)
    loss_of(net, x, weights).backward()
    with torch.inference_mode():
        x.zero_()
    named = list(net.named_parameters())
    out = [torch.zeros(p.numel()) for _, p in named]
    source.add_clipped_sum(named, 0.5, out)
    assert_same(expected, (torch.cat(out), source.norms(named)))


def test_a_stand_in_contributes_nothing():
    for make in (HooksGradientSource, BookkeepingGradientSource):
        net = Refusing()
        source = make(net)
        source.use_stand_in()
        named = list(net.named_parameters())
        (net(torch.randn(0, 6)).sum() + 3.0).backward()
        out = [torch.zeros(p.numel()) for _, p in named]
        assert (
            source.add_clipped_sum(named, 1.0, out) == 0
            and all((o == 0).all() for o in out)
            and len(source.norms(named)) == 0
        )
        source.discard([p for _, p in named])
        net(torch.randn(2, 6)).mean().backward()
        assert source.add_clipped_sum(named, 1.0, out) == 2


@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
def test_packed_sequences_are_refused(grad_sample_mode):
    """Opacus keeps the records of a packed sequence in another order than those of other layers."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return self.last(self.lstm(packed)[1][0][-1])

    net = Packed()
    source = (
        HooksGradientSource(net) if grad_sample_mode == "hooks" else BookkeepingGradientSource(net)
    )
    with pytest.raises(RuntimeError, match="packed sequence"):
        net(torch.randn(3, 4, 6), torch.tensor([2, 4, 1])).mean().backward()
        source.norms(list(net.named_parameters()))


def test_layers_without_a_kernel_warn_once():
    net = nn.Sequential(nn.ConvTranspose1d(2, 2, 2), OwnLayer(), nn.ConvTranspose1d(2, 2, 2))
    with pytest.warns(
        UserWarning, match="no book-keeping kernel for ConvTranspose1d, OwnLayer"
    ) as caught:
        BookkeepingGradientSource(net)
    assert len(caught) == 1


def test_the_way_can_be_chosen_and_is_otherwise_that_of_the_shapes():
    assert (
        layers.choose_linear(8, 512, 512) == "gram"
        and layers.choose_linear(512, 128, 128) == "instantiate"
    )
    net = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    for name, way in (("0", "unfold"), ("0", "fast"), ("1", "gram"), ("9", "gram")):
        with pytest.raises(ValueError, match="clipping_kernels"):
            BookkeepingGradientSource(net, clipping_kernels={name: way})
    with pytest.raises(ValueError, match="clipping_kernels"):
        private(clipping_kernels={"0": "gram"}, grad_sample_mode="hooks")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("first", ["private", "compiled"])
def test_a_compiled_model_runs(backend, first):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(net)
    if first == "compiled":
        compiled = torch.compile(net, backend=backend)
        # without hooks
        F.cross_entropy(compiled(torch.randn(40, 6)), torch.randint(3, (40,))).backward()
        net.zero_grad()
    source = BookkeepingGradientSource(net)
    if first == "private":
        compiled = torch.compile(net, backend=backend)
    x = torch.randn(40, 6)
    weights = weights_of(twin, x, 1.05)
    expected = clipped(BookkeepingGradientSource(twin), twin, x, weights, 1.0)
    named = list(net.named_parameters())
    for _ in range(2):
        loss_of(compiled, x, weights).backward()
        out = [torch.zeros(p.numel()) for _, p in named]
        norms = source.norms(named)
        assert source.add_clipped_sum(named, 1.0, out) == 40
        source.discard([p for _, p in named])
        assert_same(expected, (torch.cat(out), norms))


@pytest.mark.parametrize("kind", [BookkeepingGradientSource, HooksGradientSource])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "record", "slope", "positions", "clip"),
    [
        (torch.float32, 1.5e19, 1.33e19, 1, 1e-6),  # C/norm is subnormal: it was rounded up, 1.12 C
        (torch.float32, 1e17, 1.2e16, 1, 1e-12),  # 1.68 C
        (torch.float32, 1e6, 1e12, 1, 1e-22),
        (torch.float64, 1e153, 1e-162, 2, 1e-12),  # the squares of one underflow: it was 2000 C
        (torch.float64, 1e-162, 1e153, 2, 1e-12),
    ],
)
def test_no_record_passes_the_bound_where_numbers_end(
    kind, has_bias, dtype, record, slope, positions, clip
):
    net = nn.Linear(1, 1, bias=has_bias).to(dtype)
    source = kind(net, loss_reduction="sum")
    shape = (1, 1) if positions == 1 else (1, positions, 1)
    net(torch.full(shape, record, dtype=dtype)).backward(torch.full(shape, slope, dtype=dtype))
    out = [torch.zeros(1, dtype=dtype) for _ in net.parameters()]
    source.add_clipped_sum(list(net.named_parameters()), clip, out)
    assert math.hypot(*map(float, out)) <= clip * (1 + 1e-6)
