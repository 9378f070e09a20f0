"""Phase 3, fetch: the arguments of one call as plain tensors on the device where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..devices.base import Device
from ..memory.block import Block, Replica
from ..memory.manager import TensorsManager
from ..memory.plain_views import for_writing, plain_on
from ..memory.ref import TensorRef
from ..memory.sparse import plain_sparse
from .device_labels import exchange_device, is_device_operand
from .operands import Operands


def fetch(operands: Operands, device: Device, manager: TensorsManager) -> Staged:
    """Make the operands readable on a device and hold them there.

    Raises
    ------
    OutOfBudgetError, torch.OutOfMemoryError, TransferError
        They cannot be brought there. Nothing is held.
    """
    staged = Staged(operands, device, manager)
    try:
        staged.acquire()
        staged.prepare()
    except BaseException:
        staged.release()
        raise
    return staged


def expected_results(operands: Operands, manager: TensorsManager) -> int:
    """Return the bytes that the results are expected to take: what they took the last time."""
    return manager.residency.times.result_nbytes.get(operands.sizes, 0)


def note_result(operands: Operands, manager: TensorsManager, nbytes: int) -> None:
    """Remember the bytes that a result takes, for the next call of its kind."""
    manager.residency.times.remember_results(operands.sizes, nbytes)


class Staged:
    """The arguments of one call as its kernel takes them, held on a device until `release`."""

    __slots__ = (
        "args",
        "device",
        "held",
        "kwargs",
        "label",
        "manager",
        "operands",
        "overwritten",
        "plain_of",
        "plain_of_sparse",
        "reads",
        "writes",
    )

    def __init__(self, operands: Operands, device: Device, manager: TensorsManager) -> None:
        self.operands = operands
        self.device = device
        self.manager = manager
        self.label = operands.label
        #: The plain tensor that stands for a TensorRef, by the id of the TensorRef.
        self.plain_of: dict[int, torch.Tensor] = {}
        #: The same of sparse operands, by the id of what the call has.
        self.plain_of_sparse: dict[int, torch.Tensor] = {}
        #: What was acquired, until `release`.
        self.held: Sequence[Replica] = ()
        #: What the kernel writes at home in the place of a copy, until it has.
        self.overwritten: Block | None = None

    def acquire(self) -> None:
        """Make the operands readable on the device, but for what the kernel overwrites."""
        operands, device, residency = self.operands, self.device, self.manager.residency
        overwritten = operands.overwritten if device.is_host else None
        if overwritten is None:
            expected_nbytes = 0 if device.is_host else expected_results(operands, self.manager)
            self.held = residency.acquire(
                device, operands.blocks, operands.written, expected_nbytes
            )
            return
        # The others first: who waits for one has nothing begun that others wait for.
        others = [block for block in operands.blocks if block is not overwritten]
        self.held = residency.acquire(device, others, [], 0)
        if residency.overwriting.begin(overwritten):
            self.overwritten = overwritten
        else:
            self.held = [*self.held, *residency.acquire(device, [overwritten], [overwritten], 0)]

    @property
    def written(self) -> Sequence[Block]:
        """Return what the kernel writes where the device has it: all but what it overwrites."""
        return self.operands.written if self.overwritten is None else ()

    def has_run(self) -> None:
        """Note that the kernel has written what it overwrites."""
        if self.overwritten is not None:
            self.manager.residency.overwriting.end(self.overwritten, is_written=True)
            self.overwritten = None

    def take_back_sizes(self) -> None:
        """Give what a kernel has resized (`out=`) the bytes that it had: an error came."""
        written = set(self.operands.written)
        for ref in self.operands.refs:
            if ref._ttr_block in written:
                storage = self.plain_of[id(ref)].untyped_storage()
                replica = ref._ttr_block.replicas[self.device]
                if storage.nbytes() != replica.nbytes:
                    replica.take_back_size(storage)

    def prepare(self) -> None:
        """Make the plain arguments."""
        operands, device = self.operands, self.device
        plan, accelerator = operands.plan, operands.accelerator
        written = set(operands.written)  # lists may be long
        for ref in operands.refs:
            if id(ref) not in self.plain_of:
                is_written = ref._ttr_block in written
                self.plain_of[id(ref)] = (for_writing if is_written else plain_on)(ref, device)
        for key, sparse in operands.sparse.items():
            self.plain_of_sparse[key] = plain_sparse(sparse, lambda part: self.plain_of[id(part)])
        self.args = [self._plain(arg) for arg in operands.args]
        self.kwargs = {name: self._plain(arg) for name, arg in operands.kwargs.items()}
        if plan.has_device:
            asked = exchange_device(plan, device, accelerator, self.args, self.kwargs)
            self.label = asked or self.label
        if operands.on_accelerator is not None:
            self._bring_device_operands()
        if plan.host_operands and (
            not device.has_host_kernels or operands.on_accelerator is not None
        ):
            self._bring_host_operands()
        #: What owns the bytes of the distinct operands, and of those that are written.
        self.reads = [block.replicas[device].base for block in operands.blocks]
        self.writes = [block.replicas[device].base for block in operands.written]

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _plain(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return self.plain_of[id(value)]
        if isinstance(value, torch.Tensor):
            if id(value) in self.plain_of_sparse:
                return self.plain_of_sparse[id(value)]
            ref = self.operands.adopted.get(id(value))
            return value if ref is None else self.plain_of[id(ref)]
        if type(value) is list:
            return [self._plain(part) for part in value]
        if type(value) is tuple:
            return tuple(self._plain(part) for part in value)
        return value

    def _bring_device_operands(self) -> None:
        """Exchange plain operands that lie on the accelerator, where the host is to run."""
        operands = self.operands
        there: Any = operands.on_accelerator

        def brought(value: Any) -> Any:
            if is_device_operand(value, operands.accelerator):
                return there.on(value, self.device)
            return value

        self.args = tree_map_only(torch.Tensor, brought, self.args)
        self.kwargs = tree_map_only(torch.Tensor, brought, self.kwargs)

    def _bring_host_operands(self) -> None:
        """Exchange the operands that a kernel reads at home, wherever it runs."""
        plan, operands = self.operands.plan, self.operands
        for name in plan.host_operands:
            original = operands.argument(name)
            home = self.manager.ownership.plain_at_home(
                operands.adopted.get(id(original), original)
            )
            if name in self.kwargs:
                self.kwargs[name] = home
            else:
                self.args[plan.argument_names.index(name)] = home

    def release(self) -> None:
        """Let go of the operands; those about which nothing is left to decide are ready again."""
        residency, device = self.manager.residency, self.device
        if self.overwritten is not None:
            residency.overwriting.end(self.overwritten, is_written=False)
        residency.release(self.held)
        with residency.books.lock:
            for block in self.operands.blocks:
                if device.is_host:
                    residency.readiness.settle_at_home(block)
                else:
                    residency.readiness.set_ready(block, device)
