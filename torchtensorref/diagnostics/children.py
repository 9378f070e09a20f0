"""The Python children of ``torchtensorref run``: managed too, each with its share of the budget.

What `run` was told reaches them by the environment, as `TTR_` variables, and a folder in front of
`PYTHONPATH` has them begin (`in_children/`). In another folder, made for this run, each process
that opens devices leaves a file: by their number the budget is divided, and of them the report at
the end is made.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ..base.activation import when_open
from ..base.errors import TransferError
from ..base.option_parsers import AUTO, parse_budget
from ..base.options import settings
from ..base.text import LINE, fitted
from ..base.units import format_nbytes, parse_nbytes, parse_share

#: In front of the children's PYTHONPATH.
IN_CHILDREN = str(Path(__file__).with_name("in_children"))
#: How often a process looks for others that share its budget, in seconds.
PERIOD_S = 0.25
#: Whether the processes of a run divide the budget, or each has all of it.
_RULE = "rule.json"


def prepare(variables: Mapping[str, str], *, budget_is_each: bool) -> None:
    """Have the processes that this one starts begin managed; called by `run`, in itself.

    Parameters
    ----------
    variables : Mapping of str to str
        What the command line says, as the environment says it.
    budget_is_each : bool
        The budget is that of every process; else all of them divide it.
    """
    global _is_member
    try:
        folder = tempfile.mkdtemp(prefix="torchtensorref-run-")
        Path(folder, _RULE).write_text(json.dumps({"divides": not budget_is_each}))
    except OSError as error:
        print(
            f"torchtensorref: children stay plain, for want of a folder: {error}", file=sys.stderr
        )
        return
    _is_member = True
    os.environ.update(variables, TTR_RUN=folder)
    before = os.environ.get("PYTHONPATH")
    if before is None or IN_CHILDREN not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (IN_CHILDREN, before)))
    settings.run = folder
    when_open.append(Membership(folder, is_child=False).open)
    atexit.register(_remove, folder, os.getpid())


#: This process takes part in a run already: as its first one.
_is_member = False


def leave() -> None:
    """Remove the folder of the run that began in this process, which a signal ends."""
    if _is_member and settings.run is not None:
        _remove(settings.run, os.getpid())


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)  # a child that lives on writes nothing there


def begin() -> None:
    """Come under management; called in a child when it looks for torch."""
    folder = settings.run
    if settings.disable or _is_member or folder is None or not os.path.isdir(folder):
        return
    if settings.trace_file is not None:
        settings.trace_file += f".{os.getpid()}"
    when_open.append(Membership(folder, is_child=True).open)


class Membership:
    """One process's part in a run: its file, and its share of the budget."""

    def __init__(self, folder: str, *, is_child: bool) -> None:
        self._folder = Path(folder)
        self._is_child = is_child
        self._pid = os.getpid()
        self._file = self._folder / f"{self._pid}.json"
        #: The budget of the whole run; None or `AUTO`: nothing is divided.
        self._whole = settings.budget
        #: Among how many it is divided now, and what was set for that, also if in vain.
        self._count = 1
        self._shares: tuple[Any, ...] = (None,)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, manager: Any) -> None:
        """Say that this process has opened its devices, and take its share."""
        if os.getpid() != self._pid:
            return
        self._said = {"command": " ".join(sys.orig_argv), "device": _card(manager)}
        if not self._write({}):
            return
        atexit.register(self._end, manager)
        if self._whole not in (None, AUTO) and self._divides():
            self._look(manager)
            self._thread = threading.Thread(
                target=self._serve, args=(manager,), name="torchTensorRef-shares", daemon=True
            )
            self._thread.start()

    def _divides(self) -> bool:
        try:
            return bool(json.loads((self._folder / _RULE).read_text())["divides"])
        except FileNotFoundError:
            return False  # the run is over

    def _serve(self, manager: Any) -> None:
        while not self._is_over.wait(PERIOD_S):
            try:
                self._look(manager)
            except (RuntimeError, TransferError) as error:  # memory is short, or a link fails
                manager.log.note("-", "share", str(error)[:80])

    def _look(self, manager: Any) -> None:
        """Divide the budget anew if processes have come or gone."""
        setting = manager._budget_setting
        if setting not in self._shares:
            self._is_over.set()  # the program has said what its budget is
            return
        count = max(sum(row["device"] == self._said["device"] for row in self._living()), 1)
        if count != self._count:
            share = divided(self._whole, count)
            self._shares = (None, setting, share)
            manager.budget = share
            self._count = count

    def _living(self) -> list[dict[str, Any]]:
        rows = read_rows(self._folder)
        return [row for row in rows if "stats" not in row and _is_alive(row["pid"])]

    def _end(self, manager: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._write({"stats": manager.stats()})

    def _write(self, more: dict[str, Any]) -> bool:
        """Leave word in the folder of the run; False where that cannot be, which is told."""
        row = {"pid": self._pid, "is_child": self._is_child, **self._said, **more}
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps(row))
            os.replace(new, self._file)
        except FileNotFoundError:
            return False  # the run is over, and so is its folder: nobody reads it any more
        except OSError as error:
            print(f"torchtensorref: {self._pid} is not in the report: {error}", file=sys.stderr)
            return False
        return True


def _card(manager: Any) -> str:
    """What processes that name a card alike share; which cards they see is part of its name."""
    return f"{manager.device} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}".strip()


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Read what the processes of a run have said, in the order of their numbers."""
    rows = []
    for path in Path(folder).glob("[0-9]*.json"):
        try:
            rows.append(json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # the run has ended meanwhile
    return sorted(rows, key=lambda row: int(row["pid"]))


def divided(setting: Any, count: int) -> Any:
    """Return one of `count` equal shares of a budget, as `tensorsManager.budget` takes it.

    Examples
    --------
    >>> divided("6GiB", 2), divided("30%", 3), divided({"sim:0": 9}, 3)
    (3221225472, '10.0%', {'sim:0': 3})
    """
    if isinstance(setting, Mapping):
        return {device: divided(amount, count) for device, amount in setting.items()}
    if isinstance(setting, str) and "=" in setting:
        return divided(parse_budget(setting), count)
    if setting == AUTO:
        return setting
    if isinstance(setting, str) and setting.strip().endswith("%"):
        return f"{parse_share(setting) * 100 / count}%"
    return parse_nbytes(setting) // count


# -- the report -----------------------------------------------------------------------------------


def children_of_this_run() -> list[dict[str, Any]]:
    """Return what the managed children of this run have said; those killed have no `stats`."""
    if settings.run is None:
        return []
    return [row for row in read_rows(settings.run) if row["is_child"]]


def lines_of(children: list[dict[str, Any]]) -> list[str]:
    """Describe the managed children, about two lines for each."""
    return [line for child in children for line in _lines(child)]


def _lines(child: dict[str, Any]) -> list[str]:
    first = f"torchTensorRef: child {child['pid']}: {child['command']}"[:LINE]
    stats = child.get("stats")
    if stats is None:
        is_alive = _is_alive(child["pid"])
        return [first, "  still runs" if is_alive else "  was killed before it could report"]
    size = {name: format_nbytes(n) for name, n in stats.items() if name.endswith("_nbytes")}
    said = (
        f"  {stats['strategy']} on {stats['device']}, peak {size['peak_resident_nbytes']} of "
        f"{size['budget_nbytes']}, fetched {size['fetched_nbytes']}, operators {stats['op_count']}"
    )
    return fitted([first, said])
