"""The operators that draw random numbers: a part of the table (`table.py`), and factories."""

from __future__ import annotations

import functools

import torch

from .row import Row

aten = torch.ops.aten

RANDOM = (
    *(
        Row(op, random_only_with="train")
        for op in (
            aten.dropout.default,
            aten.dropout_.default,
            aten.alpha_dropout.default,
            aten.feature_dropout.default,
            aten.feature_alpha_dropout.default,
        )
    ),
    Row(
        aten.native_dropout.default,
        reason="without an answer it trains, which C++ takes for a no",
        random_only_with="train",
        is_never_ready=True,
    ),
    Row(aten.rrelu.default, random_only_with="training"),
    Row(aten.rrelu_with_noise.default, random_only_with="training"),
    *(
        Row(op, overwrites=True)
        for op in (
            aten.bernoulli_.float,
            aten.bernoulli_.Tensor,
            aten.cauchy_.default,
            aten.exponential_.default,
            aten.geometric_.default,
            aten.log_normal_.default,
            aten.normal_.default,
            aten.random_.default,
            aten.random_.to,
            getattr(aten.random_, "from"),
            aten.uniform_.default,
        )
    ),
)


@functools.cache
def draws_random(name: str) -> bool:
    """Whether a factory draws random numbers, by what torch says of the operator of that name."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
