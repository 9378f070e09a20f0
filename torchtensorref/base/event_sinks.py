"""What `TTR_TRACE` asks for: events as they happen, to a file or to stderr; totals at the end.

Nothing here raises into the program: what cannot be written is told once, where anybody listens.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable

from .event_log import EventLog, EventRecord
from .options import Settings, listeners, settings

try:
    import fcntl
except ImportError:  # not on Windows, where a file that is open cannot be replaced
    fcntl = None  # type: ignore[assignment]

_COLUMNS = ("step", "block", "event", "cause")


def as_json_line(record: EventRecord) -> str:
    """Write one event as a line of JSON: step, block, event, cause."""
    return json.dumps(dict(zip(_COLUMNS, record, strict=True))) + "\n"


def say(text: str) -> bool:
    """Write a line to stderr; False where that is closed or full, which is nobody's mistake here.

    Not a Python warning: a program that turns those into errors would end in the middle of an
    operator.
    """
    if sys.stderr is None:
        return False
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except Exception:  # also what a program's own stream raises
        return False
    return True


class TraceFile:
    """A file of events: each line is in it, whole, when `write` returns, also if we are killed.

    Parameters
    ----------
    path : str
        Where; what was there is replaced. While another process writes a trace to that file,
        ours is beside it, with the number of the process behind its name.

    Raises
    ------
    OSError
        It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path, self._file = path, _open(path)
        if not _lock(self._file):
            os.close(self._file)
            self.path = f"{path}.{os.getpid()}"
            self._file = _open(self.path)
            _lock(self._file)
        with contextlib.suppress(OSError):  # a pipe, or a terminal
            os.ftruncate(self._file, 0)

    def write(self, record: EventRecord) -> None:
        """Append an event; OSError where it does not fit, and then nothing of it is there."""
        line = as_json_line(record).encode()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            if written:
                with contextlib.suppress(OSError):  # a pipe
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise


def _open(path: str) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    if file > 2 or fcntl is None:
        return file
    # A standard stream was closed, and libraries would write to its number what is for it.
    higher: int = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(file)
    return higher


def _lock(file: int) -> bool:
    """Keep other processes from replacing a file; False if one keeps us from that."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # not a file that can be locked: nobody else's, then
    return True


class Trace:
    """Gives a log the sink that the settings ask for, as often as they change.

    Parameters
    ----------
    log : EventLog
        Where the events come from.
    totals : Callable
        Gives the text to be written when tracing ends.
    check : Callable
        Verifies the books, when checking ends.
    """

    def __init__(self, log: EventLog, totals: Callable[[], str], check: Callable[[], None]) -> None:
        self._log = log
        self._totals = totals
        self._check = check
        self._files: dict[str, TraceFile] = {}

    def settle(self) -> None:
        """Make the settings hold."""
        self._log.sink = None
        path = settings.trace_file
        if path is not None:
            try:
                lines = self._files.get(path) or self._files.setdefault(path, TraceFile(path))
            except OSError as error:
                say(f"torchTensorRef: no trace is written: {error}")
            else:
                self._log.sink = self._into(lines)
        elif settings.trace >= 2:
            self._log.sink = self._to_stderr

    def _into(self, lines: TraceFile) -> Callable[[EventRecord], None]:
        def write(record: EventRecord) -> None:
            try:
                lines.write(record)
            except OSError as error:
                if self._log.sink is write:  # not if another thread has said so
                    self._log.sink = None
                    say(
                        f"torchTensorRef: the trace {lines.path!r} ends before step {record[0]}: "
                        f"{error}. The program goes on; its results do not depend on it."
                    )

        return write

    def _to_stderr(self, record: EventRecord) -> None:
        if not say("{:>6} {} {} ({})".format(*record)):
            self._log.sink = None

    def change(self, before: Settings) -> None:
        """Follow a change of the settings, which may be the end of what they had asked for."""
        if (before.trace, before.trace_file) != (settings.trace, settings.trace_file):
            self.settle()
        self._end(
            trace=before.trace >= 1 > settings.trace, check=before.check >= 1 > settings.check
        )

    def end(self) -> None:
        """Do what was asked for the end of the process."""
        self._end(trace=settings.trace >= 1, check=settings.check >= 1)

    def _end(self, *, trace: bool, check: bool) -> None:
        if trace:
            say(self._totals())
        if check:
            self._check()


def begin(log: EventLog, totals: Callable[[], str], check: Callable[[], None]) -> None:
    """Start what the settings ask for, now and later; called once, when devices are opened.

    Parameters
    ----------
    log : EventLog
        Where the events come from.
    totals : Callable
        Gives the text to be written at exit, or at the end of a scope, from level 1 on.
    check : Callable
        Verifies the books; called at the same ends where `TTR_CHECK` is 1 or more.
    """
    trace = Trace(log, totals, check)
    trace.settle()
    listeners.append(trace.change)
    atexit.register(trace.end)
