"""A device made of integers that asks a strategy what the manager asks it, and counts bytes.

A golden model: one cache under a limit, one copy engine each way, operators that run one after
another, and a host that issues an operator as soon as the one before has started. No tensor, no
torch. It says what a strategy's decisions come to in bytes and in time; everything else is the
simulated device's task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchTensorRef.strategy import Access, BlockSnapshot, DeviceSnapshot, Strategy


@dataclass(frozen=True)
class Operand:
    """A block that an operator uses."""

    block_id: int
    nbytes: int = 1
    is_write: bool = False
    is_persistent: bool = True


@dataclass(frozen=True)
class Step:
    """One operator: what it uses, how long it runs, what it makes, what dies after it."""

    operands: tuple[Operand, ...]
    struct: int = 0
    compute_ns: int = 1
    makes: tuple[Operand, ...] = ()
    dies: tuple[int, ...] = ()


@dataclass
class Counts:
    """What a run came to."""

    fetched_nbytes: int = 0  # on demand
    prefetched_nbytes: int = 0
    written_back_nbytes: int = 0
    miss_count: int = 0
    stall_ns: float = 0.0
    peak_nbytes: int = 0
    refused_count: int = 0

    @property
    def moved_nbytes(self) -> int:
        """All bytes that went to the device."""
        return self.fetched_nbytes + self.prefetched_nbytes


@dataclass
class _Held:
    nbytes: int
    is_persistent: bool
    is_dirty: bool = False
    arrives_ns: float = 0.0
    last_use: int = 0
    read_until_ns: float = 0.0  # when the last operator that uses it is through
    is_awaited: bool = False  # an operator issued waits for it, or has used it


@dataclass
class CacheModel:
    """One device under a budget, driven by a strategy."""

    strategy: Strategy
    limit_nbytes: int
    h2d_bytes_per_s: float = 1e9  # one byte a nanosecond
    d2h_bytes_per_s: float = 1e9
    looks_ahead: bool = True
    tells_times: bool = True
    counts: Counts = field(default_factory=Counts)
    now_ns: float = 0.0  # when compute is through with all that was issued

    def __post_init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._resident_nbytes = 0
        self._h2d_free_ns = self._d2h_free_ns = 0.0
        self._host_ns = 0.0
        self._freed_ns = 0.0  # when the bytes given back last may be overwritten
        self._sizes: dict[int, int] = {}
        self._op_number = 0
        self._compute_ns = 0

    def run(self, steps: Iterable[Step]) -> Counts:
        """Run a program; return what has been counted since the model was made."""
        for step in steps:
            self._run_one(step)
        return self.counts

    # -- one operator ------------------------------------------------------------------------

    def _run_one(self, step: Step) -> None:
        self._op_number += 1
        used = {operand.block_id for operand in step.operands}
        for operand in step.operands:
            self._access(operand, step.struct)
        for operand in step.operands:
            self._acquire(operand, used)
        self._make(step, used)
        self._compute(step, used)
        self._commit(step)
        if any(operand.is_persistent for operand in step.operands) and self.looks_ahead:
            self._prefetch()
            self._write_back()

    def _compute(self, step: Step, used: set[int]) -> None:
        ready_ns = max((self._held[block_id].arrives_ns for block_id in used), default=0.0)
        self.counts.stall_ns += max(0.0, ready_ns - self.now_ns)
        self._host_ns = max(self.now_ns, ready_ns)
        self.now_ns = self._host_ns + step.compute_ns
        self._compute_ns += step.compute_ns
        for block_id in used:
            self._held[block_id].read_until_ns = self.now_ns

    def _access(self, operand: Operand, struct: int) -> None:
        held = operand.block_id in self._held
        if held and not self.strategy.watches_accesses:
            return
        self.strategy.on_access(
            Access(
                operand.block_id,
                operand.nbytes,
                struct,
                operand.is_persistent,
                operand.is_write,
                held,
            )
        )

    def _acquire(self, operand: Operand, pinned: set[int]) -> None:
        held = self._held.get(operand.block_id)
        if held is None:
            self.counts.miss_count += 1
            self.counts.fetched_nbytes += operand.nbytes
            self._make_room(operand.nbytes, pinned)
            held = self._copy_in(operand.block_id, operand.nbytes, operand.is_persistent)
        held.last_use = self._op_number
        held.is_awaited = True
        held.is_persistent = held.is_persistent or operand.is_persistent

    def _make(self, step: Step, used: set[int]) -> None:
        for made in step.makes:
            self._make_room(made.nbytes, used)
            held = _Held(made.nbytes, made.is_persistent, True, self._freed_ns, self._op_number)
            held.is_awaited = True
            self._freed_ns = 0.0
            self._hold(made.block_id, held)
            used.add(made.block_id)
            self.strategy.on_birth(made.block_id, made.nbytes, step.struct)

    def _commit(self, step: Step) -> None:
        for operand in step.operands:
            if operand.is_write:
                self._held[operand.block_id].is_dirty = True
        for block_id in step.dies:
            if block_id in self._held:
                self._release(block_id)
            self.strategy.on_death(block_id)
        touched = [operand.block_id for operand in (*step.operands, *step.makes)]
        used = [self._snapshot(block_id) for block_id in touched if block_id in self._held]
        for block_id in self.strategy.after_operator(self._device(), used):
            self._evict(block_id)

    # -- room --------------------------------------------------------------------------------

    def _make_room(self, need_nbytes: int, pinned: set[int]) -> None:
        excess_nbytes = self._resident_nbytes + need_nbytes - self.limit_nbytes
        if excess_nbytes <= 0:
            return
        candidates = self._snapshots(lambda block_id: block_id not in pinned)
        candidates.sort(key=lambda block: (block.last_use, -block.nbytes))
        chosen = list(self.strategy.victims(self._device(), candidates, excess_nbytes))
        allowed = {block.block_id for block in candidates}
        for block_id in (*chosen, *(block.block_id for block in candidates)):
            if self._resident_nbytes + need_nbytes <= self.limit_nbytes:
                return
            if block_id in allowed and block_id in self._held:
                self._evict(block_id)
        if self._resident_nbytes + need_nbytes > self.limit_nbytes:
            self._give_up_copies(need_nbytes, pinned)

    def _give_up_copies(self, need_nbytes: int, pinned: set[int]) -> None:
        """Give back what is still on its way, latest arrival first."""
        coming = [block_id for block_id in self._held if block_id not in pinned]
        for block_id in sorted(coming, key=lambda block_id: -self._held[block_id].arrives_ns):
            if self._resident_nbytes + need_nbytes <= self.limit_nbytes:
                return
            self._evict(block_id)

    def _evict(self, block_id: int) -> None:
        held = self._held[block_id]
        self._freed_ns = max(self._freed_ns, held.read_until_ns, held.arrives_ns)
        if held.is_dirty:
            self._copy_out(block_id)
            self._freed_ns = max(self._freed_ns, self._d2h_free_ns)
        self._release(block_id)
        self.strategy.on_evict(block_id)

    # -- copies ------------------------------------------------------------------------------

    def _copy_in(self, block_id: int, nbytes: int, is_persistent: bool) -> _Held:
        start_ns = max(self._host_ns, self._h2d_free_ns, self._freed_ns)
        self._freed_ns = 0.0
        self._h2d_free_ns = start_ns + nbytes / self.h2d_bytes_per_s * 1e9
        held = _Held(nbytes, is_persistent, False, self._h2d_free_ns, self._op_number)
        self._hold(block_id, held)
        return held

    def _copy_out(self, block_id: int) -> None:
        held = self._held[block_id]
        start_ns = max(self._host_ns, self._d2h_free_ns, held.read_until_ns)
        self._d2h_free_ns = start_ns + held.nbytes / self.d2h_bytes_per_s * 1e9
        self.counts.written_back_nbytes += held.nbytes
        held.is_dirty = False

    def _prefetch(self) -> None:
        wanted = list(self.strategy.prefetch(self._device(), self._snapshots()))
        sizes = self._sizes
        self._freed_ns = 0.0
        for block_id, victims in wanted:
            freed_nbytes = sum(self._held[v].nbytes for v in victims if v in self._held)
            fits = self._resident_nbytes - freed_nbytes + sizes[block_id] <= self.limit_nbytes
            if block_id in self._held or not fits or not all(map(self._is_free, victims)):
                self.counts.refused_count += 1
                continue
            for victim in victims:
                self._evict(victim)
            self.counts.prefetched_nbytes += sizes[block_id]
            self.strategy.on_prefetch(block_id, sizes[block_id])
            self._copy_in(block_id, sizes[block_id], True)

    def _write_back(self) -> None:
        if self._d2h_free_ns > self.now_ns:
            return
        for block_id in self.strategy.write_back(self._device(), self._snapshots()):
            assert self._held[block_id].is_dirty
            self._copy_out(block_id)
            return

    # -- books -------------------------------------------------------------------------------

    def _hold(self, block_id: int, held: _Held) -> None:
        self._sizes[block_id] = held.nbytes
        self._held[block_id] = held
        self._resident_nbytes += held.nbytes
        assert self._resident_nbytes <= self.limit_nbytes
        self.counts.peak_nbytes = max(self.counts.peak_nbytes, self._resident_nbytes)

    def _release(self, block_id: int) -> None:
        self._resident_nbytes -= self._held.pop(block_id).nbytes

    def _is_free(self, block_id: int) -> bool:
        held = self._held.get(block_id)
        return held is not None and (held.is_awaited or held.arrives_ns <= self.now_ns)

    def _snapshot(self, block_id: int) -> BlockSnapshot:
        held = self._held[block_id]
        return BlockSnapshot(
            block_id, held.nbytes, held.last_use, held.is_dirty, held.is_persistent
        )

    def _snapshots(self, allows: Callable[[int], bool] | None = None) -> Sequence[BlockSnapshot]:
        """Return the blocks held; with a filter, those of them that can be given back now."""
        if allows is None:
            return [self._snapshot(block_id) for block_id in self._held]
        return [
            self._snapshot(block_id)
            for block_id in self._held
            if allows(block_id) and self._is_free(block_id)
        ]

    def _device(self) -> DeviceSnapshot:
        in_flight = [
            held
            for held in self._held.values()
            if held.arrives_ns > self.now_ns and not held.is_awaited
        ]
        return DeviceSnapshot(
            name="model",
            limit_nbytes=self.limit_nbytes,
            resident_nbytes=self._resident_nbytes,
            in_flight_nbytes=sum(held.nbytes for held in in_flight),
            in_flight_count=len(in_flight),
            now_ns=int(self._host_ns),
            link_free_ns=int(self._h2d_free_ns),
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            compute_ns=self._compute_ns if self.tells_times else 0,
            compute_free_ns=int(self.now_ns),
        )


def uses(trace: Iterable[tuple[int, int]], nbytes: int = 1, compute_ns: int = 1) -> Iterator[Step]:
    """Make a program of a trace of (block, struct): one operator per access."""
    for block_id, struct in trace:
        yield Step((Operand(block_id, nbytes),), struct, compute_ns)


def least_misses(blocks: Sequence[int], room: int) -> int:
    """Return the misses of the oracle (Belady's MIN) with room for so many equal blocks."""
    never = len(blocks)
    next_uses, seen = [never] * len(blocks), dict[int, int]()
    for position in reversed(range(len(blocks))):
        next_uses[position] = seen.get(blocks[position], never)
        seen[blocks[position]] = position
    held: dict[int, int] = {}
    misses = 0
    for block, next_use in zip(blocks, next_uses, strict=True):
        if block not in held:
            misses += 1
            if len(held) >= room:
                del held[max(held, key=lambda other: held[other])]
        held[block] = next_use
    return misses
