"""Page-locked copies of host bytes, which copies to an accelerator fill on their way."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ...base import forking
from ..storages import bytes_of, storage_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Mirror", "Mirrors"]


class Mirror:
    """Page-locked memory that has, or is to have, the bytes of one base.

    Parameters
    ----------
    owner : Tensor
        The base whose bytes it is for; it is not kept alive.
    memory : Tensor
        As many bytes, page-locked.
    may_be_home : bool, optional
        It is a storage of its own, so that the block may be at home there instead.

    Attributes
    ----------
    is_filled : bool
        The copy that fills it has read all of the source. That alone does not make the bytes
        valid: somebody may have written the source since. Ask `Mirrors.of`.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "address",
        "is_filled",
        "is_taken",
        "may_be_home",
        "memory",
    )

    def __init__(self, owner: Tensor, memory: Tensor, *, may_be_home: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self.address = storage_of(owner).data_ptr()
        self.memory = memory
        self.may_be_home = may_be_home
        self.is_taken = self.is_filled = False

    def is_of(self, source: Tensor) -> bool:
        """Whether a host tensor still is what it was made for: an address alone may come again."""
        owner = self._owner()
        return (
            owner is not None
            and storage_of(owner).data_ptr() == self.address == source.data_ptr()
            and self.memory.numel() == source.numel()
        )

    def filled(self) -> None:
        """Note that the copy that fills it has read all of the source."""
        self.is_filled = True

    def was_not_filled(self) -> None:
        """Leave it to the next copy: the one that took it has failed."""
        self.is_taken = False


class Mirrors:
    """The mirrors of this process, by the addresses of their sources.

    Notes
    -----
    One dictionary has them from the moment there is room for the bytes until somebody writes the
    source, or it dies. So whoever ends a mirror need not know whether it is being filled: what is
    not found here any more is of no use, however full. Each method is one atomic step of a
    dictionary, so that finalizers may call it; but `take`, which is for one copy only.
    """

    def __init__(self) -> None:
        self._mirrors: dict[int, Mirror] = {}
        self._taking = forking.Lock()

    def __bool__(self) -> bool:
        return bool(self._mirrors)

    def offer(self, owner: Tensor, mirror: Mirror) -> None:
        """Have a mirror filled by the next copy of its source."""
        self._mirrors[mirror.address] = mirror
        weakref.finalize(owner, self._drop_one, weakref.ref(mirror)).atexit = False

    def take(self, source: Tensor) -> Mirror | None:
        """Give a mirror away to the one copy that will fill it."""
        with self._taking:
            mirror = self._mirrors.get(source.data_ptr())
            if mirror is None or mirror.is_taken or not mirror.is_of(source):
                return None
            mirror.is_taken = True
            return mirror

    def has_one_for(self, owner: Tensor) -> bool:
        """Whether a base has a mirror, filled or to be filled."""
        mirror = self._mirrors.get(storage_of(owner).data_ptr())
        return mirror is not None and mirror.is_of(bytes_of(owner))

    def being_filled(self, owner: Tensor) -> Mirror | None:
        """Return the mirror of a base that a copy fills, or has filled."""
        mirror = self._mirrors.get(storage_of(owner).data_ptr())
        return mirror if mirror is not None and mirror.is_taken else None

    def of(self, source: Tensor) -> Mirror | None:
        """Return the mirror that has the same bytes as a source, if there is one."""
        if not self._mirrors:
            return None
        mirror = self._mirrors.get(source.data_ptr())
        return mirror if mirror is not None and mirror.is_filled and mirror.is_of(source) else None

    def drop(self, address: int) -> None:
        """Forget a mirror, filled or not: its memory goes when the last copy of it has ended."""
        self._mirrors.pop(address, None)

    def drop_within(self, address: int, nbytes: int) -> None:
        """Forget those of sources that have a byte in a range: a part of a block may have one."""
        end = address + max(nbytes, 1)
        for start, mirror in list(self._mirrors.items()):
            if start < end and address < start + mirror.memory.numel():
                self.drop(start)

    def _drop_one(self, reference: weakref.ref[Mirror]) -> None:
        mirror = reference()  # weak: what was dropped before gives its memory back at once
        if mirror is not None and self._mirrors.get(mirror.address) is mirror:
            self.drop(mirror.address)
