"""Accountants and generators of the tests of audits."""

import numpy as np
import torch

import torch_dpbayes as dpb


def fresh():
    """A generator of NumPy's that the test's seed decides."""
    return np.random.default_rng(torch.randint(2**62, ()).item())


def charged(*events, **options):
    accountant = dpb.PrivacyAccountant(**options)
    for event in events:
        accountant.compose(event)
    return accountant
