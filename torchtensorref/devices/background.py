"""Tasks for a background thread, all of them done before the interpreter ends.

A daemon thread that is inside torch when the interpreter ends is unwound through functions of C++,
and the process is aborted ("terminate called without an active exception"). So these threads are
waited for, with all that was queued, before anything is taken down.

The pools of the standard library would do that, too, but end before threads of the program that go
on without its main thread; and their `submit` takes a lock of the whole process, in which a
finalizer that needs a copy would wait for itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["Background", "ask_aside", "at_start", "begin_thread"]

Task = Callable[[], None]
T = TypeVar("T")


#: What each thread of ours does first, by the kind of driver that has to be told of it.
at_start: dict[str, Callable[[], None]] = {}


def begin_thread() -> None:
    """Tell drivers that this thread is one of ours; to be called first in it."""
    for tell in list(at_start.values()):
        tell()


def ask_aside(question: Callable[[], T]) -> T:
    """Ask a driver for what it may refuse, in a thread that ends with the answer.

    The runtimes of cuda and hip remember a refusal for the thread that has asked, and torch takes
    it there for an error of the next kernel. Nothing that torch wraps makes them forget it.
    Where no thread can be started, the caller asks. What the question raises is raised here.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    def begin_and_ask() -> None:
        try:
            begin_thread()
        except BaseException as error:
            answer.set_exception(error)
        else:
            ask()

    thread = threading.Thread(target=begin_and_ask, name="torchTensorRef-ask")
    try:
        thread.start()
    except RuntimeError:  # there are too many, or the interpreter ends
        ask()
    else:
        thread.join()
    return answer.result()


class Background:
    """One thread that does tasks in their order, one after the other.

    It is started by the first task and ends with its owner. A task that raises is reported as a
    thread that died is (`threading.excepthook`), and the next one is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker = self._new_worker()

    def _new_worker(self) -> _Worker:
        worker = _Worker(self._name)
        weakref.finalize(self, worker.end).atexit = False
        return worker

    @property
    def is_over(self) -> bool:
        """Whether the interpreter is ending, so that there are no threads any more."""
        return _Worker.are_over

    def submit(self, task: Task) -> None:
        """Queue a task and return at once. Any finalizer may call this, at any moment.

        Where no thread can be started (the interpreter ends, or a limit of the system), the task is
        done before this returns, or by the caller that is doing those before it.
        """
        if self._worker.process != os.getpid():
            self._worker = self._new_worker()  # a forked child has none of the threads
        self._worker.submit(task)


class _Worker:
    """What the thread and those who queue share."""

    #: Those whose threads have not ended.
    at_work: set[_Worker] = set()  # noqa: RUF012 (of the class)
    are_over = False

    def __init__(self, name: str) -> None:
        self.process = os.getpid()
        self._name = name
        self._tasks: deque[Task] = deque()
        #: One item for each task, and a True to end. Unlike a lock, it may be entered again.
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._at_it = threading.Lock()
        self._starting = threading.RLock()
        self._is_starting = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        if self._has_thread():
            self._bell.put(False)
        if self.are_over or self._thread is None:
            self._do_all()

    def _has_thread(self) -> bool:
        """Start the thread if need be. A finalizer may come here while it is being started."""
        if self._thread is None and not self.are_over:
            with self._starting:
                if self._thread is None and not self._is_starting:
                    self._is_starting = True
                    self._start()
                    self._is_starting = False
        return self._thread is not None

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self.at_work.add(self)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # there are too many
            self.at_work.discard(self)

    def _serve(self) -> None:
        begin_thread()
        while not self._bell.get():
            self._do_all()
        self._do_all()
        self.at_work.discard(self)

    def _do_all(self) -> None:
        """Do what is queued, unless another thread does: that one looks again before it stops."""
        while self._tasks and self._at_it.acquire(blocking=False):
            try:
                while self._tasks:
                    _do(self._tasks.popleft())
            finally:
                self._at_it.release()

    def end(self) -> None:
        self._bell.put(True)

    @classmethod
    def end_all(cls) -> None:
        """Wait for everything that is queued, and for the threads."""
        cls.are_over = True
        for worker in list(cls.at_work):
            worker.end()
            thread = worker._thread
            if thread is not None and worker.process == os.getpid():
                thread.join()


def _do(task: Task) -> None:
    try:
        task()
    except BaseException:
        error = sys.exc_info()
        try:
            threading.excepthook(threading.ExceptHookArgs((*error, threading.current_thread())))
        finally:
            del error  # its traceback holds this frame, and the frame what the task holds


# Before the interpreter is taken down, and after the threads of the program have ended.
atexit.register(_Worker.end_all)
