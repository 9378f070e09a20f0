"""One row of the table: what is known of an operator beyond its schema."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload

#: Counts the floating point operations of a call from its plain arguments and its result.
FlopRule = Callable[[Sequence[Any], Any], int]

#: Says how many bytes a call takes at most, its result included; 0: no more than its result; None:
#: not known.
PeakRule = Callable[..., int | None]

# Reasons that several parts of the table have.
HOSTS_OWN = "chosen by the label; no accelerator has it"
HOSTS_OWN_BACK = "what the forward operator has left may be of another device's form"
LAUNCH = "lengths and numbers that a kernel's launch depends on"


class Reads(enum.Enum):
    """How much of its first operand an operator reads."""

    ALL = "all of it"
    ELEMENTS = "a few elements"
    ROWS = "the rows that it is asked for, which its result is made of"


class Special(enum.Enum):
    """Operators that do not go through the phases; `interception.handlers` does what is said."""

    SHARE = "a copy that changes nothing shares the bytes until one of both is written"
    RESIZE = "done at home, since it changes the storage itself, then looked at anew"
    CHOOSE_ATTENTION = "looks at what tensors are, at no byte: nothing has to be moved for it"
    IS_PINNED = "never, as far as the program can tell"
    PIN = "a copy that nobody locks, whose bytes are shared until one of both is written"
    CAN_REPLACE = "one TensorRef can take the place of another: asked before each `.data = `"
    IS_SET_TO = "the same block, read with the same metadata"
    COMPARE_SIZES = "asked before forward gradients, also of promises: looks at sizes only"
    KEEP = "an object of C++ keeps its operands: memory that stays where it is"
    COMMUNICATE = "other processes read and write the operands, perhaps after it has returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of one overload, and cannot be asked from its schema. No field: nothing."""

    op: OpOverload = field(kw_only=False)
    #: Why the row is there. Empty where its fields say it.
    reason: str = ""

    # -- what the schema leaves out --

    #: Arguments that it may write although they are not marked so.
    writes: tuple[str, ...] = ()
    #: It writes those only where this argument says so, and they are given.
    writes_only_with: str | None = None
    #: Its results share memory with an argument although they are not marked so.
    aliases: bool = False
    #: The same, and as views do: pure address arithmetic on the first argument. None: where the
    #: schema says so.
    is_view: bool | None = None
    #: Tagged as random, but only this argument makes it so; else as deterministic as any.
    random_only_with: str | None = None
    #: It writes every element of its first operand, and reads none of them.
    overwrites: bool = False
    #: It makes what a wrapper of the ready path cannot carry, or has to be looked at.
    is_never_ready: bool = False

    # -- where its work is --

    #: While the first operand is away, to read a part of it where it lives is cheaper than to move
    #: all of it.
    reads: Reads = Reads.ALL
    #: Operands that its kernels on accelerators read on the host.
    host_operands: tuple[str, ...] = ()
    #: Its kernels on accelerators make some results on the host.
    makes_on_host: bool = False

    # -- what it takes --

    #: Beside elementwise operators, which are tagged: its results take exactly the bytes of their
    #: elements, strided operands given.
    is_exact: bool = False
    #: For all overloads of the operator, before torch's own `flop_counter` is asked.
    flops: FlopRule | None = None
    #: A composite operator with this runs as one where what it takes fits the budget, and it does
    #: not write.
    peak_nbytes: PeakRule | None = None

    # -- what strategies know it by --

    #: Its uses look like those of this operator: the one that a composite operator is made of, so
    #: that they look alike however it runs.
    seen_as: OpOverload | None = None

    # -- what runs it --

    #: Python's own binding: it parses arguments in C; the overload goes through a boxed stack (0.9
    #: microseconds more). Only where it takes the overload's arguments in its order and can mean no
    #: other overload for them.
    binding: Callable[..., Any] | None = None
    #: What stands for it where its first tensor lies on an accelerator.
    elsewhere: Callable[..., Any] | None = None
    #: What stands for it where its first tensor lies on the host.
    at_home: Callable[..., Any] | None = None
    #: How it is done without going through the phases.
    special: Special | None = None
