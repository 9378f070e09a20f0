"""Phase 1, analyse: what one call of an operator reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..devices.base import Device
from ..memory.block import Block
from ..memory.manager import TensorsManager
from ..memory.ref import TensorRef
from ..memory.sparse import SparseRef, sparse_over
from ..operators.layouts import SPARSE
from ..operators.plan import OpPlan
from .device_labels import DeviceOperands, is_device_operand

_PLAIN_OR_REF = (torch.Tensor, torch.nn.Parameter, TensorRef)


class Operands:
    """One call of an operator, and the tensors in it; made by `analyse`, then only read."""

    __slots__ = (
        "accelerator",
        "adopted",
        "args",
        "blocks",
        "has_written",
        "in_blocks_nbytes",
        "instead_of",
        "kwargs",
        "label",
        "on_accelerator",
        "pieces",
        "plan",
        "reads_part_alone",
        "refs",
        "sparse",
        "unmanaged",
        "written",
    )

    def __init__(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], accelerator: Device
    ) -> None:
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.accelerator = accelerator
        #: The operands as TensorRefs, in the order of the arguments; plain ones as adopted.
        self.refs: list[Any] = []
        #: The TensorRefs of plain operands, by the id of the plain tensor.
        self.adopted: dict[int, Any] = {}
        #: Sparse operands whose parts are among `refs`, by the id of what the call has.
        self.sparse: dict[int, Any] = {}
        #: Plain operands that the program has made on the accelerator itself.
        self.on_accelerator: DeviceOperands | None = None
        #: Plain operands that cannot be adopted: with one of them the operator runs on the host.
        self.unmanaged: list[torch.Tensor] = []
        #: The device that the results say they are on: that of the first operand.
        self.label: torch.device | None = None
        #: The accelerator in whose stead the host runs it, because the strategy wants that.
        self.instead_of: Device | None = None
        #: It reads a few rows of a table that is at home, and stays there.
        self.reads_part_alone = False
        #: The blocks that were made for this call, of operands of which it reads a part.
        self.pieces: frozenset[Block] = frozenset()
        #: Its kernel has run, and changed operands: it must not run again.
        self.has_written = False
        #: What it took where it ran in blocks; 0: it did not.
        self.in_blocks_nbytes = 0
        #: The distinct blocks of all operands, and of those that are written.
        self.blocks: list[Block] = []
        self.written: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What calls of the operator on operands of equal sizes have in common."""
        return _sizes_of(self.plan, self.refs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype for which a device has a kernel, or has none."""
        dtype: torch.dtype = self.refs[0].dtype if self.refs else torch.float32
        return dtype

    @property
    def has_other_subclass(self) -> bool:
        """Whether an operand is of another class of tensors that answers to operators itself."""
        return any(_is_other_subclass(kind) for kind in map(type, self.unmanaged))

    @property
    def table(self) -> Any:
        """The TensorRef of which a part is read; None where that is sparse, or stays plain."""
        return self.ref_of(self.argument(self.plan.argument_names[0]))

    @property
    def overwritten(self) -> Block | None:
        """The block of which every byte is written, and none read; None where there is no such."""
        return overwritten_of(
            self.plan, self.ref_of(self.args[0]) if self.args else None, self.refs
        )

    def argument(self, name: str) -> Any:
        """Return the value of an argument, its default where it was left out."""
        return self.plan.argument(name, self.args, self.kwargs)

    def written_arguments(self) -> list[Any]:
        """Return the values of the arguments that are written, those of lists one by one."""
        return tree_leaves([self.argument(name) for name in self.plan.write_names])

    def ref_of(self, value: Any) -> Any:
        """Return the TensorRef by which an argument takes part; None if it does not."""
        return value if isinstance(value, TensorRef) else self.adopted.get(id(value))

    def parts_of(self, value: Any) -> tuple[Any, ...]:
        """Return the TensorRefs that a sparse operand is made of; none of any other."""
        sparse = self.sparse.get(id(value))
        return () if sparse is None else sparse._ttr_parts

    def as_passed(self, ref: Any) -> Any:
        """Return the program's own tensor for an operand: a plain one stays plain."""
        for value in (*self.args, *self.kwargs.values()):
            for part in value if isinstance(value, (list, tuple)) else (value,):
                if part is ref or self.adopted.get(id(part)) is ref:
                    return part
        return ref


def analyse(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], manager: TensorsManager
) -> Operands:
    """Find the operands: TensorRefs, plain tensors that take part, and what is written."""
    operands = Operands(plan, args, kwargs, manager.residency.books.main)
    for arg in args:
        _collect(arg, operands, manager)
    for arg in kwargs.values():
        _collect(arg, operands, manager)
    operands.blocks = list(dict.fromkeys(ref._ttr_block for ref in operands.refs))
    written = []
    for name in plan.write_names:
        value = operands.argument(name)
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                refs = (operands.ref_of(part), *operands.parts_of(part))
                written += [ref._ttr_block for ref in refs if ref is not None]
    operands.written = list(dict.fromkeys(written))
    return operands


def _collect(value: Any, operands: Operands, manager: TensorsManager) -> None:
    if isinstance(value, TensorRef):
        operands.refs.append(value)
        if operands.label is None:
            operands.label = value.device
    elif type(value) is SparseRef:
        _collect_sparse(value, value, operands)
    elif isinstance(value, torch.Tensor):
        _collect_plain(value, operands, manager)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, operands, manager)


def _collect_plain(tensor: torch.Tensor, operands: Operands, manager: TensorsManager) -> None:
    """Let a plain operand take part as a block of its own, if it can be one."""
    if is_device_operand(tensor, operands.accelerator):
        operands.on_accelerator = operands.on_accelerator or DeviceOperands()
        operands.on_accelerator.tensors.append(tensor)
        operands.label = operands.label or tensor.device
    elif tensor.layout in SPARSE and tensor.is_cpu and type(tensor) in _PLAIN_OR_REF:
        _collect_plain_sparse(tensor, operands, manager)
    elif (
        _is_other_subclass(type(tensor))
        or tensor.device.type == "meta"
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_mkldnn
    ):
        operands.unmanaged.append(tensor)
    elif tensor.dim() > 0 or operands.plan.writes:
        ref = manager.ownership.adopt_operand(tensor)
        if ref is None:
            operands.unmanaged.append(tensor)
        else:
            operands.adopted[id(tensor)] = ref
            operands.refs.append(ref)


def _collect_sparse(value: torch.Tensor, sparse: Any, operands: Operands) -> None:
    if id(value) not in operands.sparse:
        operands.sparse[id(value)] = sparse
        # Its values tell the dtype for which there is a kernel.
        operands.refs += reversed(sparse._ttr_parts)
    if operands.label is None:
        operands.label = sparse.device


def _collect_plain_sparse(
    tensor: torch.Tensor, operands: Operands, manager: TensorsManager
) -> None:
    """Let a plain sparse operand take part by its parts; one that is written is left as it is."""
    plan = operands.plan
    is_written = any(
        tensor is part
        for name in plan.write_names
        for part in _listed(plan.argument(name, operands.args, operands.kwargs))
    )
    adopt = manager.ownership.adopt_operand
    sparse = tensor if is_written else sparse_over(tensor, tensor.device, adopt)
    if sparse is tensor:
        operands.unmanaged.append(tensor)
    else:
        _collect_sparse(tensor, sparse, operands)


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_other_subclass(kind: type) -> bool:
    return (
        kind not in (*_PLAIN_OR_REF, SparseRef)
        and hasattr(kind, "__torch_dispatch__")
        and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def overwritten_of(plan: OpPlan, first: Any, refs: Iterable[Any]) -> Block | None:
    """Return the block of which every byte is written, and none read; None without one.

    Parameters
    ----------
    first : Any
        The first operand, or what is in its place.
    refs : iterable of TensorRef
        All operands.
    """
    if not plan.overwrites or not isinstance(first, TensorRef) or not first.is_contiguous():
        return None
    block: Block = first._ttr_block
    is_whole = first.numel() * first.element_size() == block.nbytes
    is_alone = sum(ref._ttr_block is block for ref in refs) == 1
    return block if is_whole and is_alone else None


def flattened(plan: OpPlan, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, those of lists of tensors one by one."""
    if not plan.list_positions:
        return args
    flat: list[Any] = []
    for position, arg in enumerate(args):
        if position in plan.list_positions and arg is not None:
            flat.extend(arg)
        else:
            flat.append(arg)
    return tuple(flat)


def folded(plan: OpPlan, args: tuple[Any, ...], flat: list[Any]) -> list[Any]:
    """Return flat arguments in lists again, as they were in `args`."""
    if not plan.list_positions:
        return flat
    folded: list[Any] = []
    start = 0
    for position, arg in enumerate(args):
        if position in plan.list_positions and arg is not None:
            folded.append(flat[start : start + len(arg)])
            start += len(arg)
        else:
            folded.append(flat[start])
            start += 1
    return folded


def targets(plan: OpPlan, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what an operator writes, lists one by one."""
    for position in plan.writes:
        value: Any = args[position] if position < len(args) else ()
        yield from value if type(value) in (list, tuple) else (value,)


def sizes_of_call(plan: OpPlan, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what calls of an operator on operands of equal sizes have in common."""
    return _sizes_of(plan, [arg for arg in flattened(plan, args) if isinstance(arg, TensorRef)])


def _sizes_of(plan: OpPlan, refs: list[Any]) -> tuple[Any, ...]:
    return (plan.number, *(ref.size() for ref in refs[:3]))
