"""Entering and leaving a native region: everything that one native run of a module holds."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .blocks.block import Block
from .budget import SHORTAGES, Ledger
from .config import settings
from .exchange import Exchange
from .manager import TensorsManager
from .recorder import Use
from .region import Region, Slot, Structure, attributes_of, same_state, state_of
from .strategy import Access
from .views import make_ref, plain_on, view_of
from .world import disabled

_CPU = torch.device("cpu")


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
        self.slots = region.slots
        self.own = region.own
        self.refs: list[Any] = []
        self.given = tuple(b for b in dict.fromkeys(r._b for r in inputs) if b not in self.own)
        self.blocks = (*self.own, *self.given)
        self.held: list[Any] = []
        self.reserve: Any = None
        #: Whether it has changed something that running it again would change again.
        self.has_changed = False
        self.made: dict[int, Block] = {}
        #: Plain inputs with their TensorRefs and their versions before the call.
        self.unwrapped: list[tuple[torch.Tensor, Any, int]] = []

    # -- entering ---------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Hold all blocks on the device, with room for what passes; False if that cannot be."""
        residency, passing = self.residency, self.structure.passing_nbytes
        ledger = residency.ledgers[self.device]
        if sum(block.nbytes for block in self.blocks) + passing > ledger.budget.limit_nbytes:
            return False
        for block in self.blocks:
            if block.exposure is not None and block.exposure.alive:
                return False
        if any(block.is_shared for block in self.own):
            return False
        if not self._is_worth_it(ledger, passing):
            return False
        self._announce()
        try:
            if not self._are_ready():
                # What is given may be written inside, unseen: a static cache.
                self.held = residency.acquire(self.device, self.blocks, self.given, passing)
            if self.device.is_witness:
                residency.make_room_patiently(self.device, passing, "a native region")
                self.reserve = self.device.allocate(passing)
            self._tell_accesses()
        except SHORTAGES:
            self._withdraw()
            self._release()
            return False
        except BaseException:
            self._withdraw()
            self._release()
            raise
        return True

    def _is_worth_it(self, ledger: Ledger, passing_nbytes: int) -> bool:
        """Whether entering now makes nobody wait who would not wait in between.

        While memory is short, blocks that are fetched one by one, ahead or on demand, arrive while
        operators run; of those fetched as one bundle, the first operator would wait for the last.
        And room for all that passes at once would be taken from what was fetched ahead.
        """
        if not self.residency.is_pressed or settings.regions == "forced":
            return True
        room_nbytes = ledger.budget.high_nbytes - ledger.resident_nbytes
        return passing_nbytes <= room_nbytes and all(
            block.readable_on(self.device) is not None for block in self.blocks
        )

    def _announce(self) -> None:
        """From here on nobody evicts the blocks, this thread's own operators included."""
        ident = threading.get_ident()
        self.outer = self.residency.native_blocks.get(ident)
        self.residency.native_blocks[ident] = (*(self.outer or ()), *self.blocks)

    def _withdraw(self) -> None:
        ident = threading.get_ident()
        if self.outer is None:
            del self.residency.native_blocks[ident]
        else:
            self.residency.native_blocks[ident] = self.outer

    def _are_ready(self) -> bool:
        """Whether nothing has to be decided about any of the blocks, which are announced."""
        device = self.device
        for block in self.own:
            if block.ready is not device:
                return False
        return all(block.ready is device and block.owned for block in self.given)

    def _tell_accesses(self) -> None:
        """Tell what the recorded operators told: how they run makes no difference to forecasts."""
        residency, structure = self.residency, self.structure
        if residency.unheard or residency.young:
            residency.tell_births()
        tick = residency.tick
        for block in self.blocks:
            block.last_use = tick + 1
            block.use_count += 1
            if block.use_count == 1:
                residency.known[block.block_id] = block
        if residency.strategy.watches_accesses and residency.is_pressed:
            with residency.strategy_lock:
                for use in self._uses():
                    self._tell_use(use, tick)
        residency.tick = tick + max(structure.op_count, 1)

    def _uses(self) -> Iterable[Use]:
        """Return the recorded uses; each block once where the blocks are others now."""
        if self.structure.block_count == len(self.blocks):
            return self.structure.uses
        kinds = (hash(("region", block.nbytes)) for block in self.blocks)
        return [Use(1, place, kind, False) for place, kind in enumerate(kinds)]

    def _tell_use(self, use: Use, tick: int) -> None:
        block = self.blocks[use.place]
        if block.is_persistent:
            self.residency.told_tick = tick + use.number
        there = block.readable_on(self.device) is not None
        self.residency.strategy.on_access(
            Access(block.block_id, block.nbytes, use.kind, block.is_persistent, use.writes, there)
        )

    # -- running ----------------------------------------------------------------------------

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module on plain tensors; put everything back, whatever happens."""
        exchange, device = self.exchange, self.device
        try:
            out, args, kwargs = self._run_plain(args, kwargs)
            device.charge_time(self.structure.compute_ns, self.structure.op_count)
            # Still held: what is wrapped now can make others go, not what it shares memory with.
            out = exchange.wrap((out, args, kwargs), self.ref_for)[0]
        finally:
            self._gather_what_stays()
            self._leave()
        self.manager.after_operator(device, self.blocks)
        return out

    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        entries, ident = self.residency.native_entries, threading.get_ident()
        outer = entries.get(ident)
        entries[ident] = self
        try:
            args, kwargs = self.exchange.unwrap((args, kwargs), self._plain_input)
            self._exchange_parameters()
            with disabled(), self.unwatched:
                return self.module._call_impl(*args, **kwargs), args, kwargs
        except BaseException:
            self.exchange.restore()
            raise
        finally:
            if outer is None:
                del entries[ident]
            else:
                entries[ident] = outer
            self.reserve = None
            self._put_back()

    def _plain_input(self, ref: Any) -> torch.Tensor:
        plain = plain_on(ref, self.device)
        self.unwrapped.append((plain, ref, _version(plain)))
        return plain

    def _exchange_parameters(self) -> None:
        device, slots = self.device, self.slots
        stand_ins: dict[int, torch.Tensor] = {}
        for i, (registry, name, weak, block, view, plain) in enumerate(slots):
            ref: Any = weak()
            self.refs.append(ref)
            if view is None or ref._t is not view or ref._d is not device:
                view = plain_on(ref, device)
                plain = stand_ins.get(id(ref))
                if plain is None:
                    plain = stand_ins[id(ref)] = _stand_in(ref, block.base_on(device))
                slots[i] = Slot(registry, name, weak, block, view, plain)
            registry[name] = plain

    def _put_back(self) -> None:
        """Hang the TensorRefs where they were; note what was written, or exchanged inside."""
        known = self.exchange.known
        for slot, ref in zip(self.slots, self.refs, strict=False):
            registry, name, _, block, _, _ = slot
            plain: Any = slot.plain
            if plain is None:
                continue
            now = registry.get(name)
            if now is plain:
                registry[name] = ref
            elif now is not None and type(now) is not self.manager.ref_type:
                self._doubt(f"it exchanges {name}")
                registry[name] = self._parameter_for(now)
            known[id(plain)] = (plain, ref)
            if _version(plain):
                self._doubt(f"it writes {name}")
                self._note_write(ref, block)
                self.region.slots = []

    def _parameter_for(self, plain: torch.Tensor) -> Any:
        ref = self.ref_for(plain)
        if isinstance(plain, nn.Parameter) and type(ref) is self.manager.ref_type:
            ref._is_param = True
            ref.requires_grad_(plain.requires_grad)
        return ref

    def _doubt(self, why: str) -> None:
        self.structure.doubt = self.structure.doubt or why

    def _note_write(self, ref: Any, block: Block) -> None:
        self.has_changed = True
        self.residency.written(block, self.device)
        if not ref.is_inference():
            torch.autograd.graph.increment_version(ref)

    def _gather_what_stays(self) -> None:
        """Wrap what an unforeseen branch has left in the attributes of modules."""
        region = self.region
        changed = [part.module for part in region.parts if not part.is_as_before()]
        if not same_state(state_of(self.module), region.state):
            changed.append(self.module)
        for module in changed:
            self.has_changed = True
            for name in attributes_of(module):
                value = module.__dict__[name]
                module.__dict__[name] = self.exchange.wrap(value, self._left_behind)
        if changed:
            region.forget()

    def _left_behind(self, plain: torch.Tensor) -> Any:
        self._doubt("it leaves tensors behind in its attributes")
        key = plain.untyped_storage()._cdata
        if key in self.region.foreign:
            return plain
        # Over the memory of a result it is an alias. Else nobody knows who holds it besides.
        return self.ref_for(plain if self._block_over(key) is not None else plain.clone())

    # -- leaving ----------------------------------------------------------------------------

    def _leave(self) -> None:
        for plain, ref, version in self.unwrapped:
            if plain.is_inference():
                if not ref._b.owned:
                    self.residency.written(ref._b, self.device)
            elif plain._version != version:
                self._note_write(ref, ref._b)
        if self.structure.writes_inputs:
            for block in self.given:
                if not block.owned:
                    self.residency.written(block, self.device)
        self._withdraw()
        self._release()

    def _release(self) -> None:
        if not self.held:
            return
        residency = self.residency
        residency.release(self.held)
        self.held = []
        with residency.lock:
            for block in self.blocks:
                residency.set_ready(block, self.device)

    def operand(self, plain: torch.Tensor) -> Any:
        """Return the TensorRef of a stand-in that meets one from outside; None if it is none."""
        block = self._block_over(plain.untyped_storage()._cdata)
        if block is None:
            return None
        self._doubt("it uses a tensor from outside")
        return make_ref(self.manager.ref_type, plain, block, self.device, _CPU)

    def ref_for(self, plain: torch.Tensor) -> Any:
        """Make the TensorRef of a tensor that the module has made or handed on."""
        if type(plain) not in (torch.Tensor, nn.Parameter):
            # A quantized cache's tensors: their own class holds the bytes. From now on intercepted.
            self._doubt(f"it makes a {type(plain).__name__}")
            return plain
        if plain.layout is not torch.strided or plain.is_quantized or plain.device.type == "meta":
            return plain
        if torch.is_inference_mode_enabled() and not plain.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return self._ref_over(plain)
        return self._ref_over(plain)

    def _ref_over(self, plain: torch.Tensor) -> Any:
        storage = plain.untyped_storage()
        if storage._cdata in self.region.foreign:
            return plain
        block, device = self._block_over(storage._cdata), self.device
        if block is None:
            if not storage.resizable():
                plain = plain.clone()
            try:
                block = self.residency.born(plain, device)
            except SHORTAGES:
                # It is there, and does not fit: it goes home.
                plain, device = plain.cpu(), self.residency.host
                if plain.untyped_storage()._cdata == storage._cdata:
                    plain = plain.clone()
                block = self.residency.born(plain, device)
            else:
                self.made[plain.untyped_storage()._cdata] = block
        return make_ref(self.manager.ref_type, plain, block, device, _CPU)

    def _block_over(self, key: int) -> Block | None:
        if not self.made:
            for block in self.blocks:
                self.made[block.base_on(self.device).untyped_storage()._cdata] = block
        return self.made.get(key)


def _version(plain: torch.Tensor) -> int:
    return 0 if plain.is_inference() else plain._version


def _stand_in(ref: Any, base: torch.Tensor) -> torch.Tensor:
    """Make what takes a parameter's or a buffer's place; its version counts writes from 0."""
    with torch.inference_mode(False), torch.no_grad():
        view = view_of(ref, base).data  # with a count of versions of its own
        if getattr(ref, "_is_param", False):
            return nn.Parameter(view, requires_grad=ref.requires_grad)
        return view
