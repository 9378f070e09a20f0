"""TensorsManager: what a user sets and asks. The only one who changes blocks, through Residency."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..base import event_sinks as tracing
from ..base import forking
from ..base.activation import when_open
from ..base.errors import InvariantError, TransferError, did_you_mean
from ..base.event_log import EventLog
from ..base.listeners import Callback, listeners
from ..base.middlewares import Middlewares
from ..base.options import OPTIONS, settings
from ..base.public_module import MANAGER_SETTINGS
from ..devices import registry
from ..devices.base import Device
from ..devices.host.readers import host_readers
from ..strategy.choice import make_strategy
from .bookkeeping import Counts, LiveBooks
from .budget import (
    Budget,
    BudgetSetting,
    budgets_of,
    read_budget,
    refuse_unused_names,
    warn_of_doubts,
)
from .device_times import DeviceTimes, times_by_device
from .external_pressure import OthersWatch, cap_allocator
from .guard import guards
from .invariants import violations
from .lowering import budgets_in_force, keep_within
from .names import names
from .once import frames_of_ours
from .ownership import Ownership
from .report import block_of, description_of, line_of, report_text
from .residency import Residency
from .statistics import stats_of
from .transfer import TransferCounts


@guards(but=("repair", "doubt", "story", "device_named"))
class TensorsManager:
    """Tracks every TensorRef across devices, under budgets, by the decisions of a strategy.

    Everything has a default that works: the accelerator torch finds (the simulated one where there
    is none), its free memory less 10 percent, and the strategy of `TTR_STRATEGY` or the default.
    Nothing is opened before the first tensor needs it. Any thread may use it.
    """

    _is_made = False

    def __init__(self) -> None:
        self._lock = forking.RLock()
        self._residency: Residency | None = None
        self._device_setting: Any = None
        self._budget_setting: BudgetSetting = None
        self._strategy_setting: Any = None
        self.log = EventLog()
        self.names = names
        self.ownership = Ownership(self)
        self._middlewares = Middlewares()
        listeners.name_of = names.of_block
        #: (operator, dtype) pairs without a kernel on the accelerator.
        self.unsupported: set[tuple[int, torch.dtype]] = set()
        self._others, self._first_release_count = OthersWatch(), 0
        #: Who runs operators on promises (`promises/`), once there are some.
        self.promises: Any = None
        #: Tells the strategy of a forecast (`promises/`); `tensor/install.py` gives it, too.
        self.tell_history: Any = None
        self._history: Any = None
        #: Open a timeline, and a panel (`interception/onlookers`); given there, too.
        self.open_timeline: Any = None
        self.open_panel: Any = None
        #: The operators before the counts were started anew, and the clocks then.
        self._first_tick = 0
        self._first_times: dict[Device, DeviceTimes] = {}
        self._is_made = True

    # -- settings -------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Take what there is; a misspelt setting would be kept, and change nothing."""
        is_known = name[:1] == "_" or hasattr(type(self), name) or name in vars(self)
        if self._is_made and not is_known:
            raise AttributeError(
                f"tensorsManager has no setting {name!r}. " + did_you_mean(name, MANAGER_SETTINGS),
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)

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
                device = registry.accelerators(self._device_setting)
                strategy = make_strategy(self._strategy_setting or settings.strategy, len(device))
                budgets = budgets_of(device, self._budget_setting)
                residency = Residency(LiveBooks(host, device, self.log), strategy)
                self._open_ledgers(residency, budgets)
                self._residency = residency
                self._start_clocks()
                tracing.begin(self.log, self.report, self.check)
                self._say_doubts(device)
                for call in when_open:
                    call(self)
            return self._residency

    def _open_ledgers(self, residency: Residency, budgets: list[tuple[Device, Budget]]) -> None:
        setting = settings.budget if self._budget_setting is None else self._budget_setting
        for device, budget in budgets:
            # First: a look that has begun must not undo what the user says now.
            self._others.watch(residency, device, setting)
            residency.books.open_ledger(device, budget)
            cap_allocator(residency.books.ledgers[device], setting)

    def _say_doubts(self, devices: list[Device], *, only_of_names: bool = False) -> None:
        setting = settings.budget if self._budget_setting is None else self._budget_setting
        if isinstance(setting, Mapping) or not only_of_names:
            warn_of_doubts(setting, devices, stacklevel=frames_of_ours())

    @property
    def device(self) -> Any:
        """The accelerator (its name), or a list of them where several are used."""
        names = [device.name for device in self.residency.books.accelerators]
        return names if len(names) > 1 else (names or ["cpu"])[0]

    @device.setter
    def device(self, setting: Any) -> None:
        devices = registry.accelerators(setting)
        with self._lock:
            budgets = budgets_of(devices, self._budget_setting)
            residency = self._residency
            if residency is not None:
                with residency.holds.alone():
                    self._exchange(residency, devices, budgets)
            self._device_setting = setting
        if residency is not None:  # else `_open` says it
            self._say_doubts(devices, only_of_names=True)

    def _exchange(self, residency: Residency, devices: list[Device], budgets: list[Any]) -> None:
        """Use other accelerators from now on."""
        residency.evictor.evict_all()  # not the guarded one: callbacks come when this is over
        host_readers.forget_finished()
        self._open_ledgers(residency, budgets)
        # An operator that could not be waited for ends on the old ones.
        left = residency.books.use(devices)
        self._others.leave(left)
        residency.feed.follow_default(self._strategy_setting, len(devices))
        self.unsupported.clear()
        residency.times.forget()
        self._start_clocks()
        for device in left:
            residency.evictor.leave(device)

    def _accelerators(self) -> list[Device]:
        """Return the accelerators in use, or that will be."""
        if self._residency is None:
            return registry.accelerators(self._device_setting)
        return list(self._residency.books.accelerators)

    def _start_clocks(self) -> None:
        """Let the time of the statistics begin now, at the end of what was given to the device."""
        books = self.residency.books
        self._first_times = times_by_device(books)
        self._first_release_count = books.main.release_count()

    @property
    def budget(self) -> Any:
        """The most bytes the accelerator may hold; by device name where there are several."""
        limits = {
            device.name: self.residency.books.ledgers[device].limit_nbytes
            for device in self.residency.books.accelerators
        }
        return next(iter(limits.values())) if len(limits) == 1 else limits

    @budget.setter
    def budget(self, setting: BudgetSetting) -> None:
        # What is wrong is refused now, not at the first tensor.
        setting = read_budget(setting, self._accelerators)
        if self._residency is None:
            self._budget_setting = setting
            return
        with self._lock:  # the device may be changed by another thread
            accelerators = self._residency.books.accelerators
            refuse_unused_names(setting, accelerators)
            budgets = budgets_of(accelerators, setting)
            before = self._budget_setting, budgets_in_force(self._residency)
            self._budget_setting = setting
            self._open_ledgers(self._residency, budgets)
        try:
            keep_within(self._residency, accelerators)
        except TransferError as error:
            with self._lock:  # somebody may have said something else meanwhile
                if self._budget_setting is setting and accelerators == self._accelerators():
                    self._budget_setting, budgets = before
                    self._open_ledgers(self._residency, budgets)
                    error.add_note("tensorsManager.budget is what it was before.")
            raise
        warn_of_doubts(setting, accelerators, stacklevel=frames_of_ours())

    @property
    def strategy(self) -> Any:
        """The strategy in use, an object; set it by name, class or object, at any time."""
        return self.residency.feed.strategy

    @strategy.setter
    def strategy(self, setting: Any) -> None:
        strategy = make_strategy(setting)
        self._strategy_setting, self._history = strategy, None
        if self._residency is not None:
            self._residency.feed.change(strategy)

    @property
    def history(self) -> Any:
        """The forecast that the strategy was told of, or None; set one, or the file of one.

        The model is there already: its tensors are found by their names. See `Forecast.teach`.
        """
        return self._history

    @history.setter
    def history(self, setting: Any) -> None:
        self._history = self.tell_history(setting)

    @property
    def placement(self) -> str:
        """Where operators run whose weights are at home: `"auto"`, `"hybrid"`, `"accelerator"`."""
        return settings.placement

    @placement.setter
    def placement(self, wanted: str) -> None:
        settings.placement = OPTIONS["placement"].parse(str(wanted), "placement")

    # -- who looks on ---------------------------------------------------------------------------

    @property
    def middlewares(self) -> Middlewares:
        """Those that see each operator and its result, and may change both: a list, in order."""
        return self._middlewares

    @middlewares.setter
    def middlewares(self, wanted: Iterable[Any]) -> None:
        self._middlewares[:] = wanted

    def on(self, event: str, callback: Callback) -> None:
        """Call a function with each `Happening` of a kind, such as "fetch": see `Listeners.on`."""
        listeners.on(event, callback)

    def off(self, event: str, callback: Callback) -> None:
        """Call it no more; ConfigError if `on` was not given the same."""
        listeners.off(event, callback)

    def trace(self, path: str, **options: Any) -> Any:
        """Return a scope of which a Chrome trace is written: at most `limit=` events."""
        return self.open_timeline(self, path, **options)

    def live(self) -> Any:
        """Return a scope in which a panel on the terminal shows what happens; else nothing."""
        return self.open_panel(self)

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
            A SparseRef for a sparse tensor. What cannot be managed (other subclasses, tensors on
            other devices, meta, results of a plain autograd graph) comes back as it is.
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
        a decision (`host_op_count` of these placed on the host), `native_op_count` inside of what
        torch.compile has made.
        Views are not counted; an operator that finds no memory on the ready path counts there too;
        threads that run operators at the same moment may lose a count.

        `miss_count` operands had to be fetched before an operator could run. On the ready path
        every operand is there, so only hits of the slow path, where one might have been missing,
        are counted: `slow_hit_count`.

        Of several accelerators `compute_ns`, `stall_ns` and `host_stall_ns` are those of the
        `busiest`; `by_device` has those of each, and the bytes that it copied.
        """
        return stats_of(self)

    def reset_stats(self) -> None:
        """Start the counts and the peak again."""
        residency = self.residency
        with residency.books.lock:
            residency.books.counts = Counts()
            residency.copier.transfer.counts = TransferCounts()
            self._first_tick = residency.books.tick
            self._start_clocks()
            for device in residency.books.ledgers:
                device.reset_peak()

    def story(self, ref: Any) -> list[str]:
        """Return what happened to the block of a TensorRef, oldest first; prints line by line."""
        return self.log.story(block_of(ref, "story").name)

    def name_of(self, ref: Any) -> str:
        """Return what the program calls a TensorRef, by the modules it is in; else its block's."""
        return self.names.of_block(block_of(ref, "name_of").block_id)

    def describe(self, ref: Any) -> str:
        """Return the side of a TensorRef that `print` does not show; moves nothing."""
        return description_of(self, ref)

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
        return violations(self.residency, self.log)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report() if self._residency else repr(self))}</pre>"

    def __repr__(self) -> str:
        return line_of(self._residency)


#: The one of this process.
tensorsManager = TensorsManager()
