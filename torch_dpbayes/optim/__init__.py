"""Noisy gradient -> new parameters: ``torch.optim.Optimizer`` subclasses, one algorithm a file."""

from .sgld import DPSGLD

__all__ = ["DPSGLD"]
