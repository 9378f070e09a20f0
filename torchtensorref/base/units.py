"""Sizes, shares and durations: read from text, written for people."""

from __future__ import annotations

import math
import re

from .errors import ConfigError, nearest

__all__ = ["format_nbytes", "format_ns", "parse_limit", "parse_nbytes", "parse_share"]

_PREFIXES = "KMGTP"

#: Bytes per unit. Binary and decimal units differ, as their standards say.
UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)},
}

_NBYTES_BY_FOLD = {unit.casefold(): nbytes for unit, nbytes in UNITS.items()}
_AMOUNT = re.compile(r"\s*(\d[\d_]*)(?:\.(\d+))?\s*([^\W\d_]*|%)\s*", re.ASCII)

#: Python itself reads no number of more than a few thousand digits; a size has a few dozen.
_MOST_DIGITS = 1000


def _bad_size(text: object, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a size: {why}. Write a number of bytes such as 6442450944, "
        "or a number and a unit such as '6GiB', '1.5GiB' or '512MB'.",
        name=str(text),
        known=tuple(UNITS),
    )


def _unit_nbytes(text: str, unit: str) -> int:
    """Bytes in one `unit`; a ConfigError that names the nearest one if there is none."""
    known = _NBYTES_BY_FOLD.get(unit.casefold())
    if known is not None:
        return known
    if unit.upper() in _PREFIXES:
        binary, decimal = f"{unit.upper()}iB", f"{unit.upper()}B"
        why = (
            f"{unit!r} is ambiguous; write {binary!r} ({UNITS[binary]:,} bytes) "
            f"or {decimal!r} ({UNITS[decimal]:,} bytes)"
        )
        raise _bad_size(text, why)
    close = nearest(unit, UNITS)
    hint = f" (did you mean {close!r}?)" if close else ""
    raise _bad_size(text, f"the unit {unit!r} is unknown{hint}")


def parse_nbytes(size: int | str) -> int:
    """Read a size in bytes from a number or from text with a unit.

    Parameters
    ----------
    size : int or str
        A number of bytes, or text: digits with an optional fraction and an optional unit.
        Units are B, KiB to PiB (powers of 1024) and KB to PB (powers of 1000), in any case.

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    ConfigError
        If it is negative, or is not understood; the message has an example and the
        nearest unit.

    Examples
    --------
    >>> parse_nbytes("1.5GiB")
    1610612736
    >>> parse_nbytes("512 MB")
    512000000
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise _bad_size(size, f"it is of type {type(size).__name__}")
    if isinstance(size, int):
        if size < 0:
            raise _bad_size(size, "it is negative")
        return size
    match = _AMOUNT.fullmatch(size)
    if match is None:
        is_negative = _AMOUNT.fullmatch(size.strip().removeprefix("-")) is not None
        why = "it is negative" if is_negative else "it is not a number with a unit"
        raise _bad_size(size, why)
    whole, fraction, unit = match[1].replace("_", ""), match[2] or "", match[3]
    if len(whole + fraction) > _MOST_DIGITS:
        raise _bad_size(size, "it has too many digits")
    # Integers throughout: a float would lose bytes above 2**53.
    nbytes = int(whole + fraction) * _unit_nbytes(size, unit or "B")
    return int(nbytes // 10 ** len(fraction))


def parse_limit(size: float | str) -> int:
    """Read a size that limits something: as `parse_nbytes`, but not what is hardly meant.

    Parameters
    ----------
    size : int or str
        As for `parse_nbytes`. Text without a unit is taken for bytes from 1 MiB on.

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    ConfigError
        If it is not understood, or is text of a few bytes without a unit; the message says what
        was probably meant.

    Examples
    --------
    >>> parse_limit("6442450944")
    6442450944
    >>> parse_limit("6B")
    6
    """
    if isinstance(size, float):
        if 0 <= size < math.inf:
            raise _unlikely(size, "is no number of bytes")
        raise _bad_size(size, "it is no number of bytes")
    nbytes = parse_nbytes(size)
    if isinstance(size, str) and size.strip().rstrip("_")[-1:].isdigit():
        is_fraction = "." in size
        if is_fraction or 0 < nbytes < 1 << 20:
            said = "is no number of bytes" if is_fraction else f"is {nbytes} bytes"
            raise _unlikely(size, f"without a unit {said}")
    return nbytes


def _unlikely(size: str | float, why: str) -> ConfigError:
    digits = str(size).strip()
    if "__" in digits or "_." in digits or digits.endswith("_"):
        digits = digits.replace("_", "")
    amount = float(digits)
    unit = "GiB" if amount < 1024 else "MiB" if amount < 1 << 20 else "B"
    meant = f"{digits}{unit}" if unit != "B" else f"{amount:.0f}B"
    share = f" or '{amount:.0%}'" if 0 < amount < 1 else ""
    in_bytes = "" if isinstance(size, float) or "." in size else f" For bytes, write '{size}B'."
    return ConfigError(
        f"{size!r} {why}. Did you mean {meant!r}{share}?{in_bytes}", name=str(size), nearest=meant
    )


def parse_share(text: str) -> float:
    """Read a share of a whole from a percentage.

    Parameters
    ----------
    text : str
        A number followed by a percent sign, above 0 and at most 100.

    Returns
    -------
    float
        The share, above 0 and at most 1.

    Raises
    ------
    ConfigError
        If it is not a percentage, or is outside of that range.

    Examples
    --------
    >>> parse_share("25%")
    0.25
    """
    match = _AMOUNT.fullmatch(text)
    if match is not None and match[3] == "%":
        share = float(f"{match[1].replace('_', '')}.{match[2] or 0}") / 100
        if 0 < share <= 1:
            return share
    raise ConfigError(
        f"{text!r} is not a share. Write a percentage above 0% and up to 100%, such as '25%'.",
        name=text,
    )


def format_nbytes(nbytes: int) -> str:
    """Describe a number of bytes in binary units, for people.

    Parameters
    ----------
    nbytes : int
        The number of bytes; negative for a difference.

    Returns
    -------
    str
        Whole bytes below 1 KiB, else two decimals and a unit.

    Notes
    -----
    The result is rounded: for messages, never to be read back.

    Examples
    --------
    >>> format_nbytes(1000)
    '1000 B'
    >>> format_nbytes(24 * 1024**2)
    '24.00 MiB'
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, unit = nbytes / 1024, "KiB"
    for prefix in _PREFIXES[1:]:
        # What would be shown as 1024.00 belongs to the next unit.
        if abs(value) < 1023.995:
            break
        value, unit = value / 1024, f"{prefix}iB"
    return f"{value:.2f} {unit}"


def format_ns(duration_ns: int) -> str:
    """Describe a duration, for people.

    Parameters
    ----------
    duration_ns : int
        Nanoseconds; negative for a difference.

    Returns
    -------
    str
        Whole nanoseconds below a microsecond, else two decimals and a unit up to minutes.

    Notes
    -----
    The result is rounded: for messages, never to be read back.

    Examples
    --------
    >>> format_ns(1_500_000)
    '1.50 ms'
    """
    if abs(duration_ns) < 1000:
        return f"{duration_ns} ns"
    value, unit = duration_ns / 1000, "us"
    for larger, ratio in (("ms", 1000), ("s", 1000), ("min", 60)):
        # What would be shown as 1000.00 (or 60.00) belongs to the next unit.
        if abs(value) < ratio - 0.005:
            break
        value, unit = value / ratio, larger
    return f"{value:.2f} {unit}"
