"""The ready path: operators whose operands are all ready, so that nothing has to be decided.

Each function takes the operator's plan and the call, and returns the result, or `SLOW` for the
slow path. `WAYS[plan.ready_way]` is the one that fits the operator, None where none does.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch

from ..devices.base import Device
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.manager import tensorsManager
from ..memory.plain_views import KEYS, labelled, make_ref, plain_on
from ..memory.ref import TensorRef, is_plain
from ..memory.sparse import sparse_over
from ..operators.costs import operator_cost
from ..operators.plan import OpPlan, ReadyWay
from . import handlers
from .fallback import settled
from .operands import flattened, folded, targets

#: Returned where the operator has to take the slow path. Nothing has happened then.
SLOW = object()

#: What most arguments beside operands are. To ask an instance whether it is a tensor takes longer.
_NO_TENSORS = frozenset({int, float, bool, type(None)})
_NO_KWARGS: dict[str, Any] = {}
_Tensor = torch.Tensor
_strided = torch.strided
_is_inference_mode = torch.is_inference_mode_enabled
_make_wrapper = torch.Tensor._make_wrapper_subclass


def run_one(plan: OpPlan, args: tuple[Any, ...], kwargs: Any, listed_count: int = 0) -> Any:
    """Run an operator with one result, whose operands are all ready; `SLOW` if one is not.

    The operator takes the first `listed_count` of them as a list. Written out flat: this is what
    most operators cost.
    """
    first = args[0]
    if not isinstance(first, TensorRef) or (kwargs and not plan.allows(kwargs, first)):
        return SLOW
    if kwargs and "device" in kwargs:
        kwargs = {**kwargs, "device": None}
    device = first._ttr_block.ready
    residency: Any = tensorsManager._residency  # open: there is a TensorRef
    if device not in residency.books.ready_on:
        return SLOW
    ident, has_written = get_ident(), False
    hazards = residency.holds.announced
    outer = hazards.get(ident)
    # Announce first, look second: an evictor closes first and looks second (Movement._seize), so
    # that one of the two sees the other.
    hazards[ident] = args if outer is None else outer + args
    try:
        plain_args = []
        tick, is_logged = residency.books.tick + 1, False
        for arg in args:
            kind = type(arg)
            if kind in _NO_TENSORS:
                plain_args.append(arg)
            elif isinstance(arg, TensorRef):
                block = arg._ttr_block
                if block.ready is not device or (
                    arg._ttr_device is not device and not can_look(arg, device)
                ):
                    return SLOW
                block.last_use = tick
                is_logged |= block.logged_as != 0
                plain_args.append(arg._ttr_plain)
            elif isinstance(arg, _Tensor) and (arg.dim() or kind is not _Tensor):
                return SLOW
            else:
                plain_args.append(arg)
        if not plan.makes_dense and plain_args[0].is_complex():
            return SLOW
        writes = plan.writes
        if writes and not first._ttr_block.owned:
            return SLOW
        residency.books.tick = tick
        if is_logged:
            residency.feed.uses.note_all(tick, plan.kind, args, (first,) if writes else ())
        run = plan.binding
        if listed_count:
            out = run(
                plain_args[:listed_count], *plain_args[listed_count:], **(kwargs or _NO_KWARGS)
            )
        else:
            out = run(*plain_args, **kwargs) if kwargs else run(*plain_args)
        has_written = bool(writes)
        if device.has_virtual_clock:
            charge(plan, args, args[: len(writes)], plain_args, kwargs or _NO_KWARGS, out, device)
        if writes:
            if not first._ttr_block.owned:  # not any more: another thread has begun to copy it
                residency.copier.has_been_written(first._ttr_block, device)
            return first
        return fresh(plan, out, residency, device, first)
    except SHORTAGES:
        if has_written:
            raise  # nothing is written twice
        return SLOW
    except RecursionError:
        raise  # ours, and perhaps after the kernel has written
    except (RuntimeError, IndexError, TypeError, ValueError):
        if has_written or device.torch_device.type == "cpu":
            raise  # the host has the same kernels: it is the program's own mistake
        return SLOW  # the host may have a kernel for it
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def _listed(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator on a list of operands, with one result."""
    operands = args[0]
    return run_one(plan, (*operands, *args[1:]), kwargs, len(operands)) if operands else SLOW


def known_peak(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> int | None:
    """Return what a composite operator takes at its peak as one; None where that is not known."""
    for arg in args:
        if isinstance(arg, _Tensor) and not isinstance(arg, TensorRef):
            return None  # nested, sparse, another class: the rules know nothing of those
    return None if plan.peak_nbytes is None else plan.peak_nbytes(*args, **kwargs)


def _whole(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a composite operator as one, where what it takes in passing fits the budget."""
    kwargs = kwargs or _NO_KWARGS
    peak_nbytes = known_peak(plan, args, kwargs)
    if peak_nbytes is None or (plan.is_random and plan.draws_random(args, kwargs)):
        return SLOW
    if not peak_nbytes:
        return run_one(plan, args, kwargs)
    device, residency = args[0]._ttr_block.ready, tensorsManager._residency
    ledger = residency.books.ledgers.get(device)  # type: ignore[union-attr]
    if ledger is None or ledger.resident_nbytes + peak_nbytes > ledger.budget.high_nbytes:
        return SLOW
    try:
        if device.is_witness:
            device.allocate(peak_nbytes)  # let go at once: its peak has seen what the kernel takes
    except SHORTAGES:
        return SLOW
    return run_one(plan, args, kwargs)


def _any(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run what `run_one` cannot: lists of operands, several results or none, conditions."""
    flat = flattened(plan, args)
    first: Any = flat[0] if flat else None
    if (
        not isinstance(first, TensorRef)
        or (kwargs and not plan.allows(kwargs, first))
        or (not plan.makes_dense and first.is_complex())
    ):
        return SLOW
    kwargs = {**kwargs, "device": None} if kwargs and "device" in kwargs else kwargs or _NO_KWARGS
    residency: Any = tensorsManager._residency
    device = first._ttr_block.ready
    if (
        device not in residency.books.ready_on
        or (
            plan.shares
            and first._ttr_block.nbytes >= handlers.SHARE_FROM_NBYTES
            and handlers.keeps_everything(first, kwargs)
        )
        or plan.draws_random(args, kwargs)
    ):
        return SLOW
    ident, has_written = get_ident(), False
    hazards = residency.holds.announced
    outer = hazards.get(ident)
    hazards[ident] = flat if outer is None else outer + flat  # first, as in `run_one`
    try:
        plain = []
        tick, is_logged = residency.books.tick + 1, False
        for arg in flat:
            if isinstance(arg, TensorRef):
                if arg._ttr_block.ready is not device or (
                    arg._ttr_device is not device and not can_look(arg, device)
                ):
                    return SLOW
                block = arg._ttr_block
                block.last_use = tick
                is_logged |= block.logged_as != 0
                plain.append(arg._ttr_plain)
            elif isinstance(arg, _Tensor) and (arg.dim() or type(arg) is not _Tensor):
                return SLOW
            else:
                plain.append(arg)
        if plan.writes and not all_owned(plan, args):
            return SLOW
        residency.books.tick = tick
        if is_logged:
            residency.feed.uses.note_all(tick, plan.kind, flat, targets(plan, args))
        run = plan.binding
        try:
            out = run(*folded(plan, args, plain), **kwargs)
            has_written = bool(plan.writes)
        finally:  # a kernel may refuse one of them when it has written those before it
            if plan.counts_lists:
                plan.count_writes(args, kwargs)
        if device.has_virtual_clock:
            charge(plan, flat, targets(plan, args), plain, kwargs, out, device)
        if plan.writes:
            if not all_owned(plan, args):
                for target in targets(plan, args):
                    residency.copier.has_been_written(target._ttr_block, device)
            return _written(plan, args, out, flat, residency, device)
        if plan.is_number:
            if device.has_virtual_clock:
                device.record().synchronize()  # a real one's kernel has waited by itself
            return out
        if not isinstance(out, _Tensor):
            return type(out)(_wrap_several(plan, out, flat, residency, device))
        return fresh(plan, out, residency, device, first)
    except SHORTAGES:
        if has_written:
            raise
        return SLOW
    except RecursionError:
        raise  # ours, and perhaps after the kernel has written
    except (RuntimeError, IndexError, TypeError, ValueError):
        if has_written or device.torch_device.type == "cpu":
            raise  # the host has the same kernels: it is the program's own mistake
        return SLOW  # the host may have a kernel for it
    finally:
        if outer is None:
            del hazards[ident]
        else:
            hazards[ident] = outer


def all_owned(plan: OpPlan, args: tuple[Any, ...]) -> bool:
    """Whether nothing has to be decided about what an operator writes; all of it is ready."""
    return all(isinstance(x, TensorRef) and x._ttr_block.owned for x in targets(plan, args))


def _written(
    plan: OpPlan, args: tuple[Any, ...], out: Any, flat: Any, residency: Any, device: Device
) -> Any:
    """Return what an operator hands back that writes: that, and what it has made beside it."""
    twins = plan.result_of_write
    if not twins:
        return None
    parts = (out,) if len(twins) == 1 else out
    made = iter(
        _wrap_several(
            plan, [part for part, twin in zip(parts, twins, strict=True) if twin is None],
            flat, residency, device,
        )
    )  # fmt: skip
    results = [next(made) if twin is None else args[twin] for twin in twins]
    return results[0] if len(twins) == 1 else tuple(results)


def can_look(ref: Any, device: Device) -> bool:
    """Make the plain view over bytes that are announced and there; False where none is kept."""
    plain_on(ref, device)
    return ref._ttr_device is device


def _has_no_bytes_of_its_own(out: torch.Tensor) -> bool:
    """Whether a result cannot be moved, but for the parts of a sparse one: it stays plain."""
    return out.layout is not _strided or out.is_quantized or out.is_nested


def fresh(plan: OpPlan, out: torch.Tensor, residency: Any, device: Device, like: Any) -> Any:
    """Make the TensorRef of a fresh result, and its block: in one step where only counting is."""
    is_dense, books = plan.makes_dense, residency.books
    if not is_dense:
        if not is_plain(out):
            return out  # of a library's class, or a kernel in Python has it from a factory
        if _has_no_bytes_of_its_own(out):
            return sparse_over(out, like.device, lambda x: fresh(plan, x, residency, device, like))
    block: Block | None = None
    ledger = None if device.is_witness else books.ledgers.get(device)  # a witness may refuse
    if ledger is not None:
        nbytes = out.nbytes if is_dense else out.untyped_storage().nbytes()
        if not books.is_pressed or nbytes < ledger.tiny_nbytes:  # else the strategy hears of it
            block = ledger.bear_if_room(out, nbytes, books.tick)
    if block is None:
        block = residency.born(out, device)
    if not is_dense or labelled.otherwise:
        return _wrap(out, block, device, like)
    # It fills its storage from the start. Told by position: torch takes half as long to read that.
    ref = _make_wrapper(
        TensorRef, out.size(), out.stride(), None, None, out.dtype,
        _strided, None, False, False, None, False, False, KEYS,
    )  # fmt: skip
    ref._ttr_block, ref._ttr_plain = block, out
    ref._ttr_device = device
    return ref


def _wrap_several(
    plan: OpPlan, out: Any, operands: Any, residency: Any, device: Device
) -> list[Any]:
    """Make the TensorRefs of several results; what shares memory, shares the block."""
    refs = [arg for arg in operands if isinstance(arg, TensorRef)]
    blocks = {ref._ttr_plain.untyped_storage()._cdata: ref._ttr_block for ref in refs}
    wrapped = []
    for part in out:
        if not is_plain(part) or _has_no_bytes_of_its_own(part):
            wrapped.append(part)  # None where it was not asked for
            continue
        key, where = part.untyped_storage()._cdata, device
        block = blocks.get(key)
        if block is None:
            part, block, where = settled(
                part, plan, residency, device, has_written=bool(plan.writes)
            )
            if where is device:  # what has gone home shares with nobody
                blocks[key] = block
        wrapped.append(_wrap(part, block, where, refs[0]))
    return wrapped


def _view(plan: OpPlan, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Address arithmetic on a ready operand. No announcement: no kernel reads its bytes.

    An evictor may empty the storage meanwhile; then torch refuses the view, or the view is of a
    storage that is filled again before anybody reads it.
    """
    first = args[0]
    if not isinstance(first, TensorRef):
        return SLOW
    block, device = first._ttr_block, first._ttr_device
    residency: Any = tensorsManager._residency
    if block.ready is not device or device not in residency.books.ready_on:
        return SLOW
    if _is_inference_mode() and not first.is_inference():
        return SLOW
    try:
        if plan.spreads_sizes and args[1]:
            out = plan.binding(first._ttr_plain, *args[1])
        else:
            out = plan.binding(first._ttr_plain, *args[1:], **(kwargs or _NO_KWARGS))
    except RuntimeError:
        return SLOW  # the program's own mistake is raised again on the slow path
    if type(out) is _Tensor:
        return _wrap(out, block, device, first)
    if type(out) is not list and type(out) is not tuple:
        return SLOW  # a view that is another subclass
    return type(out)([_wrap(part, block, device, first) for part in out])


def _wrap(out: torch.Tensor, block: Any, device: Device, like: Any) -> Any:
    """Make the TensorRef of any result."""
    dtype = out.dtype
    # Some solvers give results that are still to be conjugated.
    if labelled.otherwise or (dtype.is_complex and out.is_conj()):
        return make_ref(out, block, device, like.device)
    # Torch reads an offset, 0 where none is told, as slowly as all sizes.
    ref = _make_wrapper(
        TensorRef, out.size(), out.stride(), out.storage_offset() or None, None, dtype,
        _strided, None, False, False, None, False, False, KEYS,
    )  # fmt: skip
    ref._ttr_block, ref._ttr_plain = block, out
    ref._ttr_device = device
    return ref


def charge(
    plan: OpPlan,
    args: tuple[Any, ...],
    written: Iterable[Any],
    plain_args: list[Any],
    kwargs: Any,
    out: Any,
    device: Device,
) -> None:
    """Let a simulated device spend the time that the operator takes."""
    flops, nbytes, dtype_name = operator_cost(plan, plain_args, kwargs, out)
    bases = [arg._ttr_block.base_on(device) for arg in args if isinstance(arg, TensorRef)]
    writes = [ref._ttr_block.base_on(device) for ref in written]
    device.after_operator(bases, writes, flops=flops, nbytes=nbytes, dtype_name=dtype_name)


_FUNCTIONS: dict[ReadyWay, Any] = {
    ReadyWay.NONE: None,
    ReadyWay.VIEW: _view,
    ReadyWay.ONE: run_one,
    ReadyWay.LISTED: _listed,
    ReadyWay.WHOLE: _whole,
    ReadyWay.ANY: _any,
}

#: The function that is each `ReadyWay`.
WAYS = tuple(_FUNCTIONS[way] for way in ReadyWay)
