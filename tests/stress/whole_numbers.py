"""Programs for the soak on a real accelerator, whose kernels round otherwise than the host's.

All numbers are whole and small, and every sum of products stays below 2**24, so that single
precision is exact: whatever order, block or device an operator runs in, its bits are the same.
Sizes are such that a budget of some tens of MiB is under pressure from four threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .drawing import Call, pick, provoked, written_on_both_sides

#: Rows and columns of most matrices: 1 MiB each.
WIDTH = 512
#: What numbers stay below: 512 products of two of them are less than 2**24.
PRIME = 61.0


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw whole numbers."""
    return torch.randint(0, int(PRIME), shape, generator=generator).to(torch.float32)


def scattered(generator: torch.Generator) -> Any:
    """Views, writes through views, aliases, copies that share, blocks that die, noise."""
    tensors = [draw(generator, WIDTH, WIDTH) for _ in range(5)]
    for _ in range(12):
        i = pick(generator, 5)
        j = (i + 1 + pick(generator, 4)) % 5  # another one: who reads what it writes has no order
        x, y = tensors[i], tensors[j]
        kind = pick(generator, 10)
        if kind == 0:
            x.t()[1:99].mul_(3).add_(y[:98]).remainder_(PRIME)
        elif kind == 1:
            tensors[i] = x.clone()
            tensors[i][::2] += 1
            tensors[i].remainder_(PRIME)
        elif kind == 2:
            tensors[i] = (x @ y.t()).remainder(PRIME)
        elif kind == 3:
            x.view(-1)[::3] = y.view(-1)[: (WIDTH * WIDTH + 2) // 3]
        elif kind == 4:
            values, order = x.sort(dim=1, stable=True)
            tensors[i] = (values.flip(0) + order.to(torch.float32)).remainder(PRIME)
        elif kind == 5:
            tensors[i] = torch.cat([x[:100], y[100:]])
        elif kind == 6:
            x[x > y] = 7
        elif kind == 7:
            tensors[i] = x * torch.empty_like(y).bernoulli_(0.5, generator=generator)
        elif kind == 8:
            x.random_(0, int(PRIME), generator=generator)
        else:
            apart = x.detach().unflatten(1, (32, 16)).transpose(0, 1)
            tensors[i] = apart.reshape(WIDTH, WIDTH)
    return tensors


def layered(generator: torch.Generator) -> Any:
    """Weights that are read again and again, sums, lookups, and a number that is read."""
    weights = [draw(generator, WIDTH, WIDTH) for _ in range(6)]
    table, seen = draw(generator, 900, WIDTH), []
    token = torch.tensor([pick(generator, 900)])
    with torch.no_grad():
        for _ in range(4):
            x = nn.functional.embedding(token, table)
            for weight in weights:
                x = nn.functional.linear(x, weight).remainder_(PRIME)
            token = (x.sum(dim=1) % 900).to(torch.int64)
            seen.append(token.item())
    return [seen, x]


def trained(generator: torch.Generator) -> Any:
    """Forward and back, and updates in place, of a loss whose gradients are whole."""
    weights = [draw(generator, WIDTH, WIDTH).requires_grad_() for _ in range(3)]
    for _ in range(3):
        x = draw(generator, 16, WIDTH)
        parts = []
        for weight in weights:
            y = x @ weight
            parts.append((y * draw(generator, 16, WIDTH).remainder(2)).sum(dim=0))
            x = y.detach().remainder(PRIME)
        torch.stack(parts).backward(draw(generator, 3, WIDTH).remainder(3))
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.grad).remainder_(PRIME)
                weight.grad = None
    return [weight.detach() for weight in weights]


def exposed(generator: torch.Generator) -> Any:
    """Arrays that share memory, written on both sides; a view that outlives them."""
    x = draw(generator, WIDTH, WIDTH)
    y, part = written_on_both_sides(x, slice(3, 70))
    x.remainder_(PRIME)
    return [x, (y @ x).remainder(PRIME), part, x.tolist()[0][0]]


def failed(generator: torch.Generator) -> Any:
    """Operators that cannot run, in between some that can; what was there stays."""
    wrong: tuple[Call, ...] = (
        lambda x, y: x @ y,
        lambda x, y: x.view(7, 5),
        lambda x, y: torch.cat([x, y.t()]),
        lambda x, y: x[999],
    )
    x, y = draw(generator, 300, 400), draw(generator, 300, 400)
    return provoked(wrong, lambda x, y: (x * 3 + y).remainder(PRIME), x, y)


PROGRAMS: tuple[Callable[[torch.Generator], Any], ...] = (
    scattered,
    scattered,
    layered,
    trained,
    exposed,
    failed,
)
