"""On which of several accelerators an operator runs: the strategy sees what each of them holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices.base import Device
from ..strategy import OperandSnapshot, OpSnapshot
from .block import Block
from .bookkeeping import Books
from .residency import Residency


def choose_among(
    residency: Residency, name: str, blocks: Sequence[Block], label: torch.device | None
) -> Device:
    """Ask the strategy which accelerator runs an operator, if the first one lacks an operand.

    Parameters
    ----------
    name : str
        The operator's.
    blocks : sequence of Block
        Its distinct operands.
    label : torch.device, optional
        The device that the program says its tensors are on.
    """
    books, first = residency.books, residency.books.main
    with books.lock:
        missing = [b for b in blocks if b.ready is not first and not b.readable_on(first)]
        if not missing:
            return first
        snapshot = OpSnapshot(
            name=name,
            operand_nbytes=sum(block.nbytes for block in blocks),
            missing_nbytes=sum(block.nbytes for block in missing),
            flops=0,
            default_device=first.name,
            is_pressed=books.is_pressed,
            operands=tuple(_snapshot(block, books) for block in blocks),
            accelerators=tuple(residency.feed.device_snapshot(d) for d in books.accelerators),
            label=_named(label, books),
        )
    return residency.feed.place(snapshot, first)


def _snapshot(block: Block, books: Books) -> OperandSnapshot:
    there = tuple(device.name for device in books.accelerators if block.is_on(device))
    return OperandSnapshot(block.block_id, block.nbytes, block.is_persistent, there)


def _named(label: torch.device | None, books: Books) -> str:
    """The accelerator in use that a label means: that of its number."""
    if label is None or label.type in ("cpu", "meta") or label.index is None:
        return ""
    accelerators = books.accelerators
    return accelerators[label.index].name if label.index < len(accelerators) else ""
