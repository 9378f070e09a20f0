"""Which path ready operators take, in C++ or in Python, and what blocks and books are made of.

Where the library in C++ is chosen and built, `Block`, `Ledger` and `Books` are derived from its
classes, and keep there what operators read and count without Python. Else they are derived from
the classes below, and keep it themselves. This is decided once, when the first of them is loaded.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
from typing import Any

import torch

from ..base import core_build
from ..base.options import settings
from ..devices.storages import bytes_of, storage_of
from .core_test import BOTH_KEYS, fault_of


class _SettledWhenAskedFor:
    """What a block gets when somebody asks for it: until then whoever made the block keeps less."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, block: Any, owner: type) -> Any:
        births = block.births
        if births is not None:  # else another thread has settled it meanwhile
            births.settle(block)
        return vars(block)[self._name]


class PlainBlock:
    """A block that operators in C++ know nothing of."""

    #: Operators in C++ that run on it now.
    users = 0
    logged_as = 0
    use_count = 0
    given_by_value_count = 0
    is_persistent = is_kept = is_rehoused = False
    #: See `Block`. In C++ only a storage is kept of what is adopted.
    adopted: Any = None
    replicas: Any = _SettledWhenAskedFor()
    exposure: Any = _SettledWhenAskedFor()

    @property
    def settled(self) -> Any:
        """The replicas, if they have been asked for."""
        return vars(self).get("replicas")


class PlainLedger:
    """A ledger without newborns in C++."""

    #: Bytes of fresh results that C++ counts.
    newborn_nbytes = 0

    def count_for(self, device: Any) -> None:
        """Count the fresh results of operators on a device: nobody makes any."""

    def take_over(self, block: Any) -> int:
        """Stop counting a newborn; return its bytes."""
        return 0

    def newborns(self, last: int) -> list[Any]:
        """Return the blocks of living newborns of operators up to a number."""
        return []

    def recounted_nbytes(self) -> int:
        """Return the sum of the newborns, counted again."""
        return 0


class PlainBooks:
    """Books that operators in C++ do not read."""


#: The library, None on the path in Python.
library: Any = None
#: Why that path was taken, in words.
why = "TTR_CORE=python" if settings.core == "python" else ""


def _loaded() -> Any:
    """Load the library; None where it is not chosen or not there, or something is wrong with it."""
    global why
    if why:
        return None
    try:
        wanted = core_build.of_this_process()
        if not wanted.library.exists():
            begun = core_build.begin(wanted)
            why = "it is being built, for the next start" if begun else wanted.state
            return None
        found = _module(str(wanted.library))
        why = fault_of(found)
    except Exception as error:  # whatever it is: without the library everything runs, too
        why = f"{type(error).__name__}: {error}"
    return found if not why else None


def _module(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(core_build.NAME, path)
    spec = importlib.util.spec_from_loader(core_build.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


library = _loaded()
if library is None and settings.core != "python":
    logging.getLogger("torchTensorRef").warning(
        "Operators take the path in Python, not that in C++: %s.", why
    )

#: The dispatch keys that TensorRefs carry, which torch itself leaves alone: one above autograd,
#: and in C++ another one below it.
KEY_NAMES = BOTH_KEYS[:1] if library is None else BOTH_KEYS

BlockBase: Any = PlainBlock if library is None else library.BlockBase
LedgerBase: Any = PlainLedger if library is None else library.LedgerBase
BooksBase: Any = PlainBooks if library is None else library.BooksBase


def storage_under(plain: torch.Tensor) -> tuple[int, int, bool]:
    """Return the number of a tensor's storage, its bytes, and whether it could have others.

    Torch keeps the object that Python has of a storage as long as the storage: here none is made.
    """
    if library is not None:
        found: tuple[int, int, bool] = library.storage_under(plain, False)
        return found
    storage = storage_of(plain)
    return storage._cdata, storage.nbytes(), storage.resizable()


def bytes_to_keep(plain: torch.Tensor) -> torch.Tensor:
    """Return what a block is given of a tensor to adopt; in C++ it keeps the storage only."""
    return plain if library is not None else bytes_of(plain)


def hold_weakly(plain: torch.Tensor) -> int:
    """Keep the number of a tensor's storage from becoming another one's, until it is let go."""
    if library is None:
        held: Any = storage_of(plain)._weak_ref()
    else:
        held, _, _ = library.storage_under(plain, True)
    return int(held)


def let_go(storage: int) -> None:
    """Give back the number of a storage."""
    torch.UntypedStorage._free_weak_ref(storage)


def running_elsewhere() -> int:
    """Return how many other threads run operators in C++."""
    return 0 if library is None else int(library.running_elsewhere())


def begin_anew() -> None:
    """Forget in a forked child what other threads were doing in C++."""
    if library is not None:
        library.begin_anew()


def take_uses() -> list[tuple[int, int, Any, bool]]:
    """Return (tick, block, operator, whether it was written) of the uses noted in C++."""
    return [] if library is None else list(library.take_uses())


def path_in_words() -> str:
    """Say which path is on, and why."""
    return "C++" if library is not None else f"Python ({why})"
