"""Runs leases: n episodes of a workflow at once, one group out, whatever happens to its members.

    submit ─▶ SlotBook (decides) ─▶ task per lease ─▶ n episode tasks ─▶ Group ─▶ Outbox ─▶ pull, acknowledged

Who waits for whom: an episode waits for its engines, tools and reward; a lease waits for its episodes, at most `deadline_s`;
a pull waits for the next group of its lane. Nobody waits for a pull: the slot book stops taking leases instead.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astraflow.lib.aio import Tasks, asked_to_cancel, contain_tasks, contained, one_line
from astraflow.lib.metrics import Counter, Mean
from astraflow.lib.trace import TRACE
from astraflow.protocol.codec import encode
from astraflow.protocol.rollout import Delivery, Group, Lease, LeaseVerdict, Pull, RolloutError, Trajectory
from astraflow.raas.engines.base import EngineError
from astraflow.raas.episode import CURRENT, Episode
from astraflow.raas.models import ServedModel
from astraflow.raas.outbox import Outbox
from astraflow.raas.programs import Program, Programs
from astraflow.raas.records import Records, record_ref, spans
from astraflow.raas.slots import Held, SlotBook
from astraflow.raas.trajectory import failed, to_episode, version_spans
from astraflow.workflows.api import Episode as Result
from astraflow.workflows.api import rollout_error

log = logging.getLogger(__name__)

MAX_PULL_S = 30.0
MAX_KINDS = 200
"""Kinds of failure that are counted by name; the system's own are about twenty."""
RECORD_WRITES = 64
"""Groups whose records wait for the disk; more would mean that it does not keep up, and then records are left out, counted."""


@dataclass
class Member:
    """One episode's place in its group."""

    episode: Episode
    trajectory: Trajectory | None = None
    result: Result | None = None


class Executor:
    """All leases of an instance."""

    def __init__(
        self,
        instance_id: str,
        *,
        models: Mapping[str, ServedModel],
        programs: Programs,
        slots: SlotBook,
        outbox: Outbox,
        records: Records,
        tasks: Tasks,
        engine_retries: int = 2,
        cancel_grace_s: float = 2.0,
    ) -> None:
        self.instance_id = instance_id
        self.slots, self.outbox, self.counts, self.means = slots, outbox, Counter(), Mean()
        self._models, self._programs, self._records, self._tasks = models, programs, records, tasks
        self._engine_retries, self._cancel_grace_s = engine_retries, cancel_grace_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._episodes: set[asyncio.Task[None]] = set()
        """References to all episode tasks: one that swallows its cancellation outlives its lease."""
        self._serial = itertools.count()
        self._logged: set[str] = set()
        self._kinds: set[str] = set()
        self._writes = 0
        self._ending = False
        self.pullers = 0
        """Pulls that wait now."""
        self.last_pull = time.monotonic()
        self.refusal: Callable[[Program], str] = lambda program: ""
        """Why no new lease of this workflow is taken now (draining, nothing loaded, rollback); set by the composition root."""

    # --- leases in ------------------------------------------------------------------------------------------------------

    def submit(self, leases: list[Lease], lane: str = "") -> list[LeaseVerdict]:
        """A verdict per lease, in order. Accepted ones run at once."""
        return [self._take(lease, lane) for lease in leases]

    def _take(self, lease: Lease, lane: str) -> LeaseVerdict:
        program = self._programs.get(lease.workflow_id)
        verdict = self.slots.offer(lease, lane, self._refusal(lease, program, lane))
        if verdict.verdict == "accepted":
            assert program is not None
            self._stop(lease.lease_id)  # an older attempt
            TRACE.add("accept", time.monotonic(), lease=lease.lease_id, attempt=lease.attempt)
            name = f"lease {lease.lease_id}.{lease.attempt}"
            self._running[lease.lease_id] = self._tasks.spawn(name, self._supervised(self.slots.ticket(lease.lease_id), program))
        self.counts.add(f"raas/leases_{verdict.verdict}")
        return verdict

    def _refusal(self, lease: Lease, program: Program | None, lane: str) -> str:
        if program is None:
            return f"workflow_id {lease.workflow_id!r} is not registered here; /register_workflow comes first"
        if not 0 < lease.deadline_s < math.inf:  # also NaN
            return f"deadline_s {lease.deadline_s}: expected a number of seconds above 0"
        if not lane and program.training_refusal:
            return f"generation.{program.training_refusal}"
        return self.refusal(program)

    def cancel(self, lease_ids: list[str]) -> None:
        """Stop these leases and forget their results."""
        for lease_id in lease_ids:
            if self.slots.forget(lease_id) is not None:
                self.counts.add("raas/leases_cancelled")
            self._stop(lease_id)

    def cancel_lane(self, lane: str) -> list[str]:
        """Everything of one lane, results included ("" = training)."""
        mine = self.slots.select(lane=lane)
        self.cancel(mine)
        return mine

    def cancel_running_training(self) -> list[str]:
        """Training leases without a result: a synchronous evaluation wants the engines; finished groups stay."""
        mine = self.slots.select(lane="", running_only=True)
        self.cancel(mine)
        return mine

    async def reset_training(self, deadline_s: float) -> list[str]:
        """The same, and wait at most so long until the cancelled episodes have let go of the engines."""
        mine = self.cancel_running_training()
        names = {f"episode {lease_id}" for lease_id in mine}
        ending = [task for task in self._episodes if task.get_name() in names and not task.done()]
        if ending:
            await asyncio.wait(ending, timeout=max(0.0, min(deadline_s, MAX_PULL_S)))
        return mine

    def rollback(self, policy: str, timeline: int) -> list[str]:
        """The policy starts a new timeline: forget what an older one produced or is producing. Dataflow finds out by `/leases`."""
        dead = self.slots.select(lane="", workflow_ids=self._programs.using(policy), running_only=True)
        dead += self.outbox.of_dead_timeline(policy, timeline)
        self.cancel(dead)
        return dead

    def _stop(self, lease_id: str) -> None:
        self.outbox.drop_leases({lease_id})
        task = self._running.pop(lease_id, None)
        if task is not None:
            task.cancel()
        self._notify()

    # --- results out ----------------------------------------------------------------------------------------------------

    async def pull(self, call: Pull, lane: str, still_open: Callable[[], None] = lambda: None) -> tuple[list[Delivery], int]:
        """Acknowledge, then wait at most `wait_s` for results of the lane: (deliveries, how many more wait).

        `still_open` raises when the lane was closed while the call waited.
        """
        for delivery in self.outbox.acknowledge(call.ack):
            self.slots.acknowledged(delivery.lease_id, delivery.attempt)
        end = time.monotonic() + max(0.0, min(call.wait_s, MAX_PULL_S))  # in this order NaN is 0
        self.pullers += 1
        try:
            while True:
                still_open()
                deliveries, waiting = self.outbox.pull(lane, call.max_items)
                left = end - time.monotonic()
                if deliveries or call.max_items < 1 or left <= 0 or self._ending:
                    if deliveries:
                        TRACE.add("delivered", time.monotonic(), leases=[delivery.lease_id for delivery in deliveries])
                    return deliveries, waiting
                await self._next_news(left)
        finally:
            self.pullers -= 1
            self.last_pull = time.monotonic()

    async def _next_news(self, seconds: float) -> None:
        news = self._news
        try:
            async with asyncio.timeout(seconds):
                await news.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def end_pulls(self) -> None:
        """Answer the pulls that wait, now and from now on: the process ends."""
        self._ending = True
        self._notify()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits to be pulled."""
        return self.slots.in_flight == 0 and len(self.outbox) == 0

    # --- one lease ------------------------------------------------------------------------------------------------------

    async def _supervised(self, held: Held, program: Program) -> None:
        """A bug of ours costs this group, loudly, and not the instance: the next one would get the same lease."""
        try:
            await self._run(held, program)
        except Exception as error:
            log.exception("lease %s failed inside the executor", held.lease.lease_id)
            self.counts.add("raas/internal_errors")
            message = one_line(error)
            members = [failed(i, RolloutError(boundary="workflow", kind="internal", message=message)) for i in range(held.lease.n_samples)]
            self._deliver(held, members, {})

    def _deliver(
        self, held: Held, trajectories: list[Trajectory], timelines: dict[str, int], metrics: dict[str, float] | None = None
    ) -> None:
        """The group goes to the outbox, unless the lease was cancelled or superseded meanwhile."""
        lease = held.lease
        group = Group(
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            task_id=lease.task_id,
            versions=version_spans(trajectories, timelines),
            trajectories=trajectories,
            metrics=metrics or {},
        )
        encoded = encode(group)  # first: what cannot be encoded must not leave a finished lease without a result
        if not self.slots.group_done(held):
            return
        for trajectory in trajectories:
            error = trajectory.error
            self.counts.add("raas/trajectories")
            ended = f"finish/{trajectory.finish}" if error is None else f"error/{error.boundary}/{self._kind(error.kind)}"
            self.counts.add(f"raas/{ended}")
        self.outbox.put(lease.lease_id, lease.attempt, encoded, timelines, held.lane)
        if self._running.get(lease.lease_id) is asyncio.current_task():
            del self._running[lease.lease_id]
        self._notify()

    def _kind(self, kind: str) -> str:
        """What a failure is counted under: a workflow that makes up a kind per failure must not fill the status."""
        if len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
        return kind if kind in self._kinds else "other"

    async def _run(self, held: Held, program: Program) -> None:
        started, lease = time.monotonic(), held.lease
        members = [Member(self._episode(held, index)) for index in range(lease.n_samples)]
        await self._run_members(held, program, members)
        trajectories = [self._finished(lease, member) for member in members]
        metrics = self._group_metrics(members, time.monotonic() - started)
        self._deliver(held, trajectories, self._timelines(program, members), metrics)
        TRACE.add("lease", started, lease=lease.lease_id, attempt=lease.attempt)
        await self._record(lease, program, members)

    def _episode(self, held: Held, index: int) -> Episode:
        return Episode(held.lease, index, training=not held.lane, serial=next(self._serial))

    async def _run_members(self, held: Held, program: Program, members: list[Member]) -> None:
        """All episodes at once; past the deadline, or when the lease is cancelled, the rest is cancelled."""
        lease = held.lease
        contain_tasks(asyncio.get_running_loop(), CURRENT.get)  # a SystemExit in a task of the workflow's own would end the loop
        running: dict[asyncio.Task[None], Member] = {}
        for member in members:
            task = asyncio.get_running_loop().create_task(self._run_member(held, program, member), name=f"episode {lease.lease_id}")
            task.add_done_callback(lambda _: self.slots.episode_ended(held))
            self._episodes.add(task)
            task.add_done_callback(self._episodes.discard)
            running[task] = member
        try:
            _, late = await asyncio.wait(running, timeout=lease.deadline_s)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        for task in late:
            boundary = running[task].episode.inside
            message = f"not done within the lease's {lease.deadline_s:g} s"
            running[task].trajectory = failed(0, RolloutError(boundary=boundary, kind="timeout", message=message))
            task.cancel()
        if late:
            _, stuck = await asyncio.wait(late, timeout=self._cancel_grace_s)
            self.counts.add("raas/episodes_abandoned", len(stuck))
        for task in running:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error  # a bug of ours: everything that a workflow can raise is data by now

    async def _run_member(self, held: Held, program: Program, member: Member) -> None:
        lease, begun = held.lease, time.monotonic()
        for run in range(self._engine_retries + 1):
            if run:
                member.episode = self._episode(held, member.episode.index)
            CURRENT.set(member.episode)
            try:
                result = await contained(self._play, lease, program, member)
            except EngineError as error:
                if error.retryable and run < self._engine_retries:
                    self.counts.add("raas/episode_retries")
                    continue
                outcome = failed(0, rollout_error(error))
            except BaseException as error:  # the workflow boundary: whatever a workflow raises, also SystemExit, becomes data
                if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and asked_to_cancel()):
                    raise
                outcome = failed(0, rollout_error(error))
                if outcome.error is not None and outcome.error.kind == "exception":
                    self._log_failure(program.spec.workflow, error)
            else:
                member.result, outcome = result, result.trajectory
            if member.trajectory is None:  # otherwise the deadline has spoken already
                member.trajectory = outcome
            TRACE.add("episode", begun, lease=lease.lease_id, attempt=lease.attempt, index=member.episode.index)
            return

    async def _play(self, lease: Lease, program: Program, member: Member) -> Result:
        engines = member.episode.engines(self._models, program.spec.policies)
        returned = await program.workflow.arun_episode(engines, copy.deepcopy(lease.data))
        return to_episode(returned, program.spec.policies, member.episode.temperature)

    def _log_failure(self, workflow: str, error: BaseException) -> None:
        """The first traceback of its kind; every further one is counted, and its text is in the group."""
        kind = f"{workflow}: {type(error).__name__}"
        if kind not in self._logged and len(self._logged) < 100:
            self._logged.add(kind)
            log.warning("workflow %s failed; further failures of this kind are only counted", kind, exc_info=error)

    def _finished(self, lease: Lease, member: Member) -> Trajectory:
        trajectory = member.trajectory
        assert trajectory is not None
        trajectory.index = member.episode.index
        trajectory.record_ref = record_ref(self.instance_id, lease.lease_id, lease.attempt, trajectory.index) if self._records.keep else ""
        if trajectory.error is not None:
            # A lone surrogate, as Python's file names have them, is no text for the wire.
            trajectory.error.message = trajectory.error.message[:500].encode("utf-8", "replace").decode()
        return trajectory

    def _timelines(self, program: Program, members: list[Member]) -> dict[str, int]:
        out: dict[str, int] = {}
        for member in members:
            for policy, timeline in member.episode.timelines.items():
                out[policy] = min(out.get(policy, timeline), timeline)
        for policy in program.spec.policies:  # tokens that a workflow did not get from our engines belong to what is served
            serving = self._models[policy].serving
            if serving is not None:
                out.setdefault(policy, serving.timeline)
        return out

    def _group_metrics(self, members: list[Member], seconds: float) -> dict[str, float]:
        mean = Mean()
        for member in members:
            calls = member.episode.calls
            mean.add("rollout/calls", len(calls))
            mean.add("rollout/new_tokens", sum(len(call.response.output_ids) for call in calls))
            mean.add("raas/engine_s", member.episode.engine_s)
            for name, value in member.result.metrics.items() if member.result else ():
                mean.add(name if name.startswith("rollout/") else f"rollout/{name}", value)
        out = {"raas/group_s": seconds, **mean.take()}
        for name, value in out.items():
            self.means.add(name, value)
        return out

    # --- records --------------------------------------------------------------------------------------------------------

    async def _record(self, lease: Lease, program: Program, members: list[Member]) -> None:
        if not self._records.keep:
            return
        if self._writes >= RECORD_WRITES:
            self.counts.add("raas/records_left_out", len(members))
            return
        self._writes += 1
        try:
            await asyncio.to_thread(self._write_records, lease, program, members)
        finally:
            self._writes -= 1

    def _write_records(self, lease: Lease, program: Program, members: list[Member]) -> None:
        """In a thread: decoding and the disk."""
        records = {}
        for member in members:
            trajectory = member.trajectory
            assert trajectory is not None
            records[trajectory.record_ref] = {
                "ref": trajectory.record_ref,
                "instance_id": self.instance_id,
                "lease_id": lease.lease_id,
                "attempt": lease.attempt,
                "task_id": lease.task_id,
                "index": trajectory.index,
                "workflow": program.spec.workflow,
                "data": lease.data,
                "reward": trajectory.reward,
                "finish": trajectory.finish,
                "error": None
                if trajectory.error is None
                else {"boundary": trajectory.error.boundary, "kind": trajectory.error.kind, "message": trajectory.error.message},
                "turns": member.result.record if member.result else [],
                "calls": [self._call_text(call.policy, call.input_ids, call.response) for call in member.episode.calls],
                "segments": [spans(segment, self._token_text) for segment in trajectory.segments],
            }
        self._records.save(records)

    def _token_text(self, policy: str, ids: Sequence[int]) -> str:
        return self._models[policy].tokenizer.decode(ids, skip_special=False)

    def _call_text(self, policy: str, input_ids: list[int], response: Any) -> dict[str, Any]:
        decode = self._models[policy].tokenizer.decode
        return {
            "policy": policy,
            "prompt": decode(input_ids),
            "answer": decode(response.output_ids),
            "prompt_tokens": len(input_ids),
            "new_tokens": len(response.output_ids),
            "finish": response.finish,
            "versions": [min(response.versions), max(response.versions)] if response.versions else [],
            "timeline": response.timeline,
        }
