"""The ladder: where an operator runs when the accelerator has no room, or no kernel, for it."""

from __future__ import annotations

from typing import Any

import torch

from ..base.errors import TransferError
from ..devices.base import Device
from ..memory.budget import SHORTAGES, OutOfBudgetError
from ..memory.external_pressure import note_shortage
from .operands import Operands

#: What is evicted for a second try at least; what the kernel wanted is not known.
LEAST_NBYTES = 64 << 20

#: Errors after which the device can run nothing more.
BROKEN = (torch.AcceleratorError,)

_NO_ROOM = object()


class Generators:
    """The states of the generators that may be drawn from on a device, before that happens."""

    def __init__(self, is_random: bool, device: Device) -> None:
        self._device = device
        self._of_host = torch.get_rng_state() if is_random else None
        self._of_device = device.random_state() if is_random and not device.is_host else None

    def restore(self) -> None:
        """Set them back, so that a second run draws the same numbers."""
        if self._of_host is not None:
            torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._device.set_random_state(self._of_device)


class Ladder(Operands):
    """An operator that runs on a device, after room was made, or on the host."""

    __slots__ = ()

    def run_on(self, device: Device) -> Any:
        """Fetch the operands to a device, run there, commit what was written, wrap the results."""
        raise NotImplementedError

    def _run_down_the_ladder(self, device: Device) -> Any:
        """Run on a device; where memory is too short for it, on the host."""
        host = self.residency.books.host
        if device is host:
            self.residency.books.counts.host_op_count += 1
            return self.run_on(host)
        if self._might_need_a_second_run():
            self._note_fallback("writes and makes results while memory is short")
            return self.run_on(host)
        generators = Generators(self.plan.is_random, device)
        try:
            return self.run_on(device)
        except SHORTAGES as error:
            result = self._run_again(device, error, generators)
            if result is not _NO_ROOM:
                return result
            self._note_fallback(_reason(error))
        except NotImplementedError:
            if device.has_host_kernels:
                raise  # the host has the same kernels
            self.manager.unsupported.add((self.plan.number, self._dtype()))
            self._note_fallback(f"no kernel for {self.plan.name} on {device.kind}")
        except (RuntimeError, IndexError, ValueError) as error:
            if device.torch_device.type == "cpu" or isinstance(error, BROKEN):
                raise  # the host has the same kernels, or nothing can run any more
            generators.restore()
            result = self.run_on(host)  # a mistake of the program's own is raised here
            why = str(error).partition("\n")[0][:80]
            self._note_fallback(f"{self.plan.name} refused on {device.kind}: {why}")
            return result
        generators.restore()
        return self.run_on(host)

    def _run_again(self, device: Device, error: BaseException, generators: Generators) -> Any:
        """Make room on a real accelerator whose kernel found none, and run there again.

        Returns
        -------
        Any
            The operator's result; `_NO_ROOM` where the ledger itself had refused, the device is
            simulated (its kernels need no memory of their own), or all the room was too little.

        Notes
        -----
        Kernels allocate before they launch what writes, so operands are as they were before.
        """
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not device.kernels_allocate or not out_of_memory or isinstance(error, OutOfBudgetError):
            return _NO_ROOM
        residency = self.residency
        ledger = residency.books.ledgers[device]
        operands_nbytes = sum(block.nbytes for block in self.blocks)
        for need_nbytes in (max(LEAST_NBYTES, operands_nbytes), ledger.budget.limit_nbytes):
            generators.restore()
            with residency.books.lock:
                note_shortage(ledger)
                excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
            residency.evictor.evict_some(device, max(need_nbytes, excess_nbytes))
            device.give_up_caches()
            residency.books.log.note("-", f"again {self.plan.name}", "a kernel found no memory")
            try:
                return self.run_on(device)
            except SHORTAGES as again:
                if isinstance(again, OutOfBudgetError):
                    break
        return _NO_ROOM

    def _might_need_a_second_run(self) -> bool:
        """What does not fit is made again on the host: impossible once operands have changed."""
        if not self.written or all(twin is not None for twin in self.plan.result_of_write):
            return False
        ledger = self.residency.books.ledgers[self.accelerator]
        need_nbytes = 3 * sum(block.nbytes for block in self.blocks)
        return need_nbytes > ledger.budget.limit_nbytes

    def _note_fallback(self, reason: str) -> None:
        fallbacks = self.residency.books.counts.host_fallbacks
        fallbacks[reason] = fallbacks.get(reason, 0) + 1
        self.residency.books.log.note("-", f"host fallback {self.plan.name}", reason)

    def _note_shortage(self, error: BaseException) -> None:
        self._note_fallback(_reason(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, OutOfBudgetError):
        return "the operator needs more than the budget"
    if isinstance(error, TransferError):
        return "a copy failed"
    return "the device was out of memory"
