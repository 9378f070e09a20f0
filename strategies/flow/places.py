"""Where the record is as the recent past is: a program that has lost its place is found again."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Lengths of the contexts that are looked up when the cursor has lost its place, longest first.
GRAM_LENGTHS = (24, 8, 3, 1)
#: Places remembered per context.
PLACES_PER_GRAM = 6
#: A program of ever new order has all its contexts indexed: of so many as this share of the
#: accesses kept, and of as many before. Each takes a kilobyte; of what is forgotten the last uses
#: are tried.
INDEXED_SHARE = 1 / 8
#: Longest agreement that is told apart from a longer one.
LONGEST_AGREEMENT = 4096

_Grams = dict[int, list[int]]


class Places:
    """Places in a record, by the accesses before them.

    Parameters
    ----------
    symbols : list of int
        The record's accesses, in order. The record appends to it, and forgets its beginning.
    capacity : int
        The most accesses that it keeps.
    """

    def __init__(self, symbols: list[int], capacity: int) -> None:
        self._symbols = symbols
        self._most = math.ceil(capacity * INDEXED_SHARE)
        self._grams: tuple[_Grams, ...] = tuple({} for _ in GRAM_LENGTHS)
        self._older_grams: tuple[_Grams, ...] = tuple({} for _ in GRAM_LENGTHS)

    def note(self, end: int) -> None:
        """Remember the place after the record's last access, whose position is before `end`."""
        symbols = self._symbols
        if len(self._grams[0]) >= self._most:  # of the longest there are the most
            self.forget_half()
        for length, places_by_gram in zip(GRAM_LENGTHS, self._grams, strict=True):
            if len(symbols) < length:
                continue
            places = places_by_gram.setdefault(hash(tuple(symbols[-length:])), [])
            places.append(end)
            if len(places) > PLACES_PER_GRAM:
                del places[0]

    def find(self, start: int, end: int, uses: Sequence[int], least: int) -> int:
        """Return where the recent past agrees with the record longest; the newest on ties.

        Parameters
        ----------
        start, end : int
            Positions of the oldest access of the record, and of the one to come.
        uses : sequence of int
            Where the record has what was accessed last, for want of a place.
        least : int
            A place has to agree for so many accesses.

        Returns
        -------
        int
            -1 if there is none.
        """
        for rank, length in enumerate(GRAM_LENGTHS):
            if rank and length < least:
                break
            if len(self._symbols) < length:
                continue
            gram = hash(tuple(self._symbols[-length:]))
            places = self._older_grams[rank].get(gram, []) + self._grams[rank].get(gram, [])
            if length == 1 and not places:
                places = [use + 1 for use in uses[-PLACES_PER_GRAM:]]
            found = [
                (agreed, place)
                for place in places
                if start <= place < end and (agreed := self._agreement(place - start)) >= least
            ]
            if found:
                return max(found)[1]
        return -1

    def _agreement(self, then: int) -> int:
        """Return for how many accesses the record before an index equals the newest ones."""
        symbols, now = self._symbols, len(self._symbols)
        longest = min(then, LONGEST_AGREEMENT)
        agreed, stride, is_growing = 0, 16, True
        while stride and agreed < longest:
            stride = min(stride, longest - agreed)
            left, right = then - agreed, now - agreed
            if symbols[left - stride : left] == symbols[right - stride : right]:
                agreed += stride
                stride = stride * 2 if is_growing else stride // 2
            else:
                is_growing, stride = False, stride // 2
        return agreed

    def forget_half(self) -> None:
        """Forget what was noted before half was forgotten last."""
        self._older_grams, self._grams = self._grams, tuple({} for _ in GRAM_LENGTHS)
