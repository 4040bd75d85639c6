"""Data and models for one posterior sample, and accountants that others charge too."""

import torch

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent

RELATIONS = ("replace_one", "add_or_remove_one")


def problem(n=50, d=3):
    x = torch.randn(n, d)
    return x, (torch.rand(n) < x[:, 0].sigmoid()).float()


def glm_of(family, **options):
    extra = {"gaussian": {"noise_std": 1.0}, "poisson": {"max_count": 3.0}}.get(family, {})
    return ops.GLM(family, **{**extra, **options})


def tensors(records):
    """Features [n, 1] and targets [n] of a list of pairs."""
    x, y = zip(*records) if records else ((), ())
    return torch.tensor(x, dtype=torch.float64).reshape(-1, 1), torch.tensor(y, dtype=torch.float64)


def finite(steps=20, **options):
    return ops.FiniteRunLangevin(steps=steps, **options)


class Interrupted(PrivacyAccountant):
    """Another process charges just before this one's charge is recorded."""

    def compose(self, event, count=1, label=None, adaptive=False):
        if label is not None and label.startswith("one posterior sample"):
            super().compose(GaussianDpEvent(2.0), 3)
        return super().compose(event, count, label, adaptive)
