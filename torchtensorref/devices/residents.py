"""The bytes that lie on one device, counted by themselves: an independent witness."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .storages import storage_nbytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Resident", "Residents"]


class Resident(weakref.ref[Any]):
    """One base on a device. It is a weak reference, so that its callback gets the whole record."""

    __slots__ = ("entered_ns", "key", "nbytes", "number", "room_ns", "used_ns", "written_ns")

    key: int  # id(base): unique while the base lives, and forgotten before it can come again
    number: int  # which allocation of the device it was: its name in messages
    nbytes: int  # what it counts for
    used_ns: int  # end of the last operator known to touch it
    written_ns: int  # end of the last operator known to write it
    entered_ns: int  # end of the last operator that cannot have touched it
    room_ns: int  # until then copies or operators still used the freed bytes it was given

    def __str__(self) -> str:
        return f"allocation {self.number} ({self.nbytes:,} bytes)"


class Residents:
    """The bases that have bytes on a device, those that were emptied, and their sum.

    Notes
    -----
    It keeps no base alive. When one dies, the callback of its weak reference only appends to a
    deque (one atomic step, legal in any thread and inside the garbage collector); `settle` takes
    the dead out of the books. The caller holds its own lock around every method but `is_settled`.
    """

    def __init__(self) -> None:
        self.present: dict[int, Resident] = {}
        self.emptied: dict[int, Resident] = {}
        self.nbytes = 0
        self.peak_nbytes = 0
        self.dead: deque[Resident] = deque()
        self.on_death = self.dead.append

    def enter(self, base: Tensor, nbytes: int, number: int) -> Resident:
        """Count a base from now on. The dead must have been settled before."""
        resident = Resident(base, self.on_death)
        resident.key = key = id(base)
        resident.nbytes = nbytes
        resident.number = number
        resident.used_ns = resident.written_ns = resident.room_ns = resident.entered_ns = 0
        self.present[key] = resident
        self.nbytes = total = self.nbytes + nbytes
        if total > self.peak_nbytes:
            self.peak_nbytes = total
        return resident

    def leave(self, resident: Resident) -> None:
        """Stop counting a base that was emptied; remember that it may be refilled."""
        del self.present[resident.key]
        self.emptied[resident.key] = resident
        self.nbytes -= resident.nbytes

    def enter_again(self, resident: Resident, nbytes: int) -> None:
        """Count a refilled base."""
        del self.emptied[resident.key]
        self.present[resident.key] = resident
        resident.nbytes = nbytes
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def take_dead(self) -> Resident | None:
        """Forget one base that died; return it if its bytes were still counted."""
        while self.dead:
            resident = self.dead.popleft()
            if self.present.get(resident.key) is resident:
                del self.present[resident.key]
                self.nbytes -= resident.nbytes
                return resident
            if self.emptied.get(resident.key) is resident:
                del self.emptied[resident.key]
        return None

    def settle(self) -> None:
        """Forget every base that died."""
        while self.take_dead() is not None:
            pass

    def recover(self, bases: Sequence[tuple[Any, bool]], number: int) -> None:
        """Count again by what the storages hold; bases that are in use count although empty."""
        self.settle()
        in_use = {id(base) for base, is_used in bases if is_used}
        # Empty results that other threads have just made are not among the bases yet.
        in_use |= {key for key, resident in self.present.items() if not resident.nbytes} - {
            id(base) for base, _ in bases
        }
        known = {**self.emptied, **self.present}
        self.present, self.emptied, self.nbytes = {}, {}, 0
        for key, resident in known.items():
            base = resident()
            if base is None:
                continue
            resident.nbytes = storage_nbytes(base)
            is_here = resident.nbytes or key in in_use
            (self.present if is_here else self.emptied)[key] = resident
        for base, is_used in bases:
            if id(base) not in known:
                resident = self.enter(base, storage_nbytes(base), number)
                if not (resident.nbytes or is_used):
                    self.leave(resident)
        self.nbytes = sum(resident.nbytes for resident in self.present.values())
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def reset_peak(self) -> None:
        """Start `peak_nbytes` again from what is counted now. The dead must have been settled."""
        self.peak_nbytes = self.nbytes

    def recount(self) -> int:
        """The sum again, from the storages themselves: equal to `nbytes` or the books are wrong."""
        bases = [resident() for resident in list(self.present.values())]
        return sum(storage_nbytes(base) for base in bases if base is not None)
