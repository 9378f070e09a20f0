"""The protocols that a SparseRef keeps beside operators: printing, pickles, copies, `data`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..interception.sparse import dispatch_sparse
from ..memory.manager import tensorsManager
from ..memory.sparse import SparseRef, alias_of_sparse, become, plain_sparse


def _repr(self: Any, *, tensor_contents: Any = None) -> str:
    """Print as a torch.Tensor prints."""
    text = repr(plain_sparse(self, tensorsManager.ownership.peek))
    node = self.grad_fn
    if node is not None:
        return f"{text[:-1]}, grad_fn=<{node.name().rsplit('::', 1)[-1]}>)"
    return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text


def _exposed_plain(self: Any, why: str) -> Tensor:
    """A plain sparse tensor over the same bytes, which stay at home while it lives."""
    return plain_sparse(self, lambda part: tensorsManager.ownership.exposed_plain(part, why))


def _numpy(self: Any, *, force: bool = False) -> Any:
    """Raise what torch says of sparse tensors; it says something else of subclasses."""
    return self._ttr_hollow.numpy(force=force)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Pickle what it stands for."""
    plain = plain_sparse(self, tensorsManager.ownership.plain_to_serialise)
    return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if not self.is_leaf:
        return Tensor.__deepcopy__(self, memo)  # torch refuses it
    if id(self) not in memo:
        with torch.no_grad():
            memo[id(self)] = self.clone()
        memo[id(self)].requires_grad_(self.requires_grad)
    return memo[id(self)]


def _data(self: Any) -> Any:
    with torch.no_grad():
        return alias_of_sparse(self)


def _set_data(self: Any, other: Any) -> None:
    become(self, other if type(other) is SparseRef else tensorsManager.adopt(other))


_surface: Any = SparseRef
_surface.__torch_dispatch__ = staticmethod(dispatch_sparse)
_surface.__repr__ = _repr
_surface.exposed_plain = _exposed_plain
_surface.numpy = _numpy
_surface.__reduce_ex__ = _reduce_ex
_surface.__deepcopy__ = _deepcopy
_surface.data = property(_data, _set_data)
