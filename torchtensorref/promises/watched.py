"""The watched path of a replay: as `interception/watched_path.py` runs what lacks no decision."""

from __future__ import annotations

from typing import Protocol

from ..devices.sim.device import SimDevice
from ..interception.watched_path import closed_among, may_be_fetched, may_be_watched
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.residency import Residency
from .read_alone import groups_of
from .record import OpRecord

__all__ = ["Replay", "run_watched"]


class Replay(Protocol):
    """What of a `Replayer` is used here."""

    residency: Residency
    device: SimDevice
    blocks: dict[int, Block]
    expected: dict[int, int]

    def run_ready(self, op: OpRecord, blocks: list[Block]) -> bool:
        """Run an operator all of whose blocks are open."""
        ...


def run_watched(replayer: Replay, op: OpRecord, blocks: list[Block]) -> bool:
    """Run an operator whose blocks only have to be opened or fetched; False if there is more."""
    residency, device = replayer.residency, replayer.device
    if not (op.may_be_ready and residency.is_under_pressure):
        return False
    closed = closed_among(blocks, residency, device)
    if not closed:
        return _run_owned(replayer, op, blocks)
    if any(b.ready is not None or b.result is not None for b in closed):
        return False
    if may_be_watched(residency) and all(block.is_on(device) for block in closed):
        return _run_opened(replayer, op, blocks, closed)
    if any(replayer.blocks[number] in closed for number, _, _ in op.parts):
        return False
    are_alone = all(block.exposure is None and block.sharers is None for block in closed)
    if may_be_fetched(residency) and op.may_be_fetched and are_alone:
        return _run_fetched(replayer, op, blocks)
    return False


def _run_owned(replayer: Replay, op: OpRecord, blocks: list[Block]) -> bool:
    written = [replayer.blocks[number] for number in op.writes]
    if all(block.owned for block in written):
        return False
    if not all(replayer.residency.own(block, replayer.device) for block in written):
        return False
    return replayer.run_ready(op, blocks)


def _run_opened(replayer: Replay, op: OpRecord, blocks: list[Block], closed: list[Block]) -> bool:
    residency, device = replayer.residency, replayer.device
    try:
        if not residency.readiness.open_watched(closed, device, residency.feed.places):
            return False
        written = [replayer.blocks[number] for number in op.writes]
        if not all(block.owned for block in written):
            return False
        parts = groups_of(replayer, op)
        residency.feed.tell_uses(device, blocks, written, op.kind, ahead=1, parts=parts)
        is_open = residency.readiness.open_held(blocks, device)
        has_run = is_open and replayer.run_ready(op, blocks)
    finally:
        residency.readiness.close_watched(blocks, device)
    if has_run:
        residency.feed.tell_deaths()
        residency.after_operator(device, ())
    else:
        residency.feed.has_not_run(op.kind)
    return has_run


def _run_fetched(replayer: Replay, op: OpRecord, blocks: list[Block]) -> bool:
    residency, device = replayer.residency, replayer.device
    if op.fetched_reads:
        blocks = [replayer.blocks[number] for number in op.fetched_reads]
    written = [replayer.blocks[number] for number in op.writes]
    residency.feed.tell_uses(device, blocks, written, op.kind, ahead=1)
    try:
        held = residency.acquire(device, blocks, written, replayer.expected.get(op.fetched_form, 0))
    except SHORTAGES:
        return False
    try:
        for block in written:
            residency.copier.written(block, device)
        residency.tell_operator(device, held, written)
        is_open = residency.readiness.open_held(blocks, device)
        has_run = is_open and replayer.run_ready(op, blocks)
    finally:
        residency.release(held)
        residency.readiness.close_watched(blocks, device)
    if has_run:
        born = [replayer.blocks[number] for number in op.births]
        if born:
            replayer.expected[op.fetched_form] = born[-1].nbytes
        residency.books.counts.slow_op_count += 1
        residency.feed.tell_deaths()
        residency.after_operator(device, [*blocks, *born])
    else:
        residency.feed.has_not_run(op.kind)
        residency.readiness.close(blocks, device)
    return has_run
