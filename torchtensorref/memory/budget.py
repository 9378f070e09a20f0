"""How many bytes a device may hold, and how many it holds."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import ConfigError, TensorRefError, TransferError, did_you_mean, nearest
from ..base.units import format_nbytes, parse_nbytes, parse_share
from ..devices.base import Device
from .block import Block, Replica
from .states import DIRTY

#: What a user may write for a budget: a number of bytes, a text, both by device, or nothing.
BudgetText = int | str | None
BudgetSetting = BudgetText | Mapping[str, BudgetText]

#: Failures after which an operator is tried elsewhere: memory is short, or a link fails.
SHORTAGES = (torch.OutOfMemoryError, TransferError)

_weakly = weakref.ref

#: Left to others of what is free, when no budget is given.
HEADROOM_SHARE = 0.10


class OutOfBudgetError(TensorRefError, torch.OutOfMemoryError):
    """Bytes do not fit on a device, even after every legal eviction.

    Cause: one operator needs more than the budget, or what fills the budget is held by running
    operators or by raw memory that was given away.

    Cure: raise `tensorsManager.budget`, or look at `tensorsManager.report()` to see what is held.
    Inside an operator it never reaches the program: the operator runs on the host instead.
    """

    def __init__(self, device: str, need_nbytes: int, limit_nbytes: int, held_nbytes: int) -> None:
        super().__init__(
            f"{device} out of memory. {need_nbytes:,} bytes are needed; {held_nbytes:,} of the "
            f"{limit_nbytes:,} budgeted are held and cannot be evicted. "
            "Raise TTR_BUDGET, or print tensorsManager.report() to see what holds them.",
            device=device,
            need_nbytes=need_nbytes,
            limit_nbytes=limit_nbytes,
            held_nbytes=held_nbytes,
        )


@dataclass(frozen=True)
class Budget:
    """The most bytes a device may hold, and where eviction starts and stops.

    Eviction starts when what is resident would pass the high watermark, and stops at the low one.
    Both are 1 unless asked otherwise: the budget is there to be filled.
    """

    limit_nbytes: int
    high_watermark: float = 1.0
    low_watermark: float = 1.0

    @functools.cached_property
    def high_nbytes(self) -> int:
        """Resident bytes up to which nothing is evicted."""
        return int(self.limit_nbytes * self.high_watermark)

    def excess_nbytes(self, resident_nbytes: int, incoming_nbytes: int = 0) -> int:
        """Bytes to evict before `incoming_nbytes` may enter; 0 below the high watermark."""
        after_nbytes = resident_nbytes + incoming_nbytes
        if after_nbytes <= self.limit_nbytes * self.high_watermark:
            return 0
        return max(after_nbytes - int(self.limit_nbytes * self.low_watermark), 0)


def resolve_budget(setting: BudgetSetting, device: Device) -> Budget:
    """Turn what the user wrote into the budget of one device.

    Parameters
    ----------
    setting : int, str, mapping or None
        Bytes; a size (`"6GiB"`) or a share of what the device can hold (`"25%"`); one of these by
        device name; None for what is free now less 10 percent.
    device : Device
        The device in question.

    Raises
    ------
    ConfigError
        The text is no size and no share, or the number is negative. Nothing has changed.
    """
    setting = setting_for(setting, device)
    if setting is None:
        free_nbytes = device.free_nbytes() + device.resident_nbytes
        return Budget(int(min(free_nbytes, device.capacity_nbytes) * (1 - HEADROOM_SHARE)))
    if isinstance(setting, str) and setting.strip().endswith("%"):
        return Budget(int(device.capacity_nbytes * parse_share(setting)))
    limit_nbytes = parse_nbytes(setting)
    if limit_nbytes < 0:
        raise ConfigError(f"A budget of {limit_nbytes} bytes is negative. Use a size like '6GiB'.")
    return Budget(min(limit_nbytes, device.capacity_nbytes))


def setting_for(setting: BudgetSetting, device: Device) -> BudgetText:
    """Return what a budget says of one device: by its name, by its kind, or of all of them."""
    if not isinstance(setting, Mapping):
        return setting
    for name in setting:
        kind = str(name).partition(":")[0]
        if kind not in ("cpu", "sim", "cuda", "hip", "xpu", "mps", "disk"):
            known = (device.name, device.kind, "cpu")
            raise ConfigError(
                f"The budget names a device {name!r} that does not exist. "
                + did_you_mean(str(name), known),
                name=str(name),
                known=known,
                nearest=nearest(str(name), known),
            )
    if device.name in setting:
        return setting[device.name]
    return setting.get(device.kind)


class Ledger:
    """The replicas that hold bytes on one device, and their sum. Its user holds the lock.

    Fresh results are counted by weak references to their blocks: most die within a few operators,
    and nobody ever asks for more about them. Those that live get a replica when somebody does.
    """

    def __init__(
        self, device: Device, budget: Budget, lock: Any, bury_all: Callable[[], None]
    ) -> None:
        self.device = device
        self.budget = budget
        #: Of the budget that was asked for, left to what kernels allocate in passing.
        self.scratch_nbytes = 0
        self.resident_nbytes = 0
        self._lock = lock
        self.bury_all = bury_all
        self._replicas: dict[int, tuple[int, weakref.ref[Replica]]] = {}
        #: Fresh results and their bytes, by the weak references that tell their deaths.
        self._newborn: dict[weakref.ref[Block], int] = {}
        #: Filled by weak references' callbacks, in any thread; `bury` takes them off the books.
        self.dead: deque[weakref.ref[Block]] = deque()
        self._on_death = self.dead.append
        #: The device counts for itself, and has to be told.
        self._is_witnessed = device.is_witness

    def bear_if_room(self, result: torch.Tensor, nbytes: int, tick: int) -> Block | None:
        """Make the block of a kernel's fresh result; None where that needs more than counting.

        What `bear` does, written out flat: it is done for most operators.
        """
        with self._lock:
            if self.dead:
                dead, newborn = self.dead, self._newborn
                while dead:
                    self.resident_nbytes -= newborn.pop(dead.popleft(), 0)
            if self.resident_nbytes + nbytes > self.budget.high_nbytes or self._is_witnessed:
                return None
            block = Block(nbytes, tick, self.device, result, self)
            # Last: whoever finds it here may ask it for its replica.
            self._newborn[_weakly(block, self._on_death)] = nbytes
            # Read again: making objects can collect garbage, whose finalizers may come here.
            self.resident_nbytes += nbytes
        return block

    @property
    def limit_nbytes(self) -> int:
        """The budget as it was asked for."""
        return self.budget.limit_nbytes + self.scratch_nbytes

    def bear(self, result: torch.Tensor, nbytes: int, tick: int) -> Block:
        """Make the block of a kernel's fresh result, and count it (lock held)."""
        block = Block(nbytes, tick, self.device, result, self)
        self._newborn[_weakly(block, self._on_death)] = nbytes
        self.resident_nbytes += nbytes
        return block

    def settle(self, block: Block) -> None:
        """Make the replica of a fresh result, and count that instead."""
        with self._lock:
            if block.births is None:
                return
            # Equal to the one it was counted by: while the block lives, references to it are.
            self.resident_nbytes -= self._newborn.pop(_weakly(block))
            assert block.result is not None
            replica = Replica(block, self.device, block.result, DIRTY)
            self.bury_all()  # its number may have been that of one that has died meanwhile
            self.add(replica)
            block.replicas = {self.device: replica}
            block.result = block.births = None

    def bury(self) -> None:
        """Take fresh results that have died off the books."""
        dead, newborn = self.dead, self._newborn
        while dead:
            self.resident_nbytes -= newborn.pop(dead.popleft(), 0)

    def add(self, replica: Replica) -> None:
        """Count a replica. The dead must have been buried before (`TensorsManager`)."""
        self._replicas[id(replica)] = (replica.nbytes, weakref.ref(replica))
        self.resident_nbytes += replica.nbytes

    def remove(self, replica: Replica) -> int:
        """Stop counting a replica; return its bytes."""
        return self.remove_key(id(replica))

    def remove_key(self, key: int) -> int:
        """Stop counting a replica that died; return its bytes, 0 if it did not count."""
        nbytes, _ = self._replicas.pop(key, (0, None))
        self.resident_nbytes -= nbytes
        return nbytes

    def __contains__(self, replica: Replica) -> bool:
        return id(replica) in self._replicas

    def replicas(self) -> list[Replica]:
        """Return the living replicas that hold bytes here."""
        for newborn in list(self._newborn):
            block = newborn()
            if block is not None:
                self.settle(block)
        found = (reference() for _, reference in list(self._replicas.values()))
        return [replica for replica in found if replica is not None]

    def recount_nbytes(self) -> int:
        """Sum again what is counted, for the comparison with the running sum."""
        counted = [nbytes for nbytes, _ in list(self._replicas.values())]
        return sum(counted) + sum(list(self._newborn.values()))

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.device.name} {format_nbytes(self.resident_nbytes)} of "
            f"{format_nbytes(self.budget.limit_nbytes)}>"
        )
