"""Who waits for whom, since when: every wait of Dataflow, read from the state of its parts at the moment of asking.

Names: `trainer:<model>`, `raas:<instance>`, `raas` (any instance; it waits only for somebody's sake), `groups` (what a batch is
made of), `dataflow:<task>`, `batch:<model>`. Where one edge ends another may begin; `stall.roots` finds those that nobody else
explains. A wait without a deadline of its own has the run's (`dataflow.stall_s`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from astraflow.dataflow.evals import EvalManager
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.pool import Instance
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.dataflow.stall import targets
from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import TrainerInfo

ASKS_S = 15.0
"""A trainer that waits for a batch asks again at once after each answer; silent for longer, it is somewhere else."""
FORGET_S = 5.0
"""A wait that ended and begins again for the same reason within this time (a loop looked around) is the same one."""
SLOW_WRITE_S = 1.0
"""Ledger calls take milliseconds."""


@dataclass
class Seen:
    """A wait whose beginning nobody else remembers."""

    since: float
    last: float


@dataclass
class WaitBook:
    """One per service."""

    shelf: Shelf
    fleet: RaaSFleet
    intake: Intake
    serving: DataServing
    evals: EvalManager
    _seen: dict[tuple[str, str, str], Seen] = field(default_factory=dict)
    _leases: int = 0
    """Leases ever issued when somebody last looked."""

    def edges(self, stall_left_s: float | None = None) -> list[WaitEdge]:
        """All waits, longest first. Called by the janitor too, so that ages are right when nobody asks."""
        now, issued = self.shelf.clock(), self.shelf.leases.next_number
        if issued != self._leases:  # something was leased in between: what `groups` waits for now is another wait
            self._leases, self._seen = issued, {key: seen for key, seen in self._seen.items() if key[0] != "groups"}
        there = list(self._all(now))
        awaited = {name for edge in there for name in targets(edge)}
        found = [self._aged(edge, now) for edge in there if edge.who != "raas" or "raas" in awaited]
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen.last <= FORGET_S}
        for edge in found:
            if edge.deadline_s is None:
                edge.deadline_s = stall_left_s
        return sorted(found, key=lambda edge: -edge.since_s)

    def _aged(self, edge: WaitEdge, now: float) -> WaitEdge:
        """Texts of waits that do not know their own age hold no numbers that change while the wait is the same."""
        if edge.since_s > 0.0:
            return edge
        seen = self._seen.setdefault((edge.who, edge.waits_for, edge.why), Seen(now, now))
        seen.last, edge.since_s = now, now - seen.since
        return edge

    def _all(self, now: float) -> Iterator[WaitEdge]:
        yield from self.shelf.waits.edges()
        yield from self._trainers(now)
        yield from self._groups(now)
        for instance in self.shelf.pool.instances.values():
            yield from self._instance(instance, now)
        yield from self._evaluation()
        yield from self._ledger(now)

    # --- trainers -------------------------------------------------------------------------------------------------------

    def _trainers(self, now: float) -> Iterator[WaitEdge]:
        asking = {edge.who: edge for edge in self.serving.edges()}
        for info in self.shelf.barrier.info(now):
            if info.state in ("expected", "done"):
                continue  # a missing one is named by whoever waits for it
            asks = asking.get(f"trainer:{info.model_id}")
            if asks is not None and info.last_seen_s <= ASKS_S:
                yield asks
            else:
                yield self._away(info)

    def _away(self, info: TrainerInfo) -> WaitEdge:
        """A trainer that is not waiting for us: we wait for it."""
        opened = self.serving.open.get(info.model_id)
        what = f"has the batch of version {opened.row.version}, its notice has not come" if opened else "has not asked for a batch"
        left = self.shelf.barrier.trainer_deadline_s - info.last_seen_s if info.state != "dead" else None
        return WaitEdge(
            who=f"batch:{info.model_id}",
            waits_for=f"trainer:{info.model_id}",
            why=f"{info.state}, at version {info.version}, {what}; heard of {info.last_seen_s:.0f} s ago",
            since_s=info.last_seen_s,
            deadline_s=left,
        )

    # --- groups ---------------------------------------------------------------------------------------------------------

    def _groups(self, now: float) -> Iterator[WaitEdge]:
        """What stands between `groups` and a batch, apart from leases that run (see `_instance`)."""
        shelf = self.shelf
        if shelf.leases.pending:
            yield WaitEdge(who="groups", waits_for="raas", why="leases are to be issued again", since_s=0.0)
        elif not shelf.leases.open and shelf.recording == 0 and not all(map(self.serving.can_serve, shelf.buffers)):
            yield WaitEdge(who="groups", waits_for="dataflow:submit", why="nothing is leased", since_s=0.0)
        held: dict[tuple[str, str], list[float]] = {}
        for (_, model_id), share in self.intake.held.items():
            held.setdefault((share.instance_id, model_id), []).append(share.since)
        hold_s = shelf.process.dataflow.buffer.hold_s
        for (instance_id, model_id), begun in held.items():
            age = now - min(begun)
            whom = f"raas:{instance_id}" if instance_id else f"trainer:{model_id}"
            why = f"{len(begun)} groups of {model_id} wait for the receipt of their weights" if instance_id else "its queue is full"
            yield WaitEdge(who="groups", waits_for=whom, why=why, since_s=age, deadline_s=max(hold_s - age, 0.0))

    # --- instances ------------------------------------------------------------------------------------------------------

    def _instance(self, instance: Instance, now: float) -> Iterator[WaitEdge]:
        pool, name = self.shelf.process.dataflow.pool, f"raas:{instance.instance_id}"
        if instance.held:
            age = now - min(held.since for held in instance.held.values())
            unsure = sum(not held.confirmed for held in instance.held.values())
            why = f"{len(instance.held)} leases run there" + (f", {unsure} of them not confirmed" if unsure else "")
            who = f"dataflow:drain {instance.instance_id}" if instance.state == "draining" else "groups"
            yield WaitEdge(who=who, waits_for=name, why=why, since_s=age, deadline_s=max(pool.lease_deadline_s - age, 0.0))
        behind = dict(self._behind(instance))
        for model_id, why in behind.items():
            yield WaitEdge(who=f"dataflow:notify {model_id}", waits_for=name, why=why, since_s=0.0)
        if instance.state == "suspect" or instance.failures:
            why = f"suspect, {instance.failures} of {pool.max_failures} heartbeats failed: {instance.reason}"
            yield WaitEdge(who="dataflow:heartbeat", waits_for=name, why=why, since_s=now - instance.last_seen)
            yield WaitEdge(who="raas", waits_for=name, why="it is suspect", since_s=now - instance.last_seen)
        elif why := self._unready(instance, list(behind.values())):
            yield WaitEdge(who="raas", waits_for=name, why=why, since_s=0.0)

    def _unready(self, instance: Instance, behind: list[str]) -> str:
        """Why new work may not go there; empty = it may."""
        if not self.fleet.introduced(instance.instance_id):
            return "it has not taken the workflows yet"
        if instance.state == "catching_up":
            return f"it catches up: {'; '.join(behind) or 'its receipts are not there yet'}"
        if instance.state == "draining":
            return "it drains"
        return "; ".join(behind) or ("it is busy" if instance.held else "")

    def _behind(self, instance: Instance) -> Iterator[tuple[str, str]]:
        """(model, what it was told and has not done)."""
        for model_id in self.shelf.barrier.models:
            target = self.fleet.target(instance.instance_id, model_id)
            if model_id in instance.record.models and target is not None and self.fleet.behind(instance.instance_id, model_id):
                serving = instance.serving.get(model_id)
                serves = f"version {serving.version}" if serving is not None else "nothing"
                yield model_id, f"told to load version {target.version} of {model_id}, serves {serves}"

    # --- the rest -------------------------------------------------------------------------------------------------------

    def _evaluation(self) -> Iterator[WaitEdge]:
        """An evaluation that runs on an instance; its other waits are in `shelf.waits`."""
        if not self.evals.queue:
            return
        name = f"dataflow:{self.evals.queue[0].eval_id}"
        if not any(edge.who == name for edge in self.shelf.waits.edges()):
            for instance_id in self.fleet.pins:
                yield WaitEdge(who=name, waits_for=f"raas:{instance_id}", why="results of its lane", since_s=0.0)

    def _ledger(self, now: float) -> Iterator[WaitEdge]:
        for call, begun in self.shelf.writing():
            if now - begun >= SLOW_WRITE_S:
                yield WaitEdge(who="groups", waits_for="disk", why=f"the ledger's call {call!r} has not returned", since_s=now - begun)
