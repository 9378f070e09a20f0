"""What the results of kernels are: torch's shape functions, as the device in use has its kernels.

And functions of our own where torch's refuses what its kernels take, or knows CUDA's only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base.activation import shaped_for
from ..interception.layouts import strides_on_kernels
from ..memory.manager import tensorsManager
from ..operators.blocked.cut import is_dense
from ..operators.blocked.elementwise import elementwise
from ..operators.blocked.table import rule_of
from ..operators.plan import OpPlan
from ..operators.substitutes import itself

__all__ = ["shapes_of"]

_aten = torch.ops.aten


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of rows: torch's shape function takes bfloat16 alone, as on CUDA."""
    group_count = [] if offs is None else [offs.size(0)]
    if a.dim() == b.dim() == 2:
        sizes = [*group_count, a.size(0), b.size(1)]
    elif a.dim() == b.dim():
        sizes = [a.size(0), a.size(1), b.size(2)]
    else:
        sizes = [a.size(-2), b.size(-1)]
    return a.new_empty(sizes, dtype=out_dtype or a.dtype)


def _index_put(op: Callable[..., Any], x: Any, indices: Any, values: Any, *how: Any) -> Any:
    """Write at indices: torch's shape function looks at neither them nor the values."""
    if len(indices) > x.dim():
        dims = f"dimension {x.dim()} (got {len(indices)})"
        raise IndexError(f"too many indices for tensor of {dims}")
    if all(one is None or one.dtype in _POSITIONS for one in indices):
        values.expand(_aten.index.Tensor(x, indices).size())
    return op(x, indices, values, *how)


def _kept(given: torch.Tensor, is_empty: bool, args: Sequence[Any]) -> torch.Tensor:
    """Make what the host's kernels of norms keep for the gradient, of the parameters' dtype.

    That of CUDA's is single precision.
    """
    dtypes = [value.dtype for value in args if isinstance(value, torch.Tensor)]
    return given.new_empty((0,) if is_empty else given.size(), dtype=(dtypes[1:] or dtypes)[0])


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, ...]:
    """Make memory of its own: torch's shape function hands `x` back where it is not to train.

    And it takes no answer for a no.
    """
    if not x.numel():
        return x, torch.empty_like(x)
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _in_format(
    tensor: torch.Tensor | None, chosen: torch.memory_format, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    return tensor if tensor is None else torch.empty_like(tensor, memory_format=chosen, dtype=dtype)


def _in_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return _in_format(tensor, torch.contiguous_format)


def _in_format_of(tensor: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor | None:
    """Lay a result out in rows, or with channels last where an operand is so; of its dtype."""
    return _in_format(tensor, suggest_memory_format(of), of.dtype)


def _layer_norm(*args: Any) -> tuple[torch.Tensor | None, ...]:
    out, *kept = _aten.native_layer_norm.default(*args)
    return (_in_rows(out), *(_kept(one, False, args) for one in kept))


def _layer_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(map(_in_rows, _aten.native_layer_norm_backward.default(*args)))


def _group_norm(*args: Any) -> tuple[torch.Tensor | None, ...]:
    out, *kept = _aten.native_group_norm.default(*args)
    return (_in_format_of(out, args[0]), *(_kept(one, False, args) for one in kept))


def _norm_backward(op: Callable[..., Any], *args: Any) -> tuple[torch.Tensor | None, ...]:
    gradient, *others = op(*args)
    return (_in_format_of(gradient, args[1]), *others)


def _batch_norm(op: Callable[..., Any], training: int | None, *args: Any) -> Any:
    """Give the shapes of a batch norm, which is told at argument `training` whether it trains."""
    out, mean, deviation, *rest = op(*args)
    is_trained = training is None or args[training]
    kept = (_kept(one, not is_trained, args) for one in (mean, deviation))
    # What is in rows as well as with channels last it lays out in rows.
    made = _in_rows(out) if args[0].is_contiguous() else _in_format_of(out, args[0])
    return (made, *kept, *rest)


def _convolution(*args: Any) -> torch.Tensor | None:
    out = _aten.convolution.default(*args)
    return _in_format(out, _format_of_convolution(args[0], args[1], args[2], *args[3:]))


def _convolution_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    *gradients, of_bias = _aten.convolution_backward.default(*args)
    chosen = _format_of_convolution(args[1], args[2], None, *args[4:10], bias_sizes=args[3])
    return (*(_in_format(gradient, chosen) for gradient in gradients), of_bias)


def _format_of_convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *geometry: Any,
    bias_sizes: Any = None,
) -> torch.memory_format:
    """Return how the host's kernel for a convolution lays out what it makes."""
    formats = {suggest_memory_format(input), suggest_memory_format(weight)}
    if formats == {torch.contiguous_format}:
        return torch.contiguous_format
    # Only here: to make such a mode takes a second the first time.
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    fakes: list[Any] = [
        None if one is None else torch._subclasses.FakeTensor(mode, one, _CPU)
        for one in (input, weight, bias)
    ]
    with mode:
        x, w, b = fakes
        backend = torch._C._select_conv_backend(
            x, w, bias=b, **dict(zip(_GEOMETRY, geometry, strict=True)), bias_sizes=bias_sizes
        )
        return torch._C._conv_determine_backend_memory_format(x, w, backend)


_CPU = torch.device("cpu")
#: Dtypes of indices that are no masks.
_POSITIONS = (torch.int64, torch.int32)
_GEOMETRY = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _unpool(*args: Any) -> torch.Tensor | None:
    return _in_format_of(_aten.max_unpool2d.default(*args), args[0])


def _loss(op: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Give the shape of a loss: its kernel computes all terms where it puts their sum or mean.

    The memory goes on being as large.
    """
    out: torch.Tensor = op(*args, **kwargs)
    terms = torch.broadcast_shapes(args[0].size(), args[1].size())
    return out if out.size() == terms else out.new_empty(terms).as_strided((), ())


def _multilabel_loss(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a single row it is a number, and no row of one."""
    loss, is_target = _aten.multilabel_margin_loss_forward.default(*args, **kwargs)
    return loss.new_empty(()) if args[0].dim() < 2 else loss, is_target


def _lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """Give the shapes of MKL-DNN's layer: only its kernel knows how large the scratch memory is."""
    *results, scratch = _aten.mkldnn_rnn_layer.default(*args)
    if torch.is_grad_enabled():  # else there is none
        tensors = tuple((tuple(one.shape), one.dtype) for one in args[:7])
        numbers = tuple(tuple(one) if isinstance(one, list) else one for one in args[7:])
        scratch = scratch.new_empty((_scratch_count(tensors, numbers),))
    return (*results, scratch)


@functools.lru_cache(maxsize=256)
def _scratch_count(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> int:
    """Have a layer of these sizes computed on zeros, once, with gradients wanted."""
    zeros = torch._C._VariableFunctions.zeros
    plain = [zeros(sizes, dtype=dtype, device=_CPU) for sizes, dtype in tensors]
    return int(_aten.mkldnn_rnn_layer.default(*plain, *numbers)[3].numel())


def _lstm_layer_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Give the shapes of its gradients: each has memory of its own, in single precision.

    In torch's shape function those of the two biases are one tensor.
    """
    gradients = _aten.mkldnn_rnn_layer_backward.default(*args)
    return tuple(_in_format(one, torch.contiguous_format, torch.float32) for one in gradients)


def _laid_as_first(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep the strides of what fills its memory, also of dimensions of one element.

    Torch's shape functions make those anew.
    """
    x = args[0]
    out = op(*args, **kwargs)
    keeps = kwargs.get("memory_format") in (None, torch.preserve_format)
    if not keeps or not (is_dense(x) or not x.numel()):
        return out if rule_of(op) is not elementwise else _elementwise(op, args, kwargs)

    def laid(one: torch.Tensor) -> torch.Tensor:
        is_so = one.layout is not torch.strided or one.stride() == x.stride()
        return one if is_so else one.new_empty_strided(x.size(), x.stride())

    return tree_map_only(torch.Tensor, laid, out)


def _filled(op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operator that fills `out`: what grows is laid out as by kernels."""
    given = kwargs["out"]
    before = given.new_empty_strided(given.size(), given.stride())
    out = op(*args, **kwargs)
    if given.size() != before.size():
        strides = strides_on_kernels(op, args, {**kwargs, "out": before}, given)
        given.as_strided_(given.size(), strides)
    return out


def _elementwise(op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    out = op(*args, **kwargs)
    if isinstance(out, torch.Tensor) and not all(map(_is_plainly_laid_out, tree_leaves(args))):
        strides = strides_on_kernels(op, args, kwargs, out)
        if tuple(strides) != out.stride():
            return out.new_empty_strided(out.size(), strides)
    return out


def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ())


def _is_plainly_laid_out(value: Any) -> bool:
    """Whether it is a tensor in rows, also by its dimensions of one element; or no tensor."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.stride() == make_contiguous_strides_for(value.size())


def _with_numbers_at_home(args: Any) -> Any:
    """Give torch's decompositions single numbers as they take them beside others: on the host."""
    if not any(isinstance(x, torch.Tensor) and x.dim() for x in tree_leaves(args)):
        return args
    number = torch._C._VariableFunctions.empty
    return tree_map_only(
        torch.Tensor, lambda x: x if x.dim() else number((), dtype=x.dtype, device="cpu"), args
    )


#: Operators by name, and what is asked in the place of torch's shape function.
_OURS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "aten.multilabel_margin_loss_forward.default": _multilabel_loss,
    "aten.native_dropout.default": _native_dropout,
    **{
        str(op): lambda *args, op=op: _in_rows(op(*args))
        for op in (_aten.tril.default, _aten.triu.default)
    },
    **{
        str(op): functools.partial(_index_put, op)
        for op in (
            _aten.index_put.default,
            _aten.index_put_.default,
            _aten._index_put_impl_.default,
        )
    },
}

#: Copies, and operators whose results are laid out as copies of their first operand.
_COPIES = """
    clone _to_copy empty_like zeros_like ones_like full_like rand_like randn_like randint_like flip
    sort
"""
for _packet in (getattr(_aten, name) for name in _COPIES.split()):
    for _op in (getattr(_packet, name) for name in _packet.overloads()):
        if not _op._schema.is_mutable:
            _OURS[str(_op)] = functools.partial(_laid_as_first, _op)

#: The same where the host's kernels run.
_HOSTS: dict[str, Callable[..., Any]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.convolution.default": _convolution,
    **{
        str(op): functools.partial(_loss, op)
        for op in (
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.soft_margin_loss.default,
            _aten.binary_cross_entropy.default,
        )
    },
    "aten.max_unpool2d.default": _unpool,
    "aten.mkldnn_rnn_layer.default": _lstm_layer,
    "aten.mkldnn_rnn_layer_backward.default": _lstm_layer_backward,
    "aten.convolution_backward.default": _convolution_backward,
    **{
        str(op): functools.partial(_norm_backward, op)
        for op in (
            _aten.native_group_norm_backward.default,
            _aten.native_batch_norm_backward.default,
        )
    },
    **{
        str(op): functools.partial(_batch_norm, op, training)
        for op, training in (
            (_aten.native_batch_norm.default, 5),
            (_aten._native_batch_norm_legit.default, 5),
            (_aten._native_batch_norm_legit.no_stats, 3),
            (_aten._batch_norm_with_update.default, None),
        )
    },
}


def shapes_of(plan: OpPlan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator on tensors without bytes.

    Raises
    ------
    NotImplementedError
        Nobody knows them without values.
    """
    # What C++ chose for the host has the host's shapes, wherever its bytes will be.
    op = itself(plan.op)
    if plan.name.startswith("aten.quantize_per_"):
        raise NotImplementedError("torch's shape function gives a tensor that is not quantized")
    kind = tensorsManager.residency.books.main.torch_device.type
    shapes = _OURS.get(plan.name) or (_HOSTS.get(plan.name) if kind == "cpu" else None)
    if plan.name.startswith("prims."):
        args = _with_numbers_at_home(args)
    try:
        with shaped_for.entered(kind):
            if shapes is None and isinstance(kwargs.get("out"), torch.Tensor) and _is_pointwise(op):
                return _filled(op, args, kwargs)
            is_made = shapes is None and not (plan.writes or plan.is_random)
            if is_made and rule_of(op) is elementwise:
                return _elementwise(op, args, kwargs)
            return (shapes or op)(*args, **kwargs)
    except AssertionError as error:  # kernels check what shape functions in Python assert
        raise RuntimeError(*error.args) from error
