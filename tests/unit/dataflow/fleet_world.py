"""Rollout services that the test moves, around the real service, on the simulated clock of tools/chaos_loop: a second is a second
however slow the machine is."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.service import AstraFlowService
from astraflow.dataflow.surroundings import Surroundings
from astraflow.datasets.api import Task
from astraflow.lib.wire import Identity
from astraflow.protocol import codec, rollout
from astraflow.protocol.control import Availability, RaaSStatus, Ready, RegisterRaaS
from astraflow.protocol.errors import DeadlinePassed, Unavailable
from astraflow.protocol.message import Empty
from astraflow.protocol.routes import RaaSAPI
from astraflow.protocol.weights import NotifyRaaSReply
from astraflow.tools.chaos_loop import VirtualLoop

_spec = importlib.util.spec_from_file_location("dataflow_groups_of_fleet", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


@dataclass
class Node:
    """One rollout service process of the test."""

    world: World
    instance_id: str
    url: str
    incarnation: str = "one"
    slots: int = 8
    models: list[str] = field(default_factory=lambda: ["m"])
    state: Any = "idle"
    work_s: float = 1.0
    slow: dict[str, float] = field(default_factory=dict)
    """Route → seconds until it answers."""
    refuse: dict[str, list[Exception]] = field(default_factory=dict)
    """Route → errors of its next calls; the last one stays."""
    calls: list[tuple[float, str]] = field(default_factory=list)
    running: dict[str, rollout.Lease] = field(default_factory=dict)
    outbox: dict[str, rollout.Delivery] = field(default_factory=dict)
    workflows: list[str] = field(default_factory=list)
    serving: dict[str, rollout.Serving] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    taken: int = 0

    def when(self, route: str) -> list[float]:
        """Times at which it was called."""
        return [at for at, name in self.calls if name == route]

    def fail(self, route: str, *errors: Exception) -> None:
        self.refuse[route] = list(errors)

    async def answer(self, name: str, request: Any) -> Any:
        self.calls.append((self.world.now, name))
        await asyncio.sleep(self.slow.get(name, 0.001))
        if self.refuse.get(name):
            errors = self.refuse[name]
            error = errors.pop(0) if len(errors) > 1 else errors[0]
            if not isinstance(error, Going):
                raise error
        return await getattr(self, name)(request)

    async def status(self, request: Empty) -> RaaSStatus:
        busy = sum(lease.n_samples for lease in self.running.values())
        free = Availability(total_slots=self.slots, free_slots=self.slots - busy, in_flight=busy, outbox=len(self.outbox))
        return RaaSStatus(
            instance_id=self.instance_id, state=self.state, availability=free, models=self.models, serving=self.serving, engines={},
            workflows=self.workflows,
        )  # fmt: skip

    async def register_workflow(self, request: rollout.RegisterWorkflow) -> rollout.RegisterWorkflowReply:
        self.workflows.append(request.workflow_id)
        return rollout.RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self.workflows))

    async def submit(self, request: rollout.Submit) -> rollout.SubmitReply:
        verdicts = []
        for lease in request.leases:
            self.running[lease.lease_id] = lease
            self.taken += 1
            asyncio.get_running_loop().call_later(self.work_s, self._finish, lease)
            verdicts.append(rollout.LeaseVerdict(lease_id=lease.lease_id, verdict="accepted"))
        return rollout.SubmitReply(verdicts=verdicts, free_slots=self._free, serving=self.serving)

    @property
    def _free(self) -> int:
        return self.slots - sum(lease.n_samples for lease in self.running.values())

    def _finish(self, lease: rollout.Lease) -> None:
        if self.running.pop(lease.lease_id, None) is None:
            return
        version = self.serving["m"].version
        members = [made.trajectory(i, float(i % 2), [version, version]) for i in range(lease.n_samples)]
        group = made.group(members, lease.lease_id, task_id=lease.task_id, timeline=self.serving["m"].timeline)
        group.attempt = lease.attempt
        key = f"{self.incarnation}/{lease.lease_id}/{lease.attempt}"
        self.outbox[key] = rollout.Delivery(
            delivery_id=key, lease_id=lease.lease_id, attempt=lease.attempt, group=msgspec.Raw(codec.encode(group))
        )

    async def pull(self, request: rollout.Pull) -> rollout.PullReply:
        self.acknowledged += [key for key in request.ack if self.outbox.pop(key, None) is not None]
        end = self.world.now + request.wait_s
        while not self.outbox and self.world.now < end:
            await asyncio.sleep(0.05)
        found = list(self.outbox.values())[: request.max_items]
        return rollout.PullReply(deliveries=found, free_slots=self._free, in_flight=0, waiting=0, serving=self.serving)

    async def leases(self, request: Empty) -> rollout.Leases:
        held = [rollout.HeldLease(lease_id=key, attempt=lease.attempt, state="running") for key, lease in self.running.items()]
        held += [rollout.HeldLease(lease_id=d.lease_id, attempt=d.attempt, state="done") for d in self.outbox.values()]
        return rollout.Leases(held=held)

    async def cancel(self, request: rollout.CancelLeases) -> Empty:
        for lease_id in request.lease_ids:
            self.running.pop(lease_id, None)
        return Empty()

    async def notify_version(self, request: Any) -> NotifyRaaSReply:
        wanted = rollout.Serving(timeline=request.timeline, version=request.version, digest=request.digest)
        self.serving = {**self.serving, request.model_id: wanted}
        return NotifyRaaSReply(state="loaded", serving=self.serving)

    async def shutdown(self, request: Any) -> Empty:
        self.world.nodes.remove(self)
        return Empty()


class Going(Exception):
    """In a list of errors: this call succeeds."""


@dataclass
class Line:
    """A client of one address; whoever listens there answers, or nobody."""

    world: World
    url: str

    async def call(self, route: Any, request: Any = None, *, timeout_s: float, ref: str = "") -> Any:
        name = next(key for key, value in vars(RaaSAPI).items() if value is route)
        node = self.world.at(self.url)
        if self.world.busy_s:
            await asyncio.sleep(self.world.busy_s)
            raise DeadlinePassed(f"{route.path} at {self.url}: no answer within {timeout_s:g} s")
        if node is None:
            raise Unavailable(f"{route.path} at {self.url}: connection refused")
        try:
            async with asyncio.timeout(timeout_s):
                reply = await node.answer(name, request)
                if self.world.at(self.url) is not node:
                    raise Unavailable(f"{route.path} at {self.url}: connection broken")
        except TimeoutError:
            raise DeadlinePassed(f"{route.path} at {self.url}: no answer within {timeout_s:g} s") from None
        reply.incarnation = node.incarnation
        return reply

    async def close(self) -> None:
        return None


class World:
    """A service, its trainer's /ready, and nodes."""

    def __init__(self, directory: Path, change: Callable[[DataflowProcess], None] = lambda process: None) -> None:
        self.loop = VirtualLoop()
        self.nodes: list[Node] = []
        self.busy_s = 0.0
        """How long this process looks at nothing, and so finds that the time of a call is over."""
        process = DataflowProcess(run_id="r", run_dir=str(directory), models=["m"])
        process.workflow.n_samples = 2
        process.dataflow.pool.heartbeat_s = 10.0
        process.dataflow.buffer.max_staleness = None
        process.dataflow.buffer.treatment = "drop"
        change(process)
        self.process = process
        outside = Surroundings(clock=self.loop.time, connect=self.connect)
        self.service = AstraFlowService(process, [Task(f"t{i}", {"i": i}) for i in range(2000)], {}, outside)
        self.shelf, self.fleet = self.service.shelf, self.service.fleet

    @property
    def now(self) -> float:
        return self.loop.time()

    def connect(self, url: str, identity: Identity) -> Line:
        return Line(self, url)

    def at(self, url: str) -> Node | None:
        return next((node for node in self.nodes if node.url == url), None)

    def node(self, instance_id: str, url: str = "", **options: Any) -> Node:
        node = Node(self, instance_id, url or f"http://{instance_id}", **options)
        self.nodes.append(node)
        return node

    async def join(self, node: Node, incarnation: str = "") -> None:
        """Its registration."""
        await self.fleet.join(
            RegisterRaaS(
                instance_id=node.instance_id, url=node.url, models=node.models, total_slots=node.slots,
                incarnation=incarnation or node.incarnation,
            )
        )  # fmt: skip

    async def start(self, *nodes: Node) -> None:
        """The trainer is ready, these have joined, acquisition runs."""
        await self.service.trainers.ready(Ready(model_id="m", train_batch_size=4, sender_endpoint="", digest="d0"))
        for node in nodes:
            await self.join(node)
        self.shelf.tasks.spawn("submit", self.service.acquisition.submit_loop())
        await self.until(lambda: all(self.state(node.instance_id) == "live" for node in nodes), 30, "all are live")

    def state(self, instance_id: str) -> str:
        instance = self.shelf.pool.instances.get(instance_id)
        return instance.state if instance is not None else "out"

    async def until(self, condition: Callable[[], Any], limit_s: float, what: str) -> None:
        """Simulated seconds."""
        end = self.now + limit_s
        while not condition():
            assert self.now < end, f"not within {limit_s} s: {what}; {list(self.shelf.events)}"
            await asyncio.sleep(0.05)

    def saw(self, words: str) -> bool:
        return any(words in event for event in self.shelf.events)

    def count(self, name: str) -> int:
        return self.shelf.meter.counts[name]

    def run(self, scene: Callable[[], Awaitable[None]]) -> None:
        """To its end; the ledger's sums are checked after it."""

        async def whole() -> None:
            try:
                await scene()
            finally:
                await self.shelf.tasks.stop()

        try:
            self.loop.run_until_complete(whole())
            assert self.service._failure is None, self.service._failure
            assert not self.loop.complaints, self.loop.complaints
        finally:
            self.shelf.thread.close()
            self.shelf.ledger.check()
            self.shelf.ledger.close()
            self.shelf.metrics.close()
            self.loop.close()
