"""Norms are never too small, whatever numbers, types and ways a device has."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import zoo
from helpers import (
    H200,
    T4,
    clipped,
    clipped_rows,
    delivered,
    forced,
    gradients_of_records,
    loss_of,
    mlp,
    on,
    private,
    sum_of,
    weights_of,
)
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from torch import nn

from torch_dpbayes.per_sample import arithmetic, contributions, layers
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.gradient_source import add_clipped
from torch_dpbayes.per_sample.hooks import HooksGradientSource

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_norms_of_long_gradients_are_not_too_small():
    """Torch's own norm of this one is."""
    rows = torch.randn(2, 1_000_003)
    weight = nn.Parameter(torch.zeros(1_000_003))
    norm = contributions.PerRecord({weight: rows}).norm().double()
    assert ((norm / rows.double().norm(dim=1) - 1).abs() <= 2**-21).all()


@pytest.mark.parametrize("machine", [None, H200, T4], ids=["CPU", "H200", "T4"])
@examples(120)
@example((1, 1), 2, (-10, -30), 1.0, False, torch.float32, 0)  # norms below float32's normal ones
@example((4, 3), 0, (-23, 18), 1.0, False, torch.float32, 0)  # |a|² underflows where |a||g| counts
@example((4, 3), 0, (18, -23), 1.0, True, torch.float32, 0)
@example((1, 1), 2, (0, 0), 1e-6, False, torch.float64, 0)  # terms a million times the gradient
@given(
    widths=st.tuples(st.sampled_from([1, 3, 70, 200]), st.sampled_from([1, 5, 130])),
    positions=st.integers(0, 9),
    powers=st.tuples(st.integers(-30, 8), st.integers(-30, 8)),
    closeness=st.sampled_from([1.0, 1e-2, 1e-4, 1e-6, 2e-8, 0.0]),
    has_bias=st.booleans(),
    dtype=st.sampled_from(FLOATS[1:]),
    seed=st.integers(0, 2**20),
)
def test_norms_are_never_too_small(
    machine, widths, positions, powers, closeness, has_bias, dtype, seed
):
    """Also where positions cancel, and where numbers or their squares nearly underflow."""
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(4, max(1, positions), w, generator=generator) for w in widths)
    if positions > 1:
        a[:, 1] = a[:, 0] + closeness * a[:, 1]
        g[:, 1] = -g[:, 0]
    a, g = ((t.double() * 10.0**p).to(dtype) for t, p in zip((a, g), powers, strict=True))
    each = torch.bmm(g.double().transpose(1, 2), a.double()).flatten(1)
    if has_bias:
        each = torch.cat([each, g.double().sum(1)], 1)
    truth = each.norm(dim=1)
    sizes = (a.double().square().sum(2) + has_bias).sqrt(), g.double().norm(dim=2)
    terms = (sizes[0] * sizes[1]).sum(1)
    least = 2e-17 * ((1 + sizes[0]) * (1 + sizes[1])).sum(1)  # what float32's smallest squares lose
    if positions == 0:  # as of a layer without positions
        a, g = a[:, 0], g[:, 0]
    layer = nn.Linear(*widths, bias=has_bias, dtype=dtype)
    with on(machine):
        norm = contributions.Outer(layer.weight, layer.bias, a, g).norm().double()
        if machine is T4 and dtype != torch.float64:  # others know them to 2⁻²⁴ of the terms
            assert (norm >= truth * (1 - 2**-22)).all()
        lost = 2**-16 if dtype == torch.bfloat16 else 2**-22 * (positions + 1)
        assert (norm <= truth * (1 + 2**-20) + lost * terms + least).all()
        for share in (0.9, 1e-3):  # and wide sums of one record see nothing that norms do not
            clip = share * float(norm[0])
            out = {p: torch.zeros(p.numel(), dtype=torch.float64) for p in layer.parameters()}
            add_clipped([contributions.Outer(layer.weight, layer.bias, a[:1], g[:1])], clip, out)
            assert float(torch.cat([*out.values()]).norm()) <= clip * (1 + 1e-4) + 1e-30


HELD_PRODUCTS = {
    "held linear": (nn.Linear(6, 4), (8, 6), "gram"),
    "held linear, no bias": (nn.Linear(6, 4, bias=False), (8, 6), "gram"),
    "held convolution, Gram": (nn.Conv1d(3, 16, 3), (3, 10), "gram"),
    "held convolution": (nn.Conv1d(3, 16, 9), (3, 16), "unfold"),
}


def held(name, rows, dtype=torch.float32):
    """A model of the zoo, or a layer that is made to hold its product; records, and the way."""
    if name in zoo.LAYERS:
        return *zoo.made(name, rows, dtype), None
    layer, shape, way = HELD_PRODUCTS[name]
    return (
        nn.Sequential(copy.deepcopy(layer)).to(dtype),
        torch.randn(rows, *shape, dtype=dtype),
        way,
    )


@pytest.mark.parametrize("size", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("name", HELD_PRODUCTS)
def test_a_record_whose_positions_cancel_does_not_swallow_the_others(name, size):
    """Its terms are huge and its gradient is not: added up with those of other records, they
    would take their digits away.
    """
    net, x, way = held(name, 9)
    shape, clip, source = tuple(x.shape[1:]), 1.0, BookkeepingGradientSource(net)
    weights = weights_of(net, x, 1.0)
    with forced(way):
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
    with forced(way):
        out, norms = clipped(source, net, x, weights, clip)
    assert float((out - without).norm()) <= clip * (1 + 1e-4)
    # it does cancel
    assert float(norms[0]) < 1e-5 * 9 * size * float(weights[0].norm()) * math.sqrt(x[0].numel())


@pytest.mark.parametrize("way", ["gram", "unfold"])
def test_a_bias_whose_positions_cancel_passes_no_bound(way):
    """Multiplied by the factor, each is rounded in its own way: they moved the sum by 850 C."""
    whole = torch.randint(2**22, 2**23, (2, 16)).float() * 2**7
    g = torch.zeros(1, 16, 4)
    g[0, :, :3] = torch.stack([*whole, -whole.sum(0)], 1)
    g[0, 0] = torch.eye(4)[0]  # the gradient: all else cancels exactly
    layer = nn.Conv1d(3, 16, 3, padding=1)
    with forced(way, False):
        part = layers.convolution(layer, [(torch.zeros(1, 3, 4), g)])
    out = {p: torch.zeros(p.numel()) for p in layer.parameters()}
    add_clipped([part], 0.7, out)
    assert float(out[layer.bias].norm()) <= 0.7 * (1 + 1e-4)


def test_the_size_of_terms_counts_every_position_that_uses_an_input():
    """With equal stride and dilation, three positions use each even input."""
    layer, x = nn.Conv1d(1, 1, 3, stride=2, dilation=2), torch.tensor([[[1.0, 0.0] * 51 + [1.0]]])
    part = layers.Convolution(layer, x, torch.ones(1, 1, 50))
    part.norm()
    assert float(part.size) >= (math.sqrt(3) + 1) * 50


def test_the_squares_of_many_tokens_are_not_lost():
    """Beside a large one, each is less than half a unit of float32; it added 1.002 C."""
    tokens, weight = torch.arange(70_000)[None], nn.Parameter(torch.zeros(70_000, 1))
    g = torch.full((1, 70_000, 1), math.sqrt(0.49) * 2**-11.5)
    g[0, 0] = 1.0
    norm = contributions.Tokens(weight, tokens, g, None).norm()
    assert float(norm) >= float(g.double().norm()) * (1 - 5e-5)


def test_positions_that_round_upwards_pass_no_bound():
    """At a large sum of earlier positions, each of the small ones is rounded up to twice its size:
    the last one cancels the sum, but not the roundings, so the record added 1.006 C.
    """
    positions, clip, large, small = 203, 1.0045, 512.256, 0.53125 * 2**-14
    layer, g = nn.Linear(4, 4, bias=False), torch.zeros(1, positions, 4)
    g[0, :, 0] = small
    g[0, 0, 0], g[0, -2, 0], g[0, -1, 0] = large, clip - 200 * small, -large
    part = contributions.Outer(layer.weight, None, torch.ones_like(g) * torch.eye(4)[0], 1.25 * g)
    out = {layer.weight: torch.zeros(16)}
    add_clipped([part], clip, out)
    assert 0.95 * clip <= float(out[layer.weight].norm()) <= clip * (1 + 1e-4)


def rounded_otherwise(records):
    """Numbers whose sum without the first is above a power of two, where half of them are rounded
    up, and with it below, where none is.
    """
    large = 2 ** (records.bit_length() - 2)
    ulp = large * 2.0**-23
    up, down = 0.25 + 0.625 * ulp, -0.25 - 0.375 * ulp
    start = [-1.0, *[1.0] * large, 0.5]
    return torch.tensor(start + [up, down] * ((records - len(start)) // 2))


@pytest.mark.parametrize("kind", ["rows", "linear", "embedding", "convolution"])
def test_one_record_does_not_change_the_roundings_of_all_others(kind):
    """Added up in order, these sums moved by 1.5 to 4.0 C (Casacuberta et al. 2022)."""
    values, sums = rounded_otherwise(16382), []
    for g in (values, values[1:]):
        n = len(g)
        if kind == "rows":
            p = nn.Parameter(torch.zeros(64))
            part = contributions.PerRecord({p: g[:, None].repeat(1, 64) / 8})
        elif kind == "linear":
            p = nn.Parameter(torch.zeros(1, 4))
            part = contributions.Outer(p, None, torch.full((n, 4), 0.5), g[:, None])
        elif kind == "embedding":
            p = nn.Parameter(torch.zeros(2, 1))
            part = contributions.Tokens(
                p, torch.zeros(n, 1, dtype=torch.long), g[:, None, None], None
            )
        else:
            layer = nn.Conv1d(1, 1, 1, bias=False)
            p, part = layer.weight, layers.Convolution(layer, torch.ones(n, 1, 1), g[:, None, None])
        out = {p: torch.zeros(p.numel())}
        add_clipped([part], 1.0, out)
        sums.append(out[p])
    assert float((sums[0] - sums[1]).double().norm()) <= 1 + 2e-2


NUMBERS = [
    (torch.float16, 1.0, None),
    (torch.bfloat16, 1.0, H200),
    (torch.float32, 1e6, None),
    (torch.float64, 1.0, None),
]


@pytest.mark.parametrize(("dtype", "size", "machine"), NUMBERS)
@pytest.mark.parametrize("name", [*zoo.LAYERS, *HELD_PRODUCTS])
def test_what_one_record_adds_is_no_longer_than_the_clip_norm(name, dtype, size, machine):
    net, x, way = held(name, 1, dtype)
    weights = weights_of(net, x, 1.0) * size
    with on(machine), forced(way):
        source = BookkeepingGradientSource(net)
        _, norm = clipped(source, net, x, weights, 1.0)
        if not math.isfinite(norm[0]):
            return
        for clip in (0.9, 1e-3):
            clip *= float(norm)
            out, _ = clipped(source, net, x, weights, clip)
            length, least = float(out.double().norm()), 1e-12 if dtype == torch.float64 else 2e-6
            # what the sum over positions, or splitting, may lose is in the norm: at most 6e-5 of it
            # in float32 (a float16 network uses up to 2.3e-5), more in products of bfloat16
            few = 10 * least if dtype == torch.float64 else 2**-14
            lost = few if machine is None else 2**-7
            assert clip * (1 - lost) - 1e-18 <= length <= clip * (1 + least) + 1e-18


@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bookkeeping"])
def test_autocast_and_half_precision(grad_sample_mode, is_autocast):
    """Against the same model, in the same precision, on one record at a time.

    Numbers then differ by one rounding to bfloat16 (2⁻⁸, relative) where autograd writes a weight's
    gradient, in the norm as in the direction. The mean over 8 records divides by a power of two,
    which rounds nothing.
    """
    net, x = zoo.made("cnn", rows=8)
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


def frozen_batch_norm():
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))
    return zoo.Of(lambda net, x: net.layers(x), layers=layers)


def penalised():
    """Inside the map autocast keeps casts of tensors for its block."""

    def function(net, x):
        slope = torch.func.vjp(lambda x: net.layer(x).sum(), x)[1](torch.ones(()))[0]
        return net.layer(x) + slope.square().sum(-1, keepdim=True)

    return zoo.Of(function, layer=mlp())


@pytest.mark.parametrize("make", [frozen_batch_norm, penalised])
def test_models_under_autocast(make):
    """One step, checked and made under autocast; two passes in one block."""
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        net, optimizer, loader = private(make(), x, y)
        for _ in range(2):
            for a, b in loader:
                F.cross_entropy(net(a), b).backward()
                optimizer.step()
    assert len(optimizer.accountant) == 2


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
    net, x = zoo.made("linear")
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
        (torch.float32, 1e38, 2.85e-19, 1, 1e-7),  # C/record is subnormal: 1.40 C
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


@pytest.mark.parametrize("kind", [BookkeepingGradientSource, HooksGradientSource])
def test_a_sum_over_very_many_records_moves_by_no_more_than_the_clip_bound(kind):
    """All gradients in one direction: in float32 the sum of 200,000 rounds by a percent of C,
    differently for every number of records.
    """
    net, x = nn.Linear(1, 1), 1 + 0.1 * torch.rand(200_000, 1)
    vouched = {"assume_independent": True} if kind is BookkeepingGradientSource else {}
    source, sums = kind(net, loss_reduction="sum", **vouched), []
    for first in (0, 1):
        net(x[first:]).sum().backward()
        out = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        source.add_clipped_sum(list(net.named_parameters()), 1.0, out)
        source.discard(list(net.parameters()))
        sums.append(torch.cat(out))
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-6


# -- tied tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [None, H200], ids=["CPU", "H200"])
@examples(60)
@given(
    positions=st.sampled_from([0, 1, 2, 9]),
    dtype=st.sampled_from(FLOATS),
    closeness=st.sampled_from([1.0, 1e-1, 1e-2, 1e-4, 0.0]),
    powers=st.tuples(st.integers(-4, 1), st.integers(-4, 1)),
    seed=st.integers(0, 2**20),
)
def test_norms_of_tied_tables_hold_for_the_sum(machine, positions, dtype, closeness, powers, seed):
    """Also where what the embedding adds cancels what the linear layer does."""
    generator = torch.Generator().manual_seed(seed)
    n, width, words = 3, 5, 12
    a, g, noise = (
        torch.randn(n, size, w, generator=generator, dtype=torch.float64)
        for size, w in ((max(1, positions), width), (max(1, positions), words), (words, width))
    )
    a, g = ((t * 10.0**p).to(dtype) for t, p in zip((a, g), powers, strict=True))
    of_linear = torch.bmm(g.double().transpose(1, 2), a.double())
    tokens = torch.stack([torch.randperm(words, generator=generator) for _ in range(n)])
    rows = (closeness * noise * 10.0 ** sum(powers) - of_linear).gather(
        1, tokens[:, :, None].expand(-1, -1, width)
    )
    rows = rows.to(dtype)
    table = nn.Parameter(torch.zeros(words, width, dtype=dtype))
    terms = (g.double().norm(dim=2) * a.double().norm(dim=2)).sum(1).tolist()
    if positions == 0:  # as of a layer without positions
        a, g = a[:, 0], g[:, 0]
    truth = of_linear.scatter_add(1, tokens[:, :, None].expand_as(rows), rows.double())
    with on(machine):
        linear, of_tokens = (
            contributions.Outer(table, None, a, g),
            contributions.Tokens(table, tokens, rows, None),
        )
        tied = contributions.together([linear, of_tokens])
        assert isinstance(tied, contributions.Tied)
        norms, sizes = tied.norm().tolist(), tied.size.tolist()
        # of a split number 2⁻¹⁸ may be lost, and 2⁻¹⁷ is added
        is_split = machine is not None and dtype == torch.bfloat16
        ulp = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        for i, (norm, size) in enumerate(zip(norms, sizes, strict=True)):
            squared = float(truth[i].norm()) ** 2
            off = 2.0**-48 * size**2  # squares and their sums, of a few roundings to float64
            lost = 2.0**-18 * terms[i] * is_split
            assert (norm - lost) ** 2 >= squared * (1 - 4 * ulp) - off
            most = 2 * (lost + (max(1, positions) + 1) * ulp * size)
            assert max(norm - most, 0.0) ** 2 <= squared * (1 + 4 * ulp) + 2 * off + 1e-70
            if size <= 2**10 * norm:
                out = torch.zeros(table.numel(), dtype=arithmetic.wide(table))
                tied.add_sum(F.one_hot(torch.tensor(i), n).to(out.dtype), {table: out})
                # off is 2⁻²⁸ of norm² at most; a sum of ten terms has four roundings of each
                longest = norm * (1 + 2 * ulp + 2**-28) + 4 * ulp * size
                assert float(out.double().norm()) <= longest
