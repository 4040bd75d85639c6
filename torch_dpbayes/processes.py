"""Which process this is, for all that a fork must not share: sessions, noise, batches, messages."""

from __future__ import annotations

import os
from collections.abc import Callable

_forks = 0  # between the first process of this program and this one


def after_fork(function: Callable[[], None]) -> None:
    """Have ``function`` called in each forked child, where a system forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _count_fork() -> None:
    global _forks
    _forks += 1


after_fork(_count_fork)


def this_process() -> tuple[int, int]:
    """Which process this is among those that share its memory's past: a pid can come again in a
    descendant, a number of forks cannot.
    """
    return os.getpid(), _forks
