"""A recorded operator that reads a small part of a block, with that part alone."""

from __future__ import annotations

from typing import Any

from ..base.options import settings
from ..devices.base import Device
from ..devices.storages import empty_bytes
from ..interception.read_alone import is_away
from ..memory.block import Block, Replica
from ..memory.budget import SHORTAGES
from ..memory.parts import Place
from .parts_of_tables import piece_of
from .record import OpRecord


class ReadAlone:
    """Does as `interception.read_alone`: pieces stand for what is read of blocks that are away.

    Attributes
    ----------
    blocks : list of Block
        By which it is decided where the operator runs.
    pieces : set of Block
        Those of them that are pieces.
    """

    def __init__(self, replayer: Any, op: OpRecord, blocks: list[Block]) -> None:
        self.blocks = self._whole = blocks
        self.pieces: set[Block] = set()
        self._replayer = replayer
        self._op = op
        self._held: list[Replica] = []
        residency = replayer.residency
        parts = [(replayer.blocks[number], (start, n)) for number, start, n in op.parts]
        if not parts or not residency.books.accelerators or settings.blocks == "off":
            return
        away = {block for block, _ in parts if is_away(block, replayer.device, residency)}
        if op.packs and parts[0][0] in away:
            away = {block for block, _ in parts}
            residency.release(residency.acquire(replayer.host, [parts[-1][0]], [], 0))
        elif op.packs or not away:
            return
        with residency.books.lock:
            for block in away:
                residency.books.note_use(block, residency.books.tick)
        self._held = residency.acquire(replayer.host, [b for b in blocks if b in away], [], 0)
        self._pieces_of: dict[Block, list[Block]] = {block: [] for block in away}
        for block, place in parts:
            if block in away:
                self._pieces_of[block].append(self._piece(block, place))
        if op.packs:
            replayer.host.charge(0, 2 * parts[-1][1][1], "uint8")  # where they end is made at home
        self.blocks = self._in_place(self._pieces_of)
        residency.books.counts.parts_op_count += 1

    def brought_to(self, device: Device) -> list[Block]:
        """Return what it runs with on a device."""
        if not (self._op.packs and self.pieces):
            return self.blocks
        if device.is_host:
            return self._whole
        first = self._replayer.blocks[self._op.parts[0][0]]
        try:
            pack = _packed(self._replayer, self._pieces_of[first])
        except SHORTAGES:
            return self._whole
        self.blocks = self._in_place({**self._pieces_of, first: [pack]})
        self.pieces.clear()  # they are in the pack
        self._pieces_of.clear()
        return self.blocks

    def release(self) -> None:
        """Let go of what is held at home."""
        held, self._held = self._held, []
        self._replayer.residency.release(held)

    def _piece(self, block: Block, place: Place) -> Block:
        books = self._replayer.residency.books
        piece = piece_of(place[1], self._replayer)
        if place[0] >= 0 and not self._replayer.residency.feed.gives_back:
            with books.lock:
                base = block.replicas[books.host].base
                kept: Block | None = books.parts.find(block, base, place)
                if kept is not None:
                    return kept
                if books.parts.note(block, base, place, piece):
                    return piece
        self.pieces.add(piece)
        return piece

    def _in_place(self, pieces_of: dict[Block, list[Block]]) -> list[Block]:
        return [one for block in self._whole for one in pieces_of.get(block, (block,))]


def groups_of(replayer: Any, op: OpRecord) -> set[int]:
    """Return the number of a table of which an operator reads so few groups that these move."""
    return {replayer.blocks[n].block_id for n, _, _ in op.parts} if op.packs else set()


def _packed(replayer: Any, pieces: list[Block]) -> Block:
    """Put pieces together on the accelerator."""
    residency, device = replayer.residency, replayer.device
    nbytes = sum(piece.nbytes for piece in pieces)
    held = residency.acquire(device, pieces, [], 0)
    try:
        residency.tell_operator(device, held, [])
        bases = [replica.base for replica in held]
        device.after_operator(bases, [], flops=0, nbytes=2 * nbytes, dtype_name="uint8")
        block: Block = residency.born(empty_bytes(nbytes, "meta"), device)
        return block
    finally:
        residency.release(held)
