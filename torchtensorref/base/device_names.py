"""What a device may be called, for those who refuse a name before torch is there."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ConfigError, nearest

#: What the name of a device may begin with; "hip" is what its users call "cuda".
DEVICE_KINDS = ("cpu", "cuda", "hip", "mps", "sim", "xpu")

#: What people say for a kind, where spelling would lead to another.
MEANT_BY_WORD = {
    "accelerator": "cuda",
    "amd": "hip",
    "apple": "mps",
    "gpu": "cuda",
    "host": "cpu",
    "intel": "xpu",
    "metal": "mps",
    "nvidia": "cuda",
    "rocm": "hip",
    "simulated": "sim",
}


def no_such_device(
    name: str, known: Iterable[str] = DEVICE_KINDS, *, where: str = ""
) -> ConfigError:
    """Make the error for a name that no device has.

    Parameters
    ----------
    name : str
        What was written.
    known : iterable of str, optional
        The names that exist; the kinds, if not given.
    where : str, optional
        Where it was written, as the end of a sentence.
    """
    known = tuple(dict.fromkeys(known))
    kind, colon, rest = name.strip().lower().partition(":")
    meant = MEANT_BY_WORD.get(kind)
    if meant is not None:
        close: str | None = f"{meant}{colon}{rest}"
    elif colon and kind in DEVICE_KINDS and kind not in ("cpu", "sim"):
        close = f"{kind}:0"
    else:
        close = nearest(name, known)
    cards = [one for one in known if ":" in one]
    listed = ", ".join(sorted(set(known).difference(cards)))
    if cards:
        listed += f", and {len(cards)} simulated cards (torchtensorref forecast --help)"
    advice = f"Did you mean {close!r}? " * (close is not None) + f"Known: {listed}."
    return ConfigError(
        f"There is no device {name!r}{where}. {advice}", name=name, known=known, nearest=close
    )


def kind_of(name: str, *, where: str = "") -> str:
    """Return what the name of a device begins with; ConfigError if no device is called so."""
    kind = name.strip().lower().partition(":")[0]
    if kind not in DEVICE_KINDS:
        raise no_such_device(name, where=where)
    return kind
