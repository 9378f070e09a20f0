"""Replayer: what a device, a budget and a strategy make of a recorded program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..base.event_log import EventLog
from ..devices.base import Device, Graveyard
from ..devices.host.device import HostDevice
from ..devices.sim.device import SimDevice
from ..devices.sim.spec import DeviceSpec
from ..devices.storages import empty_bytes
from ..interception.placement import table_is_away
from ..memory.block import Block, Replica
from ..memory.bookkeeping import Books
from ..memory.budget import SHORTAGES, resolve_budget
from ..memory.external_pressure import cap_allocator
from ..memory.op_times import OpCost
from ..memory.placing import Answer, Call, choose
from ..memory.residency import Residency
from ..memory.states import CLEAN
from ..strategy.choice import make_strategy
from .parts_of_tables import run_on_parts
from .read_alone import ReadAlone, groups_of
from .record import OpRecord, Record
from .watched import run_watched

__all__ = ["Replayer", "StepCost"]


class StepCost(NamedTuple):
    """What a part of a program has cost: times in ns of the virtual clock, bytes, operators."""

    name: str
    time_ns: int
    #: How long compute stood idle because it waited for a copy; how long it worked.
    stall_ns: int
    compute_ns: int
    fetched_nbytes: int
    written_back_nbytes: int
    #: The most bytes the device has held.
    peak_nbytes: int
    op_count: int
    #: Of these, run by the host; and those that should have run on the device.
    host_op_count: int
    fallback_count: int
    #: What management took of the host's own time; how long compute stood idle while the host had
    #: not issued its operator.
    host_ns: int = 0
    host_stall_ns: int = 0


class Replayer:
    """A residency of its own, with a device that has no bytes, doing what a program did.

    Parameters
    ----------
    record : Record
        What is replayed; it is not changed.
    spec : DeviceSpec
        The device.
    budget : int, str or None
        The most bytes it may hold, as `tensorsManager.budget` takes it.
    strategy : str, class or object
        As `tensorsManager.strategy` takes it.

    Raises
    ------
    ConfigError
        The budget or the strategy is not understood.

    Notes
    -----
    It follows `interception` operator by operator, without kernels: the ready path where all
    operands are ready, else the phases of the slow one. Regions that run natively are not known.
    """

    def __init__(
        self, record: Record, spec: DeviceSpec, budget: Any = None, strategy: Any = None
    ) -> None:
        self.record = record
        self.device = SimDevice(spec, name=f"sim:{spec.name}", keeps_bytes=False)
        self.host = HostDevice()
        self.host.machines.append(self.device.machine)
        # Their own: what dies here is not for the books of the program that goes on meanwhile.
        self.host.graveyard = self.device.graveyard = Graveyard()
        self.residency = Residency(
            Books(self.host, [self.device], EventLog()), make_strategy(strategy)
        )
        self.residency.books.open_ledger(self.device, resolve_budget(budget, self.device))
        cap_allocator(self.device.ledger, budget)
        self.blocks: dict[int, Block] = {}
        #: What the results of an operator took the last time.
        self.expected: dict[int, int] = {}
        self._fallback_count = 0
        # In the order of the program: strategies are told of an operator's blocks in that order.
        born = {number for op in record.ops for number in op.births}
        first = min(born, default=0)
        for number in sorted(number for number in record.blocks if number < first):
            self.blocks[number] = self._at_home(number)
        #: Blocks at home that the program makes later, the next of them last.
        self._to_come = sorted(record.blocks.keys() - self.blocks.keys() - born, reverse=True)

    def _at_home(self, number: int) -> Block:
        """Make a block that is at home, and nowhere else."""
        known = self.record.blocks[number]
        block = Block(known.nbytes, self.residency.books.tick)
        base = empty_bytes(known.nbytes, "meta")
        block.replicas[self.host] = Replica(block, self.host, base, CLEAN)
        block.is_persistent, block.use_count = known.is_persistent, known.use_count
        if known.use_count:
            self.residency.books.known[block.block_id] = block
        self.residency.readiness.settle_at_home(block)
        return block

    def block(self, number: int) -> Block:
        """Return what stands for a recorded block that is alive."""
        block = self.blocks.get(number)
        if block is None:
            block = self.blocks[number] = self._at_home(number)
        return block

    # -- running --------------------------------------------------------------------------------

    def run(self) -> list[StepCost]:
        """Do all of the program again; return what each of its parts has cost."""
        return list(self.steps())

    def steps(self) -> Iterator[StepCost]:
        """Do the program again part by part, and yield what each has cost."""
        for name, indices in self.record.step_ranges():
            yield self.step(name, [self.record.ops[index] for index in indices])

    def step(self, name: str, ops: Sequence[OpRecord]) -> StepCost:
        """Do some operators; return what they have cost together."""
        before = self._counts()
        self.device.reset_peak()
        op_count = self._do_all(ops)
        after = self._counts()
        time, stall, compute, fetched, written, on_host, fallbacks, host, host_stall = (
            b - a for a, b in zip(before, after, strict=True)
        )
        moved = fetched, written, self.device.peak_nbytes
        ran = op_count, on_host, fallbacks
        return StepCost(name, time, stall, compute, *moved, *ran, host, host_stall)

    def _counts(self) -> tuple[int, ...]:
        device, copies = self.device, self.residency.copier.transfer.counts
        return (
            max(device.now_ns(), device.record().end_ns),
            device.stall_ns,
            device.clocks().compute_ns,
            copies.fetched_nbytes + copies.prefetched_nbytes,
            copies.written_back_nbytes,
            self.residency.books.counts.host_op_count,
            self._fallback_count,
            device.host_ns,
            device.host_stall_ns,
        )

    def _do_all(self, ops: Sequence[OpRecord]) -> int:
        """Do operators in their order, composite ones as one where they can; return how many."""
        place = count = 0
        while place < len(ops):
            op = ops[place]
            place += 1
            if not self.do(op):
                continue
            count += 1
            for part in ops[place : place + op.part_count]:
                self._let_go(part)
            place += op.part_count
        return count

    def do(self, op: OpRecord) -> bool:
        """Do one operator, and let go of what the program let go of after it.

        Returns
        -------
        bool
            False for a composite operator that cannot run as one: its parts have to.
        """
        self._make_until(op)
        self._view(op.views)
        blocks = [self.block(number) for number in op.reads]
        has_run = True
        if op.shares:
            self.blocks[op.births[0]] = self.residency.sharing.copy_on_write(blocks[0])
        elif not self._run_at_once(op, blocks):
            has_run = not op.part_count
            if has_run:
                slow = [self.block(number) for number in op.slow_reads]
                self._run_slow(op, slow or blocks)
                del slow
        del blocks
        self._let_go(op)
        return has_run

    def _run_at_once(self, op: OpRecord, blocks: list[Block]) -> bool:
        """Run an operator on the ready or the watched path, if one of them is open to it."""
        if self.run_ready(op, blocks) or run_watched(self, op, blocks):
            return True
        if not op.inner_views:
            return False
        self._view(op.inner_views)
        return self.run_ready(op, blocks) or run_watched(self, op, blocks)

    def _let_go(self, op: OpRecord) -> None:
        for number in op.deaths:
            self.blocks.pop(number, None)

    def _make_until(self, op: OpRecord) -> None:
        """Make the blocks at home that the program has made before the results of an operator."""
        while op.births and self._to_come and self._to_come[-1] < op.births[0]:
            number = self._to_come.pop()
            if number not in self.blocks:
                self.blocks[number] = self._at_home(number)

    def _view(self, numbers: Sequence[int]) -> None:
        """Open blocks to the ready path, as a view of what is on the device does."""
        residency, device = self.residency, self.device
        for number in numbers:
            block = self.blocks.get(number)
            if block is not None and block.ready is None:
                with residency.books.lock:
                    if block.is_on(device):
                        residency.readiness.set_ready(block, device)

    # -- the ready path -------------------------------------------------------------------------

    def run_ready(self, op: OpRecord, blocks: list[Block]) -> bool:
        """Run an operator about which nothing has to be decided; False where something has."""
        books = self.residency.books
        device = blocks[0].ready if blocks else None
        if (
            not op.may_be_ready
            or device not in books.ready_on
            or not self._has_room_in_passing(op, device)
            or any(block.ready is not device for block in blocks)
            or not all(self.blocks[number].owned for number in op.writes)
        ):
            return False
        assert device is not None
        for block in blocks:
            block.last_use = books.tick + 1
        try:
            books.tick += 1
            written = [self.blocks[number] for number in op.writes]
            if any(block.logged_as for block in blocks):
                self.residency.feed.uses.note_blocks(books.tick, op.kind, blocks, written)
            bases = [block.base_on(device) for block in blocks]
            self._charge(op, device, bases, [block.base_on(device) for block in written])
            self._bear(op, device)
        except SHORTAGES:
            return False
        return True

    def _has_room_in_passing(self, op: OpRecord, device: Device | None) -> bool:
        """Whether what a composite operator takes as one fits; its peak has seen it then."""
        if not op.peak_nbytes:
            return True
        ledger = None if device is None else self.residency.books.ledgers.get(device)
        if ledger is None or ledger.resident_nbytes + op.peak_nbytes > ledger.budget.high_nbytes:
            return False
        try:
            ledger.device.allocate(op.peak_nbytes)
        except SHORTAGES:
            return False
        return True

    def _charge(
        self,
        op: OpRecord,
        device: Device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        device.after_operator(reads, writes, flops=op.flops, nbytes=op.nbytes, dtype_name=op.dtype)
        if op.waits and not device.is_host:
            device.record().synchronize()

    def _bear(self, op: OpRecord, device: Device) -> list[Block]:
        """Make the blocks of the results, all or none; at home if it has written, too."""
        born = []
        for number in op.births:
            base = empty_bytes(self.record.blocks[number].nbytes, "meta")
            try:
                born.append(self.residency.born(base, device))
            except SHORTAGES:
                if not op.writes:
                    raise
                self._fallback_count += 1
                born.append(self.residency.born(base, self.host))
        self.blocks.update(zip(op.births, born, strict=True))
        return born

    # -- the slow path --------------------------------------------------------------------------

    def _run_slow(self, op: OpRecord, blocks: list[Block]) -> None:
        alone = ReadAlone(self, op, blocks)
        try:
            self._run_placed(op, alone)
        finally:
            alone.release()

    def _run_placed(self, op: OpRecord, alone: ReadAlone) -> None:
        residency, host = self.residency, self.host
        written = [self.blocks[number] for number in op.writes]
        device, is_at_home = self._place(op, alone.blocks)
        instead_of = self.device if is_at_home else None
        told = [block for block in alone.blocks if block not in alone.pieces]
        parts = groups_of(self, op)
        residency.note_operator(device, told, written, op.kind, instead_of=instead_of, parts=parts)
        blocks = alone.brought_to(device)
        if device is host:
            if run_on_parts(self, op, blocks):
                return
            residency.books.counts.host_op_count += 1
        try:
            born = self.run_on(device, op, blocks, written)
        except SHORTAGES:
            self._fallback_count += 1
            born = self.run_on(host, op, blocks, written)
        residency.feed.tell_deaths()
        residency.after_operator(self.device, [*blocks, *born])

    def _place(self, op: OpRecord, blocks: list[Block]) -> Answer:
        residency = self.residency
        if op.on_host:
            return Answer(self.host, is_at_home=False)
        if op.reads_part and blocks and table_is_away(blocks[0], self.device, residency):
            return Answer(self.host, is_at_home=False)
        if not residency.feed.places:
            return Answer(self.device, is_at_home=False)
        known = residency.times.costs.get(op.form)
        call = Call(
            op.name,
            op.kind,
            known or _cost_of(op),
            is_movable=known is not None and not op.writes,
            result_nbytes=self.expected.get(op.form, 0),
        )
        return choose(residency, call, blocks, self.device)

    def run_on(
        self, device: Device, op: OpRecord, blocks: list[Block], written: list[Block]
    ) -> list[Block]:
        """Run an operator on a device, from fetching its operands to its results."""
        residency = self.residency
        expected_nbytes = 0 if device.is_host else self.expected.get(op.form, 0)
        overwrites = op.overwrites and device.is_host and residency.overwriting.begin(written[0])
        fetched = [b for b in blocks if b not in written] if overwrites else blocks
        kept = [] if overwrites else written
        held = residency.acquire(device, fetched, kept, expected_nbytes)
        try:
            reads = [block.replicas[device].base for block in blocks]
            writes = [block.replicas[device].base for block in written]
            residency.tell_operator(device, held, written)
            for block in kept:
                residency.copier.written(block, device)
            times = residency.times
            timing = (
                times.begin(op.kind, times.costs.get(op.form), device, self.device)
                if residency.feed.places
                else None
            )
            self._charge(op, device, reads, writes)
            if timing is not None:
                timing.end(op.kind, _cost_of(op))
                times.remember(op.form, _cost_of(op))
            born = self._bear(op, device)
            if born:
                self.expected[op.form] = born[-1].nbytes
            return born
        finally:
            if overwrites:
                residency.overwriting.end(written[0], is_written=True)
            residency.release(held)
            self._open(device, blocks)

    def _open(self, device: Device, blocks: list[Block]) -> None:
        """Open the ready path to what nothing is left to be decided about."""
        residency = self.residency
        with residency.books.lock:
            for block in blocks:
                if device.is_host:
                    residency.readiness.settle_at_home(block)
                else:
                    residency.readiness.set_ready(block, device)


def _cost_of(op: OpRecord) -> OpCost:
    return OpCost(op.flops, op.nbytes, op.dtype)
