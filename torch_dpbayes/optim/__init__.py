"""Noisy gradient -> new parameters: ``torch.optim.Optimizer`` subclasses, one algorithm a file."""

from . import schedules
from .sgfs import DPSGFS
from .sghmc import DPSGHMC
from .sgld import DPSGLD
from .sgnht import DPSGNHT

__all__ = ["DPSGFS", "DPSGHMC", "DPSGLD", "DPSGNHT", "schedules"]


def __dir__() -> list[str]:
    return sorted(__all__)
