"""Lowering budgets: what is beyond them leaves, and where it cannot, the old ones hold again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from ..devices.base import Device
from .budget import Budget
from .residency import Residency

__all__ = ["budgets_in_force", "keep_within"]


def budgets_in_force(residency: Residency) -> list[tuple[Device, Budget]]:
    """Return each accelerator with the budget that it has now, as it was set."""
    books = residency.books
    return [(device, Budget(books.ledgers[device].limit_nbytes)) for device in books.accelerators]


def keep_within(residency: Residency, devices: Iterable[Device]) -> None:
    """Evict down to the budgets of all of these, also where one of them holds what cannot leave.

    Raises
    ------
    TransferError
        A copy home failed: of what was to go, some is still there.
    OutOfBudgetError
        More than a budget is exposed on its device. The budget holds all the same.
    """
    with ExitStack() as ends:
        for device in devices:
            ends.callback(residency.evictor.fit_budget, device)
