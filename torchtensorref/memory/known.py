"""Blocks by number, for as long as they live."""

from __future__ import annotations

import weakref
from collections import deque

from .block import Block


class _Reference(weakref.ref[Block]):
    """A weak reference to a block, and the block's number."""

    __slots__ = ("number",)

    number: int


class KnownBlocks:
    """Blocks by number; one that has died is not there.

    A `weakref.WeakValueDictionary` forgets in a finalizer that is written in Python: an interrupt
    that arrives in it is lost. Here the dead are noted by C, and forgotten with the next birth.
    """

    def __init__(self) -> None:
        self._references: dict[int, _Reference] = {}
        self._dead: deque[_Reference] = deque()

    def __setitem__(self, number: int, block: Block) -> None:
        self._forget_the_dead()
        reference = _Reference(block, self._dead.append)
        reference.number = number
        self._references[number] = reference

    def __len__(self) -> int:
        return len(self._references) - len(self._dead)

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    def get(self, number: int) -> Block | None:
        """Return the block of a number; None if there is none any more."""
        reference = self._references.get(number)
        return None if reference is None else reference()

    def alive(self) -> list[Block]:
        """Return all blocks."""
        references = list(self._references.values())
        return [block for reference in references if (block := reference()) is not None]

    def _forget_the_dead(self) -> None:
        try:
            while self._dead:
                reference = self._dead.popleft()
                if self._references.get(reference.number) is reference:
                    del self._references[reference.number]
        except IndexError:  # another thread was faster
            return
