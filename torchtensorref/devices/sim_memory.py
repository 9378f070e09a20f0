"""The room of a simulated device: how much is free, and from when on."""

from __future__ import annotations

from heapq import heappop, heappush

__all__ = ["Room"]


class Room:
    """Freed bytes that somebody may still be reading, by the moment when the reading ends.

    Notes
    -----
    The simulated memory has no addresses and therefore no fragmentation. What matters is kept:
    bytes freed now may still be read by operators that were issued but have not run yet, and who
    gets this room must not write it before. Room that is free already is taken first, then the
    room that becomes free first.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[int, int]] = []  # a heap of (free at, nbytes)
        self.busy_nbytes = 0  # their sum

    def give(self, nbytes: int, free_at_ns: int, now_ns: int) -> None:
        """Take back room that is free from `free_at_ns` on."""
        self.settle(now_ns)
        if nbytes and free_at_ns > now_ns:
            heappush(self._freed, (free_at_ns, nbytes))
            self.busy_nbytes += nbytes

    def settle(self, now_ns: int) -> None:
        """Forget the room whose readers have finished: it is like any other."""
        freed = self._freed
        while freed and freed[0][0] <= now_ns:
            self.busy_nbytes -= heappop(freed)[1]

    def take(self, nbytes: int, spare_nbytes: int, now_ns: int) -> int:
        """Use up room for `nbytes`; return the moment from which all of it is free.

        Parameters
        ----------
        nbytes : int
            How much is wanted; no more than `spare_nbytes`.
        spare_nbytes : int
            All that is not resident, busy room included.
        now_ns : int
            The host's clock.

        Returns
        -------
        int
            0 if it was free already.
        """
        self.settle(now_ns)
        missing = nbytes - (spare_nbytes - self.busy_nbytes)
        free_at_ns = 0
        while missing > 0:
            free_at_ns, piece = heappop(self._freed)
            self.busy_nbytes -= piece
            missing -= piece
            if missing < 0:
                heappush(self._freed, (free_at_ns, -missing))
                self.busy_nbytes -= missing
        return free_at_ns
