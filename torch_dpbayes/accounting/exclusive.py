"""One caller at a time: how threads, forks and signal handlers read and change a history."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import NamedTuple, TypeVar

from ..errors import ArgumentError, DPBayesError, StateError
from ..processes import this_process
from .events import DpEvent
from .history import Block, Flag, History, Part, PrivacyBudgetExceeded
from .ledger import LOCK
from .session import SHARE, Session

_IN_THE_MIDDLE = (
    "a signal handler called this accountant during a charge: let the handler raise SystemExit or"
    " KeyboardInterrupt instead; reserved steps are returned."
)
# Whether a charge is being made: beside the lock, which a handler in the same thread can take.
_is_busy = False

T = TypeVar("T")


class _Run(NamedTuple):
    """A charge that is made again and again, out of a block and without a decision."""

    event: DpEvent
    part: Part
    label: str | None
    adaptive: bool
    flag: Flag
    block: Block


class Exclusive:
    """A history that one caller at a time reads or changes."""

    def __init__(self, session: History) -> None:
        self.session = session
        self._run: _Run | None = None
        self._last: DpEvent | None = None
        self._settle_at_exit()
        # what was unpickled in a fork server's worker before it forgets finalizers
        util.register_after_fork(self, Exclusive._settle_at_exit)

    def _settle_at_exit(self) -> None:
        """Also in children of multiprocessing; but nothing of another process."""
        if self.session.path is not None and self.session.process == this_process():
            util.Finalize(self, _settle_quietly, (self.session,), exitpriority=100)

    def read(self, what: Callable[[History], T]) -> T:
        """The history, with the latest charges of other processes."""
        with LOCK:
            if _is_busy:
                raise StateError(_IN_THE_MIDDLE)
            while True:
                session = self._begin()
                session.refresh()
                if session is self.session:  # else a signal's handler began anew
                    session.stale = False
                    return what(session)

    def change(self, change: Callable[[History], T]) -> T:
        """One change at a time: what a signal handler starts in the middle of one is refused."""
        global _is_busy
        with LOCK:
            if _is_busy:
                raise StateError(_IN_THE_MIDDLE)
            _is_busy = True
            try:
                session = self._begin()
                self._run = None
                try:
                    found = change(session)
                except (PrivacyBudgetExceeded, ArgumentError):  # a refusal changes nothing
                    session.stale = False
                    raise
                session.stale = False
                return found
            finally:
                _is_busy = False

    def _begin(self) -> History:
        """The session, which is stale until what follows is done: after an interruption and in a
        forked child it begins anew from the file. (In memory an interruption may count
        repetitions twice.)
        """
        global _is_busy
        session = self.session
        if isinstance(session, Session) and (session.stale or session.process != this_process()):
            was_busy, _is_busy = _is_busy, True
            try:
                session, self._run = session.begun_anew(), None
            finally:
                _is_busy = was_busy
            self.session = session
            self._settle_at_exit()
        session.stale = True
        if self._run is not None and self._run.block.taken:
            run = self._run
            part = run.part._replace(times=run.block.taken)
            session.taken(run.block, part, run.label, run.flag)
            run.block.taken = 0
        return session

    def repeated(self, event: DpEvent, count: int, label: str | None, adaptive: bool) -> bool:
        """Whether this charge was the last one again, and is recorded now."""
        run = self._run
        if run is None or type(count) is not int or count != 1 or label != run.label:
            return False
        if adaptive is not run.adaptive or not (event is run.event or event == run.event):
            return False
        with LOCK:
            session, block, process = self.session, run.block, this_process()
            # No call from here on, so no signal handler: what is checked holds when it is used.
            is_sound = session.process == process and not (session.stale or _is_busy)
            if run is self._run and block.left > 0 and block.open and is_sound:
                block.left -= 1
                block.taken += 1
                return True
        return False

    def charge(self, event: DpEvent, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge of ``parts``, which ``event`` consists of."""

        def charged(session: History) -> None:
            if session.process != this_process():
                raise StateError(
                    "this accountant was forked into another process, and its parent would not see"
                    " the charges: make it with PrivacyAccountant(..., path='budget.db'), or give"
                    " each process an accountant with a share of the budget."
                )
            session.charge(parts, label, adaptive)
            # Known events, whose numbers cannot change, are one object each time.
            first, was, self._last = parts[0], self._last, parts[0].event
            if len(parts) == 1 and first.times == 1 and first.event is was:
                block = session.block_for(first.pair)
                if block is not None and block.left >= SHARE:
                    self._run = _Run(event, first, label, adaptive, session.flag(adaptive), block)

        self.change(charged)


def _settle_quietly(session: Session) -> None:
    """At the end of the program, or of the accountant, where an error could only be printed:
    what is not returned stays charged.
    """
    global _is_busy
    with LOCK, suppress(DPBayesError, OSError):
        if not _is_busy:  # else an accountant is collected in the middle of a charge
            was_stale, session.stale, _is_busy = session.stale, True, True
            try:
                session.settle(in_doubt=was_stale)
            finally:
                _is_busy = False
            session.stale = was_stale
