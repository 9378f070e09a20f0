"""The package as an object: what a program may set is said by name, nothing else is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .errors import did_you_mean, nearest
from .options import OPTIONS

__all__ = ["MANAGER_METHODS", "MANAGER_SETTINGS", "LazyModule", "PublicModule", "no_attribute"]

#: What may be set on `tensorsManager`.
MANAGER_SETTINGS = (
    "budget",
    "device",
    "history",
    "middlewares",
    "placement",
    "strategy",
)

#: What may be asked of it.
MANAGER_METHODS = (
    "adopt",
    "bring_all_home",
    "check",
    "describe",
    "live",
    "name_of",
    "off",
    "on",
    "release",
    "report",
    "reset_stats",
    "stats",
    "story",
    "trace",
)

#: Public names that are told things, and are not exchanged for them.
_TOLD = {
    "injectTo": "write torchTensorRef.injectTo.append(...)",
    "options": "write `with torchTensorRef.options(...):`",
}


class PublicModule(ModuleType):
    """A module that refuses names which nobody would ever read."""

    def __setattr__(self, name: str, value: object) -> None:
        """Take submodules and what is there already; say of anything else where it belongs.

        Raises
        ------
        AttributeError
            Nothing has that name, so nothing would come of it; the message has what is meant.
        """
        is_ours = name.startswith("_") or isinstance(value, ModuleType)
        if not is_ours and (name in _TOLD or name not in dir(self)):
            raise AttributeError(
                f"{self.__name__}.{name} cannot be set: {way_out(name, dir(self))}",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)


def no_attribute(module: ModuleType, name: str) -> AttributeError:
    """Return what to raise for a name that the package has not: where it is, if it is elsewhere.

    Python adds the nearest name itself where the error is shown: who only asks pays for nothing.
    """
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if name in (*MANAGER_SETTINGS, *MANAGER_METHODS):
        text += f": write {module.__name__}.tensorsManager.{name}"
    return AttributeError(text, name=name, obj=module)


class LazyModule(ModuleType):
    """A public module whose parts lie elsewhere, and are loaded when one is first asked for.

    Parameters
    ----------
    name : str
        The name under which programs import it.
    load : Callable
        Loads the module that has its parts, and returns it.
    """

    def __init__(self, name: str, load: Callable[[], ModuleType]) -> None:
        super().__init__(name)
        self.__load = load

    def __getattr__(self, name: str) -> Any:
        """Return a part; what Python itself asks every module for loads nothing."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        parts = self.__load()
        if not hasattr(parts, name):
            raise AttributeError(
                f"{self.__name__} has no {name!r}. {did_you_mean(name, parts.__all__)}",
                name=name,
                obj=self,
            )
        return getattr(parts, name)

    def __dir__(self) -> list[str]:
        """Return the names of the parts."""
        return list(self.__load().__all__)


def way_out(name: str, public: list[str]) -> str:
    """Say what somebody has meant who sets a name of the package."""
    if name in _TOLD:
        return _TOLD[name]
    meant = nearest(name, [*MANAGER_SETTINGS, *OPTIONS, *_TOLD], likeness=0.7)
    if meant in MANAGER_SETTINGS:
        return f"write torchTensorRef.tensorsManager.{meant} = ..."
    if meant in OPTIONS:
        return (
            f"write `with torchTensorRef.options({meant}=...):`, or set {OPTIONS[meant].variable}"
        )
    if meant in _TOLD:
        return _TOLD[meant]
    settings = ", ".join(MANAGER_SETTINGS)
    close = nearest(name, public)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{hint}settings are on torchTensorRef.tensorsManager: {settings}"
