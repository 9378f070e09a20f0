"""Page-locked host memory: within a bound, of exact size, made in the background."""

from __future__ import annotations

import functools
import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ...base.progress import Lines
from ..background import Background
from .mirrors import Mirror
from .readers import host_readers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Locker", "PageLocks", "RegisteringLocker", "TorchLocker"]

#: Smaller blocks are not worth a call of the driver: their copies cost latency, not bandwidth.
LEAST_NBYTES = 1 << 20
#: A block is page-locked when it has been copied so often from pageable memory: it recurs then.
WORTH_IT_AFTER = 2
#: Torch's own page-locked memory is rounded up to powers of two, so it is asked for in such.
CHUNK_NBYTES = 64 << 20

_log = logging.getLogger("torchTensorRef")


class Locker(Protocol):
    """How memory is page-locked on one kind of device. A refusal is returned, never raised."""

    locks_in_place: bool

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory where it lies; False if the driver refuses."""
        ...

    def unlock(self, address: int) -> None:
        """Undo it."""
        ...

    def allocate(self, nbytes: int) -> Tensor | None:
        """Return page-locked memory of its own; None if the driver refuses."""
        ...


class RegisteringLocker:
    """Page-locks any memory by registering it with the runtime of cuda or hip.

    Parameters
    ----------
    runtime : object
        Has `cudaHostRegister` and `cudaHostUnregister`, as `torch.cuda.cudart()` has.
    """

    locks_in_place = True
    #: The memory is page-locked for every context of the process.
    PORTABLE = 1

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def lock(self, address: int, nbytes: int) -> bool:  # noqa: D102
        return int(self._runtime.cudaHostRegister(address, nbytes, self.PORTABLE)) == 0

    def unlock(self, address: int) -> None:  # noqa: D102
        self._runtime.cudaHostUnregister(address)

    def allocate(self, nbytes: int) -> Tensor | None:
        """Pages of our own, registered: of exact size, where torch would round to a power of 2."""
        import torch

        pages = _Pages(-1, nbytes)
        memory: Tensor = torch.frombuffer(pages, dtype=torch.uint8)
        if not self.lock(memory.data_ptr(), nbytes):
            return None
        # The callback comes before the pages are unmapped, when the last tensor over them is gone.
        weakref.finalize(pages, self.unlock, memory.data_ptr()).atexit = False
        return memory


class _Pages(mmap.mmap):
    """Anonymous memory that a weak reference can watch."""


class TorchLocker:
    """Page-locked memory by torch's own allocator, cut out of chunks whose rounding is harmless."""

    locks_in_place = False

    def __init__(self, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._chunk: Tensor | None = None
        self._used_nbytes = 0

    def lock(self, address: int, nbytes: int) -> bool:
        """Torch cannot lock memory where it lies."""
        return False

    def unlock(self, address: int) -> None:
        """Nothing was locked."""

    def allocate(self, nbytes: int) -> Tensor | None:  # noqa: D102
        if nbytes > self._chunk_nbytes:
            return None
        if self._chunk is None or self._used_nbytes + nbytes > self._chunk_nbytes:
            self._chunk, self._used_nbytes = _torchs_own(self._chunk_nbytes), 0
        start, self._used_nbytes = self._used_nbytes, self._used_nbytes + nbytes
        return self._chunk[start : start + nbytes]


def _torchs_own(nbytes: int) -> Tensor:
    import torch

    with torch._C.DisableTorchFunction():
        memory: Tensor = torch._C._VariableFunctions.empty(
            (nbytes,), dtype=torch.uint8, device="cpu", pin_memory=True
        )
    return memory


class _Locked(weakref.ref[Any]):
    """A base whose memory is page-locked. A weak reference: its callback gets the whole record."""

    __slots__ = ("address", "key", "nbytes")

    address: int
    key: int  # id(base)
    nbytes: int


class PageLocks:
    """What is page-locked for one device, and what is waiting to be.

    Parameters
    ----------
    locker : Locker or None
        How; None where the device has no page-locking.
    limit_nbytes : int
        The most bytes to be page-locked.

    Notes
    -----
    Page-locking takes the driver about as long as a copy, so it never happens when a copy is
    wanted: `wish` notes that a block recurs, and one thread does the work in the background. A
    block in memory of torch's own is locked where it lies. Mapped files cannot be, so they get a
    *mirror*: page-locked memory of exactly their size, which their next copy fills on its way.
    """

    def __init__(self, locker: Locker | None, limit_nbytes: int) -> None:
        self._locker = locker
        self._limit_nbytes = limit_nbytes
        self._taken_nbytes = 0
        #: Appended to by finalizers, which run in any thread at any moment and take no lock.
        self._given_back: deque[int] = deque()
        self._lock = threading.Lock()
        self._locked: dict[int, _Locked] = {}  # by address
        self._by_base: dict[int, _Locked] = {}
        #: How often a base was copied from pageable memory, by its id.
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}
        #: Memory of our own, page-locked: its size by its address.
        self._own: dict[int, int] = {}
        self._background = Background("torchTensorRef-page-lock")
        self._has_complained = False
        #: What waits to be page-locked since there was last nothing that did, and what of it is.
        self._wished_nbytes = self._granted_nbytes = 0
        self._lines = Lines("page-locking host memory")
        host_readers.watchers.add(self)

    # looking ------------------------------------------------------------------------------

    def is_locked(self, source: Tensor) -> bool:
        """Whether a host tensor lies in memory that was page-locked here, from its first byte."""
        address = source.data_ptr()
        found = self._locked.get(address)
        nbytes = self._own.get(address, 0) if found is None else found.nbytes
        return nbytes >= source.numel() and nbytes > 0

    # wishing ------------------------------------------------------------------------------

    def wish(self, base: Tensor, *, may_mirror: bool) -> None:
        """Note that a block was copied from pageable memory; if that recurs, it is page-locked.

        Parameters
        ----------
        base : Tensor
            Owns the block's bytes at home.
        may_mirror : bool
            Only operators write those bytes, so that a second copy of them stays valid.
        """
        nbytes = base.untyped_storage().nbytes()
        if self._locker is None or nbytes < LEAST_NBYTES:
            return
        key = id(base)
        with self._lock:
            if self._is_full(nbytes):
                return
            if len(self._counts) > 100_000:
                self._counts.clear()  # most are of the dead
            reference, count = self._counts.get(key, (None, 0))
            if reference is None or reference() is not base:
                reference, count = weakref.ref(base), 0
            self._counts[key] = reference, count + 1
            if count + 1 != WORTH_IT_AFTER:
                return
            if not self._wished_nbytes:
                self._lines.begin()
            self._wished_nbytes += nbytes
        self.later(functools.partial(self._grant_and_tell, reference, may_mirror, nbytes))

    def later(self, task: Callable[[], None]) -> None:
        """Queue a task for the background thread, for calls of the driver that take long.

        Nothing is done while the interpreter ends: copies work without it.
        """
        if self._locker is not None and not self._background.is_over:
            self._background.submit(task)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until every wish was handled; False if that took longer than `timeout_s`."""
        settled = threading.Event()
        self._background.submit(settled.set)
        return settled.wait(timeout_s)

    def _grant_and_tell(self, reference: weakref.ref[Any], may_mirror: bool, nbytes: int) -> None:
        try:
            self._grant(reference, may_mirror)
        finally:
            with self._lock:
                self._granted_nbytes += nbytes
                granted, wished = self._granted_nbytes, self._wished_nbytes
                if granted >= wished:
                    self._granted_nbytes = self._wished_nbytes = 0
            if granted < wished and self._lines.is_due():
                self._lines.tell(granted, wished)

    def _grant(self, reference: weakref.ref[Any], may_mirror: bool) -> None:
        base = reference()
        if base is None:
            return
        storage = base.untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        # Memory that torch did not allocate (a mapped file, an array) is not locked where it lies.
        if not nbytes or (storage.resizable() and self._lock_in_place(base, address, nbytes)):
            return
        mirror = self.allocate(nbytes) if may_mirror and _has_spare_ram(nbytes) else None
        if mirror is not None:
            host_readers.mirrors.offer(base, Mirror(base, mirror))

    def _lock_in_place(self, base: Tensor, address: int, nbytes: int) -> bool:
        locker = self._locker
        if locker is None or not locker.locks_in_place or not self._reserve(nbytes):
            return False
        if not self._asked(lambda: locker.lock(address, nbytes)):
            self._given_back.append(nbytes)
            return False
        locked = _Locked(base, self._release)
        locked.address, locked.key, locked.nbytes = address, id(base), nbytes
        self._locked[address] = self._by_base[locked.key] = locked
        return True

    def allocate(self, nbytes: int) -> Tensor | None:
        """Return page-locked memory of exactly so many bytes; None beyond the bound, or refused."""
        if self._locker is None or not self._reserve(nbytes):
            return None
        locker = self._locker
        memory: Tensor | None = self._asked(lambda: locker.allocate(nbytes))
        if memory is None:
            self._given_back.append(nbytes)
            return None
        address = memory.data_ptr()
        self._own[address] = nbytes
        weakref.finalize(memory, self._own.pop, address, None).atexit = False
        weakref.finalize(memory, self._given_back.append, nbytes).atexit = False
        return memory

    def _asked(self, what: Callable[[], Any]) -> Any:
        """The driver's answer; None where it refuses or raises. Copies work without it."""
        try:
            answer = what()
        except Exception as error:
            self._complain(str(error))
            return None
        if answer is None or answer is False:
            self._complain("the driver refuses")
            return None
        return answer

    # the bound ----------------------------------------------------------------------------

    @property
    def locked_nbytes(self) -> int:
        """Bytes that are page-locked now: blocks where they lie, mirrors, and staging buffers."""
        with self._lock:
            return self._settled()

    def _settled(self) -> int:
        while self._given_back:
            self._taken_nbytes -= self._given_back.popleft()
        return self._taken_nbytes

    def _is_full(self, nbytes: int) -> bool:
        return self._settled() + nbytes > self._limit_nbytes

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self._is_full(nbytes):
                return False
            self._taken_nbytes += nbytes
            return True

    def _release(self, locked: weakref.ref[Any]) -> None:
        """A base has died: its memory is about to be freed, and must not stay page-locked."""
        assert isinstance(locked, _Locked)
        assert self._locker is not None
        if self._locked.get(locked.address) is locked:
            del self._locked[locked.address]
            del self._by_base[locked.key]
            self._locker.unlock(locked.address)
            self._given_back.append(locked.nbytes)

    def forget(self, base: Tensor) -> None:
        """Undo the page-locking of a base whose memory is about to be exchanged."""
        locked = self._by_base.get(id(base))
        if locked is not None:
            self._release(locked)

    def look_after(self, base: Tensor) -> None:
        """Undo the page-locking of memory that an operator has exchanged (`out=` does)."""
        locked = self._by_base.get(id(base))
        if locked is not None and locked.address != base.untyped_storage().data_ptr():
            self._release(locked)

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning(
                "torchTensorRef: memory cannot be page-locked (%s). Copies are slower, and right.",
                why,
            )


def _has_spare_ram(nbytes: int) -> bool:
    """Whether a mirror leaves the system some memory: it is a convenience, never worth a swap."""
    import psutil

    memory = psutil.virtual_memory()
    return bool(memory.available - nbytes > memory.total // 20)
