"""Copies to and from memory that is not page-locked: in slices, through a few page-locked slots."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...base.errors import TransferError
from ..background import Background
from ..host.mirrors import Mirror
from ..storages import empty_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HostCopier", "Lane", "StagedCopy", "StagingRing"]

#: Size and number of the slots. One is filled while one is copied, and one is free.
SLOT_NBYTES = 32 << 20
SLOT_COUNT = 3

#: A copy that fails is tried again; links hiccup, and the source is untouched.
ATTEMPTS = 2

#: Threads that fill a slot together; one alone does not reach the speed of the link.
COPY_THREADS = 4
#: A part of a slot that one thread copies has at least so many bytes.
PART_NBYTES = 1 << 20


class HostCopier:
    """Copies host bytes with several threads, and without holding Python's lock."""

    def __init__(self, thread_count: int = 0) -> None:
        self._count = thread_count or max(1, min(COPY_THREADS, (os.cpu_count() or 2) - 1))
        self._helpers = [Background("torchTensorRef-copy") for _ in range(self._count - 1)]

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy all bytes of one contiguous host tensor over those of another, equally large one."""
        nbytes = source.numel() * source.element_size()
        parts = min(self._count, max(1, nbytes // PART_NBYTES))
        step = -(-nbytes // parts) if nbytes else 0
        here, there = source.data_ptr(), destination.data_ptr()
        pieces = [
            _Piece(there + at, here + at, min(step, nbytes - at))
            for at in range(step, nbytes, step or 1)
        ]
        for helper, piece in zip(self._helpers, pieces, strict=False):
            helper.submit(piece)
        ctypes.memmove(there, here, min(step, nbytes))
        for piece in pieces:
            piece.done.wait()


class _Piece:
    """A part of a copy, for a helper."""

    def __init__(self, there: int, here: int, nbytes: int) -> None:
        self._where = there, here, nbytes
        self.done = threading.Event()

    def __call__(self) -> None:
        ctypes.memmove(*self._where)
        self.done.set()


class Lane(Protocol):
    """One direction of a link: its stream, and how copies are issued on it."""

    def hold_back(self, event: Any) -> None:
        """Let the stream wait for an event of the device."""
        ...

    def issue(self, source: Tensor, destination: Tensor) -> Any:
        """Issue a copy between page-locked memory and the device; return its event."""
        ...


class StagedCopy:
    """One copy on its way through the ring. A thread of the ring carries it out."""

    def __init__(
        self,
        source: Tensor,
        destination: Tensor,
        after: Sequence[Any],
        *,
        mirror: Mirror | None = None,
    ) -> None:
        self.source = source
        self.destination = destination
        self.after = after
        #: Page-locked memory to be filled instead of slots, and to be kept.
        self.mirror = mirror
        #: The event of its last slice, on the stream; None until that is issued, or if it failed.
        self.last: Any = None
        self.error: BaseException | None = None
        #: All slices are issued: the stream may be told to wait, and a host source has been read.
        self.issued = threading.Event()
        #: All bytes have arrived, or the copy has failed.
        self.landed = threading.Event()

    def join(self) -> None:
        """Wait until it has been issued as a whole.

        Raises
        ------
        TransferError
            It failed: the destination's bytes are undefined, the source is untouched.
        """
        self.issued.wait()
        if self.error is not None:
            raise TransferError(
                f"A copy of {self.source.numel():,} bytes through the staging buffers failed: "
                f"{self.error}. Its source is untouched.",
                nbytes=self.source.numel(),
            ) from self.error


class StagingRing:
    """A few page-locked slots that copies of one direction pass through, in their order.

    Parameters
    ----------
    lane : Lane
        Where slices are issued.
    into : bool
        Whether copies go to the device.
    make_slot : callable
        Gives a page-locked tensor of so many bytes, or None where there is none: then a slot is
        pageable, and copies are slower and right.

    Notes
    -----
    A slot is used again when the event of its last slice has fired: only the ring's own thread
    waits for that. Threads fill a slot together, since page faults of a mapped file and
    the speed of one core would else be the limit.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        into: bool,
        make_slot: Callable[[int], Tensor | None],
        copier: HostCopier,
        slot_nbytes: int = SLOT_NBYTES,
        slot_count: int = SLOT_COUNT,
    ) -> None:
        self._lane = lane
        self._into = into
        self._make_slot = make_slot
        self._copier = copier
        self._slot_nbytes = slot_nbytes
        self._slot_count = slot_count
        self._slots: list[Tensor] = []
        self._busy: list[Any] = []
        self._next = 0
        self._background = Background("torchTensorRef-staging")

    def submit(self, copy: StagedCopy) -> StagedCopy:
        """Queue a copy behind those before it; returns at once."""
        self._background.submit(functools.partial(self._serve, copy))
        return copy

    def _serve(self, copy: StagedCopy) -> None:
        try:
            self._carry(copy)
        finally:  # else whoever waits for it would wait for ever
            copy.landed.set()  # first: who hears of an error when it is issued gives its room back
            copy.issued.set()

    def _carry(self, copy: StagedCopy) -> None:
        for attempt in range(ATTEMPTS):
            try:
                self._open_slots()
                self._carry_in(copy) if self._into else self._carry_out(copy)
                return
            except BaseException as error:  # raised where the copy is waited for
                is_hiccup = isinstance(error, Exception) and not copy.issued.is_set()
                if attempt == ATTEMPTS - 1 or not is_hiccup:
                    copy.error = error
                    self._see_out(copy)
                    return

    @staticmethod
    def _see_out(copy: StagedCopy) -> None:
        """Wait for the slices of a failed copy: its ends are given away as soon as it is over."""
        if copy.last is not None:
            with contextlib.suppress(RuntimeError):  # of a dead device: the copy has failed anyway
                copy.last.synchronize()
        if copy.mirror is not None and not copy.mirror.is_filled:
            copy.mirror.was_not_filled()

    def _open_slots(self) -> None:
        while len(self._slots) < self._slot_count:
            slot = self._make_slot(self._slot_nbytes)
            if slot is None:
                slot = empty_bytes(self._slot_nbytes)
            self._slots.append(slot)
            self._busy.append(None)

    def _carry_in(self, copy: StagedCopy) -> None:
        """Fill slot after slot, each as soon as it is free, and issue its copy."""
        lane, source, destination = self._lane, copy.source, copy.destination
        held_back = False
        for start, stop in self._slices(source.numel()):
            if copy.mirror is not None:
                number, staged = None, copy.mirror.memory[start:stop]
            else:
                number, slot = self._free_slot()
                staged = slot[: stop - start]
            self._copier.copy(source[start:stop], staged)
            if not held_back:
                # Only now: filling the first slot needs nothing of the device.
                for event in copy.after:
                    lane.hold_back(event)
                held_back = True
            copy.last = lane.issue(staged, destination[start:stop])
            if number is not None:
                self._busy[number] = copy.last
        if copy.mirror is not None:
            copy.mirror.filled()

    def _carry_out(self, copy: StagedCopy) -> None:
        """Issue copies into slots, as many as are free, and empty those that have come."""
        lane, source, destination = self._lane, copy.source, copy.destination
        for event in copy.after:
            lane.hold_back(event)
        coming: deque[tuple[int, Tensor, Tensor]] = deque()
        slices = self._slices(source.numel())
        for count, (start, stop) in enumerate(slices):
            if len(coming) == self._slot_count:
                self._land(*coming.popleft())
            number, slot = self._free_slot()
            staged = slot[: stop - start]
            self._busy[number] = copy.last = lane.issue(source[start:stop], staged)
            coming.append((number, staged, destination[start:stop]))
            if count == len(slices) - 1:
                copy.issued.set()
        while coming:
            self._land(*coming.popleft())

    def _land(self, number: int, staged: Tensor, destination: Tensor) -> None:
        self._busy[number].synchronize()
        self._copier.copy(staged, destination)
        self._busy[number] = None

    def _free_slot(self) -> tuple[int, Tensor]:
        number = self._next
        self._next = (number + 1) % self._slot_count
        if self._busy[number] is not None:
            self._busy[number].synchronize()
            self._busy[number] = None
        return number, self._slots[number]

    def _slices(self, nbytes: int) -> list[tuple[int, int]]:
        step = self._slot_nbytes
        return [(at, min(at + step, nbytes)) for at in range(0, nbytes, step)]
