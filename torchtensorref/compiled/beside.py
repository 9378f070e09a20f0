"""A call of a compiled function beside another thread's: plain tensors hang where it looks.

The other thread may be waiting for this one, at a barrier inside the function, so nobody waits
here. This call is intercepted, and takes each plain tensor that the other one has put somewhere
for the TensorRef that it stands for, in whatever operator.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base.interrupts import lets_program_run
from ..memory.adoption import stands_for
from ..memory.ref import TensorRef
from .tensor_tree import Exchange

#: Threads that are in such a call: what is compiled inside one is intercepted, too.
_threads: set[int] = set()


def is_beside() -> bool:
    """Whether this thread is in such a call."""
    return threading.get_ident() in _threads


class Beside(TorchFunctionMode):
    """Has operators see the TensorRefs behind what another thread's native run has put somewhere.

    Parameters
    ----------
    exchanges : list of Exchange
        Of that run, for arguments and closures; parameters know by themselves.
    """

    def __init__(self, exchanges: list[Exchange]) -> None:
        super().__init__()
        self._exchanges = list(exchanges)

    @lets_program_run
    def run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it, and return what it gives, with TensorRefs at the top of it."""
        ident = threading.get_ident()
        _threads.add(ident)
        try:
            with self:
                out = call(*args, **kwargs)
        finally:
            _threads.discard(ident)
        return tuple(map(self._ref_of, out)) if type(out) is tuple else self._ref_of(out)

    @lets_program_run
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator with the TensorRefs instead."""
        given = args, kwargs or {}
        if any(self._ref_of(leaf) is not leaf for leaf in tree_leaves(given)):
            given = tree_map_only(torch.Tensor, self._ref_of, given)
        return func(*given[0], **given[1])

    def _ref_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, TensorRef):
            return value
        for exchange in self._exchanges:
            plain, ref = exchange.known.get(id(value), (None, None))
            if plain is value and ref is not None:
                return ref
        ref = stands_for(value)
        return value if ref is None else ref
