"""Entering and leaving a native region: everything that one native run of a module holds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .blocks.block import Block
from .budget import SHORTAGES
from .exchange import Exchange
from .manager import TensorsManager
from .strategy import Access
from .views import make_ref, plain_on
from .world import disabled


@dataclass
class Structure:
    """What is known about calls of one module with arguments of one kind."""

    call_count: int = 0
    #: Why it may not run natively, in words; empty while nothing speaks against it.
    doubt: str = ""
    #: Bytes of its inputs when it was recorded, and the most its results took in passing.
    input_nbytes: int = 0
    passing_nbytes: int = 0
    #: Time its operators take on the device, and how many there are.
    compute_ns: int = 0
    op_count: int = 0


@dataclass
class Region:
    """One module that may run natively."""

    module: weakref.ref[nn.Module]
    structures: dict[Any, Structure] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    depth: int = 0
    #: Where each tensor hangs: registry, name, TensorRef, block, plain view, stand-in.
    slots: list[tuple[dict[str, Any], str, Any, Block, Any, Any]] = field(default_factory=list)
    #: The modules under it, looked at for hooks before each run, and the distinct blocks.
    parts: list[nn.Module] = field(default_factory=list)
    own: list[Block] = field(default_factory=list)
    refs: tuple[Any, ...] = ()


class Entry:
    """One native run of a region: everything held from `acquire` to the end of `run`."""

    def __init__(
        self,
        manager: TensorsManager,
        unwatched: AbstractContextManager[None],
        region: Region,
        module: nn.Module,
        structure: Structure,
        exchange: Exchange,
        inputs: list[Any],
    ) -> None:
        self.manager = manager
        self.unwatched = unwatched
        self.region = region
        self.module = module
        self.structure = structure
        self.exchange = exchange
        self.inputs = inputs
        self.residency = manager.residency
        self.device = self.residency.main
        own = region.own
        self.given = [b for b in dict.fromkeys(r._b for r in inputs) if b not in own]
        self.blocks = [*own, *self.given]
        self.held: list[Any] = []
        self.reserve: Any = None
        self.made: dict[int, Block] = {}

    def acquire(self) -> bool:
        """Hold all blocks on the device, with room for what passes; False if that cannot be."""
        residency = self.residency
        ledger = residency.ledgers[self.device]
        total_nbytes = sum(block.nbytes for block in self.blocks) + self.structure.passing_nbytes
        if total_nbytes > ledger.budget.limit_nbytes:
            self.structure.doubt = "its blocks and what passes do not fit the budget together"
            return False
        if any(block.exposure is not None and block.exposure.alive for block in self.blocks):
            return False
        if any(block.is_shared for block in self.region.own):
            return False
        self._tell_accesses()
        passing = self.structure.passing_nbytes
        try:
            if not self._are_ready():
                # What is given may be written inside, unseen: a static cache.
                self.held = residency.acquire(self.device, self.blocks, self.given, passing)
            if self.device.is_witness:
                residency.make_room_patiently(self.device, passing, "a native region")
                self.reserve = self.device.allocate(passing)
        except SHORTAGES:
            self._withdraw()
            return False
        return True

    def _are_ready(self) -> bool:
        """Announce all operands at once; True if nothing has to be decided about any of them."""
        device = self.device
        ident = threading.get_ident()
        hazards = self.residency.hazards
        self.outer = hazards.get(ident)
        hazards[ident] = (*self.region.refs, *self.inputs)
        for block in self.region.own:
            if block.ready is not device:
                return False
        return all(block.ready is device and block.owned for block in self.given)

    def _withdraw(self) -> None:
        hazards = self.residency.hazards
        ident = threading.get_ident()
        if self.outer is None:
            hazards.pop(ident, None)
        else:
            hazards[ident] = self.outer

    def _tell_accesses(self) -> None:
        """One access per block, so that forecasts do not depend on how operators ran."""
        residency = self.residency
        residency.tick += 1
        strategy = residency.strategy
        for block in self.blocks:
            block.last_use = residency.tick
            block.use_count += 1
            if block.use_count == 1:
                residency.known[block.block_id] = block
        if strategy.watches_accesses and residency.is_pressed:
            with residency.strategy_lock:
                for block in self.blocks:
                    replica = block.replicas.get(self.device)
                    there = replica is not None and replica.state.value != "invalid"
                    struct = hash(("region", block.nbytes))
                    strategy.on_access(
                        Access(
                            block.block_id, block.nbytes, struct, block.is_persistent, False, there
                        )
                    )

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module on plain tensors; put everything back, whatever happens."""
        exchange, device = self.exchange, self.device
        try:
            args, kwargs = exchange.unwrap((args, kwargs), lambda ref: plain_on(ref, device))
            self._exchange_parameters()
            try:
                with disabled(), self.unwatched:
                    out = self.module._call_impl(*args, **kwargs)
            except BaseException:
                exchange.restore()
                raise
            finally:
                for slot in self.region.slots:
                    slot[0][slot[1]] = slot[2]
        finally:
            self.reserve = None
            self._leave()
        device.charge_time(self.structure.compute_ns, self.structure.op_count)
        try:
            return exchange.wrap((out, args, kwargs), self._wrapped)[0]
        finally:
            self.manager.after_operator(device, self.blocks)

    def _exchange_parameters(self) -> None:
        device = self.device
        slots = self.region.slots
        for i, (registry, name, ref, block, view, plain) in enumerate(slots):
            if view is None or ref._t is not view or ref._d is not device:
                view = plain_on(ref, device)
                plain = view
                if getattr(ref, "_is_param", False):
                    plain = nn.Parameter(view, requires_grad=ref.requires_grad)
                slots[i] = (registry, name, ref, block, view, plain)
            registry[name] = plain

    def _leave(self) -> None:
        residency = self.residency
        self._withdraw()
        if self.held:
            for block in self.given:
                residency.written(block, self.device)
            residency.release(self.held)
            with residency.lock:
                for block in self.blocks:
                    residency.set_ready(block, self.device)

    def _wrapped(self, plain: torch.Tensor) -> Any:
        """Make the TensorRef of a tensor that the module has made or handed on."""
        if plain.layout is not torch.strided or plain.is_quantized or plain.device.type == "meta":
            return plain
        key = plain.untyped_storage()._cdata
        block = self._block_over(key)
        ref_type = self.manager.ref_type
        label = torch.device("cpu")
        if block is None:
            if not plain.untyped_storage().resizable():
                plain = plain.clone()
                key = plain.untyped_storage()._cdata
            block = self.made[key] = self.residency.born(plain, self.device)
        return make_ref(ref_type, plain, block, self.device, label)

    def _block_over(self, key: int) -> Block | None:
        if not self.made:
            for block in self.blocks:
                self.made[block.base_on(self.device).untyped_storage()._cdata] = block
        return self.made.get(key)


def tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield where each parameter and buffer under a module hangs, its name, and the tensor."""
    for part in module.modules():
        for registry in (part._parameters, part._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    yield registry, name, tensor
