"""The lives of all rows (trajectory, policy): leased → rolled → buffered → served → trained | dropped(reason).

A *share* is one (lease, policy): its surviving rows move together, rows lost one by one (unscored, failed) are written with
their reason. Payload bytes go to segment files first, then one SQLite transaction per call (WAL, synchronous=NORMAL: safe
against the death of any process, not against loss of power). All methods run in one thread: see `LedgerThread`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from astraflow.dataflow.journal import SCHEMA, BatchRow, LeaseRow, Recovered, Result, Settled, ShareRow
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.segments import Location, PayloadDamaged, SegmentFiles
from astraflow.protocol.control import EvalResult, LedgerCounts

T = TypeVar("T")
IN_FLIGHT = ("leased", "rolled", "buffered", "served")


class Ledger:
    """One SQLite file, payload segments, and the bytes of served batches."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._batches = directory / "batches"
        self._batches.mkdir(exist_ok=True)
        self.path = directory / "ledger.sqlite"
        self.segments = SegmentFiles(directory / "segments", segment_bytes)
        self.places: dict[str, Location] = {}
        """Where the payloads of all leases that may still be served lie."""
        self._holds: Counter[str] = Counter()
        """Lease → shares that still need its payload."""
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)
        self._unlink: list[Path] = []
        """Files that the running transaction makes needless; deleted after its commit."""
        self._made, self._states, self._dropped, self._replayed = 0, Counter[str](), Counter[str](), 0
        self._count_all()
        self.snapshot = self.counts()
        """Counts as of the last commit; may be read from any thread."""

    @contextmanager
    def _transaction(self) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            self._unlink.clear()
            raise
        self._db.execute("COMMIT")
        while self._unlink:
            self._unlink.pop().unlink(missing_ok=True)
        self.snapshot = self.counts()

    # --- leases and results ---------------------------------------------------------------------------------------------

    def issue(self, leases: Sequence[LeaseRow], meta: dict[str, bytes]) -> None:
        """New leases, before they are submitted; `meta` moves the data set's position in the same transaction."""
        with self._transaction():
            for lease in leases:
                self._db.execute(
                    "INSERT INTO leases(lease_id, task_id, task_index, epoch, n_samples, seed, attempt, instance, state)"
                    " VALUES(?,?,?,?,?,?,?,?,'open')",
                    astuple(lease)[:8],
                )
                for policy in lease.policies:
                    self._db.execute(
                        "INSERT INTO shares(lease_id, policy, n, live, state) VALUES(?,?,?,?,'leased')",
                        (lease.lease_id, policy, lease.n_samples, lease.n_samples),
                    )
            self._put(meta)
            rows = sum(lease.n_samples * len(lease.policies) for lease in leases)
            self._made += rows
            self._states["leased"] += rows

    def reissue(self, leases: Sequence[tuple[str, int, str]]) -> None:
        """(lease, attempt, instance) of leases that run again."""
        with self._transaction():
            self._db.executemany("UPDATE leases SET attempt=?, instance=? WHERE lease_id=?", [(a, i, key) for key, a, i in leases])

    def abandon(self, lease_ids: Iterable[str], reason: str) -> None:
        """Open leases that are given up."""
        with self._transaction():
            for lease_id in lease_ids:
                self._db.execute("UPDATE leases SET state='closed' WHERE lease_id=? AND state='open'", (lease_id,))
                for (policy,) in self._db.execute("SELECT policy FROM shares WHERE lease_id=?", (lease_id,)).fetchall():
                    self._move(lease_id, policy, ("leased",), "dropped", reason)

    def record(self, results: Sequence[Result]) -> None:
        """Delivered groups: payload first, then one transaction. Only afterwards may their deliveries be acknowledged."""
        places = {r.lease_id: self.segments.append(r.payload) for r in results if any(s.state != "dropped" for s in r.shares)}
        with self._transaction():
            for result in results:
                place = places.get(result.lease_id)
                self._db.execute(
                    "UPDATE leases SET state='rolled', attempt=?, place=? WHERE lease_id=?",
                    (result.attempt, msgspec.msgpack.encode(place) if place else None, result.lease_id),
                )
                for share in result.shares:
                    self._lose(result.lease_id, share.policy, share.lost)
                    stats = msgspec.msgpack.encode(share.stats) if share.stats else None
                    self._db.execute(
                        "UPDATE shares SET stats=?, arrival=? WHERE lease_id=? AND policy=?",
                        (stats, share.arrival, result.lease_id, share.policy),
                    )
                    self._move(result.lease_id, share.policy, ("leased",), share.state, share.reason)
        for result in results:
            if result.lease_id in places:
                self._hold(result.lease_id, places[result.lease_id], sum(share.state != "dropped" for share in result.shares))
                self.segments.release(places[result.lease_id].segment)  # the writer's own hold

    def settle(self, items: Sequence[Settled]) -> None:
        """Held groups whose receipt came (rolled → buffered), and rows that end: expired, unconfirmed, of a dead timeline."""
        with self._transaction():
            for item in items:
                live = self._move(item.lease_id, item.policy, ("rolled", "buffered"), item.state, item.reason)
                if live is not None and item.state == "dropped":
                    self._release(item.lease_id)

    # --- batches --------------------------------------------------------------------------------------------------------

    def serve(self, batch: BatchRow, payload: bytes) -> None:
        """Persist which groups a batch holds, and its bytes, before it is sent."""
        path = self._batch_path(batch.policy, batch.timeline, batch.version)
        partial = path.with_suffix(".partial")
        partial.write_bytes(payload)
        partial.replace(path)
        with self._transaction():
            self._db.execute(
                "INSERT INTO batches(policy, timeline, version, state, fresh, replayed) VALUES(?,?,?,'served',?,?)",
                (batch.policy, batch.timeline, batch.version, msgspec.msgpack.encode(batch.fresh), msgspec.msgpack.encode(batch.replayed)),
            )
            for lease_id in batch.fresh:
                moved = self._move(lease_id, batch.policy, ("buffered",), "served")
                assert moved is not None, f"{lease_id} is not buffered for {batch.policy}, and yet in its batch {batch.version}"
                self._db.execute(
                    "UPDATE shares SET timeline=?, version=? WHERE lease_id=? AND policy=?",
                    (batch.timeline, batch.version, lease_id, batch.policy),
                )

    def batch_bytes(self, policy: str, timeline: int, version: int) -> bytes | None:
        """The bytes of a served batch; None when no such batch is open."""
        found = self._db.execute(
            "SELECT 1 FROM batches WHERE policy=? AND timeline=? AND version=? AND state='served'", (policy, timeline, version)
        ).fetchone()
        return self._batch_path(policy, timeline, version).read_bytes() if found else None

    def shares_of(self, policy: str, lease_ids: Sequence[str]) -> dict[str, GroupStats]:
        """Lease → its statistics, as stamped at admission."""
        found = {}
        for lease_id in lease_ids:
            (stats,) = self._db.execute("SELECT stats FROM shares WHERE lease_id=? AND policy=?", (lease_id, policy)).fetchone()
            found[lease_id] = msgspec.msgpack.decode(stats, type=GroupStats)
        return found

    def payload(self, lease_id: str) -> bytes:
        """The encoded Group of a lease that may still be served. May be called from any thread. Raises PayloadDamaged."""
        try:
            return self.segments.read(self.places[lease_id])
        except PayloadDamaged as error:
            error.lease_id = lease_id
            raise

    def commit(self, policy: str, timeline: int, first: int, version: int, checkpoint: int, keep: set[str], meta: dict[str, bytes]) -> int:
        """A notice: batches first … version − 1 are trained; those in the checkpoint become final. Returns rows trained.

        `keep` = leases that the replay queue still needs.
        """
        trained = 0
        with self._transaction():
            for name in range(first, version):
                trained += self._train(policy, timeline, name, keep)
            self._finalise(policy, checkpoint)
            self._put(meta)
        return trained

    def rollback(self, policy: str, version: int, meta: dict[str, bytes]) -> list[ShareRow]:
        """The trainer is back at `version` on a new timeline: open batches are dissolved, and rows trained later than
        `version` (by batches named ≥ version) are buffered again unless they are final. Returns them, oldest first."""
        with self._transaction():
            dead = self._db.execute(
                "SELECT timeline, version FROM batches WHERE policy=? AND version>=? AND state!='dead'", (policy, version)
            )
            for timeline, name in dead.fetchall():
                self._unlink.append(self._batch_path(policy, timeline, name))
                self._db.execute("UPDATE batches SET state='dead' WHERE policy=? AND timeline=? AND version=?", (policy, timeline, name))
            back = self._shares("s.policy=? AND s.final=0 AND s.state IN ('served','trained') AND s.version>=?", (policy, version))
            for share in back:
                self._move(share.lease_id, policy, ("served", "trained"), "buffered")
                self._db.execute(
                    "UPDATE shares SET timeline=NULL, version=NULL, kept=0 WHERE lease_id=? AND policy=?", (share.lease_id, policy)
                )
            self._put(meta)
        return back

    def forget(self, policy: str, lease_ids: Iterable[str]) -> None:
        """Trained groups that fell out of the replay queue."""
        with self._transaction():
            for lease_id in lease_ids:
                row = self._db.execute("SELECT final, kept FROM shares WHERE lease_id=? AND policy=?", (lease_id, policy)).fetchone()
                self._db.execute("UPDATE shares SET kept=0 WHERE lease_id=? AND policy=?", (lease_id, policy))
                if row == (1, 1):
                    self._release(lease_id)

    def _train(self, policy: str, timeline: int, name: int, keep: set[str]) -> int:
        row = self._db.execute(
            "SELECT fresh, replayed FROM batches WHERE policy=? AND timeline=? AND version=? AND state='served'", (policy, timeline, name)
        ).fetchone()
        if row is None:
            return 0
        rows = 0
        for lease_id in msgspec.msgpack.decode(row[0], type=list[str]):
            rows += self._move(lease_id, policy, ("served",), "trained") or 0
            if lease_id in keep:
                self._db.execute("UPDATE shares SET kept=1 WHERE lease_id=? AND policy=?", (lease_id, policy))
        for lease_id in msgspec.msgpack.decode(row[1], type=list[str]):
            (live,) = self._db.execute("SELECT live FROM shares WHERE lease_id=? AND policy=?", (lease_id, policy)).fetchone()
            self._replayed += live
            self._db.execute("UPDATE shares SET uses=uses+1 WHERE lease_id=? AND policy=?", (lease_id, policy))
        self._db.execute("UPDATE batches SET state='trained' WHERE policy=? AND timeline=? AND version=?", (policy, timeline, name))
        self._unlink.append(self._batch_path(policy, timeline, name))
        return rows

    def _finalise(self, policy: str, checkpoint: int) -> None:
        done = self._db.execute(
            "UPDATE shares SET final=1 WHERE policy=? AND state='trained' AND final=0 AND version<? RETURNING lease_id, kept",
            (policy, checkpoint),
        ).fetchall()
        for lease_id, kept in done:
            if not kept:
                self._release(lease_id)

    # --- everything else ------------------------------------------------------------------------------------------------

    def put(self, meta: dict[str, bytes]) -> None:
        """Named states: versions, position in the data, instances, policies."""
        with self._transaction():
            self._put(meta)

    def add_evals(self, results: Sequence[EvalResult], meta: dict[str, bytes]) -> None:
        """Results of one evaluation; `meta` takes it off the queue in the same transaction."""
        with self._transaction():
            self._db.executemany("INSERT INTO evals(result) VALUES(?)", [(msgspec.msgpack.encode(result),) for result in results])
            self._put(meta)

    def staleness(self, policy: str) -> dict[int, int]:
        """Gap → trained trajectories."""
        found: Counter[int] = Counter()
        query = "SELECT version, stats, live FROM shares WHERE policy=? AND state='trained'"
        for version, stats, live in self._db.execute(query, (policy,)):
            found[version - msgspec.msgpack.decode(stats, type=GroupStats).min_version] += live
        return dict(found)

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
        before = self.counts()
        self._count_all()
        after = self.counts()
        assert before == after, f"ledger counters {before} differ from its tables {after}"
        total = after.trained + sum(after.dropped.values()) + sum(after.in_flight.values())
        assert after.made == total, f"ledger: made {after.made}, but trained + dropped + in flight is {total}: {after}"
        return after

    def recover(self) -> Recovered:
        """Everything that a restarted Dataflow needs."""
        leases = [
            LeaseRow(lease_id=r[0], task_id=r[1], task_index=r[2], epoch=r[3], n_samples=r[4], seed=r[5], attempt=r[6], instance=r[7])
            for r in self._db.execute(
                "SELECT lease_id, task_id, task_index, epoch, n_samples, seed, attempt, instance FROM leases"
                " WHERE state='open' ORDER BY lease_id"
            )
        ]
        shares = self._shares("(s.final=0 AND s.state IN ('rolled','buffered','served','trained')) OR s.kept=1", ())
        for share in shares:
            (place,) = self._db.execute("SELECT place FROM leases WHERE lease_id=?", (share.lease_id,)).fetchone()
            self._hold(share.lease_id, msgspec.msgpack.decode(place, type=Location), 1)
        self.segments.tidy()
        served = [
            BatchRow(policy=p, timeline=t, version=v, fresh=msgspec.msgpack.decode(f), replayed=msgspec.msgpack.decode(r))
            for p, t, v, f, r in self._db.execute("SELECT policy, timeline, version, fresh, replayed FROM batches WHERE state='served'")
        ]
        wanted = {self._batch_path(batch.policy, batch.timeline, batch.version) for batch in served}
        for path in set(self._batches.iterdir()) - wanted:  # a kill came between a file and its transaction
            path.unlink()
        return Recovered(
            meta=dict(self._db.execute("SELECT key, value FROM meta").fetchall()),
            leases=leases,
            shares=shares,
            served=served,
            evals=[msgspec.msgpack.decode(r, type=EvalResult) for (r,) in self._db.execute("SELECT result FROM evals ORDER BY number")],
            arrivals=self._db.execute("SELECT COALESCE(MAX(arrival), 0) FROM shares").fetchone()[0],
        )

    def close(self) -> None:
        self.segments.close()
        self._db.close()

    def _shares(self, where: str, arguments: tuple[Any, ...]) -> list[ShareRow]:
        query = (
            "SELECT s.lease_id, s.policy, s.state, s.arrival, s.stats, s.version, l.instance, s.kept FROM shares s"
            f" JOIN leases l USING(lease_id) WHERE {where} ORDER BY s.arrival"
        )
        return [
            ShareRow(
                lease_id=r[0], policy=r[1], state=r[2], arrival=r[3] or 0,
                stats=msgspec.msgpack.decode(r[4], type=GroupStats), version=r[5], instance=r[6], kept=bool(r[7]),
            )
            for r in self._db.execute(query, arguments).fetchall()
        ]  # fmt: skip

    def _move(self, lease_id: str, policy: str, before: tuple[str, ...], after: str, reason: str = "") -> int | None:
        """Move a share's surviving rows; None when it is not in one of the states `before`. Dropped is final."""
        row = self._db.execute("SELECT state, live FROM shares WHERE lease_id=? AND policy=?", (lease_id, policy)).fetchone()
        if row is None or row[0] not in before:
            return None
        self._db.execute(
            "UPDATE shares SET state=?, reason=?, final=? WHERE lease_id=? AND policy=?",
            (after, reason, int(after == "dropped"), lease_id, policy),
        )
        live = int(row[1])
        self._states[row[0]] -= live
        if after == "dropped":
            self._dropped[reason] += live
        else:
            self._states[after] += live
        return live

    def _lose(self, lease_id: str, policy: str, lost: dict[int, str]) -> None:
        for index, reason in lost.items():
            self._db.execute("INSERT INTO lost(lease_id, policy, idx, reason) VALUES(?,?,?,?)", (lease_id, policy, index, reason))
            self._dropped[reason] += 1
        self._states["leased"] -= len(lost)
        self._db.execute("UPDATE shares SET live=live-? WHERE lease_id=? AND policy=?", (len(lost), lease_id, policy))

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

    def _put(self, meta: dict[str, bytes]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta(key, value) VALUES(?,?)", list(meta.items()))

    def _count_all(self) -> None:
        self._made, self._replayed = self._db.execute("SELECT COALESCE(SUM(n),0), COALESCE(SUM(uses*live),0) FROM shares").fetchone()
        self._states = Counter(
            dict(self._db.execute("SELECT state, SUM(live) FROM shares WHERE state!='dropped' GROUP BY state").fetchall())
        )
        self._dropped = Counter(
            dict(self._db.execute("SELECT reason, SUM(live) FROM shares WHERE state='dropped' GROUP BY reason").fetchall())
        )
        self._dropped.update(dict(self._db.execute("SELECT reason, COUNT(*) FROM lost GROUP BY reason").fetchall()))

    def _batch_path(self, policy: str, timeline: int, version: int) -> Path:
        safe = "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in policy)
        return self._batches / f"{safe}-{timeline}-{version}.batch"


class LedgerThread:
    """Runs ledger calls one after the other in their own thread, in the order in which they were made."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The call finishes even when the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments))

    def close(self) -> None:
        self._executor.shutdown(wait=True)
