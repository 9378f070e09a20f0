"""Page-locked host memory: within a bound, of exact size, made in the background."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ...base import forking
from ...base.progress import Lines
from ..background import Background, ask_aside
from ..storages import storage_of
from .limits import has_spare_ram
from .locked_bytes import LockedBytes
from .mirrors import Mirror
from .numa import run_on
from .readers import host_readers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Locker", "PageLocks", "RegisteringLocker", "TorchLocker"]

#: Smaller blocks are not worth a call of the driver: their copies cost latency, not bandwidth.
LEAST_NBYTES = 1 << 20
#: A block is page-locked when it has been copied so often from pageable memory: it recurs then.
#: Where there was none for it, it is asked for again at twice as many, at four times as many, ...
WORTH_IT_AFTER = 2
#: Torch's own page-locked memory is rounded up to powers of two, so it is asked for in such.
CHUNK_NBYTES = 64 << 20

#: Smaller pieces do without huge pages.
HUGE_FROM_NBYTES = 4 << 20

#: The thread that page-locks.
THREAD = "torchTensorRef-page-lock"

#: Has something done later, by another thread.
Later = Callable[[Callable[[], None]], None]

_log = logging.getLogger("torchTensorRef")


class Locker(Protocol):
    """How page-locked memory is made on one kind of device. A refusal is returned, never raised."""

    #: What it makes are storages of their own, so that a block may be at home there.
    makes_storages: bool

    def allocate(self, nbytes: int, free_later: Later) -> Tensor | None:
        """Return page-locked memory of its own; None if the driver refuses.

        `free_later` is given what is to be done when the memory is no longer used, by whatever
        thread lets go of it.
        """
        ...


class RegisteringLocker:
    """Page-locks whole pages of our own by registering them with the runtime of cuda or hip.

    Parameters
    ----------
    runtime : object
        Has `cudaHostRegister` and `cudaHostUnregister`, as `torch.cuda.cudart()` has.
    opened : callable, optional
        Gives a context in which the calling thread is on the device.

    Notes
    -----
    Never memory that a heap has given out: the driver locks whole pages, of which the first and the
    last belong to others, too, and a copy of memory that is locked in part is an error. Nor could
    anybody tell when such memory is exchanged (`resize_`, `out=`, `share_memory_`).
    """

    makes_storages = True
    #: The memory is page-locked for every context of the process.
    PORTABLE = 1

    def __init__(
        self,
        runtime: Any,
        opened: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._runtime = runtime
        self._opened = opened

    def allocate(self, nbytes: int, free_later: Later) -> Tensor | None:
        """Pages of our own, registered: of exact size, where torch would round to a power of 2."""
        import torch

        pages = own_pages(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with self._opened():
            status = int(self._runtime.cudaHostRegister(address, len(pages), self.PORTABLE))
        if status != 0:
            return None
        owner = (ctypes.c_ubyte * nbytes).from_address(address)
        # The storage over it keeps the owner, and the finalizer keeps the pages: they are unmapped
        # after they were given back to the driver, which can take as long as it likes.
        free = functools.partial(self._free, pages, address, os.getpid())
        weakref.finalize(owner, free_later, free).atexit = False
        memory: Tensor = torch.frombuffer(owner, dtype=torch.uint8)
        return memory

    def _free(self, pages: mmap.mmap, address: int, process: int) -> None:
        if process == os.getpid():  # a forked child has the memory, and not the driver
            with self._opened():
                self._runtime.cudaHostUnregister(address)
        pages.close()


def own_pages(nbytes: int) -> mmap.mmap:
    """Return fresh pages that nobody else has a byte of, huge ones where the system likes.

    Private: a forked child that writes what it has inherited must not write ours.
    """
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)  # Windows, where nobody forks
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and nbytes >= HUGE_FROM_NBYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    return pages


class TorchLocker:
    """Page-locked memory by torch's own allocator, cut out of chunks whose rounding is harmless."""

    #: Parts of a chunk share the chunk's storage.
    makes_storages = False

    def __init__(self, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._chunk: Tensor | None = None
        self._used_nbytes = 0

    def allocate(self, nbytes: int, free_later: Later) -> Tensor | None:
        """Cut a piece off a chunk; torch gives the chunk back when no piece is left of it."""
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


class PageLocks:
    """What is page-locked for one device, and what is waiting to be.

    Parameters
    ----------
    locker : Locker or None
        How; None where the device has no page-locking.
    limit_nbytes : int
        The most bytes to be page-locked, by whatever `counted` is part of.
    cpus : frozenset of int, optional
        The processors near the device: what recurs is page-locked by a thread that runs on them,
        so that it lies on their side.
    counted : LockedBytes, optional
        Counts what is taken.

    Notes
    -----
    Page-locking takes the driver about as long as a copy, so it never happens when a copy is
    wanted: `wish` notes that a block recurs, and one thread does the work in the background. It
    makes a *mirror*: page-locked memory of exactly that size, which the next copy of the block
    fills on its way. A block in memory of torch's own moves there afterwards (`Rehousing`); one in
    a mapped file keeps both.
    """

    def __init__(
        self,
        locker: Locker | None,
        limit_nbytes: int,
        cpus: frozenset[int] = frozenset(),
        counted: LockedBytes | None = None,
    ) -> None:
        self._locker = locker
        self._cpus = cpus
        self._limit_nbytes = limit_nbytes
        self._counted = LockedBytes() if counted is None else counted
        #: Memory that nobody uses any more, as what frees it, and how much that is.
        self._to_free: deque[tuple[Callable[[], None], int]] = deque()
        self._lock = forking.Lock()
        #: How often a base was copied from pageable memory, by its id.
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}
        #: Memory of our own, page-locked: its size by its address.
        self._own: dict[int, int] = {}
        self._background = Background(THREAD)
        self._has_complained = False
        #: What waits to be page-locked since there was last nothing that did, and what of it is.
        self._wished_nbytes = self._granted_nbytes = 0
        self._lines = Lines("page-locking host memory")

    # looking ------------------------------------------------------------------------------

    def is_locked(self, source: Tensor) -> bool:
        """Whether a host tensor lies in memory that was page-locked here, from its first byte."""
        nbytes = self._own.get(source.data_ptr(), 0)
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
        nbytes = storage_of(base).nbytes()
        if self._locker is None or nbytes < LEAST_NBYTES or not may_mirror:
            return
        key = id(base)
        if self._counted.is_full(nbytes, self._limit_nbytes):
            return
        with self._lock:
            if len(self._counts) > 100_000:
                self._counts.clear()  # most are of the dead
            reference, count = self._counts.get(key, (None, 0))
            if reference is None or reference() is not base:
                reference, count = weakref.ref(base), 0
            self._counts[key] = reference, count + 1
            if not _is_time_to_ask(count + 1):
                return
            if not self._wished_nbytes:
                self._lines.begin()
            self._wished_nbytes += nbytes
        self.later(functools.partial(self._grant_and_tell, reference, nbytes))

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

    def _grant_and_tell(self, reference: weakref.ref[Any], nbytes: int) -> None:
        if self._cpus and threading.current_thread().name == THREAD:  # not whoever stands in for it
            run_on(self._cpus)
            self._cpus = frozenset()
        try:
            self._grant(reference)
        finally:
            with self._lock:
                self._granted_nbytes += nbytes
                granted, wished = self._granted_nbytes, self._wished_nbytes
                if granted >= wished:
                    self._granted_nbytes = self._wished_nbytes = 0
            if granted < wished and self._lines.is_due():
                self._lines.tell(granted, wished)

    def _grant(self, reference: weakref.ref[Any]) -> None:
        base = reference()
        nbytes = 0 if base is None else storage_of(base).nbytes()
        if base is None or not nbytes or host_readers.mirrors.has_one_for(base):
            return
        if not has_spare_ram(nbytes):
            return
        memory = self.allocate(nbytes)
        if memory is not None:
            assert self._locker is not None
            # Memory that torch did not allocate (a mapped file, an array) is nobody's to free.
            may_be_home = self._locker.makes_storages and storage_of(base).resizable()
            host_readers.mirrors.offer(base, Mirror(base, memory, may_be_home=may_be_home))

    def allocate(self, nbytes: int) -> Tensor | None:
        """Return page-locked memory of exactly so many bytes; None beyond the bound, or refused."""
        if self._locker is None:
            return None
        self._free_what_is_dead()
        if not self._counted.take(nbytes, self._limit_nbytes):
            return None
        locker = self._locker
        memory: Tensor | None = self._asked(
            lambda: locker.allocate(nbytes, functools.partial(self._free_later, nbytes))
        )
        if memory is None:
            self._counted.give_back(nbytes)
            return None
        address = memory.data_ptr()
        self._own[address] = nbytes
        weakref.finalize(memory, self._own.pop, address, None).atexit = False
        if not locker.makes_storages:
            weakref.finalize(memory, self._counted.give_back, nbytes).atexit = False
        return memory

    def _free_later(self, nbytes: int, free: Callable[[], None]) -> None:
        """Have memory freed, and by no finalizer: the driver may wait, and take locks."""
        self._to_free.append((free, nbytes))
        self.later(self._free_what_is_dead)

    def _free_what_is_dead(self) -> None:
        while self._to_free:
            try:
                free, nbytes = self._to_free.popleft()
            except IndexError:
                return  # another thread was faster
            free()
            self._counted.give_back(nbytes)

    def _asked(self, what: Callable[[], Any]) -> Any:
        """The driver's answer; None where it refuses or raises. Copies work without it."""
        try:
            answer = ask_aside(what)
        except Exception as error:
            self._complain(str(error))
            return None
        if answer is None:
            self._complain("the driver refuses")
            return None
        return answer

    @property
    def locked_nbytes(self) -> int:
        """Bytes that are page-locked now: blocks where they lie, mirrors, and staging buffers."""
        return self._counted.nbytes

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning(
                "torchTensorRef: memory cannot be page-locked (%s). Copies are slower, and right.",
                why,
            )


def _is_time_to_ask(count: int) -> bool:
    times, rest = divmod(count, WORTH_IT_AFTER)
    return not rest and times.bit_count() == 1
