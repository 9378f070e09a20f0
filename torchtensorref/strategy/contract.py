"""What a strategy is: the frozen snapshots it sees and the decisions it returns.

A strategy decides and never acts. It receives plain numbers, returns block numbers, holds no
tensor, copies no byte, takes no lock. The manager carries a decision out, and checks before it
does that the decision still holds: a block that went away, was pinned or has changed meanwhile is
skipped, so a strategy can be wrong, but it cannot do harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Operators after which a result that is used counts as one that stays: optimizer state.
PERSISTENT_AFTER = 1000
#: Results below this share of the budget are nobody's concern: they are not told.
TINY_SHARE = 1 / 4096


class BlockSnapshot(NamedTuple):
    """What a strategy may know about a block that has a replica on the device in question."""

    block_id: int
    nbytes: int
    #: Number of the operator that used it last; larger is later.
    last_use: int
    #: Newer than its home: giving it back costs a copy.
    is_dirty: bool
    #: A parameter, a buffer, or a tensor that has outlived many operators.
    is_persistent: bool


class Access(NamedTuple):
    """One block met by one operator, in the order of the program."""

    block_id: int
    nbytes: int
    #: Equal numbers mean the same operator on operands of the same sizes.
    struct: int
    is_persistent: bool
    is_write: bool
    #: Whether the accelerator held it, or it was on its way, when the operator came.
    was_resident: bool
    #: The host runs the operator because the strategy wanted that: it was not fetched for this.
    is_at_home: bool = False
    #: Name of the accelerator that uses it, or that would have.
    device: str = ""
    #: Of a block that is there so little is read that only that would move, were it away.
    is_in_part: bool = False


class Birth(NamedTuple):
    """One result that is foretold: what `Strategy.on_birth` is told of a real one."""

    block_id: int
    nbytes: int
    place: int


class Death(NamedTuple):
    """One block that the program will have let go of: see `Strategy.on_death`."""

    block_id: int


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """What a strategy may know about a device."""

    name: str
    limit_nbytes: int
    #: Allocated replicas, copies in flight included.
    resident_nbytes: int
    #: Bytes of copies to the device that have been issued and have not arrived.
    in_flight_nbytes: int
    in_flight_count: int
    #: The device's clock, and when its copy engine towards it is free again.
    now_ns: int
    link_free_ns: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    #: How far the program has come: the time that the operators issued so far take, waiting not
    #: counted. The host's own time where nobody measures compute; 0 if neither is known.
    compute_ns: int = 0
    #: When the device will be through with the operators issued so far; 0 if not known.
    compute_free_ns: int = 0
    #: When the copy engine from it is free again.
    d2h_free_ns: int = 0
    #: How long compute has stood idle only because it waited for a copy.
    stall_ns: int = 0
    #: A copy of so many bytes takes no longer than the host takes to decide about it; 0 where its
    #: time is not counted.
    decision_nbytes: int = 0

    @property
    def free_nbytes(self) -> int:
        """What may still enter without an eviction."""
        return self.limit_nbytes - self.resident_nbytes

    @property
    def knows_compute_end(self) -> bool:
        """Whether it says when compute is through, as simulated ones that have run something do."""
        return bool(self.compute_free_ns)


class MissingBlock(NamedTuple):
    """An operand that the accelerator does not hold, or that is on its way there."""

    block_id: int
    nbytes: int
    #: As in `Access`: equal numbers mean the same operator on operands of the same sizes.
    struct: int
    is_persistent: bool
    #: How long its copy to the accelerator takes, once it is its turn.
    copy_ns: int = 0
    #: That copy has been issued.
    is_coming: bool = False


class Offer(NamedTuple):
    """What it would take to run an operator on one device. Times are those of the device's clock.

    A host operator begins when the program has come to it and its operands are at home.
    """

    device: str
    #: When its operands could be there and the operator begin.
    there_ns: int
    #: How long it takes: as learned, else as expected of such a host; 0 if nothing is known.
    run_ns: int
    #: How long its result takes on its way to where the program goes on.
    back_ns: int
    is_learned: bool
    #: All of its operands are there.
    is_here: bool = False

    @property
    def end_ns(self) -> int:
        """When its result could be there."""
        return self.there_ns + self.run_ns + self.back_ns


class OperandSnapshot(NamedTuple):
    """One operand of an operator that may run on any of several accelerators."""

    block_id: int
    nbytes: int
    is_persistent: bool
    #: Names of the accelerators that hold it, or will before long.
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpSnapshot:
    """One operator that lacks an operand, before it runs."""

    name: str
    #: Operands: total of distinct blocks, and the part that the accelerator does not hold.
    operand_nbytes: int
    missing_nbytes: int
    flops: int
    #: Where the manager would run it: the name of a device.
    default_device: str
    #: It writes no operand and draws no random numbers: where it runs changes its time, no more.
    is_movable: bool = False
    #: Whether anything had to be evicted so far.
    is_pressed: bool = False
    missing: tuple[MissingBlock, ...] = ()
    #: Of the default device, and of the host; none where it is asked which of `accelerators`.
    offers: tuple[Offer, ...] = ()
    #: For a strategy that spreads: its operands, all accelerators in use, and the one of them that
    #: the program says its tensors are on; "" where it has not said.
    operands: tuple[OperandSnapshot, ...] = ()
    accelerators: tuple[DeviceSnapshot, ...] = ()
    label: str = ""

    def offer(self, device: str) -> Offer:
        """Return what a device offers; one that is free at once and takes no time if none is."""
        found = (offer for offer in self.offers if offer.device == device)
        return next(found, Offer(device, 0, 0, 0, is_learned=False))


class Prefetch(NamedTuple):
    """Fetch this block early, after giving these back; refused as a whole if it does not fit."""

    block_id: int
    victims: tuple[int, ...] = ()


class Strategy:
    """Base of every strategy: one that never evicts unless asked, and never looks ahead.

    A `name` and `victims` have to be written. The manager calls a strategy from one thread at a
    time, and never while it holds its own lock.
    """

    #: The name by which `tensorsManager.strategy` and `TTR_STRATEGY` choose it.
    name: str = ""

    #: True if every use of a persistent block must be told to `on_access`, also of resident ones.
    watches_accesses: bool = False

    #: True if it computes at home what the accelerator computes as well: then `place` is asked only
    #: where `tensorsManager.placement` says so, or the machine says how fast its host is.
    mixes_devices: bool = False

    #: True if it uses every accelerator there is. Then `place` is asked of each operator that lacks
    #: an operand on the first one, with its operands and all accelerators, unless nothing is to be
    #: decided: all of them are ready on another one. It is told what leaves any of them, and asked
    #: for each what to fetch ahead and to write back. With `mixes_devices` too, it is asked again
    #: of what lacks an operand there, with the offers of that accelerator and of the host.
    spreads: bool = False

    #: False if it is there to hold as little as one operator needs: a compiled call holds more.
    allows_compiled: bool = True

    def place(self, op: OpSnapshot) -> str:
        """Return the name of the device on which an operator shall run.

        Asked of operators that lack an operand on the accelerator; all others run there.
        """
        return op.default_device

    def victims(
        self, device: DeviceSnapshot, candidates: Sequence[BlockSnapshot], need_nbytes: int
    ) -> Iterable[int]:
        """Return the blocks to give back, in order, until `need_nbytes` are free.

        `candidates` are the blocks on the device that no running operator holds, least recently
        used first, and among equals the largest. They are described as far as they are looked at:
        go through them as far as is needed, or ask `candidates.get(block_id)` for one of them
        (None if it is not among them). Naming fewer than needed means that the rest is the
        manager's choice: in that order.
        """
        raise NotImplementedError

    def after_operator(
        self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return which of the blocks that an operator used or made shall be given back at once."""
        return ()

    def on_access(self, access: Access) -> None:
        """Note that the program uses a block."""

    def on_foretold(self, events: Sequence[Access | Birth | Death]) -> None:
        """Learn what the program is about to use, make and let go of, before it begins.

        What it will make goes by numbers that no block has, and is dead at the end.
        """

    def on_birth(self, block_id: int, nbytes: int, place: int) -> int:
        """Note that an operator has made a block, which was there still when the next was told.

        Parameters
        ----------
        place : int
            How many operators after the last access to a persistent block it was made.
        device : str
            For a strategy that `spreads`, only: the name of the accelerator that has made it.

        Returns
        -------
        int
            After how many operators it counts as persistent if it is there still, so that each use
            of it is told; 0 is at once.

        Notes
        -----
        Told while memory is short, before the next access: most results die before then, and those
        below `TINY_SHARE` of the budget are not told.
        """
        return PERSISTENT_AFTER

    def on_evict(self, block_id: int) -> None:
        """Note that the accelerator does not hold a block any more, which lives on elsewhere.

        What comes is told too: by `on_access` (the operator fetches what is missing), `on_birth`
        and `on_prefetch`.
        """

    def on_death(self, block_id: int) -> None:
        """Note that the program has let go of a block."""

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[Prefetch]:
        """Return what to fetch ahead of need, most urgent first."""
        return ()

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        """Note that a copy which `prefetch` asked for has been issued; others were refused."""

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot]
    ) -> Iterable[int]:
        """Return dirty blocks to copy home now, while the link that way is idle."""
        return ()

    def expects(self, device: DeviceSnapshot) -> Iterable[int]:
        """Return the blocks whose next uses need not be told one by one, first used first.

        Asked after `prefetch`, while every use is told. Operators may use these blocks unheard, up
        to the first that is not there; `on_access` tells of all those uses together, before it
        tells of the next use of another block. Results of more than 1/64 of the budget end that,
        too.
        """
        return ()


def hears_where(strategy: Strategy) -> bool:
    """Whether a strategy is told which accelerator has made a result: `on_birth` has `device`."""
    return bool(strategy.spreads) and type(strategy).on_birth is not Strategy.on_birth
