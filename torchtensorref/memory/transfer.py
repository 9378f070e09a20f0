"""Copies between devices: the only place where bytes of blocks are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..base.errors import TransferError
from ..base.options import settings
from ..devices.base import Device, Event
from ..devices.host.readers import host_readers
from ..devices.storages import as_bytes, bytes_of, empty_bytes, part_of, storage_of
from .block import Replica
from .ledger import given_up
from .names import names

_is_profiled = torch._C._autograd._profiler_enabled

#: A copy that fails is tried again so often; links hiccup, and the source is untouched.
ATTEMPTS = 3


def wait_if_issued(device: Device, error: BaseException | None = None) -> None:
    """Wait for a device where an error leaves it open whether a copy was issued, and of which."""
    if not isinstance(error, TransferError):
        with suppress(RuntimeError):  # a card that is broken raises for ever, and copies nothing
            device.synchronize()


@dataclass
class TransferCounts:
    """What has been copied since the counts were last reset."""

    fetched_nbytes: int = 0
    prefetched_nbytes: int = 0
    written_back_nbytes: int = 0
    fetch_count: int = 0
    prefetch_count: int = 0
    write_back_count: int = 0
    retry_count: int = 0
    #: Of those fetched: from another accelerator, past the host.
    peer_nbytes: int = 0
    peer_count: int = 0
    #: To each accelerator, and from it home, by its name.
    nbytes_to: dict[str, int] = field(default_factory=dict)
    nbytes_from: dict[str, int] = field(default_factory=dict)
    #: From each home to be looked at, where nothing stays of it.
    peeked_from: dict[str, int] = field(default_factory=dict)
    peek_count: int = 0


class Look(NamedTuple):
    """What somebody wants to see of a block: `parts` of the bytes from `start` to `stop`.

    What is between the parts is undefined, and is read by nobody.
    """

    start: int
    stop: int
    #: Of each its first byte, and the one behind its last.
    parts: Sequence[tuple[int, int]]

    @classmethod
    def at_range(cls, start: int, stop: int) -> Look:
        """Look at all bytes of a range."""
        return cls(start, stop, ((start, stop),))


#: Asked only if something has to be copied; None is all of the block.
Looking = Callable[[], Look | None]


class Transfer:
    """Issues copies, tries failed ones again, and counts them. It changes no state of a replica."""

    def __init__(self) -> None:
        self.counts = TransferCounts()

    def fetch(self, home: Replica, replica: Replica, *, ahead: bool = False) -> Event:
        """Issue the copy of a block's bytes from home to an accelerator.

        Raises
        ------
        TransferError
            The copy failed `ATTEMPTS` times; the replica's bytes are undefined, home is untouched.
        """
        device, base = replica.device, replica.base
        source = as_bytes(home.base)
        was_exposed = is_exposed(home)
        if was_exposed:
            host_readers.have_changed(home.base)  # or may have, by now: no mirror is trusted

        event = self._issue(
            "prefetch" if ahead else "fetch",
            replica,
            lambda: device.copy_in(source, base, after=device.available(base)),
        )
        if device.prefers_page_locked:
            self._mind_source(home, device, event, was_exposed=was_exposed)
        self._count(event, replica, ahead=ahead)
        return event

    def _count(self, event: Event, replica: Replica, *, ahead: bool) -> None:
        if settings.sync:
            event.synchronize()
        to, name = self.counts.nbytes_to, replica.device.name
        to[name] = to.get(name, 0) + replica.nbytes
        if ahead:
            self.counts.prefetched_nbytes += replica.nbytes
            self.counts.prefetch_count += 1
        else:
            self.counts.fetched_nbytes += replica.nbytes
            self.counts.fetch_count += 1

    def fetch_across(self, source: Replica, replica: Replica, *, ahead: bool = False) -> Event:
        """Issue the copy of a block's bytes from one accelerator to another one.

        Raises
        ------
        TransferError
            The copy failed `ATTEMPTS` times; the replica's bytes are undefined, the source's whole.
        """
        device, giver = replica.device, source.device
        event = self._issue(
            "fetch across",
            replica,
            lambda: device.copy_across(
                giver, source.base, replica.base, after=device.available(replica.base)
            ),
        )
        self._count(event, replica, ahead=ahead)
        self.counts.peer_nbytes += replica.nbytes
        self.counts.peer_count += 1
        return event

    @staticmethod
    def _mind_source(home: Replica, device: Device, event: Event, *, was_exposed: bool) -> None:
        """Let a copy finish reading bytes that others may write unseen; page-lock what recurs."""
        may_be_written = was_exposed or is_exposed(home)
        finish = getattr(event, "finish_reading", None)
        if may_be_written and finish is not None:
            finish()
        device.wish_page_locked(home.base, may_mirror=not may_be_written)

    def write_back(self, replica: Replica, home: Replica) -> Event:
        """Issue the copy of a block's bytes from an accelerator to home.

        Raises
        ------
        TransferError
            The copy failed `ATTEMPTS` times; home's bytes are undefined, the replica is untouched.
        """
        device = replica.device
        destination = as_bytes(home.base)
        event = self._issue(
            "write_back",
            replica,
            lambda: device.copy_out(replica.base, destination),
        )
        if settings.sync:
            event.synchronize()
        self.counts.written_back_nbytes += replica.nbytes
        come_from = self.counts.nbytes_from
        come_from[device.name] = come_from.get(device.name, 0) + replica.nbytes
        self.counts.write_back_count += 1
        return event

    def peek(self, replica: Replica, look: Looking | None) -> tuple[torch.Tensor, int]:
        """Return a host copy of what is looked at of a replica's bytes, and where it begins there.

        Raises
        ------
        TransferError
            A copy failed `ATTEMPTS` times.
        """
        if replica.block is None:
            raise given_up(replica)
        wanted = look() if look is not None else None
        first, end, parts = wanted or Look.at_range(0, replica.nbytes)
        copied = empty_bytes(end - first)
        for start, stop in parts:
            self._copy_part(replica, start, part_of(copied, start - first, stop - start))
        return copied, first

    def _copy_part(self, replica: Replica, start: int, destination: torch.Tensor) -> None:
        device, counts, nbytes = replica.device, self.counts, destination.nbytes
        began_ns = device.now_ns()
        self._retry(lambda: device.copy_out(replica.base, destination, start=start)).synchronize()
        device.note_wait(began_ns)
        counts.peeked_from[device.name] = counts.peeked_from.get(device.name, 0) + nbytes
        counts.peek_count += 1

    def _issue(self, kind: str, replica: Replica, issue: Callable[[], Event]) -> Event:
        """Issue a copy, a range of its own in the traces of `torch.profiler` if one is at work."""
        if not _is_profiled():
            return self._retry(issue)
        name = names.of_block(replica.block_id)
        # Torch's `record_function` imports a module where it is used first; with `with_stack` names
        # of what ran there are read after they are gone, and may be no text.
        with torch._C._profiler._RecordFunctionFast(f"ttr::{kind} {name}"):
            return self._retry(issue)

    def _retry(self, issue: Callable[[], Event]) -> Event:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return issue()
            except TransferError:
                if attempt == ATTEMPTS:
                    raise
                self.counts.retry_count += 1
        raise AssertionError("unreachable: the last attempt returns or raises")


def is_exposed(home: Replica) -> bool:
    """Whether somebody outside may write the bytes of a replica unseen."""
    for reference in home.holders:
        block = reference()
        if block is not None and block.exposure is not None:
            return True
    return False


def copy_of(base: torch.Tensor) -> torch.Tensor:
    """Return new bytes with the content of a host base (copy on write splits that way)."""
    source = bytes_of(base)
    if source.is_meta:  # of a device that keeps no bytes: they are counted, no more
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty_like(source)
    copied = empty_bytes(source.numel())
    storage_of(copied).copy_(storage_of(source))
    return copied
