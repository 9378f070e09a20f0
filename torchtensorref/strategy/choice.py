"""From what a user writes to a strategy: a name, a class or an object, validated when chosen."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any, NoReturn

from ..base.errors import ConfigError, StrategyError, did_you_mean, nearest
from .answers import file_of
from .contract import Strategy, hears_where

#: Strategies that come with us, by name: where each lives. Found by name, never imported from here.
BUILT_IN = {
    "genoa": ("torchTensorRef.strategies.genoa", "Genoa"),
    "lru": ("torchTensorRef.strategies.lru", "LeastRecentlyUsed"),
    "flow": ("torchTensorRef.strategies.flow", "Flow"),
    "venice": ("torchTensorRef.strategies.venice", "Venice"),
}
#: What decides unless the user says otherwise: on one accelerator, on several.
DEFAULT, DEFAULT_OF_SEVERAL = "flow", "venice"

#: The entry-point group under which other packages offer theirs.
ENTRY_POINTS = "torchTensorRef.strategies"

#: What a strategy may have of its own, and the methods among it with the names of their arguments.
NAMES = tuple(name for name in vars(Strategy) if not name.startswith("_"))
CONTRACT = {
    name: tuple(inspect.signature(getattr(Strategy, name)).parameters)
    for name in NAMES
    if inspect.isfunction(vars(Strategy)[name])
}
#: A name so like one of those is taken for a slip.
LIKENESS = 0.8


def make_strategy(setting: Any, accelerator_count: int = 1) -> Strategy:
    """Make the strategy that a setting names.

    Parameters
    ----------
    setting : str, class, object or None
        A name (ours, or one that a package offers as an entry point), a subclass of `Strategy`, an
        object that keeps its contract, or None for the default.
    accelerator_count : int, optional
        How many there are: the default depends on it.

    Raises
    ------
    ConfigError
        No strategy has that name; the nearest is named. Or its package cannot be loaded.
    StrategyError
        The object does not keep the contract; the message says where.
    """
    if setting is None:
        setting = DEFAULT if accelerator_count <= 1 else DEFAULT_OF_SEVERAL
    if isinstance(setting, str):
        setting = _class_named(setting)
    strategy = _made(setting) if inspect.isclass(setting) else setting
    validate(strategy)
    return strategy  # type: ignore[no-any-return]


def _made(kind: type) -> Any:
    try:
        return kind()
    except Exception as error:
        _refuse(kind, f"cannot be made: {kind.__name__}() raised {error!r}. Give an object.", error)


def known_names() -> list[str]:
    """Return the names a user may choose from."""
    return sorted({*BUILT_IN, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))})


def _class_named(name: str) -> Any:
    key = name.strip().lower()
    if key in BUILT_IN:
        module, attribute = BUILT_IN[key]
        return getattr(import_module(module), attribute)
    points = [*metadata.entry_points(group=ENTRY_POINTS)]
    alike = [point for point in points if point.name.lower() == key]
    for point in sorted(alike, key=lambda point: point.name != name.strip()):  # as written first
        return _loaded(point)
    known = known_names()
    raise ConfigError(
        f"There is no strategy {name!r}. {did_you_mean(key, known)}",
        name=name,
        known=tuple(known),
        nearest=nearest(key, known),
    )


def _loaded(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(
            f"The strategy {point.name!r} cannot be loaded from {point.value!r}: {error!r}. Mend "
            f"the package that offers it, or choose one of {', '.join(BUILT_IN)}.",
            name=point.name,
        ) from error


def validate(strategy: Any) -> None:
    """Refuse an object that does not keep the contract, saying where and in which point.

    What looks like a slip in an optional name is warned of: nobody would ever call it.
    """
    kind = type(strategy)
    if not isinstance(strategy, Strategy):
        _refuse(
            kind,
            "must be derived from torchTensorRef.strategy.Strategy, with a `name` and `victims`.",
        )
    name = strategy.name
    if not isinstance(name, str) or not name:
        _refuse(kind, "has no name: give its class an attribute `name`.")
    if _takes_name_of_built_in(kind, name):
        _refuse(kind, f"has the name of a built-in one: call it other than {', '.join(BUILT_IN)}.")
    for method, arguments in CONTRACT.items():
        function = getattr(strategy, method)
        if not callable(function):
            _refuse(kind, f"has `{method} = {function!r}`; it is called with {arguments}.")
        found = tuple(inspect.signature(getattr(kind, method)).parameters)
        if method == "on_birth" and hears_where(strategy):
            arguments = (*arguments, "device")
        if found != arguments:
            _refuse(kind, f"has `{method}{found}`; it is called with {arguments}.")
    slips = list(_slips(kind))
    if kind.victims is Strategy.victims:
        meant = next((f" Was `{slip}` meant to be it?" for slip, n in slips if n == "victims"), "")
        _refuse(
            kind,
            "has no `victims` of its own: it must say what is given back when room is needed."
            + meant,
        )
    for slip, known in slips:
        warnings.warn_explicit(
            f"The strategy {name!r} has `{slip}`, which nobody asks for. Did you mean `{known}`? "
            f"Known: {', '.join(NAMES)}. What is its own business may begin with an underscore.",
            RuntimeWarning,
            file_of(strategy),
            1,
        )


def _takes_name_of_built_in(kind: type, name: str) -> bool:
    """Whether a strategy would be taken for one of ours; what is derived from that one may be."""
    key = name.strip().lower()
    return key in BUILT_IN and not issubclass(kind, _class_named(key))


def _slips(kind: type) -> Iterator[tuple[str, str]]:
    """Yield public names that are nearly one of the contract, which itself was left out."""
    own = {
        name
        for base in kind.__mro__[: kind.__mro__.index(Strategy)]
        for name in vars(base)
        if not name.startswith("_")
    }
    left_out = [name for name in NAMES if name not in own]
    for name in sorted(own.difference(NAMES)):
        close = difflib.get_close_matches(name.casefold(), left_out, n=1, cutoff=LIKENESS)
        if close:
            yield name, close[0]


def _refuse(kind: type, point: str, cause: Exception | None = None) -> NoReturn:
    name, where = getattr(kind, "name", ""), file_of(kind)
    shown = name if isinstance(name, str) and name else kind.__name__
    raise StrategyError(
        f"The strategy {shown!r} ({where}) {point}", strategy=str(name), where=where
    ) from cause
