"""Numbered things by a key, smallest first, without sorting them at each operator."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

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
        self._near: list[Entry] = []  # sorted, and before all of the others
        self._far: list[Entry] = []  # a heap

    def note(self, number: int, key: float) -> None:
        """Give a number its key."""
        entries, near, far = self._entries, self._near, self._far
        known = entries.get(number)
        if known is not None and known[0] == key:
            return
        entry = entries[number] = (key, number)
        if near and entry < near[-1]:
            insort(near, entry)
            if len(near) > _NEAR_COUNT:
                self._let_go_of_half()
        else:
            heappush(far, entry)
            if len(far) > _SLACK * len(entries) + 64:
                far[:] = [entry for entry in far if entries.get(entry[1]) is entry]
                heapify(far)

    def _let_go_of_half(self) -> None:
        """Look at the later half of the near ones as at those that nobody has looked at."""
        half = len(self._near) // 2
        for entry in self._near[half:]:
            if self._entries.get(entry[1]) is entry:
                heappush(self._far, entry)
        del self._near[half:]

    def forget(self, number: int) -> None:
        """Leave a number out from now on; one that is not there is left out already."""
        self._entries.pop(number, None)

    def clear(self) -> None:
        """Leave every number out."""
        self._entries.clear()
        self._near.clear()
        self._far.clear()

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
            del self._entries[number]
        return taken

    def pop(self) -> Entry | None:
        """Take out the entry with the smallest key, to be handed to `put_back`; None without."""
        entries, near, far = self._entries, self._near, self._far
        while near or far:
            entry = near.pop(0) if near else heappop(far)
            if entries.get(entry[1]) is entry:
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        """Put back what was popped, unless it is outdated by now."""
        if self._entries.get(entry[1]) is entry:
            del self._entries[entry[1]]
            self.note(entry[1], entry[0])

    def ascending(self) -> Iterator[Entry]:
        """Yield (key, number), smallest key first. Note none meanwhile; some may be forgotten."""
        entries, near, far = self._entries, self._near, self._far
        while near and entries.get(near[0][1]) is not near[0]:
            del near[0]
        for entry in near:
            if entries.get(entry[1]) is entry:
                yield entry
        while far:
            entry = heappop(far)
            if entries.get(entry[1]) is entry:
                near.append(entry)
                yield entry
