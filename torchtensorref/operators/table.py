"""The operators of which more is known than their schemas say: one row each.

A row is read together with the schema, once, into a plan (`plan.py`); what has no row is what its
schema says. Rows stand in families; inside one, what is told of several operators alike is told
once.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from . import allocating_first, flops, peaks, substitutes
from .collectives import COLLECTIVES
from .random_numbers import RANDOM
from .row import HOSTS_OWN, HOSTS_OWN_BACK, LAUNCH, FlopRule, Reads, Row, Special
from .sequences import SEQUENCES
from .storages import STORAGES

aten = torch.ops.aten

_functions = torch._C._VariableFunctions
_methods = torch._C.TensorBase
_nn = torch._C._nn

_TRAINING = "training updates the running statistics in place"
_ACCELERATORS_OWN = "chosen by the label; the host has none, and runs it when memory is short"

ARITHMETIC = (
    Row(aten.add.Tensor, binding=_functions.add),
    Row(aten.sub.Tensor, binding=_functions.sub),
    Row(aten.mul.Tensor, binding=_functions.mul),
    Row(aten.div.Tensor, binding=_functions.div),
    Row(aten.pow.Tensor_Scalar, binding=_functions.pow),
    Row(aten.where.self, binding=_functions.where),
    Row(aten.neg.default, binding=_functions.neg),
    Row(aten.sqrt.default, binding=_functions.sqrt),
    Row(aten.rsqrt.default, binding=_functions.rsqrt),
    Row(aten.cos.default, binding=_functions.cos),
    Row(aten.sin.default, binding=_functions.sin),
    Row(aten.exp.default, binding=_functions.exp),
    Row(aten.relu.default, binding=_functions.relu),
    Row(aten.tanh.default, binding=_functions.tanh),
    Row(aten.sigmoid.default, binding=_functions.sigmoid),
    Row(aten.silu.default, binding=_nn.silu),
    Row(aten.gelu.default, binding=_nn.gelu),
    Row(aten.add_.Tensor, binding=_methods.add_),
    Row(aten.sub_.Tensor, binding=_methods.sub_),
    Row(aten.mul_.Tensor, binding=_methods.mul_),
    Row(aten.div_.Tensor, binding=_methods.div_),
    Row(aten.addcmul_.default, binding=_methods.addcmul_),
    Row(aten.addcdiv_.default, binding=_methods.addcdiv_),
    Row(aten.lerp_.Scalar, binding=_methods.lerp_),
    *(
        Row(op, reason=LAUNCH, host_operands=("scalars",))
        for op in (
            aten._foreach_addcdiv.Tensor,
            aten._foreach_addcdiv_.Tensor,
            aten._foreach_addcmul.Tensor,
            aten._foreach_addcmul_.Tensor,
        )
    ),
)

PRODUCTS = (
    Row(aten.mm.default, binding=_functions.mm, is_exact=True, flops=flops.contract),
    Row(
        aten.bmm.default,
        binding=_functions.bmm,
        is_exact=True,
        flops=flops.contract,
        seen_as=aten.mm.default,
    ),
    Row(
        aten.addmm.default,
        binding=_functions.addmm,
        is_exact=True,
        flops=flops.add_contraction,
        seen_as=aten.mm.default,
    ),
    Row(aten.addmm_.default, flops=flops.add_contraction),
    Row(
        aten.baddbmm.default,
        binding=_functions.baddbmm,
        is_exact=True,
        flops=flops.add_contraction,
        seen_as=aten.mm.default,
    ),
    Row(
        aten.linear.default,
        binding=_nn.linear,
        is_exact=True,
        flops=flops.contract,
        peak_nbytes=peaks.linear,
        seen_as=aten.mm.default,
    ),
    Row(
        aten.matmul.default,
        binding=_functions.matmul,
        flops=flops.contract,
        peak_nbytes=peaks.matmul,
        seen_as=aten.mm.default,
    ),
    Row(aten._grouped_mm.default, flops=flops.contract),
    Row(aten.convolution.default, binding=_functions.convolution),
    Row(aten.conv1d.default, flops=flops.convolve),
    Row(aten.conv2d.default, flops=flops.convolve),
    Row(aten.conv3d.default, flops=flops.convolve),
    Row(aten._fft_c2c.default, is_exact=True),
    Row(aten._fft_c2r.default, is_exact=True),
    Row(aten._fft_r2c.default, is_exact=True),
)

ATTENTION = (
    Row(
        aten.scaled_dot_product_attention.default,
        random_only_with="dropout_p",
        binding=_nn.scaled_dot_product_attention,
        flops=flops.attend,
        peak_nbytes=peaks.attention,
    ),
    Row(
        aten._fused_sdp_choice.default,
        reason="reads shapes, returns a number",
        special=Special.CHOOSE_ATTENTION,
    ),
    Row(aten._scaled_dot_product_attention_math.default, random_only_with="dropout_p"),
    Row(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        reason=HOSTS_OWN,
        random_only_with="dropout_p",
        flops=flops.attend,
        elsewhere=substitutes.attention_for_cpu,
        seen_as=aten.scaled_dot_product_attention.default,
    ),
    Row(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        reason=HOSTS_OWN_BACK,
        elsewhere=substitutes.attention_for_cpu_backward,
        at_home=substitutes.attention_for_cpu_backward_at_home,
    ),
    Row(
        aten._scaled_dot_product_flash_attention.default,
        reason=_ACCELERATORS_OWN,
        random_only_with="dropout_p",
        at_home=substitutes.flash_attention_at_home,
        seen_as=aten.scaled_dot_product_attention.default,
    ),
    Row(
        aten._scaled_dot_product_flash_attention_backward.default,
        reason=HOSTS_OWN_BACK,
        elsewhere=substitutes.flash_attention_backward,
        at_home=substitutes.flash_attention_backward,
    ),
    Row(
        aten._scaled_dot_product_efficient_attention.default,
        reason=f"{_ACCELERATORS_OWN}; the seed of its dropout is counted there",
        random_only_with="dropout_p",
        makes_on_host=True,
        at_home=substitutes.efficient_attention_at_home,
        seen_as=aten.scaled_dot_product_attention.default,
    ),
    Row(
        aten._scaled_dot_product_efficient_attention_backward.default,
        reason=f"{HOSTS_OWN_BACK}; the seed is read by its address, wherever that is",
        host_operands=("philox_seed", "philox_offset"),
        elsewhere=substitutes.efficient_attention_backward,
        at_home=substitutes.efficient_attention_backward,
    ),
)

NORMALISATION = (
    Row(
        aten.layer_norm.default,
        binding=_functions.layer_norm,
        peak_nbytes=peaks.norm,
        seen_as=aten.native_layer_norm.default,
    ),
    Row(aten.native_layer_norm.default, binding=_functions.native_layer_norm),
    Row(
        aten.group_norm.default,
        peak_nbytes=peaks.norm,
        seen_as=aten.native_group_norm.default,
    ),
    Row(
        aten.rms_norm.default,
        binding=_functions.rms_norm,
        peak_nbytes=peaks.norm,
        seen_as=aten.mul.Tensor,  # which reads the weight
    ),
    Row(aten._softmax.default, binding=_functions._softmax),
    Row(
        aten.batch_norm.default,
        reason=_TRAINING,
        writes=("running_mean", "running_var"),
        writes_only_with="training",
        binding=_functions.batch_norm,
        peak_nbytes=peaks.norm,
        seen_as=aten.native_batch_norm.default,
    ),
    *(
        Row(
            op,
            reason=_TRAINING,
            writes=("running_mean", "running_var"),
            writes_only_with=training,
        )
        for op, training in (
            (aten.native_batch_norm.default, "training"),
            (aten.native_batch_norm.out, "training"),
            (aten.cudnn_batch_norm.default, "training"),
            (aten.miopen_batch_norm.default, "training"),
            # Composite: these reach us whole under inference mode, and then call the ones above.
            (aten.instance_norm.default, "use_input_stats"),
            (aten._batch_norm_impl_index.default, "training"),
        )
    ),
    *(
        Row(op, reason=_TRAINING, writes=("running_mean", "running_var"))
        for op in (
            aten.batch_norm_update_stats.default,
            # Of torch.nn.SyncBatchNorm, on accelerators only.
            aten.batch_norm_gather_stats.default,
            aten.batch_norm_gather_stats_with_counts.default,
        )
    ),
    Row(
        aten._fused_moving_avg_obs_fq_helper.default,
        reason="may give the statistics that it writes other sizes",
        is_never_ready=True,
    ),
)

REDUCTIONS = (
    Row(aten.mean.dim, binding=_functions.mean, is_exact=True),
    Row(aten.sum.dim_IntList, binding=_functions.sum, is_exact=True),
    Row(aten.argmax.default, binding=_functions.argmax, is_exact=True),
)

GATHERING = (
    Row(aten.embedding.default, reads=Reads.ROWS, binding=_functions.embedding, is_exact=True),
    Row(aten.index_select.default, reads=Reads.ROWS),
    Row(aten.gather.default, reads=Reads.ROWS),
    Row(aten.index.Tensor, reads=Reads.ROWS),
    Row(aten.take.default, reads=Reads.ROWS),
    Row(aten.trace.default, reads=Reads.ELEMENTS),
    Row(aten._local_scalar_dense.default, reads=Reads.ELEMENTS),
    *(
        Row(op, reason="its kernels allocate after they have written", elsewhere=elsewhere)
        for op, elsewhere in (
            (aten.scatter_reduce_.two, allocating_first.scatter_reduce_),
            (aten.index_reduce_.default, allocating_first.index_reduce_),
        )
    ),
)

VIEWS = (
    Row(aten.view.default, binding=_methods.view),
    Row(
        aten._unsafe_view.default,
        reason="matmul's way to reshape a temporary without a version check",
        is_view=True,
        binding=_methods.view,
    ),
    Row(aten.t.default, binding=_functions.t),
    Row(aten.transpose.int, binding=_functions.transpose),
    Row(aten.select.int, binding=_functions.select),
    Row(aten.unsqueeze.default, binding=_functions.unsqueeze),
    Row(aten.squeeze.dim, binding=_functions.squeeze),
    Row(aten.expand.default, binding=_methods.expand),
    Row(aten.detach.default, binding=_functions.detach),
    Row(aten.permute.default, binding=_functions.permute),
    Row(aten._conj.default, reason="sets a bit of the tensor's own", is_never_ready=True),
    Row(aten._neg_view.default, reason="sets a bit of the tensor's own", is_never_ready=True),
    Row(
        aten._nested_view_from_buffer.default,
        reason="a nested tensor over the bytes that it is given: it stays plain",
        is_view=False,
        host_operands=("nested_size", "nested_strides", "offsets"),
    ),
    *(
        Row(op, reason="views that may be written without invalidating one another", is_view=True)
        for op in (
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
            aten.unsafe_chunk.default,
        )
    ),
    *(
        Row(op, reason="makes a sparse tensor of the very tensors it is given", aliases=True)
        for op in (
            aten._embedding_bag_backward.default,
            aten._embedding_bag_sparse_backward.default,
            aten._sparse_coo_tensor_unsafe.default,
            aten._sparse_coo_tensor_with_dims_and_tensors.default,
            aten._sparse_compressed_tensor_unsafe.default,
            aten.sparse_compressed_tensor.comp_plain_value_size,
        )
    ),
    *(
        Row(op, reason="hands back an alias of a tensor without elements", aliases=True)
        for op in (aten.channel_shuffle.default, aten.native_channel_shuffle.default)
    ),
    *(
        Row(op, reason="is its argument: a constant, or what is not quantized", aliases=True)
        for op in (aten.lift.default, aten.lift_fresh.default, aten.dequantize.self)
    ),
    Row(
        aten.tensor_split.tensor_indices_or_sections,
        reason=LAUNCH,
        host_operands=("tensor_indices_or_sections",),
    ),
)

COPIES = (
    Row(aten.cat.default, binding=_functions.cat, is_exact=True),
    Row(aten.stack.default, binding=_functions.stack),
    Row(
        aten.clone.default,
        reason="a copy costs nothing until it is written",
        binding=_functions.clone,
        special=Special.SHARE,
    ),
    Row(
        aten._to_copy.default,
        reason="`.to(device)` of 14 GB of weights must not copy them",
        special=Special.SHARE,
    ),
)

SPARSE = (
    Row(
        aten._sparse_mm_reduce_impl.default,
        reason="asks whether an operand requires gradients, which plain tensors of ours do not",
        elsewhere=substitutes.reducing_product,
        at_home=substitutes.reducing_product,
    ),
)

ROWS: tuple[Row, ...] = (
    *ARITHMETIC,
    *PRODUCTS,
    *ATTENTION,
    *NORMALISATION,
    *REDUCTIONS,
    *GATHERING,
    *VIEWS,
    *COPIES,
    *RANDOM,
    *SEQUENCES,
    *SPARSE,
    *STORAGES,
    *COLLECTIVES,
)

#: In the name of a type: an object of C++ that torch knows by name, such as packed weights.
_OBJECT = "__torch__.torch.classes."

_by_operator = {row.op: row for row in ROWS}
_flops = {row.op.overloadpacket: row.flops for row in ROWS if row.flops is not None}


def row_of(op: OpOverload) -> Row:
    """Return what is known of an overload; an empty row where nothing is."""
    known = _by_operator.get(op)
    if known is not None:
        return known
    if any(_OBJECT in str(result.type) for result in op._schema.returns):
        return Row(op, reason="what it makes may keep its operands", special=Special.KEEP)
    return Row(op)


def flops_of(op: OpOverload) -> FlopRule | None:
    """Return the rule that the row of one of an operator's overloads has for all of them."""
    return _flops.get(op.overloadpacket)
