"""What a GPU would choose, on the CPU: the same sums, norms never too small, few launches."""

import copy
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import delivered
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from test_bookkeeping import MODELS, clipped, loss_of, randomised, weights_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torch_dpbayes as dpb
from torch_dpbayes.per_sample import arithmetic, contributions
from torch_dpbayes.per_sample.arithmetic import Machine
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource

H200, T4 = Machine(2**14, True, True), Machine(2**12, True, False)


@contextmanager
def on(machine, *, tf32=False):
    """Layers take the ways of this machine."""
    with (
        mock.patch.object(arithmetic, "machine_of", lambda _: machine),
        mock.patch.object(arithmetic, "allows_tf32", lambda _: tf32),
    ):
        yield


class LanguageModel(nn.Module):
    """The table is the head's weight, as in GPT-2, and a layer is that of transformers."""

    def __init__(self, is_long=True):
        super().__init__()
        theirs = pytest.importorskip("transformers.pytorch_utils")
        self.table, self.mix = nn.Embedding(40, 12), theirs.Conv1D(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 40, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.mix.bias)

    def forward(self, x):
        return self.head(self.norm(self.mix(self.table(x)).tanh()))


def alike():
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(40, 40), nn.Tanh())])


MORE = {
    "alike linear layers, Gram": (alike, (3, 40)),
    "alike convolutions, Gram": (
        lambda: nn.Sequential(*[nn.Conv2d(24, 24, 3, padding=1) for _ in range(3)]),
        (24, 3, 3),
    ),
    "alike convolutions, unfolded": (
        lambda: nn.Sequential(*[nn.Conv1d(24, 24, 5, padding=2) for _ in range(3)]),
        (24, 40),
    ),
    "language model": (LanguageModel, None),
}


def model(name, rows=6):
    make, shape = {**MODELS, **MORE}[name]
    net = randomised(make())
    return net, torch.randint(11, (rows, 5)) if shape is None else torch.randn(rows, *shape)


def loop(net, x, weights):
    """Every record's gradient in float64."""
    exact, rows = copy.deepcopy(net).double(), []
    x = x.double() if x.is_floating_point() else x
    for i in range(len(x)):
        loss = loss_of(exact, x[i : i + 1], weights[i : i + 1].double())
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, exact.parameters())]))
    return torch.stack(rows)


@pytest.mark.parametrize("machine", [H200, T4], ids=["H200", "T4"])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_a_gpus_choices_give_the_sum_of_a_loop(name, tf32, machine):
    net, x = model(name)
    weights = weights_of(net, x, 1.2)
    each = loop(net, x, weights)
    norms = each.norm(dim=1)
    clip = float(norms.median())
    expected = (each * (clip / norms).clamp(max=1.0)[:, None]).sum(0)
    with on(machine, tf32=tf32):
        found, theirs = clipped(BookkeepingGradientSource(net), net, x, weights, clip)
    # cut to ten bits, inputs and gradients lie off by 2⁻¹⁰ each
    tolerance = 2**-9 if tf32 else 1e-4 if machine is T4 else 1e-5
    assert float((found - expected).norm()) <= tolerance * float(norms.clamp(max=clip).sum())
    torch.testing.assert_close(theirs.double(), norms, rtol=tolerance, atol=0)


@pytest.mark.parametrize("machine", [H200, T4], ids=["H200", "T4"])
@pytest.mark.parametrize("name", ["sequence", "linear", "cnn", "layer norm", *MORE])
def test_bfloat16_adds_no_more_than_the_clip_norm(name, machine):
    """One record, clipped hard: the sum is as long as the norm says, whatever was rounded."""
    net, x = model(name, 1)
    net = net.bfloat16()
    x = x.bfloat16() if x.is_floating_point() else x
    weights = weights_of(net, x, 1.0)
    with on(machine):
        source = BookkeepingGradientSource(net)
        _, norm = clipped(source, net, x, weights, 1.0)
        clip = 0.37 * float(norm)
        found, _ = clipped(source, net, x, weights, clip)
    length = float(found.double().norm())
    assert clip * (1 - 2**-7) <= length <= clip * (1 + 2e-6)


@examples(60)
@given(
    widths=st.tuples(st.sampled_from([1, 3, 70, 200]), st.sampled_from([1, 5, 130])),
    positions=st.integers(2, 9),
    powers=st.tuples(st.integers(-30, 18), st.integers(-30, 18)),
    closeness=st.sampled_from([1.0, 1e-2, 1e-4, 0.0]),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_gram_norms_of_float32_are_never_too_small(
    widths, positions, powers, closeness, has_bias, dtype, seed
):
    """Also where positions cancel, and where numbers or their squares nearly underflow."""
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(4, positions, w, generator=generator) for w in widths)
    a[:, 1] = a[:, 0] + closeness * a[:, 1]
    g[:, 1] = -g[:, 0]
    a, g = ((t * 10.0**p).to(dtype) for t, p in zip((a, g), powers, strict=True))
    layer = nn.Linear(*widths, bias=has_bias)
    with on(T4):
        found = contributions.Outer(layer.weight, layer.bias, a, g)
        norm = found.norm().double()
    each = torch.bmm(g.double().transpose(1, 2), a.double()).flatten(1)
    if has_bias:
        each = torch.cat([each, g.double().sum(1)], 1)
    truth, terms = each.norm(dim=1), found.size.double()
    # the result is rounded to float32, whose smallest number is 2⁻¹⁴⁹
    assert (norm >= truth * (1 - 2**-22) - 2**-149).all()
    assert (norm.square() <= truth.square() * 1.001 + (5e-5 * terms.square()) + 1e-70).all()


@pytest.mark.parametrize("name", ["alike convolutions, Gram", "alike linear layers, Gram"])
def test_gram_matrices_are_never_made_in_tf32(name, monkeypatch):
    """Their error is bounded by that of float32."""
    net, x = model(name)
    inside, seen = [], []

    @contextmanager
    def coarse(_device):
        inside.append(1)
        yield
        inside.pop()

    real = contributions.gram
    monkeypatch.setattr(arithmetic, "tf32", coarse)
    monkeypatch.setattr(contributions, "gram", lambda *a: seen.append(list(inside)) or real(*a))
    with on(T4, tf32=True):
        clipped(BookkeepingGradientSource(net), net, x, weights_of(net, x, 1.0), 1.0)
    assert seen and not any(seen)


def test_tied_weights_are_not_instantiated():
    net, x = model("language model")
    weights = weights_of(net, x, 1.0)
    with (
        on(H200),
        mock.patch.object(contributions.Tokens, "per_record", side_effect=AssertionError),
    ):
        clipped(BookkeepingGradientSource(net), net, x, weights, 1.0)


# -- operations of a step --------------------------------------------------------------------------

# that launch nothing
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "view reshape as_strided transpose t permute expand select slice unsqueeze squeeze detach"
        " empty empty_like empty_strided split unbind alias chunk narrow unfold flatten unflatten"
        " resize_ set_ lift_fresh resolve_conj resolve_neg _unsafe_view diagonal movedim detach_"
        " is_nonzero item _local_scalar_dense result_type contiguous view_as expand_as to"
        " split_with_sizes new_empty numpy_T swapaxes _reshape_alias"
    ).split()
)
_WAITS = frozenset(("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal"))


def operations(step):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    leaves = [
        e.name
        for e in seen.events()
        if e.name.startswith("aten::") and not any(c.name not in _VIEWS for c in e.cpu_children)
    ]
    count = Counter(leaves)
    return sum(n for k, n in count.items() if k not in _VIEWS), sum(count[k] for k in _WAITS)


def steps(net, x, y):
    """A plain and a private step of the same model."""
    other = copy.deepcopy(net)
    parameters = list(other.parameters())

    def plain():
        other.zero_grad()
        F.cross_entropy(other(x), y).backward()
        with torch.no_grad():
            gradients = [p.grad for p in parameters]
            torch._foreach_add_(gradients, [torch.randn_like(p) for p in parameters], alpha=0.1)
            torch._foreach_add_(gradients, parameters, alpha=0.1)
            torch._foreach_add_(parameters, gradients, alpha=-0.1)

    numbers = {"num_data": 100, "expected_batch_size": len(x), "max_grad_norm": 1.0}
    private = dpb.optim.DPSGLD(net.named_parameters(), 1e-4, sampling="poisson", **numbers)
    private.release.source = BookkeepingGradientSource(net)

    def ours():
        private.zero_grad()
        inputs, targets = delivered(x, y)
        F.cross_entropy(net(inputs), targets).backward()
        private.step()

    return plain, ours


def convolutional():
    layers_, width = [], 3
    for new in (16, 16, 32, 32):
        layers_ += [nn.Conv2d(width, new, 3, padding=1), nn.GroupNorm(4, new), nn.ReLU()]
        width = new
    net = nn.Sequential(*layers_, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return net, torch.randn(8, 3, 8, 8), torch.randint(10, (8,))


def transformer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            h = self.first(x)
            q, k, v = (f(h).unflatten(2, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.o(h)
            return x + self.down(F.gelu(self.up(self.second(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body = (
                nn.Embedding(50, 32),
                nn.Sequential(*[Block() for _ in range(4)]),
            )
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.body(self.table(x)).mean(1))

    return Net(), torch.randint(50, (8, 6)), torch.randint(10, (8,))


@pytest.mark.parametrize(("make", "most"), [(convolutional, 4.0), (transformer, 2.5)])
def test_a_private_step_launches_few_operations_and_waits_seldom(make, most):
    plain, ours = steps(*make())
    with on(Machine(2**26, True, True), tf32=True):
        for _ in range(2):
            plain(), ours()
        theirs, (mine, waits) = operations(plain), operations(ours)
    assert mine <= most * theirs[0]
    # norms of parameters, one look at the records, and the noise's tails on a CPU (none on a GPU)
    assert waits <= 5
