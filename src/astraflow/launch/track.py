"""`astraflow track`: feeds the trackers of a run from its `metrics.jsonl`. `astraflow run` keeps one such process beside the others.

    metrics.jsonl ─ a thread per tracker: read from its own place on ─> Tracker.log ─> <run_dir>/trackers/<name>.json {place, kept}

The file is the queue: what a tracker is slow to take stays on disk and nowhere else, so nothing fills up, no step waits, and nothing is
lost when a tracker fails: it is made anew, with back-off, and goes on at its place. At the end it has `END_S` to catch up; what is
left then is told, and sent by another `astraflow track`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.config.experiment import Experiment, Resolved
from astraflow.config.processes import public_config
from astraflow.launch.names import import_plugins
from astraflow.launch.plan import thread_env
from astraflow.lib.aio import Backoff, one_line
from astraflow.lib.log import setup_logging
from astraflow.lib.metrics import series_of
from astraflow.lib.proc import Child
from astraflow.lib.tracking import TRACKERS, TrackedRun, Tracker
from astraflow.protocol.errors import AstraFlowError, Conflict, UserError

log = logging.getLogger(__name__)

METRICS, DIRECTORY = "metrics.jsonl", "trackers"
CHUNK_BYTES = 256 << 10
"""Read at once; a tracker's place is written down after each."""
LOOK_S = 1.0
SLOW_S = 60.0
"""A tracker that has been in one call for so long is told about."""
RETRY_S = 60.0
"""Longest pause before a tracker that failed is made anew."""
END_S = 5.0
SECRET = re.compile(r"[A-Za-z0-9_-]{32,}")
"""What may be a key in the text of a library's error."""


def checked(experiment: Experiment) -> dict[str, Tracker]:
    """A tracker per entry of `trackers`. Raises UserError for an unknown name, wrong options, a package that is missing."""
    made: dict[str, Tracker] = {}
    for name, options in experiment.trackers.items():
        try:
            made[name] = TRACKERS.resolve(name)(options)
        except (UserError, ImportError) as error:
            raise UserError(f"trackers.{name}: {one_line(error)}") from None
    return made


def state_file(run_dir: Path, name: str) -> Path:
    """Where the place of this tracker is written down."""
    return run_dir / DIRECTORY / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"


@dataclass
class Feed:
    """One tracker and its place in the file."""

    name: str
    make: Callable[[], Tracker]
    about: Callable[[dict[str, str]], TrackedRun]
    run_dir: Path
    ending: threading.Event
    place: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    broken: int = 0
    """Lines that are no rows; a process died while it wrote them."""
    failures: int = 0
    busy_since: float | None = None
    """Since when it is in a call of the tracker."""

    def __post_init__(self) -> None:
        (self.run_dir / DIRECTORY).mkdir(exist_ok=True)
        self._state = state_file(self.run_dir, self.name)
        self._lock = os.open(self._state.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"tracker {self.name!r} of {self.run_dir} is fed by another process") from None
        if self._state.exists():
            saved = json.loads(self._state.read_text(encoding="utf-8"))
            self.place, self.kept = int(saved["place"]), dict(saved["kept"])

    def release(self) -> None:
        """Let another process feed this tracker."""
        os.close(self._lock)

    @property
    def left_bytes(self) -> int:
        """Of the file, still to be sent."""
        path = self.run_dir / METRICS
        return max(path.stat().st_size - self.place, 0) if path.exists() else 0

    def run(self) -> None:
        """Until everything is sent and the end has come; while a tracker fails it is made anew."""
        backoff = Backoff(1.0, max_s=RETRY_S)
        while True:
            try:
                with self._called():
                    tracker = self.make()
                    tracker.open(self.about(self.kept))
                self._save()
                while self._send(tracker) or not self.ending.is_set():
                    backoff.reset()
                    if not self.left_bytes:
                        self.ending.wait(LOOK_S)
                with self._called():
                    tracker.close()
                return
            except Exception as error:  # the code of others: whatever it raises is told, and it is made anew
                self.failures += 1
                text = SECRET.sub("…", one_line(error))
                log.warning("tracker %s failed (%d times so far), %d bytes wait: %s", self.name, self.failures, self.left_bytes, text)
                if self.ending.wait(backoff.next()):
                    return

    def _send(self, tracker: Tracker) -> bool:
        """Send one chunk of whole lines; false when there is none."""
        try:
            with (self.run_dir / METRICS).open("rb") as file:
                file.seek(self.place)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        for line in whole.split(b"\n")[:-1]:
            self._one(tracker, line)
        self.place += len(whole)
        self._save()
        return True

    def _one(self, tracker: Tracker, line: bytes) -> None:
        try:
            row = json.loads(line)
            tags = {key: value for key, value in row.items() if key not in ("time", "process", "step", "values")}
            values = {name: float(value) for name, value in row["values"].items() if value is not None}
            given = series_of(row["process"], tags), int(row["step"]), float(row["time"])
        except (ValueError, TypeError, KeyError, AttributeError):
            self.broken += 1
            return
        with self._called():
            tracker.log(*given, values)

    @contextmanager
    def _called(self) -> Iterator[None]:
        self.busy_since = time.monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def _save(self) -> None:
        scratch = self._state.with_suffix(".tmp")
        scratch.write_text(json.dumps({"place": self.place, "kept": self.kept}), encoding="utf-8")
        os.replace(scratch, self._state)


def track(resolved: Resolved, follow: bool) -> int:
    """Main of `astraflow track`: until SIGTERM or SIGINT with `follow`, else to the present end of the file. The exit code is 1 when
    something is left."""
    run, experiment = resolved.experiment.experiment, resolved.experiment
    setup_logging("track")
    import_plugins(experiment.plugins)
    checked(experiment)
    ending = threading.Event()
    if not follow:
        ending.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())

    def about(kept: dict[str, str]) -> TrackedRun:
        return TrackedRun(run.run_id, run.name, resolved.run_dir, public_config(resolved), kept)

    feeds = [
        Feed(name, lambda name=name, options=options: TRACKERS.resolve(name)(options), about, resolved.run_dir, ending)  # type: ignore[misc]
        for name, options in experiment.trackers.items()
    ]
    threads = [threading.Thread(target=feed.run, name=f"tracker {feed.name}", daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    told: dict[str, float] = {}
    while any(thread.is_alive() for thread in threads):
        for feed, thread in zip(feeds, threads, strict=True):
            thread.join(LOOK_S / 4)
            _tell_slow(feed, told)
    left = [feed for feed in feeds if feed.left_bytes]
    for feed in feeds:
        log.log(logging.WARNING if feed.left_bytes or feed.broken else logging.INFO, "%s", summary(feed))
    return 1 if left else 0


def summary(feed: Feed) -> str:
    """What became of the numbers, in one line."""
    text = f"tracker {feed.name}: {feed.place} bytes of {METRICS} sent, {feed.left_bytes} left"
    return text + (f", {feed.broken} broken lines dropped" if feed.broken else "")


def _tell_slow(feed: Feed, told: dict[str, float]) -> None:
    since = feed.busy_since
    if since is not None and time.monotonic() - since > SLOW_S and told.get(feed.name) != since:
        told[feed.name] = since
        log.warning("tracker %s has not returned for %.0f s; %d bytes wait", feed.name, time.monotonic() - since, feed.left_bytes)


@contextmanager
def tracking(experiment: Experiment, run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep `astraflow track` up beside the block; afterwards it has `END_S` to send the rest. It never ends or delays the run.
    Raises UserError, before anything is started, for trackers that cannot work."""
    if not checked(experiment):
        yield
        return
    ended = threading.Event()
    argv = [sys.executable, "-m", "astraflow", "track", str(run_dir), "--follow"]
    keeper = threading.Thread(target=_keep, args=(argv, run_dir, ended), name="track", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join(END_S + 5.0)
        for name, left in unsent(experiment.trackers, run_dir).items():
            say(f"trackers.{name}: {left} bytes of {METRICS} are not sent; `astraflow track {run_dir}` sends them (logs/track.log)")


def unsent(trackers: Mapping[str, Any], run_dir: Path) -> dict[str, int]:
    """Name → bytes, of those that are behind."""
    size = (run_dir / METRICS).stat().st_size if (run_dir / METRICS).exists() else 0
    left = {}
    for name in trackers:
        state = state_file(run_dir, name)
        place = int(json.loads(state.read_text(encoding="utf-8"))["place"]) if state.exists() else 0
        if size > place:
            left[name] = size - place
    return left


def _keep(argv: list[str], run_dir: Path, ended: threading.Event) -> None:
    """Start it, and again when it dies; at the end ask it to end, and kill it when it does not."""
    backoff = Backoff(1.0, max_s=RETRY_S)
    child: Child | None = None
    while not ended.is_set():
        if child is None or child.poll() is not None:
            if child is not None and ended.wait(backoff.next()):
                break
            try:
                child = Child(argv, env={**os.environ, **thread_env(1)}, log_path=run_dir / "logs" / "track.log", name="track")
            except AstraFlowError as error:
                log.warning("track: %s", error)
        ended.wait(LOOK_S)
    if child is not None:
        child.terminate(END_S)
