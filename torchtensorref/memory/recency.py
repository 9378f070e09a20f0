"""Replicas by their last use, oldest first, without sorting them and without being told of uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

#: Outdated entries tolerated, as a multiple of the living ones.
_SLACK = 4

#: (last use as far as known, bytes negated, number): among equals the largest comes first.
_Entry = tuple[int, int, int]


class Recency:
    """A heap of numbered things by their last use, which grows unseen.

    Whoever uses one writes that down at the thing itself and tells nobody. So an entry may be older
    than the truth, never newer: it is brought up to date when it is met. Each use makes at most one
    entry outdated, so that finding the oldest takes O(log n) per use, in the long run.

    Parameters
    ----------
    last_use_of : callable
        The number of a thing's last use, by the thing's number; None if it is gone.
    """

    def __init__(self, last_use_of: Callable[[int], int | None]) -> None:
        self._last_use_of = last_use_of
        self._entries: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []

    def add(self, number: int, last_use: int, nbytes: int) -> None:
        """Take a thing in."""
        entry = self._entries[number] = (last_use, -nbytes, number)
        heappush(self._heap, entry)
        if len(self._heap) > _SLACK * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def remove(self, number: int) -> None:
        """Leave a thing out; one that is not there is left out already."""
        self._entries.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def oldest(self) -> Iterator[int]:
        """Yield the numbers, least recently used first. Change nothing meanwhile."""
        self._bring_first_up_to_date()
        heap, entries = self._heap, self._entries
        if not heap:
            return
        given = heap[0][2]
        yield given  # mostly it is all that is asked for
        # What comes next is among the children of what was passed: nothing is taken out.
        ahead: list[tuple[_Entry, int]] = [(heap[0], 0)]
        while ahead:
            entry, place = heappop(ahead)
            number = entry[2]
            if place < 0:  # brought up to date on the way
                if number != given:
                    yield number
                given = number
                continue
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child], child))
            if entries.get(number) != entry:
                continue
            last_use = self._last_use_of(number)
            if last_use is None:
                continue
            if last_use > entry[0]:
                heappush(ahead, ((last_use, entry[1], number), -1))
            elif number != given:  # what was left out and taken in again is there twice
                yield number
                given = number

    def _bring_first_up_to_date(self) -> None:
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            last_use_before, nbytes, number = entry
            if entries.get(number) != entry:
                heappop(heap)
                continue
            last_use = self._last_use_of(number)
            if last_use is None:
                del entries[number]
                heappop(heap)
            elif last_use > last_use_before:
                newer = entries[number] = (last_use, nbytes, number)
                heapreplace(heap, newer)
            else:
                return
