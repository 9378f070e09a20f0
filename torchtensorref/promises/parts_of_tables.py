"""A recorded operator that reads a small part of a block, on the accelerator with that alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..base.options import settings
from ..devices.storages import empty_bytes
from ..interception.read_alone import is_away
from ..memory.block import Block, Replica
from ..memory.budget import SHORTAGES
from ..memory.states import CLEAN
from .record import OpRecord


def run_on_parts(replayer: Any, op: OpRecord, blocks: Sequence[Block]) -> bool:
    """Do as `interception.parts_of_tables`; False where the operator runs at home.

    What is packed takes the bytes of the result, and the indices those that they have.
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
    pieces = [_piece(nbytes, replayer) for nbytes in (rows_nbytes, *(b.nbytes for b in blocks[1:]))]
    try:
        born = replayer.run_on(replayer.device, op, pieces, [])
    except SHORTAGES:
        return False
    residency.feed.tell_deaths()
    residency.after_operator(replayer.device, [*blocks, *born])
    return True


def read_alone(
    replayer: Any, op: OpRecord, blocks: list[Block]
) -> tuple[list[Block], frozenset[Block], list[Replica]]:
    """Do as `interception.read_alone`.

    Returns
    -------
    list of Block
        What the operator runs with.
    frozenset of Block
        Those of it that are pieces.
    list of Replica
        What is held at home meanwhile.
    """
    residency, host = replayer.residency, replayer.host
    parts = [(replayer.blocks[number], nbytes) for number, nbytes in op.parts]
    if not parts or not residency.books.accelerators or settings.blocks == "off":
        return blocks, frozenset(), []
    if not op.packs:
        parts = [part for part in parts if is_away(part[0], replayer.device, residency)]
    elif not is_away(parts[0][0], replayer.device, residency):
        parts = []
    if not parts:
        return blocks, frozenset(), []
    wholes = list(dict.fromkeys(block for block, _ in parts))
    with residency.books.lock:
        for block in wholes:
            residency.books.note_use(block, residency.books.tick)
    held = residency.acquire(host, wholes, [], 0)
    if op.packs:
        residency.release(held)
        held = []
    pieces: dict[Block, list[Block]] = {block: [] for block in wholes}
    for block, nbytes in parts:
        pieces[block].append(_piece(nbytes, replayer, is_packed=op.packs))
    residency.books.counts.parts_op_count += 1
    found = [one for block in blocks for one in pieces.get(block, (block,))]
    return found, frozenset(chain.from_iterable(pieces.values())), held


def _piece(nbytes: int, replayer: Any, *, is_packed: bool = True) -> Block:
    host = replayer.host
    if is_packed:
        host.charge(0, 2 * nbytes, "uint8")
    block = Block(nbytes, replayer.residency.books.tick)
    block.replicas[host] = Replica(block, host, empty_bytes(nbytes, "meta"), CLEAN)
    return block
