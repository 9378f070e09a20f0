"""Record: the operators of a program in their order, with the blocks that they use and make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["BlockRecord", "OpRecord", "Record"]


@dataclass(slots=True)
class BlockRecord:
    """One block: a number that is never given twice, its bytes, and what it is."""

    number: int
    nbytes: int
    #: A parameter, a buffer, or whatever else a module has registered.
    is_persistent: bool = False
    #: Operators that had used it before.
    use_count: int = 0
    #: What the program calls it: "model.layers.3.mlp.up_proj.weight"; "" where it has no name.
    name: str = ""
    #: The program says that it keeps this for a part that may follow.
    is_kept: bool = False


@dataclass(slots=True)
class OpRecord:
    """One operator: what it uses, by the numbers of blocks, and what it costs.

    Views are no operators here: they use no bytes, and the blocks they keep alive are noted as
    alive. Where one was made is noted, since it can open a block to the ready path.
    """

    name: str
    #: What strategies know its uses by (`OpPlan.kind`).
    kind: int
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    births: tuple[int, ...] = ()
    #: Blocks that the program has let go of when the next operator began.
    deaths: list[int] = field(default_factory=list)
    flops: int = 0
    nbytes: int = 0
    dtype: str = "float32"
    #: Bytes that its kernel takes in passing.
    peak_nbytes: int = 0
    #: It may run without a decision where all its operands are ready.
    may_be_ready: bool = True
    #: And also where it lacks some, once they are fetched.
    may_be_fetched: bool = False
    #: It runs on the host, whatever the strategy says: random numbers that the host draws.
    on_host: bool = False
    #: At home it needs nothing of what it writes, all of it.
    overwrites: bool = False
    #: It reads a part of its first operand: rows of a table.
    reads_part: bool = False
    #: Then what it reads of each of the others, indices; empty where that is not known.
    index_nbytes: tuple[int, ...] = ()
    #: Blocks of which parts move alone while they are away, with the first byte of each (-1: not
    #: known) and how many there are; and whether those of the first are put together there
    #: (groups: as many as there are rows).
    parts: tuple[tuple[int, int, int], ...] = ()
    packs: bool = False
    #: The host waits for what it returns: a number.
    waits: bool = False
    #: It only makes a copy, which shares the bytes of the first operand until one is written.
    shares: bool = False
    #: Calls of the same form are expected to make as many bytes as the last of them did.
    form: int = 0
    #: The same where its operands are fetched first: a composite operator runs as one then.
    fetched_form: int = 0
    #: `reads` in the order in which they are fetched then; empty: in that of `reads`.
    fetched_reads: tuple[int, ...] = ()
    #: `reads`, and plain numbers among them, where only the slow path is told of these; else empty.
    slow_reads: tuple[int, ...] = ()
    #: Blocks of which the program has made views since the operator before; and those of which
    #: torch makes views on the way to it, where it cannot run at once.
    views: tuple[int, ...] = ()
    inner_views: tuple[int, ...] = ()
    #: A composite operator as one: so many of those that follow are its parts, which run instead
    #: where it cannot.
    part_count: int = 0


@dataclass(slots=True)
class Record:
    """What a program has done.

    Attributes
    ----------
    blocks : dict of int to BlockRecord
        All that took part, by number. One that no operator has made is at home when it is read.
    ops : list of OpRecord
        In the order of the program.
    steps : list of (str, int)
        A name for each part of the program, and the index of its first operator.
    is_from_file : bool
        The numbers of its blocks mean nothing here: their names do.
    """

    blocks: dict[int, BlockRecord] = field(default_factory=dict)
    ops: list[OpRecord] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)
    is_from_file: bool = False

    def each(self) -> Iterator[OpRecord]:
        """Yield the operators in their order, composite ones in their parts."""
        return (op for op in self.ops if not op.part_count)

    def begin_step(self, name: str) -> None:
        """Note that what comes next is another part of the program."""
        self.steps.append((name, len(self.ops)))

    def step_ranges(self) -> list[tuple[str, range]]:
        """Return each part of the program, with the indices of its operators."""
        starts = self.steps or [("all", 0)]
        if starts[0][1]:
            starts = [("before", 0), *starts]
        ends = [start for _, start in starts[1:]] + [len(self.ops)]
        return [(name, range(start, end)) for (name, start), end in zip(starts, ends, strict=True)]
