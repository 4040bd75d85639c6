"""A model that was checked is not checked again where nothing changed, and always where something
did.
"""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.checks import known_models
from torch_dpbayes.checks.model_state import CopiedTensor
from torch_dpbayes.clipping import layers
from torch_dpbayes.engine import gradient_sources

SCALE = 1.0


class Block(nn.Module):
    def __init__(self, width=6, factor=1.0):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.factor, self.sizes, self.table = factor, [1, 2], torch.ones(2)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.factor * SCALE + self.shift))


class Caching(Block):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.seen = 1.0
        return super().forward(x)


class NoEmptyBatch(Block):
    def forward(self, x):
        if len(x) == 0:
            raise ValueError("no rows")
        return super().forward(x)


class WholeBatch(Block):
    def forward(self, x):
        if (x.abs() > 1e30).any():  # which changes nothing for other records
            x = x.clamp(-1e30, 1e30)
        return super().forward(x)


@pytest.fixture(autouse=True)
def _forgets(monkeypatch):
    monkeypatch.setattr(known_models, "_known", type(known_models._known)(maxlen=8))


@pytest.fixture
def checks(monkeypatch):
    """How often a model was checked."""
    seen = []
    for name in ("check_model", "check_mapped_model"):
        check = getattr(gradient_sources, name)

        def counted(*args, check=check, **options):
            seen.append(check)
            return check(*args, **options)

        monkeypatch.setattr(gradient_sources, name, counted)
    return seen


def make(net, shape=(4,), **options):
    data = TensorDataset(torch.randn(20, *shape), torch.randint(3, (20,)))
    given = {
        "module": net,
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.1),
        "data_loader": DataLoader(data, batch_size=10),
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    return dpb.PrivacyEngine().make_private(**{**given, **options})


def clipped_sum(net, optimizer):
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    source = optimizer.release.source
    parameters = [p for p in net.parameters() if p.requires_grad]
    source.discard(parameters)
    F.cross_entropy(net(x), y).backward()
    out = [torch.zeros(p.numel()) for p in parameters]
    named = [(str(i), p) for i, p in enumerate(parameters)]
    assert source.add_clipped_sum(named, 0.1, out) == 5
    source.discard(parameters)
    return torch.cat(out)


@pytest.mark.parametrize("kind", [Block, NoEmptyBatch])
@pytest.mark.parametrize("mode", [None, "isolated"])
def test_an_equal_model_is_checked_once_and_trained_alike(kind, mode, checks):
    one, other = kind(), kind()
    first = make(one, grad_sample_mode=mode)
    times = len(checks)
    assert times > 0
    other.load_state_dict(one.state_dict())
    second = make(other, grad_sample_mode=mode)
    again = make(one, grad_sample_mode=mode)
    assert len(checks) == times
    assert first[1].independence == second[1].independence
    torch.testing.assert_close(clipped_sum(*again[:2]), clipped_sum(*second[:2]))
    net, optimizer, loader = second
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x[:0]), y[:0]) if kind is NoEmptyBatch else None
        optimizer.release.source.discard(list(net.parameters()))
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def frozen(net):
    net.last.bias.requires_grad_(False)
    return net


def with_frozen_value(net):
    frozen(net).last.bias.data.fill_(5.0)
    return net


def with_buffer(net):
    net.shift.fill_(1.0)
    return net


def with_hook(net):
    net.first.register_forward_hook(lambda *_: None)
    return net


def with_item(net):
    net.sizes.append(3)
    return net


def with_table(net):
    net.table = torch.zeros(2)
    return net


def shared(net):
    net.first = nn.Linear(4, 4)
    net.last = nn.Linear(4, 3)
    net.shift = torch.zeros(4)
    net.again = net.first
    return net


def forward_of_its_own(net):
    net.forward = partial(type(net).forward, net)
    return net


class Renamed(Block):
    pass


DIFFERENT = {
    "class": (Renamed, {}),
    "shape": (lambda: Block(7), {}),
    "attribute": (lambda: Block(factor=2.0), {}),
    "item of an attribute": (lambda: with_item(Block()), {}),
    "tensor that is no buffer": (lambda: with_table(Block()), {}),
    "buffer": (lambda: with_buffer(Block()), {}),
    "frozen": (lambda: frozen(Block()), {}),
    "frozen value": (lambda: with_frozen_value(Block()), {}),
    "type": (lambda: Block().double(), {"example_inputs": (torch.randn(2, 4).double(),)}),
    "hook": (lambda: with_hook(Block()), {}),
    "forward": (lambda: forward_of_its_own(Block()), {}),
    "module": (lambda: shared(Block()), {}),
    "batch size": (Block, {"data_loader": DataLoader(TensorDataset(torch.randn(20, 4)), 5)}),
    "records": (Block, {"example_inputs": (torch.randn(2, 4),)}),
    "way of computing": (Block, {"loss_reduction": "sum"}),
    "kernels": (Block, {"clipping_kernels": {"first": "instantiate"}}),
    "mode": (Block, {"grad_sample_mode": "isolated"}),
    "loss": (Block, {"loss": F.cross_entropy}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_checked(what, checks):
    make(frozen(Block()) if what == "frozen value" else Block())
    times = len(checks)
    build, options = DIFFERENT[what]
    try:
        make(build(), **options)
    except ValueError as error:  # it was looked at: the loader of "batch size" has no target
        assert "clipping_kernels" in str(error) or len(checks) > times
    assert len(checks) > times or what == "kernels"


def test_what_a_model_reads_or_runs_is_compared(checks, monkeypatch):
    make(Block())
    times = len(checks)
    own, layer = Block.forward, nn.Linear.forward
    kind = layers.KINDS[nn.LayerNorm]
    changes = [
        (globals(), "SCALE", 2.0),
        (Block, "forward", lambda self, x: own(self, x)),
        (F, "softplus", lambda x: x),
        (torch, "tanh", lambda x: torch.Tensor.tanh(x)),
        (nn.Linear, "forward", lambda self, x: layer(self, x)),
        (layers.KINDS, nn.LayerNorm, kind._replace(kernel=lambda *a: kind.kernel(*a))),
    ]
    for home, name, value in changes:
        with monkeypatch.context() as patch:
            (patch.setitem if isinstance(home, dict) else patch.setattr)(home, name, value)
            make(Block())
        assert len(checks) > times, name
        times = len(checks)
    make(Block())
    assert len(checks) == times


def test_a_model_that_mixes_since_is_found_out_again():
    class Switched(Block):
        def forward(self, x):
            return super().forward(x - x.mean(0) if self.factor == 2.0 else x)

    net = Switched()
    make(net, grad_sample_mode="hooks")
    net.factor = 2.0
    for options in ({"grad_sample_mode": "hooks"}, {}):
        with pytest.raises(ValueError, match=r"another record|mixes records"):
            make(net, **options)
        with pytest.raises(ValueError, match=r"another record|mixes records"):
            make(Switched(factor=2.0), **options)


def test_what_fills_a_cache_or_runs_in_a_mode_is_not_remembered(checks):
    for build in (Caching, Block):
        make(build())
        times = len(checks)
        if build is Caching:
            make(build())
            assert len(checks) == 2 * times
        else:
            with torch.overrides.TorchFunctionMode.__new__(_Passing):
                make(build())
            assert len(checks) > times


class _Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_records_that_are_not_kept_apart_by_construction_are_checked_every_time(monkeypatch):
    class OfTheEnvironment(WholeBatch):
        def forward(self, x):
            return super().forward(x - x.mean(0) if os.environ.get("MIXES") else x)

    make(OfTheEnvironment())
    monkeypatch.setenv("MIXES", "1")
    with pytest.raises(ValueError, match=r"another record|mixes records"):
        make(OfTheEnvironment())


def test_no_values_of_a_tensor_are_kept_and_its_type_counts(checks):
    for dtype, is_known in ((torch.int64, False), (torch.int64, True), (torch.float64, False)):
        times, net = len(checks), Block()
        net.table = torch.ones(2, dtype=dtype)
        make(net)
        assert (len(checks) == times) is is_known
    for key, _ in known_models._known:
        assert not any(
            isinstance(leaf, (torch.Tensor, CopiedTensor)) for leaf in key.leaves.values()
        )


def test_few_models_are_kept():
    for width in range(5, 16):
        make(Block(width))
    assert len(known_models._known) == 8
