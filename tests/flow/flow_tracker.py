"""A tracker of a user's own: one file of lines, and one that never returns."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from astraflow.lib.options import Options
from astraflow.lib.tracking import TrackedRun


class Lines:
    """Appends what it gets to `<run_dir>/<option file>`. With `fails` it breaks down once, before the line of that number."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        known = Options("tracker 'lines'", options)
        self._name: str = known.take("file", "lines.jsonl")
        self._fails: int = known.take("fails", -1)
        known.done()
        self._file: IO[str] | None = None
        self._marker = Path()
        self._count = 0

    def open(self, run: TrackedRun) -> None:
        run.kept.setdefault("id", secrets.token_hex(4))
        self._file = (run.run_dir / self._name).open("a", encoding="utf-8", buffering=1)
        self._marker = run.run_dir / f"{self._name}.failed"
        self._file.write(json.dumps({"id": run.kept["id"], "run": run.run_id, "trackers": run.config.get("trackers")}) + "\n")

    def log(self, series: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        assert self._file is not None
        if self._count == self._fails and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("the service is away; key 0123456789abcdef0123456789abcdef01234567 was refused")
        self._count += 1
        self._file.write(json.dumps([series, step, time_s, dict(values)]) + "\n")

    def close(self) -> None:
        assert self._file is not None
        self._file.close()


class Hangs(Lines):
    """Takes one line and does not return."""

    def log(self, series: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        super().log(series, step, time_s, values)
        while True:
            time.sleep(3600)  # that is what it is for
