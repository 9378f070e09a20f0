"""An operator passes those who look on: middlewares first and last, callbacks when it has run.

`pass_onlookers` is entered only while `watch.on`, and runs the operator by the way that it would
take without them, unless a middleware has placed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ...base.interrupts import lets_program_run
from ...base.listeners import Happening, listeners, not_torchs_own
from ...devices.base import Device
from ...memory.block import Block
from ...memory.manager import tensorsManager
from ...memory.ref import TensorRef
from ...operators.plan import OpPlan
from ..ready_path import SLOW
from .seen import SeenOperator, module_here

#: Runs an operator with its plan and arguments, on a device if one is given; returns its result.
Run = Callable[[OpPlan, tuple[Any, ...], dict[str, Any], "Device | None"], Any]

#: Timelines that are open.
recorders: list[Any] = []


class _Within(threading.local):
    """Taken in a thread in which a middleware is at work: its operators pass none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_within = _Within()


def pass_onlookers(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
    """Run an operator that somebody looks on at.

    Raises
    ------
    Exception
        What a middleware raises, with a note that names it (`not_torchs_own`): in `before`, the
        operator has not run.
    """
    middlewares = tensorsManager.middlewares.here()
    if not middlewares or _within.lock.locked():
        result = _told(plan, args, kwargs, run, None)
    else:
        result = _pass(middlewares, plan, args, kwargs, run)
    if listeners.waiting:
        deliver(plan, args, kwargs)
    return result


def _pass(middlewares: tuple[Any, ...], plan: OpPlan, args: Any, kwargs: Any, run: Run) -> Any:
    op = SeenOperator(plan, args, kwargs)
    for one in middlewares:
        if hasattr(one, "before"):
            _call(one.before, "before", op)
    op.check()
    result = op.answered if op.has_answer else _told(plan, op.args, op.kwargs, run, op.placed)
    try:
        for one in reversed(middlewares):
            if hasattr(one, "after"):
                changed = _call(one.after, "after", op, result)
                if changed is not None and changed is not result:
                    result = op.checked(changed, "after() has returned")
    except BaseException:
        note_written(plan, args, kwargs)  # it has run
        raise
    return result


@lets_program_run
def _call(method: Callable[..., Any], name: str, op: SeenOperator, *rest: Any) -> Any:
    with _within.lock:
        try:
            return method(op, *rest)
        except Exception as error:
            kind = type(getattr(method, "__self__", method)).__name__
            done = "has not run" if name == "before" else "has run"
            error.add_note(f"in the middleware {kind}.{name}, of {op.name}, which {done}")
            raise not_torchs_own(error)  # noqa: B904 - its cause is known


def _told(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, placed: Device | None
) -> Any:
    """Run an operator and tell of it, and of how long it has waited."""
    is_asked = recorders or listeners.wants("op") or listeners.wants("stall")
    if plan.is_true_view or not is_asked:
        return run(plan, args, kwargs, placed)
    books = tensorsManager.residency.books
    blocks = {ref._ttr_block for ref in tree_leaves((args, kwargs)) if isinstance(ref, TensorRef)}
    seen = [_Before.of(device, blocks) for device in books.accelerators or [books.main]]
    on_host_count = books.counts.host_op_count + sum(books.counts.host_fallbacks.values())
    result = run(plan, args, kwargs, placed)
    if result is SLOW:
        return result  # nothing has happened
    before = _at_work(seen, result)
    device, began_ns = before.device, before.now_ns
    after = device.clocks()
    took_ns = after.compute_ns - before.compute_ns
    if took_ns:  # else it has run on the host, or there is only the host's clock
        began_ns, ended_ns = after.compute_free_ns - took_ns, after.compute_free_ns
    else:
        ended_ns = device.now_ns()
    counts = tensorsManager.residency.books.counts
    was_on_host = counts.host_op_count + sum(counts.host_fallbacks.values()) > on_host_count
    happening = Happening(
        "op",
        plan.name,
        sum(block.nbytes for block in blocks),
        (books.host if was_on_host else device).name,
        "",
        began_ns,
        ended_ns,
        module=module_here(blocks),
    )
    waited_ns = device.stall_ns - before.stall_ns
    if waited_ns:
        start_ns = began_ns - waited_ns if took_ns else began_ns
        stall = _stall(happening, before.missing, start_ns, start_ns + waited_ns)
        listeners.tell(stall._replace(device=device.name))
    listeners.tell(happening)
    for recorder in list(recorders):
        recorder.operator(plan, args, kwargs, result, happening)
    return result


class _Before(NamedTuple):
    """What an accelerator was like before an operator, and which operands it did not have."""

    device: Device
    now_ns: int
    compute_ns: int
    stall_ns: int
    missing: list[Block]

    @classmethod
    def of(cls, device: Device, blocks: set[Block]) -> _Before:
        missing = [block for block in blocks if block.readable_on(device) is None]
        return cls(device, device.now_ns(), device.clocks().compute_ns, device.stall_ns, missing)


def _at_work(seen: list[_Before], result: Any) -> _Before:
    """Which of several accelerators has run an operator; where only their results tell, by those.

    The first one, if none has.
    """
    if len(seen) > 1:
        for before in seen:
            if before.device.clocks().compute_ns > before.compute_ns:
                return before
        made = [leaf._ttr_block for leaf in tree_leaves(result) if isinstance(leaf, TensorRef)]
        for before in seen:
            if any(block.readable_on(before.device) is not None for block in made):
                return before
    return seen[0]


def _stall(happening: Happening, missing: list[Block], start_ns: int, end_ns: int) -> Happening:
    """What to tell of an operator's wait: by the name of the largest block that was not there."""
    cause = f"{happening.name} waited for a copy"
    number, nbytes = 0, 0
    if missing:
        largest = max(missing, key=lambda block: block.nbytes)
        number, nbytes = largest.block_id, sum(block.nbytes for block in missing)
        cause = f"{happening.name} waited for {len(missing)} blocks"
    return happening._replace(
        kind="stall", cause=cause, start_ns=start_ns, end_ns=end_ns, block_id=number, nbytes=nbytes
    )


def deliver(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the callbacks for what an operator has done, which counts as having run if one fails."""
    try:
        listeners.deliver()
    except BaseException:
        note_written(plan, args, kwargs)
        raise


def note_written(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count versions of what an operator writes that has run, or may have, and ends in an error.

    Torch counts them once it has ended. If it has not, what autograd has saved would be taken for
    what it was.
    """
    if not plan.writes:
        return
    values = tree_leaves([plan.argument(name, args, kwargs) for name in plan.write_names])
    torch.autograd.graph.increment_version(
        [x for x in values if isinstance(x, torch.Tensor) and not x.is_inference()]
    )
