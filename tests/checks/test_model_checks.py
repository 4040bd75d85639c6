"""The models of support/model_zoo.py are taken, or refused with a message that names the
module and the remedy.
"""

import random
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from support.model_zoo import ALLOWED, FLAT, REFUSED, Wrapped, make_private
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

pytestmark = pytest.mark.usefixtures("whole_batches")


def test_there_are_at_least_thirty():
    assert len(ALLOWED) + len(REFUSED) >= 30


MODES = pytest.mark.parametrize("mode", ["hooks", "bookkeeping"])


@pytest.mark.first_cases(2)
@MODES
@pytest.mark.filterwarnings("ignore:there is no book-keeping kernel for:UserWarning")
@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name, mode):
    make, shape = ALLOWED[name]
    net = make()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    returned, optimizer, loader = make_private(net, shape, grad_sample_mode=mode)
    assert returned is net
    assert (
        all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        and net.state_dict().keys() == before.keys()
    )
    assert all(p.grad is None for p in net.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        output = net(x)
        (
            F.cross_entropy(output, y) if output.dim() > 1 else F.mse_loss(output, y.float())
        ).backward()
        optimizer.step()
    assert len(optimizer.accountant) == len(loader)


@pytest.mark.first_cases(8)
@MODES
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, mode):
    make, shape, words = REFUSED[name]
    net = make()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError) as error:
        make_private(net, shape, grad_sample_mode=mode)
    for word in words:
        assert word in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(hasattr(p, "grad_sample") for p in net.parameters())  # no hooks are left behind
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_refused_in_eval_mode():
    with pytest.raises(ValueError, match=r"model.train\(\)"):
        make_private(Wrapped(torch.relu).eval(), FLAT)


def test_the_check_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    net = Wrapped(nn.Dropout(0.5))
    data = DataLoader(
        TensorDataset(torch.zeros(20, 6), torch.zeros(20, dtype=torch.long)), batch_size=4
    )
    torch.manual_seed(5)
    dpb.PrivacyEngine().make_private(
        module=net, optimizer=partial(dpb.optim.DPSGLD, lr=0.1), data_loader=data, max_grad_norm=1.0
    )
    assert torch.equal(torch.rand(3), expected)


def test_existing_gradients_survive_the_check():
    net = Wrapped(torch.relu)
    net.first.weight.grad = torch.ones(6, 6)
    make_private(net, FLAT)
    assert torch.equal(net.first.weight.grad, torch.ones(6, 6))


def test_integer_inputs():
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(1), nn.Linear(12, 3))
    data = TensorDataset(torch.randint(50, (20, 3)), torch.randint(3, (20,)))
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    dpb.PrivacyEngine().make_private(
        module=net, optimizer=factory, data_loader=DataLoader(data, batch_size=4), max_grad_norm=1.0
    )


def test_models_that_take_something_else():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, batch):
            return self.linear(batch["features"])

    records = [{"features": torch.randn(6), "label": torch.tensor(1)} for _ in range(20)]
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    arguments = {
        "optimizer": factory,
        "data_loader": DataLoader(records, batch_size=4),
        "max_grad_norm": 1.0,
    }
    dpb.PrivacyEngine().make_private(module=Pair(), **arguments)  # a mapping is the one input
    dpb.PrivacyEngine().make_private(module=nn.Linear(6, 3), **arguments)  # or its first value is
    with pytest.raises(ValueError, match="example_inputs"):
        dpb.PrivacyEngine().make_private(module=nn.Linear(7, 3), **arguments)
    dpb.PrivacyEngine().make_private(
        module=nn.Linear(6, 3), **arguments, example_inputs=(torch.randn(2, 6),)
    )
    with pytest.raises(ValueError, match="two equal records"):
        dpb.PrivacyEngine().make_private(
            module=nn.Linear(6, 3), **arguments, example_inputs=(torch.zeros(2, 6),)
        )


# -- records that depend on one another, each in a way of its own ----------------------------------


class Before(nn.Module):
    """A linear layer, and ``output``, on what ``function`` makes of the batch."""

    def __init__(self, function, output=None, width=6, outputs=1):
        super().__init__()
        self.last = nn.Linear(width, outputs)
        self.function, self.output = function, output or (lambda y: y)

    def forward(self, x):
        return self.output(self.last(self.function(x)))


class TimeFirst(nn.Module):
    """A frozen sequence model that takes dimension 0 for time, on records in dimension 0."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.last = layer.requires_grad_(False), nn.Linear(width, 1)

    def forward(self, x):
        mask = {
            "src_mask": nn.Transformer.generate_square_subsequent_mask(len(x)),
            "is_causal": True,
        }
        y = (
            self.layer(x, **mask)
            if isinstance(self.layer, nn.TransformerEncoderLayer)
            else self.layer(x)[0]
        )
        return self.last(y.flatten(1))


class Capacity(nn.Module):
    """An expert takes the first records that choose it, and no more."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, x):
        share = self.gate(x).softmax(1)
        chosen = F.one_hot(share.argmax(1), 2)
        taken = chosen * (chosen.cumsum(0) <= max(1, 5 * len(x) // 8))
        return sum(expert(x) * (share * taken)[:, k, None] for k, expert in enumerate(self.experts))


class Trimmed(nn.Module):
    """The mean over the longest record of the batch, for padding is cut off."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, x):
        longest = max(1, int((x != 0).sum(1).max())) if len(x) else 1
        return self.last(self.embedding(x[:, :longest]).mean(1))


def centred(x):
    return x - x.mean(0)


def centred_if(condition):
    return lambda x: centred(x) if len(x) > 1 and condition() else x


def mixup(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def minus_one_of_them(x):
    return x - x[torch.randint(len(x), (1,))] if len(x) else x


def winsorised(x):
    if len(x) < 2:
        return x
    m, d = x.mean(0), x.std(0)
    return x.clamp(m - 3 * d, m + 3 * d)


def near_duplicates_masked(x):
    is_near = ((torch.cdist(x, x) < 2) & torch.ones(len(x), len(x), dtype=torch.bool).tril(-1)).any(
        1
    )
    return x * ~is_near[:, None]


def scaled_if_large(x):
    largest = x.abs().amax() if len(x) else x.new_ones(())
    return x / largest if largest > 10 else x


NUMBERS, TOKENS = torch.zeros(20, 6), torch.zeros(20, 12, dtype=torch.long)

MIXING = {
    "minus the first record": (lambda: Before(lambda x: x - x[:1]), NUMBERS),
    "running sum": (lambda: Before(lambda x: x.cumsum(0)), NUMBERS),
    "the record before": (lambda: Before(lambda x: x + x.roll(1, 0)), NUMBERS),
    "frozen LSTM": (lambda: TimeFirst(nn.LSTM(3, 8), 32), torch.zeros(20, 4, 3)),
    "frozen GRU": (lambda: TimeFirst(nn.GRU(3, 8), 32), torch.zeros(20, 4, 3)),
    "frozen causal transformer": (
        lambda: TimeFirst(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 20),
        torch.zeros(20, 5, 4),
    ),
    "frozen causal transformer with dropout": (
        lambda: TimeFirst(nn.TransformerEncoderLayer(4, 2, 8), 20),
        torch.zeros(20, 5, 4),
    ),
    "experts with a capacity": (Capacity, NUMBERS),
    "near duplicates": (lambda: Before(near_duplicates_masked), NUMBERS),
    "bytes if any is large": (
        lambda: Before(lambda x: x / 255 if len(x) and x.max() > 1 else x),
        NUMBERS,
    ),
    "shifted if any is negative": (
        lambda: Before(lambda x: (x + 1) / 2 if len(x) and x.min() < 0 else x),
        NUMBERS,
    ),
    "zeros if any is not finite": (
        lambda: Before(lambda x: x if x.isfinite().all() else torch.zeros_like(x)),
        NUMBERS,
    ),
    "only with gradients": (
        lambda: Before(lambda x: x - x.mean(0) if len(x) and torch.is_grad_enabled() else x),
        NUMBERS,
    ),
    "position in the batch": (lambda: Before(lambda x: x + torch.arange(len(x))[:, None]), NUMBERS),
    "mixup": (lambda: Before(mixup), NUMBERS),
    "a random record": (lambda: Before(minus_one_of_them), NUMBERS),
    "torch's coin": (lambda: Before(centred_if(lambda: torch.rand(()) > 0.5)), NUMBERS),
    "two coins": (
        lambda: Before(centred_if(lambda: torch.rand(()) < 0.4 and torch.rand(()) > 0.6)),
        NUMBERS,
    ),
    "Python's coin": (lambda: Before(centred_if(lambda: random.random() < 0.1)), NUMBERS),
    "NumPy's coin": (lambda: Before(centred_if(lambda: numpy.random.rand() < 0.1)), NUMBERS),
    "padding trimmed": (Trimmed, TOKENS),
    "padding trimmed, short": (Trimmed, TOKENS[:, :5]),
    "winsorised": (lambda: Before(winsorised), NUMBERS),
    "missing values imputed": (
        lambda: Before(lambda x: torch.where(x.isnan(), x.nanmean(0), x)),
        NUMBERS,
    ),
    "scaled if large": (lambda: Before(scaled_if_large), NUMBERS),
    "small integers centred": (lambda: Before(lambda x: centred(x.float() / 1e5)), NUMBERS.long()),
    "images centred": (
        lambda: Before(lambda x: centred(x.float().flatten(1) / 255), torch.relu, 16),
        torch.zeros(20, 1, 4, 4, dtype=torch.uint8),
    ),
    "large batches centred": (lambda: Before(lambda x: centred(x) if len(x) >= 8 else x), NUMBERS),
    "large batches scaled": (lambda: Before(lambda x: x / len(x) if len(x) >= 8 else x), NUMBERS),
    "dead behind ReLU": (lambda: Before(centred, torch.relu), NUMBERS),
    "dead behind a threshold": (lambda: Before(centred, lambda y: y * (y > 3)), NUMBERS),
    "saturated": (lambda: Before(lambda x: 100 * x - 50 * x.mean(0), torch.sigmoid), NUMBERS),
    "centred network": (
        lambda: nn.Sequential(Before(centred, torch.relu, outputs=8), nn.Linear(8, 1), nn.ReLU()),
        NUMBERS,
    ),
}


def attach(net, x):
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    data = DataLoader(TensorDataset(x, torch.zeros(20)), batch_size=4)
    dpb.PrivacyEngine().make_private(
        module=net, optimizer=factory, data_loader=data, max_grad_norm=1.0
    )


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused_whatever_the_parameters(name):
    make, x = MIXING[name]
    for _ in range(5):
        with pytest.raises(ValueError, match=r"depend on (another record|the number of records)"):
            attach(make(), x)


@pytest.mark.parametrize("name", ["frozen LSTM", "frozen causal transformer"])
def test_time_first_is_named(name):
    make, x = MIXING[name]
    with pytest.raises(ValueError, match=r"'layer.*batch_first=True"):
        attach(make(), x)


# -- independent records, however random, reordered or laid out ------------------------------------


class Drawing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 6), nn.Linear(6, 2), change

    def forward(self, x):
        return self.last(x + self.change(self.first(x)))


class TransposedInside(nn.Module):
    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.last = layer.requires_grad_(False), nn.Linear(width, 2)

    def forward(self, x):
        y = self.layer(x.transpose(0, 1))
        return self.last((y[0] if isinstance(y, tuple) else y)[-1])


class SortedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.last(torch.tanh(self.frozen(x[order]))[order.argsort()])


class SortedPastTheCounter(nn.Module):
    """Rows change places in the tensor that the layer before gave, whose version stays."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        order = x[:, 0].argsort()
        h.data.copy_(h.data[order])
        return self.last(self.second(h)[order.argsort()])


def test_rows_that_change_places_past_the_version_counter_are_found():
    with pytest.raises(ValueError, match="module 'second' sees rows in another order"):
        make_private(SortedPastTheCounter(), FLAT)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.frozen = (
            nn.Embedding(30, 4).requires_grad_(False),
            nn.LSTM(4, 5, batch_first=True).requires_grad_(False),
        )
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        if not len(x):
            return self.last(torch.zeros(0, 5))
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.last(self.frozen(packed)[1][0][-1])


class Routed(nn.Module):
    """Frozen experts, each on its own records only."""

    def __init__(self):
        super().__init__()
        self.gate, self.last = nn.Linear(6, 2).requires_grad_(False), nn.Linear(6, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)
        ).requires_grad_(False)

    def forward(self, x):
        chosen, y = self.gate(x).argmax(1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                y[chosen == k] = expert(x[chosen == k])
        return self.last(y)


class Frames(nn.Module):
    """Frozen features of single frames, which stand with their records in dimension 0."""

    def __init__(self, is_time_first):
        super().__init__()
        self.frozen = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Flatten()
        ).requires_grad_(False)
        self.last, self.is_time_first = nn.Linear(48, 2), is_time_first

    def forward(self, x):
        shape = x.shape[:2]
        if self.is_time_first:
            return self.last(
                self.frozen(x.transpose(0, 1).flatten(0, 1)[:, None])
                .unflatten(0, shape[::-1])
                .transpose(0, 1)
                .flatten(1)
            )
        return self.last(self.frozen(x.flatten(0, 1)[:, None]).unflatten(0, shape).flatten(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(40, 8), nn.Embedding(12, 8)
        self.norm, self.qkv, self.last, self.dropout = (
            nn.LayerNorm(8),
            nn.Linear(8, 24),
            nn.Linear(8, 2),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        h = self.embedding(x) + self.position(torch.arange(x.shape[1]).expand(len(x), -1))
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        return self.last((h + self.dropout(F.scaled_dot_product_attention(q, k, v))).mean(1))


class OwnGenerator(Drawing):
    def __init__(self):
        super().__init__(lambda h: h + torch.randn(len(h), 6, generator=self.generator))
        self.generator = torch.Generator()


def sequence_encoder(batch_first):
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=batch_first), 2, enable_nested_tensor=False
    )


SEQUENCES = torch.zeros(20, 5, 6)

INDEPENDENT = {
    **{name: (make, torch.zeros(20, *shape)) for name, (make, shape) in ALLOWED.items()},
    "ReLU last": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU()),
        NUMBERS,
    ),
    "deep": (
        lambda: nn.Sequential(
            *(m for _ in range(8) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())),
            nn.Linear(6, 1),
        ),
        NUMBERS,
    ),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16(),
        NUMBERS.bfloat16(),
    ),
    "normalised records": (lambda: Before(lambda x: F.normalize(x)), NUMBERS),
    "NaN to zero": (lambda: Before(lambda x: x.nan_to_num()), NUMBERS),
    "constant images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
        ),
        torch.zeros(20, 1, 4, 4),
    ),
    "dropped rows": (
        lambda: Drawing(lambda h: h * torch.empty(len(h), 1).bernoulli_(0.7)),
        NUMBERS,
    ),
    "a layer dropped by torch's coin": (
        lambda: Drawing(lambda h: h * (torch.rand(()) < 0.7)),
        NUMBERS,
    ),
    "a layer dropped by Python's coin": (
        lambda: Drawing(lambda h: h * (random.random() < 0.7)),
        NUMBERS,
    ),
    "NumPy's mask": (
        lambda: Drawing(
            lambda h: h * torch.from_numpy(numpy.random.binomial(1, 0.7, h.shape)).float()
        ),
        NUMBERS,
    ),
    "one mask for all": (lambda: Drawing(lambda h: h * torch.empty(6).bernoulli_(0.7)), NUMBERS),
    "Gaussian noise": (lambda: Drawing(lambda h: h + torch.randn_like(h)), NUMBERS),
    "Gamma noise, by rejection": (
        lambda: Drawing(lambda h: h + torch.distributions.Gamma(h.abs() + 0.1, 1.0).sample()),
        NUMBERS,
    ),
    "randomised ReLU": (lambda: Drawing(lambda h: F.rrelu(h, training=True)), NUMBERS),
    "a sampled category": (
        lambda: Drawing(lambda h: h + torch.multinomial(h.softmax(1), 1)),
        NUMBERS,
    ),
    "a generator of its own": (OwnGenerator, NUMBERS),
    "frozen LSTM, time first": (
        lambda: TransposedInside(nn.LSTM(6, 4, 2, dropout=0.3), 4),
        SEQUENCES,
    ),
    "frozen LSTM, time first, as long as a batch": (
        lambda: TransposedInside(nn.LSTM(6, 4, 2, dropout=0.3), 4),
        torch.zeros(20, 33, 6),
    ),
    "frozen transformer, time first": (
        lambda: TransposedInside(sequence_encoder(False), 6),
        SEQUENCES,
    ),
    "sorted": (SortedInside, NUMBERS),
    "packed": (Packed, TOKENS),
    "routed": (Routed, NUMBERS),
    "frames": (lambda: Frames(False), torch.zeros(20, 3, 4, 4)),
    "frames, time first": (lambda: Frames(True), torch.zeros(20, 3, 4, 4)),
    "transformer": (Transformer, TOKENS),
    "one-hot": (
        lambda: Before(lambda x: F.one_hot(x, 10).flatten(1).float(), width=60),
        NUMBERS.long(),
    ),
}


@pytest.mark.first_cases(1)
@pytest.mark.filterwarnings("ignore:there is no book-keeping kernel for:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:RNN module weights are not part of single contiguous chunk:UserWarning"
)
@pytest.mark.parametrize("name", [name for name in INDEPENDENT if name not in ALLOWED])
def test_independent_records_are_let_through_whatever_the_parameters(name):
    make, x = INDEPENDENT[name]
    attach(make(), x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:there is no book-keeping kernel for:UserWarning")
def test_no_false_alarm_in_two_hundred_tries():
    for k in range(200):
        make, x = list(INDEPENDENT.values())[k % len(INDEPENDENT)]
        attach(make(), x)


def test_values_that_a_model_refuses_are_not_held_against_it():
    def refusing(x):
        assert torch.isfinite(x).all() and (x.abs() < 100).all()
        return x

    attach(Before(refusing), NUMBERS)


def test_a_model_that_remembers_is_refused():
    net = Before(lambda x: x)
    passes = iter(range(10**6))
    net.output = lambda y: y * next(passes)
    with pytest.raises(ValueError, match="another output when it is run again"):
        attach(net, NUMBERS)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:there is no book-keeping kernel for:UserWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
def test_spectral_norm_is_told_what_to_do_instead(norm):
    with pytest.raises(
        ValueError,
        match=r"power iteration of spectral_norm.*remove_parametrizations.*after optimizer.step",
    ):
        attach(nn.Sequential(nn.Linear(6, 6), norm(nn.Linear(6, 2))), NUMBERS)


def test_a_model_that_never_responds_is_told_so():
    with pytest.raises(ValueError, match=r"no parameter has a gradient.*example_inputs"):
        attach(Before(lambda x: x, lambda y: y * (y > 1e9)), NUMBERS)


@pytest.mark.thorough
def test_the_check_leaves_the_generators_of_python_and_numpy_alone():
    expected = random.getstate(), numpy.random.get_state()[1].tolist()
    attach(Drawing(lambda h: h * random.random() * numpy.random.rand()), NUMBERS)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == expected
    net = OwnGenerator()
    state = net.generator.get_state()
    attach(net, NUMBERS)
    assert torch.equal(net.generator.get_state(), state)
