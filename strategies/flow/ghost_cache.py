"""Caches without bytes, run beside the real one, to see if another order had moved less."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator

from .history import NEVER

#: A forecast may move this many times LRU's bytes before it is doubted.
TOLERATED = 1.05
#: Bytes that it may then move beyond, in budgets, before it is dropped: while a program is learned
#: for the first time, and when it has been dropped before.
PATIENCE = 2.0
SECOND_PATIENCE = 1.0
#: It is followed again when it would have moved at most this share of LRU's bytes.
CONVINCING = 0.9


#: Blocks drawn, of which the one used last of all goes: to look at all would take longer the more
#: there are. The best of 64 is among the farthest 5 % in 96 of 100 cases.
DRAWN_COUNT = 64


class GhostCache:
    """A cache of block numbers under a limit, which counts the bytes that it would have fetched.

    The least recently used block goes.
    """

    def __init__(self) -> None:
        self.missed_nbytes = 0
        self._held: OrderedDict[int, int] = OrderedDict()
        self._held_nbytes = 0

    def access(self, block_id: int, nbytes: int, limit_nbytes: int) -> int:
        """Use a block; return the bytes that had to be fetched for it."""
        if block_id in self._held:
            self._held.move_to_end(block_id)
            return 0
        self.birth(block_id, nbytes, limit_nbytes)
        self.missed_nbytes += nbytes
        return nbytes

    def birth(self, block_id: int, nbytes: int, limit_nbytes: int) -> None:
        """Let a block in that needs no copy."""
        if block_id in self._held:
            self.death(block_id)
        while self._held and self._held_nbytes + nbytes > limit_nbytes:
            self._let_one_go()
        self._held[block_id] = nbytes
        self._held_nbytes += nbytes

    def death(self, block_id: int) -> None:
        """Forget a block."""
        self._held_nbytes -= self._held.pop(block_id, 0)

    def become(self, other: GhostCache) -> None:
        """Hold what another ghost holds, with nothing missed yet."""
        self._held = other._held.copy()
        self._held_nbytes = other._held_nbytes
        self.missed_nbytes = 0

    def _let_one_go(self) -> None:
        self._held_nbytes -= self._held.popitem(last=False)[1]


class FarthestGhost(GhostCache):
    """A ghost cache in which a block goes whose next use is far.

    Parameters
    ----------
    next_use : callable
        Forecast distance of a block's next use.
    """

    def __init__(self, next_use: Callable[[int], float]) -> None:
        super().__init__()
        self._next_use = next_use
        self._random = random.Random(0)
        self._numbers: list[int] = []  # of the blocks held, in no order
        self._place: dict[int, int] = {}

    def birth(self, block_id: int, nbytes: int, limit_nbytes: int) -> None:
        """Let a block in that needs no copy."""
        super().birth(block_id, nbytes, limit_nbytes)
        self._place[block_id] = len(self._numbers)
        self._numbers.append(block_id)

    def death(self, block_id: int) -> None:
        """Forget a block."""
        super().death(block_id)
        place = self._place.pop(block_id, None)
        if place is not None:
            last = self._numbers.pop()
            if last != block_id:
                self._numbers[place] = last
                self._place[last] = place

    def become(self, other: GhostCache) -> None:
        """Hold what another ghost holds, with nothing missed yet."""
        super().become(other)
        self._numbers = list(self._held)
        self._place = {block_id: place for place, block_id in enumerate(self._numbers)}

    def _let_one_go(self) -> None:
        # Of few all, by age: of equals the least recently used goes.
        is_few = len(self._held) <= DRAWN_COUNT
        farthest, gone = -1.0, -1
        for block_id in self._held if is_few else self._drawn():
            distance = self._next_use(block_id)
            if distance > farthest:
                farthest, gone = distance, block_id
                if distance == NEVER:
                    break
        self.death(gone)

    def _drawn(self) -> Iterator[int]:
        draw, numbers = self._random.random, self._numbers
        return (numbers[int(draw() * len(numbers))] for _ in range(DRAWN_COUNT))


class Referee:
    """Says whether the forecast may be followed, by the bytes that following it has cost.

    While it is followed, what really was fetched is held against a ghost LRU: the excess is summed
    up, savings made earlier do not count, and at one budget's worth the forecast is dropped. While
    it is not, a ghost that follows it shows when it has become good again; each fall makes the
    proof asked for twice as long.
    """

    def __init__(self, next_use: Callable[[int], float]) -> None:
        self.is_followed = True
        self.fall_count = 0
        self._lru = GhostCache()
        self._forecast = FarthestGhost(next_use)
        self._excess_nbytes = 0.0

    def access(
        self,
        block_id: int,
        nbytes: int,
        fetched_nbytes: int,
        limit_nbytes: int,
        *,
        is_followed: bool = True,
    ) -> None:
        """Hear of an access, and how many bytes were fetched for it on demand.

        Where nobody follows the forecast for want of confidence, what is fetched is not its doing.
        """
        lru_nbytes = self._lru.access(block_id, nbytes, limit_nbytes)
        if self.is_followed:
            if is_followed and (lru_nbytes or fetched_nbytes):
                self._weigh(fetched_nbytes - TOLERATED * lru_nbytes, limit_nbytes)
            return
        self._forecast.access(block_id, nbytes, limit_nbytes)
        if lru_nbytes:
            self._reconsider(limit_nbytes)

    def prefetched(self, nbytes: int, limit_nbytes: int) -> None:
        """Hear of bytes fetched ahead of need."""
        self._weigh(nbytes, limit_nbytes)

    def birth(self, block_id: int, nbytes: int, limit_nbytes: int) -> None:
        """Hear of a block that an operator has made."""
        self._lru.birth(block_id, nbytes, limit_nbytes)
        if not self.is_followed:
            self._forecast.birth(block_id, nbytes, limit_nbytes)

    def death(self, block_id: int) -> None:
        """Hear of a block that is gone."""
        self._lru.death(block_id)
        if not self.is_followed:
            self._forecast.death(block_id)

    def _weigh(self, excess_nbytes: float, limit_nbytes: int) -> None:
        self._excess_nbytes = max(0.0, self._excess_nbytes + excess_nbytes)
        patience = SECOND_PATIENCE if self.fall_count else PATIENCE
        if self._excess_nbytes > patience * limit_nbytes:
            self.is_followed = False
            self.fall_count += 1
            self._start_proof()

    def _reconsider(self, limit_nbytes: int) -> None:
        if self._lru.missed_nbytes < limit_nbytes * 2 ** min(self.fall_count + 1, 16):
            return
        if self._forecast.missed_nbytes <= CONVINCING * self._lru.missed_nbytes:
            self.is_followed = True
            self._excess_nbytes = 0.0
        else:
            self._start_proof()

    def _start_proof(self) -> None:
        self._lru.missed_nbytes = 0
        self._forecast.become(self._lru)
