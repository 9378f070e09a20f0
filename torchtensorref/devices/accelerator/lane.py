"""One direction of the link: a stream of ours, and copies on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..storages import move_bytes
from .vendor import Vendor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Ends", "StreamLane"]

#: The source of a copy, and its destination.
Ends = tuple["Tensor", "Tensor"]


class StreamLane:
    """One direction of the link: a stream, and copies on it.

    Parameters
    ----------
    vendor : Vendor
        Has the streams.
    is_urgent : bool
        Whether its copies are to be preferred, where the vendor has priorities.
    """

    def __init__(self, vendor: Vendor, *, is_urgent: bool = False) -> None:
        self._vendor = vendor
        self.stream: Any = vendor.new_stream(is_urgent=is_urgent)

    def hold_back(self, event: Any) -> None:
        """Let the stream wait for an event of the device."""
        self.stream.wait_event(event)

    def issue(self, source: Tensor, destination: Tensor) -> Any:
        """Issue a copy; return its event."""
        return self.issue_all(((source, destination),))

    def issue_all(self, copies: Sequence[Ends]) -> Any:
        """Issue copies in their order; return the event of the last one."""
        with self._vendor.on(self.stream):
            for source, destination in copies:
                self.copy(source, destination)
            return self._vendor.record(self.stream, blocking=True)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Issue a copy on the stream, which is the current one."""
        move_bytes(source, destination, non_blocking=True)
