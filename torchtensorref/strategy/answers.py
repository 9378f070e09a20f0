"""What a strategy says, checked by one rule before anybody acts on it.

* An answer that cannot be used is left out, and the built-in one is taken instead. A warning names
  strategy, method and answer, once for each method.
* A method that raises ends the operator that is about to run with `StrategyError`: nothing has been
  changed, so the program may catch it and go on. Where no operator can be refused any more, since
  it has run, what the method raised is an answer that cannot be used.

Block numbers need not exist: by the time an answer is carried out, a block may be gone.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from reprlib import Repr
from types import GeneratorType
from typing import Any, NoReturn, TypeVar

from ..base.errors import InvariantError, StrategyError, did_you_mean
from ..base.listeners import listeners
from .contract import (
    PERSISTENT_AFTER,
    Access,
    Birth,
    BlockSnapshot,
    Death,
    DeviceSnapshot,
    OpSnapshot,
    Prefetch,
    Strategy,
    hears_where,
)
from .oldest_first import OldestFirst

T = TypeVar("T")

#: What each method has to answer, and what is done where it does not.
EXPECTED = {
    "place": ("the name of a device in use", "the operator runs where the manager would run it"),
    "victims": ("block numbers", "the least recently used blocks are given back"),
    "after_operator": ("block numbers", "nothing is given back"),
    "prefetch": ("`Prefetch(block_id, victims)`s", "nothing is fetched ahead"),
    "write_back": ("block numbers", "nothing is written back early"),
    "expects": ("block numbers", "each use is told by itself"),
    "on_birth": ("a number of operators", f"it is taken for {PERSISTENT_AFTER}"),
    "on_evict": ("nothing", "the program goes on"),
    "on_foretold": ("nothing", "it learns as the program runs"),
    "on_death": ("nothing", "the program goes on"),
    "on_prefetch": ("nothing", "the program goes on"),
}

_brief = Repr()
_brief.maxother = _brief.maxstring = 80


class UnusableAnswerError(Exception):
    """Internal: an answer is not of the kind that was asked for; the text says more, or nothing."""


class CheckedStrategy:
    """A strategy, whose answers can be used whatever it says. One thread at a time.

    Parameters
    ----------
    strategy : Strategy
        One that keeps the contract as far as that can be seen before it is asked (`choice.py`).
    """

    def __init__(self, strategy: Strategy) -> None:
        kind = type(strategy)
        self.strategy = strategy
        self.watches_accesses = bool(strategy.watches_accesses)
        #: Whether it says where operators run.
        self.places = kind.place is not Strategy.place
        #: Whether it does so only where operators may be computed at home for their time's sake.
        self.mixes_devices = bool(strategy.mixes_devices)
        #: Whether it uses every accelerator there is.
        self.spreads = bool(strategy.spreads)
        #: Whether it is told which of them has made a result.
        self.hears_where = hears_where(strategy)
        #: Whether it has an order of its own for what goes first.
        self.names_victims = kind.victims is not OldestFirst.victims
        #: Whether it is told of uses.
        self.hears_uses = kind.on_access is not Strategy.on_access
        #: Whether it evicts what an operator has used as soon as it has ended.
        self.gives_back = kind.after_operator is not Strategy.after_operator
        #: Whether it asks for copies before they are needed.
        self.looks_ahead = (
            kind.write_back is not Strategy.write_back or kind.prefetch is not Strategy.prefetch
        )
        #: Whether it says which uses need not be told one by one.
        self.expects_uses = kind.expects is not Strategy.expects
        #: Whether it follows what leaves the device.
        self.hears_evictions = kind.on_evict is not Strategy.on_evict
        #: Whether it is told what is gone.
        self.hears_deaths = kind.on_death is not Strategy.on_death
        self._warned: set[str] = set()

    # -- asked ----------------------------------------------------------------------------------

    def place(self, op: OpSnapshot, known: Iterable[str]) -> str:
        """Return where an operator is to run: one of the `known` names of devices.

        Raises
        ------
        StrategyError
            It raised.
        """

        def read(answer: Any) -> str:
            if not isinstance(answer, str):
                raise UnusableAnswerError
            name = str.__str__(answer)
            if name not in known:
                raise UnusableAnswerError(did_you_mean(name, known))
            return name

        return self._ask("place", (op,), read, op.default_device, may_fail=True)

    def victims(
        self,
        device: DeviceSnapshot,
        candidates: Sequence[BlockSnapshot],
        need_nbytes: int,
        count: int,
        nbytes_of: Callable[[int], int],
        *,
        may_fail: bool,
    ) -> list[int]:
        """Return what goes first where room is needed: no more than it takes.

        Parameters
        ----------
        count : int
            How many blocks live.
        nbytes_of : callable
            The bytes that a block frees; 0 for what is no candidate.
        may_fail : bool
            The operator that needs the room has not run yet.

        Raises
        ------
        StrategyError
            It raised, and `may_fail`.
        """

        def read(answer: Any) -> list[int]:
            return block_numbers(answer, count, nbytes_of, need_nbytes)

        return self._ask("victims", (device, candidates, need_nbytes), read, [], may_fail=may_fail)

    def after_operator(self, device: DeviceSnapshot, used: Sequence[BlockSnapshot]) -> list[int]:
        """Return what an operator has used and is to be given back at once."""
        return self._ask("after_operator", (device, used), _numbers_up_to(len(used)), [])

    def write_back(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot], count: int
    ) -> list[int]:
        """Return what to copy home early; `count` blocks live."""
        return self._ask("write_back", (device, resident), _numbers_up_to(count), [])

    def prefetch(
        self, device: DeviceSnapshot, resident: Sequence[BlockSnapshot], count: int
    ) -> list[Prefetch]:
        """Return what to fetch ahead; `count` blocks live."""

        def read(answer: Any) -> list[Prefetch]:
            wishes: list[Prefetch] = []

            def take(wish: Any) -> bool:
                if not isinstance(wish, Prefetch):
                    raise UnusableAnswerError
                victims = tuple(block_numbers(wish.victims, count))
                wishes.append(Prefetch(block_number(wish.block_id), victims))
                return True

            _read_items(answer, count, take)
            return wishes

        return self._ask("prefetch", (device, resident), read, [])

    def expects(self, device: DeviceSnapshot, count: int) -> list[int]:
        """Return of which blocks uses need not be told one by one; `count` blocks live."""
        return self._ask("expects", (device,), _numbers_up_to(count), [])

    # -- told -----------------------------------------------------------------------------------

    def on_access(self, access: Access) -> None:
        """Tell of a use by an operator that is about to run.

        Raises
        ------
        StrategyError
            It raised.
        """
        try:
            self.strategy.on_access(access)
        except MemoryError:
            raise
        except Exception as error:
            self._fail("on_access", error)

    def on_foretold(self, events: Sequence[Access | Birth | Death]) -> None:
        """Tell what the program is about to use, make and let go of."""
        self._ask("on_foretold", (events,), _anything, None)

    def on_birth(self, block_id: int, nbytes: int, place: int, device: str) -> int:
        """Tell of a result before the next operator; return after how many it is persistent.

        Raises
        ------
        StrategyError
            It raised.
        """
        arguments = (block_id, nbytes, place, *((device,) if self.hears_where else ()))
        return self._ask("on_birth", arguments, block_number, PERSISTENT_AFTER, may_fail=True)

    def on_evict(self, block_id: int) -> None:
        """Tell that a block has left the device."""
        self._ask("on_evict", (block_id,), _anything, None)

    def on_death(self, block_id: int) -> None:
        """Tell that a block is gone."""
        self._ask("on_death", (block_id,), _anything, None)

    def on_prefetch(self, block_id: int, nbytes: int) -> None:
        """Tell that a copy it asked for has been issued."""
        self._ask("on_prefetch", (block_id, nbytes), _anything, None)

    # -- the rule -------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        arguments: tuple[Any, ...],
        read: Callable[[Any], T],
        built_in: T,
        *,
        may_fail: bool = False,
    ) -> T:
        answer = None
        try:
            answer = getattr(self.strategy, method)(*arguments)
            return read(answer)
        except (InvariantError, MemoryError):
            raise  # our own fault, since it was looking at what the books say; or nobody's
        except UnusableAnswerError as more:
            self._warn(method, f"answered {_brief.repr(answer)} to `{method}`", str(more))
        except Exception as error:
            if may_fail:
                self._fail(method, error)
            self._warn(method, f"raised {_brief.repr(error)} in `{method}`", _place_of(error))
        return built_in

    def _fail(self, method: str, error: Exception) -> NoReturn:
        name, where = self.strategy.name, file_of(self.strategy)
        raise StrategyError(
            f"The strategy {name!r} ({where}) raised {_brief.repr(error)} in `{method}`. The "
            'operator has not run. Correct it, or write `tensorsManager.strategy = "lru"`.',
            strategy=name,
            where=where,
            method=method,
            answer=_brief.repr(error),
        ) from error

    def _warn(self, method: str, what: str, more: str) -> None:
        if method in self._warned:
            return
        self._warned.add(method)
        expected, instead = EXPECTED[method]
        code = getattr(getattr(type(self.strategy), method), "__code__", None)
        say = partial(
            warnings.warn_explicit,
            f"The strategy {self.strategy.name!r} {what}{f' ({more})' if more else ''}, which has "
            f"to answer {expected}: {instead}, now and from now on wherever it is so. Said once.",
            RuntimeWarning,
            file_of(self.strategy),
            code.co_firstlineno if code is not None else 1,
        )
        listeners.later(say)  # when no operator is halfway: a program may make an error of it


# -- reading ------------------------------------------------------------------------------------


def block_number(item: Any) -> int:
    """Return a number as a plain integer, also where it is one of numpy's."""
    if type(item) is int:
        return item
    try:
        return int.__index__(index(item))
    except TypeError:
        raise UnusableAnswerError from None


def block_numbers(
    answer: Any,
    count: int,
    nbytes_of: Callable[[int], int] | None = None,
    need_nbytes: int = 0,
) -> list[int]:
    """Read block numbers, each once, in order: all of them, or until enough bytes are named.

    Parameters
    ----------
    answer : iterable of int
    count : int
        How many blocks there are to be named.
    nbytes_of, need_nbytes : optional
        The bytes that each block frees; nothing is read beyond those that suffice.
    """
    if nbytes_of is None and type(answer) in (list, tuple) and {int}.issuperset(map(type, answer)):
        return list(dict.fromkeys(answer))  # what most answers are
    named: dict[int, None] = {}
    left_nbytes = need_nbytes

    def take(item: Any) -> bool:
        nonlocal left_nbytes
        number = block_number(item)
        if nbytes_of is not None and number not in named:
            left_nbytes -= nbytes_of(number)
        named[number] = None
        return nbytes_of is None or left_nbytes > 0

    _read_items(answer, count, take)
    return list(named)


def _read_items(answer: Any, count: int, take: Callable[[Any], bool]) -> None:
    """Give the items of an answer to `take`, as long as it wants more and they can have a meaning.

    Blocks that are gone, and some that are named again, are read over; one that goes on and on is
    no answer.
    """
    try:
        iterator = iter(answer)
    except TypeError:
        raise UnusableAnswerError from None
    left = 2 * count + 64
    try:
        for item in iterator:
            if not left:
                raise UnusableAnswerError(
                    f"more than {2 * count + 64} items where {count} could be"
                )
            left -= 1
            if not take(item):
                return
    finally:
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _numbers_up_to(count: int) -> Callable[[Any], list[int]]:
    return lambda answer: block_numbers(answer, count)


def _anything(_: Any) -> None:
    """Read an answer that nobody wants."""


def file_of(strategy: Any) -> str:
    """Return the file that defines a strategy, or a class of them."""
    try:
        return inspect.getfile(strategy if inspect.isclass(strategy) else type(strategy))
    except (TypeError, OSError):
        return "unknown file"


def _place_of(error: Exception) -> str:
    """Return the line that raised."""
    traceback: Any = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


def mind_of(strategy: Strategy, mind: dict[str, Any] | None = None) -> Any:
    """Return a copy of all that a strategy keeps, or of what it kept once; None without."""
    try:
        return copy.deepcopy(vars(strategy) if mind is None else mind, {id(strategy): strategy})
    except Exception:
        return None  # it holds what cannot be copied: it has to cope
