"""One posterior sample: a draw from a posterior is private if its certificate holds.

* ``one_posterior_sample``: computes the tempering, charges, draws, releases;
* ``certificates``: bounds on a record's influence; for a new one copy ``bounded.py``;
* ``models``: what a certificate needs from a model; ``glm`` and ``softmax``, which share
  ``linear_model``, and ``pyro_model`` implement it;
* ``langevin``, ``nuts``: the samplers;
* ``hybrid_sampling``: one posterior sample as the start of a private chain.
"""

from typing import TYPE_CHECKING, Any

from .certificates import (
    Bounded,
    Certificate,
    FiniteRunLangevin,
    RenyiClose,
    StronglyLogConcave,
    TotalVariationClose,
)
from .glm import GLM
from .langevin import Overdamped, Underdamped
from .one_posterior_sample import OnePosteriorSample
from .softmax import Softmax

if TYPE_CHECKING:
    from .hybrid_sampling import Hybrid as Hybrid
    from .hybrid_sampling import hybrid as hybrid

__all__ = [
    "GLM",
    "Bounded",
    "Certificate",
    "FiniteRunLangevin",
    "Hybrid",
    "OnePosteriorSample",
    "Overdamped",
    "RenyiClose",
    "Softmax",
    "StronglyLogConcave",
    "TotalVariationClose",
    "Underdamped",
    "hybrid",
]


def __getattr__(name: str) -> Any:
    if name not in ("Hybrid", "hybrid"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import hybrid_sampling  # loads Opacus, which takes seconds

    return getattr(hybrid_sampling, name)


def __dir__() -> list[str]:
    return sorted(__all__)
