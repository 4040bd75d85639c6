"""One caller at a time at a history, among threads, signal handlers, forked children and the end of
the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import Any, TypeVar

from .charging import Charging, ChargingInMemory, Run
from .events import DpEvent
from .gate import Gate
from .history import Settings
from .ledger import Ledger, LedgerError, Session
from .ledger_charging import ChargingAtLedger
from .termination import end_if_due, give_back_when_terminated

_IN_THE_MIDDLE = (
    "this accountant was called from within one of its own charges, which only a signal handler can"
    " do: let the handler raise SystemExit or KeyboardInterrupt instead; reserved steps are"
    " returned."
)

T = TypeVar("T")


class Access:
    """Hands what is known of a history to one caller at a time, and gives back what is reserved
    when nobody can ask for it any more.

    Args:
        settings: budget, method and relation.
        session: the process' place at a ledger; ``None`` in memory.

    Attributes:
        charging: what is known, as it was last read.
    """

    def __init__(self, settings: Settings, session: Session | None) -> None:
        self._gate = Gate()
        self._run: Run | None = None
        self._begin(settings, session)
        # what was unpickled in a fork server's worker before it forgets finalizers
        util.register_after_fork(self, Access._settle_at_exit)
        if session is not None:
            give_back_when_terminated(self)

    @property
    def lock(self) -> Any:
        """Held by whoever looks at :attr:`charging` more than once."""
        return self._gate.lock

    @property
    def session(self) -> Session | None:
        """The process' place at a ledger."""
        return self.charging.session

    @property
    def ledger(self) -> Ledger | None:
        """The file, if there is one."""
        return None if self.session is None else self.session.ledger

    def _begin(self, settings: Settings, session: Session | None) -> None:
        self._run = None
        self.charging: Charging = (
            ChargingInMemory(settings) if session is None else ChargingAtLedger(settings, session)
        )
        self.charging.refresh()
        self._settle_at_exit()

    def _settle_at_exit(self) -> None:
        """Also in children of multiprocessing; but nothing of another process."""
        if self.session is not None and self.charging.process == os.getpid():
            util.Finalize(self, _settle_quietly, (self.session, self._gate), exitpriority=100)

    def _current(self, *, charging: bool = False) -> Charging:
        """What is known of the history; begun anew from the file in a forked child, and after
        an interruption.
        """
        known = self.charging
        if os.getpid() == known.process and not known.stale:
            return known
        if known.session is None:
            if charging:
                raise RuntimeError(
                    "this accountant was forked into another process, where a charge would be lost"
                    " to its parent: make it with PrivacyAccountant(..., path='budget.db'), or give"
                    " every process an accountant with a share of the budget."
                )
            return known
        known.settle()
        ledger = Ledger(known.session.ledger.path, {"id": known.session.ledger.id})
        session = Session(ledger, known.session.job, known.session.later)
        self._begin(known.history.settings, session)
        return self.charging

    def read(self) -> Charging:
        """What is known of the history, and what other processes charged since. Under
        :attr:`lock`.
        """
        if self._gate.is_busy:
            raise RuntimeError(_IN_THE_MIDDLE)
        if self._run is not None:
            self.charging.enter(self._run)
        charging = self._current()
        charging.refresh()
        return charging

    def change(self, change: Callable[[Charging], T], *, charging: bool = True) -> T:
        """One change at a time: threads wait for each other, and what a signal handler starts
        in the middle of one is refused.
        """
        with self._gate.lock:
            if self._gate.is_busy:
                raise RuntimeError(_IN_THE_MIDDLE)
            self._gate.is_busy = True
            try:
                if self._run is not None:
                    self.charging.enter(self._run)
                    self._run = None
                return change(self._current(charging=charging))
            finally:
                self._gate.is_busy = False
                end_if_due()

    @property
    def is_in_the_middle(self) -> bool:
        """Whether a signal handler that asks came in the middle of a change."""
        if not self._gate.lock.acquire(blocking=False):
            return False  # another thread's
        try:
            return self._gate.is_busy
        finally:
            self._gate.lock.release()

    def settle_for_good(self, timeout: float) -> None:
        """Gives back what this process reserved, unless a charge is still being made after
        ``timeout`` seconds. From then on no other thread charges.
        """
        if self._gate.lock.acquire(timeout=timeout) and self.charging.process == os.getpid():
            self.change(lambda charging: charging.settle(), charging=False)

    # --- repetitions ------------------------------------------------------------------------------

    def will_repeat(self, run: Run | None) -> None:
        """The next charges may be taken out of ``run``, by :meth:`repeated`. In a change."""
        self._run = run

    def repeated(self, event: DpEvent, count: int, label: str | None, adaptive: bool) -> bool:
        """Whether this charge was the last one again, and is recorded now."""
        run = self._run
        if (
            run is None
            or type(count) is not int
            or count != 1
            or label != run.label
            or adaptive is not run.adaptive
            or not (event is run.event or event == run.event)
        ):
            return False
        with self._gate.lock:
            process, charging = os.getpid(), self.charging
            # No call from here on, so no signal handler: what is checked holds when it is used.
            if (
                run is self._run
                and run.block.left > 0
                and run.block.open
                and process == charging.process
                and not (charging.stale or self._gate.is_busy)
            ):
                run.block.left -= 1
                run.taken += 1
                return True
        return False

    @property
    def known_releases(self) -> int:
        """How many this process knows of, without reading the file."""
        taken = 0 if self._run is None else self._run.taken
        return sum(self.charging.history.charges.values()) + taken


def _settle_quietly(session: Session, gate: Gate) -> None:
    """At the end of the program, or of the accountant, where an error could only be printed:
    what is not returned stays charged.
    """
    with gate.lock, suppress(LedgerError, OSError):
        session.settle()
