"""accelerate keeps weights on the meta device and brings them back: as with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..support.injection import assert_same_injected

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

#: A third of the weights.
BUDGET_NBYTES = 8 << 10


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)).eval()


def used(model: nn.Module) -> list[Any]:
    """What is computed twice, and what the model is then."""
    x = torch.rand(4, 64)
    results = [model(x).detach() for _ in range(2)]
    kinds = [(name, isinstance(p, nn.Parameter)) for name, p in model.named_parameters()]
    places = [(p.device.type, p.requires_grad) for p in model.parameters()]
    return [results, kinds, places, [b.device.type for b in model.buffers()]]


def cpu_offload(folder: Path) -> Any:
    return used(accelerate.cpu_offload(model(), execution_device="cpu", offload_buffers=True))


def cpu_offload_with_hook(folder: Path) -> Any:
    offloaded, hook = accelerate.cpu_offload_with_hook(model(), execution_device="cpu")
    found = used(offloaded)
    hook.offload()
    return [found, used(offloaded)]


def disk_offload(folder: Path) -> Any:
    return used(accelerate.disk_offload(model(), str(folder), execution_device="cpu"))


def dispatch_model(folder: Path) -> Any:
    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    dispatched = accelerate.dispatch_model(
        model(), places, offload_dir=str(folder), main_device="cpu", force_hooks=True
    )
    state = accelerate.utils.modeling.get_state_dict_offloaded_model(dispatched)
    return [used(dispatched), [state[name] for name in sorted(state)]]


def load_and_dispatch(folder: Path) -> Any:
    source = {name: tensor + 1 for name, tensor in model().state_dict().items()}
    safetensors.save_file(source, str(folder / "model.safetensors"), {"format": "pt"})
    with accelerate.init_empty_weights():
        empty = model()
    places = [(p.device.type, isinstance(p, nn.Parameter)) for p in empty.parameters()]
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, str(folder / "model.safetensors"), device_map={"": "cpu"}
    )
    return [places, used(loaded)]


def set_tensors(folder: Path) -> Any:
    one = model()
    put = accelerate.utils.set_module_tensor_to_device
    put(one, "0.weight", "meta")
    seen = [one[0].weight.device.type, isinstance(one[0].weight, nn.Parameter)]
    put(one, "0.weight", "cpu", value=torch.ones(64, 64), dtype=torch.float32)
    put(one, "1.running_mean", "cpu", value=torch.ones(64))
    one[2].weight.requires_grad_(False)
    put(one, "2.weight", "meta")
    put(one, "2.weight", "cpu", value=torch.ones(32, 64))
    return [seen, used(one)]


@pytest.mark.parametrize(
    "program",
    [
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        load_and_dispatch,
        set_tensors,
    ],
)
def test_weights_are_offloaded(manage, tmp_path, program: Callable[[Path], Any]):
    manager = manage("lru", BUDGET_NBYTES)
    folders = iter((tmp_path / "plain", tmp_path / "ours"))

    def run() -> Any:
        folder = next(folders)
        folder.mkdir()
        return program(folder)

    assert_same_injected(run, manager)
