"""The operators that ask or change what a tensor's memory is: a part of the table (`table.py`)."""

from __future__ import annotations

import torch

from .row import Row, Special

aten = torch.ops.aten

STORAGES = (
    *(
        Row(op, reason="changes or exchanges the storage itself", special=Special.RESIZE)
        for op in (
            aten.resize_.default,
            aten.resize_as_.default,
            aten.set_.default,
            aten.set_.source_Storage,
            aten.set_.source_Storage_storage_offset,
            aten.set_.source_Tensor,
            aten.set_.source_Tensor_storage_offset,
        )
    ),
    *(
        Row(op, reason="page-locking is the runtime's business, not the program's", special=special)
        for op, special in (
            (aten.is_pinned.default, Special.IS_PINNED),
            (aten._pin_memory.default, Special.PIN),
        )
    ),
    Row(
        aten._has_compatible_shallow_copy_type.default,
        reason="compares types only",
        special=Special.CAN_REPLACE,
    ),
    Row(
        aten.is_set_to.default,
        reason="compares storages, which wrappers do not have",
        special=Special.IS_SET_TO,
    ),
    *(
        Row(op, reason="no byte is read", special=Special.COMPARE_SIZES)
        for op in (aten.is_same_size.default, aten._has_same_storage_numel.default)
    ),
    *(
        Row(
            op,
            reason="keeps the very scales that it is given, as only the slow path sees",
            is_never_ready=True,
        )
        for op in (
            aten.quantize_per_channel.default,
            aten._make_per_channel_quantized_tensor.default,
            aten._empty_per_channel_affine_quantized.default,
        )
    ),
)
