"""What a seat runs on: its clock, its cap, and what its allocator counts.

`cuda:0`, `xpu:0`, `mps` are torch's own devices. `sim:NAME` is the simulated one, in virtual time,
and then the host for those who are not ours. `cpu` is a rehearsal of the way with a real device:
ours runs the adapter for real accelerators over `torch.cpu`, the others run on the host.
"""

from __future__ import annotations

import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch

from .scales import FULL_NBYTES, SCALES, Scale
from .weights import sizes_of


class Machine:
    """A device of torch's, or the host.

    Parameters
    ----------
    name : str
        ``"cuda:0"``, ``"cpu"``, ...
    """

    #: Whether a single run is enough, since its time says nothing.
    runs_once = False

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.module: Any = torch.get_device_module(self.device.type)
        self.index = self.device.index or 0
        self._peaks: dict[str, int] = {}
        self._least_held: int | None = None

    @property
    def is_host(self) -> bool:
        """Whether there is no accelerator here."""
        return self.device.type == "cpu"

    @property
    def is_comparable(self) -> bool:
        """Whether times are those of a device: the host's say nothing of any."""
        return not self.is_host

    def total_nbytes(self) -> int:
        """What the device can hold; 0 where torch cannot say."""
        if hasattr(self.module, "mem_get_info"):
            return int(self.module.mem_get_info(self.index)[1])
        if hasattr(self.module, "recommended_max_memory"):
            return int(self.module.recommended_max_memory())
        return 0

    def cap(self, nbytes: int) -> bool:
        """Let torch's allocator refuse more; the same call for every contestant."""
        limit = getattr(self.module, "set_per_process_memory_fraction", None)
        if limit is None:
            return False
        fraction = min(1.0, nbytes / self.total_nbytes())
        limit(fraction) if self.device.type == "mps" else limit(fraction, self.index)
        return True

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the device, as those do who have to."""
        return tensor.to(self.device)

    def now_s(self) -> float:
        """Wait for the device, then read the clock."""
        if not self.is_host:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    # -- memory ---------------------------------------------------------------------------------

    def reset_peaks(self) -> None:
        """Start the peaks of the device and of resident host memory again."""
        self._reset_peaks()
        self._peaks, self._least_held = {}, None
        reset_peak_rss()

    def begin_steps(self) -> None:
        """Tell the peak of what comes before the first step from that of the steps."""
        self._take_peaks("before")

    def end_step(self) -> None:
        """Take the peak of a step, and what is held between steps."""
        self._take_peaks("steps")
        held = self._allocated()
        if held is not None:
            self._least_held = held if self._least_held is None else min(self._least_held, held)

    def _take_peaks(self, when: str) -> None:
        for name, value in self._current_peaks().items():
            for key in (name, f"{name} {when}"):
                self._peaks[key] = max(value, self._peaks.get(key, 0))
        self._reset_peaks()

    def _reset_peaks(self) -> None:
        if hasattr(self.module, "reset_peak_memory_stats"):
            self.module.reset_peak_memory_stats(self.index)

    def _current_peaks(self) -> dict[str, int]:
        """What torch's own allocator says; nothing where there is none."""
        if not hasattr(self.module, "max_memory_allocated"):
            return {}
        return {
            "allocated": int(self.module.max_memory_allocated(self.index)),
            "reserved": int(self.module.max_memory_reserved(self.index)),
        }

    def _allocated(self) -> int | None:
        module = self.module
        if not hasattr(module, "memory_allocated"):
            return None
        return int(module.memory_allocated(self.index))

    def memory(self) -> dict[str, int | None]:
        """The peaks since `reset_peaks`; None where nobody can say.

        Returns
        -------
        dict
            `allocated`, `reserved`, `page_locked`, `rss`; `retries`: how often torch's allocator
            gave up its cache for want of room, since the seat began; `in_steps` is what was
            allocated at most during steps, `between_steps` the least that was between them;
            `driver` is what the driver says is taken at the end.
        """
        self._take_peaks("after")
        page_locked = None
        if not self.is_host and hasattr(self.module, "host_memory_stats"):
            page_locked = int(self.module.host_memory_stats().get("allocated_bytes.current", 0))
        return {
            "allocated": self._peaks.get("allocated"),
            "reserved": self._peaks.get("reserved"),
            "page_locked": page_locked,
            "rss": peak_rss(),
            "retries": self._retries(),
            "in_steps": self._peaks.get("allocated steps"),
            "between_steps": self._least_held,
            "driver": self._taken_from_driver(),
        }

    def _retries(self) -> int | None:
        if self.is_host or not hasattr(self.module, "memory_stats"):
            return None
        return int(self.module.memory_stats(self.index).get("num_alloc_retries", 0))

    def _taken_from_driver(self) -> int | None:
        """What the driver has given away, to whomever; also what no allocator of torch's saw."""
        if not hasattr(self.module, "mem_get_info"):
            return None
        free_nbytes, total_nbytes = self.module.mem_get_info(self.index)
        return int(total_nbytes - free_nbytes)

    # -- for ours -------------------------------------------------------------------------------

    def begin_ours(self, strategy: str, cap_nbytes: int | None) -> None:
        """Set torchTensorRef up on this device, as a user does."""
        from torchTensorRef import tensorsManager

        tensorsManager.device = self._our_device()
        if cap_nbytes is not None:
            tensorsManager.budget = cap_nbytes
        tensorsManager.strategy = strategy

    def _our_device(self) -> Any:
        if not self.is_host:
            return str(self.device)
        from torchTensorRef.devices.accelerator.device import AcceleratorDevice

        device = AcceleratorDevice("cpu", module=torch.cpu)  # type: ignore[arg-type]
        device.name, device.capacity_nbytes = "adapter:0", 8 << 30
        return device

    def describe(self) -> dict[str, str]:
        """What a reader has to know of the hardware."""
        name = platform.processor() or platform.machine()
        if hasattr(self.module, "get_device_name"):
            name = self.module.get_device_name(self.index)
        return {
            "device": f"{self.device} ({name})",
            "memory": f"{self.total_nbytes() / 1e9:.1f} GB",
        }


class SimulatedMachine(Machine):
    """A simulated device of ours, in virtual time.

    Its speeds are a card's, divided so that the scale's weights take as long to copy and to read as
    the full scale's on the card. For models that are bound by arithmetic, that is divided further
    by the ratio of the lengths, so that the balance of copies and arithmetic stays as well.
    Latencies are not scaled.
    """

    def __init__(self, name: str, scale: Scale, family: str) -> None:
        super().__init__("cpu")
        from torchTensorRef.devices.sim.cards import SPECS

        self.name = name
        card = SPECS[name.partition(":")[2]]
        slower = FULL_NBYTES[family] / sizes_of(scale, family).nbytes
        full = SCALES["full"]
        shorter = {
            "llama": 1.0,
            "denoiser": full.patches / scale.patches,
            "lora": full.training_tokens / scale.training_tokens,
        }[family]
        self.spec = card.scaled(
            h2d_bytes_per_s=card.h2d_bytes_per_s / slower,
            d2h_bytes_per_s=card.d2h_bytes_per_s / slower,
            # What activations take grows with the lengths, as arithmetic does.
            memory_bytes_per_s=card.memory_bytes_per_s / slower,
            host_memory_bytes_per_s=card.host_memory_bytes_per_s / slower,
            host_flops_per_s=card.host_flops_per_s / slower / shorter,
            flops_per_s={k: v / slower / shorter for k, v in card.flops_per_s.items()},
        )

    @property
    def is_comparable(self) -> bool:
        return True

    def begin_ours(self, strategy: str, cap_nbytes: int | None) -> None:
        from torchTensorRef import tensorsManager
        from torchTensorRef.devices.sim.device import SimDevice

        room = 2**40 if cap_nbytes is None else cap_nbytes
        self.sim = SimDevice(self.spec.scaled(capacity=room), name=self.name)
        tensorsManager.device = self.sim
        tensorsManager.budget = room
        tensorsManager.strategy = strategy

    def cap(self, nbytes: int) -> bool:
        return True  # the simulated device is made no larger

    def now_s(self) -> float:
        from torchTensorRef import tensorsManager

        return float(tensorsManager.stats()["time_ns"] / 1e9)

    def _reset_peaks(self) -> None:
        self.sim.reset_peak()

    def _current_peaks(self) -> dict[str, int]:
        return {"allocated": int(self.sim.peak_nbytes)}

    def _allocated(self) -> int | None:
        return int(self.sim.resident_nbytes)

    def describe(self) -> dict[str, str]:
        spec = self.spec
        return {
            "device": f"{self.name}, simulated, virtual time",
            "memory": "as large as the cap",
            "speeds": f"{spec.name}'s divided: to copy the weights takes as long as to copy the "
            "full scale's takes there",
        }


class HostMachine(Machine):
    """The host, for a dry run of those who are not ours: results count, times do not."""

    runs_once = True

    def __init__(self) -> None:
        super().__init__("cpu")


def open_machine(name: str, scale: Scale, family: str, *, is_ours: bool) -> Machine:
    """Return what a seat runs on."""
    if not name.startswith("sim:"):
        return Machine(name)
    return SimulatedMachine(name, scale, family) if is_ours else HostMachine()


class StopWatch:
    """The laps of a run: seconds per step."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._mark_s = machine.now_s()
        self.steps_s: list[float] = []

    def skip(self) -> None:
        """Forget the time since the last mark."""
        self._machine.begin_steps()
        self._mark_s = self._machine.now_s()

    def step(self, count: int = 1) -> None:
        """Note the time since the last mark, as that of `count` steps."""
        now_s = self._machine.now_s()
        self.steps_s += [(now_s - self._mark_s) / count] * count
        self._machine.end_step()
        self._mark_s = self._machine.now_s()


def reset_peak_rss() -> None:
    """Start the kernel's record of this process's peak again, where it lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # then the peak is that of the whole process, which is no less


def peak_rss() -> int:
    """The most resident memory this process had, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
