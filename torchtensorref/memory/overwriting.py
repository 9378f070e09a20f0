"""What an operator at home overwrites as a whole is not copied home before.

Noise is drawn into memory that nobody has written: `empty_like(x).bernoulli_(p)`. Where the host
draws it and the memory is on the accelerator, a copy home would bring what nobody reads, and the
host would wait for it, and for all that the accelerator computes before.
"""

from __future__ import annotations

import threading

from ..base.units import format_nbytes
from .block import Block, Replica
from .bookkeeping import Books
from .copies import Copier
from .holds import Holds
from .states import CLEAN, FILLING, INVALID


class Overwriting:
    """Lets an operator fill home in the place of a copy.

    Until the operator has ended, what is on the accelerator counts: if it raises, nothing is lost.
    """

    def __init__(self, books: Books, holds: Holds, copier: Copier) -> None:
        self._books = books
        self._holds = holds
        self._copier = copier

    def begin(self, block: Block) -> bool:
        """Have home filled by an operator of this thread; `end` must follow (no lock held).

        Returns
        -------
        bool
            False where home has the bytes, or gets them, or somebody else has them too or reads
            them. Nothing has changed.
        """
        with self._books.lock:
            if not (block.exposure is None and block.sharers is None and block.promise is None):
                return False
            home = self._copier.leaving.home_of(block)
            is_coming = self._copier.leaving.is_overtaken(home)
            if home.state is not INVALID or home.pins or is_coming:
                return False
            # As for a copy that is about to be issued: who wants these bytes waits for it. Nobody
            # evicts what counts meanwhile: that would be copied to where the operator writes.
            self._holds.pin(self._away(block))
            self._holds.issuing[home] = threading.get_ident()
            home.become(FILLING, "about to be overwritten")
        return True

    def end(self, block: Block, *, is_written: bool) -> None:
        """Note that the operator has ended, and whether it has written (no lock held).

        If an error comes in between, whoever is told of the end again goes on with it; and until
        then a repair lets what is on the accelerator count (`Holds.forget_threads`).
        """
        books = self._books
        with books.lock:
            home = block.replicas[books.host]
            if home.state is FILLING:
                home.become(CLEAN if is_written else INVALID, "the operator has ended")
            if home.state is CLEAN:
                spared = format_nbytes(block.nbytes)
                books.log.note(block.name, "overwritten", f"{spared} not copied home")
                self._copier.written(block, books.host)
            self._holds.unpin(self._away(block))
            self._holds.issuing.pop(home, None)

    def _away(self, block: Block) -> list[Replica]:
        host = self._books.host
        return [replica for device, replica in block.replicas.items() if device is not host]
