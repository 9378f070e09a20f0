"""Phase 2, place: decide on which device an operator runs."""

from __future__ import annotations

from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..memory.residency import Residency
from ..strategy import OpSnapshot
from .operands import Operands

#: A table of which rows are read is fetched as a whole once so many operators have read it,
TABLE_USES = 3
#: and if it takes at most this much of the room that is free.
TABLE_SHARE = 0.5


def place(operands: Operands, manager: TensorsManager) -> Device:
    """Decide where an operator runs: the strategy is asked where nothing else decides it."""
    residency, plan = manager.residency, operands.plan
    host, accelerator = residency.books.host, operands.accelerator
    if not residency.books.accelerators or operands.unmanaged:
        return host
    if operands.on_accelerator is not None:
        return accelerator  # the program has put one of its operands there
    if plan.draws_random(operands.args, operands.kwargs) and (
        operands.label is None or operands.label.type == "cpu"
    ):
        return host  # the same seed gives the numbers of plain torch
    for block in operands.written:
        if block.exposure is not None and block.exposure.alive:
            return block.exposure.device
    if plan.reads_part and _table_is_away(operands, residency):
        return host
    if (plan.number, operands.dtype) in manager.unsupported:
        return host
    return _ask_strategy(operands, manager)


def _table_is_away(operands: Operands, residency: Residency) -> bool:
    """Whether the operand of which only a part is read is not on the accelerator, and stays away.

    Where there is room for all of it, it is fetched once it has been read a few times: then its
    rows need not cross the link each time.
    """
    block: Block = operands.refs[0]._ttr_block
    if block.readable_on(operands.accelerator) is not None:
        return False
    ledger = residency.books.ledgers[operands.accelerator]
    room_nbytes = ledger.budget.high_nbytes - ledger.resident_nbytes
    is_wanted = block.use_count >= TABLE_USES and not residency.books.is_pressed
    return not is_wanted or block.nbytes > room_nbytes * TABLE_SHARE


def _ask_strategy(operands: Operands, manager: TensorsManager) -> Device:
    residency, accelerator = manager.residency, operands.accelerator
    if not residency.feed.places:
        return accelerator
    missing = [b for b in operands.blocks if b.ready is None and not b.readable_on(accelerator)]
    snapshot = OpSnapshot(
        name=operands.plan.name,
        operand_nbytes=operands.nbytes,
        missing_nbytes=sum(block.nbytes for block in missing),
        flops=0,
        default_device=accelerator.name,
    )
    return residency.feed.place(snapshot, accelerator)
