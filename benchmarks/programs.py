"""Programs with the shapes of real ones, small enough to run in seconds.

Each is a plain torch program that knows nothing of us: `make()` builds its modules from a seed,
`run(parts)` is what is measured and returns what must be identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Program:
    """One program, and the regime that the device's speeds are scaled to."""

    name: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module], Any]
    #: Compute time over the time to copy what half the weights' budget leaves out; None: as on the
    #: card itself (for batch-1 decode, copies take far longer).
    compute_to_copy: float | None = None


class DecoderLayer(nn.Module):
    """A Llama-shaped layer: grouped-query attention with a cache, gated feed-forward."""

    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, self.width, bias=False)
        self.v = nn.Linear(hidden, self.width, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        y = self.norm1(x)
        batch, length, _ = y.shape
        q = self.q(y).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k(y).view(batch, length, 1, self.width).transpose(1, 2)
        v = self.v(y).view(batch, length, 1, self.width).transpose(1, 2)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        seen = functional.scaled_dot_product_attention(
            q, k, v, is_causal=length > 1, enable_gqa=True
        )
        x = x + self.o(seen.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """32 layers, so that one matrix is under 1 % of the weights, as in a model of 8 B."""

    def __init__(self, layers: int = 32, hidden: int = 96, inner: int = 336) -> None:
        super().__init__()
        self.embed = nn.Embedding(750, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, inner, 8) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 750, bias=False)

    def forward(self, ids: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(self.norm(x[:, -1:]))


def decode(model: nn.Module) -> list[int]:
    """Prefill of 8 tokens, then 32 greedy steps."""
    tokens = [3, 14, 15, 92, 65, 35, 89, 79]
    caches: list[list[torch.Tensor]] = [[] for _ in model.layers]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), caches)
        for _ in range(32):
            tokens.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([tokens[-1:]]), caches)
    return tokens


class FeedForward(nn.Module):
    """Norm, widen, narrow: what most of the time of a transformer block goes into."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def tower(layers: int, hidden: int = 96, inner: int = 384) -> nn.Sequential:
    """Return a stack of feed-forward blocks."""
    return nn.Sequential(*(FeedForward(hidden, inner) for _ in range(layers)))


class Pipeline(nn.Module):
    """Text encoder, denoiser, decoder, each used in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.denoiser, self.decoder = tower(10), tower(40), tower(6)


def diffuse(model: nn.Module) -> torch.Tensor:
    """Encode once, denoise 20 times, decode once; then the same for a second image."""
    images = []
    with torch.inference_mode():
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            text = model.encoder(torch.randn(8, 96, generator=generator))
            x = torch.randn(16, 96, generator=generator)
            for step in range(20):
                x = x - 0.05 * model.denoiser(x + text.mean(0) * (step / 20))
            images.append(model.decoder(x))
    return torch.stack(images)


def forward_passes(model: nn.Module) -> torch.Tensor:
    """Batches through one tower: prefill, embedding, scoring."""
    with torch.inference_mode():
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
        for _ in range(16):
            x = torch.tanh(model(x))
    return x


def train(model: nn.Module) -> list[torch.Tensor]:
    """Four micro-steps and AdamW, six times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(6):
        for _ in range(4):
            x = torch.randn(8, 96, generator=generator)
            loss = (model(x) - x.roll(1, 0)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


class MixtureOfExperts(nn.Module):
    """Eight experts in each of 12 layers, two of them used for each token."""

    def __init__(self, layers: int = 12, experts: int = 8, hidden: int = 96) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.routers = nn.ModuleList(nn.Linear(hidden, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(experts)) for _ in range(layers)
        )


def route(model: nn.Module) -> torch.Tensor:
    """60 tokens, one after the other; each changes the routing of the next a little."""
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        x = torch.randn(1, 96, generator=generator)
        for _ in range(60):
            x = x + 0.6 * torch.randn(1, 96, generator=generator)
            for dense, router, experts in zip(
                model.dense, model.routers, model.experts, strict=True
            ):
                x = functional.layer_norm(x + dense(x), (96,))
                for chosen in router(x).topk(2).indices[0].tolist():
                    x = x + torch.tanh(experts[chosen](x))
    return x


def wander(model: nn.Module) -> torch.Tensor:
    """Use 120 matrices, each under 1 % of the weights, in an order that nobody can foretell."""
    generator = torch.Generator().manual_seed(4)
    order = torch.randint(120, (1500,), generator=generator).tolist()
    with torch.inference_mode():
        x = torch.randn(1, 96, generator=generator)
        for number in order:
            x = torch.tanh(model[number](x))
    return x


def _square(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build().eval()

    return make


PROGRAMS = (
    Program("decode", _seeded(Decoder), decode),
    Program("diffusion", _seeded(Pipeline), diffuse, compute_to_copy=2.0),
    Program("balanced", _seeded(lambda: tower(48)), forward_passes, compute_to_copy=1.0),
    Program("training", _seeded(lambda: tower(16)), train, compute_to_copy=1.0),
    Program("experts", _seeded(MixtureOfExperts), route),
    Program("random", _seeded(lambda: nn.ModuleList(map(_square, [96] * 120))), wander),
)
