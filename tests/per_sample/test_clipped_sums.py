"""The clipped sum is that of records by themselves, over layers, shapes, programs and losses."""

import copy
import math

import pytest
import torch
import zoo
from helpers import (
    H200,
    T4,
    assert_sum,
    clipped,
    clipped_rows,
    delivered,
    entropy,
    forced,
    gradients_of_records,
    loss_of,
    middle_norm,
    on,
    private,
    sum_of,
    trained,
    weights_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from losses import USUAL
from support.examples import examples
from torch import nn

from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SOURCES = {"bookkeeping": BookkeepingGradientSource, "vmap": VmapGradientSource}
# torch runs these for one record after another
slow_rules = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def in_double(net, x, weights):
    """Every record's gradient in float64."""
    x = x.double() if x.is_floating_point() else x
    return gradients_of_records(copy.deepcopy(net).double(), loss_of, (x, weights.double()))


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", zoo.LAYERS)
@examples(24)
@given(
    machine=st.sampled_from([None, None, H200, T4]),
    tf32=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    frozen=st.sampled_from([None, None, "bias", "weight"]),
    share=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_layers_on_every_machine(name, device, machine, tf32, dtype, frozen, share):
    net, x = zoo.made(name, 6, dtype, device)
    for layer in net.modules():
        if isinstance(getattr(layer, "bias", None), nn.Parameter) and frozen is not None:
            getattr(layer, frozen).requires_grad_(False)
    assume(trained(net))
    weights = weights_of(net, x, 1.2)
    rows = in_double(net, x, weights)
    norms = rows.norm(dim=1)
    clip = share * float(norms.median())  # all, half or none are clipped
    with on(machine, tf32=tf32):
        found, theirs = clipped(BookkeepingGradientSource(net), net, x, weights, clip)
    # cut to ten bits, inputs and gradients lie off by 2⁻¹⁰ each; norms add what float32 may lose
    room = 2**-9 if tf32 and machine is not None else 1e-4
    room = 1e-11 if dtype == torch.float64 else room
    least = float(norms.max()) * 2**-40  # a record may be zero but for what is added
    is_cut = tf32 and machine is not None
    low = max(room, 1e-6) if is_cut else 1e-5  # passes in float32 lose as much
    assert (theirs <= (1 + max(room, 1e-6)) * norms + least).all()
    assert (theirs >= (1 - low) * norms - least).all()
    of = norms if dtype == torch.float64 else theirs.double()  # theirs are float32
    error = float((found - clipped_rows(rows, clip, of)).norm())
    assert error <= (room if is_cut else min(room, 1e-5)) * norms.clamp(max=clip).sum()


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
    net = nn.Sequential(layer) if is_linear else nn.Sequential(nn.Tanh(), layer)
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    if frozen is not None and layer.bias is not None:
        getattr(layer, frozen).requires_grad_(False)
    weights = weights_of(net, x, 1.3)
    if is_linear and len(x) > 2:  # no gradient for the weight, none at all
        x[0], weights[-1] = 0.0, 0.0
    rows = in_double(net, x, weights)
    terms = in_double(net, x.abs(), weights.abs()).norm(dim=1)
    norms = rows.norm(dim=1)
    # above this a record counts as longer
    assume(x.dtype == torch.float64 or bool((terms <= 100 * norms).all()))
    clip = max(share * float(norms.median()), 1e-9)
    factor = (clip / norms).clamp(max=1.0)
    ways = [None, "gram", *(["instantiate"] if is_linear else ["unfold"])]
    ways += ["grouped"] if not is_linear and x.dtype == torch.float32 else []
    # norms include what sums over up to 512 positions may lose; sums by these norms are exact
    room = 1e-12 if x.dtype == torch.float64 else 1e-3
    for way, is_kept in ((way, is_kept) for way in ways for is_kept in (False, True)):
        if way == "gram" and is_kept:
            continue
        source = BookkeepingGradientSource(net)
        with forced(way, is_kept):
            found, theirs = clipped(source, net, x, weights, clip)
        of = norms if x.dtype == torch.float64 else theirs.double()  # theirs are float32
        error = float((found - clipped_rows(rows, clip, of)).norm())
        assert error <= min(room, 2e-6) * float((factor * terms).sum())
        assert (theirs <= (1 + 2**-23) * norms + room * terms).all()
        assert (theirs >= (1 - 2**-23) * norms - min(room, 2e-6) * terms).all()
        source.remove()


@pytest.mark.parametrize("name", ["linear", "sequence", "cnn", "embedding", "tied embedding"])
@pytest.mark.parametrize("options", ["diagonal", "full", "scaled"])
@pytest.mark.parametrize("source_of", [BookkeepingGradientSource, VmapGradientSource])
def test_second_moments_and_scales(name, options, source_of):
    net, x = zoo.made(name, dtype=torch.float64)
    d = sum(p.numel() for p in net.parameters())
    if d > 2000 and options == "full":
        pytest.skip("d × d is large")
    weights, arguments = weights_of(net, x, 1.2), {}
    rows = in_double(net, x, weights)
    if options == "scaled":
        scale = arguments["scale"] = torch.rand(d, dtype=torch.float64) + 0.5
        rows = rows / scale
    rows = rows * (0.8 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    moment = torch.zeros((d, d) if options == "full" else d, dtype=torch.float64)
    source = source_of(net)
    total, _ = clipped(source, net, x, weights, 0.8, second_moment=moment, **arguments)
    expected = rows.T @ rows if options == "full" else rows.square().sum(0)
    for mine, true in ((total, rows.sum(0)), (moment, expected)):
        assert float((mine - true).norm()) <= 1e-12 * float(true.norm())


def test_squares_of_a_huge_gradient_are_those_of_its_direction():
    """Its squares are beyond float32, though it is finite."""
    net, x = nn.Linear(6, 3, bias=False), torch.randn(9, 6)
    x[0] *= 1e12
    weights = weights_of(net, x, 1.0)
    weights[0] *= 1e10
    moment = torch.zeros(18)
    source = BookkeepingGradientSource(net)
    clipped(source, net, x, weights, 1e-3, second_moment=moment)
    assert float(moment.sum()) == pytest.approx(len(x) * 1e-6, rel=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [n for n, (_, shape) in zoo.LAYERS.items() if shape is not None])
def test_a_record_that_is_not_finite_contributes_nothing(name, broken):
    net, x = zoo.made(name)
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


# -- programs and losses ---------------------------------------------------------------------------


OF_PROGRAMS = [*zoo.PROGRAMS, "linear", "cnn", "instance norm 2d", "language model"]


@slow_rules
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in OF_PROGRAMS for mode in SOURCES),
        *((name, "hooks") for name in ("one layer", "cnn", "Opacus' LSTM")),
        *(
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name in zoo.PUBLISHED
            for mode in SOURCES
        ),
    ],
)
def test_programs_run_by_construction(name, mode):
    if name in zoo.PUBLISHED:
        make, inputs = zoo.PUBLISHED[name]
        net, given = make().double(), inputs(5)
        for module in net.modules():  # whose random numbers a record would not draw again alone
            for attribute in ("p", "dropout", "attn_dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
    else:
        net, given = zoo.made(name, 7)
        given = (given,)
    data = (*given, torch.randint(3, (len(given[0]),)))
    gradients = gradients_of_records(net, entropy, data)
    clip = middle_norm(gradients)
    options = {"grad_sample_mode": mode, "assume_independent_records": mode == "hooks"}
    net, optimizer, loader = private(net, *data, clip=clip, **options)
    assert optimizer.independence.startswith(
        "as the user" if mode == "hooks" else "by construction"
    )
    for batch in loader:
        entropy(net, *batch).backward()
        assert_sum(optimizer.release.source, net, gradients, clip)


CASES = [
    (name, way, mode)
    for k, (name, usual) in enumerate(USUAL.items())
    for way in ("followed", "vouched", *(["given"] if usual.of_output else []))
    for mode in SOURCES
    if mode == "bookkeeping" or k % 6 == 0 or not usual.is_plain
]


@slow_rules
@pytest.mark.parametrize(("name", "way", "mode"), CASES)
def test_a_usual_loss_runs_as_it_is(name, way, mode):
    """Followed, of whole batches that are vouched for, or inside the map; its value, too."""
    usual = USUAL[name]
    net, data = usual.model(), usual.data()
    gradients = gradients_of_records(net, usual.loss, data)
    clip = middle_norm(gradients)
    expected = clipped_rows(gradients, clip)
    with torch.no_grad():
        whole = [usual.loss(net, *(t[i : i + 1] for t in data)) for i in range(len(data[0]))]
    options = {"loss_reduction": usual.loss_reduction, "assume_independent": way == "vouched"}
    if way == "given":
        options["loss"] = usual.of_output
    source = SOURCES[mode](net, **options)
    batch = data if way == "vouched" else delivered(*data)
    loss = net.private_loss(*batch) if way == "given" else usual.loss(net, *batch)
    loss.backward()
    found = sum_of(source, net, clip)
    if way == "given":  # in eval mode it is the loss of the batch
        with torch.no_grad():
            evaluated = net.eval().private_loss(*data)
        torch.testing.assert_close(evaluated, usual.loss(net, *data).detach())
    source.remove()
    assert found.isfinite().all()
    if not usual.draws:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        total = torch.stack(whole).sum() / (len(whole) if usual.loss_reduction == "mean" else 1)
        assert float(loss.detach()) == pytest.approx(float(total), rel=1e-4, abs=1e-5)


@slow_rules
def test_a_given_loss_of_a_model_whose_arguments_the_first_pass_shows():
    net, data = nn.Bilinear(3, 3, 4), (torch.randn(7, 6), torch.randint(4, (7,)))
    gradients = gradients_of_records(
        net, lambda net, x, y: nn.functional.cross_entropy(net(x[:, :3], x[:, 3:]), y), data
    )
    net, optimizer, loader = private(net, *data, loss=nn.functional.cross_entropy)
    for x, y in loader:
        net.private_loss(x[:, :3], x[:, 3:], y).backward()
        assert_sum(optimizer.release.source, net, gradients)


@pytest.mark.parametrize("mode", SOURCES)
@pytest.mark.parametrize("is_vouched", [False, True])
def test_empty_batches_add_nothing(mode, is_vouched):
    for name in ("cross entropy", "Normal", "segmentation", "language model, two terms", "elbo"):
        usual = USUAL[name]
        net, data = usual.model(), tuple(t[:0] for t in usual.data())
        source = SOURCES[mode](net, assume_independent=is_vouched)
        usual.loss(net, *(data if is_vouched else delivered(*data, shown=3))).backward()
        named = list(net.named_parameters())
        out = [torch.ones(p.numel()) for _, p in named]
        assert source.norms(named).shape == (0,)
        assert source.add_clipped_sum(named, 1.0, out, beta=0.0) == 0
        assert not torch.cat(out).any()
        source.remove()
