"""What was foretold becomes what the strategy knows, before the first real operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..base.errors import ConfigError
from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..memory.report import living_blocks
from ..strategy import Access
from .record import Record

__all__ = ["teach"]


def teach(record: Record, module: Any = None) -> None:
    """Tell the strategy in use what a program is about to do; see `Forecast.teach`."""
    residency = tensorsManager.residency
    found = _real_blocks(record, module)
    if not found:
        raise ConfigError(
            "Nothing that was foretold is there: give the real model, whose parameters have the "
            "names of the one that was forecast."
        )
    accesses = list(_accesses(record, found))
    nbytes = sum(block.nbytes for block in found.values())
    with residency.feed.lock:
        residency.feed.tell_foretold(accesses)
    books = residency.books
    with books.lock:
        for block in found.values():
            block.is_persistent, block.ready = True, None
            books.known[block.block_id] = block
        # What is foretold does not fit: the strategy is asked from the first operator on.
        if not books.main.is_host and nbytes > books.ledgers[books.main].budget.limit_nbytes:
            books.is_pressed = True


def _real_blocks(record: Record, module: Any) -> dict[int, Block]:
    """Return the real blocks that recorded ones stand for, by recorded number."""
    wanted = {number: b for number, b in record.blocks.items() if b.is_persistent}
    if module is None:
        known = {block.block_id: block for block in living_blocks(tensorsManager)}
        return {number: known[number] for number in wanted if number in known}
    named = dict((*module.named_parameters(), *module.named_buffers()))
    found = {}
    for number, block in wanted.items():
        ref = named.get(block.name)
        if type(ref) is TensorRef and ref._ttr_block.nbytes == block.nbytes:
            found[number] = ref._ttr_block
    return found


def _accesses(record: Record, found: dict[int, Block]) -> Iterator[Access]:
    for op in record.ops:
        if op.on_host or op.reads_part:
            continue
        written = set(op.writes)
        for number in sorted(op.reads):
            block = found.get(number)
            if block is not None:
                struct = hash((op.kind, block.nbytes))
                yield Access(block.block_id, block.nbytes, struct, True, number in written, False)
