"""Identify a process, so that a fork shares no sessions, noise, batches or messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

from .errors import StateError

_forks = 0  # between the first process of this program and this one
_RLock: Any = type(threading.RLock())


class Lock(_RLock):
    """A reentrant lock. A child has no thread that could let go of one that another thread held at
    the fork, and finds what was done under it half done: there it raises.
    """

    def __init__(self) -> None:
        _locks.add(self)


class _HeldAtFork(Lock):
    def __enter__(self) -> NoReturn:
        raise StateError(
            "another thread was in the middle of a step or draw when this process was forked, so"
            " it is half done here: fork before or after, or start processes by spawn.",
            code="forked",
        )


_locks = WeakSet[Lock]()


def after_fork(function: Callable[[], None]) -> None:
    """Have ``function`` called in each forked child, where a system forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _begin_child() -> None:
    global _forks
    _forks += 1
    for lock in _locks:
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock.__class__ = _HeldAtFork


after_fork(_begin_child)


def this_process() -> tuple[int, int]:
    """Which process this is among those that share its memory's past: a pid can come again in a
    descendant, a number of forks cannot.
    """
    return os.getpid(), _forks
