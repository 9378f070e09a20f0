"""What strategies are told of devices: facts that stay, also copied, changed, or kept for later."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

import torch

from torchTensorRef.strategy import BlockSnapshot, DeviceSnapshot, Strategy


class Keeping(Strategy):
    """One that keeps what it is told, as a program does that wraps another strategy."""

    name = "keeping"

    def __init__(self) -> None:
        self.seen: list[DeviceSnapshot] = []

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> list[int]:
        self.seen.append(device)
        return [block.block_id for block in candidates]


def test_a_device_that_a_strategy_was_told_of_is_a_dataclass_like_any_other(manage):
    strategy = Keeping()
    manager = manage(strategy, 4096)
    kept = [manager.adopt(torch.rand(256)) * 2 for _ in range(8)]
    assert strategy.seen
    for device in strategy.seen:
        smaller = replace(device, limit_nbytes=17)
        assert (smaller.limit_nbytes, smaller.name) == (17, device.name)
    device = strategy.seen[-1]
    facts = {field.name: getattr(device, field.name) for field in fields(DeviceSnapshot)}
    assert asdict(device) == facts
    assert facts["limit_nbytes"] == 4096
    del kept
    for same in (copy.copy(device), copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert asdict(same) == facts
    assert facts["name"] in repr(device)
