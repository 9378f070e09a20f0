"""Equations: what an einsum says of each dimension, parsed once and kept.

The text is torch's: `"bij,bjk->bik"`, with `...` for dimensions that broadcast, and without `->`
for the result of all labels that appear once, in alphabetical order. Labels are letters, or
integers in lists, of which there may be any number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch

#: A letter, a number, or (for what `...` stands for) a pair of "..." and a place from the right.
Label = Any
Labels = tuple[Label, ...]


class Bound(NamedTuple):
    """An equation with the sizes of its dimensions."""

    #: Labels of each operand, once its diagonals are taken and broadcast dimensions dropped.
    inputs: tuple[Labels, ...]
    output: Labels
    sizes: dict[Label, int]

    def with_summed(self, spelt: Sequence[Labels]) -> Bound:
        """Keep summed dimensions that broadcast, too, of operands with these labels.

        Where the best terms are is told in the order in which operands first have a dimension, and
        that is not to depend on who broadcasts.
        """
        inputs = tuple(
            tuple(x for x in dict.fromkeys(labels) if x in kept or x not in self.output)
            for labels, kept in zip(spelt, self.inputs, strict=True)
        )
        return self._replace(inputs=inputs)


class Equation:
    """Which dimensions of operands are the same, and which of them the result has.

    Parameters
    ----------
    inputs : str or sequence of sequences
        The equation as text, or the labels of each operand: letters, integers of at least 0, or
        `...`.
    output : sequence, optional
        The labels of the result; of text, what is behind `->`.

    Raises
    ------
    ValueError
        It is no equation; the message says where it is wrong.

    Examples
    --------
    >>> product = Equation("ij,jk")
    >>> product
    Equation('ij,jk->ik')
    >>> Equation([[0, 1], [1, 77]], [0, 77])
    Equation('[0, 1], [1, 77] -> [0, 77]')
    """

    __slots__ = ("inputs", "output", "plans", "text")

    def __init__(
        self, inputs: str | Sequence[Sequence[Label]], output: Sequence[Label] | None = None
    ) -> None:
        if isinstance(inputs, str):
            left, arrow, right = inputs.partition("->")
            output = _letters(right, inputs) if arrow else None
            inputs = [_letters(part, inputs) for part in left.split(",")]
        self.inputs: tuple[Labels, ...] = tuple(_checked(labels) for labels in inputs)
        self.output: Labels = _implied(self.inputs) if output is None else _checked(output)
        #: Of `plan.py`, by what they depend on.
        self.plans: dict[Any, Any] = {}
        self._refuse_output()
        #: As torch has it; empty where labels are integers.
        self.text = "" if self._has_integers() else str(self)

    def _refuse_output(self) -> None:
        known = {label for labels in self.inputs for label in labels}
        for label in self.output:
            if self.output.count(label) > 1:
                raise ValueError(f"{self}: the result has the index {label!r} twice.")
            if label not in known and label is not ...:
                raise ValueError(
                    f"{self}: the result has the index {label!r}, which no operand has, so "
                    "its size is not known. Add an operand that has it (ones, for copies), or "
                    "expand the result."
                )

    def bind(self, shapes: Sequence[torch.Size]) -> Bound:
        """Find the size of each dimension for operands of these shapes.

        Raises
        ------
        ValueError
            The operands do not fit the equation, or each other.
        """
        if len(shapes) != len(self.inputs):
            raise ValueError(
                f"{self} is about {len(self.inputs)} operands, and {len(shapes)} are given."
            )
        spelt = [self.spelt_out(place, len(shape)) for place, shape in enumerate(shapes)]
        sizes: dict[Label, int] = {}
        for place, (labels, shape) in enumerate(zip(spelt, shapes, strict=True)):
            for label, size in zip(labels, shape, strict=True):
                known = sizes.get(label, 1)
                if 1 not in (known, size) and known != size:
                    raise ValueError(
                        f"{self}: the index {_name(label)} has {known} elements, and {size} in "
                        f"operand {place}, of shape {tuple(shape)}. Only 1 broadcasts."
                    )
                sizes[label] = size if known == 1 else known
        inputs = []
        for place, (labels, shape) in enumerate(zip(spelt, shapes, strict=True)):
            own = dict(zip(labels, shape, strict=True))
            if any(own[label] != size for label, size in zip(labels, shape, strict=True)):
                raise ValueError(
                    f"{self}: operand {place}, of shape {tuple(shape)}, has one index for "
                    "dimensions of different sizes. A diagonal needs the same."
                )
            inputs.append(tuple(label for label in own if own[label] == sizes[label]))
        dots = max((_dot_count(labels) for labels in spelt), default=0)
        output = _with_dots(self.output, dots)
        return Bound(tuple(inputs), output, sizes)

    def spelt_out(self, place: int, dim: int) -> Labels:
        """Return the labels of an operand of so many dimensions, with those of `...`."""
        labels = self.inputs[place]
        dots = dim - (len(labels) - (... in labels))
        if dots < 0 or (dots and ... not in labels):
            raise ValueError(
                f"{self}: operand {place} has {dim} dimensions, and the equation has "
                f"{len(labels) - (... in labels)} indices for it. `...` stands for any more."
            )
        return _with_dots(labels, dots)

    def __reduce__(self) -> Any:
        # Without plans: they are kept by the identity of what a copy has copies of.
        return Equation, (self.inputs, self.output)

    def __repr__(self) -> str:
        return f"Equation({str(self)!r})"

    def _has_integers(self) -> bool:
        return any(isinstance(label, int) for labels in self.inputs for label in labels)

    def __str__(self) -> str:
        if self._has_integers():
            lists = ", ".join(str([_shown(one) for one in labels]) for labels in self.inputs)
            return f"{lists} -> {[_shown(one) for one in self.output]}".replace("'...'", "...")
        joined = ["".join(map(_shown, labels)) for labels in (*self.inputs, self.output)]
        return f"{','.join(joined[:-1])}->{joined[-1]}"


def view(operand: torch.Tensor, spelt: Labels, kept: Labels, sizes: Sequence[int]) -> torch.Tensor:
    """Take diagonals of an operand, and drop dimensions that broadcast; no bytes are copied.

    What broadcasts and is kept gets the size that it has in others.
    """
    labels = list(spelt)
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            operand = operand.diagonal(0, first, second)  # it becomes the last one
            del labels[second], labels[first]
            labels.append(label)
    for label in [label for label in labels if label not in kept]:
        operand = operand.select(labels.index(label), 0)
        labels.remove(label)
    order = [labels.index(label) for label in kept]
    operand = operand if order == sorted(order) else operand.permute(order)
    return operand if list(operand.shape) == sizes else operand.expand(sizes)


@functools.lru_cache(maxsize=1024)
def compiled(text: str) -> Equation:
    """Return the equation of a text, parsed the first time."""
    return Equation(text)


def _letters(part: str, text: str) -> list[Label]:
    """Split a part of the text of an equation into its labels."""
    labels: list[Label] = []
    at = 0
    while at < len(part):
        if part.startswith("...", at):
            labels.append(...)
            at += 3
        elif part[at].isascii() and part[at].isalpha():
            labels.append(part[at])
            at += 1
        elif part[at] == " ":  # anywhere but between the dots
            at += 1
        else:
            raise ValueError(
                f"{text!r} is no equation: {part[at]!r} is neither a letter nor part of `...`. For "
                "more than 52 indices write integers: einsum(a, [0, 1], b, [1, 2], [0, 2])."
            )
    return labels


def _checked(labels: Iterable[Label]) -> Labels:
    found = tuple(labels)
    for label in found:
        is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
        is_letter = isinstance(label, str) and len(label) == 1
        if not (is_number or is_letter or isinstance(label, EllipsisType)):
            raise ValueError(f"{label!r} is no index: a letter, an integer of 0 or more, or ...")
    if found.count(...) > 1:
        raise ValueError(f"{found} has `...` twice, so nobody knows where one of them ends.")
    return found


def _implied(inputs: Iterable[Labels]) -> Labels:
    """Return what a result has that is not said: `...`, then each label that appears once."""
    every = [label for labels in inputs for label in labels]
    once = [label for label in every if label is not ... and every.count(label) == 1]
    dots: Labels = (...,) if ... in every else ()
    return (*dots, *sorted(once, key=lambda label: (isinstance(label, str), label)))


def _with_dots(labels: Labels, count: int) -> Labels:
    """Put labels in the place of `...`, counted from the right, as shapes broadcast."""
    if ... not in labels:
        return labels
    at = labels.index(...)
    dots = tuple(("...", count - 1 - place) for place in range(count))
    return (*labels[:at], *dots, *labels[at + 1 :])


def _dot_count(labels: Labels) -> int:
    return sum(isinstance(label, tuple) for label in labels)


def _name(label: Label) -> str:
    return f"{label[1] + 1} from the right of `...`" if isinstance(label, tuple) else repr(label)


def _shown(label: Label) -> Any:
    return "..." if label is ... else label
