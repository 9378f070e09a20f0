"""A middleware that names the first operator that makes a NaN."""

from __future__ import annotations

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


def _lacks_values(tensor: torch.Tensor) -> bool:
    """Whether it is metadata, or what is asked about it is promised, and may be made up."""
    promises = tensorsManager.promises
    return tensor.is_meta or (promises is not None and promises.take_part(tensor))


class NanGuard(Middleware):
    """Raise NanError at the first operator that makes a NaN of operands without one.

    Parameters
    ----------
    infinite : bool, optional
        Infinities count, too.

    Notes
    -----
    It looks at each floating result: about three more operators for each one. What has no values
    (promises, metadata) is not looked at, nor what a promise gets when it is fulfilled.
    """

    def __init__(self, *, infinite: bool = False) -> None:
        self._is_bad = (lambda t: ~torch.isfinite(t)) if infinite else torch.isnan

    def after(self, op: SeenOperator, result: Any) -> None:
        """Look at the result, and at the operands if it is bad."""
        if op.name.startswith(_UNWRITTEN) or not self._any(result):
            return
        if self._any(op.read()):
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
        leaves = [_values_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        with torch.no_grad():
            return [
                self._is_bad(leaf)
                for leaf in leaves
                if (leaf.is_floating_point() or leaf.is_complex()) and not _lacks_values(leaf)
            ]

    def _any(self, value: Any) -> bool:
        return any(bool(bad.any()) for bad in self._bad_in(value))

    def _count(self, value: Any) -> int:
        return sum(int(bad.sum()) for bad in self._bad_in(value))


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the elements: of a sparse one, those that are not zero."""
    if isinstance(tensor, SparseRef):
        values: torch.Tensor = tensor._ttr_parts[-1]
        return values
    return parts_of(tensor)[-1] if tensor.layout in SPARSE else tensor
