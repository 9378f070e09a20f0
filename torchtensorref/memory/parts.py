"""Parts of blocks that are at home: those that are read again stay blocks of their own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from .block import Block

#: Places that are remembered of one block; beyond it all are forgotten.
MOST_PLACES = 4096

#: Where a part is in its block: its first byte, and how many there are.
Place = tuple[int, int]


@dataclass(slots=True)
class _PartsOf:
    """The parts of one block: None for a place that was read once."""

    base: weakref.ref[torch.Tensor]
    at: dict[Place, Block | None] = field(default_factory=dict)


class Parts:
    """Parts that operators have read of blocks which are away (lock of the books held).

    Notes
    -----
    A part has its home in the memory of its block, and copies of its own on accelerators. These are
    right as long as nobody writes the block, wherever: who does, or gives its memory to others,
    exchanges that, or brings the block to an accelerator, calls `forget` before and, where others
    may have read meanwhile, afterwards.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Block, _PartsOf] = weakref.WeakKeyDictionary()

    def find(self, block: Block, base: torch.Tensor, place: Place) -> Block | None:
        """Return the part at a place, if it is kept.

        Parameters
        ----------
        base : Tensor
            What owns the block's bytes at home now.
        """
        known = self._of.get(block)
        return known.at.get(place) if known is not None and known.base() is base else None

    def note(self, block: Block, base: torch.Tensor, place: Place, part: Block) -> bool:
        """Note that a part is read; whether it was before, and so is kept as one that lasts."""
        known = self._of.get(block)
        if known is None or known.base() is not base or len(known.at) >= MOST_PLACES:
            known = self._of[block] = _PartsOf(weakref.ref(base))
        recurs = place in known.at
        known.at[place] = part if recurs else None
        part.is_persistent = recurs
        return recurs

    def forget(self, block: Block) -> None:
        """Let go of all parts of a block."""
        if self._of:
            self._of.pop(block, None)

    def blocks(self) -> set[Block]:
        """Return all that are kept."""
        return {part for known in self._of.values() for part in known.at.values() if part}

    def clear(self) -> None:
        """Let go of all parts."""
        self._of.clear()
