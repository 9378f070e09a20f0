"""What people use today, written as strategies, to be measured beside ours.

They imitate the order of copies, not the code: `prefix_resident` is what a device map of accelerate
amounts to (the first layers stay, the rest is fetched when needed and dropped after use),
`stream_ahead` is diffusers' group offloading with a stream (nothing stays, the next group is
fetched while one computes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchTensorRef.strategy import (
    Access,
    BlockSnapshot,
    DeviceSnapshot,
    Prefetch,
    Strategy,
)


def _until_freed(blocks: Iterable[BlockSnapshot], need_nbytes: int) -> list[int]:
    chosen: list[int] = []
    for block in blocks:
        if need_nbytes <= 0:
            break
        chosen.append(block.block_id)
        need_nbytes -= block.nbytes
    return chosen


class PrefixResident(Strategy):
    """Keep the blocks that the program uses first; fetch the others on demand, keep none of them.

    The prefix is as long as fits: it closes when room is first needed, and gives up its last blocks
    for good when something else must have the room.
    """

    name = "prefix_resident"
    watches_accesses = True

    def __init__(self) -> None:
        self._prefix: dict[int, int] = {}  # block -> rank
        self._is_open = True

    def on_access(self, access: Access) -> None:
        """Take the block into the prefix while that is still open."""
        if self._is_open and access.is_persistent:
            self._prefix.setdefault(access.block_id, len(self._prefix))

    def on_death(self, block_id: int) -> None:
        """Forget a block."""
        self._prefix.pop(block_id, None)

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return blocks outside the prefix, then its end, then what operators have made."""
        self._is_open = False

        def order(block: BlockSnapshot) -> tuple[int, int]:
            if block.block_id in self._prefix:
                return 1, -self._prefix[block.block_id]
            return (0 if block.is_persistent else 2), block.last_use

        chosen = _until_freed(sorted(candidates, key=order), need_nbytes)
        for block_id in chosen:
            self._prefix.pop(block_id, None)
        return chosen

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return the persistent blocks used that are not in the prefix."""
        return [
            block.block_id
            for block in used
            if block.is_persistent and block.block_id not in self._prefix
        ]


class StreamAhead(Strategy):
    """Keep no persistent block; fetch the next one while an operator computes."""

    name = "stream_ahead"
    watches_accesses = True

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # block -> the persistent block used after it
        self._nbytes: dict[int, int] = {}
        self._last = -1

    def on_access(self, access: Access) -> None:
        """Note which block follows which."""
        if not access.is_persistent:
            return
        self._nbytes[access.block_id] = access.nbytes
        if self._last != access.block_id:
            self._next[self._last] = access.block_id
        self._last = access.block_id

    def on_death(self, block_id: int) -> None:
        """Forget a block."""
        self._nbytes.pop(block_id, None)

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return persistent blocks first, the oldest first."""
        order = sorted(candidates, key=lambda block: (not block.is_persistent, block.last_use))
        return _until_freed(order, need_nbytes)

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return the persistent blocks used."""
        return [block.block_id for block in used if block.is_persistent]

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        """Return the block that followed the last one before."""
        block_id = self._next.get(self._last, -1)
        nbytes = self._nbytes.get(block_id, 0)
        held = {block.block_id for block in resident}
        if not nbytes or block_id in held or nbytes > device.free_nbytes:
            return ()
        return [Prefetch(block_id)]
