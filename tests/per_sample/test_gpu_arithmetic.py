"""What a GPU would choose, on the CPU: norms never too small, few launches."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import delivered
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from test_bookkeeping import H200, T4, on
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torch_dpbayes as dpb
from torch_dpbayes.per_sample import arithmetic, contributions
from torch_dpbayes.per_sample.arithmetic import Machine
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.gradient_source import add_clipped


@examples(60)
@example((1, 1), 2, (-10, -30), 1.0, False, torch.float32, 0)  # norms below float32's normal ones
@given(
    widths=st.tuples(st.sampled_from([1, 3, 70, 200]), st.sampled_from([1, 5, 130])),
    positions=st.integers(2, 9),
    powers=st.tuples(st.integers(-30, 8), st.integers(-30, 8)),
    closeness=st.sampled_from([1.0, 1e-2, 1e-4, 0.0]),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_norms_in_float32_are_never_too_small(
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
    assert (norm >= truth * (1 - 2**-22)).all()
    lost = 2**-16 if dtype == torch.bfloat16 else 2**-23 * positions
    assert (norm <= truth * (1 + 2**-20) + lost * terms + 2e-17).all()


@pytest.mark.parametrize("machine", [None, H200], ids=["CPU", "H200"])
@examples(60)
@given(
    positions=st.sampled_from([0, 1, 2, 9]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
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
            assert max(norm - 2 * lost, 0.0) ** 2 <= squared * (1 + 4 * ulp) + 2 * off + 1e-70
            if size <= 2**10 * norm:
                out = torch.zeros(table.numel(), dtype=arithmetic.wide(table))
                tied.add_sum(F.one_hot(torch.tensor(i), n).to(out.dtype), {table: out})
                # off is 2⁻²⁸ of norm² at most; a sum of ten terms has four roundings of each
                longest = norm * (1 + 2 * ulp + 2**-28) + 4 * ulp * size
                assert float(out.double().norm()) <= longest


@pytest.mark.parametrize("positions", [1, 2])
def test_what_splitting_rounds_up_is_in_the_norm(positions):
    """A product of two terms of bfloat16 has 16 bits of the factor: up to 2⁻¹⁸ too many."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    a = torch.ones(1, *[positions] * (positions > 1), 1, dtype=torch.bfloat16)
    with on(H200):
        for clip in torch.rand(100, generator=torch.Generator().manual_seed(0)).tolist():
            out = {weight: torch.zeros(1)}
            add_clipped([contributions.Outer(weight, None, a, a)], clip, out)
            assert clip * (1 - 2**-15) <= float(out[weight]) <= clip * (1 + 2**-22)


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


# torch 2.12 says it once, of cycles that these profiles do not have
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
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
