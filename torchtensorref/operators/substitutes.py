"""Operators that C++ above us chose for the host, in the accelerator's own way, and back.

A TensorRef's label is cpu unless the program asked otherwise, so torch picks the host's variant of
a few composite operators before dispatch is reached: attention by `..._for_cpu`, LSTMs by MKL-DNN.
No accelerator has those. Where the plain operands of such a call lie on one, the call is made as
torch itself would make it there: the composite operator is called on them, and picks anew. The
other way round, what was chosen for an accelerator has to run on the host when memory is short.

The backward variants do not trust what the forward one has left for them (a log-sum-exp, a
workspace), since it may have been made elsewhere and in another form. They run the forward operator
again, on plain tensors that require gradients, and go back from there: the same kernels, and so the
same numbers, for one forward pass more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_AUTOGRAD = [
    torch._C._dispatch_key_parse(name)
    for name in (
        "AutogradFunctionality",
        "AutogradCPU",
        "AutogradCUDA",
        "AutogradXPU",
        "AutogradMPS",
        "AutogradMeta",
        "AutogradOther",
        "ADInplaceOrView",
    )
]


class Substitute:
    """Takes the place of an operator in its plan, and is it in everything but the call."""

    op: OpOverload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is in its place."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Be the operator for everybody who asks for its facts."""
        return getattr(self.op, name)


def itself(op: Any) -> Any:
    """Return an operator, also where a substitute has taken its place: what tables know it by."""
    return op.op if isinstance(op, Substitute) else op


class ByDevice(Substitute):
    """An operator that is another one where its first tensor does not lie on the host."""

    def __init__(
        self,
        op: OpOverload,
        elsewhere: Callable[..., Any] | None,
        at_home: Callable[..., Any] | None,
    ) -> None:
        self.op = op
        self._elsewhere = elsewhere or op
        self._at_home = at_home or op

    @property
    def is_itself_at_home(self) -> bool:
        """Whether the host has it; where it minds stand-ins, as long as there are none."""
        return self._at_home is self.op or self.minds_stand_ins

    @property
    def minds_stand_ins(self) -> bool:
        """Whether it is another one on the host for what a forward operator has left elsewhere."""
        return self._at_home is attention_for_cpu_backward_at_home

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the device has."""
        run = self._at_home if args[0].device.type == "cpu" else self._elsewhere
        return run(*args, **kwargs)


def gradients(
    forward: Callable[..., Any], tensors: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Run a forward operator again and return the gradients of its operands.

    Parameters
    ----------
    forward : callable
        Takes the tensors; returns a tensor or a tuple of them.
    tensors : sequence of Tensor or None
        Plain operands.
    grads : sequence of Tensor or None
        The gradients of its results, in their order.
    """
    stack = [torch._C._SetExcludeDispatchKeyGuard(key, False) for key in _AUTOGRAD]
    with _All(stack), torch.inference_mode(False), torch.enable_grad():
        leaves = [None if t is None else _leaf(t) for t in tensors]
        out = forward(*leaves)
        results = out if isinstance(out, (tuple, list)) else (out,)
        pairs = [(r, g) for r, g in zip(results, grads, strict=False) if g is not None]
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        )
        return [None if leaf is None else next(found) for leaf in leaves]


class _All:
    """Several guards as one context."""

    def __init__(self, guards: Sequence[Any]) -> None:
        self._guards = guards

    def __enter__(self) -> None:
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*exc)


def _leaf(tensor: Tensor) -> Tensor:
    # What was made in inference mode cannot be saved for a backward pass.
    plain = tensor.clone() if tensor.is_inference() else tensor.detach()
    return plain.requires_grad_()


# -- attention ----------------------------------------------------------------------------------


class StandIns:
    """Whether an operator that an accelerator was chosen for has run on the host, or the other way.

    Only then is it worth a look whether what a forward operator has left is a stand-in.

    Attributes
    ----------
    made : bool
        It has happened in this process.
    listeners : list of callable
        Called with that when it changes, before a stand-in is there: who keeps a copy (C++).
    """

    def __init__(self) -> None:
        self.made = False
        self.listeners: list[Callable[[bool], None]] = []

    def note(self, made: bool) -> None:
        """Tell the listeners first: between the two an interrupt leaves it to be told again."""
        for listener in self.listeners:
            listener(made)
        self.made = made


stand_ins = StandIns()


def _attention(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
    """Attention by the kernel that torch picks for plain tensors where they lie."""
    mask, dropout_p, is_causal, scale = how
    several = query.size(-3) != key.size(-3)
    out: Tensor = aten.scaled_dot_product_attention.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=several
    )
    return out


def _as_torch_would(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
    """`_attention`, picking as for a training step where the program records gradients."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        query, key, value = (_leaf(part) for part in (query, key, value))
    return _attention(query, key, value, *how).detach()


def _log_sum_exp(query: Tensor) -> Tensor:
    """A stand-in: nobody who trusts it goes unnoticed."""
    if not stand_ins.made:
        stand_ins.note(True)
    return torch.full(query.shape[:-1], torch.nan, dtype=torch.float32, device=query.device)


def _is_stand_in(log_sum_exp: Tensor) -> bool:
    if not stand_ins.made or not log_sum_exp.numel():
        return False
    return bool(log_sum_exp.reshape(-1)[0].isnan())


def attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The host's flash attention, elsewhere."""
    out = _as_torch_would(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out, _log_sum_exp(query)


def attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor | None]:
    """Its gradients, elsewhere."""
    how = (attn_mask, dropout_p, is_causal, scale)
    return gradients(lambda *qkv: _attention(*qkv, *how), (query, key, value), (grad_out,))


def attention_for_cpu_backward_at_home(grad_out: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Its gradients on the host, where the forward operator may have run elsewhere."""
    if _is_stand_in(args[4]):
        return attention_for_cpu_backward(grad_out, *args, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad_out, *args, **kwargs
    )


# -- products of sparse matrices ----------------------------------------------------------------


def reducing_product(matrix: Tensor, other: Tensor, reduce: str) -> Any:
    """The product that reduces otherwise than by a sum.

    Its kernel notes where each extreme was only if an operand requires gradients, and the formula
    for the gradient reads what it noted without a look: the process ends.
    """
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        matrix = matrix.detach().requires_grad_()
    return aten._sparse_mm_reduce_impl.default(matrix, other, reduce)


# -- LSTM ---------------------------------------------------------------------------------------

_LSTM_MODE = 2


def _lstm(*tensors: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction, step by step: any device has these operators."""
    steps, weight, weight_hidden, bias, bias_hidden, hidden, cell = tensors
    gates = aten.linear(steps, weight, bias).unbind(0)
    outputs = []
    for gate in reversed(gates) if reverse else gates:
        both = gate + aten.linear(hidden, weight_hidden, bias_hidden)
        enter, forget, new, leave = both.chunk(4, -1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        outputs.append(hidden)
    if reverse:
        outputs.reverse()
    return aten.stack(outputs), hidden, cell


def lstm_layer(
    steps: Tensor,
    weight: Tensor,
    weight_hidden: Tensor,
    bias: Tensor,
    bias_hidden: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MKL-DNN's LSTM layer, elsewhere."""
    if mode != _LSTM_MODE or batch_sizes:
        raise NotImplementedError("only LSTMs over batches of one length")
    parts = (steps, weight, weight_hidden, bias, bias_hidden, hidden, cell)
    output, hidden, cell = _lstm(*parts, reverse=reverse)
    return output, hidden, cell, steps.new_empty((0,), dtype=torch.uint8)


def lstm_layer_backward(*args: Any) -> list[Tensor | None]:
    """Its gradients, elsewhere."""
    reverse, mode = args[13], args[14]
    if mode != _LSTM_MODE or args[20]:
        raise NotImplementedError("only LSTMs over batches of one length")
    return gradients(lambda *parts: _lstm(*parts, reverse=reverse), args[:7], args[10:13])


def lstm_layer_backward_at_home(*args: Any) -> Any:
    """Its gradients on the host, where the forward operator may have run elsewhere."""
    scratch = args[22].untyped_storage()
    if scratch.nbytes() == 0:
        return lstm_layer_backward(*args)
    # All of it: of one that was promised nobody knew the size.
    workspace = args[22].new_empty(0).set_(scratch, 0, (scratch.nbytes(),))
    return aten.mkldnn_rnn_layer_backward.default(*args[:22], workspace)


# -- chosen for an accelerator, run on the host -------------------------------------------------


def _without_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("dropout drawn on an accelerator cannot be repeated on the host")


def flash_attention_at_home(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """An accelerator's flash attention, on the host."""
    _without_dropout(dropout_p)
    out = _as_torch_would(query, key, value, None, 0.0, is_causal, scale)
    nothing = query.new_empty((0,))
    seed = query.new_zeros((2,), dtype=torch.int64)
    lengths = (query.size(-2), key.size(-2))
    return (out, _log_sum_exp(query), None, None, *lengths, seed, seed.clone(), nothing)


def flash_attention_backward(*args: Any, scale: float | None = None) -> Any:
    """Its gradients, wherever the forward operator has run."""
    if args[0].device.type != "cpu" and not _is_stand_in(args[5]):
        return aten._scaled_dot_product_flash_attention_backward.default(*args, scale=scale)
    _without_dropout(args[10])
    how = (None, 0.0, args[11], scale)
    return gradients(lambda *qkv: _attention(*qkv, *how), args[1:4], args[:1])


def efficient_attention_at_home(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An accelerator's memory-efficient attention, on the host."""
    _without_dropout(dropout_p)
    out = _as_torch_would(query, key, value, attn_bias, 0.0, is_causal, scale)
    seed = query.new_zeros((), dtype=torch.int64)
    return out, _log_sum_exp(query), seed, seed.clone()


def efficient_attention_backward(*args: Any, scale: float | None = None) -> Any:
    """Its gradients, wherever the forward operator has run."""
    if args[0].device.type != "cpu" and not _is_stand_in(args[6]):
        return aten._scaled_dot_product_efficient_attention_backward.default(*args, scale=scale)
    grad_out, query, key, value, bias = args[:5]
    _without_dropout(args[9])
    wants, is_causal = args[10], args[11] if len(args) > 11 else False
    wants_bias = bias is not None and wants[3]

    def forward(*parts: Tensor) -> Tensor:
        used = parts[3] if wants_bias else bias
        return _attention(*parts[:3], used, 0.0, is_causal, scale)

    parts = (query, key, value, bias) if wants_bias else (query, key, value)
    found = gradients(forward, parts, (grad_out,))
    return tuple(found) if wants_bias else (*found, None)
