"""The ledger of a run, read and never written: also while the run goes on. One object sees one moment of it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from astraflow.dataflow.flow import Sums, numbers
from astraflow.dataflow.ledger_lives import members_of
from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol.control import LedgerCounts
from astraflow.protocol.errors import ConfigError

STATES_IN_FLIGHT = ("leased", "rolled", "buffered", "served")
TABLES = "FROM shares s JOIN leases l USING(lease_id)"
SHARE = (
    "SELECT s.lease_id, l.task_id, s.policy, s.part, s.members, s.n, s.live, s.state, s.reason, s.arrival, s.stats, s.timeline,"
    " s.version, s.uses, l.instance, l.attempt, l.epoch "
    + TABLES
)


@dataclass(frozen=True)
class LoggedShare:
    """One (group, policy), or a part of one."""

    lease_id: str
    task_id: str
    policy: str
    part: int
    members: tuple[int, ...]
    """Trajectories of this part; empty = all."""
    made: int
    live: int
    state: str
    reason: str
    arrival: int | None
    """Order in which it came; None = it never came."""
    stats: GroupStats | None
    """None = it never came, or no member is scored."""
    timeline: int | None
    version: int | None
    """Batch that holds it, or held it."""
    uses: int
    """Times replayed."""
    instance: str
    attempt: int
    epoch: int

    @property
    def scored(self) -> list[int]:
        """Scored trajectories of this part."""
        return sorted(self.members or (self.stats.values if self.stats is not None else ()))

    def sums(self) -> Sums:
        """Of the scored trajectories of this part."""
        if self.stats is None:
            return Sums()
        stats, scored = self.stats, self.scored
        tokens = sum(stats.lengths[i] for i in scored) if stats.lengths else stats.loss_tokens * len(scored) / stats.size
        return Sums().plus(1, len(scored), tokens, sum(stats.values[i] for i in scored), not stats.all_equal)


class Logbook:
    """`with Logbook(run_dir) as log: …`. Raises ConfigError when there is no ledger, or one of another layout, or where it is damaged."""

    def __init__(self, run_dir: Path) -> None:
        self._path = path = run_dir / "ledger" / "ledger.sqlite"
        if not path.is_file():
            raise ConfigError(f"{str(run_dir)!r}: not the directory of a run (it has no ledger/ledger.sqlite)")
        # nobody writes a ledger without a -wal file, and SQLite would leave one in a directory that is only to be read
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
        with self._reading():
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)
        try:
            self._all("BEGIN")
            self._all(f"{SHARE} LIMIT 0")
        except ConfigError:
            self._db.close()
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise ConfigError(f"{str(self._path)!r} cannot be read: {' '.join(str(error).split())}") from None

    def _all(self, query: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        with self._reading():
            return self._db.execute(query, arguments).fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._db.close()

    def counts(self) -> LedgerCounts:
        """From the tables themselves."""
        states = dict(self._all("SELECT state, SUM(live) FROM shares WHERE state!='dropped' GROUP BY state"))
        ((made, replayed),) = self._all("SELECT COALESCE(SUM(n),0), COALESCE(SUM(uses*live),0) FROM shares")
        return LedgerCounts(
            made=made,
            trained=states.get("trained", 0),
            dropped={reason: rows for reason, (_, rows) in self.reasons().items() if rows},
            in_flight={state: states.get(state, 0) for state in STATES_IN_FLIGHT},
            replayed=replayed,
        )

    def staleness(self) -> dict[str, dict[int, int]]:
        """Policy → versions behind when its batch was made → trained trajectories."""
        found: dict[str, dict[int, int]] = {}
        query = "SELECT policy, version - min_version, SUM(live) FROM shares WHERE state='trained' GROUP BY 1, 2 ORDER BY 1, 2"
        for policy, gap, rows in self._all(query):
            if rows:
                found.setdefault(policy, {})[gap] = rows
        return found

    def reasons(self) -> dict[str, tuple[int, int]]:
        """Reason → (whole groups that ended by it, rows: theirs and those that other groups lost one by one)."""
        groups, rows = Counter[str](), Counter[str]()
        for reason, count, live in self._all("SELECT reason, COUNT(*), SUM(live) FROM shares WHERE state='dropped' GROUP BY reason"):
            groups[reason] += count
            rows[reason] += live
        for reason, count in self._all("SELECT reason, COUNT(*) FROM lost GROUP BY reason"):
            rows[reason] += count
        return {reason: (groups[reason], rows[reason]) for reason in sorted({*groups, *rows})}

    def shares(self, where: str = "", arguments: tuple[Any, ...] = (), limit: int = -1) -> Iterator[LoggedShare]:
        """Newest first; those that have not come yet are the newest."""
        query = f"{SHARE} {where} ORDER BY s.arrival IS NOT NULL, s.arrival DESC, s.lease_id DESC, s.policy, s.part LIMIT ?"
        with self._reading():  # an error of the caller's own does not come in here
            for row in self._db.execute(query, (*arguments, limit)):
                values = list(row)
                values[4] = members_of(row[4])
                values[10] = msgspec.msgpack.decode(row[10], type=GroupStats) if row[10] else None
                yield LoggedShare(*values)

    def count(self, where: str = "", arguments: tuple[Any, ...] = ()) -> int:
        """How many `shares` would give."""
        ((found,),) = self._all(f"SELECT COUNT(*) {TABLES} {where}", arguments)
        return int(found)

    def attempts(self) -> tuple[int, int]:
        """(leases, how often one of them ran again)."""
        ((leases, again),) = self._all("SELECT COUNT(*), COALESCE(SUM(attempt - 1), 0) FROM leases")
        return int(leases), int(again)

    def faults(self) -> list[str]:
        """What is wrong in the books of a run that has ended, one line each; empty = every row is in one place and was trained once."""
        counts, found = self.counts(), []
        rows = (counts.made, counts.trained, sum(counts.dropped.values()), sum(counts.in_flight.values()))
        if rows[0] != sum(rows[1:]):
            found.append("made {} is not trained {} + dropped {} + in flight {}".format(*rows))
        ((leased,),) = self._all(
            "SELECT COALESCE(SUM(n_samples * (SELECT COUNT(DISTINCT policy) FROM shares s WHERE s.lease_id=l.lease_id)), 0) FROM leases l"
        )
        if leased != rows[0]:
            found.append(f"made {rows[0]}, but leases are of {leased} rows")
        for policy in self.policies():
            batches = self._all("SELECT version, fresh FROM batches WHERE policy=? AND state='trained' ORDER BY version", (policy,))
            versions = [version for version, _ in batches]
            if versions and versions != list(range(versions[0], versions[0] + len(versions))):
                found.append(f"{policy}: {len(versions)} trained batches from version {versions[0]} to {versions[-1]}, not one for each")
            picks = Counter(pick for _, fresh in batches for pick in msgspec.msgpack.decode(fresh, type=list[tuple[str, int]]))
            twice = [lease for (lease, _), count in picks.items() if count > 1]
            if twice:
                found.append(f"{policy}: {len(twice)} groups are in two trained batches, e.g. {twice[0]}")
        ((nameless,),) = self._all("SELECT COUNT(*) FROM shares WHERE state='dropped' AND reason=''")
        if nameless:
            found.append(f"{nameless} groups were dropped without a reason")
        return found

    def moves(self) -> list[tuple[int, str, int]]:
        """(newest arrival before it, policy, version) of each version that moved up, oldest first."""
        return self._all("SELECT arrival, policy, version FROM moves ORDER BY number")

    def versions(self) -> dict[str, int]:
        """Policy → version that was made of its newest trained batch."""
        return dict(self._all("SELECT policy, MAX(version) + 1 FROM batches WHERE state='trained' GROUP BY policy"))

    def policies(self) -> list[str]:
        """Whose shares there are."""
        return [policy for (policy,) in self._all("SELECT DISTINCT policy FROM shares ORDER BY policy")]

    def lost(self, lease_id: str, policy: str) -> dict[int, str]:
        """Trajectory → why its row ended alone."""
        return dict(self._all("SELECT idx, reason FROM lost WHERE lease_id=? AND policy=? ORDER BY idx", (lease_id, policy)))

    def flows(self) -> dict[str, dict[str, float]]:
        """Per policy, length and reward of all that was generated against what is trained on (names as in metrics.jsonl)."""
        spent = Counter[str]()
        generated: dict[str, Sums] = {}
        trained: dict[str, Sums] = {}
        counted: set[tuple[str, str]] = set()
        for share in self.shares("WHERE s.arrival IS NOT NULL"):
            if (share.lease_id, share.policy) not in counted:
                counted.add((share.lease_id, share.policy))
                spent[share.policy] += 1
            _add(generated, share, whole=share.part == 0)
            if share.state == "trained":
                _add(trained, share, whole=share.part == 0)
        none = Sums()
        return {policy: numbers(spent[policy], generated.get(policy, none), trained.get(policy, none)) for policy in sorted(spent)}


def _add(sums: dict[str, Sums], share: LoggedShare, whole: bool) -> None:
    """Add a part; a group counts once, by its first part."""
    old, new = sums.get(share.policy, Sums()), share.sums()
    if share.stats is not None:
        groups = int(whole)
        sums[share.policy] = Sums(
            old.groups + groups,
            old.trajectories + new.trajectories,
            old.tokens + new.tokens,
            old.reward + new.reward,
            old.varied + groups * new.varied,
        )
