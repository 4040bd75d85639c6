"""Private counterparts of what ``pyro.infer`` offers beside Markov chains."""

from .svi import DPSVI

__all__ = ["DPSVI"]
