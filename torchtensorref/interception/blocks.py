"""An operator that does not fit, in blocks: whether it can be cut, and into which tiles.

`block_plan.py` says what a cut means for a call, `tiles.py` runs the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from ..base.options import settings
from ..base.units import format_nbytes
from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..operators.blocked.along import RULES as ALONG
from ..operators.blocked.cut import WHOLE, Call, Cut
from ..operators.blocked.sizes import MUCH_LESS, TileTooLargeError, Tiling
from ..operators.blocked.table import cut_of, rule_of
from ..operators.substitutes import itself
from .block_plan import Plan, arguments_of
from .operands import Operands
from .parts_of_tables import run_on_parts
from .sparse_blocks import SparseRun, product_of
from .staging import expected_results
from .tiles import Phases, Run, UnfitError

#: Of the room that kernels leave, which allocate in passing.
SCRATCH_SHARE = 8


class Blocks:
    """One call of an operator that may run in blocks.

    Attributes
    ----------
    why_not : str
        Why it did not; empty where it has no rule, or was not tried.
    """

    #: For tests: chooses the tiles of every operator that has a rule, whether it fits or not.
    forced: Callable[[Cut, Tiling], Tiling] | None = None

    def __init__(
        self, operands: Operands, manager: TensorsManager, phases: Phases, born: list[Block]
    ) -> None:
        self._operands = operands
        self._manager = manager
        self._residency = manager.residency
        self._phases = phases
        self._born = born
        self.why_not = ""

    def is_needed(self, device: Device) -> bool:
        """Whether the operator is known not to fit on a device, before it is tried."""
        operands = self._operands
        if Blocks.forced is not None:
            return True
        limit_nbytes = self._residency.books.ledgers[device].budget.limit_nbytes
        nbytes = operands.nbytes
        return nbytes > limit_nbytes or (
            nbytes + expected_results(operands, self._manager) > limit_nbytes
        )

    def run(self, device: Device) -> Any:
        """Run it in blocks.

        Returns
        -------
        Any
            The operator's result; NotImplemented where it cannot be cut, or where that would not
            keep the bits. Then nothing has changed.

        Raises
        ------
        OutOfBudgetError, torch.OutOfMemoryError, TransferError
            The first tile found no room. Nothing has changed.
        """
        if self._operands.sparse:
            return self._run_sparse(device)
        found = self._found(device)
        if found is None:
            return NotImplemented
        plan, tiling = found
        self.why_not = ""
        if Blocks.forced is not None:
            tiling = Blocks.forced(plan.cut, tiling)
        run = Run(plan, tiling, self._manager, self._phases, device)
        try:
            result = run.run(self._born)
        except UnfitError:
            return NotImplemented
        pairs = zip(tiling.axes, tiling.counts(), strict=True)
        keeps_bits = plan.keeps_places and all(axis.keeps_bits for axis, n in pairs if n > 1)
        self._note(run.tile_count, tiling.need_nbytes, keeps_bits)
        return result

    def _run_sparse(self, device: Device) -> Any:
        """Run a product of sparse matrices in rows; nothing else of such operands is cut."""
        operands = self._operands
        product, room_nbytes = product_of(operands), self._room_nbytes(device)
        if product is None:
            return NotImplemented
        if Blocks.forced is not None:
            room_nbytes = min(room_nbytes, operands.nbytes)
        run = SparseRun(operands, product, self._manager, self._phases, device, room_nbytes)
        if device.has_host_kernels and settings.blocks != "any" and not run.keeps_bits:
            self.why_not = "blocks would change bits"
            return NotImplemented
        result = run.run(self._born)
        self.why_not = run.why_not
        if result is not NotImplemented:
            self._note(run.tile_count, run.need_nbytes, run.keeps_bits)
        return result

    def run_on_parts(self) -> Any:
        """Run it on the rows of its table that it reads; NotImplemented where it cannot be."""
        return run_on_parts(self._operands, self._manager, self._phases, self._born)

    def _found(self, device: Device) -> tuple[Plan, Tiling] | None:
        """Find tiles that fit: of the cuts that keep the bits, else of any, where that may be."""
        wholes = self._cuts()
        cuts = [cut.keeping_bits() for cut in wholes]
        if not device.has_host_kernels or settings.blocks == "any":
            cuts += wholes
        room_nbytes = self._room_nbytes(device)
        found: tuple[Plan, Tiling] | None = None
        least: tuple[int, tuple[int, ...]] | None = None  # not the error: it holds this frame
        for cut in cuts:
            plan = Plan.of(self._operands, cut if cut.can_be_cut else WHOLE, device)
            if plan is None or not plan.cut_refs:
                continue
            if device.has_host_kernels and not (cut.can_be_cut or plan.keeps_layouts):
                self.why_not = "packed operands are computed otherwise"
                continue
            if device.has_host_kernels and settings.blocks != "any" and not plan.keeps_places:
                self.why_not = "operands that begin elsewhere are added in another order"
                continue
            try:
                tiling = plan.tiling(room_nbytes)
                if found is None or tiling.moved_nbytes < MUCH_LESS * found[1].moved_nbytes:
                    found = plan, tiling
                if settings.blocks != "any":
                    break  # bits are changed where nothing else fits, and not to save time
            except TileTooLargeError as error:
                if not cut.can_be_cut:
                    self.why_not = "blocks would add in another order"
                    continue
                if least is None or error.need_nbytes < least[0]:
                    least = error.need_nbytes, error.lengths
        if found is None and least is not None:
            self.why_not = self._told(*least, room_nbytes, device)
        return found

    def _cuts(self) -> list[Cut]:
        """Ask the operator's rules: the first one, and that for what it does not find to fit."""
        operands, plan = self._operands, self._operands.plan
        if settings.blocks == "off" or operands.unmanaged or operands.on_accelerator is not None:
            return []
        if plan.has_device and operands.argument("device") is not None:
            return []
        op = itself(plan.op)
        rules = [rule_of(op), ALONG.get(op)]
        if not any(rules) or any(ref.is_conj() or ref.is_neg() for ref in operands.refs):
            return []
        call = Call(op, arguments_of(plan, operands))
        first, along = (None if rule is None else cut_of(rule, call) for rule in rules)
        if first is None and rules[0] is not None and not plan.writes:
            first = WHOLE
        return [cut for cut in (first, along) if cut is not None]

    def _room_nbytes(self, device: Device) -> int:
        books, holds = self._residency.books, self._residency.holds
        with books.lock:
            books.bury()
            budget = books.ledgers[device].budget
            room = min(budget.limit_nbytes, budget.high_nbytes) - holds.held_nbytes(device)
        return room - room // SCRATCH_SHARE if device.kernels_allocate else room

    def _told(
        self, tile_nbytes: int, lengths: tuple[int, ...], room_nbytes: int, device: Device
    ) -> str:
        """Say how large the smallest tile is, and under which budget it would fit."""
        need_nbytes = tile_nbytes
        if device.kernels_allocate:
            need_nbytes += need_nbytes // (SCRATCH_SHARE - 1) + 1
        with self._residency.books.lock:
            share = min(self._residency.books.ledgers[device].budget.high_watermark, 1.0)
            need_nbytes += self._residency.holds.held_nbytes(device)
        return (
            f"even in blocks: the smallest takes {format_nbytes(tile_nbytes)} of the "
            f"{format_nbytes(room_nbytes)} there are; its lengths are "
            f"{' x '.join(map(str, lengths))}; a budget of {ceil(need_nbytes / share):,} "
            "bytes would do"
        )

    def _note(self, count: int, need_nbytes: int, keeps_bits: bool) -> None:
        plan, counts = self._operands.plan, self._residency.books.counts
        counts.blocked_op_count += 1
        counts.blocked_tile_count += count
        counts.blocked_operators[plan.name] = counts.blocked_operators.get(plan.name, 0) + 1
        order = "" if keeps_bits else ", which adds in another order"
        counts.reordered_op_count += not keeps_bits
        self._operands.in_blocks_nbytes = need_nbytes
        self._residency.books.log.note(
            "-", plan.name, f"in {count} blocks of {format_nbytes(need_nbytes)}{order}"
        )
