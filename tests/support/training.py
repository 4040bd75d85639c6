"""The smallest private training there is, and its event."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent


def sampled(noise):
    return PoissonSampledDpEvent(0.01, GaussianDpEvent(noise))


def made_private(**options):
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    return dpb.PrivacyEngine().make_private(
        module=nn.Sequential(nn.Linear(3, 1)),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(data, batch_size=5),
        **{"max_grad_norm": 1.0, "noise_multiplier": 1.0, **options},
    )


def bare(optimizer, **options):
    given = {"lr": 0.1, "num_data": 20, "expected_batch_size": 5, "max_grad_norm": 1.0}
    return optimizer(
        nn.Linear(3, 1).named_parameters(), **{**given, "noise_multiplier": 1.0, **options}
    )
