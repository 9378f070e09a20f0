"""What has happened to a replica, or could not: for its story, and for those who listen."""

from __future__ import annotations

from ..base.listeners import Happening, listeners
from ..devices.base import Device, Event
from .block import Block, Replica
from .bookkeeping import Books
from .budget import OutOfBudgetError
from .once import note_thrash

#: Why a block is fetched, unless the program has asked for it.
READS = "an operator reads"


def fetched(books: Books, name: str, replica: Replica, *, ahead: bool, why: str) -> None:
    """A copy to an accelerator has been issued, ahead of need or for a reason."""
    why = "ahead" if ahead else why
    books.counts.costs.note_fetch(replica.block_id, replica.nbytes, books.tick, ahead=ahead)
    note_thrash(books)
    books.log.note(name, f"fetch {replica.device.name}", why)
    if listeners.any:
        tell_of(replica, "fetch", why, replica.arrival, ahead=ahead)


def written_back(books: Books, name: str, replica: Replica, home: Replica) -> None:
    """A copy home has been issued."""
    why = f"from {replica.device.name}"
    books.log.note(name, "write back", why)
    if listeners.any:
        tell_of(replica, "write_back", why, home.arrival)


def failed(books: Books, replica: Replica, error: Exception) -> None:
    """A copy from an accelerator or to it has failed."""
    books.log.note(f"b{replica.block_id}", f"no copy {replica.device.name}", str(error)[:80])


def given_up(books: Books, replica: Replica, why: str, *, was_written_back: bool) -> None:
    """The bytes of a replica have been freed (lock held)."""
    books.counts.costs.note_eviction(replica.block_id, replica.nbytes, why, books.tick)
    books.log.note(f"b{replica.block_id}", f"drop {replica.device.name}", why)
    if listeners.any:
        tell_of(replica, "evict", why)
        if not was_written_back:
            tell_of(replica, "drop", why)


def tell_of(
    replica: Replica, kind: str, why: str, copy: Event | None = None, *, ahead: bool = False
) -> None:
    """Tell what has happened to a replica, with the times of its copy if it was copied."""
    device = replica.device
    # What compute has been given may still use what is evicted now.
    start_ns = end_ns = max(device.now_ns(), device.clocks().compute_free_ns)
    if copy is not None:
        start_ns, end_ns = copy.start_ns or device.now_ns(), copy.end_ns
    listeners.tell(
        Happening(
            kind,
            f"b{replica.block_id}",
            replica.nbytes,
            device.name,
            why,
            start_ns,
            end_ns,
            replica.block_id,
            is_ahead=ahead,
        ),
        copy,
    )


def tell_no_room(block: Block, device: Device, error: OutOfBudgetError) -> None:
    """Tell that a block does not fit, and that its program is told so by an error."""
    why = f"toGPU: {str(error).partition('. Raise')[0]}"
    now_ns = device.now_ns()
    listeners.tell(
        Happening(
            "out_of_budget",
            block.name,
            block.nbytes,
            device.name,
            why,
            now_ns,
            now_ns,
            block.block_id,
        )
    )
