"""What must hold after every event, and at the end. Looks at the live service from outside; raises nothing, names what is broken."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.service import AstraFlowService
from astraflow.protocol.control import LedgerCounts
from astraflow.tools.chaos_schedule import BATCH_GROUPS, N_SAMPLES, Schedule
from astraflow.tools.chaos_trainer import TrainerBook

LIMBO_S = 3.0
"""A lease may be between two places for as long as a few ledger calls take."""
HOLD_SLACK_S = 3.0


class Checks:
    """One per schedule; `quiet_until` keeps the checks of durations off after a pause of the process."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.acknowledged: dict[str, int] = {}
        """Training lease → newest attempt whose result an instance was told to forget."""
        self.quiet_until = 0.0
        self._limbo: dict[str, float] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._made = 0
        self._dropped: dict[str, int] = {}
        self._counts: LedgerCounts | None = None
        self._issued = 0
        self._timelines: list[int] = []

    def new_life(self) -> None:
        """Dataflow starts again: what only its memory knew may be gone."""
        self._limbo.clear()
        self._versions.clear()
        self._issued = 0
        self._timelines.clear()

    def after_event(self, service: AstraFlowService, now: float) -> str:
        """The first broken invariant; empty = none."""
        counts = service.shelf.ledger.snapshot
        same = counts is self._counts
        self._counts = counts
        return (
            ("" if same else self._counters(counts))  # nothing was committed since
            or self._leases(service, now)
            or self._queues(service)
            or self._versions_move_forward(service)
            or self._pace(service)
            or ("" if now <= self.quiet_until else self._holds(service, now))
        )

    def _counters(self, counts: LedgerCounts) -> str:
        total = counts.trained + sum(counts.dropped.values()) + sum(counts.in_flight.values())
        if counts.made != total or min(counts.in_flight.values()) < 0:
            return f"conservation: made {counts.made}, but trained + dropped + in flight is {total}: {counts}"
        if counts.made < self._made:
            return f"rows made went back from {self._made} to {counts.made}"
        if any(counts.dropped.get(reason, 0) < count for reason, count in self._dropped.items()):
            return f"rows dropped went back from {dict(self._dropped)} to {counts.dropped}"
        self._made, self._dropped = counts.made, counts.dropped
        return ""

    def _leases(self, service: AstraFlowService, now: float) -> str:
        leases, pool = service.shelf.leases, service.shelf.pool
        places = [*leases.pending]
        for instance in pool.instances.values():
            places += instance.held
        where, limbo = set(places), dict[str, float]()
        if len(where) != len(places):
            return f"leases that are in two places: {[key for key in where if places.count(key) > 1]}"
        for lease_id, row in leases.open.items():
            if lease_id not in where:
                since = limbo[lease_id] = self._limbo.get(lease_id, now)
                if now - since > LIMBO_S and now > self.quiet_until:
                    return f"open lease {lease_id} is on no instance and not to be issued again"
            if self.acknowledged.get(lease_id) == row.attempt:
                return f"the result of lease {lease_id} attempt {row.attempt} was acknowledged, and yet it is still awaited"
        self._limbo = limbo
        return ""

    def _queues(self, service: AstraFlowService) -> str:
        for model_id, buffer in service.shelf.buffers.items():
            opened = service.serving.open.get(model_id)
            places = [entry.lease_id for entry in buffer.entries()]
            places += [lease_id for lease_id, policy in service.intake.held if policy == model_id]
            if opened is not None and self._schedule.dataflow.buffer.unit == "groups":  # sequences of one group may be in both
                places += [entry.lease_id for entry in opened.fresh]
            groups = set(places)
            if len(groups) != len(places):
                return f"groups that are under way twice for {model_id}: {[key for key in groups if places.count(key) > 1]}"
            if not groups.isdisjoint(service.shelf.leases.open):
                return f"groups {groups & service.shelf.leases.open.keys()} are queued for {model_id}, and their leases are still open"
            if any(key.startswith("eval") for key in groups):
                return f"an evaluation's group is in a training queue of {model_id}: {groups}"
        return ""

    def _versions_move_forward(self, service: AstraFlowService) -> str:
        for model_id, state in service.shelf.barrier.models.items():
            before, now = self._versions.get(model_id, (0, 0)), (state.timeline, state.version)
            if now < before:
                return f"{model_id}: (timeline, version) went back from {before} to {now}"
            self._versions[model_id] = now
        return ""

    def _pace(self, service: AstraFlowService) -> str:
        """When new leases were made: what is under way can be trained in time by the policy that has most room."""
        shelf, buffer = service.shelf, self._schedule.dataflow.buffer
        issued, self._issued = self._issued, shelf.leases.next_number
        timelines = [state.timeline for state in shelf.barrier.models.values()]
        same, self._timelines = timelines == self._timelines, timelines
        if self._issued <= issued or not issued or not same:
            return ""
        flying = len(shelf.leases.open) * N_SAMPLES
        if buffer.treatment == "drop" or buffer.max_staleness is None:
            queued = min(len(b) for b in shelf.buffers.values()) * N_SAMPLES + flying
            if queued > buffer.max_groups * N_SAMPLES:
                return f"{queued} trajectories are queued and in flight; the bound is {buffer.max_groups} groups"
            return ""
        under_way = []
        for model_id in shelf.barrier.live():
            opened = service.serving.open.get(model_id)
            served = sum(entry.places for entry in opened.fresh) if opened is not None else 0
            under_way.append(shelf.buffers[model_id].places + service.intake.held_places(model_id) + served + flying)
        bound = (buffer.max_staleness + 1) * BATCH_GROUPS * N_SAMPLES
        if under_way and min(under_way) > bound:
            return f"pace: {min(under_way)} trajectories are under way, {bound} can be trained in time"
        return ""

    def _holds(self, service: AstraFlowService, now: float) -> str:
        limit = self._schedule.dataflow.buffer.hold_s + HOLD_SLACK_S
        for (lease_id, model_id), share in service.intake.held.items():
            if now - share.since > limit:
                return f"group {lease_id} is held for {model_id} since {now - share.since:.1f} s"
        return ""


def at_the_end(directory: Path, segment_bytes: int, books: Mapping[str, TrainerBook], acknowledged: Mapping[str, int]) -> Iterator[str]:
    """The ledger as the next start would find it, against the trainers' books."""
    ledger = Ledger(directory, segment_bytes)
    try:
        ledger.check()
    except AssertionError as error:
        yield str(error)
    finally:
        ledger.close()
    db = sqlite3.connect(directory / "ledger.sqlite")
    try:
        for model_id, book in books.items():
            assert book.now is not None
            rows = db.execute("SELECT lease_id, live FROM shares WHERE policy=? AND state='trained'", (model_id,)).fetchall()
            trained = {lease_id for lease_id, live in rows if live}
            mine = {key.rsplit("/", 1)[0] for key in book.now.trained}
            if trained != mine:
                yield f"{model_id}: the ledger has {sorted(trained - mine)} as trained, the trainer {sorted(mine - trained)}"
            count = sum(live for _, live in rows)
            if count != len(book.now.trained):
                yield f"{model_id}: {count} rows are trained by the ledger, {len(book.now.trained)} by the trainer's book"
        states = dict(db.execute("SELECT lease_id, state FROM leases").fetchall())
        for lease_id, attempt in acknowledged.items():
            row = db.execute("SELECT attempt FROM leases WHERE lease_id=?", (lease_id,)).fetchone()
            if row is None or (states[lease_id] == "open" and row[0] == attempt):
                yield f"the acknowledged result of lease {lease_id} attempt {attempt} is lost"
    finally:
        db.close()
