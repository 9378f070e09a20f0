"""Small blocks that recur: all of them are kept, where they are little together."""

from __future__ import annotations

from .scores import SMALL_TOTAL_SHARE, small_limit_nbytes


class SmallBlocks:
    """What is used again and small, on the device or missing.

    Attributes
    ----------
    numbers : dict of int to int
        Number -> bytes.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._nbytes = 0  # the sum
        self._limit_nbytes = self._most_nbytes = 0

    def set_limit(self, limit_nbytes: int) -> None:
        """Work with another budget from now on."""
        self._limit_nbytes = limit_nbytes
        self._most_nbytes = small_limit_nbytes(limit_nbytes)

    def note(self, block_id: int, nbytes: int) -> None:
        """Note a block that is used again, if it is small."""
        if nbytes <= self._most_nbytes and block_id not in self.numbers:
            self.numbers[block_id] = nbytes
            self._nbytes += nbytes

    def forget(self, block_id: int) -> None:
        """Note that a block is gone."""
        self._nbytes -= self.numbers.pop(block_id, 0)

    def clear(self) -> None:
        """Forget all of them."""
        self.numbers.clear()
        self._nbytes = 0

    @property
    def are_kept(self) -> bool:
        """Whether they are few enough to be kept, all of them."""
        return self._nbytes <= self._limit_nbytes * SMALL_TOTAL_SHARE
