"""Real accelerators, through torch's device-generic interface: cuda, hip, xpu, mps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...base import forking
from ...base.options import settings
from ..base import DONE, Event
from ..clocks import Clocks
from ..host.limits import share_of_ram
from ..host.locked_bytes import LockedBytes, of_process
from ..host.page_lock import LEAST_NBYTES, Locker, PageLocks, RegisteringLocker, TorchLocker
from ..host.page_locked_pool import PageLockedPool
from ..host.readers import host_readers
from ..out_of_memory import is_said_otherwise, said_as_cuda
from ..residents import Residents
from ..storages import (
    bytes_of,
    empty_bytes,
    exchange_storage,
    give_bytes,
    storage_nbytes,
    storage_of,
)
from .captures import relax_threads
from .copies import LinkCopier, StreamLane
from .events import AcceleratorEvent, AllOf, EventStopwatch, events_of
from .peers import AcceleratorPeers
from .rooms import UNNOTED, Rooms
from .streams import ComputeStreams, captures_under_way
from .vendor import Vendor

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import Tensor

__all__ = ["AcceleratorDevice", "AcceleratorEvent"]


#: Of a budget, left for what is lost when blocks of different sizes follow one another: with none
#: a model whose matrices have two sizes makes the allocator give up its cache at every token.
SLACK_SHARE = 0.03
SLACK_NBYTES = 64 << 20
#: And the most of it, where the budget is small.
MOST_SLACK_SHARE = 1 / 8


class AcceleratorDevice(AcceleratorPeers):
    """One accelerator that torch can use.

    Parameters
    ----------
    kind : str
        ``"cuda"`` (also hip), ``"xpu"`` or ``"mps"``.
    index : int, optional
        Which one.
    module : module, optional
        What to use instead of ``torch.get_device_module(kind)`` (for tests).
    new_lane : callable, optional
        What makes one direction of the link (for tests).

    Attributes
    ----------
    vendor : Vendor
        Torch's module of its kind.
    page_locks : PageLocks
        What host memory is page-locked for it.
    stall_ns : int
        How long the host waited for its events.

    Raises
    ------
    ConfigError
        If this torch, or this machine, has no such accelerator.

    Notes
    -----
    Copies run on one side stream per direction where the module has streams and events, and in the
    order of compute where not (mps). Small ones to the device have another stream, and pass large
    ones. Three rules keep copies apart from compute, and none makes the host wait:

    * *Room.* What is fetched is allocated on the copy stream. Torch's allocator has a pool of room
      per stream, so that room is only ever used by other fetched replicas, and who used it last is
      known (`FreedRoom`): a copy waits for the last reader of the replica that was evicted from
      its room, and for no operator that came later. Results of kernels are allocated by them, on
      the compute stream, as without us.
    * *Arrival.* Compute waits for the copy's event before the first operator that reads it.
    * *Retirement.* Room that is still being copied home is freed at once where only copies take it
      (the next one waits for the event); in compute's pool, compute waits for it.

    Operators may run on several streams (`ComputeStreams`); then what is evicted waits for all.
    """

    kernels_allocate = True
    shares_memory = True
    prefers_page_locked = True
    #: A copy into freed memory waits for its last reader, which the manager has to name.
    notes_uses = True
    #: Whatever gets memory that a copy home still reads waits for that copy.
    keeps_leaving_bytes = True
    #: 0.2 ms at 20 GB/s.
    decision_nbytes = 4 << 20

    def __init__(
        self,
        kind: str,
        index: int = 0,
        *,
        module: ModuleType | None = None,
        new_lane: Callable[..., StreamLane] = StreamLane,
    ) -> None:
        self.kind = kind
        self.index = index
        self.name = f"{kind}:{index}"
        if module is None:
            self.vendor = Vendor.open(self.torch_device, kind, index)
        else:
            self.vendor = Vendor(module, self.torch_device, kind, index)
        relax_threads(self.vendor.driver)
        self.exchanges_storages = not self.vendor.can_refill()
        self._lock = forking.RLock()
        self._alloc_count = 0
        self._residents = Residents()
        self._seen_peak_nbytes = 0
        self._compute = ComputeStreams(self.vendor, self._lock)
        self._rooms = Rooms(self._compute.record)
        self.capacity_nbytes = self.vendor.total_nbytes()
        share, near = share_of_ram(settings.page_lock), self.vendor.cpus_near()
        counted = LockedBytes(of_process)
        self.page_locks = PageLocks(_locker_of(self.vendor), share, near, counted)
        self._page_locked_pool = PageLockedPool(self.page_locks)
        self._copier = LinkCopier(
            self.vendor, self.page_locks, self._compute, lock=self._lock, new_lane=new_lane
        )

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """The device, as torch names it."""
        import torch

        return torch.device(self.kind, self.index)

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        try:
            base = empty_bytes(nbytes, self.torch_device)
        except RuntimeError as error:
            if not is_said_otherwise(error):
                raise
            raise said_as_cuda(error) from error
        with self._lock:
            self._residents.settle()
            self._alloc_count += 1
            self._residents.enter(base, nbytes, self._alloc_count)
        return base

    def refill(self, base: Tensor, nbytes: int) -> None:  # noqa: D102
        with self._lock:
            self._settle_rooms()
            self._copier.forget_ended()
            # Asked each time: the settings of torch's allocator can be changed while it runs.
            is_copies_own = self.vendor.has_pool_per_stream
            try:
                if is_copies_own:
                    with self.vendor.on(self._copier.in_lane.stream):
                        self._resize(base, nbytes)
                else:
                    self._resize(base, nbytes)
            except RuntimeError as error:
                if not is_said_otherwise(error):
                    raise
                raise said_as_cuda(error) from error
            if is_copies_own and nbytes:
                self._rooms.take(base, storage_of(base).data_ptr(), nbytes)
            elif nbytes and self.vendor.has_streams:
                self._compute.keep(base)
            resident = self._residents.emptied.get(id(base))
            if resident is not None:
                self._residents.enter_again(resident, nbytes)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._settle_rooms()
            resident = self._residents.present.get(id(base))
            if resident is not None:
                self._residents.leave(resident)
            events = [part for copy in self._copier.copies_of(base) for part in events_of(copy)]
            if not self._rooms.leave(base, events):
                # The allocator gives this room out again in the order of the stream it is of.
                self._compute.fence()
                for event in events:
                    self._compute.hold_back(event)
            self._resize(base, 0)

    def _resize(self, base: Tensor, nbytes: int) -> None:
        """Give a base other bytes; where its storage cannot have them, another storage."""
        if self.exchanges_storages:
            exchange_storage(base, nbytes)
        elif nbytes:
            give_bytes(base, nbytes)
        else:
            storage_of(base).resize_(0)

    def recover(self, bases: Sequence[tuple[Tensor, bool]]) -> None:  # noqa: D102
        with self._lock:
            self._residents.recover(bases, self._alloc_count)

    def _settle_rooms(self) -> None:
        if self._residents.dead:
            self._residents.settle()
        if self._rooms.dead:
            self._rooms.settle()

    def note_uses(self, bases: Sequence[Tensor]) -> None:
        """Operators on these bases were issued; later ones will be noted again."""
        self._rooms.mark(bases, self._rooms.marks.mark)

    def forget_uses(self, bases: Sequence[Tensor]) -> None:
        """Operators may use these bases from now on without a note."""
        self._rooms.mark(bases, UNNOTED)

    def about_to_change(self, base: Tensor) -> None:
        """Operators may use this base from now on without a note."""
        self.forget_uses([base])

    def available(self, base: Tensor) -> Event | None:
        """The last readers of what was in this room before; all of compute if they are unknown."""
        if not self.vendor.has_streams:
            return None
        with self._lock:
            waits = self._rooms.waits_of(base)
        return AllOf(waits, self._copier) if waits else None

    def account(self, base: Tensor) -> None:
        """Count nothing: torch's allocator counts what kernels make (`resident_nbytes`)."""

    # what it holds ------------------------------------------------------------------------

    @property
    def resident_nbytes(self) -> int:
        """What torch's allocator has given out, to whatever; else the bytes of the replicas."""
        allocated = self.vendor.allocated_nbytes()
        if allocated is None:
            with self._lock:
                self._residents.settle()
                allocated = self._residents.nbytes
        self._seen_peak_nbytes = max(self._seen_peak_nbytes, allocated)
        return allocated

    @property
    def peak_nbytes(self) -> int:
        """The most of it since `reset_peak`, by the allocator's own counter where it has one."""
        peak = self.vendor.peak_allocated_nbytes()
        if peak is not None:
            return peak
        return max(self._seen_peak_nbytes, self.resident_nbytes, self._residents.peak_nbytes)

    def reset_peak(self) -> None:  # noqa: D102
        self.vendor.reset_peak()
        with self._lock:
            self._residents.settle()
            self._residents.peak_nbytes = self._residents.nbytes
        self._seen_peak_nbytes = 0

    def free_nbytes(self) -> int:
        """What the driver says is free, and what torch's allocator keeps unused."""
        free = self.vendor.driver_free_nbytes()
        if free is None:
            return max(0, self.capacity_nbytes - self.resident_nbytes)
        reserved, allocated = self.vendor.reserved_nbytes(), self.vendor.allocated_nbytes()
        return free + (reserved or 0) - (allocated or 0)

    def limit(self, nbytes: int) -> bool:
        """Let torch's allocator itself refuse more than `nbytes`; False where it cannot."""
        return self.vendor.cap(nbytes, self.capacity_nbytes)

    def slack_nbytes(self, limit_nbytes: int) -> int:
        """What is lost between blocks of different sizes, which the allocator's limit counts."""
        if not self.vendor.counts_segments:
            return 0
        wanted_nbytes = max(int(limit_nbytes * SLACK_SHARE), SLACK_NBYTES)
        return min(wanted_nbytes, int(limit_nbytes * MOST_SLACK_SHARE))

    def release_count(self) -> int:
        """How often torch's allocator had to give back all that it keeps, waiting for compute."""
        return self.vendor.alloc_retry_count()

    def give_up_caches(self) -> None:
        """Give back to the driver what torch's allocator keeps for later; compute is waited for."""
        self._copier.forget_ended()
        if not captures_under_way:  # torch refuses; and it has emptied it when that began
            self.vendor.empty_cache()

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        event = self._copier.copy_in(source, base, after)
        with self._lock:
            self._rooms.note_copy(base)
        return event

    def copy_out(  # noqa: D102
        self,
        base: Tensor,
        destination: Tensor,
        *,
        after: Event | None = None,
        start: int | None = None,
    ) -> Event:
        return self._copier.copy_out(base, destination, after, start)

    def home_memory(self, nbytes: int) -> Tensor | None:
        """Page-locked memory for what is about to be copied home, if there is some ready."""
        return self._page_locked_pool.take(nbytes) if self.vendor.has_streams else None

    def wish_page_locked(self, base: Tensor, *, may_mirror: bool) -> None:
        """Note that a block was copied from home; if it recurs, its memory is page-locked."""
        if not may_mirror:
            host_readers.have_changed(base)  # this copy may have filled one
        if not self.vendor.has_streams or storage_nbytes(base) < LEAST_NBYTES:
            return
        if not self._copier.is_page_locked(bytes_of(base)):
            self.page_locks.wish(base, may_mirror=may_mirror)

    @property
    def page_locked_nbytes(self) -> int:
        """Host memory that is page-locked for this device."""
        return self.page_locks.locked_nbytes

    @property
    def staged_nbytes(self) -> int:
        """Bytes of copies from and to memory that was not page-locked."""
        return self._copier.staged_nbytes

    @property
    def stall_ns(self) -> int:
        """How long the host waited for its events."""
        return self._copier.stall_ns

    # compute ------------------------------------------------------------------------------

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """See what stream the operator goes to."""
        if self.vendor.has_streams:
            self._compute.note()

    def record(self) -> Event:  # noqa: D102
        if not self.vendor.has_streams:
            return DONE
        return AcceleratorEvent(self._compute.record(), self._copier)

    def synchronize(self) -> None:
        """Make the host wait for all operators, and for all copies: what is staged lands, too."""
        self.vendor.synchronize()
        self._copier.finish()

    @property
    def hardware(self) -> str:  # noqa: D102
        return self.vendor.hardware()

    def stopwatch(self) -> EventStopwatch | None:  # noqa: D102
        has_streams = self.vendor.has_streams
        return self.vendor.stopwatch(self._compute.current()) if has_streams else None

    def random_state(self) -> Tensor | None:
        """The state of the device's generator, to be set again before a second try."""
        return self.vendor.random_state()

    def set_random_state(self, state: Tensor) -> None:
        """Set the generator back to a state asked for before."""
        self.vendor.set_random_state(state)

    def clocks(self) -> Clocks:
        """The host's clock, since nobody knows how far compute is without asking it; the link."""
        return Clocks(
            host_ns=self.now_ns() - self.stall_ns,
            h2d_bytes_per_s=self._copier.rate_in.bytes_per_s,
            d2h_bytes_per_s=self._copier.rate_out.bytes_per_s,
        )

    def now_ns(self) -> int:
        """The clock on the wall."""
        return time.perf_counter_ns()


def _locker_of(vendor: Vendor) -> Locker | None:
    """How host memory is page-locked; None where copies are in the order of compute anyway."""
    if not vendor.has_streams:
        return None
    runtime = vendor.host_runtime()
    return TorchLocker() if runtime is None else RegisteringLocker(runtime, vendor.opened)
