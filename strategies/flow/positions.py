"""Where a block stands in the order of eviction: at the position of its next use, if it has one."""

from __future__ import annotations

from .forecaster import Forecaster
from .history import NEVER
from .scores import UNFORESEEN

#: How far ahead the next use of a small block counts as being where none is foreseen.
UNFORESEEN_PERIODS = 4
#: What goes by itself within so many accesses is not copied home to fetch something ahead.
GOES_SOON = 24


def position_of(
    forecaster: Forecaster,
    block_id: int,
    nbytes: int,
    last_use: int,
    *,
    is_dirty: bool,
    is_temporary: bool,
    decision_nbytes: int,
) -> tuple[float, float | None, bool]:
    """Return where a block stands now.

    Parameters
    ----------
    last_use : int
        Position of its last access.
    is_temporary : bool
        An operator has made it, and it need not last.
    decision_nbytes : int
        What is smaller is copied in less time than it takes to decide about it.

    Returns
    -------
    float
        Its position; the farthest goes first.
    float or None
        The position from which on it has to be put anew, unless it was used before; None if never.
    bool
        Whether a use of it is foreseen.
    """
    cursor, distance = forecaster.cursor, forecaster.next_use(block_id)
    if distance != NEVER:
        return cursor + distance, cursor + distance, True
    if is_temporary and (end := forecaster.next_end(block_id)) != NEVER:
        # It is used no more, and takes a copy home if it does not go by itself.
        return cursor + max(end, forecaster.period), cursor + end, False
    if nbytes <= decision_nbytes:
        # To give it back frees little: rather a larger one that is used again.
        ahead = UNFORESEEN_PERIODS * forecaster.period
        return cursor + ahead, cursor + ahead // 2, False
    if is_dirty and (end := forecaster.next_end(block_id)) != NEVER:
        # It goes by itself then, and takes no copy home.
        return cursor + end, cursor + end, False
    return UNFORESEEN - last_use, None, False


def is_foreseen(forecaster: Forecaster, block_id: int) -> bool:
    """Whether a use of a temporary is foreseen, or its end."""
    if forecaster.next_use(block_id) != NEVER:
        return True
    return GOES_SOON < forecaster.next_end(block_id) != NEVER
