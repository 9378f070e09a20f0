"""A function of another library, and what we do around it."""

from __future__ import annotations

import pkgutil
from types import FunctionType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    _FunctionWrapper = wrapt.FunctionWrapper[..., Any]
else:
    _FunctionWrapper = wrapt.FunctionWrapper  # generic in new versions only


class PatchedFunction(_FunctionWrapper):
    """A function of another library (or a class that is called), and what we do around it.

    To everyone who asks (hash, ==, name, signature, isinstance) it is the function itself, so
    tables keyed by functions, such as torch's own, go on working. It also pickles as that.
    """

    def __copy__(self) -> PatchedFunction:
        return self

    def __deepcopy__(self, memo: Any) -> PatchedFunction:
        return self

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As the original, so that it loads where we are not.
        original = self.__wrapped__
        reduced: Any = original.__qualname__
        if not isinstance(original, (FunctionType, type)):
            reduced = original.__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return pkgutil.resolve_name, (f"{original.__module__}:{reduced}",)
        return reduced
