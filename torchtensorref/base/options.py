"""Every option of the library, in one table, with the variable that sets it.

The table is the class `Settings`: one field, one row. `docs/environment.md` is made from it.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from . import option_parsers as texts
from .activation import watch
from .errors import ConfigError, did_you_mean, nearest
from .option_parsers import FAULT_KINDS, parse_budget, parse_faults
from .option_row import Option, row

__all__ = [
    "FAULT_KINDS",
    "OPTIONS",
    "Option",
    "Settings",
    "did_you_mean",
    "nearest",
    "options",
    "parse_budget",
    "parse_faults",
    "read",
    "settings",
]

_log = logging.getLogger("torchTensorRef")

PREFIX = "TTR_"


@dataclass(slots=True)
class Settings:
    """What every option is set to; the hot path reads these attributes and nothing else."""

    disable: bool = row(
        False,
        texts.switch,
        "0, 1",
        "no hook, no patch: is it us at all?",
        "none",
        instead="with torchTensorRef.disabled(), or torchTensorRef.uninstall()",
    )
    trace: int = row(
        0,
        texts.level(3),
        "0 to 3",
        "0 off; 1 totals at the end; 2 each fetch, eviction, write-back; 3 each operator",
        "none; low; medium; high",
    )
    trace_file: str | None = row(
        None,
        texts.file_to_write,
        "path",
        "write the trace there, as JSON lines, each as it happens",
        "a write per event",
    )
    check: int = row(
        0,
        texts.level(2),
        "0 to 2",
        "`tensorsManager.check()` never; at the end; after each operator",
        "none; low; very high",
    )
    sync: bool = row(
        False, texts.switch, "0, 1", "every copy waits at once: is it a missing event?", "slow"
    )
    poison: bool = row(
        False,
        texts.switch,
        "0, 1",
        "fill freed and stale replicas with a pattern: is it a stale read?",
        "a fill per drop",
    )
    shadow: bool = row(
        False,
        texts.switch,
        "0, 1",
        "run each operator also on plain CPU tensors and compare",
        "very slow",
    )
    compiled: str = row(
        "on",
        texts.one_of("on", "off", "forced"),
        "on, off, forced",
        "run what torch.compile has made on plain tensors where nothing speaks against it; never; "
        "also where it takes longer",
        "forced: slow while memory is short",
    )
    tracebacks: str = row(
        "short",
        texts.one_of("short", "whole"),
        "short, whole",
        "leave our frames out of what torch raises for a program's own mistake; show them",
        "none",
    )
    core: str = row(
        "c++",
        texts.one_of("c++", "python"),
        "c++, python",
        "run operators on ready operands without Python, by a library in C++ that is built once "
        "where it is used (`torchtensorref build`); in Python",
        "none",
        instead="",
    )
    strategy: str | None = row(
        None,
        texts.name,
        "name",
        "choose the strategy",
        "none",
        instead="tensorsManager.strategy = ...",
    )
    placement: str = row(
        "auto",
        texts.one_of("auto", "hybrid", "accelerator"),
        "auto, hybrid, accelerator",
        "compute operators whose weights are at home there when that ends sooner: where the "
        "machine says how fast its host is; wherever it pays; never",
        "hybrid: last bits may differ on a real accelerator",
    )
    op_times: str = row(
        "cache", texts.file_or("cache", "off"), "cache, off, path",
        "keep what was learned of operators' times: in the user's cache, but for simulated devices;"
        " nowhere; in this file", "a small file is read and written", instead="",
    )  # fmt: skip
    blocks: str = row(
        "exact", texts.one_of("exact", "any", "off"), "exact, any, off",
        "cut what is larger than the budget: where no bit changes; wherever it can be; never",
        "any: last bits may differ",
    )  # fmt: skip
    device: str | None = row(
        None,
        texts.device,
        "`cuda:0`, `mps`, `sim`, ...",
        "choose the accelerator",
        "none",
        instead="tensorsManager.device = ...",
    )
    budget: str | dict[str, str] | None = row(  # noqa: RUF009 (it makes a field)
        None,
        parse_budget,
        "`6GiB`, `25%`, `auto`, `cuda:0=6GiB,cuda:1=25%`",
        "the most bytes that may be used on an accelerator",
        "none",
        instead="tensorsManager.budget = ...",
    )
    page_lock: str = row(
        "50%",
        texts.size_or_share,
        "`8GiB`, `25%`, `0`",
        "the most host memory to page-lock",
        "not swappable",
        instead="",
    )
    faults: str | None = row(
        None,
        texts.faults,
        "`copy:17,alloc:3`",
        "fail the 17th copy and the 3rd allocation (simulated devices only)",
        "none",
    )
    inject_to: tuple[str, ...] = row(
        (),
        texts.prefixes_of_others,
        "`transformers,diffusers`",
        "packages whose names taken from torch are rebound, as `injectTo.append` does",
        "none",
        instead="injectTo.append(...)",
    )
    exclude: tuple[str, ...] = row(
        (),
        texts.prefixes,
        "`package.module`",
        "modules that keep plain tensors, as `injectTo.exclude` does",
        "none",
        instead="injectTo.exclude(...)",
    )
    run: str | None = row(
        None,
        texts.name,
        "path",
        "the folder that the processes of one `torchtensorref run` share; set by it",
        "none",
    )


#: Every option by its name, in the order of the documents.
OPTIONS: dict[str, Option] = {
    field.name: Option(
        name=field.name,
        variable=PREFIX + field.name.upper(),
        values=field.metadata["values"],
        default=field.default,
        effect=field.metadata["effect"],
        cost=field.metadata["cost"],
        instead=field.metadata["instead"],
        _parse=field.metadata["parse"],
    )
    for field in dataclasses.fields(Settings)
}


def read(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables.

    Parameters
    ----------
    environ : Mapping of str to str
        All variables; those that do not begin with ``TTR_``, or that in lower case, are not
        looked at, and an empty one counts as not set.

    Returns
    -------
    Settings
        A new object; what is not set has its default.

    Raises
    ------
    ConfigError
        For a value that is not understood. Not with ``TTR_DISABLE=1``, which has nothing of
        ours stand in the way: such ones are then as good as not set.

    Notes
    -----
    A ``TTR_`` variable that does not exist may be somebody else's, and no program may die of it:
    that is said to the logger, naming the nearest that does exist. A mistyped switch that does
    nothing and says nothing costs a day.
    """
    values: dict[str, Any] = {}
    by_variable = {option.variable: option for option in OPTIONS.values()}
    given = {n: text.strip() for n, text in environ.items() if n.upper().startswith(PREFIX)}
    given = {"TTR_DISABLE": given.pop("TTR_DISABLE", ""), **given}  # first: it decides on the rest
    for variable, text in given.items():
        option = by_variable.get(variable)
        try:
            if option is None:
                _say_unknown(variable, by_variable, is_disabled=values.get("disable", False))
            elif text:
                values[option.name] = option.parse(text)
        except ConfigError:
            if not values.get("disable"):
                raise
    return Settings(**values)


def _say_unknown(variable: str, known: Mapping[str, Option], *, is_disabled: bool) -> None:
    # By the logger: a warning could be an error, and stop the program after all.
    if not is_disabled:
        _log.warning(
            "torchTensorRef: the environment variable %s is none of ours, and does nothing. %s",
            variable,
            did_you_mean(variable, known),
        )


#: What holds now, in the whole process. Always this object: its attributes change.
settings = read(os.environ)

#: Called after a change by `options`, with what held before: for what is read only once otherwise.
listeners: list[Callable[[Settings], None]] = []


def _apply(values: Mapping[str, Any]) -> None:
    before = dataclasses.replace(settings)
    for name, value in values.items():
        setattr(settings, name, value)
    is_looked_at = settings.check >= 2 or settings.shadow or settings.trace >= 3
    watch.want("settings", is_looked_at, takes_apart=True, is_slow=True)
    for listener in listeners:
        listener(before)


_apply({})


def _checked(changes: Mapping[str, object]) -> dict[str, object]:
    """`changes` with every value read, if it was text; ConfigError before any is applied."""
    checked = {}
    for name, value in changes.items():
        option = OPTIONS.get(name)
        if option is None:
            raise ConfigError(
                f"There is no option {name!r}. " + did_you_mean(name, OPTIONS),
                name=name,
                known=tuple(OPTIONS),
                nearest=nearest(name, OPTIONS),
            )
        if option.instead is not None:
            write = f"Write {option.instead}, or set" if option.instead else "Set"
            raise ConfigError(
                f"The option {name!r} says how to begin, so a scope would change nothing. "
                f"{write} {option.variable} before the import.",
                name=name,
            )
        if value is option.default:
            checked[name] = option.default
        else:
            checked[name] = option.parse(_text_of(option, value), f"options({name}=...)")
    return checked


def _text_of(option: Option, value: Any) -> str:
    """Write a value as the environment would hold it; ConfigError for one of another kind."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if path is None or isinstance(path, str):
        return str(path)
    if isinstance(option.default, int):
        with suppress(TypeError):  # a whole number of whatever kind
            return str(operator.index(value))
    raise ConfigError(
        f"options({option.name}={value!r}) is not understood: it takes {option.values}, as text or "
        f"as a value, and not a {type(value).__name__}.",
        name=option.name,
    )


@contextmanager
def options(**changes: object) -> Iterator[Settings]:
    """Set options for a scope, and set them back at its end.

    Parameters
    ----------
    **changes : object
        Options by name, as values or as the text that the environment would hold.

    Yields
    ------
    Settings
        What holds inside.

    Raises
    ------
    ConfigError
        For an unknown option, naming the nearest, one that says how to begin, naming what to
        write instead, or a value that is not understood. Nothing is changed then.

    Notes
    -----
    Holds for the whole process, in all threads: a switch is read by whichever thread runs
    an operator. Scopes nest; they must end in the reverse order.
    """
    checked = _checked(changes)
    before = {name: getattr(settings, name) for name in checked}
    try:
        _apply(checked)
        yield settings
    finally:
        _apply(before)
