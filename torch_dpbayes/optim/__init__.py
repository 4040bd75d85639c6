"""The samplers: subclasses of ``torch.optim.Optimizer``, one file for each algorithm."""

from . import schedules
from .sgfs import DPSGFS
from .sghmc import DPSGHMC
from .sgld import DPSGLD
from .sgnht import DPSGNHT

__all__ = ["DPSGFS", "DPSGHMC", "DPSGLD", "DPSGNHT", "schedules"]


def __dir__() -> list[str]:
    return sorted(__all__)
