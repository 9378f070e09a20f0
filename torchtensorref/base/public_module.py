"""The package as an object: what a program may set is said by name, nothing else is taken."""

from __future__ import annotations

from types import ModuleType

from .errors import nearest
from .options import OPTIONS

__all__ = ["MANAGER_SETTINGS", "PublicModule"]

#: What may be set on `tensorsManager`.
MANAGER_SETTINGS = ("budget", "device", "regions", "strategy")

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
