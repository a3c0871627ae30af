"""An index of the records under `rollouts/`, so that tens of thousands of them can be searched and paged: one SQLite file, FTS5 for text.

The files are the truth; the index may be deleted at any time. It is brought up to date in slices, in a thread of the process that
shows the page, and only while somebody looks: a run never waits for it. What became of a rollout is not copied: queries join
the ledger itself, which is opened read-only for each of them.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

NAME = "viewer.sqlite"
LAYOUT = 1
"""In the file's `user_version`; an index of another layout is made anew."""
SLICE = 64
"""Records per transaction."""
REST = 1.0
"""Pause after a slice as a share of its time: the process has better things to do."""
SETTLED_NS = 100_000_000
"""A directory that changed just now may change again under the same time stamp."""
MAX_RECORD_BYTES = 64 * 2**20
"""Larger files are listed without their content."""
MAX_TEXT_CHARS = 200_000
"""Of one rollout's text that can be searched."""
SCHEMA = """
CREATE TABLE rollouts(
  id INTEGER PRIMARY KEY,
  place TEXT NOT NULL UNIQUE,       -- INSTANCE/REF, below rollouts/, without suffix
  inode INTEGER NOT NULL,           -- a record that was written again has another one
  time REAL NOT NULL,               -- unix seconds
  instance TEXT NOT NULL, lease_id TEXT NOT NULL, attempt INTEGER NOT NULL, task_id TEXT NOT NULL, idx INTEGER NOT NULL,
  workflow TEXT NOT NULL, policies TEXT NOT NULL,   -- " a b "
  reward REAL, finish TEXT NOT NULL, error TEXT NOT NULL,     -- boundary.kind
  tokens INTEGER NOT NULL,          -- sampled
  min_version INTEGER, max_version INTEGER, head TEXT NOT NULL
);
CREATE INDEX by_lease ON rollouts(lease_id);
CREATE INDEX by_reward ON rollouts(reward);
CREATE INDEX by_tokens ON rollouts(tokens);
CREATE VIRTUAL TABLE texts USING fts5(text);
"""


class Called(msgspec.Struct):
    policy: str = ""
    answer: str = ""
    prompt: str = ""
    new_tokens: int = 0
    versions: list[int] = []


class Failed(msgspec.Struct):
    boundary: str = ""
    kind: str = ""


class Record(msgspec.Struct):
    """What the index reads of a record (raas/executor.py writes it)."""

    lease_id: str
    task_id: str
    index: int
    attempt: int = 1
    workflow: str = ""
    reward: float | None = None
    finish: str = ""
    error: Failed | None = None
    turns: list[dict[str, Any]] = []
    calls: list[Called] = []

    def text(self) -> str:
        """What can be searched: the turns, or the calls of a workflow that keeps no turns."""
        parts = [_plain(turn.get("content")) for turn in self.turns] or [part for call in self.calls for part in (call.prompt, call.answer)]
        return "\n".join(parts)[:MAX_TEXT_CHARS]


def _plain(content: Any) -> str:
    """The text of a turn: a string, or parts of which some are text."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


_DECODER = msgspec.json.Decoder(Record)


@dataclass
class Todo:
    """What one look at a directory found; worked off before the next look, which costs as much as there are files."""

    stamp: int
    """The directory's mtime before the look."""
    new: deque[os.DirEntry[str]]
    gone: deque[str]

    @property
    def left(self) -> int:
        return len(self.new) + len(self.gone)


class RolloutIndex:
    """The index of one run. Safe to share between threads: every call opens its own connection; one thread writes at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._records, self._run_dir = run_dir / "rollouts", run_dir
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._todo: dict[str, Todo] = {}
        self._seen: dict[str, int] = {}
        """Directory → its mtime when it was last read to its end: nothing was added or removed since."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.pending = 0
        """Records that are not in the index yet, as of the last look."""

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    # --- bringing up to date --------------------------------------------------------------------------------------------

    def refresh(self, budget_s: float = 0.2) -> int:
        """Take in what is new for at most about this long; returns how many records are left. Returns at once while another thread
        is at it."""
        if not self._lock.acquire(blocking=False):
            return self.pending
        try:
            with closing(self._open()) as db:
                return self._refresh(db, time.monotonic() + budget_s)
        finally:
            self._lock.release()

    def _refresh(self, db: sqlite3.Connection, end: float) -> int:
        for directory in self._directories():
            todo = self._todo.get(directory.name)
            if todo is None:
                stamp = directory.stat().st_mtime_ns
                if self._seen.get(directory.name) == stamp:
                    continue
                todo = self._todo[directory.name] = Todo(stamp, *self._changes(db, directory))
            self._work(db, directory.name, todo, end)
            if not todo.left:
                self._todo.pop(directory.name, None)  # another thread may have made the file anew
                if time.time_ns() - todo.stamp > SETTLED_NS:
                    self._seen[directory.name] = todo.stamp
        self.pending = sum(todo.left for todo in list(self._todo.values()))
        return self.pending

    def _work(self, db: sqlite3.Connection, name: str, todo: Todo, end: float) -> None:
        while todo.left and time.monotonic() < end:
            began = time.monotonic()
            if todo.gone:
                self._forget(db, [todo.gone.popleft() for _ in range(min(SLICE, len(todo.gone)))])
            else:
                self._take(db, name, [todo.new.popleft() for _ in range(min(SLICE, len(todo.new)))])
            time.sleep(min(REST * (time.monotonic() - began), 0.2))

    def _directories(self) -> list[Path]:
        with suppress(FileNotFoundError), os.scandir(self._records) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def _changes(self, db: sqlite3.Connection, directory: Path) -> tuple[deque[os.DirEntry[str]], deque[str]]:
        """(files to read, oldest first; places to forget)."""
        with os.scandir(directory) as entries:
            there = {f"{directory.name}/{entry.name.removesuffix('.json')}": entry for entry in entries if entry.name.endswith(".json")}
        prefix = f"{directory.name}/"
        known = dict(db.execute("SELECT place, inode FROM rollouts WHERE place >= ? AND place < ?", (prefix, f"{directory.name}0")))
        new = [entry for place, entry in there.items() if known.get(place) != entry.inode()]
        gone = [place for place, inode in known.items() if place not in there or there[place].inode() != inode]
        return deque(sorted(new, key=_written)), deque(gone)

    def _forget(self, db: sqlite3.Connection, places: Sequence[str]) -> None:
        with _writing(db):
            for place in places:
                row = db.execute("DELETE FROM rollouts WHERE place=? RETURNING id", (place,)).fetchone()
                if row is not None:
                    db.execute("DELETE FROM texts WHERE rowid=?", row)

    def _take(self, db: sqlite3.Connection, instance: str, entries: Sequence[os.DirEntry[str]]) -> None:
        read = [row for entry in entries if (row := _read(instance, entry)) is not None]
        with _writing(db):
            for values, text in read:
                marks = ",".join("?" * len(values))
                cursor = db.execute(f"INSERT OR IGNORE INTO rollouts VALUES(NULL,{marks})", values)
                if cursor.rowcount:
                    db.execute("INSERT INTO texts(rowid, text) VALUES(?,?)", (cursor.lastrowid, text))

    # --- the file -------------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            self._path = self._run_dir / NAME if os.access(self._run_dir, os.W_OK) else self._elsewhere() / NAME
        db = sqlite3.connect(self._path.absolute().as_uri(), uri=True, isolation_level=None, timeout=10.0)
        try:
            if db.execute("PRAGMA user_version").fetchone()[0] != LAYOUT:
                self._make(db)
        except sqlite3.DatabaseError:  # damaged: it is made of files that are still there
            db.close()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            db = sqlite3.connect(self._path.absolute().as_uri(), uri=True, isolation_level=None, timeout=10.0)
            self._make(db)
        db.execute("PRAGMA synchronous=OFF")
        return db

    def _elsewhere(self) -> Path:
        """The run directory may only be read."""
        self._scratch = tempfile.TemporaryDirectory(prefix="astraflow-view-")
        return Path(self._scratch.name)

    def _make(self, db: sqlite3.Connection) -> None:
        self._seen.clear()
        self._todo.clear()
        db.execute("PRAGMA journal_mode=WAL")
        with _writing(db):
            if db.execute("PRAGMA user_version").fetchone()[0] == LAYOUT:  # another process was quicker
                return
            for table in ("rollouts", "texts"):
                db.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in SCHEMA.split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute(f"PRAGMA user_version={LAYOUT}")

    @contextmanager
    def reading(self) -> Iterator[tuple[sqlite3.Connection, bool]]:
        """(connection with the ledger attached as `ledger`, whether there is a ledger that can be read)."""
        ledger = self._run_dir / "ledger" / "ledger.sqlite"
        with closing(self._open()) as db:
            db.create_function("in_part", 2, _in_part, deterministic=True)
            attached = False
            if ledger.is_file():
                mode = "mode=ro" if ledger.with_name(f"{ledger.name}-wal").exists() else "immutable=1"
                with suppress(sqlite3.Error):
                    db.execute("ATTACH ? AS ledger", (f"{ledger.absolute().as_uri()}?{mode}",))
                    db.execute("SELECT lease_id, policy, part, members, state, reason FROM ledger.shares LIMIT 0")
                    attached = True
            yield db, attached


@contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _in_part(members: bytes | None, index: int) -> int:
    """Whether a trajectory belongs to a part of a share; no list = all of it."""
    return int(members is None or index in msgspec.msgpack.decode(members, type=list[int]))


def _written(entry: os.DirEntry[str]) -> tuple[int, str]:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns, entry.name
    except FileNotFoundError:
        return 0, entry.name


def _read(instance: str, entry: os.DirEntry[str]) -> tuple[tuple[Any, ...], str] | None:
    """(columns after the id, searchable text); None when the file is gone, a link, or no record."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_file(follow_symlinks=False) or status.st_size > MAX_RECORD_BYTES:
            return None
        record = _DECODER.decode(Path(entry.path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is no record: %s", entry.path, error)
        return None
    versions = [version for call in record.calls for version in call.versions]
    text = record.text()
    policies = sorted({call.policy for call in record.calls if call.policy})
    values = (
        f"{instance}/{entry.name.removesuffix('.json')}",
        entry.inode(),
        status.st_mtime,
        instance,
        record.lease_id,
        record.attempt,
        record.task_id,
        record.index,
        record.workflow,
        f" {' '.join(policies)} ",
        record.reward,
        record.finish,
        f"{record.error.boundary}.{record.error.kind}" if record.error else "",
        sum(call.new_tokens for call in record.calls),
        min(versions, default=None),
        max(versions, default=None),
        " ".join((record.calls[-1].answer if record.calls else text)[-400:].split())[-160:],
    )
    return values, text
