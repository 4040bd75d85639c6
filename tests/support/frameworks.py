"""What tests of frameworks share: a small private run, a run that ends in an error, and what
Lightning warns of in small runs: its exact texts, nothing broader.
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
    options = {"engine": engine or dpb.PrivacyEngine(), "noise_multiplier": 2.0, **options}
    return options["engine"], *private(net, data, BATCH, lr=0.05, **options)


def moves_nothing(run, engine, net, is_told=True):
    """``run`` raises an error, if anything ``is_told``; nothing is charged, and no parameter
    moves.
    """
    start = [p.detach().clone() for p in net.parameters()]
    with pytest.raises((RuntimeError, ValueError)) if is_told else nullcontext():
        run()
    assert all(torch.equal(a, b) for a, b in zip(start, net.parameters()))
    assert len(engine.accountant) == 0


_POSSIBLE = "lightning.fabric.utilities.warnings.PossibleUserWarning"

LIGHTNING_WARNS = [
    pytest.mark.filterwarnings(f"ignore:{text}:{category}")
    for text, category in (
        # of its own use of torch
        (
            r"`isinstance\(treespec, LeafSpec\)` is deprecated, use"
            r" `isinstance\(treespec, TreeSpec\) and treespec\.is_leaf\(\)` instead\.$",
            "FutureWarning",
        ),
        # of the default logger, which the recipe takes
        (
            r"Starting from v1\.9\.0, `tensorboardX` has been removed as a dependency of the"
            r" `lightning\.pytorch` package, due to potential conflicts",
            "UserWarning",
        ),
        # of a data set of four batches
        (
            r"The number of training batches \(4\) is smaller than the logging interval"
            r" Trainer\(log_every_n_steps=50\)\.",
            _POSSIBLE,
        ),
        # most of the runs validate nothing
        (
            r"You defined a `validation_step` but have no `val_dataloader`\. Skipping val loop\.$",
            _POSSIBLE,
        ),
        # where a machine has more processors
        (
            r"The '(train|val)_dataloader' does not have many workers which may be a bottleneck\.",
            _POSSIBLE,
        ),
        # where it has a GPU, which the runs leave alone
        (r"GPU available but not used\.", _POSSIBLE),
    )
]
