"""Tasks from the user's own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.lib.jsonl import BadRow, read_jsonl
from astraflow.protocol.errors import ConfigError


def jsonl(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """One task per line of `path`. Options: `columns`: field of the task → column of the file (`{prompt: question}`);
    other columns keep their names. Every task must end up with `prompt` or `messages`. Broken rows raise BadRow."""
    options = Options(config)
    columns: dict[str, Any] = options.take("columns", {})
    options.done()
    path = Path(config.path).expanduser()
    if not config.path or not path.is_file():
        raise ConfigError(f"dataset 'jsonl' path: {config.path!r} is not a file")
    taken = set(columns.values())
    for number, row in enumerate(read_jsonl(path), start=1):
        missing = [column for column in columns.values() if column not in row]
        if missing:
            raise BadRow(f"{path}: record {number}: no column {missing[0]!r}; it has {', '.join(sorted(row))}")
        data = {key: value for key, value in row.items() if key not in taken}
        data |= {field: row[column] for field, column in columns.items()}
        if not isinstance(data.get("prompt"), str) and not isinstance(data.get("messages"), list):
            raise BadRow(f"{path}: record {number}: needs `prompt` (text) or `messages` (list); it has {', '.join(sorted(data))}")
        yield data
