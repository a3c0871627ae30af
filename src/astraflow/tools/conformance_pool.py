"""A rollout service as `astraflow conformance dataflow` plays it: it runs nothing, keeps a diary, and can be told to go wrong."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from astraflow.lib.wire import Handler
from astraflow.protocol import codec, control, rollout, weights
from astraflow.protocol.errors import Unavailable, UnknownName
from astraflow.protocol.message import Empty

PROMPT, ANSWER = 3, 5
"""Tokens of a trajectory."""
Damage = Literal["logprob is NaN", "a column is short", "the versions are not those of the tokens", "another task"]
DAMAGES: tuple[Damage, ...] = ("logprob is NaN", "a column is short", "the versions are not those of the tokens", "another task")


def make_group(lease: rollout.Lease, policies: list[str], serving: dict[str, rollout.Serving]) -> rollout.Group:
    """n trajectories of one segment per policy, stamped with what is served; every other one is right."""
    dice = random.Random(f"{lease.lease_id} {lease.attempt}")
    own = [0] * PROMPT + [1] * ANSWER

    def segment(policy: str) -> rollout.Segment:
        logprobs = np.array([0.0] * PROMPT + [-2.0 - 2.0 * dice.random() for _ in range(ANSWER)], dtype=np.float32)
        return rollout.Segment(
            policies=[policy],
            input_ids=codec.column([dice.randrange(3, 20) for _ in own], "int32"),
            loss_mask=codec.column(own, "uint8"),
            logprobs=codec.column(logprobs, "float32"),
            versions=codec.column([serving[policy].version if mine else -1 for mine in own], "int32"),
        )

    return rollout.Group(
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        task_id=lease.task_id,
        versions={p: rollout.VersionSpan(timeline=serving[p].timeline, min=serving[p].version, max=serving[p].version) for p in policies},
        trajectories=[
            rollout.Trajectory(index=index, segments=[segment(policy) for policy in policies], reward=float(index % 2))
            for index in range(lease.n_samples)
        ],
    )


def damage(group: rollout.Group, how: Damage) -> None:
    """Make it one that Dataflow has to refuse at its door."""
    segment = group.trajectories[-1].segments[-1]
    if how == "logprob is NaN":
        segment.logprobs = codec.column(np.full(PROMPT + ANSWER, np.nan, dtype=np.float32), "float32")
    elif how == "a column is short":
        segment.loss_mask = codec.column([1, 1], "uint8")
    elif how == "another task":
        group.task_id += "-of-another-lease"
    else:
        span = next(iter(group.versions.values()))
        span.max += 1


@dataclass
class PlayedRaaS:
    """Groups are made at once, unless `held`."""

    instance_id: str
    models: list[str]
    slots: int
    held: bool = False
    """Leases are taken and never finished."""
    damages: list[Damage] = field(default_factory=list)
    """One of the next groups each."""
    lose_replies: int = 0
    """Pull replies that never arrive."""
    copies: int = 0
    """Acknowledged results that come a second time, under another delivery id."""
    fail_loads: int = 0
    """Notices that are answered with `failed`."""
    diary: list[tuple[str, Any]] = field(default_factory=list)
    """Calls in their order: (route, message)."""
    serving: dict[str, rollout.Serving] = field(default_factory=dict)
    workflows: dict[str, rollout.WorkflowSpec] = field(default_factory=dict)
    running: dict[str, rollout.Lease] = field(default_factory=dict)
    """Held, by id."""
    outbox: dict[str, rollout.Delivery] = field(default_factory=dict)
    groups: dict[str, rollout.Group] = field(default_factory=dict)
    """Good groups ever made, by lease."""
    bad: dict[str, Damage] = field(default_factory=dict)
    """Damaged ones."""
    given: set[str] = field(default_factory=set)
    """Delivery ids that were in an answer that arrived."""
    acked: set[str] = field(default_factory=set)
    unknown_acks: list[str] = field(default_factory=list)
    """Acknowledged although never handed out."""
    copied: dict[str, str] = field(default_factory=dict)
    """Delivery id of a second copy → lease."""
    overfull: str = ""
    """Set when more was submitted than there was room for."""
    ended: bool = False
    _names: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Delivery id → (lease, attempt)."""
    _count: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def handlers(self) -> dict[str, Handler]:
        """Route name → handler."""
        names = "status availability register_workflow submit pull leases cancel notify_version shutdown media record"
        found: dict[str, Handler] = {name: getattr(self, name) for name in names.split()}
        return found | {
            "reset_training_engine": self._reset, "eval_start": self._done, "eval_submit": self.submit, "eval_pull": self.pull,
            "eval_end": self._done,
        }  # fmt: skip

    @property
    def in_flight(self) -> int:
        return sum(lease.n_samples for lease in self.running.values())

    def delivered(self, lease_id: str) -> set[str]:
        """Delivery ids of a lease, those of the past included."""
        return {name for name, (lease, _) in self._names.items() if lease == lease_id}

    async def availability(self, request: Empty) -> control.Availability:
        free = max(0, self.slots - self.in_flight)
        return control.Availability(total_slots=self.slots, free_slots=free, in_flight=self.in_flight, outbox=len(self.outbox))

    async def status(self, request: Empty) -> control.RaaSStatus:
        return control.RaaSStatus(
            instance_id=self.instance_id, state="ready", availability=await self.availability(request), models=self.models,
            serving=self.serving, engines={}, workflows=list(self.workflows),
        )  # fmt: skip

    async def register_workflow(self, request: rollout.RegisterWorkflow) -> rollout.RegisterWorkflowReply:
        self.diary.append(("register_workflow", request))
        self.workflows[request.workflow_id] = request.spec
        return rollout.RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self.workflows))

    async def submit(self, request: rollout.Submit) -> rollout.SubmitReply:
        self.diary.append(("submit", request))
        verdicts = []
        for lease in request.leases:
            known = lease.lease_id in self.running or any(named == (lease.lease_id, lease.attempt) for named in self._names.values())
            if not known:
                if self.in_flight + lease.n_samples > self.slots:
                    taken = f"while {self.in_flight} of {self.slots} slots are taken"
                    self.overfull = f"lease {lease.lease_id}: {lease.n_samples} samples {taken}"
                self.running[lease.lease_id] = lease
                if not self.held:
                    self.finish(lease)
            verdicts.append(rollout.LeaseVerdict(lease_id=lease.lease_id, verdict="duplicate" if known else "accepted"))
        return rollout.SubmitReply(verdicts=verdicts, free_slots=max(0, self.slots - self.in_flight), serving=self.serving)

    def finish(self, lease: rollout.Lease) -> None:
        """The lease is done: its group goes to the outbox."""
        spec = self.workflows.get(lease.workflow_id)
        group = make_group(lease, spec.policies if spec else self.models, self.serving)
        if self.damages:
            self.bad[lease.lease_id] = self.damages[0]
            damage(group, self.damages.pop(0))
        else:
            self.groups[lease.lease_id] = group
        del self.running[lease.lease_id]
        self._put(lease.lease_id, lease.attempt, codec.encode(group))

    def _put(self, lease_id: str, attempt: int, group: bytes) -> str:
        self._count += 1
        name = f"{self.instance_id}-{self._count}"
        self._names[name] = (lease_id, attempt)
        self.outbox[name] = rollout.Delivery(delivery_id=name, lease_id=lease_id, attempt=attempt, group=msgspec.Raw(group))
        self._news.set()
        return name

    async def pull(self, request: rollout.Pull) -> rollout.PullReply:
        self.unknown_acks += [name for name in request.ack if name not in self.given]
        for name in request.ack:
            self.acked.add(name)
            gone = self.outbox.pop(name, None)
            if gone is not None and self.copies and gone.lease_id in self.groups:
                self.copies -= 1
                self.copied[self._put(gone.lease_id, gone.attempt, bytes(gone.group))] = gone.lease_id
        end = asyncio.get_running_loop().time() + min(request.wait_s, 30.0)
        while not self.outbox and not self.ended and (left := end - asyncio.get_running_loop().time()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                break
        found = list(self.outbox.values())[: request.max_items]
        if found and self.lose_replies:
            self.lose_replies -= 1
            raise Unavailable("this reply was lost on its way")
        self.given.update(delivery.delivery_id for delivery in found)
        return rollout.PullReply(
            deliveries=found, free_slots=max(0, self.slots - self.in_flight), in_flight=self.in_flight,
            waiting=len(self.outbox) - len(found), serving=self.serving,
        )  # fmt: skip

    async def leases(self, request: Empty) -> rollout.Leases:
        running = [rollout.HeldLease(lease_id=lease.lease_id, attempt=lease.attempt, state="running") for lease in self.running.values()]
        done = [rollout.HeldLease(lease_id=d.lease_id, attempt=d.attempt, state="done") for d in self.outbox.values()]
        return rollout.Leases(held=running + done)

    async def cancel(self, request: rollout.CancelLeases) -> Empty:
        self.diary.append(("cancel", request))
        for lease_id in request.lease_ids:
            self.running.pop(lease_id, None)
        self.outbox = {name: delivery for name, delivery in self.outbox.items() if delivery.lease_id not in request.lease_ids}
        return Empty()

    async def notify_version(self, request: weights.NotifyRaaS) -> weights.NotifyRaaSReply:
        self.diary.append(("notify_version", request))
        if self.fail_loads:
            self.fail_loads -= 1
            return weights.NotifyRaaSReply(state="failed", message="this load was to fail", serving=self.serving)
        receipt = rollout.Serving(timeline=request.timeline, version=request.version, digest=request.digest)
        self.serving = {**self.serving, request.model_id: receipt}
        return weights.NotifyRaaSReply(state="loaded", serving=self.serving)

    async def shutdown(self, request: control.Shutdown) -> Empty:
        self.ended = True
        self._news.set()
        return Empty()

    async def media(self, ref: str) -> bytes:
        raise UnknownName(f"{ref!r}: nothing is kept here")

    record = media

    async def _done(self, request: Any) -> Empty:
        return Empty()

    async def _reset(self, request: rollout.ResetEngine) -> rollout.ResetEngineReply:
        return rollout.ResetEngineReply(cancelled=[])
