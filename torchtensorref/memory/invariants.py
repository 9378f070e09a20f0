"""The invariants of the books, written once, as sentences."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from typing import Any

from ..base.event_log import EventLog
from ..devices.base import Device
from ..devices.storages import storage_of
from .block import Block, Replica
from .bookkeeping import Books
from .states import CLEAN, DIRTY, FILLING, INVALID

#: How often two sums are compared before they count as different: other threads let tensors die.
READINGS = 50
#: Between two readings, in seconds: a thread in the middle of letting one die must get on.
READING_PAUSE_S = 0.001


def violations(residency: Any, log: EventLog) -> list[str]:
    """Say what is wrong with all that a residency keeps books of, with the blocks' stories."""
    found: list[str] = []
    with residency.books.lock:
        residency.books.bury()
        residency.holds.give_back_stale()
        for device in residency.books.ledgers:
            held_nbytes = residency.holds.held_nbytes(device)
            found += ledger_violations(residency.books, device, held_nbytes, residency.holds.stale)
            found += storage_violations(residency.books.blocks_on(device), device)
            for block in residency.books.blocks_on(device):
                found += [
                    f"{text}; story: {'; '.join(log.story(block.name)) or 'none'}"
                    for text in block_violations(block, residency.holds.issuing)
                ]
    return found


def ledger_violations(
    books: Books, device: Device, held_nbytes: int, stale: Container[Replica] = ()
) -> list[str]:
    """Say what is wrong with one device's books (lock held).

    What operators and outsiders hold, `held_nbytes`, may pass a budget that was lowered meanwhile,
    and what has not left yet; `stale` are invalid and read all the same.
    """
    found = []
    ledger = books.ledgers[device]
    counted, recount = ledger.both_sums()
    if counted != recount:
        found.append(f"{device.name}: the ledger says {counted} bytes, its entries {recount}")
    if device.is_witness:
        counted, allocated = _sums_by_both(books, device)
        if counted != allocated:
            found.append(
                f"{device.name}: the ledger says {counted} bytes, its allocator {allocated}"
            )
    if ledger.beyond_nbytes(counted) > held_nbytes:
        found.append(
            f"{device.name}: {counted} bytes are resident, {ledger.budget.limit_nbytes} budgeted, "
            f"and only {held_nbytes} are held"
        )
    for replica in ledger.replicas():
        if replica.state is INVALID and replica not in stale:
            found.append(f"b{replica.block_id}: counted on {device.name} although it is invalid")
        is_missed = replica.state in (CLEAN, DIRTY) and not ledger.is_in_order(replica)
        if is_missed and replica.block is not None:  # looked at last: the program may let go of it
            found.append(f"b{replica.block_id}: {device.name} would never evict it")
    return found


def storage_violations(blocks: Iterable[Block], device: Device) -> list[str]:
    """Say which blocks on a device have one storage: to evict one takes the other's bytes."""
    owners: dict[int, Block] = {}
    found = []
    for block in blocks:
        owner = owners.setdefault(storage_of(block.base_on(device))._cdata, block)
        if owner is not block:
            found.append(f"{owner.name} and {block.name} have one storage on {device.name}")
    return found


def _sums_by_both(books: Books, device: Device) -> tuple[int, int]:
    """The bytes by the ledger and by the allocator, read again where a tensor died in between."""
    for _ in range(READINGS):
        books.bury()
        counted, allocated = books.ledgers[device].resident_nbytes, device.resident_nbytes
        if counted == allocated:
            break
        time.sleep(READING_PAUSE_S)
    return counted, allocated


def block_violations(block: Block, issuing: Container[Replica]) -> list[str]:
    """Say what is wrong with one block; `issuing` are filled by copies about to be issued."""
    found = []
    states = [replica.state for replica in block.replicas.values()]
    if CLEAN not in states and DIRTY not in states and FILLING not in states:
        found.append(f"{block.name}: no readable replica; its bytes are lost")
    if states.count(DIRTY) > 1:
        found.append(f"{block.name}: more than one dirty replica")
    if DIRTY in states and CLEAN in states:
        found.append(f"{block.name}: clean and dirty replicas at once; one of them is stale")
    for replica in block.replicas.values():
        if replica.state is FILLING and replica.arrival is None and replica not in issuing:
            found.append(f"{block.name}: filling on {replica.device.name} and no copy in flight")
    if block.ready is not None and block.readable_on(block.ready) is None:
        found.append(f"{block.name}: ready on {block.ready.name} but not readable there")
    return found
