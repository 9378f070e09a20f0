"""Entering and leaving a native region: everything that one native run of a module holds."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from .blocks.block import Block
from .devices.base import Device
from .exchange import Exchange
from .late_links import count_write
from .manager import TensorsManager
from .region import Region, Slot, Structure, attributes_of, same_state, state_of
from .region_graph import Graph, run_at_once
from .region_hold import Hold
from .region_results import settled
from .views import make_ref, plain_on, view_of
from .world import disabled

_CPU = torch.device("cpu")


class Entry(Hold):
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
        #: Where gradients are noted: what torch notes about the plain tensors.
        self.graph = Graph(manager) if torch.is_grad_enabled() else None
        super().__init__(manager, region, structure, inputs, self.graph is not None)
        self.unwatched = unwatched
        self.module = module
        self.exchange = exchange
        #: What hangs in the place of parameters and buffers, with its slot, its TensorRef, and its
        #: version before the call.
        self.hung: list[tuple[Slot, Any, torch.Tensor, int]] = []
        #: Whether it has changed something that running it again would change again.
        self.has_changed = False
        self.made: dict[int, Block] = {}
        #: Plain inputs by the ids of their TensorRefs; with these, and their versions and nodes
        #: before the call.
        self.inside: dict[int, torch.Tensor] = {}
        self.unwrapped: list[tuple[torch.Tensor, Any, int, Any]] = []
        #: With a graph: storages of what was given plain.
        self.plain_keys: set[int] | None = None

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
            try:
                self._gather_what_stays()
                self._note_writes()
                self._count_what_is_saved()
            finally:
                self._withdraw()
                self._release()
        self.manager.after_operator(device, self.blocks)
        return out

    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        entries, ident = self.residency.native_entries, threading.get_ident()
        outer = entries.get(ident)
        entries[ident] = self
        try:
            args, kwargs = self.exchange.unwrap((args, kwargs), self._plain_input)
            self._exchange_parameters()
            noting = nullcontext() if self.graph is None else self.graph.hooks()
            with disabled(), self.unwatched, noting:
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
        known = self.inside.get(id(ref))
        if known is not None:
            return known  # modules ask whether they are given the same tensor twice
        plain = plain_on(ref, self.device)
        if self.graph is not None:
            # An alias: what is noted about it in the graph is no business of the TensorRef's view.
            plain = self.graph.inside_for(ref, plain.data)
        self.inside[id(ref)] = plain
        self.unwrapped.append((plain, ref, _version(plain), plain.grad_fn))
        return plain

    def _exchange_parameters(self) -> None:
        slots = self.slots
        stand_ins: dict[int, torch.Tensor] = {}
        for i, slot in enumerate(slots):
            ref: Any = slot.ref()
            if self.graph is not None:
                # One for each place: tied ones get their gradients in the order that torch has.
                plain = self.graph.inside_for(ref, plain_on(ref, self.device).data)
                if plain.requires_grad and (slot.place_count > 2 or _is_awaited(ref)):
                    run_at_once(plain)
                plain._is_param = getattr(ref, "_is_param", False)
            else:
                slots[i] = slot = self._with_stand_in(slot, ref, stand_ins)
                plain = cast("torch.Tensor", slot.plain)
            self.hung.append((slot, ref, plain, _version(plain)))
            slot.registry[slot.name] = plain

    def _with_stand_in(self, slot: Slot, ref: Any, made: dict[int, torch.Tensor]) -> Slot:
        """Return a slot with what takes its tensor's place, kept for the next time."""
        view, device = slot.view, self.device
        if view is not None and ref._t is view and ref._d is device:
            assert slot.plain is not None
            if slot.plain.requires_grad != ref.requires_grad:
                slot.plain.requires_grad_(ref.requires_grad)
            return slot
        plain = made.get(id(ref))
        if plain is None:
            plain = made[id(ref)] = _stand_in(ref, slot.block.base_on(device))
        return slot._replace(view=plain_on(ref, device), plain=plain)

    def _put_back(self) -> None:
        """Hang the TensorRefs where they were; note what was written, or exchanged inside."""
        known = self.exchange.known
        for slot, ref, plain, version in self.hung:
            registry, name = slot.registry, slot.name
            now = registry.get(name)
            if now is plain:
                registry[name] = ref
            elif now is not None and type(now) is not self.manager.ref_type:
                self._doubt(f"it exchanges {name}")
                registry[name] = self._parameter_for(now)
            known[id(plain)] = (plain, ref)
            if self.graph is not None and plain._backward_hooks:
                self._doubt(f"it hooks the gradient of {name}")
            if _version(plain) != version:
                self._doubt(f"it writes {name}")
                self._note_write(ref, slot.block)
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
            count_write(ref)

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

    def _count_what_is_saved(self) -> None:
        if self.graph is not None:
            self.graph.settle(self._block_for)

    def _block_for(self, plain: torch.Tensor) -> Block | None:
        """Return the block over what a graph has saved; None for the program's own tensors."""
        key = plain.untyped_storage()._cdata
        if key in self.region.foreign or key in self._given_plain():
            return None
        block = self._block_over(key)
        if block is None:
            block = self._settled(plain)[1]
        return block

    def _given_plain(self) -> set[int]:
        """Return the storages of the program's own tensors among what the call was given."""
        if self.plain_keys is None:
            own = self.exchange.plain_tensors()
            self.plain_keys = {x.untyped_storage()._cdata for x in own if x.layout is torch.strided}
        return self.plain_keys

    def _note_writes(self) -> None:
        for plain, ref, version, node in self.unwrapped:
            if plain.is_inference():
                if not ref._b.owned:
                    self.residency.written(ref._b, self.device)
            elif plain._version != version:
                self._note_write(ref, ref._b)
                if plain.grad_fn is not node:
                    self._doubt("it writes what it is given")
                    ref.copy_(self.ref_for(plain.clone()))  # what it depends on from now on
        if self.structure.writes_inputs:
            for block in self.given:
                if not block.owned:
                    self.residency.written(block, self.device)

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
        if self.graph is not None:
            return self._ref_with_graph(self.graph, plain)
        if torch.is_inference_mode_enabled() and not plain.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return self._ref_over(plain)
        return self._ref_over(plain)

    def _ref_with_graph(self, graph: Graph, plain: torch.Tensor) -> Any:
        if self._block_over(plain.untyped_storage()._cdata) is not None:
            self._doubt("its results share memory")
        # Of an alias that leads to no graph: a block that led there would hold itself.
        if not plain.requires_grad:
            ref = self._ref_over(plain.data)
        else:
            ref = graph.wrapped(plain, lambda plain: self._ref_over(plain.data))
        if type(ref) is self.manager.ref_type:
            graph.watch_result(plain, ref)
        return ref

    def _ref_over(self, plain: torch.Tensor) -> Any:
        storage = plain.untyped_storage()
        if storage._cdata in self.region.foreign:
            return plain
        block, device = self._block_over(storage._cdata), self.device
        if block is None:
            plain, block, device = self._settled(plain)
        return make_ref(self.manager.ref_type, plain, block, device, _CPU)

    def _settled(self, plain: torch.Tensor) -> tuple[torch.Tensor, Block, Device]:
        plain, block, device = settled(self.residency, plain, self.device)
        if device is self.device:
            self.made[plain.untyped_storage()._cdata] = block
        return plain, block, device

    def _block_over(self, key: int) -> Block | None:
        if not self.made:
            for block in self.blocks:
                self.made[block.base_on(self.device).untyped_storage()._cdata] = block
        return self.made.get(key)


def _is_awaited(ref: Any) -> bool:
    """Whether hooks of the program expect its gradient as soon as torch has it."""
    return bool(ref._backward_hooks or ref._post_accumulate_grad_hooks)


def _version(plain: torch.Tensor) -> int:
    return 0 if plain.is_inference() else plain._version


def _stand_in(ref: Any, base: torch.Tensor) -> torch.Tensor:
    """Make what takes a parameter's or a buffer's place; its version counts writes from 0."""
    with torch.inference_mode(False), torch.no_grad():
        view = view_of(ref, base).data  # with a count of versions of its own
        if getattr(ref, "_is_param", False):
            return nn.Parameter(view, requires_grad=ref.requires_grad)
        return view
