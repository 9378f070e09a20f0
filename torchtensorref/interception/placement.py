"""Phase 2, place: decide on which device an operator runs."""

from __future__ import annotations

from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..memory.op_times import OpCost
from ..memory.placing import Call, choose
from ..memory.residency import Residency
from ..memory.spreading import choose_among
from .operands import Operands
from .staging import expected_results

#: A table of which rows are read is fetched as a whole once so many operators have read it,
TABLE_USES = 3
#: and if it takes at most this much of the room that is free.
TABLE_SHARE = 0.5


def place(operands: Operands, manager: TensorsManager, placed: Device | None = None) -> Device:
    """Decide where an operator runs: the strategy is asked where nothing else decides it.

    What a middleware says, `placed`, comes after what must be, and before what is better.
    """
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
    if placed is not None:
        return placed
    table = operands.table if plan.reads_part else None
    if table is not None and table_is_away(table._ttr_block, accelerator, residency):
        operands.reads_part_alone = True
        return host  # or on the accelerator, with what it reads of the table
    if (plan.number, operands.dtype) in manager.unsupported:
        return host
    return _ask_strategy(operands, manager)


def table_is_away(block: Block, accelerator: Device, residency: Residency) -> bool:
    """Whether a block of which only a part is read is not on the accelerator, and stays away.

    Where there is room for all of it, and it may stay, it is fetched once it has been read a few
    times: then its rows need not cross the link each time.
    """
    if any(block.readable_on(one) is not None for one in residency.books.accelerators):
        return False
    ledger = residency.books.ledgers[accelerator]
    room_nbytes = ledger.budget.high_nbytes - ledger.resident_nbytes
    is_wanted = not residency.is_under_pressure and block.use_count >= TABLE_USES
    return not is_wanted or block.nbytes > room_nbytes * TABLE_SHARE


def _ask_strategy(operands: Operands, manager: TensorsManager) -> Device:
    residency, accelerator = manager.residency, operands.accelerator
    if residency.feed.spreads:
        name, blocks, label = operands.plan.name, operands.blocks, operands.label
        accelerator = choose_among(residency, name, blocks, label)
    if not residency.feed.places:
        return accelerator
    plan = operands.plan
    cost = residency.times.costs.get(operands.sizes)
    call = Call(
        plan.name,
        plan.kind,
        cost or OpCost(0, operands.nbytes, str(operands.dtype).removeprefix("torch.")),
        # What it computes is known once it has run somewhere.
        is_movable=cost is not None
        and not (
            plan.writes or operands.written or plan.draws_random(operands.args, operands.kwargs)
        ),
        result_nbytes=expected_results(operands, manager),
    )
    answer = choose(residency, call, operands.blocks, accelerator)
    if answer.is_at_home:
        operands.instead_of = accelerator
    return answer.device
