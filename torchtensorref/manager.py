"""TensorsManager: what a user sets and asks. The only one who changes blocks, through Residency."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .adoption import block_for, is_adoptable, replace_in_place
from .blocks.block import Block, Replica
from .blocks.states import CLEAN, DIRTY, FILLING, INVALID
from .blocks.table import Table
from .budget import BudgetSetting, resolve_budget
from .config import settings
from .devices import registry
from .devices.base import Device
from .errors import InvariantError
from .events import EventLog
from .reports import report_text
from .books import Counts
from .residency import Residency
from .strategy import Strategy
from .strategy_choice import make_strategy
from .transfer import TransferCounts
from .units import format_nbytes
from .views import alias_of, make_ref, plain_on, view_over, view_with


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
        self.table = Table()
        #: The class of the refs; `tensor.py` names it, so that nothing here imports upward.
        self.ref_type: Any = None
        #: (operator, dtype) pairs without a kernel on the accelerator.
        self.unsupported: set[tuple[int, torch.dtype]] = set()
        #: Bytes that the results of an operator on operands of such sizes took the last time.
        self.expected_results: dict[Any, int] = {}
        self._devices_by_name: dict[str, Device] = {}
        #: The native regions (`regions.py`), once the tensors are there.
        self.native: Any = None

    # -- settings -------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        """The acting half; opened by the first use."""
        return self._residency or self._open()

    def _open(self) -> Residency:
        with self._lock:
            if self._residency is None:
                host = registry.resolve("cpu")
                device = self._resolve_devices(self._device_setting)
                strategy = make_strategy(self._strategy_setting or settings.strategy)
                budgets = self._budgets_for(device, self._budget_setting)
                residency = Residency(host, device, strategy, self.log)
                for accelerator, budget in budgets:
                    residency.open_ledger(accelerator, budget)
                self._devices_by_name = {d.name: d for d in (host, *device)}
                self._residency = residency
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

    @property
    def device(self) -> Any:
        """The accelerator (its name), or a list of them where several are used."""
        names = [device.name for device in self.residency.accelerators]
        if not names:
            return "cpu"
        return names[0] if len(names) == 1 else names

    @device.setter
    def device(self, setting: Any) -> None:
        devices = self._resolve_devices(setting)
        budgets = self._budgets_for(devices, self._budget_setting)
        with self._lock:
            self._device_setting = setting
            if self._residency is not None:
                self.bring_all_home()
                self._residency.ledgers.clear()
                self._residency.accelerators[:] = devices
                self._residency.fast_device = self._residency.main
                self._residency.is_pressed = False
                self.native.forget()
                self.native.watch()
                for device, budget in budgets:
                    self._residency.open_ledger(device, budget)
                self._devices_by_name = {d.name: d for d in (self._residency.host, *devices)}
                self.unsupported.clear()

    @property
    def budget(self) -> Any:
        """The most bytes the accelerator may hold; by device name where there are several."""
        limits = {
            device.name: ledger.budget.limit_nbytes
            for device, ledger in self.residency.ledgers.items()
        }
        return next(iter(limits.values())) if len(limits) == 1 else limits

    @budget.setter
    def budget(self, setting: BudgetSetting) -> None:
        if self._residency is None:
            devices = [registry.resolve("cpu")] if setting is not None else []
            self._budgets_for(devices, setting)  # bad text is refused now, not at the first tensor
            self._budget_setting = setting
            return
        budgets = self._budgets_for(self._residency.accelerators, setting)
        self._budget_setting = setting
        for device, budget in budgets:
            self._residency.open_ledger(device, budget)
            self._residency.fit_budget(device)

    @property
    def strategy(self) -> Any:
        """The strategy in use, an object; set it by name, class or object, at any time."""
        return self.residency.strategy

    @strategy.setter
    def strategy(self, setting: Any) -> None:
        strategy = make_strategy(setting)
        self._strategy_setting = strategy
        if self._residency is not None:
            # In this order: what a strategy is told can need the lock (a result's first look).
            with self._residency.strategy_lock, self._residency.lock:
                self._residency.strategy = strategy
                for ledger in self._residency.ledgers.values():
                    for replica in ledger.replicas():
                        block = self._residency.block_of(replica)
                        if block is not None:
                            block.ready = None

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

    # -- adopt, release -------------------------------------------------------------------------

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
        if isinstance(x, torch.Tensor):
            return self.adopt_tensor(x, sole=sole)
        if isinstance(x, torch.nn.Module):
            return self._adopt_module(x)
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, lambda t: self.adopt_tensor(t, sole=sole), x)

    def adopt_tensor(self, tensor: torch.Tensor, *, sole: bool = False) -> Any:
        """Return a TensorRef that shares the memory of a tensor; see `adopt`."""
        if type(tensor) is self.ref_type or not is_adoptable(tensor) or tensor.grad_fn is not None:
            return tensor
        known = tensor.__dict__.get("_ref")
        if known is not None:
            return known
        ref = self._ref_over(tensor, sole=sole)
        if ref is None:
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            ref._is_param = True
        return ref.requires_grad_(tensor.requires_grad) if tensor.requires_grad else ref

    def adopt_operand(self, tensor: torch.Tensor, ref_type: Any) -> Any:
        """Return a TensorRef for a plain operand of one operator, or None if it cannot be one."""
        known = tensor.__dict__.get("_ref")
        if known is not None and type(known) is ref_type:
            return known
        return self._ref_over(tensor, sole=False) if is_adoptable(tensor) else None

    def _ref_over(self, tensor: torch.Tensor, *, sole: bool) -> Any:
        residency = self.residency
        with residency.lock:
            found = block_for(tensor, self.table, residency, sole=sole)
        if found is None:
            return None
        return self.ref_over(found[0], tensor, found[1])

    def ref_over(self, block: Block, tensor: torch.Tensor, start: int) -> Any:
        """Make the TensorRef with a plain tensor's metadata over a block that begins at `start`."""
        host = self.residency.host
        offset = tensor.storage_offset() - start // tensor.element_size()
        base = block.replicas[host].base
        plain = view_with(tensor, base.untyped_storage(), offset)
        return make_ref(self.ref_type, plain, block, host, tensor.device)

    def adopt_in_place(self, tensor: torch.Tensor) -> Any:
        """Make the object `tensor` itself a TensorRef where that is possible; see `replace_in_place`."""
        ref = self.adopt_tensor(tensor, sole=True)
        if ref is tensor or tensor.__dict__.get("_ref") is ref:
            return ref
        ref = replace_in_place(tensor, ref)
        ref._b.is_persistent = True
        return ref

    def _adopt_module(self, module: torch.nn.Module) -> torch.nn.Module:
        for part in module.modules():
            for registry_ in (part._parameters, part._buffers):
                for name, tensor in list(registry_.items()):
                    if tensor is not None and type(tensor) is not self.ref_type:
                        registry_[name] = self.adopt_in_place(tensor)
        return module

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
        if type(x) is self.ref_type:
            return self._release_tensor(x)
        if isinstance(x, torch.nn.Module):
            for part in x.modules():
                for registry_ in (part._parameters, part._buffers):
                    for name, tensor in list(registry_.items()):
                        if type(tensor) is self.ref_type:
                            registry_[name] = self._release_tensor(tensor)
            return x
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, self.release, x) if not isinstance(x, torch.Tensor) else x

    def _release_tensor(self, ref: Any) -> torch.Tensor:
        plain: torch.Tensor = ref.exposed_plain("released")
        if getattr(ref, "_is_param", False):
            return torch.nn.Parameter(plain, requires_grad=ref.requires_grad)
        return plain.requires_grad_(ref.requires_grad) if ref.requires_grad else plain

    # -- during operators -----------------------------------------------------------------------

    def after_operator(self, device: Device, blocks: Sequence[Block]) -> None:
        """Carry out what the strategy wants given back, written back and fetched ahead."""
        residency = self.residency
        strategy = residency.strategy
        kind = type(strategy)
        if kind.after_operator is not Strategy.after_operator:
            with residency.lock:
                used = [
                    replica
                    for block in blocks
                    if (replica := block.readable_on(device)) is not None and not replica.pins
                ]
                snapshots = [s for r in used if (s := residency.snapshot_of(r)) is not None]
                seen = residency.device_snapshot(device)
            with residency.strategy_lock:
                given_back = set(strategy.after_operator(seen, snapshots))
            for replica in used:
                block = residency.block_of(replica)
                if block is not None and block.block_id in given_back:
                    residency.give_back(replica, f"{strategy.name}: given back")
        if kind.write_back is not Strategy.write_back or kind.prefetch is not Strategy.prefetch:
            if residency.is_pressed:
                residency.look_ahead(device)

    # -- one tensor -----------------------------------------------------------------------------

    def where(self, block: Block) -> Device:
        """Return the device where operators find a block's bytes now."""
        residency = self.residency
        for device in residency.accelerators:
            if block.readable_on(device) is not None:
                return device
        return residency.host

    def to_accelerator(self, ref: Any) -> None:
        """Fetch a block now; OutOfBudgetError if it does not fit."""
        residency = self.residency
        device = residency.main
        residency.release(residency.acquire(device, [ref._b], [], 0))
        with residency.lock:
            residency.set_ready(ref._b, device)

    def to_host(self, ref: Any) -> None:
        """Bring a block home and give the accelerators' replicas back."""
        residency = self.residency
        residency.bring_home(ref._b)
        for device in residency.accelerators:
            replica = ref._b.replicas.get(device)
            if replica is not None and replica.readable:
                residency.evict(replica, "toCPU")

    def plain_at_home(self, value: Any) -> Any:
        """Return a plain view at home for a TensorRef, with current bytes; others as they are."""
        if type(value) is not self.ref_type:
            return value
        self.residency.bring_home(value._b)
        return plain_on(value, self.residency.host)

    def peek(self, ref: Any) -> torch.Tensor:
        """Return a plain look at the values that changes no residency and no recency."""
        return view_over(ref, self.residency.peek(ref._b).untyped_storage())

    def expose(self, ref: Any, why: str, *, forever: bool = False) -> torch.UntypedStorage:
        """Bring a block home, hold it there, and return a storage that may be given away."""
        residency = self.residency
        residency.unshare(ref._b)
        residency.bring_home(ref._b)
        storage: torch.UntypedStorage = residency.expose(
            ref._b, residency.host, why, forever=forever
        )
        return storage

    def exposed_plain(self, ref: Any, why: str) -> torch.Tensor:
        """Return a plain host tensor over a ref's bytes, which stay there while it lives."""
        return view_over(ref, self.expose(ref, why))

    def target(self, ref: Any) -> torch.Tensor:
        """Return a plain tensor where the bytes are now, and hold them there while it lives."""
        residency = self.residency
        residency.unshare(ref._b)
        device = self.where(ref._b)
        if device.is_host:
            residency.bring_home(ref._b)
        return view_over(ref, residency.expose(ref._b, device, "target"))

    def copy_of(self, ref: Any, block: Block | None, *, label: Any = None) -> Any:
        """Return a copy of a TensorRef whose bytes are shared until one of the two is written."""
        if block is None:
            block = self.residency.copy_on_write(ref._b)
        twin = alias_of(ref, block)
        return twin if label is None or label == ref.device else twin.to(label)

    def labelled_copy(self, ref: Any, wished: str) -> Any:
        """Return what `.to(device)` gives where torch cannot carry that label."""
        if getattr(ref, "_asked", None) == wished:
            return ref
        twin = ref.clone()
        twin._asked = wished
        return twin

    def forget_accelerators(self, block: Block) -> None:
        """Drop every replica but the one at home, which is current."""
        residency = self.residency
        for device in residency.accelerators:
            replica = block.replicas.get(device)
            if replica is not None:
                # It stays, empty: aliases keep views over its storage.
                with residency.lock:
                    residency._arrive(replica)
                residency.evict(replica, "its storage changes")

    def block_of_storage(self, plain: torch.Tensor, sources: Any) -> Any:
        """Return the TensorRef for a plain tensor that was set to another storage."""
        for source in sources:
            if type(source) is self.ref_type:
                if (
                    self.plain_at_home(source).untyped_storage()._cdata
                    == plain.untyped_storage()._cdata
                ):
                    return make_ref(self.ref_type, 
                        plain, source._b, self.residency.host, torch.device("cpu")
                    )
        return self.adopt_tensor(plain)

    def share_memory(self, ref: Any) -> None:
        """Move a block's bytes at home into shared memory."""
        block: Block = ref._b
        self.residency.unshare(block)
        home = self.residency.bring_home(block)
        self.forget_accelerators(block)
        home.base.untyped_storage().share_memory_()
        self.residency.expose(block, self.residency.host, "share_memory_", forever=True)

    def is_shared_memory(self, ref: Any) -> bool:
        """Whether a block's bytes at home are in shared memory."""
        home = ref._b.replicas.get(self.residency.host)
        return home is not None and home.base.untyped_storage().is_shared()

    # -- asking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what has happened since the start or the last `reset_stats`, as plain numbers."""
        residency = self.residency
        with residency.lock:
            residency.bury()
            main = residency.main
            ledger = residency.ledgers.get(main)
            counts, copies = residency.counts, residency.transfer.counts
            return {
                "strategy": residency.strategy.name,
                "device": main.name,
                "budget_nbytes": ledger.budget.limit_nbytes if ledger else main.capacity_nbytes,
                "resident_nbytes": main.resident_nbytes if ledger else 0,
                "peak_resident_nbytes": main.peak_nbytes if ledger else 0,
                "fetched_nbytes": copies.fetched_nbytes,
                "prefetched_nbytes": copies.prefetched_nbytes,
                "written_back_nbytes": copies.written_back_nbytes,
                "dropped_nbytes": counts.dropped_nbytes,
                "fetch_count": copies.fetch_count + copies.prefetch_count,
                "evict_count": counts.evict_count,
                "hit_count": counts.hit_count,
                "miss_count": counts.miss_count,
                "op_count": counts.op_count,
                "native_op_region_count": self.native.native_count,
                "native_op_count": self.native.native_op_count,
                "host_op_count": counts.host_op_count,
                "host_fallback_count": sum(counts.host_fallbacks.values()),
                "host_fallback_reasons": dict(counts.host_fallbacks),
                "stall_ns": main.stall_ns,
                "time_ns": max(main.now_ns(), main.record().end_ns),
            }

    def reset_stats(self) -> None:
        """Start the counts and the peak again."""
        residency = self.residency
        with residency.lock:
            residency.counts = Counts()
            residency.transfer.counts = TransferCounts()
            self.native.native_count = self.native.native_op_count = 0
            for device in residency.ledgers:
                device.reset_peak()

    def story(self, ref: Any) -> list[str]:
        """Return what happened to the block of a TensorRef, oldest first."""
        return self.log.story(ref._b.name)

    def describe(self, ref: Any) -> str:
        """Return the side of a TensorRef that `print` does not show; moves nothing."""
        block: Block = ref._b
        shape = ", ".join(map(str, ref.size()))
        kind = str(ref.dtype).removeprefix("torch.")
        lines = [f"{kind}[{shape}] -> {block.name} {format_nbytes(block.nbytes)}  home cpu"]
        for replica in block.replicas.values():
            pins = f", pinned {replica.pins}" if replica.pins else ""
            used = self.residency.tick - block.last_use
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
        residency = self.residency
        for ledger in list(residency.ledgers.values()):
            for replica in ledger.replicas():
                with residency.lock:
                    if replica.state is FILLING:
                        residency._arrive(replica)
                residency.evict(replica, "everything home")
        residency.settle_home()

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
        with residency.lock:
            residency.bury()
            for device, ledger in residency.ledgers.items():
                found += _ledger_violations(device, ledger)
                for replica in ledger.replicas():
                    block = residency.block_of(replica)
                    if block is not None:
                        found += [
                            f"{text}; story: {'; '.join(self.log.story(block.name)) or 'none'}"
                            for text in _block_violations(block, residency.issuing)
                        ]
        return found

    def __repr__(self) -> str:
        if self._residency is None:
            return "<TensorsManager: nothing opened yet>"
        where = ", ".join(
            f"{device.name} {format_nbytes(ledger.resident_nbytes)} of "
            f"{format_nbytes(ledger.budget.limit_nbytes)}"
            for device, ledger in self._residency.ledgers.items()
        )
        return f"<TensorsManager {self._residency.strategy.name}: {where or 'host only'}>"


def _ledger_violations(device: Device, ledger: Any) -> list[str]:
    found = []
    counted, recount = ledger.resident_nbytes, ledger.recount_nbytes()
    if counted != recount:
        found.append(f"{device.name}: the ledger says {counted} bytes, its entries {recount}")
    if device.is_simulated and device.resident_nbytes != counted:
        found.append(
            f"{device.name}: the ledger says {counted} bytes, its allocator "
            f"{device.resident_nbytes}"
        )
    held = sum(r.nbytes for r in ledger.replicas() if r.pins)
    if counted > ledger.budget.limit_nbytes + held:
        found.append(
            f"{device.name}: {counted} bytes are resident, {ledger.budget.limit_nbytes} budgeted, "
            f"and only {held} are held"
        )
    for replica in ledger.replicas():
        if replica.state is INVALID:
            found.append(f"b{replica.block_id}: counted on {device.name} although it is invalid")
    return found


def _block_violations(block: Block, issuing: set[Replica]) -> list[str]:
    found = []
    states = [replica.state for replica in block.replicas.values()]
    if CLEAN not in states and DIRTY not in states and FILLING not in states:
        found.append(f"{block.name}: no readable replica; its bytes are lost")
    if states.count(DIRTY) > 1:
        found.append(f"{block.name}: more than one dirty replica")
    if DIRTY in states and CLEAN in states:
        found.append(f"{block.name}: clean and dirty replicas at once; one of them is stale")
    for replica in block.replicas.values():
        if replica.state is FILLING and replica.arrival is None and replica not in issuing:
            found.append(f"{block.name}: filling on {replica.device.name} and no copy in flight")
    if block.ready is not None and block.readable_on(block.ready) is None:
        found.append(f"{block.name}: ready on {block.ready.name} but not readable there")
    return found


#: The one of this process.
tensorsManager = TensorsManager()  # noqa: N816 (a name its users know)
