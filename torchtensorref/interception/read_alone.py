"""Operands of which a call reads a small part, while their blocks are away: the part moves alone.

A view that is short beside its block (an expert of those that lie in one tensor, a batch of a data
set), or the groups of a grouped product that have rows, become pieces: blocks of their own, for
this one call, before it is decided where it runs. The block stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block, Replica
from ..memory.manager import TensorsManager
from ..memory.plain_views import plain_on
from ..memory.ref import TensorRef
from ..memory.residency import Residency
from ..memory.states import INVALID
from ..operators.blocked.cut import is_dense
from ..operators.blocked.taken import GROUPS
from ..operators.plan import OpPlan
from ..operators.row import Special
from .operands import Operands, analyse
from .pieces import gathered_piece, piece_of
from .placement import table_is_away

#: A view is short that has at most this share of the bytes of its block, ...
SHORT_SHARE = 1 / 8
#: ... which has at least so many: a smaller one is fetched as soon as a part of it.
LEAST_NBYTES = 1 << 20
#: Kernels of the host may round otherwise where memory begins elsewhere within so many bytes.
ALIGNED_NBYTES = 64


def is_short(ref: Any, block: Block) -> bool:
    """Whether a TensorRef has so little of its block that it is better moved alone."""
    if block.nbytes < LEAST_NBYTES:
        return False
    width: int = ref.element_size()
    return (
        0 < ref.numel() * width <= SHORT_SHARE * block.nbytes
        and ref.storage_offset() * width % ALIGNED_NBYTES == 0
        and is_dense(ref)  # a packed one is computed otherwise
        and not (ref.is_conj() or ref.is_neg())
    )


def parts_of(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of which a call would move a part, by their numbers, and its bytes.

    Of groups, how many are used is not known before their ends are: not more than there are rows.
    """
    if not _may_stand_for_operands(plan):
        return ()
    if plan.reads_groups:
        x, matrices, ends = (plan.argument(name, args, kwargs) for name in GROUPS[plan.name])
        if not (isinstance(matrices, TensorRef) and isinstance(ends, TensorRef)):
            return ()
        count, rows = matrices.size(0), x.size(0)
        block = matrices._ttr_block
        nbytes = matrices.nbytes * rows // max(count, 1)
        if matrices.dim() != 3 or block.nbytes < LEAST_NBYTES or nbytes >= block.nbytes / 2:
            return ()
        of_ends = ends._ttr_block.block_id, ends.element_size() * rows
        return ((block.block_id, nbytes), of_ends)
    written = [plan.argument(name, args, kwargs) for name in plan.write_names]
    refs = {id(ref): ref for ref in tree_leaves((args, kwargs)) if isinstance(ref, TensorRef)}
    whole = {ref._ttr_block for ref in tree_leaves(written) if isinstance(ref, TensorRef)}
    whole |= {ref._ttr_block for ref in refs.values() if not is_short(ref, ref._ttr_block)}
    parts = ((ref._ttr_block, ref.nbytes) for ref in refs.values())
    return tuple((block.block_id, nbytes) for block, nbytes in parts if block not in whole)


def _may_stand_for_operands(plan: OpPlan) -> bool:
    """Whether copies of an operator's operands would do: no result is one, or is read elsewhere."""
    return (
        plan.special in (None, Special.SHARE)  # a copy of a part shares nothing
        and not (plan.may_alias or plan.reads_part or plan.host_operands)
    )


def is_away(block: Block, device: Device, residency: Residency) -> bool:
    """Whether a block is at home, and is not brought to an accelerator as a whole."""
    replica = block.replicas.get(device)
    return (
        not block.is_kept
        and block.exposure is None
        and block.promise is None
        and (replica is None or replica.state is INVALID)  # else it may be on its way
        and block.readable_on(residency.books.host) is not None
        and table_is_away(block, device, residency)
    )


class ReadAlone:
    """A call with pieces in the place of operands whose blocks are away; `release` ends it.

    Attributes
    ----------
    operands : Operands
        Those of the call with the pieces.
    """

    def __init__(self, operands: Operands, manager: TensorsManager) -> None:
        self.operands = operands
        self._manager = manager
        self._residency: Residency = manager.residency
        self._held: list[Replica] = []

    @classmethod
    def of(cls, operands: Operands, manager: TensorsManager) -> ReadAlone | None:
        """Exchange what can be; None where nothing is, as mostly."""
        plan, books = operands.plan, manager.residency.books
        if (
            not books.accelerators
            or manager.residency.recorder is not None
            or settings.blocks == "off"
            or operands.unmanaged
            or operands.on_accelerator is not None
            or operands.sparse
            or not _may_stand_for_operands(plan)
        ):
            return None
        call = cls(operands, manager)
        try:
            made = call._groups() if plan.reads_groups else call._short_views()
            if not made:
                return None
            call._exchange(made)
        except BaseException:
            call.release()
            raise
        return call

    def release(self) -> None:
        """Let go of the memory at home that pieces share."""
        residency, held = self._residency, self._held
        self._held = []
        residency.books.counts.costs.forget_parts(p.block_id for p in self.operands.pieces)
        if held:
            residency.release(held)

    # -- what becomes pieces --------------------------------------------------------------------

    def _short_views(self) -> dict[int, Any]:
        """Return pieces over the memory at home for short views, by the id of these."""
        operands, host = self.operands, self._residency.books.host
        if not any(is_short(ref, ref._ttr_block) for ref in operands.refs):
            return {}
        plain = {id(ref) for ref in operands.adopted.values()}
        views: dict[Block, list[Any]] = {}
        for ref in operands.refs:
            views.setdefault(ref._ttr_block, []).append(ref)
        short = [
            ref
            for block, refs in views.items()
            if all(is_short(ref, block) and id(ref) not in plain for ref in refs)
            and self._is_away(block)
            for ref in refs
        ]
        self._hold(list(dict.fromkeys(ref._ttr_block for ref in short)))
        return {
            id(ref): piece_of(plain_on(ref, host), ref.device, self._residency).ref for ref in short
        }

    def _groups(self) -> dict[int, Any]:
        """Return packs of the groups that a product uses, and which they are, likewise."""
        operands, host = self.operands, self._residency.books.host
        groups = GROUPS[operands.plan.name]
        given = {name: operands.argument(name) for name in (groups.table, groups.ends)}
        if not all(isinstance(value, TensorRef) for value in given.values()):
            return {}
        blocks: list[Block] = [ref._ttr_block for ref in given.values()]
        if blocks[0].nbytes < LEAST_NBYTES or not self._is_away(blocks[0]):
            return {}
        self._hold(blocks)
        call = {name: plain_on(ref, host) for name, ref in given.items()}
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                packs = groups.take(call, blocks[0].nbytes / given[groups.table].element_size())
        finally:
            self.release()  # they are copies
        return {
            id(given[name]): gathered_piece(pack, given[name].device, self._residency).ref
            for name, pack in (packs or {}).items()
        }

    def _is_away(self, block: Block) -> bool:
        is_read = block not in self.operands.written
        return is_read and is_away(block, self.operands.accelerator, self._residency)

    def _hold(self, blocks: Sequence[Block]) -> None:
        """Keep blocks at home, and count a use: what is used often may be worth its room."""
        residency = self._residency
        if not blocks:
            return
        with residency.books.lock:
            for block in blocks:
                residency.books.note_use(block, residency.books.tick)
        self._held = residency.acquire(residency.books.host, blocks, [], 0)

    # -- the call with them ---------------------------------------------------------------------

    def _exchange(self, made: dict[int, Any]) -> None:
        operands, costs = self.operands, self._residency.books.counts.costs
        for ref in operands.refs:
            piece = made.get(id(ref))
            if piece is not None:
                part, block = piece._ttr_block, ref._ttr_block
                costs.note_part(part.block_id, block.block_id, block.nbytes, operands.nbytes)
        args = tuple(_exchanged(arg, made) for arg in operands.args)
        kwargs = {name: _exchanged(arg, made) for name, arg in operands.kwargs.items()}
        self.operands = analyse(operands.plan, args, kwargs, self._manager)
        self.operands.pieces = frozenset(piece._ttr_block for piece in made.values())
        self._residency.books.counts.parts_op_count += 1


def _exchanged(value: Any, made: dict[int, Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_exchanged(part, made) for part in value)
    return made.get(id(value), value)
