"""SIGTERM, by which schedulers end programs: what was reserved and not used is given back first.

Only where nobody else answers to the signal and Python can: the default action is in force, and
the main thread asks. The program ends by the same signal as it would without us; one that never
comes back to Python ends by the scheduler's SIGKILL instead, and what it had reserved stays
charged, as it would have.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from contextlib import suppress
from types import FrameType
from typing import Protocol

_SECONDS = 5.0  # to wait for charges that other threads are making


class Holder(Protocol):
    """What has something reserved."""

    @property
    def is_in_the_middle(self) -> bool:
        """Whether this very thread is changing it."""

    def settle_for_good(self, timeout: float) -> None:
        """Gives back what is reserved, unless it is being changed longer than ``timeout``."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_is_due = False  # the signal came in the middle of a change, at whose end the program ends


def give_back_when_terminated(holder: Holder) -> None:
    """From now on, until nobody needs ``holder`` any more, in this process and those forked."""
    _holders.add(holder)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, _end)


def end_if_due() -> None:
    """At the end of a change."""
    if _is_due:
        _end(signal.SIGTERM, None)


def _end(number: int, _: FrameType | None) -> None:
    global _is_due
    holders = list(_holders)
    if any(holder.is_in_the_middle for holder in holders):
        _is_due = True
        return
    end = time.monotonic() + _SECONDS
    for holder in holders:
        with suppress(Exception):  # what is not given back stays charged
            holder.settle_for_good(max(end - time.monotonic(), 0.0))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
