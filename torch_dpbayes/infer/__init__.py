"""Private counterparts of what ``pyro.infer`` offers beside Markov chains."""

from ..troubleshooting import explain_all
from .svi import DPSVI

__all__ = ["DPSVI"]


explain_all(globals())


def __dir__() -> list[str]:
    return sorted(__all__)
