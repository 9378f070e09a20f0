"""Torch's module of one kind of accelerator, and what to do where it lacks something."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError
from ..background import ask_aside
from ..host.numa import cpus_near
from ..storages import bytes_of, empty_bytes
from .driver_memory import memory_info
from .events import EventStopwatch
from .own_stream import OnSideStream, new_stream

if TYPE_CHECKING:
    import torch

__all__ = ["Vendor", "can_refill", "has_expandable_segments"]

#: What lets torch's allocator refuse more than a share of the device.
CAP = "set_per_process_memory_fraction"

#: Of what is free, the most to be taken where the driver gives the host's memory beyond it.
SHARE_WHERE_SPILLED = 0.9

#: Where the settings of torch's allocator are, for those that cannot be asked.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def spills_silently() -> bool:
    """Whether the driver answers a lack of memory with the host's (Windows, and WSL2 over it)."""
    return sys.platform == "win32" or "microsoft" in platform.uname().release.lower()


class Vendor:
    """What an accelerator of one kind can do, asked by one set of names.

    Parameters
    ----------
    module : module
        ``torch.cuda`` (also hip), ``torch.xpu``, ``torch.mps``, or whatever has their names.
    device : torch.device
        Which one of its kind.

    Attributes
    ----------
    has_streams : bool
        Whether copies can run aside of compute. Without streams everything happens in one order.
    """

    #: Of each thread, whatever device it is about: to look at another one there takes its lock.
    _here = threading.local()

    def __init__(self, module: Any, device: torch.device, kind: str, index: int) -> None:
        self._module = module
        self._device = device
        self._kind = kind
        self._index = index
        self._raw_stream = _raw_stream_of(module)
        self._blocking = {"blocking": True} if _has_blocking_events(module) else {}
        self.has_streams = all(
            hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream")
        )

    # streams and events -------------------------------------------------------------------

    def new_stream(self, *, is_urgent: bool = False) -> Any:
        """Make a stream beside those that operators go to, preferred where there are priorities."""
        return new_stream(self._module, self._device, self.driver, is_urgent=is_urgent)

    @property
    def driver(self) -> str:
        """The kind of its driver: torch calls hip cuda."""
        import torch

        is_hip = self._kind == "cuda" and torch.version.hip is not None
        return "hip" if is_hip else self._kind

    def on(self, stream: Any) -> OnSideStream:
        """Let this thread issue its work on a stream of ours."""
        return OnSideStream(self._module, self._index, stream, self._here)

    def opened(self) -> contextlib.AbstractContextManager[Any]:
        """Let this thread's calls of the driver go to this device.

        A fresh thread is on the first one, and would open that besides, which takes memory there.
        """
        device = getattr(self._module, "device", None)
        return contextlib.nullcontext() if device is None else device(self._index)

    @property
    def is_on_side_stream(self) -> bool:
        """Whether this thread's current stream is one of ours, inside `on` of any device."""
        return getattr(self._here, "is_on_side", False)

    def current_stream(self) -> Any:
        """The stream that operators of this thread go to."""
        return self._module.current_stream(self._device)

    def default_stream(self) -> Any:
        """The stream that threads begin on; where the module does not tell (xpu), one is asked."""
        ask = getattr(self._module, "default_stream", None)
        return ask_aside(self.current_stream) if ask is None else ask(self._device)

    def current_stream_number(self) -> Any:
        """What tells that stream from others, and costs as little as can be."""
        if self._raw_stream is not None:
            return self._raw_stream(self._index)
        return self.current_stream()

    def record(self, stream: Any, *, blocking: bool = False) -> Any:
        """Make an event at the end of what a stream was given so far.

        A `blocking` one lets the thread that waits for it sleep, where the driver can: else it
        turns round and round, and takes a processor from those that fill the next buffer.
        """
        event = self._module.Event(**(self._blocking if blocking else {}))
        event.record(stream)
        return event

    def can_reach(self, other: int) -> bool:
        """Whether this device copies from another one of its kind by itself, past the host."""
        ask = getattr(self._module, "can_device_access_peer", None)
        return ask is not None and self.has_streams and bool(ask(self._index, other))

    def cpus_near(self) -> frozenset[int]:
        """The host's processors on the device's side; none where that is not told."""
        properties = getattr(self._module, "get_device_properties", None)
        return frozenset() if properties is None else cpus_near(properties(self._index))

    def is_capturing(self, stream: Any = None) -> bool:
        """Whether what a stream is given, or else this thread's, goes into a graph of kernels."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        if ask is None:
            return False
        with self.opened() if stream is None else self.on(stream):
            return bool(ask())

    @staticmethod
    def record_use(base: torch.Tensor, stream: Any) -> None:
        """Have torch give a base's bytes to others when a stream has done what it has by then."""
        import torch

        # Of a fresh tensor over them: to torch it is a write, which counts a version.
        torch._C.TensorBase.record_stream(bytes_of(base), stream)

    def timed_event(self) -> Any:
        """An event that keeps the time; None where the module has none."""
        try:
            return self._module.Event(enable_timing=True)
        except (TypeError, RuntimeError):
            return None

    def stopwatch(self, stream: Any) -> EventStopwatch | None:
        """Begin to measure what a stream is given next; None where events keep no time."""
        began, ended = self.timed_event(), self.timed_event()
        return None if began is None or ended is None else EventStopwatch(began, ended, stream)

    def hardware(self) -> str:
        """What its maker calls it, where the module says so."""
        named = getattr(self._module, "get_device_name", None)
        return self._kind if named is None else f"{self._kind} {named(self._index)}"

    def synchronize(self) -> None:
        """Make the host wait for everything."""
        if self._kind == "mps":
            self._module.synchronize()
        else:
            self._module.synchronize(self._device)

    # memory -------------------------------------------------------------------------------

    @property
    def has_pool_per_stream(self) -> bool:
        """Whether room freed on one stream is never given out on another, nor unmapped.

        Expandable segments are: torch gives what is free of them back to the driver when only the
        stream that had allocated it is done. So we keep to compute's stream there.
        """
        backend = getattr(self._module, "get_allocator_backend", None)
        is_native = backend is None or backend() == "native"
        return self.has_streams and is_native and not has_expandable_segments()

    def can_refill(self) -> bool:
        """Whether a storage can give its bytes back and get others; on mps it cannot."""
        return can_refill(self._device)

    def total_nbytes(self) -> int:
        """What the device has."""
        info = memory_info(self._module, self._index)
        if info is not None:
            return info[1]
        recommended = getattr(self._module, "recommended_max_memory", None)
        if recommended is not None:
            return int(recommended())  # mps shares the host's
        properties = getattr(self._module, "get_device_properties", None)
        return 0 if properties is None else int(getattr(properties(self._index), "total_memory", 0))

    def driver_free_nbytes(self) -> int | None:
        """What the driver has free; None where it does not say."""
        info = memory_info(self._module, self._index)
        return None if info is None else info[0]

    def allocated_nbytes(self) -> int | None:
        """What torch's allocator has given out in this process; None where it does not say."""
        return self._figure("memory_allocated", "current_allocated_memory")

    def peak_allocated_nbytes(self) -> int | None:
        """The most of it since `reset_peak`."""
        return self._figure("max_memory_allocated", None)

    def reserved_nbytes(self) -> int | None:
        """What torch's allocator holds of the driver, given out or not."""
        return self._figure("memory_reserved", "driver_allocated_memory")

    @property
    def counts_segments(self) -> bool:
        """Whether a cap counts the allocator's segments, of which parts can be of no use."""
        return all(hasattr(self._module, n) for n in ("memory_stats", CAP))

    def alloc_retry_count(self) -> int:
        """How often the allocator found no memory, and gave up its cache to find some."""
        stats = getattr(self._module, "memory_stats", None)
        return 0 if stats is None else int(stats(self._index).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Start `peak_allocated_nbytes` again."""
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(self._index)

    def _figure(self, name: str, name_on_mps: str | None) -> int | None:
        by_index = getattr(self._module, name, None)
        if by_index is not None:
            return int(by_index(self._index))
        alone = getattr(self._module, name_on_mps, None) if name_on_mps else None
        return None if alone is None else int(alone())

    def cap(self, nbytes: int, total_nbytes: int) -> bool:
        """Let the allocator itself refuse more than `nbytes`; False where it cannot.

        Where the driver would rather use the host's memory than refuse, never all that is free.
        """
        cap = getattr(self._module, CAP, None)
        if cap is None or not total_nbytes:
            return False
        if spills_silently():
            free_nbytes = (self.driver_free_nbytes() or 0) + (self.reserved_nbytes() or 0)
            nbytes = min(nbytes, int(free_nbytes * SHARE_WHERE_SPILLED)) if free_nbytes else nbytes
        fraction = min(1.0, max(nbytes, 1) / total_nbytes)  # 0 is refused, or means all of it
        if self._kind == "mps":
            cap(fraction)  # takes no device: there is one
        else:
            cap(fraction, self._index)
        return True

    def empty_cache(self) -> None:
        """Give back to the driver what the allocator keeps for later."""
        empty = getattr(self._module, "empty_cache", None)
        if empty is not None:
            with self.opened():
                empty()

    # random numbers -----------------------------------------------------------------------

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's generator; None where it cannot be asked for."""
        get = getattr(self._module, "get_rng_state", None)
        if get is None:
            return None
        state: torch.Tensor = get() if self._kind == "mps" else get(self._device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the generator back to a state asked for before."""
        if self._kind == "mps":
            self._module.set_rng_state(state)
        else:
            self._module.set_rng_state(state, self._device)

    # host memory --------------------------------------------------------------------------

    @staticmethod
    def is_pinned(memory: torch.Tensor) -> bool:
        """Whether the program has page-locked all of some host memory.

        Torch asks the driver about the first byte only. What is locked in part is an error for
        copies, so the last byte is asked about, too.
        """
        return memory.is_pinned() and memory[-1:].is_pinned()

    def host_runtime(self) -> Any | None:
        """The runtime that can page-lock memory where it lies (cuda, hip); None elsewhere."""
        runtime = getattr(self._module, "cudart", None)
        if runtime is None:
            return None
        found = runtime()
        return found if hasattr(found, "cudaHostRegister") else None

    @classmethod
    def open(cls, device: torch.device, kind: str, index: int) -> Vendor:
        """Find the module of an accelerator that is there.

        Raises
        ------
        ConfigError
            This torch, or this machine, has no such accelerator.
        """
        module = module_of(kind)
        count = int(module.device_count())
        if index >= count:
            raise ConfigError(
                f"There is no device '{kind}:{index}': torch finds {count}, numbered from 0.",
                name=f"{kind}:{index}",
            )
        return cls(module, device, kind, index)


def module_of(kind: str, called: str = "") -> Any:
    """Return torch's module of a kind of device, which may be called otherwise ("hip").

    Raises
    ------
    ConfigError
        This torch, or this machine, has none; said by the name that it was called by.
    """
    import torch

    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        module = None
    if module is None or not module.is_available():
        name = called or kind
        raise ConfigError(
            f"This torch ({torch.__version__}) finds no usable {name!r} device. Install a "
            "build of torch and a driver for it, or use 'sim', which simulates one.",
            name=name,
        )
    return module


def has_expandable_segments() -> bool:
    """Whether torch's allocator was told to grow its segments, and to unmap parts of them."""
    import torch

    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return _says_expandable(ask())
    return any(_says_expandable(os.environ.get(name, "")) for name in ALLOCATOR_SETTINGS)


@functools.lru_cache(maxsize=8)
def _says_expandable(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "").split(",")


def _raw_stream_of(module: Any) -> Callable[[int], int] | None:
    """Torch's own quick look at the current stream, where a module is torch's and has one."""
    import torch

    name = getattr(module, "__name__", "")
    if name not in ("torch.cuda", "torch.xpu"):
        return None
    return getattr(torch._C, f"_{name.removeprefix('torch.')}_getCurrentRawStream", None)


def _has_blocking_events(module: Any) -> bool:
    """Whether events of a module can be told to let threads sleep (cuda, hip)."""
    event = getattr(module, "Event", None)
    if event is None:
        return False
    try:
        return "blocking" in inspect.signature(event).parameters
    except (TypeError, ValueError):  # written in C
        return False


def can_refill(device: torch.device) -> bool:
    """Whether a storage on a device can give its bytes back and get others; on mps it cannot."""
    try:
        storage = empty_bytes(8, device).untyped_storage()
        storage.resize_(0)
        is_empty = storage.nbytes() == 0
        storage.resize_(8)
    except RuntimeError:
        return False
    return is_empty and storage.nbytes() == 8
