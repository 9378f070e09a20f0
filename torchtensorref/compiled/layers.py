"""The repeated layers of a model that does not fit: each is compiled, once for all of a kind.

Torch keeps what it has compiled by the code of a layer's `forward`, and looks at a layer's weights
as at arguments: so the second layer of a kind finds what was compiled for the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules under one whose class occurs there more than once.

    Single operators of torch's own (a linear, a norm) are no layers: nothing would be fused.
    """
    counts = Counter(type(part) for part in module.modules())
    yield from _find(module, counts, {id(module)})


def _find(module: nn.Module, counts: Counter[type], seen: set[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if _is_layer(child) and counts[type(child)] > 1:
            yield child
        else:
            yield from _find(child, counts, seen)


def _is_layer(module: nn.Module) -> bool:
    return (
        not isinstance(module, _CONTAINERS)
        and bool(module._modules)
        and any(True for _ in module.parameters())
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to a layer's calls: then it is called as it is."""
    standing: tuple[Any, ...] = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(standing)
