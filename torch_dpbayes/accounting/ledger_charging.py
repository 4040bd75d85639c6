"""How one process charges a file that others charge too."""

from __future__ import annotations

from collections.abc import Mapping

from .admission import Admission
from .charging import Charging, Run
from .events import lowered
from .filters import Filter
from .history import Part, Settings, needed
from .ledger import Block, Entry, Flag, Key, Row, Session
from .pairs import Pair, added
from .reservations import SHARE, Reservations


class ChargingAtLedger(Charging):
    """Takes charges out of blocks that the file already counts.

    Args:
        settings: budget, method and relation.
        session: the process' place at the ledger.
    """

    session: Session

    def __init__(self, settings: Settings, session: Session) -> None:
        super().__init__(settings)
        self.session = session
        self._reservations = Reservations(session, self.history)

    # --- charging ---------------------------------------------------------------------------------

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        flag = self._flag(adaptive)
        if adaptive and not self.is_later:
            # refuses where a filter cannot begin, whatever open blocks would cover
            self.limits.rule(needed(parts), True, is_later=False)
        while (found := self._reservations.cover(parts)) is None:
            self._reserve(parts, label, flag)
        for block, part in found:
            block.left -= part.times
            self._taken(block, part, label, flag)

    def _certain(self, part: Part, label: str | None, flag: Flag) -> Block | None:
        return self._reservations.covering(part.pair, {})

    def enter(self, run: Run) -> None:
        """An interruption must not lose it: then the file tells."""
        if not run.taken:
            return
        part, was_stale = run.part._replace(times=run.taken), self.stale
        self.stale, run.taken = True, 0
        self._taken(run.block, part, run.label, run.flag)
        self.stale = was_stale

    def _taken(self, block: Block, part: Part, label: str | None, flag: Flag) -> None:
        self._reservations.made(part, block)
        if block.key[2] == "registered":
            part = Part(block.key[0], part.times, self._reservations.pair(block))
            flag = "registered"
        else:
            flag = "adaptive" if self.history.schedule else flag
            if self.limits.admission is not None:
                self.limits.admission.spend(part.pair, part.times)
        key = part.event, label, flag
        block.used[key] = block.used.get(key, 0) + part.times
        self.history.keep(part, label, flag)

    def open_registered(self) -> dict[Pair, int]:
        reserved = self._reservations.left(self._reservations.registered)
        left = added(self.history.schedule_left, reserved)
        return {pair: count for pair, count in left.items() if count}

    # --- reading the file -------------------------------------------------------------------------

    def refresh(self) -> None:
        self.stale = True
        rows = self.session.read()
        if rows:
            self._take_in(rows)
        self.stale = False

    def _take_in(self, rows: list[Row]) -> None:
        history = self.history
        history.changes += 1
        schedule = {row.key: row.count for row in rows if row.kind == "plan"}
        if schedule:
            self.adopt(schedule)
        net: dict[Pair, int] = {}
        rule: Filter | None = None
        declared = False
        for row in rows:
            if row.kind == "filter":
                rule = Filter.decoded(row.label or "", history.settings.budget)
                declared = row.flag == "adaptive"
            if row.kind in ("filter", "plan"):
                continue
            event, label, flag = row.key
            part = Part(event, row.count, history.pair(event))
            history.first = history.first or {part.pair: 1}
            history.later_jobs |= row.later
            history.keep(part, label, flag)
            if flag == "registered":
                left = history.schedule_left.get(part.pair, 0)
                history.schedule_left[part.pair] = left - part.times
            else:
                net = added(net, {part.pair: part.times})
        if rule is not None and history.filter is None:
            self.limits.start(rule, declared, self.committed())
        elif self.limits.admission is not None:
            net = {pair: count for pair, count in net.items() if count}
            self.limits.admission.others_spent(self.committed(), net)

    # --- writing it -------------------------------------------------------------------------------

    def _write(self, entries: list[Entry]) -> bool:
        self.stale = True
        written = self.session.commit([], also=entries)
        self.stale = False
        return written

    def settle(self) -> None:
        blocks, was_stale, self.stale = list(self.session.blocks), self.stale, True
        self.session.settle()
        for block in blocks:
            self._reservations.settled(block)
            if block.key[2] == "registered":
                self.history.schedule_left[self._reservations.pair(block)] += block.left
        self.stale = was_stale

    def _reserve(self, parts: list[Part], label: str | None, flag: Flag) -> None:
        """Opens blocks that cover ``parts``, or raises."""
        session, limits = self.session, self.limits
        committed = False
        while not committed:
            self.refresh()
            finished = self._finished([part.pair for part in parts])
            registered, rest, left = self._split(parts, finished)
            rule = limits.rule(needed(rest), flag == "adaptive", self.is_later) if rest else None
            origin: Flag = "fixed" if self.is_later else "adaptive"
            also = [] if rule is None else [Entry("filter", rule.code, None, 0, origin)]
            try:
                with limits.provisionally(rule, not self.is_later, self.committed()):
                    wanted = self._registered_blocks(registered, label, left, finished)
                    kind: Flag = "adaptive" if self.history.schedule else flag
                    wanted += self._blocks(rest, label, kind, finished)
                    self.stale = True
                    committed = session.commit(wanted, finished, also)
                    if not committed:
                        raise _Outrun
            except _Outrun:
                self.stale = False
                continue
            self._are_reserved(wanted, finished, first=parts[0].pair)
            self.stale = False

    def _finished(self, pairs: list[Pair]) -> list[Block]:
        """The open blocks that are settled when blocks for ``pairs`` are opened."""
        return [
            block for block in self.session.blocks if self._reservations.is_finished(block, pairs)
        ]

    def _split(
        self, parts: list[Part], finished: list[Block]
    ) -> tuple[list[Part], list[Part], dict[Pair, int]]:
        """The parts that the schedule covers, the others, and what is left of the schedule beside
        open blocks. These are added to ``finished`` where more is needed.
        """
        while True:
            returned = [block for block in finished if block.key[2] == "registered"]
            left = added(self.history.schedule_left, self._reservations.left(returned))
            registered, rest = self.history.split(parts, left)
            held = [block for block in self._kept(finished) if block.key[2] == "registered"]
            if not rest or not held:
                return registered, rest, left
            finished += held

    def _are_reserved(
        self, wanted: list[tuple[Key, int]], finished: list[Block], first: Pair
    ) -> None:
        """Counts what stands in the file now."""
        history, admission = self.history, self.limits.admission
        history.first = history.first or {first: 1}
        history.later_jobs |= self.session.later
        for block in finished:
            pair = self._reservations.pair(block)
            self._reservations.settled(block)
            if block.key[2] == "registered":
                history.schedule_left[pair] += block.left
            elif admission is not None:
                admission.reserved(pair, fell_through=block.left > 0)
        for (event, _, kind), count in wanted:
            pair = history.pair(event)
            if kind == "registered":
                history.schedule_left[pair] -= count
            elif admission is not None:
                admission.take({pair: count}, 1)

    def _kept(self, finished: list[Block]) -> list[Block]:
        return [block for block in self.session.blocks if block not in finished and block.left]

    def _registered_blocks(
        self,
        parts: list[Part],
        label: str | None,
        left: Mapping[Pair, int],
        finished: list[Block],
    ) -> list[tuple[Key, int]]:
        if not parts:
            return []
        fit = min(left[pair] // count for pair, count in needed(parts).items())
        size = self._reservations.size(parts, self._kept(finished))
        size = max(1, min(size, fit // SHARE))
        return _blocks_of(parts, size, label, "registered")

    def _blocks(
        self, parts: list[Part], label: str | None, flag: Flag, finished: list[Block]
    ) -> list[tuple[Key, int]]:
        """Blocks for ``parts``. May add to ``finished`` what has to be given back."""
        if not parts:
            return []
        size = self._reservations.size(parts, self._kept(finished))
        admission = self.limits.admission
        if admission is None:
            return _blocks_of(parts, size, label, flag)
        need, fit = needed(parts), 0
        counts = self.committed() if self.history.schedule else self.history.counts
        while not fit:
            # those of the schedule are counted with it
            others = [block for block in self._kept(finished) if block.key[2] != "registered"]
            reserved = self._reservations.left(others)
            lower = [self._lowered(part, admission) for part in parts]
            if fit := admission.room(counts, reserved, needed(lower), SHARE * size):
                parts = lower
            elif not (fit := admission.room(counts, reserved, need, SHARE * size)):
                if not others:
                    self.limits.refuse(self.committed(), parts)
                finished += others
        return _blocks_of(parts, max(1, min(size, fit // SHARE)), label, flag)

    def _lowered(self, part: Part, admission: Admission) -> Part:
        """What covers ``part`` and what may follow it where noise falls."""
        slack = admission.slack(part.pair)
        if slack == 1:
            return part
        event = lowered(part.event, slack)
        return Part(event, part.times, self.history.pair(event))


class _Outrun(Exception):
    """Another process committed first."""


def _blocks_of(
    parts: list[Part], size: int, label: str | None, flag: Flag
) -> list[tuple[Key, int]]:
    wanted: dict[Key, int] = {}
    for part in parts:
        key: Key = part.event, label, flag
        wanted[key] = wanted.get(key, 0) + size * part.times
    return list(wanted.items())
