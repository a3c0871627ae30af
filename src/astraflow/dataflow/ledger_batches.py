"""Batches in the ledger: served, trained, rolled back. A group that straddles two batches is split here, in the transaction
that serves its first part, so that a kill finds either one share or both parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from astraflow.dataflow.collate import Item, collate
from astraflow.dataflow.journal import BatchRow, Pick, ShareRow
from astraflow.dataflow.ledger_lives import Lives, members_of
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.segments import DiskRefused, PayloadDamaged
from astraflow.protocol import codec
from astraflow.protocol.errors import ProtocolError

STATS_AT_ONCE = 500
"""Leases of one query; SQLite's limit of variables was 999 for a long time."""


class LedgerBatches(Lives):
    """What happens to buffered shares."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        super().__init__(directory, segment_bytes)
        self._batches = directory / "batches"
        self._batches.mkdir(exist_ok=True)

    def serve(self, batch: BatchRow, payload: bytes) -> None:
        """Persist which groups a batch holds, and its bytes, before it is sent."""
        self._write(self._batch_path(batch.policy, batch.timeline, batch.version), payload)
        fresh = msgspec.msgpack.encode([(pick.lease_id, pick.part) for pick in batch.fresh])
        with self._transaction():
            self._db.execute(
                "INSERT INTO batches(policy, timeline, version, state, fresh, replayed, length, checksum) VALUES(?,?,?,'served',?,?,?,?)",
                (batch.policy, batch.timeline, batch.version, fresh, msgspec.msgpack.encode(batch.replayed), *seal(payload)),
            )
            for pick in batch.fresh:
                if pick.rest:
                    self._split(batch.policy, pick)
                name = (batch.timeline, batch.version)
                moved = self._move(pick.lease_id, batch.policy, pick.part, ("buffered",), "served", batch=name)
                assert moved is not None, f"{pick} is not buffered for {batch.policy}, and yet in its batch {batch.version}"
        for pick in batch.fresh:
            if pick.rest:
                self._hold(pick.lease_id, self.places[pick.lease_id], 1)

    def _write(self, path: Path, payload: bytes) -> None:
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(payload)
            partial.replace(path)
        except OSError as error:
            raise DiskRefused(f"ledger: cannot write {partial}: {error.strerror}") from error

    def _split(self, policy: str, pick: Pick) -> None:
        """`pick.rest` becomes a buffered share of its own; statistics stay those of the whole group."""
        key = (pick.lease_id, policy, pick.part)
        row = self._db.execute("SELECT state, members, stats FROM shares WHERE lease_id=? AND policy=? AND part=?", key).fetchone()
        members = members_of(row[1]) or tuple(sorted(msgspec.msgpack.decode(row[2], type=GroupStats).values))
        taken = members[: len(members) - len(pick.rest)]
        assert row[0] == "buffered", f"{pick} of {policy} is {row[0]}"
        assert taken, f"{pick} of {policy} would leave nothing of {members}"
        assert members == taken + pick.rest, f"{pick} of {policy} does not end {members}"
        self._db.execute(
            "INSERT INTO shares(lease_id, policy, part, members, n, live, state, arrival, stats, min_version)"
            " SELECT lease_id, policy, ?, ?, ?, ?, state, arrival, stats, min_version FROM shares"
            " WHERE lease_id=? AND policy=? AND part=?",
            (pick.rest[0], msgspec.msgpack.encode(pick.rest), len(pick.rest), len(pick.rest), *key),
        )
        self._db.execute(
            "UPDATE shares SET members=?, n=n-?, live=live-? WHERE lease_id=? AND policy=? AND part=?",
            (msgspec.msgpack.encode(taken), len(pick.rest), len(pick.rest), *key),
        )

    def batch_bytes(self, policy: str, timeline: int, version: int) -> bytes | None:
        """The bytes of a served batch as they were written; None when no such batch is open. A damaged file is made again from the
        payloads. Raises LedgerDamaged when that does not give the same bytes."""
        with self._guarded():
            found = self._db.execute(
                "SELECT fresh, replayed, length, checksum FROM batches WHERE policy=? AND timeline=? AND version=? AND state='served'",
                (policy, timeline, version),
            ).fetchone()
            if found is None:
                return None
            path, wrong = self._batch_path(policy, timeline, version), "damaged"
            try:
                data = path.read_bytes()
            except OSError as error:
                data, wrong = b"", "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
            if seal(data) == found[2:]:
                return data
            fresh = [Pick(*key) for key in msgspec.msgpack.decode(found[0], type=list[tuple[str, int]])]
            batch = BatchRow(policy, timeline, version, fresh, msgspec.msgpack.decode(found[1], type=list[str]))
            try:
                data = codec.encode(collate(self._items(batch), policy, timeline, version))
            except (PayloadDamaged, ProtocolError) as error:
                raise self.damaged(f"{path.name}, a batch that is open, is {wrong} and cannot be made again: {error}") from None
        if seal(data) != found[2:]:
            raise self.damaged(f"{path.name}, a batch that is open, is {wrong}, and its groups make another one now")
        self._write(path, data)
        self.mended.append(f"{path} was {wrong}: made again from its groups, byte for byte")
        return data

    def _items(self, batch: BatchRow) -> list[Item]:
        """What `batch` was collated from."""
        members: dict[str, tuple[int, ...]] = {}
        for pick in batch.fresh:
            key = (pick.lease_id, batch.policy, pick.part)
            row = self._db.execute("SELECT members FROM shares WHERE lease_id=? AND policy=? AND part=?", key).fetchone()
            members[pick.lease_id] = members.get(pick.lease_id, ()) + members_of(row[0] if row else None)
        wanted = [(lease_id, False) for lease_id in members] + [(lease_id, True) for lease_id in batch.replayed]
        stats = self.shares_of(batch.policy, [lease_id for lease_id, _ in wanted])
        for lease_id, _ in wanted:
            if lease_id not in self.places or lease_id not in stats:
                raise PayloadDamaged(f"nothing is known any more of its group {lease_id}")
        return [Item(self.payload(key), stats[key], replayed, () if replayed else members[key]) for key, replayed in wanted]

    def shares_of(self, policy: str, lease_ids: Sequence[str]) -> dict[str, GroupStats]:
        """Lease → its statistics, as stamped at admission."""
        found: dict[str, GroupStats] = {}
        with self._guarded():
            for start in range(0, len(lease_ids), STATS_AT_ONCE):
                some = lease_ids[start : start + STATS_AT_ONCE]
                query = f"SELECT lease_id, stats FROM shares WHERE policy=? AND part=0 AND lease_id IN ({','.join('?' * len(some))})"
                for lease_id, stats in self._db.execute(query, (policy, *some)):
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
            done = self._finalise(policy, checkpoint)
            if version > first:
                moved = (policy, timeline, version, self._arrivals)
                self._db.execute("INSERT INTO moves(policy, timeline, version, arrival) VALUES(?,?,?,?)", moved)
            self._put(meta)
        for lease_id in done:
            self._release(lease_id)
        return trained

    def rollback(self, policy: str, version: int, meta: dict[str, bytes]) -> list[ShareRow]:
        """The trainer is back at `version` on a new timeline: open batches are dissolved, and rows trained later than
        `version` (by batches named ≥ version) are buffered again unless they are final. Returns them, oldest first; parts of a
        group stay parts."""
        with self._transaction():
            dead = self._db.execute(
                "SELECT timeline, version FROM batches WHERE policy=? AND version>=? AND state!='dead'", (policy, version)
            )
            for timeline, name in dead.fetchall():
                self._unlink.append(self._batch_path(policy, timeline, name))
                self._db.execute("UPDATE batches SET state='dead' WHERE policy=? AND timeline=? AND version=?", (policy, timeline, name))
            back = self._shares("s.policy=? AND s.final=0 AND s.state IN ('served','trained') AND s.version>=?", (policy, version))
            for share in back:
                self._move(share.lease_id, policy, share.part, ("served", "trained"), "buffered")
                self._db.execute(
                    "UPDATE shares SET timeline=NULL, version=NULL, kept=0 WHERE lease_id=? AND policy=? AND part=?",
                    (share.lease_id, policy, share.part),
                )
            self._put(meta)
        return back

    def forget(self, policy: str, lease_ids: Iterable[str]) -> None:
        """Trained groups that fell out of the replay queue."""
        free: list[str] = []
        with self._transaction():
            for lease_id in lease_ids:
                rows = self._db.execute(
                    "UPDATE shares SET kept=0 WHERE lease_id=? AND policy=? AND kept=1 RETURNING final", (lease_id, policy)
                ).fetchall()
                free += [lease_id for (final,) in rows if final]
        for lease_id in free:
            self._release(lease_id)

    def _train(self, policy: str, timeline: int, name: int, keep: set[str]) -> int:
        row = self._db.execute(
            "SELECT fresh, replayed FROM batches WHERE policy=? AND timeline=? AND version=? AND state='served'", (policy, timeline, name)
        ).fetchone()
        if row is None:
            return 0
        rows = 0
        for lease_id, part in msgspec.msgpack.decode(row[0], type=list[tuple[str, int]]):
            rows += self._move(lease_id, policy, part, ("served",), "trained") or 0
            if lease_id in keep:
                self._db.execute("UPDATE shares SET kept=1 WHERE lease_id=? AND policy=? AND part=?", (lease_id, policy, part))
        for lease_id in msgspec.msgpack.decode(row[1], type=list[str]):
            used = self._db.execute("UPDATE shares SET uses=uses+1 WHERE lease_id=? AND policy=? RETURNING live", (lease_id, policy))
            self._replayed += sum(live for (live,) in used.fetchall())
        self._db.execute("UPDATE batches SET state='trained' WHERE policy=? AND timeline=? AND version=?", (policy, timeline, name))
        self._unlink.append(self._batch_path(policy, timeline, name))
        return rows

    def _finalise(self, policy: str, checkpoint: int) -> list[str]:
        """Leases whose payload is no longer needed by the rows that became final."""
        done = self._db.execute(
            "UPDATE shares SET final=1 WHERE policy=? AND state='trained' AND final=0 AND version<? RETURNING lease_id, kept",
            (policy, checkpoint),
        ).fetchall()
        return [lease_id for lease_id, kept in done if not kept]

    def _batch_path(self, policy: str, timeline: int, version: int) -> Path:
        safe = "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in policy)
        return self._batches / f"{safe}-{timeline}-{version}.batch"


def seal(data: bytes) -> tuple[int, bytes]:
    """Length and xxh3-64, as the batch's row keeps them."""
    return len(data), xxhash.xxh3_64_digest(data)
