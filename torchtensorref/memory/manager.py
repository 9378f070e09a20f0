"""TensorsManager: what a user sets and asks. The only one who changes blocks, through Residency."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..base import event_sinks as tracing
from ..base.errors import InvariantError
from ..base.event_log import EventLog
from ..base.options import settings
from ..base.units import format_nbytes
from ..devices import registry
from ..devices.base import Device
from ..devices.host.readers import host_readers
from ..strategy.choice import make_strategy
from .block import Block
from .bookkeeping import Counts
from .budget import Budget, BudgetSetting, resolve_budget
from .external_pressure import OthersWatch, cap_allocator
from .guard import guards
from .invariants import block_violations, ledger_violations
from .ownership import Ownership
from .report import report_text
from .residency import Residency
from .states import CLEAN, DIRTY
from .transfer import TransferCounts


@guards(but=("repair", "doubt", "story", "device_named"))
class TensorsManager:
    """Tracks every TensorRef across devices, under budgets, by the decisions of a strategy.

    Everything has a default that works: the accelerator torch finds (the simulated one where there
    is none), its free memory less 10 percent, and the strategy of `TTR_STRATEGY` or the default.
    Nothing is opened before the first tensor needs it. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._residency: Residency | None = None
        self._device_setting: Any = None
        self._budget_setting: BudgetSetting = None
        self._strategy_setting: Any = None
        self.log = EventLog()
        self.ownership = Ownership(self)
        #: (operator, dtype) pairs without a kernel on the accelerator.
        self.unsupported: set[tuple[int, torch.dtype]] = set()
        #: Bytes that the results of an operator on operands of such sizes took the last time.
        self.expected_results: dict[Any, int] = {}
        self._devices_by_name: dict[str, Device] = {}
        self._others = OthersWatch()
        #: The native regions (`regions/`); `tensor/install.py` gives them.
        self.native: Any = None
        #: The operators before the counts were started anew, and the clocks then.
        self._first_tick = self._first_ns = self._first_stall_ns = 0

    # -- settings -------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        """Where the bytes are; opened by the first use."""
        return self._residency or self._open()

    def repair(self) -> None:
        """Repair what an error has left halfway; nothing does so while nothing is opened."""
        if self._residency is not None:
            self._residency.repair()

    def doubt(self) -> None:
        """Note, while an error is handled, that it may have come halfway through something."""
        if self._residency is not None:
            self._residency.books.doubt()

    def _open(self) -> Residency:
        with self._lock:
            if self._residency is None:
                host = registry.resolve("cpu")
                device = self._resolve_devices(self._device_setting)
                strategy = make_strategy(self._strategy_setting or settings.strategy)
                budgets = self._budgets_for(device, self._budget_setting)
                residency = Residency(host, device, strategy, self.log)
                for accelerator, budget in budgets:
                    self._open_ledger(residency, accelerator, budget)
                self._devices_by_name = {d.name: d for d in (host, *device)}
                self._residency = residency
                self._start_clocks()
                tracing.begin(self.log, self.report)
                if settings.check >= 1:
                    atexit.register(self.check)
            return self._residency

    def _resolve_devices(self, setting: Any) -> list[Device]:
        if setting is None:
            setting = settings.device or registry.default_name()
        if not isinstance(setting, (list, tuple)):
            setting = [setting]
        devices = [registry.resolve(one) for one in setting]
        return [device for device in devices if not device.is_host]

    def _budgets_for(self, devices: Iterable[Device], setting: BudgetSetting) -> list[Any]:
        setting = settings.budget if setting is None else setting
        return [(device, resolve_budget(setting, device)) for device in devices]

    def _open_ledger(self, residency: Residency, device: Device, budget: Budget) -> None:
        setting = settings.budget if self._budget_setting is None else self._budget_setting
        # First: a look that has begun must not undo what the user says now.
        self._others.watch(residency, device, setting)
        residency.books.open_ledger(device, budget)
        residency.books.ledgers[device].scratch_nbytes = 0
        if device.torch_device.type != "cpu":
            residency.books.labels_differ = True
        cap_allocator(device, setting, budget.limit_nbytes)

    @property
    def device(self) -> Any:
        """The accelerator (its name), or a list of them where several are used."""
        names = [device.name for device in self.residency.books.accelerators]
        if not names:
            return "cpu"
        return names[0] if len(names) == 1 else names

    @device.setter
    def device(self, setting: Any) -> None:
        devices = self._resolve_devices(setting)
        budgets = self._budgets_for(devices, self._budget_setting)
        with self._lock:
            self._device_setting = setting
            residency = self._residency
            if residency is not None:
                self.bring_all_home()
                host_readers.forget_finished()
                residency.books.use(devices)
                self.native.start_again()
                for device, budget in budgets:
                    self._open_ledger(residency, device, budget)
                self._devices_by_name = {d.name: d for d in (residency.books.host, *devices)}
                self.unsupported.clear()
                self._start_clocks()

    def _start_clocks(self) -> None:
        """Let the time of the statistics begin now, at the end of what was given to the device."""
        self._first_ns, self._first_stall_ns = (
            self._reached_ns(),
            self.residency.books.main.stall_ns,
        )

    def _reached_ns(self) -> int:
        main = self.residency.books.main
        return max(main.now_ns(), main.record().end_ns)

    @property
    def budget(self) -> Any:
        """The most bytes the accelerator may hold; by device name where there are several."""
        limits = {
            device.name: ledger.limit_nbytes
            for device, ledger in self.residency.books.ledgers.items()
        }
        return next(iter(limits.values())) if len(limits) == 1 else limits

    @budget.setter
    def budget(self, setting: BudgetSetting) -> None:
        if self._residency is None:
            devices = [registry.resolve("cpu")] if setting is not None else []
            self._budgets_for(devices, setting)  # bad text is refused now, not at the first tensor
            self._budget_setting = setting
            return
        budgets = self._budgets_for(self._residency.books.accelerators, setting)
        self._budget_setting = setting
        for device, budget in budgets:
            self._open_ledger(self._residency, device, budget)
            self._residency.evictor.fit_budget(device)
        self.native.start_again()  # which modules fit is another question now

    @property
    def strategy(self) -> Any:
        """The strategy in use, an object; set it by name, class or object, at any time."""
        return self.residency.feed.strategy

    @strategy.setter
    def strategy(self, setting: Any) -> None:
        strategy = make_strategy(setting)
        self._strategy_setting = strategy
        if self._residency is not None:
            self._residency.feed.change(strategy)

    @property
    def regions(self) -> bool:
        """Whether modules whose operators need no interception run natively."""
        return self.native is not None and self.native.enabled

    @regions.setter
    def regions(self, wanted: bool) -> None:
        self.native.enabled = bool(wanted)

    def device_named(self, name: str) -> Device:
        """Return one of the devices in use by its name."""
        return self._devices_by_name[name]

    # -- tensors ---------------------------------------------------------------------------------

    def adopt(self, x: Any, *, sole: bool = False) -> Any:
        """Bring tensors under management without a copy.

        Parameters
        ----------
        x : torch.Tensor, torch.nn.Module or a container of them
            A tensor gives a TensorRef that shares its memory. A module is changed in place and
            returned; so are the tensors inside lists, tuples and dictionaries, which come back as
            a container of the same kind.
        sole : bool, optional
            Nobody else writes memory that came from outside torch, such as a mapped file. Without
            it every operator reads such memory anew.

        Returns
        -------
        TensorRef, torch.nn.Module or container
            What cannot be managed (other subclasses, sparse layouts, tensors on other devices, meta
            tensors, results of a plain autograd graph) comes back as it is.
        """
        return self.ownership.adopt(x, sole=sole)

    def release(self, x: Any) -> Any:
        """Give plain tensors back: the way opposite to `adopt`.

        Parameters
        ----------
        x : TensorRef, torch.nn.Module or a container of them

        Returns
        -------
        torch.Tensor, torch.nn.Module or container
            Plain host tensors with the current bytes; a module is changed in place. They share the
            memory of the TensorRefs, which stay usable and see what is written to them.
        """
        return self.ownership.release(x)

    # -- asking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what has happened since the start or the last `reset_stats`, as plain numbers.

        Notes
        -----
        `op_count` operators ran: `ready_op_count` with nothing to be decided, `slow_op_count` with
        a decision (`host_op_count` of these on the host, for they had to), `native_op_count` in
        regions. Views of ready operands are not counted, and threads that run operators at the
        same moment may lose a count.
        """
        residency = self.residency
        with residency.books.lock:
            residency.books.bury()
            books = residency.books
            main = books.main
            ledger = books.ledgers.get(main)
            counts, copies = books.counts, residency.copier.transfer.counts
            op_count = max(books.tick - self._first_tick, 0)
            return {
                "strategy": residency.feed.strategy.name,
                "device": main.name,
                "budget_nbytes": ledger.limit_nbytes if ledger else main.capacity_nbytes,
                "resident_nbytes": main.resident_nbytes if ledger else 0,
                "peak_resident_nbytes": main.peak_nbytes if ledger else 0,
                "page_locked_nbytes": main.page_locked_nbytes,
                "fetched_nbytes": copies.fetched_nbytes,
                "prefetched_nbytes": copies.prefetched_nbytes,
                "written_back_nbytes": copies.written_back_nbytes,
                "dropped_nbytes": counts.dropped_nbytes,
                "fetch_count": copies.fetch_count + copies.prefetch_count,
                "evict_count": counts.evict_count,
                "hit_count": counts.hit_count,
                "miss_count": counts.miss_count,
                "op_count": op_count,
                "ready_op_count": max(op_count - counts.slow_op_count - counts.native_op_count, 0),
                "slow_op_count": counts.slow_op_count,
                "host_op_count": counts.host_op_count,
                "native_op_region_count": self.native.native_count,
                "native_op_count": counts.native_op_count,
                "native_share": counts.native_op_count / max(op_count, 1),
                "host_fallback_count": sum(counts.host_fallbacks.values()),
                "host_fallback_reasons": dict(counts.host_fallbacks),
                "stall_ns": main.stall_ns - self._first_stall_ns,
                "time_ns": self._reached_ns() - self._first_ns,
            }

    def reset_stats(self) -> None:
        """Start the counts and the peak again."""
        residency = self.residency
        with residency.books.lock:
            residency.books.counts = Counts()
            residency.copier.transfer.counts = TransferCounts()
            self.native.native_count = 0
            self._first_tick = residency.books.tick
            self._start_clocks()
            for device in residency.books.ledgers:
                device.reset_peak()

    def story(self, ref: Any) -> list[str]:
        """Return what happened to the block of a TensorRef, oldest first."""
        return self.log.story(ref._ttr_block.name)

    def describe(self, ref: Any) -> str:
        """Return the side of a TensorRef that `print` does not show; moves nothing."""
        block: Block = ref._ttr_block
        shape = ", ".join(map(str, ref.size()))
        kind = str(ref.dtype).removeprefix("torch.")
        lines = [f"{kind}[{shape}] -> {block.name} {format_nbytes(block.nbytes)}  home cpu"]
        for replica in block.replicas.values():
            pins = f", pinned {replica.pins}" if replica.pins else ""
            used = self.residency.books.tick - block.last_use
            last = f", last used {used} operators ago" if replica.state in (CLEAN, DIRTY) else ""
            lines.append(f"  {replica.device.name:8} {replica.state.value}{pins}{last}")
        if block.exposure is not None and block.exposure.alive:
            exposure = block.exposure
            lines.append(f"  exposed on {exposure.device.name}: {exposure.why}")
        return "\n".join(lines)

    def report(self) -> str:
        """Return what is held and what it has cost, as text that fits a screen; moves nothing."""
        return report_text(self)

    def bring_all_home(self) -> None:
        """Give back every replica on every accelerator, dirty ones written back first."""
        self.residency.evictor.evict_all()

    def check(self) -> None:
        """Verify the books.

        Raises
        ------
        InvariantError
            Something is wrong in torchTensorRef itself; the message holds every violation, each
            with the story of its block.
        """
        found = self.violations()
        if found:
            raise InvariantError("\n".join(found), violations=tuple(found))

    def violations(self) -> list[str]:
        """Return every broken invariant in words."""
        residency = self.residency
        found: list[str] = []
        with residency.books.lock:
            residency.books.bury()
            for device in residency.books.ledgers:
                held_nbytes = residency.holds.held_nbytes(device)
                found += ledger_violations(residency.books, device, held_nbytes)
                for block in residency.books.blocks_on(device):
                    found += [
                        f"{text}; story: {'; '.join(self.log.story(block.name)) or 'none'}"
                        for text in block_violations(block, residency.holds.issuing)
                    ]
        return found

    def __repr__(self) -> str:
        if self._residency is None:
            return "<TensorsManager: nothing opened yet>"
        where = ", ".join(
            f"{device.name} {format_nbytes(ledger.resident_nbytes)} of "
            f"{format_nbytes(ledger.budget.limit_nbytes)}"
            for device, ledger in self._residency.books.ledgers.items()
        )
        return f"<TensorsManager {self._residency.feed.strategy.name}: {where or 'host only'}>"


#: The one of this process.
tensorsManager = TensorsManager()
