"""Spans: when a process did what, one JSON line each in `<run_dir>/trace/<process>.jsonl`; `astraflow trace` draws them.

    TRACE.open(run_dir, "trainer:solver")                  once, in a process's main; without it nothing is written and nothing is kept
    with TRACE.span("forward", rows=8): …
    TRACE.add("wait", begin, end)                          of `time.monotonic()`

Times are written as unix seconds: one reading of the wall clock at `open` and the monotonic clock from there on, so that spans of one
process keep their lengths and their order whatever is done to its wall clock.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from astraflow.lib.jsonl import append_bytes

log = logging.getLogger(__name__)
DIRECTORY = "trace"


class Trace:
    """The spans of this process. Safe to use from several threads: a line is one write."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._offset = 0.0
        self.on = False

    def open(self, run_dir: Path | str, process: str) -> None:
        """Write from now on."""
        directory = Path(run_dir) / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        name = process.replace("/", "_").replace(":", "_")
        self._descriptor = os.open(directory / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._offset = wall_offset()
        self._write({"process": process})
        self.on = True

    def add(self, name: str, begin: float, end: float | None = None, **about: Any) -> None:
        """A span that is over; `end` None = now. Both of `time.monotonic()`."""
        if self.on:
            end = time.monotonic() if end is None else end
            self._write({"name": name, "begin": round(begin + self._offset, 6), "end": round(end + self._offset, 6), **about})

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """The block is a span, also when it raises."""
        return _Span(self, name, about) if self.on else _OFF

    def _write(self, line: dict[str, Any]) -> None:
        try:
            append_bytes(self._descriptor, json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n")
        except OSError as error:  # a full disk costs the trace, not the run
            self.on = False
            log.warning("trace ends: %s", error)


def wall_offset() -> float:
    """Unix time minus `time.monotonic()`. Of several readings the one that took the shortest: between two calls a process may be put off
    for long."""
    readings = []
    for _ in range(8):
        before = time.monotonic()
        wall = time.time()
        after = time.monotonic()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


class _Span:
    def __init__(self, trace: Trace, name: str, about: dict[str, Any]):
        self._trace, self._name, self._about = trace, name, about

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._trace.add(self._name, self._begin, **self._about)


_OFF = nullcontext()
TRACE = Trace()
"""Of this process."""
