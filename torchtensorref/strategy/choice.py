"""From what a user writes to a strategy: a name, a class or an object, validated when chosen."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import Any

from ..base.errors import ConfigError, StrategyError, did_you_mean, nearest
from .contract import Strategy

#: Strategies that come with us, by name: where each lives. Found by name, never imported from here.
BUILT_IN = {
    "genoa": ("torchTensorRef.strategies.genoa", "Genoa"),
    "lru": ("torchTensorRef.strategies.lru", "LeastRecentlyUsed"),
    "flow": ("torchTensorRef.strategies.flow", "Flow"),
}
DEFAULT = "flow"

#: The entry-point group under which other packages offer theirs.
ENTRY_POINTS = "torchTensorRef.strategies"

#: The methods a strategy must have, with the names of their arguments.
CONTRACT = {
    name: tuple(inspect.signature(getattr(Strategy, name)).parameters)
    for name in (
        "place",
        "victims",
        "after_operator",
        "on_access",
        "on_birth",
        "on_death",
        "prefetch",
        "write_back",
    )
}


def make_strategy(setting: Any) -> Strategy:
    """Make the strategy that a setting names.

    Parameters
    ----------
    setting : str, class, object or None
        A name (ours, or one that a package offers as an entry point), a subclass of `Strategy`, an
        object that keeps its contract, or None for the default.

    Raises
    ------
    ConfigError
        No strategy has that name; the nearest is named.
    StrategyError
        The object does not keep the contract; the message says where.
    """
    if setting is None:
        setting = DEFAULT
    if isinstance(setting, str):
        setting = _class_named(setting)
    strategy = setting() if inspect.isclass(setting) else setting
    validate(strategy)
    return strategy  # type: ignore[return-value]


def known_names() -> list[str]:
    """Return the names a user may choose from."""
    return sorted({*BUILT_IN, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))})


def _class_named(name: str) -> Any:
    key = name.strip().lower()
    if key in BUILT_IN:
        module, attribute = BUILT_IN[key]
        return getattr(import_module(module), attribute)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == key:
            return point.load()
    known = known_names()
    raise ConfigError(
        f"There is no strategy {name!r}. {did_you_mean(key, known)}",
        name=name,
        known=tuple(known),
        nearest=nearest(key, known),
    )


def validate(strategy: Any) -> None:
    """Refuse an object that does not keep the contract, saying where and in which point."""
    kind = type(strategy)
    name = getattr(strategy, "name", "")
    try:
        where = inspect.getfile(kind)
    except (TypeError, OSError):
        where = "unknown file"

    def refuse(point: str) -> None:
        raise StrategyError(
            f"The strategy {name or kind.__name__!r} ({where}) {point}", strategy=name, where=where
        )

    if not isinstance(strategy, Strategy):
        refuse("must be derived from torchTensorRef.strategy.Strategy; only `victims` is required.")
    if not isinstance(name, str) or not name:
        refuse("has no name: give its class an attribute `name`.")
    for method, arguments in CONTRACT.items():
        function = getattr(kind, method)
        found = tuple(inspect.signature(function).parameters)
        if found != arguments:
            refuse(f"has `{method}{found}`; it is called with {arguments}.")
    if kind.victims is Strategy.victims:
        refuse("has no `victims` of its own: it must say what is given back when room is needed.")
