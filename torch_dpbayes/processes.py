"""Identify a process, so that a forked child shares no sessions, noise, batches or messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

from .errors import StateError

_forks = 0  # how many forks lie between the program's first process and this one
_RLock: Any = type(threading.RLock())


class Lock(_RLock):
    """A reentrant lock. If another thread holds it at a fork, the child can never acquire it, and
    the work under it is half done in the child: acquiring it there raises.
    """

    def __init__(self) -> None:
        _locks.add(self)


class _HeldAtFork(Lock):
    def __enter__(self) -> NoReturn:
        raise StateError(
            "this process was forked while another thread made a step or draw, so it is half done"
            " here: fork before or after it, or start processes by spawn.",
            code="forked",
        )


_locks = WeakSet[Lock]()


def after_fork(function: Callable[[], None]) -> None:
    """Call ``function`` in each forked child, on systems that fork."""
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
    """Identifies this process among its ancestors and descendants: a pid can occur again in a
    descendant, but not with the same number of forks.
    """
    return os.getpid(), _forks
