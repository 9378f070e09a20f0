"""Who is who among the results of operators: what a step makes anew each time is one thing.

A block is known by a *symbol*. Its symbol is its number, unless it is recognised as the one that
was made at the same place of the program before: then it bears the symbol of that one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container

#: Births remembered between two accesses to persistent blocks.
BIRTHS_PER_SLOT = 256
#: Share by which what is made anew at one place may differ in size: caches that grow.
GROWTH = 0.5

_NONE: array[int] = array("q")


class AllocationSites:
    """A record of where blocks were made, and the symbols that follow from it.

    A *slot* is the position in the record of accesses before which something happened; a *place* is
    how many operators after the access before. One thread at a time.
    """

    def __init__(self) -> None:
        self.symbol_of: dict[int, int] = {}  # block -> symbol, where they differ
        self.bearer_of: dict[int, int] = {}  # symbol -> block, where they differ
        #: Living results of operators -> slot of their birth.
        self.made: dict[int, int] = {}
        #: Of results that were accessed as persistent ones: symbol -> slots of the births.
        self.born_at: dict[int, array[int]] = {}
        #: Of those that were not, and were recognised.
        self.others_born_at: dict[int, array[int]] = {}
        self._births: dict[int, list[tuple[int, int, int]]] = {}  # slot -> place, nbytes, symbol
        self._last_nbytes: dict[int, int] = {}  # symbol -> size of its last bearer
        self._slots_lived: dict[int, int] = {}  # symbol -> how many its last bearer was alive

    def birth(self, block_id: int, nbytes: int, place: int, *, slot: int, before: int) -> bool:
        """Note that an operator has made a block; say whether such a one stayed before.

        Parameters
        ----------
        before : int
            The slot that this one is expected to repeat; negative if none is.
        """
        born = self._births.setdefault(slot, [])
        if len(born) >= BIRTHS_PER_SLOT:
            return False
        self.made[block_id] = slot
        symbol = block_id
        if 0 <= before != slot:
            symbol = self._born_before(place, nbytes, born, before, block_id)
        born.append((place, nbytes, symbol))
        if symbol != block_id:
            self._last_nbytes[symbol] = nbytes
            self.symbol_of[block_id] = symbol
            self.bearer_of[symbol] = block_id
        if symbol not in self.born_at:
            if symbol != block_id:
                self.others_born_at.setdefault(symbol, array("q")).append(slot)
            return False
        self.born_at[symbol].append(slot)
        return True

    def _born_before(
        self,
        place: int,
        nbytes: int,
        born: list[tuple[int, int, int]],
        before: int,
        otherwise: int,
    ) -> int:
        """Return what was born at this place of an earlier slot, of about this size.

        Or of about that of its last bearer, as a cache is that has grown since.
        """
        rank = sum(other == place for other, _, _ in born)
        for other, other_nbytes, symbol in self._births.get(before, ()):
            if other == place:
                if rank == 0:
                    last_nbytes = self._last_nbytes.get(symbol, other_nbytes)
                    is_alike = _is_alike(nbytes, other_nbytes) or _is_alike(nbytes, last_nbytes)
                    return symbol if is_alike else otherwise
                rank -= 1
        return otherwise

    def death(self, block_id: int, slot: int) -> None:
        """Note that a block is gone."""
        made = self.made.pop(block_id, None)
        symbol = self.symbol_of.pop(block_id, block_id)
        if made is not None:
            self._slots_lived[symbol] = slot - made
        if self.bearer_of.get(symbol) == block_id:
            del self.bearer_of[symbol]

    def stays(self, block_id: int, symbol: int) -> bool:
        """Note an access to a persistent block; say whether it is a result that is new as one."""
        if symbol in self.born_at or block_id not in self.made:
            return False
        slots = self.others_born_at.pop(symbol, None)
        self.born_at[symbol] = slots or array("q", [self.made[block_id]])
        return True

    def is_alike(self, symbol: int, nbytes: int) -> bool:
        """Whether what was made last under a symbol had about this size."""
        born = self._births.get(self.born_at[symbol][-1], ())
        return any(other == symbol and _is_alike(nbytes, size) for _, size, other in born)

    def rename(self, block_id: int, symbol: int, other: int) -> int:
        """Give a block that is new as a persistent one the symbol of one that is gone."""
        del self.born_at[symbol]
        if self.bearer_of.get(symbol) == block_id:
            del self.bearer_of[symbol]
        self.symbol_of[block_id] = other
        self.bearer_of[other] = block_id
        self._born_as(block_id, symbol, other)
        slots = self.born_at[other]
        if slots[-1] < self.made[block_id]:
            slots.append(self.made[block_id])
        return other

    def separate(self, block_id: int) -> int:
        """Give a block a symbol of its own, when a younger one has taken its allocation site.

        Optimizer state is born once where a step makes a temporary each time: it is in use after
        the next birth at that place, so it was not that temporary.
        """
        symbol = ~block_id
        self._born_as(block_id, self.symbol_of.get(block_id, block_id), symbol)
        self.symbol_of[block_id] = symbol
        self.bearer_of[symbol] = block_id
        return symbol

    def _born_as(self, block_id: int, symbol: int, other: int) -> None:
        """Let what is made next time where a block was made be recognised as this one."""
        slot = self.made.get(block_id, -1)
        if slot in self._births:
            self._births[slot] = [
                (place, nbytes, other if born == symbol else born)
                for place, nbytes, born in self._births[slot]
            ]

    def next_birth(self, symbol: int, cursor: int) -> float:
        """Return the slot, after that at the cursor, in which the next bearer was made."""
        slots = self.born_at.get(symbol) or self.others_born_at.get(symbol, _NONE)
        index = bisect_right(slots, cursor)
        return slots[index] if index < len(slots) else math.inf

    def is_another(self, block_id: int, symbol: int, cursor: int, use: int, end: int) -> bool:
        """Whether what the record has used in a slot was made after that at the cursor.

        Parameters
        ----------
        end : int
            The slot that there is now.

        Notes
        -----
        Of what need not last it is also asked how long the last one lived: it may be used in the
        slot in which the other is made from it, as states are, or be taken for another's.
        """
        if self.next_birth(symbol, cursor) > use:
            return False
        return symbol in self.born_at or self._next_death(block_id, symbol) - end < use - cursor

    def next_end(self, block_id: int, symbol: int, cursor: int, end: int) -> float:
        """Return after how many slots a block is likely to be gone, or another in its place."""
        birth = self.next_birth(symbol, cursor) - cursor
        if symbol in self.born_at:
            return birth
        death = self._next_death(block_id, symbol) - end
        return death if 0 <= death < birth else birth

    def _next_death(self, block_id: int, symbol: int) -> float:
        """Return the slot in which a result goes, if it lives as long as the last at its site."""
        return self.made.get(block_id, math.inf) + self._slots_lived.get(symbol, math.inf)

    @property
    def birth_count(self) -> int:
        """How many births are remembered."""
        return sum(map(len, self._births.values()))

    def forget_before(self, start: int, symbols: Container[int]) -> None:
        """Forget births up to a slot, and symbols that are not used any more."""
        self._births = {slot: born for slot, born in self._births.items() if slot > start}
        self.born_at, self.others_born_at = (
            {
                symbol: kept
                for symbol, slots in born_at.items()
                if symbol in symbols and (kept := slots[bisect_left(slots, start) :])
            }
            for born_at in (self.born_at, self.others_born_at)
        )
        self._last_nbytes, self._slots_lived = (
            {symbol: value for symbol, value in of_last.items() if symbol in symbols}
            for of_last in (self._last_nbytes, self._slots_lived)
        )


def _is_alike(nbytes: int, before_nbytes: int) -> bool:
    return abs(nbytes - before_nbytes) <= GROWTH * before_nbytes
