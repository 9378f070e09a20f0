"""A double of torch's device modules that knows what happens before what.

Each piece of work on a stream is given the clocks of all streams that its own has waited for, so
that of two pieces of work it can be said whether one has to end before the other begins. Nothing
ever fires by itself: whoever forgets to wait is seen to.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from torchTensorRef.devices.accelerator.copies import StreamLane
from torchTensorRef.devices.accelerator.device import AcceleratorDevice
from torchTensorRef.devices.storages import empty_bytes, move_bytes

from .device_double import Runtime

Clock = dict["OrderedStream", int]

#: Numbers copies in the order in which they are issued.
_issues = itertools.count(1)


class OrderedStream:
    """Work in its order, and what of other streams' work comes before."""

    #: What is issued goes into a graph of kernels. Nobody else may have a part in it.
    is_capturing = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}
        #: Which of all copies was the last here; 0 for none.
        self.last_issue = 0

    def work(self) -> Clock:
        """Issue some; return when that is."""
        self.clock[self] += 1
        return dict(self.clock)

    def wait_event(self, event: OrderedEvent) -> None:
        assert not self.is_capturing, "cudaErrorStreamCaptureIsolation"
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def __repr__(self) -> str:
        return self.name


class OthersStream(OrderedStream):
    """One that another library has made: its number is its handle. It can be destroyed."""

    is_alive = True

    def __init__(self, name: str, handle: int = 0x7F00) -> None:
        super().__init__(name)
        self.stream_id = self.cuda_stream = handle

    def must_live(self) -> None:
        if not self.is_alive:
            raise RuntimeError("CUDA error: invalid resource handle")

    def wait_event(self, event: OrderedEvent) -> None:
        self.must_live()
        super().wait_event(event)


class OrderedEvent:
    """A moment of a stream."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: OrderedStream) -> None:
        if isinstance(stream, OthersStream):
            stream.must_live()
        assert not stream.is_capturing, "the event is part of the capture"
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """The host waits."""


class OrderedModule:
    """What `torch.cuda` would be: a pool of 32 streams in turn, and a current one per thread."""

    POOL = 32

    def __init__(self, *, has_own_streams: bool = True) -> None:
        self.default = OrderedStream("default")
        self.pool = [OrderedStream(f"pool {n}") for n in range(self.POOL)]
        self.given = 0
        self.runtime = Runtime()
        self._here = threading.local()
        if has_own_streams:
            self.ExternalStream = lambda handle, device: OrderedStream(f"own {handle}")

    def Stream(self, device: Any = None) -> OrderedStream:
        self.given += 1
        return self.pool[(self.given - 1) % self.POOL]

    def Event(self) -> OrderedEvent:
        return OrderedEvent()

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().is_capturing

    def current_stream(self, device: Any = None) -> OrderedStream:
        return getattr(self._here, "stream", self.default)

    def default_stream(self, device: Any = None) -> OrderedStream:
        return self.default

    def set_stream(self, stream: OrderedStream) -> None:
        self._here.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: OrderedStream) -> Iterator[None]:
        was = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(was)

    def synchronize(self, device: Any = None) -> None:
        """The host waits for the device."""

    def cudart(self) -> Runtime:
        return self.runtime

    def mem_get_info(self, index: int = 0) -> tuple[int, int]:
        return 1 << 30, 1 << 30


class OrderedLane(StreamLane):
    """Copies at once, and says when."""

    def issue(self, source: torch.Tensor, destination: torch.Tensor) -> Any:
        self.last = self.stream.work()
        self.stream.last_issue = next(_issues)
        move_bytes(source, destination)
        return self._vendor.record(self.stream)


class OrderedDevice(AcceleratorDevice):
    """The real adapter over it."""

    torch_device = torch.device("cpu")  # type: ignore[assignment]

    def __init__(self, module: OrderedModule | None = None, index: int = 0) -> None:
        self.double = module or OrderedModule()
        super().__init__("cuda", index, module=self.double, new_lane=OrderedLane)  # type: ignore[arg-type]
        self.name = f"ordered:{index}"

    def fetched(self, nbytes: int = 4096) -> torch.Tensor:
        """A replica whose bytes have been fetched, and for which compute waits."""
        base = self.allocate(0)
        self.empty(base)
        self.refill(base, nbytes)
        self.copy_into(base).wait()
        return base

    def copy_into(self, base: torch.Tensor) -> Any:
        source = empty_bytes(base.untyped_storage().nbytes())
        return self.copy_in(source, base, after=self.available(base))

    @property
    def arrived(self) -> Clock:
        """When the last copy to the device is made."""
        lanes = (self._copier.in_lane, self._copier.urgent_lane)
        latest = max(lanes, key=lambda lane: lane.stream.last_issue)
        return latest.last  # type: ignore[attr-defined,no-any-return]

    def kernel(self, *bases: torch.Tensor) -> Clock:
        """Run an operator on this thread's stream; return when that is."""
        self.before_operator(bases, ())
        return self.double.current_stream().work()

    def kernel_unseen(self) -> Clock:
        """Run one on the ready path, of which nobody is told."""
        return self.double.current_stream().work()


def comes_before(first: Clock, second: Clock) -> bool:
    """Whether one piece of work has ended when the other begins."""
    return all(second.get(stream, 0) >= count for stream, count in first.items())
