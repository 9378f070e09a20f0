"""An operator that reads a few rows of a table at home: they move alone, and it runs where they go.

What it reads is packed at home, as pieces of operators in blocks are; the pack is fetched, and the
operator runs on the accelerator with the pack instead of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.options import settings
from ..devices.base import Device
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.manager import TensorsManager
from ..memory.plain_views import plain_on
from ..memory.residency import Residency
from ..operators.blocked.taken import TAKES
from ..operators.substitutes import itself
from .block_plan import arguments_of
from .operands import Operands, analyse
from .pieces import gathered_piece


def run_on_parts(
    operands: Operands,
    manager: TensorsManager,
    phases: Callable[[Operands, Device, list[Block]], Any],
    born: list[Block],
) -> Any:
    """Run an operator on the rows of its table that it reads.

    Returns
    -------
    Any
        The operator's result; NotImplemented where it reads as much as the table has, where there
        is no room, or the call is the program's own mistake. Then nothing has changed.
    """
    plan, device = operands.plan, operands.accelerator
    take = TAKES.get(itself(plan.op))
    if (
        take is None
        or settings.blocks == "off"
        or (plan.number, operands.dtype) in manager.unsupported
        or any(ref.is_conj() or ref.is_neg() for ref in operands.refs)
    ):
        return NotImplemented
    residency = manager.residency
    host = residency.books.host
    held = residency.acquire(host, operands.blocks, [], 0)
    try:
        table = operands.table
        most = table._ttr_block.nbytes / max(table.element_size(), 1)
        given = arguments_of(plan, operands)
        call = {name: _at_home(value, operands, host) for name, value in given.items()}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            made = take(call, most)
    except (IndexError, RuntimeError, TypeError):
        return NotImplemented  # the program's own mistake: raised where it runs at home
    finally:
        residency.release(held)
        with residency.books.lock:
            for block in operands.blocks:
                residency.readiness.settle_at_home(block)
    if made is None:
        return NotImplemented
    label = operands.label or torch.device("cpu")
    names = plan.argument_names[: len(operands.args)]
    values = {**dict(zip(names, operands.args, strict=True)), **operands.kwargs}
    values |= {name: _piece(value, label, residency) for name, value in made.items()}
    args = tuple(values.pop(name) for name in names)
    try:
        out = phases(analyse(plan, args, values, manager), device, born)
    except SHORTAGES:
        return NotImplemented
    except NotImplementedError:
        if device.has_host_kernels:
            raise  # the host has the same kernels
        return NotImplemented
    residency.books.counts.parts_op_count += 1
    return out


def _at_home(value: Any, operands: Operands, host: Device) -> Any:
    if isinstance(value, (list, tuple)):
        return [_at_home(part, operands, host) for part in value]
    ref = operands.ref_of(value) if isinstance(value, torch.Tensor) else None
    return value if ref is None else plain_on(ref, host)


def _piece(value: Any, label: torch.device, residency: Residency) -> Any:
    if isinstance(value, list):
        return [None if part is None else _piece(part, label, residency) for part in value]
    return gathered_piece(value, label, residency).ref
