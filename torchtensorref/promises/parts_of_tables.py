"""A recorded operator that reads a few rows of a table, on the accelerator with these alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.options import settings
from ..devices.storages import empty_bytes
from ..memory.block import Block, Replica
from ..memory.budget import SHORTAGES
from ..memory.states import CLEAN
from .record import OpRecord


def run_on_parts(replayer: Any, op: OpRecord, blocks: Sequence[Block]) -> bool:
    """Do as `interception.parts_of_tables`; False where the operator runs at home.

    What is packed takes the bytes of the result.
    """
    if not op.reads_part or op.on_host or len(blocks) < 2 or settings.blocks == "off":
        return False
    rows_nbytes = sum(replayer.record.blocks[number].nbytes for number in op.births)
    if not op.births or rows_nbytes >= blocks[0].nbytes:
        return False
    residency, host = replayer.residency, replayer.host
    residency.release(residency.acquire(host, blocks, [], 0))
    with residency.books.lock:
        for block in blocks:
            residency.readiness.settle_at_home(block)
    pieces = []
    indices = op.index_nbytes or [block.nbytes for block in blocks[1:]]
    for nbytes in (rows_nbytes, *indices):
        host.charge(0, 2 * nbytes, "uint8")
        pieces.append(piece_of(nbytes, replayer))
    try:
        born = replayer.run_on(replayer.device, op, pieces, [])
    except SHORTAGES:
        return False
    residency.feed.tell_deaths()
    residency.after_operator(replayer.device, [*blocks, *born])
    return True


def piece_of(nbytes: int, replayer: Any) -> Block:
    """Make a block of so many bytes at home."""
    host = replayer.host
    block = Block(nbytes, replayer.residency.books.tick)
    block.replicas[host] = Replica(block, host, empty_bytes(nbytes, "meta"), CLEAN)
    return block
