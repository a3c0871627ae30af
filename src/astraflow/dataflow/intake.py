"""From a delivery to the queue: examine, decide, write, and only then acknowledge. Groups whose weights have no receipt yet
are held (bounded by pace, with a deadline), then dropped(unconfirmed).

Between decision and queue lies a write, and meanwhile a trainer may roll back: what is taken out of the queue is looked at
again (`unservable`)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from astraflow.dataflow.admission import Checked, Share, examine
from astraflow.dataflow.buffer import Entry, fresh_enough, make_entry
from astraflow.dataflow.journal import LeaseRow, Result, Settled, ShareResult
from astraflow.dataflow.policies.base import Filter, GroupStats, Shaper
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.shelf import Shelf, log
from astraflow.lib.trace import TRACE
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Delivery

T = TypeVar("T")


@dataclass(frozen=True)
class HeldShare:
    """A durable share that waits for the receipt of its newest version."""

    instance_id: str
    entry: Entry
    since: float


class Intake:
    """One per service; called by every instance's collect loop."""

    def __init__(self, shelf: Shelf, filters: Sequence[Filter], shapers: Sequence[Shaper], curation: Curation, arrivals: int = 0) -> None:
        self._shelf, self._filters, self._shapers, self._curation = shelf, filters, shapers, curation
        self._arrivals = arrivals
        self.held: dict[tuple[str, str], HeldShare] = {}
        """(lease, policy) → share."""
        self._writing: Counter[str] = Counter()
        """Policy → places of groups that are decided on and not yet queued."""

    async def take(self, instance_id: str, deliveries: Sequence[Delivery]) -> list[str]:
        """Returns the deliveries that may be acknowledged: all of them, because what is wanted is durable now."""
        shelf, wanted = self._shelf, {}
        for delivery in deliveries:
            verdict = shelf.leases.verdict(delivery.lease_id, delivery.attempt)
            if verdict == "wanted" and delivery.lease_id not in wanted:
                wanted[delivery.lease_id] = delivery
            else:
                shelf.meter.counts[f"rollout/{'duplicate' if verdict == 'wanted' else verdict}_deliveries"] += 1
        if wanted:
            payloads = [(d, bytes(d.group), shelf.leases.open[d.lease_id]) for d in wanted.values()]
            begun = time.monotonic()
            examined = await asyncio.to_thread(lambda: [self._examine(*item) for item in payloads])
            # a task of its own: the caller is cancelled when its instance leaves, and a group written but not queued would be lost
            await asyncio.shield(shelf.tasks.spawn(f"record {instance_id}", self._store(instance_id, payloads, examined)))
            TRACE.add("admit", begun, instance=instance_id, leases=list(wanted))
        if shelf.recording:  # a copy of what an earlier call still writes: it may be acknowledged only once that is durable
            await shelf.write(_nothing)
        return [delivery.delivery_id for delivery in deliveries]

    def _examine(self, delivery: Delivery, payload: bytes, lease: LeaseRow) -> Checked | BadMessage:
        try:
            checked = examine(payload, delivery.lease_id, delivery.attempt, lease.n_samples, self._shelf.process.policies, self._shapers)
            if checked.group.task_id != lease.task_id:
                raise BadMessage(f"group {lease.lease_id}.task_id: {checked.group.task_id!r}, leased was {lease.task_id!r}")
            return checked
        except BadMessage as error:
            return error

    async def _store(
        self, instance_id: str, payloads: Sequence[tuple[Delivery, bytes, LeaseRow]], examined: Sequence[Checked | BadMessage]
    ) -> None:
        shelf = self._shelf
        results: list[Result] = []
        queued: list[tuple[str, Entry]] = []
        for (delivery, payload, lease), checked in zip(payloads, examined, strict=True):
            if shelf.leases.verdict(delivery.lease_id, delivery.attempt) != "wanted":
                shelf.meter.counts["rollout/superseded_deliveries"] += 1  # its instance was given up while it was decoded
                continue
            shelf.leases.close(lease.lease_id)
            shelf.pool.release(lease.lease_id)
            shares = self._decide(instance_id, lease, checked, queued)
            results.append(Result(lease.lease_id, delivery.attempt, payload, shares))
        learned = self._curation.learned()
        await self._durably(lambda rows: shelf.ledger.record(rows, learned), results, queued)

    async def _durably(self, write: Callable[[list[T]], None], rows: list[T], queued: Sequence[tuple[str, Entry]]) -> None:
        """Write, then queue."""
        shelf, places = self._shelf, Counter[str]()
        for model_id, entry in queued:
            places[model_id] += entry.places
        shelf.recording += len(rows)
        self._writing.update(places)
        try:
            await shelf.write(write, rows)
        finally:
            shelf.recording -= len(rows)
            self._writing.subtract(places)
        for model_id, entry in queued:
            self._queue(model_id, entry)
        shelf.pulse.fire()

    def _decide(
        self, instance_id: str, lease: LeaseRow, checked: Checked | BadMessage, queued: list[tuple[str, Entry]]
    ) -> list[ShareResult]:
        shelf, now = self._shelf, self._shelf.clock()
        if isinstance(checked, BadMessage):
            log.warning("dropped a malformed group from %s: %s", instance_id, checked)
            for policy in shelf.process.policies:
                self._note(policy, "malformed")
                shelf.flows[policy].came(None)
            return [ShareResult(policy, "dropped", "malformed") for policy in shelf.process.policies]
        shelf.meter.group(now, lease.n_samples, checked.tokens)
        for name, value in checked.group.metrics.items():
            shelf.group_means.add(name, value)
        for finish, count in checked.finishes.items():
            shelf.meter.counts[f"rollout/{finish}"] += count
        results = []
        for share in checked.shares:
            self._arrivals += 1
            shelf.flows[share.policy].came(share.stats)
            reason = self._reject(share)
            if share.stats is None or reason:
                self._note(share.policy, reason)
                results.append(ShareResult(share.policy, "dropped", reason, share.stats, share.lost, self._arrivals))
                continue
            entry = make_entry(lease.lease_id, self._arrivals, share.stats, shelf.process.dataflow.buffer.unit)
            shelf.buffers[share.policy].pace.accepted += entry.places
            confirmed = shelf.barrier.confirmed(instance_id, share.policy, entry.timeline, entry.max_version)
            if confirmed:
                self._note(share.policy, "")
                queued.append((share.policy, entry))
            else:
                self.held[(lease.lease_id, share.policy)] = HeldShare(instance_id, entry, now)
            results.append(ShareResult(share.policy, "buffered" if confirmed else "rolled", "", share.stats, share.lost, self._arrivals))
        return results

    def _reject(self, share: Share) -> str:
        """Reason to drop a whole share; empty = keep it."""
        shelf, policy, stats = self._shelf, share.policy, share.stats
        if stats is None:
            return "unscored"
        shelf.meter.reward(sum(stats.values.values()) / stats.size)
        self._curation.observe(policy, stats)
        if stats.size < 2 and shelf.process.group_relative.get(policy, True):
            return "too_few_scored"
        for rule in self._filters:
            reason = rule.reject(policy, stats)
            if reason:
                return reason
        buffer = shelf.buffers[policy]
        return self.unservable(policy, stats) or (
            "no_room" if len(buffer) + self.held_groups(policy) >= buffer.config.max_groups else ""
        )

    def unservable(self, model_id: str, group: Entry | GroupStats) -> str:
        """`dead_timeline`, `stale`, or empty."""
        shelf = self._shelf
        if not shelf.barrier.on_live_timeline(model_id, group.timeline, group.max_version):
            return "dead_timeline"
        version = shelf.barrier.models[model_id].version
        return "" if fresh_enough(version, group.min_version, shelf.process.dataflow.buffer.max_staleness) else "stale"

    def _note(self, model_id: str, reason: str) -> None:
        """Count a group's end at the door for starvation and for /batch's counts; held groups count when they are settled."""
        tally = self._shelf.rejections[model_id]
        tally.seen += 1
        if reason:
            if not tally.in_a_row:
                tally.rejecting_since = self._shelf.clock()
            tally.dropped[reason] += 1
            tally.in_a_row += 1
        else:
            tally.in_a_row = 0

    def _queue(self, model_id: str, entry: Entry) -> None:
        shelf = self._shelf
        if not shelf.buffers[model_id].add(entry):  # filled up while it was written: it stays durable and goes in as soon as there is room
            self.held[(entry.lease_id, model_id)] = HeldShare("", entry, shelf.clock())

    async def reconsider(self) -> None:
        """Held shares: queue those whose receipt came, drop those past their deadline or no longer servable."""
        shelf, now = self._shelf, self._shelf.clock()
        settled: list[Settled] = []
        queued: list[tuple[str, Entry]] = []
        for (lease_id, model_id), share in list(self.held.items()):
            entry, buffer = share.entry, shelf.buffers[model_id]
            reason = self.unservable(model_id, entry)
            overdue = now - share.since > shelf.process.dataflow.buffer.hold_s
            confirmed = not share.instance_id or shelf.barrier.confirmed(share.instance_id, model_id, entry.timeline, entry.max_version)
            if not reason and confirmed and len(buffer) < buffer.config.max_groups:
                self._note(model_id, "")
                settled.append(Settled(lease_id, model_id, "buffered"))
                queued.append((model_id, entry))
            elif reason or overdue:
                reason = reason or ("no_room" if confirmed else "unconfirmed")
                self._note(model_id, reason)
                buffer.pace.give_back(entry.places)
                settled.append(Settled(lease_id, model_id, "dropped", reason))
            else:
                continue
            del self.held[(lease_id, model_id)]
        if settled:
            await self._durably(shelf.ledger.settle, settled, queued)

    def held_places(self, model_id: str) -> int:
        """Places of groups that are accepted and not in the queue: held, or being written."""
        return sum(share.entry.places for (_, policy), share in self.held.items() if policy == model_id) + self._writing[model_id]

    def held_groups(self, model_id: str) -> int:
        return sum(policy == model_id for _, policy in self.held)


def _nothing() -> None:
    """A ledger call that only waits for those before it."""
