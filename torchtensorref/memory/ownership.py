"""Ownership: tensors come under management, are looked at, handed out, and given back."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Protocol

import torch

from ..base.activation import when_plain
from ..base.errors import ConfigError, did_you_mean, nearest
from ..base.listeners import listeners
from ..base.progress import Bar
from ..devices.base import Device
from ..devices.storages import storage_of
from ..operators.layouts import SPARSE
from .adoption import (
    Adoptions,
    has_bytes_at_home,
    is_adoptable,
    is_replaceable,
    ref_behind,
    replace_in_place,
    try_replace_in_place,
    without_own_references,
)
from .block import Block
from .budget import OutOfBudgetError
from .guard import Guarded, guards
from .looks import look_at
from .names import names
from .once import note_held
from .plain_views import alias_of, bare_ref, make_ref, plain_on, ref_like, view_over, view_with
from .ref import TensorRef, as_parameter, attributes_given
from .residency import Residency
from .sparse import SparseRef, sparse_over
from .storage_index import Table
from .telling import tell_no_room


class Manager(Guarded, Protocol):
    """What ownership needs of the manager."""

    #: None while nothing is opened.
    _residency: Residency | None

    @property
    def residency(self) -> Residency:
        """Where the bytes are; opened by the first use."""
        ...


@guards(but=("repair", "doubt", "note_data", "native_entry"))
class Ownership:
    """What is done with single tensors and modules: from plain to managed and back."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.table = Table()
        self._adoptions: Adoptions | None = None

    @property
    def _residency(self) -> Residency:
        return self._manager.residency

    def repair(self) -> None:
        """Repair what an error has left halfway."""
        self._manager.repair()

    def doubt(self) -> None:
        """Note, while an error is handled, that it may have come halfway through something."""
        self._manager.doubt()

    # -- adopt, release -------------------------------------------------------------------------

    def adopt(self, x: Any, *, sole: bool = False) -> Any:
        """See `TensorsManager.adopt`."""
        if isinstance(x, torch.Tensor):
            return self.adopt_tensor(x, sole=sole)
        if isinstance(x, torch.nn.Module):
            return self._adopt_module(x)
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, lambda t: self.adopt_tensor(t, sole=sole), x)

    def adopt_tensor(self, tensor: torch.Tensor, *, sole: bool = False) -> Any:
        """Return a TensorRef that shares the memory of a tensor; see `adopt`."""
        if tensor.layout in SPARSE:
            return self._adopt_sparse(tensor, sole=sole)
        if isinstance(tensor, TensorRef) or not is_adoptable(tensor) or tensor.grad_fn is not None:
            return tensor
        known = ref_behind(tensor)
        if known is not None:
            return known
        if torch.is_inference_mode_enabled() and not tensor.is_inference():
            with torch.inference_mode(False):  # else no gradient would ever come to it
                return self.adopt_tensor(tensor, sole=sole)
        ref = self._ref_over(tensor, sole=sole)
        if ref is None:
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            ref = as_parameter(ref)
        if given := attributes_given(tensor):
            ref.__dict__.update(given)
        return ref.requires_grad_(tensor.requires_grad) if tensor.requires_grad else ref

    def _adopt_sparse(self, tensor: torch.Tensor, *, sole: bool) -> Any:
        """Return a SparseRef over the parts of a sparse tensor; itself where it cannot be one."""
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.grad_fn is not None:
            return tensor
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return tensor
        with torch.no_grad():
            made = sparse_over(
                tensor.detach(), tensor.device, lambda part: self.adopt_tensor(part, sole=sole)
            )
        if type(made) is not SparseRef:
            return tensor
        return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made

    def note_data(self, *tensors: torch.Tensor) -> None:
        """Tell compiled calls of tensors whose `.data` somebody takes: their stand-ins, perhaps."""
        residency = self._manager._residency
        for entry in [*residency.holds.native_entries.values()] if residency is not None else ():
            for tensor in tensors:
                entry.note_data(tensor)

    def native_entry(self) -> Any:
        """Return the compiled call that runs natively in this thread; None without."""
        residency = self._manager._residency
        entries = residency.holds.native_entries if residency is not None else None
        return entries.get(threading.get_ident()) if entries else None

    def adopt_operand(self, tensor: torch.Tensor) -> Any:
        """Return a TensorRef for a plain operand of one operator, or None if it cannot be one."""
        entry = self.native_entry()
        if entry is not None and (inside := entry.operand(tensor)) is not None:
            return inside
        known = ref_behind(tensor)
        if known is not None:
            return known
        whole = tensor._base if tensor._is_view() else tensor
        if isinstance(whole, torch.nn.Parameter) and ref_behind(whole) is None:
            for call in when_plain:
                call(whole)
        return self._ref_over(tensor, sole=False) if has_bytes_at_home(tensor) else None

    def _ref_over(self, tensor: torch.Tensor, *, sole: bool) -> Any:
        residency = self._residency
        with residency.books.lock:
            adoptions = self._adoptions
            if adoptions is None or adoptions.books is not residency.books:
                adoptions = self._adoptions = Adoptions(self.table, residency)
        found = adoptions.block_for(tensor, sole=sole)
        if found is None:
            return None
        return self.ref_over(found[0], tensor, found[1])

    def ref_over(self, block: Block, tensor: torch.Tensor, start: int) -> Any:
        """Make the TensorRef with a plain tensor's metadata over a block that begins at `start`."""
        host = self._residency.books.host
        offset = tensor.storage_offset() - start // tensor.element_size()
        if block.ready is not host:
            return ref_like(tensor, offset, block)
        plain = view_with(tensor, storage_of(block.replicas[host].base), offset)
        return make_ref(plain, block, host, tensor.device)

    def adopt_in_place(self, tensor: torch.Tensor) -> Any:
        """Make the object `tensor` itself a TensorRef, where possible: see `replace_in_place`."""
        ref = self.adopt_tensor(tensor, sole=True)
        if ref is tensor or ref_behind(tensor) is ref or type(ref) is SparseRef:
            return ref
        ref = replace_in_place(tensor, ref)
        self.note_registered(ref)
        return ref

    def adopt_registered(self, tensor: torch.Tensor) -> Any:
        """Make what a module takes a TensorRef; None where it has to stay plain.

        With another object in its place the program would train one that the module does not have.
        """
        is_known = ref_behind(tensor) is not None
        return self.adopt_in_place(tensor) if is_known or is_replaceable(tensor) else None

    def try_adopt_in_place(self, tensor: torch.Tensor, *, sole: bool = False) -> bool:
        """Make the object `tensor` itself a TensorRef; where that cannot be, nothing changes.

        Nor where a graph holds it: torch would let its backward pass end in an error. `sole` is as
        for `adopt_tensor`.
        """
        if tensor._use_count() > 1:  # type: ignore[attr-defined]
            return False
        ref = self.adopt_tensor(tensor, sole=sole)
        if ref is tensor or ref_behind(tensor) is ref or type(ref) is SparseRef:
            return False
        if not try_replace_in_place(tensor, ref):
            return False
        self.note_registered(tensor)
        return True

    def note_registered(self, ref: Any) -> None:
        """Note that a module has a TensorRef: it stays."""
        ref._ttr_block.is_persistent = True

    def _adopt_module(self, module: torch.nn.Module) -> torch.nn.Module:
        names.note_module(module)
        tensors = itertools.chain(module.parameters(), module.buffers())
        with Bar(f"adopting {type(module).__name__}", sum(map(_nbytes_of, tensors))) as bar:
            for part in module.modules():
                with without_own_references(part):
                    for registry_ in (part._parameters, part._buffers):
                        for name, tensor in list(registry_.items()):
                            if tensor is not None and not isinstance(tensor, TensorRef):
                                registry_[name] = self.adopt_in_place(tensor)
                            bar.advance(_nbytes_of(tensor))
        return module

    def release(self, x: Any) -> Any:
        """See `TensorsManager.release`."""
        if isinstance(x, TensorRef):
            return self._release_tensor(x)
        if type(x) is SparseRef:
            return x.exposed_plain("released").requires_grad_(x.requires_grad)  # type: ignore[attr-defined]
        if isinstance(x, torch.nn.Module):
            for part in x.modules():
                for registry_ in (part._parameters, part._buffers):
                    for name, tensor in list(registry_.items()):
                        if isinstance(tensor, TensorRef):
                            registry_[name] = self._release_tensor(tensor)  # type: ignore[assignment]
            return x
        from torch.utils._pytree import tree_map_only

        return x if isinstance(x, torch.Tensor) else tree_map_only(torch.Tensor, self.release, x)

    def _release_tensor(self, ref: Any) -> torch.Tensor:
        plain: torch.Tensor = ref.exposed_plain("released")
        if isinstance(ref, torch.nn.Parameter):
            return torch.nn.Parameter(plain, requires_grad=ref.requires_grad)
        return plain.requires_grad_(ref.requires_grad) if ref.requires_grad else plain

    # -- one tensor -----------------------------------------------------------------------------

    def where(self, block: Block) -> Device:
        """Return the device where operators find a block's bytes now."""
        return self._residency.books.where(block)

    def to_accelerator(self, ref: Any, name: Any = None) -> None:
        """Fetch a block now; OutOfBudgetError if it does not fit."""
        residency = self._residency
        device = residency.books.main if name is None else self._accelerator_named(name)
        try:
            residency.release(residency.acquire(device, [ref._ttr_block], [], 0, "toGPU"))
        except OutOfBudgetError as error:
            if listeners.any:
                tell_no_room(ref._ttr_block, device, error)
            raise
        with residency.books.lock:
            residency.readiness.set_ready(ref._ttr_block, device)
        exposure = ref._ttr_block.exposure
        if exposure is not None and exposure.alive and exposure.device is not device:
            note_held(ref._ttr_block, exposure, device)

    def _accelerator_named(self, name: Any) -> Device:
        known = {device.name: device for device in self._residency.books.accelerators}
        asked = name.name if isinstance(name, Device) else str(name).strip().lower()
        found = known.get(asked) or known.get(f"{asked}:0")
        if found is None:
            raise ConfigError(
                f"The accelerator {asked!r} is not in use. {did_you_mean(asked, known)} "
                "Name one of these, or set tensorsManager.device to a list that has it.",
                name=asked,
                known=tuple(known),
                nearest=nearest(asked, known),
            )
        return found

    def to_host(self, ref: Any) -> None:
        """Bring a block home and give the accelerators' replicas back."""
        residency = self._residency
        residency.copier.bring_home(ref._ttr_block)
        for device in residency.books.accelerators:
            replica = ref._ttr_block.replicas.get(device)
            if replica is not None and replica.readable:
                residency.evictor.evict(replica, "toCPU")

    def plain_at_home(self, value: Any) -> Any:
        """Return a plain view at home for a TensorRef, with current bytes; others as they are."""
        if not isinstance(value, TensorRef):
            return value
        self._residency.copier.bring_home(value._ttr_block)
        return plain_on(value, self._residency.books.host)

    def peek(self, ref: Any, edge: int | None = None) -> torch.Tensor:
        """Return a plain look, at what `look_at` says; changes no residency and no recency."""
        base, start = self._residency.copier.peek(ref._ttr_block, lambda: look_at(ref, edge))
        return view_with(ref, storage_of(base), ref.storage_offset() - start // ref.element_size())

    def expose(self, ref: Any, why: str, *, forever: bool = False) -> torch.UntypedStorage:
        """Bring a block home, hold it there, and return a storage that may be given away."""
        return self._hand_out(ref._ttr_block, self._residency.books.host, why, forever=forever)

    def _hand_out(
        self, block: Block, where: Device | None, why: str, *, forever: bool = False
    ) -> torch.UntypedStorage:
        recorder = self._residency.recorder
        if recorder is not None:
            recorder.mistrust(f"bytes are handed out: {why}")
        storage, device = self._residency.sharing.expose(block, where, why, forever=forever)
        if device.is_host:
            with self._residency.books.lock:
                # What the program makes over it (`x.set_(storage)`) is a view of the block.
                if self.table.find(storage._cdata, 0, block.nbytes) is None:
                    number: Any = storage._weak_ref()
                    self.table.add(number, 0, block.nbytes, block)
        return storage

    def exposed_plain(self, ref: Any, why: str, *, forever: bool = False) -> torch.Tensor:
        """Return a plain host tensor over a ref's bytes, which stay there while it lives."""
        return view_over(ref, self.expose(ref, why, forever=forever))

    def plain_to_serialise(self, ref: Any) -> torch.Tensor:
        """Return a plain host tensor with the values, over the same bytes unless held elsewhere."""
        exposure = ref._ttr_block.exposure
        if exposure is not None and not exposure.device.is_host and exposure.alive:
            return self.peek(ref)
        return self.exposed_plain(ref, "serialised")

    def target(self, ref: Any) -> torch.Tensor:
        """Return a plain tensor where the bytes are now, and hold them there while it lives."""
        return view_over(ref, self._hand_out(ref._ttr_block, None, "target"))

    def copy_of(self, ref: Any, block: Block | None, *, label: Any = None) -> Any:
        """Return a copy of a TensorRef whose bytes are shared until one of the two is written."""
        if block is None and ref._ttr_block.promise is not None:
            block = _promised_copy(ref)
        elif block is None:
            block = self._residency.sharing.copy_on_write(ref._ttr_block)
        block.asked = ref._ttr_block.asked
        twin = alias_of(ref, block)
        return twin if label is None or label == ref.device else twin.to(label)

    def block_of_storage(self, plain: torch.Tensor, sources: Any) -> Any:
        """Return the TensorRef for a plain tensor that was set to another storage."""
        for source in sources:
            if not isinstance(source, TensorRef):
                continue
            storage = self.plain_at_home(source).untyped_storage()
            if storage._cdata == plain.untyped_storage()._cdata:
                host = self._residency.books.host
                return make_ref(plain, source._ttr_block, host, torch.device("cpu"))
        return self.adopt_tensor(plain)

    def share_memory(self, ref: Any) -> None:
        """Move a block's bytes at home into shared memory."""
        block: Block = ref._ttr_block
        self._residency.sharing.unshare(block)
        self._residency.copier.bring_home(block)
        self._residency.forget_accelerators(block)
        self._residency.sharing.move_to_shared_memory(block)
        self._hand_out(block, self._residency.books.host, "share_memory_", forever=True)

    def is_shared_memory(self, ref: Any) -> bool:
        """Whether a block's bytes at home are in shared memory."""
        home = ref._ttr_block.replicas.get(self._residency.books.host)
        return home is not None and home.base.untyped_storage().is_shared()


def _promised_copy(ref: Any) -> Block:
    """Promise a copy of all the bytes of a promise, of which there are none to be shared."""
    mine: Block = ref._ttr_block
    whole = bare_ref(torch.Size((mine.nbytes,)), (1,), 0, torch.uint8, ref.device, mine)
    block: Block = whole.clone()._ttr_block
    block.is_persistent = mine.is_persistent
    return block


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _nbytes_of(tensor: torch.Tensor | None) -> int:
    """Bytes of a tensor, for a bar; 0 where it has no shape yet (lazy modules)."""
    if tensor is None or torch.nn.parameter.is_lazy(tensor):
        return 0
    return tensor.numel() * tensor.element_size()
