"""Operators that have part of their work on the host, also where an accelerator has their kernel.

Torch wants some operands there, or makes some results there: lengths that a kernel's launch depends
on, seeds that the host counts. Nothing in a schema says so. The audit in `tests/device` finds what
is missing here: such an operator is refused, and runs on the host as a whole.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

#: Operators whose kernels on accelerators read some operands on the host, and their names.
READS_AT_HOME: dict[OpOverload, tuple[str, ...]] = {
    aten._pack_padded_sequence.default: ("lengths",),
    aten._pack_padded_sequence_backward.default: ("batch_sizes",),
    aten._pad_packed_sequence.default: ("batch_sizes",),
    aten.lstm.data: ("batch_sizes",),
    aten.gru.data: ("batch_sizes",),
    aten.rnn_tanh.data: ("batch_sizes",),
    aten.rnn_relu.data: ("batch_sizes",),
    aten.tensor_split.tensor_indices_or_sections: ("tensor_indices_or_sections",),
    aten._foreach_addcdiv.Tensor: ("scalars",),
    aten._foreach_addcdiv_.Tensor: ("scalars",),
    aten._foreach_addcmul.Tensor: ("scalars",),
    aten._foreach_addcmul_.Tensor: ("scalars",),
    # Reads the numbers by their address, and does not ask where that is.
    aten._scaled_dot_product_efficient_attention_backward.default: (
        "philox_seed",
        "philox_offset",
    ),
}

#: Operators whose kernels on accelerators make some results on the host.
MAKES_AT_HOME = {
    aten._pack_padded_sequence.default,
    aten._scaled_dot_product_efficient_attention.default,
}
