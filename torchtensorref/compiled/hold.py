"""Holding what a compiled function uses: all its blocks on the device, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ..base.options import settings
from ..memory.block import Block
from ..memory.budget import SHORTAGES
from ..memory.ledger import Ledger
from ..memory.manager import TensorsManager
from .recorder import Use
from .region import Region, Structure


class Hold:
    """The blocks of one native run, held from `acquire` to `_withdraw` and `_release`."""

    def __init__(
        self,
        manager: TensorsManager,
        region: Region,
        structure: Structure,
        inputs: list[Any],
    ) -> None:
        self.manager = manager
        self.region = region
        self.structure = structure
        #: What it takes beside the blocks.
        self.passing_nbytes = structure.passing_nbytes
        self.residency = manager.residency
        self.device = self.residency.books.main
        self.own = region.own
        self.given = tuple(
            b for b in dict.fromkeys(r._ttr_block for r in inputs) if b not in self.own
        )
        self.blocks = (*self.own, *self.given)
        #: What something has to be decided about, and what is held of it.
        self.fetched: list[Block] = []
        self.held: list[Any] = []
        self.reserve: Any = None

    def acquire(self) -> bool:
        """Hold all blocks on the device, with room for what passes; False if that cannot be."""
        residency, passing = self.residency, self.passing_nbytes
        if self.device.is_host or self.device.exchanges_storages:
            return False  # the device was changed since this was learned
        ledger, nbytes = residency.books.ledgers[self.device], passing
        for block in self.blocks:
            nbytes += block.nbytes
            exposure = block.exposure
            if exposure is not None and exposure.alive:
                return False
        if nbytes > ledger.most_nbytes:
            return False
        if any(block.sharers is not None and block.is_shared for block in self.own):
            return False
        if not self._is_worth_it(ledger, passing):
            return False
        self._announce()
        try:
            self.fetched = self._not_ready()
            if self.fetched:
                # What is given may be written inside, unseen: a static cache.
                given = [block for block in self.fetched if block in self.given]
                self.held = residency.acquire(self.device, self.fetched, given, passing)
            if self.device.is_witness:
                residency.evictor.make_room_patiently(
                    self.device, passing, "a compiled function", may_fail=True
                )
                if ledger.resident_nbytes + passing > ledger.most_nbytes:
                    self._withdraw()
                    self._release()
                    return False
                self.reserve = self.device.allocate(passing)
            self._tell_accesses()
        except SHORTAGES:
            self._withdraw()
            self._release()
            return False
        except BaseException:
            self._withdraw()
            self._release()
            raise
        return True

    def _is_worth_it(self, ledger: Ledger, passing_nbytes: int) -> bool:
        """Whether entering now makes nobody wait who would not wait in between.

        While memory is short, blocks that are fetched one by one, ahead or on demand, arrive while
        operators run; of those fetched as one bundle, the first operator would wait for the last.
        And room for all that passes at once would be taken from what was fetched ahead.
        """
        if settings.compiled == "forced":
            return True
        if not self.residency.books.is_pressed:
            return True
        room_nbytes = ledger.high_nbytes - ledger.resident_nbytes
        return passing_nbytes <= room_nbytes and all(
            block.readable_on(self.device) is not None for block in self.blocks
        )

    def _announce(self) -> None:
        """From here on nobody evicts the blocks, this thread's own operators included."""
        entries, key = self.residency.holds.native_blocks, threading.get_ident()
        self.outer = entries.get(key)
        entries[key] = (*(self.outer or ()), *self.blocks)

    def _withdraw(self) -> None:
        entries, key = self.residency.holds.native_blocks, threading.get_ident()
        if self.outer is None:
            del entries[key]
        else:
            entries[key] = self.outer

    def _not_ready(self) -> list[Block]:
        """Return the blocks about which something has to be decided; all are announced."""
        device = self.device
        own = [block for block in self.own if block.ready is not device]
        return own + [block for block in self.given if block.ready is not device or not block.owned]

    def _tell_accesses(self) -> None:
        """Tell what the recorded operators told: how they run makes no difference to forecasts."""
        books, feed = self.residency.books, self.residency.feed
        feed.catch_up()
        feed.tell_births()
        tick = books.tick
        for block in self.blocks:
            books.note_use(block, tick + 1)
        if feed.wants_every_use and not feed.is_within:
            with feed.lock:
                # In the order in which operators tell of theirs.
                for use in sorted(
                    self._uses(), key=lambda u: (u.number, self.blocks[u.place].block_id)
                ):
                    block = self.blocks[use.place]
                    feed.tell_access(block, use.kind, tick + use.number, writes=use.writes)
        op_count = max(self.structure.op_count, 1)
        books.tick = tick + op_count
        books.counts.native_op_count += op_count

    def _uses(self) -> Iterable[Use]:
        """Return the recorded uses; each block once where the blocks are others now."""
        if self.structure.block_count == len(self.blocks):
            return self.structure.uses
        kinds = (hash(("compiled", block.nbytes)) for block in self.blocks)
        return [Use(1, place, kind, False) for place, kind in enumerate(kinds)]

    def _release(self) -> None:
        if not self.held:
            return
        residency = self.residency
        residency.release(self.held)
        self.held = []
        with residency.books.lock:
            for block in self.fetched:
                residency.readiness.set_ready(block, self.device)
