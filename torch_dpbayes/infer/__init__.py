"""Private counterparts of ``pyro.infer``, except Markov chains."""

from .svi import DPSVI

__all__ = ["DPSVI"]


def __dir__() -> list[str]:
    return sorted(__all__)
