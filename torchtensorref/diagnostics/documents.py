"""The pages of the documents that are made from the code, so that they cannot drift from it.

Write them anew with ``python -m torchTensorRef.diagnostics.documents docs``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from ..base.errors import TensorRefError
from ..base.options import OPTIONS, Option
from ..inject import hooks

ENVIRONMENT_HEAD = """\
# Environment

Every switch of torchTensorRef is a variable that begins with `TTR_`. They are read once, when
torchTensorRef is imported. A value that is not understood is refused, with what would be. A name
that does not exist may be somebody else's: it is said once, with the nearest that does, and nothing
else happens. An empty one counts as not set.

Most can also be set for a part of a program:

    with torchTensorRef.options(trace=2, poison=True):
        ...

The name there is the variable's in lower case, without `TTR_`. Such a scope holds for all threads,
and its end is the end that `TTR_TRACE=1` and `TTR_CHECK=1` wait for. `TTR_DISABLE`, `TTR_STRATEGY`,
`TTR_DEVICE`, `TTR_BUDGET`, `TTR_INJECT_TO` and `TTR_EXCLUDE` say how to begin, so a scope refuses
them; a program says the same with `tensorsManager` and `injectTo`.

A trace is written event by event, so it is whole up to the last one, also after `kill -9`. If the
disk is full it ends there, and says so on stderr, once. A process that inherits `TTR_TRACE_FILE`
writes beside the trace of the first, with its number behind the name. With `TTR_DISABLE=1` no other
variable is looked at too closely: one that is not understood counts as not set.
"""

ENVIRONMENT_FOOT = """\
## When a result is wrong

Each step halves the suspects:

1. `TTR_DISABLE=1`: still wrong? Then it is not us.
2. `TTR_CORE=python`: right now? Then it is an operator in C++.
3. `TTR_COMPILED=off`: right now? Then it is what torch.compile has made.
4. `TTR_SYNC=1`: right now? Then somebody does not wait for a copy.
5. `TTR_POISON=1`: different, or NaN? Then stale bytes are read.
6. `TTR_SHADOW=1`: names the first operator whose result differs from plain torch.
7. `TTR_CHECK=2`: names the first operator after which the books are wrong.
8. `tensorsManager.story(tensor)`: tells what happened to one tensor.

When there is no accelerator, `TTR_FAULTS` makes the simulated one fail, to see what a program does
then.
"""

ERRORS_HEAD = """\
# Errors

Everything that torchTensorRef raises on purpose is a `TensorRefError`. What plain torch raises for
a wrong program (shapes, dtypes) passes through us as it is.

An error says what happened, how much, and what to do. The same facts are its attributes, and they
survive pickling, so a worker process can send them home.
"""

GENERATED = "<!-- Made by `python -m torchTensorRef.diagnostics.documents docs`. Do not edit. -->\n"


def environment_page() -> str:
    """Write the page of the `TTR_` variables from the table of options."""
    rows = [
        "| variable | values | default | effect | cost |",
        "|---|---|---|---|---|",
        *(_option_row(option) for option in OPTIONS.values()),
    ]
    table = "\n".join(rows) + "\n"
    return "\n".join((GENERATED, ENVIRONMENT_HEAD, table, ENVIRONMENT_FOOT))


def _option_row(option: Option) -> str:
    default = "not set"
    if isinstance(option.default, int):
        default = f"{option.default:d}"  # a switch that is off is 0
    elif isinstance(option.default, str):
        default = option.default
    cells = (f"`{option.variable}`", option.values, default, option.effect, option.cost)
    return f"| {' | '.join(cells)} |"


def errors_page() -> str:
    """Write the page of the errors from their docstrings.

    Notes
    -----
    Imports torch: `OutOfBudgetError` is an error of torch as well.
    """
    # torch first: a module of ours that brings it in is not whole yet when torch is patched.
    importlib.import_module("torch")
    hooks.load(".memory.budget")
    kinds = {kind.__name__: kind for kind in _own_subclasses(TensorRefError)}
    sections = [
        _error_section(TensorRefError),
        *(_error_section(kinds[name]) for name in sorted(kinds)),
    ]
    return "\n".join((GENERATED, ERRORS_HEAD, *sections))


def _own_subclasses(root: type[TensorRefError]) -> list[type[TensorRefError]]:
    """The errors of the package itself; a test or a user may have derived others."""
    ours = f"{TensorRefError.__module__.partition('.')[0]}."
    direct = [kind for kind in root.__subclasses__() if kind.__module__.startswith(ours)]
    return [*direct, *(below for kind in direct for below in _own_subclasses(kind))]


def _error_section(kind: type[TensorRefError]) -> str:
    # Parameters and notes are for those who raise it; the page is for those who meet it.
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nParameters\n---")[0].rstrip()
    for word in ("Cause", "Cure"):
        text = text.replace(f"\n{word}:", f"\n**{word}:**")
    usual = [base for base in kind.__bases__ if not issubclass(base, TensorRefError)]
    also = [f"Also caught as `{_full_name(base)}`." for base in usual if base is not Exception]
    facts = ", ".join(f"`{name}`" for name in inspect.get_annotations(kind))
    carries = [f"Carries {facts}."] if facts else []
    last = " ".join((*also, *carries))
    return "\n".join((f"## {kind.__name__}\n", text, *(("", last) if last else ()), ""))


def _full_name(kind: type) -> str:
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def pages() -> dict[str, str]:
    """Give every page that is made from the code, by its file name in ``docs``."""
    return {"environment.md": environment_page(), "errors.md": errors_page()}


def main(arguments: list[str] | None = None) -> int:
    """Write the pages into a folder.

    Parameters
    ----------
    arguments : list of str, optional
        The folder; the command line if not given, and ``docs`` if that is empty.

    Returns
    -------
    int
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else arguments
    folder = Path(given[0] if given else "docs")
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(f"wrote {folder / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
