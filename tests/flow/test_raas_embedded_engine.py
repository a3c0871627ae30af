"""A rollout service with a real engine process: updates and deaths in the middle of work cost nothing but time, a load that went
wrong is found out, `/status` answers meanwhile, and nothing outlives the service.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from astraflow.lib.aio import poll_until
from astraflow.lib.net import free_port
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.codec import array
from astraflow.protocol.control import RaaSStatus
from astraflow.protocol.rollout import CancelLeases, Group, Submit
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.config import EngineConfig, RaaSConfig, RaaSProcess
from astraflow.raas.engines.embedded_arch import read_architecture
from astraflow.raas.reference import Reference
from astraflow.raas.staging import staging_path
from astraflow.weights.config import ModelConfig, WeightsConfig

sys.path.insert(0, str(Path(__file__).parent))
from raas_rig import WAIT_S, Raas, lease, run, serving

torch = pytest.importorskip("torch")

TINY = Path(__file__).parents[2] / "assets" / "tiny" / "solver"
PLUGIN = """
import shutil
from pathlib import Path
import msgspec
from astraflow.raas.engines.process import embedded

HERE = Path(__file__).parent

def sometimes_lying(setup):
    engine = embedded(setup)
    honest = engine.load

    async def load(weights):
        if not (HERE / "first.safetensors").exists():
            shutil.copy(weights.path, HERE / "first.safetensors")
        await honest(msgspec.structs.replace(weights, path=str(HERE / "first.safetensors")) if (HERE / "lie").exists() else weights)

    engine.load = load
    return engine
"""
NEW_TOKENS = 150
ENGINE = {"kv_bytes": 256 << 20, "prefix_cache_bytes": 16 << 20}


class Stage:
    """One service, one publisher, and the words of every version that was published."""

    def __init__(self, raas: Raas, manager: Any, directory: Path, model: Path) -> None:
        self.raas, self.manager, self.directory, self.model = raas, manager, directory, model
        self.version = -1
        self.names = itertools.count()

    def publish(self) -> NotifyRaaS:
        """New random words under the next version."""
        self.version += 1
        torch.manual_seed(self.version)
        words = {name: (torch.randn(shape) * 0.15).bfloat16() for name, shape in shapes(self.model).items()}
        save_file(words, self.file(self.version))
        self.manager.offload(words.items(), self.version)
        digest = self.manager.published(self.version, WAIT_S)
        sender = self.manager.endpoint
        return NotifyRaaS(model_id="m", timeline=1, version=self.version, digest=digest, sender_endpoint=sender, wait_s=WAIT_S)

    def file(self, version: int) -> Path:
        return self.directory / f"v{version}.safetensors"

    async def loaded(self, notice: NotifyRaaS) -> Any:
        reply = await self.raas("notify_version", notice, timeout_s=2 * WAIT_S)
        assert reply.state in ("loaded", "current"), reply
        assert reply.serving["m"].digest == notice.digest
        return reply

    async def begin(self, max_new_tokens: int = NEW_TOKENS) -> RaaSStatus:
        """Up, at a version of its own, with workflow `w`."""
        await self.raas.up()
        await self.loaded(self.publish())
        await self.raas.register(reward="exact_match", policies=["m"], generation={"max_new_tokens": max_new_tokens})
        return await self.status()

    async def status(self) -> RaaSStatus:
        found: RaaSStatus = await self.raas("status")
        return found

    def leases(self, count: int = 2, **fields: Any) -> list[Any]:
        names = [next(self.names) for _ in range(count)]
        return [lease(f"{self.version}-{n}", 8, seed=n, data={"prompt": "s31428", "answer": "12348"}, **fields) for n in names]


def shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """HF names of a Qwen3 model with tied embeddings."""
    arch = read_architecture(model)
    assert arch is not None
    hidden, queries, keys, wide = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.intermediate
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (arch.head_dim,),
        "self_attn.k_norm": (arch.head_dim,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    out = {f"model.layers.{number}.{name}.weight": shape for number in range(arch.layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (arch.vocab_size, hidden), "model.norm.weight": (hidden,), **out}


@contextmanager
def stage_on(directory: Path, **config: Any) -> Iterator[Stage]:
    from astraflow.weights.manager import WeightManager

    model = directory / "model"
    shutil.copytree(TINY, model)
    (model / "model.safetensors").unlink()
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | config))
    (directory / "flow_engine.py").write_text(PLUGIN)
    engine = EngineConfig(kind="flow_engine:sometimes_lying", threads=1, options=ENGINE)
    process = RaaSProcess(
        run_id="test",
        run_dir=str(directory),
        instance_id="raas0",
        port=free_port(),
        models={"m": ModelConfig(path=str(model))},
        raas=RaaSConfig(slots=16, engine=engine),
        plugins=["flow_engine"],
    )
    with ExitStack() as stack:
        raas = stack.enter_context(serving(process, directory))
        weights = WeightsConfig(streams=2, delta=False)  # of random words a delta is no saving
        manager = WeightManager("m", weights, new_identity("test"), directory)
        stack.callback(manager.close)
        yield Stage(raas, manager, directory, model)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage_on(tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    """The same service for several tests; each begins with a version and connections of its own, and counts from there."""
    shared.raas.client = Client(shared.raas.url, new_identity("test"))
    yield shared
    (shared.directory / "lie").unlink(missing_ok=True)


def columns(group: Group) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Per member: token ids, loss mask, log-probs, versions."""
    for trajectory in group.trajectories:
        assert trajectory.error is None, trajectory.error
        (segment,) = trajectory.segments
        yield array(segment.input_ids), array(segment.loss_mask) == 1, array(segment.logprobs), array(segment.versions)


def check_group(group: Group, ends: set[int]) -> None:
    """Nobody was dropped or cut: an answer ends with an end token, or at its budget."""
    assert len(group.trajectories) == 8
    for trajectory, (ids, own, logprobs, _) in zip(group.trajectories, columns(group), strict=True):
        assert (logprobs[own] <= 0).all()
        assert trajectory.finish == ("stop" if ids[own][-1] in ends else "length")
        assert trajectory.finish == "stop" or own.sum() == NEW_TOKENS


def test_updates_in_the_middle_of_sixteen_generations_drop_cut_and_mislabel_nothing(stage: Stage) -> None:
    """Every token has the log-prob that the words of its own stamp give it, whenever the load came (numerics 2, 3)."""

    async def test() -> None:
        await stage.begin()
        mixed: list[Group] = []
        for _ in range(20):
            leases = stage.leases()
            notice = await asyncio.to_thread(stage.publish)
            assert await stage.raas.submit(*leases) == ["accepted"] * 2
            await stage.loaded(notice)
            for group in await stage.raas.groups(2):
                check_group(group, {2})
                if any(len(set(versions[own])) == 2 for _, own, _, versions in columns(group)):
                    mixed.append(group)
            if mixed:
                break
        assert mixed, "no load came in the middle of a sequence"
        arch = read_architecture(stage.model)
        assert arch is not None
        errors: dict[bool, list[Any]] = {True: [], False: []}
        for ids, own, logprobs, versions in columns(mixed[0]):
            first = int(np.flatnonzero(own)[0])
            for version in set(versions[own]):
                wanted = Reference(arch).log_probs(stage.file(version), [ids.tolist()], [first], threading.Event())[0]
                for stamped in errors:
                    errors[stamped].append(np.abs(wanted - logprobs[first:])[(versions[first:] == version) == stamped])
        assert np.concatenate(errors[True]).max() < 1e-3
        assert np.concatenate(errors[False]).max() > 0.1, "the other version's words say otherwise"

    run(test())


def test_a_load_that_the_engine_only_claims_takes_the_instance_out_until_one_passes(stage: Stage) -> None:
    async def test() -> None:
        before = (await stage.begin()).metrics
        assert before["raas/canary/passed"] >= 1
        assert before["raas/canary/max_error"] < 1e-3
        (stage.directory / "lie").touch()
        notice = await asyncio.to_thread(stage.publish)
        for _ in range(2):  # Dataflow repeats a notice that failed
            reply = await stage.raas("notify_version", notice, timeout_s=2 * WAIT_S)
            assert (reply.state, reply.serving) == ("failed", {}), "out of rotation: no receipt, so Dataflow sends nothing"
            assert f"canary of version {notice.version}: log-probs differ" in reply.message
        refused = (await stage.raas("submit", Submit(leases=stage.leases(1)))).verdicts[0]
        assert (refused.verdict, "canary" in refused.reason) == ("refused", True)
        assert (await stage.status()).metrics["raas/canary/failed"] == before.get("raas/canary/failed", 0) + 2
        (stage.directory / "lie").unlink()
        await stage.loaded(notice)
        assert await stage.raas.submit(*stage.leases(1)) == ["accepted"]
        (group,) = await stage.raas.groups(1)
        assert group.versions["m"].max == notice.version
        status = await stage.status()
        assert (status.metrics["raas/canary/passed"], status.message) == (before["raas/canary/passed"] + 1, "")

    run(test())


def test_a_cancelled_lease_frees_its_requests_in_the_engine(stage: Stage) -> None:
    async def test() -> None:
        status = await stage.begin()
        pid, before = status.engines["m"].pid, status.metrics.get("raas/engine/cancelled", 0.0)
        os.kill(pid, signal.SIGSTOP)  # so that no request can end before it is cancelled
        leases = stage.leases()
        assert await stage.raas.submit(*leases) == ["accepted"] * 2
        await stage.raas("cancel", CancelLeases(lease_ids=[leases[0].lease_id]))
        os.kill(pid, signal.SIGCONT)
        (group,) = await stage.raas.groups(1)
        assert group.lease_id == leases[1].lease_id

        async def freed() -> bool:
            now = await stage.status()
            return now.metrics.get("raas/engine/cancelled", 0.0) == before + 8 and now.engines["m"].running == 0

        await poll_until(freed, WAIT_S, "eight cancelled requests, and none that runs on")

    run(test())


def test_a_killed_engine_comes_back_at_the_current_version_and_its_episodes_are_run_again(stage: Stage) -> None:
    """kill -9 with sixteen requests in flight: the service stays up, nothing is lost, no zombie and no socket is left."""
    raas = stage.raas

    async def test() -> None:
        before = await stage.begin()
        notice = await asyncio.to_thread(stage.publish)
        await stage.loaded(notice)
        engine_pid, held = before.engines["m"].pid, sockets(raas.child.pid)
        os.kill(engine_pid, signal.SIGSTOP)  # no request can be answered before the kill
        leases = stage.leases()
        assert await raas.submit(*leases) == ["accepted"] * 2
        assert (await raas("availability")).in_flight == 16
        os.kill(engine_pid, signal.SIGKILL)
        groups = await raas.groups(2)
        assert sorted(group.lease_id for group in groups) == sorted(lease.lease_id for lease in leases)
        for group in groups:
            check_group(group, {2})
            span = group.versions["m"]
            assert (span.timeline, span.min, span.max) == (1, notice.version, notice.version)
        status = await stage.status()
        assert (status.serving["m"].digest, status.engines["m"].restarts) == (notice.digest, before.engines["m"].restarts + 1)
        assert status.metrics["raas/episode_retries"] == before.metrics.get("raas/episode_retries", 0) + 16
        assert status.engines["m"].pid != engine_pid
        assert not Path(f"/proc/{engine_pid}").exists(), "a zombie"
        await poll_until(lambda: sockets(raas.child.pid) == held, WAIT_S, f"the sockets of before, {held}")

    run(test())


def test_nothing_outlives_a_service_that_was_killed(tmp_path: Path) -> None:
    async def killed(stage: Stage) -> None:
        engine_pid = (await stage.begin()).engines["m"].pid
        os.kill(stage.raas.child.pid, signal.SIGKILL)
        await poll_until(lambda: not alive(engine_pid), WAIT_S, "the engine's end with its service")

    async def again(raas: Raas, staged: Path) -> None:
        await raas.up()
        assert not list(staged.glob("*/*/model.safetensors")), "staged files of the dead are gone"

    with stage_on(tmp_path) as stage:
        run(killed(stage))
        process = stage.raas.process
        staged = staging_path(process.run_dir, process.instance_id)
        assert list(staged.glob("*/*/model.safetensors")), "the killed one could not clean up"
        with serving(process, stage.directory) as second:
            run(again(second, staged))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def sockets(pid: int) -> tuple[int, int]:
    """(TCP ports that the process listens on, its sockets that are not TCP). Connections of clients come and go."""
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    tcp = {row[9]: row[3] for row in rows if row[9] in inodes}
    return list(tcp.values()).count("0A"), len(inodes - tcp.keys())


async def p99_of_status(stage: Stage, until: asyncio.Future[Any]) -> float:
    """Seconds. A call every 20 ms, whether or not the last one was answered: a loop that stands still delays all that come meanwhile."""
    took: list[float] = []

    async def call() -> None:
        started = time.perf_counter()
        await stage.status()
        took.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as calls:
        while not until.done():
            calls.create_task(call())
            await asyncio.sleep(0.02)
    return sorted(took)[int(0.99 * len(took))]


def test_status_answers_within_100_ms_during_a_load(tmp_path: Path) -> None:
    """p99, while 70 MB are pulled, loaded and checked with sixteen episodes under way. On a machine that is late by itself, no later
    than twice its lateness without a load; and the best of some rounds counts, because others compute here too. A loop that is blocked
    by any part of an update is late in all of them.
    """

    async def test(stage: Stage) -> None:
        await stage.begin(max_new_tokens=16)
        rounds = []
        for _ in range(8):
            idle = await p99_of_status(stage, asyncio.ensure_future(asyncio.sleep(1.0)))
            notice = await asyncio.to_thread(stage.publish)
            assert await stage.raas.submit(*stage.leases()) == ["accepted"] * 2
            loading = asyncio.ensure_future(stage.loaded(notice))
            rounds.append((await p99_of_status(stage, loading), idle))
            await loading
            await stage.raas.groups(2)
            if rounds[-1][0] < max(0.1, 2 * idle):
                return
        raise AssertionError(f"p99 of /status (during a load, without one): {rounds}")

    with stage_on(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, head_dim=64) as stage:
        run(test(stage))
