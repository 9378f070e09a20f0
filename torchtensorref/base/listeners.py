"""Who is told what happens: callbacks of the program's, called where no lock is held, and ours.

What happens is noted at once, where it happens, and possibly under a lock. Callbacks are the
program's code: they are called at the end of the operator, or of the call of ours, in which it
happened, by the thread in which it happened.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from . import forking
from .activation import watch
from .errors import ConfigError, did_you_mean, nearest
from .interrupts import lets_program_run
from .middlewares import takes

__all__ = ["KINDS", "Callback", "Happening", "Listeners", "listeners", "name_of_callback"]

#: What one can be told of.
KINDS = ("fetch", "evict", "write_back", "drop", "op", "stall", "out_of_budget")
#: Those that are seen only by who looks on at every operator.
OF_OPERATORS = ("op", "stall")


class Happening(NamedTuple):
    """One thing that has happened.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    name : str
        The operator, or the block: by the name that the program gave it, else ``b7``. Of a stall,
        the largest block that was waited for.
    nbytes : int
        Bytes copied or freed; of an operator, those of its operands.
    device : str
        Where: the accelerator of a copy, the device that an operator ran on.
    cause : str
        Why, in words.
    start_ns, end_ns : int
        When, on the device's clock; `end_ns` is 0 where it is not known yet.
    block_id : int
        Number of the block; 0 for an operator.
    module : str
        Path of the module that the operator was called in, where that is known.
    is_ahead : bool
        A copy that nobody waits for: fetched before it is needed.
    """

    kind: str
    name: str
    nbytes: int
    device: str
    cause: str
    start_ns: int = 0
    end_ns: int = 0
    block_id: int = 0
    module: str = ""
    is_ahead: bool = False


Callback = Callable[[Happening], object]
#: Of ours; it is also given the event of a copy.
Sink = Callable[[Happening, Any], object]


class Listeners:
    """Callbacks by kind, and what they have not been told yet.

    Attributes
    ----------
    any : bool
        Whether anybody wants to be told anything; asked before anything is put together.
    waiting : dict
        What callbacks have not been told yet, by the thread in which it happened.
    name_of : Callable
        Gives the name of a block by its number; the manager's.

    Notes
    -----
    What a callback itself causes, by operators of its own, is not told to callbacks: one that is
    told of operators would never end.
    """

    def __init__(self) -> None:
        self.any = False
        self.waiting: dict[int, list[Happening | Callable[[], None]]] = {}
        self.name_of: Callable[[int], str] = "b{}".format
        self._callbacks: dict[str, tuple[Callback, ...]] = {}
        #: Ours: told at once, possibly under a lock; quick, and calling nothing.
        self._sinks: tuple[Sink, ...] = ()
        self._calling: set[int] = set()
        self._lock = forking.Lock()

    # -- who ------------------------------------------------------------------------------------

    def on(self, kind: str, callback: Callback) -> None:
        """Call a function each time something of a kind has happened.

        Raises
        ------
        ConfigError
            There is no such kind, or the callback cannot be called.
        """
        _check(kind, callback)
        with self._lock:
            self._callbacks[kind] = (*self._callbacks.get(kind, ()), callback)
            self._settle()

    def off(self, kind: str, callback: Callback) -> None:
        """Call a function no more; ConfigError if it was not called before."""
        _check(kind, callback)
        with self._lock:
            left = list(self._callbacks.get(kind, ()))
            if callback not in left:
                raise ConfigError(
                    f"{name_of_callback(callback)} is not called for {kind!r}: there are "
                    f"{len(left)} other callbacks for that. Give off() what on() was given."
                )
            left.remove(callback)
            self._callbacks[kind] = tuple(left)
            self._settle()

    def add_sink(self, sink: Sink) -> None:
        """Tell something of ours at once; it runs under locks, is quick, and calls nothing."""
        with self._lock:
            self._sinks = (*self._sinks, sink)
            self._settle()

    def remove_sink(self, sink: Sink) -> None:
        """Take back what `add_sink` has done."""
        with self._lock:
            self._sinks = tuple(other for other in self._sinks if other != sink)
            self._settle()

    def wants(self, kind: str) -> bool:
        """Whether anybody wants to be told of a kind."""
        return bool(self._sinks or self._callbacks.get(kind))

    def _settle(self) -> None:
        self.any = bool(self._sinks) or any(self._callbacks.values())
        watch.want("callbacks", any(self._callbacks.get(kind) for kind in OF_OPERATORS))

    # -- what -----------------------------------------------------------------------------------

    def tell(self, happening: Happening, copy: Any = None) -> None:
        """Note what has happened, in any thread and under any lock; with the event of its copy."""
        for sink in self._sinks:
            sink(happening, copy)
        me = get_ident()
        if self._callbacks.get(happening.kind) and me not in self._calling:
            self.waiting.setdefault(me, []).append(happening)

    def later(self, call: Callable[[], None]) -> None:
        """Have a function of ours called where callbacks are; what it raises goes on."""
        self.waiting.setdefault(get_ident(), []).append(call)

    @lets_program_run
    def deliver(self) -> None:
        """Call the callbacks for what has happened in this thread (no lock held).

        Raises
        ------
        Exception
            What a callback has raised, with a note that names it (`not_torchs_own`); the others
            have been called.
        """
        me = get_ident()
        if me in self._calling:
            return  # what is to be said of what a callback has done is said at the next call
        mine = self.waiting.pop(me, None)
        if mine is None:
            return
        failed: list[Exception] = []
        self._calling.add(me)
        try:
            for happening in mine:
                if not isinstance(happening, Happening):
                    _say(happening, failed)
                    continue
                told = happening
                if happening.block_id:
                    told = happening._replace(name=self.name_of(happening.block_id))
                for callback in self._callbacks.get(happening.kind, ()):
                    _call(callback, told, failed)
        finally:
            self._calling.discard(me)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(_told_beside(other))
            raise not_torchs_own(failed[0])

    def deliver_beside(self, error: BaseException) -> None:
        """Call the callbacks before an error goes on; what they raise is noted on it."""
        if self.waiting:
            try:
                self.deliver()
            except Exception as other:
                error.add_note(_told_beside(other))


def _told_beside(error: Exception) -> str:
    return "; ".join((f"And {type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def not_torchs_own(error: Exception) -> Exception:
    """Return what to raise inside an operator for an error of the program's own functions.

    Torch takes a TypeError there for its own refusal of the operands, of which `a + b` makes an
    error that says no more than their classes.
    """
    if not isinstance(error, TypeError):
        return error
    other = RuntimeError(f"{type(error).__name__}: {error}")
    other.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    return other


def _say(call: Callable[[], None], failed: list[Exception]) -> None:
    try:
        call()
    except Exception as error:
        failed.append(error)


def _call(callback: Callback, happening: Happening, failed: list[Exception]) -> None:
    try:
        callback(happening)
    except Exception as error:
        error.add_note(
            f"in the callback {name_of_callback(callback)} for {happening.kind!r} of "
            f"{happening.name}; what it was told of has been done, and stays so"
        )
        failed.append(error)


def name_of_callback(callback: object) -> str:
    """Name a function as its author would."""
    module = getattr(callback, "__module__", "")
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    return f"{module}.{name}" if module else name


def _check(kind: str, callback: object) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"Nothing of the kind {kind!r} is told. " + did_you_mean(str(kind), KINDS),
            name=str(kind),
            known=KINDS,
            nearest=nearest(str(kind), KINDS),
        )
    if not callable(callback):
        raise ConfigError(f"A callback is a function of one argument, not {callback!r}.")
    if not takes(callback, ("happening",)):
        raise ConfigError(
            f"{name_of_callback(callback)} takes other arguments: a callback is called with one, "
            "the Happening."
        )


#: Of this process, as the manager is.
listeners = Listeners()
