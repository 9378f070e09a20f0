"""What it costs to give a block back: the farther its next use, the less, and by its kind.

Blocks are given back in the order of `distance / cost per byte`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...strategy import BlockSnapshot, DeviceSnapshot
from .forecaster import Forecaster
from .history import NEVER

#: A block is small below both; small ones that recur are kept, up to a share of the budget.
SMALL_NBYTES = 2**20
SMALL_SHARE = 1 / 512
SMALL_TOTAL_SHARE = 1 / 16
#: How much dearer a byte is that has to be copied home first: little, as the other direction of the
#: link is idle most of the time.
DIRTY_COST = 1.25
#: How much dearer a byte of a larger block is: the block needs its whole room while it comes, so
#: a large one that is kept saves more than its bytes. Per share of the budget that it takes.
LARGE_COST = 8.0

#: Above any distance: blocks that the forecast does not contain go first.
UNFORESEEN = 1e15


def small_limit_nbytes(limit_nbytes: int) -> int:
    """Return the most bytes that a small block has, under a budget."""
    return min(SMALL_NBYTES, int(limit_nbytes * SMALL_SHARE))


def cost_per_byte(block: BlockSnapshot, device: DeviceSnapshot, dirty_cost: float) -> float:
    """Return how much dearer a byte of this block is than one of a small clean one."""
    cost = 1 + LARGE_COST * block.nbytes / device.limit_nbytes
    return cost * dirty_cost if block.is_dirty else cost


def by_score(
    forecaster: Forecaster, device: DeviceSnapshot, blocks: Sequence[BlockSnapshot]
) -> list[BlockSnapshot]:
    """Sort blocks: first to be given back first."""
    newest = max((block.last_use for block in blocks), default=0)
    is_lost = forecaster.cursor < 0

    def score(block: BlockSnapshot) -> float:
        distance = forecaster.next_use(block.block_id)
        if distance == NEVER:
            if is_lost or block.is_persistent:
                return UNFORESEEN - block.last_use
            # Nothing is known of a fresh temporary: give it as long as it has waited.
            distance = 2 * (newest - block.last_use)
        return distance / cost_per_byte(block, device, DIRTY_COST)

    ordered = sorted(blocks, key=lambda block: (-score(block), block.last_use, -block.nbytes))
    return _small_ones_last(forecaster, device, ordered)


def _small_ones_last(
    forecaster: Forecaster, device: DeviceSnapshot, ordered: list[BlockSnapshot]
) -> list[BlockSnapshot]:
    """Put small blocks that recur behind all others: they cost more copies than bytes."""
    small_nbytes = small_limit_nbytes(device.limit_nbytes)
    left_nbytes = int(device.limit_nbytes * SMALL_TOTAL_SHARE)
    kept = []
    for block in reversed(ordered):
        if block.nbytes <= small_nbytes and forecaster.next_use(block.block_id) != NEVER:
            left_nbytes -= block.nbytes
            if left_nbytes < 0:
                break
            kept.append(block)
    if not kept:
        return ordered
    kept_ids = {block.block_id for block in kept}
    return [block for block in ordered if block.block_id not in kept_ids] + kept[::-1]
