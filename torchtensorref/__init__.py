"""Run torch programs on accelerators smaller than their tensors.

Importing this package is cheap: it imports no torch. It asks to be told when torch is imported, and
then patches what makes tensors. Everything else is loaded when it is first asked for.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING, Any

if __name__ != "torchTensorRef":
    raise ImportError(
        f"This package is not {__name__!r}: write `import torchTensorRef`. Under another name "
        "there would be two managers that know nothing of each other.",
        name=__name__,
    )

from ._version import __version__ as __version__
from .base.errors import ConfigError as ConfigError
from .base.errors import ExposedError as ExposedError
from .base.errors import InvariantError as InvariantError
from .base.errors import LostError as LostError
from .base.errors import StrategyError as StrategyError
from .base.errors import TensorRefError as TensorRefError
from .base.errors import TransferError as TransferError
from .base.errors import UnsupportedOpError as UnsupportedOpError
from .base.options import options as options
from .base.public_module import PublicModule as _PublicModule
from .inject import hooks
from .inject.hooks import disabled as disabled
from .inject.hooks import install as install
from .inject.hooks import uninstall as uninstall
from .inject.inject_to import injectTo as injectTo

if TYPE_CHECKING:
    from .memory.budget import OutOfBudgetError as OutOfBudgetError
    from .memory.manager import TensorsManager as TensorsManager
    from .memory.manager import tensorsManager as tensorsManager
    from .tensor.tensor_ref import Surface as TensorRef

#: Public names that need torch: loaded by the first use, from these modules.
_NEED_TORCH = {
    "OutOfBudgetError": ".memory.budget",
    "TensorRef": ".memory.ref",
    "TensorsManager": ".memory.manager",
    "tensorsManager": ".memory.manager",
}

__all__ = [
    "ConfigError",
    "ExposedError",
    "InvariantError",
    "OutOfBudgetError",
    "StrategyError",
    "TensorRef",
    "TensorRefError",
    "TensorsManager",
    "TransferError",
    "UnsupportedOpError",
    "__version__",
    "disabled",
    "injectTo",
    "install",
    "options",
    "tensorsManager",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hooks.load(".tensor.install")  # it connects the parts: a manager alone knows no TensorRef
    value = globals()[name] = getattr(hooks.load(_NEED_TORCH[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)


_sys.modules[__name__].__class__ = _PublicModule
hooks.register()
