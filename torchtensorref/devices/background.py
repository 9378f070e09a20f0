"""Work that a thread of ours does meanwhile, and that is over before the interpreter is.

A daemon thread that is inside torch when the interpreter ends is unwound through functions of C++,
and the process is aborted ("terminate called without an active exception"). The threads of a pool
of the standard library are waited for, with all that was queued, before anything is taken down.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Background"]

Task = Callable[[], None]


class Background:
    """One thread that does tasks in their order.

    It is started by the first task and ends with its owner. A task that raises is reported as a
    thread that died is (`threading.excepthook`), and the next one is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool, self._process = ThreadPoolExecutor(1, name), os.getpid()

    def submit(self, task: Task) -> bool:
        """Queue a task and return at once; False if nobody will do it.

        No thread can be had while the interpreter ends, or beyond a limit of the system.
        """
        if self._process != os.getpid():
            # A forked child has the pool, and none of its threads.
            self._pool, self._process = ThreadPoolExecutor(1, self._name), os.getpid()
        tasks = deque([task])
        try:
            self._pool.submit(_do, tasks)
        except RuntimeError:
            # It may be in the queue all the same, and a thread come to it: not twice.
            return not _taken(tasks)
        return True


def _taken(tasks: deque[Task]) -> Task | None:
    try:
        return tasks.popleft()
    except IndexError:
        return None


def _do(tasks: deque[Task]) -> None:
    task = _taken(tasks)
    if task is None:
        return
    try:
        task()
    except BaseException:
        seen = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(seen))
