"""Leases: uses that the strategy expects, and hears of together instead of one by one.

While memory is short a strategy that follows the program hears of each use of what stays, and to
tell it and ask it takes longer than a small operator. Where it knows what comes, and all of that is
there, the next blocks are opened to the ready path at once (`Readiness.lease`), which notes each of
their uses (`UseLog`). When an operator comes to anything else, those uses are told, in the order of
the program (`StrategyFeed.catch_up`). So nothing is lost but that the strategy is asked less often.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..operators.plan import plan_of
from . import core
from .block import Block
from .ledger import Ledger
from .ref import TensorRef

#: More uses than that are not noted: a strategy that misses some learns anew.
MOST_USES = 4096
#: What is made may fill this share of the budget meanwhile.
RESULTS_SHARE = 1 / 64


class Lease:
    """Blocks that operators may use unheard, until something else happens.

    Parameters
    ----------
    ledger : Ledger
        Of the device where they are.
    blocks : sequence of Block
        Opened to the ready path; their uses are noted from now on. None is kept alive.

    Attributes
    ----------
    nbytes : dict of int to int
        The size of each block, by its number, for those that are gone when their use is told.
    """

    def __init__(self, ledger: Ledger, blocks: Sequence[Block]) -> None:
        self.device = ledger.device
        self._ledger = ledger
        self._most_nbytes = ledger.resident_nbytes + int(ledger.limit_nbytes * RESULTS_SHARE)
        self.nbytes = {block.block_id: block.nbytes for block in blocks}
        self._blocks = [weakref.ref(block) for block in blocks]
        self._results: list[weakref.ref[Block]] = []
        for block in blocks:
            block.logged_as = block.block_id

    def log_result(self, block: Block) -> bool:
        """Have the uses of a result noted that is made meanwhile; whether the lease has to end.

        It has to where what is made fills the device, or the list. The strategy reckons with the
        room that short-lived results take, and hears only of those that are there when it is told.
        Each of them stays in the list: once it has been full, it says no more.
        """
        if len(self._results) >= MOST_USES:
            return False
        block.logged_as = block.block_id
        self._results.append(weakref.ref(block))
        is_full = len(self._results) == MOST_USES
        return is_full or self._ledger.resident_nbytes > self._most_nbytes

    def blocks(self) -> list[Block]:
        """Return the blocks that are alive."""
        return _alive(self._blocks)

    def end(self) -> None:
        """Note no more uses."""
        for block in _alive(self._blocks) + _alive(self._results):
            block.logged_as = 0


def _alive(references: list[weakref.ref[Block]]) -> list[Block]:
    return [block for reference in references if (block := reference()) is not None]


#: One use of a block by a ready operator, noted to be told later: the operator's number, the
#: block's, the operator's kind, whether it writes.
Use = tuple[int, int, int, bool]


class UseLog:
    """The uses that were noted since the last time, here and in C++."""

    def __init__(self) -> None:
        self._uses: list[Use] = []

    def note_all(
        self, tick: int, kind: int, operands: Iterable[Any], targets: Iterable[TensorRef]
    ) -> None:
        """Note what an operator uses and writes, as far as that is wanted."""
        blocks = [operand._ttr_block for operand in operands if isinstance(operand, TensorRef)]
        self.note_blocks(tick, kind, blocks, [target._ttr_block for target in targets])

    def note_blocks(
        self, tick: int, kind: int, blocks: Iterable[Block], written: Sequence[Block]
    ) -> None:
        """Note the same of blocks."""
        for block in blocks:
            if block.logged_as and len(self._uses) < MOST_USES:
                self._uses.append((tick, block.block_id, kind, block in written))

    def take(self) -> list[Use]:
        """Return the uses in the order of operators, as they are told: a block once for each."""
        uses, self._uses = self._uses, []
        for tick, block_id, op, is_written in core.take_uses():
            uses.append((tick, block_id, plan_of(op).kind, is_written))
        found: dict[tuple[int, int], Use] = {}
        for use in uses:
            tick, block_id, _, is_written = use
            if is_written or (tick, block_id) not in found:
                found[tick, block_id] = use
        return [found[key] for key in sorted(found)]


def struct_of(kind: int, nbytes: int) -> int:
    """Return what uses of equally large blocks by one kind of operator have in common."""
    return hash((kind, nbytes))
