"""Room that is not ours to fill: what other programs take, and what kernels need in passing.

Only real accelerators have either. The budget stays what the user said; what it leaves out here is
in the ledger's `scratch_nbytes`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from ..base import forking
from ..devices.background import begin_thread
from ..devices.base import Device
from .budget import SHORTAGES, Budget, BudgetSetting, resolve_budget, setting_for
from .ledger import Ledger

#: How often the driver is asked what is free, in seconds.
PERIOD_S = 0.25
#: Differences up to this share of what the device can hold are nobody's concern.
SMALL_SHARE = 0.02
#: Of the budget, kept free for kernels after each operator that found no memory inside a kernel.
#: It stays free, so little at a time: at 1/32 a 7 B model on an H100 lost a tenth of its room to
#: the first three lacks, and fetched a tenth more for good.
STEP_SHARE = 1 / 256
#: and the most of it.
SCRATCH_SHARE = 1 / 4
#: Fetches between two looks at how often torch's allocator has given up its cache,
LOOK_EVERY = 32
#: and how often it may before more is kept free.
RELEASES_PER_STEP = 2

_log = logging.getLogger("torchTensorRef")


def cap_allocator(ledger: Ledger, setting: BudgetSetting) -> None:
    """Let torch's own allocator refuse what is beyond a budget that the user has just set.

    It counts what it reserves, and so also what it loses between blocks: that is left to it.
    Without a budget, only the ledger keeps to what was free: other programs may leave more.
    """
    device, limit_nbytes = ledger.device, ledger.budget.limit_nbytes
    is_capped = setting_for(setting, device) is not None
    ledger.scratch_nbytes = device.slack_nbytes(limit_nbytes) if is_capped else 0
    ledger.budget = Budget(limit_nbytes - ledger.scratch_nbytes)
    device.limit(limit_nbytes if is_capped else device.capacity_nbytes)


def note_shortage(ledger: Ledger) -> None:
    """Keep more room for what kernels allocate in passing: one has just found none."""
    whole_nbytes = ledger.limit_nbytes
    scratch_nbytes = ledger.scratch_nbytes + int(whole_nbytes * STEP_SHARE)
    if scratch_nbytes <= whole_nbytes * SCRATCH_SHARE:
        ledger.scratch_nbytes = scratch_nbytes
        ledger.budget = Budget(whole_nbytes - scratch_nbytes)


class ReleaseWatch:
    """Keeps more free where torch's allocator gives up its cache again and again to find room.

    What fits by its bytes may not fit between what is there: then the allocator waits for the
    device, gives back all it keeps, and asks the driver. That costs milliseconds, so the counter is
    looked at now and then; each time it has grown, a little more of the budget is left.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def note_fetch(self, ledger: Ledger) -> None:
        """A replica was given memory; look, if it is time to (lock of the books held)."""
        self._count += 1
        if self._count % LOOK_EVERY:
            return
        device = ledger.device
        count = device.release_count()
        if count - self._seen.setdefault(device, count) >= RELEASES_PER_STEP:
            self._seen[device] = count
            note_shortage(ledger)


class OthersWatch:
    """Follows what other programs take of a device and give back, where no budget is set.

    What torch's allocator holds and the driver has free, less the share that is left to others,
    is ours: as they take of that share, we give back as much. A thread asks the driver, since
    operators on the ready path ask nobody anything. It is waited for before the interpreter ends,
    which would abort the process if the thread were in the driver then.
    """

    def __init__(self) -> None:
        #: What is followed: each accelerator without a budget, for its residency.
        self._watched: dict[Device, Any] = {}
        self._lock = forking.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._said = ""
        #: Where the last look has failed: what it should have evicted is still there.
        self._to_repeat: weakref.WeakSet[Device] = weakref.WeakSet()

    def watch(self, residency: Any, device: Device, setting: BudgetSetting) -> None:
        """Follow a real device without a budget; leave one alone that has got a budget."""
        is_followed = device.shares_memory and setting_for(setting, device) is None
        with self._lock:
            self._watched.pop(device, None)
            if is_followed:
                self._watched[device] = residency
            if is_followed and self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name="torchTensorRef-others", daemon=True
                )
                thread.start()
                self._thread = thread
                atexit.unregister(self._end)
                atexit.register(self._end)

    def leave(self, devices: Iterable[Device]) -> None:
        """Follow some devices no more, since others are used; torch may give out all they have."""
        with self._lock:
            for device in devices:
                self._watched.pop(device, None)
                device.limit(device.capacity_nbytes)

    def _end(self) -> None:
        self._is_over.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        begin_thread()
        while not self._is_over.wait(PERIOD_S):
            with self._lock:
                watched = list(self._watched.items())
                if not watched:
                    self._thread = None
                    return
            for device, residency in watched:
                try:
                    self.look(residency, device)
                except Exception as error:  # else nobody would look any more
                    self._note(residency, device, error)
            del watched, residency, device

    def _note(self, residency: Any, device: Device, error: Exception) -> None:
        """Say that a look has failed: it is repeated, and said once as long as it is the same."""
        said = f"{type(error).__name__}: {error}"
        residency.books.log.note("-", f"others {device.name}", str(error)[:80])
        if said != self._said and not isinstance(error, SHORTAGES):
            _log.warning("what others take of %s: %s", device.name, said, exc_info=error)
        self._said = said
        self._to_repeat.add(device)

    def look(self, residency: Any, device: Device) -> None:
        """Lower or raise the limit of the ledger as others take or leave (no lock held)."""
        ledger = residency.books.ledgers.get(device)
        if ledger is None:
            return
        limit_nbytes = resolve_budget(None, device).limit_nbytes - ledger.scratch_nbytes
        before_nbytes = ledger.budget.limit_nbytes
        is_near = abs(limit_nbytes - before_nbytes) <= SMALL_SHARE * device.capacity_nbytes
        if is_near and device not in self._to_repeat:
            return
        self._to_repeat.discard(device)
        residency.books.log.note(
            "-", f"budget {device.name}", f"others: {before_nbytes} {limit_nbytes}"
        )
        with residency.books.lock:
            if device not in self._watched:
                return  # meanwhile the user has said what the budget is
            ledger.budget = Budget(max(limit_nbytes, 0))
            residency.books.bury()
            excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
        if excess_nbytes > 0:
            residency.evictor.evict_some(device, excess_nbytes)
            device.give_up_caches()  # what is only cached is still missing to the others
