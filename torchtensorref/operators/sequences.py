"""The operators on sequences, packed and recurrent ones: a part of the table (`table.py`)."""

from __future__ import annotations

import torch

from . import flops, substitutes
from .row import HOSTS_OWN, HOSTS_OWN_BACK, LAUNCH, Row

aten = torch.ops.aten

SEQUENCES = (
    Row(
        aten._pack_padded_sequence.default,
        reason=LAUNCH,
        host_operands=("lengths",),
        makes_on_host=True,
    ),
    *(
        Row(op, reason=LAUNCH, host_operands=("batch_sizes",))
        for op in (
            aten._pack_padded_sequence_backward.default,
            aten._pad_packed_sequence.default,
            aten.lstm.data,
            aten.gru.data,
            aten.rnn_tanh.data,
            aten.rnn_relu.data,
        )
    ),
    Row(
        aten.mkldnn_rnn_layer.default,
        reason=HOSTS_OWN,
        elsewhere=substitutes.lstm_layer,
        flops=flops.recur,
    ),
    Row(
        aten.mkldnn_rnn_layer_backward.default,
        reason=f"{HOSTS_OWN_BACK}; it writes the scratch memory that it is handed over",
        writes=("workspace",),
        elsewhere=substitutes.lstm_layer_backward,
        at_home=substitutes.lstm_layer_backward_at_home,
        is_never_ready=True,
        flops=flops.recur_backward,
    ),
)
