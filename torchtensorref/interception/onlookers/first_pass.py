"""The first pass of a program through its weights, in which strategies learn: how far it is.

It is seen by what is fetched, and begun only where stderr is a terminal. It is over when all
weights were met, or when one of them is fetched again; nobody is told anything after that.
"""

from __future__ import annotations

from typing import Any

from ...base.listeners import Happening, listeners
from ...base.progress import Lines, screen
from ...memory.report import living_blocks


class FirstPass:
    """Says now and then how many bytes of the weights have been on the accelerator so far."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._met: set[int] = set()
        self._lines = Lines("first pass, weights met")
        self.is_over = False

    def note(self, happening: Happening, _: Any) -> None:
        """Note a fetch; possibly under a lock."""
        if happening.kind != "fetch" or self.is_over:
            return
        number = happening.block_id
        if not self._met:
            self._lines.begin()
        if number in self._met:
            block = self._manager.residency.books.known.get(number)
            if block is not None and block.is_persistent:
                self.end()
        self._met.add(number)
        if self._lines.is_due():
            listeners.later(self._tell)

    def _tell(self) -> None:
        """Say how far it is (no lock held)."""
        if self.is_over or not self._lines.is_due():
            return
        with self._manager.residency.books.lock:
            weights = [block for block in living_blocks(self._manager) if block.is_persistent]
        met_nbytes = sum(block.nbytes for block in weights if block.block_id in self._met)
        total_nbytes = sum(block.nbytes for block in weights)
        self._lines.tell(met_nbytes, total_nbytes)
        if met_nbytes == total_nbytes:
            self.end()

    def end(self) -> None:
        """Look no more."""
        self.is_over = True
        listeners.remove_sink(self.note)
        self._met.clear()


def begin(manager: Any) -> None:
    """Look on from now on, where there is somebody to be told."""
    if screen.is_there():
        listeners.add_sink(FirstPass(manager).note)
