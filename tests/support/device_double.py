"""A double of torch's device modules, whose streams work as late as they may.

Kernels run at once, on the host, because that is where the double keeps its bytes. Copies wait in
their stream until somebody has a right to see them: until compute waits for their event, the host
does, or they are pumped. So bytes that are read too early are not there, a source that is changed
too early arrives changed, and room that is given away too early is overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchTensorRef.devices.accelerator.copies import StreamLane
from torchTensorRef.devices.accelerator.device import AcceleratorDevice
from torchTensorRef.devices.accelerator.events import events_of
from torchTensorRef.devices.storages import move_bytes

_lock = threading.RLock()


class LateStream:
    """Work in its order, done when somebody waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], None]] = deque()

    def issue(self, work: Callable[[], None]) -> None:
        with _lock:
            self.work.append(work)

    def pump(self, until: Callable[[], bool] = lambda: False) -> None:
        with _lock:
            while self.work and not until():
                self.work.popleft()()

    def wait_event(self, event: LateEvent) -> None:
        if self.name == "compute":
            event.synchronize()  # kernels run at once, so what they wait for must have happened
        else:
            self.issue(event.synchronize)


class LateEvent:
    """Fires when its stream has come to it."""

    def __init__(self) -> None:
        self.stream: LateStream | None = None
        self.fired = True

    def record(self, stream: LateStream) -> None:
        self.stream = stream
        self.fired = False
        if stream.name == "compute":
            self.fired = True  # kernels run at once
        else:
            stream.issue(functools.partial(setattr, self, "fired", True))

    def query(self) -> bool:
        return self.fired

    def synchronize(self) -> None:
        if not self.fired and self.stream is not None:
            self.stream.pump(lambda: self.fired)


class Runtime:
    """Registers host memory by whole pages, as drivers do, and remembers what is registered."""

    def __init__(self, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self.pages: set[int] = set()
        #: The threads that have asked for memory, and given it back.
        self.asked_by: list[threading.Thread] = []
        self.unregistered_by: list[str] = []
        self.refuses = refuses

    @staticmethod
    def pages_of(address: int, nbytes: int) -> set[int]:
        return set(range(address // PAGESIZE, -(-(address + nbytes) // PAGESIZE)))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked_by.append(threading.current_thread())
        wanted = self.pages_of(address, nbytes)
        if self.refuses or wanted & self.pages:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = nbytes
        self.pages |= wanted
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pages -= self.pages_of(address, self.registered.pop(address))
        self.unregistered_by.append(threading.current_thread().name)
        return 0

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Whether the first byte lies on a locked page: what `is_pinned` asks."""
        return memory.data_ptr() // PAGESIZE in self.pages

    def state_of(self, memory: torch.Tensor) -> str:
        """How much of some memory is locked; what is locked in part no copy engine takes."""
        wanted = self.pages_of(memory.data_ptr(), memory.numel() * memory.element_size())
        if wanted <= self.pages:
            return "locked"
        return "locked in part" if wanted & self.pages else "pageable"


class LateModule:
    """What `torch.cuda` would be, over host memory."""

    def __init__(
        self, total_nbytes: int = 1 << 30, *, seed: int = 0, refuses: bool = False
    ) -> None:
        self.total_nbytes = total_nbytes
        self.others_nbytes = 0
        self.ours: Callable[[], int] = lambda: 0
        self.compute = LateStream("compute")
        self.streams: list[LateStream] = []
        self.runtime = Runtime(refuses)
        self.random = random.Random(seed)
        self.caps: list[float] = []
        self.emptied_count = 0

    def may_refuse(self) -> None:
        """Called before a copy is issued, and before the device is waited for: a test may raise."""

    def can_device_access_peer(self, index: int, other: int) -> bool:
        return index != other

    def Stream(self, device: Any = None) -> LateStream:
        self.streams.append(LateStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def Event(self) -> LateEvent:
        return LateEvent()

    def current_stream(self, device: Any = None) -> LateStream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        self.may_refuse()
        for stream in self.streams:
            stream.pump()

    def mem_get_info(self, index: int = 0) -> tuple[int, int]:
        return self.total_nbytes - self.others_nbytes - self.ours(), self.total_nbytes

    def cudart(self) -> Runtime:
        return self.runtime

    def set_per_process_memory_fraction(self, fraction: float, index: int = 0) -> None:
        self.caps.append(fraction)

    def empty_cache(self) -> None:
        self.emptied_count += 1

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class LateLane(StreamLane):
    """Copies are made when their stream comes to them."""

    def __init__(self, vendor: Any, jitter: random.Random, *, is_urgent: bool = False) -> None:
        super().__init__(vendor, is_urgent=is_urgent)
        self._jitter = jitter

    def issue(self, source: torch.Tensor, destination: torch.Tensor) -> Any:
        self._vendor._module.may_refuse()
        self._look_at(source, destination)
        self.stream.issue(functools.partial(self._look_and_copy, source, destination))
        event = self._vendor.record(self.stream)
        if self._jitter.random() < 0.2:
            self.stream.pump()  # sometimes the link is fast
        return event

    def _look_at(self, *ends: torch.Tensor) -> None:
        runtime = self._vendor.host_runtime()
        for end in ends:
            if end.device.type == "cpu":
                assert runtime.state_of(end) != "locked in part", "cudaErrorInvalidValue"

    def _look_and_copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._look_at(source, destination)  # what was unlocked meanwhile was so too early
        self._copy(source, destination)

    @staticmethod
    def _copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        for end in (source, destination):
            reach = end.storage_offset() + end.numel()
            assert reach <= end.untyped_storage().nbytes(), "a copy in flight has lost an end"
        move_bytes(source, destination)


class LateDevice(AcceleratorDevice):
    """The real adapter over the double: `torch.cuda`'s way, on host bytes."""

    torch_device = torch.device("cpu")  # type: ignore[assignment]
    lane = LateLane

    def __init__(self, module: LateModule | None = None, index: int = 0) -> None:
        self.double = module or LateModule()
        super().__init__(
            "cuda",
            index,
            module=self.double,  # type: ignore[arg-type]
            new_lane=functools.partial(self.lane, jitter=self.double.random),
        )
        self.name = f"late:{index}"
        self.double.ours = lambda: self._residents.nbytes

    def empty(self, base: torch.Tensor) -> None:
        # A card's memory stays where it is when it is freed; the host's is gone.
        for event in self._copier.copies_of(base):
            for part in events_of(event):
                part.synchronize()
        super().empty(base)


class ExchangingDevice(LateDevice):
    """One whose storages cannot be emptied, as on mps: what was evicted lies in another one.

    Each storage that a base had is watched: once it has been given up, nobody may hold it.
    """

    def __init__(self, module: LateModule | None = None, index: int = 0) -> None:
        super().__init__(module, index)
        self.exchanges_storages = True
        self.given_up: list[tuple[int, StorageWeakRef]] = []

    def _resize(self, base: torch.Tensor, nbytes: int) -> None:
        storage = base.untyped_storage()
        if not nbytes and storage.nbytes():
            self.given_up.append((storage.nbytes(), StorageWeakRef(storage)))
        del storage
        super()._resize(base, nbytes)

    def held_nbytes(self) -> int:
        """What was given up and is still held by somebody."""
        self.synchronize()
        return sum(nbytes for nbytes, storage in self.given_up if not storage.expired())


class StreamlessModule:
    """What `torch.mps` is to the adapter: no streams, no events, no segments, some memory."""

    def __init__(self, total_nbytes: int = 1 << 30) -> None:
        self.total_nbytes = total_nbytes

    def recommended_max_memory(self) -> int:
        return self.total_nbytes

    def synchronize(self) -> None:
        """Everything has happened: it is in one order."""

    def empty_cache(self) -> None:
        """Nothing is kept."""


class MpsDevice(AcceleratorDevice):
    """One as mps: in one order, and what is evicted lies in another storage afterwards.

    Whatever looks at bytes that were evicted sees 0xAA: the storage that was given up is spoilt.
    """

    torch_device = torch.device("cpu")  # type: ignore[assignment]

    def __init__(self, total_nbytes: int = 1 << 30) -> None:
        super().__init__("mps", 0, module=StreamlessModule(total_nbytes))  # type: ignore[arg-type]
        self.name = "mps double:0"
        self.exchanges_storages = True
        self.given_up_count = 0

    def _resize(self, base: torch.Tensor, nbytes: int) -> None:
        if not nbytes and base.untyped_storage().nbytes():
            base.untyped_storage().fill_(0xAA)
            self.given_up_count += 1
        super()._resize(base, nbytes)


class MetaLane(LateLane):
    """Copies no bytes: there are none on `meta`."""

    @staticmethod
    def _copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        assert source.numel() == destination.numel()


class MetaDevice(LateDevice):
    """An accelerator whose tensors really lie elsewhere, with all their metadata and no bytes.

    Torch itself refuses an operator whose operands lie on several devices, and one that has no
    kernel there: so it shows whether everything is where a card's kernels would look for it.
    """

    torch_device = torch.device("meta")  # type: ignore[assignment]
    lane = MetaLane
