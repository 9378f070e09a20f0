"""Leases: uses that the strategy expects, and hears of together instead of one by one.

While memory is short a strategy that follows the program hears of each use of what stays, and to
tell it and ask it takes longer than a small operator. Where it knows what comes, and all of that is
there, the next blocks are opened to the ready path at once (`Readiness.lease`). When an operator
comes to anything else, those that were used are read off the numbers of the operators that used
them last, and told in that order (`StrategyFeed.catch_up`). So nothing is lost but that the
strategy is asked less often.
"""

from __future__ import annotations

import weakref

from ..devices.base import Device
from .block import Block


class Lease:
    """Blocks that operators may use unheard, until something else happens.

    Parameters
    ----------
    device : Device
        Where they are.
    since : int
        Number of the last operator before it.
    result_nbytes : int
        Results of more bytes than that, together, end it: the strategy reckons with the room that
        short-lived ones take, and hears only of those that are there when it is told.
    """

    def __init__(self, device: Device, since: int, result_nbytes: int) -> None:
        self.device = device
        self.result_nbytes = result_nbytes
        self._since = since
        self._uses: list[tuple[weakref.ref[Block], int]] = []

    def add(self, block: Block, struct: int) -> None:
        """Note a block that was opened, and what its use will look like."""
        self._uses.append((weakref.ref(block), struct))

    @property
    def is_open(self) -> bool:
        """Whether there is a block."""
        return bool(self._uses)

    def blocks(self) -> list[Block]:
        """Return the blocks that are alive."""
        return [block for reference, _ in self._uses if (block := reference()) is not None]

    def used(self) -> list[tuple[int, Block, int]]:
        """Return (operator, block, struct) of what was used, in the order of the program."""
        found = [
            (block.last_use, block.block_id, block, struct)
            for reference, struct in self._uses
            if (block := reference()) is not None and block.last_use > self._since
        ]
        return [(tick, block, struct) for tick, _, block, struct in sorted(found)]
