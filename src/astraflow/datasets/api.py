"""Tasks by loader name. A task's id is its data set's name and a hash of its content, so the same row is the same task
across runs, files and resume, and rows of two data sets never share an id (case G10)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import xxhash

from astraflow.datasets import DATASETS, register_dataset
from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.rows import check_sendable
from astraflow.lib import options
from astraflow.protocol.errors import ConfigError

__all__ = ["DATASETS", "Dataset", "DatasetConfig", "Task", "load", "register_dataset", "task_id"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One prompt item."""

    task_id: str
    """`<data set>:<xxh3-64 of the canonical content>`."""
    data: dict[str, Any]
    """`messages` or `prompt`, `answer`, and whatever workflow and reward read."""


class Loader(Protocol):
    """A loader gives data dicts; it raises ConfigError or BadRow in one line."""

    def __call__(self, config: DatasetConfig, seed: int) -> Iterable[dict[str, Any]]: ...


@dataclass(frozen=True)
class Dataset(Sequence[Task]):
    """The tasks of one data set, each once."""

    name: str
    tasks: tuple[Task, ...]
    duplicates: int
    """Rows that were merged into an equal earlier one."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self.tasks[index]


def task_id(name: str, data: dict[str, Any]) -> str:
    """Data set name and content hash; the order of keys does not matter."""
    canonical = msgspec.json.encode(data, order="deterministic")
    return f"{name}:{xxhash.xxh3_64_hexdigest(canonical)}"


def load(config: DatasetConfig, seed: int = 0, name: str = "") -> Dataset:
    """All tasks of a data set, equal rows merged and counted. Raises UserError in one line, also for an empty set."""
    name = name or config.name or config.loader
    loader: Loader = DATASETS.resolve(config.loader)
    tasks: dict[str, Task] = {}
    seen = 0
    for data in loader(config, seed):
        if config.limit is not None and len(tasks) >= config.limit:
            break
        seen += 1
        check_sendable(data, f"dataset {name!r}: task {seen}")
        key = task_id(name, data)
        tasks.setdefault(key, Task(key, data))
    if not tasks:
        raise ConfigError(f"dataset {name!r}: loader {config.loader!r} gave no task (path={config.path!r}, options={config.options!r})")
    duplicates = seen - len(tasks)
    if duplicates:
        logger.warning("dataset %s: %d rows equal an earlier one and were merged", name, duplicates)
    return Dataset(name, tuple(tasks.values()), duplicates)


class Options(options.Options):
    """Options of a loader; `split` of the section is one of them."""

    def __init__(self, config: DatasetConfig) -> None:
        values = {"split": config.split, **config.options} if config.split else config.options
        super().__init__(f"dataset {config.loader!r}", values)
