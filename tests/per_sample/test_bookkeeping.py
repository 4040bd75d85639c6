"""Book-keeping against records one by one in float64: layers, shapes, devices' ways, precision."""

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from helpers import clipped_rows, delivered, gradients_of_records, sum_of
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from torch import nn

from torch_dpbayes.per_sample import arithmetic, layers
from torch_dpbayes.per_sample.arithmetic import Machine
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.contributions import Outer
from torch_dpbayes.per_sample.gradient_source import add_clipped
from torch_dpbayes.per_sample.hooks import HooksGradientSource

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# what these would choose, on the CPU
H200, T4 = Machine(2**14, True, True), Machine(2**12, True, False)


@contextmanager
def on(machine: Machine | None, *, tf32: bool = False) -> Iterator[None]:
    """Layers take the ways of this machine; None: their own."""
    with ExitStack() as stack:
        if machine is not None:
            stack.enter_context(mock.patch.object(arithmetic, "machine_of", lambda _: machine))
            stack.enter_context(mock.patch.object(arithmetic, "allows_tf32", lambda _: tf32))
        yield


@contextmanager
def forced(way: str | None, is_kept: bool = False) -> Iterator[None]:
    """Layers take this way, whatever their shapes; None: that of the shapes."""
    with ExitStack() as stack:
        for name, choice in (("choose_linear", way), ("choose_convolution", (way, is_kept))):
            if way is not None:
                stack.enter_context(mock.patch.object(layers, name, lambda *_, c=choice: c))
        yield


@torch.no_grad()
def outputs(net, x):
    return net(x).flatten(1)


def loss_of(net, x, weights):
    return (net(x).flatten(1) * weights).sum(1).mean()


def weights_of(net, x, spread):
    """Of the outputs in a linear loss: record i's gradient is about spread**i times the first
    one's.
    """
    out = outputs(net, x)
    size = spread ** torch.arange(len(x), device=x.device, dtype=out.dtype)
    return torch.randn_like(out) * size[:, None]


def loop(net, x, weights):
    """Every record's gradient in float64."""
    x = x.double() if x.is_floating_point() else x
    return gradients_of_records(copy.deepcopy(net).double(), loss_of, (x, weights.double()))


def clipped(source, net, x, weights, clip, *, way=None, is_kept=False, **options):
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]

    def backward():
        source.discard([p for _, p in named])
        for _, p in named:
            p.grad = None
        batch = delivered(x, weights) if source.follows else (x, weights)
        with forced(way, is_kept):
            loss_of(net, *batch).backward()

    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    out = [torch.zeros(p.numel(), dtype=dtype, device=p.device) for _, p in named]
    backward()  # once for each: norms() may leave behind what the sum would have to find out
    assert source.add_clipped_sum(named, clip, out, **options) == len(x)
    backward()
    norms = source.norms(named)
    source.discard([p for _, p in named])
    return torch.cat(out), norms


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embedding(x))))


def randomised(net):
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


def two_layers():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def cnn():
    first, last = nn.Conv2d(2, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, 16), nn.ReLU(), last, nn.Flatten())


class LanguageModel(nn.Module):
    """The table is the head's weight, as in GPT-2, and a layer is that of transformers."""

    def __init__(self):
        super().__init__()
        theirs = pytest.importorskip("transformers.pytorch_utils")
        self.table, self.mix = nn.Embedding(40, 12), theirs.Conv1D(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.mix(self.table(x)).tanh()))


def of(*made):
    """A sequence of layers that are made anew each time."""
    return lambda: nn.Sequential(*copy.deepcopy(made))


MODELS = {
    "linear": (two_layers, (6,)),
    "sequence": (two_layers, (7, 6)),
    "long sequence, Gram": (of(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300)), (4, 6)),
    "cnn": (cnn, (2, 8, 8)),
    "layer norm": (of(nn.LayerNorm(6), nn.Linear(6, 3)), (5, 6)),
    "rms norm": (of(nn.Linear(6, 6), nn.RMSNorm(6)), (5, 6)),
    "group norm": (of(nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(2, 6)), (6, 5)),
    "instance norm 2d": (of(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), (2, 6, 6)),
    "a linear layer twice": (lambda: Twice(nn.Linear(6, 6)), (6,)),
    "a convolution twice": (lambda: Twice(nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)),
    "tied embedding": (Tied, None),
    "embedding": (of(nn.Embedding(11, 6), nn.Linear(6, 3)), None),
    "language model": (LanguageModel, None),
    "alike linear layers, Gram": (of(*[nn.Linear(40, 40)] * 3), (3, 40)),
    "alike convolutions, Gram": (of(*[nn.Conv2d(24, 24, 3, padding=1)] * 3), (24, 3, 3)),
    "alike convolutions, unfolded": (of(*[nn.Conv1d(24, 24, 5, padding=2)] * 3), (24, 40)),
    "embedding with padding": (of(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)), None),
}


def made(name, rows=9, dtype=torch.float32, device="cpu"):
    make, shape = MODELS[name]
    net = randomised(make()).to(device, dtype)
    x = torch.randint(11, (rows, 5)) if shape is None else torch.randn(rows, *shape, dtype=dtype)
    return net, x.to(device)


# -- the same sums ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@examples(24)
@given(
    machine=st.sampled_from([None, None, H200, T4]),
    tf32=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    frozen=st.sampled_from([None, None, "bias", "weight"]),
    share=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_clipped_sums_are_those_of_records_by_themselves(
    name, device, machine, tf32, dtype, frozen, share
):
    net, x = made(name, 6, dtype, device)
    for layer in net.modules():
        if isinstance(getattr(layer, "bias", None), nn.Parameter) and frozen is not None:
            getattr(layer, frozen).requires_grad_(False)
    assume(any(p.requires_grad for p in net.parameters()))
    weights = weights_of(net, x, 1.2)
    rows = loop(net, x, weights)
    norms = rows.norm(dim=1)
    clip = share * float(norms.median())  # all, half or none are clipped
    with on(machine, tf32=tf32):
        found, theirs = clipped(BookkeepingGradientSource(net), net, x, weights, clip)
    # cut to ten bits, inputs and gradients lie off by 2⁻¹⁰ each; T4 adds what float32 may lose
    room = 2**-9 if tf32 and machine is not None else 1e-4 if machine is T4 else 1e-5
    room = 1e-11 if dtype == torch.float64 else room
    assert float((found - clipped_rows(rows, clip)).norm()) <= room * norms.clamp(max=clip).sum()
    least = float(norms.max()) * 2**-40  # a record may be zero but for what T4 adds
    torch.testing.assert_close(theirs.double(), norms, rtol=max(room, 1e-6), atol=least)


@st.composite
def linear_layers(draw):
    positions, dtype = draw(st.lists(st.integers(1, 9), max_size=2)), torch.float64
    width, out = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    layer = nn.Linear(width, out, dtype=dtype)
    return layer, torch.randn(draw(st.integers(1, 6)), *positions, width, dtype=dtype)


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    groups = draw(st.sampled_from([1, 2, 4]))
    channels = groups * draw(st.sampled_from([1, 2, 16 if dims < 3 else 2]))
    width = groups * draw(st.sampled_from([1, 2, 3, 16, 16, 16]))
    kernel, dilation, bias = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    padding = draw(st.sampled_from([0, 1, "same", "valid"]))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    stride = 1 if padding == "same" else draw(st.integers(1, 2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    layer = kind(channels, width, kernel, stride, padding, dilation, groups, bias, mode)
    x = torch.randn(draw(st.integers(1, 4)), channels, *([6] * dims), dtype=dtype)
    return layer.to(dtype), x


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@examples(80)
@given(
    of=linear_layers() | convolutions(),
    frozen=st.sampled_from([None, None, "weight", "bias"]),
    share=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_layers_of_every_shape_in_every_way(of, frozen, share):
    layer, x = of
    is_linear = isinstance(layer, nn.Linear)
    net = randomised(nn.Sequential(layer) if is_linear else nn.Sequential(nn.Tanh(), layer))
    if frozen is not None and layer.bias is not None:
        getattr(layer, frozen).requires_grad_(False)
    weights = weights_of(net, x, 1.3)
    if is_linear and len(x) > 2:  # no gradient for the weight, none at all
        x[0], weights[-1] = 0.0, 0.0
    rows, terms = loop(net, x, weights), loop(net, x.abs(), weights.abs()).norm(dim=1)
    norms = rows.norm(dim=1)
    # above this a record counts as longer
    assume(x.dtype == torch.float64 or bool((terms <= 100 * norms).all()))
    clip = max(share * float(norms.median()), 1e-9)
    factor = (clip / norms).clamp(max=1.0)
    ways = [None, "gram", *(["instantiate"] if is_linear else ["unfold"])]
    ways += ["grouped"] if not is_linear and x.dtype == torch.float32 else []
    room = 1e-12 if x.dtype == torch.float64 else 2e-6
    for way, is_kept in ((way, is_kept) for way in ways for is_kept in (False, True)):
        if way == "gram" and is_kept:
            continue
        source = BookkeepingGradientSource(net)
        found, theirs = clipped(source, net, x, weights, clip, way=way, is_kept=is_kept)
        error = float((found - clipped_rows(rows, clip)).norm())
        assert error <= room * float((factor * terms).sum())
        assert ((theirs - norms).abs() <= 2**-23 * norms + room * terms).all()
        source.remove()


@pytest.mark.parametrize(
    "name", "linear|sequence|long sequence, Gram|cnn|embedding|group norm|tied embedding".split("|")
)
@pytest.mark.parametrize("options", ["diagonal", "full", "scaled"])
def test_second_moments_and_scales(name, options):
    net, x = made(name, dtype=torch.float64)
    d = sum(p.numel() for p in net.parameters())
    if d > 2000 and options == "full":
        pytest.skip("d × d is large")
    weights, arguments = weights_of(net, x, 1.2), {}
    rows = loop(net, x, weights)
    if options == "scaled":
        scale = arguments["scale"] = torch.rand(d, dtype=torch.float64) + 0.5
        rows = rows / scale
    rows = rows * (0.8 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    moment = torch.zeros((d, d) if options == "full" else d, dtype=torch.float64)
    source = BookkeepingGradientSource(net)
    total, _ = clipped(source, net, x, weights, 0.8, second_moment=moment, **arguments)
    expected = rows.T @ rows if options == "full" else rows.square().sum(0)
    for mine, true in ((total, rows.sum(0)), (moment, expected)):
        assert float((mine - true).norm()) <= 1e-12 * float(true.norm())


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [name for name, (_, shape) in MODELS.items() if shape is not None])
def test_a_record_that_is_not_finite_contributes_nothing(name, broken):
    net, x = made(name)
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


def test_positions_that_cancel_have_their_norm_and_count_as_longer():
    """Σ_t g_t a_tᵀ is 1e-4 of its terms: in float32 the Gram norm would be rounding error."""
    net = nn.Sequential(nn.Linear(64, 48, bias=False))
    source = BookkeepingGradientSource(net)
    half, backprops = torch.randn(5, 8, 64), torch.randn(5, 8, 48)
    x = torch.cat([half, half * (1 + 1e-4)], 1)
    weights = torch.cat([backprops, -backprops], 1).flatten(1)
    exact = torch.einsum("ntp,ntd->npd", weights.view(5, 16, 48).double(), x.double()).flatten(1)
    out, norms = clipped(source, net, x, weights, 1e-6, way="gram")
    torch.testing.assert_close(norms.double(), exact.norm(dim=1), rtol=1e-6, atol=0)
    terms = (weights.view(5, 16, 48).norm(dim=2) * x.norm(dim=2)).sum(1).double()
    expected = (exact * (1e-6 / (terms * 2**-10))[:, None]).sum(0)
    # what is left of the sum in float32 is good to 2⁻²⁴ of its terms
    assert float((out - expected).norm()) <= 5e-6 * 2**10 * 2**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e8, 1e11, 1e14])
@pytest.mark.parametrize("rest", [1e-4, 1e-6, 2e-8, 1e-9])
def test_positions_that_cancel_add_no_more_than_the_clip_norm_to_wide_sums(rest, size, dtype):
    """Two positions whose products differ by ``rest`` of their size: the Gram norm does not see
    what a sum in float64 keeps.
    """
    weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    for _ in range(5):
        v, u = (torch.randn(64, dtype=dtype) for _ in range(2))
        v, u = size * v / v.norm(), u / u.norm()
        a, g = torch.stack([v, v * (1 + rest)])[None], torch.stack([u, -u])[None]
        out = {weight: torch.zeros(64 * 64, dtype=torch.float64)}
        add_clipped([Outer(weight, None, a, g)], 1.0, out)
        assert float(out[weight].norm()) <= 1 + 1e-4


HELD_PRODUCTS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4)), (8, 6), "gram"),
    "linear, no bias": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False)), (8, 6), "gram"),
    "convolution, Gram": (lambda: nn.Sequential(nn.Conv1d(3, 16, 3)), (3, 10), "gram"),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 16, 9)), (3, 16), "unfold"),
}


@pytest.mark.parametrize("size", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("name", HELD_PRODUCTS)
def test_a_record_whose_positions_cancel_does_not_swallow_the_others(name, size):
    """Its terms are huge and its gradient is not: added up with those of other records, they
    would take their digits away.
    """
    make, shape, way = HELD_PRODUCTS[name]
    net = randomised(make())
    source = BookkeepingGradientSource(net)
    x, clip = torch.randn(9, *shape), 1.0
    weights = torch.randn_like(outputs(net, x))
    without, _ = clipped(source, net, x[1:], weights[1:], clip, way=way)
    rows = (8, 4) if shape == (8, 6) else (16, -1)
    backprops = weights[0].view(rows)
    if shape == (8, 6):
        x[0] = size * x[0, 0]
        backprops.copy_(torch.randint(-4, 5, rows))
        backprops[7] = -backprops[:7].sum(0)  # exactly; the products with x are rounded
    else:
        x[0] = size
        backprops -= backprops.mean(1, keepdim=True)
    out, norms = clipped(source, net, x, weights, clip, way=way)
    assert float((out - without).norm()) <= clip * (1 + 1e-4)
    # it does cancel
    assert float(norms[0]) < 1e-5 * 9 * size * float(weights[0].norm()) * math.sqrt(x[0].numel())


@pytest.mark.parametrize(
    ("dtype", "size", "machine"),
    [
        (torch.float16, 1.0, None),
        (torch.bfloat16, 1e6, None),
        (torch.float32, 1e-6, None),
        (torch.float32, 1e6, None),
        (torch.float64, 1.0, None),
        (torch.bfloat16, 1.0, H200),
        (torch.bfloat16, 1.0, T4),
    ],
)
@pytest.mark.parametrize("name", [*MODELS, *(f"{name}, held" for name in HELD_PRODUCTS)])
def test_what_one_record_adds_is_no_longer_than_the_clip_norm(name, dtype, size, machine):
    if name in MODELS:
        net, x = made(name, 1, dtype)
        way = None
    else:
        make, shape, way = HELD_PRODUCTS[name.removesuffix(", held")]
        net, x = randomised(make()).to(dtype), torch.randn(1, *shape, dtype=dtype)
    weights = weights_of(net, x, 1.0) * size
    with on(machine):
        source = BookkeepingGradientSource(net)
        _, norm = clipped(source, net, x, weights, 1.0, way=way)
        if not math.isfinite(norm[0]):
            return
        for clip in (0.9, 1e-3):
            clip *= float(norm)
            out, _ = clipped(source, net, x, weights, clip, way=way)
            length, least = float(out.double().norm()), 1e-12 if dtype == torch.float64 else 2e-6
            lost = least if machine is None else 2**-7  # what splitting may lose is in the norm
            assert clip * (1 - lost) - 1e-18 <= length <= clip * (1 + least) + 1e-18


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
    # backward and the sum inside as well
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        gradients = gradients_of_records(copy.deepcopy(net), loss_of, (x, weights)).double()
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
    expected = clipped_rows(gradients, clip)
    assert float((found - expected).norm()) <= 2**-7 * float(norm.clamp(max=clip).sum())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_reduced_products_are_not_used_for_norms_and_sums(monkeypatch, precision):
    matmul = torch.backends.mkldnn.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch cannot tell")
    seen = []
    monkeypatch.setattr(layers.Outer, "add_sum", lambda *_: seen.append(matmul.fp32_precision))
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


def test_a_backward_pass_under_autocast_rounds_no_sum():
    net, x = nn.Sequential(nn.Linear(6, 3)), torch.randn(9, 5, 6)
    weights, sums = weights_of(net, x, 1.0), []
    for enabled in (False, True):
        source = BookkeepingGradientSource(net)
        loss = loss_of(net, *delivered(x, weights))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), forced("instantiate"):
            loss.backward()
        sums.append(sum_of(source, net, 1.0))
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-6)


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
    x = torch.full(shape, record, dtype=dtype)
    if kind is BookkeepingGradientSource:
        (x,) = delivered(x)
    (net(x) * slope).sum().backward()
    out = [torch.zeros(1, dtype=dtype) for _ in net.parameters()]
    source.add_clipped_sum(list(net.named_parameters()), clip, out)
    assert math.hypot(*map(float, out)) <= clip * (1 + 1e-6)
