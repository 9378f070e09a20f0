"""What a device can do: hold bytes, copy them, and say when its work is done."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .clocks import Clocks, Stopwatch
from .events import DONE, DoneEvent, Event
from .peers import PeerLinks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "DONE",
    "Clocks",
    "Device",
    "DoneEvent",
    "Event",
    "Stopwatch",
]


class Graveyard(deque[Any]):
    """What dying replicas leave, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        #: `append`, the same object for all replicas: each keeps it.
        self.note = self.append
        #: What the living ones will leave, by their numbers: it is gone with all of the devices,
        #: also where nobody takes the last deaths off the books.
        self.mortals: dict[int, Any] = {}


class Device(PeerLinks, ABC):
    """A place that can hold replicas.

    Attributes
    ----------
    name : str
        Unique among devices: ``"cpu"``, ``"sim:0"``, ``"cuda:0"``.
    kind : str
        ``"cpu"``, ``"sim"``, ``"cuda"``, ``"xpu"``, ``"mps"``.
    index : int
        Which one of its kind.
    torch_device : torch.device
        Where the plain tensors that live here say they are (``cpu`` for a simulated device).
    capacity_nbytes : int
        The most bytes it can hold.
    stall_ns : int
        How long compute stood idle for no other reason than a copy it waited for.

    Notes
    -----
    A *base* is a plain tensor that owns the storage of one replica. The storage object lives as
    long as the base: `empty` takes its bytes away and `refill` gives bytes back, so that plain
    views made of it stay valid objects. Every method may be called from any thread.
    """

    #: The host itself, where blocks are at home.
    is_host: bool = False
    #: What counts it for us. Kept here: it lives as long as somebody may ask for it.
    ledger: Any = None
    #: What dying replicas leave, to be taken off the books: of all devices that are used together.
    graveyard: Graveyard = Graveyard()  # one for all, unless a device is given another
    #: Its time is virtual: it must be told what operators cost (`after_operator`, `charge`), and
    #: that the host waits for a number which the program reads.
    has_virtual_clock: bool = False
    #: Its kernels are the host's: what one of them refuses the host refuses, too, and operands that
    #: a kernel reads on the host are there already.
    has_host_kernels: bool = False
    #: Kernels and factories allocate from it by themselves, so that one of them may find no memory
    #: although the ledger has some: then it helps to evict and to call it again.
    kernels_allocate: bool = False
    #: Other processes may take its memory while we run: what is free must be asked for again.
    shares_memory: bool = False
    #: Copies from page-locked memory are faster, and read their source after they were issued:
    #: `wish_page_locked`, and `finish_reading` of its events.
    prefers_page_locked: bool = False
    #: Counts the results of kernels itself, by `account`: an independent check of the ledger.
    is_witness: bool = False
    #: `empty` may follow a `copy_out` at once: the bytes are kept until the copy has read them.
    keeps_leaving_bytes: bool = False
    #: It is known how fast its host's kernels are.
    knows_host: bool = False
    #: A base gets another storage when it is emptied or filled: no view of the old one may be kept.
    exchanges_storages: bool = False
    #: Has to be told when operators on a replica were issued: `note_uses`.
    notes_uses: bool = False
    #: A copy of so many bytes takes no longer than we take to decide about it; 0 where our time is
    #: not counted.
    decision_nbytes: int = 0

    name: str
    kind: str
    index: int
    capacity_nbytes: int

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """Where the plain tensors that live here say they are."""
        import torch

        return torch.device("cpu")

    # memory -------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> Tensor:
        """Make a base of `nbytes` uninitialised bytes: one-dimensional, uint8.

        Raises
        ------
        torch.OutOfMemoryError
            It does not fit; nothing has changed.
        """

    @abstractmethod
    def refill(self, base: Tensor, nbytes: int) -> None:
        """Give bytes again to a base that was emptied; the storage object is the same.

        Raises
        ------
        torch.OutOfMemoryError
            They do not fit; the base is still empty.
        """

    @abstractmethod
    def empty(self, base: Tensor) -> None:
        """Free the bytes of a base and keep its storage object."""

    @abstractmethod
    def account(self, base: Tensor) -> None:
        """Count the storage of a kernel's fresh result from now on.

        Raises
        ------
        torch.OutOfMemoryError
            It does not fit; it is not counted.
        """

    @abstractmethod
    def free_nbytes(self) -> int:
        """How many bytes more it could hold now."""

    @property
    @abstractmethod
    def resident_nbytes(self) -> int:
        """The bytes it holds now."""

    @property
    @abstractmethod
    def peak_nbytes(self) -> int:
        """The most bytes it has held since the last `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start `peak_nbytes` again from what is resident now."""

    def recover(self, bases: Sequence[tuple[Tensor, bool]]) -> None:
        """Count anew what is here, after an error that came halfway through something.

        `bases` may have bytes here; with each stands whether those are in use.
        """

    # copies -------------------------------------------------------------------------------

    @abstractmethod
    def copy_in(self, source: Tensor, base: Tensor, *, after: Event | None = None) -> Event:
        """Issue a copy of host bytes into all of `base`; return the event of its arrival.

        Parameters
        ----------
        source : Tensor
            Plain host tensor, uint8, one-dimensional, as many bytes as `base` has. It must keep
            its bytes until the event fires.
        base : Tensor
            The replica that receives them.
        after : Event, optional
            The copy starts no earlier; at least `available` of the base.
        """

    @abstractmethod
    def copy_out(
        self,
        base: Tensor,
        destination: Tensor,
        *,
        after: Event | None = None,
        start: int | None = None,
    ) -> Event:
        """Issue a copy of bytes of `base` into host memory; return the event of its arrival.

        Parameters
        ----------
        base : Tensor
            Has arrived, as far as compute knows.
        destination : Tensor
            Plain host tensor, uint8, one-dimensional, as many bytes as `base` has.
        after : Event, optional
            The copy starts no earlier. Without, it starts when everything is done that compute has
            been given by then, also by other threads.
        start : int, optional
            Where in `base` the copy begins, which then has as many bytes as `destination`.
        """

    @abstractmethod
    def available(self, base: Tensor) -> Event | None:
        """The event after which a copy engine may write `base`; None if it may at once."""

    def note_uses(self, bases: Sequence[Tensor]) -> None:
        """Operators on these bases were issued; later ones will be noted again."""

    def forget_uses(self, bases: Sequence[Tensor]) -> None:
        """Operators may use these bases from now on without a note."""

    def about_to_change(self, base: Tensor) -> None:
        """These bytes may be written or used without our knowledge after this call.

        On the host: wait until no copy reads them any more.
        """

    def has_changed(self, base: Tensor) -> None:
        """These bytes have been written, perhaps while a copy was reading them."""

    def wish_page_locked(self, base: Tensor, *, may_mirror: bool) -> None:
        """Note that a host base is copied from, so that it may be page-locked if that recurs.

        Parameters
        ----------
        base : Tensor
            Owns the bytes of a block at home.
        may_mirror : bool
            Only operators write them, so that a second copy of them stays valid.
        """

    def home_memory(self, nbytes: int) -> Tensor | None:
        """Host memory that copies from here reach fastest, for a block that has no home yet.

        Returns
        -------
        Tensor or None
            A base of exactly so many bytes; None where any other memory is as good.
        """
        return None

    @property
    def page_locked_nbytes(self) -> int:
        """Host memory that is page-locked for its copies."""
        return 0

    @property
    def staged_nbytes(self) -> int:
        """Bytes copied so far by way of staging buffers, since their memory was not page-locked."""
        return 0

    # shortage -----------------------------------------------------------------------------

    def limit(self, nbytes: int) -> bool:
        """Let the allocator itself refuse more than `nbytes`; False where it cannot."""
        return False

    def slack_nbytes(self, limit_nbytes: int) -> int:
        """Of a limit on what the allocator may take, what has to be left for it to find room."""
        return 0

    def release_count(self) -> int:
        """How often the allocator had to give up all its caches, which waits for the device."""
        return 0

    def give_up_caches(self) -> None:
        """Give back to the driver what an allocator keeps for later."""

    def random_state(self) -> Tensor | None:
        """The state of the device's own generator, if it has one: a second try needs it."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Set the generator back to a state asked for before."""

    # operators ----------------------------------------------------------------------------

    def note_decision(self) -> None:
        """Note that a strategy is told or asked about an operator: a virtual clock advances."""

    def before_operator(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Refuse an operator that may not touch these bases now. Real devices cannot tell."""

    def after_operator(
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        flops: int,
        nbytes: int,
        dtype_name: str,
    ) -> None:
        """Note that an operator was issued: the clock of a simulated device advances."""

    def charge(self, flops: int, nbytes: int, dtype_name: str) -> None:
        """Advance the clock as `after_operator` does, and note no use of any base."""

    def charge_time(self, compute_ns: int, op_count: int) -> None:
        """Advance the clock by operators that were not seen one by one."""

    @abstractmethod
    def record(self) -> Event:
        """An event at the end of what compute has been given so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for all that was issued."""

    def clocks(self) -> Clocks:
        """When its engines are free, and what they have done."""
        return Clocks()

    @property
    def hardware(self) -> str:
        """What it is: operators take about as long on another device of which this is true."""
        return self.kind

    def stopwatch(self) -> Stopwatch | None:
        """Start to measure what compute is given from now on; None where it cannot be measured."""
        return None

    @abstractmethod
    def now_ns(self) -> int:
        """The host's clock as this device sees it."""

    def note_wait(self, began_ns: int) -> None:
        """Note that the host has waited since then for a copy that the program asked for.

        Where the time is virtual: else events count it themselves.
        """

    @property
    def stall_ns(self) -> int:
        """How long compute stood idle for no other reason than a copy it waited for."""
        return 0

    @property
    def host_stall_ns(self) -> int:
        """How long compute stood idle while the host had not issued its operator."""
        return 0

    @property
    def host_ns(self) -> int:
        """What management took of the host's own time; 0 where nobody counts it."""
        return 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
