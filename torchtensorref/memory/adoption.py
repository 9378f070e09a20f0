"""Tensors that come under management and leave it again, without a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import getweakrefs
from weakref import ref as weak_reference

import torch

from ..devices.storages import bytes_of, storage_of
from . import core
from .block import Block, Replica
from .bookkeeping import Books
from .exposure import SHARED, TWIN_USERS, Exposure
from .readiness import AT_HOME_NBYTES
from .ref import TensorRef, as_parameter, is_plain
from .residency import Residency
from .states import CLEAN
from .storage_index import WHOLE, Table
from .twins import twin_of

#: Users of an adopted storage that are ours: its object, a tensor over it, and in C++ the block.
OWN_USERS = 2 if core.library is None else 3


def is_adoptable(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor can be a TensorRef: strided bytes on the host, no other subclass."""
    return is_plain(tensor) and has_bytes_at_home(tensor)


def has_bytes_at_home(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided bytes on the host, which an operator may read as a block.

    So are tensors of a library's own class that leaves operators to torch; they stay what they are.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_mkldnn
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch._C._has_storage(tensor)
        and not tensor._is_zerotensor()
    )


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches, from the first to behind the last."""
    item = tensor.element_size()
    start: Any = tensor.storage_offset() * item  # torch types it for symbolic sizes too
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * item


class StoodFor:
    """Noted on a plain tensor that has stood for a TensorRef: for which, as long as that lives.

    A copy that shares the memory may carry it along; one that does not is left nothing of it.
    """

    __slots__ = ("_ref", "_view")

    def __init__(self, ref: Any, view: torch.Tensor) -> None:
        self._ref = weak_reference(ref)
        self._view = view

    def ref_of(self, plain: torch.Tensor) -> Any:
        """Return the TensorRef; None where it is gone, or the tensor was set to other memory."""
        return self._ref() if self._view.is_set_to(plain) else None

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # nothing, in words that `torch.load` trusts


def ref_behind(tensor: torch.Tensor) -> Any:
    """Return the TensorRef that a plain tensor is known to stand for, or to have stood for."""
    known = getattr(tensor, "_ttr_ref", None)
    if type(known) is StoodFor:
        known = known.ref_of(tensor)
    return known if isinstance(known, TensorRef) else None


def stands_for(tensor: torch.Tensor) -> Any:
    """Return the TensorRef whose place a plain tensor has, or had, in a compiled call."""
    known = getattr(tensor, "_ttr_ref", None)
    return known.ref_of(tensor) if type(known) is StoodFor else None


class Adopted:
    """Makes the replicas of adopted blocks when somebody asks for them.

    Until then a block has its storage, and that is all. Plain tensors that shared the bytes when
    they were adopted may be gone by then, and no twin is needed.
    """

    def __init__(self, books: Books, *, is_sole: bool) -> None:
        self._books = books
        self._is_sole = is_sole

    def settle(self, block: Block) -> None:
        """Give a block its replica at home, over its storage or a twin of that."""
        host = self._books.host
        with self._books.lock:
            base = block.adopted
            if base is None or block.settled is not None:
                return
            exposure = None if self._is_sole else self._exposure_over(base)
            if exposure is not None:
                base = twin_of(storage_of(base), 0, block.nbytes)
                exposure.own_count = TWIN_USERS
            block.exposure = exposure
            # In this order: whatever comes in between, the bytes are held.
            block.replicas = {host: Replica(block, host, base, CLEAN)}
            block.births = block.adopted = None

    def _exposure_over(self, base: torch.Tensor) -> Exposure | None:
        """Say who else holds the storage under a tensor of ours; None: nobody does."""
        exposure = Exposure(self._books.host, storage_of(base), SHARED, own_count=OWN_USERS)
        return exposure if exposure.alive else None


class Adoptions:
    """Finds or makes the blocks that stand for plain tensors' storages."""

    def __init__(self, table: Table, residency: Residency) -> None:
        self._table = table
        self._residency = residency
        self.books = residency.books
        self._readiness = residency.readiness
        self._sole = Adopted(self.books, is_sole=True)
        self._shared = Adopted(self.books, is_sole=False)

    def block_for(self, tensor: torch.Tensor, *, sole: bool) -> tuple[Block, int] | None:
        """Find or make the block that stands for a plain tensor's storage (lock not held).

        Parameters
        ----------
        tensor : torch.Tensor
            Plain and adoptable.
        sole : bool
            The caller gives the tensor up, and knows that memory which came from outside torch (a
            mapped file, an array) is read by nobody who does not hold its storage. Of memory that
            other processes share nobody can know that: it makes no difference there.

        Returns
        -------
        (Block, int) or None
            The block, and the byte of the tensor's storage where it begins; None where part of the
            range, or of an element, belongs to a block already: the tensor must stay plain.
        """
        under = core.storage_under(tensor)
        with self.books.lock:
            found = self._find_or_make(tensor, *under, sole=sole)
        if found is not None and under[1] > found[0].nbytes and _has_grown(found[0], tensor):
            self._residency.sharing.grow(found[0], storage_of(tensor))
            self._residency.resized(found[0], storage_of(tensor).nbytes())
        return found

    def _find_or_make(
        self, tensor: torch.Tensor, number: int, nbytes: int, is_resizable: bool, *, sole: bool
    ) -> tuple[Block, int] | None:
        is_shared = storage_of(tensor).is_shared()
        # A mapped file may be one storage under many tensors: each is a block of its own.
        start, stop = (0, nbytes) if is_resizable or is_shared else extent_of(tensor)
        found = self._table.find(number, start, stop)
        if found is not None:
            # An element that begins between those of the block has no offset in it.
            return None if found[1] % tensor.element_size() else found
        if self._table.overlaps(number, start, stop):
            return None
        if is_shared:
            block = self._borrowing_block(tensor, start, stop, sole=False)
        elif is_resizable or (sole and (start, stop) == (0, nbytes)):
            block = self._block_of_all(tensor, nbytes, sole=sole)
        else:
            block = self._borrowing_block(tensor, start, stop, sole=sole)
        held = core.hold_weakly(tensor)
        self._table.add(held, start, WHOLE if is_resizable else stop, block)
        if block.nbytes <= AT_HOME_NBYTES:
            self._readiness.settle_at_home(block)
        return block, start

    def _block_of_all(self, tensor: torch.Tensor, nbytes: int, *, sole: bool) -> Block:
        """Make the block of a whole storage, of whose holders torch keeps count."""
        is_sole = not nbytes or (sole and _user_count(tensor) <= SOLE_USERS)
        births = self._sole if is_sole else self._shared
        tick = self.books.tick  # it stays if it is used long after
        return Block(nbytes, tick, births=births, adopted=core.bytes_to_keep(tensor))

    def _borrowing_block(self, tensor: torch.Tensor, start: int, stop: int, *, sole: bool) -> Block:
        """Make the block of memory that came from outside torch, or of a part of it."""
        block = Block(stop - start, self.books.tick)
        host = self.books.host
        base = bytes_of(tensor)
        if block.nbytes:
            storage = storage_of(tensor)
            if not storage.is_shared():  # else a twin would not be what other processes are sent
                base = twin_of(storage, start, stop)
            block.exposure = (
                Exposure(host, storage, SHARED, own_count=TWIN_USERS)
                if sole
                else Exposure(host, None, "memory from outside", forever=True)
            )
        block.replicas[host] = Replica(block, host, base, CLEAN)
        return block


def _has_grown(block: Block, tensor: torch.Tensor) -> bool:
    """Whether torch, or who holds it, has given a storage more bytes than its block has."""
    storage = storage_of(tensor)
    if not storage.resizable() or storage.is_shared():
        return False  # the block is a part of it
    # Else the memory is a replica's: nobody outside has it.
    return block.exposure is not None or not block.nbytes


def _user_count(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(storage_of(tensor)._cdata)


#: Users of a storage under one tensor. Our own look at it counts among them, but for torch 2.9.
SOLE_USERS = _user_count(torch._C._VariableFunctions.empty((1,)))


@contextmanager
def without_own_references(module: torch.nn.Module) -> Iterator[None]:
    """Have a recurrent module refer weakly to none of its parameters: torch exchanges no such one.

    As torch does when it moves a module.
    """
    if not isinstance(module, torch.nn.RNNBase):
        yield
        return
    module._flat_weight_refs = []
    try:
        yield
    finally:
        module._init_flat_weights()


def is_replaceable(tensor: torch.Tensor) -> bool:
    """Whether the object itself can become a TensorRef: torch exchanges none that others hold.

    Those are a graph, a view's note of its base, and weak references.
    """
    return tensor._use_count() == 1 and not getweakrefs(tensor)  # type: ignore[attr-defined]


def replace_in_place(tensor: torch.Tensor, ref: Any) -> Any:
    """Make the object `tensor` itself the TensorRef, so that whoever holds it sees the change.

    Returns
    -------
    TensorRef
        `tensor` where its object could be exchanged; `ref` where somebody in C++ holds it (an
        autograd graph, a weak reference). Then `tensor` remembers it under `_ttr_ref`.
    """
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(ref, torch.nn.Parameter):
        ref = as_parameter(ref)
    known = ref_behind(tensor)
    if known is not None:
        return known
    if try_replace_in_place(tensor, ref):
        return tensor
    tensor._ttr_ref = ref  # type: ignore[attr-defined]
    return ref


def try_replace_in_place(tensor: torch.Tensor, ref: Any) -> bool:
    """Make the object `tensor` itself the TensorRef, if nobody in C++ holds it.

    It keeps what the program has noted on it (transformers marks what it has loaded so), its
    gradient and its hooks.
    """
    if noted := vars(tensor):
        ref.__dict__ = noted | vars(ref)
    ref.grad = tensor.grad
    try:
        torch.utils.swap_tensors(tensor, ref)
    except RuntimeError:
        return False
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks is not None:  # torch adds later ones to an empty dictionary, as pickle gives one
            setattr(tensor, name, hooks)  # they were torch's note on what it has been
    return True
