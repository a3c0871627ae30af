"""A simulated rollout service: the contract of `raas`, with its real slot book, outbox and lanes; episodes and loads only take time.

Every sampled token carries a mark of the weights that sampled it, so that the trainer can tell whether its own history made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import xxhash

from astraflow.lib.wire import Handler, Identity
from astraflow.lib.wire_client import Caller
from astraflow.protocol import codec
from astraflow.protocol.control import Availability, DeregisterRaaS, RaaSStatus, RegisterRaaS, Shutdown
from astraflow.protocol.errors import AstraFlowError, Unavailable, UnknownName
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.rollout import (
    CancelLeases,
    EvalEnd,
    EvalStart,
    Group,
    HeldLease,
    Lease,
    Leases,
    Pull,
    PullReply,
    RegisterWorkflow,
    RegisterWorkflowReply,
    ResetEngine,
    ResetEngineReply,
    RolloutError,
    Segment,
    Serving,
    Submit,
    SubmitReply,
    Trajectory,
    VersionSpan,
)
from astraflow.protocol.routes import DataflowAPI
from astraflow.protocol.weights import NotifyRaaS, NotifyRaaSReply
from astraflow.raas.lanes import Lanes, same_weights
from astraflow.raas.outbox import Outbox
from astraflow.raas.slots import Held, SlotBook

OUTBOX_GROUPS = 6
SILENCE_S = 8.0
TOKENS = 4
EVAL_MARK = 7
"""First sampled token of every evaluation rollout; none of them may ever be trained on."""


@lru_cache(maxsize=256)
def mark(digest: str) -> int:
    """A token id that names weights."""
    return 1000 + xxhash.xxh3_64_intdigest(digest.encode()) % 1_000_000_000


class Chances(Protocol):
    """What the world decides for an instance."""

    def seconds(self, what: str) -> float: ...

    def mishap(self, what: str) -> bool: ...

    def number(self, what: str, below: int) -> int: ...

    def published(self, sender: str, version: int) -> str | None:
        """Digest of what this sender serves under this version; None = it does not."""
        ...

    def accepted(self, instance: SimRaaS, lease: Lease) -> None: ...

    def acknowledged(self, lease_id: str, attempt: int, lane: str) -> None: ...

    def serves(self, instance: SimRaaS) -> None:
        """It loaded something."""
        ...


class SimRaaS:
    """One life of one instance."""

    def __init__(
        self,
        instance_id: str,
        url: str,
        identity: Identity,
        policies: tuple[str, ...],
        slots: int,
        chances: Chances,
        connect: Callable[[], Caller],
        spawn: Callable[[Any, str], asyncio.Task[Any]],
    ) -> None:
        self.instance_id, self.url, self.identity, self.policies = instance_id, url, identity, policies
        self.slots = SlotBook(slots, OUTBOX_GROUPS)
        self.outbox = Outbox(identity.incarnation)
        self.lanes = Lanes()
        self.serving: dict[str, Serving] = {}
        self.was_current = False
        """It served the newest weights of all its models at least once."""
        self.draining = False
        self.ended = asyncio.Event()
        self._chances, self._connect, self._spawn = chances, connect, spawn
        self._clock = asyncio.get_running_loop().time
        self._workflows: set[str] = set()
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._timelines: dict[str, int] = {}
        """Newest timeline that was announced, per model."""
        self._wanted: dict[str, NotifyRaaS] = {}
        self._loading: dict[str, asyncio.Task[Any]] = {}
        self._news, self._turned = asyncio.Event(), asyncio.Event()
        self._known = ""
        self._lost = asyncio.Event()
        self._last_heard = 0.0

    # --- life -----------------------------------------------------------------------------------------------------------

    async def register_loop(self) -> None:
        """Register, again when Dataflow is a new process, again when it has been silent."""
        client, pause = self._connect(), 0.1
        while not self.ended.is_set() and not self.draining:
            if not self._known:
                self._lost.clear()
                message = RegisterRaaS(
                    instance_id=self.instance_id, url=self.url, models=list(self.policies), total_slots=self.slots.total_slots
                )
                try:
                    self._known = (await client.call(DataflowAPI.register_raas, message, timeout_s=3.0)).incarnation
                    pause, self._last_heard = 0.1, self._clock()
                except AstraFlowError:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 1.0)
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await self._lost.wait()
                    self._known = ""
                    continue
            if self._last_heard + SILENCE_S <= self._clock():
                self._known = ""

    def _heard(self, request: Message, only_dataflow: bool) -> None:
        if request.incarnation == self._known:
            self._last_heard = self._clock()
        elif only_dataflow:
            for lane in self.lanes.orphans(request.incarnation):
                self._close_lane(lane, "Dataflow was restarted")
            if self._known:
                self._lost.set()

    async def drain(self, deadline_s: float) -> None:
        """Leave: take nothing new, finish, hand out, end."""
        self.draining = True
        end = self._clock() + deadline_s
        with contextlib.suppress(AstraFlowError):
            await self._connect().call(DataflowAPI.deregister_raas, DeregisterRaaS(instance_id=self.instance_id), timeout_s=3.0)
        while (self.slots.in_flight or len(self.outbox)) and self._clock() < end:
            await asyncio.sleep(0.2)
        self.ended.set()

    # --- what is asked --------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """Route name → handler."""

        async def missing(ref: str) -> bytes:
            raise UnknownName(f"{ref!r}: nothing is kept here")

        def from_dataflow(handler: Callable[[Any], Awaitable[Any]]) -> Handler:
            async def heard(request: Any) -> Any:
                self._heard(request, True)
                return await handler(request)

            return heard

        own = ("register_workflow", "submit", "pull", "leases", "cancel", "notify_version", "reset_training_engine")
        lane: dict[str, Handler] = {
            "eval_start": self._eval_start,
            "eval_submit": self._submit,
            "eval_pull": self._pull,
            "eval_end": self._eval_end,
        }
        table: dict[str, Handler] = {name: from_dataflow(getattr(self, f"_{name}")) for name in own}
        table |= {name: from_dataflow(handler) for name, handler in lane.items()}
        return table | {
            "status": self._status, "availability": self._availability, "shutdown": self._shutdown, "media": missing, "record": missing,
        }  # fmt: skip

    async def _availability(self, request: Empty) -> Availability:
        self._heard(request, False)
        slots = self.slots
        return Availability(total_slots=slots.total_slots, free_slots=slots.free_slots, in_flight=slots.in_flight, outbox=len(self.outbox))

    async def _status(self, request: Empty) -> RaaSStatus:
        return RaaSStatus(
            instance_id=self.instance_id, state="draining" if self.draining else "ready", availability=await self._availability(request),
            models=list(self.policies), serving=self.serving, engines={}, workflows=sorted(self._workflows), lanes=self.lanes.names,
        )  # fmt: skip

    async def _register_workflow(self, request: RegisterWorkflow) -> RegisterWorkflowReply:
        self._workflows.add(request.workflow_id)
        return RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self._workflows))

    async def _shutdown(self, request: Shutdown) -> Empty:
        self.ended.set()
        return Empty()

    # --- leases ---------------------------------------------------------------------------------------------------------

    def _refusal(self, lease: Lease) -> str:
        if self.draining:
            return "draining"
        if lease.workflow_id not in self._workflows:
            return "unknown workflow"
        for policy in self.policies:
            if policy not in self.serving:
                return f"{policy} serves no weights yet"
            if self._timelines.get(policy, 0) > self.serving[policy].timeline:
                return f"{policy} rolls back"
        return ""

    async def _submit(self, request: Submit) -> SubmitReply:
        if request.lane:
            self.lanes.check(request.lane)
        verdicts = []
        for lease in request.leases:
            verdict = self.slots.offer(lease, request.lane, self._refusal(lease))
            if verdict.verdict == "accepted":
                if not request.lane:
                    self._chances.accepted(self, lease)
                self._stop(lease.lease_id)
                self._running[lease.lease_id] = self._spawn(self._work(self.slots.ticket(lease.lease_id)), f"lease {lease.lease_id}")
            verdicts.append(verdict)
        return SubmitReply(verdicts=verdicts, free_slots=self.slots.free_slots, serving=self.serving)

    async def _work(self, held: Held) -> None:
        before = dict(self.serving)
        await asyncio.sleep(self._chances.seconds("episode"))
        after = {p: s if s.timeline == before[p].timeline else before[p] for p, s in self.serving.items()}
        group = self._group(held, before, after)
        if self.slots.group_done(held):
            timelines = {policy: serving.timeline for policy, serving in before.items()}
            self.outbox.put(held.lease.lease_id, held.lease.attempt, codec.encode(group), timelines, held.lane)
            self._tell()

    def _group(self, held: Held, before: dict[str, Serving], after: dict[str, Serving]) -> Group:
        lease, chances = held.lease, self._chances
        trajectories = []
        for index in range(lease.n_samples):
            if chances.mishap("episode"):
                error = RolloutError(boundary="tool", kind="timeout")
                trajectories.append(Trajectory(index=index, error=error, finish="error"))
                continue
            segments = [segment(policy, before[policy], after[policy], bool(held.lane)) for policy in self.policies]
            reward = None if chances.mishap("reward") else float(chances.number("reward", 3))
            trajectories.append(Trajectory(index=index, segments=segments, reward=reward))
        spans = {
            policy: VersionSpan(timeline=before[policy].timeline, min=before[policy].version, max=after[policy].version)
            for policy in self.policies
            if any(trajectory.segments for trajectory in trajectories)
        }
        if chances.mishap("group"):
            spans = {policy: VersionSpan(timeline=0, min=77, max=77) for policy in self.policies}  # malformed: refused at the door
        return Group(lease_id=lease.lease_id, attempt=lease.attempt, task_id=lease.task_id, versions=spans, trajectories=trajectories)

    def _stop(self, lease_id: str) -> None:
        self.outbox.drop_leases({lease_id})
        task = self._running.pop(lease_id, None)
        if task is not None:
            task.cancel()
        self._tell()

    def _forget(self, lease_ids: list[str]) -> None:
        for lease_id in lease_ids:
            self.slots.forget(lease_id)
            self._stop(lease_id)

    async def _pull(self, request: Pull) -> PullReply:
        for delivery in self.outbox.acknowledge(request.ack):
            self.slots.acknowledged(delivery.lease_id, delivery.attempt)
            self._chances.acknowledged(delivery.lease_id, delivery.attempt, request.lane)
        end = self._clock() + request.wait_s
        while True:
            if request.lane:
                self.lanes.check(request.lane)
            deliveries, waiting = self.outbox.pull(request.lane, request.max_items)
            if deliveries or (left := end - self._clock()) <= 0:
                return PullReply(
                    deliveries=deliveries, free_slots=self.slots.free_slots, in_flight=self.slots.in_flight, waiting=waiting,
                    serving=self.serving,
                )  # fmt: skip
            await _wait(self._news, left)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _leases(self, request: Empty) -> Leases:
        held: list[HeldLease] = self.slots.listing()
        return Leases(held=held)

    async def _cancel(self, request: CancelLeases) -> Empty:
        self._forget(request.lease_ids)
        return Empty()

    async def _reset_training_engine(self, request: ResetEngine) -> ResetEngineReply:
        mine = self.slots.select(lane="", running_only=True)
        self._forget(mine)
        return ResetEngineReply(cancelled=mine)

    # --- weights --------------------------------------------------------------------------------------------------------

    async def _notify_version(self, request: NotifyRaaS) -> NotifyRaaSReply:
        model = request.model_id
        serving, newest = self.serving.get(model), self._timelines.get(model, -1)
        named = Serving(timeline=request.timeline, version=request.version, digest=request.digest)
        ahead = serving is not None and serving.timeline == request.timeline and serving.version > request.version
        if request.timeline < newest or ahead or same_weights(serving, named):
            return NotifyRaaSReply(state="current", serving=self.serving)
        self._timelines[model] = request.timeline
        if request.timeline > newest >= 0:
            self._forget([*self.slots.select(lane="", running_only=True), *self.outbox.of_dead_timeline(model, request.timeline)])
        wanted = self._wanted.get(model)
        if wanted is None or (wanted.timeline, wanted.version) <= (request.timeline, request.version):
            self._wanted[model] = request
        if model not in self._loading or self._loading[model].done():
            self._loading[model] = self._spawn(self._load(model), f"load {model}")
        end = self._clock() + request.wait_s
        while not self._loading[model].done() and not self._reached(model, named) and (left := end - self._clock()) > 0:
            await _wait(self._turned, left)
        if self._reached(model, named):
            return NotifyRaaSReply(state="loaded", serving=self.serving)
        return NotifyRaaSReply(state="failed" if self._loading[model].done() else "loading", serving=self.serving)

    def _reached(self, model: str, wanted: Serving) -> bool:
        serving = self.serving.get(model)
        newer = serving is not None and (serving.timeline, serving.version) > (wanted.timeline, wanted.version)
        return newer or same_weights(serving, wanted)

    async def _load(self, model: str) -> None:
        while (notice := self._wanted.pop(model, None)) is not None:
            await self._lanes_idle()
            await asyncio.sleep(self._chances.seconds("pull"))
            digest = self._chances.published(notice.sender_endpoint, notice.version)
            await self._lanes_idle()
            right = digest is not None and digest == notice.digest and notice.timeline == self._timelines[model]
            if right and not self._chances.mishap("load"):
                assert digest is not None
                self.serving = {**self.serving, model: Serving(timeline=notice.timeline, version=notice.version, digest=digest)}
                self._chances.serves(self)
            self._turn()
        self._turn()

    def _turn(self) -> None:
        self._turned.set()
        self._turned = asyncio.Event()

    # --- lanes ----------------------------------------------------------------------------------------------------------

    async def _lanes_idle(self) -> None:
        while self.lanes.names:
            await _wait(self._turned, 0.5)

    async def _eval_start(self, request: EvalStart) -> Empty:
        if self.draining:
            raise Unavailable("draining")
        self.lanes.open(request.lane, request.versions, request.deadline_s, self.serving, self._clock(), request.incarnation)
        self._spawn(self._watch_lanes(), "lanes")
        return Empty()

    async def _watch_lanes(self) -> None:
        while self.lanes.names:
            await asyncio.sleep(0.5)
            for lane, reason in self.lanes.due(self.serving, self._clock()):
                self._close_lane(lane, reason)

    async def _eval_end(self, request: EvalEnd) -> Empty:
        self._close_lane(request.lane, "ended")
        return Empty()

    def _close_lane(self, lane: str, reason: str) -> None:
        if self.lanes.close(lane, reason):
            self._forget(self.slots.select(lane=lane))
            self._turn()


MASK = codec.column([0, 0] + [1] * TOKENS, "uint8")
LOGPROBS = codec.column(np.array([0, 0] + [-1] * TOKENS, dtype=np.float32), "float32")


def segment(policy: str, before: Serving, after: Serving, evaluation: bool) -> Segment:
    """Two prompt tokens and four sampled ones, half of them before a load that came in between."""
    half = TOKENS // 2
    sampled = [mark(before.digest)] * half + [mark(after.digest)] * half
    if evaluation:
        sampled[0] = EVAL_MARK
    return Segment(
        policies=[policy],
        input_ids=_ints((1, 2, *sampled)),
        loss_mask=MASK,
        logprobs=LOGPROBS,
        versions=_ints((-1, -1, *[before.version] * half, *[after.version] * half)),
    )


@lru_cache(maxsize=256)
def _ints(values: tuple[int, ...]) -> codec.Column:
    return codec.column(list(values), "int32")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
