"""The timeline of a run: each operator, copy and eviction with its time, as long as it is open.

Nothing is put together while operators run: what is told is kept as it is, and `chrome.py` makes a
file of it at the end. On a simulated device the times are those of its clock. A real one tells when
an operator was issued, and a copy ends when it is seen to have ended.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, TypeVar

from torch.utils._pytree import tree_leaves

from ...base.activation import watch
from ...base.errors import ConfigError
from ...base.event_sinks import say
from ...base.listeners import Happening, listeners
from ...base.option_parsers import path_to_write
from ...devices.base import Event
from ...memory.device_times import DeviceTimes
from ...memory.ref import TensorRef
from ...operators.costs import operator_cost
from ...operators.plan import OpPlan, ReadyWay
from ..handlers import keeps_everything
from ..operands import flattened, overwritten_of, sizes_of_call
from ..read_alone import parts_of
from .chrome import chrome_trace, write_json
from .passing import recorders

_T = TypeVar("_T")

#: So many events are kept unless more are asked for: about a gigabyte.
EVENTS_AT_MOST = 1_000_000


class Ran(NamedTuple):
    """What a replay needs to know of one operator, beside its time."""

    kind: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    #: Blocks that it has made, with their bytes; and those that had died when it began.
    born: tuple[tuple[int, int], ...]
    dead: tuple[int, ...]
    flops: int
    touched_nbytes: int
    dtype_name: str
    #: What its kernel takes in passing, where it ran as one.
    peak_nbytes: int
    #: What it is: it may take the ready path; the host runs it; only a part of the first operand is
    #: read; the host waits for what it returns; its result shares the bytes of its operand.
    facts: tuple[str, ...]
    #: Blocks of which parts move alone while they are away, the first byte of each, and its bytes.
    parts: tuple[tuple[int, int, int], ...]
    #: Calls of the same form, one operator on equal sizes, are expected to make as many bytes.
    form: int


class Timeline(AbstractContextManager["Timeline"]):
    """Writes a Chrome trace of what happens inside of `with tensorsManager.trace(path):`.

    Attributes
    ----------
    events : list of (Happening, Ran or None)
        What has happened so far; `Ran` stands with operators.
    blocks : dict
        Bytes by the numbers of the blocks that were met, and which of them the program keeps.
    """

    def __init__(self, manager: Any, path: str, limit: int = EVENTS_AT_MOST) -> None:
        self.path = path_to_write(path, "trace(path)")
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"trace(limit={limit!r}): write a whole number of events, from 1 on.")
        self.events: list[tuple[Happening, Ran | None]] = []
        self.blocks: dict[int, tuple[int, bool]] = {}
        #: What the program calls them: the model may be gone when the file is written.
        self.names: dict[int, str] = {}
        #: Bytes on an accelerator, by its name, with the times.
        self.resident: list[tuple[int, str, int]] = []
        self._manager = manager
        self._limit = limit
        self._dead: deque[int] = deque()
        self._forms: dict[Any, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        #: Copies of a real device that were not seen to end, and the first places among the events
        #: where they may be: threads note at once.
        self._open_copies: deque[tuple[int, Happening, Event]] = deque()
        self.is_cut = False

    # -- begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Timeline:
        """Begin; what is resident already is in the first counter."""
        manager = self._manager
        manager.names.look()
        books = manager.residency.books
        self.devices = list(books.accelerators)
        self._ledgers = {device.name: books.ledgers[device] for device in self.devices}
        self.began_ns = min(DeviceTimes.of(d).reached_ns for d in self.devices or [books.main])
        self._stats = manager.stats()
        with books.lock:
            self.resident_at_first = {
                device.name: [b.block_id for b in books.blocks_on(device) if self._meet(b)]
                for device in self.devices
            }
        listeners.add_sink(self.note)
        recorders.append(self)
        watch.want(f"timeline {id(self)}", True)
        return self

    def __exit__(self, *_: object) -> None:
        """End, and write the file, also after an error."""
        watch.want(f"timeline {id(self)}", False)
        recorders.remove(self)
        listeners.remove_sink(self.note)
        self._see_ends()
        self._manager.names.look()
        for number in self.blocks:
            name = self._manager.names.last_of_block(number)
            if name:
                self.names[number] = name
        try:
            write_json(self.path, self.as_chrome())
        except OSError as error:
            say(f"torchTensorRef: no timeline is written: {error}")

    def as_chrome(self) -> dict[str, Any]:
        """Return what has happened so far in the format of Chrome's traces."""
        return chrome_trace(self, self._manager, self._stats)

    # -- told -----------------------------------------------------------------------------------

    def note(self, happening: Happening, copy: Event | None = None) -> None:
        """Keep what has happened to a block; possibly under a lock."""
        if happening.kind == "op" or not self._has_room():
            return
        place = len(self.events)
        self.events.append((happening, None))
        if copy is not None and not happening.end_ns:
            self._open_copies.append((place, happening, copy))
        if happening.kind in ("fetch", "evict"):
            self._count(happening.device, happening.start_ns)

    def operator(
        self, plan: OpPlan, args: Any, kwargs: Any, result: Any, happening: Happening
    ) -> None:
        """Keep an operator that has run; no lock is held."""
        if self._open_copies:
            self._see_ends()
        if not self._has_room():
            return
        dead = tuple(_taken(self._dead, len(self._dead)))
        reads = [
            leaf._ttr_block for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TensorRef)
        ]
        written = [plan.argument(name, args, kwargs) for name in plan.write_names]
        writes = [leaf._ttr_block for leaf in tree_leaves(written) if isinstance(leaf, TensorRef)]
        known = {block.block_id for block in reads}
        made = [leaf._ttr_block for leaf in tree_leaves(result) if isinstance(leaf, TensorRef)]
        born = {b.block_id: b.nbytes for b in made if b.block_id not in known}
        for block in (*reads, *made):
            self._meet(block)
        flops, nbytes, dtype_name = operator_cost(plan, args, kwargs, result)
        ran = Ran(
            plan.kind,
            tuple(dict.fromkeys(block.block_id for block in reads)),
            tuple(dict.fromkeys(block.block_id for block in writes)),
            tuple(born.items()),
            dead,
            flops,
            nbytes,
            dtype_name,
            _peak_nbytes(plan, args, kwargs),
            _facts(plan, args, kwargs),
            parts_of(plan, args, kwargs),
            self._forms.setdefault(sizes_of_call(plan, args), len(self._forms)),
        )
        self.events.append((happening, ran))
        self._count(happening.device, happening.end_ns)

    def _count(self, name: str, at_ns: int) -> None:
        """Note what is on an accelerator; after what the host has run, on the first of them."""
        if name not in self._ledgers:
            name = next(iter(self._ledgers), "")
        if name:
            self.resident.append((at_ns, name, self._ledgers[name].resident_nbytes))

    def _has_room(self) -> bool:
        if len(self.events) < self._limit:
            return True
        self.is_cut = True
        return False

    def _meet(self, block: Any) -> bool:
        number = block.block_id
        if number not in self._references:
            self._references[number] = weakref.ref(block, lambda _: self._dead.append(number))
        self.blocks[number] = (block.nbytes, block.is_persistent)
        name = self._manager.names.last_of_block(number)
        if name:
            self.names[number] = name
        return True

    def _see_ends(self) -> None:
        """Note when copies of a real device have ended, as far as that is to be seen."""
        now_ns = self._manager.residency.books.main.now_ns()
        for place, happening, copy in _taken(self._open_copies, len(self._open_copies)):
            if not copy.is_done():
                self._open_copies.append((place, happening, copy))
                continue
            while self.events[place][0] is not happening:
                place += 1
            self.events[place] = (happening._replace(end_ns=now_ns), None)


def _taken(waiting: deque[_T], most: int) -> Iterator[_T]:
    """Take the first so many; other threads may take some of them first."""
    with suppress(IndexError):
        for _ in range(most):
            yield waiting.popleft()


def _peak_nbytes(plan: OpPlan, args: Any, kwargs: Any) -> int:
    rule = plan.peak_nbytes
    return 0 if rule is None else rule(*args, **kwargs) or 0


def _facts(plan: OpPlan, args: Any, kwargs: Any) -> tuple[str, ...]:
    first: Any = args[0] if args else None
    is_ref = isinstance(first, TensorRef)
    draws = plan.draws_random(args, kwargs)
    refs = (arg for arg in flattened(plan, args) if isinstance(arg, TensorRef))
    known = {
        "ready": plan.ready_way != ReadyWay.NONE and plan.allows(kwargs, first),
        "fetched": plan.may_be_fetched,
        "on_host": draws and is_ref and first.device.type == "cpu",
        "overwrites": overwritten_of(plan, first, refs) is not None,
        "reads_part": plan.reads_part,
        "packs": plan.reads_groups,
        "waits": plan.answers,
        "shares": plan.shares and is_ref and keeps_everything(first, kwargs),
    }
    return tuple(name for name, holds in known.items() if holds)
