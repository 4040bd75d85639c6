"""One change of an accountant at a time, among threads, signal handlers and forked children."""

from __future__ import annotations

import os
import threading
import weakref


class Gate:
    """A lock for threads, and a mark for signal handlers that a change is under way.

    Attributes:
        lock: taken by whoever reads or changes. It is free in a forked child, also if another
            thread held it at the moment of the fork.
        is_busy: whether the thread that holds the lock is changing something.
    """

    def __init__(self) -> None:
        self.renew()
        _gates.add(self)

    def renew(self) -> None:
        """Opens the gate, whoever went through it."""
        self.lock, self.is_busy = threading.RLock(), False


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def _renew_all() -> None:
    for gate in _gates:
        gate.renew()


if hasattr(os, "register_at_fork"):  # else there is no fork
    os.register_at_fork(after_in_child=_renew_all)
