"""Entering and leaving a compiled function: everything that one native run of it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..base.activation import disabled
from ..base.errors import TransferError
from ..base.interrupts import holds_operands, lets_program_run
from ..devices.base import Device
from ..devices.storages import bytes_of
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.manager import TensorsManager
from ..memory.plain_views import follow, make_ref, plain_on, view_of, view_over
from ..memory.ref import TensorRef, as_parameter, attributes_given, is_plain
from .hold import Hold
from .recorder import version_of
from .region import Region, Structure, attributes_of, state_of
from .slots import Place, data_of, same_state
from .tensor_tree import Exchange

_CPU = torch.device("cpu")

_count_of_writes = attrgetter("_version")
_address_of = torch._C.TensorBase.data_ptr


class Entry(Hold):
    """One native run of a region: everything held from `acquire` to the end of `run`."""

    #: Whether a result that is a view is one for the program, too.
    keeps_views = True

    def __init__(
        self,
        manager: TensorsManager,
        region: Region,
        module: nn.Module,
        structure: Structure,
        exchange: Exchange,
        inputs: list[Any],
        call: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(manager, region, structure, inputs)
        self.module = module
        #: What runs on plain tensors: the module itself, or what it was compiled to.
        self.call = call or module._call_impl
        self.exchange = exchange
        #: The places of parameters and buffers, their TensorRefs, what hangs there instead, and the
        #: versions and addresses of that before the call.
        self.places: list[Place] = []
        self.refs: list[Any] = []
        self.plains: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.addresses: list[int] = []
        #: Whether it has changed something that running it again would change again.
        self.has_changed = False
        self.made: dict[int, Block] = {}
        #: What stands where results are views, and the TensorRefs of what they are views of.
        self.views: list[tuple[Any, Any]] = []
        #: Plain inputs by the ids of their TensorRefs; with these, and their versions before the
        #: call.
        self.inside: dict[int, torch.Tensor] = {}
        self.unwrapped: list[tuple[torch.Tensor, Any, int]] = []
        #: Blocks of which somebody took `.data`: who writes by that counts in no version.
        self.unseen: set[Block] = set()

    # -- running ----------------------------------------------------------------------------

    @holds_operands
    @lets_program_run
    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module on plain tensors; put everything back, whatever happens."""
        device = self.device
        try:
            out, args, kwargs = self._run_plain(args, kwargs)
            device.charge_time(self.structure.compute_ns, self.structure.op_count)
            # Still held: what is wrapped now can make others go, not what it shares memory with.
            out = self._wrap(out, args, kwargs)
        except BaseException:
            with suppress(Exception):  # the program's own error is to arrive
                self.exchange.wrap((args, kwargs), self.ref_for)  # what it has put there before
            raise
        finally:
            self._gather_what_stays()
            self._note_writes()
            # Last: where this does not come to its end, a repair takes it that all was written.
            self._withdraw()
            self._release()
        self.residency.after_operator(device, self.blocks)
        self._connect()
        return self._as_views(out, args, kwargs)

    def _wrap(self, out: Any, args: Any, kwargs: Any) -> Any:
        """Return the result, with TensorRefs in the place of what was made and handed on."""
        return self.exchange.wrap((out, args, kwargs), self._result_for)[0]

    def _result_for(self, plain: torch.Tensor) -> Any:
        """Make the TensorRef of a result; of a view one that stands there until it can be one."""
        base = plain._base if self.keeps_views else None
        if base is None or base.dtype is not plain.dtype or not is_plain(plain):
            return self.ref_for(plain)
        base_ref = self.exchange.wrap_one(base, self.ref_for)
        if not isinstance(base_ref, TensorRef):
            return self.ref_for(plain)
        ref = Entry.ref_for(self, data_of(plain))  # not connected by itself
        self.views.append((ref, base_ref))
        return ref

    def _connect(self) -> None:
        """Tell autograd of the results: nothing, where none has a gradient."""

    def _as_views(self, out: Any, args: Any, kwargs: Any) -> Any:
        """Make the results that are views ones of TensorRefs.

        Autograd has to know: where one is written, the gradients of the other change.
        """
        if not self.views:
            return out
        made = {}
        for ref, base in self.views:
            view = base.as_strided(ref.size(), ref.stride(), ref.storage_offset())
            vars(view).update(attributes_given(ref))
            made[id(ref)] = view
        out = self.exchange.put((out, args, kwargs), made)[0]
        self.views = []
        return out

    @lets_program_run
    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        entries, ident = self.residency.holds.native_entries, threading.get_ident()
        outer = entries.get(ident)
        entries[ident] = self
        try:
            args, kwargs = self.exchange.unwrap((args, kwargs), self._plain_input)
            self._exchange_parameters()
            with disabled():
                return self.call(*args, **kwargs), args, kwargs
        except SHORTAGES:
            self.exchange.restore(whole=True)  # it may be called once more
            raise
        except BaseException:
            self.exchange.restore()
            raise
        finally:
            self.reserve = None
            self._put_back()
            if outer is None:  # last: until then a repair puts back
                del entries[ident]
            else:
                entries[ident] = outer

    def _plain_input(self, ref: Any) -> torch.Tensor:
        known = self.inside.get(id(ref))
        if known is not None:
            return known  # modules ask whether they are given the same tensor twice
        plain, given = self._stand_in(ref), attributes_given(ref)
        if given:
            plain = plain if plain.requires_grad else plain.detach()  # the view of it is kept
            vars(plain).update(given)
        self.inside[id(ref)] = plain
        self.unwrapped.append((plain, ref, version_of(plain)))
        return plain

    def _stand_in(self, ref: Any) -> torch.Tensor:
        return plain_on(ref, self.device)

    def _exchange_parameters(self) -> None:
        slots = self.region.slots
        assert slots is not None
        refs = slots.refs()
        plains, some_are_new = slots.stand_ins(refs, self.device)
        if some_are_new:
            self.region.storages = {}
            table = self.manager.ownership.table
            with self.residency.books.lock:
                for block in self.own:
                    table.note_base(block.base_on(self.device), block)
        self.exchange.hung = dict(zip(map(id, plains), refs, strict=True))
        versions, addresses = [*map(_count_of_writes, plains)], [*map(_address_of, plains)]
        # From here on there is something to put back. In one line: an error comes between two.
        noted = slots.places, refs, plains, versions, addresses
        self.places, self.refs, self.plains, self.versions, self.addresses = noted
        for (registry, name), plain in zip(slots.places, plains, strict=True):
            registry[name] = plain

    def _put_back(self) -> None:
        """Hang the TensorRefs where they were; note what was written, or exchanged inside."""
        for (registry, name), ref, plain in zip(self.places, self.refs, self.plains, strict=True):
            now = registry.get(name)
            if now is plain:
                registry[name] = ref
            elif now is not None and not isinstance(now, TensorRef):
                self.mistrust(f"it exchanges {name}")
                registry[name] = self._parameter_for(now)
        if [*map(_count_of_writes, self.plains)] != self.versions or [
            *map(_address_of, self.plains)
        ] != self.addresses:
            self._note_written_parameters()

    def _note_written_parameters(self) -> None:
        several = zip(self.places, self.refs, self.plains, self.versions, strict=True)
        for (_, name), ref, plain, version in several:
            if plain._version != version:
                self.mistrust(f"it writes {name}")
                self._note_write(ref, ref._ttr_block)
        pairs = {id(ref): (ref, plain) for ref, plain in zip(self.refs, self.plains, strict=True)}
        for ref, plain in [pair for pair in pairs.values() if self._is_elsewhere(*pair)]:
            self._follow(ref, self.ref_for(data_of(plain)))
        self.region.slots = None

    def abandon(self) -> None:
        """Hang everything where it was, after an error that came while that was being done."""
        for (registry, name), ref, plain in zip(self.places, self.refs, self.plains, strict=True):
            if registry.get(name) is plain:
                registry[name] = ref
        self.exchange.restore()
        self.region.forget()
        self.mistrust("it was interrupted")

    def _parameter_for(self, plain: torch.Tensor) -> Any:
        ref = self.ref_for(plain)
        if isinstance(plain, nn.Parameter) and isinstance(ref, TensorRef):
            ref.requires_grad_(plain.requires_grad)
            return as_parameter(ref)
        return ref

    def mistrust(self, why: str) -> None:
        """Note what speaks against running such calls natively."""
        self.structure.doubt = self.structure.doubt or why

    def _note_write(self, ref: Any, block: Block) -> None:
        self.has_changed = True
        self.residency.copier.written(block, self.device)
        if not ref.is_inference():
            torch.autograd.graph.increment_version(ref)

    def _is_elsewhere(self, ref: Any, plain: torch.Tensor) -> bool:
        """Whether a stand-in was given other memory, or another type: `x.data = y`."""
        base = ref._ttr_block.base_on(self.device)
        is_same = plain.untyped_storage()._cdata == base.untyped_storage()._cdata
        return not is_same or plain.dtype is not ref.dtype

    def _follow(self, ref: Any, other: Any) -> None:
        """Let a TensorRef stand for what its stand-in was given."""
        self.mistrust("it gives a tensor other memory")
        self.has_changed = True
        if isinstance(other, TensorRef):
            follow(ref, other)

    def _gather_what_stays(self) -> None:
        """Wrap what an unforeseen branch has left in the attributes of modules."""
        region = self.region
        changed = []
        if not region.attributes_are_as_before():
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
        self.mistrust("it leaves tensors behind in its attributes")
        key = plain.untyped_storage()._cdata
        # Over the memory of a result it is an alias. Else nobody knows who holds it besides.
        return self.ref_for(plain if self._block_over(key) is not None else plain.clone())

    # -- leaving ----------------------------------------------------------------------------

    def _note_writes(self) -> None:
        for plain, ref, version in self.unwrapped:
            if plain.is_inference():
                if not ref._ttr_block.owned:
                    self.residency.copier.written(ref._ttr_block, self.device)
            elif plain._version != version:
                self._note_write(ref, ref._ttr_block)
            is_elsewhere = self._is_elsewhere(ref, plain)
            if is_elsewhere:
                before = view_of(ref, ref._ttr_block.base_on(self.device))
                self._follow(ref, self._left_behind(data_of(plain)))
            self._note_what_it_became(plain, ref)
            if is_elsewhere:
                plain.data = before  # others may have the view that is kept
        # By `.data` it is written with nobody counting.
        for block in (*self.given, *self.unseen):
            if not block.owned:
                self.residency.copier.written(block, self.device)

    def _note_what_it_became(self, plain: torch.Tensor, ref: Any) -> None:
        """Let what is given have the layout and the attributes that an unforeseen branch gave."""
        layout = plain.size(), plain.stride(), plain.storage_offset()
        if layout != (ref.size(), ref.stride(), ref.storage_offset()):
            self.mistrust("it changes the layout of what it is given")
            with torch.no_grad():
                ref.as_strided_(*layout)
        given, before = attributes_given(plain), attributes_given(ref)
        for name in [name for name in given if name.startswith("_dynamo_") and name not in before]:
            del given[name]  # a mark of the compiler's, on what it has seen
        if not same_state(given, before):
            self.mistrust("it changes the attributes of what it is given")
            for name in given:
                delattr(plain, name)  # the view of it may be kept
            vars(ref).update(self.exchange.wrap(given, self.ref_for))

    def note_data(self, plain: torch.Tensor) -> None:
        """Take it that what a tensor is over is written, as `.data` of it was taken."""
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(plain)  # torch refuses it
        if is_wrapped or not is_plain(plain) or plain.layout is not torch.strided or plain.is_meta:
            return
        block = self._block_over(plain.untyped_storage()._cdata)
        if block is not None:
            self.has_changed = True
            self.unseen.add(block)
            if block in self.own:
                self.mistrust("it takes `.data` of a tensor of its own")

    def operand(self, plain: torch.Tensor) -> Any:
        """Return the TensorRef of a stand-in that meets one from outside; None if it is none."""
        block = self._block_over(plain.untyped_storage()._cdata)
        if block is None:
            return None
        self.mistrust("it uses a tensor from outside")
        return make_ref(plain, block, self.device, _CPU)

    def ref_for(self, plain: torch.Tensor) -> Any:
        """Make the TensorRef of a tensor that the module has made or handed on."""
        if not is_plain(plain):
            # A quantized cache's tensors: their own class holds the bytes. From now on intercepted.
            self.mistrust(f"it makes a {type(plain).__name__}")
            return plain
        if plain.layout is not torch.strided or plain.is_quantized or plain.device.type == "meta":
            return plain
        if torch.is_inference_mode_enabled() and not plain.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return self._ref_over(plain)
        return self._ref_over(plain)

    def _ref_over(self, plain: torch.Tensor) -> Any:
        storage = plain.untyped_storage()
        block, device = self._block_over(storage._cdata), self.device
        if block is None:
            plain, block, device = self._settled(plain)
        return make_ref(plain, block, device, _CPU)

    def _settled(self, plain: torch.Tensor) -> tuple[torch.Tensor, Block, Device]:
        """Make the block of what the module has made; it goes home where it does not fit."""
        residency, device = self.residency, self.device
        if not plain.untyped_storage().resizable():
            plain = _copied(plain)
        try:
            if device not in residency.books.ledgers:
                raise TransferError(f"{device.name} is not in use any more")
            block = residency.born(plain, device)
        except SHORTAGES:
            at_home = bytes_of(plain).to("cpu", copy=True)
            plain = view_over(plain, at_home.untyped_storage())
            return plain, residency.born(plain, residency.books.host), residency.books.host
        self.made[plain.untyped_storage()._cdata] = block
        return plain, block, device

    def _block_over(self, key: int) -> Block | None:
        """Return the block of which a storage is the bytes on the device."""
        region = self.region
        if not region.storages:
            region.storages = self._storages_of(self.own)
        if not self.made:
            self.made.update(self._storages_of(self.given))
        return self.made.get(key) or region.storages.get(key)

    def _storages_of(self, blocks: tuple[Block, ...]) -> dict[int, Block]:
        device = self.device
        return {block.base_on(device).untyped_storage()._cdata: block for block in blocks}


def _copied(plain: torch.Tensor) -> torch.Tensor:
    """Return a copy that is laid out alike: kernels take another way for another layout."""
    with torch.no_grad():
        copy = plain.clone()
        if copy.stride() == plain.stride():
            return copy
        return view_over(plain, bytes_of(plain).clone().untyped_storage())
