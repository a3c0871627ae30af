"""EvalManager: evaluations one after the other, each in a lane pinned to one set of versions. Training leases go on.

Results travel by their own calls and never come near the training buffer. When no instance can serve the wanted versions any
more, the newest are evaluated instead, and the result names what was really evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from astraflow.dataflow.admission import check_group
from astraflow.dataflow.barrier import same_digest
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.scores import eval_metrics
from astraflow.dataflow.shelf import Shelf
from astraflow.datasets.api import Task
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import EvalResult, EvalResults, EvalResultsRequest
from astraflow.protocol.errors import AstraFlowError, BadMessage, Conflict, Unavailable
from astraflow.protocol.rollout import EvalEnd, EvalStart, Group, Lease, Pull, Serving, Submit
from astraflow.protocol.routes import RaaSAPI

MAX_QUEUED = 64
"""Evaluations that wait for their turn; a trainer asks for one in many steps, so that more means that none gets through."""
TRIES = 3
"""Instances that one evaluation may lose."""
SUBMITTED_AT_ONCE = 64
PULL_WAIT_S = 5.0
REACH_S = 60.0
"""How long an evaluation waits for the slower policies' version; then it takes what they have, and says so."""
AT_START = "start"
"""Asked for once in a run."""


class EvalJob(msgspec.Struct, kw_only=True):
    """Persisted until its results are."""

    eval_id: str
    wanted: dict[str, Serving]
    why: str
    step: int = -1
    """Version that every model should be at; −1 = the present ones."""


@dataclass(frozen=True)
class EvalSet:
    """One valid data set."""

    name: str
    tasks: Sequence[Task]
    n_samples: int
    workflow_id: str
    max_prompt_tokens: int | None


@dataclass
class _Run:
    """One try of one evaluation."""

    lane: str
    leases: dict[str, Lease]
    rewards: dict[str, list[float | None]]
    """Lease → reward per sample; absent = nothing came."""
    to_submit: list[str] = field(default_factory=list)


class EvalManager:
    """One per service; `run` is its supervised task."""

    def __init__(self, shelf: Shelf, fleet: RaaSFleet, sets: Sequence[EvalSet]) -> None:
        self._shelf, self._fleet, self._sets = shelf, fleet, sets
        self.results: list[EvalResult] = []
        self.queue: list[EvalJob] = []
        """First = running or next."""
        self._asked: dict[str, str] = {}
        """Why → id, the newest: what is asked again is not run again."""
        self._number = 0

    def restore(self, results: list[EvalResult], meta: Mapping[str, bytes]) -> None:
        """After a restart: finished results, and jobs to be run again."""
        self.results = results
        if "evals" in meta:
            self.queue, self._number, self._asked = msgspec.msgpack.decode(meta["evals"], type=tuple[list[EvalJob], int, dict[str, str]])

    async def request(self, why: str, step: int = -1) -> str:
        """Queue an evaluation; its id, also when the same was asked before (each trainer asks for its step). Empty = nothing to
        evaluate."""
        if not self._sets:
            return ""
        if why in self._asked:
            known = self._asked[why]
            return known if why != AT_START or any(job.eval_id == known for job in self.queue) else ""
        if len(self.queue) >= MAX_QUEUED:
            self._shelf.event(f"evaluation {why} left out: {len(self.queue)} are waiting")
            return ""
        self._number += 1
        job = EvalJob(eval_id=f"eval-{self._number:04d}", wanted=self._wanted(step), why=why, step=step)
        self.queue.append(job)
        self._asked[why] = job.eval_id
        while len(self._asked) > MAX_QUEUED:
            del self._asked[next(iter(self._asked))]
        self._pin_early(job)
        await self._shelf.write(self._shelf.ledger.put, self._meta())
        self._shelf.pulse.fire()
        return job.eval_id

    def joined(self) -> None:
        """A new instance: an evaluation that waits for one takes it before it gets newer weights."""
        if self.queue and not self._fleet.pins:
            self._pin_early(self.queue[0])

    async def answer(self, request: EvalResultsRequest) -> EvalResults:
        """Results from `since` on; waits up to `wait_s` for the first."""
        end = self._shelf.clock() + min(max(request.wait_s, 0.0), 30.0)
        while len(self.results) <= request.since and (left := end - self._shelf.clock()) > 0 and not self._shelf.stopping:
            await self._shelf.pulse.wait(left)
        running = [job.eval_id for job in self.queue]
        return EvalResults(results=self.results[request.since :], next=max(len(self.results), request.since), running=running)

    async def run(self) -> None:
        """Evaluates what is queued, for ever."""
        shelf = self._shelf
        while True:
            if not self.queue:
                await shelf.pulse.wait(1.0)
                continue
            job, started = self.queue[0], shelf.clock()
            await self._all_reach(job)
            results = await self._evaluate(job)
            self.queue.pop(0)
            self.results += results  # now, so that the evaluation is always either running or done
            await shelf.write(shelf.ledger.add_evals, results, self._meta())
            for result in results:
                values = {f"eval/{result.dataset}/{k}": v for k, v in result.metrics.items() if v is not None}
                shelf.metrics.log(max((s.version for s in result.versions.values()), default=0), values)
            shelf.event(f"{job.eval_id} ({job.why}) done in {shelf.clock() - started:.1f} s")
            if self.queue:
                self._pin_early(self.queue[0])
            shelf.pulse.fire()

    def _wanted(self, step: int) -> dict[str, Serving]:
        """Published weights of this step where they are known, the newest ones otherwise."""
        wanted = {}
        for model_id in self._shelf.process.policies:
            state = self._shelf.barrier.models[model_id]
            known = step in state.digests
            wanted[model_id] = (
                Serving(timeline=state.timeline, version=step, digest=state.digests[step])
                if known
                else self._shelf.barrier.target(model_id)
            )
        return wanted

    async def _all_reach(self, job: EvalJob) -> None:
        """With several policies: wait until the slower ones have published the step too."""
        shelf = self._shelf
        end = shelf.clock() + min(REACH_S, shelf.process.dataflow.eval.deadline_s)
        while job.step >= 0 and (left := end - shelf.clock()) > 0:
            behind = [m for m in shelf.barrier.live() if m in job.wanted and shelf.barrier.models[m].version < job.step]
            if not behind:
                break
            with shelf.waits.waiting(f"dataflow:{job.eval_id}", f"trainer:{behind[0]}", f"version {job.step}", left):
                await shelf.pulse.wait(min(left, 1.0))
        if job.step >= 0:
            job.wanted = self._wanted(job.step)
            self._pin_early(job)

    def _meta(self) -> dict[str, bytes]:
        return {"evals": msgspec.msgpack.encode((self.queue, self._number, self._asked))}

    # --- one evaluation -------------------------------------------------------------------------------------------------

    async def _evaluate(self, job: EvalJob) -> list[EvalResult]:
        """Within its deadline, on as many instances in turn as it takes."""
        shelf = self._shelf
        started = shelf.clock()
        end = started + shelf.process.dataflow.eval.deadline_s
        run = self._plan(job, 0)
        served = job.wanted
        for attempt in range(TRIES):
            found = await self._open_lane(job, run.lane, end)
            if found is None:
                break
            instance_id, client, served = found
            try:
                await self._drive(client, run, end)
                if len(run.rewards) == len(run.leases) or shelf.clock() >= end:
                    break
            except AstraFlowError as error:
                self._fleet.trouble(instance_id, f"{job.eval_id}: {error}")
                shelf.event(f"{job.eval_id}: try {attempt + 1} on {instance_id} ended: {error}")
            finally:
                await self._close_lane(instance_id, client, run.lane)
            run = self._plan(job, attempt + 1)  # other versions may be served by then: nothing of this try is kept
        duration = shelf.clock() - started
        return [self._result(job, eval_set, run, served, duration) for eval_set in self._sets]

    def _plan(self, job: EvalJob, attempt: int) -> _Run:
        process, leases = self._shelf.process, {}
        # of this life of Dataflow: an instance may still hold leases of the same evaluation from the life before
        lane = f"{job.eval_id}.{attempt}~{self._shelf.identity.incarnation[:6]}"
        for eval_set in self._sets:
            for number, task in enumerate(eval_set.tasks):
                lease_id = f"{lane}-{eval_set.name}-{number:05d}"
                leases[lease_id] = Lease(
                    lease_id=lease_id,
                    attempt=1,
                    task_id=task.task_id,
                    workflow_id=eval_set.workflow_id,
                    n_samples=eval_set.n_samples,
                    data=task.data,
                    seed=process.seed + number,
                    max_prompt_tokens=eval_set.max_prompt_tokens,
                    deadline_s=process.dataflow.eval.deadline_s,
                )
        return _Run(lane, leases, {}, list(leases))

    async def _open_lane(self, job: EvalJob, lane: str, end: float) -> tuple[str, Client, dict[str, Serving]] | None:
        """An instance that serves the wanted versions, with the lane open; None at the deadline."""
        shelf, wanted = self._shelf, job.wanted
        with shelf.waits.waiting(f"dataflow:{job.eval_id}", "raas", "an instance at the wanted versions", end - shelf.clock()):
            while (left := end - shelf.clock()) > 0:
                instance_id = self._choose(wanted)
                if instance_id is not None:
                    self._pin(instance_id, wanted)
                    client = await self._try_lane(instance_id, lane, wanted, left)
                    if client is not None:
                        return instance_id, client, wanted
                elif self._out_of_reach(wanted):
                    newest = {model_id: shelf.barrier.target(model_id) for model_id in wanted}
                    if newest != wanted:
                        shelf.event(f"{job.eval_id}: no instance can serve {_words(wanted)} any more, evaluating {_words(newest)}")
                        wanted = newest
                        continue
                await shelf.pulse.wait(min(left, 0.25))
        self._pin("", {})
        return None

    async def _try_lane(self, instance_id: str, lane: str, wanted: dict[str, Serving], left: float) -> Client | None:
        """Open the lane if the instance serves the wanted versions by its own receipt."""
        shelf, client = self._shelf, self._fleet.client(instance_id)
        served = shelf.pool.instances[instance_id].serving
        if (
            client is None
            or not self._fleet.introduced(instance_id)
            or not all(_same(served.get(model_id), want) for model_id, want in wanted.items())
        ):
            return None
        request = EvalStart(lane=lane, versions=wanted, deadline_s=left)
        try:
            await client.call(RaaSAPI.eval_start, request, timeout_s=shelf.process.dataflow.pool.call_timeout_s)
        except Conflict:
            return None  # it moved on between its receipt and this call
        except AstraFlowError as error:
            self._fleet.trouble(instance_id, f"eval_start: {error}")
            return None
        return client

    def _choose(self, wanted: dict[str, Serving]) -> str | None:
        """A live instance that serves the wanted versions, or else one that can still get there."""
        best: tuple[int, int, str] | None = None
        for instance_id, instance in self._shelf.pool.instances.items():
            if instance.state not in ("live", "catching_up") or not all(m in instance.record.models for m in wanted):
                continue
            exact, reachable = True, True
            for model_id, want in wanted.items():
                serving = instance.serving.get(model_id)
                exact = exact and _same(serving, want)
                ahead = serving is not None and (serving.timeline, serving.version) > (want.timeline, want.version)
                reachable = reachable and not ahead and self._still_sent(model_id, want)
            if exact or reachable:
                pinned = self._fleet.pins.get(instance_id) == wanted
                rank = (int(exact) * 2 + int(pinned), instance.free(self._shelf.clock()), instance_id)
                best = max(best, rank) if best is not None else rank
        return best[2] if best is not None else None

    def _still_sent(self, model_id: str, want: Serving) -> bool:
        """The sender keeps the newest version and, unless it was started since, the one before it: an instance can still be
        brought to those."""
        state = self._shelf.barrier.models[model_id]
        return want.timeline == state.timeline and want.version >= max(state.version - 1, state.sent_from)

    def _out_of_reach(self, wanted: dict[str, Serving]) -> bool:
        """No instance serves the wanted versions or can still get there (not: there is no instance at all)."""
        usable = [i for i in self._shelf.pool.instances.values() if i.state in ("live", "catching_up")]
        return bool(usable) and self._choose(wanted) is None

    def _pin_early(self, job: EvalJob) -> None:
        """The job's turn is now: hold newer weights back from the instance that will be used."""
        if self.queue and self.queue[0] is job and self._sets:
            instance_id = self._choose(job.wanted)
            if instance_id is not None:
                self._pin(instance_id, job.wanted)

    def _pin(self, instance_id: str, wanted: dict[str, Serving]) -> None:
        """One instance at a time; empty = none. The others go on to newer weights."""
        pins = {instance_id: wanted} if instance_id else {}
        if pins != self._fleet.pins:
            self._fleet.pins = pins
            self._fleet.announce()

    async def _drive(self, client: Client, run: _Run, end: float) -> None:
        """Submit and pull until everything is back or the deadline passed."""
        shelf, limit = self._shelf, self._shelf.process.dataflow.pool.call_timeout_s
        acks: list[str] = []
        while len(run.rewards) < len(run.leases) and (left := end - shelf.clock()) > 0:
            if run.to_submit:
                chosen = run.to_submit[:SUBMITTED_AT_ONCE]
                request = Submit(leases=[run.leases[key] for key in chosen], lane=run.lane)
                reply = await client.call(RaaSAPI.eval_submit, request, timeout_s=limit)
                taken = {v.lease_id for v in reply.verdicts if v.verdict in ("accepted", "duplicate")}
                refused = {v.lease_id: v.reason for v in reply.verdicts if v.verdict == "refused"}
                if refused:
                    raise Unavailable(f"{run.lane}: lease {min(refused)} was refused: {refused[min(refused)]}")
                run.to_submit = [key for key in run.to_submit if key not in taken]
            wait_s = min(PULL_WAIT_S, left) if not run.to_submit else min(0.5, left)
            pulled = await client.call(RaaSAPI.eval_pull, Pull(ack=acks, wait_s=wait_s, lane=run.lane), timeout_s=wait_s + limit)
            acks = [delivery.delivery_id for delivery in pulled.deliveries]
            for delivery in pulled.deliveries:
                if (lease := run.leases.get(delivery.lease_id)) is not None:
                    rewards = await asyncio.to_thread(_rewards, bytes(delivery.group), lease)
                    run.rewards.setdefault(delivery.lease_id, rewards)

    async def _close_lane(self, instance_id: str, client: Client, lane: str) -> None:
        try:
            await client.call(RaaSAPI.eval_end, EvalEnd(lane=lane), timeout_s=self._shelf.process.dataflow.pool.status_timeout_s)
        except AstraFlowError as error:
            self._shelf.event(f"{lane}: the lane on {instance_id} closes by its deadline: {error}")
        finally:
            self._pin("", {})

    def _result(self, job: EvalJob, eval_set: EvalSet, run: _Run, served: dict[str, Serving], duration_s: float) -> EvalResult:
        config, rewards, missing = self._shelf.process.dataflow.eval, [], 0
        for number in range(len(eval_set.tasks)):
            got = run.rewards.get(f"{run.lane}-{eval_set.name}-{number:05d}", [])
            samples = (got + [None] * eval_set.n_samples)[: eval_set.n_samples]
            missing += sum(reward is None for reward in samples)
            rewards.append(samples)
        return EvalResult(
            eval_id=job.eval_id,
            dataset=eval_set.name,
            versions=served,
            n_tasks=len(eval_set.tasks),
            n_samples=eval_set.n_samples,
            missing=missing,
            metrics=eval_metrics(rewards, eval_set.n_samples, config.correct_threshold, config.k),
            duration_s=duration_s,
        )


def _rewards(data: bytes, lease: Lease) -> list[float | None]:
    """Reward per sample; None for failed and unscored ones. A malformed group gives nothing."""
    try:
        group: Group = check_group(data, lease.lease_id, lease.attempt, lease.n_samples)
    except BadMessage:
        return []
    return [None if t.error is not None else t.reward for t in group.trajectories]


def _same(serving: Serving | None, want: Serving) -> bool:
    return (
        serving is not None
        and (serving.timeline, serving.version) == (want.timeline, want.version)
        and same_digest(serving.digest, want.digest)
    )


def _words(versions: dict[str, Serving]) -> str:
    return ", ".join(f"{model_id} {serving.version}" for model_id, serving in sorted(versions.items()))
