"""How much room the short-lived results of operators are going to need."""

from __future__ import annotations

from array import array

#: Accesses after which a block that an operator made counts as one to be cached, not as passing.
PASSING_AGE = 16
#: Furthest that a need is looked for.
FURTHEST = 512


class TransientPeak:
    """A record of the most bytes that short-lived blocks held at once, by position.

    Positions are `History`'s; `advance` follows it, and forgets what it forgets.
    """

    def __init__(self) -> None:
        self.live_nbytes = 0
        self._peaks = array("q", [0])
        self._start = 0
        self._young: dict[int, tuple[int, int]] = {}  # block -> (position of birth, bytes)

    def birth(self, block_id: int, nbytes: int, position: int) -> None:
        """Count a fresh result."""
        self.death(block_id)
        self._young[block_id] = (position, nbytes)
        self.live_nbytes += nbytes
        if self.live_nbytes > self._peaks[-1]:
            self._peaks[-1] = self.live_nbytes

    def death(self, block_id: int) -> None:
        """Stop counting a block."""
        young = self._young.pop(block_id, None)
        if young is not None:
            self.live_nbytes -= young[1]

    def advance(self, start: int, end: int) -> None:
        """Open the slot before the access at `end`; forget slots before `start`."""
        passed = []
        for block_id, (born, _) in self._young.items():  # the oldest first
            if end - born <= PASSING_AGE:
                break
            passed.append(block_id)
        for block_id in passed:
            self.death(block_id)
        missing = end + 1 - self._start - len(self._peaks)
        if missing > 0:
            self._peaks.extend([self.live_nbytes] * missing)
        if start > self._start:
            del self._peaks[: start - self._start]
            self._start = start

    def reserve_nbytes(self, cursor: int, distance: int) -> int:
        """Return what short-lived blocks will need beyond what they hold, until then."""
        first = cursor - self._start
        if cursor < 0 or first < 0:
            return 0
        peaks = self._peaks[first : first + min(distance, FURTHEST) + 1]
        return max(0, max(peaks, default=0) - self.live_nbytes)
