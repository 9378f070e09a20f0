"""injectTo: whose tensors come under management, by prefixes of module names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from operator import index as operator_index
from types import ModuleType
from typing import SupportsIndex

from ..base.errors import ConfigError, did_you_mean, nearest
from ..base.options import settings

#: Modules that are not asked for: their prefix, whether what they make comes under management, why.
BY_DEFAULT = {
    "torch": (
        False,
        "what torch makes for itself; its callers' tensors come through its factories",
    ),
    "torch.nn.modules.module": (True, "`to_empty` makes parameters outside their registration"),
    "torch.distributions": (True, "what is drawn of numbers (`Normal(0.0, 1.0)`) is the program's"),
    "torch.signal": (True, "a window is made once, and read by each transform"),
    "torch.nn.modules.transformer": (True, "a mask is made once, and read by each layer"),
    "torchTensorRef": (False, "the runtime itself works on plain tensors"),
}

#: How much alike two names must be for one to be a slip of the other, and how long at least.
LIKENESS, SHORTEST = 0.85, 5


def _checked(prefix: str | ModuleType) -> str:
    name = prefix.__name__ if isinstance(prefix, ModuleType) else prefix
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{name!r} is not the name of a module. Write the name that `import` takes, such as "
            "'transformers' or 'transformers.models.bert'.",
            name=str(name),
        )
    return name


def check_known(prefixes: Iterable[str]) -> None:
    """Refuse names of packages that are not here, where one that is is written nearly the same.

    Raises
    ------
    ConfigError
        The nearest is named. A name like no other passes: its module may be made later. So does a
        module itself, whatever it is called.
    """
    for prefix in prefixes:
        package = prefix.partition(".")[0]
        # Not `find_spec` of importlib: asking for torch's is what the hooks wait for.
        if package in sys.modules or PathFinder.find_spec(package) is not None:
            continue
        from importlib import metadata  # only where something may be wrong: it takes long

        known = {*metadata.packages_distributions(), *sys.modules, *sys.stdlib_module_names}
        close = nearest(package, [name for name in known if "." not in name], likeness=LIKENESS)
        if package not in known and close is not None and len(package) >= SHORTEST:
            meant = close + prefix.removeprefix(package)
            raise ConfigError(
                f"There is no package {package!r} here. Did you mean {meant!r}? If it is yet to "
                "come, import it first, and give the module instead of its name.",
                name=prefix,
                nearest=meant,
            )


class Decisions(dict[str, bool]):
    """From the name of a module to whether what it makes comes under management.

    Asked by every factory, so it answers from a dictionary; a name not met before is decided once.
    """

    def __init__(self, rules: dict[str, bool]) -> None:
        super().__init__()
        self._rules = rules

    def __missing__(self, name: str) -> bool:
        rule = explicit_rule(name, self._rules)
        decision = self[name] = True if rule is None else rule
        return decision


def explicit_rule(name: str, rules: dict[str, bool]) -> bool | None:
    """What the longest prefix of a module's name says; None where no prefix speaks of it."""
    prefix = str(name)
    while prefix:
        if prefix in rules:
            return rules[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def check_not_ours(names: Iterable[str]) -> None:
    """Refuse our own modules: what manages tensors cannot be managed itself."""
    ours = __name__.partition(".")[0]
    for name in names:
        if name.partition(".")[0] == ours:
            raise ConfigError(
                f"{name!r} cannot be included: the runtime itself works on plain tensors. Write "
                "the name of the package whose tensors are meant.",
                name=name,
            )


def _named(prefixes: Iterable[str | ModuleType]) -> list[str]:
    """The names of packages or modules; ConfigError for a wrong one, before anything is changed."""
    given = list(prefixes)
    names = [_checked(prefix) for prefix in given]
    check_known(name for name, prefix in zip(names, given, strict=True) if isinstance(prefix, str))
    return names


class InjectTo:
    """A list of package prefixes whose modules get the patched names; the longest prefix decides.

    A module that no prefix speaks of gets what it finds: patched names, as far as it takes them
    from torch after we came. `append` also rebinds names that imported modules took before;
    `exclude` gives modules the originals, and what they make stays plain. Both hold for modules
    that are imported later, too.
    """

    __slots__ = ("_excluded", "_included", "_rules", "decisions")

    def __init__(self) -> None:
        self._included: list[str] = []
        self._excluded: list[str] = []
        self._rules: dict[str, bool] = {}
        self.decisions = Decisions(self._rules)
        self._settle()

    # -- the list -------------------------------------------------------------------------------

    def append(self, prefix: str | ModuleType) -> None:
        """Include a package or module."""
        self.insert(len(self._included), prefix)

    def insert(self, index: SupportsIndex, prefix: str | ModuleType) -> None:
        """Include a package or module at a place in the list; the order decides nothing."""
        (name,) = _named([prefix])
        check_not_ours([name])
        self._insert(operator_index(index), name)

    def _insert(self, index: SupportsIndex, name: str) -> None:
        if name in self._excluded:
            self._excluded.remove(name)
        if name not in self._included:
            self._included.insert(index, name)
        self._settle(name)

    def extend(self, prefixes: Iterable[str | ModuleType]) -> None:
        """Include several; nothing is changed if one of them is no name of a module."""
        if not isinstance(prefixes, Iterable):
            raise ConfigError(f"extend takes a list of names, not {prefixes!r}.")
        if isinstance(prefixes, str):
            raise ConfigError(
                f"extend takes a list of names; for {prefixes!r} alone use append.", name=prefixes
            )
        names = _named(prefixes)
        check_not_ours(names)
        for name in names:
            self._insert(len(self._included), name)

    def exclude(self, *prefixes: str | ModuleType) -> None:
        """Leave packages or modules plain."""
        self._exclude(_named(prefixes))

    def begin_with(self, included: Iterable[str], excluded: Iterable[str]) -> None:
        """Take names that were read before the program's own modules could be found.

        Whether there are such modules is asked later (`check_known`), where it can be known.
        """
        for name in included:
            self._insert(len(self._included), name)
        self._exclude(excluded)

    def _exclude(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._included:
                self._included.remove(name)
            if name not in self._excluded:
                self._excluded.append(name)
            self._settle(name)

    def remove(self, prefix: str | ModuleType) -> None:
        """Forget what was said of a prefix, by `append` or by `exclude`.

        Raises
        ------
        ConfigError
            Nothing was said of it; the nearest prefix is named.
        """
        name = _checked(prefix)
        known = [*self._included, *self._excluded]
        if name not in known:
            raise ConfigError(
                f"{name!r} is neither included nor excluded. {did_you_mean(name, known)}",
                name=name,
                known=tuple(known),
                nearest=nearest(name, known),
            )
        for names in (self._included, self._excluded):
            if name in names:
                names.remove(name)
        self._settle(name)

    def clear(self) -> None:
        """Forget everything that was said."""
        for name in [*self._included, *self._excluded]:
            self.remove(name)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The prefixes left out on request."""
        return tuple(self._excluded)

    def __iter__(self) -> Iterator[str]:
        return iter(self._included)

    def __len__(self) -> int:
        return len(self._included)

    def __getitem__(self, index: SupportsIndex) -> str:
        return self._included[index]

    def __contains__(self, name: object) -> bool:
        return name in self._included

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        without = f" without {self._excluded}" if self._excluded else ""
        return f"<injectTo {self._included}{without}>"

    # -- what it means --------------------------------------------------------------------------

    def rule(self, module_name: str) -> bool | None:
        """What the longest prefix says of a module: True, False, or None for nothing."""
        return explicit_rule(module_name, self._rules)

    def _settle(self, changed: str = "") -> None:
        """Make the lists hold: for calls from now on, and for names that modules have taken."""
        self._rules.clear()
        self._rules.update({prefix: rule for prefix, (rule, _) in BY_DEFAULT.items()})
        self._rules.update(dict.fromkeys(self._included, True))
        self._rules.update(dict.fromkeys(self._excluded, False))
        self.decisions.clear()
        patches = sys.modules.get(f"{__package__}.torch_")
        if changed and patches is not None:
            patches.rebind(changed)


#: The one of this process.
injectTo = InjectTo()
injectTo.begin_with(settings.inject_to, settings.exclude)
