"""Pure core: has the run stopped moving, and who is at the root of it? Marks and time in, a verdict out; no I/O, no clock.

A run moves when a ledger row changes its state, a version moves, an evaluation gives a result, or an instance joins. Who merely
polls does not move it. When nothing has moved for `stall_s`, the edges of who waits for whom lead to those that nobody else
explains: the roots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import DataflowStatus

WORD = "stalled: "
"""How the one line of a stall begins, wherever it is said."""
CHAINS = 8
"""Chains that a report spells out; the others lead to the same roots."""


@dataclass
class StallWatch:
    """Remembers when the marks last changed."""

    limit_s: float | None
    """None = never stalled."""
    moved_at: float
    marks: Hashable = field(default=None)

    def look(self, marks: Hashable, now: float) -> bool:
        """True when nothing has moved for the limit. `marks` equals the last ones exactly when nothing moved in between."""
        if marks != self.marks:
            self.marks, self.moved_at = marks, now
        return self.limit_s is not None and self.idle_s(now) >= self.limit_s

    def idle_s(self, now: float) -> float:
        """Since something moved, as far as it was looked at."""
        return now - self.moved_at

    def left_s(self, now: float) -> float | None:
        """Until the run is called stalled if nothing moves; None = it never is."""
        return None if self.limit_s is None else max(self.limit_s - self.idle_s(now), 0.0)


def targets(edge: WaitEdge) -> list[str]:
    """Whom an edge waits for; one edge may name several."""
    return [name for name in edge.waits_for.split(", ") if name]


def roots(edges: Sequence[WaitEdge]) -> list[WaitEdge]:
    """The stuck edges, longest first: those that wait for somebody who waits for nobody, and those of a circle that waits for
    nobody outside itself."""
    reach = _reachable(edges)
    found = []
    for edge in edges:
        for name in targets(edge):
            after = reach.get(name, set())
            final = all(name in reach.get(other, set()) for other in after)  # nothing, or only a circle through it
            if final and (not after or edge.who in after):
                found.append(edge)
                break
    return sorted(found, key=lambda edge: -edge.since_s)


def chains(edges: Sequence[WaitEdge]) -> list[list[WaitEdge]]:
    """From those for whom nobody waits down to a root, a root in a circle included; longest wait first, at most `CHAINS`."""
    ends = roots(edges)
    awaited = {name for edge in edges for name in targets(edge)}
    starts = [edge for edge in edges if edge.who not in awaited]
    covered: set[str] = set()
    found: list[list[WaitEdge]] = []
    for start in [*sorted(starts, key=lambda edge: -edge.since_s), *ends]:
        if start.who not in covered and len(found) < CHAINS:
            chain = _chain(start, edges, ends)
            covered.update(edge.who for edge in chain)
            found.append(chain)
    return found


def _chain(start: WaitEdge, edges: Sequence[WaitEdge], ends: Sequence[WaitEdge]) -> list[WaitEdge]:
    """The shortest way from an edge to a root."""
    ways = [[start]]
    seen = {start.who}
    while ways:
        way = ways.pop(0)
        if way[-1] in ends:
            return way
        for edge in edges:
            if edge.who in targets(way[-1]) and edge.who not in seen:
                ways.append([*way, edge])
        seen.update(targets(way[-1]))
    return [start]


def _reachable(edges: Iterable[WaitEdge]) -> dict[str, set[str]]:
    """Name → everybody that it waits for, directly or not; itself too when it stands in a circle."""
    direct: dict[str, set[str]] = {}
    for edge in edges:
        direct.setdefault(edge.who, set()).update(targets(edge))
    reach: dict[str, set[str]] = {}
    for name in direct:
        found, todo = set[str](), list(direct[name])
        while todo:
            other = todo.pop()
            if other not in found:
                found.add(other)
                todo += direct.get(other, ())
        reach[name] = found
    return reach


class StallReport(msgspec.Struct, kw_only=True):
    """`RUN_DIR/stall.json`."""

    summary: str
    """One line: the root that has been waited for longest."""
    idle_s: float
    """Since anything moved."""
    stall_s: float
    """The limit that this passed."""
    roots: list[WaitEdge]
    """The stuck edges: nobody else explains them."""
    chains: list[list[WaitEdge]]
    """Who waits for whom, down to a root."""
    status: DataflowStatus
    """Everything that /status says: pool, queues, versions, rows, all waits, events."""


def make_report(status: DataflowStatus, idle_s: float, stall_s: float) -> StallReport:
    """What is written when a run is stalled."""
    found = roots(status.waits)
    return StallReport(
        summary=summary(found, idle_s),
        idle_s=idle_s,
        stall_s=stall_s,
        roots=found,
        chains=chains(status.waits),
        status=status,
    )


def summary(found: Sequence[WaitEdge], idle_s: float) -> str:
    """One line for people."""
    head = f"{WORD}nothing moved for {idle_s:.0f} s"
    if not found:
        return f"{head}, and nobody waits for anybody"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{head}; {sentence(found[0])}{more}"


def sentence(edge: WaitEdge) -> str:
    """`groups waits for raas:r0 since 31 s: 6 leases run there`."""
    return f"{edge.who} waits for {edge.waits_for} since {edge.since_s:.0f} s: {edge.why}"


def as_text(report: StallReport) -> str:
    """`RUN_DIR/stall.txt`."""
    status, ledger = report.status, report.status.ledger
    out = [report.summary, "", "Stuck (nobody else explains these):"]
    out += [f"  {sentence(edge)}" for edge in report.roots] or ["  none"]
    out += ["", "How the others hang on them:"]
    for chain in report.chains:
        out += [f"  {'  ' * depth}{sentence(edge)}" for depth, edge in enumerate(chain)]
    out += ["", "Trainers:"]
    out += [
        f"  {t.model_id}: {t.state}, version {t.version}, timeline {t.timeline}, heard of {t.last_seen_s:.0f} s ago"
        for t in status.trainers
    ]
    out += ["", "Rollout services:"]
    out += [
        f"  {i.instance_id}: {i.state}, {i.in_flight}/{i.total_slots} places taken, serves "
        + (", ".join(f"{model} v{held.version}" for model, held in i.serving.items()) or "nothing")
        + (f" ({i.reason})" if i.reason else "")
        for i in status.instances
    ] or ["  none"]
    out += ["", "Queues:"]
    out += [
        f"  {model}: {q.fresh_groups} groups queued, {q.held_groups} held, {q.served} rows served, {q.replay_groups} kept for replay"
        for model, q in status.queues.items()
    ]
    dropped = ", ".join(f"{reason} {count}" for reason, count in ledger.dropped.items()) or "none"
    flying = ", ".join(f"{state} {count}" for state, count in ledger.in_flight.items() if count) or "none"
    out += ["", f"Rows: made {ledger.made}, trained {ledger.trained}", f"  dropped: {dropped}", f"  in flight: {flying}"]
    out += ["", "Newest events:", *[f"  {event}" for event in status.events[-30:]]]
    return "\n".join(out) + "\n"
