"""One process at one ledger: the job that it belongs to, and the releases that it has reserved.

A process charges in blocks. It reads what is new, decides outside of any transaction whether a
block of releases fits, and commits the block only if the file is still what it decided on; else it
decides again. Releases are then taken out of the block in memory. So whatever was released was on
disk before, and if the process is killed, the rest of the block stays charged. A process that ends
returns the rest, once, which a unique index enforces. A forked child starts afresh from the file.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ... import _TAKEN_UP
from .. import events
from ..budget import Budget, Filter
from ..dominating_pairs import Pair, covers
from ..history import Flag, History, Key, Part, Settings, needed
from .file import Ledger
from .schema import Entry, LedgerError

BLOCK = 64  # releases that a process may have reserved, or half as many as it made
SHARE = 8  # a block takes at most one part in so many of what fits
_LOWERED = 1.05  # by how much a block for falling noise has less noise

_log = logging.getLogger("torch_dpbayes")


# --- job identity ---------------------------------------------------------------------------------
#
# Workers that a launcher started together (torchrun, srun, mpirun) are one job: what they release
# was decided when they were launched. A name alone does not show that: names repeat (torchrun's is
# "none" unless it is given one), and a shell of Slurm starts one program after another under one
# job. So each worker writes which worker it is, and when it began to charge.

# variables that name a launch, and the one that tells its workers apart
_LAUNCHERS = (
    (("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), "RANK"),
    (("PMIX_NAMESPACE",), "PMIX_RANK"),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_PROCID"),
)
_WRITER = re.compile(r" (?P<worker>.+?)(?: is .+)?, up (?P<up>[0-9.]+) s of boot (?P<boot>\S+)$")


class Moment(NamedTuple):
    """Seconds since the machine was started, which no change of its clock moves."""

    up: float
    boot: str

    def is_before(self, other: Moment) -> bool:
        """Whether it certainly was."""
        return self.boot == other.boot and self.up < other.up


def now() -> Moment | None:
    """This moment; ``None`` where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), boot)
    except (OSError, AttributeError):
        return None


def start_of_this_program() -> Moment | None:
    """When this process was started, or imported this library if that was later, rounded up;
    ``None`` where the system does not tell.

    A shell that ends in a program becomes it, and stays the process that it was: ``sh -c "a; b"``
    began before what ``a`` charged, though ``b`` may have been decided from it.
    """
    moment = now()
    try:
        # the name of the program, in parentheses, may hold spaces
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    if moment is None or _TAKEN_UP is None:
        return None
    return Moment(max(up, _TAKEN_UP + 0.01), moment.boot)


def launch_and_worker(environment: Mapping[str, str]) -> tuple[str, str]:
    """The name of the launch, the same for all its workers, and which of them this is; two empty
    strings where no launcher says so.
    """
    for named, rank in _LAUNCHERS:
        if all(environment.get(name) for name in (*named, rank)):
            name = " ".join(f"{variable}={environment[variable]}" for variable in named)
            return name, f"{rank} {environment[rank]}"
    return "", ""


def _this_process() -> str:
    return f"pid {os.getpid()} on {platform.node()}"


def _this_worker() -> str:
    """Which worker of its launch this process is; without a launcher each process is one."""
    return launch_and_worker(os.environ)[1] or _this_process()


def _self_description() -> str:
    """What a worker writes of itself into its rows, at the moment before the first of them."""
    worker, process, moment = _this_worker(), _this_process(), now()
    text = worker if worker == process else f"{worker} is {process}"
    return text if moment is None else f"{text}, up {moment.up:.2f} s of boot {moment.boot}"


def _parsed(writer: str) -> tuple[str, Moment | None]:
    """The worker that wrote a row, and when it began to write, as far as the row says so."""
    found = _WRITER.search(writer)
    if found is None:
        return writer.partition(" ")[2], None
    return found["worker"], Moment(float(found["up"]), found["boot"])


def _is_later(ledger: Ledger, job: str) -> bool:
    """Whether this process began after others had charged a ledger, which holds charges.

    It did not if its job charged before, and began in time then, and this program was started
    before the first of those charges: nothing that was released can have led to its start. A second
    process in the place of a worker that charged already was started for another purpose, whatever
    it is called.
    """
    own = ledger.charges_of(job)
    if not own or own[0].later:
        return True
    written = [_parsed(row.writer) for row in own]
    _, first_charge = written[0]
    start, worker = start_of_this_program(), _this_worker()
    if start is None or first_charge is None or not start.is_before(first_charge):
        return True
    return any(worker == other for other, _ in written)


# job, and whether it is a later one, by file and launch: a process that opens a file again, as a
# notebook's cell that runs twice, goes on with the same job
jobs_of_this_process: dict[tuple[str, str], tuple[str, bool]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=jobs_of_this_process.clear)


# --- sessions -------------------------------------------------------------------------------------


class Block:
    """Releases that one process reserved: how many are left, and what the others were used for."""

    __slots__ = ("key", "left", "open", "pair", "seq", "used")

    def __init__(self, seq: int, key: Key, pair: Pair, left: int) -> None:
        self.seq, self.key, self.pair, self.left, self.open = seq, key, pair, left, True
        self.used: dict[Key, int] = {}

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
        returned = -(self.left + sum(others.values()))
        return [*entries, Entry("return", label, event, returned, flag, self.seq)]


class Session:
    """One process at one ledger.

    Args:
        ledger: the file.
        job: the same for all processes that an accountant was forked or sent to.
        later: the ledger held charges already when the job began.

    Attributes:
        history: what was charged, with what was used of the own blocks.
        stale: reading or writing was interrupted, so what is known may differ from the file: begin
            anew.
    """

    def __init__(self, ledger: Ledger, job: str, later: bool) -> None:
        found = ledger.settings
        budget = None if found["epsilon"] is None else (found["epsilon"], found["delta"])
        self.ledger, self.job, self.later = ledger, job, later
        self.history = History(
            Settings(budget, found["method"], found["neighboring"], found["unit"])
        )
        self.blocks: list[Block] = []
        self.stale = False
        self._writer = ""
        self._process = os.getpid()
        # a commit was interrupted: there may be blocks that nobody took anything out of
        self._uncertain = False
        self._made: Counter[type] = Counter()  # releases, by type of pair
        self._last_use: dict[Block, int] = {}  # how many releases had been made
        self._cost_was_told = False

    @classmethod
    def opened(cls, ledger: Ledger, launch: str) -> Session:
        """The session of a process that opens the file by its path."""
        key = ledger.id, launch
        job, later = jobs_of_this_process.get(key, ("", False))
        session = cls(ledger, job or launch or uuid.uuid4().hex, later)
        session.refresh()
        if not job:
            session.later = bool(session.history.counts) and _is_later(ledger, session.job)
            jobs_of_this_process[key] = session.job, session.later
        return session

    def begun_anew(self) -> Session:
        """A session of the same job that knows only what the file says."""
        self.settle()
        ledger = Ledger(self.ledger.path, {"id": self.ledger.id})
        session = Session(ledger, self.job, self.later)
        session.refresh()
        return session

    @property
    def writer(self) -> str:
        """The process in its rows, with the moment before the first of them."""
        if not self._writer:
            self._writer = f"{uuid.uuid4().hex} {_self_description()}"
        return self._writer

    # --- charging ---------------------------------------------------------------------------------

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge in the file, or raises before anything is recorded."""
        if adaptive and not self.later:
            # refuses where a filter cannot begin, whatever open blocks would cover
            self.history.rule(needed(parts), True, is_later=False)
        flag = self.flag(adaptive)
        while (found := self._cover(parts)) is None:
            self._reserve(parts, label, flag)
        for block, part in found:
            block.left -= part.times
            self.taken(block, part, label, flag)

    def flag(self, adaptive: bool) -> Flag:
        """Under which flag this job's charges stand."""
        return "adaptive" if adaptive or self.later else "fixed"

    def taken(self, block: Block, part: Part, label: str | None, flag: Flag) -> None:
        """These releases were taken out of a block."""
        self._made[type(part.pair)] += part.times
        self._last_use[block] = self._made.total()
        key = part.event, label, flag
        block.used[key] = block.used.get(key, 0) + part.times
        self.history.keep(part, label, flag)

    def covering(self, pair: Pair, taken: Mapping[Block, int]) -> Block | None:
        """A block with something left for ``pair``: its own rather than one that dominates it."""
        found = None
        for block in self.blocks:
            if block.open and block.left > taken.get(block, 0):
                if block.pair == pair:
                    return block
                if found is None and covers(block.pair, pair):
                    found = block
        return found

    def _cover(self, parts: Iterable[Part]) -> list[tuple[Block, Part]] | None:
        """What to take out of which block for ``parts``; ``None``: the blocks do not suffice."""
        found: list[tuple[Block, Part]] = []
        chosen: dict[Block, int] = {}
        for event, times, pair in parts:
            while times:
                block = self.covering(pair, chosen)
                if block is None:
                    return None
                count = min(times, block.left - chosen.get(block, 0))
                chosen[block] = chosen.get(block, 0) + count
                found.append((block, Part(event, count, pair)))
                times -= count
        return found

    # --- reading ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what other processes charged."""
        self.stale = True
        history, rule, declared = self.history, None, False
        for row in self.ledger.read():
            if row.writer == self._writer:
                continue
            if row.kind == "filter":
                rule = Filter.decoded(row.label or "", history.settings.budget)
                declared = row.flag == "adaptive"
                continue
            event, label, flag = row.key
            part = Part(event, row.count, history.pair(event))
            history.first = history.first or {part.pair: 1}
            history.later_jobs |= row.later
            history.keep(part, label, flag)
        if rule is not None and history.filter is None:
            history.start(rule, declared)
        self.stale = False

    # --- reserving --------------------------------------------------------------------------------

    def _reserve(self, parts: list[Part], label: str | None, flag: Flag) -> None:
        """Opens blocks that cover ``parts``, or raises."""
        history, committed = self.history, False
        while not committed:
            self.refresh()
            before = history.filter
            finished = [block for block in self.blocks if self._is_finished(block, parts)]
            rule = history.rule(needed(parts), flag == "adaptive", self.later)
            origin: Flag = "fixed" if self.later else "adaptive"
            also = [] if rule is None else [Entry("filter", rule.code, None, 0, origin)]
            try:
                with history.under(rule, declared=not self.later):
                    wanted = self._blocks(parts, label, flag, finished)
                    self.stale = True
                    committed = self._commit(wanted, finished, also)
                    if not committed:
                        raise _Outrun
            except _Outrun:
                self.stale = False
                continue
            history.first = history.first or {parts[0].pair: 1}
            history.later_jobs |= self.later
            self.stale = False
            self._tell_cost(needed(parts), began=before is None)

    def _is_finished(self, block: Block, parts: Collection[Part]) -> bool:
        """Used up, or left behind: noise fell below what the block covers, or it lies idle."""
        return (
            block.left == 0
            or self._made.total() - self._last_use.get(block, 0) >= BLOCK
            or _fell_below(block, parts)
        )

    def _blocks(
        self, parts: list[Part], label: str | None, flag: Flag, finished: list[Block]
    ) -> list[tuple[Key, int]]:
        """Blocks for ``parts``. May add to ``finished`` what has to be given back."""
        size, budget = self._size(parts, finished), self.history.budget
        lowered = parts
        if any(block.left and _fell_below(block, parts) for block in finished):
            lower = [events.lowered(part.event, _LOWERED) for part in parts]
            lowered = [
                Part(event, part.times, self.history.pair(event))
                for event, part in zip(lower, parts, strict=True)
            ]
        if budget is None:
            return _blocks_of(lowered, size, label, flag)
        while True:
            others = [block for block in self.blocks if block not in finished and block.left]
            reserved: Counter[Pair] = Counter()
            for block in others:
                reserved[block.pair] += block.left
            for wanted in (lowered, parts):
                fit = budget.certain(self.history.counts, needed(wanted), reserved)
                if fit:
                    size = max(1, min(size, fit // SHARE))
                    return _blocks_of(wanted, size, label, flag)
                if lowered is parts:
                    break
            if not others:
                self.history.refuse(parts)
            finished += others

    def _size(self, parts: list[Part], finished: Collection[Block]) -> int:
        """How many times ``parts`` the next block should hold.

        The first charge of a kind reserves itself alone. A block beside others takes half of what
        they leave.
        """
        made = self._made[type(parts[0].pair)]
        releases = max(BLOCK, made // 2) if made else 1
        free = max(BLOCK, self._made.total() // 2)
        if others := sum(block.left for block in self.blocks if block not in finished):
            free = (free - others) // 2
        return max(min(releases, free) // sum(part.times for part in parts), 1)

    def _tell_cost(self, need: Mapping[Pair, int], began: bool) -> None:
        """Says, once, what it costs that this is a later job."""
        history, budget = self.history, self.history.settings.budget
        if not self.later or self._cost_was_told:
            return
        self._cost_was_told = True
        if budget is None or history.filter is None:
            _log.warning(
                "%s held charges before this job and has no budget: epsilon is infinite.",
                self.ledger.path,
            )
            return
        left = history.remaining(need, is_later=True)
        in_one = ""
        if began:
            whole = Budget(*budget, history.settings.method)
            whole.restart(history.counts)
            in_one = f" ({whole.max_count(history.counts, need) - 1} in the first job)"
        _log.warning(
            "%s held charges before this job, so a filter guarantees its budget, epsilon = %g"
            " at delta = %g. About %s more such releases fit%s. Avoid it by one job, or"
            " adaptive=True from the start.",
            self.ledger.path,
            *budget,
            max((left or 0) - 1, 0),
            in_one,
        )

    # --- writing ----------------------------------------------------------------------------------

    def write(self, entries: list[Entry]) -> bool:
        """Keeps rows for which no block was opened; ``False``: others wrote first, and nothing
        happened.
        """
        self.stale = True
        written = self._commit([], [], entries)
        self.stale = False
        return written

    def _commit(
        self, wanted: list[tuple[Key, int]], finished: list[Block], also: list[Entry]
    ) -> bool:
        """Opens blocks and settles finished ones in one transaction, if the ledger is still what
        was read last.

        Returns:
            Whether it is. If not, nothing happened.

        Raises:
            LedgerError: nobody knows what is on disk. Take nothing out of any block any more:
                :meth:`settle`, and begin anew.
        """
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
                Block(seq, key, self.history.pair(key[0]), count)
                for seq, (key, count) in zip(numbers[first:], wanted, strict=True)
            ]
            for block in finished:
                self._last_use.pop(block, None)
        self._uncertain = False
        return numbers is not None

    def settle(self) -> None:
        """Returns what the open blocks did not use."""
        if os.getpid() != self._process:
            return  # the blocks are the parent's
        was_stale, self.stale = self.stale, True
        if self._uncertain:
            known = {block.seq for block in self.blocks}
            self.blocks += [
                Block(row.seq, row.key, self.history.pair(row.key[0]), row.count)
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
            self._last_use.pop(block, None)
        self.stale = was_stale


class _Outrun(Exception):
    """Another process committed first."""


def _fell_below(block: Block, parts: Iterable[Part]) -> bool:
    """Whether one of the parts has less noise than the block covers, and otherwise is like it."""
    pairs = [part.pair for part in parts]
    return any(covers(pair, block.pair) for pair in pairs) and not any(
        covers(block.pair, pair) for pair in pairs
    )


def _blocks_of(
    parts: list[Part], size: int, label: str | None, flag: Flag
) -> list[tuple[Key, int]]:
    wanted: dict[Key, int] = {}
    for part in parts:
        key: Key = part.event, label, flag
        wanted[key] = wanted.get(key, 0) + size * part.times
    return list(wanted.items())
