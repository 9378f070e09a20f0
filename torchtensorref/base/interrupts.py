"""Interrupts: a signal handler of the program's is called between our doings, never within.

A Python handler may run, and raise, between any two instructions of Python. Half a bookkeeping step
later nobody knows where bytes are. Kernels of plain torch are C++, which no handler interrupts. So
`Deferring` stands in for each handler: where the signal came while code of ours was at work, the
program's handler is called as soon as the program's own code goes on, which is where plain torch
would have let it run. Nothing on the way of an operator pays for that: the stack tells whether we
are at work, and Python's tracing tells when the program goes on.

Whoever is interrupted otherwise (`PyThreadState_SetAsyncExc`, a `MemoryError`) is repaired
afterwards: `memory/repair.py`.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from opcode import EXTENDED_ARG, opmap
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = [
    "Deferring",
    "defers",
    "holds_operands",
    "is_within",
    "is_within_another",
    "lets_program_run",
]

Function = TypeVar("Function", bound=Callable[..., Any])

#: The same piece of our code may be stuck, in a lock or a copy that never ends: a signal that comes
#: so long after the first one, in seconds, is no longer put off.
PATIENCE_S = 1.0

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
#: Of ours, and yet no reason to wait: these files run programs, and this one runs handlers.
_PROGRAMS = (
    os.path.join(_PACKAGE, "diagnostics") + os.sep,
    os.path.join(_PACKAGE, "__main__.py"),
    __file__,
)
#: Callbacks of dying objects: Python prints what is raised there and goes on.
_SWALLOWING_FILES = tuple(
    os.path.join(os.path.dirname(os.__file__), name) for name in ("weakref.py", "_weakrefset.py")
)
#: What torch's C++ calls in the middle of an operator, on the path in Python: what a handler
#: computed there would have no gradients.
_IN_OPERATORS = os.path.join("torch", "_library", "simple_registry.py")
#: After these, and at these, Python itself looks for signals.
_CALLS = frozenset(opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in opmap)
_LOOPS = frozenset(
    number
    for name, number in opmap.items()
    if "JUMP_BACKWARD" in name and not name.endswith("NO_INTERRUPT")  # Python 3.11: POP_JUMP_...
)
#: Functions of ours that run code of the program's, and hold nothing of ours halfway meanwhile.
_open: set[CodeType] = set()
#: Functions of ours that hold operands while they run.
_holding: set[CodeType] = set()


def lets_program_run(function: Function) -> Function:
    """Mark a function of ours in which the program's own code runs, and may be interrupted."""
    _open.add(function.__code__)
    return function


def holds_operands(function: Function) -> Function:
    """Mark a function of ours that holds operands while other code runs, and lets go of them."""
    _holding.add(function.__code__)
    return function


def is_within(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, is of ours and halfway through something.

    While a signal waits this is asked at each call of Python's, so what is looked for first is what
    is found then, at the least cost for each frame: below us torch may be importing modules.
    """
    above = frame
    while above is not None:
        name = above.f_code.co_filename
        if name.startswith(_PACKAGE):
            if above is not frame and above.f_code in _open:
                break
            if not name.startswith(_PROGRAMS):
                return True
        above = above.f_back
    return next(_halfway(frame), None) is not None


def is_within_another(frame: FrameType | None) -> bool:
    """Whether a frame that called the innermost run of frames of ours holds something of ours.

    Then it goes on holding that, whatever becomes of the innermost.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None:
        if frame.f_code in _holding:
            return True
        frame = frame.f_back
    return False


def _outermost(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of ours that has to end before the program is itself again."""
    last = deque(_halfway(frame), maxlen=1)
    return last[0] if last else None


def _halfway(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames that have to end before the program is itself again, innermost first."""
    innermost = frame
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith(_PACKAGE):
            if frame is not innermost and code in _open:
                break
            if not name.startswith(_PROGRAMS):
                yield frame
        elif name.endswith(_IN_OPERATORS) or _is_callback(code):
            yield frame
        frame = frame.f_back


def _is_callback(code: CodeType) -> bool:
    """Whether Python prints what is raised there, and goes on."""
    return (
        code.co_name == "__del__"
        or code.co_filename in _SWALLOWING_FILES
        or any(getattr(callback, "__code__", None) is code for callback in gc.callbacks)
    )


def _is_swallowed_in(frame: FrameType | None) -> bool:
    """Whether a frame is part of a callback out of which no error comes."""
    while frame is not None:
        if _is_callback(frame.f_code):
            return True
        frame = frame.f_back
    return False


class _Noted:
    """The signals that wait until the program goes on, and the tracing that tells us."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[..., Any], int]] = deque()
        #: The piece of our code that was interrupted first, by its `id`, and when. The frame itself
        #: would hold all that it and its callers hold, where nobody tells us that it has ended: a
        #: debugger may have taken the tracing. Another frame at its place is not found stuck before
        #: a signal has waited for long, and then it is no worse a piece to be left.
        self.within = 0
        self.since_s = 0.0
        self.is_delivering = False
        self.tracer: Any = None

    def is_stuck_in(self, section: FrameType) -> bool:
        """Whether a signal has waited for the very same call of ours for long."""
        return self.within == id(section) and time.monotonic() - self.since_s > PATIENCE_S

    def forget(self, signum: int) -> None:
        """Drop what has waited for the same signal: it is about to be handled."""
        self.waiting = deque(noted for noted in self.waiting if noted[1] != signum)
        if not self.waiting:
            self.within = 0

    def note(self, handler: Callable[..., Any], signum: int, section: FrameType) -> None:
        """Call a handler when the frame that has called ours goes on."""
        frame = section.f_back
        if frame is None or self.is_delivering or frame.f_code.co_filename.startswith(_PACKAGE):
            _send_again(handler, signum)  # a moment later the program may be itself
            return
        self.waiting.append((handler, signum))
        if self.within != id(section):
            self.within, self.since_s = id(section), time.monotonic()
        self.watch(frame)

    def watch(self, frame: FrameType) -> None:
        """Be told when a frame goes on, beside a debugger that is told already."""
        tracer = sys.gettrace()
        if tracer is None or tracer == self._on_call:
            tracer = self._on_call
        else:
            self.tracer = tracer
        if isinstance(frame.f_trace, _Watched):
            frame.f_trace.begin(frame)
        else:
            frame.f_trace = _Watched(frame)
            frame.f_trace_opcodes = True
        sys.settrace(tracer)  # after that, or newer Pythons tell of no instructions

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        """Trace no frame that is entered meanwhile, but see that the program has gone on."""
        if not is_within(frame) and not self._is_waited_for(frame):
            self.deliver(frame)

    def _is_waited_for(self, frame: FrameType | None) -> bool:
        """Whether a frame is part of a call that should end first.

        That is the call which is watched (a backward pass calls Python), and what puts something
        back (`no_grad`).
        """
        while frame is not None:
            if frame.f_code.co_name in ("__enter__", "__exit__"):
                return True
            if isinstance(frame.f_trace, _Watched):
                return frame.f_trace.is_leaving or frame.f_trace.place == frame.f_lasti
            frame = frame.f_back
        return False

    def deliver(self, frame: FrameType) -> None:
        """Call the handlers that have waited, in their order."""
        self.within = 0
        tracer, self.tracer = self.tracer, None
        if sys.gettrace() == self._on_call:
            sys.settrace(None)
        self.is_delivering = True
        try:
            while self.waiting:
                handler, signum = self.waiting.popleft()
                handler(signum, frame)
        except BaseException:
            # Python stops all tracing where a tracer raises: a debugger goes on after that.
            if tracer is not None and sys.getprofile() is None:
                sys.setprofile(_Resumed(tracer))
            raise
        finally:
            self.is_delivering = False
            while self.waiting:
                _send_again(*self.waiting.popleft())


class _Watched:
    """The local tracing of a frame of the program's, until Python would look for signals in it.

    It does so after calls, and where loops begin again. Anywhere else what a handler raises would
    pass between a lock that is taken and the block that gives it back. So it would behind the call
    in `with lock: return call()`: Python looks while it is still in the block, and we are told when
    it is on its way out. Then we wait until the frame has returned, with all that it puts back.
    """

    def __init__(self, frame: FrameType) -> None:
        self._before = frame.f_trace
        self._opcodes = frame.f_trace_opcodes
        self.begin(frame)

    def begin(self, frame: FrameType) -> None:
        """Note where the frame is: while it stays there, the same call goes on."""
        self._last, self.place = _place_of(frame), frame.f_lasti
        #: Whether it is on its way out of a block, and of the frame.
        self.is_leaving = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Go with the frame: to its next safe place, or into the one that has called it."""
        last, now, code = self._last, _place_of(frame), frame.f_code
        if event == "exception":
            self._last, self.is_leaving = -1, False
        elif event == "return":
            self._leave(frame)
            if frame.f_back is not None:
                _noted.watch(frame.f_back)
        elif event == "opcode" and not self.is_leaving:
            self._last, self.place = now, -1
            has_called = last >= 0 and code.co_code[last] in _CALLS
            self.is_leaving = has_called and not _is_still_in_block(code, last, now)
            if not self.is_leaving and (has_called or code.co_code[now] in _LOOPS):
                self._leave(frame)
                _noted.deliver(frame)
        return frame.f_trace

    def _leave(self, frame: FrameType) -> None:
        frame.f_trace, frame.f_trace_opcodes = self._before, self._opcodes


def _place_of(frame: FrameType) -> int:
    """Return the place of the instruction that a frame is executing, or about to execute."""
    code, place = frame.f_code.co_code, frame.f_lasti
    while place > 0 and not code[place]:  # what an instruction notes behind itself
        place -= 2
    while code[place] == EXTENDED_ARG:  # and what large arguments put before it
        place += 2
    return place


def _is_still_in_block(code: CodeType, last: int, now: int) -> bool:
    """Whether who handles an error at one instruction also handles what is raised at another.

    So it is within a block that begins there, too: behind the call of an `__enter__`, say, which
    is a call like any other from Python 3.14 on.
    """
    block, handler = _handler_at(code, last), _handler_at(code, now)
    while handler not in (block, -1):
        handler = _handler_at(code, handler)  # an error in there goes on to the next one around it
    return handler == block


def _handler_at(code: CodeType, place: int) -> int:
    """Return where Python goes on after an error at an instruction; -1 for out of the frame.

    The table is that of CPython's `Objects/exception_table_notes.txt`: for each stretch its start,
    its length, where it goes on and how much stays, as numbers of six bits a byte.
    """
    table = iter(code.co_exceptiontable)
    for byte in table:
        numbers: list[int] = []
        while len(numbers) < 4:
            number = byte & 63
            while byte & 64:
                byte = next(table)
                number = number << 6 | byte & 63
            numbers.append(number)
            byte = next(table) if len(numbers) < 4 else 0
        start, length, target, _ = numbers
        if 2 * start <= place < 2 * (start + length):
            return 2 * target
    return -1


class _Resumed:
    """A profile function that takes up tracing again, once Python has stopped it."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        sys.setprofile(None)
        sys.settrace(self._tracer)


_noted = _Noted()
_interrupt_main: Callable[..., Any] = _thread.interrupt_main


def _send_again(handler: Callable[..., Any], signum: int) -> None:
    """Have Python call the handler once more, soon: a thread of C sends the signal to it."""
    try:
        if hasattr(signal, "pthread_kill"):  # a real one also wakes who waits in the system
            ident = threading.main_thread().ident or 0
            _thread.start_new_thread(signal.pthread_kill, (ident, signum))
        else:
            _thread.start_new_thread(_interrupt_main, (signum,))
    except RuntimeError:  # Python ends, or the system has no thread to spare
        handler(signum, None)


class Deferring:
    """What Python calls for a signal in place of the program's handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> Any:
        """Call the handler now, or once the code of ours that was interrupted has ended."""
        section = _outermost(frame)
        if section is None:
            return self.handler(signum, frame)
        if _noted.is_stuck_in(section) and not _is_swallowed_in(frame):
            _noted.forget(signum)
            return self.handler(signum, frame)
        if frame is not None and (frame.f_code in _open or _noted.is_stuck_in(section)):
            _send_again(self.handler, signum)  # a few instructions, before and after the program's
        else:
            _noted.note(self.handler, signum, section)
        return None


def defers(handler: Any) -> Any:
    """Return what stands in for a handler; settings that are no function stay what they are."""
    if isinstance(handler, (Deferring, signal.Handlers, int)) or not callable(handler):
        return handler
    return Deferring(handler)
