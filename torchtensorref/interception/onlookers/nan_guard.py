"""A middleware that names the first operator that makes a NaN."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...base.errors import NanError
from ...base.middlewares import Middleware
from ...memory.manager import tensorsManager
from ...memory.sparse import SparseRef
from ...operators.layouts import SPARSE, parts_of
from .seen import SeenOperator

#: Their results hold what was in memory before, until somebody writes them.
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize")
#: At whose numbers torch cannot look one by one.
_OPAQUE = (torch._mkldnn,)  # type: ignore[attr-defined]
_PACKED = (getattr(torch, "float4_e2m1fn_x2", None),)


def _lacks_values(tensor: torch.Tensor) -> bool:
    """Whether it is metadata, or what is asked about it is promised, and may be made up."""
    promises = tensorsManager.promises
    return tensor.is_meta or (promises is not None and promises.take_part(tensor))


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the elements: of a sparse one, those that are not zero."""
    if isinstance(tensor, SparseRef):
        values: torch.Tensor = tensor._ttr_parts[-1]
        return values
    return parts_of(tensor)[-1] if tensor.layout in SPARSE else tensor


def _numbers_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of numbers that may be NaN, as far as torch can look at them."""
    found = []
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.layout in _OPAQUE:
            continue
        tensor = _values_of(leaf)
        is_bare = tensor.dtype in _PACKED or _lacks_values(tensor)
        if is_bare or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        found.append(tensor if tensor.element_size() > 1 else tensor.float())
    return found


class NanGuard(Middleware):
    """Raise NanError at the first operator that makes a NaN of operands without one.

    Parameters
    ----------
    infinite : bool, optional
        Infinities count, too.

    Notes
    -----
    It looks at each floating result, and before at what is written in place: about three more
    operators for each one. What has no values (promises, metadata) is not looked at, nor what a
    promise gets when it is fulfilled, nor nested, MKL-DNN and packed tensors.
    """

    def __init__(self, *, infinite: bool = False) -> None:
        self._is_bad = (lambda t: ~torch.isfinite(t)) if infinite else torch.isnan
        #: Operators at work that had one before, in what they write.
        self._excused: weakref.WeakSet[SeenOperator] = weakref.WeakSet()

    def before(self, op: SeenOperator) -> None:
        """Look at what is written in place or in part."""
        if not op.name.startswith(_UNWRITTEN) and self._any(op.rewritten()):
            self._excused.add(op)

    def after(self, op: SeenOperator, result: Any) -> None:
        """Look at the result, and at the operands if it is bad."""
        if op.name.startswith(_UNWRITTEN) or not self._any(result):
            return
        if op in self._excused or self._any(op.read()):
            return
        where = f" in {op.module}" if op.module else ""
        of = ", ".join(f"{o.name} {list(o.shape)} {o.dtype}" for o in op.operands) or "none of ours"
        raise NanError(
            f"{op.name}{where} has made {self._count(result)} NaN or infinite numbers of operands "
            f"without one: {of}. Look at the values there.",
            operator=op.name,
            module=op.module,
        )

    def _bad_in(self, value: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._is_bad(tensor) for tensor in _numbers_in(value)]

    def _any(self, value: Any) -> bool:
        return any(bool(bad.any()) for bad in self._bad_in(value))

    def _count(self, value: Any) -> int:
        return sum(int(bad.sum()) for bad in self._bad_in(value))
