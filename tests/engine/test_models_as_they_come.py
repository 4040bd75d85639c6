"""Models as people have them take a private step, in the default mode and, where that can be,
under vmap.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18
from torchvision.ops import StochasticDepth

import torch_dpbayes as dpb


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head((self.tokens(x) + places).mean(1))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.bag(x))


class BagOfOffsets(Bag):
    def forward(self, x):
        return self.head(self.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1])))


class Residual(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.drop = StochasticDepth(0.3, mode)

    def forward(self, x):
        return self.head(x + self.drop(self.branch(x)))


class LowRank(nn.Module):
    """A frozen layer with a trainable update of rank two."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def last_layer():
    net = resnet18(weights=None).requires_grad_(False)
    net.fc = nn.Linear(512, 3)
    net.train()
    [m.eval() for m in net.modules() if "BatchNorm" in type(m).__name__]
    return net


def tokens():
    return torch.randint(50, (20, 6))


def numbers():
    return torch.randn(20, 4)


CASES = {
    "position embeddings": (Positions, tokens, (None, "vmap")),
    "EmbeddingBag": (Bag, tokens, (None, "vmap")),
    "EmbeddingBag with offsets": (BagOfOffsets, tokens, (None, "vmap")),
    "stochastic depth, each record": (partial(Residual, "row"), numbers, (None,)),
    "stochastic depth, all records": (partial(Residual, "batch"), numbers, (None,)),
    "low rank": (
        lambda: nn.Sequential(LowRank(nn.Linear(4, 4)), nn.ReLU(), LowRank(nn.Linear(4, 3))),
        numbers,
        (None, "vmap"),
    ),
    "last layer": (last_layer, lambda: torch.randn(20, 3, 32, 32), (None,)),
}


@pytest.mark.first_cases(5)
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, case in CASES.items() for mode in case[2]]
)
def test_a_private_step(name, mode):
    make, inputs, _ = CASES[name]
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=make(),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs(), torch.randint(3, (20,))), 20),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        grad_sample_mode=mode,
    )
    trained = [p for p in net.parameters() if p.requires_grad]
    before = [p.clone() for p in net.parameters()]
    ((x, y),) = loader
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    assert len(optimizer.accountant) == 1
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, old) is not any(p is q for q in trained)
