"""What is done with operators that need their own treatment (`Special` in their row).

A handler receives the plan and the call before it is analysed, and returns its result, or
NotImplemented to let the six phases go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.plain_views import follow, for_writing, make_ref, view_with
from ..memory.ref import TensorRef
from ..memory.sparse import SparseRef, plain_sparse
from ..operators.blocked.cut import is_dense, lies_as_fresh
from ..operators.plan import OpPlan
from ..operators.row import Special
from .device_labels import label_of

Handler = Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], Any]

#: Smaller blocks are copied at once: that is cheaper than to ask at each use who shares them.
SHARE_FROM_NBYTES = 1 << 16


def _share(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`clone` and `_to_copy` that change nothing: share the bytes until one is written."""
    source = args[0]
    if not isinstance(source, TensorRef) or not keeps_everything(source, kwargs):
        return NotImplemented
    label = label_of(kwargs.get("device") or source.device)
    return tensorsManager.ownership.copy_of(source, None, label=label)


def keeps_everything(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the copy has the same dtype and strides and covers the whole block."""
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    if kwargs.get("dtype") not in (None, source.dtype) or kwargs.get("layout") not in (
        None,
        torch.strided,
    ):
        return False
    keeps_order = memory_format in (None, torch.preserve_format)
    if not keeps_order and not lies_as_fresh(source, memory_format):
        return False
    block: Block = source._ttr_block
    return (
        block.nbytes >= SHARE_FROM_NBYTES
        and (block.exposure is None or not block.exposure.alive)
        and _is_whole(source)
    )


def _resize_at_home(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that change a storage's size or exchange it: done at home, then looked at anew."""
    ref: Any = args[0]
    if isinstance(ref, SparseRef):
        return NotImplemented  # its parts are written, as by any other operator
    # Of a sparse one only its sizes count.
    args = tuple(arg._ttr_hollow if isinstance(arg, SparseRef) else arg for arg in args)
    if not isinstance(ref, TensorRef):
        # What a plain tensor is set to is held outside from then on.
        return plan.op(*tree_map_only(TensorRef, _held_outside, args), **kwargs)
    residency = tensorsManager.residency
    residency.sharing.unshare(ref._ttr_block)
    residency.sharing.own_home_bytes(ref._ttr_block)
    at_home = tensorsManager.ownership.plain_at_home
    plain_args = [at_home(arg) for arg in args]
    kwargs = {name: at_home(arg) for name, arg in kwargs.items()}
    residency.forget_accelerators(ref._ttr_block)
    block: Block = ref._ttr_block
    host = residency.books.host
    plain = plain_args[0] = for_writing(ref, host)
    before = plain.untyped_storage()
    plan.op(*plain_args, **kwargs)
    if plain.untyped_storage()._cdata != before._cdata:
        other = tensorsManager.ownership.block_of_storage(plain, args[1:])
        follow(ref, other)
        return ref
    home = block.replicas[host].base.untyped_storage()
    residency.resized(block, home.nbytes())
    ref._ttr_home = None
    plain = view_with(plain, home, plain.storage_offset())
    follow(ref, make_ref(plain, block, host, ref.device))
    return ref


def _held_outside(ref: Any) -> torch.Tensor:
    return tensorsManager.ownership.exposed_plain(ref, "a plain tensor")


def _choose_attention(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_fused_sdp_choice` reads no byte, but looks at shapes, strides and who wants gradients."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, TensorRef):
            return value
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty_strided(
                value.size(),
                value.stride(),
                dtype=value.dtype,
                device="cpu",
                requires_grad=value.requires_grad,
            )

    named = {name: stand_in(arg) for name, arg in kwargs.items()}
    return plan.op(*map(stand_in, args), **named)


def _false(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The program's tensors are never page-locked as far as it can tell."""
    return False


def _pin(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Page-locking is the runtime's business, but what comes of it is a copy with the same strides.

    Its bytes are shared until one of both is written, small ones too: batches are let go at once.
    """
    ref = args[0]
    if not isinstance(ref, TensorRef):
        return torch.ops.aten.clone.default(ref)
    if _is_whole(ref):
        return tensorsManager.ownership.copy_of(ref, None)
    made = torch.ops.aten.new_empty_strided.default(ref, ref.size(), ref.stride())
    return torch.ops.aten.copy_.default(made, ref)


def _is_whole(ref: Any) -> bool:
    """Whether a tensor is all of its block, each element once, as it is."""
    return (
        ref.storage_offset() == 0
        and ref.numel() * ref.element_size() == ref._ttr_block.nbytes
        and not ref.is_conj()
        and not ref.is_neg()
        and is_dense(ref)
    )


def _both_are_refs(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One TensorRef can take the place of another: asked before each `.data = `."""
    return all(isinstance(arg, TensorRef) for arg in args[:2]) or NotImplemented


def _has_same_storage(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`is_set_to`: the same block, read with the same metadata."""
    a, b = args[:2]
    if not isinstance(a, TensorRef) or not isinstance(b, TensorRef):
        return NotImplemented
    return (
        a._ttr_block is b._ttr_block
        and a.size() == b.size()
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def _compare_sizes(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that look at sizes, of tensors and of storages: asked of tensors without bytes."""

    def hollow(value: Any) -> Any:
        if not isinstance(value, TensorRef):
            return value
        storage = torch.UntypedStorage(value._ttr_block.nbytes, device="meta")
        return view_with(value, storage, value.storage_offset())

    return plan.op(*map(hollow, args), **kwargs)


def _keep(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that make an object of C++ (packed weights): it may keep what it is given.

    So that is at home, and stays there for as long as the object has it.
    """

    def hold(ref: Any) -> torch.Tensor:
        return tensorsManager.ownership.exposed_plain(ref, "an object of C++")

    return _with_held(plan, args, kwargs, hold)[0]


def _with_held(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hold: Callable[[Any], torch.Tensor],
) -> tuple[Any, dict[int, torch.Tensor], dict[int, Any]]:
    """Run an operator on what `hold` gives; return its result, those by operand, and back."""
    refs: dict[int, Any] = {}
    known: dict[int, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, (TensorRef, SparseRef)):
            return value
        if id(value) not in known:
            is_sparse = isinstance(value, SparseRef)
            known[id(value)] = held = plain_sparse(value, hold) if is_sparse else hold(value)
            refs[id(held)] = value
        return known[id(value)]

    out = plan.op(*tree_map(plain, args), **tree_map(plain, kwargs))
    return tree_map(lambda value: refs.get(id(value), value), out), known, refs


def _communicate(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators between processes: on plain tensors, held where they are until nobody has them.

    Whoever still writes them when the call has returned holds them. A result that is no operand
    may not have its bytes yet, so it stays plain. A sparse operand gets other indices and values:
    these are waited for.
    """
    out, known, refs = _with_held(plan, args, kwargs, _hold_for(plan, args, kwargs))
    sparse = [held for held in known.values() if isinstance(refs[id(held)], SparseRef)]
    if sparse:
        _wait(out)
    for held in sparse:
        torch.ops.aten.copy_.default(refs[id(held)], held.cpu())
        torch.autograd.graph.increment_version(refs[id(held)])
    return out


def _wait(out: Any) -> None:
    """Wait until what was begun is done."""
    for work in tree_leaves(out):
        if isinstance(work, torch.ScriptObject):
            torch.distributed.Work.unbox(work).wait()


def _hold_for(plan: OpPlan, args: Any, kwargs: Any) -> Callable[[Any], torch.Tensor]:
    """How operands are held for a group of processes: where it can exchange them, best at home."""
    named = {"process_group", "group_name"}.intersection(plan.argument_names)
    if not named:
        return tensorsManager.ownership.target
    group = plan.argument(named.pop(), args, kwargs)
    distributed: Any = torch.distributed.distributed_c10d
    if isinstance(group, str):
        group = distributed._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = distributed.ProcessGroup.unbox(group)
    if any(device.type == "cpu" for device in group._device_types):
        return _at_home
    return _on_accelerator


def _at_home(ref: Any) -> torch.Tensor:
    return tensorsManager.ownership.exposed_plain(ref, "other processes")


def _on_accelerator(ref: Any) -> torch.Tensor:
    tensorsManager.ownership.to_accelerator(ref)
    return tensorsManager.ownership.target(ref)


#: What is done for each kind; a row of `operators.table` says which operators are of it.
HANDLERS: dict[Special, Handler] = {
    Special.SHARE: _share,
    Special.RESIZE: _resize_at_home,
    Special.CHOOSE_ATTENTION: _choose_attention,
    Special.IS_PINNED: _false,
    Special.PIN: _pin,
    Special.CAN_REPLACE: _both_are_refs,
    Special.IS_SET_TO: _has_same_storage,
    Special.COMPARE_SIZES: _compare_sizes,
    Special.KEEP: _keep,
    Special.COMMUNICATE: _communicate,
}
