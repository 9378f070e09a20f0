"""What devices do that can copy to each other, past the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .events import Event

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PeerLinks"]


class PeerLinks:
    """Of any device: no other one can copy to it. A giver is another `Device`."""

    def peer_bytes_per_s(self, giver: Any) -> float:
        """How fast copies from another accelerator to this one are; 0 where there is no such link.

        Where a link is there and nobody knows its speed, that of copies from the host.
        """
        return 0.0

    def peer_free_ns(self, giver: Any) -> int:
        """When the link from another accelerator has finished what it was given."""
        return 0

    def copy_across(
        self, giver: Any, source: Tensor, base: Tensor, *, after: Event | None = None
    ) -> Event:
        """Issue a copy of all bytes of a base of another accelerator; return its arrival's event.

        Parameters
        ----------
        giver : Device
            Where `source` is; `peer_bytes_per_s` of it is not 0. The copy reads what operators
            issued there so far write. The source may be emptied at once.
        source, base : Tensor
            The replica that is read, and the one that receives its bytes.
        after : Event, optional
            The copy starts no earlier; at least `available` of the base.
        """
        raise NotImplementedError

    def end_peer_copies(self, base: Tensor) -> None:
        """Let operators issued from now on wait until no other accelerator copies these bytes."""
