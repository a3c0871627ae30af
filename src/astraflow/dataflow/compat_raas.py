"""A rollout service of the old wire, as the pool sees it: a caller of our routes that says them in pickle (`compat`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import numpy as np

from astraflow.dataflow.admission import segments_of
from astraflow.dataflow.columns import Columns
from astraflow.dataflow.compat import PICKLE, POLL_S, Values, field, pickled, unpickled
from astraflow.dataflow.config import OLD_WIRE, DataflowProcess
from astraflow.protocol import codec, control, rollout, weights
from astraflow.protocol.errors import AstraFlowError, BadMessage, Conflict, DeadlinePassed, RemoteError, Unavailable
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.routes import Route

LOAD_S = 600.0
"""Longest call to an old service: it answers /notify_version when it has loaded."""


@dataclasses.dataclass(eq=False)
class Job:
    """One lease: tasks of the old service until there are n trajectories."""

    lease: rollout.Lease
    lane: str
    timelines: dict[str, int]
    since: float
    """Clock time of the last task."""
    open: int = 0
    """Tasks that run."""
    found: list[rollout.Trajectory] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def missing(self) -> int:
        return self.lease.n_samples - len(self.found)


class OldRaaS:
    """A `Caller`: our calls, said to one rollout service of the old wire. Leases, deliveries and receipts, which it does not know,
    are kept here."""

    def __init__(self, url: str, process: DataflowProcess) -> None:
        base, _, uid = url.removeprefix(OLD_WIRE).partition("#")
        self.url, self._base, self.uid, self._process = url, base.rstrip("/"), unquote(uid), process
        self.renew()

    def renew(self) -> None:
        """Another process registered there, or the first one: nothing runs."""
        self.incarnation = secrets.token_hex(8)
        self.models, self.slots = list(self._process.models), self._process.workflow.n_samples
        self._serving: dict[str, rollout.Serving] = {}
        self._specs: dict[str, rollout.WorkflowSpec] = {}
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[tuple[str, int], Job] = {}
        self._yield: dict[str, int] = {}
        """Workflow → trajectories of one of its tasks; known after the first one."""
        self._outbox: dict[str, tuple[rollout.Delivery, str]] = {}
        self._loads: dict[str, tuple[rollout.Serving, asyncio.Task[str]]] = {}
        self._lane, self._doubt, self._lock = "", False, asyncio.Lock()
        """A result is looked for only when the task that it belongs to is known; doubt = results may have been lost."""

    async def call(self, route: Route[Any, Any], request: Any = None, *, timeout_s: float, ref: str = "") -> Any:
        """The same errors as `lib.wire_client.Client`."""
        try:
            async with asyncio.timeout(timeout_s):
                reply: Message = await getattr(self, f"_{route.path[1:]}")(request or route.request())
        except TimeoutError:
            raise DeadlinePassed(f"{route.path} at {self.url}: no answer within {timeout_s:g} s") from None
        reply.incarnation = self.incarnation
        return reply

    async def close(self) -> None:
        """Connections last for one call, as in the old wire."""

    async def _ask(self, path: str, message: dict[str, Any] | None = None) -> Any:
        where = f"{path} at {self.url}"
        try:
            async with httpx.AsyncClient(timeout=LOAD_S, trust_env=False, verify=self._base.startswith("https:")) as client:
                if message is None:
                    return codec.decode_json((await client.get(self._base + path)).raise_for_status().content, dict)
                response = await client.post(self._base + path, content=pickled(message), headers={"content-type": PICKLE})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"{where}: {str(error) or type(error).__name__}") from None
        answer = await asyncio.to_thread(unpickled, response.content, where)
        if answer.get("ok") is not True:
            raise RemoteError(f"{where}: {answer.get('error')!s:.300}")
        return answer.get("result")

    def _free(self) -> int:
        return self.slots - sum(job.lease.n_samples for job in self._jobs.values())

    async def _status(self, request: Empty) -> control.RaaSStatus:
        found = await self._ask("/status")
        state, models, slots = found.get("status"), found.get("models"), found.get("max_concurrency")
        if isinstance(models, list) and models:
            self.models = [str(name) for name in models]
        if isinstance(slots, int):  # it queues what it cannot run at once, so that a group always has room
            self.slots = max(slots, self._process.workflow.n_samples)
        return control.RaaSStatus(
            instance_id=self.uid,
            state=state if state in ("ready", "idle", "error") else "starting",
            message=str(found.get("message") or "")[:200],
            availability=control.Availability(
                total_slots=self.slots, free_slots=self._free(), in_flight=self.slots - self._free(), outbox=len(self._outbox)
            ),
            models=self.models,
            serving=self._serving,
            engines={},
            workflows=list(self._specs),
            lanes=[self._lane] if self._lane else [],
        )

    async def _register_workflow(self, request: rollout.RegisterWorkflow) -> rollout.RegisterWorkflowReply:
        if not self._specs:  # it may hold what an earlier Dataflow gave it
            for path in ("/reset_training_engine", "/eval_end"):
                with contextlib.suppress(RemoteError):
                    await self._ask(path, {"timeout": 1.0})
        spec = request.spec
        names = {"workflow_id": request.workflow_id, "workflow_cls": spec.workflow, "reward_fn": spec.reward or None}
        options = {"gconfig_overrides": spec.generation or None, "workflow_kwargs": spec.options}
        await self._ask("/register_workflow", names | options)
        self._specs[request.workflow_id] = spec
        return rollout.RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self._specs))

    async def _submit(self, request: rollout.Submit) -> rollout.SubmitReply:
        verdicts = []
        for lease in request.leases:
            word: Any = "accepted"
            held = self._jobs.get(lease.lease_id)
            if (held is not None and held.lease.attempt == lease.attempt) or f"{lease.lease_id}/{lease.attempt}" in self._outbox:
                word = "duplicate"
            elif lease.workflow_id not in self._specs:
                word = "refused"
            elif self._free() < lease.n_samples:
                word = "over_capacity"
            else:
                lines = {model_id: held_now.timeline for model_id, held_now in self._serving.items()}
                job = self._jobs[lease.lease_id] = Job(lease, request.lane, lines, time.monotonic())
                await self._send(job, lease.n_samples)
            verdicts.append(rollout.LeaseVerdict(lease_id=lease.lease_id, verdict=word))
        return rollout.SubmitReply(verdicts=verdicts, free_slots=self._free(), serving=self._serving)

    _eval_submit = _submit

    async def _send(self, job: Job, one: int) -> None:
        """Tasks for what is missing; `one` = trajectories of a task as long as that is not known."""
        path, lease = "/eval_submit" if job.lane else "/submit", job.lease
        message = {"data": lease.data, "workflow_id": lease.workflow_id}
        count = -(-job.missing // self._yield.get(lease.workflow_id, one))
        try:
            async with self._lock:
                for answer in await asyncio.gather(*(self._ask(path, message) for _ in range(count))):
                    self._tasks[(job.lane, field(answer, "task_id", int, f"{path} at {self.url}"))] = job
                    job.open, job.since = job.open + 1, time.monotonic()
        except BaseException:
            self._drop([lease.lease_id])  # its tasks are nobody's now; the lease is issued again
            raise

    def _drop(self, lease_ids: Iterable[str]) -> None:
        gone = [job for lease_id in lease_ids if (job := self._jobs.pop(lease_id, None)) is not None]
        self._tasks = {key: job for key, job in self._tasks.items() if job not in gone}

    async def _pull(self, request: rollout.Pull) -> rollout.PullReply:
        for delivery_id in request.ack:
            self._outbox.pop(delivery_id, None)
        end = time.monotonic() + request.wait_s
        while True:
            mine = [delivery for delivery, lane in self._outbox.values() if lane == request.lane]
            if mine or (left := end - time.monotonic()) <= 0:
                break
            running = [job for job in self._jobs.values() if job.lane == request.lane]
            for job in running:
                if time.monotonic() - job.since > job.lease.deadline_s:
                    job.found += [_failed("timeout", "no result within the lease's deadline")] * job.missing
                    self._finish(job)
            if not running or not await self._poll(request.lane):
                await asyncio.sleep(min(left, POLL_S))
        busy, mine = self.slots - self._free(), mine[: request.max_items]
        return rollout.PullReply(deliveries=mine, free_slots=self._free(), in_flight=busy, waiting=0, serving=self._serving)

    _eval_pull = _pull

    async def _poll(self, lane: str) -> int:
        """Take what is done. Returns how many tasks."""
        async with self._lock:
            before, self._doubt = self._doubt, True  # whatever ends this call before its answer may lose results
            items = await self._ask("/eval_pull" if lane else "/pull", {"max_items": 256, "timeout": POLL_S})
            self._doubt = before
        items = items.get("items", []) if isinstance(items, dict) else items
        for item in items:
            job = self._tasks.pop((lane, item["task_id"]), None)
            if job is not None and self._jobs.get(job.lease.lease_id) is job:
                await self._came(job, item.get("result"))
        return len(items)

    async def _came(self, job: Job, result: Any) -> None:
        workflow_id, spec = job.lease.workflow_id, self._specs[job.lease.workflow_id]
        found = await asyncio.to_thread(trajectories, result, spec)
        if found[0].error is None and found[0].finish != "rejected":
            self._yield[workflow_id] = len(found)
            job.metrics = {str(k): float(v) for k, v in (result.get("agent_metrics") or {}).items() if isinstance(v, int | float)}
        job.open -= 1
        job.found += found[: job.missing]
        if not job.missing:
            self._finish(job)
        elif not job.open:
            await self._send(job, 1)

    def _finish(self, job: Job) -> None:
        lease, key = job.lease, f"{job.lease.lease_id}/{job.lease.attempt}"
        for index, trajectory in enumerate(job.found):
            job.found[index] = msgspec.structs.replace(trajectory, index=index)
        group = rollout.Group(
            lease_id=lease.lease_id, attempt=lease.attempt, task_id=lease.task_id, versions={}, trajectories=job.found, metrics=job.metrics
        )
        columns = Columns(segments_of(group))
        for policy in columns.policies:
            if any((span := columns.spans(policy)).counts):
                low, high = min(span.low), max(span.high)
                group.versions[policy] = rollout.VersionSpan(timeline=job.timelines.get(policy, 0), min=low, max=high)
        delivery = rollout.Delivery(
            delivery_id=key, lease_id=lease.lease_id, attempt=lease.attempt, group=msgspec.Raw(codec.encode(group))
        )
        self._drop([lease.lease_id])
        self._outbox[key] = (delivery, job.lane)

    async def _leases(self, request: Empty) -> rollout.Leases:
        if self._doubt and self._jobs:
            asked, now = time.monotonic(), await self._ask("/status")
            if not now.get("inflight") and not now.get("pending_futures"):
                for lane in {job.lane for job in self._jobs.values()}:
                    while await self._poll(lane):
                        pass
                self._drop([key for key, job in self._jobs.items() if job.open and job.since < asked])
                self._doubt = False
        running = [(job.lease.lease_id, job.lease.attempt, "running", job.lane) for job in self._jobs.values()]
        done = [(delivery.lease_id, delivery.attempt, "done", lane) for delivery, lane in self._outbox.values()]
        held = [rollout.HeldLease(lease_id=a, attempt=b, state=c, lane=d) for a, b, c, d in running + done]  # type: ignore[arg-type]
        return rollout.Leases(held=held)

    async def _cancel(self, request: rollout.CancelLeases) -> Empty:
        self._drop(request.lease_ids)  # the old wire cancels none by its name: it runs to its end there, and its result is left
        self._outbox = {key: item for key, item in self._outbox.items() if item[0].lease_id not in request.lease_ids}
        return Empty()

    async def _reset_training_engine(self, request: rollout.ResetEngine) -> rollout.ResetEngineReply:
        await self._ask("/reset_training_engine", {"timeout": request.deadline_s})
        cancelled = [key for key, job in self._jobs.items() if not job.lane]
        self._drop(cancelled)
        return rollout.ResetEngineReply(cancelled=cancelled)

    async def _eval_start(self, request: rollout.EvalStart) -> Empty:
        wanted = {model_id: msgspec.structs.replace(serving, digest="") for model_id, serving in request.versions.items()}
        if any(self._serving.get(model_id) != serving for model_id, serving in wanted.items()):
            raise Conflict(f"lane {request.lane}: {self.uid} serves other versions")
        if self._lane not in ("", request.lane):
            raise Conflict(f"lane {request.lane}: {self.uid} has the lane {self._lane}, and the old wire knows one at a time")
        await self._ask("/eval_start", {})
        self._lane, self._doubt = request.lane, True  # some old services cancel training tasks for it
        return Empty()

    async def _eval_end(self, request: rollout.EvalEnd) -> Empty:
        await self._ask("/eval_end", {})
        self._drop([key for key, job in self._jobs.items() if job.lane])
        self._lane = ""
        return Empty()

    async def _shutdown(self, request: control.Shutdown) -> Empty:
        await self._ask("/shutdown", {})
        return Empty()

    async def _notify_version(self, request: weights.NotifyRaaS) -> weights.NotifyRaaSReply:
        wanted, model_id = rollout.Serving(timeline=request.timeline, version=request.version, digest=""), request.model_id
        if model_id not in self._serving and (request.timeline, request.version) == (0, 0):
            self._serving[model_id] = wanted  # it begins with the first weights by itself
        if self._serving.get(model_id) == wanted:
            return weights.NotifyRaaSReply(state="current", serving=self._serving)
        if model_id not in self._loads or self._loads[model_id][0] != wanted:
            self._loads[model_id] = (wanted, asyncio.create_task(self._load(wanted, request)))
        load = self._loads[model_id][1]
        if not (await asyncio.wait({load}, timeout=request.wait_s))[0]:
            return weights.NotifyRaaSReply(state="loading", serving=self._serving)
        del self._loads[model_id]
        return weights.NotifyRaaSReply(state="failed" if load.result() else "loaded", message=load.result(), serving=self._serving)

    async def _load(self, wanted: rollout.Serving, request: weights.NotifyRaaS) -> str:
        """Returns what went wrong."""
        sender = request.sender_endpoint.partition("://")[2] or request.sender_endpoint
        message = {"model_id": request.model_id, "version": request.version, "sender_endpoint": sender}
        try:
            inner = await self._ask("/notify_version", message)
        except AstraFlowError as error:
            return str(error)
        if not inner.get("ok") or inner.get("version", wanted.version) != wanted.version:
            return f"it serves version {inner.get('version')}: {inner.get('reason') or inner.get('pull_result')!s:.200}"
        self._serving = {**self._serving, request.model_id: wanted}
        return ""


def trajectories(result: Any, spec: rollout.WorkflowSpec) -> list[rollout.Trajectory]:
    """What one task of the old wire gave, at least one; their indices are set later."""
    if result is None:
        return [rollout.Trajectory(index=0, finish="rejected")]
    try:
        if "trajectories" not in result:
            return [_failed("exception", str(result.get("error"))[:500])]
        rewards = [None if math.isnan(value) else float(value) for value in _row(result["rewards"])]
        temperature = float(spec.generation.get("temperature", 1.0))
        return [
            rollout.Trajectory(
                index=0, segments=[_segment(s, spec.policies, temperature) for s in found["sequences"]], reward=rewards[number]
            )
            for number, found in enumerate(result["trajectories"])
        ] or [_failed("malformed", "no trajectory")]  # fmt: skip
    except (LookupError, TypeError, ValueError, AttributeError, BadMessage) as error:
        return [_failed("malformed", f"{type(error).__name__}: {error}"[:500])]


def _failed(kind: str, message: str) -> rollout.Trajectory:
    error = rollout.RolloutError(boundary="workflow", kind=kind, message=message)
    return rollout.Trajectory(index=0, error=error, finish="error")


def _row(value: Any) -> Any:
    return (value.array if isinstance(value, Values) else np.asarray(value)).reshape(-1)


def _segment(sequence: Mapping[str, Any], policies: list[str], temperature: float) -> rollout.Segment:
    there = _row(sequence["attention_mask"]).astype(bool)
    rows = {name: _row(sequence[name])[there] for name in ("input_ids", "loss_mask", "logprobs", "versions")}
    own = rows["loss_mask"] != 0
    owners = _row(sequence["model_ids"])[there] if "model_ids" in sequence else np.zeros(len(own), np.int64)
    present = np.unique(owners[own]) if own.any() else np.array([0])
    names = [policies[index] for index in present if index >= 0]
    credit = _row(sequence["rewards"])[0] if "rewards" in sequence else None
    return rollout.Segment(
        policies=names,
        policy_of_token=codec.column(np.where(own, np.searchsorted(present, owners), 0), "uint8") if len(names) > 1 else None,
        input_ids=codec.column(rows["input_ids"], "int32"),
        loss_mask=codec.column(own, "uint8"),
        logprobs=codec.column(np.where(own, rows["logprobs"], 0), "float32"),
        versions=codec.column(np.where(own, rows["versions"], -1), "int32"),
        temperature=temperature,
        credit={} if credit is None else dict.fromkeys(names, None if math.isnan(credit) else float(credit)),
    )
