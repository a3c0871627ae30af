"""The resolved experiment as YAML with the origin of every value behind it (`astraflow config`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from astraflow.config.experiment import Resolved


def annotated(resolved: Resolved) -> str:
    """YAML that loads as it is; comments say where a value comes from: file and line, override, derived, or default."""
    rows = list(_rows(resolved.plain(), "", 0, resolved.origins))
    width = min(max(len(text) for text, _ in rows), 90)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _rows(section: Mapping[str, Any], prefix: str, depth: int, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        path = f"{prefix}.{key}" if prefix else key
        indent = "  " * depth + _scalar(key) + ":"
        if isinstance(value, Mapping) and value and not _free(path, origins):
            yield indent, ""
            yield from _rows(value, path, depth + 1, origins)
        else:
            yield f"{indent} {_flow(value)}", origin(path, origins)


def origin(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at `path` (a leaf, or a mapping of the user's own keys) was written."""
    if path in origins:
        return origins[path]
    below = sorted({text for key, text in origins.items() if key.startswith(f"{path}.")})
    return below[0] if below else "default"


def _free(path: str, origins: Mapping[str, str]) -> bool:
    """Mappings whose keys are the user's own (options, generation) are shown in one line."""
    return path.rpartition(".")[2] in ("options", "generation") and path != "raas.generation"


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False).removesuffix("\n...\n").strip()


def _scalar(value: str) -> str:
    return _flow(value)
