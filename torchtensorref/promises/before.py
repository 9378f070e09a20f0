"""What a forecast finds, and puts back when it is over: bytes, sizes, versions, histories."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.activation import moving
from ..interception.operands import Operands
from ..memory.block import Block
from ..memory.plain_views import alias_of, bare_ref, exchange, replace_metadata
from ..memory.ref import TensorRef
from ..memory.sparse import SparseRef, alias_of_sparse, become
from .graph import Cell, copied

__all__ = ["Before"]

#: What torch keeps of a tensor's hooks, with what the object is.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Before:
    """What real tensors were before a program ran on promises; all of it can be put back twice."""

    def __init__(self) -> None:
        #: Real blocks that were written meanwhile, and what they had.
        self.originals: dict[Block, Block] = {}
        #: Promises from before that may be others now, and what they promised.
        self.promised: dict[Block, Cell] = {}
        #: Blocks with what promises were from before.
        self._twins: weakref.WeakKeyDictionary[Block, Block] = weakref.WeakKeyDictionary()
        #: Promises that were made meanwhile: nobody wants back what they were.
        self.born: weakref.WeakSet[Block] = weakref.WeakSet()
        #: Blocks with the bytes that real ones have now.
        self._now: weakref.WeakKeyDictionary[Block, Block] = weakref.WeakKeyDictionary()
        #: Cells with such bytes.
        self._cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        #: Tensors over them, with the versions that these had before they were first written.
        self._versions: list[tuple[Any, int]] = []
        self._histories: dict[int, _History] = {}
        #: Sparse tensors that were written, and others of the same indices and values.
        self._sparse: dict[int, tuple[Any, Any]] = {}
        #: Memory that was made meanwhile, by its number, which is kept from becoming another one's.
        self._made: dict[int, StorageWeakRef] = {}
        #: Tensors that may stand for other memory now, the number of what the object was, the block
        #: of the memory which they had, a TensorRef that stands for it, who holds that outside,
        #: whether inference mode made them.
        self._moved: dict[int, tuple[Any, int, weakref.ref[Block], Any, Any, bool]] = {}

    def cell_of(self, block: Block) -> Cell:
        """Make a cell with the bytes that a block has now, which does not keep that one alive."""
        cell = Cell(block.nbytes, self._bytes_of(block))
        self._cells.add(cell)
        return cell

    def _bytes_of(self, block: Block) -> Block:
        found = self._now.get(block)
        if found is None or found.replicas is not block.replicas:
            found = self._now[block] = _shared(block)
        return found

    def original_of(self, block: Block) -> Block:
        """Return a block with the bytes that one had, or promised, before anything was written."""
        cell = self.promised.get(block, block.promise)
        if cell is not None and block not in self.originals:
            twin = self._twins.get(block)
            if twin is None:
                twin = self._twins[block] = Block(cell.nbytes)
                self.promised[twin] = cell
            return twin
        original = self.originals.get(block)
        return self._bytes_of(block) if original is None else original

    def note_bytes(self, block: Block) -> Block:
        """Note what a block has that is about to be a promise; return another with its bytes."""
        # What has been computed since it was written first is not what it had.
        if self._is_as_before(block):
            self.originals[block] = original = _shared(block)
            # Who holds its bytes goes on holding those.
            original.exposure = block.exposure
            block.exposure = None
        return _shared(block)

    def note_promise(self, block: Block) -> None:
        """Note a promise that is about to be another one: of a copy, if it is from before."""
        cell = block.promise
        is_other = block in self.originals or self.promised.get(block, cell) is not cell
        if cell is not None and not is_other and block not in self.born:
            made = copied(cell)
            self._cells.add(made)
            self.promised[block] = cell
            block.promise = made

    def _is_as_before(self, block: Block) -> bool:
        """Whether a block is from before, and has not been written."""
        return not any(block in known for known in (self.born, self.originals, self.promised))

    def note_made(self, plain: torch.Tensor) -> None:
        """Note memory that is made meanwhile: nobody wants back what is in it at first."""
        made = StorageWeakRef(plain.untyped_storage())
        self._made[made.cdata] = made

    def _is_made(self, block: Block) -> bool:
        """Whether the bytes of a block were made meanwhile, and nobody else has them."""
        exposure, bases = block.exposure, [replica.base for replica in block.replicas.values()]
        storages = [base.untyped_storage() for base in bases]
        if exposure is not None and exposure.storage is not None:
            storages.append(exposure.storage)
        is_held = exposure is not None and exposure.alive
        return not is_held and any(storage._cdata in self._made for storage in storages)

    def is_held_outside(self, block: Block) -> bool:
        """Whether a plain tensor of the program's has the bytes of a block, or had them before."""
        exposure = self.originals.get(block, block).exposure
        return exposure is not None and exposure.alive

    def note_written(self, operands: Operands) -> None:
        """Note versions, histories and promises of tensors from before: they are to be written."""
        self.born.update(b for b in operands.written if b.promise is None and self._is_made(b))
        for value in operands.written_arguments():
            if type(value) is SparseRef:
                self._note_sparse(value)
            elif isinstance(value, torch.Tensor) and not value.is_inference():
                ref = operands.ref_of(value)
                block = None if ref is None else ref._ttr_block
                if block is not None and (block.promise is None or self._is_as_before(block)):
                    self._versions.append((value, value._version))
                    self.note_history(value)
        for block in operands.written:
            self.note_promise(block)

    def _note_sparse(self, ref: Any) -> None:
        if id(ref) not in self._sparse:
            self._sparse[id(ref)] = ref, alias_of_sparse(ref)
            for part in ref._ttr_parts:
                self.note_moved(part)
            if not ref.is_inference():
                self._versions.append((ref, ref._version))
                self.note_history(ref)

    def note_history(self, tensor: Any) -> None:
        """Note whether a tensor requires gradients, where they go, and what it has of them."""
        base = tensor._base
        if base is not None:  # first: views follow it
            self.note_history(base)
        if (base is None or _is_leaf(tensor)) and id(tensor) not in self._histories:
            self._histories[id(tensor)] = history = _History(tensor)
            if history.gradient is not None:
                self.note_history(history.gradient)
            if isinstance(tensor, TensorRef):
                # Torch can exchange what the object is, and tells nobody (`swap_tensors`).
                self.note_moved(tensor)
                if base is None and not tensor.is_inference():
                    self._versions.append((tensor, tensor._version))

    def note_moved(self, ref: Any) -> None:
        """Note the memory and the sizes of a TensorRef that is about to stand for others."""
        block = ref._ttr_block
        if block not in self.born and id(ref) not in self._moved:
            # Its block may die meanwhile, as it would in the program.
            exposure = self.originals.get(block, block).exposure
            twin = alias_of(ref, self.original_of(block))
            parts = ref._cdata, weakref.ref(block), twin, exposure, ref.is_inference()
            self._moved[id(ref)] = (ref, *parts)

    def put_back(self) -> None:
        """Let all be as it was, once the blocks have their bytes."""
        self._put_back_objects()
        for ref, number, block_of, twin, exposure, is_inference in self._moved.values():
            block = block_of()
            if block is not None and ref._cdata == number and self._stands(ref, block, twin):
                continue  # another thread may be using it
            if block is None:
                block = twin._ttr_block
                block.exposure = exposure
            # It would become of the mode of this one; and no forecast around this one is told.
            with torch.inference_mode(is_inference), moving.entered(None):
                # What the object was is gone where it still is another: that may be of any mode.
                put = replace_metadata if ref._cdata == number else exchange
                put(ref, alias_of(twin, block))
        for ref, twin in self._sparse.values():
            become(ref, twin)
        for history in self._histories.values():
            history.put_back()
        for tensor, version in reversed(self._versions):  # those of views are their base's
            with suppress(RuntimeError):  # it was another one's, and has none itself
                if tensor._version != version:
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for history in self._histories.values():  # now: a view of another version asks its base
            history.put_back_leaf()

    def _stands(self, ref: Any, block: Block, twin: Any) -> bool:
        """Whether a TensorRef stands for what it stood for, and that was not written."""
        is_block = ref._ttr_block is block and self._is_as_before(block)
        return is_block and _layout_of(ref) == _layout_of(twin)

    def _put_back_objects(self) -> None:
        """Let objects that were exchanged for one another be what they were (`swap_tensors`)."""
        exchanged = [history for history in self._histories.values() if history.is_exchanged]
        for history in exchanged:
            history.put_back_object()
        now = {history.tensor._cdata: history.tensor for history in exchanged}
        for history in exchanged:
            tensor, other = history.tensor, now.get(history.number)
            if other is not None and other is not tensor:
                torch._C._swap_tensor_impl(tensor, other)
                now[other._cdata] = other

    def forget(self) -> list[Block]:
        """Keep nothing of it any longer: what is left of the program are promises without values.

        Returns
        -------
        list of Block
            Real ones whose bytes nobody shares any more, which would cost them their ready paths.
        """
        for cell in list(self._cells):
            if cell.writer is None or not cell.writer.is_done:
                cell.real = cell.writer = None
        blocks = [*self.originals, *self._now]
        for kept in (self.originals, self._now, self._versions, self._histories, self._moved):
            kept.clear()
        for noted in (self.promised, self._twins, self.born, self._made, self._sparse):
            noted.clear()
        return blocks


def _shared(block: Block) -> Block:
    made = Block(block.nbytes)
    made.is_persistent = block.is_persistent
    block.share_with(made)
    return made


class _History:
    """Where the gradients of a tensor go, before something is written into it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.number = tensor._cdata
        self._was_exchanged = False
        self._class, self._was_plain = type(tensor), not isinstance(tensor, TensorRef)
        self._noted = _noted_on(tensor)
        self._hooks = {name: getattr(tensor, name) for name in _HOOKS}
        self._requires_grad = tensor.requires_grad
        self._grad_fn = tensor.grad_fn
        self.gradient = tensor.grad if tensor.is_leaf else None
        self._carrier = None
        if self._grad_fn is not None and isinstance(tensor, TensorRef):  # others stay what they are
            with torch.enable_grad():
                self._carrier = _Carried.apply(tensor)

    @property
    def is_exchanged(self) -> bool:
        """Whether the program has exchanged what the object is: we do where we adopt it."""
        is_adopted = self._was_plain and isinstance(self.tensor, TensorRef)
        return bool(self.tensor._cdata != self.number) and not is_adopted

    def put_back_object(self) -> None:
        """Let the object be of its class, with what was noted on it."""
        tensor, self._was_exchanged = self.tensor, True
        tensor.__class__ = self._class
        for name in _noted_on(tensor):
            del tensor.__dict__[name]
        tensor.__dict__.update(self._noted)

    def put_back(self) -> None:
        """Let its gradients go where they went, unless it is a view, which does as its base."""
        tensor = self.tensor
        if tensor._base is None and tensor.grad_fn is not self._grad_fn:
            if self._grad_fn is None:
                tensor.detach_()
            elif self._carrier is not None:
                with torch.enable_grad():
                    _Returned.apply(tensor, self._carrier)

    def put_back_leaf(self) -> None:
        """Let a leaf require gradients, and have one, as it did; and call the same hooks."""
        tensor = self.tensor
        if self._was_exchanged:
            for name, hooks in self._hooks.items():
                setattr(tensor, name, hooks)
        if _is_leaf(tensor):
            if tensor.requires_grad != self._requires_grad:
                with torch.inference_mode(tensor.is_inference()):  # torch refuses it elsewhere
                    tensor.requires_grad_(self._requires_grad)
            gradient = self.gradient
            # Torch refuses one of other sizes, which a tensor has that was given other data.
            is_fit = gradient is None or gradient.size() == tensor.size()
            if is_fit and tensor.grad is not gradient:
                tensor.grad = gradient


def _layout_of(ref: Any) -> tuple[Any, ...]:
    sizes = ref.size(), ref.stride(), ref.storage_offset()
    return *sizes, ref.dtype, ref.device, ref.is_conj(), ref.is_neg()


def _noted_on(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_ttr_")}


def _is_leaf(tensor: Any) -> bool:
    try:
        return bool(tensor.is_leaf)
    except RuntimeError:  # a view that gradients must not go through
        return False


class _Carried(torch.autograd.Function):
    """A tensor without bytes whose gradients go where those of another one go."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        strides = (0,) * tensor.dim()
        return bare_ref(tensor.size(), strides, 0, tensor.dtype, tensor.device, Block(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Returned(torch.autograd.Function):
    """A tensor whose gradients go where those of a second one go, and not where they went."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, carrier: Any) -> Any:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]
