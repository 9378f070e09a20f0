"""Phase 6, wrap: what a kernel has returned, as the program's tensors.

A result is an operand that was written, or a view of an operand, which shares its block, or fresh,
with a block of its own. What cannot be managed stays plain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..devices.base import Device
from ..devices.storages import storage_of
from ..memory.block import Block, Replica
from ..memory.plain_views import follow, make_ref, view_with
from ..memory.ref import TensorRef, is_plain
from ..memory.sparse import SparseRef, become, sparse_over
from ..operators.layouts import parts_of
from .fallback import settled
from .staging import Staged, note_result

_CPU = torch.device("cpu")


def wrap(out: Any, staged: Staged, born: list[Block]) -> Any:
    """Return the results of an operator; the blocks of fresh ones are appended to `born`."""
    return _Results(staged, born).wrap(out)


class _Results:
    """Wraps the results of one call that has run on a device."""

    __slots__ = (
        "_blocks",
        "_born",
        "_fresh",
        "_manager",
        "_operands",
        "_plan",
        "_residency",
        "_staged",
    )

    def __init__(self, staged: Staged, born: list[Block]) -> None:
        self._staged = staged
        self._operands = staged.operands
        self._plan = staged.operands.plan
        self._manager = staged.manager
        self._residency = staged.manager.residency
        self._born = born
        #: Blocks by the numbers of storages, since lists may be long: those of operands, once a
        #: result asks for them, and those of fresh results.
        self._blocks: dict[int, Block] | None = None
        self._fresh: dict[int, Block] = {}

    def wrap(self, out: Any) -> Any:
        plan = self._plan
        for name in plan.write_names if plan.list_positions else ():
            values = self._operands.argument(name)
            for original in values if isinstance(values, (list, tuple)) else ():
                self._follow_metadata(original)
        twins = plan.result_of_write
        if isinstance(out, torch.Tensor):
            return self._wrap_one(out, twins[0] if twins else None)
        if isinstance(out, (list, tuple)):
            wrapped = [
                self._wrap_one(part, twins[i] if i < len(twins) else None)
                if isinstance(part, torch.Tensor)
                else self.wrap(part)
                for i, part in enumerate(out)
            ]
            return type(out)(wrapped) if type(out) in (list, tuple) else type(out)(*wrapped)
        return out

    def _wrap_one(self, plain: torch.Tensor, twin: int | None) -> Any:
        """Wrap one result; `twin` is the position of the argument that it hands back, if any."""
        operands = self._operands
        if twin is not None:
            original = operands.argument(self._plan.argument_names[twin])
            if isinstance(original, torch.Tensor):
                self._follow_metadata(original)
                return original
        if plain.layout is not torch.strided or plain.is_nested:
            wrapped = self._wrap_sparse(plain)
            return self._unmanaged(plain) if wrapped is plain else wrapped
        if plain.is_quantized or plain.is_mkldnn:
            return self._unmanaged(plain)
        if not is_plain(plain):
            return plain  # of a library's class, or a kernel in Python has it from a factory
        device = self._device_of(plain)
        if device is None:
            return plain
        block = self._aliased(plain)
        if block is None:
            return self._wrap_fresh(plain, device)
        for ref in operands.refs:
            if self._staged.plain_of[id(ref)] is plain:
                return operands.as_passed(ref)
        return make_ref(plain, block, device, self._staged.label or _CPU)

    def _wrap_sparse(self, plain: torch.Tensor) -> Any:
        """Wrap a sparse result by its parts; itself where it has to stay plain."""
        label = self._staged.label or _CPU
        return sparse_over(plain, label, lambda part: self._wrap_one(part, None))

    def _device_of(self, plain: torch.Tensor) -> Device | None:
        """Where a result lies: a kernel may have made it elsewhere than where it ran."""
        device, accelerator = self._staged.device, self._operands.accelerator
        if plain.device == device.torch_device:
            return device
        if plain.is_cpu:
            return self._residency.books.host
        return accelerator if plain.device == accelerator.torch_device else None

    def _wrap_fresh(self, plain: torch.Tensor, device: Device) -> Any:
        if plain._is_zerotensor() or not plain.untyped_storage().resizable():
            plain = plain.clone()
        has_written = bool(self._operands.written)
        plain, block, device = settled(
            plain, self._plan, self._residency, device, has_written=has_written
        )
        self._fresh[plain.untyped_storage()._cdata] = block
        if self._residency.recorder is not None:
            self._residency.recorder.birth(block)
        self._born.append(block)
        note_result(self._operands, self._manager, block.nbytes)
        return make_ref(plain, block, device, self._staged.label or _CPU)

    def _unmanaged(self, plain: torch.Tensor) -> torch.Tensor:
        """Return a result that stays plain, and may be made of the operands' own memory.

        Then it is made again of memory that stays where it is as long as the result lives.
        """
        operands = self._operands
        parts = {part.untyped_storage()._cdata for part in parts_of(plain)}
        mine = {one.untyped_storage()._cdata for one in self._staged.plain_of.values()}
        if parts.isdisjoint(mine) or self._plan.writes:
            return plain

        def held(value: Any) -> Any:
            if isinstance(value, TensorRef):
                return self._manager.ownership.exposed_plain(
                    value, f"part of what {self._plan.name} made"
                )
            return value

        again: torch.Tensor = self._plan.op(
            *tree_map(held, operands.args), **tree_map(held, operands.kwargs)
        )
        return again

    def _aliased(self, plain: torch.Tensor) -> Block | None:
        """Return the block whose storage a result shares: an operand's, or one of a result's."""
        key = plain.untyped_storage()._cdata
        if self._blocks is None:
            plain_of = self._staged.plain_of
            self._blocks = {
                plain_of[id(ref)].untyped_storage()._cdata: ref._ttr_block
                for ref in reversed(self._operands.refs)  # of those with one storage the first
            }
        block = self._blocks.get(key)
        if block is not None:
            return block
        made = self._fresh.get(key)
        replicas = [] if made is None else list(made.replicas.values())
        # Another thread may have moved it, and another result have its storage.
        return made if any(storage_of(one.base)._cdata == key for one in replicas) else None

    def _follow_parts(self, sparse: Any) -> None:
        """Where an operator gave a sparse tensor other parts, sizes or order, follow it.

        What it has resized of its own parts is resized for all that are made of them.
        """
        plain, device = self._staged.plain_of_sparse[id(sparse)], self._staged.device
        kept = {_view_of(self._staged.plain_of[id(part)]): part for part in sparse._ttr_parts}
        grown: dict[int, tuple[torch.UntypedStorage, Replica]] = {}
        for part in sparse._ttr_parts:
            storage = self._staged.plain_of[id(part)].untyped_storage()
            replica = part._ttr_block.replicas[device]
            self._follow_metadata(part)
            if storage.nbytes() != replica.nbytes:
                grown[storage._cdata] = storage, replica

        def made(part: torch.Tensor) -> Any:
            if _view_of(part) in kept:
                return kept[_view_of(part)]
            if part.untyped_storage()._cdata in grown:
                part = part.clone()  # the kernel has resized a replica's storage
            return self._wrap_one(part, None)

        followed = sparse_over(plain, sparse.device, made)
        for storage, replica in grown.values():
            replica.take_back_size(storage)
        become(sparse, followed)  # by an operator that may fetch what it was made of

    def _follow_metadata(self, original: Any) -> None:
        """Where an operator changed sizes in place (`t_`, `out=`), change the program's, too."""
        if type(original) is SparseRef:
            self._follow_parts(original)
        ref = self._operands.ref_of(original)
        if ref is None:
            return
        plain = self._staged.plain_of[id(ref)]
        if plain.size() == ref.size() and plain.stride() == ref.stride():
            same_bits = plain.is_conj() == ref.is_conj() and plain.is_neg() == ref.is_neg()
            if same_bits and plain.storage_offset() == ref.storage_offset():
                return
        block, device = ref._ttr_block, self._staged.device
        replica = block.replicas[device]
        if plain.untyped_storage().nbytes() != replica.nbytes:
            # The kernel has resized the replica's storage: what it made becomes another block's.
            grown = view_with(plain, plain.untyped_storage().clone(), plain.storage_offset())
            replica.take_back_size(plain.untyped_storage())
            plain, block, device = settled(
                grown, self._plan, self._residency, device, has_written=True
            )
        else:
            # Not of the storage that was handed out (`for_writing`), which may be gone tomorrow.
            plain = view_with(plain, storage_of(replica.base), plain.storage_offset())
        if ref is original:
            follow(ref, make_ref(plain, block, device, ref.device))
        else:
            original.set_(plain)


def _view_of(plain: torch.Tensor) -> tuple[Any, ...]:
    """What tells the views of one storage apart."""
    bits = plain.dtype, plain.is_conj(), plain.is_neg()
    where = plain.size(), plain.stride(), plain.storage_offset()
    return (plain.untyped_storage()._cdata, *bits, *where)
