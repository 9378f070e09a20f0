"""Models with the shapes of real ones, made from real configs with tiny widths, and their programs.

Each program is a generator function of a model: what it yields names the part that has ended, as
`torchTensorRef.forecast` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 500
#: Sizes of a picture's latents, and of the text that goes with it.
PICTURE, TEXT_LENGTH, TEXT_WIDTH = 16, 7, 48


@dataclass(frozen=True)
class Shape:
    """A model, and what is done with it: parts that are alike, but for a first one."""

    name: str
    make: Callable[[], nn.Module]
    run: Callable[..., Iterator[str]]


def llama() -> nn.Module:
    """A decoder with grouped queries and gated layers."""
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
        )
    )


def bert() -> nn.Module:
    """An encoder."""
    import transformers

    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=12,
            num_attention_heads=6,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        )
    )


def unet() -> nn.Module:
    """A denoiser: convolutions, and attention to a text."""
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=PICTURE,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
    )


def experts() -> nn.Module:
    """A decoder with eight experts, two for each token."""
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
        )
    )


def drawn(*size: int) -> torch.Tensor:
    """Draw the tokens of a text, always the same."""
    return torch.randint(3, VOCABULARY, size, generator=torch.Generator().manual_seed(1))


def write(model: Any, new_tokens: int = 5, prompt: int = 16) -> Iterator[str]:
    """Read a prompt, and write tokens greedily."""
    with torch.no_grad():
        out = model(drawn(1, prompt), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        yield f"prompt of {prompt}"
        for number in range(1, new_tokens):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            yield f"token {number + 1}"


def read(model: Any, batches: int = 4, rows: int = 4) -> Iterator[str]:
    """Read batches of 32 tokens."""
    with torch.no_grad():
        for number in range(batches):
            model(drawn(rows, 32))
            yield f"batch {number + 1}"


def denoise(model: Any, steps: int = 4) -> Iterator[str]:
    """Denoise two pictures."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, PICTURE, PICTURE, generator=generator)
    text = torch.randn(2, TEXT_LENGTH, TEXT_WIDTH, generator=generator)
    with torch.no_grad():
        for number in range(steps):
            noise = model(x, torch.tensor(900 - 200 * number), encoder_hidden_states=text).sample
            x = x - 0.1 * noise
            yield f"step {number + 1}"


SHAPES = (
    Shape("llama", llama, write),
    Shape("bert", bert, read),
    Shape("unet", unet, denoise),
    Shape("moe", experts, write),
)
