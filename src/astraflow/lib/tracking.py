"""Trackers: where the numbers of a run go beside `metrics.jsonl` and TensorBoard, which are always written.

A tracker lives in the process of `astraflow track` and reads what others wrote: it may be slow, fail or hang, and no step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from astraflow.lib.registry import Registry


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run."""

    run_id: str
    name: str
    run_dir: Path
    config: Mapping[str, Any]
    """The resolved experiment, without tokens and without what names code."""
    kept: dict[str, str]
    """What the tracker remembers over restarts and `--resume`, e.g. the id of its own run; `open` fills it in."""


class Tracker(Protocol):
    """Made by `factory(options)`, which only looks at the options (raises UserError) and connects to nothing."""

    def open(self, run: TrackedRun) -> None:
        """Begin, or go on with the run that `run.kept` names."""

    def log(self, series: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One line. `series`: process and tags (`trainer:solver`, `dataflow/solver`), `step`: the policy's version, `time_s`: unix time.
        After a crash the last lines come a second time."""

    def close(self) -> None:
        """Hand over what is still on its way."""


TRACKERS: Registry = Registry("trackers", {"wandb": "astraflow.lib.tracker_wandb:Wandb"})
"""Tracker name → factory of the options in the configuration."""
