"""A strategy that shakes another: it decides as the other does, and evicts at random besides."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from torchTensorRef.strategy import (
    Access,
    BlockSnapshot,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
)


class Shaken(Strategy):
    """Every decision is the inner strategy's; after an operator a random part goes besides.

    Parameters
    ----------
    inner : Strategy
        Who decides.
    seed : int
        Of the random evictions.
    share : float
        The part of what an operator has used, and of what is dirty, that is given back.
    """

    watches_accesses = True

    def __init__(self, inner: Strategy, seed: int = 0, share: float = 0.3) -> None:
        self.inner = inner
        self.mixes_devices = inner.mixes_devices
        self.name = f"shaken-{inner.name}"
        self._random = random.Random(seed)
        self._share = share

    def _some(self, blocks: Iterable[BlockSnapshot]) -> list[int]:
        return [block.block_id for block in blocks if self._random.random() < self._share]

    def place(self, op: OpSnapshot) -> str:
        return self.inner.place(op)

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        return [*self._some(candidates), *self.inner.victims(device, candidates, need_nbytes)]

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        return {*self.inner.after_operator(device, used), *self._some(used)}

    def on_access(self, access: Access) -> None:
        self.inner.on_access(access)

    def on_birth(self, block_id: int, nbytes: int, place: int) -> int:
        return self.inner.on_birth(block_id, nbytes, place)

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        self.inner.on_prefetch(block_id, nbytes)

    def on_death(self, block_id: int) -> None:
        self.inner.on_death(block_id)

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        return self.inner.prefetch(device, resident)

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        dirty = self._some(block for block in resident if block.is_dirty)
        return {*self.inner.write_back(device, resident), *dirty}
