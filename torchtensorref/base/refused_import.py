"""What an import raises where a `TTR_` variable has a wrong value: what is wrong, and no more.

How the variables are read tells a reader nothing, and our own command says everything in one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .errors import ConfigError

__all__ = ["BAD_USAGE", "as_refusal"]

#: Exit status of Python itself for what it was told and does not understand.
BAD_USAGE = 2


def as_refusal(error: ConfigError) -> BaseException:
    """Return what to raise: the error without our frames, or the end of our own command."""
    if not _is_our_command():
        return error.with_traceback(None)
    if sys.stderr is not None:
        sys.stderr.write(f"torchtensorref: {error}\n")
    return SystemExit(BAD_USAGE)


def _is_our_command() -> bool:
    """Whether this is `torchtensorref ...`, or `python -m torchTensorRef ...` on its way there."""
    begun_by = sys.argv[0] if sys.argv else ""
    if begun_by != "-m":
        return Path(begun_by).stem.lower() in ("torchtensorref", "torchtensorref-script")
    given = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return given[-1].removeprefix("-m").strip() == "torchTensorRef"
