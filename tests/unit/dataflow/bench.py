"""A service without sockets whose instance and trainer are the test."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.service import AstraFlowService
from astraflow.dataflow.surroundings import MACHINE, Surroundings
from astraflow.datasets.api import Task
from astraflow.protocol import codec
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.control import NotifyVersion, Ready, RegisterRaaS
from astraflow.protocol.rollout import Delivery, Serving

_spec = importlib.util.spec_from_file_location("dataflow_groups", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


class Bench:
    """A service whose instance and trainer are this test."""

    def __init__(
        self,
        run_dir: Path,
        n_tasks: int = 100,
        change: Callable[[DataflowProcess], None] | None = None,
        batch: int = 4,
        outside: Surroundings = MACHINE,
    ) -> None:
        process = DataflowProcess(run_id="r", run_dir=str(run_dir), models=["m"])
        process.workflow.n_samples = 2
        if change is not None:
            change(process)
        self.service = AstraFlowService(process, [Task(f"t{i}", {"i": i}) for i in range(n_tasks)], {}, outside)
        self.shelf = self.service.shelf
        self.timeline, self.batch = 0, batch

    async def start(self, version: int = 0) -> Bench:
        reply = await self.service.trainers.ready(
            Ready(
                model_id="m", train_batch_size=self.batch, sender_endpoint="", version=version, digest=f"d{version}",
                recovered_version=version,
            )
        )  # fmt: skip
        self.timeline = reply.timeline
        record = RegisterRaaS(instance_id="r", url="http://127.0.0.1:9", models=["m"], total_slots=64, incarnation="one")
        self.shelf.pool.register(record, 0.0)
        self.serves(version)
        self.shelf.pool.catch_up(lambda instance: True)
        return self

    def serves(self, version: int, digest: str = "") -> None:
        self.service.fleet.receipts("r", {"m": Serving(timeline=self.timeline, version=version, digest=digest or f"d{version}")})

    async def lease(self) -> list[str]:
        plan = await self.service.acquisition._plan()
        return [row.lease_id for rows in plan.values() for row in rows]

    def delivery(self, lease_id: str, rewards: Sequence[float | None], version: int = 0, attempt: int = 1, task_id: str = "") -> Delivery:
        lease = self.shelf.leases.open.get(lease_id)
        members = [made.trajectory(i, reward, [version, version]) for i, reward in enumerate(rewards)]
        task_id = task_id or (lease.task_id if lease is not None else "t")
        group = made.group(members, lease_id, task_id=task_id, timeline=self.timeline)
        group.attempt = attempt
        return Delivery(delivery_id=f"{lease_id}/{attempt}", lease_id=lease_id, attempt=attempt, group=msgspec.Raw(codec.encode(group)))

    async def deliver(self, lease_id: str, rewards: Sequence[float | None], version: int = 0, attempt: int = 1) -> list[str]:
        return await self.service.intake.take("r", [self.delivery(lease_id, rewards, version, attempt)])

    async def ask(self, version: int, wait_s: float = 0.0) -> BatchReply:
        return await self.service.serving.batch(BatchRequest(model_id="m", timeline=self.timeline, version=version, wait_s=wait_s))

    async def train(self, version: int, checkpoint: int = -1) -> int:
        message = NotifyVersion(model_id="m", timeline=self.timeline, version=version, digest=f"d{version}", checkpoint_version=checkpoint)
        return (await self.service.trainers.notify(message)).trained

    async def fates(self) -> list[str]:
        """Leases under `filter_zero_adv`: two trained, one of equal rewards, one unscored; the others run."""
        leases = await self.lease()
        await self.deliver(leases[0], [0.0, 1.0])
        await self.deliver(leases[1], [1.0, 0.0])
        await self.deliver(leases[2], [1.0, 1.0])
        await self.deliver(leases[3], [None, None])
        assert (await self.ask(0)).kind == "batch"
        await self.train(1)
        return leases

    async def back(self, version: int, digest: str = "") -> None:
        """Another trainer process attaches, at what it found in its checkpoint."""
        message = Ready(
            model_id="m", train_batch_size=self.batch, sender_endpoint="", version=version, digest=digest, recovered_version=version
        )
        self.timeline = (await self.service.trainers.ready(message)).timeline

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """The ledger's calls wait while the block runs."""
        gate = threading.Event()
        waiting = asyncio.ensure_future(self.shelf.write(gate.wait, 60.0))
        try:
            yield
        finally:
            gate.set()
            waiting.add_done_callback(lambda _: None)

    def close(self) -> None:
        """As kill -9 would: nothing is said to anybody."""
        self.shelf.thread.close()
        self.shelf.ledger.check()
        self.shelf.ledger.close()
        self.shelf.metrics.close()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 90))  # type: ignore[arg-type]


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.001)
