"""Holds: who keeps which replicas where they are. Pins, announcements and exposures in one place.

An operator on the slow path *pins* its operands' replicas. One on the ready path only *announces*
its operands: an entry in a dictionary, by thread, which evictors look at. A compiled call announces
all its blocks. Bytes that have left us (arrays, raw pointers) are *exposed* where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from ..base.at_once import items_at_once
from ..devices.base import Device
from . import core
from .block import Block, Replica
from .bookkeeping import Books
from .states import CLEAN, DIRTY, FILLING, INVALID

#: How long a thread waits for others to let go of bytes before it looks again, in seconds.
PATIENCE_S = 0.02
#: Rounds of waiting before a thread gives up: others may wait for this one.
PATIENCE_ROUNDS = 500

_NONE: frozenset[Block] = frozenset()


class Holds:
    """Who keeps which replicas where they are."""

    def __init__(self, books: Books) -> None:
        self._books = books
        #: Operands of operators that run on the ready path, by thread.
        self.announced: dict[int, tuple[Any, ...]] = {}
        #: Blocks of the compiled calls that run natively, by thread; and the runs themselves.
        self.native_blocks: dict[int, Iterable[Block]] = {}
        self.native_entries: dict[int, Any] = {}
        #: Replicas whose copy a thread is just issuing, without the lock, and which thread.
        self.issuing: dict[Replica, int] = {}
        #: What each thread has pinned, as often as it has; `Replica.pins` is counted from these.
        self.pinned: dict[int, list[Replica]] = {}
        #: Threads with operators on the slow path, and how many, one within the other.
        self.in_flight: dict[int, int] = {}
        #: On accelerators: no longer current, but another thread's operator still reads the bytes.
        self.stale: list[Replica] = []

    # -- operators on the slow path -------------------------------------------------------------

    def begin_operator(self) -> None:
        """Note an operator of this thread; wait while another one exchanges devices (no lock)."""
        me, books = threading.get_ident(), self._books
        count = self.in_flight.get(me, 0)
        # Note first, look second: who exchanges devices says so first, and looks second.
        self.in_flight[me] = count + 1
        if count or books.changed_by in (None, me) or me in self.native_entries:
            return
        del self.in_flight[me]
        with books.lock:
            while books.changed_by is not None:
                books.wait_for_release(PATIENCE_S)
            self.in_flight[me] = 1

    def end_operator(self) -> None:
        """Take back what `begin_operator` has noted."""
        me = threading.get_ident()
        count = self.in_flight.get(me, 1) - 1
        if count:
            self.in_flight[me] = count
        else:
            self.in_flight.pop(me, None)

    def threads(self) -> set[int]:
        """Return the threads that hold something, or are inside an operator or compiled call."""
        several = self.in_flight, self.announced, self.pinned, self.native_entries
        return {*self.issuing.values(), *(ident for one in several for ident in one)}

    def threads_inside(self, idents: Iterable[int]) -> set[int]:
        """Return which of these threads are inside an operator, or a compiled call."""
        alive = {thread.ident for thread in threading.enumerate()}
        inside = {*self.in_flight, *self.native_entries}
        return {ident for ident in idents if ident in alive and ident in inside}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no operator of another thread begin, and those in flight end, if they do in time."""
        me, books = threading.get_ident(), self._books
        with books.lock:
            while books.changed_by is not None:
                books.wait_for_release(PATIENCE_S)
            books.changed_by = me
        try:
            with books.lock:
                books.reopen()  # closed, that is
            for _ in range(PATIENCE_ROUNDS):
                is_in_flight = {*self.in_flight, *self.announced, *self.native_entries} - {me}
                if not is_in_flight and not core.running_elsewhere():
                    break
                self.wait_a_little()
            yield
        finally:
            with books.lock:
                books.changed_by = None
                books.reopen()
                books.tell_release()

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, replicas: Sequence[Replica]) -> None:
        """Keep replicas where they are until `unpin` (lock held)."""
        self.pinned.setdefault(threading.get_ident(), []).extend(replicas)
        for replica in replicas:
            replica.pins += 1

    def unpin(self, replicas: Sequence[Replica]) -> None:
        """Let go of what `pin` keeps, and tell who waits for it."""
        me = threading.get_ident()
        with self._books.lock:
            mine = self.pinned.get(me, [])
            for replica in replicas:
                if replica in mine:  # else a repair has taken it already
                    mine.remove(replica)
                    replica.pins -= 1
            if not mine:
                self.pinned.pop(me, None)
            self.give_back_stale()
            self._books.tell_release()

    def pinned_nbytes(self, device: Device) -> int:
        """Return the bytes on a device that operators on the slow path hold there (lock held)."""
        nbytes = 0
        for replica in set().union(*self.pinned.values()):
            if replica.device is device and (replica.state is not INVALID or replica in self.stale):
                nbytes += replica.nbytes
        return nbytes

    @property
    def pins_by_thread(self) -> dict[int, int]:
        """How many replicas on accelerators each thread has pinned, if any."""
        counts = {
            ident: sum(not replica.device.is_host for replica in replicas)
            for ident, replicas in items_at_once(self.pinned)
        }
        return {ident: count for ident, count in counts.items() if count}

    def forget_threads(self, idents: Iterable[int]) -> list[Block]:
        """Let go of all that threads hold whose operators were interrupted (lock held).

        Returns
        -------
        list of Block
            Those of compiled calls, which may have been written there; and those that an operator
            at home has overwritten without the end of which others would be told.
        """
        left: list[Block] = []
        for ident in idents:
            self.pinned.pop(ident, None)
            self.announced.pop(ident, None)
            self.in_flight.pop(ident, None)
            entry = self.native_entries.pop(ident, None)
            if entry is not None:
                entry.abandon()
            left += self.native_blocks.pop(ident, ())
            # A copy: threads that issue one now note it without the lock.
            for replica, by in self.issuing.copy().items():
                if by == ident:
                    self.issuing.pop(replica, None)
                    block = replica.block
                    if replica.state is CLEAN and block is not None:
                        left.append(block)
        return left

    def recount_pins(self, replicas: Iterable[Replica]) -> None:
        """Count the pins of replicas again, from who has pinned them (lock held)."""
        for replica in replicas:
            replica.pins = sum(pinned.count(replica) for pinned in self.pinned.values())

    # -- announcements --------------------------------------------------------------------------

    def announced_blocks(self) -> AbstractSet[Block]:
        """Return the blocks that other threads' operators use unpinned, and compiled calls."""
        if not (self.announced or self.native_blocks):
            return _NONE
        me = threading.get_ident()
        held = {
            operand._ttr_block
            for ident, args in items_at_once(self.announced)
            if ident != me
            for operand in args
            if hasattr(operand, "_ttr_block")
        }
        # Of this thread's regions too: an operator inside one can need room.
        for blocks in list(self.native_blocks.values()):
            held.update(blocks)
        return held

    def by_others(self, block: Block) -> dict[tuple[str, int], Any]:
        """Return by which operators of other threads a block is used (lock held).

        Returns
        -------
        dict
            By the way and the thread, what it has pinned: another list for its next operator. In
            the other ways nothing new begins on a block that is closed.
        """
        replicas = set(block.replicas.values())
        found: dict[tuple[str, int], Any] = {
            ("pinned", ident): pinned
            for ident, pinned in self.pinned.items()
            if not replicas.isdisjoint(pinned)
        }
        for ident, args in items_at_once(self.announced):
            if any(getattr(arg, "_ttr_block", None) is block for arg in args):
                found["announced", ident] = True
        for ident, blocks in items_at_once(self.native_blocks):
            if block in blocks:
                found["compiled", ident] = True
        me = threading.get_ident()
        found = {(way, ident): hold for (way, ident), hold in found.items() if ident != me}
        if block.users and core.running_elsewhere():
            found["in C++", 0] = True
        return found

    def is_alone(self) -> bool:
        """Whether no other thread runs an operator, or holds anything."""
        me = threading.get_ident()
        busy = {*self.pins_by_thread, *self.announced, *self.native_blocks}
        return not busy - {me} and not core.running_elsewhere()

    def several_threads_hold(self) -> bool:
        """Whether operators of more than one thread hold something now."""
        threads = {*self.pins_by_thread, *self.announced}
        return len(threads) > 1 or core.running_elsewhere() > 0

    def is_alone_on_ready_path(self) -> bool:
        """Whether no other thread runs an operator on the ready path."""
        is_mine = not self.announced or tuple(self.announced) == (threading.get_ident(),)
        # Of a compiled call operators come that nobody tells of, in this thread, too.
        return is_mine and not self.native_blocks and not core.running_elsewhere()

    # -- what is stale --------------------------------------------------------------------------

    def give_back(self, replica: Replica) -> None:
        """Give back the bytes of a stale replica, or once nobody reads them (lock held).

        Programs may write what another thread reads: torch promises no values then, but no more
        than that. So a kernel that runs keeps its memory.
        """
        block = replica.block
        if block is not None and block.ready is replica.device:
            block.ready = None  # opened while the end of a copy was waited for
        # Closed first, looked at second, as in `seize`.
        is_read = block is not None and (block.users or block in self.announced_blocks())
        if replica.pins or is_read:
            self.stale.append(replica)
        else:
            replica.device.empty(replica.base)
            self._books.remove(replica)

    def give_back_stale(self) -> None:
        """Give back what is stale, as far as nobody reads it any more (lock held)."""
        if not self.stale:
            return
        stale, self.stale = self.stale, []
        for replica in stale:
            self.give_back(replica)

    def take_stale(self, replica: Replica) -> bool:
        """Whether a replica still has the bytes that it had; they are its own again (lock held)."""
        is_stale = replica in self.stale
        if is_stale:
            self.stale.remove(replica)
        return is_stale

    # -- who may be evicted ---------------------------------------------------------------------

    def seize(self, replica: Replica) -> bool:
        """Close the ready path to a replica; False if somebody holds it (lock held)."""
        block = replica.block
        if replica.pins or replica.state not in (CLEAN, DIRTY) or block is None:
            return False
        ready, block.ready = block.ready, None
        # The order matters: close first, look second. A thread on the ready path announces its
        # operands first and looks at `ready` second, so one of the two sees the other.
        is_used = block.users or block in self.announced_blocks()
        if is_used or (block.exposure is not None and is_exposed_on(block, replica.device)):
            block.ready = ready
            return False
        return True

    def free_among(self, device: Device, block_ids: Sequence[int]) -> list[Replica]:
        """Return those of the named blocks' replicas on a device that nobody holds (lock held)."""
        announced = self.announced_blocks()
        found = {}
        for block_id in block_ids:
            block = self._books.known.get(block_id)
            replica = block.replicas.get(device) if block is not None else None
            if block is not None and replica is not None and is_free(replica, block, announced):
                found[replica.number] = replica
        return list(found.values())

    def held_nbytes(self, device: Device) -> int:
        """Return the bytes on a device that operators or outsiders hold there (lock held)."""
        announced = self.announced_blocks()
        return sum(
            replica.nbytes
            for replica in self._books.ledgers[device].replicas()
            if (block := replica.block) is not None
            and (replica.pins or block.users or block in announced or is_exposed_on(block, device))
        )

    # -- waiting --------------------------------------------------------------------------------

    def wait_a_little(self) -> None:
        """Wait until somebody lets go of something, or a short time (lock not needed)."""
        with self._books.lock:
            self._books.wait_for_release(PATIENCE_S)

    def wait_for_issue(self, replica: Replica) -> None:
        """Let another thread that is just issuing the copy into a replica do so (lock held)."""
        while replica.state is FILLING and replica.arrival is None:
            self._books.wait_for_release(PATIENCE_S)


def is_exposed_on(block: Block, device: Device) -> bool:
    """Whether somebody outside may read or write a block's bytes on a device."""
    exposure = block.exposure
    return exposure is not None and exposure.device is device and exposure.alive


def is_free(replica: Replica, block: Block, announced: AbstractSet[Block]) -> bool:
    """Whether a replica holds bytes, and nobody keeps them there."""
    return (
        not (replica.pins or block.is_kept)
        and replica.state in (CLEAN, DIRTY)
        and not block.users
        and block not in announced
        and not (block.exposure is not None and is_exposed_on(block, replica.device))
    )
