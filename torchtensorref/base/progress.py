"""Long work shows how far it is: on stderr, where that is a terminal, and only after a second.

What the program waits for has a bar, which goes away with it. What goes on beside the program has a
line now and then, for a bar would stand between what the program writes itself.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from . import forking
from .event_sinks import say
from .units import format_nbytes

__all__ = ["Bar", "Lines", "screen"]

#: Work that ends sooner shows nothing, in seconds.
AFTER_S = 1.0


class Screen:
    """The terminal behind stderr, on which one at a time draws."""

    def __init__(self) -> None:
        self._drawing = forking.Lock()

    def is_there(self) -> bool:
        """Whether stderr is a terminal."""
        return bool(getattr(sys.stderr, "isatty", bool)())

    def try_take(self) -> bool:
        """Take it for drawing; False if somebody else draws there. Give it back afterwards."""
        return self._drawing.acquire(blocking=False)

    def give_back(self) -> None:
        """End what `try_take` has begun."""
        self._drawing.release()

    @property
    def is_taken(self) -> bool:
        """Whether somebody draws there."""
        return self._drawing.locked()


#: Of this process.
screen = Screen()


class Bar(AbstractContextManager["Bar"]):
    """A bar on the terminal while work lasts that the program waits for.

    Parameters
    ----------
    what : str
        What is done, such as "adopting LlamaModel".
    total_nbytes : int, optional
        How many bytes of work there are; without it only the time is shown.
    """

    def __init__(self, what: str, total_nbytes: int | None = None) -> None:
        self._what = what
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._lock = forking.Lock()
        self._is_over = False
        self._timer: threading.Timer | None = None
        self._drawn: Any = None

    def __enter__(self) -> Bar:
        """Have it drawn in a second, unless the work has ended by then."""
        if screen.is_there():
            self._timer = threading.Timer(AFTER_S, self._draw)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError as error:  # the system has no thread left
                self._timer = None
                say(f"torchTensorRef: no progress is shown of {self._what}: {error}")
        return self

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done; only one thread says so."""
        self._done_nbytes += nbytes
        drawn = self._drawn
        if drawn is not None:
            drawn.update(drawn.task_ids[0], completed=self._done_nbytes)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        size = (DownloadColumn(binary_units=True),) if self._total_nbytes is not None else ()
        with self._lock:
            if self._is_over or not screen.try_take():
                return
            # The program's streams stay its own: it may exchange them meanwhile.
            drawn = Progress(
                TextColumn("torchTensorRef: {task.description}"),
                BarColumn(), *size, TimeElapsedColumn(),
                console=Console(file=sys.stderr), transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            task = drawn.add_task(self._what, total=self._total_nbytes)
            self._drawn = drawn  # from here on `advance` tells it
            drawn.update(task, completed=self._done_nbytes)
            drawn.start()

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._drawn is not None:
                try:
                    self._drawn.stop()
                finally:
                    screen.give_back()


class Lines:
    """Lines on the terminal of work that goes on beside the program: after 1 s, 2 s, 4 s, ...

    Parameters
    ----------
    what : str
        What is done, such as "page-locking".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.begin()

    def begin(self) -> None:
        """The work begins, or begins anew."""
        self._began_s, self._wait_s = time.monotonic(), AFTER_S

    def is_due(self) -> bool:
        """Whether a line should be said now: it is time, and there is where to say it."""
        is_time = time.monotonic() - self._began_s >= self._wait_s
        return is_time and screen.is_there() and not screen.is_taken

    def tell(self, done_nbytes: int, total_nbytes: int) -> None:
        """Say how far it is; the next line is due when as long again has passed."""
        took_s = time.monotonic() - self._began_s
        self._wait_s = 2 * took_s
        say(
            f"torchTensorRef: {self._what}: {format_nbytes(done_nbytes)} of "
            f"{format_nbytes(total_nbytes)}, after {took_s:.0f} s"
        )
