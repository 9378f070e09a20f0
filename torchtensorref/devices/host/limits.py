"""How much of the host's memory this process may use: what is installed, and what its group may."""

from __future__ import annotations

from pathlib import Path

from ...base.units import parse_nbytes, parse_share

__all__ = ["ram_limit_nbytes", "share_of_ram"]

#: Where control groups are mounted, and which of them this process is in.
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")

#: Version 1 writes "no limit" as the largest multiple of a page in 63 bits.
NO_LIMIT_FROM_NBYTES = 1 << 60


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
    return min([installed, *_group_limits(root, of_process)])


def _group_limits(root: Path, of_process: Path) -> list[int]:
    """The memory limits of the groups this process is in, and of those around them."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return []  # no control groups here (macOS, Windows)
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limits += _limits_upward(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upward(root / "memory", path, "memory.limit_in_bytes")
    return limits


def _limits_upward(mount: Path, path: str, name: str) -> list[int]:
    # Inside a container the path can be the one seen from outside: the mount itself still counts.
    folder = mount / path.strip("/")
    limits = []
    for place in (folder, *folder.parents):
        limit = _read_limit(place / name)
        if limit is not None:
            limits.append(limit)
        if place == mount:
            break
    return limits


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
