"""What tests of frameworks share: a small private run, a run that ends in an error, and what
Lightning warns of in small runs.
"""

from contextlib import nullcontext

import pytest
import torch
from support.training import private
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb

RECORDS, BATCH, DELTA = 60, 10, 1e-4


def made(engine=None, **options):
    """Engine, model, optimizer and loader."""
    data = TensorDataset(torch.randn(RECORDS, 4), torch.randint(3, (RECORDS,)))
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = engine or dpb.PrivacyEngine()
    options = {"noise_multiplier": 2.0, "lr": 0.05, **options}
    return engine, *private(net, data, BATCH, engine=engine, **options)


def moves_nothing(run, engine, net, is_told=True):
    """``run`` raises an error, if anything ``is_told``; nothing is charged, and no parameter
    moves.
    """
    start = [p.detach().clone() for p in net.parameters()]
    with pytest.raises((RuntimeError, ValueError)) if is_told else nullcontext():
        run()
    assert all(map(torch.equal, start, net.parameters()))
    assert len(engine.accountant) == 0


LIGHTNING_WARNS = [
    pytest.mark.filterwarnings(f"ignore:{text}:{category}")  # UserWarning or one of its kinds
    for text, category in (
        (r"`isinstance\(treespec, LeafSpec\)` is deprecated", "FutureWarning"),  # its own use
        (r"Starting from v1\.9\.0, `tensorboardX` has been removed", "UserWarning"),  # its logger
        (
            r"The number of training batches \(4\) is smaller than the logging interval",
            "UserWarning",
        ),
        (r"The 'train_dataloader' does not have many workers", "UserWarning"),
        (r"GPU available but not used\.", "UserWarning"),
    )
]
