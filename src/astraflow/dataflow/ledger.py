"""The lives of all rows (trajectory, policy): leased → rolled → buffered → served → trained | dropped(reason).

A *share* is one (lease, policy), or a part of one where a group straddles two batches: its surviving rows move together, rows
lost one by one (unscored, failed) are written with their reason. Payload bytes go to segment files first, then one SQLite
transaction per call (WAL, synchronous=NORMAL: safe against the death of any process, not against loss of power). Rows are
never deleted: the file is also the log of all groups. All methods run in one thread: see `LedgerThread`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import astuple
from typing import Any, TypeVar

import msgspec

from astraflow.dataflow.journal import BatchRow, Learned, LeaseRow, Pick, PromptRow, Recovered, Result, Settled
from astraflow.dataflow.ledger_batches import LedgerBatches
from astraflow.dataflow.ledger_lives import TOTALS
from astraflow.dataflow.segments import Location
from astraflow.protocol.control import EvalResult

T = TypeVar("T")
NOT_DONE = ("s.final=0 AND s.state IN ('rolled','buffered','served','trained')", "s.final=1 AND s.kept=1")
"""Shares that a restart needs; each condition has a partial index, so that finished rows are not read."""


class Ledger(LedgerBatches):
    """One SQLite file, payload segments, and the bytes of served batches."""

    # --- leases and results ---------------------------------------------------------------------------------------------

    def issue(self, leases: Sequence[LeaseRow], meta: dict[str, bytes]) -> None:
        """New leases, before they are submitted; `meta` moves the data set's position in the same transaction."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO leases(lease_id, task_id, task_index, epoch, n_samples, seed, attempt, instance, state)"
                " VALUES(?,?,?,?,?,?,?,?,'open')",
                [(x.lease_id, x.task_id, x.task_index, x.epoch, x.n_samples, x.seed, x.attempt, x.instance) for x in leases],
            )
            self._db.executemany(
                "INSERT INTO shares(lease_id, policy, n, live, state) VALUES(?,?,?,?,'leased')",
                [(lease.lease_id, policy, lease.n_samples, lease.n_samples) for lease in leases for policy in lease.policies],
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
                    self._move(lease_id, policy, 0, ("leased",), "dropped", reason)

    def record(self, results: Sequence[Result], learned: Learned | None = None) -> None:
        """Delivered groups: payload first, then one transaction, with what curators learned from them. Only afterwards may their
        deliveries be acknowledged."""
        places = {r.lease_id: self.segments.append(r.payload) for r in results if any(s.state != "dropped" for s in r.shares)}
        with self._transaction():
            for result in results:
                place = places.get(result.lease_id)
                self._db.execute(
                    "UPDATE leases SET state='rolled', attempt=?, place=? WHERE lease_id=?",
                    (result.attempt, msgspec.msgpack.encode(place) if place else None, result.lease_id),
                )
                for share in result.shares:
                    self._arrive(result.lease_id, share)
            if learned is not None:
                rows = [astuple(row) for row in learned.prompts]
                self._db.executemany("INSERT OR REPLACE INTO prompts(curator, policy, task_id, state) VALUES(?,?,?,?)", rows)
                self._put(learned.meta)
        for result in results:
            if result.lease_id in places:
                self._hold(result.lease_id, places[result.lease_id], sum(share.state != "dropped" for share in result.shares))
                self.segments.release(places[result.lease_id].segment)  # the writer's own hold

    def settle(self, items: Sequence[Settled]) -> None:
        """Held groups whose receipt came (rolled → buffered), and rows that end: expired, unconfirmed, of a dead timeline."""
        ended: list[str] = []
        with self._transaction():
            for item in items:
                live = self._move(item.lease_id, item.policy, item.part, ("rolled", "buffered"), item.state, item.reason)
                if live is not None and item.state == "dropped":
                    ended.append(item.lease_id)
        for lease_id in ended:  # only now: a file that is gone before its rows are would be missing after a kill
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

    def recover(self) -> Recovered:
        """Everything that a restarted Dataflow needs. Raises LedgerDamaged."""
        with self._guarded():
            return self._recover()

    def _recover(self) -> Recovered:
        leases = [
            LeaseRow(lease_id=r[0], task_id=r[1], task_index=r[2], epoch=r[3], n_samples=r[4], seed=r[5], attempt=r[6], instance=r[7])
            for r in self._db.execute(
                "SELECT lease_id, task_id, task_index, epoch, n_samples, seed, attempt, instance FROM leases"
                " WHERE state='open' ORDER BY lease_id"
            )
        ]
        shares = [share for which in NOT_DONE for share in self._shares(which, ())]
        shares.sort(key=lambda share: (share.arrival, share.part))
        for share in shares:
            (place,) = self._db.execute("SELECT place FROM leases WHERE lease_id=?", (share.lease_id,)).fetchone()
            self._hold(share.lease_id, msgspec.msgpack.decode(place, type=Location), 1)
        self.segments.tidy()
        served = [
            BatchRow(p, t, v, [Pick(*key) for key in msgspec.msgpack.decode(f)], msgspec.msgpack.decode(r))
            for p, t, v, f, r in self._db.execute("SELECT policy, timeline, version, fresh, replayed FROM batches WHERE state='served'")
        ]
        wanted = {self._batch_path(batch.policy, batch.timeline, batch.version) for batch in served}
        for path in set(self._batches.iterdir()) - wanted:  # a kill came between a file and its transaction
            path.unlink()
        for batch in served:  # other bytes under its name would be another batch than the one that was handed out
            self.batch_bytes(batch.policy, batch.timeline, batch.version)
        return Recovered(
            meta=dict(self._db.execute("SELECT key, value FROM meta WHERE key!=?", (TOTALS,)).fetchall()),
            leases=leases,
            shares=shares,
            served=served,
            evals=[msgspec.msgpack.decode(r, type=EvalResult) for (r,) in self._db.execute("SELECT result FROM evals ORDER BY number")],
            arrivals=self._arrivals,
            prompts=[PromptRow(*row) for row in self._db.execute("SELECT curator, policy, task_id, state FROM prompts")],
        )

    def close(self) -> None:
        self.segments.close()
        self._db.close()


class LedgerThread:
    """Runs ledger calls one after the other in their own thread, in the order in which they were made."""

    def __init__(self, executor: Executor | None = None) -> None:
        """`executor`: runs one call at a time; None = a thread."""
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The call finishes even when the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments))

    def close(self) -> None:
        self._executor.shutdown(wait=True)
