"""Recorder: writes down what operators use and make, while they are asked for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from ..interception.operands import Operands
from ..interception.read_alone import parts_of
from ..memory.block import Block
from ..memory.budget import Budget
from ..memory.ref import TensorRef
from ..operators.plan import OpPlan, ReadyWay
from .before import Before
from .record import BlockRecord, OpRecord, Record

__all__ = ["Recorder"]


class Recorder:
    """Writes a `Record`; see `Promises`.

    Parameters
    ----------
    budget : Budget, optional
        That of the device for which lists are divided.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.record = Record()
        self._budget = budget
        self._alive_nbytes = self._most_nbytes = 0
        #: What real tensors were.
        self.before = Before()
        #: The names of blocks that modules have, by number.
        self.names: dict[int, str] = {}
        #: Blocks of which views were made since the last operator.
        self._viewed: dict[int, None] = {}
        #: The forms of calls: operator and sizes of operands.
        self._forms: dict[Any, int] = {}
        #: Filled by weak references' callbacks, in any thread at any moment.
        self._dead: deque[_Trace] = deque()
        self._traces: dict[int, _Trace] = {}

    def note(
        self,
        plan: OpPlan,
        operands: Operands,
        *,
        born: Sequence[Block],
        cost: tuple[int, int, str],
        on_host: bool,
        shares: bool,
        peak_nbytes: int,
        numbers: Container[Block] = (),
    ) -> None:
        """Write down one operator.

        Parameters
        ----------
        numbers : container of Block, optional
            Those of plain numbers that it only reads, which no operator is told of that only reads.
        """
        self.note_deaths()
        flops, nbytes, dtype = cost
        form = self._form_of(plan, operands, () if plan.writes else numbers)
        number_of = self._numbers_for(operands, numbers)
        blocks = [block for block in operands.blocks if block not in numbers]
        slow_reads = operands.blocks if plan.writes and len(blocks) < len(operands.blocks) else ()
        self.record.ops.append(
            OpRecord(
                plan.name,
                plan.kind,
                tuple(map(number_of.__getitem__, blocks)),
                tuple(map(number_of.__getitem__, operands.written)),
                tuple(map(self.number_of, born)),
                flops=flops,
                nbytes=nbytes,
                dtype=dtype,
                peak_nbytes=peak_nbytes,
                may_be_ready=_may_be_ready(plan, operands, numbers),
                may_be_fetched=_may_be_fetched(plan, operands, numbers),
                on_host=on_host,
                overwrites=operands.overwritten is not None,
                reads_part=plan.reads_part,
                index_nbytes=_nbytes_of_indices(operands) if plan.reads_part else (),
                parts=parts_of(plan, operands.args, operands.kwargs),
                packs=plan.reads_groups,
                waits=plan.answers,
                shares=shares,
                form=form,
                fetched_form=form,
                slow_reads=tuple(map(number_of.__getitem__, slow_reads)),
                views=self._take_views(),
                deaths=[n for block, n in number_of.items() if n != block.block_id],
            )
        )

    def _numbers_for(self, operands: Operands, numbers: Container[Block]) -> dict[Block, int]:
        """Return the numbers of operands, those of plain tensors for this operator alone.

        On real tensors each operator reads those anew, unless the program has them as TensorRefs,
        too.
        """
        adopted = {ref._ttr_block for ref in operands.adopted.values()}
        found = {}
        for block in operands.blocks:
            if block in adopted and block.block_id not in self.record.blocks:
                number = found[block] = Block(block.nbytes).block_id
                self.record.blocks[number] = self._recorded(block, number)
            elif block in adopted or block not in numbers:
                found[block] = self.number_of(block)
        return found

    def _form_of(self, plan: OpPlan, operands: Operands, numbers: Container[Block] = ()) -> int:
        refs = [ref for ref in operands.refs if ref._ttr_block not in numbers]
        form = (plan.number, *(tuple(ref.size()) for ref in refs[:3]))
        return self._forms.setdefault(form, len(self._forms))

    # -- views and composite operators ----------------------------------------------------------

    def note_view(self, block: Block) -> None:
        """Note that the program makes a view of a block."""
        self._viewed[self.number_of(block)] = None

    def _take_views(self) -> tuple[int, ...]:
        viewed = tuple(self._viewed)
        self._viewed.clear()
        return viewed

    def begin_whole(self, plan: OpPlan, operands: Operands, peak_nbytes: int) -> int:
        """Write down that a composite operator may run as one; its parts come next.

        Returns
        -------
        int
            Its place, for `end_whole`.
        """
        self.note_deaths()
        reads = tuple(map(self.number_of, operands.blocks))
        whole = OpRecord(
            plan.name,
            plan.kind,
            reads,
            peak_nbytes=peak_nbytes,
            may_be_fetched=_may_be_fetched(plan, operands),
            parts=parts_of(plan, operands.args, operands.kwargs),
            fetched_form=self._form_of(plan, operands),
        )
        whole.views = self._take_views()
        self.record.ops.append(whole)
        return len(self.record.ops) - 1

    def end_whole(self, place: int, born: Block | None, cost: tuple[int, int, str]) -> None:
        """Write down what a composite operator made and cost, or forget that it may run as one.

        Parameters
        ----------
        born : Block or None
            Its one result; None where it made none, and runs in its parts.
        """
        ops = self.record.ops
        whole, parts = ops[place], ops[place + 1 :]
        whole.part_count = len(parts)
        whole.flops, whole.nbytes, whole.dtype = cost
        if born is not None:
            whole.births = (self.number_of(born),)
        if not parts:
            self._viewed = dict.fromkeys((*whole.views, *self._viewed))
        elif born is None:
            parts[0].views = (*whole.views, *parts[0].views)
        elif _is_like(parts, whole):
            parts[0].views, parts[0].inner_views = whole.views, parts[0].views
            parts[0].fetched_form = whole.fetched_form
            if parts[0].reads != whole.reads:
                parts[0].fetched_reads = whole.reads
        else:
            return
        if place:
            ops[place - 1].deaths += whole.deaths
        del ops[place]

    def number_of(self, block: Block) -> int:
        """Return the number of a block, which is written down if it is new."""
        number = block.block_id
        if number not in self.record.blocks:
            self.record.blocks[number] = self._recorded(block, number)
            trace = self._traces[number] = _Trace(block, self._dead.append)
            trace.number = number
            self._alive_nbytes += block.nbytes
            self._most_nbytes = max(self._most_nbytes, self._alive_nbytes)
        return number

    def room(self) -> tuple[int, bool]:
        """Return how much there would be, 0 if that is not known, and whether it would be short."""
        if self._budget is None:
            return 0, False
        return self._budget.limit_nbytes, self._most_nbytes > self._budget.high_nbytes

    def _recorded(self, block: Block, number: int) -> BlockRecord:
        name = self.names.get(block.block_id, "")
        return BlockRecord(number, block.nbytes, block.is_persistent, block.use_count, name)

    def begin_step(self, name: str) -> None:
        """Begin another part of the program."""
        self.note_deaths()
        self.record.begin_step(name)

    def rename_step(self, name: str) -> None:
        """Name the part that has just ended."""
        steps = self.record.steps
        taken = {other for other, _ in steps[:-1]}
        steps[-1] = (name if name not in taken else f"{name} ({len(steps)})", steps[-1][1])

    def note_deaths(self) -> None:
        """Write down which blocks the program has let go of since the last operator."""
        while self._dead:
            number = self._dead.popleft().number
            del self._traces[number]
            self._alive_nbytes -= self.record.blocks[number].nbytes
            if self.record.ops:
                self.record.ops[-1].deaths.append(number)


class _Trace(weakref.ref[Block]):
    """A weak reference that knows the number of what has died."""

    number = 0


def _is_like(parts: list[OpRecord], whole: OpRecord) -> bool:
    """Whether a composite operator is one part, and what it does as one is the same."""
    part = parts[0]
    return len(parts) == 1 and (
        (part.kind, part.births, part.flops, part.nbytes, part.peak_nbytes, part.may_be_ready)
        == (whole.kind, whole.births, whole.flops, whole.nbytes, whole.peak_nbytes, True)
        and set(part.reads) == set(whole.reads)
    )


def _may_be_ready(plan: OpPlan, operands: Operands, numbers: Container[Block]) -> bool:
    first = operands.args[0] if operands.args else None
    if isinstance(first, TensorRef) and first._ttr_block in numbers:
        return False
    return plan.ready_way != ReadyWay.NONE and plan.allows(operands.kwargs, first)


def _may_be_fetched(plan: OpPlan, operands: Operands, numbers: Container[Block] = ()) -> bool:
    adopted = [ref for ref in operands.adopted.values() if ref._ttr_block not in numbers]
    return plan.may_be_fetched and not (adopted or operands.unmanaged)


def _nbytes_of_indices(operands: Operands) -> tuple[int, ...]:
    table = operands.table
    return tuple(ref.nbytes for ref in operands.refs if ref is not table)
