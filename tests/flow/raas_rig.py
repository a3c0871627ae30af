"""A rollout service process and what Dataflow would say to it, for the tests of the rollout service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from astraflow.lib.aio import poll_until
from astraflow.lib.net import http_url
from astraflow.lib.proc import Child
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.codec import decode
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.message import Message
from astraflow.protocol.rollout import Group, Lease, Pull, RegisterWorkflow, Submit, WorkflowSpec
from astraflow.protocol.routes import RaaSAPI, table
from astraflow.raas.config import RaaSProcess
from astraflow.raas.staging import staging_path

WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
MAIN = (
    "import sys, msgspec; from astraflow.raas.config import RaaSProcess; from astraflow.raas.service import run; "
    "sys.exit(run(msgspec.json.decode(open(sys.argv[1], 'rb').read(), type=RaaSProcess)))"
)


class Raas:
    """The process and a client of it."""

    def __init__(self, process: RaaSProcess, child: Child) -> None:
        self.process, self.child = process, child
        self.url = http_url("127.0.0.1" if process.host == "0.0.0.0" else process.host, process.port)
        self.client = Client(self.url, new_identity(process.run_id, process.token))

    async def __call__(self, name: str, request: Message | None = None, timeout_s: float = WAIT_S) -> Any:
        return await self.client.call(table(RaaSAPI)[name], request, timeout_s=timeout_s)

    async def up(self) -> None:
        async def healthy() -> bool:
            with contextlib.suppress(AstraFlowError):
                return (await self("status", timeout_s=20.0)).state in ("idle", "ready")
            assert self.child.poll() is None, (Path(self.process.run_dir) / "out.log").read_text()
            return False

        await poll_until(healthy, WAIT_S, "raas up", 0.02)

    async def register(self, workflow_id: str = "w", workflow: str = "rlvr", reward: str = "last_number", **fields: Any) -> None:
        spec = WorkflowSpec(workflow=workflow, reward=reward, **fields)
        await self("register_workflow", RegisterWorkflow(workflow_id=workflow_id, spec=spec))

    async def submit(self, *leases: Lease, lane: str = "") -> list[str]:
        reply = await self("eval_submit" if lane else "submit", Submit(leases=list(leases), lane=lane))
        return [verdict.verdict for verdict in reply.verdicts]

    async def groups(self, count: int, lane: str = "") -> list[Group]:
        out: list[Group] = []
        ack: list[str] = []
        while len(out) < count:
            reply = await self("eval_pull" if lane else "pull", Pull(ack=ack, wait_s=WAIT_S / 2, lane=lane))
            assert reply.deliveries, f"no result within {WAIT_S / 2:g} s"
            ack = [delivery.delivery_id for delivery in reply.deliveries]
            out += [decode(bytes(delivery.group), Group) for delivery in reply.deliveries]
        await self("eval_pull" if lane else "pull", Pull(ack=ack, max_items=0, lane=lane))
        return out

    async def ended(self) -> int:
        await poll_until(lambda: self.child.poll() is not None, WAIT_S, "raas ends", 0.02)
        code = self.child.poll()
        assert code is not None
        return code


def lease(lease_id: str = "l1", n: int = 2, workflow: str = "w", **fields: Any) -> Lease:
    data = fields.pop("data", {"prompt": "2 + 3 =", "answer": "5"})
    return Lease(lease_id=lease_id, task_id="t", workflow_id=workflow, n_samples=n, data=data, **fields)


@contextmanager
def serving(process: RaaSProcess, plugins: Path) -> Iterator[Raas]:
    """A started service, its output in the run directory. `plugins`: directory of its plug-in modules. It is gone, with its staged
    weights, when the block ends."""
    run_dir = Path(process.run_dir)
    path = run_dir / f"process-{process.instance_id}.json"
    path.write_bytes(msgspec.json.encode(process))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    child = Child([sys.executable, "-c", MAIN, str(path)], env=env, log_path=run_dir / "out.log", name=process.instance_id)
    try:
        yield Raas(process, child)
    finally:
        child.terminate(WAIT_S)
        assert not staging_path(process.run_dir, process.instance_id).exists(), "staged weights were left behind"


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(4 * WAIT_S):
            await test

    asyncio.run(bounded())
