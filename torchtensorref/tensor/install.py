"""What torch and Python are told of TensorRefs, as a table that `uninstall()` undoes.

Done before the first TensorRef is made. No tensor of another class meets any of it, and TensorRefs
that live need all of it: `uninstall()` takes it back when none is alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing.reduction import ForkingPickler

from ..autograd import overrides
from ..interception import higher_order
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEY_NAME
from ..memory.ref import TensorRef, wiring
from ..regions.regions import Regions
from . import tensor_ref as tensor_ref
from .protocols import reduce_for_process

Undo = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One thing that torch, or Python, is told."""

    name: str
    #: Tells it, and returns what takes it back.
    do: Callable[[], Undo]
    reason: str
    #: Rows that have to be done before.
    after: tuple[str, ...] = ()


def _register_pickling() -> Undo:
    ForkingPickler.register(TensorRef, reduce_for_process)

    def undo() -> None:
        del ForkingPickler._extra_reducers[TensorRef]  # type: ignore[attr-defined]

    return undo


def _offer_regions() -> Undo:
    regions: Regions = tensorsManager.native
    return regions.forget


TABLE: tuple[Row, ...] = (
    Row("kernels", overrides.install, "autograd takes other formulas for a subclass"),
    Row(
        "control flow",
        lambda: higher_order.install(KEY_NAME),
        "operators that take functions ask a class of tensors for a rule",
        after=("kernels",),
    ),
    Row("other processes", _register_pickling, "a TensorRef travels as a tensor does"),
    Row("regions", _offer_regions, "a hook on module calls finds those that may run natively"),
)

_undo: list[Undo] = []


def install() -> None:
    """Tell torch of TensorRefs, row by row in the order of `after`. Twice is as good as once."""
    if wiring.is_done:
        return
    rows = {row.name: row for row in TABLE}
    wiring.is_done = True  # a row may make TensorRefs itself
    for name in TopologicalSorter({row.name: row.after for row in TABLE}).static_order():
        _undo.append(rows[name].do())


def uninstall() -> None:
    """Take everything back, unless a TensorRef is alive: those go on working."""
    gc.collect()
    if any(type(thing) is TensorRef for thing in gc.get_objects()):
        return
    wiring.is_done = False
    while _undo:
        _undo.pop()()


tensorsManager.native = Regions(tensorsManager)
wiring.do = install
