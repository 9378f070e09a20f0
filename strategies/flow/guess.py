"""How many uses are expected at once where a forecast is often wrong."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

#: Uses that are expected at once.
EXPECTED_COUNT = 32
#: At least so many are guessed: one would be told by itself.
LEAST_COUNT = 2


class Guess:
    """Guesses what is used next: more of it as long as most of it is, else as much as was.

    To expect a block takes some microseconds, and to hear of a use by itself some hundred.
    """

    def __init__(self) -> None:
        self._count = LEAST_COUNT
        self._given_count = self._end = 0

    def these(self, likely: Iterable[int], end: int) -> list[int]:
        """Return the first of some blocks, as many as the last guess was right, each once.

        Parameters
        ----------
        likely : iterable of int
            Blocks, the most likely first.
        end : int
            The position that the program has reached.
        """
        if self._given_count:
            used_count = end - self._end
            if 2 * used_count >= self._given_count:
                self._count = min(2 * self._count, EXPECTED_COUNT)
            else:
                self._count = max(2 * used_count, LEAST_COUNT)
        guessed = list(dict.fromkeys(islice(likely, self._count)))
        self._given_count, self._end = len(guessed), end
        return guessed
