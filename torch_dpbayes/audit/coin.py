"""The auditor's own randomness, which the training never sees and never feeds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_AUDIT = 0x61756469  # keeps a seed that the training uses too from giving equal numbers

Coins = npt.NDArray[np.bool_]


def auditor(seed: int | None) -> np.random.Generator:
    """A generator of NumPy's own kind; None: from the operating system's entropy."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng([_AUDIT, seed])


def toss(canaries: int, generator: np.random.Generator) -> Coins:
    """A fair coin for each canary: whether it is in the data."""
    return generator.integers(0, 2, size=canaries, dtype=np.int8).astype(bool)
