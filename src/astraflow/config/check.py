"""Give plain values the types that a Struct declares, or stop with one line that names the dotted path.

YAML and shells lose types; the declaration has them. Text becomes a number or a truth value only where one is declared and
only when nothing is lost (`1e3` → 1000 for an int, never 12.5; "false" → False; never `08` → 8 for text).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as kinds

from astraflow.config.load import FLOAT, INT, Layers
from astraflow.protocol.errors import ConfigError

T = TypeVar("T")
TRUTH = {"true": True, "false": False}


def typed(layers: Layers, kind: type[T], spread: str = "") -> T:
    """The layers' values as a `kind`. Raises ConfigError naming path, value, expected type and the closest known key.

    `spread`: a section of named entries whose keys may also be written directly under it (only for the wording of hints).
    """
    info = kinds.type_info(kind)
    values = _Checker(layers, info, spread).checked()
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_own_words(str(error), layers, known_paths(kind))) from None


def typed_part(layers: Layers, value: Any, kind: type, path: str) -> dict[str, Any]:
    """The given keys of a partial section with the types that the Struct `kind` declares; nothing is filled in."""
    info = kinds.type_info(kind)
    part = _Checker(layers, info).value(value, info, path)
    assert isinstance(part, dict)
    return part


def known_paths(kind: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key that `kind` declares, sections included; the names of a mapping's entries are written `*`."""
    yield from _paths(kinds.type_info(kind), prefix)


class _Checker:
    """One walk over the values along the declared types."""

    def __init__(self, layers: Layers, root: kinds.Type, spread: str = "") -> None:
        self.layers, self.root, self.spread = layers, root, spread

    def checked(self) -> Any:
        return self.value(self.layers.values, self.root, "")

    def refuse(self, path: str, problem: str) -> ConfigError:
        origin = self.layers.origin(path)
        return ConfigError(f"{path or 'configuration'}: {problem}" + (f" ({origin})" if origin else ""))

    def value(self, value: Any, kind: kinds.Type, path: str) -> Any:
        if isinstance(kind, kinds.Metadata):
            kind = kind.type
        if isinstance(kind, kinds.UnionType):
            return self.union(value, kind, path)
        if value is None and not isinstance(kind, kinds.NoneType | kinds.AnyType):
            raise self.refuse(path, f"null is no value for it, expected {describe(kind)}")
        if isinstance(kind, kinds.StructType):
            return self.struct(value, kind, path)
        if isinstance(kind, kinds.DictType):
            self.expect(value, Mapping, kind, path)
            return {key: self.value(item, kind.value_type, _join(path, str(key))) for key, item in value.items()}
        if isinstance(kind, kinds.ListType | kinds.VarTupleType | kinds.SetType):
            self.expect(value, list, kind, path)
            return [self.value(item, kind.item_type, _join(path, str(i))) for i, item in enumerate(value)]
        if isinstance(kind, kinds.TupleType):
            return self.fixed_tuple(value, kind, path)
        if isinstance(kind, kinds.LiteralType):
            return self.literal(value, kind, path)
        if isinstance(kind, kinds.StrType) and not isinstance(value, str) and path in self.layers.overridden_text:
            return self.layers.overridden_text[path]  # a shell has no quotes: `experiment.name=2024` is text
        return self.scalar(value, kind, path)

    def expect(self, value: Any, wanted: type | tuple[type, ...], kind: kinds.Type, path: str) -> None:
        if not isinstance(value, wanted):
            raise self.refuse(path, f"{show(value)} is not {describe(kind)}")

    def struct(self, value: Any, kind: kinds.StructType, path: str) -> dict[str, Any]:
        self.expect(value, Mapping, kind, path)
        fields = {field.encode_name: field for field in kind.fields}
        for key in value:
            if key not in fields:
                raise self.refuse(_join(path, str(key)), f"unknown key{self.suggestion(str(key), list(fields), path)}")
        out: dict[str, Any] = {}
        for name, field in fields.items():
            if name in value:
                out[name] = self.value(value[name], field.type, _join(path, name))
            elif field.required:
                raise self.refuse(_join(path, name), f"required, but not given; expected {describe(field.type)}")
        return out

    def suggestion(self, key: str, names: list[str], path: str) -> str:
        """The nearest right key: here by spelling, or the same key in another section."""
        close = get_close_matches(key, names, n=1, cutoff=0.6)
        if close:
            return f"; did you mean {_join(path, close[0])}?"
        elsewhere = [known for known in _paths(self.root, "") if known.rpartition(".")[2] == key]
        if elsewhere:
            found = min(elsewhere, key=len).replace(f"{self.spread}.*.", f"{self.spread}.").replace("*", "<name>")
            return f"; did you mean {found}?"
        return f"; known here: {', '.join(names)}"

    def union(self, value: Any, kind: kinds.UnionType, path: str) -> Any:
        members = [member for member in kind.types if not isinstance(member, kinds.NoneType)]
        if len(members) < len(kind.types) and (value is None or value == "null"):
            return None
        exact = [member for member in members if _same_kind(value, member)]
        problems: list[ConfigError] = []
        for member in exact or members:
            try:
                return self.value(value, member, path)
            except ConfigError as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        raise self.refuse(path, f"{show(value)} is not {describe(kind)}")

    def fixed_tuple(self, value: Any, kind: kinds.TupleType, path: str) -> list[Any]:
        self.expect(value, list, kind, path)
        if len(value) != len(kind.item_types):
            raise self.refuse(path, f"{show(value)} has {len(value)} items, expected {len(kind.item_types)}")
        return [self.value(item, wanted, _join(path, str(i))) for i, (item, wanted) in enumerate(zip(value, kind.item_types, strict=True))]

    def literal(self, value: Any, kind: kinds.LiteralType, path: str) -> Any:
        for accepted in kind.values:
            if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
                return accepted
        text = self.layers.overridden_text.get(path, str(value))
        for accepted in kind.values:
            if not isinstance(value, bool | float) and str(accepted) == text:
                return accepted
        raise self.refuse(path, f"{show(value)} is not {describe(kind)}{nearest(str(value), [str(v) for v in kind.values])}")

    def scalar(self, value: Any, kind: kinds.Type, path: str) -> Any:
        if isinstance(kind, kinds.IntType):
            value = self.number(value, kind, path, whole=True)
        elif isinstance(kind, kinds.FloatType):
            value = self.number(value, kind, path, whole=False)
        elif isinstance(kind, kinds.BoolType):
            value = TRUTH.get(value.lower(), value) if isinstance(value, str) else value
            self.expect(value, bool, kind, path)
        elif isinstance(kind, kinds.StrType):
            if isinstance(value, int) and not isinstance(value, bool):
                return str(value)  # only canonical decimals are read as numbers, so this is the text that was written
            if not isinstance(value, str):
                raise self.refuse(path, f"{show(value)} is not {describe(kind)}; put it in quotes if it is one")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.bounds(value, kind, path)
        return value

    def number(self, value: Any, kind: kinds.Type, path: str, *, whole: bool) -> int | float:
        if isinstance(value, str):
            if INT.match(value) or (value.lstrip("+-").isdecimal()):
                value = int(value)
            elif FLOAT.match(value):
                value = float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(path, f"{show(value)} is not {describe(kind)}")
        if not whole:
            if math.isnan(value):
                raise self.refuse(path, f"nan is not {describe(kind)}")
            return float(value)
        if isinstance(value, float) and not value.is_integer():
            raise self.refuse(path, f"{show(value)} is not {describe(kind)}")
        return int(value)

    def bounds(self, value: int | float, kind: kinds.Type, path: str) -> None:
        for name in ("ge", "gt", "le", "lt"):
            limit = getattr(kind, name, None)
            if limit is not None and not _compare(name, value, limit):
                raise self.refuse(path, f"{show(value)} is out of range, expected {describe(kind)}")


def describe(kind: kinds.Type) -> str:
    """A type in the words of the user."""
    if isinstance(kind, kinds.Metadata):
        return describe(kind.type)
    if isinstance(kind, kinds.LiteralType):
        return "one of " + ", ".join(str(value) for value in kind.values)
    if isinstance(kind, kinds.UnionType):
        return " or ".join(describe(member) for member in kind.types)
    if isinstance(kind, kinds.StructType):
        return "a section with the keys " + ", ".join(field.encode_name for field in kind.fields)
    if isinstance(kind, kinds.IntType | kinds.FloatType):
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        limits = [f"{sign} {getattr(kind, name)}" for name, sign in signs.items() if getattr(kind, name) is not None]
        word = "a whole number" if isinstance(kind, kinds.IntType) else "a number"
        return word + (f" {' and '.join(limits)}" if limits else "")
    words: dict[type[kinds.Type], str] = {
        kinds.BoolType: "true or false",
        kinds.StrType: "text",
        kinds.NoneType: "null",
        kinds.DictType: "a mapping",
        kinds.ListType: "a list",
        kinds.VarTupleType: "a list",
        kinds.TupleType: "a list",
        kinds.SetType: "a list",
    }
    return words.get(type(kind), type(kind).__name__.removesuffix("Type").lower())


def show(value: Any) -> str:
    """A value in an error line, at most 60 characters."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "…"


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean x?` when one of `names` is close."""
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _same_kind(value: Any, kind: kinds.Type) -> bool:
    """True when `value` is of this kind without any conversion."""
    table: list[tuple[tuple[type[kinds.Type], ...], type | tuple[type, ...]]] = [
        ((kinds.StructType, kinds.DictType), Mapping),
        ((kinds.ListType, kinds.VarTupleType, kinds.TupleType, kinds.SetType), list),
        ((kinds.BoolType,), bool),
        ((kinds.IntType,), int),
        ((kinds.FloatType,), (int, float)),
        ((kinds.StrType,), str),
    ]
    for declared, accepted in table:
        if isinstance(kind, declared):
            return isinstance(value, accepted) and (accepted is bool or not isinstance(value, bool))
    return isinstance(kind, kinds.LiteralType) and value in kind.values


def _compare(name: str, value: float, limit: float) -> bool:
    return {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[name]


def _paths(kind: kinds.Type, prefix: str) -> Iterator[str]:
    if isinstance(kind, kinds.Metadata):
        kind = kind.type
    if isinstance(kind, kinds.UnionType):
        for member in kind.types:
            yield from _paths(member, prefix)
    elif isinstance(kind, kinds.StructType):
        for field in kind.fields:
            path = _join(prefix, field.encode_name)
            yield path
            yield from _paths(field.type, path)
    elif isinstance(kind, kinds.DictType):
        yield from _paths(kind.value_type, _join(prefix, "*"))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _own_words(message: str, layers: Layers, known: Iterator[str]) -> str:
    """msgspec's `text - at `$.a.b`` as `a.b: text (origin)`; what a Struct's own checks raised comes this way.

    Such a check names its field first (`lr is …`): the field joins the path, so that the line names what was written.
    """
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").strip(".").replace("[...]", "")
    named = re.match(r"(?:[\w.]+\.)?(\w+)(?: is |: | )", text)
    if named and any(key == _join(path, named[1]) or key.replace(".*", "") == _join(path, named[1]) for key in known):
        path = _join(path, named[1])
        text = text[named.end() :]
    origin = layers.origin(path)
    return (f"{path}: {text}" if path else text) + (f" ({origin})" if origin else "")
