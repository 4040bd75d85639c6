"""Small modules that make_private must take, or refuse with a message that names the module
and the remedy.
"""

from functools import partial

import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb


class Wrapped(nn.Module):
    """A linear layer before and after ``function``."""

    def __init__(self, function, width=6):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Reused(Wrapped):
    def forward(self, x):
        return self.last(F.linear(self.first(x), self.first.weight))


class TiedByModule(Wrapped):
    def forward(self, x):
        return self.last(self.first(self.first(x)))


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.linear(x) * self.scale


class Unused(Wrapped):
    def forward(self, x):
        return self.first(x)


class Counting(Wrapped):
    def __init__(self):
        super().__init__(torch.relu)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().sum()
        return super().forward(x)


class BatchSize(Wrapped):
    def forward(self, x):
        return super().forward(x) / len(x)


class Reshaping(Wrapped):
    def forward(self, x):
        return super().forward(x.view(x.shape[0], -1))


class Shortcut(Wrapped):
    def forward(self, x):
        return super().forward(x) if len(x) else x[:, :3]


class Picky(Reshaping):
    def forward(self, x):
        if (x == 1.0).all():
            raise ValueError("no ones, please")
        return super().forward(x)


class Returning(Wrapped):
    def forward(self, x):
        return super().forward(x).mean()


class Residual(Wrapped):
    def forward(self, x):
        h = self.first(x)
        return self.last(h + F.gelu(h))


class Noisy(Wrapped):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.3, self.training))


class Detached(Wrapped):
    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.mean(0).detach())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = DPMultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.attention(x, x, x)[0].mean(1))


class ZeroHead(nn.Module):
    """Mixes records behind a layer that starts at zero."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.mean(0))


class RunningMean(Wrapped):
    def __init__(self):
        super().__init__(torch.relu)
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.01)
        return super().forward(x)


class Scalar(Wrapped):
    def forward(self, x):
        return super().forward(x)[:, 0]


class PaddedTokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding, self.last = nn.Embedding(50, 6, **options), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.embedding(x.long().abs().clamp(max=49)).mean(1))


class Sorting(Wrapped):
    """Runs one layer on the records in another order; what comes out is in theirs."""

    def __init__(self, sign):
        super().__init__(torch.relu)
        self.sign = sign

    def forward(self, x):
        order = (self.sign * x[:, 0]).argsort()
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position, self.last = nn.Embedding(5, 6), nn.Linear(30, 3)

    def forward(self, x):
        return self.last((x + self.position(torch.arange(5))).flatten(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.last = (
            nn.Conv2d(2, 4, 2, stride=2),
            nn.ConvTranspose2d(4, 2, 2, stride=2),
            nn.Linear(32, 3),
        )

    def forward(self, x):
        return self.last((x + self.up(torch.relu(self.down(x)))).flatten(1))


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.last = nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.last(
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0).mean(1)
        )


def image(*layers):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(1), nn.Linear(4 * 16, 3)
    )


FLAT, IMAGE, SEQUENCE = (6,), (2, 4, 4), (5, 6)

ALLOWED = {
    "mlp": (lambda: Wrapped(torch.relu), FLAT),
    "tanh": (lambda: Wrapped(torch.tanh), FLAT),
    "layer norm": (lambda: Wrapped(nn.LayerNorm(6)), FLAT),
    "rms norm": (lambda: Wrapped(nn.RMSNorm(6)), FLAT),
    "softmax over features": (lambda: Wrapped(partial(torch.softmax, dim=1)), FLAT),
    "dropout": (lambda: Wrapped(nn.Dropout(0.5)), FLAT),
    "functional dropout": (lambda: Noisy(torch.relu), FLAT),
    "residual": (lambda: Residual(None), FLAT),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 3, bias=False)), FLAT),
    "one module twice": (lambda: TiedByModule(None), FLAT),
    "cnn": (lambda: image(nn.ReLU()), IMAGE),
    "group norm": (lambda: image(nn.GroupNorm(2, 4)), IMAGE),
    "max pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(1), nn.Linear(16, 3)
        ),
        IMAGE,
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(1), nn.Linear(20, 3)),
        SEQUENCE,
    ),
    "lstm": (Recurrent, SEQUENCE),
    "several dropouts": (
        lambda: nn.Sequential(
            nn.Dropout(0.2), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.Dropout(0.1)
        ),
        FLAT,
    ),
    "dropout of channels": (lambda: image(nn.Dropout2d(0.3), nn.Dropout(0.2)), IMAGE),
    "one number a record": (lambda: Scalar(torch.relu), FLAT),
    "padding index": (lambda: PaddedTokens(padding_idx=0), FLAT),
    "sparse gradients": (lambda: PaddedTokens(sparse=True), FLAT),
    "u-net": (UNet, IMAGE),
    "attention by hand": (OwnAttention, SEQUENCE),
    "own parameter beside a layer": (OwnParameter, FLAT),
    "view on empty batches": (lambda: Reshaping(torch.relu), FLAT),
    "a way out for empty batches": (lambda: Shortcut(torch.relu), FLAT),
    "instance norm, which torch cannot run backward on empty batches": (
        lambda: image(nn.InstanceNorm2d(4, affine=True)),
        IMAGE,
    ),
    "Opacus' attention, which cannot take empty batches": (Attention, SEQUENCE),
}

REFUSED = {
    "batch norm": (
        lambda: image(nn.BatchNorm2d(4)),
        IMAGE,
        ["'1'", "ModuleValidator.fix", "GroupNorm"],
    ),
    "batch norm without affine": (
        lambda: image(nn.BatchNorm2d(4, affine=False)),
        IMAGE,
        ["'1'", "ModuleValidator.fix"],
    ),
    "batch norm without statistics": (
        lambda: image(nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
        IMAGE,
        ["module '1'", "another record"],
    ),
    "tracked instance norm": (
        lambda: image(nn.InstanceNorm2d(4, track_running_stats=True)),
        IMAGE,
        ["'1", "ModuleValidator.fix"],
    ),
    "centring": (
        lambda: Wrapped(lambda h: h - h.mean(0)),
        FLAT,
        ["Wrapped", "before module 'last'", "another record"],
    ),
    "centring, detached": (
        lambda: Detached(None),
        FLAT,
        ["Detached", "before module 'last'", "another record"],
    ),
    "softmax over the batch": (
        lambda: Wrapped(partial(torch.softmax, dim=0)),
        FLAT,
        ["another record"],
    ),
    "sorting the batch": (lambda: Wrapped(lambda h: h.sort(0).values), FLAT, ["another record"]),
    "division by the batch size": (
        lambda: BatchSize(torch.relu),
        FLAT,
        ["BatchSize", "number of records"],
    ),
    "weight reused by F.linear": (
        lambda: Reused(None),
        FLAT,
        ["'first.weight'", "not through torch.nn.functional"],
    ),
    "parameter not used": (
        lambda: Unused(None),
        FLAT,
        ["'last.weight'", "not used", "requires_grad_"],
    ),
    "buffer changed": (Counting, FLAT, ["'Counting'", "'seen'", "without noise"]),
    "neither empty batches nor a stand-in": (
        lambda: Picky(torch.relu),
        FLAT,
        ["empty batch", "flatten(1)"],
    ),
    "gradients divided by counts": (
        lambda: PaddedTokens(scale_grad_by_freq=True),
        FLAT,
        ["'embedding'", "scale_grad_by_freq"],
    ),
    "mixing behind a zero head": (ZeroHead, FLAT, ["ZeroHead", "another record"]),
    "statistics in a frozen parameter": (RunningMean, FLAT, ["'mean'", "without noise"]),
    "one layer on sorted records": (lambda: Sorting(1.0), FLAT, ["'first'", "another order"]),
    "one layer on records sorted downwards": (
        lambda: Sorting(-1.0),
        FLAT,
        ["'first'", "another order"],
    ),
    "max_norm": (lambda: PaddedTokens(max_norm=1.0), FLAT, ["'embedding'", "max_norm"]),
    "positions shared by the batch": (Positions, SEQUENCE, ["'position.weight'", "dimension 0"]),
    "not finite on made-up records": (
        lambda: Wrapped(torch.log),
        FLAT,
        ["not finite", "example_inputs"],
    ),
    "torch's attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, batch_first=True)),
        SEQUENCE,
        ["ModuleValidator.fix"],
    ),
    "loss inside the model": (lambda: Returning(torch.relu), FLAT, ["one row per record"]),
}


def make_private(module, shape, **options):
    data = TensorDataset(torch.randn(20, *shape), torch.randint(3, (20,)))
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    return dpb.PrivacyEngine().make_private(
        module=module,
        optimizer=factory,
        data_loader=DataLoader(data, batch_size=4),
        max_grad_norm=1.0,
        **options,
    )
