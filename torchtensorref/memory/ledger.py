"""The ledger of one device: which replicas hold bytes there, and their sum."""

from __future__ import annotations

import time
import weakref
from collections import deque

import torch

from ..base import forking
from ..base.errors import LostError
from ..base.units import format_nbytes
from ..devices.base import Device
from ..strategy import TINY_SHARE
from . import core
from .block import Block, Death, Replica
from .budget import Budget
from .recency import Recency
from .states import DIRTY

_weakly = weakref.ref
#: How often sums are compared that operators in C++ change meanwhile.
LOOKS = 1000
#: A number that no operator has reached.
ALL = (1 << 63) - 1


def given_up(replica: Replica) -> LostError:
    """Return what is raised where a block is used again that was told to have died.

    That is in Python alone, where the collector sees what TensorRefs hold: it clears the weak
    references to all that a cycle holds before it calls the cycle's finalizers.
    """
    name = f"b{replica.block_id}"
    return LostError(
        f"Python's collector had given {name} up, in a cycle with the __del__ that uses it now. "
        "Break the cycle, or build the library in C++ (`torchtensorref build`), where that works.",
        block=name,
    )


def lost(block: Block) -> LostError:
    """Return what is raised where no copy of a block's bytes is left."""
    return LostError(
        f"The only copy of {block.name} ({block.nbytes:,} bytes) is lost: it was being moved when "
        "an error came that may come at any instruction, or was on an accelerator of the process "
        "that this one was forked from. Make the tensor again, or load it.",
        block=block.name,
    )


class Ledger(core.LedgerBase):  # type: ignore[misc]
    """The replicas that hold bytes on one device, and their sum.

    Fresh results are counted by weak references to their blocks: most die within a few operators,
    and nobody ever asks for more about them. Those that live get a replica when somebody does.
    What operators in C++ make is counted there, the same way (`newborn_nbytes`).

    Notes
    -----
    Nobody waits under its lock, and only the device's own count is called: the ready path counts
    results under it. It is that of the books (`forking.shared`).
    """

    def __init__(self, device: Device, budget: Budget) -> None:
        self.device = device
        #: Of the budget that was asked for, left to what kernels allocate in passing.
        self.scratch_nbytes = 0
        #: The bytes that are counted here; C++ reads them.
        self.counted_nbytes = 0
        self.budget = budget
        self._lock = forking.shared  # again: making objects can collect garbage that comes here
        self._replicas: dict[int, Death] = {}
        self._recency = Recency(self._last_use_of)
        #: Fresh results and their bytes, by the weak references that tell their deaths.
        self._newborn: dict[weakref.ref[Block], int] = {}
        #: Filled by weak references' callbacks, in any thread; `bury` takes them off the books.
        self.dead: deque[weakref.ref[Block]] = deque()
        self._on_death = self.dead.append
        #: The device counts for itself, and has to be told.
        self._is_witnessed = device.is_witness
        self.count_for(device)

    @property
    def budget(self) -> Budget:
        """The most bytes that may be here, and where eviction starts."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._budget = budget
        #: The most bytes that may be here, and up to how many nothing is evicted.
        self.most_nbytes, self.high_nbytes = budget.limit_nbytes, budget.high_nbytes
        #: Results of fewer bytes are not told to the strategy.
        self.tiny_nbytes = int(budget.limit_nbytes * TINY_SHARE)
        #: What was here when it was lowered, until it is kept: that leaves bit by bit.
        self.lowered_from_nbytes = self.resident_nbytes

    @property
    def resident_nbytes(self) -> int:
        """The bytes here."""
        nbytes: int = self.counted_nbytes + self.newborn_nbytes
        return nbytes

    @property
    def limit_nbytes(self) -> int:
        """The budget as it was asked for."""
        return self.budget.limit_nbytes + self.scratch_nbytes

    def beyond_nbytes(self, counted_nbytes: int) -> int:
        """How much more is here than ever may be, also just after the budget was lowered.

        Once it is kept, it is so for good (lock of the books held).
        """
        if counted_nbytes <= self.most_nbytes:
            self.lowered_from_nbytes = 0
        return counted_nbytes - max(self.most_nbytes, self.lowered_from_nbytes)

    # -- fresh results --------------------------------------------------------------------------

    def bear_if_room(self, result: torch.Tensor, nbytes: int, tick: int) -> Block | None:
        """Make the block of a kernel's fresh result and count it; None where there is no room.

        Raises
        ------
        torch.OutOfMemoryError
            The device, which counts for itself, has no room. Nothing is counted.
        """
        with self._lock:
            if self.dead:
                self.bury()
            if self.counted_nbytes + self.newborn_nbytes + nbytes > self.high_nbytes:
                return None
            if self._is_witnessed:
                self.device.account(result)
            block = Block(nbytes, tick, self.device, result, self)
            # Last: whoever finds it here may ask it for its replica.
            self._newborn[_weakly(block, self._on_death)] = nbytes
            # Read again: making objects can collect garbage, whose finalizers may come here.
            self.counted_nbytes += nbytes
        return block

    def settle(self, block: Block) -> None:
        """Make the replica of a fresh result, and count that instead."""
        with self._lock:
            if block.births is None:
                return
            if block.settled is not None:  # an error came before it was no newborn any more
                block.result = block.births = None
                self.take_over(block)
                return
            assert block.result is not None
            replica = Replica(block, self.device, block.result, DIRTY)
            # In this order: at any moment it is counted, twice if an error comes in between.
            self.add(replica)
            block.replicas = {self.device: replica}
            block.result = block.births = None
            # Equal to the one it was counted by: while the block lives, references to it are.
            nbytes = self._newborn.pop(_weakly(block), 0)
            self.counted_nbytes -= nbytes  # read only now: see `bear_if_room`
            self.take_over(block)

    def bury(self) -> None:
        """Take fresh results that have died off the books."""
        with self._lock:
            dead, newborn = self.dead, self._newborn
            while dead:
                nbytes = newborn.pop(dead.popleft(), 0)
                self.counted_nbytes -= nbytes

    # -- replicas -------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Count a replica."""
        with self._lock:
            self._count(replica)
            self._put_in_order(replica)

    def _count(self, replica: Replica) -> None:
        death = replica.device.graveyard.mortals.get(replica.number)
        if death is None:
            raise given_up(replica)
        death.counted_nbytes = nbytes = replica.nbytes
        self._replicas[replica.number] = death
        self.counted_nbytes += nbytes

    def add_if_room(self, replica: Replica) -> bool:
        """Count a replica that is about to be filled; False where the budget has no room for it."""
        with self._lock:
            if self.dead:
                self.bury()
            if self.counted_nbytes + self.newborn_nbytes + replica.nbytes > self.most_nbytes:
                return False
            self._count(replica)
            return True

    def has_arrived(self, replica: Replica) -> None:
        """Take a replica that was about to be filled into the order of who goes first.

        Not before: what is fetched ahead of need was used least recently, and each eviction would
        pass all of it to find what can go.
        """
        with self._lock:
            if replica.number in self._replicas:
                self._put_in_order(replica)

    def is_in_order(self, replica: Replica) -> bool:
        """Whether a replica has a place in that order."""
        with self._lock:  # another thread may be just taking it in: it counts before it has one
            return replica.number in self._recency

    def remove(self, replica: Replica) -> int:
        """Stop counting a replica; return its bytes."""
        return self.remove_number(replica.number)

    def remove_number(self, number: int) -> int:
        """Stop counting a replica that died; return its bytes, 0 if it did not count."""
        with self._lock:
            death = self._replicas.pop(number, None)
            nbytes = 0 if death is None else death.counted_nbytes
            self._recency.remove(number)
            self.counted_nbytes -= nbytes
            return nbytes

    def __contains__(self, replica: Replica) -> bool:
        return replica.number in self._replicas

    def replicas(self) -> list[Replica]:
        """Return the living replicas that hold bytes here."""
        self._settle_born_until(ALL)
        found = (death() for death in list(self._replicas.values()))
        return [replica for replica in found if replica is not None]

    def oldest(self, count: int) -> list[Replica]:
        """Return the replicas used least recently, in that order: so many, or all there are."""
        with self._lock:
            found = self._oldest_settled(count)
            # Fresh results that nobody has asked for were used after they were made: none of those
            # made later comes before the last of these.
            block = found[-1].block if len(found) == count else None
            if self._settle_born_until(ALL if block is None else block.last_use):
                found = self._oldest_settled(count)
            return found

    def _oldest_settled(self, count: int) -> list[Replica]:
        found: list[Replica] = []
        for number in self._recency.oldest():
            # Not there: garbage was collected in between, and its finalizer has had this evicted.
            death = self._replicas.get(number)
            replica = death() if death is not None else None
            if replica is not None:
                found.append(replica)
                if len(found) == count:
                    break
        return found

    def _settle_born_until(self, last: int) -> bool:
        """Make the replicas of fresh results of operators up to a number; whether there are any."""
        settled = self.newborns(last)
        for newborn in list(self._newborn) if self._has_newborn_until(last) else ():
            block = newborn()
            if block is not None:
                if block.born > last:
                    break  # they are in the order of their births
                settled.append(block)
        for block in settled:
            self.settle(block)
        return bool(settled)

    def _has_newborn_until(self, last: int) -> bool:
        """Whether the one made first may be of an operator up to a number."""
        self.bury()
        try:
            block = next(iter(self._newborn))()
        except StopIteration:
            return False
        except RuntimeError:
            return True  # garbage was collected in between, and with it came others
        return block is None or block.born <= last

    def _put_in_order(self, replica: Replica) -> None:
        block = replica.block
        last_use = block.last_use if block is not None else 0
        self._recency.add(replica.number, last_use, replica.nbytes)

    def _last_use_of(self, number: int) -> int | None:
        death = self._replicas.get(number)
        replica = death() if death is not None else None
        block = replica.block if replica is not None else None
        return block.last_use if block is not None else None

    def both_sums(self) -> tuple[int, int]:
        """Return the running sum, and what is counted summed again: they are to be equal.

        Notes
        -----
        Operators in C++ take no lock of Python's. One may have counted its result and not have it
        in its list yet, and one may end between two looks: they are given the time to.
        """
        with self._lock:
            mine_nbytes = self._replica_nbytes() + sum(self._newborn.values())
            for _ in range(LOOKS):
                newborn_nbytes, listed_nbytes = self.newborn_nbytes, self.recounted_nbytes()
                if newborn_nbytes == listed_nbytes:
                    break
                time.sleep(0)
            return self.counted_nbytes + newborn_nbytes, mine_nbytes + listed_nbytes

    def recount(self) -> None:
        """Forget what has died, and sum again; see `repair.py`."""
        with self._lock:
            self.dead.clear()
            for reference in list(self._newborn):
                block = reference()
                if block is not None and block.settled is not None:
                    block.result = block.births = None
                if block is None or block.births is None:
                    del self._newborn[reference]
            self._recency = Recency(self._last_use_of)
            for number, death in list(self._replicas.items()):
                replica = death()
                if replica is None:
                    del self._replicas[number]
                else:
                    self._put_in_order(replica)
            self.counted_nbytes = self._replica_nbytes() + sum(self._newborn.values())

    def _replica_nbytes(self) -> int:
        return sum(death.counted_nbytes for death in self._replicas.values())

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.device.name} {format_nbytes(self.resident_nbytes)} of "
            f"{format_nbytes(self.budget.limit_nbytes)}>"
        )
