"""A rollout service with a real engine process: its death costs nothing but time, and nothing outlives the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.lib.aio import poll_until
from astraflow.lib.net import free_port, http_url
from astraflow.lib.proc import Child
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.codec import array, decode
from astraflow.protocol.control import RaaSStatus
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.rollout import Group, Lease, Pull, RegisterWorkflow, Submit, WorkflowSpec
from astraflow.protocol.routes import RaaSAPI
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.config import EngineConfig, RaaSConfig, RaaSProcess
from astraflow.raas.staging import staging_path
from astraflow.weights.config import ModelConfig, WeightsConfig

WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
MODEL = Path(__file__).parents[2] / "assets" / "tiny" / "solver"
MAIN = (
    "import sys, msgspec; from astraflow.raas.config import RaaSProcess; from astraflow.raas.service import run; "
    "sys.exit(run(msgspec.json.decode(open(sys.argv[1], 'rb').read(), type=RaaSProcess)))"
)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def begin(tmp_path: Path) -> tuple[RaaSProcess, Child]:
    process = RaaSProcess(
        run_id="test",
        run_dir=str(tmp_path),
        instance_id="raas0",
        port=free_port(),
        models={"solver": ModelConfig(path=str(MODEL))},
        raas=RaaSConfig(slots=16, engine=EngineConfig(threads=1, options={"kv_bytes": 64 << 20, "prefix_cache_bytes": 16 << 20})),
    )
    path = tmp_path / "process.json"
    path.write_bytes(msgspec.json.encode(process))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return process, Child([sys.executable, "-c", MAIN, str(path)], env=env, log_path=tmp_path / "out.log")


@pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="the tiny policies are not made yet (scripts/make_tiny_policies.py)")
def test_a_killed_engine_comes_back_with_its_weights_and_its_episodes_are_run_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    from astraflow.weights.manager import WeightManager

    async def test(manager: Any, process: RaaSProcess, child: Child) -> int:
        client = Client(http_url(process.host, process.port), new_identity("test"))

        async def status() -> RaaSStatus | None:
            with contextlib.suppress(AstraFlowError):
                return await client.call(RaaSAPI.status, timeout_s=20)
            return None

        async def up() -> bool:
            assert child.poll() is None, (tmp_path / "out.log").read_text()
            found = await status()
            return found is not None and found.state == "idle"

        await poll_until(up, WAIT_S, "engine up")
        digest = manager.published(0, WAIT_S)
        notice = NotifyRaaS(model_id="solver", timeline=1, version=0, digest=digest, sender_endpoint=manager.endpoint, wait_s=WAIT_S)
        reply = await client.call(RaaSAPI.notify_version, notice, timeout_s=2 * WAIT_S)
        assert (reply.state, reply.serving["solver"].digest) == ("loaded", digest)
        spec = WorkflowSpec(workflow="rlvr", reward="exact_match", policies=["solver"], generation={"max_new_tokens": 64})
        await client.call(RaaSAPI.register_workflow, RegisterWorkflow(workflow_id="w", spec=spec), timeout_s=WAIT_S)
        leases = [
            Lease(lease_id=str(n), task_id="t", workflow_id="w", n_samples=8, data={"prompt": "s31428", "answer": "12348"}, seed=n)
            for n in range(2)
        ]
        await client.call(RaaSAPI.submit, Submit(leases=leases), timeout_s=WAIT_S)
        found = await status()
        assert found is not None
        engine_pid = found.engines["solver"].pid
        os.kill(engine_pid, signal.SIGKILL)
        groups: list[Group] = []
        ack: list[str] = []
        while len(groups) < 2:
            pulled = await client.call(RaaSAPI.pull, Pull(ack=ack, wait_s=20), timeout_s=WAIT_S)
            ack = [delivery.delivery_id for delivery in pulled.deliveries]
            groups += [decode(bytes(delivery.group), Group) for delivery in pulled.deliveries]
        for group in groups:
            assert [t.error for t in group.trajectories] == [None] * 8
            assert (group.versions["solver"].timeline, group.versions["solver"].max) == (1, 0)
            for trajectory in group.trajectories:
                own = array(trajectory.segments[0].loss_mask) == 1
                assert (array(trajectory.segments[0].logprobs)[own] <= 0).all()

        async def back() -> RaaSStatus | None:  # also when the episodes had ended before the kill
            now = await status()
            return now if now is not None and now.engines["solver"].pid not in (0, engine_pid) and now.state == "idle" else None

        found = await poll_until(back, WAIT_S, "the engine's return")
        assert found is not None
        assert found.serving["solver"].digest == digest
        assert found.engines["solver"].restarts == 1
        await client.close()
        return found.engines["solver"].pid

    manager = WeightManager("solver", WeightsConfig(streams=2), new_identity("test"), tmp_path)
    process, child = begin(tmp_path)
    try:
        manager.offload(load_file(MODEL / "model.safetensors").items(), 0)
        engine_pid = asyncio.run(asyncio.wait_for(test(manager, process, child), 4 * WAIT_S))
        os.kill(child.pid, signal.SIGKILL)
        asyncio.run(poll_until(lambda: not alive(engine_pid), WAIT_S, "engine dies with its service"))
        staged = staging_path(process.run_dir, process.instance_id)
        assert list(staged.glob("*/*/model.safetensors")), "the killed one could not clean up"
        _, again = begin(tmp_path)
        try:
            asyncio.run(poll_until(lambda: not list(staged.glob("*/*/model.safetensors")), WAIT_S, "staged files of the dead are gone"))
        finally:
            assert again.terminate(WAIT_S) == 0
        assert not staged.exists()
    finally:
        child.terminate(WAIT_S)
        manager.close()
