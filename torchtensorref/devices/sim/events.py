"""Events of a simulated device, and the copies whose bytes arrive when they fire."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ...base.errors import TransferError
from ..storages import bytes_of, move_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Event
    from ..residents import Resident

__all__ = ["Copy", "Engine", "Landing", "Observer", "SimEvent"]

#: Copies of one device to the host, in the order of their ends, and the addresses they write.
Landing: TypeAlias = "deque[tuple[Copy, int]]"


class Engine(Enum):
    """The engines of a simulated device, each with its own clock."""

    COMPUTE = "compute"
    H2D = "h2d"  # copies from the host to the device
    D2H = "d2h"  # copies from the device to the host

    __hash__ = object.__hash__  # there is one object of each; Python's own takes the name


class Observer(Protocol):
    """What an event needs of the device's engines."""

    #: Copies to the host that it has not waited for, oldest first.
    landing: Landing

    def has_fired(self, event: SimEvent) -> bool:
        """Whether the host's clock has passed it; if so, its bytes arrive."""

    def wait_on_compute(self, event: SimEvent) -> None:
        """Let compute wait for it; its bytes arrive."""

    def wait_on_host(self, event: SimEvent) -> None:
        """Let the host wait for it; its bytes arrive."""

    def deliver(self, copy: Copy) -> None:
        """Move the bytes of a copy and of those before it; they may not be used yet."""


class SimEvent:
    """A moment in virtual time at which one engine has finished something."""

    __slots__ = ("end_ns", "engine", "observer", "start_ns")

    def __init__(self, observer: Observer, engine: Engine, end_ns: int, start_ns: int = 0) -> None:
        self.observer = observer
        self.engine = engine
        self.start_ns = start_ns
        self.end_ns = end_ns

    def is_done(self) -> bool:
        """Whether it has fired at the host's present time; then the bytes have arrived."""
        return self.observer.has_fired(self)

    def wait(self) -> None:
        """Make compute wait for it: operators issued later see the bytes."""
        self.observer.wait_on_compute(self)

    def synchronize(self) -> None:
        """Make the host wait for it: its clock moves on to the end."""
        self.observer.wait_on_host(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.engine.value} ends at {self.end_ns} ns>"


class Copy(SimEvent):
    """A copy that was issued, and the event that fires when its bytes have arrived.

    Notes
    -----
    The bytes are moved by `arrive`, not before: a read that comes too early sees old bytes or
    poison.
    """

    __slots__ = ("after", "error", "number", "resident", "source", "target")

    def __init__(
        self,
        observer: Observer,
        engine: Engine,
        end_ns: int,
        *,
        start_ns: int = 0,
        number: int,
        resident: Resident,
        after: Event | None,
    ) -> None:
        super().__init__(observer, engine, end_ns, start_ns)
        self.number = number
        self.resident = resident
        self.after = after
        self.source: Tensor | None = None
        self.target: Tensor | None = None
        #: It fails, and says so to whoever waits for it.
        self.error: TransferError | None = None

    def wait(self) -> None:
        """Make compute wait for it."""
        super().wait()
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        """Make the host wait for it."""
        super().synchronize()
        if self.error is not None:
            raise self.error

    def arrive(self) -> None:
        """Move the bytes. The second time, and after `cancel`, nothing happens."""
        source, target = self.source, self.target
        if self.engine is Engine.H2D:
            base = self.resident()
            target = None if base is None else bytes_of(base)
        if source is not None and target is not None and self.error is None:
            move_bytes(source, target)
        self.cancel()

    def keep_source(self) -> None:
        """Take the bytes now: the base is about to be emptied."""
        if self.source is not None:
            self.source = self.source.clone()

    def cancel(self) -> None:
        """Let no bytes arrive any more; release both ends."""
        self.source = self.target = self.after = None

    def is_past(self, now_ns: int) -> bool:
        """Whether its bytes have been moved and the clock has passed its end."""
        return self.source is None and self.end_ns <= now_ns

    def __str__(self) -> str:
        return f"copy {self.number} ({self.engine.value}, ends at {self.end_ns:,} ns)"
