"""What programs of the soak are made of, whatever numbers they go by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: What the folders of programs are called.
FOLDER = "soak-"
#: From two tensors to whatever.
Call = Callable[[torch.Tensor, torch.Tensor], Any]


def pick(generator: torch.Generator, below: int) -> int:
    """Draw a number."""
    return int(torch.randint(below, (), generator=generator))


def provoked(wrong: Iterable[Call], between: Call, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Call what cannot run, and in between what can; return what there is, and what was raised."""
    complaints = []
    for call in wrong:
        try:
            call(x, y)
        except (RuntimeError, IndexError) as error:
            complaints.append(type(error).__name__)
        x = between(x, y)
    return [x, y, complaints]


def written_on_both_sides(x: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a tensor, an array and a view that share memory; return a copy, and the view."""
    array = x.numpy()
    array[2] = 5
    x.add_(1)
    y = torch.from_numpy(array.copy())
    part = torch.from_dlpack(x)[rows]
    part.mul_(2)
    return y, part
