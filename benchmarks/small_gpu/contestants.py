"""Who takes part, and how each brings a model to the device.

Each with its best settings; `docs/benchmarks.md` says which those are, and why.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .machine import Machine
from .workloads import Put


class Contestant:
    """Plain torch, and what the others have in common with it.

    Attributes
    ----------
    name : str
        In the table.
    is_ours : bool
        Whether torchTensorRef runs in its process.
    package : str or None
        What has to be installed.
    """

    is_ours = False
    package: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def reason_not(self, cap_nbytes: int, weights_nbytes: int) -> str | None:
        """Why there can be no cell, or None."""
        if weights_nbytes > cap_nbytes:
            return (
                f"plain torch keeps all weights on the device: {weights_nbytes / 1e9:.3g} GB, "
                f"and the cap is {cap_nbytes / 1e9:.3g} GB"
            )
        return None

    def headrooms(self, cap_nbytes: int, weights_nbytes: int) -> list[int]:
        """Bytes to leave free below the cap, the best first; the next is tried when memory ends."""
        return [0]

    def begin(self, machine: Machine, cap_nbytes: int | None) -> None:
        """Do what has to be done before the model is loaded."""

    def place(self, model: Any, machine: Machine, room_nbytes: int, folder: Path) -> Put:
        """Bring the model to the device, in `room_nbytes`; return what brings inputs there."""
        model.to(machine.device)
        return machine.put

    def is_settled(self) -> bool:
        """Whether it is as it will be, asked after each run of the warm-up."""
        return True

    def reason_not_here(self, device: str, workload: str) -> str | None:
        """Why it does not run on a device, or not this workload; None if it does."""
        return None

    def model_to_run(self, model: Any) -> Any:
        """What programs call: some peers put something else before the model."""
        return model

    def plain(self, result: Any) -> Any:
        """Return a result as plain tensors on the host."""
        return tree_map(
            lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x,
            result,
        )

    def notes(self, machine: Machine) -> str:
        """What a run on this machine does not exercise."""
        return ""

    def counts(self) -> dict[str, Any]:
        """Whatever else it can say of itself."""
        return {}


class Ours(Contestant):
    """torchTensorRef under one of its strategies. The program is the unmodified one."""

    is_ours = True
    _locked_nbytes = -1

    def reason_not(self, cap_nbytes: int, weights_nbytes: int) -> str | None:
        return None

    def begin(self, machine: Machine, cap_nbytes: int | None) -> None:
        # From here on what torch's factories and modules make is ours.
        machine.begin_ours(self.name, cap_nbytes)

    def place(self, model: Any, machine: Machine, room_nbytes: int, folder: Path) -> Put:
        return lambda tensor: tensor

    def is_settled(self) -> bool:
        """Its home memory is page-locked as it recurs, which makes copies faster."""
        from torchTensorRef import tensorsManager

        before, self._locked_nbytes = (
            self._locked_nbytes,
            tensorsManager.stats()["page_locked_nbytes"],
        )
        return self._locked_nbytes == before

    def plain(self, result: Any) -> Any:
        from torchTensorRef import tensorsManager

        released = tensorsManager.release(result)
        return tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, released
        )

    def counts(self) -> dict[str, Any]:
        from torchTensorRef import tensorsManager

        tensorsManager.check()
        stats = tensorsManager.stats()
        wanted = ("fetched_nbytes", "prefetched_nbytes", "written_back_nbytes", "staged_nbytes")
        wanted += ("stall_ns", "alloc_retry_count", "out_of_budget_count")
        return {
            **{name: stats[name] for name in wanted},
            **{k: v for k, v in stats.items() if "page_locked" in k},
            "host_fallbacks": stats["host_fallback_count"],
        }


class Accelerate(Contestant):
    """accelerate's `dispatch_model`: what fits stays on the device, the rest in host memory."""

    package = "accelerate"
    _offloads = False

    def reason_not(self, cap_nbytes: int, weights_nbytes: int) -> str | None:
        return None

    def headrooms(self, cap_nbytes: int, weights_nbytes: int) -> list[int]:
        """Half-gigabyte steps of the full scale (PEERS d.3).

        More headroom leaves fewer weights on the device and changes nothing else, so the least that
        runs is the best.
        """
        step = math.ceil(weights_nbytes / 28)
        return [step * n for n in (1, 2, 3, 4, 6, 8) if step * n < cap_nbytes]

    def place(self, model: Any, machine: Machine, room_nbytes: int, folder: Path) -> Put:
        from accelerate import dispatch_model, infer_auto_device_map

        everything = 2**50
        # Without an accelerator everything is a tier lower: the host executes, the disk keeps.
        room: dict[Any, int] = (
            {"cpu": room_nbytes, "disk": everything}
            if machine.is_host
            else {machine.index: room_nbytes, "cpu": everything}
        )
        base = _without_adapters(model)
        blocks = list(getattr(base, "_no_split_modules", None) or [])
        device_map = infer_auto_device_map(model, max_memory=room, no_split_module_classes=blocks)
        main = "cpu" if machine.is_host else machine.index
        self._offloads = len(set(device_map.values())) > 1
        dispatch_model(model, device_map, main_device=main, offload_dir=folder / "offload")
        return machine.put

    def notes(self, machine: Machine) -> str:
        if not self._offloads:
            return "all of it fits, nothing is offloaded"
        if not machine.is_host:
            return ""
        return "on the host: offloaded to disk instead of host memory; copies to a device not run"


class Diffusers(Contestant):
    """diffusers' group offloading: nothing stays, the next group comes while one computes."""

    package = "diffusers"

    def __init__(self, name: str, offload_type: str) -> None:
        super().__init__(name)
        self._offload_type = offload_type

    def reason_not(self, cap_nbytes: int, weights_nbytes: int) -> str | None:
        return None

    def place(self, model: Any, machine: Machine, room_nbytes: int, folder: Path) -> Put:
        from diffusers.hooks import apply_group_offloading

        options: dict[str, Any] = {"offload_type": self._offload_type}
        if self._offload_type == "block_level":
            options["num_blocks_per_group"] = 1
            if hasattr(_without_adapters(model), "lm_head"):
                options["block_modules"] = ["model"]  # else the whole model is one group
        if not machine.is_host:
            options |= {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": False}
        apply_group_offloading(
            _without_adapters(model),
            onload_device=machine.device,
            offload_device=torch.device("cpu"),
            **options,
        )
        return machine.put

    def notes(self, machine: Machine) -> str:
        if not machine.is_host:
            return ""
        return "on the host: hooks run; streams, page-locked memory and copies to a device do not"


class FlexTensor(Contestant):
    """NVIDIA's FlexTensor: which weights stay is planned once, the others come in time.

    Everything that is a block of the model may be offloaded; the plan is for the same cap. It is
    made in the warm-up, from forwards that discover the order and measure, until which the
    contestant is not settled. Two to four blocks of room, whatever its own search finds best; its
    measuring is the one for tight memory, since the other keeps a second copy on the device.
    """

    package = "flextensor"

    def reason_not(self, cap_nbytes: int, weights_nbytes: int) -> str | None:
        return None

    def reason_not_here(self, device: str, workload: str) -> str | None:
        if not device.startswith("cuda"):
            return f"FlexTensor needs cuda, and this is {device}"
        return "FlexTensor is for inference only" if workload == "training" else None

    def headrooms(self, cap_nbytes: int, weights_nbytes: int) -> list[int]:
        """Of accelerate's: its plan too is for the cap less what activations need."""
        step = math.ceil(weights_nbytes / 28)
        return [step * n for n in (0, 1, 2, 3, 4, 6, 8) if step * n < cap_nbytes]

    def place(self, model: Any, machine: Machine, room_nbytes: int, folder: Path) -> Put:
        import flextensor

        share = min(1.0, room_nbytes / machine.total_nbytes())
        kinds = list(getattr(model, "_no_split_modules", None) or [])
        config = flextensor.OffloadConfig(
            gpu_device=machine.index,
            include_patterns=[f"class:{kind}" for kind in kinds],
            max_gpu_mem_fraction=share,
            profile_mode="getter",
            num_blocks=4,
            min_blocks=2,
        )
        self._model = flextensor.offload(model, config)
        self._manager = flextensor.get_offload_manager()
        return machine.put

    def model_to_run(self, model: Any) -> Any:
        return self._model

    def is_settled(self) -> bool:
        return str(self._manager.phase.value).lower() == "inference"


def _without_adapters(model: nn.Module) -> Any:
    """The model that PEFT's was made from, with the adapters in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Ours("flow"),
        Ours("lru"),
        Ours("genoa"),
        Contestant("plain"),
        Accelerate("accelerate"),
        Diffusers("diffusers block", "block_level"),
        Diffusers("diffusers leaf", "leaf_level"),
        FlexTensor("flextensor"),
    )
}


def reason_not(
    contestant: Contestant, workload: str, cap_nbytes: int, nbytes: int, device: str = ""
) -> str | None:
    """Why there can be no such cell, or None."""
    reason = contestant.reason_not_here(device, workload)
    if reason is not None:
        return reason
    for package in (contestant.package, "peft" if workload == "training" else None):
        if package is not None and importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return contestant.reason_not(cap_nbytes, nbytes)
