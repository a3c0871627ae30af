"""A real rollout service process with the scripted engine, driven over HTTP as Dataflow would."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from astraflow.lib.aio import poll_until
from astraflow.lib.net import free_port, http_url
from astraflow.lib.wire import Handler, Server, new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.codec import decode
from astraflow.protocol.control import DeregisterRaaS, RegisterRaaS, RegisterRaaSReply, Shutdown
from astraflow.protocol.errors import AuthError, Conflict, UnknownName
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.rollout import (
    CancelLeases,
    EvalEnd,
    EvalStart,
    Group,
    Pull,
    Serving,
    Submit,
)
from astraflow.protocol.routes import DataflowAPI, RaaSAPI, table
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.config import EngineConfig, RaaSConfig, RaaSProcess, RewardsConfig
from astraflow.weights.config import ModelConfig

sys.path.insert(0, str(Path(__file__).parent))
from raas_rig import WAIT_S, Raas, lease, run, serving

CHARS = Path(__file__).parents[1] / "data" / "chars-model"
PLUGIN = """
import asyncio
from pathlib import Path
from astraflow.raas.engines.scripted import ScriptedEngine
from astraflow.rewards.api import register_reward
from astraflow.workflows.api import RolloutWorkflow, register_workflow

@register_reward("flow_broken", blocking=False)
def broken(prompt, completions, prompt_ids, completion_ids, **data):
    if data["answer"] == "raise":
        raise RuntimeError("the judge is down")
    return 1.0

class Gated(ScriptedEngine):
    async def load(self, weights):
        self._status.state = "loading"
        while Path(__file__).with_name("gate").exists():
            await asyncio.sleep(0.01)
        await super().load(weights)

@register_workflow("flow_moody")
class Moody(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        if data["mood"] == "raise":
            raise RuntimeError("no")
        if data["mood"] == "hang":
            await asyncio.Event().wait()
        return None
"""


Start = Callable[..., Raas]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start rollout services."""
    with contextlib.ExitStack() as services:
        started: list[Raas] = []

        def begin(options: Mapping[str, Any] | None = None, kind: str = "scripted", **fields: Any) -> Raas:
            (tmp_path / "flow_plugin.py").write_text(PLUGIN)
            engine = EngineConfig(kind=kind, options={"initial": True, **(options or {})})
            process = RaaSProcess(
                run_id="test",
                run_dir=str(tmp_path),
                instance_id=f"raas{len(started)}",
                port=free_port(),
                models={"default": ModelConfig(path=str(CHARS))},
                raas=RaaSConfig(slots=8, cancel_grace_s=0.2, engine=engine),
                plugins=["flow_plugin"],
            )
            started.append(services.enter_context(serving(msgspec.structs.replace(process, **fields), tmp_path)))
            return started[-1]

        yield begin


async def written(raas: Any, ref: str) -> bytes:
    """A record; it is written behind the delivery, which does not wait for the disk."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return bytes(await raas.client.raw(RaaSAPI.record, ref, timeout_s=WAIT_S))
        except UnknownName:
            assert time.monotonic() < end, f"record {ref} is not written"
            await asyncio.sleep(0.01)


def test_leases_go_in_and_groups_come_out_until_they_are_acknowledged(start: Start) -> None:
    async def test() -> None:
        raas = start({"correct": 1.0})
        await raas.up()
        await raas.register()
        assert await raas.submit(lease("a", 4), lease("b", 4), lease("c", 4), lease("a", 4)) == [
            "accepted",
            "accepted",
            "over_capacity",
            "duplicate",
        ]
        first = await raas("pull", Pull(wait_s=WAIT_S / 2, max_items=1))
        again = await raas("pull", Pull(wait_s=WAIT_S / 2, max_items=1))
        assert [d.delivery_id for d in first.deliveries] == [d.delivery_id for d in again.deliveries], "a lost reply comes again"
        group = decode(bytes(first.deliveries[0].group), Group)
        assert [(t.index, t.reward, t.finish) for t in group.trajectories] == [(i, 1.0, "stop") for i in range(4)]
        assert {held.state for held in (await raas("leases")).held} <= {"running", "done"}
        groups = await raas.groups(2)
        assert sorted(g.lease_id for g in groups) == ["a", "b"]
        reply = await raas("pull", Pull())
        assert (reply.deliveries, reply.in_flight, reply.free_slots, reply.waiting) == ([], 0, 8, 0)
        assert reply.serving["default"].version == 0
        assert await raas.submit(lease("a", 4)) == ["duplicate"], "acknowledged is not forgotten"
        assert (await raas("leases")).held == []
        record = await written(raas, group.trajectories[0].record_ref)
        assert msgspec.json.decode(record)["calls"][0]["answer"] == "5"
        with pytest.raises(UnknownName):
            await raas.client.raw(RaaSAPI.record, "nothing", timeout_s=WAIT_S)

    run(test())


def test_workflows_that_raise_return_none_or_hang_are_results(start: Start) -> None:
    async def test() -> None:
        raas = start()
        await raas.up()
        await raas.register(workflow="flow_moody", reward="")
        moods = [lease(mood, data={"mood": mood}) for mood in ("raise", "none")]
        await raas.submit(*moods, lease("hang", data={"mood": "hang"}, deadline_s=0.3))
        by_id = {group.lease_id: group.trajectories for group in await raas.groups(3)}
        assert [t.finish for t in by_id["none"]] == ["rejected", "rejected"]
        kinds = {name: {(t.error.boundary, t.error.kind) for t in by_id[name] if t.error} for name in ("raise", "hang")}
        assert kinds == {"raise": {("workflow", "exception")}, "hang": {("workflow", "timeout")}}
        assert (await raas("availability")).free_slots == 8
        with pytest.raises(UnknownName, match="did you mean 'flow_moody'"):
            await raas.register("x", workflow="flow_mody")

    run(test())


def test_a_reward_that_mostly_fails_is_data_a_metric_and_in_the_end_a_closed_gate(start: Start) -> None:
    """Fault 35's other half: errors are told apart from scores; other workflows go on."""

    async def test() -> None:
        rewards = RewardsConfig(max_error_rate=0.5)
        raas = start(raas=RaaSConfig(slots=32, rewards=rewards, engine=EngineConfig(kind="scripted", options={"initial": True})))
        await raas.up()
        await raas.register("bad", reward="flow_broken")
        await raas.register("good", reward="last_number")
        answers = [(f"{answer}{n}", {"prompt": "2 + 3 =", "answer": answer}) for answer in ("raise", "5") for n in range(2)]
        judged = [lease(name, 8, "bad", data=data) for name, data in answers]
        assert await raas.submit(*judged[2:]) == ["accepted"] * 2
        await raas.groups(2)
        assert (await raas("status")).metrics["reward/flow_broken/error_rate"] == 0.0, "too few to tell"
        assert await raas.submit(*judged[:2]) == ["accepted"] * 2, "half of them: not above the limit yet"
        for group in await raas.groups(2):
            errors = [(t.error.boundary, t.error.kind, t.reward) for t in group.trajectories if t.error]
            assert errors == [("reward", "exception", None)] * 8
        assert await raas.submit(msgspec.structs.replace(judged[0], lease_id="more")) == ["accepted"]
        await raas.groups(1)
        reply = await raas("submit", Submit(leases=[lease("late", workflow="bad")]))
        assert reply.verdicts[0].verdict == "refused"
        assert "reward 'flow_broken': 60% of its verdicts" in reply.verdicts[0].reason
        status = await raas("status")
        assert "flow_broken" in status.message
        assert status.metrics["reward/flow_broken/error_rate"] == 0.6
        assert (status.metrics["reward/flow_broken/exception"], status.metrics["reward/flow_broken/scored"]) == (24, 16)
        assert await raas.submit(lease("other", workflow="good")) == ["accepted"]

    run(test())


def test_the_lanes_of_a_dataflow_that_was_restarted_end_with_the_first_call_of_its_next_life(start: Start) -> None:
    async def test() -> None:
        raas = start()
        await raas.up()
        await raas("eval_start", EvalStart(lane="e", versions={"default": Serving(timeline=0, version=0, digest="")}, deadline_s=300))
        await raas("leases")
        assert (await raas("status")).lanes == ["e"]
        async with Client(raas.url, new_identity(raas.process.run_id, raas.process.token)) as next_life:
            await next_life.call(RaaSAPI.leases, timeout_s=WAIT_S)
        assert (await raas("status")).lanes == []

    run(test())


def test_status_answers_while_a_load_is_slow_and_the_lane_pins_versions(start: Start, tmp_path: Path) -> None:
    """Real weights: a sender, a receiver, and loads put off by an evaluation lane."""
    torch = pytest.importorskip("torch")
    from astraflow.weights.config import WeightsConfig
    from astraflow.weights.manager import WeightManager

    async def test(manager: Any) -> None:
        raas = start({"initial": False, "fail_loads": [1]}, kind="flow_plugin:Gated")
        await raas.up()
        await raas.register()
        reply = await raas("submit", Submit(leases=[lease()]))
        assert (reply.verdicts[0].verdict, reply.serving) == ("refused", {})
        assert "no weights" in reply.verdicts[0].reason
        digests = [await asyncio.to_thread(publish, manager, torch, version) for version in range(2)]

        def notice(version: int, timeline: int = 1, wait_s: float = WAIT_S) -> NotifyRaaS:
            return NotifyRaaS(
                model_id="default",
                timeline=timeline,
                version=version,
                digest=digests[version],
                sender_endpoint=manager.endpoint,
                wait_s=wait_s,
            )

        gate = tmp_path / "gate"
        gate.touch()
        loading = asyncio.create_task(raas("notify_version", notice(0)))
        while (await raas("status")).engines["default"].state != "loading":
            await asyncio.sleep(0.02)
        for _ in range(3):
            status = await raas("status")
            assert (status.engines["default"].state, status.serving) == ("loading", {}), "the receipt waits for the engine's word"
        gate.unlink()
        assert (await loading).state == "loaded"
        assert (await raas("notify_version", notice(0))).state == "current"
        failed = await raas("notify_version", notice(1))
        assert (failed.state, failed.serving["default"].version) == ("failed", 0)
        assert "version 1" in (await raas("status")).message

        serving = Serving(timeline=1, version=0, digest=digests[0])
        with pytest.raises(Conflict, match="version 1"):
            await raas("eval_start", EvalStart(lane="e", versions={"default": Serving(timeline=1, version=1, digest="")}))
        await raas("eval_start", EvalStart(lane="e", versions={"default": serving}, deadline_s=5 * WAIT_S))
        while "lane" not in (put_off := await raas("notify_version", notice(1, wait_s=0.1))).message:
            assert put_off.state == "loading"
        assert (put_off.state, "lane" in put_off.message) == ("loading", True)
        assert await raas.submit(lease("e1", 1), lane="e") == ["accepted"]
        group = (await raas.groups(1, lane="e"))[0]
        assert group.versions["default"].max == 0
        await raas("eval_end", EvalEnd(lane="e"))
        with pytest.raises(Conflict, match="not open"):
            await raas("eval_pull", Pull(lane="e"))
        after = await raas("notify_version", notice(1))
        assert (after.state in ("loaded", "current"), after.serving["default"].version) == (True, 1), "what was put off is loaded"
        assert await raas.submit(lease("dead")) == ["accepted"]
        await raas("pull", Pull(wait_s=WAIT_S / 2))
        rolled = await raas("notify_version", notice(0, timeline=2))
        assert (rolled.state, rolled.serving["default"].timeline, rolled.serving["default"].version) == ("loaded", 2, 0)
        assert (await raas("leases")).held == [], "what the dead timeline produced is gone"
        assert (await raas("notify_version", notice(1, timeline=1))).state == "current", "a notice of a dead timeline"
        metrics = (await raas("status")).metrics
        assert metrics["weights/failures"] == 1
        assert metrics["weights/syncs_full"] >= 2

    manager = WeightManager("default", WeightsConfig(streams=2), new_identity("test"), tmp_path)
    try:
        run(test(manager))
    finally:
        manager.close()


def publish(manager: Any, torch: Any, version: int) -> str:
    named = [("w", torch.full((64, 64), 1.0 + version)), ("b", torch.arange(64, dtype=torch.float32))]
    manager.offload(named, version)
    return str(manager.published(version, WAIT_S))


class FakeDataflow:
    """The two routes of registration; everything else of Dataflow is not there."""

    def __init__(self, port: int, token: str = "") -> None:
        self.calls: list[Message] = []
        self.failures = 1
        handlers: dict[str, Handler] = dict.fromkeys(table(DataflowAPI), self._nothing)
        handlers.update(register_raas=self._register, deregister_raas=self._deregister)
        self.server = Server("dataflow", DataflowAPI, handlers, new_identity("test", token), port=port)

    async def _nothing(self, request: Message) -> Message:
        raise UnknownName("not here")

    async def _register(self, request: RegisterRaaS) -> RegisterRaaSReply:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("an answer that is an error is no registration")
        self.calls.append(request)
        return RegisterRaaSReply(instance_id=request.instance_id, pool_size=1)

    async def _deregister(self, request: DeregisterRaaS) -> Empty:
        self.calls.append(request)
        return Empty()

    async def count(self, n: int) -> None:
        await poll_until(lambda: len(self.calls) >= n, WAIT_S, f"{n} calls", 0.02)


@asynccontextmanager
async def dataflow(port: int, token: str = "") -> AsyncIterator[FakeDataflow]:
    fake = FakeDataflow(port, token)
    await fake.server.start()
    try:
        yield fake
    finally:
        await fake.server.stop(1.0)


def test_it_registers_whenever_dataflow_comes_and_again_with_a_new_one(start: Start) -> None:
    async def test() -> None:
        port = free_port()
        raas = start(dataflow_url=http_url("127.0.0.1", port))
        await raas.up()
        assert "not registered" in (await raas("status")).message
        async with dataflow(port) as first:
            await first.count(1)
            call = first.calls[0]
            assert isinstance(call, RegisterRaaS)
            assert (call.instance_id, call.url, call.total_slots, call.models) == ("raas0", raas.url, 8, ["default"])
            assert call.tokenizer_hash["default"]
        async with dataflow(port) as second:
            second.failures = 0
            peer = Client(raas.url, second.server.identity)
            await peer.call(RaaSAPI.leases, timeout_s=WAIT_S)
            await second.count(1)
            await peer.close()
            raas.child.signal(signal.SIGTERM)
            assert await raas.ended() == 0
            assert isinstance(second.calls[-1], DeregisterRaaS)

    run(test())


@pytest.mark.parametrize("fields", [{"token": "wrong"}, {"run_id": "another"}], ids=str)
def test_a_wrong_token_or_run_is_final(start: Start, tmp_path: Path, fields: dict[str, Any]) -> None:
    async def test() -> None:
        port = free_port()
        async with dataflow(port, "right") as fake:
            raas = start(**{"token": "right", "dataflow_url": http_url("127.0.0.1", port), **fields})
            assert await raas.ended() == 2
            assert not fake.calls
        lines = [line for line in (tmp_path / "out.log").read_text().splitlines() if "ERROR" in line]
        assert len(lines) == 1, lines
        assert "dataflow_url" in lines[0]

    run(test())


def test_sigterm_drains_what_runs_and_hands_it_out(start: Start) -> None:
    async def test() -> None:
        raas = start({"token_s": 0.05})
        await raas.up()
        await raas.register()
        await raas.submit(lease("a", 2, data={"prompt": "say", "answer": "1"}))
        raas.child.signal(signal.SIGTERM)
        await poll_until(lambda: _state(raas, "draining"), WAIT_S, "draining", 0.01)
        reply = await raas("submit", Submit(leases=[lease("b")]))
        assert (reply.verdicts[0].verdict, "draining" in reply.verdicts[0].reason) == ("refused", True)
        assert [g.lease_id for g in await raas.groups(1)] == ["a"]
        assert await raas.ended() == 0

    run(test())


async def _state(raas: Raas, state: str) -> bool:
    return bool((await raas("status")).state == state)


def test_shutdown_ends_it_with_zero_although_work_hangs(start: Start) -> None:
    async def test() -> None:
        raas = start()
        await raas.up()
        await raas.register(workflow="flow_moody", reward="")
        await raas.submit(lease("a", data={"mood": "hang"}))
        await raas("shutdown", Shutdown(reason="test", deadline_s=0.2))
        assert await raas.ended() == 0

    run(test())


def test_cancelled_leases_are_forgotten_and_json_clients_are_served(start: Start) -> None:
    async def test() -> None:
        raas = start(token="secret")
        raas.client = Client(raas.url, new_identity("test", "secret"))
        await raas.up()
        await raas.register(workflow="flow_moody", reward="")
        await raas.submit(lease("a", data={"mood": "hang"}))
        assert (await raas("availability")).in_flight == 2
        await raas("cancel", CancelLeases(lease_ids=["a"]))
        assert (await raas("availability")).in_flight == 0
        reply = httpx.get(raas.url + "/status", headers={"authorization": "Bearer secret"}, timeout=WAIT_S)
        assert reply.json()["instance_id"] == "raas0"
        with pytest.raises(AuthError):
            await Client(raas.url, new_identity("test")).call(RaaSAPI.status, timeout_s=WAIT_S)

    run(test())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"models": {"default": ModelConfig(path="/nowhere")}}, "models.default.path"),
        ({"raas": RaaSConfig(engine=EngineConfig(kind="scriptd"))}, "did you mean 'scripted'"),
        ({"raas": RaaSConfig(engine=EngineConfig(kind="scripted", options={"token": 1}))}, "raas.engine.options"),
        ({"plugins": ["no_such_module"]}, "no_such_module"),
        ({"host": "0.0.0.0"}, "token"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(start: Start, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    async def test() -> None:
        raas = start(**fields)
        assert await raas.ended() == 2
        lines = (tmp_path / "out.log").read_text().strip().splitlines()
        assert len(lines) == 1, lines
        assert text in lines[0]

    run(test())
