"""The plan of an operator: what its schema and its row say, compiled once.

What an operator reads, writes and aliases is asked from its schema and from what torch has
registered for it, never from its name; what those leave out, or get wrong, stands in the table
(`table.py`). An audit in the tests runs torch's own operator database and looks for rows that are
missing.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from ..base import forking
from . import python_kernels
from .blocked.taken import GROUPS
from .python_kernels import has_kernel, is_replaced
from .row import FlopRule, PeakRule, Reads, Row, Special
from .substitutes import ByDevice, Substitute
from .table import flops_of, row_of

_HOLDS_TENSORS = (torch.Tensor, list, tuple)
_LIST_TYPES = frozenset({"List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"})


class ReadyWay(enum.IntEnum):
    """How an operator runs whose operands are all ready (`interception.ready_path`)."""

    NONE = 0  # it always takes the six phases
    VIEW = 1  # pure address arithmetic
    ONE = 2  # one flat pass finds its operands, and it has one result, whatever its arguments are
    LISTED = 3  # the same, but that its first argument is a list of operands, and it writes none
    WHOLE = 4  # a composite operator as one, if what it takes fits
    ANY = 5  # lists of operands, several results or none, conditions


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class OpPlan:
    """What the runtime needs to know about one overload. Made once, read for every operator."""

    #: What is called: the overload, or what is it in everything but the call.
    op: OpOverload | Substitute
    number: int
    #: What strategies know its uses by: its number, or that of the operator which it is seen as.
    kind: int
    name: str

    # -- arguments --

    argument_names: tuple[str, ...]
    #: The value that each has where a call leaves it out.
    defaults: tuple[Any, ...]
    #: Positions of the lists of tensors.
    list_positions: tuple[int, ...]
    has_kwarg_tensors: bool
    #: A call may say on which device its results are to be: a label (`device_labels.py`).
    has_device: bool
    #: Operands that kernels on accelerators read on the host.
    host_operands: tuple[str, ...]
    #: On a real accelerator it takes the slow path, which looks where things lie.
    minds_labels: bool
    #: Only a part of the first operand is read.
    reads_part: bool
    #: And its result is made of that part.
    gathers_rows: bool
    #: Only some groups of a table may be read.
    reads_groups: bool

    # -- what it writes --

    write_names: tuple[str, ...]
    #: Positions of the arguments that may be written.
    writes: tuple[int, ...]
    #: Every element of the first operand is written, and none read.
    overwrites: bool
    #: It leaves it to its kernel, which sees nothing but plain tensors, to count their versions.
    counts_lists: bool
    #: It writes only where all of these are given, and not false; its plan where it does not.
    writing_arguments: tuple[str, ...]
    reading: OpPlan | None

    # -- results --

    returns_tensors: bool
    #: It answers the program: there are results, and none is a tensor. The host waits for them.
    answers: bool
    #: For each result, the position of the argument it is, where it is written and handed back.
    result_of_write: tuple[int | None, ...]
    #: A result may share memory with an argument: compare storages.
    may_alias: bool
    #: Pure address arithmetic: moves no byte, reads no byte, and always aliases argument 0.
    is_true_view: bool
    #: Reads one number of a tensor, or whether two are equal: the host waits for it.
    is_number: bool
    #: Its results, strided operands given, are strided and take the bytes of their elements:
    #: elementwise, a product, a sum, a gathering. The kernel of any other may be made of others and
    #: conjugate lazily between them, which only the slow path provides for: complex operands go
    #: there.
    makes_dense: bool

    # -- random numbers --

    is_random: bool
    #: The argument that makes it so; None: always.
    random_argument: str | None

    # -- how it runs --

    #: Autograd takes it apart, into which others may depend on who wants gradients.
    comes_in_parts: bool
    #: A library's Python runs it; autograd may look into that (`interception/recorded_inside.py`).
    has_kernel_in_python: bool
    is_recorded_inside: bool
    #: A `ReadyWay`, as a plain integer: an index that Python reads in no time.
    ready_way: int
    #: What runs it on plain tensors in the least time.
    binding: Callable[..., Any]
    #: The binding takes sizes one by one: given a list, it tries another overload first.
    spreads_sizes: bool
    special: Special | None
    #: A copy that changes nothing shares the bytes of the first operand.
    shares: bool
    #: For a composite operator that may run as one: what it takes.
    peak_nbytes: PeakRule | None
    own_flops: FlopRule | None

    def count_writes(self, args: Any, kwargs: Any) -> None:
        """Count, in the versions of tensors in lists, that it has written them."""
        for name in self.write_names:
            torch.autograd.graph.increment_version(self.argument(name, args, kwargs))

    @property
    def may_be_fetched(self) -> bool:
        """Whether a call that lacks operands runs where they are brought to, whatever they are."""
        is_placed = self.reads_part or self.reads_groups or self.is_random or self.host_operands
        return not is_placed and self.special is None

    def allows(self, kwargs: dict[str, Any], first: Any) -> bool:
        """Whether a call with such keywords, and this first operand, may take the ready path."""
        asked = kwargs.get("device")
        # What is made beside `self` gets its label: to name that is to name none.
        if asked is not None and (self.minds_labels or torch.device(asked) != first.device):
            return False
        return not self.has_kwarg_tensors or not any(
            isinstance(value, _HOLDS_TENSORS) for value in kwargs.values()
        )

    def draws_random(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call draws random numbers; with no answer (`train=None`) it does."""
        name = self.random_argument
        said = self.is_random if name is None else self.argument(name, args, kwargs)
        return self.is_random and (said is None or bool(said))

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
        """Return the plan of a call: another one where it could write, and does not."""
        if self.reading is None:
            return self
        said = [self.argument(name, args, kwargs) for name in self.writing_arguments]
        return self.reading if any(one is None or one is False for one in said) else self

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value an argument has in a call, its default where it was left out."""
        if name in kwargs:
            return kwargs[name]
        position = self.argument_names.index(name)
        return args[position] if position < len(args) else self.defaults[position]

    def __repr__(self) -> str:
        return f"<OpPlan {self.name}>"


def plan_of(op: OpOverload) -> OpPlan:
    """Return the plan of an overload, the same object every time.

    It hangs on the overload itself: a dictionary would hash it, in Python, at each call.
    """
    try:
        plan: OpPlan = op._ttr_plan  # type: ignore[attr-defined]
    except AttributeError:
        row = row_of(op)
        doubted = not row.writes and python_kernels.is_doubted(op)
        plan = op._ttr_plan = _doubting(row) if doubted else compiled(row)  # type: ignore[attr-defined]
    return plan


_learning = forking.Lock()


def _doubting(row: Row) -> OpPlan:
    """Compile the plan of an operator whose schema may leave out what it writes.

    A call exchanges it for one that knows what it has written of the operands that it had; those
    that no call has had yet stay doubted.
    """
    op, written = row.op, set[str]()
    unseen = {a.name for a in op._schema.arguments if "Tensor" in str(a.type)}

    def plan_now() -> OpPlan:
        plan = compiled(replace(row, writes=(*written, *unseen), aliases=True))
        if not unseen:
            return plan
        doubted = python_kernels.Doubted(op, plan.op, frozenset(unseen), learn)
        return replace(plan, op=doubted, ready_way=int(ReadyWay.NONE))

    def learn(seen: set[str], found: set[str]) -> None:
        with _learning:
            written.update(found)
            unseen.difference_update(seen)
            op._ttr_plan = plan_now()  # type: ignore[attr-defined]

    return plan_now()


def kind_named(name: str) -> int:
    """Return the kind of the operator of a name such as "aten.mm.default"; 0 if there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return plan_of(found).kind if isinstance(found, OpOverload) else 0


def name_of_kind(kind: int) -> str:
    """Return the name of an operator of a kind, as `kind_named` takes it; "" if there is none."""
    return _names.get(kind, "")


_numbers = itertools.count(1)
_names: dict[int, str] = {}
_kinds: dict[Row, int] = {}  # an operator with another kernel is what it was


def compiled(row: Row) -> OpPlan:
    """Compile the plan of an overload from its schema and its row."""
    op, schema = row.op, row.op._schema
    names = tuple(argument.name for argument in schema.arguments)
    types = [str(argument.type) for argument in schema.arguments]
    results = [str(result.type) for result in schema.returns]
    lists = tuple(i for i, kind in enumerate(types) if kind in _LIST_TYPES)
    write_names = (*(a.name for a in schema.arguments if _is_written(a)), *row.writes)
    writes = tuple(names.index(name) for name in write_names)
    is_composite = has_kernel(op, "CompositeImplicitAutograd") and not has_kernel(op, "CPU")
    is_declared = any(r.alias_info is not None and not _is_written(r) for r in schema.returns)
    has_device = "device" in names
    run: Any = op
    if row.elsewhere is not None or row.at_home is not None:
        run = ByDevice(op, row.elsewhere, row.at_home)
    elif python_kernels.has_kernel_in_python(op):
        run = python_kernels.OverTwins(op)
    number = next(_numbers)
    kind = plan_of(row.seen_as).kind if row.seen_as is not None else _kinds.setdefault(row, number)
    _names.setdefault(kind, str(op))
    plan = OpPlan(
        op=run,
        number=number,
        kind=kind,
        name=str(op),
        argument_names=names,
        defaults=tuple(argument.default_value for argument in schema.arguments),
        list_positions=lists,
        has_kwarg_tensors=any(
            argument.kwarg_only and "Tensor" in kind
            for argument, kind in zip(schema.arguments, types, strict=True)
        ),
        has_device=has_device,
        host_operands=row.host_operands,
        minds_labels=(has_device and not _makes_beside_self(schema))
        or bool(row.host_operands)
        or row.makes_on_host,
        reads_part=row.reads is not Reads.ALL,
        gathers_rows=row.reads is Reads.ROWS,
        reads_groups=str(op) in GROUPS,
        write_names=write_names,
        writes=writes,
        overwrites=row.overwrites,
        writing_arguments=()
        if row.writes_only_with is None
        else (row.writes_only_with, *row.writes),
        reading=_reading(row),
        counts_lists=not results and not set(lists).isdisjoint(writes) and _is_made_of_others(op),
        returns_tensors=any("Tensor" in result for result in results),
        answers=bool(results) and not any("Tensor" in result for result in results),
        result_of_write=tuple(_written_twin(schema, result) for result in schema.returns),
        may_alias=is_declared or is_composite or row.aliases or bool(row.is_view),
        is_true_view=row.is_view
        if row.is_view is not None
        else is_declared and not (is_composite or writes) and op.is_view and _is_first(schema),
        is_number=results in (["number"], ["bool"]) and not (is_composite or writes),
        makes_dense=(row.is_exact or torch.Tag.pointwise in op.tags) and not is_replaced(op),
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        random_argument=row.random_only_with,
        comes_in_parts=is_composite and not has_kernel(op, "ADInplaceOrView"),
        is_recorded_inside=python_kernels.is_recorded_inside(op),
        has_kernel_in_python=python_kernels.has_kernel_in_python(op),
        ready_way=ReadyWay.NONE,
        binding=row.binding or (op._op if type(run) is OpOverload else run),
        spreads_sizes=row.binding is torch._C.TensorBase.view,
        special=row.special,
        shares=row.special is Special.SHARE,
        peak_nbytes=None if row.writes_only_with else row.peak_nbytes,
        own_flops=flops_of(op),
    )
    # It follows from the rest; nobody has seen the plan yet.
    object.__setattr__(plan, "ready_way", int(_ready_way(plan, row)))
    if plan.reading is not None:  # its uses look alike
        object.__setattr__(plan.reading, "kind", plan.kind)
    return plan


def _reading(row: Row) -> OpPlan | None:
    """Compile the plan of calls that write nothing, where there are such."""
    if row.writes_only_with is None:
        return None
    return compiled(replace(row, writes=(), writes_only_with=None))


def _ready_way(plan: OpPlan, row: Row) -> ReadyWay:
    """Which way fits what the plan says so far."""
    if plan.peak_nbytes is not None:
        return ReadyWay.WHOLE
    if (
        row.is_never_ready
        or row.special not in (None, Special.SHARE)
        or (plan.is_random and plan.random_argument is None)
        or torch.Tag.inplace_view in row.op.tags
    ):
        return ReadyWay.NONE
    if plan.is_true_view:
        return ReadyWay.VIEW
    if not plan.is_number and not _has_plain_results(plan, row.op._schema):
        return ReadyWay.NONE
    arguments, results = row.op._schema.arguments, row.op._schema.returns
    if (
        len(results) == 1
        and str(results[0].type) == "Tensor"
        and not (plan.is_random or plan.shares)
    ):
        if not plan.list_positions and plan.writes in ((), (0,)):
            return ReadyWay.ONE
        if plan.list_positions == (0,) and str(arguments[0].type) == "List[Tensor]":
            return ReadyWay.ANY if plan.writes else ReadyWay.LISTED
    return ReadyWay.ANY


def _makes_beside_self(schema: Any) -> bool:
    """Whether it makes its result where `self` is, unless a call names a device."""
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    is_first = schema.arguments[0].name == "self" and types["self"] == "Tensor"
    return is_first and types.get("device") == "Optional[Device]"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_made_of_others(op: OpOverload) -> bool:
    """Whether it is for the operators that its kernel calls to count what they write.

    Torch makes a kernel that counts only for what an operator returns: one that writes the tensors
    of a list and returns nothing has none.
    """
    return has_kernel(op, "CompositeExplicitAutograd") and not has_kernel(op, "ADInplaceOrView")


def _written_twin(schema: Any, result: Any) -> int | None:
    """Position of the written argument that a result hands back; None if it is no such result."""
    if not _is_written(result):
        return None
    for position, argument in enumerate(schema.arguments):
        if _is_written(argument) and argument.alias_info.before_set == result.alias_info.before_set:
            return position
    return None


def _is_first(schema: Any) -> bool:
    """Whether what the results alias is the first argument."""
    # Lists of views carry their alias set inside the element type, where the parser does not look:
    # that the first argument is marked at all is the fact to trust.
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and not first.is_write


def _has_plain_results(plan: OpPlan, schema: Any) -> bool:
    """Whether its results are fresh tensors, or what it has written."""
    made = [
        str(result.type)
        for result, twin in zip(schema.returns, plan.result_of_write, strict=True)
        if twin is None
    ]
    if plan.writes:
        first_kwarg = sum(not argument.kwarg_only for argument in schema.arguments)
        is_fresh = not made or (set(made) == {"Tensor"} and not plan.may_alias)
        return is_fresh and max(plan.writes) < first_kwarg
    return not plan.may_alias and set(made) in ({"Tensor"}, {"List[Tensor]"})
