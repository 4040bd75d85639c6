"""What Opacus' ``make_private`` attaches to its optimizer where it was given our accountant."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from . import events


def charging_hook(
    step: Callable[..., None], sample_rate: float, asking: FrameType | None
) -> Callable[[Any], None]:
    """A hook that charges ``step`` for every step of Opacus' optimizer.

    Args:
        step: takes ``noise_multiplier`` and ``sample_rate``.
        sample_rate: of the loader.
        asking: the frame that Opacus called, or one above it.

    Raises:
        ValueError: Opacus was told ``poisson_sampling=False``.
    """
    rate = events.sampling_rate(sample_rate)
    # Opacus asks in the same words whether it samples or not; the answer stands in the call that
    # asks
    while asking is not None:  # however deep in wrappers
        of_opacus = str(asking.f_globals.get("__name__")).partition(".")[0] == "opacus"
        if of_opacus and not asking.f_locals.get("poisson_sampling", True):
            raise ValueError(
                "poisson_sampling=False: every step would be charged as a Poisson draw, which costs"
                " far less than these batches. Leave it at True, Opacus' default, or take"
                " torch_dpbayes.PrivacyEngine, which samples itself."
            )
        asking = asking.f_back

    def hook(optimizer: Any) -> None:
        if optimizer.accumulated_iterations != 1:
            raise RuntimeError(
                f"Opacus summed {optimizer.accumulated_iterations} batches before one step, in"
                " which a record may count more than once: step after every batch, and use"
                " Opacus' BatchMemoryManager for batches that do not fit into memory."
            )
        step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

    return hook
