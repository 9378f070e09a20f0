"""Events: points in a device's work, at which somebody can wait."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DONE", "DoneEvent", "Event"]


class Event(Protocol):
    """A point in a device's work; it *fires* when the work before it is finished."""

    @property
    def start_ns(self) -> int:
        """When the copy began that it is the end of; 0 for others, and where it is not known."""
        ...

    @property
    def end_ns(self) -> int:
        """When it fires, on the device's clock; 0 where that is not known."""
        ...

    def is_done(self) -> bool:
        """Whether it has fired. Never blocks."""
        ...

    def wait(self) -> None:
        """Make the device's compute engine wait for it: operators issued later see the bytes."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for it."""
        ...


class DoneEvent:
    """The event of work that was finished at once."""

    start_ns = end_ns = 0

    def is_done(self) -> bool:
        """Whether it has fired: always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


DONE = DoneEvent()
