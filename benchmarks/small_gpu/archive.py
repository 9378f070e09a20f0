"""Everything a run has found, in one file: it comes from there before a call, and goes there after.

Rented machines begin bare, and give back a few files of bounded size. So the archive has what was
measured and what cannot be made again: the state, results that differ from the reference's, what
seats printed, timelines. Weights are made again from their seeds.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

SUFFIXES = (".tar", ".tar.gz", ".tgz")
#: Of one file; larger ones (torch's profiles) stay where they were made.
MOST_NBYTES = 8 << 20
FOLDERS = ("run", "timelines")


def is_archive(path: Path) -> bool:
    """Whether a state is to be kept in one file.

    Examples
    --------
    >>> is_archive(Path("state.tar.gz")), is_archive(Path(".cache/small_gpu"))
    (True, False)
    """
    return path.name.endswith(SUFFIXES)


def unpack(archive: Path, folder: Path) -> bool:
    """Put back what an archive has, over whatever was in the folder; False if there is none."""
    if not archive.exists():
        return False
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return True


def pack(archive: Path, folder: Path, is_needed: Callable[[Path], bool] = lambda _: True) -> None:
    """Write the archive anew, whole or not at all."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(archive.name + ".unfinished")
    with tarfile.open(unfinished, "w" if archive.name.endswith(".tar") else "w:gz") as packed:
        for path in sorted(p for name in FOLDERS for p in (folder / name).rglob("*")):
            if path.is_file() and path.stat().st_size <= MOST_NBYTES and is_needed(path):
                packed.add(path, arcname=path.relative_to(folder))
    os.replace(unfinished, archive)
