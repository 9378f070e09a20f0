"""The best of numbers in rows and where it is, faster than torch's `max` finds it in long ones."""

from __future__ import annotations

import torch
from torch import Tensor

#: The greatest of so many numbers in a row is found ten times as fast as where it is.
GROUP = 64
#: Where there are fewer, finding the group first is no faster.
FEWEST = 16 * GROUP


def best_of(terms: Tensor, is_greatest: bool) -> tuple[Tensor, Tensor]:
    """Return the best along the last dimension and where it is, of equals the first.

    Notes
    -----
    Of long rows the best of each group of numbers comes first, then the group, then the place in
    it. A row that no groups fill has one more group, which begins in the one before.
    """
    length = terms.shape[-1]
    if length < FEWEST:
        return _extreme(terms, is_greatest)
    whole = length // GROUP * GROUP
    reduce = torch.amax if is_greatest else torch.amin
    of_groups = reduce(terms[..., :whole].unflatten(-1, (-1, GROUP)), -1)
    if whole < length:
        of_groups = torch.cat([of_groups, reduce(terms[..., whole:], -1, keepdim=True)], -1)
    start = _extreme(of_groups, is_greatest)[1].mul_(GROUP).clamp_(max=length - GROUP)
    places = start.unsqueeze(-1) + torch.arange(GROUP, device=terms.device)
    values, at = _extreme(terms.gather(-1, places), is_greatest)
    return values, at.add_(start)


def _extreme(terms: Tensor, is_greatest: bool) -> tuple[Tensor, Tensor]:
    values, at = terms.max(-1) if is_greatest else terms.min(-1)
    return values, at
