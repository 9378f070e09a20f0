"""The slow path: an operator about which something has to be decided, in six phases.

`SlowPath.run` is all of it, in the order of the phases. Each has its file, but for commit and run,
which are here:

1. analyse (`operands.py`): what is read and written;
2. place (`placement.py`): where it runs; from there on `fallback.py` begins again where it cannot;
3. fetch (`staging.py`): the operands are brought there, evicting what is in the way, and held;
4. commit: what is about to be written is current there and stale elsewhere, whatever happens;
5. run: the kernel, on plain tensors;
6. wrap (`results.py`): what was written, views and fresh results as the program's tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.interrupts import holds_operands
from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..memory.op_times import OpCost, Timing
from ..memory.plain_views import make_ref, plain_on
from ..memory.ref import TensorRef
from ..memory.residency import Residency
from ..memory.states import INVALID
from ..operators.costs import operator_cost
from ..operators.plan import OpPlan
from .blocks import Blocks
from .device_labels import run_on_meta
from .fallback import Fallback
from .handlers import HANDLERS
from .operands import Operands, analyse
from .placement import place
from .read_alone import ReadAlone, groups_of
from .reference_check import ReferenceCheck
from .results import wrap
from .staging import Staged, fetch

_SetExcluded = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C._dispatch_key_parse("Conjugate")
_NEGATIVE = torch._C._dispatch_key_parse("Negative")


class SlowPath:
    """One call of an operator on its way through the six phases."""

    __slots__ = ("args", "kwargs", "manager", "placed", "plan")

    def __init__(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        manager: TensorsManager,
        placed: Device | None = None,
    ) -> None:
        self.plan = plan
        #: Where a middleware wants it to run.
        self.placed = placed
        self.args = args
        self.kwargs = kwargs
        self.manager = manager

    @holds_operands
    def run(self) -> Any:
        """Take the operator through the phases and return its result."""
        residency = self.manager.residency
        residency.repair()
        residency.holds.begin_operator()
        try:
            return self._run()
        finally:
            residency.holds.end_operator()

    @holds_operands
    def _run(self) -> Any:
        plan, manager = self.plan, self.manager
        promises = manager.promises
        if promises is not None and promises.takes(plan, self.args, self.kwargs):
            result = promises.run(plan, self.args, self.kwargs)
            if result is not NotImplemented:
                return result
        if plan.special is not None:
            result = HANDLERS[plan.special](plan, self.args, self.kwargs)
            if result is not NotImplemented:
                return result

        if plan.has_device:
            result = run_on_meta(plan, self.args, self.kwargs)
            if result is not NotImplemented:
                return result
        operands = analyse(plan, self.args, self.kwargs, manager)
        if operands.has_other_subclass:
            return NotImplemented
        if plan.is_true_view and isinstance(self.args[0], TensorRef):
            return view(operands, manager.residency)
        alone = ReadAlone.of(operands, manager)
        if alone is not None:
            operands = alone.operands
        try:
            device = place(operands, manager, self.placed)
            note_operator(operands, device, manager.residency)
            if alone is not None:
                # Not by way of an argument: where torch has compiled something, who calls a
                # function holds those, and pieces that are in a pack by now would stay.
                operands = alone.brought_to(device, self._run_on)
            return self._run_placed(operands, device)
        finally:
            if alone is not None:
                alone.release()

    def _run_placed(self, operands: Operands, device: Device) -> Any:
        manager, born = self.manager, list[Block]()
        blocks = Blocks(operands, manager, self._run_on, born)
        fallback = Fallback(operands, manager, lambda d: self._run_on(operands, d, born), blocks)
        result = fallback.run(device)
        # Not after an error, which may have come halfway: it would be lost behind the next one.
        after_operator(operands, device, born, manager)
        return result

    def _run_on(self, operands: Operands, device: Device, born: list[Block]) -> Any:
        """Run the phases from 3 on; append the blocks of fresh results to `born`."""
        with fetch(operands, device, self.manager) as staged:
            check = before_kernel(staged)
            timing = begin_timing(staged)
            # First: an exception may come when part of the operands has been written.
            commit(staged)
            try:
                try:
                    out = run_kernel(staged)
                    staged.has_run()
                    operands.has_written = bool(operands.written)
                finally:
                    count_versions(operands)
                    confirm(staged)
                after_kernel(staged, out, check, timing)
                return wrap(out, staged, born)
            except BaseException:
                staged.take_back_sizes()
                raise


# -- phases 4 and 5: commit, run ----------------------------------------------------------------


def before_kernel(staged: Staged) -> ReferenceCheck | None:
    """Tell the device what the kernel will read and write; copy its operands for `TTR_SHADOW`."""
    plan, device, residency = staged.operands.plan, staged.device, staged.manager.residency
    residency.tell_operator(device, staged.held, staged.operands.written)
    check = ReferenceCheck(plan, staged.args, staged.kwargs) if settings.shadow else None
    if settings.trace >= 3:
        residency.books.log.note("-", plan.name, f"on {device.name}")
    return check


def run_kernel(staged: Staged) -> Any:
    """Run the operator on plain tensors."""
    op = staged.operands.plan.op
    if any(plain.is_complex() for plain in staged.plain_of.values()):
        # Inside dispatch torch skips the keys above it, so a kernel that conjugates lazily and
        # calls another operator would read the bytes as they are: linalg_pinv was wrong so.
        with _SetExcluded(_CONJUGATE, False), _SetExcluded(_NEGATIVE, False):
            return op(*staged.args, **staged.kwargs)
    return op(*staged.args, **staged.kwargs)


def commit(staged: Staged) -> None:
    """Make what is written current on the device, and stale elsewhere."""
    for block in staged.written:
        staged.manager.residency.copier.written(block, staged.device)


def confirm(staged: Staged) -> None:
    """Look whether what has been written is still current nowhere else."""
    for block in staged.written:
        staged.manager.residency.copier.has_been_written(block, staged.device)


def count_versions(operands: Operands) -> None:
    """Count the versions of what is written in lists, which torch does not."""
    if operands.plan.counts_lists:
        operands.plan.count_writes(operands.args, operands.kwargs)


def begin_timing(staged: Staged) -> Timing | None:
    """Begin to measure the kernel, where the strategy says where operators run."""
    operands, residency = staged.operands, staged.manager.residency
    if not residency.feed.places:
        return None
    cost = residency.times.costs.get(operands.sizes)
    main = residency.books.main
    return residency.times.begin(operands.plan.kind, cost, staged.device, main)


def after_kernel(
    staged: Staged, out: Any, check: ReferenceCheck | None, timing: Timing | None
) -> None:
    """Compare with the reference; let a simulated device spend the time; copy back to operands."""
    plan, device = staged.operands.plan, staged.device
    if check is not None:
        check.compare(out, device)
    has_own_clock = not (device.has_virtual_clock or device.is_host)
    if timing is not None or not has_own_clock:
        cost = OpCost(*operator_cost(plan, staged.args, staged.kwargs, out))
        if not has_own_clock:
            flops, nbytes, dtype = cost
            device.after_operator(
                staged.reads, staged.writes, flops=flops, nbytes=nbytes, dtype_name=dtype
            )
        if timing is not None:
            timing.end(plan.kind, cost)
            staged.manager.residency.times.remember(staged.operands.sizes, cost)
    if device.has_virtual_clock and plan.answers:
        device.record().synchronize()  # the program reads a number: the host waits for it
    if staged.operands.on_accelerator is not None:
        staged.operands.on_accelerator.copy_back(staged.operands.written_arguments())


# -- around the phases --------------------------------------------------------------------------


def view(operands: Operands, residency: Residency) -> Any:
    """Make a view: address arithmetic, for which any readable replica will do."""
    ref = operands.args[0]
    block: Block = ref._ttr_block
    while True:
        with residency.books.lock:
            device = _where_there_is_room(block, operands.accelerator)
            if device is not None:
                out = operands.plan.op(plain_on(ref, device), *operands.args[1:], **operands.kwargs)
                if block.ready is None and not device.is_host:
                    residency.readiness.set_ready(block, device)
                break
        residency.copier.bring_home(block)
    if type(out) in (list, tuple):
        return type(out)(make_ref(part, block, device, ref.device) for part in out)
    return make_ref(out, block, device, ref.device)


def _where_there_is_room(block: Block, accelerator: Device) -> Device | None:
    """Return the accelerator if the block has bytes there, else any device where it has.

    They may be on their way: a view reads none of them.
    """
    found = [device for device, r in block.replicas.items() if r.state is not INVALID]
    return accelerator if accelerator in found else next(iter(found), None)


def note_operator(operands: Operands, device: Device, residency: Residency) -> None:
    """Count an operator that is about to run, and tell those who follow the program."""
    residency.note_operator(
        device,
        [block for block in operands.blocks if block not in operands.pieces],
        operands.written,
        operands.plan.kind,
        instead_of=operands.instead_of,
        parts=groups_of(operands.plan, operands.args, operands.kwargs),
    )
    if residency.recorder is not None:
        residency.recorder.note(operands, device)


def after_operator(
    operands: Operands, device: Device, born: list[Block], manager: TensorsManager
) -> None:
    """Let the strategy evict, write back and prefetch; tell it which blocks have died."""
    if not device.is_host:
        whole_nbytes = operands.nbytes + sum(block.nbytes for block in born)
        need_nbytes = operands.in_blocks_nbytes or whole_nbytes
        manager.residency.books.counts.costs.note_operator(operands.plan.name, need_nbytes)
    manager.residency.feed.tell_deaths()
    if not operands.accelerator.is_host:
        is_there = manager.residency.feed.spreads and not device.is_host
        where = operands.instead_of or (device if is_there else operands.accelerator)
        manager.residency.after_operator(where, [*operands.blocks, *born])
    if settings.check >= 2:
        manager.check()
