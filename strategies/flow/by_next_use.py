"""Numbered things by a key, smallest first, without sorting them at each operator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain

#: Outdated entries tolerated, as a multiple of the living ones.
_SLACK = 4
#: Entries kept sorted between two looks; half as many once there are more.
_NEAR_COUNT = 512

Entry = tuple[float, int]


class ByKey:
    """Numbers by a key that is given anew when it changes: sorted as far as somebody has looked.

    While a forecast holds, the position of a block's next use does not change until the block is
    used, so one entry per use is enough. The first ones are looked at again and again: they are in
    a sorted list, the others in a heap, so that an event takes O(log n) in the long run. Outdated
    entries are dropped when they are met.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._near: list[Entry] = []  # sorted, none outdated, and before all of the others
        self._far: list[Entry] = []  # a heap
        self._most_far = 64  # more entries than that are looked through for outdated ones

    def note(self, number: int, key: float) -> None:
        """Give a number its key."""
        entries, near, far = self._entries, self._near, self._far
        known = entries.get(number)
        if known is not None:
            if known[0] == key:
                return
            self._outdate(known)
        entry = entries[number] = (key, number)
        if near and entry < near[-1]:
            insort(near, entry)
            if len(near) > _NEAR_COUNT:
                self._let_go_from(_NEAR_COUNT // 2)
        else:
            heappush(far, entry)
            if len(far) > self._most_far:
                far[:] = [entry for entry in far if entries.get(entry[1]) is entry]
                heapify(far)
                self._most_far = _SLACK * len(far) + 64

    def _let_go_from(self, place: int) -> None:
        """Look at the near ones from a place on as at those that nobody has looked at."""
        for entry in self._near[place:]:
            heappush(self._far, entry)
        del self._near[place:]

    def forget(self, number: int) -> None:
        """Leave a number out from now on; one that is not there is left out already."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._outdate(entry)

    def _outdate(self, entry: Entry) -> None:
        near = self._near
        if near and entry <= near[-1]:
            del near[bisect_left(near, entry)]

    def fill(self, keys: Mapping[int, float]) -> None:
        """Have these numbers with their keys, and no others."""
        self._entries = {number: (key, number) for number, key in keys.items()}
        self._near.clear()
        self._far = list(self._entries.values())
        heapify(self._far)
        self._most_far = _SLACK * len(self._far) + 64

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, number: int) -> float | None:
        """Return the key of a number; None without."""
        entry = self._entries.get(number)
        return None if entry is None else entry[0]

    def numbers(self) -> list[int]:
        """Return all numbers, in no order."""
        return list(self._entries)

    def entries(self) -> Collection[Entry]:
        """Return (key, number) of all, in no order."""
        return self._entries.values()

    def take_below(self, limit: float) -> list[int]:
        """Leave out the numbers whose key is below a limit; return them."""
        if self._near and self._near[0][0] >= limit:
            return []
        taken = []
        for key, number in self.ascending():
            if key >= limit:
                break
            taken.append(number)
        for number in taken:
            self.forget(number)
        return taken

    def pop(self) -> Entry | None:
        """Take out the entry with the smallest key; None without.

        Whoever pops some hands them to `put_back` before anybody looks through the others.
        """
        if self._near:
            self._let_go_from(0)
        while self._far:
            entry = heappop(self._far)
            if self._entries.get(entry[1]) is entry:
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        """Put back what was popped, unless it is outdated by now."""
        if self._entries.get(entry[1]) is entry:
            heappush(self._far, entry)

    def ascending(self) -> Iterator[Entry]:
        """Yield (key, number), smallest key first. Note none meanwhile; some may be forgotten."""
        return chain(tuple(self._near), self._draw())

    def _draw(self) -> Iterator[Entry]:
        """Yield those that nobody has looked at, which are near from now on."""
        while self._far:
            entry = heappop(self._far)
            if self._entries.get(entry[1]) is entry:
                self._near.append(entry)
                yield entry
