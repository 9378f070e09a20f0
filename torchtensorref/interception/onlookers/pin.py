"""A middleware that keeps what matches a pattern of names on the accelerator."""

from __future__ import annotations

import warnings

from ...base.units import format_nbytes
from ...memory.manager import tensorsManager
from .by_name import ByName
from .kept_blocks import KeptBlocks
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
        self._blocks = KeptBlocks()

    def before(self, op: SeenOperator) -> None:
        """Keep the operands that match."""
        super().before(op)
        for ref in op.refs:
            block = ref._ttr_block
            if self._blocks.has_lost(block):
                self._give_up()
            elif not self._blocks.knows(block) and self._matches(
                tensorsManager.names.of_operand(block)
            ):
                self._blocks.keep(block, self)

    def _give_up(self) -> None:
        gone_nbytes, held_nbytes = self._blocks.give_up_lost()
        if not gone_nbytes:
            return  # nothing, or another thread says it
        warnings.warn(
            f"{self!r}: the budget of {tensorsManager.device} cannot hold "
            f"{format_nbytes(gone_nbytes)} of it beside the operators, so they come and go; "
            f"{format_nbytes(held_nbytes)} stay. Raise tensorsManager.budget, or pin less.",
            RuntimeWarning,
            stacklevel=2,
        )

    def leave(self) -> None:
        """Let everything go: the middleware has left the list. Say first what has not stayed."""
        try:
            super().leave()
            self._give_up()
        finally:
            self._blocks.clear()
