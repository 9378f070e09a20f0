"""How the texts of options are read: one function for each kind of value."""

from __future__ import annotations

import os
from collections.abc import Callable

from .device_names import kind_of
from .errors import ConfigError, did_you_mean, nearest
from .units import parse_limit, parse_share

#: As a budget: what is free there, less a margin for others.
AUTO = "auto"
#: What `TTR_FAULTS` can make fail.
FAULT_KINDS = ("alloc", "copy", "late")


class BadValueError(Exception):
    """Says why a text is no value for an option; turned into a ConfigError by `Option.parse`."""


def level(highest: int) -> Callable[[str], int]:
    """Read a number from 0 to `highest`."""

    def parse(text: str) -> int:
        if text.strip() not in {str(level) for level in range(highest + 1)}:
            raise BadValueError(f"use a number from 0 to {highest}")
        return int(text)

    return parse


def switch(text: str) -> bool:
    """Read 0 or 1."""
    if text.strip() not in ("0", "1"):
        raise BadValueError("use 0 (off) or 1 (on)")
    return text.strip() == "1"


def name(text: str) -> str:
    """Read a name: any text."""
    return text.strip()


def file_to_write(text: str) -> str:
    """Read the path of a file that can be written; give it back from the root on.

    Asked without a trace: nothing is made or touched, and a program may change its folder later.
    """
    path = os.path.abspath(text.strip())
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise BadValueError(f"{path!r} is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise BadValueError(f"there is no folder {folder!r}; make it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise BadValueError(f"{path!r} may not be written; name a file where you may")
    return path


def path_to_write(path: object, said: str) -> str:
    """Read the path of a file that can be written; ConfigError, for what was `said`, of another."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{said} takes the path of a file to write, not {path!r}.")
    try:
        return file_to_write(os.fspath(path))
    except BadValueError as why:
        asked = f"{said}={os.fspath(path)!r}"
        raise ConfigError(f"{asked} is not understood: {why}.", name=str(path)) from None


def file_or(*words: str) -> Callable[[str], str]:
    """Read one of these words, or else the path of a file that can be written.

    A name that is nearly such a word is hardly that of a file.
    """

    def parse(text: str) -> str:
        text = text.strip()
        meant = None if text in words else nearest(text, words, likeness=0.8)
        if meant is not None:
            raise BadValueError(
                f"did you mean {meant!r}? For a file of that name, write './{text}'"
            )
        return text if text in words else file_to_write(text)

    return parse


def one_of(*known: str) -> Callable[[str], str]:
    """Read one of these words; of another, say which one was probably meant."""

    def parse(text: str) -> str:
        if text.strip() not in known:
            raise BadValueError(did_you_mean(text.strip(), known).removesuffix("."))
        return text.strip()

    return parse


def prefixes(text: str) -> tuple[str, ...]:
    """Read names of modules, separated by commas."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for prefix in found:
        if not all(part.isidentifier() for part in prefix.split(".")):
            raise BadValueError(
                f"{prefix!r} is not the name of a module; use names such as 'transformers', "
                "separated by commas"
            )
    return found


def prefixes_of_others(text: str) -> tuple[str, ...]:
    """Read names of modules that are none of ours: what manages tensors is not managed itself."""
    found = prefixes(text)
    for prefix in found:
        if prefix.partition(".")[0] == __name__.partition(".")[0]:
            raise BadValueError(f"{prefix!r} is the runtime itself; name the packages that use it")
    return found


def size_or_share(text: str) -> str:
    """Give `text` back if it is a size or a share."""
    parse = parse_share if text.strip().endswith("%") else parse_limit
    parse(text)
    return text


def amount(text: str) -> str:
    """Give what a device may hold back if it is a size, a share, or `AUTO`."""
    text = text.strip()
    if text.lower() == AUTO:
        return AUTO
    if nearest(text, (AUTO,)) is not None:
        raise ConfigError(f"{text!r} is no budget. Did you mean {AUTO!r}?", name=text, nearest=AUTO)
    return size_or_share(text)


def device(text: str) -> str:
    """Read the name of a device of a kind that there is, or several, separated by commas."""
    for name in text.split(","):
        kind_of(name.strip())
    return text.strip()


def parse_budget(text: str) -> str | dict[str, str]:
    """Check the text of a budget, and take it apart if it speaks of several devices.

    Parameters
    ----------
    text : str
        A size (``6GiB``), a share (``25%``), ``auto`` (what is free), or one of them per
        device, separated by commas (``cuda:0=6GiB,cuda:1=50%``).

    Returns
    -------
    str or dict of str to str
        What `tensorsManager.budget` takes: the amount, or the amounts by device name.

    Raises
    ------
    ConfigError
        If an amount is not understood, or no device has such a name.
    """
    if "=" not in text:
        if "," in text:
            raise ConfigError(
                f"The budget {text!r} is several amounts. Say which device has which: "
                "'cuda:0=6GiB,cuda:1=25%'.",
                name=text,
            )
        return amount(text)
    budgets = {}
    for part in text.split(","):
        device, equals, most = (piece.strip() for piece in part.partition("="))
        if not device or not equals:
            raise ConfigError(
                f"{part.strip()!r} in the budget {text!r} names no device and amount. "
                "Write it as 'cuda:0=6GiB,cuda:1=25%'.",
                name=text,
            )
        kind_of(device, where=f", which the budget {text!r} names")
        if device in budgets:
            raise ConfigError(
                f"The budget {text!r} names {device} twice. Name each device once.", name=device
            )
        budgets[device] = amount(most)
    return budgets


def budget_by_device(budget: str, devices: str) -> str:
    """Give amounts without names, separated by commas, to the devices in the same order."""
    amounts, names = budget.split(","), devices.split(",")
    if len(amounts) == 1 or "=" in budget:
        return budget
    if not all(map(str.strip, amounts)):
        raise ConfigError(f"The budget {budget!r} has a comma too many.", name=budget)
    if len(amounts) != len(names):
        raise ConfigError(
            f"The budget {budget!r} has {len(amounts)} amounts; devices: {len(names)} "
            f"({devices or 'the default'}). Give one to each, in their order. Or say which device "
            "has which: 'cuda:0=6GiB,cuda:1=25%'.",
            name=budget,
        )
    return ",".join(f"{n.strip()}={a.strip()}" for n, a in zip(names, amounts, strict=True))


def parse_faults(text: str) -> tuple[tuple[str, int], ...]:
    """Read a fault plan: which allocation or copy of a simulated device is to fail, or fails late.

    Parameters
    ----------
    text : str
        Pairs of a kind and a number counted from 1, separated by commas: ``copy:17,alloc:3``.

    Returns
    -------
    tuple of (str, int)
        The pairs, in the order given.

    Raises
    ------
    ConfigError
        If a pair is not understood; the message names the nearest kind.
    """
    plan = []
    for part in text.split(","):
        kind, _, number = (piece.strip() for piece in part.partition(":"))
        if kind not in FAULT_KINDS:
            raise ConfigError(
                f"{part.strip()!r} in the fault plan {text!r} names no kind of fault. "
                + did_you_mean(kind, FAULT_KINDS),
                name=kind,
                known=FAULT_KINDS,
                nearest=nearest(kind, FAULT_KINDS),
            )
        if not number.isdecimal() or len(number) > 18 or int(number) < 1:
            raise ConfigError(
                f"{part.strip()!r} in the fault plan {text!r} has no number from 1 upward. "
                "Write it as 'copy:17,alloc:3'.",
                name=part.strip(),
            )
        plan.append((kind, int(number)))
    return tuple(plan)


def faults(text: str) -> str:
    """Give `text` back if it is a fault plan: each simulated device takes it apart itself."""
    parse_faults(text)
    return text
