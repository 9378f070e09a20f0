"""How much of the host's memory this process may use: what there is, and what its group may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...base.units import parse_nbytes, parse_share

__all__ = ["has_spare_ram", "ram_limit_nbytes", "share_of_ram", "spare_ram_nbytes"]

#: Where control groups are mounted, and which of them this process is in.
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")

#: Version 1 writes "no limit" as the largest multiple of a page in 63 bits.
NO_LIMIT_FROM_NBYTES = 1 << 60

#: Of what the process may use, left free by what is a convenience: never worth a swap.
SPARE_SHARE = 1 / 20


class _Names(NamedTuple):
    """How a version of control groups calls what it says of a group's memory."""

    limit: str
    used: str
    #: Of what is used, the pages of files that can be read again: lines of `memory.stat`.
    of_files: tuple[str, ...]


_VERSION_2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))
_VERSION_1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def ram_limit_nbytes(
    root: Path = CGROUP_ROOT, of_process: Path = CGROUP_OF_PROCESS, installed: int | None = None
) -> int:
    """Return the most bytes of memory this process can ever get.

    Parameters
    ----------
    root, of_process : Path, optional
        Where to read about control groups (tests have folders of their own).
    installed : int, optional
        What is installed; by default what the system says.

    Returns
    -------
    int
        The smaller of what is installed and the tightest limit of the groups around the process.
    """
    if installed is None:
        import psutil

        installed = int(psutil.virtual_memory().total)
    groups = _groups(root, of_process)
    limits = [_read_limit(folder / names.limit) for folder, names in groups]
    return min([installed, *(limit for limit in limits if limit is not None)])


def spare_ram_nbytes(
    root: Path = CGROUP_ROOT, of_process: Path = CGROUP_OF_PROCESS, available: int | None = None
) -> int:
    """Return how many bytes more this process can get now.

    Parameters
    ----------
    root, of_process : Path, optional
        Where to read about control groups (tests have folders of their own).
    available : int, optional
        What the machine has; by default what the system says.

    Returns
    -------
    int
        The smallest of that and what is left in the groups around the process.
    """
    if available is None:
        import psutil

        available = int(psutil.virtual_memory().available)
    left = [_left_in(folder, names) for folder, names in _groups(root, of_process)]
    return min([available, *(nbytes for nbytes in left if nbytes is not None)])


def has_spare_ram(nbytes: int) -> bool:
    """Whether so much for a convenience leaves the process, and the system, some memory."""
    return spare_ram_nbytes() - nbytes > ram_limit_nbytes() * SPARE_SHARE


def _groups(root: Path, of_process: Path) -> Iterator[tuple[Path, _Names]]:
    """The groups this process is in, and those around them, by their folders."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return  # no control groups here (macOS, Windows)
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from ((folder, _VERSION_2) for folder in _upward(root, path))
        elif "memory" in controllers.split(","):
            yield from ((folder, _VERSION_1) for folder in _upward(root / "memory", path))


def _upward(mount: Path, path: str) -> Iterator[Path]:
    # Inside a container the path can be the one seen from outside: the mount itself still counts.
    folder = mount / path.strip("/")
    for place in (folder, *folder.parents):
        yield place
        if place == mount:
            return


def _left_in(folder: Path, names: _Names) -> int | None:
    """What a group may still use; None where it has no limit, or does not say what is used."""
    limit, used = _read_limit(folder / names.limit), _read_limit(folder / names.used)
    if limit is None or used is None:
        return None
    try:
        rows = [row.split() for row in (folder / "memory.stat").read_text().splitlines()]
    except OSError:
        rows = []
    of_files = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names.of_files)
    return limit - max(0, used - of_files)


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdecimal() or int(text) >= NO_LIMIT_FROM_NBYTES:
        return None
    return int(text)


def share_of_ram(amount: str) -> int:
    """Turn a size or a share of the memory this process may use into bytes.

    Parameters
    ----------
    amount : str
        As in a budget: ``8GiB``, ``50%``. A size is taken as it is said: the memory of a virtual
        machine, or of a group, can grow while we run, and each piece is asked for when it comes.

    Raises
    ------
    ConfigError
        It is neither.
    """
    if amount.strip().endswith("%"):
        return int(ram_limit_nbytes() * parse_share(amount))
    return parse_nbytes(amount)
