"""Python's own bindings of the operators that run most: a table."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_functions = torch._C._VariableFunctions
_methods = torch._C.TensorBase

#: Operator and binding. Bindings parse their arguments in C; the overload goes through a boxed
#: stack (0.9 microseconds more). Only where the binding takes the overload's arguments in its order
#: and can mean no other overload for them.
BINDINGS: dict[OpOverload, Any] = {
    aten.add.Tensor: _functions.add,
    aten.sub.Tensor: _functions.sub,
    aten.mul.Tensor: _functions.mul,
    aten.div.Tensor: _functions.div,
    aten.pow.Tensor_Scalar: _functions.pow,
    aten.where.self: _functions.where,
    aten.neg.default: _functions.neg,
    aten.sqrt.default: _functions.sqrt,
    aten.rsqrt.default: _functions.rsqrt,
    aten.cos.default: _functions.cos,
    aten.sin.default: _functions.sin,
    aten.exp.default: _functions.exp,
    aten.relu.default: _functions.relu,
    aten.tanh.default: _functions.tanh,
    aten.sigmoid.default: _functions.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.gelu.default: torch._C._nn.gelu,
    aten.mm.default: _functions.mm,
    aten.bmm.default: _functions.bmm,
    aten.addmm.default: _functions.addmm,
    aten.baddbmm.default: _functions.baddbmm,
    aten.linear.default: torch._C._nn.linear,
    aten.matmul.default: _functions.matmul,
    aten.convolution.default: _functions.convolution,
    aten.scaled_dot_product_attention.default: torch._C._nn.scaled_dot_product_attention,
    aten.layer_norm.default: _functions.layer_norm,
    aten.native_layer_norm.default: _functions.native_layer_norm,
    aten._softmax.default: _functions._softmax,
    aten.mean.dim: _functions.mean,
    aten.sum.dim_IntList: _functions.sum,
    aten.argmax.default: _functions.argmax,
    aten.embedding.default: _functions.embedding,
    aten.cat.default: _functions.cat,
    aten.stack.default: _functions.stack,
    aten.clone.default: _functions.clone,
    aten.add_.Tensor: _methods.add_,
    aten.sub_.Tensor: _methods.sub_,
    aten.mul_.Tensor: _methods.mul_,
    aten.div_.Tensor: _methods.div_,
    aten.addcmul_.default: _methods.addcmul_,
    aten.addcdiv_.default: _methods.addcdiv_,
    aten.lerp_.Scalar: _methods.lerp_,
    aten.view.default: _methods.view,
    aten._unsafe_view.default: _methods.view,
    aten.t.default: _functions.t,
    aten.transpose.int: _functions.transpose,
    aten.select.int: _functions.select,
    aten.unsqueeze.default: _functions.unsqueeze,
    aten.squeeze.dim: _functions.squeeze,
    aten.expand.default: _methods.expand,
    aten.detach.default: _functions.detach,
    aten.permute.default: _functions.permute,
}
