"""Copies between real accelerators of one kind, where their driver lets them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..base import Device

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Event
    from .copies import LinkCopier
    from .rooms import Rooms
    from .vendor import Vendor

__all__ = ["AcceleratorPeers"]


class AcceleratorPeers(Device):
    """What an accelerator does with others of its kind.

    Notes
    -----
    The speed of such a link is not asked for: it is taken to be that of the link to the host, which
    it leaves to others.
    """

    vendor: Vendor
    _copier: LinkCopier
    _lock: threading.RLock
    _rooms: Rooms

    def peer_bytes_per_s(self, giver: Device) -> float:  # noqa: D102
        if giver is self or giver.kind != self.kind or not isinstance(giver, AcceleratorPeers):
            return 0.0
        return self.clocks().h2d_bytes_per_s if self.vendor.can_reach(giver.index) else 0.0

    def copy_across(  # noqa: D102
        self, giver: Device, source: Tensor, base: Tensor, *, after: Event | None = None
    ) -> Event:
        assert isinstance(giver, AcceleratorPeers)
        event = self._copier.copy_across(giver._copier, source, base, after)
        with self._lock:
            self._rooms.note_copy(base)
        return event

    def end_peer_copies(self, base: Tensor) -> None:  # noqa: D102
        self._copier.end_copies_across(base)
