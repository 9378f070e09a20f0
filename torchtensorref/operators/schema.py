"""Facts about operators: what each reads, writes and aliases, and where the schema is not honest.

Nothing here guesses from a name. The facts come from the operator's schema, once per overload, and
from three short lists of what schemas leave out, each entry with its reason. An audit in the tests
runs torch's own operator database and looks for entries that are missing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch._ops import OpOverload

from .bindings import BINDINGS
from .host_operands import MAKES_AT_HOME, READS_AT_HOME

aten = torch.ops.aten

#: Operators that write arguments their schema does not mark as written.
UNDECLARED_WRITES: dict[OpOverload, tuple[str, ...]] = {
    # Training mode updates the running statistics in place.
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.native_batch_norm.out: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
    # The scratch memory that the forward run has filled, and hands over.
    aten.mkldnn_rnn_layer_backward.default: ("workspace",),
    # Composite: reaches us whole under inference mode, and then calls the ones above.
    aten.batch_norm.default: ("running_mean", "running_var"),
    aten.instance_norm.default: ("running_mean", "running_var"),
    aten._batch_norm_impl_index.default: ("running_mean", "running_var"),
}

#: Operators whose results share memory with an argument although the schema does not say so.
UNDECLARED_ALIASES = {
    # matmul's way to reshape a temporary without a version check.
    aten._unsafe_view.default,
    # Views whose outputs may be written without invalidating one another in autograd.
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    # Hand back an alias of a tensor without elements.
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    # Marks a constant of a traced program; hands back its argument.
    aten.lift.default,
    aten.lift_fresh.default,
}

#: Tagged as random, but only one argument makes them so; else as deterministic as any.
RANDOM_ONLY_WITH = {
    aten.scaled_dot_product_attention.default: "dropout_p",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "dropout_p",
    aten._scaled_dot_product_flash_attention.default: "dropout_p",
    aten._scaled_dot_product_efficient_attention.default: "dropout_p",
    aten._scaled_dot_product_attention_math.default: "dropout_p",
    aten.dropout.default: "train",
    aten.dropout_.default: "train",
    aten.native_dropout.default: "train",
    aten.alpha_dropout.default: "train",
    aten.feature_dropout.default: "train",
    aten.feature_alpha_dropout.default: "train",
    aten.rrelu.default: "training",
    aten.rrelu_with_noise.default: "training",
}

#: Operators that read a few rows of their first operand.
RUNS_AT_HOME = {
    aten.embedding.default,
    aten.index_select.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.take.default,
    aten.trace.default,
    aten._local_scalar_dense.default,
}

#: Beside elementwise operators: those whose results take exactly the bytes of their elements.
EXACT = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.argmax.default,
        aten.embedding.default,
        aten.cat.default,
    }
)

_HOLDS_TENSORS = (torch.Tensor, list, tuple)

_plan_numbers = itertools.count(1)

_TENSOR_TYPES = frozenset({"Tensor", "Optional[Tensor]"})
_LIST_TYPES = frozenset({"List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"})


class OpPlan:
    """What the runtime needs to know about one overload. Made once, read for every operator."""

    __slots__ = (
        "_random_default",
        "_random_position",
        "alias_position",
        "argument_names",
        "binding",
        "counts_lists",
        "fast_above",
        "fast_below_nbytes",
        "flops",
        "handler",
        "has_device",
        "has_kwarg_tensors",
        "is_fast",
        "is_flat",
        "is_listed",
        "is_number",
        "is_random",
        "is_simple",
        "is_true_view",
        "is_view_tagged",
        "list_positions",
        "makes_dense",
        "may_alias",
        "may_conjugate",
        "minds_labels",
        "name",
        "number",
        "op",
        "passing",
        "random_argument",
        "reads_at_home",
        "result_of_write",
        "returns_tensor",
        "returns_tensors",
        "runs_at_home",
        "spreads_sizes",
        "way",
        "write_names",
        "writes",
    )

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        arguments = schema.arguments
        self.op = op
        self.number = next(_plan_numbers)
        self.name = str(op)
        self.argument_names = [argument.name for argument in arguments]
        types = [str(argument.type) for argument in arguments]
        #: No lists of tensors: operands are found in one flat pass.
        self.is_flat = not any(kind in _LIST_TYPES for kind in types)
        #: Positions of the lists of tensors.
        self.list_positions = tuple(i for i, kind in enumerate(types) if kind in _LIST_TYPES)
        self.has_kwarg_tensors = any(
            argument.kwarg_only and ("Tensor" in kind)
            for argument, kind in zip(arguments, types, strict=True)
        )
        self.write_names = written_arguments(op)
        #: Positions of the arguments that may be written.
        self.writes = tuple(self.argument_names.index(name) for name in self.write_names)
        #: It writes the tensors of lists and leaves it to its kernel, which sees nothing but plain
        #: tensors, to count their versions.
        self.counts_lists = bool(self.writes) and self.name.startswith("aten._foreach_")
        self.returns_tensor = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        self.returns_tensors = any("Tensor" in str(result.type) for result in schema.returns)
        #: For each result, the position of the argument it is, where it is written and handed back.
        self.result_of_write = tuple(_written_twin(schema, result) for result in schema.returns)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "CompositeImplicitAutograd"
        )
        declared = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in schema.returns
        )
        #: A result may share memory with an argument: compare storages.
        self.may_alias = declared or composite or op in UNDECLARED_ALIASES
        self.alias_position = 0
        #: Pure address arithmetic: moves no byte, reads no byte, and always aliases argument 0.
        self.is_true_view = (
            declared and not composite and not self.writes and op.is_view and _is_first(schema)
        ) or op is aten._unsafe_view.default
        self.is_view_tagged = torch.Tag.inplace_view in op.tags
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.random_argument = RANDOM_ONLY_WITH.get(op)
        if self.random_argument is not None:
            self._random_position = self.argument_names.index(self.random_argument)
            self._random_default = arguments[self._random_position].default_value
        #: Only rows of the first operand are read: while it is away, gathering where it lives and
        #: moving the rows is cheaper than moving the table.
        self.runs_at_home = op in RUNS_AT_HOME
        #: Reads one number of a tensor: the host waits for it.
        self.is_number = op is aten._local_scalar_dense.default
        #: Its results, strided operands given, are strided and take the bytes of their elements:
        #: elementwise, a product, a sum, a gathering.
        self.makes_dense = torch.Tag.pointwise in op.tags or op in EXACT
        #: Its kernel may be made of others and conjugate lazily between them, which only the long
        #: way provides for (`slow_path.run_kernel`): complex operands go there.
        self.may_conjugate = not self.makes_dense
        #: May take the fast path: operands are found by position, and the results are fresh, views
        #: of the first operand, or the operands that were written.
        self.is_fast = (
            op not in (aten._conj.default, aten._neg_view.default)
            and not (self.is_random and self.random_argument is None)
            and not self.is_view_tagged
            and (self.is_true_view or self.is_number or self._has_plain_results(schema))
        )
        #: A call may say on which device its results are to be: a label (`labels.py`).
        self.has_device = "device" in self.argument_names
        self.reads_at_home = READS_AT_HOME.get(op, ())
        #: On a real accelerator it takes the long way, which looks where things lie.
        self.minds_labels = self.has_device or bool(self.reads_at_home) or op in MAKES_AT_HOME
        if _labels_matter and self.minds_labels:
            self.is_fast = False
        #: One flat pass finds its operands, and it has one result, whatever its arguments are.
        self.is_simple = (
            self.is_flat
            and self.returns_tensor
            and not self.is_random
            and self.writes in ((), (0,))
            and not self.is_number
        )
        #: The same, but that its first argument is a list of operands, and that it writes none.
        self.is_listed = (
            self.list_positions == (0,)
            and types[0] == "List[Tensor]"
            and self.returns_tensor
            and not self.is_random
            and not self.writes
        )
        #: Larger first operands take the long way all the same, unless this says otherwise.
        self.fast_below_nbytes = float("inf")
        self.fast_above: Any = None
        #: For a composite operator that may run as one: what it takes in passing.
        self.passing: Any = None
        #: The function that is its fast path; None: it has none.
        self.way: Any = None
        #: What runs it on plain tensors in the least time.
        self.binding: Any = BINDINGS.get(op, op)
        #: The binding takes sizes one by one: given a list, it tries another overload first.
        self.spreads_sizes = self.binding is torch._C.TensorBase.view
        self.handler: Any = None
        self.flops: Any = None

    def count_writes(self, args: Any, kwargs: Any) -> None:
        """Count, in the versions of tensors in lists, that it has written them."""
        for name in self.write_names:
            torch.autograd.graph.increment_version(self.argument(name, args, kwargs))

    def _has_plain_results(self, schema: Any) -> bool:
        """Whether its results are fresh tensors, or nothing but what it has written."""
        if self.writes:
            first_kwarg = sum(not argument.kwarg_only for argument in schema.arguments)
            return all(twin is not None for twin in self.result_of_write) and all(
                position < first_kwarg for position in self.writes
            )
        kinds = {str(result.type) for result in schema.returns}
        return not self.may_alias and kinds in ({"Tensor"}, {"List[Tensor]"})

    def allows(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call with such keywords may take the fast path."""
        if kwargs.get("device") is not None:
            return False
        return not self.has_kwarg_tensors or not any(
            isinstance(value, _HOLDS_TENSORS) for value in kwargs.values()
        )

    def draws_random(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call draws random numbers."""
        if not self.is_random:
            return False
        if self.random_argument is None:
            return True
        if self.random_argument in kwargs:
            return bool(kwargs[self.random_argument])
        position = self._random_position
        return bool(args[position] if position < len(args) else self._random_default)

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value an argument has in a call, its default where it was left out."""
        if name in kwargs:
            return kwargs[name]
        position = self.argument_names.index(name)
        if position < len(args):
            return args[position]
        return self.op._schema.arguments[position].default_value

    def __repr__(self) -> str:
        return f"<OpPlan {self.name}>"


def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that `op` may write."""
    declared = tuple(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return declared + UNDECLARED_WRITES.get(op, ())


def _written_twin(schema: Any, result: Any) -> int | None:
    """Position of the written argument that a result hands back; None if it is no such result."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for position, argument in enumerate(schema.arguments):
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.alias_info.before_set == result.alias_info.before_set
        ):
            return position
    return None


def _is_first(schema: Any) -> bool:
    """Whether what the results alias is the first argument."""
    # Lists of views carry their alias set inside the element type, where the parser does not look:
    # that the first argument is marked at all is the fact to trust.
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and not first.is_write


_plans: dict[OpOverload, OpPlan] = {}

#: Whether plain tensors lie on devices of their own, so that what a call says of a device differs
#: from where its operands are.
_labels_matter = False


def mind_labels() -> None:
    """From now on, calls that name a device take the long way: a real accelerator is in use."""
    global _labels_matter
    _labels_matter = True
    for plan in list(_plans.values()):
        if plan.minds_labels:
            plan.is_fast = False
            plan.way = None


def plan_of(op: OpOverload) -> OpPlan:
    """Return the facts about an overload, the same object every time."""
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = OpPlan(op)
    return plan
