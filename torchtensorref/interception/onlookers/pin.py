"""A middleware that keeps what matches a pattern of names on the accelerator."""

from __future__ import annotations

import warnings
import weakref

from ...base.units import format_nbytes
from ...memory.block import Block
from ...memory.manager import tensorsManager
from .by_name import ByName
from .seen import SeenOperator


class Pin(ByName):
    """Keep the parameters and buffers that match resident, from their first use on.

    Parameters
    ----------
    pattern : str
        Names of modules or tensors: ``model.layers.0-3``, ``**.embed_tokens`` (`name_patterns`).

    Notes
    -----
    They are evicted by nobody, unless an operator would not fit the budget else: then those that
    were used last go, and a warning says how much does not fit. It ends when the middleware leaves
    the list.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self._kept: weakref.WeakSet[Block] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[Block] = weakref.WeakSet()

    def before(self, op: SeenOperator) -> None:
        """Keep the operands that match."""
        super().before(op)
        for ref in op.refs:
            block = ref._ttr_block
            if block in self._kept and not block.is_kept:
                self._give_up()
            elif not (block in self._kept or block in self._given_up) and self._matches(
                tensorsManager.names.of_operand(block)
            ):
                block.is_kept = True
                self._kept.add(block)

    def _give_up(self) -> None:
        gone = [block for block in self._kept if not block.is_kept]
        self._kept.difference_update(gone)
        self._given_up.update(gone)
        nbytes = format_nbytes(sum(block.nbytes for block in gone))
        held = format_nbytes(sum(block.nbytes for block in self._kept))
        warnings.warn(
            f"{self!r}: the budget of {tensorsManager.device} cannot hold "
            f"{nbytes} of it beside the operators, so they come and go; {held} stay. Raise "
            "tensorsManager.budget, or pin less.",
            RuntimeWarning,
            stacklevel=2,
        )

    def leave(self) -> None:
        """Let everything go: the middleware has left the list. Say first what has not stayed."""
        try:
            super().leave()
            if not all(block.is_kept for block in self._kept):
                self._give_up()
        finally:
            for block in self._kept:
                block.is_kept = False
            self._kept.clear()
            self._given_up.clear()
