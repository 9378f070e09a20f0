"""What torch and Python are told of TensorRefs, as a table that `uninstall()` undoes.

Done before the first TensorRef is made. No tensor of another class meets any of it, and TensorRefs
that live need all of it: `uninstall()` takes it back when none is alive.
"""

from __future__ import annotations

import copyreg
import gc
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ..autograd import overrides
from ..base import forking
from ..base.activation import when_open
from ..interception import cpp_path, higher_order
from ..interception.onlookers import first_pass
from ..interception.onlookers.live import Panel
from ..interception.onlookers.timeline import Timeline
from ..memory import core
from ..memory.manager import tensorsManager
from ..memory.ref import RefType, TensorRef, is_ref, wiring
from . import numbers
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
    """Tell how TensorRefs travel, by their own class or by those that they are of in C++."""
    reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    kinds = (TensorRef,) if core.library is None else (torch.Tensor, torch.nn.Parameter)
    before = {kind: reducers.get(kind) for kind in kinds}
    for kind in kinds:
        reducers[kind] = reduce_for_process

    def undo() -> None:
        for kind, reducer in before.items():
            if reducer is None:
                del reducers[kind]
            else:
                reducers[kind] = reducer

    return undo


def _register_class() -> Undo:
    copyreg.pickle(RefType, lambda kind: (pkgutil.resolve_name, ("torch:Tensor",)))

    def undo() -> None:
        del copyreg.dispatch_table[RefType]

    return undo


def _follow_backward() -> Undo:
    variable: Any = torch.autograd.Variable
    original = variable._execution_engine
    if core.library is not None:
        variable._execution_engine = cpp_path.Engine()

    def undo() -> None:
        variable._execution_engine = original

    return undo


def _deny_being_fake() -> Undo:
    original = getattr(torch._C, "_is_fake_tensor", None)
    if core.library is None or original is None:
        return _nothing

    def is_fake_tensor(tensor: Any) -> bool:
        return not is_ref(tensor) and bool(original(tensor))

    torch._C._is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]

    def undo() -> None:
        torch._C._is_fake_tensor = original  # type: ignore[attr-defined]

    return undo


TABLE: tuple[Row, ...] = (
    Row("kernels", overrides.install, "autograd takes other formulas for a subclass"),
    Row(
        "control flow",
        lambda: higher_order.install(*core.KEY_NAMES),
        "operators that take functions ask a class of tensors for a rule",
        after=("kernels",),
    ),
    Row("attributes", tensor_ref.attach, "what is called on torch's class is given TensorRefs"),
    Row("numbers", numbers.attach, "C++ that fills a tensor from a list leaves out our keys"),
    Row("class", _register_class, "it has torch.Tensor's name, by which pickle would look for it"),
    Row("other processes", _register_pickling, "a TensorRef travels as a tensor does"),
    Row(
        "fake tensors",
        _deny_being_fake,
        "torch 2.15 knows its fake tensors in C++ by a key of ours",
    ),
    Row("backward", _follow_backward, "formulas in C++ fill for TensorRefs what factories make"),
)

_undo: list[Undo] = []
#: Another thread's first TensorRef waits; a row may make TensorRefs itself.
_lock = forking.RLock()


def install() -> None:
    """Tell torch of TensorRefs, row by row in the order of `after`. Twice is as good as once."""
    with _lock:
        if wiring.is_done or _undo:
            return
        rows = {row.name: row for row in TABLE}
        _undo.append(_nothing)  # from here on this thread is at it
        try:
            for name in TopologicalSorter({row.name: row.after for row in TABLE}).static_order():
                _undo.append(rows[name].do())
        except BaseException:
            _take_back()
            raise
        wiring.is_done = True


def _nothing() -> None:
    """Undo nothing."""


def uninstall() -> None:
    """Take everything back, unless a TensorRef is alive: those go on working."""
    if _is_one_alive():
        return
    wiring.is_done = False
    _take_back()


def _is_one_alive() -> bool:
    """Look for a TensorRef, also among the objects that the program has frozen (`gc.freeze`)."""
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        return any(map(is_ref, gc.get_objects()))
    finally:
        if is_frozen:
            gc.freeze()


def _take_back() -> None:
    while _undo:
        _undo.pop()()


def _tell_history(setting: Any) -> Any:
    """Tell the strategy of a forecast; those who never do so need not load what makes them."""
    from ..promises.forecast import history_of

    return history_of(setting)


tensorsManager.tell_history = _tell_history
tensorsManager.open_timeline, tensorsManager.open_panel = Timeline, Panel
when_open.append(first_pass.begin)
wiring.do = install
