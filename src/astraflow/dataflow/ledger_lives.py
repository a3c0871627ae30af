"""The ledger's ground: one SQLite file, transactions, running totals, and the moves of shares from state to state.

A damaged file is refused by name when it is opened or when its damage is met; a disk that takes no more bytes ends the transaction
and the process, which may be started again.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from astraflow.dataflow.journal import SCHEMA, SCHEMA_VERSION, ShareResult, ShareRow, Totals
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.segments import DiskRefused, Location, SegmentFiles
from astraflow.protocol.control import Drop, LedgerCounts
from astraflow.protocol.errors import AstraFlowError, UserError

IN_FLIGHT = ("leased", "rolled", "buffered", "served")
TOTALS = "totals"
"""Key of the running totals in `meta`."""
DROPS_KEPT = 20
"""For /status: what is being dropped just now. All of them are in the tables."""
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""What SQLite says of a file that is not what was written. All its other errors are the disk's, or another process's."""


class LedgerDamaged(UserError):
    """The ledger's file cannot be used; only a person can decide what to do."""


class Lives:
    """Shares, their states, and who still needs which payload. All methods run in one thread."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "ledger.sqlite"
        self.segments = SegmentFiles(directory / "segments", segment_bytes)
        self.places: dict[str, Location] = {}
        """Where the payloads of all leases that may still be served lie."""
        self._holds: Counter[str] = Counter()
        """Lease → parts of shares that still need its payload."""
        self._unlink: list[Path] = []
        """Files that the running transaction makes needless; deleted after its commit."""
        self._fell: list[tuple[str, str, str]] = []
        """(lease, policy, reason) of shares that the running transaction drops."""
        self.recent_drops: list[Drop] = []
        """As of the last commit, newest last; replaced, never changed, so that it may be read from any thread."""
        self.mended: list[str] = []
        """What was found damaged and made good, until somebody tells it."""
        with self._guarded():
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            with self._guarded():
                self._open()
        except AstraFlowError:
            self._db.close()
            raise
        self.snapshot = self.counts()
        """Counts as of the last commit; may be read from any thread."""

    def damaged(self, what: str) -> LedgerDamaged:
        return LedgerDamaged(f"ledger: {self.path} is damaged ({what}): put back a copy of the directory, or start a new run directory")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Name what SQLite, or a row that cannot be decoded, says: LedgerDamaged, or DiskRefused, after which a restart may help."""
        try:
            yield
        except msgspec.DecodeError as error:
            raise self.damaged(f"a row of it cannot be decoded: {error}") from None
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            no_text = code is None and isinstance(error, sqlite3.OperationalError)  # Python's own: a text that is not UTF-8
            if no_text or (code is not None and code & 0xFF in DAMAGE):
                raise self.damaged(" ".join(str(error).split())) from None
            raise DiskRefused(f"ledger: cannot write {self.path}: {error}: free space or make it writable, then resume") from error

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._refuse_a_torn_file()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if tables and version != SCHEMA_VERSION:
            raise LedgerDamaged(
                f"ledger: {self.path} was written by another version of AstraFlow (layout {version}, this one reads {SCHEMA_VERSION}):"
                " go on with that version, or start a new run directory"
            )
        self._refuse_damaged_pages()
        self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        self._refuse_to_forget()
        self._load_totals()

    def _refuse_a_torn_file(self) -> None:
        """SQLite notices missing pages only when it reads them, which may be hours later."""
        (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        (pages,), (size,) = self._db.execute("PRAGMA page_count").fetchone(), self._db.execute("PRAGMA page_size").fetchone()
        there = self.path.stat().st_size
        if not busy and there < pages * size:
            raise self.damaged(f"{there} bytes, its header says {pages * size}")

    def _refuse_damaged_pages(self) -> None:
        """Damage in the middle, which a run might meet hours later."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self.damaged(" ".join(found.split()))

    def _refuse_to_forget(self) -> None:
        """Leases are written before any other file is, and never deleted: files without a lease have lost their database."""
        if self._db.execute("SELECT 1 FROM leases LIMIT 1").fetchone():
            return
        there = {path: len(list(path.glob("*"))) for path in (self.path.parent / "segments", self.path.parent / "batches")}
        if any(there.values()):
            files = ", ".join(f"{path.name}/ has {count} files" for path, count in there.items() if count)
            raise LedgerDamaged(
                f"ledger: {self.path.parent}: {files}, but the database that knows them, {self.path}, is missing or empty: put back the"
                f" whole directory ({self.path.name}-wal belongs to it), or start a new run directory"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._save_totals()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._unlink.clear()
                self._fell.clear()
                self._load_totals()
                raise
            while self._unlink:
                self._unlink.pop().unlink(missing_ok=True)
            self._note_drops()
        self.snapshot = self.counts()

    def _note_drops(self) -> None:
        fell, self._fell = self._fell[-DROPS_KEPT:], []
        new = []
        for lease_id, policy, reason in fell:
            (task_id,) = self._db.execute("SELECT task_id FROM leases WHERE lease_id=?", (lease_id,)).fetchone()
            new.append(Drop(lease_id=lease_id, task_id=task_id, policy=policy, reason=reason))
        if new:
            self.recent_drops = [*self.recent_drops, *new][-DROPS_KEPT:]

    def _put(self, meta: dict[str, bytes]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta(key, value) VALUES(?,?)", list(meta.items()))

    # --- totals ---------------------------------------------------------------------------------------------------------

    def _load_totals(self) -> None:
        found = self._db.execute("SELECT value FROM meta WHERE key=?", (TOTALS,)).fetchone()
        self._use(msgspec.msgpack.decode(found[0], type=Totals) if found else Totals())
        self._saved = found[0] if found else b""

    def _use(self, totals: Totals) -> None:
        self._made, self._replayed, self._arrivals = totals.made, totals.replayed, totals.arrivals
        self._states, self._dropped = Counter(totals.states), Counter(totals.dropped)
        self._gaps = {policy: Counter(gaps) for policy, gaps in totals.gaps.items()}

    def _totals(self) -> Totals:
        return Totals(
            made=self._made,
            states=+self._states,
            dropped=+self._dropped,
            replayed=self._replayed,
            gaps={policy: +gaps for policy, gaps in self._gaps.items()},
            arrivals=self._arrivals,
        )

    def _save_totals(self) -> None:
        data = msgspec.msgpack.encode(self._totals())
        if data != self._saved:
            self._put({TOTALS: data})
            self._saved = data

    def _count_all(self) -> Totals:
        """The totals from the tables themselves; reads every share."""
        db, totals = self._db, Totals()
        totals.made, totals.replayed, totals.arrivals = db.execute(
            "SELECT COALESCE(SUM(n),0), COALESCE(SUM(uses*live),0), COALESCE(MAX(arrival),0) FROM shares"
        ).fetchone()
        totals.states = dict(db.execute("SELECT state, SUM(live) FROM shares WHERE state!='dropped' GROUP BY state"))
        dropped = Counter(dict(db.execute("SELECT reason, SUM(live) FROM shares WHERE state='dropped' GROUP BY reason")))
        dropped.update(dict(db.execute("SELECT reason, COUNT(*) FROM lost GROUP BY reason")))
        totals.states, totals.dropped = +Counter(totals.states), +dropped
        gaps = "SELECT policy, version - min_version, SUM(live) FROM shares WHERE state='trained' GROUP BY 1, 2"
        for policy, gap, rows in db.execute(gaps):
            if rows:
                totals.gaps.setdefault(policy, {})[gap] = rows
        return totals

    def counts(self) -> LedgerCounts:
        """Kept up to date in memory; `check` compares them with the tables."""
        return LedgerCounts(
            made=self._made,
            trained=self._states["trained"],
            dropped={reason: count for reason, count in sorted(self._dropped.items()) if count},
            in_flight={state: self._states[state] for state in IN_FLIGHT},
            replayed=self._replayed,
        )

    def check(self) -> LedgerCounts:
        """Assert conservation, in memory and in the tables, and return the counts."""
        with self._guarded():
            kept, found = self._totals(), self._count_all()
        kept.gaps = {policy: gaps for policy, gaps in kept.gaps.items() if gaps}
        assert kept == found, f"ledger totals {kept} differ from its tables {found}"
        after = self.counts()
        total = after.trained + sum(after.dropped.values()) + sum(after.in_flight.values())
        assert after.made == total, f"ledger: made {after.made}, but trained + dropped + in flight is {total}: {after}"
        return after

    def staleness(self, policy: str) -> dict[int, int]:
        """Gap → trained trajectories."""
        return dict(+self._gaps.get(policy, Counter()))

    # --- shares ---------------------------------------------------------------------------------------------------------

    def _shares(self, where: str, arguments: tuple[Any, ...]) -> list[ShareRow]:
        """Oldest first, parts of a group in the order of its trajectories."""
        query = (
            "SELECT s.lease_id, s.policy, s.state, s.arrival, s.stats, s.version, l.instance, s.kept, s.part, s.members FROM shares s"
            f" JOIN leases l USING(lease_id) WHERE {where} ORDER BY s.arrival, s.part"
        )
        return [
            ShareRow(
                lease_id=r[0], policy=r[1], state=r[2], arrival=r[3] or 0, stats=msgspec.msgpack.decode(r[4], type=GroupStats),
                version=r[5], instance=r[6], kept=bool(r[7]), part=r[8], members=members_of(r[9]),
            )
            for r in self._db.execute(query, arguments).fetchall()
        ]  # fmt: skip

    def _move(
        self,
        lease_id: str,
        policy: str,
        part: int,
        before: tuple[str, ...],
        after: str,
        reason: str = "",
        batch: tuple[int, int] | None = None,
    ) -> int | None:
        """Move a share's surviving rows (into the `batch` of this timeline and version); None when it is not in one of the states
        `before`. Dropped is final."""
        key, state = (lease_id, policy, part), before[0]
        if len(before) > 1:
            row = self._db.execute("SELECT state FROM shares WHERE lease_id=? AND policy=? AND part=?", key).fetchone()
            if row is None or row[0] not in before:
                return None
            state = row[0]
        found = self._db.execute(
            "UPDATE shares SET state=?, reason=?, final=?, timeline=COALESCE(?,timeline), version=COALESCE(?,version)"
            " WHERE lease_id=? AND policy=? AND part=? AND state=? RETURNING live, version, min_version",
            (after, reason, int(after == "dropped"), *(batch or (None, None)), *key, state),
        ).fetchall()
        if not found:
            return None
        live, version, min_version = found[0]
        self._states[state] -= live
        if after == "dropped":
            self._dropped[reason] += live
            self._fell.append((lease_id, policy, reason))
        else:
            self._states[after] += live
        if "trained" in (state, after):
            self._gaps.setdefault(policy, Counter())[version - min_version] += live if after == "trained" else -live
        return int(live)

    def _arrive(self, lease_id: str, share: ShareResult) -> None:
        """A leased share's group came: its statistics, the rows that it lost one by one, and where the others go."""
        stats, lost = share.stats, len(share.lost)
        self._db.execute(
            "UPDATE shares SET stats=?, min_version=?, arrival=?, live=live-? WHERE lease_id=? AND policy=? AND part=0",
            (
                msgspec.msgpack.encode(stats) if stats else None, stats.min_version if stats else None, share.arrival, lost,
                lease_id, share.policy,
            ),
        )  # fmt: skip
        if lost:
            rows = [(lease_id, share.policy, index, reason) for index, reason in share.lost.items()]
            self._db.executemany("INSERT INTO lost(lease_id, policy, idx, reason) VALUES(?,?,?,?)", rows)
            self._dropped.update(share.lost.values())
            self._states["leased"] -= lost
        self._move(lease_id, share.policy, 0, ("leased",), share.state, share.reason)
        self._arrivals = max(self._arrivals, share.arrival)

    def _hold(self, lease_id: str, place: Location, count: int) -> None:
        self.places[lease_id] = place
        self._holds[lease_id] += count
        self.segments.hold(place.segment, count)

    def _release(self, lease_id: str) -> None:
        place = self.places[lease_id]
        self._holds[lease_id] -= 1
        if self._holds[lease_id] == 0:
            del self._holds[lease_id], self.places[lease_id]
        self.segments.release(place.segment)


def members_of(blob: bytes | None) -> tuple[int, ...]:
    """Trajectories of a part; empty = all that are scored."""
    return tuple(msgspec.msgpack.decode(blob, type=list[int])) if blob is not None else ()
