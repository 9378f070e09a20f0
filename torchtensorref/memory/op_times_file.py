"""What was learned of operators' times, kept between runs: a small file for each machine.

It may be gone, cut off, of another version or somebody else's: then it is not read, one line of
the log says so, and the program goes on as without it. It is exchanged as a whole, so that who
reads it meanwhile sees the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..base.core_build import cache_folder
from ..base.options import settings
from ..devices.base import Device
from ..operators.plan import kind_named, name_of_kind

_log = logging.getLogger("torchTensorRef")

#: What stands at the head of such a file; another number where entries mean something else.
FORMAT = "torchTensorRef operator times 1"
#: The most entries of a file, for all devices: those of other devices go first.
MOST_ENTRIES = 8192

#: Kind, dtype, buckets of bytes and of operations (`OpKey` but for its device).
Key = tuple[int, str, int, int]
#: The logarithm of the ns that a byte takes, and from how many measurements.
Value = tuple[float, int]


def file_for(main: Device) -> OpTimesFile | None:
    """Return where times are kept that are learned beside an accelerator; None for nowhere.

    Those of a simulated one are virtual: they are kept where the user has named a file.
    """
    where = settings.op_times
    if where == "off" or (where == "cache" and main.has_virtual_clock):
        return None
    if where != "cache":
        return OpTimesFile(Path(where), is_ours=False)
    machine = hashlib.sha256(f"{platform.node()} {platform.machine()}".encode()).hexdigest()[:12]
    return OpTimesFile(cache_folder() / f"operator-times-{machine}.json", is_ours=True)


class OpTimesFile:
    """One file of times.

    Parameters
    ----------
    path : Path
        Where it is.
    is_ours : bool
        It lies where only we write: what is no such file is replaced, and left alone elsewhere.
    """

    def __init__(self, path: Path, *, is_ours: bool) -> None:
        self.path = path
        self._is_ours = is_ours

    def read(self, hardware: str) -> dict[Key, Value]:
        """Return what is known of operators on such a device; never an error."""
        found = {}
        for name, dtype, nbytes_bucket, flops_bucket, log_ns_per_byte, count in (
            self._devices() or {}
        ).get(hardware, []):
            kind = kind_named(name)
            if kind:
                found[kind, dtype, nbytes_bucket, flops_bucket] = (log_ns_per_byte, count)
        return found

    def write(self, hardware: str, found: Mapping[Key, Value]) -> None:
        """Add what was learned on a device to what is there; never an error."""
        devices = self._devices(says_so=False)
        if devices is None:
            return
        entries = {tuple(entry[:4]): entry for entry in devices.pop(hardware, [])}
        for (kind, *rest), value in found.items():
            name = name_of_kind(kind)
            if name:
                entries[name, *rest] = [name, *rest, *value]
        kept = {hardware: list(entries.values())[-MOST_ENTRIES:]}
        for other, lines in devices.items():
            if sum(map(len, kept.values())) + len(lines) <= MOST_ENTRIES:
                kept[other] = lines
        try:
            self._exchange({"format": FORMAT, "torch": torch.__version__, "devices": kept})
        except OSError as error:
            _log.warning("torchTensorRef: operator times are not kept: %s", error)

    def _exchange(self, content: dict[str, Any]) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _devices(self, *, says_so: bool = True) -> dict[str, list[Any]] | None:
        """Return the entries by device; None for a file that is not ours to replace."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"it says {str(content['format'])[:40]!r}, not {FORMAT!r}")
            devices: dict[str, list[Any]] = content["devices"]
            for lines in devices.values():
                for line in lines:
                    _check(line)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if says_so:
                what = f"{type(error).__name__}: {error}"[:200]
                _log.warning(
                    "torchTensorRef: operator times in %s are not read: %s", self.path, what
                )
            return {} if self._is_ours else None
        # Another torch has other kernels, and may call its operators by other names.
        return devices if content.get("torch") == torch.__version__ else {}


def _check(line: Any) -> None:
    """Refuse what is no entry with a ValueError."""
    name, dtype, nbytes_bucket, flops_bucket, log_ns_per_byte, count = line
    is_right = (
        all(type(text) is str for text in (name, dtype))
        and all(type(n) is int and n >= 0 for n in (nbytes_bucket, flops_bucket, count))
        and type(log_ns_per_byte) is float
        and math.isfinite(log_ns_per_byte)
    )
    if not is_right:
        raise ValueError(f"{str(line)[:80]} is no entry")
