"""Host bytes that copies may still be reading: before a write, those are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...base import forking
from ..storages import storage_of
from .mirrors import Mirrors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HostReaders", "Reader", "host_readers"]


class Reader(Protocol):
    """A copy that reads host bytes."""

    def has_read(self) -> bool:
        """Whether it needs the source no more. Never blocks."""
        ...

    def finish_reading(self) -> None:
        """Make the host wait until it needs the source no more."""
        ...


class HostReaders:
    """Which host bytes are being read by copies, and which have a page-locked mirror.

    Attributes
    ----------
    mirrors : Mirrors
        Page-locked copies of host bytes, filled or to be filled.

    Notes
    -----
    A copy from page-locked memory is issued and reads its source later, when compute and the link
    get to it. An operator on the host, or a user with an array, could write those bytes before
    that, so `about_to_change` is called first. Only copies that read late are noted, so the check
    costs one look at an empty dictionary where there is no accelerator.
    """

    def __init__(self) -> None:
        self._lock = forking.Lock()
        self._readers: dict[int, list[Reader]] = {}
        self.mirrors = Mirrors()

    @property
    def are_watched(self) -> bool:
        """Whether writing any bytes at home could matter to a copy."""
        return bool(self._readers) or bool(self.mirrors)

    def note_reader(self, source: Tensor, reader: Reader) -> None:
        """Remember that a copy reads a host tensor from its first byte."""
        address = source.data_ptr()
        with self._lock:
            if len(self._readers) >= 64:
                self._drop_finished()
            left = [old for old in self._readers.get(address, ()) if not old.has_read()]
            self._readers[address] = [*left, reader]

    def forget_finished(self) -> None:
        """Drop the copies that have read their source; each holds its device."""
        with self._lock:
            self._drop_finished()

    def _drop_finished(self) -> None:
        for address in list(self._readers):
            left = [reader for reader in self._readers[address] if not reader.has_read()]
            if left:
                self._readers[address] = left
            else:
                del self._readers[address]

    def _of(self, address: int, nbytes: int) -> list[tuple[int, Reader]]:
        """Return the copies that read from within a range, and where each begins (lock held).

        A part of a block that is moved alone begins somewhere in it.
        """
        end = address + max(nbytes, 1)
        return [
            (start, reader)
            for start, readers in self._readers.items()
            if address <= start < end
            for reader in readers
        ]

    def _forget(self, address: int, reader: Reader) -> None:
        with self._lock:
            left = [other for other in self._readers.get(address, ()) if other is not reader]
            if left:
                self._readers[address] = left
            else:
                self._readers.pop(address, None)

    def about_to_change(self, base: Tensor) -> None:
        """Wait until no copy reads these bytes, and forget their mirror.

        To be called before they are written, freed, or handed to code that may do either.
        """
        if not self.are_watched:
            return
        storage = storage_of(base)
        address = storage.data_ptr()
        with self._lock:
            readers = self._of(address, storage.nbytes())
        for each, reader in readers:
            reader.finish_reading()
            self._forget(each, reader)
        self.mirrors.drop_within(address, storage.nbytes())

    def about_to_be_filled(self, destination: Tensor, device: object) -> None:
        """Forget the mirror of bytes that a copy from a device is about to replace.

        Copies into that same device are not waited for: they came before what it now sends back.
        """
        if not self.are_watched:
            return
        address = destination.data_ptr()
        with self._lock:
            readers = self._of(address, destination.nbytes)
        for _, reader in readers:
            if getattr(reader, "device", None) is not device:
                reader.finish_reading()
        self.mirrors.drop_within(address, destination.nbytes)

    def have_changed(self, base: Tensor) -> None:
        """Forget the mirror of bytes that have been written: a copy may have begun to fill one."""
        if self.mirrors:
            storage = storage_of(base)
            self.mirrors.drop_within(storage.data_ptr(), storage.nbytes())


#: Of this process: all accelerators copy from the same host.
host_readers = HostReaders()
