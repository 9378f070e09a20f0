"""The operators between processes: a part of the table (`table.py`) of its own.

They write operands that their schemas do not mark, and a thread or a stream may go on reading and
writing when they have returned.
"""

from __future__ import annotations

import torch

from .row import Row, Special

#: What each library of operators between processes has; none where torch was built without.
_COLLECTIVES = {
    "c10d": (
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "barrier",
        "broadcast_",
        "check_for_nan",
        "gather_",
        "gather_into_tensor_",
        "monitored_barrier_",
        "recv_",
        "recv_any_source_",
        "reduce_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
        "scatter_",
        "send",
    ),
    "_c10d_functional": (
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_to_all_single",
        "batch_p2p_ops",
        "broadcast",
        "broadcast_",
        "irecv",
        "isend",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_out",
        "wait_tensor",
        "wait_tensors",
    ),
}

COLLECTIVES = tuple(
    Row(
        getattr(getattr(torch.ops, library), name).default,
        reason="writes what its schema does not mark, and may go on when it has returned",
        special=Special.COMMUNICATE,
    )
    for library, names in _COLLECTIVES.items()
    for name in names
    if hasattr(getattr(torch.ops, library), name)
)
