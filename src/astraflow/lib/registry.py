"""Plug-ins by name: a literal table per family, decorators that write into it, entry points. Code is loaded only when chosen."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from astraflow.protocol.errors import UnknownName

T = TypeVar("T")


def closest(name: str, known: list[str]) -> str:
    """` (did you mean 'x'?)` or nothing."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def import_attr(target: str) -> Any:
    """The object that `module:attr` (attr may be dotted) names. Raises UnknownName when module or attribute are missing.

    Only a process's own configuration may come here: nothing that arrives over the wire names code.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise UnknownName(f"{target!r}: expected module:attribute")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UnknownName(f"{target!r}: there is no module {error.name!r}") from None
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [name for name in dir(found) if not name.startswith("_")]
            raise UnknownName(f"{target!r}: {module_name} has no {path!r}{closest(part, public)}") from None
    return found


class Registry:
    """Names of one family (`workflows`, `rewards`, …: the word of the entry-point group `astraflow.<family>`)."""

    def __init__(self, family: str, table: Mapping[str, str]):
        """`table`: name → `module:attr`, loaded on `get`."""
        self.family = family
        self._noun = family[:-2] if family.endswith("sses") else family.removesuffix("s")
        self._table: dict[str, Any] = dict(table)

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=f"astraflow.{self.family}")}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: write the object into the table. The same name twice is refused unless it is the same object reloaded."""

        def write(value: T) -> T:
            old = self._table.get(name)
            same = old is None or (isinstance(old, str) and old == _address(value)) or _address(old) == _address(value)
            if not same:
                raise UnknownName(f"{self._noun} {name!r} is registered already ({old if isinstance(old, str) else _address(old)})")
            self._table[name] = value
            return value

        return write

    def get(self, name: str) -> Any:
        """The object behind a name, imported now. Raises UnknownName with the closest and all known names."""
        found = self._table.get(name)
        if found is None:
            if name not in self._entry_points:
                raise UnknownName(f"{self._noun} {name!r} is unknown{closest(name, self.names())}; known: {', '.join(self.names())}")
            return self._entry_points[name].load()
        return import_attr(found) if isinstance(found, str) else found

    def resolve(self, name: str) -> Any:
        """Like `get`, and `module:attr` too: only for names from the process's own configuration."""
        return import_attr(name) if ":" in name else self.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._table or name in self._entry_points

    def names(self) -> list[str]:
        """All known names, sorted; nothing is imported."""
        return sorted({*self._table, *self._entry_points})


def _address(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', repr(value))}"
