"""What the rollout viewer asks for: a page of rollouts, one of them, its group, an export. Files and SQLite only; called in threads."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.dashboard.index import RolloutIndex
from astraflow.dataflow.logbook import Logbook, LoggedShare
from astraflow.dataflow.reasons import describe
from astraflow.protocol.errors import ConfigError, UnknownName, UserError

Natural = Annotated[int, Meta(ge=0, le=10**9)]
State = Literal["", "trained", "dropped", "in_flight", "unknown"]
ORDERS = {
    "newest": "r.id DESC",
    "oldest": "r.id",
    "best": "r.reward IS NULL, r.reward DESC, r.id DESC",
    "worst": "r.reward IS NULL, r.reward, r.id DESC",
    "longest": "r.tokens DESC, r.id DESC",
    "shortest": "r.tokens, r.id DESC",
}
FIELDS = [
    "id", "place", "time", "instance", "lease_id", "attempt", "task_id", "idx", "workflow", "policies", "reward", "finish", "error",
    "tokens", "min_version", "max_version", "head",
]  # fmt: skip
CHOICES = ("workflow", "instance", "policies")
"""Columns of few values that a person chooses from."""
MAX_MEMBERS = 64
"""Of a group that are shown side by side."""
EXPORT_CHUNK = 200


class Filter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which rollouts; empty fields choose nothing."""

    q: Annotated[str, Meta(max_length=1000)] = ""
    """Words that all stand in the text; the last may be the beginning of one. `"a phrase"` in quotes."""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: Natural | None = None
    tokens_max: Natural | None = None
    """Sampled tokens."""
    workflow: str = ""
    policy: str = ""
    version: Natural | None = None
    """A call of the rollout was sampled by it, or by one before and one after it."""
    instance: str = ""
    task: str = ""
    lease: str = ""
    reason: str = ""
    """Why it was not trained on; whole, or its beginning up to `:` or `.`."""
    state: State = ""
    """`unknown`: not in the ledger, as evaluations are."""
    order: Literal["newest", "oldest", "best", "worst", "longest", "shortest"] = "newest"
    page: Natural = 0
    size: Annotated[int, Meta(ge=1, le=200)] = 50

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Filter:
        """From a query string. Raises UserError naming the field."""
        try:
            found = msgspec.convert({key: value for key, value in values.items() if value != ""}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UserError(f"filter: {error}; known: {', '.join(cls.__struct_fields__)}") from None
        for name in ("reward_min", "reward_max"):
            bound = getattr(found, name)
            if bound is not None and not math.isfinite(bound):
                raise UserError(f"filter: {name}: {bound}: expected a finite number")
        return found


class Rollouts:
    """The rollouts of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.index = RolloutIndex(run_dir)

    def page(self, wanted: Filter) -> dict[str, Any]:
        """`{total, pending, rows, choices}`; rows hold the columns of the index and `outcomes` per policy."""
        pending = self.index.refresh()
        with self.index.reading() as (db, has_ledger):
            where, arguments = conditions(wanted, has_ledger)
            (total,) = db.execute(f"SELECT COUNT(*) FROM rollouts r {where}", arguments).fetchone()
            place = (wanted.size, wanted.page * wanted.size)
            rows = self._rows(db, f"{where} ORDER BY {ORDERS[wanted.order]} LIMIT ? OFFSET ?", (*arguments, *place))
            there = {name: [value for (value,) in db.execute(f"SELECT DISTINCT {name} FROM rollouts")] for name in CHOICES}
            choices = {name: sorted({word for value in values for word in value.split()}) for name, values in there.items()}
        return {"total": total, "pending": pending, "rows": self._with_outcomes(rows), "choices": choices | {"reason": self._reasons()}}

    def one(self, place: str) -> dict[str, Any]:
        """`{row, record, why}`. Raises UnknownName for what is not in the index."""
        return self._full(self._find("WHERE r.place=?", (place,), f"rollout {place!r}"))[0]

    def group(self, lease_id: str) -> dict[str, Any]:
        """`{lease_id, members, more}`: all kept rollouts of a lease side by side."""
        found = self._find("WHERE r.lease_id=? ORDER BY r.idx, r.attempt", (lease_id,), f"lease {lease_id!r}")
        return {"lease_id": lease_id, "members": self._full(found[:MAX_MEMBERS]), "more": max(0, len(found) - MAX_MEMBERS)}

    def export(self, wanted: Filter) -> Iterator[bytes]:
        """JSON lines: the records that the filter chooses, each with its `outcomes`."""
        with self.index.reading() as (db, has_ledger):
            where, arguments = conditions(wanted, has_ledger)
            places = [place for (place,) in db.execute(f"SELECT place FROM rollouts r {where} ORDER BY {ORDERS[wanted.order]}", arguments)]
        for start in range(0, len(places), EXPORT_CHUNK):
            chunk = places[start : start + EXPORT_CHUNK]
            with self.index.reading() as (db, _):
                marks = ",".join("?" * len(chunk))
                rows = {row["place"]: row for row in self._rows(db, f"WHERE r.place IN ({marks})", tuple(chunk))}
            for row in self._with_outcomes([rows[place] for place in chunk if place in rows]):
                if (record := self._record(row["place"])) is not None:
                    yield msgspec.json.encode({**record, "outcomes": row["outcomes"]}) + b"\n"

    # --- parts ----------------------------------------------------------------------------------------------------------

    def _rows(self, db: sqlite3.Connection, rest: str, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        columns = ", ".join(f"r.{name}" for name in FIELDS)
        rows = [dict(zip(FIELDS, values, strict=True)) for values in db.execute(f"SELECT {columns} FROM rollouts r {rest}", arguments)]
        for row in rows:
            row["policies"] = row["policies"].split()
        return rows

    def _find(self, where: str, arguments: tuple[Any, ...], what: str) -> list[dict[str, Any]]:
        self.index.refresh()
        with self.index.reading() as (db, _):
            rows = self._rows(db, where, arguments)
        if not rows:
            raise UnknownName(f"{what}: no such record; the newest raas.records.keep of each instance are kept")
        return self._with_outcomes(rows)

    def _full(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"row": row, "record": self._record(row["place"])} for row in rows]

    def _record(self, place: str) -> dict[str, Any] | None:
        """`place` is one that the index knows, so it names a file below `rollouts/`. None = it was deleted meanwhile, or is broken."""
        try:
            found = msgspec.json.decode((self._run_dir / "rollouts" / f"{place}.json").read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found if isinstance(found, dict) else None

    def _reasons(self) -> list[str]:
        try:
            with Logbook(self._run_dir) as book:
                return list(book.reasons())
        except ConfigError:
            return []

    def _with_outcomes(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each row with `outcomes`: what became of it for each policy; none = the ledger does not know its lease."""
        leases = sorted({row["lease_id"] for row in rows})
        shares: dict[str, list[LoggedShare]] = {}
        lost: dict[tuple[str, str], dict[int, str]] = {}
        try:
            with Logbook(self._run_dir) as book:
                for share in book.shares(f"WHERE s.lease_id IN ({','.join('?' * len(leases))})", tuple(leases)):
                    shares.setdefault(share.lease_id, []).append(share)
                    lost.setdefault((share.lease_id, share.policy), book.lost(share.lease_id, share.policy))
        except ConfigError:
            pass  # a directory without its ledger still has its texts
        for row in rows:
            found = [outcome(row, share, lost[share.lease_id, share.policy]) for share in shares.get(row["lease_id"], ())]
            row["outcomes"] = [item for item in found if item is not None]
        return rows


def outcome(row: Mapping[str, Any], share: LoggedShare, lost: Mapping[int, str]) -> dict[str, Any] | None:
    """What became of one trajectory for the policy of a share; None when another part of the share holds it."""
    index, stats = row["idx"], share.stats
    state, reason = share.state, share.reason
    if row["attempt"] != share.attempt:
        state, reason, why = "superseded", "", f"its lease was issued again (attempt {share.attempt})"
    elif index in lost:
        if share.part:
            return None
        state, reason = "dropped", lost[index]
        why = describe(reason)
    elif share.members and index not in share.members:
        return None
    else:
        why = describe(reason) if reason else ""
    found: dict[str, Any] = {"policy": share.policy, "state": state, "reason": reason, "why": why}
    if share.version is not None and state not in ("superseded", "dropped"):
        found["batch"] = [share.timeline, share.version]
    if stats is not None and index in stats.values and state != "superseded":
        value = stats.shaped.get(index, stats.values[index])
        found |= {"value": stats.values[index], "group_mean": stats.mean, "group_std": stats.std}
        found["advantage"] = (value - stats.mean) / stats.std if stats.std > 0 else 0.0
    return found


def conditions(wanted: Filter, has_ledger: bool) -> tuple[str, tuple[Any, ...]]:
    """(WHERE clause over `rollouts r`, its arguments)."""
    parts: list[str] = []
    arguments: list[Any] = []

    def add(text: str, *values: Any) -> None:
        parts.append(text)
        arguments.extend(values)

    if phrase := match(wanted.q):
        add("r.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", phrase)
    bounds = {"reward >=": wanted.reward_min, "reward <=": wanted.reward_max}
    bounds |= {"tokens >=": wanted.tokens_min, "tokens <=": wanted.tokens_max}
    for bound, limit in bounds.items():
        if limit is not None:
            add(f"r.{bound} ?", limit)
    equal = {"workflow": wanted.workflow, "instance": wanted.instance, "task_id": wanted.task, "lease_id": wanted.lease}
    for column, text in equal.items():
        if text:
            add(f"r.{column} = ?", text)
    if wanted.policy:
        add("instr(r.policies, ?) > 0", f" {wanted.policy} ")
    if wanted.version is not None:
        add("r.min_version <= ? AND r.max_version >= ?", wanted.version, wanted.version)
    if wanted.reason or wanted.state:
        if has_ledger:
            _fate(wanted, add)
        elif wanted.reason or wanted.state != "unknown":
            add("0")
    return ("WHERE " + " AND ".join(f"({part})" for part in parts) if parts else ""), tuple(arguments)


def _fate(wanted: Filter, add: Any) -> None:
    """By what the ledger says of it (for the chosen policy, if one is chosen)."""
    lost = "SELECT 1 FROM ledger.lost x WHERE x.lease_id=r.lease_id AND x.idx=r.idx"
    share = (
        "SELECT 1 FROM ledger.shares s JOIN ledger.leases l USING(lease_id) WHERE s.lease_id=r.lease_id AND l.attempt=r.attempt"
        " AND in_part(s.members, r.idx) AND NOT EXISTS (SELECT 1 FROM ledger.lost y WHERE y.lease_id=s.lease_id"
        " AND y.policy=s.policy AND y.idx=r.idx)"
    )
    whose: tuple[str, ...] = ()
    if wanted.policy:
        lost, share, whose = f"{lost} AND x.policy=?", f"{share} AND s.policy=?", (wanted.policy,)
    if wanted.reason:
        escaped = wanted.reason.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values = (wanted.reason, f"{escaped}:%", f"{escaped}.%")
        fits = "({0} = ? OR {0} LIKE ? ESCAPE '\\' OR {0} LIKE ? ESCAPE '\\')"
        text = f"EXISTS ({lost} AND {fits.format('x.reason')}) OR EXISTS ({share} AND s.state='dropped' AND {fits.format('s.reason')})"
        add(text, *whose, *values, *whose, *values)
    if wanted.state == "unknown":
        add("NOT EXISTS (SELECT 1 FROM ledger.leases l WHERE l.lease_id=r.lease_id)")
    elif wanted.state == "dropped":
        add(f"EXISTS ({lost}) OR EXISTS ({share} AND s.state='dropped')", *whose, *whose)
    elif wanted.state:
        chosen = "s.state='trained'" if wanted.state == "trained" else "s.state NOT IN ('trained','dropped')"
        add(f"EXISTS ({share} AND {chosen})", *whose)


def match(text: str) -> str:
    """What a person typed as an FTS5 query: words and quoted phrases, all of which must occur; nothing in it is an operator."""
    phrases = [piece for number, part in enumerate(text.split('"')) for piece in ([part] if number % 2 else part.split())]
    words = ['"' + piece.replace("\0", "") + '"' for piece in phrases if any(character.isalnum() for character in piece)]
    if words and not text.endswith(('"', " ")):
        words[-1] += "*"
    return " ".join(words)
