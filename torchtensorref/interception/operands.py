"""The first two phases of an operator: find its operands, decide where it runs."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..memory.ref import TensorRef
from ..operators.schema import OpPlan
from ..strategy import OpSnapshot
from .device_labels import Guests, is_guest

#: A table of which rows are read is fetched as a whole once so many operators have read it,
TABLE_USES = 3
#: and if it takes at most this much of the room that is free.
TABLE_SHARE = 0.5


class Operands:
    """What one call of an operator reads and writes, and the device it will run on."""

    __slots__ = (
        "accelerator",
        "args",
        "blocks",
        "born",
        "foreign",
        "guests",
        "kwargs",
        "label",
        "manager",
        "plain_of",
        "plan",
        "refs",
        "residency",
        "special",
        "written",
        "written_refs",
    )

    def __init__(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        manager: TensorsManager,
    ) -> None:
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.manager = manager
        self.residency = manager.residency
        self.accelerator = self.residency.books.main
        self.born: list[Block] = []

    # -- analyse --------------------------------------------------------------------------------

    def analyse(self) -> None:
        """Find the operands: TensorRefs, plain tensors that take part, and what is written."""
        self.refs: list[Any] = []
        self.foreign: dict[int, Any] = {}
        self.guests: Guests | None = None
        self.special: list[torch.Tensor] = []
        self.label: Any = None
        for arg in self.args:
            self._collect(arg)
        for arg in self.kwargs.values():
            self._collect(arg)
        self.blocks: list[Block] = list(dict.fromkeys(ref._ttr_block for ref in self.refs))
        written = []
        for name in self.plan.write_names:
            value = self.plan.argument(name, self.args, self.kwargs)
            for part in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(part, torch.Tensor):
                    ref: Any = part if type(part) is TensorRef else self.foreign.get(id(part))
                    if ref is not None:
                        written.append(ref)
        self.written_refs = written
        self.written: list[Block] = list(dict.fromkeys(ref._ttr_block for ref in written))

    def _collect(self, value: Any) -> None:
        if type(value) is TensorRef:
            self.refs.append(value)
            if self.label is None:
                self.label = value.device
        elif isinstance(value, torch.Tensor):
            self._collect_plain(value)
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._collect(part)

    def _collect_plain(self, tensor: torch.Tensor) -> None:
        """A plain operand takes part as a block of its own; what cannot, sends us to the host."""
        if is_guest(tensor, self.accelerator):
            self.guests = self.guests or Guests()
            self.guests.tensors.append(tensor)
            self.label = self.label or tensor.device
        elif (
            self._is_other_subclass(type(tensor))
            or tensor.device.type == "meta"
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_mkldnn
        ):
            self.special.append(tensor)
        elif tensor.dim() > 0 or self.plan.writes:
            ref = self.manager.ownership.adopt_operand(tensor)
            if ref is None:
                self.special.append(tensor)
            else:
                self.foreign[id(tensor)] = ref
                self.refs.append(ref)

    def _is_other_subclass(self, kind: type) -> bool:
        return (
            kind not in (torch.Tensor, torch.nn.Parameter, TensorRef)
            and hasattr(kind, "__torch_dispatch__")
            and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        )

    # -- place ----------------------------------------------------------------------------------

    def place(self) -> Device:
        """Decide where the operator runs."""
        residency, host, plan = self.residency, self.residency.books.host, self.plan
        if not residency.books.accelerators or self.special:
            return host
        if self.guests is not None:
            return self.accelerator  # the program has put one of its operands there
        if plan.draws_random(self.args, self.kwargs) and (
            self.label is None or self.label.type == "cpu"
        ):
            return host
        for block in self.written:
            if block.exposure is not None and block.exposure.alive:
                return block.exposure.device
        if plan.runs_at_home and self._table_is_away():
            return host
        if (plan.number, self._dtype()) in self.manager.unsupported:
            return host
        missing = [
            b for b in self.blocks if b.ready is None and not b.readable_on(self.accelerator)
        ]
        return self._ask_strategy(sum(block.nbytes for block in missing))

    def _table_is_away(self) -> bool:
        """Whether the operand of which only a part is read is not on the accelerator.

        Where there is room for all of it, it is fetched once it is known to come again: then its
        rows need not cross the link each time.
        """
        block: Block = self.refs[0]._ttr_block
        if block.readable_on(self.accelerator) is not None:
            return False
        residency = self.residency
        ledger = residency.books.ledgers[self.accelerator]
        room_nbytes = ledger.budget.high_nbytes - ledger.resident_nbytes
        is_wanted = block.use_count >= TABLE_USES and not residency.books.is_pressed
        return not is_wanted or block.nbytes > room_nbytes * TABLE_SHARE

    def _dtype(self) -> torch.dtype:
        return self.refs[0].dtype if self.refs else torch.float32

    def _ask_strategy(self, missing_nbytes: int) -> Device:
        residency = self.residency
        snapshot = OpSnapshot(
            name=self.plan.name,
            operand_nbytes=sum(block.nbytes for block in self.blocks),
            missing_nbytes=missing_nbytes,
            flops=0,
            default_device=self.accelerator.name,
        )
        with residency.feed.lock:
            name = residency.feed.strategy.place(snapshot)
        return self.manager.device_named(name)
