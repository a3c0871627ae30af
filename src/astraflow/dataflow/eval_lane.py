"""The I/O of one evaluation on one instance: reset, open the lane, submit and pull, close. `eval_book` decides, this calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from astraflow.dataflow.admission import check_group
from astraflow.dataflow.eval_book import EvalBook, Wanted, exact, of_wanted
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.shelf import Shelf
from astraflow.lib.wire_client import Caller
from astraflow.protocol.errors import AstraFlowError, BadMessage, Conflict, Retryable, Unavailable
from astraflow.protocol.rollout import EvalEnd, EvalStart, Lease, Pull, PullReply, ResetEngine, Submit, SubmitReply
from astraflow.protocol.routes import RaaSAPI

SUBMITTED_AT_ONCE = 64
PULL_WAIT_S = 5.0
FULL_WAIT_S = 0.5
"""Pause before an instance without room is asked again."""
RESET_TRIES = 3
RESET_WAIT_S = 5.0
"""Cancelled episodes get this long to let go of their engine."""


class EvalLane:
    """One instance's part in an evaluation. Errors of its calls are raised: they cost this instance, not the evaluation."""

    def __init__(self, shelf: Shelf, fleet: RaaSFleet, instance_id: str, lane: str, wanted: Wanted) -> None:
        self._shelf, self._fleet, self.instance_id = shelf, fleet, instance_id
        self._lane, self._wanted = lane, wanted
        self._client: Caller | None = None
        self._acks: list[str] = []
        self._room = 0
        """Free trajectories by the instance's last word."""

    async def open(self, deadline_s: float) -> bool:
        """True when the instance serves the wanted weights, by its receipt and by its own word, and holds newer ones back now."""
        shelf, instance = self._shelf, self._shelf.pool.instances.get(self.instance_id)
        client = self._fleet.client(self.instance_id)
        if instance is None or client is None or not self._fleet.introduced(self.instance_id) or not exact(instance, self._wanted):
            return False
        request = EvalStart(lane=self._lane, versions=self._wanted, deadline_s=deadline_s)
        self._client, self._room = client, instance.record.total_slots  # from here on there may be a lane to close, whatever the reply
        try:
            await client.call(RaaSAPI.eval_start, request, timeout_s=shelf.process.dataflow.pool.call_timeout_s)
        except Conflict:
            self._client = None
            return False  # it moved on between its receipt and this call
        return True

    async def drive(self, book: EvalBook, end: Callable[[], float], instances: Callable[[], int]) -> None:
        """Take leases from the book, its part of them at a time, until everything is back, here and elsewhere: what another instance
        loses may come here."""
        shelf = self._shelf
        while not book.complete and (left := end() - shelf.clock()) > 0:
            part = -(-len(book.leases) // max(instances(), 1)) - len(book.on(self.instance_id))
            taken = book.take(self.instance_id, self._room, min(max(part, 1), SUBMITTED_AT_ONCE))
            if taken:
                self._submitted(book, taken, await self._submit(taken))
            # training leases would take every place that comes free here, and the evaluation would never get one
            full = bool(book.waiting) and self._room < book.leases[book.waiting[0]].n_samples
            (shelf.reserved.add if full else shelf.reserved.discard)(self.instance_id)
            if not book.on(self.instance_id) and not full and not self._acks:
                await shelf.pulse.wait(min(left, FULL_WAIT_S))
                continue
            await self._collect(book, min(FULL_WAIT_S if full else PULL_WAIT_S, left))

    async def _submit(self, leases: list[Lease]) -> SubmitReply:
        assert self._client is not None
        limit = self._shelf.process.dataflow.pool.call_timeout_s
        return await self._client.call(RaaSAPI.eval_submit, Submit(leases=leases, lane=self._lane), timeout_s=limit)

    def _submitted(self, book: EvalBook, leases: list[Lease], reply: SubmitReply) -> None:
        verdicts = {verdict.lease_id: verdict for verdict in reply.verdicts}
        for lease in leases:
            verdict = verdicts.get(lease.lease_id)
            if verdict is None or verdict.verdict == "refused":
                reason = verdict.reason if verdict is not None else "no verdict"
                raise Unavailable(f"{self._lane}: lease {lease.lease_id} was refused by {self.instance_id}: {reason}")
        full = [lease.lease_id for lease in leases if verdicts[lease.lease_id].verdict == "over_capacity"]
        book.put_back(self.instance_id, full)
        self._room = 0 if full else reply.free_slots
        self._heard(reply)

    async def _collect(self, book: EvalBook, wait_s: float) -> None:
        assert self._client is not None
        limit = self._shelf.process.dataflow.pool.call_timeout_s
        request = Pull(ack=self._acks, wait_s=wait_s, lane=self._lane)
        reply = await self._client.call(RaaSAPI.eval_pull, request, timeout_s=wait_s + limit)
        self._acks = [delivery.delivery_id for delivery in reply.deliveries]
        self._room = reply.free_slots
        self._heard(reply)
        for delivery in reply.deliveries:
            lease = book.leases.get(delivery.lease_id)
            if lease is None or lease.attempt != delivery.attempt:
                continue
            rewards = await asyncio.to_thread(rewards_of, bytes(delivery.group), lease, self._wanted)
            if book.scored(self.instance_id, delivery.lease_id, delivery.attempt, rewards):
                self._shelf.pulse.fire()

    def _heard(self, reply: SubmitReply | PullReply) -> None:
        if not self._fleet.heard(self.instance_id, reply.incarnation):
            raise Unavailable(f"{self._lane}: another process answers for {self.instance_id}")
        self._shelf.pool.reported(self.instance_id, reply.free_slots, self._shelf.clock())
        self._fleet.receipts(self.instance_id, reply.serving)

    async def close(self) -> None:
        """Loads that were put off go on."""
        limit = self._shelf.process.dataflow.pool.status_timeout_s
        self._shelf.reserved.discard(self.instance_id)
        if self._client is None:
            return
        try:
            await self._client.call(RaaSAPI.eval_end, EvalEnd(lane=self._lane), timeout_s=limit)
        except AstraFlowError as error:
            self._shelf.event(f"{self._lane}: the lane on {self.instance_id} closes by its deadline: {error}")


async def reset(shelf: Shelf, fleet: RaaSFleet, instance_id: str) -> int:
    """Cancel what an instance generates for training; its leases are to be issued again, as the same attempt: nothing failed.
    Returns how many. Raises what its calls raise.

    A reply may be lost after the instance has cancelled. Therefore its own list decides in the end, and the usual comparison of
    lists, which would count a lost attempt, waits meanwhile.
    """
    client, end = fleet.client(instance_id), shelf.clock() + shelf.process.dataflow.pool.call_timeout_s
    while (left := end - shelf.clock()) > 0 and (instance := shelf.pool.instances.get(instance_id)) is not None:
        if not instance.sending and instance_id not in fleet.reconciling:
            break
        await shelf.pulse.wait(min(left, 0.1))
    if client is None or instance_id in fleet.reconciling or instance_id not in shelf.pool.instances:
        raise Unavailable(f"{instance_id} left, or does not say which leases it holds")
    fleet.reconciling.add(instance_id)
    try:
        return await _reset(shelf, client, instance_id)
    finally:
        fleet.reconciling.discard(instance_id)
        shelf.pulse.fire()


async def _reset(shelf: Shelf, client: Caller, instance_id: str) -> int:
    limit, before = shelf.process.dataflow.pool.call_timeout_s, shelf.clock()
    for attempt in range(RESET_TRIES):
        try:
            request = ResetEngine(deadline_s=RESET_WAIT_S)
            await client.call(RaaSAPI.reset_training_engine, request, timeout_s=RESET_WAIT_S + limit)
            there = await client.call(RaaSAPI.leases, timeout_s=limit)
            break
        except Retryable:
            if attempt + 1 == RESET_TRIES:
                raise
    instance = shelf.pool.instances.get(instance_id)
    if instance is None:
        return 0  # its leases were given out again when it left
    held = {lease.lease_id: lease.attempt for lease in there.held if not lease.lane}
    gone = [h for h in instance.held.values() if h.since <= before and h.lease_id not in instance.sending]
    cancelled = [h for h in gone if held.get(h.lease_id) != h.attempt]
    for lease in cancelled:
        shelf.pool.release(lease.lease_id, instance_id)
        shelf.leases.requeue(lease.lease_id)
    shelf.meter.counts["rollout/cancelled_leases"] += len(cancelled)
    return len(cancelled)


def rewards_of(data: bytes, lease: Lease, wanted: Wanted) -> list[float | None]:
    """Reward per sample; None for failed and unscored ones. A malformed group, or one of other weights, gives nothing."""
    try:
        group = check_group(data, lease.lease_id, lease.attempt, lease.n_samples)
    except BadMessage:
        return []
    if not of_wanted(group, wanted):
        return []
    return [None if t.error is not None else t.reward for t in group.trajectories]
