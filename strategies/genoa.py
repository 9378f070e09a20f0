"""Hold nothing: what an operator used goes back as soon as the operator is done.

The device then holds one operator's operands and results at a time. It is slow, and it is simple:
the first thing to try when a result is in doubt, and the smallest budget that can work at all.
What an interrupted operator left behind goes as it does under `lru`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..strategy import BlockSnapshot, DeviceSnapshot, OldestFirst


class Genoa(OldestFirst):
    """Give everything back at once."""

    name = "genoa"
    allows_compiled = False

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return all that the operator used or made."""
        return [block.block_id for block in used]
