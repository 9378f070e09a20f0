"""The operators that may be cut, and the rule of each.

Elementwise ones are known by their tag. A rule says itself, call by call, whether the tiles keep
the bits of the whole; tests force each of them into tiles of random sizes and compare.
"""

from __future__ import annotations

from typing import Any

import torch

from . import indexing, products, rows, windows
from .cut import Call, Cut, Rule
from .elementwise import elementwise

aten = torch.ops.aten

_sum = rows.reduction()
_choice = rows.reduction(is_choice=True)
_two = rows.reduction(2, is_choice=True)
_scan = rows.along_one("self", is_choice=True)

RULES: dict[Any, Rule] = {
    # products
    aten.mm.default: products.mm,
    aten.addmm.default: products.addmm,
    aten.bmm.default: products.bmm,
    aten.baddbmm.default: products.baddbmm,
    aten.linear.default: products.linear,
    # elementwise, and not tagged so
    aten.copy_.default: elementwise,
    aten.fill_.Scalar: elementwise,
    aten.zero_.default: elementwise,
    aten.masked_fill_.Scalar: elementwise,
    aten.leaky_relu_backward.default: elementwise,
    aten._to_copy.default: elementwise,
    # over some dimensions
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _sum,
    aten.prod.dim_int: _sum,
    aten.nansum.default: _sum,
    aten.var.correction: _sum,
    aten.std.correction: _sum,
    aten.logsumexp.default: _sum,
    aten.linalg_vector_norm.default: _sum,
    # of zeros they choose one by vectors, and another one by one
    aten.amax.default: _sum,
    aten.amin.default: _sum,
    aten.argmax.default: _choice,
    aten.argmin.default: _choice,
    aten.any.dim: _choice,
    aten.all.dim: _choice,
    aten.max.dim: _two,
    aten.min.dim: _two,
    # along one
    aten._softmax.default: rows.along_one("self", is_flat=True),
    aten._log_softmax.default: rows.along_one("self"),
    aten._softmax_backward_data.default: rows.along_one("grad_output", "output"),
    aten._log_softmax_backward_data.default: rows.along_one("grad_output", "output"),
    aten.cumsum.default: _scan,
    aten.cumprod.default: _scan,
    aten.logcumsumexp.default: _scan,
    aten.sort.default: rows.along_one("self", result_count=2, is_choice=True),
    aten.sort.stable: rows.along_one("self", result_count=2, is_choice=True),
    aten.topk.default: rows.along_one("self", result_count=2, is_choice=True),
    aten.argsort.default: _scan,
    # norms
    aten.native_layer_norm.default: rows.layer_norm,
    aten.native_layer_norm_backward.default: rows.layer_norm_backward,
    aten._fused_rms_norm.default: rows.rms_norm,
    aten.native_group_norm.default: rows.group_norm,
    # putting together, taking out
    aten.cat.default: rows.cat,
    aten.stack.default: rows.stack,
    aten.embedding.default: indexing.embedding,
    aten.embedding_dense_backward.default: indexing.embedding_dense_backward,
    aten.index_select.default: indexing.index_select,
    aten.gather.default: indexing.gather,
    aten.nll_loss_forward.default: indexing.nll_loss_forward,
    aten.nll_loss_backward.default: indexing.nll_loss_backward,
    # windows
    aten.convolution.default: windows.convolution,
    aten.convolution_backward.default: windows.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: windows.attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        windows.attention_for_cpu_backward
    ),
}


#: Products, whose kernels add in another order where an operand begins elsewhere. Measured in plain
#: torch on views that begin 4 to 64 bytes later: of `linear` 2 to 35 in 60 had other bits, of
#: attention 1 to 32, and none in half precision, of other operators here, or at multiples of
#: `ALIGNED_NBYTES`, where each piece begins that is fetched by itself.
MINDS_PLACES = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


def rule_of(op: Any) -> Rule | None:
    """Return the rule of an overload; None where it is never cut."""
    rule = RULES.get(op)
    if rule is None and torch.Tag.pointwise in op.tags and not is_random(op):
        rule = elementwise
    return rule


def is_random(op: Any) -> bool:
    """Whether it draws numbers: cut, it would draw others."""
    return torch.Tag.nondeterministic_seeded in op.tags


def cut_of(rule: Rule, call: Call) -> Cut | None:
    """Ask a rule; None where it does not fit the call, which may be the program's own mistake."""
    try:
        return rule(call)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
