"""What was foretold becomes what the strategy knows, before the first real operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..base.errors import ConfigError
from ..memory.block import Block, unused_number
from ..memory.manager import tensorsManager
from ..memory.ref import TensorRef
from ..memory.report import living_blocks
from ..strategy import PERSISTENT_AFTER, Access, Birth, Death
from .record import Record

__all__ = ["teach"]


def teach(record: Record, module: Any = None) -> None:
    """Tell the strategy in use what a program is about to do; see `Forecast.teach`."""
    if module is not None and not isinstance(module, nn.Module):
        raise ConfigError(f"teach() takes the real model, a torch.nn.Module, not {module!r}.")
    residency = tensorsManager.residency
    found = _real_blocks(record, module)
    if not found:
        raise ConfigError(
            "Nothing that was foretold is there: build the real model first, and give it to "
            "Forecast.teach if what is outside of it has other names than when it was forecast."
        )
    events = list(_events(record, found))
    nbytes = sum(block.nbytes for block in found.values())
    with residency.feed.lock:
        residency.feed.tell_foretold(events)
    books = residency.books
    with books.lock:
        for block in found.values():
            block.is_persistent, block.ready = True, None
            books.known[block.block_id] = block
        # What is foretold does not fit: the strategy is asked from the first operator on.
        if not books.main.is_host and nbytes > books.ledgers[books.main].budget.limit_nbytes:
            books.is_pressed, books.short_at = True, books.tick


def _real_blocks(record: Record, module: Any) -> dict[int, Block]:
    """Return the real blocks that recorded ones stand for, by recorded number."""
    wanted = {number: b for number, b in record.blocks.items() if b.is_persistent}
    if module is None:
        known = {block.block_id: block for block in living_blocks(tensorsManager)}
        if not record.is_from_file:
            return {number: known[number] for number in wanted if number in known}
        called = {tensorsManager.names.of_block(number): b for number, b in known.items()}
        return {
            number: called[block.name]
            for number, block in wanted.items()
            if block.name in called and called[block.name].nbytes == block.nbytes
        }
    named = dict((*module.named_parameters(), *module.named_buffers()))
    found = {}
    for number, block in wanted.items():
        ref = named.get(block.name)
        if isinstance(ref, TensorRef) and ref._ttr_block.nbytes == block.nbytes:
            found[number] = ref._ttr_block
    return found


def _events(record: Record, found: dict[int, Block]) -> Iterator[Access | Birth | Death]:
    """Yield what the strategy would be told, were all of it to run on the accelerator.

    A result is told of before the next use of a block that stays, if it lives until then.
    """
    ids: dict[int, int] = {}  # of what is made and was told of
    born: dict[int, int] = {}  # what is made -> at which operator
    unheard: list[int] = []
    told_at = 0
    for index, op in enumerate(record.each(), 1):
        alone = {number for number, _, _ in op.parts}
        told = () if op.on_host or op.reads_part else op.reads
        reads = sorted(number for number in told if number not in alone)
        if any(number in found for number in reads):
            for number in unheard:
                ids[number] = unused_number()
                place = max(0, born[number] - told_at)
                yield Birth(ids[number], record.blocks[number].nbytes, place)
            unheard.clear()
            told_at = index
        for number in reads:
            stays = number in found or index - born.get(number, index) > PERSISTENT_AFTER
            block_id = found[number].block_id if number in found else ids.get(number)
            if block_id is not None:
                nbytes = record.blocks[number].nbytes
                struct = hash((op.kind, nbytes))
                yield Access(block_id, nbytes, struct, stays, number in op.writes, False)
        born.update(dict.fromkeys(op.births, index))
        unheard += op.births
        for number in op.deaths:
            if number in ids:
                yield Death(ids.pop(number))
            elif number in unheard:
                unheard.remove(number)
    yield from map(Death, ids.values())
