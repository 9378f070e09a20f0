"""Programs in processes of their own."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torchTensorRef

#: As a user starts a program that has never heard of us.
RUN = ("-m", "torchTensorRef", "run", "--device", "sim")
#: Variables of a process that is to end as Python ends, with what its collector finds at last.
AS_FOR_A_USER = {"PYTEST_CURRENT_TEST": ""}


def python(
    *arguments: Any, cwd: Any = None, options: Mapping[str, Any] | None = None, **environ: str
) -> Any:
    """Run Python to its end.

    Parameters
    ----------
    *arguments : Any
        What stands behind `python`, as text or what is turned into it.
    options : mapping, optional
        Of `subprocess.run`; what they say nothing of is as here: streams are caught, as text.
    **environ : str
        What is added to the environment.
    """
    pipe = subprocess.PIPE
    usual = {"cwd": cwd, "stdout": pipe, "stderr": pipe, "text": True, "timeout": 240}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environ},
        check=False,
        **{**usual, **(options or {})},
    )


def printed_by_plain_torch(path: str, *arguments: str) -> str:
    """Run a program in this process, switched off; another one takes three seconds to begin."""
    told, before = io.StringIO(), sys.argv
    sys.argv = [path, *arguments]
    try:
        with torchTensorRef.disabled(), contextlib.redirect_stdout(told):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    return told.getvalue()
