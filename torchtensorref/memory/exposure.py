"""Bytes that have left us: who holds them outside, and where they are now."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from ..devices.base import Device


#: Users of a storage that a twin was made of: the twin's own hold on it, and the exposure's.
TWIN_USERS = 2
#: Why bytes live outside that came from there.
SHARED = "plain tensors share it"


class Exposure:
    """Bytes of a block that also live outside: in an array, a plain tensor, a raw pointer.

    What is outside holds a storage object of its own (a twin: another object, the same memory), so
    the number of users of that object tells whether anyone outside still holds it.
    """

    __slots__ = ("address", "device", "forever", "own_count", "start", "storage", "why")

    def __init__(
        self,
        device: Device,
        storage: torch.UntypedStorage | None,
        why: str,
        *,
        own_count: int = 1,
        forever: bool = False,
    ) -> None:
        #: Where the bytes are held; what other devices have is a copy for one operator.
        self.device = device
        self.storage = storage
        #: Where its bytes began when it was looked at last: who holds it may move them. And where
        #: in it the block begins, once they have moved.
        self.address = storage.data_ptr() if storage is not None and device.is_host else None
        self.start: int | None = None
        #: Users of the storage object that are ours.
        self.own_count = own_count
        #: A raw pointer, or memory that came from outside: nobody can follow those.
        self.forever = forever
        self.why = why

    @property
    def alive(self) -> bool:
        """Whether somebody outside may still read or write the bytes."""
        return self.forever or self.held

    @property
    def held(self) -> bool:
        """Whether the storage that was handed out is still there, raw pointers left aside."""
        if self.storage is None:
            return False
        users: int = torch._C._storage_Use_Count(self.storage._cdata)
        # Torch keeps one Python object per storage: whoever was given that shares ours, and is not
        # among the users.
        own_count = _OURS + (users > 1) * _TORCHS_OWN
        return users > self.own_count or self._references() > own_count

    def _references(self) -> int:
        """Count who holds the object of the storage: we do, torch does, and who was given it."""
        return sys.getrefcount(self.storage)

    def is_over(self, storage: torch.UntypedStorage, device: Device) -> bool:
        """Whether what is held is a block's storage there, and not a larger one around it."""
        held = self.storage
        return self.device is device and held is not None and held.data_ptr() == storage.data_ptr()


def _references_of(make: Callable[[], Any]) -> int:
    nowhere = cast("Device", SimpleNamespace(is_host=False))
    return Exposure(nowhere, make(), "")._references()


_a_tensor = torch._C._VariableFunctions.empty((1,))
#: References that an exposure has by itself. Counted where all are counted: from Python 3.14 on
#: what a variable hands to a call has no further one for that.
_OURS = _references_of(object)
#: References of torch's own to the object of a storage that has users in C++: 1, in torch 2.9 none.
_TORCHS_OWN = _references_of(partial(torch._C.TensorBase.untyped_storage, _a_tensor)) - _OURS
