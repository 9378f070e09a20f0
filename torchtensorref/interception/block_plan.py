"""What a cut means for one call: what is cut, what stays whole, and what the results are like."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.base import Device
from ..memory.block import Block
from ..operators.blocked.cut import (
    Along,
    Call,
    Cut,
    Place,
    begins_at,
    has_one_layout,
    is_dense,
)
from ..operators.blocked.elementwise import elementwise
from ..operators.blocked.products import ALIGNED_NBYTES
from ..operators.blocked.sizes import Part, Tiling, choose
from ..operators.blocked.sums import HALF
from ..operators.blocked.table import MINDS_PLACES, rule_of
from ..operators.costs import touched_nbytes
from ..operators.plan import OpPlan
from ..operators.substitutes import itself
from .layouts import as_kernels_lay_out, as_operands_lie
from .operands import Operands

#: An operand of which a call takes less than this share of its block is packed, and not fetched.
MOST_OF = 0.8


def arguments_of(plan: OpPlan, operands: Operands) -> dict[str, Any]:
    """Return the arguments of a call by their names, those that it leaves out included."""
    return {name: operands.argument(name) for name in plan.argument_names}


class Plan:
    """What a cut means for one call: what is cut, what is whole, what results will be like."""

    def __init__(self, operands: Operands, cut: Cut, device: Device) -> None:
        self.operands = operands
        self.cut = cut
        self.device = device
        self.arguments = arguments_of(operands.plan, operands)
        #: The operands that are cut, or of which little is used, with what they lie along.
        self.cut_refs: dict[Place, tuple[Any, Along]] = {}
        #: What fresh results will be like; None where an operand is handed back.
        self.fresh: list[torch.Tensor] = []
        self.results = cut.results
        self.parts: list[Part] = []

    @classmethod
    def of(cls, operands: Operands, cut: Cut, device: Device) -> Plan | None:
        """Work it out; None where the call is other than the rule thinks."""
        plan = cls(operands, cut, device)
        if not plan._look_at_operands() or not plan._look_at_results():
            return None
        return plan

    def tiling(self, room_nbytes: int) -> Tiling:
        """Choose the tiles."""
        return choose(self.cut.axes, self.parts, room_nbytes, self.cut.inner)

    def written(self) -> list[Place]:
        """Return where the operands stand that are written."""
        return [(name, None) for name in self.operands.plan.write_names]

    def _look_at_operands(self) -> bool:
        operands, cut = self.operands, self.cut
        call = Call(operands.plan.op, self.arguments)
        is_cut = {a for a, axis in enumerate(cut.axes) if axis.most_tiles > 1}
        whole: set[Block] = set()
        for place, tensor in call.tensors():
            ref = operands.ref_of(tensor)
            if ref is None:
                continue  # a plain number
            along = cut.operands.get(place, (None,) * tensor.dim())
            if cut.gather is not None and place in cut.operands:
                self.cut_refs[place] = ref, along
                continue
            nbytes = touched_nbytes(tensor)
            axes = frozenset(is_cut.intersection(a for a in along if a is not None))
            if axes or self._is_away(ref, nbytes):
                self.cut_refs[place] = ref, along
                share = _in_single(tensor) if tensor.dtype in HALF else 0.0
                self.parts.append(Part(nbytes, axes, sums_share=share))
            elif ref._ttr_block not in whole:
                whole.add(ref._ttr_block)
                self.parts.append(Part(ref._ttr_block.nbytes, frozenset()))
        if not all(has_one_layout(ref) for ref, _ in self.cut_refs.values()):
            return False
        self.parts += [Part(n, axes & is_cut, is_scratch=True) for n, axes in cut.scratch]
        if cut.gather is not None:
            self.parts.append(Part(cut.gathered_nbytes, frozenset()))
            return all(place in self.cut_refs for place in cut.operands)
        return self._is_written_apart(call)

    @property
    def keeps_layouts(self) -> bool:
        """Whether no operand is packed: kernels go another way through those without gaps."""
        return all(is_dense(ref) for ref, _ in self.cut_refs.values())

    @property
    def keeps_places(self) -> bool:
        """Whether kernels find pieces where they do not mind: a piece begins a block of its own."""
        return itself(self.operands.plan.op) not in MINDS_PLACES or all(
            ref.dtype in HALF or begins_at(ref, ALIGNED_NBYTES) for ref, _ in self.cut_refs.values()
        )

    def _is_away(self, ref: Any, nbytes: int) -> bool:
        block: Block = ref._ttr_block
        return nbytes < MOST_OF * block.nbytes and block.readable_on(self.device) is None

    def _is_written_apart(self, call: Call) -> bool:
        """Whether what is written is cut, and read by nothing else in the call.

        What is written twice (expanded) is refused by torch, which would not see that in a piece.
        Windows that overlap (`unfold`) it writes one after the other, each upon what the one before
        has left; pieces come from home before others have been written there.
        """
        for place in self.written():
            if place not in self.cut_refs:
                return False
            ref = self.cut_refs[place][0]
            if _may_overlap_itself(ref):
                return False
            block = ref._ttr_block
            readers = [t for at, t in call.tensors() if at != place]
            if any(getattr(self.operands.ref_of(t), "_ttr_block", None) is block for t in readers):
                return False
        return True

    def _look_at_results(self) -> bool:
        """Ask torch what the results will be like, by tensors without bytes."""
        operands, cut = self.operands, self.cut
        twins = operands.plan.result_of_write
        if twins and all(twin is not None for twin in twins):
            return True
        args = [_without_bytes(arg) for arg in operands.args]
        kwargs = {name: _without_bytes(arg) for name, arg in operands.kwargs.items()}
        op = operands.plan.op
        run = getattr(op, "op", op)
        is_elementwise = rule_of(op) is elementwise
        out = as_operands_lie(run, args, kwargs) if is_elementwise and cut.is_flat else None
        try:
            out = run(*args, **kwargs) if out is None else out
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
            return False  # the program's own mistake is raised where it really runs
        found = list(out) if isinstance(out, (list, tuple)) else [out]
        self.fresh = [one for one in found if isinstance(one, torch.Tensor)]
        if is_elementwise and not cut.is_flat:  # else it is like its operands
            self.fresh = as_kernels_lay_out(run, args, kwargs, self.fresh)
        self.results = cut.results or tuple((None,) * like.dim() for like in self.fresh)
        if len(self.fresh) != len(self.results):
            return False
        self.template = out
        for like, along in zip(self.fresh, self.results, strict=True):
            if cut.is_flat:
                if not self._is_like_operands(like):
                    return False
            elif not _fits(like, along, cut):
                return False
            axes = frozenset(a for a in along if a is not None and cut.axes[a].most_tiles > 1)
            nbytes, share = like.numel() * like.element_size(), _in_single(like)
            self.parts.append(Part(nbytes, axes, is_result=True, sums_share=share))
        return True

    def _is_like_operands(self, like: torch.Tensor) -> bool:
        if not self.cut_refs:
            return False
        refs = [ref for ref, _ in self.cut_refs.values()]
        return is_dense(like) and all(ref.stride() == like.stride() for ref in refs)


def _in_single(tensor: torch.Tensor) -> float:
    """Return what it takes in single precision, or its own if that is more, as a share of it."""
    return max(4 / tensor.element_size(), 1.0)


def _fits(like: torch.Tensor, along: Along, cut: Cut) -> bool:
    return like.dim() == len(along) and all(
        axis is None or cut.axes[axis].extent == size
        for axis, size in zip(along, like.size(), strict=True)
    )


def _may_overlap_itself(ref: Any) -> bool:
    """Whether two of its elements may lie at the same place; no dimension reaches into the next."""
    reach = 0
    for step, size in sorted(zip(ref.stride(), ref.size(), strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _without_bytes(value: Any) -> Any:
    """Exchange tensors for such as have no bytes."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
    if isinstance(value, (list, tuple)):
        return type(value)(_without_bytes(part) for part in value)
    return value
