"""The smallest private training there is, and batches as the loader delivers them."""

import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.per_sample.followed import Followed
from torch_dpbayes.per_sample.operations import Delivery


def private(net, data, batch_size, *, lr=0.1, engine=None, loader=None, **options):
    """Model, optimizer and loader: DPSGLD at a clip norm of 1, where ``options`` say nothing else;
    ``loader``: arguments of the data loader.
    """
    given = {
        "module": net,
        "optimizer": partial(dpb.optim.DPSGLD, lr=lr),
        "data_loader": DataLoader(data, batch_size, **(loader or {})),
        "max_grad_norm": 1.0,
    }
    engine = dpb.PrivacyEngine() if engine is None else engine
    return engine.make_private(**{**given, **options})


def made_private(**options):
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    return private(nn.Sequential(nn.Linear(3, 1)), data, 5, **{"noise_multiplier": 1.0, **options})


def recorded(mode):
    """Arguments of make_private for one way to record per-sample gradients."""
    return {"grad_sample_mode": mode, "assume_independent_records": mode == "hooks"}


def deliver(*tensors):
    """As the private loader would: the records of one batch."""
    return Delivery(len(tensors[0]))(tensors, len(tensors[0]))


def states():
    """Where the random numbers of torch, Python and NumPy stand."""
    kind, words, *place = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), words.tolist(), place


def values(delivered):
    """The records of a tensor that the private loader delivered, also before ``backward()``."""
    if not isinstance(delivered, Followed):
        return delivered
    rows = delivered._rows.detach().flatten(0, 1)
    return rows[: len(rows) - delivered._batch.spare]
