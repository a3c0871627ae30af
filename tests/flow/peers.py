"""Peers of Dataflow that speak the routes and nothing else: a scripted rollout service (a process of its own) and a trainer.

python tests/flow/peers.py raas --dataflow URL --instance r0 --port 0 …
python tests/flow/peers.py dataflow PROCESS.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.dataflow import service
from astraflow.dataflow.config import DataflowProcess
from astraflow.datasets.api import Task
from astraflow.lib.wire import Identity, Server, new_identity
from astraflow.lib.wire_client import Client, SyncClient
from astraflow.protocol import codec, control, rollout, weights
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.errors import AstraFlowError, Conflict, Retryable, Unavailable
from astraflow.protocol.message import Empty
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

RUN_ID = "flow-test"
WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""


def tasks(count: int) -> list[Task]:
    """A data set that needs no loader."""
    return [Task(f"numbers:{i:04d}", {"prompt": f"number {i}", "answer": str(i)}) for i in range(count)]


def make_group(lease: rollout.Lease, policies: list[str], serving: dict[str, rollout.Serving], reward: str = "random") -> rollout.Group:
    """n trajectories of one segment per policy: three prompt tokens and four sampled ones, stamped with what is served."""
    rng = random.Random(lease.seed * 1000 + lease.attempt)
    trajectories = []
    for index in range(lease.n_samples):
        segments = [
            rollout.Segment(
                policies=[policy],
                input_ids=codec.column([1, 2, 3, *(rng.randrange(10, 99) for _ in range(4))], "int32"),
                loss_mask=codec.column([0, 0, 0, 1, 1, 1, 1], "uint8"),
                logprobs=codec.column(np.array([0, 0, 0, -1, -1, -1, -1], dtype=np.float32), "float32"),
                versions=codec.column([-1, -1, -1, *([serving[policy].version] * 4)], "int32"),
            )
            for policy in policies
        ]
        value = 0.0 if reward == "zero" else float(index % 2) if reward == "mixed" else rng.random()
        trajectories.append(rollout.Trajectory(index=index, segments=segments, reward=None if reward == "none" else value))
    return rollout.Group(
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        task_id=lease.task_id,
        versions={p: rollout.VersionSpan(timeline=serving[p].timeline, min=serving[p].version, max=serving[p].version) for p in policies},
        trajectories=trajectories,
    )


@dataclass
class ScriptedRaaS:
    """Leases in, groups out after a fixed time; loads are instant."""

    instance_id: str
    identity: Identity
    policies: list[str]
    slots: int
    delay_s: float
    reward: str
    lose_every: int
    gate: str = ""
    """Training leases end only while this file exists; empty = always."""
    lane_gate: str = ""
    """The same for leases of an evaluation."""
    serving: dict[str, rollout.Serving] = field(default_factory=dict)
    workflows: list[str] = field(default_factory=list)
    running: dict[str, tuple[rollout.Lease, asyncio.Task[None], str]] = field(default_factory=dict)
    outbox: dict[str, tuple[rollout.Delivery, str]] = field(default_factory=dict)
    known: set[tuple[str, int]] = field(default_factory=set)
    lanes: dict[str, dict[str, rollout.Serving]] = field(default_factory=dict)
    put_off: dict[str, rollout.Serving] = field(default_factory=dict)
    pulls: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_flight(self) -> int:
        return sum(lease.n_samples for lease, _, _ in self.running.values())

    def handlers(self) -> dict[str, Any]:
        async def missing(ref: str) -> bytes:
            return b""

        return {
            "status": self.status, "availability": self.availability, "register_workflow": self.register_workflow,
            "submit": self.submit, "pull": self.pull, "leases": self.leases, "cancel": self.cancel,
            "notify_version": self.notify_version, "reset_training_engine": self.reset, "eval_start": self.eval_start,
            "eval_submit": self.submit, "eval_pull": self.pull, "eval_end": self.eval_end, "media": missing, "record": missing,
            "shutdown": self.shutdown,
        }  # fmt: skip

    async def availability(self, request: Empty) -> control.Availability:
        return control.Availability(
            total_slots=self.slots, free_slots=self.slots - self.in_flight, in_flight=self.in_flight, outbox=len(self.outbox)
        )

    async def status(self, request: Empty) -> control.RaaSStatus:
        return control.RaaSStatus(
            instance_id=self.instance_id, state="ready", availability=await self.availability(request), models=self.policies,
            serving=self.serving, engines={}, workflows=self.workflows, lanes=list(self.lanes),
        )  # fmt: skip

    async def register_workflow(self, request: rollout.RegisterWorkflow) -> rollout.RegisterWorkflowReply:
        self.workflows.append(request.workflow_id)
        self.lanes.clear()  # a new Dataflow never ends the lanes of the one before
        return rollout.RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self.workflows))

    async def submit(self, request: rollout.Submit) -> rollout.SubmitReply:
        verdicts = []
        for lease in request.leases:
            verdict: Any = "accepted"
            if (lease.lease_id, lease.attempt) in self.known:
                verdict = "duplicate"
            elif lease.workflow_id not in self.workflows:
                verdict = "refused"
            elif self.in_flight + lease.n_samples > self.slots:
                verdict = "over_capacity"
            else:
                self.known.add((lease.lease_id, lease.attempt))
                task = asyncio.get_running_loop().create_task(self.work(lease, request.lane))
                self.running[lease.lease_id] = (lease, task, request.lane)
            verdicts.append(rollout.LeaseVerdict(lease_id=lease.lease_id, verdict=verdict))
        return rollout.SubmitReply(verdicts=verdicts, free_slots=self.slots - self.in_flight, serving=self.serving)

    async def work(self, lease: rollout.Lease, lane: str) -> None:
        serving = dict(self.serving)
        await asyncio.sleep(self.delay_s)
        while (gate := self.lane_gate if lane else self.gate) and not Path(gate).exists():
            await asyncio.sleep(0.02)
        group = make_group(lease, self.policies, serving, "mixed" if lane else self.reward)
        delivery = rollout.Delivery(
            delivery_id=f"{lease.lease_id}/{lease.attempt}", lease_id=lease.lease_id, attempt=lease.attempt,
            group=msgspec.Raw(codec.encode(group)),
        )  # fmt: skip
        self.running.pop(lease.lease_id, None)
        self.outbox[delivery.delivery_id] = (delivery, lane)
        self.grown.set()

    async def pull(self, request: rollout.Pull) -> rollout.PullReply:
        for delivery_id in request.ack:
            self.outbox.pop(delivery_id, None)
        end = time.monotonic() + request.wait_s
        while not (mine := [d for d, lane in self.outbox.values() if lane == request.lane]) and (left := end - time.monotonic()) > 0:
            self.grown.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.grown.wait(), min(left, 0.2))
        mine = mine[: request.max_items]
        self.pulls += bool(mine)
        if mine and self.lose_every and self.pulls % self.lose_every == 0:
            raise Unavailable("this reply was lost on purpose")
        return rollout.PullReply(
            deliveries=mine, free_slots=self.slots - self.in_flight, in_flight=self.in_flight, waiting=0, serving=self.serving
        )

    async def leases(self, request: Empty) -> rollout.Leases:
        held = [
            rollout.HeldLease(lease_id=key, attempt=lease.attempt, state="running", lane=lane)
            for key, (lease, _, lane) in self.running.items()
        ]
        held += [rollout.HeldLease(lease_id=d.lease_id, attempt=d.attempt, state="done", lane=lane) for d, lane in self.outbox.values()]
        return rollout.Leases(held=held)

    async def cancel(self, request: rollout.CancelLeases) -> Empty:
        for lease_id in request.lease_ids:
            found = self.running.pop(lease_id, None)
            if found is not None:
                found[1].cancel()
                self.known.discard((lease_id, found[0].attempt))  # as if it had never come
            self.outbox = {key: value for key, value in self.outbox.items() if value[0].lease_id != lease_id}
        return Empty()

    async def notify_version(self, request: weights.NotifyRaaS) -> weights.NotifyRaaSReply:
        wanted = rollout.Serving(timeline=request.timeline, version=request.version, digest=request.digest)
        if self.lanes:
            self.put_off[request.model_id] = wanted
            await asyncio.sleep(min(request.wait_s, 0.2))
            return weights.NotifyRaaSReply(state="loading", serving=self.serving)
        before = self.serving.get(request.model_id)
        if before is not None and request.timeline > before.timeline:  # a rollback: what the dead timeline produces is dropped
            await self.cancel(rollout.CancelLeases(lease_ids=[*self.running, *(d.lease_id for d, _ in self.outbox.values())]))
        self.serving = {**self.serving, request.model_id: wanted}
        return weights.NotifyRaaSReply(state="loaded", serving=self.serving)

    async def reset(self, request: rollout.ResetEngine) -> rollout.ResetEngineReply:
        cancelled = [key for key, (_, _, lane) in self.running.items() if not lane]
        await self.cancel(rollout.CancelLeases(lease_ids=cancelled))
        return rollout.ResetEngineReply(cancelled=cancelled)

    async def eval_start(self, request: rollout.EvalStart) -> Empty:
        if any(self.serving.get(model) != wanted for model, wanted in request.versions.items()):
            raise Conflict(f"lane {request.lane}: serves {self.serving}")
        self.lanes[request.lane] = request.versions
        return Empty()

    async def eval_end(self, request: rollout.EvalEnd) -> Empty:
        self.lanes.pop(request.lane, None)
        self.serving, self.put_off = {**self.serving, **self.put_off}, {}
        return Empty()

    async def shutdown(self, request: control.Shutdown) -> Empty:
        self.ended.set()
        return Empty()

    async def serve(self, dataflow: str, port: int) -> None:
        server = Server(self.instance_id, RaaSAPI, self.handlers(), self.identity, port=port)
        await server.start()
        seen, missing = "", 0
        async with Client(dataflow, self.identity) as client:
            while not self.ended.is_set():
                with contextlib.suppress(Retryable):  # Dataflow starts later, or is away
                    pool = await client.call(DataflowAPI.raas_pool, timeout_s=10.0)
                    now = pool.incarnation
                    missing = 0 if any(i.instance_id == self.instance_id for i in pool.instances) else missing + 1
                    if now != seen or missing > 10:  # put out because it was slow: it comes again, as a real one does
                        request = control.RegisterRaaS(
                            instance_id=self.instance_id, url=server.url, models=self.policies, total_slots=self.slots
                        )
                        await client.call(DataflowAPI.register_raas, request, timeout_s=30.0)
                        seen, missing = now, 0
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), 0.3)
        await server.stop(1.0)


def patiently(call: Any, deadline_s: float = WAIT_S) -> Any:
    """Again while it may still succeed."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return call()
        except Retryable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@dataclass
class Trainer:
    """The three calls of a trainer, with what it trained on."""

    url: str
    model_id: str = "default"
    batch_size: int = 8
    version: int = 0
    timeline: int = -1
    seen: list[str] = field(default_factory=list)
    """Trajectory ids of committed batches."""

    def __post_init__(self) -> None:
        self.client = SyncClient(self.url, new_identity(RUN_ID))

    def digest(self, version: int) -> str:
        return f"{self.model_id}-{self.timeline}-{version}"

    def ready(self, recovered: int | None = None, digest: str = "") -> control.ReadyReply:
        reply = self.patiently(
            lambda: self.client.call(
                DataflowAPI.ready,
                control.Ready(
                    model_id=self.model_id, train_batch_size=self.batch_size, sender_endpoint="", digest=digest,
                    version=0 if recovered is None else recovered, recovered_version=recovered,
                ),
                timeout_s=WAIT_S,
            )
        )  # fmt: skip
        self.timeline, self.version = reply.timeline, reply.version
        return reply

    def ask(self, version: int | None = None, wait_s: float = 5.0) -> BatchReply:
        request = BatchRequest(
            model_id=self.model_id, timeline=self.timeline, version=self.version if version is None else version, wait_s=wait_s
        )
        return self.client.call(DataflowAPI.batch, request, timeout_s=wait_s + WAIT_S)

    def batch(self, deadline_s: float = WAIT_S) -> BatchReply:
        """Ask until there is an answer other than `wait`, over restarts of Dataflow."""
        end = time.monotonic() + deadline_s
        while True:
            reply = self.patiently(lambda: self.ask(wait_s=2.0))
            if reply.kind != "wait":
                return reply
            assert time.monotonic() < end, f"no batch: {reply.reason} {reply.waits}"

    def notify(self, run_eval: bool = False, checkpoint: int = -1) -> control.NotifyVersionReply:
        request = control.NotifyVersion(
            model_id=self.model_id, timeline=self.timeline, version=self.version + 1, digest=self.digest(self.version + 1),
            run_eval=run_eval, checkpoint_version=checkpoint,
        )  # fmt: skip
        reply = self.patiently(lambda: self.client.call(DataflowAPI.notify_version, request, timeout_s=WAIT_S))
        self.version += 1
        return reply

    def step(self, run_eval: bool = False) -> BatchReply:
        reply = self.batch()
        assert reply.kind == "batch", (reply.kind, reply.reason)
        self.seen += reply.batch.trajectory_ids
        self.notify(run_eval)
        return reply

    def status(self) -> control.DataflowStatus:
        return self.patiently(lambda: self.client.call(DataflowAPI.status, timeout_s=20.0))

    def shutdown(self) -> None:
        self.client.call(DataflowAPI.shutdown, control.Shutdown(model_id=self.model_id), timeout_s=WAIT_S)

    patiently = staticmethod(patiently)


def until(condition: Any, deadline_s: float, what: str) -> Any:
    """Poll with a deadline that bounds a broken test, never a slow machine."""
    deadline_s = max(deadline_s, WAIT_S)
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
    return found


@dataclass
class Stage:
    """Processes of one test; all of them are ended, by their own pids."""

    directory: Path
    process: DataflowProcess
    url: str = ""
    """Known after the first `dataflow`, and kept over its restarts."""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{name}.log").open("ab")
        argv = [sys.executable, __file__, *arguments]
        self.children[name] = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        log.close()
        return self.children[name]

    def dataflow(self, n_tasks: int = 1000) -> subprocess.Popen[bytes]:
        path = self.directory / "process.json"
        path.write_bytes(msgspec.json.encode(self.process))
        child = self.start("dataflow", "dataflow", str(path), str(n_tasks))
        if not self.url:
            named = Path(self.process.run_dir) / "dataflow.url"
            self.url = until(lambda: named.exists() and named.read_text().strip(), WAIT_S, "Dataflow's address")
            self.process.port = int(self.url.rpartition(":")[2])
        return child

    def raas(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start(name, "raas", "--dataflow", self.url, "--instance", name, *options)

    def kill(self, name: str) -> None:
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait(WAIT_S)

    def end(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait(WAIT_S)


@contextlib.contextmanager
def staged(tmp_path: Path) -> Iterator[Stage]:
    """A stage for groups of four, whose Dataflow looks often and is patient; every process of it ends with it."""
    process = DataflowProcess(run_id=RUN_ID, run_dir=str(tmp_path / "run"))
    process.workflow.n_samples = 4
    pool = process.dataflow.pool
    pool.heartbeat_s, pool.status_timeout_s, pool.pull_wait_s = 1.0, 20.0, 1.0
    made = Stage(tmp_path, process)
    try:
        yield made
    finally:
        made.end()


def _raas_main(arguments: argparse.Namespace) -> None:
    raas = ScriptedRaaS(
        arguments.instance, new_identity(RUN_ID), arguments.policies.split(","), arguments.slots, arguments.delay,
        arguments.reward, arguments.lose_every, arguments.gate, arguments.lane_gate,
    )  # fmt: skip
    asyncio.run(raas.serve(arguments.dataflow, arguments.port))


def _dataflow_main(path: str, count: int) -> int:
    process = msgspec.json.decode(Path(path).read_bytes(), type=DataflowProcess)
    service.setup_logging("dataflow")
    valid = {name: tasks(4) for name in process.valid_datasets}
    return asyncio.run(service.AstraFlowService(process, tasks(count), valid).run()) if count else service.run(process)


def main() -> int:
    parser = argparse.ArgumentParser()
    parts = parser.add_subparsers(dest="part", required=True)
    raas = parts.add_parser("raas")
    raas.add_argument("--dataflow", required=True)
    raas.add_argument("--instance", required=True)
    raas.add_argument("--port", type=int, default=0)
    raas.add_argument("--slots", type=int, default=16)
    raas.add_argument("--policies", default="default")
    raas.add_argument("--delay", type=float, default=0.02)
    raas.add_argument("--reward", default="random")
    raas.add_argument("--lose-every", type=int, default=0)
    raas.add_argument("--gate", default="")
    raas.add_argument("--lane-gate", default="")
    dataflow = parts.add_parser("dataflow")
    dataflow.add_argument("process")
    dataflow.add_argument("tasks", type=int)
    arguments = parser.parse_args()
    if arguments.part == "dataflow":
        return _dataflow_main(arguments.process, arguments.tasks)
    try:
        _raas_main(arguments)
    except AstraFlowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
