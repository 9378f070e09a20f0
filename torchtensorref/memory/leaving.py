"""Copies home by way of staging buffers, which nothing can be told to wait for until they run."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import TransferError
from .block import Block
from .bookkeeping import Books
from .states import FILLING, INVALID


def issue_of(books: Books, block: Block | None) -> Callable[[], None] | None:
    """What waits until the copy home of a block was issued as a whole; None if nothing has to."""
    home = block.replicas.get(books.host) if block is not None else None
    return getattr(home.arrival, "finish_issue", None) if home is not None else None


def finish_issue(books: Books, block: Block | None) -> None:
    """Wait until the copy home of a block is under way (lock not held, so that others may go on).

    Raises
    ------
    TransferError
        It failed. Home is not being filled any more, and the replica that it left is as it was.
    """
    finish = issue_of(books, block)
    if finish is None or block is None:
        return
    try:
        finish()
    except TransferError:
        with books.lock:
            home = block.replicas.get(books.host)
            if home is not None and home.state is FILLING and issue_of(books, block) == finish:
                home.become(INVALID, "write-back failed")
                home.arrival = None
        raise
