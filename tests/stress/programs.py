"""Programs for the soak where kernels are the host's: their bits are plain torch's.

Each is a function of a generator of its own: threads share torch's.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchTensorRef
from torchTensorRef import TensorRef

from .drawing import FOLDER, Call, pick, provoked, written_on_both_sides


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw a tensor."""
    return torch.rand(*shape, generator=generator)


def drawn_weights(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw the weights of a module, which come from the generator that all threads share."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return module


def change(
    tensors: list[torch.Tensor], generator: torch.Generator, kind: int, i: int, j: int
) -> None:
    """Do one of ten things to one or two of some tensors of 24 rows and columns."""
    x, y = tensors[i], tensors[j]
    if kind == 0:
        x.t()[1:9].mul_(0.5).add_(y[:8].sin())
    elif kind == 1:
        tensors[i] = x.clone()
        tensors[i][::2] += 1
    elif kind == 2:
        tensors[i] = (x @ y.t()).tanh()
    elif kind == 3:
        x.view(-1)[::3] = y.view(-1)[:192]
    elif kind == 4:
        values, order = x.sort(dim=1)
        tensors[i] = values.flip(0) + order.to(torch.float32) * 1e-3
    elif kind == 5:
        tensors[i] = torch.cat([x[:12], y[12:]])
    elif kind == 6:
        tensors[i] = x * torch.empty_like(y).bernoulli_(0.5, generator=generator)
    elif kind == 7:
        x.uniform_(generator=generator)
    elif kind == 8:
        tensors[i] = x.detach().unflatten(1, (4, 6)).transpose(0, 1).reshape(24, 24)
    else:
        x[x > y] = 0.25


#: The last of them asks for values.
CHANGE_COUNT = 10


def scattered(generator: torch.Generator) -> Any:
    """Views, writes through views, aliases, copies that share, blocks that die, noise."""
    tensors = [draw(generator, 24, 24) for _ in range(5)]
    for _ in range(12):
        i, j = pick(generator, 5), pick(generator, 5)
        change(tensors, generator, pick(generator, CHANGE_COUNT), i, j)
    return tensors


def promised(generator: torch.Generator) -> Any:
    """The same, at times on promises, of which some are fulfilled and some used as they are."""
    tensors = [draw(generator, 24, 24) for _ in range(4)]
    is_ours = isinstance(tensors[0], TensorRef)
    chance = random.Random(pick(generator, 1 << 30))  # what is drawn inside is promised
    try:
        for _ in range(3):
            with torchTensorRef.promising() if is_ours else nullcontext():
                for _ in range(chance.randrange(1, 8)):
                    kind = chance.randrange(CHANGE_COUNT - 1)
                    change(tensors, generator, kind, chance.randrange(4), chance.randrange(4))
            for x in chance.sample(tensors, chance.randrange(5)):
                fulfil(x)
            if chance.random() < 0.5:
                for kind in range(CHANGE_COUNT):
                    change(tensors, generator, kind, chance.randrange(4), chance.randrange(4))
        for x in tensors:
            fulfil(x)
    finally:
        generator.get_state()  # draws what waits: nothing of an interrupted one is left
    return tensors


def fulfil(x: torch.Tensor) -> None:
    """Fulfil a promise; anything else is left as it is."""
    if isinstance(x, TensorRef) and x.proxyInfo.promised:
        x.fulfil()


def trained(generator: torch.Generator) -> Any:
    """Some steps of training; the optimizer is one of four."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10)
    )
    drawn_weights(model, generator)
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    optimizer = kinds[pick(generator, 4)](model.parameters(), lr=0.01)
    for _ in range(3):
        loss = nn.functional.mse_loss(model(draw(generator, 3, 2, 6, 6)), draw(generator, 3, 10))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [loss.detach(), *(p.detach() for p in model.parameters()), *model.buffers()]


def decoded(generator: torch.Generator) -> Any:
    """Attention with keys and values that grow, as a language model writes."""
    weights = [draw(generator, 32, 96) - 0.5, draw(generator, 32, 32), draw(generator, 40, 32)]
    keys, values = torch.empty(1, 4, 0, 8), torch.empty(1, 4, 0, 8)
    token, seen = torch.tensor([[pick(generator, 40)]]), []
    with torch.no_grad():
        for _ in range(6):
            x = nn.functional.embedding(token, weights[2])
            q, k, v = (x @ weights[0]).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            y = nn.functional.scaled_dot_product_attention(q, keys, values)
            scores = nn.functional.linear(y.transpose(1, 2).flatten(2) @ weights[1], weights[2])
            token = scores.argmax(-1)
            seen.append(token.item())
    return [seen, keys, values, scores]


def exposed(generator: torch.Generator) -> Any:
    """Arrays that share memory, written on both sides; a view that outlives them."""
    x = draw(generator, 16, 16)
    y, part = written_on_both_sides(x, slice(3, 7))
    return [x, y @ x, part, x.tolist()[0][0]]


def saved(generator: torch.Generator) -> Any:
    """Written to a file and read again."""
    model = drawn_weights(nn.LSTM(8, 16, batch_first=True), generator)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder:
        path = os.path.join(folder, "weights.pt")
        torch.save(model.state_dict(), path)
        other = nn.LSTM(8, 16, batch_first=True)
        other.load_state_dict(torch.load(path, mmap=bool(pick(generator, 2))))
        result, (hidden, cell) = other(draw(generator, 2, 5, 8))
        return [x.detach() for x in (result, hidden, cell)]


def failed(generator: torch.Generator) -> Any:
    """Operators that cannot run, in between some that can; what was there stays."""
    wrong: tuple[Call, ...] = (
        lambda x, y: x @ y,
        lambda x, y: x.view(5, 5),
        lambda x, y: torch.cat([x, y.t()]),
        lambda x, y: x[99],
        lambda x, y: x.bernoulli_(2.0),
    )
    x, y = draw(generator, 8, 9), draw(generator, 8, 9)
    return provoked(wrong, lambda x, y: x * 1.5 - y, x, y)


class Residual(nn.Module):
    """A layer around which a checkpoint may be, with a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(nn.functional.gelu(self.norm(self.wide(x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        if way == 0:
            return x + self.inner(x)
        y = checkpoint(self.inner, x, use_reentrant=way == 1, preserve_rng_state=False)
        return x + y  # type: ignore[no-any-return]


def accumulated(generator: torch.Generator) -> Any:
    """Two micro-steps of training between steps of an optimizer, by lists or not, checkpointed."""
    model = drawn_weights(Residual(), generator)
    optimizers: tuple[Callable[..., torch.optim.Optimizer], ...] = (
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.RMSprop,
        partial(torch.optim.Adam, foreach=False, amsgrad=True),
    )
    optimizer = optimizers[pick(generator, len(optimizers))](model.parameters())
    seen: list[Any] = []
    for _ in range(3):
        for _ in range(2):
            x = draw(generator, 5, 16).requires_grad_()
            loss = model(x, pick(generator, 3)).square().mean()
            loss.backward()
            seen += [loss.detach(), x.grad]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(pick(generator, 2)))
    return [*seen, *(p.detach() for p in model.parameters())]


def transformed(generator: torch.Generator) -> Any:
    """Gradients of each row at once, and a Jacobian."""
    weight, x = draw(generator, 8, 8), draw(generator, 6, 8)
    each = torch.func.grad(lambda weight, x: (x @ weight).sin().square().sum())
    jacobian = torch.func.jacrev(lambda x: (x @ weight).tanh())(x[0])
    return [torch.func.vmap(each, (None, 0))(weight, x), jacobian]


def convolved(generator: torch.Generator) -> Any:
    """A convolution, overlapping windows, parts that are written, indices that repeat."""
    x, weight = draw(generator, 2, 4, 10, 10), draw(generator, 6, 4, 3, 3).requires_grad_()
    y = nn.functional.conv2d(x, weight, padding=1)
    y.unfold(2, 4, 2).permute(0, 3, 1, 2, 4).reshape(-1).square().sum().backward()
    x.chunk(2, 1)[1].add_(1)
    x.split(3, 3)[1].zero_()
    order = torch.randperm(10, generator=generator)
    x.index_copy_(3, order[:3], x[..., :3].clone())
    where = order.expand(2, 4, 10, 10)
    return [y.detach(), weight.grad, x, x.gather(3, where), x.scatter_add(3, where, x)]


def foreseen(generator: torch.Generator) -> Any:
    """Forecast before it runs: nothing is changed by asking."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    drawn_weights(model, generator)
    x = draw(generator, 3, 16)
    if isinstance(x, TensorRef):
        torchTensorRef.forecast(model, x, device="sim", budget="64KiB", steps=1)
    model(x).sum().backward()
    x.mul_(2)
    return [x, *(p.grad for p in model.parameters())]


PROGRAMS: list[Callable[[torch.Generator], Any]] = [
    *(scattered, scattered, promised, promised),
    *(trained, accumulated, decoded, transformed, convolved),
    *(exposed, saved, failed, foreseen),
]
