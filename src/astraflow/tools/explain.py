"""`astraflow explain RUN_DIR`: why a group was not trained on. One reason per group, and per trajectory that it lost alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from astraflow.dataflow.logbook import Logbook, LoggedShare
from astraflow.dataflow.reasons import describe
from astraflow.lib.registry import closest
from astraflow.protocol.control import LedgerCounts
from astraflow.protocol.errors import ConfigError


class Query(msgspec.Struct, kw_only=True):
    """Which groups; without a task, lease or reason those that are not trained on, or lost a member."""

    task: str = ""
    lease: str = ""
    reason: str = ""
    """Whole, or its beginning up to `:` or `.` (`error`, `error:reward`)."""
    policy: str = ""
    limit: int = 20
    """Newest first."""


class Explained(msgspec.Struct, kw_only=True):
    """One (group, policy), or a part of one."""

    lease_id: str
    task_id: str
    policy: str
    state: str
    """leased, rolled (held), buffered, served, trained, dropped."""
    reason: str
    """Empty unless it is dropped."""
    why: str
    """The reason in a sentence."""
    members: list[int]
    """Scored trajectories of it."""
    reward_mean: float | None
    """Mean of raw rewards over the scored members of the group."""
    spread: float | None
    """Standard deviation after shaping."""
    versions: tuple[int, int] | None
    """Smallest and largest version of its tokens."""
    tokens_mean: float | None
    """Sampled tokens per scored trajectory."""
    instance: str
    """Where it ran last."""
    attempts: int
    """Times that its lease was issued."""
    epoch: int
    batch: tuple[int, int] | None
    """(timeline, version) of the batch that holds it."""
    replayed: int
    lost: dict[int, str]
    """Trajectory → why it ended alone."""


class Reason(msgspec.Struct, kw_only=True):
    reason: str
    groups: int
    """Groups that ended by it."""
    rows: int
    """Trajectories that ended by it, alone or with their group."""
    why: str


class Explanation(msgspec.Struct, kw_only=True):
    """The answer; `--json` prints it."""

    counts: LedgerCounts
    """made = trained + dropped + in flight."""
    reasons: list[Reason]
    """Their rows add up to what was dropped."""
    groups: list[Explained]
    more: int
    """Groups that match beyond the limit."""


def explain(run_dir: Path, query: Query) -> Explanation:
    """Read-only, also while the run goes on. Raises ConfigError when there is no ledger."""
    where, arguments = conditions(query)
    with Logbook(run_dir) as log:
        if query.policy and query.policy not in (known := log.policies()):
            raise ConfigError(f"--policy: {query.policy!r} is not in this ledger{closest(query.policy, known)}; known: {', '.join(known)}")
        reasons = [Reason(reason=name, groups=groups, rows=rows, why=describe(name)) for name, (groups, rows) in log.reasons().items()]
        shown = [explained(share, log.lost(share.lease_id, share.policy)) for share in log.shares(where, arguments, query.limit)]
        return Explanation(counts=log.counts(), reasons=reasons, groups=shown, more=log.count(where, arguments) - len(shown))


def conditions(query: Query) -> tuple[str, tuple[Any, ...]]:
    """(WHERE clause, its arguments)."""
    parts, arguments = [], list[Any]()
    for column, value in (("l.task_id", query.task), ("s.lease_id", query.lease), ("s.policy", query.policy)):
        if value:
            parts.append(f"{column} = ?")
            arguments.append(value)
    alone = "EXISTS (SELECT 1 FROM lost x WHERE x.lease_id = s.lease_id AND x.policy = s.policy{})"
    if query.reason:
        names = ("{0} = ?", "{0} LIKE ? ESCAPE '\\'", "{0} LIKE ? ESCAPE '\\'")
        escaped = query.reason.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values = (query.reason, f"{escaped}:%", f"{escaped}.%")
        fits = [" OR ".join(name.format(column) for name in names) for column in ("s.reason", "x.reason")]
        parts.append(f"(s.state = 'dropped' AND ({fits[0]}) OR {alone.format(f' AND ({fits[1]})')})")
        arguments += [*values, *values]
    elif not query.task and not query.lease:
        parts.append(f"(s.state = 'dropped' OR {alone.format('')})")
    return "WHERE " + " AND ".join(parts), tuple(arguments)


def explained(share: LoggedShare, lost: dict[int, str]) -> Explained:
    stats, sums = share.stats, share.sums()
    return Explained(
        lease_id=share.lease_id,
        task_id=share.task_id,
        policy=share.policy,
        state=share.state,
        reason=share.reason,
        why=describe(share.reason) if share.reason else "",
        members=share.scored,
        reward_mean=stats.raw_mean if stats is not None else None,
        spread=stats.std if stats is not None else None,
        versions=(stats.min_version, stats.max_version) if stats is not None else None,
        tokens_mean=sums.tokens / sums.trajectories if sums.trajectories else None,
        instance=share.instance,
        attempts=share.attempt,
        epoch=share.epoch,
        batch=(share.timeline, share.version) if share.timeline is not None and share.version is not None else None,
        replayed=share.uses,
        lost=lost,
    )


def show(answer: Explanation, console: Console) -> None:
    """For people."""
    counts = answer.counts
    dropped, flying = sum(counts.dropped.values()), sum(counts.in_flight.values())
    sure = counts.made == counts.trained + dropped + flying and dropped == sum(reason.rows for reason in answer.reasons)
    equation = f"made {counts.made} = trained {counts.trained} + dropped {dropped} + in flight {flying}"
    _line(console, f"rollouts: {equation}  ({'adds up' if sure else 'DOES NOT ADD UP'})")
    if answer.reasons:
        table = Table("reason", "groups", "rollouts", "meaning", box=None, pad_edge=False)
        for reason in answer.reasons:
            table.add_row(reason.reason, str(reason.groups), str(reason.rows), reason.why)
        console.print(table)
    for group in answer.groups:
        _line(console, group_line(group))
        for index, name in group.lost.items():
            _line(console, f"    trajectory {index}: {name}")
    if answer.more:
        _line(console, f"… and {answer.more} more (--limit)")
    elif not answer.groups:
        _line(console, "no group matches")


def group_line(group: Explained) -> str:
    """`ab12-0000007  t1  solver  dropped (zero_variance)  reward 1.000 ± 0.000  v3  12.0 tokens  on raas-0, attempt 1`."""
    parts = [group.lease_id, group.task_id, group.policy]
    parts.append(f"{group.state} ({group.reason})" if group.reason else group.state)
    if group.reward_mean is not None and group.spread is not None and group.versions is not None:
        low, high = group.versions
        parts += [f"reward {group.reward_mean:.3f} ± {group.spread:.3f}", f"v{low}" if low == high else f"v{low}–{high}"]
    if group.tokens_mean is not None:
        parts.append(f"{len(group.members)} × {group.tokens_mean:.1f} tokens")
    parts.append(f"on {group.instance}, attempt {group.attempts}")
    if group.batch is not None:
        parts.append(f"batch of version {group.batch[1]}, timeline {group.batch[0]}")
    if group.replayed:
        parts.append(f"replayed {group.replayed} times")
    return "  ".join(parts)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
