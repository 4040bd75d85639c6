"""The blocks that one process has reserved in a ledger, and how large the next one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from .history import History, Part
from .ledger import Block, Session
from .pairs import Pair, covers

_LEAST_BLOCK = 50  # releases
SHARE = 8  # a block takes at most one part in so many of what fits


class Reservations:
    """Open blocks of one process.

    What is reserved and was not released is never more than 50 releases, or than half as many as
    this process made: so much stays charged, at most, if it is killed. The first charge of a kind
    of pair reserves itself alone, a block beside others takes half of what they leave, and any
    takes at most an eighth of what fits. One that lay idle is given back with the next commit.
    """

    def __init__(self, session: Session, history: History) -> None:
        self.session, self._history = session, history
        self._made: Counter[type] = Counter()
        self._last_use: dict[Block, int] = {}  # how many releases had been made

    def pair(self, block: Block) -> Pair:
        """What the block is taken for."""
        if block.pair is None:
            block.pair = self._history.pair(block.key[0])
        return block.pair

    def covering(self, pair: Pair, taken: Mapping[Block, int]) -> Block | None:
        """A block with something left for ``pair``: its own rather than one that merely
        dominates it, which of the registered schedule would use up what others need while there is
        some for ``pair`` itself.
        """
        is_registered = self._history.schedule_left.get(pair, 0) > 0
        found = None
        for block in self.session.blocks:
            if block.open and block.left > taken.get(block, 0):
                kept = self.pair(block)
                if kept == pair:
                    return block
                if block.key[2] == "registered" and is_registered:
                    continue
                if found is None and covers(kept, pair):
                    found = block
        return found

    def cover(self, parts: Iterable[Part]) -> list[tuple[Block, Part]] | None:
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

    def made(self, part: Part, block: Block) -> None:
        """These releases were taken out of a block."""
        self._made[type(part.pair)] += part.times
        self._last_use[block] = self._made.total()

    def size(self, parts: list[Part], kept: Iterable[Block]) -> int:
        """How many times ``parts`` the next block for them should hold, beside blocks that are
        kept.
        """
        made = self._made[type(parts[0].pair)]
        releases = max(_LEAST_BLOCK, made // 2) if made else 1
        free = max(_LEAST_BLOCK, self._made.total() // 2)
        if others := sum(block.left for block in kept):
            free = (free - others) // 2
        return max(min(releases, free) // sum(part.times for part in parts), 1)

    def is_finished(self, block: Block, pairs: Collection[Pair]) -> bool:
        """Used up, or left behind: noise fell below what the block covers, or it lies idle."""
        kept = self.pair(block)
        return (
            block.left == 0
            or self._made.total() - self._last_use.get(block, 0) >= _LEAST_BLOCK
            or (
                block.key[2] != "registered"
                and any(covers(pair, kept) for pair in pairs)
                and not any(covers(kept, pair) for pair in pairs)
            )
        )

    def settled(self, block: Block) -> None:
        """It is not open any more."""
        self._last_use.pop(block, None)

    def left(self, blocks: Iterable[Block]) -> dict[Pair, int]:
        """What is left in these blocks."""
        found: Counter[Pair] = Counter()
        for block in blocks:
            if block.left:
                found[self.pair(block)] += block.left
        return dict(found)

    @property
    def registered(self) -> list[Block]:
        """The open blocks of the registered schedule."""
        return [
            block for block in self.session.blocks if block.key[2] == "registered" and block.open
        ]
