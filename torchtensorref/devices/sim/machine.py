"""The virtual host that simulated devices are plugged into: its clock and its memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...base import forking
from ...base.errors import InvariantError
from ..storages import storage_of

if TYPE_CHECKING:
    from torch import Tensor

    from .events import Copy, Landing
    from .spec import DeviceSpec

__all__ = ["Machine", "SharedMemory", "address_of"]


class SharedMemory:
    """Host memory as a bandwidth that several users share, in virtual time.

    Notes
    -----
    The model is deterministic and simple: *first come, first served*. A copy reserves, from its
    start, what its link can take of the bandwidth that earlier copies left over, and keeps it
    until it ends. An operator on the host takes what all copies issued before it leave over:
    ``min(b_host, b_dram - b_link)`` of THEORY.md, 3.2, where `b_host` is what a kernel can take
    (`DeviceSpec.host_kernel_bytes_per_s`). As the host issues nothing while it
    computes, no copy issued later can overlap it, and the model is exact for one thread.
    """

    def __init__(self) -> None:
        #: (start, end, bytes per ns) of the copies that may still be running, in the order of time,
        #: by engine: the copies of one engine never overlap
        self._reserved: dict[object, deque[tuple[float, float, float]]] = {}

    def forget_before(self, now_ns: float) -> None:
        """Drop the reservations that ended: no copy can start before `now_ns` any more."""
        for lane in self._reserved.values():
            while lane and lane[0][1] <= now_ns:
                lane.popleft()

    def finish(
        self, start_ns: float, nbytes: int, *, rate: float, total_rate: float, lane: object = None
    ) -> float:
        """Say when `nbytes` have passed, starting at `start_ns` with at most `rate` bytes per ns.

        Parameters
        ----------
        start_ns : float
            When the transfer starts.
        nbytes : int
            How much passes.
        rate : float
            The most this user can take, bytes per ns.
        total_rate : float
            What the memory gives to all users together, bytes per ns.
        lane : object, optional
            Which engine copies: later users find this bandwidth taken. None reserves nothing.
        """
        others = self._running_after(start_ns)
        changes = sorted({edge for entry in others for edge in entry[:2] if edge > start_ns})
        pieces = []
        left, at = float(nbytes), float(start_ns)
        for until in (*changes, math.inf):
            taken = sum(entry[2] for entry in others if entry[0] <= at < entry[1])
            free = min(rate, total_rate - taken)
            # Rates are sums of floats: a share this small is a rounding error.
            if free > 1e-9 * total_rate:
                done_at = at + left / free
                pieces.append((at, min(done_at, until), free))
                if done_at <= until:
                    at = done_at
                    break
                left -= free * (until - at)
            at = until
        if lane is not None:
            self._reserved.setdefault(lane, deque()).extend(pieces)
        return at

    def _running_after(self, start_ns: float) -> list[tuple[float, float, float]]:
        """The reservations that have not ended at `start_ns`, looked for from the latest."""
        found = []
        for lane in self._reserved.values():
            for entry in reversed(lane):
                if entry[1] <= start_ns:
                    break
                found.append(entry)
        return found


class Machine:
    """One virtual host: a clock, memory, and the lock of all devices plugged into it.

    Parameters
    ----------
    memory_bytes_per_s, flops_per_s : float
        What its memory gives to all together, and what its cores compute.
    kernel_bytes_per_s : float, optional
        The most that one of its kernels takes of the memory; by default all that there is.

    Attributes
    ----------
    now_ns : int
        The host's clock. The host issues work in program order and runs ahead of the devices;
        only waiting for an event or computing by itself holds it up.
    waited_ns : int
        Until when it was held up so the last time.
    """

    def __init__(
        self,
        *,
        memory_bytes_per_s: float,
        flops_per_s: float,
        kernel_bytes_per_s: float | None = None,
    ) -> None:
        self.lock = forking.shared
        self.now_ns = self.waited_ns = 0
        self.memory = SharedMemory()
        self.memory_bytes_per_ns = memory_bytes_per_s / 1e9
        self.flops_per_ns = flops_per_s / 1e9
        kernel_bytes_per_s = kernel_bytes_per_s or memory_bytes_per_s
        self.kernel_bytes_per_ns = min(kernel_bytes_per_s, memory_bytes_per_s) / 1e9
        #: copies to the host that it has not waited for, by the storage they write. The tensor
        #: is kept so that nothing else can get this number and look as if it were on its way
        self.landing: dict[int, tuple[Copy, Tensor]] = {}

    def expect(self, copy: Copy, destination: Tensor) -> None:
        """Remember that bytes are on their way to host memory."""
        landing = copy.observer.landing
        while landing and landing[0][0].is_past(self.now_ns):
            self._forget_first(landing)
        address = address_of(destination)
        landing.append((copy, address))
        self.landing[address] = (copy, destination)

    def land(self, landing: Landing, end_ns: int) -> None:
        """Forget the copies of one device that ended by `end_ns`: the host has waited for them."""
        while landing and landing[0][0].end_ns <= end_ns:
            self._forget_first(landing)

    def _forget_first(self, landing: Landing) -> None:
        copy, address = landing.popleft()
        if self.landing.get(address, (None,))[0] is copy:  # else a later one goes there
            del self.landing[address]

    def check_landed(self, bases: Iterable[Tensor], verb: str) -> None:
        """Refuse host tensors whose bytes are still on their way."""
        for base in bases:
            copy, _ = self.landing.get(address_of(base), (None, None))
            if copy is not None and not copy.is_past(self.now_ns):
                raise InvariantError(
                    f"cpu: an operator that {verb} a host replica is illegal at {self.now_ns:,} "
                    f"ns: its bytes arrive by {copy}, and the host has not waited for it.",
                    violations=(f"host {verb} before {copy} was waited for",),
                )

    def compute(self, flops: int, nbytes: int) -> None:
        """Let the host run one operator itself; its clock advances by the time it takes."""
        with self.lock:
            now = self.now_ns
            self.memory.forget_before(now)
            moved_at = self.memory.finish(
                now,
                nbytes,
                rate=self.kernel_bytes_per_ns,
                total_rate=self.memory_bytes_per_ns,
            )
            self.now_ns = math.ceil(max(moved_at, now + flops / self.flops_per_ns))
            self.waited_ns = self.now_ns

    @classmethod
    def of(cls, spec: DeviceSpec) -> Machine:
        """Return a machine like the one that a device of that kind is plugged into."""
        return cls(
            memory_bytes_per_s=spec.host_memory_bytes_per_s,
            flops_per_s=spec.host_flops_per_s,
            kernel_bytes_per_s=spec.host_kernel_bytes_per_s,
        )

    def wait_until(self, end_ns: int) -> None:
        """Let the host stand still until a moment."""
        with self.lock:
            if end_ns > self.now_ns:
                self.now_ns = self.waited_ns = end_ns


def address_of(base: Tensor) -> int:
    """Which memory: that of its storage, also where there are no bytes."""
    address: int = storage_of(base)._cdata
    return address
