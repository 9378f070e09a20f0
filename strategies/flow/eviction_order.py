"""What may be given back, best first: by the distance of its next use per cost of a byte.

Blocks of one cost differ by their distance alone, which does not change their order as the program
moves on. So there is a heap for each cost, and the best of all is the best of the first of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain

from ...strategy import BlockSnapshot
from .by_next_use import ByKey, Entry
from .forecaster import Look
from .scores import UNFORESEEN, cost_per_byte

#: Costs that differ by less than this share are one.
COST_STEP = 1 / 512
#: Sizes whose cost is remembered.
SIZE_COUNT = 4096


#: A block's number, its bytes, the position of its next use, whether it is dirty, and small.
Placed = tuple[int, int, float, bool, bool]


class _Kind(ByKey):
    """Blocks whose bytes cost the same, the farthest next use first: keys are positions negated."""

    def __init__(self, cost: float, *, is_dirty: bool, is_small: bool, is_named: bool) -> None:
        super().__init__()
        self.cost = cost
        self.is_dirty = is_dirty
        self.is_small = is_small
        self.is_named = is_named


class EvictionOrder:
    """The blocks on the device in the order in which they are given back.

    Of *fresh* temporaries no next use is known: they are given as long as they have waited.
    """

    def __init__(self) -> None:
        self._limit_nbytes, self.decision_nbytes = 1, 0
        self._kinds: dict[tuple[int, bool, bool, bool], _Kind] = {}  # by rank of the cost
        self._by_size: dict[tuple[int, bool, bool, bool], _Kind] = {}  # the same, by bytes
        self._kind_of: dict[int, _Kind] = {}
        #: Temporaries by their last use, as far as known.
        self.fresh = ByKey()

    def clear(self, limit_nbytes: int, decision_nbytes: int = 0) -> None:
        """Forget every position; costs are worked out for this budget from now on."""
        self._limit_nbytes, self.decision_nbytes = max(1, limit_nbytes), decision_nbytes
        self._kinds.clear()
        self._by_size.clear()
        self._kind_of.clear()

    def note(
        self,
        block_id: int,
        nbytes: int,
        position: float,
        *,
        is_dirty: bool,
        is_small: bool,
        is_named: bool = False,
    ) -> None:
        """Say when a block is used next; one that is named as a victim already goes by itself."""
        kind = self._by_size.get((nbytes, is_dirty, is_small, is_named))
        if kind is None:
            kind = self._kind(nbytes, is_dirty, is_small, is_named)
        known = self._kind_of.get(block_id)
        if known is not kind:
            if known is not None:
                known.forget(block_id)
            self._kind_of[block_id] = kind
        kind.note(block_id, -position)

    def fill(self, placed: Iterable[Placed]) -> None:
        """Note many blocks after `clear`."""
        keys_of: dict[_Kind, dict[int, float]] = {}
        for block_id, nbytes, position, is_dirty, is_small in placed:
            kind = self._by_size.get((nbytes, is_dirty, is_small, False))
            if kind is None:
                kind = self._kind(nbytes, is_dirty, is_small, False)
            self._kind_of[block_id] = kind
            keys_of.setdefault(kind, {})[block_id] = -position
        for kind, keys in keys_of.items():
            kind.fill(keys)

    def note_fresh(self, block_id: int) -> None:
        """Take in a temporary: when it was used last is asked when it is looked at."""
        if block_id not in self.fresh:
            self.fresh.note(block_id, 0)

    def forget(self, block_id: int) -> None:
        """Leave a block out from now on."""
        kind = self._kind_of.pop(block_id, None)
        if kind is not None:
            kind.forget(block_id)
        self.fresh.forget(block_id)

    def name(self, block_id: int, nbytes: int) -> None:
        """Note that a block is named as a victim: a walk can leave those out."""
        kind = self._kind_of.get(block_id)
        key = None if kind is None else kind.key(block_id)
        if kind is not None and key is not None:
            self.note(
                block_id,
                nbytes,
                -key,
                is_dirty=kind.is_dirty,
                is_small=kind.is_small,
                is_named=True,
            )

    def is_named(self, block_id: int) -> bool:
        """Whether a block is named as a victim, and has not been used since."""
        kind = self._kind_of.get(block_id)
        return kind is not None and kind.is_named

    def _kind(self, nbytes: int, is_dirty: bool, is_small: bool, is_named: bool) -> _Kind:
        cost = cost_per_byte(nbytes, is_dirty, self._limit_nbytes, self.decision_nbytes)
        rank = int(math.log(cost) / COST_STEP)
        kind = self._kinds.get((rank, is_dirty, is_small, is_named))
        if kind is None:
            kind = _Kind(cost, is_dirty=is_dirty, is_small=is_small, is_named=is_named)
            self._kinds[rank, is_dirty, is_small, is_named] = kind
        if len(self._by_size) >= SIZE_COUNT:
            self._by_size.clear()
        self._by_size[nbytes, is_dirty, is_small, is_named] = kind
        return kind

    def cost(self, block: BlockSnapshot) -> float:
        """Return how much dearer a byte of a block is."""
        return cost_per_byte(block.nbytes, block.is_dirty, self._limit_nbytes, self.decision_nbytes)

    def moved(self, block: BlockSnapshot, position: float, kind: _Kind) -> _Kind:
        """Put a block, which turns out to be dirty or not to be, where it belongs."""
        self.note(
            block.block_id,
            block.nbytes,
            position,
            is_dirty=block.is_dirty,
            is_small=kind.is_small,
            is_named=kind.is_named,
        )
        return self._kind_of[block.block_id]

    def farthest_first(self) -> list[Entry]:
        """Return (position, block) of all whose next use is known, farthest first."""
        entries = chain.from_iterable(kind.entries() for kind in self._kinds.values())
        return [(-key, block_id) for key, block_id in sorted(entries)]

    def best_first(
        self,
        cursor: int,
        newest: int,
        look: Look,
        *,
        end: int = 0,
        with_small: bool,
        with_fresh: bool,
        with_named: bool = True,
    ) -> Iterator[tuple[float, BlockSnapshot]]:
        """Yield (distance, block), best first. Close it before anything else is noted.

        Parameters
        ----------
        cursor : int
            From where distances count.
        newest : int
            Number of the last operator.
        look : callable
            Describes a block; None for one that cannot be given back now.
        end : int, optional
            Where the history ends: the position of what was used just now.
        with_small : bool
            Small ones take part; else only the others do.
        with_fresh : bool
            Temporaries of which no next use is known take part.
        with_named : bool, optional
            Those take part that are named as victims already.
        """
        walk = _Walk(self, cursor, end, newest, look)
        try:
            for kind in list(self._kinds.values()):
                if (with_small or not kind.is_small) and (with_named or not kind.is_named):
                    walk.push_first_of(kind)
            if with_fresh:
                walk.push_first_fresh()
            yield from walk.run()
        finally:
            walk.put_back()


class _Walk:
    """One walk through an order: the first of each kind, of which the best comes next."""

    def __init__(
        self, order: EvictionOrder, cursor: int, end: int, newest: int, look: Look
    ) -> None:
        self._order = order
        self._cursor = cursor
        self._end = end
        self._newest = newest
        self._look = look
        self._serial = 0
        #: (score negated, serial, distance, number, block if it was looked at, kind).
        self._heads: list[tuple[float, int, float, int, BlockSnapshot | None, _Kind | None]] = []
        self._passed: list[tuple[ByKey, Entry]] = []

    def run(self) -> Iterator[tuple[float, BlockSnapshot]]:
        """Yield (distance, block), best first."""
        heads, look = self._heads, self._look
        while heads:
            _, _, distance, block_id, block, kind = heappop(heads)
            if kind is None:
                assert block is not None
                yield distance, block
                self.push_first_fresh()
                continue
            block = look(block_id)
            if block is not None:
                if block.is_dirty is kind.is_dirty:
                    yield distance, block
                else:
                    position = distance + self._cursor
                    self.push_first_of(self._order.moved(block, position, kind))
            self.push_first_of(kind)

    def put_back(self) -> None:
        """Put back into the heaps what was looked at."""
        for heap, entry in self._passed:
            heap.put_back(entry)

    def push_first_of(self, kind: _Kind) -> None:
        """Let the first of what is left of a kind take part."""
        entry = kind.pop()
        if entry is not None:
            self._passed.append((kind, entry))
            distance = -entry[0] - self._cursor
            score = distance if distance > UNFORESEEN / 2 else distance / kind.cost
            self._push(score, distance, entry[1], None, kind)

    def push_first_fresh(self) -> None:
        """Let the temporary that has waited longest take part."""
        fresh = self._order.fresh
        while (entry := fresh.pop()) is not None:
            self._passed.append((fresh, entry))
            last_use, block_id = entry
            block = self._look(block_id)
            if block is None:
                continue
            if block.last_use > last_use:
                fresh.note(block_id, block.last_use)
                continue
            if block.is_persistent and block.nbytes > self._order.decision_nbytes:
                # Behind all others of which no use is foreseen. Its own age is of no use beside
                # theirs: numbers of operators are no positions.
                score = distance = UNFORESEEN - self._end - self._cursor
            else:
                distance = float(2 * (self._newest - block.last_use))
                score = distance / self._order.cost(block)
            self._push(score, distance, block_id, block, None)
            return

    def _push(
        self,
        score: float,
        distance: float,
        block_id: int,
        block: BlockSnapshot | None,
        kind: _Kind | None,
    ) -> None:
        self._serial += 1
        heappush(self._heads, (-score, self._serial, distance, block_id, block, kind))
