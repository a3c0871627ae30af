"""DataAcquisition: the submit loop hands out tasks, one collect loop per instance brings results back.

Submission is paced (numerics 6): while any live policy has room, leases go to the instance with most free slots. A lease is
in the ledger before it is submitted; a result is in the ledger before its delivery is acknowledged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from astraflow.dataflow.intake import Intake
from astraflow.dataflow.journal import LeaseRow
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.pool import Held, Instance
from astraflow.dataflow.shelf import Shelf
from astraflow.lib.aio import Backoff
from astraflow.lib.trace import TRACE
from astraflow.lib.wire_client import Caller
from astraflow.protocol.codec import fault_of
from astraflow.protocol.errors import AstraFlowError, BadMessage
from astraflow.protocol.rollout import Lease, Pull, PullReply, Serving, Submit, SubmitReply
from astraflow.protocol.routes import RaaSAPI

LEASES_PER_ROUND = 64
"""Leases of one transaction and at most of one submit: keeps a round short, so that new versions and deaths are seen."""
DRAWS_PER_ROUND = 1024
"""Tasks that curators are asked about in one round: some milliseconds, whatever they refuse."""
COOL_DOWN_S = 0.5
"""Pause for an instance that refused a lease although it seemed to have room."""
CONCURRENT_GROUPS = 64
"""Groups of one pull; bounds the memory of a reply."""


class Fleet(Protocol):
    """What acquisition needs of the fleet."""

    def client(self, instance_id: str) -> Caller | None: ...

    def trouble(self, instance_id: str, reason: str) -> None:
        """A data-path call failed."""
        ...

    def receipts(self, instance_id: str, serving: dict[str, Serving]) -> None: ...

    def heard(self, instance_id: str, incarnation: str) -> bool:
        """A data-path call was answered; False when another process did it."""
        ...


class DataAcquisition:
    """Who runs what."""

    def __init__(self, shelf: Shelf, fleet: Fleet, intake: Intake, curation: Curation, workflow_id: str) -> None:
        self._shelf, self._fleet, self._intake, self._curation = shelf, fleet, intake, curation
        self._workflow_id = workflow_id
        self._cool: dict[str, float] = {}
        self._submitting: set[str] = set()

    # --- submit ---------------------------------------------------------------------------------------------------------

    async def submit_loop(self) -> None:
        """Runs until cancelled."""
        shelf = self._shelf
        while True:
            blocked = self._blocked()
            if not blocked:
                shelf.started = True
                plan = await self._plan()
                for instance_id, leases in plan.items():
                    self._submitting.add(instance_id)
                    shelf.tasks.spawn(f"submit {instance_id}", self._submit(instance_id, leases))
                if plan:
                    shelf.waits.over("dataflow:submit")
                    continue
                blocked = self._full()
            shelf.waits.note("dataflow:submit", *blocked)
            await shelf.pulse.wait(0.5)

    def _blocked(self) -> tuple[str, str] | None:
        """(whom, why) acquisition may not go on."""
        shelf = self._shelf
        if not shelf.barrier.all_ready:
            missing = [name for name, state in shelf.barrier.models.items() if not (state.registered or state.done)]
            return ", ".join(f"trainer:{name}" for name in missing), "expected trainers are not ready"
        if not any(instance.state == "live" for instance in shelf.pool.instances.values()):
            return "raas", f"no live instance at the current versions ({len(shelf.pool.instances)} registered)"
        if shelf.held_for:
            return f"dataflow:{shelf.held_for}", "a synchronous evaluation has the rollout services"
        if shelf.paused:
            return "operator", "acquisition is paused"
        return None

    def _full(self) -> tuple[str, str]:
        trainers = ", ".join(f"trainer:{name}" for name in self._shelf.barrier.live() or self._shelf.barrier.models)
        if self._shelf.source.exhausted and not self._shelf.leases.pending:
            return trainers, "every task was handed out"
        if self.room() < self._shelf.n_samples:
            return trainers, "as much is under way as can be trained in time (pace)"
        if not any(self.room(instance) >= self._shelf.n_samples for instance in self._shelf.pool.instances.values()):
            return "raas", "instances still serve versions whose rollouts would be stale when their turn comes"
        return "raas", "no instance has a free place for a group"

    def room(self, instance: Instance | None = None) -> int:
        """Trajectories that may be admitted now (on this instance): the most that any live policy has room for.

        The version of numerics 6 is the one that the instance really serves when that is older than the service version: a group
        begun on it is that much older when its turn comes, so admitting it earlier would only generate what is stale when served.
        """
        shelf = self._shelf
        in_flight = shelf.groups_in_flight * shelf.n_samples
        rooms, version = [0], shelf.barrier.service_version
        for policy in shelf.barrier.live():
            if policy in shelf.process.policies:
                batch = shelf.barrier.models[policy].batch_size
                serving = instance.serving.get(policy) if instance is not None else None
                lag = max(version - serving.version, 0) if serving is not None else 0
                held = self._intake.held_groups(policy)
                rooms.append(shelf.buffers[policy].room(batch, shelf.n_samples, version, in_flight, lag, held))
        return max(rooms)

    def _eligible(self, instance: Instance, total: int) -> bool:
        """It serves all policies of the workflow on their live timelines, and a lease begun on it can be trained in time.

        `total`: trajectories that are under way or may be."""
        shelf, limit = self._shelf, self._shelf.process.dataflow.buffer.max_staleness
        name = instance.instance_id
        if name in self._submitting or name in shelf.reserved or self._cool.get(name, 0.0) > shelf.clock():
            return False
        for policy in shelf.process.policies:
            serving = instance.serving.get(policy)
            lag = shelf.barrier.lag(policy, serving) if serving is not None else None
            if lag is None or (limit is not None and lag > limit):
                return False
        n = shelf.n_samples
        share = shelf.pool.share(instance.instance_id, n, total, shelf.clock())
        return instance.places + n <= share and (bool(shelf.leases.pending) or self.room(instance) >= n)

    async def _plan(self) -> dict[str, list[LeaseRow]]:
        """Choose leases and instances, and write them down."""
        shelf, n = self._shelf, self._shelf.n_samples
        plan: dict[str, list[LeaseRow]] = defaultdict(list)
        new: list[LeaseRow] = []
        again: list[LeaseRow] = []
        models = [model for model in shelf.barrier.live() if model in shelf.process.policies]
        looked_before = shelf.source.looked

        def wants(task_id: str, number: int) -> bool:
            return self._curation.wants(models, task_id, number)

        while len(new) + len(again) < LEASES_PER_ROUND:
            room = self.room()
            if room < n and not shelf.leases.pending:
                break
            eligible = partial(self._eligible, total=shelf.groups_in_flight * n + room)
            instance = shelf.pool.route(n, eligible, shelf.clock())
            if instance is None:
                break
            name = instance.instance_id
            lease = shelf.leases.next_pending(name)
            if lease is not None:
                again.append(lease)
            else:
                too_many = shelf.source.looked - looked_before >= DRAWS_PER_ROUND
                draw = shelf.source.draw(wants) if not too_many and self.room(instance) >= n else None
                if draw is None:
                    break
                lease = shelf.leases.new(draw, n, shelf.process.seed, tuple(shelf.process.policies), name)
                new.append(lease)
            shelf.pool.assign(name, lease.lease_id, lease.attempt, n, shelf.clock())
            plan[name].append(lease)
        if new:
            await shelf.write(shelf.ledger.issue, new, shelf.source_meta())
        if again:
            await shelf.write(shelf.ledger.reissue, [(lease.lease_id, lease.attempt, lease.instance) for lease in again])
        return plan

    async def _submit(self, instance_id: str, rows: list[LeaseRow]) -> None:
        shelf = self._shelf
        try:
            client, held = self._fleet.client(instance_id), shelf.pool.instances.get(instance_id)
            rows = [r for r in rows if held is not None and r.lease_id in held.held and held.held[r.lease_id].attempt == r.attempt]
            if client is None or held is None or not rows:
                return  # it left between plan and call; its leases are to be issued again already
            if shelf.held_for:  # a synchronous evaluation began between plan and call
                for row in rows:
                    shelf.pool.release(row.lease_id, instance_id)
                    shelf.leases.requeue(row.lease_id)
                return
            request = Submit(leases=[self._lease(row) for row in rows])
            held.sending.update(row.lease_id for row in rows)
            begun = time.monotonic()
            try:
                reply = await client.call(RaaSAPI.submit, request, timeout_s=shelf.process.dataflow.pool.call_timeout_s)
            except BadMessage:  # of the reply, or of what was to be sent
                if await self._unsendable(instance_id, rows, request):
                    return
                raise
            finally:
                held.sending.difference_update(row.lease_id for row in rows)
            taken = [v.lease_id for v in reply.verdicts if v.verdict == "accepted"] if TRACE.on else []
            TRACE.add("submit", begun, instance=instance_id, leases=taken)
            if self._fleet.heard(instance_id, reply.incarnation):
                self._verdicts(instance_id, reply)
        except AstraFlowError as error:
            self._fleet.trouble(instance_id, f"submit: {error}")  # what it took of it is asked of itself (GET /leases)
        finally:
            self._submitting.discard(instance_id)
            shelf.pulse.fire()

    async def _unsendable(self, instance_id: str, rows: list[LeaseRow], request: Submit) -> bool:
        """Whether leases were dropped because their tasks cannot be sent. Loading a data set refuses such rows; this is for what still
        gets here, so that one lease does not end the run, and every resumed one."""
        shelf = self._shelf
        faults = {row.lease_id: fault_of(lease.data) for row, lease in zip(rows, request.leases, strict=True)}
        dropped = [lease_id for lease_id, fault in faults.items() if fault]
        if not dropped:
            return False
        for row in rows:
            shelf.pool.release(row.lease_id, instance_id)
            if faults[row.lease_id]:
                shelf.event(f"task {row.task_id} dropped: {faults[row.lease_id]}")
                shelf.leases.close(row.lease_id)
            else:
                shelf.leases.requeue(row.lease_id)
        await shelf.write(shelf.ledger.abandon, dropped, "unsendable")
        return True

    def _verdicts(self, instance_id: str, reply: SubmitReply) -> None:
        shelf = self._shelf
        for verdict in reply.verdicts:
            if verdict.verdict in ("accepted", "duplicate"):
                shelf.pool.confirm(instance_id, verdict.lease_id)
                continue
            shelf.meter.counts[f"rollout/{verdict.verdict}_leases"] += 1
            self._cool[instance_id] = shelf.clock() + COOL_DOWN_S
            if shelf.pool.release(verdict.lease_id, instance_id) is not None:
                shelf.leases.requeue(verdict.lease_id)
            if verdict.verdict == "refused":
                self._fleet.trouble(instance_id, f"refused lease {verdict.lease_id}: {verdict.reason}")
        shelf.pool.reported(instance_id, reply.free_slots, shelf.clock())
        self._fleet.receipts(instance_id, reply.serving)

    def _lease(self, row: LeaseRow) -> Lease:
        shelf = self._shelf
        return Lease(
            lease_id=row.lease_id,
            attempt=row.attempt,
            task_id=row.task_id,
            workflow_id=self._workflow_id,
            n_samples=row.n_samples,
            data=shelf.leases.data[row.lease_id],
            seed=row.seed,
            max_prompt_tokens=shelf.process.train_dataset.max_length,
            deadline_s=shelf.process.dataflow.pool.lease_deadline_s,
        )

    async def lost(self, held: Iterable[Held], why: str) -> None:
        """Leases of an instance that died, or that it forgot: issue them again, or give them up after the last attempt."""
        shelf, held = self._shelf, list(held)
        if not held:
            return
        given_up = shelf.leases.lost(held)
        shelf.event(f"{len(held)} leases to be issued again: {why}" + (f"; {len(given_up)} given up" if given_up else ""))
        if given_up:
            await shelf.write(shelf.ledger.abandon, given_up, "max_attempts")
        shelf.pulse.fire()

    # --- collect --------------------------------------------------------------------------------------------------------

    async def collect_loop(self, instance_id: str) -> None:
        """Pull, write, acknowledge; ends when the instance is gone."""
        shelf, acks = self._shelf, list[str]()
        backoff = Backoff(seed=f"{shelf.identity.incarnation} pull {instance_id}")
        wait_s = shelf.process.dataflow.pool.pull_wait_s
        while (instance := shelf.pool.instances.get(instance_id)) is not None:
            client = self._fleet.client(instance_id)
            if client is None:
                await shelf.pulse.wait(0.5)
                continue
            try:
                ask_s = 0.0 if acks and instance.state == "draining" else wait_s  # it leaves when its last results are acknowledged
                request = Pull(ack=acks, max_items=CONCURRENT_GROUPS, wait_s=ask_s)
                reply = await client.call(RaaSAPI.pull, request, timeout_s=ask_s + shelf.process.dataflow.pool.call_timeout_s)
            except AstraFlowError as error:
                self._fleet.trouble(instance_id, f"pull: {error}")
                await shelf.pulse.wait(backoff.next())
                continue
            if not self._fleet.heard(instance_id, reply.incarnation):
                await shelf.pulse.wait(backoff.next())
                continue
            backoff.reset()
            instance.unacknowledged = len(reply.deliveries)
            acks = await self._received(instance_id, reply)

    async def _received(self, instance_id: str, reply: PullReply) -> list[str]:
        self._shelf.pool.reported(instance_id, reply.free_slots, self._shelf.clock())
        self._fleet.receipts(instance_id, reply.serving)
        return await self._intake.take(instance_id, reply.deliveries) if reply.deliveries else []
