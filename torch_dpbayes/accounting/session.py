"""The view of one process on a ledger: its job and its reserved releases; and mutual exclusion of
threads, forks and signal handlers that use a history.

A process charges in blocks. It reads new rows, decides outside of any transaction whether a block
of releases fits, and commits the block if the file has not changed since; otherwise it decides
again. Then it takes releases from the block in memory, so each release was on disk before it was
made. When the process ends, it returns the rest of the block.

A job is a process that opened the file, together with the processes to which its accountant was
forked or sent. Any other process that opens a file with charges is a later job: its charges may
depend on outputs.
"""

from __future__ import annotations

import logging
import os
import platform
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from multiprocessing import util
from typing import Any, NamedTuple, TypeVar

from ..errors import ArgumentError, DPBayesError, StateError
from ..processes import this_process
from . import events
from .budget import Budget
from .dominating_pairs import Pair, covers
from .events import DpEvent
from .history import RESUMED, Block, Flag, History, Key, Part, PrivacyBudgetExceeded, needed
from .ledger import LOCK, Ledger, LedgerError, Row, open_blocks

BLOCK = 64  # a process reserves at most so many releases, or half of those it has made
SHARE = 8  # a block reserves at most 1/SHARE of the releases that still fit
_LOWERED = 1.05  # if the noise falls, a block is reserved for noise that is smaller by this factor

_IN_THE_MIDDLE = (
    "a signal handler called this accountant during a charge: let the handler raise SystemExit or"
    " KeyboardInterrupt instead; reserved steps are returned."
)
# whether a charge is in progress; the lock does not show it to a handler in the same thread
_is_busy = False


T = TypeVar("T")
_log = logging.getLogger("torch_dpbayes")

# For each file the job of this process, and whether it is a later job. If a process opens a file
# again (a notebook cell that runs twice), it continues the same job.
jobs_of_this_process: dict[str, tuple[str, bool]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=jobs_of_this_process.clear)


class Session(History):
    """The view of one process on a ledger. ``job``: empty for a new job; ``later``: the ledger held
    charges when the job began.
    """

    def __init__(self, ledger: Ledger, job: str = "", later: bool = False) -> None:
        super().__init__(ledger.settings, job)
        self.ledger, self.path, self.later = ledger, ledger.path, later
        self.blocks: list[Block] = []
        self._writer = f"{uuid.uuid4().hex} pid {self.process[0]} on {platform.node()}"
        self._made: Counter[type] = Counter()  # number of releases by type of pair
        self._cost_was_told = False
        self.refresh()
        if not job:
            self.later = bool(self.counts)

    @classmethod
    def opened(cls, ledger: Ledger) -> Session:
        """The session of a process that opens the file by its path."""
        session = cls(ledger, *jobs_of_this_process.get(ledger.id, ()))
        jobs_of_this_process[ledger.id] = session.job, session.later
        return session

    def begun_anew(self) -> Session:
        """A new session of the same job, with only the contents of the file."""
        # a signal handler may do this during a reading, which must keep its own ledger object
        self.ledger = Ledger(self.ledger.path, {"id": self.ledger.id})
        self.settle(in_doubt=True)
        return Session(self.ledger, self.job, self.later)

    # --- charging ---------------------------------------------------------------------------------

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge in the file, or raises before anything is recorded."""
        flag = self.flag(adaptive)
        if not self.later:
            # raises if a filter cannot start, even if open blocks cover the charge
            self.budget_for(parts, flag)
        while (found := self._cover(parts)) is None:
            self._reserve(parts, label, flag)
        for block, part in found:
            block.left -= part.times
            self.taken(block, part, label, flag)

    def taken(self, block: Block | None, part: Part, label: str | None, flag: Flag) -> None:
        """Note that these releases were taken from a block."""
        assert block is not None
        self._made[type(part.pair)] += part.times
        block.last_use = self._made.total()
        key = Key(part.event, label, flag, self.job)
        block.used[key] = block.used.get(key, 0) + part.times
        self.keep(part.pair, key, part.times)

    def block_for(self, pair: Pair, taken: Mapping[Block, int] | None = None) -> Block | None:
        """An open block with releases left for ``pair`` besides ``taken``, if possible its own."""
        found = None
        for block in self.blocks:
            if block.open and block.left > (taken or {}).get(block, 0):
                if block.pair == pair:
                    return block
                if found is None and covers(block.pair, pair):
                    found = block
        return found

    def _cover(self, parts: Iterable[Part]) -> list[tuple[Block, Part]] | None:
        """The blocks that cover ``parts``, with the part for each block; ``None`` if they do not
        suffice.
        """
        found: list[tuple[Block, Part]] = []
        chosen: dict[Block, int] = {}
        for event, times, pair in parts:
            while times:
                block = self.block_for(pair, chosen)
                if block is None:
                    return None
                count = min(times, block.left - chosen.get(block, 0))
                chosen[block] = chosen.get(block, 0) + count
                found.append((block, Part(event, count, pair)))
                times -= count
        return found

    # --- reading ----------------------------------------------------------------------------------

    @property
    def place(self) -> dict[str, Any]:
        """The part of a saved state that identifies its file and the last row read."""
        return {"ledger": self.ledger.id, "place": self.ledger.place}

    def refresh(self) -> None:
        """Reads the charges of other processes."""
        for row in self.ledger.read():
            if row.writer == self._writer:
                continue
            if row.event is not None:
                self.keep(self.pair(row.event), row.key, row.count)
            else:
                self._notes[row.label or ""] = None

    # --- reserving --------------------------------------------------------------------------------

    def _reserve(self, parts: list[Part], label: str | None, flag: Flag) -> None:
        """Opens blocks that cover ``parts``, or raises."""
        numbers = None
        while numbers is None:  # None after a try: another process charged in between
            self.refresh()
            begins = not self.is_adaptive
            finished = [block for block in self.blocks if self._is_finished(block, parts)]
            wanted = self._wanted(parts, label, flag, finished)
            before = [row for block in finished for row in _settlement(block)]
            numbers = self._append([*before, *wanted])
        self.blocks = [block for block in self.blocks if block not in finished]
        for seq, row in zip(numbers[len(before) :], wanted, strict=True):
            self.blocks.append(self._block(row._replace(seq=seq, job=self.job)))
        if self.later and not self._cost_was_told:
            self._cost_was_told = True
            self._tell_cost(needed(parts), begins)

    def _is_finished(self, block: Block, parts: Collection[Part]) -> bool:
        """Whether a block is empty, idle, or no longer of use because the noise fell."""
        is_idle = self._made.total() - block.last_use >= BLOCK
        return block.left == 0 or is_idle or _fell_below(block, parts)

    def _wanted(
        self, parts: list[Part], label: str | None, flag: Flag, finished: list[Block]
    ) -> list[Row]:
        """Rows of blocks for ``parts``. May add blocks that must be returned to ``finished``."""
        budget, size, kinds = self.budget_for(parts, flag), self._size(parts, finished), [parts]
        if any(block.left and _fell_below(block, parts) for block in finished):
            lower = [(events.lowered(part.event, _LOWERED), part.times) for part in parts]
            kinds.insert(0, [Part(event, n, self.pair(event)) for event, n in lower])
        while True:
            others = [block for block in self.blocks if block not in finished and block.left]
            reserved: Counter[Pair] = Counter()
            for block in others:
                reserved[block.pair] += block.left
            for kind in kinds:
                fit = size * SHARE
                if budget is not None:
                    fit = budget.certain(self.counts, needed(kind), reserved)
                if fit:
                    times, counts = max(1, min(size, fit // SHARE)), Counter[DpEvent]()
                    for part in kind:
                        counts[part.event] += times * part.times
                    return [Row("block", label, event, n, flag) for event, n in counts.items()]
            if not others:
                assert budget is not None
                self.refuse(parts, budget)
            finished += others

    def _size(self, parts: list[Part], finished: Collection[Block]) -> int:
        """How many times ``parts`` the next block should contain: once for the first block of a
        kind, and at most half of the rest that other blocks leave.
        """
        made = self._made[type(parts[0].pair)]
        releases = max(BLOCK, made // 2) if made else 1
        free = max(BLOCK, self._made.total() // 2)
        if others := sum(block.left for block in self.blocks if block not in finished):
            free = (free - others) // 2
        return max(min(releases, free) // sum(part.times for part in parts), 1)

    def _tell_cost(self, need: Mapping[Pair, int], begins: bool) -> None:
        """Logs a warning on the cost of being a later job."""
        budget, left, in_one, advice = self.settings.budget, self.remaining(need), "", ""
        if budget is None:
            why = "had charges before this job and has no budget: epsilon is infinite."
            _log.warning("%s %s", self.path, why)
            return
        if begins:
            whole = Budget(*budget, self.settings.method, None, self.counts)
            in_one = f" ({whole.max_count(self.counts, need) - 1} in the first job)"
            advice = " To avoid this use one job, or adaptive=True from the start."
        _log.warning(
            "%s held charges before this job, so a filter is in force: epsilon is the whole"
            " budget, %g at delta = %g. About %s more such releases fit%s.%s",
            *(self.path, *budget, max((left or 0) - 1, 0), in_one, advice),
        )

    # --- writing ----------------------------------------------------------------------------------

    def _append(self, rows: list[Row], if_unchanged: bool = True) -> list[int] | None:
        return self.ledger.append(
            rows, job=self.job, writer=self._writer, if_unchanged=if_unchanged
        )

    def _block(self, row: Row) -> Block:
        return Block(row.seq, row.key, self.pair(row.key.event), row.count)

    def settle(self, in_doubt: bool = False) -> None:
        """Returns the unused releases of open blocks."""
        if this_process() != self.process:
            return  # the blocks are the parent's
        if in_doubt:  # after an interrupted commit the file may have blocks not known in memory
            known = {block.seq for block in self.blocks}
            rows = Ledger(self.ledger.path, {"id": self.ledger.id}).read()
            found = open_blocks(row for row in rows if row.writer == self._writer)
            self.blocks += [self._block(row) for row in found if row.seq not in known]
        for block in list(self.blocks):
            block.open = False
            try:
                self._append(_settlement(block), if_unchanged=False)
            except LedgerError as error:
                # the block was returned before, by a commit that seemed to fail
                if not isinstance(error.__cause__, sqlite3.IntegrityError):
                    raise
            self.blocks.remove(block)

    # --- noting and loading -----------------------------------------------------------------------

    def note(self, statement: str) -> None:
        """Stores a statement once, for all jobs."""
        self.refresh()
        while statement not in self._notes:
            if self._append([Row("note", statement, None, 0, "fixed")]) is not None:
                self._notes[statement] = None
            self.refresh()

    def take_over(self, state: Mapping[str, Any], charges: Mapping[Key, int]) -> None:
        """Loads a saved state into an empty file, or checks that this file contains its own."""
        self.refresh()
        if state["ledger"] != self.ledger.id:
            super().take_over(state, charges)
            if charges:
                self.note(RESUMED)
        elif not self.ledger.holds(state["place"]):
            raise ArgumentError(
                f"the ledger {self.path} has fewer charges than the saved run: it was restored"
                " from an older copy. Put the newer file back."
            )

    def _write(self, state: Mapping[str, Any], parts: list[tuple[Part, Key]]) -> None:
        rows = [
            Row("charge", key.label, part.event, part.times, key.flag, job=key.job)
            for part, key in parts
        ]
        if self._append(rows) is None:
            raise ArgumentError(
                "another process has just charged this ledger, so it is not empty and nothing was"
                " loaded. Use a new ledger."
            )


def _settlement(block: Block) -> list[Row]:
    """The rows that replace a block: charges with other keys, and the returned rest."""
    own = block.key
    assert own is not None
    others = {key: count for key, count in block.used.items() if key != own}
    rows = [Row("charge", key.label, key.event, n, key.flag) for key, n in others.items()]
    returned = -(block.left + sum(others.values()))
    return [*rows, Row("return", own.label, own.event, returned, own.flag, block.seq)]


def _fell_below(block: Block, parts: Iterable[Part]) -> bool:
    """Whether a part is like the block's releases, but has less noise than the block covers."""
    pairs = [part.pair for part in parts]
    return any(covers(pair, block.pair) for pair in pairs) and not any(
        covers(block.pair, pair) for pair in pairs
    )


# --- one caller at a time -------------------------------------------------------------------------


class _Run(NamedTuple):
    """A charge that is repeated, from one block and without a decision."""

    event: DpEvent
    part: Part
    label: str | None
    adaptive: bool
    flag: Flag
    block: Block


class Exclusive:
    """A history that only one caller at a time reads or changes."""

    def __init__(self, session: History) -> None:
        self.session = session
        self._run: _Run | None = None
        self._last: DpEvent | None = None
        self._settle_at_exit()
        # a worker of a fork server drops finalizers after it has unpickled its arguments
        util.register_after_fork(self, Exclusive._settle_at_exit)

    def _settle_at_exit(self) -> None:
        """Settle at exit, also in multiprocessing children, but only for this process' session."""
        if self.session.path is not None and self.session.process == this_process():
            util.Finalize(self, _settle_quietly, (self.session,), exitpriority=100)

    def read(self, what: Callable[[History], T]) -> T:
        """``what`` of the history with the latest charges of other processes."""
        with LOCK:
            if _is_busy:
                raise StateError(_IN_THE_MIDDLE)
            while True:
                session = self._begin()
                session.refresh()
                if session is self.session:  # a signal handler may have started a new session
                    session.stale = False
                    return what(session)

    def change(self, change: Callable[[History], T]) -> T:
        """Make one change; a change that a signal handler starts during another one raises."""
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
        """The session, marked as stale until the caller is done. After an interruption and in a
        forked child a new session is read from the file. (In memory an interruption may count
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
        """Record a charge that repeats the last one; False if it does not or cannot."""
        run = self._run
        if run is None or type(count) is not int or count != 1 or label != run.label:
            return False
        if adaptive is not run.adaptive or not (event is run.event or event == run.event):
            return False
        with LOCK:
            session, block, process = self.session, run.block, this_process()
            # From here on there are no calls, so no signal handler runs: the checks stay valid.
            is_sound = session.process == process and not (session.stale or _is_busy)
            if run is self._run and block.left > 0 and block.open and is_sound:
                block.left -= 1
                block.taken += 1
                return True
        return False

    def charge(self, event: DpEvent, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge of ``event``, which consists of ``parts``."""

        def charged(session: History) -> None:
            if session.process != this_process():
                raise StateError(
                    "this accountant was forked into another process, and its parent would not see"
                    " the charges: make it with PrivacyAccountant(..., path='budget.db'), or give"
                    " each process an accountant with a share of the budget."
                )
            session.charge(parts, label, adaptive)
            # a cached event, whose numbers cannot change, is the same object each time
            first, was, self._last = parts[0], self._last, parts[0].event
            if len(parts) == 1 and first.times == 1 and first.event is was:
                block = session.block_for(first.pair)
                if block is not None and block.left >= SHARE:
                    self._run = _Run(event, first, label, adaptive, session.flag(adaptive), block)

        self.change(charged)


def _settle_quietly(session: Session) -> None:
    """Settle at the end of the program or of the accountant. Errors are ignored, since nobody can
    catch them; releases that are not returned stay charged.
    """
    global _is_busy
    with LOCK, suppress(DPBayesError, OSError):
        if not _is_busy:  # busy if garbage collection runs this during a charge
            was_stale, session.stale, _is_busy = session.stale, True, True
            try:
                session.settle(in_doubt=was_stale)
            finally:
                _is_busy = False
            session.stale = was_stale
