"""`TTR_SHADOW`: run each operator also on plain host copies, and stop at the first difference."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..base.errors import InvariantError
from ..devices.base import Device
from ..operators.plan import OpPlan

aten = torch.ops.aten

#: Their results are whatever was there: nothing to compare.
UNINITIALISED = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.resize_}


class ReferenceCheck:
    """A second run of a call, on copies of its operands that are made before the first."""

    def __init__(self, plan: OpPlan, args: Any, kwargs: Any) -> None:
        self._plan = plan
        self._real = (args, kwargs)
        self._copies = tree_map(_host_copy, (args, kwargs))
        self._random_state = torch.get_rng_state() if plan.is_random else None

    def compare(self, out: Any, device: Device) -> None:
        """Run the call on the copies, and compare its results and its operands with the real ones.

        Raises
        ------
        InvariantError
            Something differs: at all where the host's kernels ran, beyond rounding elsewhere.
        """
        if self._plan.op.overloadpacket in UNINITIALISED:
            return
        after = torch.get_rng_state()
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
        args, kwargs = self._copies
        expected = self._plan.op(*args, **kwargs)
        torch.set_rng_state(after)
        real = [*tree_leaves(out), *tree_leaves(self._real)]
        reference = [*tree_leaves(expected), *tree_leaves(self._copies)]
        for number, (a, b) in enumerate(zip(real, reference, strict=True)):
            if isinstance(a, torch.Tensor) and not _same(a, b, device):
                raise InvariantError(
                    f"{self._plan.name} on {device.name}: result or operand {number} differs from "
                    "that of the same operator on plain copies. TTR_CHECK=2 tells whether the "
                    "books were wrong before it."
                )


def _host_copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    host = value.detach().cpu()
    return host.clone() if host.data_ptr() == value.data_ptr() or host is value else host


def _same(a: torch.Tensor, b: torch.Tensor, device: Device) -> bool:
    if a.layout is not torch.strided or a.is_quantized:
        return True
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return torch.equal(a, b)
    if device.torch_device.type == "cpu":
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True)
