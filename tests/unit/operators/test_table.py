"""The table of operators, and the plans that it is compiled into."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchTensorRef.interception.handlers import HANDLERS
from torchTensorRef.interception.ready_path import WAYS
from torchTensorRef.operators.plan import ReadyWay, compiled, plan_of
from torchTensorRef.operators.row import Row, Special
from torchTensorRef.operators.table import ROWS, flops_of

aten = torch.ops.aten

#: Fields that say something surprising, so that their row has to say why.
SURPRISING = (
    "writes",
    "aliases",
    "is_view",
    "is_never_ready",
    "host_operands",
    "makes_on_host",
    "elsewhere",
    "at_home",
    "special",
)


def names_of(row: Row) -> set[str]:
    return {argument.name for argument in row.op._schema.arguments}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.op))
def test_every_row_says_something_that_can_be(row):
    assert row != Row(row.op, reason=row.reason), "a row that says nothing"
    assert row.reason or not any(getattr(row, name) for name in SURPRISING)
    named = {*row.writes, *row.host_operands, *filter(None, [row.random_only_with])}
    assert named <= names_of(row)
    declared = Row(row.op)
    assert not set(row.writes) & set(compiled(declared).write_names), "the schema says so itself"


def test_every_special_kind_has_a_handler_and_operators():
    by_schema = {Special.KEEP}
    assert set(HANDLERS) == set(Special) == {row.special for row in ROWS} - {None} | by_schema


def test_every_ready_way_has_a_function():
    assert len(WAYS) == len(ReadyWay)
    assert WAYS[ReadyWay.NONE] is None


def test_an_operator_has_one_row():
    assert len({row.op for row in ROWS}) == len(ROWS)


def test_an_operator_has_one_rule_for_its_operations():
    packets = [row.op.overloadpacket for row in ROWS if row.flops is not None]
    assert len(set(packets)) == len(packets)


def test_a_recurrent_layer_counts_as_much_as_what_it_is_made_of():
    double = {"dtype": torch.float64}  # which oneDNN does not take
    layer = torch.nn.LSTM(5, 7, **double)
    x = torch.rand(3, 2, 5, **double).requires_grad_()
    hidden = tuple(torch.rand(1, 2, 7, **double).requires_grad_() for _ in range(2))
    with FlopCounterMode(display=False) as forward:
        out = layer(x, hidden)[0].sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    args = (x, *layer.parameters(), *hidden)
    layers = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    counts = [counter.get_total_flops() for counter in (forward, backward)]
    assert [flops_of(op)(args, ()) for op in layers] == counts


def test_only_composites_with_one_result_run_as_one():
    whole = [row.op for row in ROWS if row.peak_nbytes is not None]
    assert whole
    for op in whole:
        key = "CompositeImplicitAutograd"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
        assert [str(result.type) for result in op._schema.returns] == ["Tensor"]
        plan = plan_of(op)
        assert (plan.reading or plan).ready_way == ReadyWay.WHOLE


def test_only_calls_that_write_nothing_go_by_the_other_plan():
    for row in ROWS:
        plan = plan_of(row.op)
        assert (plan.reading is None) == (row.writes_only_with is None)
        if plan.reading is not None:
            assert set(plan.write_names) > set(plan.reading.write_names)
            assert plan.reading.kind == plan.kind
            # A composite one comes in parts where it writes; one with `out=` is never ready.
            is_ready = plan.reading.ready_way == ReadyWay.ANY and not plan.may_alias
            assert plan.ready_way == (ReadyWay.ANY if is_ready else ReadyWay.NONE), row.op
    plan, x = plan_of(aten.native_batch_norm.default), torch.ones(1)
    assert plan.of_call((x, x, x, x, x, True, 0.1, 1e-5), {}) is plan
    assert plan.of_call((x, x, x, x, x, False, 0.1, 1e-5), {}) is plan.reading
    assert plan.of_call((x, x, x, x, x), {"training": True}) is plan
    assert plan.of_call((x, x, x, None, None, True, 0.1, 1e-5), {}) is plan.reading


def test_what_is_random_only_sometimes_is_tagged_as_random():
    for row in ROWS:
        if row.random_only_with is not None:
            assert plan_of(row.op).is_random, row.op


def test_a_plan_is_made_once_and_never_changes():
    plan = plan_of(aten.mm.default)
    assert plan_of(aten.mm.default) is plan
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)


@pytest.mark.parametrize(
    ("op", "way"),
    [
        (aten.view.default, ReadyWay.VIEW),
        (aten._unsafe_view.default, ReadyWay.VIEW),
        (aten._conj.default, ReadyWay.NONE),
        (aten.mul.Tensor, ReadyWay.ONE),
        (aten.mul_.Tensor, ReadyWay.ONE),
        (aten.cat.default, ReadyWay.LISTED),
        (aten.clone.default, ReadyWay.ANY),
        (aten.topk.default, ReadyWay.ANY),
        (aten.add.out, ReadyWay.NONE),
        (aten.unbind.int, ReadyWay.VIEW),
        (aten._local_scalar_dense.default, ReadyWay.ANY),
        (aten._foreach_add_.Scalar, ReadyWay.ANY),
        (aten.t_.default, ReadyWay.NONE),
        (aten.rand_like.default, ReadyWay.NONE),
        (aten.dropout.default, ReadyWay.NONE),
        (aten.resize_.default, ReadyWay.NONE),
    ],
    ids=str,
)
def test_each_operator_has_the_ready_way_that_fits(op, way):
    assert ReadyWay(plan_of(op).ready_way) is way


@pytest.mark.parametrize(
    ("op", "counts"),
    [
        (aten._foreach_add_.Scalar, True),
        (aten._foreach_add.Scalar_out, True),
        (aten.split_copy.Tensor_out, True),
        (aten.unbind_copy.int_out, True),
        (aten._fused_adam_.default, False),
        (aten._amp_foreach_non_finite_check_and_unscale_.default, False),
        (aten.add_.Tensor, False),
        (aten._foreach_add.Scalar, False),
    ],
    ids=str,
)
def test_which_operators_leave_it_to_others_to_count_versions_of_lists(op, counts):
    assert plan_of(op).counts_lists is counts


def test_every_operator_between_processes_has_its_row():
    """One that is new would be run as if it wrote nothing."""
    libraries = ("c10d::", "_c10d_functional::")
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(libraries)}
    names -= {"_c10d_functional::_wrap_tensor_autograd"}  # says nothing to anybody
    assert names == {row.op.name() for row in ROWS if row.special is Special.COMMUNICATE}


class Made(TorchDispatchMode):
    """What is called, with sizes, strides and numbers."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        seen = [(x.size(), x.stride()) if isinstance(x, torch.Tensor) else x for x in args]
        self.calls.append((op, seen, kwargs))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["bare", "weighted"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_rms_norm_is_made_of_ignores_who_wants_gradients(dtype, is_weighted, mode):
    """It runs as one on plain tensors, which do not say."""
    x = torch.rand(5, 3, 4, dtype=dtype)
    weight = torch.rand(4, dtype=dtype) if is_weighted else None
    for operand in (x, x.transpose(0, 1), x[:, ::2], x[0]):
        made = []
        for wants_gradients in (False, True):
            args = [
                None if x is None else x.detach().requires_grad_(wants_gradients)
                for x in (operand, weight)
            ]
            with mode(), Made() as seen:
                aten.rms_norm.default(args[0], [4], args[1], None)
            made.append(seen.calls)
        assert made[0] == made[1] != []
