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
from .base.errors import PromisedError as PromisedError
from .base.errors import StrategyError as StrategyError
from .base.errors import TensorRefError as TensorRefError
from .base.errors import TransferError as TransferError
from .base.errors import UnsupportedOpError as UnsupportedOpError
from .base.refused_import import as_refusal as _as_refusal

try:
    from .base.options import options as options
except ConfigError as _error:
    raise _as_refusal(_error) from None
from .base.public_module import LazyModule as _LazyModule
from .base.public_module import PublicModule as _PublicModule
from .base.public_module import no_attribute as _no_attribute
from .inject import hooks
from .inject.hooks import disabled as disabled
from .inject.hooks import install as install
from .inject.hooks import uninstall as uninstall
from .inject.inject_to import injectTo as injectTo

if TYPE_CHECKING:
    from .interception import onlookers as middlewares
    from .memory.budget import OutOfBudgetError as OutOfBudgetError
    from .memory.manager import TensorsManager as TensorsManager
    from .memory.manager import tensorsManager as tensorsManager
    from .promises.forecast import Forecast as Forecast
    from .promises.forecast import forecast as forecast
    from .promises.promising import promising as promising
    from .tensor.einsum import Equation as Equation
    from .tensor.einsum import Semiring as Semiring
    from .tensor.einsum import einsum as einsum
    from .tensor.tensor_ref import Surface as TensorRef

#: Public names that need torch: loaded by the first use, from these modules.
_NEED_TORCH = {
    "Equation": ".tensor.einsum",
    "OutOfBudgetError": ".memory.budget",
    "Semiring": ".tensor.einsum",
    "TensorRef": ".memory.ref",
    "TensorsManager": ".memory.manager",
    "Forecast": ".promises.forecast",
    "einsum": ".tensor.einsum",
    "forecast": ".promises.forecast",
    "promising": ".promises.promising",
    "tensorsManager": ".memory.manager",
}


def _load(name: str) -> Any:
    hooks.load(".tensor.install")  # it connects the parts: a manager alone knows no TensorRef
    return hooks.load(name)


if not TYPE_CHECKING:
    middlewares = _LazyModule(f"{__name__}.middlewares", lambda: _load(".interception.onlookers"))
    # So that `from torchTensorRef.middlewares import Pin` finds it.
    _sys.modules[middlewares.__name__] = middlewares

__all__ = [
    "ConfigError",
    "Equation",
    "ExposedError",
    "Forecast",
    "InvariantError",
    "OutOfBudgetError",
    "PromisedError",
    "Semiring",
    "StrategyError",
    "TensorRef",
    "TensorRefError",
    "TensorsManager",
    "TransferError",
    "UnsupportedOpError",
    "__version__",
    "disabled",
    "einsum",
    "forecast",
    "injectTo",
    "install",
    "middlewares",
    "options",
    "promising",
    "tensorsManager",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise _no_attribute(_sys.modules[__name__], name)
    value = globals()[name] = getattr(_load(_NEED_TORCH[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)


_sys.modules[__name__].__class__ = _PublicModule
hooks.register()
