"""Small copies home: through a piece of page-locked memory, carried on by whoever looks first."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...base import forking
from ..storages import empty_bytes
from .events import Waits

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PIECE_NBYTES", "Landing", "Pieces"]

#: Size and number of the pieces. Larger copies, and those that find none free, go through the ring.
PIECE_NBYTES = 64 << 10
PIECE_COUNT = 64


class Pieces:
    """A few pieces of page-locked memory, of one size.

    Parameters
    ----------
    make_slot : callable
        Gives a page-locked tensor of so many bytes, or None where there is none: then the pieces
        are pageable, and copies are slower and right.
    """

    def __init__(self, make_slot: Callable[[int], Tensor | None]) -> None:
        self._make_slot = make_slot
        self._lock = forking.Lock()
        self._free: deque[Tensor] | None = None

    def take(self) -> Tensor | None:
        """Return a piece that nobody uses; None if there is none."""
        if self._free is None:
            with self._lock:
                if self._free is None:
                    self._free = deque(self._made())
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def _made(self) -> tuple[Tensor, ...]:
        nbytes = PIECE_NBYTES * PIECE_COUNT
        memory = self._make_slot(nbytes)
        memory = empty_bytes(nbytes) if memory is None else memory
        self._memory = memory  # while it lives, its bytes count as page-locked
        return tuple(memory[at : at + PIECE_NBYTES] for at in range(0, nbytes, PIECE_NBYTES))

    def give_back(self, piece: Tensor) -> None:
        """Let others use a piece."""
        assert self._free is not None  # it was taken from there
        self._free.append(piece)


class Landing:
    """The event of a small copy home, which ends when its bytes have been carried on from a piece.

    Parameters
    ----------
    event : Any
        Of the device module: the piece has the bytes.
    device : Waits
        What holds compute back, and counts the host's waiting.
    source, piece, destination : Tensor
        Held until it has ended.
    pieces : Pieces
        Where the piece goes back to.

    Notes
    -----
    No thread is needed: a thread takes longer to wake than the bytes take to be copied.
    """

    start_ns = end_ns = 0

    def __init__(
        self,
        event: Any,
        device: Waits,
        source: Tensor,
        piece: Tensor,
        destination: Tensor,
        pieces: Pieces,
    ) -> None:
        self._event = event
        self._device = device
        self._lock = forking.RLock()  # again: whoever is interrupted here may look once more
        self._left: tuple[Tensor, Tensor, Tensor] | None = (source, piece, destination)
        self._pieces = pieces

    @property
    def events(self) -> tuple[Any, ...]:
        """The event after which the source may be written."""
        return (self._event,)

    def is_done(self) -> bool:
        """Whether the bytes have arrived; carries them on if that is all that is missing."""
        if self._left is None:
            return True
        if not self._event.query():
            return False
        self._land()
        return True

    def wait(self) -> None:
        """Make the compute stream wait until the source has been read."""
        self._device.hold_compute_back(self._event)

    def synchronize(self) -> None:
        """Make the host wait for it; the time counts as a stall."""
        if self._left is None:
            return
        began_ns = time.perf_counter_ns()
        self._event.synchronize()
        self._device.stall_ns += time.perf_counter_ns() - began_ns
        self._land()

    def _land(self) -> None:
        with self._lock:
            if self._left is None:
                return  # another thread was faster
            _, piece, destination = self._left
            nbytes = destination.numel() * destination.element_size()
            ctypes.memmove(destination.data_ptr(), piece.data_ptr(), nbytes)
            self._left = None
        self._pieces.give_back(piece)
