"""One operator on promises: torch's shape functions on tensors without bytes, and what is noted."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..interception.device_labels import exchange_device
from ..interception.handlers import keeps_everything
from ..interception.operands import Operands
from ..interception.slow_path import SlowPath
from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.plain_views import follow, view_with
from ..memory.ref import TensorRef
from ..operators.costs import operator_cost
from ..operators.plan import OpPlan
from ..operators.row import Special
from .graph import Cell, Operand
from .shapes import shapes_of
from .values import cannot_be_written, has_no_value

_CPU = torch.device("cpu")
#: How torch says that a shape, or a result, depends on values.
_ASKS_VALUES = (NotImplementedError, torch._subclasses.fake_tensor.DataDependentOutputException)

#: The same in words: a shape function that says so, and a kernel in the place of one.
_ASK_VALUES = ("meta tensor", "INTERNAL ASSERT")


class _Nowhere:
    """Where the bytes of promises are, to those who ask a device."""

    name = "promised"
    is_host = exchanges_storages = False
    torch_device = torch.device("meta")


NOWHERE: Any = _Nowhere()


class PromisedCall:
    """One call of an operator whose results are promises.

    Parameters
    ----------
    promises : Promises
        Who knows the cells, and keeps the graph.
    operands : Operands
        What takes part.
    numbers : iterable of Block, optional
        Those of plain numbers, which a kernel on real tensors takes as they are.
    """

    def __init__(self, promises: Any, operands: Operands, numbers: Iterable[Block] = ()) -> None:
        self._promises = promises
        self._operands = operands
        self._numbers = {*numbers, *_numbers_in(operands)}
        recorder = promises.recorder
        if recorder is not None:
            recorder.before.note_written(operands)
        #: It writes what a plain tensor of the program's has, so that it runs where that is.
        self._is_at_home = recorder is not None and any(
            map(recorder.before.is_held_outside, operands.written)
        )
        self._plan = operands.plan
        self._label = operands.label or _CPU
        self._cells: dict[Block, Cell] = {b: promises.cell_of(b) for b in operands.blocks}
        #: Fresh results: place among the flattened results, cell, block.
        self._born: list[tuple[int, Cell, Block]] = []
        self._plain_of: dict[int, torch.Tensor] = {}
        for ref in operands.refs:
            storage = self._cells[ref._ttr_block].base.untyped_storage()
            self._plain_of[id(ref)] = view_with(ref, storage, ref.storage_offset())
        self._args = tree_map(self._plain, list(operands.args))
        self._kwargs = tree_map(self._plain, operands.kwargs)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        ref = self._operands.ref_of(value)
        return value if ref is None else self._plain_of[id(ref)]

    def run(self) -> Any:
        """Return the results as promises; or what is answered, where values are asked for."""
        if self._plan.result_of_write and not self._plan.returns_tensors:
            return self._answered()  # it returns numbers
        if self._promises.recorder is None:
            if any(map(_is_held_outside, self._operands.written)):
                return self._written_now()
            if self._promises.values.policy == "compute" and self._may_be_refused():
                return self._run_now()
        try:
            out = self._on_metadata()
        except _ASKS_VALUES:
            return self._answered()
        except RuntimeError as error:
            if not any(words in str(error) for words in _ASK_VALUES):
                raise
            return self._answered()
        operands = self._operands
        if self._plan.counts_lists:
            self._plan.count_writes(operands.args, operands.kwargs)
        if self._is_set_to_another():
            return self._followed(operands.args[0])
        # Before its results are there: it may change what it is given (`out=`, `resize_`).
        args, kwargs = tree_map(self._described, (operands.args, operands.kwargs))
        if not self._plan.is_true_view:
            self._promise_written()
        result = self._wrapped(out)
        if not self._plan.is_true_view:
            self._note(out, args, kwargs)
        return result

    def _on_metadata(self) -> Any:
        plan = self._plan
        if plan.has_device:
            accelerator = self._operands.accelerator
            asked = exchange_device(plan, NOWHERE, accelerator, self._args, self._kwargs)
            self._label = asked or self._label
        kwargs = {name: arg for name, arg in self._kwargs.items() if name != "generator"}
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return shapes_of(plan, self._args, kwargs)

    def _promise_written(self) -> None:
        for block in self._operands.written:
            if block.promise is None:
                self._promises.make_promise(block, self._cells[block])

    def _is_set_to_another(self) -> bool:
        """Whether it is `set_` to a tensor: no byte is written then, and none is promised."""
        is_set = self._plan.special is Special.RESIZE and "source" in self._plan.argument_names
        return is_set and all(isinstance(value, TensorRef) for value in self._operands.args[:2])

    def _followed(self, ref: Any) -> Any:
        """Return a TensorRef that stands for the memory of the one that it was set to."""
        block = self._operands.args[1]._ttr_block
        follow(ref, self._promises.ref_over(self._plain_of[id(ref)], block, ref.device))
        return ref

    # -- answers --------------------------------------------------------------------------------

    def _answered(self) -> Any:
        """Run the operator for real, on computed or made up operands, or give a given answer."""
        out = self._answer()
        blocks = [x._ttr_block for x in tree_leaves(out) if isinstance(x, TensorRef)]
        self._record(out, [b for b in blocks if b not in self._operands.written])
        return out

    def _answer(self) -> Any:
        operands, name = self._operands, self._plan.name
        values = self._promises.values
        given = values.answer(name, operands.refs)
        if given is not None:
            return given[0]
        if values.computes and self._promises.can_all(self._cells.values()):
            return self._run_now()
        for ref in operands.refs:
            plain = values.made_up(ref.size(), ref.stride(), ref.dtype)
            if plain is None:
                raise has_no_value(name, "an operand is a promise")
            self._plain_of[id(ref)] = plain
        args = tree_map(self._plain, list(operands.args))
        kwargs = tree_map(self._plain, operands.kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            out = self._plan.op(*args, **kwargs)
        return tree_map(_adopted, out)

    def _may_be_refused(self) -> bool:
        """Whether it writes elements that share memory, which kernels refuse and no shape does."""
        return any(
            isinstance(value, torch.Tensor) and torch._debug_has_internal_overlap(value) == 1
            for value in map(self._plain, self._operands.written_arguments())
        )

    def _written_now(self) -> Any:
        """Run an operator that writes what is held outside; PromisedError if that is not wanted."""
        if self._promises.values.policy == "compute":
            return self._run_now()
        held = next(filter(_is_held_outside, self._operands.written))
        assert held.exposure is not None
        raise cannot_be_written(self._plan.name, held.name, held.exposure.why)

    def _run_now(self) -> Any:
        operands, name = self._operands, self._plan.name
        write_copies(self._promises, operands)
        for block in operands.blocks:
            self._promises.fulfil(block, name)
        return self._promises.outside(run_for_real, self._plan, *operands.args, **operands.kwargs)

    # -- what is noted --------------------------------------------------------------------------

    def _note(self, out: Any, args: Any, kwargs: Any) -> None:
        operands, plan = self._operands, self._plan
        written = [self._cells[block] for block in operands.written]
        if not (written or self._born) and self._promises.recorder is None and self._is_there():
            self._run_now()  # it only looks, at what nobody computes any more (`_assert_async`)
            return
        is_random = plan.draws_random(operands.args, operands.kwargs)
        arguments = (*operands.args, *operands.kwargs.values())
        self._promises.note(
            plan.name,
            functools.partial(run_for_real, plan),
            args,
            kwargs,
            uses=self._cells.values(),
            writes=written,
            births=[(place, cell) for place, cell, _ in self._born],
            draws=self._promises.draws_of(arguments) if is_random else None,
        )
        self._record(out, [block for _, _, block in self._born])

    def _is_there(self) -> bool:
        cells = self._cells.values()
        return all(c.real is not None and (c.writer is None or c.writer.is_done) for c in cells)

    def _record(self, out: Any, born: list[Block]) -> None:
        recorder, plan, operands = self._promises.recorder, self._plan, self._operands
        if recorder is not None:
            is_random = plan.draws_random(operands.args, operands.kwargs)
            recorder.note(
                plan,
                operands,
                born=born,
                cost=operator_cost(plan, self._args, self._kwargs, out),
                on_host=self._is_at_home or (is_random and self._label.type == "cpu"),
                shares=self._shares(),
                peak_nbytes=self._peak_nbytes(),
                numbers=self._numbers,
            )

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        ref = self._operands.ref_of(value)
        return value if ref is None else Operand.of(ref, self._cells[ref._ttr_block])

    def _shares(self) -> bool:
        first = self._operands.args[0] if self._operands.args else None
        kwargs = self._operands.kwargs
        return (
            self._plan.shares and isinstance(first, TensorRef) and keeps_everything(first, kwargs)
        )

    def _peak_nbytes(self) -> int:
        rule = self._plan.peak_nbytes
        return int(rule(*self._args, **self._kwargs) or 0) if rule is not None else 0

    # -- results --------------------------------------------------------------------------------

    def _wrapped(self, out: Any) -> Any:
        twins = self._twins()
        for original in self._operands.written_arguments():
            if isinstance(original, torch.Tensor):
                self._follow_metadata(original)
        places = iter(range(1 << 30))
        made: dict[int, Any] = {}

        def wrapped(value: Any) -> Any:
            place, twin = next(places), next(twins)
            if not isinstance(value, torch.Tensor):
                return value
            if twin is not None:
                return twin
            # One that is there twice is one: autograd copies a gradient that others have.
            if id(value) not in made:
                made[id(value)] = self._wrapped_one(value, place)
            return made[id(value)]

        return tree_map(wrapped, out)

    def _twins(self) -> Iterator[Any]:
        """Yield for each result the argument that it hands back, or None."""
        for position in self._plan.result_of_write:
            if position is None:
                yield None
            else:
                value = self._operands.argument(self._plan.argument_names[position])
                yield from value if isinstance(value, (list, tuple)) else (value,)
        while True:
            yield None

    def _wrapped_one(self, plain: torch.Tensor, place: int) -> Any:
        if plain.layout is not torch.strided:
            raise has_no_value(self._plan.name, f"its result is {plain.layout}")
        key = plain.untyped_storage()._cdata
        known = [(cell, block) for block, cell in self._cells.items()]
        for cell, block in [*known, *((cell, block) for _, cell, block in self._born)]:
            if cell.base.untyped_storage()._cdata == key:
                return self._promises.ref_over(plain, block, self._label)
        cell = Cell(plain.untyped_storage().nbytes())
        cell.base = plain
        block = self._promises.promised(cell)
        self._born.append((place, cell, block))
        return self._promises.ref_over(plain, block, self._label)

    def _follow_metadata(self, original: Any) -> None:
        """Where an operator changes sizes in place (`t_`, `out=`), change the program's, too."""
        ref = self._operands.ref_of(original)
        if ref is None:
            return
        plain = self._plain_of[id(ref)]
        if (plain.size(), plain.stride()) == (ref.size(), ref.stride()):
            return
        if plain.size() == ref.size() and any(
            one is original for one in tree_leaves(self._operands.kwargs)
        ):
            return  # what is given to be filled keeps its layout, whatever a shape function says
        block = ref._ttr_block
        nbytes = plain.untyped_storage().nbytes()
        if nbytes != block.nbytes:
            tensorsManager.residency.resized(block, nbytes)
            self._cells[block].nbytes, self._cells[block].base = nbytes, plain
        made = self._promises.ref_over(plain, block, ref.device)
        if ref is original:
            follow(ref, made)


def take_number(numbers: set[Block], value: torch.Tensor) -> Any:
    """Take a plain number as a TensorRef, in `numbers`: what it is now counts, without bytes."""
    if value.dim() or isinstance(value, TensorRef):
        return value
    ref = tensorsManager.ownership.adopt_operand(value)
    if ref is None:
        return value
    numbers.add(ref._ttr_block)
    return ref


def _numbers_in(operands: Operands) -> Iterator[Block]:
    """Yield the blocks of plain numbers that an operator reads."""
    for ref in operands.adopted.values():
        if not ref.dim() and ref._ttr_block not in operands.written:
            yield ref._ttr_block


def _is_held_outside(block: Block) -> bool:
    """Whether somebody would not see that a block is only promised to be written."""
    exposure = block.exposure
    return block.promise is None and exposure is not None and exposure.alive


def write_copies(promises: Any, operands: Operands) -> None:
    """Let an operator that is to run for real inside a forecast write copies of what is there."""
    if promises.recorder is None:
        return
    for block in operands.written:
        if block.promise is None:
            cell = promises.cell_of(block)
            promises.make_promise(block, cell)  # notes what it has
            # Of those that share bytes the oldest keeps them when they are written: not this one.
            tensorsManager.residency.sharing.unshare(cell.real)
            promises.fulfil(block)


def run_for_real(plan: OpPlan, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on TensorRefs that have bytes."""
    return SlowPath(plan, args, kwargs, tensorsManager).run()


def _adopted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return tensorsManager.ownership.adopt_tensor(value, sole=True)
