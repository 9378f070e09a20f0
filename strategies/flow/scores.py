"""What it costs to give a block back: the farther its next use, the less, and by its kind.

Blocks are given back in the order of `distance / cost per byte`.
"""

from __future__ import annotations

import math

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

#: How finely the cost of a decision is told apart.
STEPS_PER_OCTAVE = 4

#: Above any distance: blocks that the forecast does not contain go first.
UNFORESEEN = 1e15


def small_limit_nbytes(limit_nbytes: int) -> int:
    """Return the most bytes that a small block has, under a budget."""
    return min(SMALL_NBYTES, int(limit_nbytes * SMALL_SHARE))


def cost_per_byte(
    nbytes: int, is_dirty: bool, limit_nbytes: int, decision_nbytes: int = 0
) -> float:
    """Return how much dearer a byte of such a block is than one of a small clean one.

    Parameters
    ----------
    decision_nbytes : int, optional
        What the host could copy while it decides about a block, of whatever size: rounded, for
        blocks of nearly the same cost are kept together.
    """
    cost = 1 + LARGE_COST * nbytes / limit_nbytes
    if decision_nbytes:
        octaves = math.log2(1 + decision_nbytes / max(nbytes, 1))
        cost *= 2 ** (round(octaves * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)
    return cost * DIRTY_COST if is_dirty else cost
