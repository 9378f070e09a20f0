"""When torch is imported, patch it: registration, install, uninstall, and who is left out.

Loaded by every import of torchTensorRef, so it knows only the options and the standard library;
even wrapt is loaded no earlier than torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from ..base import torch_versions
from ..base.activation import disabled as disabled
from ..base.activation import is_disabled as is_disabled
from ..base.options import settings

PACKAGE = __package__.rpartition(".")[0]


@dataclass
class HookState:
    """What has become of the hook; `env` reports it."""

    #: Whether what torch makes comes under management. The patches ask it at each call.
    active: bool = False
    #: Whether torch had been imported before we were; None: not registered at all.
    torch_was_first: bool | None = None
    #: Why the patches could not be installed, in words.
    failures: list[str] = field(default_factory=list)


state = HookState()


def load(name: str) -> ModuleType:
    """Import a module of ours by its relative name; ImportError in one sentence without torch."""
    try:
        return importlib.import_module(name, PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"torchTensorRef needs {torch_versions.WANTED}, and there is none: pip install torch.",
            name="torch",
        ) from None


def is_ref(value: Any) -> bool:
    """Whether a value is a TensorRef; what makes them need not be loaded."""
    kind = getattr(sys.modules.get(f"{PACKAGE}.memory.ref"), "TensorRef", None)
    return kind is not None and isinstance(value, kind)


class _WhenTorchIsLookedFor:
    """A finder that finds nothing: it registers with wrapt when somebody looks for torch.

    wrapt takes longer to import than all of us. Whoever looks for torch does not notice.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        _stop_waiting()
        _register_with_wrapt()
        # The caller is in the middle of the list of finders, behind wrapt's: begin again.
        return importlib.util.find_spec(name)


def _stop_waiting() -> None:
    if _WhenTorchIsLookedFor in sys.meta_path:
        sys.meta_path.remove(_WhenTorchIsLookedFor)


_registered = False


def _register_with_wrapt() -> None:
    global _registered
    if not _registered:
        # Nobody can unregister at wrapt, so this happens once and the hook asks `state`.
        _registered = True
        import wrapt

        wrapt.register_post_import_hook(f"{__name__}:on_torch", "torch")


def on_torch(module: ModuleType) -> None:
    """Patch torch, which has just been imported. Never raises into the import."""
    if not state.active:
        return
    version = str(getattr(module, "__version__", ""))
    try:
        complaint = complaint_of(version)
        if not complaint:
            load(".inject.torch_").apply()
    except Exception as error:
        complaint = f"{type(error).__name__}: {error}"
    if complaint:
        state.active = False
        state.failures.append(complaint)
        warnings.warn(
            f"torchTensorRef could not patch torch {version} and stays out of the way: "
            f"{complaint}. Set TTR_DISABLE=1 to silence this.",
            RuntimeWarning,
            stacklevel=2,
        )


def complaint_of(version: str) -> str:
    """Say why a torch of that version will not do; "" if it will."""
    is_known = len(torch_versions.numbers_of(version)) == 2
    if not is_known or torch_versions.has(torch_versions.MANAGEMENT, version):
        return ""
    return f"{torch_versions.WANTED} is needed"


def register() -> None:
    """Ask to be told when torch is imported; patch at once if it has been."""
    if state.torch_was_first is None:
        state.torch_was_first = "torch" in sys.modules
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    if not settings.disable and not _is_fork_server():
        install()


def _is_fork_server() -> bool:
    """Whether this process is one of `multiprocessing` that only forks others.

    It imports the program for them, and is plain as they are: with an accelerator open it could
    fork nobody who uses one. Python 3.14 starts it where older ones fork the program itself.
    """
    frame: FrameType | None = sys._getframe(1)
    names = set()
    while frame is not None:
        if frame.f_globals.get("__name__") == "multiprocessing.forkserver":
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "main" in names and "_serve_one" not in names  # the latter runs a child of it


def install() -> None:
    """Patch torch, now or when it is imported. Twice is as good as once.

    Notes
    -----
    Importing torchTensorRef does this, unless `TTR_DISABLE=1`. It also takes back an `uninstall`.
    """
    state.active = True
    if _registered:
        if "torch" in sys.modules:
            on_torch(sys.modules["torch"])
    elif "torch" in sys.modules:
        _register_with_wrapt()
    elif _WhenTorchIsLookedFor not in sys.meta_path:
        sys.meta_path.insert(0, _WhenTorchIsLookedFor)


def uninstall() -> None:
    """Give torch its own functions back, the same objects; TensorRefs that live go on working."""
    state.active = False
    _stop_waiting()
    patches = sys.modules.get(f"{PACKAGE}.inject.torch_")
    if patches is not None:
        patches.undo()
    wiring = sys.modules.get(f"{PACKAGE}.tensor.install")
    if wiring is not None:
        wiring.uninstall()


def _after_fork() -> None:
    # A forked child (a worker of a DataLoader) has our locks and no accelerator: what it makes
    # stays plain, and it can send that home like any worker.
    state.active = False
