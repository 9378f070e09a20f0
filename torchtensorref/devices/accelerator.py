"""Real accelerators, through torch's device-generic interface: cuda, hip, xpu, mps."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, TransferError
from .base import DONE, Device, Event, bytes_of, empty_bytes, move_bytes
from .residents import CountsResidents, Residents

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import Tensor

__all__ = ["AcceleratorDevice", "AcceleratorEvent"]


class AcceleratorEvent:
    """An event of torch's device module, and what has to live until it fires.

    Notes
    -----
    A copy on a side stream uses memory that the allocator believes to be used by the compute
    stream only. Holding both ends of the copy here, until it is seen to have fired, takes the
    place of `record_stream`, which would delay every reuse. The device keeps the event as long.
    """

    end_ns = 0

    def __init__(self, event: Any, device: AcceleratorDevice, held: tuple[Tensor, ...]) -> None:
        self.event = event
        self._device = device
        self._held = held

    def is_done(self) -> bool:
        """Whether it has fired. Never blocks."""
        done = bool(self.event.query())
        if done:
            self._held = ()
        return done

    def wait(self) -> None:
        """Make the compute stream wait for it."""
        self._device.compute_stream().wait_event(self.event)

    def synchronize(self) -> None:
        """Make the host wait for it; the time counts as a stall."""
        began_ns = time.perf_counter_ns()
        self.event.synchronize()
        self._device.stall_ns += time.perf_counter_ns() - began_ns
        self._held = ()


class AcceleratorDevice(CountsResidents, Device):
    """One accelerator that torch can use.

    Parameters
    ----------
    kind : str
        ``"cuda"`` (also hip), ``"xpu"`` or ``"mps"``.
    index : int, optional
        Which one.
    module : module, optional
        What to use instead of ``torch.get_device_module(kind)`` (for tests).

    Raises
    ------
    ConfigError
        If this torch, or this machine, has no such accelerator.

    Notes
    -----
    Copies run on side streams, one per direction, where the module has streams and events, and
    in the order of the compute stream where not (mps). Only from and to page-locked memory are
    they asynchronous; torch makes the others wait by itself.
    """

    def __init__(self, kind: str, index: int = 0, *, module: ModuleType | None = None) -> None:
        self.kind = kind
        self.index = index
        self.name = f"{kind}:{index}"
        self.stall_ns = 0
        self._module: Any = _open_module(kind, index) if module is None else module
        self._lock = threading.RLock()
        self._alloc_count = 0
        self._residents = Residents()
        self._has_streams = hasattr(self._module, "Stream") and hasattr(self._module, "Event")
        self._has_streams = self._has_streams and hasattr(self._module, "current_stream")
        self._in_stream: Any = None  # made when first needed: a device may never copy
        self._out_stream: Any = None
        #: copies that may still run, with the bases they touch; see `_retire`
        self._in_flight: deque[tuple[int, AcceleratorEvent]] = deque()
        self.capacity_nbytes = self._total_nbytes()

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """The device, as torch names it."""
        import torch

        return torch.device(self.kind, self.index)

    # memory -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:  # noqa: D102
        base = empty_bytes(nbytes, self.torch_device)
        self._enter(base, nbytes)
        return base

    def refill(self, base: Tensor, nbytes: int) -> None:  # noqa: D102
        base.untyped_storage().resize_(nbytes)
        with self._lock:
            self._residents.settle()
            resident = self._residents.emptied.get(id(base))
            if resident is not None:
                self._residents.enter_again(resident, nbytes)

    def empty(self, base: Tensor) -> None:  # noqa: D102
        with self._lock:
            self._residents.settle()
            resident = self._residents.present.get(id(base))
            if resident is not None:
                self._residents.leave(resident)
            self._retire()
            for key, event in self._in_flight:
                if key == id(base):
                    # The allocator gives this room out again in the order of the compute stream.
                    event.wait()
        base.untyped_storage().resize_(0)

    def account(self, base: Tensor) -> None:  # noqa: D102
        self._enter(base, base.untyped_storage().nbytes())

    def _enter(self, base: Tensor, nbytes: int) -> None:
        with self._lock:
            self._residents.settle()
            self._alloc_count += 1
            self._residents.enter(base, nbytes, self._alloc_count)

    def limit(self, nbytes: int) -> bool:
        """Let torch's allocator itself refuse more than `nbytes`; False where it cannot."""
        cap = getattr(self._module, "set_per_process_memory_fraction", None)
        if cap is None or not self.capacity_nbytes:
            return False
        fraction = min(1.0, nbytes / self.capacity_nbytes)
        if self.kind == "mps":
            cap(fraction)  # takes no device: there is one
        else:
            cap(fraction, self.index)
        return True

    def free_nbytes(self) -> int:
        """What the driver says is free, and what torch's allocator keeps unused."""
        module = self._module
        if not hasattr(module, "mem_get_info"):
            return max(0, self.capacity_nbytes - self.resident_nbytes)
        free = int(module.mem_get_info(self.index)[0])
        if hasattr(module, "memory_reserved") and hasattr(module, "memory_allocated"):
            free += module.memory_reserved(self.index) - module.memory_allocated(self.index)
        return free

    def _total_nbytes(self) -> int:
        module = self._module
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(self.index)[1])
        if hasattr(module, "recommended_max_memory"):  # mps shares the host's memory
            return int(module.recommended_max_memory())
        return 0

    # copies -------------------------------------------------------------------------------

    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        target = bytes_of(base)
        self._check_sizes(source, target, "cpu", self.name)
        asynchronous = source.is_pinned()
        if not self._has_streams:
            return self._copy_in_order(source, target, after)
        if self._in_stream is None:
            self._in_stream = self._new_stream()
        event = self._copy_aside(source, target, after, self._in_stream, asynchronous)
        return self._keep(base, event)

    def copy_out(self, base: Tensor, destination: Tensor, *, after: Event | None = None) -> Event:  # noqa: D102
        source = bytes_of(base)
        self._check_sizes(source, destination, self.name, "cpu")
        asynchronous = destination.is_pinned()
        if not self._has_streams:
            return self._copy_in_order(source, destination, after)
        if self._out_stream is None:
            self._out_stream = self._new_stream()
        # Without an order of the caller's, what compute was given so far may write these bytes.
        after = self.record() if after is None else after
        event = self._copy_aside(source, destination, after, self._out_stream, asynchronous)
        return self._keep(base, event)

    def _new_stream(self) -> Any:
        """Make a side stream; modules of one device (`torch.cpu`) take no device for it."""
        try:
            return self._module.Stream(device=self.torch_device)
        except TypeError:
            return self._module.Stream()

    def _copy_aside(
        self,
        source: Tensor,
        destination: Tensor,
        after: Event | None,
        stream: Any,
        asynchronous: bool,
    ) -> AcceleratorEvent:
        """Copy on a side stream; the event holds both ends until it is seen to have fired."""
        module = self._module
        if isinstance(after, AcceleratorEvent):
            stream.wait_event(after.event)
        elif after is not None:
            after.synchronize()
        with module.stream(stream):
            move_bytes(source, destination, non_blocking=asynchronous)
            event = module.Event()
            event.record(stream)
        return AcceleratorEvent(event, self, (source, destination))

    def _keep(self, base: Tensor, event: AcceleratorEvent) -> Event:
        """Hold a copy's ends until it has fired, even if the caller forgets its event."""
        with self._lock:
            self._retire()
            self._in_flight.append((id(base), event))
        return event

    def _retire(self) -> None:
        """Let go of the copies that have fired."""
        in_flight = self._in_flight
        for _ in range(len(in_flight)):
            entry = in_flight.popleft()
            if not entry[1].is_done():
                in_flight.append(entry)

    def _copy_in_order(self, source: Tensor, destination: Tensor, after: Event | None) -> Event:
        if after is not None:
            after.synchronize()
        move_bytes(source, destination)
        return DONE

    @staticmethod
    def _check_sizes(source: Tensor, destination: Tensor, here: str, there: str) -> None:
        nbytes = source.numel() * source.element_size()
        wanted = destination.numel() * destination.element_size()
        if nbytes != wanted:
            raise TransferError(
                f"A copy from {here} to {there} has {nbytes:,} bytes to give and room for "
                f"{wanted:,}; nothing was copied.",
                source=here,
                destination=there,
                nbytes=nbytes,
            )

    def available(self, base: Tensor) -> Event | None:
        """The end of compute so far: the allocator gives out room in the order of its stream."""
        return self.record() if self._has_streams else None

    # operators ----------------------------------------------------------------------------

    def compute_stream(self) -> Any:
        """The stream that operators of this thread go to."""
        return self._module.current_stream(self.torch_device)

    def record(self) -> Event:  # noqa: D102
        if not self._has_streams:
            return DONE
        event = self._module.Event()
        event.record(self.compute_stream())
        return AcceleratorEvent(event, self, ())

    def synchronize(self) -> None:  # noqa: D102
        if self.kind == "mps":
            self._module.synchronize()
        else:
            self._module.synchronize(self.torch_device)

    def now_ns(self) -> int:
        """The clock on the wall."""
        return time.perf_counter_ns()


def _open_module(kind: str, index: int) -> Any:
    """The torch module of a kind of accelerator, or an error that says what is missing."""
    import torch

    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        module = None
    if module is None or not module.is_available():
        raise ConfigError(
            f"This torch ({torch.__version__}) finds no usable {kind!r} device. Install a build "
            "of torch and a driver for it, or use 'sim', which simulates one.",
            name=kind,
        )
    count = int(module.device_count())
    if index >= count:
        raise ConfigError(
            f"There is no device '{kind}:{index}': torch finds {count}, numbered from 0.",
            name=f"{kind}:{index}",
        )
    return module
