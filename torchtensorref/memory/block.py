"""Block and Replica: one logical storage, and its copies on devices."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..base.errors import InvariantError
from . import core
from .exposure import Exposure
from .states import INVALID, LEGAL_TRANSITIONS, READABLE, ReplicaState

if TYPE_CHECKING:
    from ..devices.base import Device, Event

_block_numbers = itertools.count(1)


def unused_number() -> int:
    """Return a number that no block has, and none will get."""
    return next(_block_numbers)


_replica_numbers = itertools.count(1)


class Death(weakref.ref["Replica"]):
    """What a replica leaves behind when the program has let go of its block.

    A weak reference whose callback is C: what is raised in a finalizer of Python's would be lost.
    """

    # There is one for each replica.
    __slots__ = ("block_id", "counted_nbytes", "device", "number")

    device: Device | None
    number: int
    block_id: int
    #: What it counts for in the ledger of its device, while it is there.
    counted_nbytes: int


def next_death(device: Device) -> Death:
    """Take the death that is told of next; there must be one.

    The callbacks of the weak references run in any thread at any moment, and therefore only append
    to the graveyard of the device; who counts drains it before.
    """
    death: Death = device.graveyard.popleft()
    if not hasattr(death, "block_id"):  # an interrupt came before all was known of it
        death.device, death.number, death.block_id = None, 0, 0
    device.graveyard.mortals.pop(death.number, None)
    return death


class Replica:
    """The bytes of one block on one device.

    One storage object serves a replica for its whole life. Giving the bytes back empties that
    storage and fetching fills it again, so views made of it stay usable objects.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "base",
        "block_id",
        "device",
        "handed_out",
        "holders",
        "nbytes",
        "number",
        "pins",
        "stale_count",
        "state",
    )

    def __init__(
        self, block: Block, device: Device, base: torch.Tensor, state: ReplicaState
    ) -> None:
        #: Never given twice, unlike an address: the ledger counts by it.
        self.number = next(_replica_numbers)
        self.device = device
        #: A plain tensor that owns the storage: what a kernel returned, or 1-D bytes. It is empty
        #: (a storage of 0 bytes) while the device holds nothing.
        self.base = base
        #: At home, what the program was last given over the base: each look at the block gives the
        #: same storage object, whose `id` is no other living block's. It has no more memory.
        self.handed_out: Exposure | None = None
        self.state = state
        self.nbytes = block.nbytes
        self.block_id = block.block_id
        #: The blocks it belongs to, oldest first: one, or all that share it.
        sharers = block.sharers
        self.holders: Sequence[weakref.ref[Block]] = (
            sharers if sharers is not None else _alone(block)
        )
        #: Operators that hold the replica where it is.
        self.pins = 0
        #: How often its bytes were given up: what is there at another count was copied since.
        self.stale_count = 0
        #: The event of the copy that fills it, until an operator has waited for it.
        self.arrival: Event | None = None
        death = Death(self, device.graveyard.note)
        death.device, death.number, death.block_id = device, self.number, block.block_id
        # Ledgers keep that of a replica, and no more.
        device.graveyard.mortals[self.number] = death

    @property
    def death(self) -> Death:
        """What it will leave behind."""
        death: Death = self.device.graveyard.mortals[self.number]
        return death

    @property
    def block(self) -> Block | None:
        """The living block whose views over this replica are kept."""
        for reference in self.holders:
            block = reference()
            if block is not None:
                return block
        return None

    @property
    def readable(self) -> bool:
        """Whether an operator may read it now."""
        return self.state in READABLE

    def rehouse(self, base: torch.Tensor) -> None:
        """Exchange the memory at home: what was given away before is over the old one."""
        self.handed_out = None
        self.base = base

    def take_back_size(self, storage: torch.UntypedStorage) -> None:
        """Give the storage of the base the size that it had before a kernel has resized it."""
        self.handed_out = None
        storage.resize_(self.nbytes)

    def become(self, state: ReplicaState, why: str) -> None:
        """Change the state along a legal transition; anything else is our own fault."""
        if (self.state, state) not in LEGAL_TRANSITIONS:
            raise InvariantError(
                f"b{self.block_id} on {self.device.name}: {self.state.value} -> {state.value} "
                f"({why}) is not a legal transition"
            )
        self.state = state
        self.stale_count += state is INVALID

    def __repr__(self) -> str:
        pins = f", pinned {self.pins}" if self.pins else ""
        return f"<Replica b{self.block_id} {self.device.name} {self.state.value}{pins}>"


def _alone(block: Block) -> Sequence[weakref.ref[Block]]:
    """Return the holders of a replica of a block that shares with nobody: its replicas have one."""
    for replica in (block.settled or {}).values():
        return replica.holders
    return (weakref.ref(block),)


class Births(Protocol):
    """Who keeps less of a block until somebody asks: of fresh results, and of what is adopted."""

    def settle(self, block: Block) -> None:
        """Give a block its `replicas`, and its `exposure`."""


_NOTHING_LEFT: frozenset[int] = frozenset()
#: By a name, since mypy does not see that the base has the others.
_SLOTS = ("asked", "block_id", "left", "promise", "sharers")


class Block(core.BlockBase):  # type: ignore[misc]
    """One logical storage; keeps its identity wherever its bytes are.

    All TensorRefs that alias one another hold the same block. Blocks that are copies of one
    another and have not been written since share the dictionary `replicas` itself (copy on write).
    """

    # There is one for each tensor: what is not in these slots stands in the base, which in C++ has
    # no dictionary either.
    __slots__ = _SLOTS

    block_id: int
    #: The device, one that torch cannot name, where the program takes it to be; None: none.
    asked: str | None
    #: What is to become its bytes (`promises/`); None: it has them.
    promise: Any
    #: Weak references to the blocks that share `replicas`, oldest first; None: nobody does.
    sharers: list[weakref.ref[Block]] | None
    #: Numbers of replicas that it has left for others: views that are kept may be over those.
    left: frozenset[int]
    if TYPE_CHECKING:
        use_count: int
        #: Operators that were given its number by value (`interception/by_value.py`).
        given_by_value_count: int
        is_persistent: bool
        #: The program wants it to stay where it is (`Pin`): it goes only for want of other room.
        is_kept: bool
        #: Whether the bytes at home have changed their storage object: views kept are of no use.
        is_rehoused: bool
        #: The copies, by device. They and `exposure` are settled when somebody asks.
        replicas: dict[Device, Replica]
        exposure: Exposure | None
        #: `replicas` if they have been asked for, or None.
        settled: dict[Device, Replica] | None

    def __init__(
        self,
        nbytes: int,
        born: int = 0,
        ready: Device | None = None,
        result: torch.Tensor | None = None,
        births: Births | None = None,
        adopted: torch.Tensor | None = None,
    ) -> None:
        # The ready path reads these of every operand. None has a default in the class: Python finds
        # an attribute of an object several times as fast where the class has none of that name.
        self.block_id = next(_block_numbers)
        self.nbytes = nbytes
        #: The device where operators may use the block without asking anybody; None: ask.
        self.ready = ready
        #: With `ready`: operators may also write it there, since no other replica is current.
        self.owned = ready is not None
        #: The number under which each use by a ready operator is noted, to be told later
        #: (`leases.py`); 0: none is.
        self.logged_as = 0
        #: Number of the operator that made it, and of the one that used it last.
        self.born = born
        self.last_use = born
        #: What a kernel has just made, until somebody asks for `replicas`; most results die before.
        self.result = result
        self.births = births
        #: A plain tensor over the bytes that are to be those at home, until then.
        self.adopted = adopted
        self.promise = self.sharers = self.asked = None
        self.left = _NOTHING_LEFT
        if births is None:
            self.replicas = {}
        if adopted is None:
            self.exposure = None

    def base_on(self, device: Device) -> torch.Tensor:
        """Return the tensor that owns the bytes on a device where the block is ready."""
        result = self.result  # once: another thread may make a replica of it meanwhile
        return self.replicas[device].base if result is None else result

    @property
    def name(self) -> str:
        """Short and stable, for stories: b7."""
        return f"b{self.block_id}"

    def readable_on(self, device: Device) -> Replica | None:
        """Return the replica on `device` if its bytes are current."""
        replica = self.replicas.get(device)
        return replica if replica is not None and replica.state in READABLE else None

    def is_on(self, device: Device) -> bool:
        """Whether a device holds it, or will before long."""
        replica = self.replicas.get(device)
        return replica is not None and replica.state is not INVALID

    def readable_replicas(self) -> list[Replica]:
        """Return the replicas whose bytes are current."""
        return [replica for replica in list(self.replicas.values()) if replica.state in READABLE]

    def accelerator(self) -> Device | None:
        """Return an accelerator that holds it, or will before long; None if none does."""
        there = (r.device for r in list(self.replicas.values()) if r.state is not INVALID)
        return next((device for device in there if not device.is_host), None)

    @property
    def is_shared(self) -> bool:
        """Whether another living block shares the replicas; forgets the dead."""
        if self.sharers is None:
            return False
        self.sharers[:] = [reference for reference in self.sharers if reference() is not None]
        if len(self.sharers) > 1:
            return True
        self.sharers = None
        for replica in self.replicas.values():
            replica.holders = (weakref.ref(self),)
            replica.block_id = replica.death.block_id = self.block_id
        return False

    @property
    def owner(self) -> Block:
        """The oldest living block that shares the replicas: the only one whose views are kept."""
        if self.sharers is not None:
            for reference in self.sharers:
                block = reference()
                if block is not None:
                    return block
        return self

    def share_with(self, other: Block) -> None:
        """Make `other` a copy of this block that costs nothing until one of them is written."""
        # In this order: whatever comes in between, nobody writes what another one has, and it can
        # be done again.
        self.ready = other.ready = None
        self.owned = other.owned = False
        sharers = [weakref.ref(self)] if self.sharers is None else self.sharers
        for replica in self.replicas.values():
            replica.holders = sharers
        self.sharers = sharers
        if not any(reference() is other for reference in sharers):
            sharers.append(weakref.ref(other))
        if other.sharers is not sharers or other.replicas is not self.replicas:
            other.move_to(self.replicas, sharers)
        if other.left and other.left <= _numbers_of(self.replicas):
            # The oldest again: views that are kept are its.
            others = [reference for reference in sharers if reference() is not other]
            sharers[:] = [weakref.ref(other), *others]
            other.left = _NOTHING_LEFT

    def move_to(self, replicas: dict[Device, Replica], sharers: list[weakref.ref[Block]]) -> None:
        """Leave the sharers for replicas that hold the same bytes, alone or with others."""
        before = self.sharers
        if self.owner is self:
            self.left |= _numbers_of(self.replicas)
        if len(sharers) > 1:  # first: it does not take for its own what others have, too
            self.sharers = sharers
        self.replicas = replicas
        if len(sharers) <= 1:
            self.sharers = None
        if before is not None and before is not sharers:
            before[:] = [reference for reference in before if reference() is not self]

    def __repr__(self) -> str:
        replicas = list(self.replicas.values())
        where = ", ".join(f"{one.device.name} {one.state.value}" for one in replicas)
        return f"<Block {self.name} {self.nbytes} bytes: {where or 'no replica'}>"


def _numbers_of(replicas: dict[Device, Replica]) -> frozenset[int]:
    return frozenset(replica.number for replica in replicas.values())


def _half() -> Block:
    """Make what Python keeps of a block that C++ has made: its result is in the books there."""
    block: Block = Block.__new__(Block)
    block.block_id = next(_block_numbers)
    block.promise = block.sharers = block.exposure = block.asked = None
    block.left = _NOTHING_LEFT
    return block


if core.library is not None:
    core.library.set_maker(_half)
