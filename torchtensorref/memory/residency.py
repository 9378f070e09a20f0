"""Residency: where blocks' bytes are. The only one that changes a block; it acts for operators."""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Sequence
from typing import Any

import torch

from ..base.interrupts import is_within_another
from ..devices.base import Device
from ..devices.storages import storage_of
from ..strategy import Strategy
from .block import Block, Replica
from .bookkeeping import Books
from .budget import OutOfBudgetError
from .copies import Copier
from .costs import GIVEN_BACK
from .eviction import Evictor, HeldByOthersError
from .fetching import Fetcher
from .forks import Forks
from .holds import PATIENCE_ROUNDS, Holds
from .op_times import OpTimes
from .overwriting import Overwriting
from .prefetch import Prefetcher
from .readiness import Readiness
from .repair import Repair
from .sharing import Sharing
from .states import CLEAN, FILLING
from .strategy_feed import StrategyFeed
from .telling import READS


class Residency:
    """The blocks' bytes on all devices.

    Attributes
    ----------
    books : Books
        Devices, ledgers, counts; the lock under which blocks change.
    holds : Holds
        Who keeps which replicas where they are.
    readiness : Readiness
        Which blocks operators may use without asking anybody.
    copier, evictor, prefetcher, sharing, overwriting
        What copies, makes room, works ahead of need, lets several have the same bytes, and spares
        the copy of bytes that are about to be overwritten.
    feed : StrategyFeed
        What the strategy is told and asked.
    recorder
        Who writes down what a module's call does while it is learned (`compiled/`), or None.
    """

    def __init__(self, books: Books, strategy: Strategy) -> None:
        self.books = books
        self.holds = Holds(self.books)
        self.copier = Copier(self.books, self.holds)
        self.readiness = Readiness(self.books, self.holds, self.copier)
        self.feed = StrategyFeed(self.books, self.copier, self.readiness, strategy)
        self.evictor = Evictor(self.books, self.holds, self.copier, self.feed)
        self._fetcher = Fetcher(self.books, self.copier, self.evictor)
        self.prefetcher = Prefetcher(self.books, self.holds, self.copier, self.evictor, self.feed)
        self.sharing = Sharing(self.books, self.holds, self.copier)
        self.overwriting = Overwriting(self.books, self.holds, self.copier)
        self._repair = Repair(self.books, self.holds, self.copier, self.feed)
        self._forks = Forks(self.books, self.copier, self.evictor)
        #: How long operators took, where a strategy says where they run.
        self.times = OpTimes()
        self.recorder: Any = None
        self.recording_ident = 0

    def repair(self) -> None:
        """Repair what an error has left halfway, before anything is used (no lock held)."""
        if not self.books.is_in_doubt:
            return
        # Operators and regions around this one go on, and hold what they hold; so do those around
        # an error that another thread has caught.
        me = threading.get_ident()
        keep = self.holds.threads_inside({doubt.ident for doubt in self.books.doubts} - {me})
        if is_within_another(sys._getframe(1)):
            keep.add(me)
        self._repair.run(keep)
        if self.recorder is not None and self.recording_ident == me:
            self.recorder.mistrust("it was interrupted")
            if me not in keep:
                self.recorder, self.books.sees_all = None, False
        self.books.reopen()

    # -- operands -------------------------------------------------------------------------------

    def acquire(
        self,
        device: Device,
        blocks: Sequence[Block],
        written: Sequence[Block],
        expected: int,
        why: str = READS,
    ) -> list[Replica]:
        """Make blocks readable on a device and hold them there: all of them, or none.

        Parameters
        ----------
        device : Device
            Where the operator will run.
        blocks, written : sequence of Block
            Distinct operands, and those of them that the operator writes.
        expected : int
            Bytes its results are expected to take; room is made for them if there is any.
        why : str, optional
            What a story says of those that have to be fetched.

        Returns
        -------
        list of Replica
            What is held, to be handed to `release`.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError, TransferError
            They cannot be brought there. Nothing is held.
        """
        for block in written:
            self.sharing.unshare(block)
        if device.is_host:
            return self._pin_at_home(blocks)
        for _ in range(PATIENCE_ROUNDS):
            held = self._pin(device, blocks)
            try:
                self._fetcher.fetch_missing(device, blocks, expected, why)
                for block in written:
                    self.copier.end_write_back(block)
                    if self.books.is_spread:
                        self.copier.peers.end_reading(block, device)
                return held
            except HeldByOthersError:
                self.release(held)
                self.holds.wait_a_little()
            except BaseException:
                self.release(held)
                raise
        need_nbytes = sum(block.nbytes for block in blocks)
        limit_nbytes = self.books.ledgers[device].budget.limit_nbytes
        raise OutOfBudgetError(device.name, need_nbytes, limit_nbytes, limit_nbytes)

    def own(self, block: Block, device: Device) -> bool:
        """Let operators write a ready block unasked: what others have of it is stale from now on.

        Returns
        -------
        bool
            False where it is not ready there, or others may have it all the same.
        """
        if block.owned:
            return True
        with self.books.lock:
            replica = block.readable_on(device)
            if replica is None or block.ready is not device or self.books.is_spread:
                return False
            self.holds.pin([replica])
        try:
            self.copier.end_write_back(block)
            self.copier.written(block, device)
        finally:
            self.holds.unpin([replica])
        return self.readiness.open_held([block], device) and block.owned

    def tell_operator(
        self, device: Device, held: Sequence[Replica], written: Sequence[Block]
    ) -> None:
        """Tell a device what a kernel is about to read and write there.

        Since it was acquired another thread may have written it elsewhere and begun to bring it
        back, or to copy home what will be written. The kernel is ordered behind those copies, too.

        Parameters
        ----------
        device : Device
            Where the kernel runs.
        held : sequence of Replica
            What `acquire` holds.
        written : sequence of Block
            Those of its blocks that the kernel writes.
        """
        reads = [replica.base for replica in held]
        writes = [block.replicas[device].base for block in written]
        while True:
            with self.books.lock:
                moving = [replica for replica in held if replica.state is FILLING]
                leaving = [block for block in written if self.copier.is_on_its_way_home(block)]
                if not (moving or leaving or device.is_host):
                    return device.before_operator(reads, writes)
            for replica in moving:
                self.copier.arrivals.wait_for(replica)
            if device.is_host:
                return device.before_operator(reads, writes)  # may wait, and so without the lock
            for block in leaving:
                self.copier.end_write_back(block)

    def _pin(self, device: Device, blocks: Sequence[Block]) -> list[Replica]:
        for block in blocks:
            if block.exposure is not None or block.promise is not None:
                self.sharing.renew(block, device)
        with self.books.lock:
            held = [self.copier.replica_on(block, device) for block in blocks]
            self.holds.pin(held)  # all or none: nothing above is held yet, this cannot fail
        return held

    def _pin_at_home(self, blocks: Sequence[Block]) -> list[Replica]:
        """At home nothing is evicted: pins only keep sharers from writing what is being read."""
        for block in blocks:
            self.copier.bring_home(block)
        with self.books.lock:
            held = [block.replicas[self.books.host] for block in blocks]
            self.holds.pin(held)
        return held

    def release(self, held: Sequence[Replica]) -> None:
        """Let go of what `acquire` holds."""
        with self.books.lock:
            if held and held[0].device.notes_uses:  # all are on one device
                self.readiness.note_uses(held[0].device, held)
            self.holds.unpin(held)
        for replica in held:
            if self.books.is_left(replica.device):
                self.evictor.clear(replica.device)

    def note_operator(
        self,
        device: Device,
        blocks: Sequence[Block],
        written: Sequence[Block],
        kind: int,
        *,
        instead_of: Device | None = None,
        parts: Container[int] = (),
    ) -> None:
        """Count an operator that is about to run, and tell the strategy what it uses.

        Parameters
        ----------
        kind : int
            Number of the operator's kind: uses by the same one look alike to a strategy.
        instead_of : Device, optional
            The accelerator that would run it, did the strategy not want the host to.
        parts : container of int, optional
            Numbers of the blocks of which only parts would move, were they away.
        """
        self.books.tick += 1
        self.books.counts.slow_op_count += 1
        if instead_of is not None:
            self.books.short_at = self.books.tick
        self.feed.tell_uses(device, blocks, written, kind, instead_of=instead_of, parts=parts)

    # -- results --------------------------------------------------------------------------------

    def born(self, tensor: torch.Tensor, device: Device) -> Block:
        """Make the block of a kernel's fresh result, which owns its storage.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError
            It does not fit on the device, even after every legal eviction. Nothing has changed.
        """
        books = self.books
        nbytes = storage_of(tensor).nbytes()
        if device.is_host:
            block = Block(nbytes, books.tick)
            block.replicas[device] = Replica(block, device, tensor, CLEAN)
            self.readiness.settle_at_home(block)
            return block
        ledger = books.ledgers[device]
        has_been_refused = False
        while True:
            if device.graveyard or ledger.dead:
                with books.lock:
                    books.bury()
            try:
                born = ledger.bear_if_room(tensor, nbytes, books.tick)
            except torch.OutOfMemoryError:
                if has_been_refused:
                    raise
                has_been_refused = True
                self.evictor.evict_some(device, nbytes)
                continue
            if born is not None:
                if nbytes >= ledger.tiny_nbytes:
                    self.feed.note_birth(born)
                return born
            self.evictor.make_room_patiently(device, nbytes, "results")

    def resized(self, block: Block, nbytes: int) -> None:
        """Note that the storage of a block at home, and nowhere else, has another size now."""
        with self.books.lock:
            self.books.parts.forget(block)
            block.nbytes = nbytes
            for replica in block.replicas.values():
                if replica.nbytes != nbytes:
                    replica.handed_out, replica.nbytes = None, nbytes

    def given_by_value(self, block: Block) -> None:
        """Count that an operator was given the number in a block instead of its bytes."""
        block.given_by_value_count += 1

    def forget_accelerators(self, block: Block) -> None:
        """Drop every replica but the one at home, which is current, and about to change storage."""
        books = self.books
        with books.lock:
            books.parts.forget(block)
        for device in books.accelerators:
            replica = block.replicas.get(device)
            if replica is not None:
                # It stays, empty: aliases keep views over its storage.
                with books.lock:
                    self.copier.arrivals.settle(replica)
                self.evictor.evict(replica, "its storage changes")
        home = block.replicas.get(books.host)
        if home is not None:
            books.host.about_to_change(home.base)

    @property
    def is_under_pressure(self) -> bool:
        """Whether memory is short, or given back as if it were."""
        return self.books.is_pressed or self.feed.gives_back

    # -- afterwards -----------------------------------------------------------------------------

    def after_operator(self, device: Device, blocks: Sequence[Block]) -> None:
        """Carry out what the strategy wants evicted, written back and prefetched."""
        if self.feed.gives_back:
            with self.books.lock:
                used = [
                    replica
                    for block in blocks
                    if (replica := block.readable_on(device)) is not None
                    and not (replica.pins or block.is_kept)
                ]
            given_back = self.feed.given_back(device, used)
            for replica in used:
                block = replica.block
                if block is not None and block.block_id in given_back:
                    self.evictor.try_evict(replica, f"{self.feed.strategy.name}: {GIVEN_BACK}")
        books = self.books
        if books.is_pressed:
            if books.looks_ahead:
                for each in books.accelerators if self.feed.spreads else (device,):
                    self.prefetcher.issue_wishes(each)
            self.feed.begin_lease(device)
            if books.tick - books.short_at > books.calm_count:
                books.note_calm()
        if self.books.is_left(device):
            self.evictor.clear(device)
