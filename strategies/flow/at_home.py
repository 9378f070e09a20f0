"""Which operators are computed where their weights lie, so that host and link both work.

While the link brings weights, the host computes with others. What is missing is gone through in the
order of use, on two clocks: that of the program, which moves on by what the accelerator computes
and by what is computed at home, and that of the link. What the link brings in time is fetched;
what it cannot is computed at home, and gives it the time to bring what comes after. So the share
of each follows from their speeds, and it is spread over the whole period: the error of one block is
carried on to the next (THEORY.md, 3.2 and R5: whole operators suffice). Where the accelerator's own
work gives the link time enough, nothing is computed at home.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...strategy import Access, DeviceSnapshot, Offer, OpSnapshot
from .forecaster import Wanted
from .latest_start import LatestStart

#: What takes longer at home than so many copies is never computed there.
MOST_COPIES = 4.0
#: A copy that is on its way would be lost, and costs so many times its own: the link could have
#: brought another, and in its room another could have stayed until it is evicted. More changes
#: nothing but where the host is so much faster that it should not wait.
LOST_COPIES = 3.0
#: Of the operators that lacked a weight of late, this share has to have been better off at home
#: before copies are planned around what is computed there; "of late" is about so many.
OPEN_SHARE = 1 / 16
OF_LATE_COUNT = 32
#: What takes no longer at home and back is light: as long as a crossing takes (THEORY.md, 3.1).
LIGHT_NS = 50_000


class AtHome:
    """What is known of computing at home: by which operators, and what a byte takes."""

    def __init__(self) -> None:
        #: By struct, in ns: running there, and handing over what goes in and what comes out.
        self._ns_per_byte: dict[int, float] = {}
        self._struct_of: dict[int, int] = {}
        #: What the next operator at home takes, as foreseen, and the longest of late.
        self.next_ns = self.longest_ns = 0.0
        self._share = 0.0  # of those asked about of late, that were computed at home
        self.is_allowed = True

    def use(self, access: Access) -> None:
        """Note which operator uses a block that lasts: the last one says whether it may."""
        if not self._ns_per_byte:
            return
        if access.struct in self._ns_per_byte and not access.is_write:
            self._struct_of[access.block_id] = access.struct
        else:
            self._struct_of.pop(access.block_id, None)

    def death(self, block_id: int) -> None:
        """Forget a block."""
        self._struct_of.pop(block_id, None)

    def wants(self, op: OpSnapshot) -> Offer | None:
        """Return the host's offer if an operator that lacks a weight ends sooner there.

        What only lacks small things that operators have made follows them home where all of it is
        there, and little is to be done: so a group of operators shares one crossing. Else it
        follows its weights: it runs on the accelerator. What is large is as dear to fetch whoever
        made it: a cache of keys and values is attended where it lies.
        """
        if not (self.is_allowed and op.is_movable and op.is_pressed):
            return None
        lasting = [b for b in op.missing if b.is_persistent or b.copy_ns > LIGHT_NS]
        home = next((one for one in op.offers if one.device != op.default_device), None)
        if home is None:
            return None
        if not lasting:
            is_light = home.run_ns + home.back_ns <= LIGHT_NS
            return home if home.is_here and is_light else None
        largest = max(lasting, key=lambda block: block.nbytes)
        cost_ns = home.run_ns + 2 * home.back_ns
        if largest.is_persistent:
            self._ns_per_byte[largest.struct] = cost_ns / max(largest.nbytes, 1)
        # However long the link is busy, what crosses may outweigh what does not.
        # What operators have made may be others the next time: it has to pay by itself.
        most_copies = MOST_COPIES if largest.is_persistent else 1.0
        is_cheap = cost_ns <= most_copies * sum(block.copy_ns for block in lasting)
        lost_ns = LOST_COPIES * sum(block.copy_ns for block in lasting if block.is_coming)
        is_sooner = is_cheap and home.end_ns + lost_ns < op.offer(op.default_device).end_ns
        self._share += (is_sooner - self._share) / OF_LATE_COUNT
        if not is_sooner:
            return None
        faded_ns = self.longest_ns + (cost_ns - self.longest_ns) / OF_LATE_COUNT
        self.longest_ns = max(cost_ns, faded_ns)
        return home

    @property
    def is_open(self) -> bool:
        """Whether enough of what lacks weights is computed at home to plan copies around it."""
        return self.is_allowed and self._share > OPEN_SHARE

    def idle_nbytes(self, device: DeviceSnapshot, at_home_ns: float) -> float:
        """Return what the link could bring beyond its queue while the host computes so long.

        Meanwhile nothing can be queued. More than that would hold room before it is needed.
        """
        reached_ns = max(device.now_ns, device.compute_free_ns)
        return (reached_ns + at_home_ns - device.link_free_ns) * device.h2d_bytes_per_s / 1e9

    def in_time(
        self,
        device: DeviceSnapshot,
        gate: LatestStart,
        cursor: int,
        missing: Iterable[Wanted],
    ) -> Iterator[Wanted]:
        """Leave out what the link would bring too late, and what is computed at home meanwhile.

        Parameters
        ----------
        missing : iterable of Wanted
            In the order of use.
        """
        ns_per_link_byte = 1e9 / device.h2d_bytes_per_s
        reached_ns = max(device.now_ns, device.compute_free_ns)
        link_ns = float(max(0, device.link_free_ns - reached_ns))
        at_home_ns = waited_ns = self.next_ns = 0.0
        for wanted in missing:
            distance, block_id, nbytes = wanted
            copy_ns = nbytes * ns_per_link_byte
            cost_ns = self._cost_ns(block_id, nbytes)
            begins_ns = gate.compute_ns(cursor, distance) + at_home_ns + waited_ns
            if cost_ns < MOST_COPIES * copy_ns and begins_ns < link_ns + copy_ns:
                self.next_ns = self.next_ns or cost_ns
                at_home_ns += cost_ns
                continue
            link_ns += copy_ns
            waited_ns += max(0.0, link_ns - begins_ns)
            yield wanted

    def _cost_ns(self, block_id: int, nbytes: int) -> float:
        """Return what an operator on a block takes at home; infinity where it may not run there."""
        struct = self._struct_of.get(block_id)
        if struct is None:
            return float("inf")
        return self._ns_per_byte.get(struct, float("inf")) * nbytes
