"""Operands of which a call reads a small part, while their blocks are away: the part moves alone.

A view that is short beside its block (an expert of those that lie in one tensor, a batch of a data
set), or the groups of a grouped product that have rows, become pieces: blocks of their own, for
this one call, before it is decided where it runs. The block stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block, Replica
from ..memory.bookkeeping import Books
from ..memory.budget import SHORTAGES
from ..memory.manager import TensorsManager
from ..memory.plain_views import make_ref, plain_on, view_with
from ..memory.ref import TensorRef
from ..memory.residency import Residency
from ..operators.blocked.cut import is_dense
from ..operators.blocked.taken import GROUPS, GROUPS_SHARE, groups_with_rows
from ..operators.plan import OpPlan, plan_of
from ..operators.row import Special
from .operands import Operands, analyse
from .pieces import gathered_piece, piece_of
from .placement import table_is_away
from .tiles import Phases

aten = torch.ops.aten

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
) -> tuple[tuple[int, int, int], ...]:
    """Return the blocks of which a call would move parts, by their numbers, with their places.

    Of groups, which are used is not known before their ends are: as many as there are rows, and
    where is -1.
    """
    if not _may_stand_for_operands(plan):
        return ()
    if plan.reads_groups:
        x, matrices, ends = (plan.argument(name, args, kwargs) for name in GROUPS[plan.name])
        if not (isinstance(matrices, TensorRef) and isinstance(ends, TensorRef)):
            return ()
        block, rows = matrices._ttr_block, x.size(0)
        each_nbytes = _each_nbytes(matrices, ends)
        if not 0 < rows * each_nbytes < block.nbytes * GROUPS_SHARE:
            return ()
        of_ends = ends._ttr_block.block_id, -1, ends.element_size() * rows
        return (*[(block.block_id, -1, each_nbytes)] * rows, of_ends)
    written = [plan.argument(name, args, kwargs) for name in plan.write_names]
    refs = {id(ref): ref for ref in tree_leaves((args, kwargs)) if isinstance(ref, TensorRef)}
    whole = {ref._ttr_block for ref in tree_leaves(written) if isinstance(ref, TensorRef)}
    whole |= {ref._ttr_block for ref in refs.values() if not is_short(ref, ref._ttr_block)}
    return tuple(
        (ref._ttr_block.block_id, int(ref.storage_offset()) * ref.element_size(), ref.nbytes)
        for ref in refs.values()
        if ref._ttr_block not in whole
    )


def groups_of(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the number of a table of which a call reads so few groups that these would move."""
    if not plan.reads_groups:
        return set()
    return {block_id for block_id, _, _ in parts_of(plan, args, kwargs)}


def _each_nbytes(table: torch.Tensor, ends: torch.Tensor) -> int:
    """Bytes of the matrix of each group; 0 where they do not move one by one."""
    if table.dim() != 3 or ends.numel() != table.size(0) or table.nbytes < LEAST_NBYTES:
        return 0
    nbytes: int = table.nbytes // table.size(0)
    return nbytes if nbytes % ALIGNED_NBYTES == 0 else 0


def _may_stand_for_operands(plan: OpPlan) -> bool:
    """Whether copies of an operator's operands would do: no result is one, or is read elsewhere."""
    return (
        plan.special in (None, Special.SHARE)  # a copy of a part shares nothing
        and not (plan.may_alias or plan.reads_part or plan.host_operands)
    )


def is_away(block: Block, device: Device, residency: Residency) -> bool:
    """Whether a block is at home, and is not brought to an accelerator as a whole."""
    return (
        not block.is_kept
        and block.exposure is None
        and block.promise is None
        and not block.is_on(device)
        and block.readable_on(residency.books.host) is not None
        and table_is_away(block, device, residency)
    )


class ReadAlone:
    """A call with pieces in the place of operands whose blocks are away; `release` ends it.

    Attributes
    ----------
    operands : Operands
        By which it is decided where the call runs.
    """

    def __init__(self, operands: Operands, manager: TensorsManager) -> None:
        self.operands = operands
        self._whole = operands
        self._manager = manager
        self._residency: Residency = manager.residency
        self._held: list[Replica] = []
        self._pieces: list[Block] = []  # for this call alone,
        self._piece_ids: list[int] = []  # also those that are in a pack by now
        #: Of a grouped product: the groups that have rows, and where they end among themselves.
        self._groups: list[Any] = []
        self._ends: Any = None

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
            is_any = call._take_groups() if plan.reads_groups else call._take_short_views()
        except BaseException:
            call.release()
            raise
        if not is_any:
            call.release()
            return None
        books.counts.parts_op_count += 1
        return call

    def brought_to(self, device: Device, phases: Phases) -> Operands:
        """Return what the call runs with on a device: groups are put together there."""
        if not self._groups:
            return self.operands
        if device.is_host:
            return self._whole  # of which no more is read there
        names = GROUPS[self._whole.plan.name]
        table, ends = (self._whole.argument(name) for name in (names.table, names.ends))

        stack = analyse(plan_of(aten.stack.default), (self._groups,), {}, self._manager)
        self._groups, self._pieces = [], []
        try:
            pack = phases(stack, device, [])
        except SHORTAGES:
            return self._whole
        if not table.is_contiguous():
            with self._residency.books.lock:
                turned = plain_on(pack, device).mT
            pack = make_ref(turned, pack._ttr_block, device, pack.device)
        self.operands = self._with({id(table): pack, id(ends): self._ends})
        self.operands.pieces = frozenset((pack._ttr_block, self._ends._ttr_block))
        return self.operands

    def release(self) -> None:
        """Let go of the memory at home that pieces share."""
        self._let_go()
        self._groups = []
        self._pieces = []
        self._residency.books.counts.costs.forget_parts(self._piece_ids)

    # -- what becomes pieces --------------------------------------------------------------------

    def _take_short_views(self) -> bool:
        operands, host = self.operands, self._residency.books.host
        short = {id(ref): ref for ref in operands.refs if is_short(ref, ref._ttr_block)}
        if not short:
            return False
        for ref in operands.adopted.values():  # plain operands are read anew each time
            short.pop(id(ref), None)
        whole = {ref._ttr_block for ref in operands.refs if id(ref) not in short}
        blocks = dict.fromkeys(ref._ttr_block for ref in short.values())
        away = [block for block in blocks if block not in whole and self._is_away(block)]
        if not away:
            return False
        self._hold(away)
        made = {
            key: self._piece(plain_on(ref, host), ref)
            for key, ref in short.items()
            if ref._ttr_block in away
        }
        self.operands = self._with(made)
        self.operands.pieces = frozenset(self._pieces)
        return True

    def _take_groups(self) -> bool:
        operands, host = self.operands, self._residency.books.host
        names = GROUPS[operands.plan.name]
        table, ends = (operands.argument(name) for name in (names.table, names.ends))
        if not (isinstance(table, TensorRef) and isinstance(ends, TensorRef)):
            return False
        block: Block = table._ttr_block
        each_nbytes = _each_nbytes(table, ends)
        if not each_nbytes or not self._is_away(block):
            return False
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._hold([ends._ttr_block])
            used = groups_with_rows(plain_on(ends, host))
            if not 0 < used.numel() * each_nbytes < block.nbytes * GROUPS_SHARE:
                return False
            new_ends = plain_on(ends, host).index_select(0, used)
            self._let_go()
            self._hold([block])
            stack = plain_on(table, host)
            stack = stack if stack.is_contiguous() else stack.mT
            if not stack.is_contiguous():
                return False
            self._groups = [self._piece(stack[number], table) for number in used.tolist()]
        self._ends = gathered_piece(new_ends, ends.device, self._residency).ref
        # Whoever decides sees what would move.
        self.operands = analyse(operands.plan, operands.args, operands.kwargs, self._manager)
        parts = [part._ttr_block for part in self._groups]
        self.operands.blocks = [b for b in operands.blocks if b is not block] + parts
        self.operands.pieces = frozenset(self._pieces)
        return True

    def _piece(self, part: torch.Tensor, ref: Any) -> Any:
        """Make a part of a TensorRef's memory at home a block of its own, over that memory.

        The second time it stays one, which strategies keep, and foretell, like others.
        """
        books, block = self._residency.books, ref._ttr_block
        width = part.element_size()
        place = int(part.storage_offset()) * width, part.numel() * width
        with books.lock:
            base = block.replicas[books.host].base
            # Looked at again: another thread may have brought the block to the accelerator.
            may_stay = not self._residency.feed.gives_back and self._is_away(block)
            kept = books.parts.find(block, base, place) if may_stay else None
            if kept is not None:
                storage = kept.replicas[books.host].base.untyped_storage()
                piece = make_ref(view_with(part, storage, 0), kept, books.host, ref.device)
            else:
                piece = piece_of(part, ref.device, self._residency).ref
                if may_stay and books.parts.note(block, base, place, piece._ttr_block):
                    kept = piece._ttr_block
                    weakref.finalize(kept, _forget_cost, books, kept.block_id).atexit = False
        part_id, whole_nbytes = piece._ttr_block.block_id, self._whole.nbytes
        books.counts.costs.note_part(part_id, block.block_id, block.nbytes, whole_nbytes)
        if kept is None:
            self._pieces.append(piece._ttr_block)
            self._piece_ids.append(part_id)
        return piece

    def _is_away(self, block: Block) -> bool:
        is_read = block not in self._whole.written
        return is_read and is_away(block, self._whole.accelerator, self._residency)

    def _hold(self, blocks: Sequence[Block]) -> None:
        """Keep blocks at home, and count a use: what is used often may be worth its room."""
        residency = self._residency
        with residency.books.lock:
            for block in blocks:
                residency.books.note_use(block, residency.books.tick)
        self._held = residency.acquire(residency.books.host, blocks, [], 0)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        if held:
            self._residency.release(held)

    def _with(self, made: dict[int, Any]) -> Operands:
        """Return the operands with others in the place of those with some ids."""
        whole = self._whole
        args = tuple(_exchanged(arg, made) for arg in whole.args)
        kwargs = {name: _exchanged(arg, made) for name, arg in whole.kwargs.items()}
        return analyse(whole.plan, args, kwargs, self._manager)


def _forget_cost(books: Books, part_id: int) -> None:
    books.counts.costs.forget_parts([part_id])


def _exchanged(value: Any, made: dict[int, Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_exchanged(part, made) for part in value)
    return made.get(id(value), value)
