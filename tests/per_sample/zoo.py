"""The zoo of models: layers that book-keeping knows, programs, and models as they are published."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

FLAT, SEQUENCE, IMAGE, TOKENS = (6,), (5, 6), (2, 8, 8), None  # of one record


class Of(nn.Module):
    """``function(self, *args)`` with some layers."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args):
        return self.function(self, *args)


def of(*made):
    """A sequence of layers that are made anew each time."""
    return lambda: nn.Sequential(*copy.deepcopy(made))


def head(width=6):
    return nn.Linear(width, 3)


def around(function=torch.tanh):
    """A linear layer before and after ``function``."""
    return Of(lambda net, x: net.last(function(net.first(x))), first=nn.Linear(6, 6), last=head())


# -- layers ----------------------------------------------------------------------------------------


def twice(layer):
    return lambda: Of(lambda net, x: net.layer(net.layer(x).tanh()), layer=copy.deepcopy(layer))


def in_place(layer, function):
    """The layer three times; what comes out is changed in place, as a view or not."""

    def run(net, x):
        return net.layer(function(net.layer(function(net.layer(x)))))

    return lambda: Of(run, layer=copy.deepcopy(layer))


def tied():
    """The table is the head's weight, as in GPT-2."""
    table, last = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    last.weight = table.weight
    layers = {"table": table, "mix": nn.Linear(6, 6), "last": last}
    return Of(lambda net, x: net.last(net.mix(net.table(x)).tanh()), **layers)


def language_model():
    """With a layer of transformers, too."""
    theirs = pytest.importorskip("transformers.pytorch_utils")
    table, last = nn.Embedding(40, 12), nn.Linear(12, 40, bias=False)
    last.weight = table.weight
    layers = {"table": table, "mix": theirs.Conv1D(12, 12), "norm": nn.LayerNorm(12), "last": last}
    return Of(lambda net, x: net.last(net.norm(net.mix(net.table(x)).tanh())), **layers)


TWO_LAYERS = of(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
CONVOLUTIONS = [
    nn.Conv2d(2, 16, 3),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
]
BLOCK = [nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)]
LAYERS = {
    "linear": (TWO_LAYERS, FLAT),
    "sequence": (TWO_LAYERS, (7, 6)),
    "long sequence, Gram": (of(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300)), (4, 6)),
    "cnn": (of(*CONVOLUTIONS, nn.Flatten()), IMAGE),
    "layer norm": (of(nn.LayerNorm(6), nn.Linear(6, 3)), SEQUENCE),
    "rms norm": (of(nn.Linear(6, 6), nn.RMSNorm(6)), SEQUENCE),
    "group norm": (of(nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(2, 6)), (6, 5)),
    "instance norm 2d": (of(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), (2, 6, 6)),
    "in place": (in_place(nn.Linear(6, 6), torch.sigmoid_), FLAT),
    "in place, sequence": (in_place(nn.Linear(6, 6), F.selu_), SEQUENCE),
    "in place, instance norm": (in_place(nn.InstanceNorm1d(4, affine=True), torch.tanh_), (4, 5)),
    "a linear layer twice": (twice(nn.Linear(6, 6)), FLAT),
    "a convolution twice": (twice(nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)),
    "tied embedding": (tied, TOKENS),
    "embedding": (of(nn.Embedding(11, 6), nn.Linear(6, 3)), TOKENS),
    "language model": (language_model, TOKENS),
    "blocks": (of(nn.Embedding(11, 12), *BLOCK * 4, nn.Linear(12, 3)), TOKENS),
    "alike linear layers, Gram": (of(*[nn.Linear(40, 40)] * 3), (3, 40)),
    "alike convolutions, Gram": (of(*[nn.Conv2d(24, 24, 3, padding=1)] * 3), (24, 3, 3)),
    "alike convolutions, unfolded": (of(*[nn.Conv1d(24, 24, 5, padding=2)] * 3), (24, 40)),
    "embedding with padding": (of(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)), TOKENS),
}


# -- programs --------------------------------------------------------------------------------------


def with_positions(net, x):
    return net.head((net.first(x) + net.position(torch.arange(x.shape[1]))).tanh().mean(1))


def with_class_token(net, x):
    x = torch.cat([net.token.expand(len(x), -1, -1), net.first(x)], 1)
    x = x + net.attention(x, x, x, need_weights=False)[0]
    return net.head(F.linear(x[:, 0], net.first.weight))


def fused_attention(net, x):
    q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    y = F.scaled_dot_product_attention(q, k, v, mask)
    y = y + F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return net.head(y.transpose(1, 2).flatten(2).mean(1))


def lstm_cell(net, x):
    h = c = x.new_zeros(len(x), 6)
    for k in range(x.shape[1]):
        h, c = net.cell(x[:, k], (h, c))
    return net.head(h)


def last_of_lstm(net, x):
    return net.head(net.lstm(x)[0][:, -1])


def written_into(net, x):
    x[:, 0] = 0.0
    return net.head(net.second(net.first(x)).tanh())


def checkpointed(net, x):
    return net.head(checkpoint(net.second, net.first(x), use_reentrant=False).tanh())


def a_layers_derivative(net, x):
    return net.head(torch.func.grad(lambda x: net.first(x).tanh().sum())(x))


def collected(net, x):
    """Into memory that it makes itself."""
    states = torch.zeros(len(x), x.shape[1], 6)
    with torch.profiler.record_function("first"):
        for k in range(x.shape[1]):
            states[:, k] = net.first(x[:, k])
    return net.head(states.tanh().mean(1))


def scanned(net, x):
    sums = associative_scan(torch.add, net.first(x), dim=1, combine_mode="generic")
    return net.head(sums.tanh().mean(1))


def channels_last(net, x):
    return net.head(net.first(x.to(memory_format=torch.channels_last)).mean((2, 3)))


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), head())


def program(function, **layers):
    """With a head, and layers that are made anew each time."""
    return lambda: Of(function, **copy.deepcopy({"head": head(), **layers}))


NORMED = nn.utils.parametrizations.weight_norm
ATTENTION = nn.MultiheadAttention(6, 2, batch_first=True)
POSITIONS = {"first": nn.Linear(6, 4), "position": nn.Embedding(5, 4), "head": head(4)}
TOKEN = {"token": nn.Parameter(torch.randn(1, 1, 6)), "first": nn.Linear(6, 6)}
TWO = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)}
RRELUS = [nn.Linear(6, 6), nn.RReLU(0.3, 0.3), nn.Linear(6, 6), nn.RReLU().eval(), head()]
PROGRAMS = {
    "one layer": (head, FLAT),
    "positions": (program(with_positions, **POSITIONS), SEQUENCE),
    "class token": (program(with_class_token, attention=ATTENTION, **TOKEN), SEQUENCE),
    "Opacus' LSTM": (program(last_of_lstm, lstm=DPLSTM(6, 6, batch_first=True)), SEQUENCE),
    "torch's LSTM": (program(last_of_lstm, lstm=nn.LSTM(6, 6, 2, batch_first=True)), SEQUENCE),
    "LSTM's cell": (program(lstm_cell, cell=nn.LSTMCell(6, 6)), SEQUENCE),
    "fused attention": (program(fused_attention, qkv=nn.Linear(6, 18)), SEQUENCE),
    "checkpoint": (program(checkpointed, **TWO), FLAT),
    "input that is written into": (program(written_into, **TWO), FLAT),
    "bag": (
        program(lambda net, x: net.head(net.bag(x)), bag=nn.EmbeddingBag(20, 6, sparse=True)),
        TOKENS,
    ),
    "weight norm": (lambda: nn.Sequential(NORMED(nn.Linear(6, 6)), head()), FLAT),
    "pruned": (
        lambda: nn.Sequential(nn.utils.prune.l1_unstructured(nn.Linear(6, 6), "weight", 9), head()),
        FLAT,
    ),
    "weight norm by a hook": (old_weight_norm, FLAT),
    "rrelu": (of(*RRELUS), FLAT),
    "states in torch.zeros": (program(collected, first=nn.Linear(6, 6)), SEQUENCE),
    "scan": (program(scanned, first=nn.Linear(6, 6)), SEQUENCE),
    "channels last": (program(channels_last, first=nn.Conv2d(2, 6, 1)), IMAGE),
    "a layer's derivative": (program(a_layers_derivative, first=nn.Linear(6, 6)), FLAT),
    # what mixes records on whole batches does not here
    "centring": (lambda: around(lambda h: h - h.mean(0)), FLAT),
    "batch norm": (
        lambda: around(lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h),
        FLAT,
    ),
    "the largest record": (lambda: around(lambda h: h / h.abs().amax()), FLAT),
}


def made(name, rows=9, dtype=torch.float32, device="cpu"):
    """A model of either, its parameters drawn anew, and records for it."""
    make, shape = {**LAYERS, **PROGRAMS}[name]
    net = make().to(device, dtype)
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randint(11, (rows, 5)) if shape is None else torch.randn(rows, *shape, dtype=dtype)
    return net, x.to(device)


# -- published models, with random weights ---------------------------------------------------------

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "num_labels": 3}


class Logits(nn.Module):
    """Of images, or of token ids and an attention mask."""

    def __init__(self, kind, **settings):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind.partition('For')[0]}Config")
        self.model = getattr(transformers, kind)(config(**SMALL | settings))

    def forward(self, x, mask=None):
        return (self.model(x) if mask is None else self.model(x, attention_mask=mask)).logits


def torchvisions(kind, **options):
    return getattr(pytest.importorskip("torchvision").models, kind)(num_classes=3, **options)


def texts(n):
    mask = (torch.arange(8) < torch.randint(3, 9, (n, 1))).long()
    return torch.randint(3, 50, (n, 8)) * mask, mask


def images(size):
    return lambda n: (torch.randn(n, 3, size, size, dtype=torch.float64),)


WORDS = {"vocab_size": 50, "pad_token_id": 0}
GROUPS = {"norm_layer": partial(nn.GroupNorm, 8)}
VIT = {"image_size": 16, "patch_size": 8}
PUBLISHED = {
    "bert": (partial(Logits, "BertForSequenceClassification", **WORDS), texts),
    "gpt2": (partial(Logits, "GPT2ForSequenceClassification", n_head=2, n_embd=16, **WORDS), texts),
    # weights so large that its GELU is no other
    "bloom": (
        partial(Logits, "BloomForSequenceClassification", initializer_range=0.5, **WORDS),
        texts,
    ),
    "vit": (partial(Logits, "ViTForImageClassification", **VIT), images(16)),
    "resnet-18": (partial(torchvisions, "resnet18", **GROUPS), images(32)),
}
