"""One process at one ledger, and what it has reserved there."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Iterable

from .. import launch
from ..pairs import Pair
from .errors import LedgerError
from .file import Ledger
from .rows import Entry, Key, Row


class Block:
    """Releases that one process reserved: how many are left, and what the others were used for."""

    __slots__ = ("count", "key", "left", "open", "pair", "seq", "used")

    def __init__(self, seq: int, key: Key, count: int) -> None:
        self.seq, self.key, self.count, self.left, self.open = seq, key, count, count, True
        self.used: dict[Key, int] = {}
        self.pair: Pair | None = None  # what the accountant takes its event for

    def settlement(self) -> list[Entry]:
        """What takes the place of the block: the releases that it was used for, where they
        are others than its own, and the rest returned.
        """
        event, label, flag = self.key
        others = {key: count for key, count in self.used.items() if key != self.key}
        entries = [
            Entry("charge", name, other, count, kind)
            for (other, name, kind), count in others.items()
        ]
        return [
            *entries,
            Entry("return", label, event, -(self.left + sum(others.values())), flag, self.seq),
        ]


class Session:
    """One process at one ledger: the job that it belongs to, and its open blocks.

    Args:
        ledger: the file.
        job: the same for all processes that an accountant was forked or sent to.
        later: the ledger held charges already when the job began.
    """

    def __init__(self, ledger: Ledger, job: str, later: bool) -> None:
        self.ledger, self.job, self.later = ledger, job, later
        self._writer = ""
        self.blocks: list[Block] = []
        self._process = os.getpid()
        # a commit was interrupted: there may be blocks that nobody took anything out of
        self._uncertain = False

    @property
    def writer(self) -> str:
        """The process in its rows, with the moment before the first of them."""
        if not self._writer:
            self._writer = f"{uuid.uuid4().hex} {launch.said()}"
        return self._writer

    def read(self) -> list[Row]:
        """What others wrote since the last call."""
        return [row for row in self.ledger.read() if row.writer != self._writer]

    def join(self) -> None:
        """Decides whether the job began after others had charged; the ledger holds charges.

        It did not if it charged before, and began in time then, and this program was started
        before the first of its charges: nothing that was released can have led to its start. A
        second process in the place of a worker that charged already is one that was started for
        another purpose, whatever it is called.
        """
        own = self.ledger.charges_of(self.job)
        self.later = True
        if own and not own[0].later:
            written = [launch.understood(row.writer) for row in own]
            _, first_charge = written[0]
            start, place = launch.start_of_this_program(), launch.this_worker()
            is_started_before = (
                start is not None and first_charge is not None and start.is_before(first_charge)
            )
            self.later = not is_started_before or any(place == worker for worker, _ in written)

    def commit(
        self,
        wanted: Iterable[tuple[Key, int]],
        finished: Iterable[Block] = (),
        also: Iterable[Entry] = (),
    ) -> bool:
        """Opens blocks and settles finished ones in one transaction, if the ledger is still what
        was read last.

        Returns:
            Whether it is. If not, nothing happened.

        Raises:
            LedgerError: nobody knows what is on disk. Take nothing out of any block any more:
                :meth:`settle`, and begin anew.
        """
        finished, wanted, also = list(finished), list(wanted), list(also)
        entries = [entry for block in finished for entry in block.settlement()] + also
        first = len(entries)
        entries += [
            Entry("block", label, event, count, flag) for (event, label, flag), count in wanted
        ]
        self._uncertain = True
        numbers = self.ledger.append(entries, job=self.job, writer=self.writer, later=self.later)
        if numbers is not None:
            self.blocks = [block for block in self.blocks if block not in finished]
            self.blocks += [
                Block(seq, key, count)
                for seq, (key, count) in zip(numbers[first:], wanted, strict=True)
            ]
        self._uncertain = False
        return numbers is not None

    def settle(self) -> None:
        """Returns what the open blocks did not use."""
        if os.getpid() != self._process:
            return  # the blocks are the parent's
        if self._uncertain:
            known = {block.seq for block in self.blocks}
            self.blocks += [
                Block(row.seq, row.key, row.count)
                for row in self.ledger.open_blocks_of(self.writer)
                if row.seq not in known
            ]
            self._uncertain = False
        for block in list(self.blocks):
            block.open = False
            try:
                self.ledger.append(
                    block.settlement(),
                    job=self.job,
                    writer=self.writer,
                    later=self.later,
                    if_unchanged=False,
                )
            except LedgerError as error:
                # settled before, by a commit that seemed to fail
                if not isinstance(error.__cause__, sqlite3.IntegrityError):
                    raise
            self.blocks.remove(block)
