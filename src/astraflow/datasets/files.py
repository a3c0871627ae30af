"""Tasks from files: JSON lines, JSON arrays, Parquet, CSV; the user's own, and those that `hub.py` finds."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.rows import check_chat, readable, tasks_of
from astraflow.lib.jsonl import BadRow, read_jsonl
from astraflow.protocol.errors import ConfigError, UserError

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv")
MAX_CELL_CHARS = 1 << 26
"""Of one CSV cell; the library's own 128 Ki are less than the tests of many a programming task."""


def table(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """One task per row of the file `path`, whose ending tells the format (without a known one the loader's name does).

    Options: `columns`: field of the task → column of the file (`{prompt: question}`); other columns keep their names. Every task
    must end up with `prompt` or `messages`. Broken rows raise BadRow.
    """
    options = Options(config)
    columns: dict[str, Any] = options.take("columns", {})
    wrong = [field for field, column in columns.items() if not isinstance(column, str)]
    if wrong:
        raise ConfigError(
            f"dataset {config.loader!r} options.columns.{wrong[0]}: {columns[wrong[0]]!r:.60}, expected the name of a column (text)"
        )
    options.done()
    path = Path(config.path).expanduser()
    if not config.path or not path.is_file():
        raise ConfigError(f"dataset {config.loader!r} path: {config.path!r} is not a file")
    rows = ((f"{path}: record {number}", row) for number, row in enumerate(read_rows(path, f".{config.loader}"), start=1))
    yield from tasks_of(rows, partial(_renamed, columns))


def _renamed(columns: dict[str, str], where: str, row: dict[str, Any]) -> dict[str, Any]:
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise BadRow(f"{where}: no column {missing[0]!r}; it has {', '.join(sorted(row))}")
    taken = set(columns.values())
    data = {key: value for key, value in row.items() if key not in taken}
    data |= {field: row[column] for field, column in columns.items()}
    if not isinstance(data.get("prompt"), str) and not isinstance(data.get("messages"), list):
        raise BadRow(f"{where}: needs `prompt` (text) or `messages` (list); it has {', '.join(sorted(data))}")
    if data.get("messages") is not None:
        check_chat(data["messages"], where)
    return data


def format_of(path: Path, default: str = "") -> str:
    """The longest known ending, else `default`."""
    return max((known for known in FORMATS if path.name.endswith(known)), key=len, default=default)


def read_rows(path: Path, default: str = "") -> Iterator[dict[str, Any]]:
    """The rows of a file by its ending (`default` for an unknown one). Raises BadRow, UserError naming the file."""
    kind = format_of(path, default)
    readers = {".jsonl": read_jsonl, ".jsonl.gz": _zipped, ".json": _array, ".parquet": _parquet, ".csv": _csv, ".tsv": _csv}
    if kind not in readers:
        raise UserError(f"{path}: unknown format; known endings: {', '.join(FORMATS)}")
    yield from readable(readers[kind](path), path)


def _zipped(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(json.loads(line), f"{path}:{number}")


def _array(path: Path) -> Iterator[dict[str, Any]]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise BadRow(f"{path}: expected an array of objects, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{path}: record {number}")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UserError(f"{path}: Parquet files need the package: pip install 'astraflow[data]'") from None
    file = parquet.ParquetFile(path)
    _each_once(file.schema_arrow.names, path)
    for batch in file.iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def _each_once(names: Sequence[str], path: Path) -> None:
    """Of two columns of one name a row would silently keep the last."""
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise BadRow(f"{path}: column {twice!r} is named twice")


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """The first line names the columns; every value is text."""
    csv.field_size_limit(MAX_CELL_CHARS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            _each_once(reader.fieldnames or (), path)
            for row in reader:
                if None in row or None in row.values():
                    raise BadRow(f"{path}:{reader.line_num}: {len(reader.fieldnames or ())} columns are named, the row has more or less")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadRow(f"{path}:{reader.line_num}: {error}") from None
