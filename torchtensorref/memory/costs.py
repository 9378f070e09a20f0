"""What each block has cost: how often it was fetched, why it was given up, how soon it was back.

Kept by number, so that a report can tell which blocks the budget was too small for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

#: Fetching again, on demand, what was given up so few operators ago is thrash.
THRASH_WITHIN = 64
#: How the cause ends where a strategy keeps nothing on purpose: that is no thrash.
GIVEN_BACK = "given back"
#: So many blocks are remembered; beyond it the cheaper half is forgotten.
MOST_BLOCKS = 20_000


class Kept(NamedTuple):
    """What a program keeps: parameters, buffers, what has outlived many operators."""

    nbytes: int
    block_ids: frozenset[int]
    #: Of them, what optimizers keep beside the parameters.
    state_nbytes: int = 0


@dataclass(slots=True)
class BlockCost:
    """What one block has cost since the counts were last reset."""

    block_id: int
    nbytes: int
    fetch_count: int = 0
    evict_count: int = 0
    #: Fetches of what had been evicted for want of room: more of it would save these.
    again_count: int = 0
    #: Bytes of its parts, which operators fetched that ran in blocks, and what the largest of these
    #: operators would need to run as one.
    parts_nbytes: int = 0
    whole_op_nbytes: int = 0
    #: Why it was given up the last time, and at which operator; -1: it was not.
    why: str = ""
    evicted_at: int = -1

    @property
    def fetched_nbytes(self) -> int:
        """Bytes that were copied for it."""
        return self.fetch_count * self.nbytes + self.parts_nbytes

    def again_nbytes(self, room_nbytes: int) -> int:
        """Bytes that staying would have saved: what came after it had been evicted for room.

        Its parts come and go as long as an operator that uses it has no room as a whole.
        """
        nbytes = self.again_count * self.nbytes
        if not self.parts_nbytes or self.whole_op_nbytes > room_nbytes:
            return nbytes
        first_nbytes = 0 if self.fetch_count else self.nbytes  # it has come as a whole, or has to
        return nbytes + max(self.parts_nbytes - first_nbytes, 0)


@dataclass
class Costs:
    """What the blocks have cost, and why replicas were given up (lock of the books not needed)."""

    by_block: dict[int, BlockCost] = field(default_factory=dict)
    #: Bytes given up, by cause.
    evicted_nbytes: dict[str, int] = field(default_factory=dict)
    fetched_nbytes: int = 0
    thrash_count: int = 0
    thrash_nbytes: int = 0
    #: The most that one operator has needed at once, operands and results, and its name.
    largest_op_nbytes: int = 0
    largest_op: str = ""
    #: The blocks that pieces are parts of, by the pieces' numbers, while their operator runs.
    _whole_of: dict[int, BlockCost] = field(default_factory=dict)

    def note_part(self, part_id: int, block_id: int, nbytes: int, whole_op_nbytes: int) -> None:
        """Count what is copied for a piece as copied for the block that it is a part of."""
        cost = self._whole_of[part_id] = self._of(block_id, nbytes)
        cost.whole_op_nbytes = max(cost.whole_op_nbytes, whole_op_nbytes)

    def forget_parts(self, part_ids: Iterable[int]) -> None:
        """Their operator has run."""
        for part_id in part_ids:
            self._whole_of.pop(part_id, None)

    def note_fetch(self, block_id: int, nbytes: int, tick: int, *, ahead: bool) -> None:
        """Count a copy to an accelerator."""
        self.fetched_nbytes += nbytes
        whole = self._whole_of.get(block_id)
        if whole is not None:
            whole.parts_nbytes += nbytes
            return
        cost = self._of(block_id, nbytes)
        cost.fetch_count += 1
        if cost.evicted_at < 0:
            return
        cost.again_count += 1
        if not ahead and tick - cost.evicted_at < THRASH_WITHIN:
            self.thrash_count += 1
            self.thrash_nbytes += nbytes
        cost.evicted_at = -1

    def note_eviction(self, block_id: int, nbytes: int, why: str, tick: int) -> None:
        """Count bytes that were freed."""
        self.evicted_nbytes[why] = self.evicted_nbytes.get(why, 0) + nbytes
        if block_id in self._whole_of:
            return
        cost = self._of(block_id, nbytes)
        cost.evict_count += 1
        cost.why, cost.evicted_at = why, -1 if why.endswith(GIVEN_BACK) else tick

    def note_operator(self, name: str, nbytes: int) -> None:
        """Remember the largest operator."""
        if nbytes > self.largest_op_nbytes:
            self.largest_op_nbytes, self.largest_op = nbytes, name

    def dearest(self, count: int) -> list[BlockCost]:
        """Return the blocks for which most was copied, dearest first."""
        costs = list(self.by_block.values())
        return heapq.nlargest(count, costs, key=lambda cost: (cost.fetched_nbytes, -cost.block_id))

    def missing_nbytes(self, kept: Kept, budget_nbytes: int) -> int:
        """Return what a budget lacks to hold what is kept, and the largest operator beside it."""
        return max(kept.nbytes + self.largest_op_nbytes - budget_nbytes, 0)

    def saved_by(self, more_nbytes: int, budget_nbytes: int, kept: Kept) -> int:
        """Return how much might not have been fetched with so much more room than a budget.

        Under a strategy that knows what comes next. Of what is kept and came again and again: as
        much as more of it has room. Where some blocks came more often than others, and of what is
        not kept: what staying of these would have saved, the most often fetched first.
        """
        room_nbytes, missing = budget_nbytes + more_nbytes, self.missing_nbytes(kept, budget_nbytes)
        share = min(more_nbytes / missing, 1.0) if missing else 0.0
        costs = list(self.by_block.values())
        again = sum(c.again_nbytes(room_nbytes) for c in costs if c.block_id in kept.block_ids)
        return max(int(share * again), self._saved_by_staying(more_nbytes, room_nbytes))

    def _saved_by_staying(self, more_nbytes: int, room_nbytes: int) -> int:
        saved = 0
        costs = list(self.by_block.values())  # at once: other threads add some
        again = [(cost.again_nbytes(room_nbytes), cost.nbytes) for cost in costs]
        again = [(nbytes, size) for nbytes, size in again if nbytes]
        for nbytes, size in sorted(again, key=lambda one: -one[0] / one[1]):
            if size <= more_nbytes:
                more_nbytes -= size
                saved += nbytes
        return saved

    def _of(self, block_id: int, nbytes: int) -> BlockCost:
        cost = self.by_block.get(block_id)
        if cost is None:
            if len(self.by_block) >= MOST_BLOCKS:
                kept = self.dearest(MOST_BLOCKS // 2)
                self.by_block = {cost.block_id: cost for cost in kept}
            cost = self.by_block[block_id] = BlockCost(block_id, nbytes)
        return cost
