"""Where an operator runs when the accelerator has no room, or no kernel, for it.

What does not fit runs in blocks (`blocks.py`) where it can, else on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..base.errors import TransferError
from ..base.listeners import Happening, listeners
from ..devices.base import Device
from ..devices.out_of_memory import is_said_otherwise, said_as_cuda
from ..memory.block import Block
from ..memory.budget import SHORTAGES, OutOfBudgetError
from ..memory.external_pressure import note_shortage
from ..memory.manager import TensorsManager
from ..memory.once import note_lack_of_room
from ..memory.residency import Residency
from ..operators.plan import OpPlan
from .blocks import Blocks
from .operands import Operands

#: What is evicted for a second try at least; what the kernel wanted is not known.
LEAST_NBYTES = 64 << 20

#: Errors after which the device can run nothing more.
BROKEN = (torch.AcceleratorError,)
#: Errors of our own frames, which may come after a kernel has written.
OURS = (RecursionError,)

_NO_ROOM = object()

NEEDS_TOO_MUCH = "the operator needs more than the budget"
NO_DEVICE_MEMORY = "the device was out of memory"
#: Reasons of fallbacks that more memory would have spared.
SHORT_OF_MEMORY = (NEEDS_TOO_MUCH, NO_DEVICE_MEMORY)


class Generators:
    """The states of the generators that may be drawn from on a device, before that happens."""

    def __init__(self, is_random: bool, device: Device, arguments: Iterable[Any] = ()) -> None:
        self._device = device
        given = [x for x in arguments if isinstance(x, torch.Generator)] if is_random else []
        self._given = [(generator, generator.get_state()) for generator in given]
        self._of_host = torch.get_rng_state() if is_random else None
        self._of_device = device.random_state() if is_random and not device.is_host else None

    def restore(self) -> None:
        """Set them back, so that a second run draws the same numbers."""
        if self._of_host is not None:
            torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._device.set_random_state(self._of_device)
        for generator, state in self._given:
            generator.set_state(state)


class Fallback:
    """Runs one operator on a device; again after room was made; else on the host.

    Parameters
    ----------
    operands : Operands
        What the operator reads and writes.
    manager : TensorsManager
        Whose devices they are.
    run_on : callable
        Runs the operator on a device, from fetching its operands to its results, and raises what
        speaks against it.
    blocks : Blocks
        Runs it in blocks.
    """

    __slots__ = ("_blocks", "_operands", "_residency", "_run_on", "_unsupported")

    def __init__(
        self,
        operands: Operands,
        manager: TensorsManager,
        run_on: Callable[[Device], Any],
        blocks: Blocks,
    ) -> None:
        self._operands = operands
        self._residency = manager.residency
        self._unsupported = manager.unsupported
        self._run_on = run_on
        self._blocks = blocks

    def run(self, device: Device) -> Any:
        """Run on a device; where it cannot, on the host."""
        host, plan = self._residency.books.host, self._operands.plan
        if device is host:
            if self._operands.reads_part_alone:
                result = self._blocks.run_on_parts()
                if result is not NotImplemented:
                    return result
            self._residency.books.counts.host_op_count += 1
            instead_of = self._operands.instead_of
            if instead_of is None:
                return self._run_on(host)
            done = self._run_at_home()
            if done is not _NO_ROOM:
                return done
            device = instead_of
        needs_blocks = self._blocks.is_needed(device)
        arguments = (*self._operands.args, *self._operands.kwargs.values())
        generators = Generators(plan.is_random, device, arguments)
        try:
            if needs_blocks:
                result = self._in_blocks(device)
                if result is not _NO_ROOM:
                    return result
            return self._run_there(device)
        except SHORTAGES as error:
            if self._operands.has_written:
                raise  # nothing is written twice
            result = self._run_again(device, error, generators)
            if result is _NO_ROOM and not (needs_blocks or isinstance(error, TransferError)):
                generators.restore()
                result = self._in_blocks(device)
            if result is not _NO_ROOM:
                return result
            self._note(reason_of(error))
        except NotImplementedError:
            if device.has_host_kernels:
                raise  # the host has the same kernels
            self._unsupported.add((plan.number, self._operands.dtype))
            self._note(f"no kernel for {plan.name} on {device.kind}")
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if device.torch_device.type == "cpu" or isinstance(error, BROKEN + OURS):
                raise  # the host has the same kernels, or nothing can run any more
            if self._operands.has_written:
                raise  # the host had no memory for a result, say: nothing is written twice
            generators.restore()
            result = self._run_on(host)  # a mistake of the program's own is raised here
            why = str(error).partition("\n")[0][:80]
            self._note(f"{plan.name} refused on {device.kind}: {why}")
            return result
        generators.restore()
        return self._run_on(host)

    def _run_there(self, device: Device) -> Any:
        try:
            return self._run_on(device)
        except RuntimeError as error:
            if not is_said_otherwise(error):
                raise
            raise said_as_cuda(error) from error

    def _in_blocks(self, device: Device) -> Any:
        """Run it in blocks; `_NO_ROOM` where it cannot be, or where not even one finds room."""
        try:
            result = self._blocks.run(device)
        except SHORTAGES:
            if self._operands.has_written:
                raise
            return _NO_ROOM
        if self._blocks.why_not:
            name = self._operands.plan.name
            self._residency.books.log.note("-", f"not in blocks {name}", self._blocks.why_not)
        return _NO_ROOM if result is NotImplemented else result

    def _run_at_home(self) -> Any:
        """Run at home what the accelerator could run as well; `_NO_ROOM` where it has to.

        The host may have no kernel for the dtype. That is asked once: nothing has been written.
        """
        operands, times = self._operands, self._residency.times
        try:
            return self._run_on(self._residency.books.host)
        except (*OURS, *SHORTAGES):
            raise
        except (NotImplementedError, RuntimeError):
            if operands.accelerator.has_host_kernels:
                raise  # it has the same kernels: it is the program's own mistake
            times.refuse(operands.plan.kind, str(operands.dtype).removeprefix("torch."))
            return _NO_ROOM

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
        residency = self._residency
        ledger = residency.books.ledgers[device]
        limit_nbytes = ledger.budget.limit_nbytes
        for need_nbytes in (max(LEAST_NBYTES, self._operands.nbytes), limit_nbytes):
            generators.restore()
            with residency.books.lock:
                note_shortage(ledger)
                excess_nbytes = ledger.resident_nbytes - ledger.budget.limit_nbytes
            residency.evictor.evict_some(device, max(need_nbytes, excess_nbytes))
            device.give_up_caches()
            residency.books.log.note(
                "-", f"again {self._operands.plan.name}", "a kernel found no memory"
            )
            try:
                return self._run_there(device)
            except SHORTAGES as again:
                if isinstance(again, OutOfBudgetError):
                    break
        return _NO_ROOM

    def _note(self, reason: str) -> None:
        note_fallback(self._residency, self._operands.plan, reason)


def settled(
    plain: torch.Tensor, plan: OpPlan, residency: Residency, device: Device, *, has_written: bool
) -> tuple[torch.Tensor, Block, Device]:
    """Make the block of a fresh result; return what it is over, the block, and where that is.

    Parameters
    ----------
    has_written : bool
        The operator has changed its operands.

    Raises
    ------
    OutOfBudgetError, torch.OutOfMemoryError, TransferError
        There is no room for it, and the operator may run again. Nothing has changed.
    """
    try:
        return plain, residency.born(plain, device), device
    except SHORTAGES as error:
        if not has_written:
            raise
        # What it has written cannot be written again, so it cannot run again: the result is there,
        # and goes home.
        note_fallback(residency, plan, reason_of(error))
        plain, host = plain.cpu(), residency.books.host
        return plain, residency.born(plain, host), host


def note_fallback(residency: Residency, plan: OpPlan, reason: str) -> None:
    """Count that the host did what the accelerator should have done."""
    fallbacks = residency.books.counts.host_fallbacks
    fallbacks[reason] = fallbacks.get(reason, 0) + 1
    counts = residency.books.counts
    by_operator = counts.host_fallback_operators
    by_operator[plan.name] = by_operator.get(plan.name, 0) + 1
    residency.books.log.note("-", f"host fallback {plan.name}", reason)
    if reason not in SHORT_OF_MEMORY:
        return
    counts.out_of_budget_count += 1
    note_lack_of_room(plan.name, residency.books)
    if listeners.any:
        device = residency.books.main
        now_ns = device.now_ns()
        listeners.tell(
            Happening("out_of_budget", plan.name, 0, device.name, reason, now_ns, now_ns)
        )


def reason_of(error: BaseException) -> str:
    """Say why memory was too short, in the words of the statistics."""
    if isinstance(error, OutOfBudgetError):
        return NEEDS_TOO_MUCH
    if isinstance(error, TransferError):
        return "a copy failed"
    return NO_DEVICE_MEMORY
