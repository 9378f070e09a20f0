"""Cuts of convolutions and attention: by samples, channels, heads and queries."""

from __future__ import annotations

import torch

from .cut import Along, Axis, Call, Cut, are_rows_at, broadcast_along
from .sums import HALF

#: Output channels of a tile: kernels take them by the vector.
CHANNELS = 64
#: What is left over of them does not change how the others are computed where they are so many.
EVEN_CHANNELS = 4
#: Heads are computed alike wherever they begin, if it is at a multiple of so many bytes.
VECTOR_NBYTES = 16
#: So many queries at once are what torch's kernel for the host takes, if there are enough.
QUERIES, ENOUGH = 256, 768


def convolution(call: Call) -> Cut | None:
    """Samples and output channels.

    Measured: in single precision oneDNN often takes another way for fewer samples (13,654 of 24,722
    convolutions), in double precision the products are cut in other places (1,246 of 49,538), in
    half precision none of 26,000 changed a bit. By output channels see `_are_channels_apart`.
    """
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if call["transposed"] or x.dim() != weight.dim():
        return None
    rest: Along = (None,) * (x.dim() - 2)
    is_grouped = call["groups"] != 1
    operands: dict[tuple[str, int | None], Along] = {("input", None): (0, None, *rest)}
    axes = [Axis(x.size(0), keeps_bits=x.dtype in HALF)]
    if not is_grouped:
        axes.append(Axis(weight.size(0), CHANNELS, _are_channels_apart(x, weight)))
        operands["weight", None] = (1, None, *rest)
        if bias is not None:
            operands["bias", None] = (1,)
    return Cut(
        axes=tuple(axes),
        operands=operands,
        results=((0, None if is_grouped else 1, *rest),),
        follows_tiles=True,
    )


def _are_channels_apart(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether no output channel's bits depend on how many there are.

    Measured: of 130,000 convolutions 183 did in single precision, all of them where the channels
    are no multiple of four; with channels last 317 of 5,000 large kernels there, and 3,000 of 3,600
    in double precision; in half precision 73 of 6,000 of more than 64 input channels.
    """
    if not (x.is_contiguous() and weight.is_contiguous()):
        return False
    if x.dtype in HALF:
        return weight.size(1) <= CHANNELS
    return x.dtype is not torch.float32 or weight.size(0) % EVEN_CHANNELS == 0


def convolution_backward(call: Call) -> Cut | None:
    """Samples for the gradient of the input, output channels for those of weight and bias.

    What the bits do has not been measured.
    """
    x, weight, wants = call["input"], call["weight"], call["output_mask"]
    if call["transposed"] or x.dim() != weight.dim() or call["groups"] != 1:
        return None
    rest: Along = (None,) * (x.dim() - 2)
    if not (wants[1] or wants[2]):
        along: Along = (0, None, *rest)
        return Cut(
            axes=(Axis(x.size(0), keeps_bits=False),),
            operands={("grad_output", None): along, ("input", None): along},
            results=(along,),
            follows_tiles=True,
        )
    if wants[0]:
        return None
    results: list[Along] = []
    if wants[1]:
        results.append((0, None, *rest))
    if wants[2]:
        results.append((0,))
    return Cut(
        axes=(Axis(weight.size(0), CHANNELS, keeps_bits=False),),
        operands={("grad_output", None): (None, 0, *rest), ("weight", None): (0, None, *rest)},
        results=tuple(results),
        localise=lambda tile: {"bias_sizes": [tile[0][1] - tile[0][0]]},
        follows_tiles=True,
    )


def attention_for_cpu(call: Call) -> Cut | None:
    """Samples and heads; queries, where each sees all keys.

    Measured: in single and double precision 11,000 of 46,000 had other bits where rows were no
    multiples of 16 bytes, none of 110,000 where they were; in half precision none of 13,000.
    """
    query, mask = call["query"], call["attn_mask"]
    if query.dim() != 4 or call["key"].size(1) != query.size(1) or call["dropout_p"]:
        return None
    length = query.size(2)
    axes = _samples_and_heads(call, ("query", "key", "value"))
    of_queries = None  # which key a query sees depends on where it stands
    if not call["is_causal"]:
        of_queries = 2
        axes.append(Axis(length, ENOUGH if length >= 2 * ENOUGH else length))
    of_key: Along = (0, 1, None, None)
    operands: dict[tuple[str, int | None], Along] = {
        ("query", None): (0, 1, of_queries, None),
        ("key", None): of_key,
        ("value", None): of_key,
    }
    if mask is not None:
        sizes = (*query.size()[:3], call["key"].size(2))
        operands["attn_mask", None] = tuple(
            axis if axis is not None and axis < len(axes) else None
            for axis in broadcast_along(mask, sizes)
        )
    results = ((0, 1, of_queries, None), (0, 1, of_queries))
    return Cut(axes=tuple(axes), operands=operands, results=results)


def attention_for_cpu_backward(call: Call) -> Cut | None:
    """Samples and heads."""
    query, key, mask = call["query"], call["key"], call["attn_mask"]
    if query.dim() != 4 or key.size(1) != query.size(1) or call["dropout_p"]:
        return None
    along: Along = (0, 1, None, None)
    names = ("grad_out", "query", "key", "value", "out")
    operands: dict[tuple[str, int | None], Along] = {(name, None): along for name in names}
    operands["logsumexp", None] = along[:3]
    if mask is not None:
        sizes = (*query.size()[:3], key.size(2))
        operands["attn_mask", None] = tuple(
            axis if axis in (0, 1) else None for axis in broadcast_along(mask, sizes)
        )
    axes = _samples_and_heads(call, names)
    return Cut(axes=tuple(axes), operands=operands, results=(along,) * 3)


def _samples_and_heads(call: Call, names: tuple[str, ...]) -> list[Axis]:
    query = call["query"]
    is_even = query.dtype in HALF or all(are_rows_at(call[name], VECTOR_NBYTES) for name in names)
    return [Axis(query.size(0), keeps_bits=is_even), Axis(query.size(1), keeps_bits=is_even)]
