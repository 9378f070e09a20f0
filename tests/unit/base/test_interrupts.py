"""Handlers of signals wait for our code to end, and for nothing else."""

# ruff: noqa: PT012 (where in the block it is raised is the question)

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchTensorRef.base import interrupts
from torchTensorRef.base.interrupts import Deferring, is_within

ALARM = signal.SIGUSR1


class Told(Exception):
    """What the handlers of these tests raise."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(ALARM)
    yield
    signal.signal(ALARM, before)


def ours(source: str, file: str = "", **names: Any) -> dict[str, Any]:
    """Run source as if it stood in a file of the package, or in another one."""
    code = compile(source, file or interrupts._PACKAGE + "memory/imagined.py", "exec")
    module = types.ModuleType("imagined")
    vars(module).update(signal=signal, ALARM=ALARM, time=time, **names)
    exec(code, vars(module))
    return vars(module)


HALFWAY = """
def section(log):
    log.append("begun")
    signal.raise_signal(ALARM)
    log.append("ended")
"""


def test_a_handler_waits_for_our_code_and_raises_into_the_program():
    log: list[str] = []

    def handler(signum: int, frame: Any) -> None:
        log.append("called")
        assert (
            frame.f_code.co_name == "test_a_handler_waits_for_our_code_and_raises_into_the_program"
        )
        raise Told

    signal.signal(ALARM, handler)
    section = ours(HALFWAY)["section"]
    with pytest.raises(Told):
        section(log)
        log.append("the program went on")
    assert log == ["begun", "ended", "called"]
    assert sys.gettrace() is None


def test_a_handler_waits_for_the_python_that_torch_calls_within_an_operator():
    """There autograd is shut out: a handler that took a gradient had none."""
    log: list[str] = []
    signal.signal(ALARM, lambda signum, frame: log.append("called"))
    file = sys.modules["torch._library.simple_registry"].__file__
    ours(HALFWAY, file)["section"](log)
    assert log == ["begun", "ended", "called"]


def test_a_handler_that_returns_lets_the_program_go_on():
    log: list[str] = []
    signal.signal(ALARM, lambda signum, frame: log.append("called"))
    ours(HALFWAY)["section"](log)
    log.append("the program goes on")
    assert log == ["begun", "ended", "called", "the program goes on"]
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_outside_of_our_code_a_handler_is_called_at_once():
    log: list[str] = []
    signal.signal(ALARM, lambda signum, frame: log.append("called"))
    signal.raise_signal(ALARM)
    assert log == ["called"]


def test_the_error_that_ends_our_code_reaches_the_program_first():
    seen: list[type] = []

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    section = ours("def section():\n    signal.raise_signal(ALARM)\n    raise ValueError")[
        "section"
    ]
    with pytest.raises(Told):
        try:
            section()
        except ValueError as error:
            seen.append(type(error))
            raise
    assert seen in ([], [ValueError])
    assert sys.exc_info() == (None, None, None)


def test_a_handler_is_called_where_the_program_does_not_catch_the_error():
    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    section = ours("def section():\n    signal.raise_signal(ALARM)\n    raise ValueError")[
        "section"
    ]

    def program() -> None:
        section()

    with pytest.raises(Told):
        try:
            program()
        except ValueError:
            time.sleep(0)


def test_a_lock_of_the_programs_is_given_back():
    lock = threading.Lock()

    class Summand:
        __add__ = ours("def add(self, other):\n    signal.raise_signal(ALARM)\n    return 1")["add"]

    def program() -> Any:
        with lock:
            return Summand() + 1

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    with pytest.raises(Told):
        program()
    assert not lock.locked()


class Kept:
    """What a block puts back, in C and in Python."""

    def __init__(self, section: Any) -> None:
        self.section = section
        self.lock, self.other = threading.Lock(), threading.Lock()
        self.put_back: list[str] = []

    def note(self, name: str) -> None:
        self.put_back.append(name)

    def in_a_block(self) -> Any:
        with self.lock:
            return self.section([])

    def in_two_blocks(self) -> Any:
        with self.lock, self.other:
            return self.section([])

    def in_a_loop(self) -> Any:
        for _ in range(3):
            with self.lock:
                return self.section([])

    def with_a_last_word(self) -> Any:
        try:
            return self.section([])
        finally:
            self.note("first")
            for name in ("second", "third"):
                self.note(name)

    def behind_another_call(self) -> Any:
        with self.other:
            return self.in_a_block()

    def without_gradients(self) -> Any:
        with torch.no_grad():
            return self.section([])


@pytest.mark.parametrize("name", [name for name in vars(Kept) if name.startswith(("in", "w", "b"))])
def test_what_a_program_puts_back_when_it_returns_is_put_back(name):
    """Python looks for signals while it is still in the block, and we are told afterwards."""

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    kept = Kept(ours(HALFWAY)["section"])
    with pytest.raises(Told):
        getattr(kept, name)()
    assert not kept.lock.locked()
    assert not kept.other.locked()
    assert kept.put_back == (["first", "second", "third"] if name == "with_a_last_word" else [])
    assert torch.is_grad_enabled()
    assert sys.gettrace() is None


class Begun:
    """A block that code of ours begins."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    __enter__ = ours("def enter(self):\n    signal.raise_signal(ALARM)")["enter"]

    def __exit__(self, *_: object) -> None:
        self.log.append("ended")


def test_a_handler_is_called_in_the_block_that_our_code_has_begun():
    """And does not wait until the program has left the function that the block is in."""
    log: list[str] = []

    def handler(signum: int, frame: Any) -> None:
        raise Told

    def program() -> None:
        with Begun(log):
            len(log)  # before Python 3.14 it is told behind this
            log.append("the program went on")

    signal.signal(ALARM, handler)
    with pytest.raises(Told):
        program()
    assert log == ["ended"]


class Summand:
    """What a loop adds: code of ours without a call in the loop."""

    def __init__(self) -> None:
        self.count = 0

    __add__ = ours(
        "def add(self, other):\n"
        "    self.count += other\n"
        "    if self.count == 5: signal.raise_signal(ALARM)\n"
        "    return self"
    )["add"]


@pytest.mark.parametrize("loop", ["while summand.count < 1000", "for _ in range(1000)"])
@pytest.mark.parametrize("length", [1, 300], ids=["short", "long"])
def test_a_handler_is_called_where_a_loop_begins_again(loop, length):
    """A jump over a long loop is an instruction with another one before it."""

    def handler(signum: int, frame: Any) -> None:
        raise Told

    lines = ["    summand = summand + 1", *["    a = summand"] * length]
    program = ours("\n".join(["def program(summand):", f"  {loop}:", *lines]), __file__)["program"]
    signal.signal(ALARM, handler)
    summand = Summand()
    with pytest.raises(Told):
        program(summand)
    assert summand.count == 5


def test_several_signals_are_handled_in_their_order():
    log: list[int] = []
    other = signal.getsignal(signal.SIGUSR2)
    signal.signal(ALARM, lambda signum, frame: log.append(signum))
    signal.signal(signal.SIGUSR2, lambda signum, frame: log.append(signum))
    ours("def section():\n    signal.raise_signal(signal.SIGUSR2)\n    signal.raise_signal(ALARM)")[
        "section"
    ]()
    assert log == [signal.SIGUSR2, ALARM]
    signal.signal(signal.SIGUSR2, other)


def test_what_a_handler_raises_does_not_swallow_the_next_signal():
    log: list[int] = []
    other = signal.getsignal(signal.SIGUSR2)

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    signal.signal(signal.SIGUSR2, lambda signum, frame: log.append(signum))
    section = ours(
        "def section():\n    signal.raise_signal(ALARM)\n    signal.raise_signal(signal.SIGUSR2)"
    )["section"]
    with pytest.raises(Told):
        section()
    deadline = time.monotonic() + 5
    while not log and time.monotonic() < deadline:
        time.sleep(0.001)
    assert log == [signal.SIGUSR2]
    signal.signal(signal.SIGUSR2, other)


def test_our_code_that_is_stuck_is_left_by_a_second_signal(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.05)

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    section = ours(
        "def section():\n"
        "    signal.raise_signal(ALARM)\n"
        "    while True:\n"
        "        time.sleep(0.06)\n"
        "        signal.raise_signal(ALARM)\n"
    )["section"]
    with pytest.raises(Told):
        section()
    assert not interrupts._noted.waiting
    assert not interrupts._noted.within


def test_a_signal_that_nobody_delivers_holds_nothing_of_the_program():
    class Thing:
        """What a program has in hand."""

    signal.signal(ALARM, lambda signum, frame: None)
    section = ours(HALFWAY + "    stop()", stop=stop)["section"]

    def program() -> weakref.ref[Thing]:
        thing = Thing()
        section([])
        return weakref.ref(thing)

    try:
        thing = program()
        assert interrupts._noted.waiting
        assert thing() is None
    finally:
        interrupts._noted.forget(ALARM)


def stop() -> None:
    """Take the tracing away, as a debugger does that begins."""
    frame = sys._getframe(2)
    frame.f_trace, frame.f_trace_opcodes = None, False
    sys.settrace(None)


def test_what_a_handler_raises_in_a_finalizer_is_not_lost(recwarn):
    log: list[str] = []

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(ALARM)
            log.append("finalized")

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    thing = Finalized()
    with pytest.raises(Told):
        del thing
        time.sleep(0)
    assert log == ["finalized"]
    assert not recwarn.list


def test_what_a_handler_raises_in_a_callback_of_the_collector_is_not_lost(recwarn):
    log: list[str] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":  # a second one would come again later, by itself
            signal.raise_signal(ALARM)
        log.append(phase)

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    gc.disable()  # but for the one below
    gc.callbacks.append(collecting)
    try:
        with pytest.raises(Told):
            gc.collect()
            time.sleep(0)
    finally:
        gc.callbacks.remove(collecting)
        gc.enable()
    assert log == ["start", "stop"]
    assert not recwarn.list


def test_the_programs_own_code_within_ours_is_interrupted():
    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    module = ours(
        "@lets_program_run\ndef run(program):\n    return program()",
        lets_program_run=interrupts.lets_program_run,
    )
    log: list[str] = []

    def program() -> None:
        signal.raise_signal(ALARM)
        log.append("went on")

    with pytest.raises(Told):
        module["run"](program)
    assert log == []


def test_a_debugger_goes_on_after_an_interrupt():
    seen: list[str] = []

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return None

    def later() -> None:
        """Be seen."""

    def handler(signum: int, frame: Any) -> None:
        raise Told

    signal.signal(ALARM, handler)
    section = ours(HALFWAY)["section"]
    sys.settrace(tracer)
    try:
        try:
            section([])
        except Told:
            later()  # Python tells a profiler of it later than a debugger
            later()
        is_back = sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert is_back
    assert seen.count("later") == 1


def test_the_program_sees_the_handlers_that_it_has_set():
    def handler(signum: int, frame: Any) -> None:
        """Do nothing."""

    before = signal.getsignal(ALARM)
    assert not isinstance(before, Deferring)
    assert signal.signal(ALARM, handler) is before
    assert signal.getsignal(ALARM) is handler
    assert signal.signal(ALARM, signal.SIG_IGN) is handler
    assert signal.signal(ALARM, handler=signal.SIG_DFL) is signal.SIG_IGN
    # A shell starts what it runs in the background with this one ignored.
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)


def test_within_is_said_of_frames_of_ours_only():
    assert not is_within(sys._getframe())
    assert ours("def ask(ask, frame):\n    return ask(frame())")["ask"](is_within, sys._getframe)


def test_a_frame_of_ours_is_told_without_a_walk_through_its_callers():
    """While a signal waits this is asked at every call: an operator in blocks took far longer."""

    class Frame:
        f_code = ours("def work():\n    return 1")["work"].__code__

        @property
        def f_back(self) -> types.FrameType:
            raise AssertionError("its callers were asked for")

    assert is_within(Frame())
