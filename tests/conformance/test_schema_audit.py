"""Do operators write or share what their schema does not declare? A look for new liars.

Operators run on plain tensors under a mode that compares all inputs before and after, and the
memory of results with that of inputs. What `operators/table.py` says is known; anything else fails.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchTensorRef.operators.plan import OpPlan, plan_of

from ..support.differential import bits
from ..support.operator_cases import operators, seed, turn_of

#: One operator in so many is looked at; those in `operators/table.py` come through modules.
ONE_IN = 4
#: Sample inputs of each.
SAMPLES = 2


class Audit(TorchDispatchMode):
    """Notes operators that write or share more than their plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.liars: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload):
            return op(*args, **kwargs)
        plan = plan_of(op)
        self.seen.add(plan.name)
        inputs = _named_inputs(plan, args, kwargs)
        before = [(name, tensor, bits(tensor).clone()) for name, tensor in inputs]
        result = op(*args, **kwargs)
        for name, tensor, values in before:
            if name not in plan.write_names and not torch.equal(values, bits(tensor)):
                self.liars.add(f"{plan.name} writes {name}")
        self._note_aliases(plan, inputs, result)
        return result

    def _note_aliases(self, plan: OpPlan, inputs: Any, result: Any) -> None:
        if plan.may_alias:
            return
        declared = {
            tensor.untyped_storage()._cdata for n, tensor in inputs if n in plan.write_names
        }
        memory = {tensor.untyped_storage()._cdata for _, tensor in inputs} - declared
        for leaf in tree_leaves(result):
            if _can_be_read(leaf) and leaf.untyped_storage()._cdata in memory:
                self.liars.add(f"{plan.name} shares its operand's memory")


def _named_inputs(plan: OpPlan, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    named = [*zip(plan.argument_names, args, strict=False), *kwargs.items()]
    return [
        (name, leaf) for name, value in named for leaf in tree_leaves(value) if _can_be_read(leaf)
    ]


def _can_be_read(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.layout is torch.strided
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_nested
        and not x.is_quantized
        and not x._is_zerotensor()
        and x.device.type == "cpu"
        and x.untyped_storage().nbytes() > 0
    )


@pytest.fixture
def audit():
    """A fresh audit; warnings of the database's own inputs are none of ours."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Audit()


def test_no_new_liars_among_operators(manager, audit):
    for name, op in operators().items():
        dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else torch.int64
        if turn_of(name) % ONE_IN or not op.supports_dtype(dtype, "cpu"):
            continue
        seed(name, "audit")
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if number == SAMPLES:
                break
            _run(audit, lambda op=op, s=sample: op(s.input, *s.args, **s.kwargs))
            _run(audit, lambda op=op, s=sample: _into_out(op, s))
    assert len(audit.seen) > 200
    assert audit.liars == set()


def _into_out(op: Any, sample: Any) -> None:
    if op.supports_out:
        expected = op(sample.input, *sample.args, **sample.kwargs)
        if isinstance(expected, torch.Tensor):
            op(sample.input, *sample.args, out=torch.empty_like(expected), **sample.kwargs)


def test_no_new_liars_among_modules_in_training(manager, audit):
    for info in module_db:
        seed(info.name, "audit")
        inputs = info.module_inputs_func(
            info, "cpu", torch.float32, requires_grad=True, training=True
        )
        for given in inputs[:SAMPLES]:
            _run(audit, lambda info=info, given=given: _train(info, given))
    assert any("batch_norm" in name for name in audit.seen)
    assert audit.liars == set()


def _train(info: Any, given: Any) -> None:
    made, called = given.constructor_input, given.forward_input
    module = info.module_cls(*made.args, **made.kwargs).train()
    out = module(*called.args, **called.kwargs)
    heads = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.autograd.backward([head.sum() for head in heads])


def _run(audit: Audit, function: Any) -> None:
    """Run what may not work: the database has inputs that this build of torch refuses."""
    try:
        with audit:
            function()
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
        return
