"""What a device tells of time: when its engines are free, and what an operator has taken."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Clocks", "Stopwatch"]


class Clocks(NamedTuple):
    """What a device tells of its engines; zeros where it does not measure them."""

    #: Time that the operators issued so far take, waiting not counted.
    compute_ns: int = 0
    #: What the clock on the host's wall says, waiting for the device not counted.
    host_ns: int = 0
    #: When compute will be through with them, and when the copy engine towards the device is free.
    compute_free_ns: int = 0
    link_free_ns: int = 0
    d2h_free_ns: int = 0
    h2d_bytes_per_s: float = 12e9
    d2h_bytes_per_s: float = 12e9
    #: What a kernel of its host reads and computes; 0 where nobody knows.
    host_bytes_per_s: float = 0
    host_flops_per_s: float = 0


class Stopwatch(Protocol):
    """Measures what compute does between two moments, without waiting for it."""

    def stop(self) -> None:
        """End what is measured with what compute has been given so far."""

    def took_ns(self) -> int | None:
        """How long it took, waiting not counted; None while it is not known."""
