"""What a shape function tells of results is what kernels make: forecasts count by it.

Over torch's databases of operators and modules, there and back: dtypes, sizes, the memory that
results take (which may be more than their elements do), and which of them share it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torchTensorRef.tensor.install  # noqa: F401 (promises need operators to come to us)
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.promises.shapes import shapes_of

from ..support.operator_cases import op_db  # where torch does not search the stack for a test
from ..support.sweeps import WHOLE

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="older torch's shape functions tell of CUDA's kernels",
)

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
SAMPLE_COUNT = 12 if WHOLE else 1

#: What these make depends on values, or on what the kernel chooses by them.
KNOWN = {aten._embedding_bag.default: "what it keeps for the gradient, a few numbers for each bag"}


def without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device that lies in its memory as another one does."""
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    return torch._conj(made) if tensor.is_conj() else made


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def told_of(results: Any, operands: Any) -> list[Any]:
    """What is compared of results: of each what it is, and whose memory it has."""
    given = {x.untyped_storage()._cdata: f"operand {n}" for n, x in enumerate(tensors_of(operands))}
    told = []
    for number, x in enumerate(tensors_of(results)):
        storage = x.untyped_storage()
        memory = given.setdefault(storage._cdata, f"result {number}")
        told.append((x.dtype, tuple(x.size()), memory, storage.nbytes()))
    return told


class Compared(TorchDispatchMode):
    """Runs operators, and asks of each what its results would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.differences: dict[str, str] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (args, kwargs or {})
        plan, given = plan_of(op), tensors_of(call)
        if (
            plan.is_true_view
            or plan.special is not None
            or plan.writes
            or plan.has_device
            or op in KNOWN
            or any(x.layout is not torch.strided or x.is_nested or x.is_quantized for x in given)
        ):
            return op(*args, **(kwargs or {}))
        others = tree_map_only(torch.Tensor, without_bytes, call)
        results = op(*args, **(kwargs or {}))
        if any(x.layout is not torch.strided for x in tensors_of(results)):
            return results
        try:
            foretold = shapes_of(plan, *others)
        except (NotImplementedError, RuntimeError):  # nobody knows without values
            return results
        self.count += 1
        was, said = told_of(results, call), told_of(foretold, others)
        if was != said:
            self.differences.setdefault(str(op), f"{was} was made, {said} foretold")
        return results


def back(results: Any) -> None:
    found = [x for x in tensors_of(results) if x.requires_grad]
    if found:
        sum(x.abs().sum() if x.is_complex() else x.float().sum() for x in found).backward()


def calls_of_operators() -> Iterator[Callable[[], Any]]:
    for op in op_db:
        dtypes = [dtype for dtype in DTYPES if dtype in op.dtypes]
        for dtype in dtypes if WHOLE else dtypes[:1]:
            has_gradient = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            samples = iter(op.sample_inputs("cpu", dtype, requires_grad=has_gradient))
            for _, sample in zip(range(SAMPLE_COUNT), samples, strict=False):
                yield lambda op=op, s=sample: op(s.input, *s.args, **s.kwargs)


def calls_of_modules() -> Iterator[Callable[[], Any]]:
    for info in module_db:
        for is_training in (True, False) if WHOLE else (True,):
            given = info.module_inputs_func(info, "cpu", torch.float32, True, is_training)
            for sample in given if WHOLE else given[:2]:
                made, fed = sample.constructor_input, sample.forward_input
                if fed is not None:
                    module = info.module_cls(*made.args, **made.kwargs).train(is_training)
                    yield lambda m=module, f=fed: m(*f.args, **f.kwargs)


@pytest.mark.parametrize(("calls", "least"), [(calls_of_operators, 1500), (calls_of_modules, 1000)])
def test_results_are_as_foretold(manage: Any, calls: Any, least: int) -> None:
    manage()
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compared = Compared()
        for call in calls():
            try:
                with compared:
                    back(call())
            except (RuntimeError, TypeError, ValueError, AssertionError):
                refused += 1  # by torch itself: samples that no backward pass goes through
    assert compared.differences == {}
    assert compared.count > least
    assert refused < compared.count / 20
