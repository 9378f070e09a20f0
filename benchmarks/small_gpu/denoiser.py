"""A diffusion transformer, as a model of transformers so that everyone's loading code knows it.

The shape of DiT: patches in, blocks of attention and feed-forward modulated by the time, patches
out. One call is one step of denoising.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from .scales import PATCH_WIDTH


class DenoiserConfig(PretrainedConfig):
    model_type = "benchmark_denoiser"

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        **rest: object,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        super().__init__(**rest)


class DenoiserBlock(nn.Module):
    """Attention and feed-forward, each scaled, shifted and gated by the time."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(functional.silu(time)).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.out(self._attend(y))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(functional.gelu(self.up(y), approximate="tanh"))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v)
        return seen.transpose(1, 2).reshape(batch, length, hidden)


class Denoiser(PreTrainedModel):
    """Patches and a time to patches."""

    config_class = DenoiserConfig
    main_input_name = "x"
    _no_split_modules: tuple[str, ...] = ("DenoiserBlock",)

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.patch_in = nn.Linear(PATCH_WIDTH, hidden)
        self.time1, self.time2 = nn.Linear(256, hidden), nn.Linear(hidden, hidden)
        self.blocks = nn.ModuleList(
            DenoiserBlock(hidden, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.patch_out = nn.Linear(hidden, PATCH_WIDTH)
        self.post_init()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(128, device=time.device) * (-math.log(10000.0) / 128))
        angles = time[:, None] * rates
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        when = self.time2(functional.silu(self.time1(waves)))
        x = self.patch_in(x)
        for block in self.blocks:
            x = block(x, when)
        return self.patch_out(self.norm(x))
