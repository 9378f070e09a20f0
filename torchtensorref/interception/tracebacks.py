"""Whose mistake an error is: what torch says of a program's shapes comes without our frames."""

from __future__ import annotations

import sys
from pathlib import Path

from ..base.errors import TensorRefError
from ..base.options import settings

__all__ = ["OF_PROGRAMS", "hides", "shorten"]

#: What torch raises for a wrong program. Anything else keeps its frames: it may be our mistake.
OF_PROGRAMS = (RuntimeError, IndexError, ValueError, TypeError)

_OURS = str(Path(__file__).parents[1])
#: Where kernels are called that have no Python frame of their own.
_CALL_KERNELS = (str(Path(__file__).with_name("ready_path.py")),)


def hides(_: object) -> bool:
    """Whether pytest is to leave out the frames of a module whose `__tracebackhide__` this is."""
    return settings.tracebacks != "whole"


def shorten(error: BaseException) -> None:
    """Forget the frames of an error that torch has raised below us; to be raised again at once.

    Parameters
    ----------
    error : BaseException
        Just caught, where torch has called us: what is raised again has the program's frames only.

    Notes
    -----
    Kept are all frames where one of them is not torch's and not ours, where the last is ours, of
    errors that are not `OF_PROGRAMS` or are ours on purpose, and with `TTR_TRACEBACKS=whole`.
    """
    is_of_program = isinstance(error, OF_PROGRAMS) and not isinstance(error, TensorRefError)
    if not is_of_program or settings.tracebacks == "whole":
        return
    torchs = str(Path(sys.modules["torch"].__file__ or "").parent)
    trace, file = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((_OURS, torchs)):
            return
        trace = trace.tb_next
    if file.startswith(torchs) or file in _CALL_KERNELS:
        error.__traceback__ = None
