"""The graph behind promises: what has to run, and in which order, for a promise to get its bytes.

A *cell* stands for one block's bytes through time, a *node* for one operator that was asked for and
has not run. Nodes run in the order in which they were asked for, those that are needed: the writer
of what is read, and before a block is written whoever was to read it first.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..base.errors import InvariantError, LostError
from ..devices.storages import empty_bytes, storage_of
from ..interception.entry import may_have_written
from ..memory.block import Block
from ..memory.plain_views import bare_ref
from .draws import Draws, drawing
from .kernel_settings import as_asked, settings_now

__all__ = [
    "Cell",
    "Node",
    "Operand",
    "copied",
    "fulfil_all",
    "is_lost",
    "lacks_values",
    "nodes_before",
    "used_by",
]

_numbers = itertools.count(1)


class Cell:
    """One block's bytes through time: those it had, and those it is going to get."""

    __slots__ = ("__weakref__", "_crowd", "base", "nbytes", "real", "users", "writer")

    def __init__(self, nbytes: int, real: Block | None = None) -> None:
        self.nbytes = nbytes
        #: A tensor without bytes, as a shape function has made or resized it, if one has; views of
        #: it have the metadata of views of the block.
        self.base = empty_bytes(nbytes, "meta")
        #: The bytes as they are after the last node that has run; None before the first one.
        self.real = real
        #: The last node that makes or writes them.
        self.writer: Node | None = None
        #: Nodes that use them, in their order; weak, so that nobody runs what nobody wants.
        self.users: list[weakref.ref[Node]] = []
        #: With so many of them it is looked which have died.
        self._crowd = 16

    def add_user(self, node: Node) -> None:
        """Note that a node uses the bytes, after all that do."""
        self.users.append(weakref.ref(node))
        if len(self.users) >= self._crowd:
            self._crowd = 16 + 2 * len(self._waiting())

    def users_before(self, number: int) -> list[Node]:
        """Return the nodes that use the bytes before node `number`, and have not run."""
        return [node for node in self._waiting() if node.number < number]

    def _waiting(self) -> list[Node]:
        """Return the users that have not run; forget the others."""
        nodes = [(reference, reference()) for reference in self.users]
        living = [(one, node) for one, node in nodes if node is not None and not node.is_done]
        self.users[:] = [reference for reference, _ in living]
        return [node for _, node in living]


@dataclass(frozen=True, slots=True)
class Operand:
    """A view of a cell: what a TensorRef is without its identity."""

    cell: Cell
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    label: torch.device
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, ref: Any, cell: Cell) -> Operand:
        """Describe a TensorRef over the block of a cell."""
        offset = int(ref.storage_offset())
        return cls(
            cell,
            ref.size(),
            ref.stride(),
            offset,
            ref.dtype,
            ref.device,
            ref.is_conj(),
            ref.is_neg(),
        )

    def real(self) -> Any:
        """Make the TensorRef over the bytes as they are now."""
        made = bare_ref(self.size, self.stride, self.offset, self.dtype, self.label, self.cell.real)
        if self.is_conj:
            torch._C._set_conj(made, True)
        if self.is_neg:
            torch._C._set_neg(made, True)
        return made


def copied(cell: Cell) -> Cell:
    """Return a cell that is to have a copy of the bytes that another one is to have by now."""
    made, size = Cell(cell.nbytes), torch.Size([cell.nbytes])
    whole = Operand(cell, size, (1,), 0, torch.uint8, torch.device("cpu"), False, False)
    Node("clone", "", torch.clone, (whole,), {}, uses=[cell], births=[(0, made)])
    return made


class Layout(NamedTuple):
    """How a result lies in its bytes, as a shape function has said."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    nbytes: int

    @classmethod
    def of(cls, tensor: Any, nbytes: int) -> Layout:
        """Describe a tensor whose storage has so many bytes."""
        stride = tuple(
            step if count > 1 else 1
            for count, step in zip(tensor.size(), tensor.stride(), strict=True)
        )
        offset, bits = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
        return cls(tensor.size(), stride, offset, tensor.dtype, *bits, nbytes)

    def laid_out(self, real: Any) -> Block:
        """Return the block of a kernel's result, or one with the same values in this layout.

        Kernels choose strides that torch's shape functions do not know of (those of `torch.fft`);
        what the program has made of the promise since then follows what it was told.
        """
        found = Layout.of(real, real._ttr_block.nbytes)
        # Of scratch memory a shape function says that there is none.
        is_scratch = self.size == (0,) and not self.nbytes and found.dtype == self.dtype
        if found == self or is_scratch:
            return real._ttr_block  # type: ignore[no-any-return]
        if (found.size, found.dtype) != (self.size, self.dtype):
            raise InvariantError(
                f"a shape function said {self.dtype} {tuple(self.size)}, and the kernel has made "
                f"{found.dtype} {tuple(found.size)}"
            )
        made = real.new_empty(self.nbytes // real.element_size())
        block: Block = made._ttr_block
        Operand(Cell(0, block), *self[:4], real.device, *self[4:6]).real().copy_(real)
        return block


class Node:
    """An operator, or a factory, that was asked for and has not run.

    Parameters
    ----------
    name : str
        The operator's.
    where : str
        File and line of the program that asked for it.
    run : callable
        Runs it for real on TensorRefs.
    args, kwargs
        Its arguments, with an `Operand` for each tensor.
    uses, writes : iterable of Cell
        What it reads or writes, and what of it it writes.
    births : sequence of (int, Cell)
        The cells of its fresh results, by their places among its flattened results.
    draws : Draws, optional
        Where its random numbers come from; who drew there before runs first.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "births",
        "checks",
        "deps",
        "draws",
        "grad_mode",
        "has_begun",
        "is_done",
        "kwargs",
        "name",
        "number",
        "run",
        "settings",
        "uses",
        "where",
        "writes",
    )

    def __init__(
        self,
        name: str,
        where: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        uses: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
        births: Sequence[tuple[int, Cell]] = (),
        draws: Draws | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.name, self.where = name, where
        #: None once it has run.
        self.run: Callable[..., Any] | None = run
        self.args, self.kwargs = args, kwargs
        #: As it was when it was asked for: kernels look at it (an LSTM's keeps scratch memory).
        self.grad_mode, self.settings = torch.is_grad_enabled(), settings_now()
        self.uses, self.writes = list(uses), {cell: _layout_of(cell) for cell in writes}
        self.births = [(place, weakref.ref(cell), _layout_of(cell)) for place, cell in births]
        self.deps = [cell.writer for cell in self.uses if cell.writer is not None]
        self.draws = draws
        before = None if draws is None else draws.wait(self)
        if before is not None:
            self.deps.append(before)
        self.is_done = False
        #: It writes, and may have written: once more would be twice.
        self.has_begun = False
        #: Operators that look at its results and make none: they run with it, and may refuse.
        self.checks: list[Node] = []
        if self.deps and not (self.writes or births):
            max(self.deps, key=lambda node: node.number).checks.append(self)
        for cell in self.uses:
            cell.add_user(self)
        for cell in self.writes:
            cell.writer = self
        for _, cell in births:
            cell.writer = self

    def fulfil(self) -> None:
        """Run it for real; what it uses has its bytes.

        Raises
        ------
        LostError
            It writes, and an error has come halfway: what it writes is neither old nor new.
        """
        if self.run is not None:
            self._execute(self.run)
        for check in self.checks:
            if not check.is_done:
                check.fulfil()
        self.is_done = True
        if self.draws is not None:
            self.draws.has_run(self)
        self.checks.clear()
        self.deps.clear()
        self.uses.clear()
        self.writes.clear()

    def _execute(self, run: Callable[..., Any]) -> None:
        if self.has_begun:
            raise LostError(
                f"{self.name} at {self.where} was promised and writes, and an error came while it "
                "ran: what it has written is lost. Make again what is promised of it."
            )
        operands: list[tuple[Cell, Any]] = []

        def real_of(value: Any) -> Any:
            if type(value) is not Operand:
                return value
            operands.append((value.cell, value.real()))
            return operands[-1][1]

        args, kwargs = tree_map(real_of, (self.args, self.kwargs))
        self.has_begun = bool(self.writes)
        try:
            with torch.set_grad_enabled(self.grad_mode), as_asked(self.settings):
                if self.draws is None:
                    real = run(*args, **kwargs)
                else:
                    real = self.draws.run(lambda: run(*args, **kwargs), self.number)
        except BaseException as error:
            self.has_begun = self.has_begun and may_have_written(error)
            raise
        leaves = tree_leaves(real)
        for cell, ref in operands:
            if cell in self.writes and ref._ttr_block is not cell.real:  # it was resized
                cell.real = self.writes[cell].laid_out(ref)
        for place, reference, layout in self.births:
            born = reference()
            if born is not None:
                born.real = layout.laid_out(leaves[place])
        self.run = self.args = self.kwargs = None  # only checks may be left


def _layout_of(cell: Cell) -> Layout:
    return Layout.of(cell.base, storage_of(cell.base).nbytes())


def nodes_before(last: Node | None) -> list[Node]:
    """Return what has to run, in that order, for a node to have run: for a cell, its writer.

    Returns
    -------
    list of Node
        That one among them; empty where it has run.
    """
    found: dict[int, Node] = {}
    #: By cell, up to which node its users are among them: writes of one are many.
    seen: dict[Cell, int] = {}
    waiting = [] if last is None else [last]
    while waiting:
        node = waiting.pop()
        if node.is_done or node.number in found:
            continue
        found[node.number] = node
        waiting.extend(node.deps)
        waiting.extend(dep for check in node.checks for dep in check.deps)
        for written in node.writes:
            if seen.get(written, 0) < node.number:
                seen[written] = node.number
                waiting.extend(written.users_before(node.number))
    return [found[number] for number in sorted(found)]


def fulfil_all(nodes: Iterable[Node]) -> None:
    """Run nodes in their order that have not run."""
    with drawing():
        for node in nodes:
            if not node.is_done:  # a check has run with what it looks at
                node.fulfil()


def is_lost(last: Node) -> bool:
    """Whether a node never runs: one that was broken off comes before it."""
    return any(node.has_begun and node.run is not None for node in nodes_before(last))


def used_by(nodes: Iterable[Node]) -> Iterator[Cell]:
    """Yield what nodes use."""
    for node in nodes:
        yield from node.uses


def lacks_values(cells: Iterable[Cell]) -> bool:
    """Whether any of these was made without values, and nobody gives it some."""
    return any(one.real is None and one.writer is None for one in cells)
