"""YAML files left to right, then dotted overrides, into one plain mapping that remembers where each value came from.

Files are merged mapping by mapping; an override sets its key to exactly the value given (`options={}` empties it).
Scalars follow the YAML 1.2 core schema (`1e-6` is a number, `no` and `08` are text). OmegaConf merges and interpolates;
`config/check.py` gives the result its declared types. Nothing here knows what an experiment is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astraflow.protocol.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20  # a configuration is written by hand; a data file given by mistake should say so at once

INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$")
LEADING_ZERO = re.compile(r"^[-+]?0[0-9]+$")


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}


def _construct_float(loader: yaml.SafeLoader, node: yaml.Node) -> float:
    text = str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan")
    return float(text)


def _construct_int(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    return int(str(node.value))


class _NotLeadingZero:
    """A regular expression object that refuses `08`: it is text, so that names keep their digits."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def match(self, text: str) -> re.Match[str] | None:
        return None if LEADING_ZERO.match(text) else self.pattern.match(text)


CoreLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
CoreLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
CoreLoader.add_implicit_resolver("tag:yaml.org,2002:int", INT, list("-+0123456789"))
CoreLoader.add_implicit_resolver("tag:yaml.org,2002:float", _NotLeadingZero(FLOAT), list("-+.0123456789"))
CoreLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass
class Layers:
    """The merged mapping and the origin of its leaves."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path → `file:line` or `override`; a path without an entry takes its nearest parent's."""
    overridden_text: dict[str, str] = field(default_factory=dict)
    """Dotted path → the text after `=`, for fields that are text (`experiment.name=2024`)."""

    def origin(self, path: str) -> str:
        """Where the value at `path` was written; empty when nobody wrote it."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return ""


def parse_scalar(text: str, where: str) -> Any:
    """The YAML value of an override's text. Raises ConfigError naming `where`."""
    try:
        return yaml.load(text, Loader=CoreLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is not a YAML value ({_problem(error)})") from None


def load_layers(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Layers:
    """Read, merge and interpolate. Raises ConfigError, one line, for every mistake in the files or overrides."""
    if not files:
        raise ConfigError("no configuration file given")
    layers = Layers({})
    merged = OmegaConf.create({})
    for name in files:
        values, lines = read_yaml(Path(name))
        layers.origins.update({path: f"{name}:{line}" for path, line in lines.items()})
        merged = _omega(lambda values=values, merged=merged: OmegaConf.merge(merged, OmegaConf.create(values)), str(name))
    for override in overrides:
        path, text = split_override(override)
        layers.overridden_text[path] = text
        layers.origins[path] = "override"
        value = parse_scalar(text, path)
        if value == "???":
            raise ConfigError(f"{path}: ??? marks a value that is still to be given (override)")
        _omega(lambda path=path, value=value: OmegaConf.update(merged, path, value, merge=False, force_add=True), f"override {override!r}")
    plain = _omega(lambda: OmegaConf.to_container(merged, resolve=True, throw_on_missing=True), str(files[-1]))
    assert isinstance(plain, dict)
    layers.values = {str(key): value for key, value in plain.items()}
    return layers


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """One file as a mapping, and the line of every dotted path in it (from 1)."""
    text = _read_text(path)
    loader = CoreLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{path}: the file is empty; expected a mapping of sections")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected a mapping of sections, got {_kind(node)}")
        lines: dict[str, int] = {}
        _record_lines(node, "", lines, path)
        values = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_line(error)}: broken YAML: {_problem(error)}") from None
    finally:
        loader.dispose()
    return _text_keys(values), lines


def split_override(override: str) -> tuple[str, str]:
    """`trainer.lr=1e-6` → (`trainer.lr`, `1e-6`)."""
    path, sign, text = override.partition("=")
    path = path.strip()
    if not sign or not path or any(not part for part in path.split(".")):
        raise ConfigError(f"override {override!r}: expected key=value with a dotted key, e.g. trainer.max_steps=10")
    return path, text


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b` of a plain mapping."""
    *parents, last = path.split(".")
    for part in parents:
        below = values.get(part)
        values[part] = dict(below) if isinstance(below, Mapping) else {}
        values = values[part]
    values[last] = value


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: {size} bytes is no configuration (limit {MAX_CONFIG_BYTES})")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_neighbour(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _neighbour(path: Path) -> str:
    """The closest file beside a missing one, as a hint."""
    from difflib import get_close_matches

    beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    return f"; there are {', '.join(sorted(beside)[:10])}" if beside else ""


def _record_lines(node: yaml.Node, prefix: str, lines: dict[str, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be a plain word, got {_kind(key)}")
            name, line = str(key.value), key.start_mark.line + 1
            dotted = f"{prefix}.{name}" if prefix else name
            if name in seen:
                raise ConfigError(f"{path}:{line}: {dotted} is given twice (first in line {seen[name]})")
            seen[name] = line
            lines[dotted] = line
            _record_lines(value, dotted, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}.{index}"] = item.start_mark.line + 1
            _record_lines(item, f"{prefix}.{index}", lines, path)


def _omega(step: Any, where: str) -> Any:
    try:
        return step()
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        text = " ".join(str(getattr(error, "msg", None) or error).split("\n")[0].split())
        if "Missing mandatory value" in text or "MissingMandatoryValue" in type(error).__name__:
            raise ConfigError(f"{key}: required, but the value is ??? ({where})") from None
        raise ConfigError(f"{key or where}: {text}") from None


def _text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def _kind(node: yaml.Node) -> str:
    return {"MappingNode": "a mapping", "SequenceNode": "a list"}.get(type(node).__name__, f"{node.value!r}")


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())
