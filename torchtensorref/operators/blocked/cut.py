"""A cut: the axes along which one call of an operator may be taken apart, and what lies along them.

An axis is a range of numbers, such as the rows of a product. Each operand has, for each of its
dimensions, the axis it lies along, or none: then it is whole in every tile. Each result has an axis
for each of its dimensions that is cut. A *tile* is a range on each axis; the operator called on the
pieces of the operands that lie in it gives the piece of the results that lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

#: For each dimension of a tensor the number of the axis it lies along; None: it is never cut.
Along = tuple[int | None, ...]

#: Where an operand stands in a call: the argument's name, and its place if that is a list.
Place = tuple[str, int | None]

#: A range on each axis: where it begins, and where it ends.
Tile = tuple[tuple[int, int], ...]

#: Makes of operands at home, by their names, smaller ones that stand for them; None where the call
#: is the program's own mistake.
Gather = Callable[[dict[str, torch.Tensor]], "dict[str, torch.Tensor] | None"]

#: Gives other arguments the values they have in a tile: sizes, a number of groups.
Localise = Callable[[Tile], dict[str, Any]]


class Axis(NamedTuple):
    """What may be cut.

    Cuts are at multiples of `step`, and no tile is shorter than that: the last one takes what is
    left over. Cut there, the tiles' results are bit for bit parts of the whole one's, or not.
    """

    extent: int
    step: int = 1
    keeps_bits: bool = True
    #: Where they are not: the step at which they would be; 0: there is none.
    exact_step: int = 0

    @property
    def most_tiles(self) -> int:
        """How many tiles there can be."""
        return max(self.extent // self.step, 1)

    def ranges(self, length: int) -> list[tuple[int, int]]:
        """Cut it into tiles of about `length`."""
        length = max(length // self.step, 1) * self.step
        count = max(self.extent // length, 1)
        if self.extent - count * length >= self.step:
            count += 1
        ends = [length * (i + 1) for i in range(count - 1)] + [self.extent]
        return list(zip([0, *ends[:-1]], ends, strict=True))


class Inner(NamedTuple):
    """The axis that an operator goes along itself, and what puts its tiles together.

    It is gone through for each tile of the other axes, and cut only where nothing else fits or
    that is so much better.
    """

    axis: int
    #: Makes what puts the results of the tiles together (`sums.py`).
    sums: Callable[..., Any]
    #: How often it is gone through: a softmax looks at the numbers twice.
    passes: int = 1
    #: Whether that has to be from its beginning to its end each time.
    is_in_order: bool = False
    #: Whether its tiles are put together so even where it is whole: another axis may be cut then,
    #: and the operator itself knows nothing of what lies before its operands.
    is_always: bool = False
    #: Axes that are cut as short as may be before it is, so that its pieces lie in one run.
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one call may be cut."""

    axes: tuple[Axis, ...]
    #: What operands lie along; one that is not named is whole in every tile.
    operands: dict[Place, Along]
    #: The same for each tensor that the operator returns.
    results: tuple[Along, ...]
    localise: Localise | None = field(default=None)
    #: Operands and results are taken as the runs of elements that they are in memory.
    is_flat: bool = False
    #: Results lie in memory as that of the first tile does: torch does not foretell it.
    follows_tiles: bool = False
    inner: Inner | None = field(default=None)
    #: What is made on the way to a result along `inner`: bytes, and the axes that they lie along.
    scratch: tuple[tuple[int, frozenset[int]], ...] = ()
    #: Where only a part of the operands is read, told by their values: what is fetched instead of
    #: those that `operands` names, and how many bytes that takes. There is one tile then.
    gather: Gather | None = field(default=None)
    gathered_nbytes: int = 0

    @property
    def can_be_cut(self) -> bool:
        """Whether there can be more than one tile."""
        return self.gather is not None or any(axis.most_tiles > 1 for axis in self.axes)

    def keeping_bits(self) -> Cut:
        """Return the cut with those axes whole along which a cut changes bits, wherever it is."""
        axes = tuple(
            axis if axis.keeps_bits else Axis(axis.extent, axis.exact_step or axis.extent or 1)
            for axis in self.axes
        )
        return replace(self, axes=axes)


class Call:
    """One call, as far as a rule looks at it: arguments by their names, and their sizes."""

    __slots__ = ("arguments", "op", "thread_count")

    def __init__(self, op: Any, arguments: dict[str, Any]) -> None:
        self.op = op
        self.arguments = arguments
        self.thread_count = torch.get_num_threads()

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def tensors(self) -> list[tuple[Place, torch.Tensor]]:
        """Return the tensors in the call, with where they stand."""
        found: list[tuple[Place, torch.Tensor]] = []
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found.append(((name, None), value))
            elif isinstance(value, (list, tuple)):
                found += [
                    ((name, i), part)
                    for i, part in enumerate(value)
                    if isinstance(part, torch.Tensor)
                ]
        return found


#: One tile, what results there are: of operands only what is used is fetched, and no bit changes.
WHOLE = Cut(axes=(), operands={}, results=())

#: Says how a call may be cut; None where it may not.
Rule = Callable[[Call], Cut | None]


def broadcast_along(tensor: torch.Tensor, sizes: Sequence[int], first: int = 0) -> Along:
    """What a tensor lies along that is broadcast to sizes, each of which is an axis.

    Parameters
    ----------
    sizes : sequence of int
        What it is broadcast to.
    first : int, optional
        The number of the axis that the first of the sizes is.
    """
    lead = len(sizes) - tensor.dim()
    return tuple(
        None if size != sizes[lead + i] else first + lead + i
        for i, size in enumerate(tensor.size())
    )


def begins_at(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor begins at a multiple of so many bytes of its memory."""
    return int(tensor.storage_offset()) * tensor.element_size() % nbytes == 0


def are_rows_at(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor and all its rows begin at multiples of so many bytes of its memory."""
    return begins_at(tensor, nbytes) and all(
        stride == 1 or stride * tensor.element_size() % nbytes == 0 for stride in tensor.stride()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their range of memory without gaps or repetition, in some order."""
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    return _follow_one_another((stride, size) for stride, size in pairs if size != 1)


def _follow_one_another(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions, as (stride, size), each begin where the one inside of it ends."""
    expected = 1
    for stride, size in sorted(dimensions):
        if stride != expected:
            return False
        expected *= size
    return True


#: In the order in which kernels ask for them.
_FORMATS = ((None, torch.contiguous_format), (4, torch.channels_last), (5, torch.channels_last_3d))


def has_one_layout(tensor: torch.Tensor) -> bool:
    """Whether kernels and tensors without bytes agree on what a result beside it is like.

    The strides of dimensions of one element lead nowhere, and say something all the same: whether
    a tensor counts as contiguous or with its channels last, and where in the order of memory they
    come. Where they are others than torch gives a fresh tensor of that layout, kernels make results
    of other strides than they are foretold to, and by those the next kernels choose their way.
    """
    if 1 not in tensor.size():
        return True
    for dims, layout in _FORMATS:
        if dims in (None, tensor.dim()) and tensor.is_contiguous(memory_format=layout):
            return lies_as_fresh(tensor, layout)
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    return not is_dense(tensor) or _follow_one_another(pairs)  # else it was not made and permuted


def lies_as_fresh(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    """Whether a tensor has the strides of a new one, also in dimensions of one element.

    A tensor with such a dimension can be contiguous in several formats at once.
    """
    if not tensor.is_contiguous(memory_format=layout):
        return False
    with torch._C.DisableTorchFunction():
        fresh = torch._C._VariableFunctions.empty(
            tensor.size(), device="meta", memory_format=layout
        )
    return bool(fresh.stride() == tensor.stride())
