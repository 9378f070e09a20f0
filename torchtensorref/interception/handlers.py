"""Operators that need their own treatment: a table, each row with its reason.

A handler receives the call before it is analysed and returns its result, or NotImplemented to let
the six phases go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..memory.block import Block
from ..memory.manager import tensorsManager
from ..memory.plain_views import make_ref, replace_metadata
from ..memory.ref import TensorRef
from ..operators import substitutes as variants
from ..operators.schema import plan_of
from .slow_path import SlowPath

aten = torch.ops.aten

#: Smaller blocks are copied at once: that is cheaper than to ask at each use who shares them.
SHARE_FROM_NBYTES = 1 << 16


def _share(call: SlowPath) -> Any:
    """`clone` and `_to_copy` that change nothing: share the bytes until one is written."""
    source = call.args[0]
    if type(source) is not TensorRef or not _keeps_everything(source, call.kwargs):
        return NotImplemented
    label = torch.device(call.kwargs.get("device") or source.device)
    return tensorsManager.ownership.copy_of(source, None, label=label)


def _changes_something(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy has to be made anyway, so that nobody has to be asked about sharing."""
    return not _keeps_everything(args[0], kwargs)


def _keeps_everything(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the copy has the same dtype and strides and covers the whole block."""
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    if kwargs.get("dtype") not in (None, source.dtype) or kwargs.get("layout") not in (
        None,
        torch.strided,
    ):
        return False
    keeps_order = memory_format in (None, torch.preserve_format)
    if not keeps_order and not source.is_contiguous(memory_format=memory_format):
        return False
    block: Block = source._ttr_block
    return (
        source.storage_offset() == 0
        and source.numel() * source.element_size() == block.nbytes
        and not source.is_conj()
        and not source.is_neg()
        and block.nbytes >= SHARE_FROM_NBYTES
        and (block.exposure is None or not block.exposure.alive)
        and _non_overlapping(source.size(), source.stride())
    )


def _non_overlapping(sizes: Any, strides: Any) -> bool:
    """Whether the elements fill their range without gaps or repetition, in some order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _resize_at_home(call: SlowPath) -> Any:
    """Operators that change a storage's size or exchange it: done at home, then looked at anew."""
    ref = call.args[0]
    if type(ref) is not TensorRef:
        return NotImplemented
    residency = tensorsManager.residency
    residency.sharing.unshare(ref._ttr_block)
    residency.sharing.own_home_bytes(ref._ttr_block)
    plain_args = [tensorsManager.ownership.plain_at_home(arg) for arg in call.args]
    kwargs = {
        name: tensorsManager.ownership.plain_at_home(arg) for name, arg in call.kwargs.items()
    }
    residency.forget_accelerators(ref._ttr_block)
    # Another object: the view at hand can be the replica's own base, which keeps its storage.
    plain = plain_args[0] = plain_args[0].detach()
    before = plain.untyped_storage()
    call.plan.op(*plain_args, **kwargs)
    if plain.untyped_storage()._cdata != before._cdata:
        other = tensorsManager.ownership.block_of_storage(plain, call.args[1:])
        replace_metadata(ref, other)
        return ref
    block: Block = ref._ttr_block
    residency.resized(block, before.nbytes())
    ref._ttr_home = None
    replace_metadata(ref, make_ref(plain, block, residency.books.host, ref.device))
    return ref


def _choose_attention(call: SlowPath) -> Any:
    """`_fused_sdp_choice` looks at shapes and strides only: nothing has to be moved for it."""

    def stand_in(value: Any) -> Any:
        if type(value) is not TensorRef:
            return value
        with torch._C.DisableTorchFunction():
            return torch._C._VariableFunctions.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="cpu"
            )

    args = [stand_in(arg) for arg in call.args]
    return call.plan.op(*args, **{name: stand_in(arg) for name, arg in call.kwargs.items()})


def _false(call: SlowPath) -> Any:
    """The program's tensors are never page-locked as far as it can tell."""
    return False


def _same(call: SlowPath) -> Any:
    """Page-locking is the runtime's business: the tensor itself is as good."""
    return call.args[0]


def _both_are_refs(call: SlowPath) -> Any:
    """One TensorRef can take the place of another: asked before each `.data = `."""
    return all(type(arg) is TensorRef for arg in call.args[:2]) or NotImplemented


def _has_same_storage(call: SlowPath) -> Any:
    """`is_set_to`: the same block, read with the same metadata."""
    a, b = call.args[:2]
    if type(a) is not TensorRef or type(b) is not TensorRef:
        return NotImplemented
    return (
        a._ttr_block is b._ttr_block
        and a.size() == b.size()
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


#: Operator, treatment, reason.
TABLE: tuple[tuple[Any, Callable[[SlowPath], Any], str], ...] = (
    (aten.clone.default, _share, "a copy costs nothing until it is written"),
    (aten._to_copy.default, _share, "`.to(device)` of 14 GB of weights must not copy them"),
    (aten.resize_.default, _resize_at_home, "changes the size of the storage itself"),
    (aten.resize_as_.default, _resize_at_home, "changes the size of the storage itself"),
    (aten.set_.default, _resize_at_home, "exchanges the storage"),
    (aten.set_.source_Storage, _resize_at_home, "exchanges the storage"),
    (aten.set_.source_Storage_storage_offset, _resize_at_home, "exchanges the storage"),
    (aten.set_.source_Tensor, _resize_at_home, "exchanges the storage"),
    (aten.set_.source_Tensor_storage_offset, _resize_at_home, "exchanges the storage"),
    (aten._fused_sdp_choice.default, _choose_attention, "reads shapes, returns a number"),
    (aten.is_pinned.default, _false, "page-locking is not the program's business"),
    (aten._pin_memory.default, _same, "page-locking is not the program's business"),
    (aten._has_compatible_shallow_copy_type.default, _both_are_refs, "compares types only"),
    (aten.is_set_to.default, _has_same_storage, "compares storages, which wrappers do not have"),
)


_HOSTS_OWN = "chosen by the label; no accelerator has it"
_HOSTS_OWN_BACK = "what the forward operator has left may be of another device's form"
_ACCELERATORS_OWN = "chosen by the label; the host has none, and runs it when memory is short"

#: Operator, what takes its place where its operands lie on an accelerator, and on the host (None:
#: itself), reason.
VARIANTS: tuple[tuple[Any, Any, Any, str], ...] = (
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        variants.attention_for_cpu,
        None,
        _HOSTS_OWN,
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        variants.attention_for_cpu_backward,
        variants.attention_for_cpu_backward_at_home,
        _HOSTS_OWN_BACK,
    ),
    (aten.mkldnn_rnn_layer.default, variants.lstm_layer, None, _HOSTS_OWN),
    (
        aten.mkldnn_rnn_layer_backward.default,
        variants.lstm_layer_backward,
        variants.lstm_layer_backward_at_home,
        _HOSTS_OWN_BACK,
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        None,
        variants.flash_attention_at_home,
        _ACCELERATORS_OWN,
    ),
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        variants.flash_attention_backward,
        variants.flash_attention_backward,
        _HOSTS_OWN_BACK,
    ),
    (
        aten._scaled_dot_product_efficient_attention.default,
        None,
        variants.efficient_attention_at_home,
        _ACCELERATORS_OWN,
    ),
    (
        aten._scaled_dot_product_efficient_attention_backward.default,
        variants.efficient_attention_backward,
        variants.efficient_attention_backward,
        _HOSTS_OWN_BACK,
    ),
)


def install() -> None:
    """Put the tables into the plans."""
    for op, elsewhere, at_home, _ in VARIANTS:
        # It is the operator in everything but the call.
        plan_of(op).op = variants.ByDevice(op, elsewhere, at_home)  # type: ignore[assignment]
    for op, handler, _ in TABLE:
        plan = plan_of(op)
        plan.handler = handler
        plan.is_fast = plan.is_fast and handler is _share
        plan.is_simple = plan.is_listed = False
        plan.fast_below_nbytes = SHARE_FROM_NBYTES
        plan.fast_above = _changes_something
