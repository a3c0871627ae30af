"""Numbers of a run: one JSON line per step and process in `metrics.jsonl`, TensorBoard event files beside it, and aggregators.

The names stand in `protocol/metrics.py`.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from astraflow.lib.jsonl import append_bytes
from astraflow.lib.tensorboard import EventFile


class Metrics:
    """Writes the numbers of one process. Safe to share between threads; several processes append to the same file.

    A line is `{"time": unix seconds, "process": …, "step": …, tags…, "values": {name: number or null}}`.
    """

    def __init__(self, run_dir: Path | str, process: str, *, tensorboard: bool = True):
        self._process = process
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._descriptor = os.open(directory / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._tensorboard = directory / "tensorboard" if tensorboard else None
        self._events: dict[str, EventFile] = {}

    def log(self, step: int, values: Mapping[str, float], **tags: str | int) -> None:
        """Append one line with a single write. Numbers that are not finite become null (and stay out of TensorBoard)."""
        clash = {"time", "process", "step", "values"} & tags.keys()
        assert not clash, f"tags {sorted(clash)} are fields of the line"
        now = time.time()
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        shown = {name: (value if name in finite else None) for name, value in numbers.items()}
        row = {"time": round(now, 3), "process": self._process, "step": step, **tags, "values": shown}
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8") + b"\n"
        with self._lock:
            if self._descriptor < 0:
                return
            append_bytes(self._descriptor, line)
            if self._tensorboard is not None and finite:
                self._events_of(self._tensorboard, tags).scalars(step, finite, now)

    def _events_of(self, root: Path, tags: Mapping[str, str | int]) -> EventFile:
        series = series_of(self._process, tags)
        if series not in self._events:
            self._events[series] = EventFile(root / series.replace(":", "_"))
        return self._events[series]

    def close(self) -> None:
        """Close the files; later calls of `log` are ignored."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                for events in self._events.values():
                    events.close()


def series_of(process: str, tags: Mapping[str, object]) -> str:
    """What tells the curves of one name apart: the process and the words among its tags (`dataflow/solver/interval`). A word that the
    process's own name ends with says nothing new (`trainer:solver`)."""
    words = [word for word in tags.values() if isinstance(word, str) and word and not process.endswith(f":{word}")]
    return "/".join(part.replace("/", "_") for part in (process, *words))


class Counter:
    """Counts by name; only grows. `counter["dropped/stale"] += 1` and `counter.values()`."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0) -> None:
        assert amount >= 0, f"{name}: a counter only grows"
        self._counts[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._counts.get(name, 0.0)

    def values(self) -> dict[str, float]:
        """All counts, sorted by name."""
        return dict(sorted(self._counts.items()))


class Mean:
    """Weighted means by name since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: float | None, weight: float = 1.0) -> None:
        """One observation; None and non-finite values (unscored) are outside the mean."""
        if value is None or not math.isfinite(value):
            return
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + value * weight, count + weight)

    def take(self) -> dict[str, float]:
        """The means, and begin again."""
        means = {name: total / count for name, (total, count) in sorted(self._sums.items()) if count > 0}
        self._sums.clear()
        return means
