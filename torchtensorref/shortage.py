"""A kernel found no memory: make room and run the operator again, as if for the first time."""

from __future__ import annotations

from typing import Any

import torch

from .budget import SHORTAGES, OutOfBudgetError
from .devices.base import Device
from .headroom import note_shortage

#: Returned where a second try is of no use.
NO_ROOM = object()

#: What is evicted for a second try at least; what the kernel wanted is not known.
LEAST_NBYTES = 64 << 20


class Generators:
    """The states of the generators that an operator may draw from, before it does."""

    def __init__(self, call: Any, device: Device) -> None:
        is_random = call.plan.is_random
        self._device = device
        self._of_host = torch.get_rng_state() if is_random else None
        self._of_device = device.random_state() if is_random and not device.is_host else None

    def restore(self) -> None:
        """Set them back, so that a second run draws the same numbers."""
        if self._of_host is not None:
            torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._device.set_random_state(self._of_device)


def run_again(call: Any, device: Device, error: BaseException, generators: Generators) -> Any:
    """Make room on a real accelerator whose kernel found none, and run the operator again.

    Returns
    -------
    Any
        The operator's result; `NO_ROOM` where the ledger itself had refused, the device is
        simulated (its kernels need no memory of their own), or all the room was too little.

    Notes
    -----
    Kernels allocate before they launch what writes, so operands are as they were before.
    """
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    if device.is_simulated or not out_of_memory or isinstance(error, OutOfBudgetError):
        return NO_ROOM
    residency = call.residency
    ledger = residency.ledgers[device]
    operands_nbytes = sum(block.nbytes for block in call.blocks)
    for need_nbytes in (max(LEAST_NBYTES, operands_nbytes), ledger.budget.limit_nbytes):
        generators.restore()
        with residency.lock:
            note_shortage(ledger)
            excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
        residency.evict_some(device, max(need_nbytes, excess_nbytes))
        device.give_up_caches()
        residency.log.note("-", f"again {call.plan.name}", "a kernel found no memory")
        try:
            return call.run_on(device)
        except SHORTAGES as again:
            if isinstance(again, OutOfBudgetError):
                break
    return NO_ROOM
