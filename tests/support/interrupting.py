"""Errors that come at a chosen line of the package, one line after the other."""

from __future__ import annotations

import dis
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torchTensorRef

PACKAGE = str(Path(torchTensorRef.__file__).parent) + "/"
STRATEGIES = str(Path(torchTensorRef.__file__).parents[1] / "strategies") + "/"

#: A signal that has not been heard of after so long was swallowed, in seconds.
PATIENCE_S = 3.0

#: A line of a file, and whether it is about to run or its function about to return.
Place = tuple[str, int, str]


class Sent(BaseException):
    """What another thread sends with `PyThreadState_SetAsyncExc`."""


def sent() -> None:
    """Raise what another thread sends."""
    raise Sent


def no_memory() -> None:
    """Raise what Python raises where it finds no memory."""
    raise MemoryError


def ctrl_c() -> None:
    """Have the signal come here, for which a handler is called."""
    sys.settrace(None)
    signal.raise_signal(signal.SIGINT)


@functools.cache
def cannot_raise(code: CodeType) -> frozenset[int]:
    """Return where lines are told of and nothing of Python's is raised, so that nothing handles it.

    Blocks of `with` end there by themselves, or by `return`, before `__exit__` is called: Python
    looks for signals, and for what other threads send, after calls, and `__exit__` of a lock is C.
    And a line such as `try:` does nothing, nor does a generator where it is left at a `yield`, and
    a block of `with` begins as soon as `__enter__` returns.
    """
    found = list(dis.get_instructions(code))
    left = {"NOP", "YIELD_VALUE", *["RETURN_VALUE"] * (code.co_name == "__enter__")}
    ends = {one.offset for one in found if one.opname in left}
    for before, *nones in zip([found[0], *found], found, found[1:], found[2:], strict=False):
        if all(one.opname == "LOAD_CONST" and one.argval is None for one in nones):
            ends.add(nones[0].offset)
            if before.opname == "SWAP":  # what is returned
                ends.add(before.offset)
    return frozenset(ends)


@functools.cache
def is_ours(code: CodeType) -> bool:
    """Whether a function is one of the package's."""
    name = code.co_filename
    return name.startswith((PACKAGE, STRATEGIES)) and not name.endswith("interrupts.py")


@functools.cache
def lines_in(code: CodeType) -> frozenset[int | None]:
    """Return the lines of a function."""
    return frozenset(line for _, _, line in code.co_lines())


class Tracer:
    """Sees every line of the package that this thread passes, or does something at one place.

    Python calls it for each line that it follows: where it waits for one place, it follows only
    the functions that have it.
    """

    def __init__(self, act: Callable[[], None] | None = None, place: Place | None = None) -> None:
        self.passed: dict[Place, int] = {}
        self._act = act
        self._place = place
        self.has_acted = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace calls of functions of the package only."""
        code = frame.f_code
        if self._place is None:
            return self._note if is_ours(code) else None
        file, line, _ = self._place
        may_pass = code.co_filename == file and line in lines_in(code)
        return self._wait if may_pass and not self.has_acted else None

    def _note(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return") and frame.f_lasti not in cannot_raise(frame.f_code):
            place = (frame.f_code.co_filename, frame.f_lineno, event)
            self.passed[place] = self.passed.get(place, 0) + 1
        return self._note

    def _wait(self, frame: FrameType, event: str, arg: Any) -> Any:
        if (
            not self.has_acted
            and (frame.f_code.co_filename, frame.f_lineno, event) == self._place
            and frame.f_lasti not in cannot_raise(frame.f_code)
        ):
            self.has_acted = True
            assert self._act is not None
            self._act()
        return self._wait

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace this thread."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def lines_of(program: Callable[[], Any]) -> list[Place]:
    """Return the places of the package that a program passes, in a fixed order."""
    tracer = Tracer()
    with tracer.watching():
        program()
    return sorted(tracer.passed)


def interrupt(program: Callable[[], Any], act: Callable[[], None], place: Place) -> bool:
    """Run a program in which something happens at a place; whether it got there."""
    tracer = Tracer(act, place)
    try:
        with tracer.watching():
            program()
        # What is raised itself while a generator is closed, Python prints and forgets.
        if tracer.has_acted and act is ctrl_c:
            time.sleep(PATIENCE_S)  # it may come a moment later
            raise AssertionError(f"what came at {place} was swallowed")
    except (Sent, MemoryError, KeyboardInterrupt):
        pass
    return tracer.has_acted
