"""What is said at the end of ``torchtensorref run``, and where: the report."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, nearest
from ..base.event_sinks import say
from ..base.option_parsers import path_to_write
from ..base.options import settings
from . import children

#: They end a process, and Python lets them.
ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
#: Where a report goes that goes to no file.
PLACES = ("stderr", "none")


def report_place(text: str) -> str:
    """Read where the report is to go: "stderr", "none", or the path of a file, from the root on.

    Raises
    ------
    ConfigError
        That file cannot be written: said before the program runs, not after it.
    """
    if text in PLACES:
        return text
    meant = nearest(text, (*PLACES, "stdout", "json"), likeness=0.8)
    if meant is not None:
        raise ConfigError(
            f"--report={text!r} is no place for a report. Write {' or '.join(PLACES)}, "
            f"'report.json' for numbers, or './{text}' for a file of that name.",
            name=text,
            known=PLACES,
            nearest=meant,
        )
    return path_to_write(text, "--report")


class Ending:
    """The report at the end of a run, however it ends: by itself, an error, or a signal.

    Parameters
    ----------
    where : str
        As `report_place` has read it.
    about : dict
        What a report in JSON says of the run itself.
    """

    def __init__(self, where: str, about: dict[str, Any]) -> None:
        self._where = where
        self._about = about
        self._pid = os.getpid()
        self._began_ns = time.perf_counter_ns()
        self._is_written = False

    def begin(self) -> None:
        """Have it written at exit, and at signals that would end the process without one."""
        atexit.register(self.write)
        for signum in ENDING_SIGNALS:
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, self._on_signal)

    def write(self) -> None:
        """Write it, once."""
        if os.getpid() == self._pid and not self._is_written:
            self._is_written = True
            wall_ns = time.perf_counter_ns() - self._began_ns
            write_report(self._where, {**self._about, "wall_ns": wall_ns})

    def call_off(self) -> None:
        """Write nothing: what there is to say has been said."""
        self._is_written = True

    def _on_signal(self, signum: int, frame: Any) -> None:
        if os.getpid() == self._pid:
            self.write()
            children.leave()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def write_report(where: str, about: dict[str, Any]) -> None:
    """Say what happened, where the user asked for it; a failure to do so is told, never raised."""
    manager = getattr(sys.modules.get("torchTensorRef.memory.manager"), "tensorsManager", None)
    opened = manager is not None and manager._residency is not None
    if where == "stderr" and opened and settings.trace >= 1 and not children.children_of_this_run():
        return  # a trace ends with the same words
    try:
        as_json = where.endswith(".json")
        text = report_of(manager if opened else None, as_json=as_json, about=about)
    except Exception as error:
        say(f"torchtensorref: no report: {type(error).__name__}: {error}")
        return
    if where == "stderr":
        say(text)
        return
    try:
        write_whole(Path(where), f"{text}\n")
    except OSError as error:
        say(f"torchtensorref: the report is not in {where!r} ({error}), but here:\n{text}")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either as it was or has all of the text, also where the disk is full."""
    is_special = path.exists() and not path.is_file()  # a pipe, a terminal
    path = path if is_special else path.resolve()
    if is_special or not os.access(path.parent, os.W_OK):
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def report_of(manager: Any | None, *, as_json: bool, about: dict[str, Any] | None = None) -> str:
    """Describe what the manager did for the program, as text or as JSON; None did nothing."""
    born = children.children_of_this_run()
    if as_json:
        stats = {} if manager is None else manager.stats()
        if about and manager is not None:
            is_virtual = manager.residency.books.main.has_virtual_clock
            times = {"virtual_ns": stats["time_ns"]} if is_virtual else {}
            stats["run"] = {**about, **times}
        return json.dumps({**stats, "children": born} if born else stats)
    if manager is not None:
        first: str = manager.report()
    else:
        first = "torchTensorRef: the program made no tensor" + (" itself." if born else ".")
    return "\n".join([first, *children.lines_of(born)])
