"""Numbered things by a key, smallest first, without sorting them at each operator."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

#: Outdated entries tolerated, as a multiple of the living ones.
_SLACK = 4

Entry = tuple[float, int]


class ByKey:
    """A heap of numbers, each with a key that is given anew when it changes.

    While a forecast holds, the position of a block's next use does not change until the block is
    used, so one entry per use is enough, and an event takes O(log n) in the long run. Outdated
    entries are dropped when they are met.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._heap: list[Entry] = []
        self._out_count = 0  # entries that are popped and come back

    def note(self, number: int, key: float) -> None:
        """Give a number its key."""
        entries = self._entries
        known = entries.get(number)
        if known is not None and known[0] == key:
            return
        entry = entries[number] = (key, number)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > _SLACK * len(entries) + 64 and not self._out_count:
            self._heap = list(entries.values())
            heapify(self._heap)

    def forget(self, number: int) -> None:
        """Leave a number out from now on; one that is not there is left out already."""
        self._entries.pop(number, None)

    def clear(self) -> None:
        """Leave every number out."""
        self._entries.clear()
        self._heap.clear()

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
        heap, entries = self._heap, self._entries
        taken = []
        while heap and heap[0][0] < limit:
            entry = heappop(heap)
            if entries.get(entry[1]) is entry:
                del entries[entry[1]]
                taken.append(entry[1])
        return taken

    def pop(self) -> Entry | None:
        """Take out the entry with the smallest key, to be handed to `put_back`; None without."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heappop(heap)
            if entries.get(entry[1]) is entry:
                self._out_count += 1
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        """Put back what was popped, unless it is outdated by now."""
        self._out_count -= 1
        if self._entries.get(entry[1]) is entry:
            heappush(self._heap, entry)

    def ascending(self) -> Iterator[Entry]:
        """Yield (key, number), smallest key first, as far as somebody looks."""
        passed: list[Entry] = []
        try:
            while (entry := self.pop()) is not None:
                passed.append(entry)
                yield entry
        finally:
            for entry in passed:
                self.put_back(entry)
