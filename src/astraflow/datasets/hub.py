"""Where the files of a public data set are: a local copy, or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.files import FORMATS, read_rows
from astraflow.lib.jsonl import BadRow
from astraflow.protocol.errors import ConfigError, UserError


@dataclass(frozen=True)
class Source:
    """A data set of the hub."""

    repo: str
    """`owner/name`."""
    files: tuple[str, ...] = tuple(f"*{{split}}*{ending}" for ending in FORMATS)
    """Patterns of its files, `*` also across directories; `{split}` and other words in braces are filled in. The first that
    matches anything counts, since mirrors and revisions hold the same rows in other formats; `a|b` is both."""
    revision: str | None = None


def source_rows(config: DatasetConfig, source: Source, **words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with where it stands (`file: record n`).

    `path` of the section is a file, or a directory with the hub's files or one called `<split>.jsonl`, `<split>.parquet`, …; without
    it the files come from the hub (or its cache: HF_HUB_OFFLINE=1). Raises UserError when they cannot be had, BadRow.
    """
    patterns = [pattern.format(**words) for pattern in source.files]
    for path in _local(config, patterns, words["split"]) if config.path else _downloaded(config, source, patterns):
        for number, row in enumerate(read_rows(path), start=1):
            yield f"{path}: record {number}", row


def _local(config: DatasetConfig, patterns: Sequence[str], split: str) -> list[Path]:
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    patterns = [*patterns, *(f"{split}{ending}" for ending in FORMATS)]
    found = _first_match(path, patterns)
    if not found:
        raise ConfigError(f"dataset {config.loader!r} path: {path} is no file, and no directory with {', '.join(patterns)}")
    return found


def _first_match(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """`rglob` matches a pattern with and without directories in front of it, as the hub's `*` does."""
    for pattern in patterns:
        found = sorted(path for part in pattern.split("|") for path in directory.rglob(part) if path.is_file())
        if found:
            return found
    return []


def _downloaded(config: DatasetConfig, source: Source, patterns: Sequence[str]) -> list[Path]:
    try:
        from httpx import HTTPError
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(f"dataset {config.loader!r} needs a `path`, or the package: pip install 'astraflow[data]'") from None
    try:
        home = snapshot_download(source.repo, repo_type="dataset", revision=source.revision, allow_patterns="|".join(patterns).split("|"))
    except (OSError, ValueError, HTTPError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"dataset {config.loader!r}: {source.repo} cannot be downloaded; give the `path` of a copy ({reason})") from None
    found = _first_match(Path(home), patterns)
    if not found:
        raise UserError(f"dataset {config.loader!r}: {source.repo} holds none of {', '.join(patterns)}; give the `path` of a copy")
    return found


def first(row: dict[str, Any], columns: Sequence[str], where: str) -> Any:
    """The first of these columns that the row has with a value. Raises BadRow naming them."""
    for column in columns:
        if row.get(column) is not None:
            return row[column]
    raise BadRow(f"{where}: expected one of {', '.join(columns)}; it has {', '.join(sorted(row))}")
