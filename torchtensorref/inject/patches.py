"""The kinds of patches: replace an attribute, add a hook. Each can be undone, and twice is once."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

from ..tensor.patched_function import PatchedFunction

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class Row:
    """What all rows of a table of patches have: where in another library they belong."""

    module: str
    path: str

    @property
    def name(self) -> str:
        """What is changed there, in full: torch.rand."""
        return f"{self.module}.{self.path}"

    def resolve(self) -> tuple[Any, str, Any]:
        """Return who has the attribute, its name there, and what it is now."""
        found: tuple[Any, str, Any] = wrapt.resolve_path(
            importlib.import_module(self.module), self.path
        )
        return found


@dataclass(eq=False)
class Replacement(Row):
    """Something of another library in whose place we put our own, and that we give back."""

    wrapper: Wrapper
    reason: str
    original: Any = field(default=None, init=False)
    patched: Any = field(default=None, init=False)
    #: Why the row does not match this version of the library; "" where it does.
    absence: str = field(default="", init=False)

    @property
    def installed(self) -> bool:
        """Whether the attribute is ours now."""
        return self.patched is not None

    def install(self) -> None:
        """Replace the attribute, unless it is replaced; note where there is none."""
        if self.installed:
            return
        try:
            owner, name, self.original = self._find()
            patched = PatchedFunction(self.original, self.wrapper)
            self._put(owner, name, patched)
        except (AttributeError, ImportError, KeyError, TypeError) as error:
            self.absence = f"{type(error).__name__}: {error}"
            return
        self.absence = ""
        self.patched = patched

    def uninstall(self) -> None:
        """Put the same object back, unless somebody else has replaced ours since."""
        if not self.installed:
            return
        owner, name, current = self._find()
        if current is self.patched:
            self._put(owner, name, self.original)
        self.patched = None

    def _find(self) -> tuple[Any, str, Any]:
        """Return who has the attribute, its name there, and what it is now."""
        raise NotImplementedError

    def _put(self, owner: Any, name: str, value: Any) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class Patch(Replacement):
    """One attribute of another library that we replace."""

    def _find(self) -> tuple[Any, str, Any]:
        return self.resolve()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)


@dataclass(eq=False)
class MethodPatch(Replacement):
    """A method of a class written in C that we replace: Python cannot assign to such a class.

    Or one that Python keeps in another form than it was written in: `__new__`. Its dictionary can
    be reached all the same. For what is looked up there at each call (methods, `__new__`,
    `__instancecheck__`, not other slots) that is all CPython asks for, as long as it is told to
    forget what it has looked up before.
    """

    def _find(self) -> tuple[Any, str, Any]:
        *names, name = self.path.split(".")
        owner = functools.reduce(getattr, names, importlib.import_module(self.module))
        if isinstance(owner, PatchedFunction) or not isinstance(owner, type):
            raise TypeError(f"{self.path} is not of a class")
        return owner, name, vars(owner)[name]

    def _put(self, owner: Any, name: str, value: Any) -> None:
        (namespace,) = (part for part in gc.get_referents(vars(owner)) if type(part) is dict)
        namespace[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


@dataclass(eq=False)
class HookPatch(Row):
    """A hook that another library offers, taken instead of replacing anything."""

    hook: Callable[..., Any]
    reason: str
    handle: Any = field(default=None, init=False)
    absence: str = field(default="", init=False)

    @property
    def installed(self) -> bool:
        """Whether the hook is registered."""
        return self.handle is not None

    def install(self) -> None:
        """Register the hook, unless it is registered; note where there is no place for it."""
        if self.installed:
            return
        try:
            register = getattr(importlib.import_module(self.module), self.path)
        except (AttributeError, ImportError) as error:
            self.absence = str(error)
            return
        self.absence = ""
        self.handle = register(self.hook)

    def uninstall(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


@dataclass(eq=False)
class LatePatch(Row):
    """A change of a module that is costly to import: made when somebody else imports it."""

    change: Callable[[Any], Callable[[], None]]
    reason: str
    installed: bool = field(default=False, init=False)
    absence: str = field(default="", init=False)
    _is_registered: bool = field(default=False, init=False)
    _undo: Callable[[], None] | None = field(default=None, init=False)

    def install(self) -> None:
        """Make the change now if the module is there, else when it comes."""
        self.installed = True
        if self._is_registered:
            if self.module in sys.modules:
                self._apply(sys.modules[self.module])
            return
        self._is_registered = True
        wrapt.register_post_import_hook(self._apply, self.module)

    def _apply(self, module: Any) -> None:
        if not self.installed or self._undo is not None:
            return
        try:
            self._undo = self.change(module)
        except Exception as error:
            self.absence = f"{type(error).__name__}: {error}"

    def uninstall(self) -> None:
        """Take the change back."""
        self.installed = False
        if self._undo is not None:
            self._undo()
            self._undo = None
