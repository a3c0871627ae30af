"""The curves of a run from its `metrics.jsonl`: read on from where the last look ended, thinned out so that a page stays fluid.

A curve holds at most `POINTS` points. When it is full, neighbours are merged in pairs and each later point stands for twice as many
rows, with their mean, smallest and largest value; so 100,000 rows cost no more to send or to draw than a thousand.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

POINTS = 480
CURVES = 24
"""Of one chart; further ones are left out and named."""
SLICE_BYTES = 2 * 2**20
"""Read in one go: some 50 ms of decoding, which other threads share."""
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Chart:
    """One picture: which numbers of which processes."""

    key: str
    title: str
    unit: str
    sources: tuple[tuple[str, str], ...]
    """(process, name) as regular expressions that match whole. Group 1 of the name, if there is one, names the curve."""


CHARTS = (
    Chart("reward", "Reward", "", (("trainer:.*", "reward/(mean)"), ("dataflow", "reward/(rollout_mean)"))),
    Chart("eval", "Evaluation", "", (("dataflow", "eval/(.+/avg@[0-9]+)"),)),
    Chart("staleness", "Staleness", "versions", (("trainer:.*", "staleness/(mean|max)"),)),
    Chart("drops", "Dropped, by reason", "trajectories", (("dataflow", "rollout/dropped/(.+)"),)),
    Chart("tokens", "Tokens per second", "tokens/s", (("dataflow", "rollout/(tokens_per_s)"), ("trainer:.*", "perf/(train_tokens_per_s)"))),
    Chart("wait", "Trainer waits", "share of a step", (("trainer:.*", "perf/(wait_share)"),)),
    Chart("idle", "Rollout places idle", "share of all", (("dataflow", "dashboard/(idle)"),)),
    Chart("mismatch", "Mismatch", "nats", (("trainer:.*", "mismatch/(k3|log_ratio_abs)"),)),
    Chart("size", "Weight transfers: size", "MB", ((".+", "dashboard/size_mb/(.+)"),)),
    Chart("speed", "Weight transfers: speed", "MB/s", ((".+", "dashboard/mb_per_s/(.+)"),)),
)


class Row(msgspec.Struct):
    """A line of metrics.jsonl (lib/metrics.py)."""

    time: float
    process: str
    step: int
    values: dict[str, float | None]
    model: str = ""
    over: str = ""


_DECODER = msgspec.json.Decoder(Row)


@dataclass
class Curve:
    """Points are `[first row, time, mean, smallest, largest, step]`; times are seconds since the first row."""

    chart: str
    label: str
    points: list[list[float]] = field(default_factory=list)
    merged_at: int = 0
    """Row at which all points changed last."""
    grown_at: int = 0
    """Row of the newest value."""
    _per: int = 1
    _held: int = 0
    """Values in the last point."""

    def add(self, row: int, time: float, value: float, step: int) -> None:
        self.grown_at = row
        if self.points and self._held < self._per:
            last = self.points[-1]
            self._held += 1
            last[2] += (value - last[2]) / self._held
            last[1], last[3], last[4], last[5] = time, min(last[3], value), max(last[4], value), step
            return
        if len(self.points) >= POINTS:
            self.points = [_merged(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._per, self.merged_at = self._per * 2, row
        self.points.append([row, time, value, value, value, step])
        self._held = 1


def _merged(first: list[float], second: list[float]) -> list[float]:
    """Two neighbours that stand for equally many values."""
    low, high = min(first[3], second[3]), max(first[4], second[4])
    return [first[0], second[1], (first[2] + second[2]) / 2, low, high, second[5]]


class Series:
    """The curves of one run. Safe to share between threads."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._offset = self._row = self._broken = 0
        self._start: float | None = None
        self._curves: dict[tuple[str, str], Curve] = {}
        self._left_out: set[str] = set()
        self._places: dict[str, float] = {}
        self._pulls: dict[tuple[str, str], tuple[float, float]] = {}
        self._matches: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def since(self, row: int) -> dict[str, Any]:
        """`{row, more, charts, curves}`: what is new after `row` (0 = everything). A curve with `whole` replaces the one that the
        caller has; otherwise points from its first one on do. `more`: the file goes on, ask again."""
        with self._lock:
            more = self._read()
            if row > self._row:  # the file was begun anew, or the caller means another run
                row = 0
            curves = [found for curve in self._curves.values() if (found := _news(curve, row))]
            charts = [{"key": chart.key, "title": chart.title, "unit": chart.unit} for chart in CHARTS]
            return {
                "row": self._row,
                "more": more,
                "start": self._start,
                "charts": charts,
                "curves": curves,
                "left_out": sorted(self._left_out),
                "broken_lines": self._broken,
            }

    def _read(self) -> bool:
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._reset()
            if size == self._offset:
                return False
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(SLICE_BYTES)
        except FileNotFoundError:
            return False
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) < MAX_LINE_BYTES:
                return False  # a line that is being written
            end = len(data)
        self._offset += end
        for line in data[:end].split(b"\n"):
            if line.strip():
                self._line(line)
        return self._offset < size

    def _line(self, line: bytes) -> None:
        try:
            row = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._broken += 1
            return
        self._row += 1
        if self._start is None:
            self._start = row.time
        if row.over or (row.process == "dataflow" and row.model):
            return  # the same numbers once more, in another cut
        for name, value in self._numbers(row):
            if value is not None:
                for key in self._wanted(row.process, name):
                    self._curve(key).add(self._row, round(row.time - self._start, 3), value, row.step)

    def _numbers(self, row: Row) -> Iterator[tuple[str, float | None]]:
        """The row's own, and what follows from several."""
        yield from row.values.items()
        if (places := row.values.get("raas/slots")) is not None:
            self._places[row.process] = places
        busy = row.values.get("buffer/in_flight_trajectories")
        if busy is not None and (total := sum(self._places.values())):
            yield "dashboard/idle", min(max(1 - busy / total, 0.0), 1.0)
        for name, size in row.values.items():
            if name.startswith("weights/size_bytes") and size is not None:
                tail = name.removeprefix("weights/size_bytes")  # nothing when the service has one model only
                model = tail.removeprefix("/") or "weights"
                seconds = row.values.get(f"weights/pull_s{tail}") or 0.0
                if self._pulls.get((row.process, model)) != (size, seconds):  # otherwise it is the same transfer, told again
                    self._pulls[row.process, model] = (size, seconds)
                    yield f"dashboard/size_mb/{model}", size / 1e6
                    if seconds > 0:
                        yield f"dashboard/mb_per_s/{model}", size / 1e6 / seconds

    def _wanted(self, process: str, name: str) -> list[tuple[str, str]]:
        """(chart, label of the curve) of each chart that shows this number."""
        key = (process, name)
        if key not in self._matches:
            if len(self._matches) > 100_000:
                self._matches.clear()
            self._matches[key] = list(_matches(process, name))
        return self._matches[key]

    def _curve(self, key: tuple[str, str]) -> Curve:
        if key not in self._curves:
            chart, label = key
            if sum(curve.chart == chart for curve in self._curves.values()) >= CURVES:
                self._left_out.add(f"{chart}: {label}")
                return Curve(chart, label)  # forgotten
            self._curves[key] = Curve(chart, label)
        return self._curves[key]


def _matches(process: str, name: str) -> Iterator[tuple[str, str]]:
    for chart in CHARTS:
        for process_pattern, name_pattern in chart.sources:
            found = re.fullmatch(name_pattern, name)
            if found and re.fullmatch(process_pattern, process):
                owner = process.removeprefix("trainer:")
                yield chart.key, found[1] if process == "dataflow" else f"{owner} {found[1]}"


def _news(curve: Curve, row: int) -> dict[str, Any] | None:
    """What a caller that knows everything up to `row` lacks; its last point may have grown, so that is sent again."""
    whole = row == 0 or curve.merged_at > row
    points = curve.points if whole else curve.points[_first_after(curve.points, row) :]
    if not points or (not whole and curve.grown_at <= row):
        return None
    return {"chart": curve.chart, "label": curve.label, "whole": whole, "points": points}


def _first_after(points: list[list[float]], row: int) -> int:
    """Index of the last point that began at `row` or before."""
    index = len(points)
    while index > 0 and points[index - 1][0] > row:
        index -= 1
    return max(index - 1, 0)
