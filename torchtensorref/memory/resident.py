"""What a strategy looks at: what a device holds, described as far as somebody looks.

To describe all of it, or to sort it, would take longer the more there is, at every operator.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, overload

from ..devices.base import Device
from ..strategy import BlockSnapshot, DeviceSnapshot
from .block import Block, Replica
from .bookkeeping import Books
from .holds import Holds, is_free
from .in_flight import InFlight
from .states import DIRTY, FILLING, INVALID

#: Candidates looked at first: mostly one is enough. Then four times as many, and so on.
FIRST_COUNT = 1


class _Described(Sequence[BlockSnapshot]):
    """Snapshots that are made when somebody looks, all of them only if somebody wants all."""

    def __init__(self, books: Books, device: Device) -> None:
        self._books = books
        self._device = device
        #: Number of the last operator.
        self.newest = books.tick
        self._all: list[BlockSnapshot] | None = None

    @abstractmethod
    def get(self, block_id: int) -> BlockSnapshot | None:
        """Describe one block; None if it is not among them."""

    @abstractmethod
    def _look(self) -> Iterator[BlockSnapshot]:
        """Describe them one by one."""

    def _look_at_all(self) -> list[BlockSnapshot]:
        if self._all is None:
            self._all = list(self._look())
        return self._all

    def __iter__(self) -> Iterator[BlockSnapshot]:
        return self._look() if self._all is None else iter(self._all)

    def __len__(self) -> int:
        return len(self._look_at_all())

    @overload
    def __getitem__(self, index: int) -> BlockSnapshot: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockSnapshot]: ...

    def __getitem__(self, index: int | slice) -> BlockSnapshot | list[BlockSnapshot]:
        return self._look_at_all()[index]

    def _replica_of(self, block_id: int) -> tuple[Block, Replica] | None:
        block = self._books.known.get(block_id)
        replica = block.replicas.get(self._device) if block is not None else None
        if block is None or replica is None or replica.state is INVALID:
            return None
        return block, replica


class Resident(_Described):
    """All that a device holds."""

    def get(self, block_id: int) -> BlockSnapshot | None:
        """Describe one block; None if the device does not hold it."""
        found = self._replica_of(block_id)
        return None if found is None else described(self._books, *found)

    def _look(self) -> Iterator[BlockSnapshot]:
        with self._books.lock:
            replicas = self._books.ledgers[self._device].replicas()
            return iter(snapshots_of(self._books, replicas))


class Candidates(_Described):
    """What a device holds and nobody keeps there, least recently used first.

    Held is looked at as it is when somebody looks: who evicts one looks again.
    """

    def __init__(self, books: Books, holds: Holds, device: Device) -> None:
        super().__init__(books, device)
        self._holds = holds
        self._found: dict[int, Replica] = {}

    def get(self, block_id: int) -> BlockSnapshot | None:
        """Describe one block; None if the device does not hold it, or somebody keeps it there."""
        found = self._replica_of(block_id)
        if found is None or not is_free(found[1], found[0], self._holds.announced_blocks()):
            return None
        self._found[block_id] = found[1]
        return described(self._books, *found)

    def replica(self, block_id: int) -> Replica | None:
        """Return the replica that is to be evicted if its block is named."""
        if block_id not in self._found:
            self.get(block_id)
        return self._found.get(block_id)

    def nbytes_of(self, block_id: int) -> int:
        """Return the bytes that a block frees; 0 for what is no candidate."""
        replica = self.replica(block_id)
        return 0 if replica is None else replica.nbytes

    def _look(self) -> Iterator[BlockSnapshot]:
        for block, replica in self._free():
            self._found[block.block_id] = replica
            with self._books.lock:
                snapshot = described(self._books, block, replica)
            yield snapshot

    def replicas(self) -> Iterator[Replica]:
        """Yield the replicas of all candidates, without describing them."""
        return (replica for _, replica in self._free())

    def _free(self) -> Iterator[tuple[Block, Replica]]:
        books, given = self._books, set[int]()
        count = FIRST_COUNT
        while True:
            with books.lock:
                oldest = books.ledgers[self._device].oldest(count)
                announced = self._holds.announced_blocks()
                found = []
                for replica in oldest:
                    block = replica.block
                    if replica.number in given or block is None:
                        continue
                    given.add(replica.number)
                    if is_free(replica, block, announced):
                        found.append((block, replica))
            yield from found
            if len(oldest) < count:
                return
            count *= 4


def snapshots_of(books: Books, replicas: Sequence[Replica]) -> list[BlockSnapshot]:
    """Describe the living blocks of replicas (lock of the books held)."""
    pairs = ((replica.block, replica) for replica in replicas)
    return [described(books, block, replica) for block, replica in pairs if block is not None]


def described(books: Books, block: Block, replica: Replica) -> BlockSnapshot:
    """Describe a block that has a replica on the device in question."""
    return BlockSnapshot(
        block.block_id,
        replica.nbytes,
        block.last_use,
        replica.state is DIRTY and not _is_on_its_way_home(books, block),
        block.is_persistent,
    )


def _is_on_its_way_home(books: Books, block: Block) -> bool:
    home = block.replicas.get(books.host)
    return home is not None and home.state is FILLING


class SeenDevice(DeviceSnapshot):
    """A device, described when somebody looks: strategies that go by age, or give all, never do."""

    __slots__ = ("_books", "_device", "_in_flight")

    @classmethod
    def of(cls, books: Books, in_flight: InFlight, device: Device) -> SeenDevice:
        """Return a device as it is when somebody looks; a copy of that is made of facts."""
        seen = object.__new__(cls)
        for name, value in (("_books", books), ("_in_flight", in_flight), ("_device", device)):
            object.__setattr__(seen, name, value)
        # All that is asked before most operators under pressure, and always the same.
        object.__setattr__(seen, "decision_nbytes", device.decision_nbytes)
        return seen

    def __getattr__(self, name: str) -> Any:
        """Describe it, all at once: called for what is not there yet."""
        if name not in _FACTS:
            raise AttributeError(name)
        with self._books.lock:
            facts = facts_of(self._books, self._in_flight, self._device)
        for fact, value in facts.items():
            object.__setattr__(self, fact, value)
        return facts[name]


_FACTS = frozenset(field.name for field in fields(DeviceSnapshot))


def facts_of(books: Books, in_flight: InFlight, device: Device) -> dict[str, Any]:
    """Return what a `DeviceSnapshot` says of a device (lock of the books held)."""
    ledger = books.ledgers[device]
    clocks = device.clocks()
    now_ns = device.now_ns()
    compute_ns, compute_free_ns = clocks.compute_ns, clocks.compute_free_ns
    if books.spreads:  # the program comes to this one when it is through with the others
        all_clocks = [accelerator.clocks() for accelerator in books.accelerators]
        compute_ns = sum([clocks.compute_ns for clocks in all_clocks])
        compute_free_ns = max([clocks.compute_free_ns for clocks in all_clocks])
    # What compute gets to before it is through with what it has been given is no longer ahead.
    filling = in_flight.later_than(device, max(now_ns, compute_free_ns))
    return {
        "name": device.name,
        "limit_nbytes": ledger.most_nbytes,
        "resident_nbytes": ledger.resident_nbytes,
        "in_flight_nbytes": sum(r.nbytes for r in filling),
        "in_flight_count": len(filling),
        "now_ns": now_ns,
        "link_free_ns": clocks.link_free_ns,
        "h2d_bytes_per_s": clocks.h2d_bytes_per_s,
        "d2h_bytes_per_s": clocks.d2h_bytes_per_s,
        "compute_ns": compute_ns or clocks.host_ns,
        "compute_free_ns": compute_free_ns,
        "d2h_free_ns": clocks.d2h_free_ns,
        "stall_ns": device.stall_ns,
        "decision_nbytes": device.decision_nbytes,
    }
