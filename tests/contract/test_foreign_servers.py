"""The engines of foreign servers against stand-ins that follow the documented schemas to the letter, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from astraflow.lib.aio import poll_until
from astraflow.lib.proc import Child
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import ConfigError
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines import ENGINES
from astraflow.raas.engines.base import EngineError, EngineSetup, Weights
from astraflow.workflows.api import ModelRequest, ModelResponse

WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
CHARS = Path(__file__).parents[1] / "data" / "chars-model"
FOREIGN = Path(__file__).parent / "foreign"
KINDS = ("vllm", "sglang")
MAIN = """
import asyncio, sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_foreign_servers import Bench
async def main():
    bench = Bench(Path(sys.argv[2]), "vllm")
    await bench.engine.start()
    print(bench.engine.report().status.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Bench:
    """One engine on a stand-in; `foreign` are its FOREIGN_* variables."""

    def __init__(
        self, tmp_path: Path, kind: str, *, foreign: dict[str, str] | None = None, config: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.staged: Weights | None = None
        self.deaths: list[str] = []
        self.directory = tmp_path
        tokenizer = Tokenizer.load(CHARS)
        env = {"PYTHONPATH": str(FOREIGN), **{f"FOREIGN_{name}": value for name, value in (foreign or {}).items()}}
        self.setup = EngineSetup(
            model_id="m",
            model_dir=CHARS,
            tokenizer=tokenizer,
            eos_ids=list(tokenizer.eos_ids),
            context_length=128,
            max_slots=16,
            config=EngineConfig(kind=kind, start_s=WAIT_S, ping_s=0.1, options={"env": env, **options}, **(config or {})),
            dtype="float32",
            staged=lambda: self.staged,
            on_death=self.deaths.append,
            log_path=tmp_path / "engine.log",
        )
        self.engine = ENGINES.get(kind)(self.setup)

    def weights(self, version: int, *, tied: bool = False) -> Weights:
        """A staged file whose only number is its version."""
        path = self.directory / f"v{version}" / "model.safetensors"
        path.parent.mkdir(exist_ok=True)
        names = ["model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight", "lm_head.weight"]
        ties = {"astraflow.tied": json.dumps({"lm_head.weight": "model.embed_tokens.weight"})}
        save_file({name: np.array([version], np.float32) for name in names}, path, metadata=ties)
        return Weights(path=str(path), timeline=3, version=version, digest=f"d{version}")

    async def load(self, version: int) -> None:
        weights = self.weights(version)
        await self.engine.load(weights)
        self.staged = weights

    async def ask(self, number: int = 0, new: int = 20, **fields: Any) -> ModelResponse:
        """A prompt that never ends by itself; the token at place n is the digit n % 10."""
        asked = {"input_ids": [127, 30 + number], **fields}
        return await self.engine.agenerate(ModelRequest(request_id=f"r/{number}#1", max_new_tokens=new, seed=1 << 40, **asked))

    async def seen(self) -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{self.engine._launch.port}/seen", timeout=WAIT_S)).json()

    async def running(self, count: int) -> None:
        async def reached() -> bool:
            return bool((await self.seen())["running"] == count)

        await poll_until(reached, WAIT_S, f"{count} requests run")


def check(response: ModelResponse, new: int, prompt: int = 2) -> None:
    """Tokens are those of an uninterrupted generation, and every log-prob is that of the version that it is stamped with."""
    assert response.output_ids == [23 + (prompt + at) % 10 for at in range(new)]
    expected = [-version - token / 1000 for version, token in zip(response.versions, response.output_ids, strict=True)]
    assert response.logprobs == pytest.approx(expected)
    assert response.versions == sorted(response.versions)
    assert (response.finish, response.timeline) == ("length", 3)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def with_engine(bench: Bench, test: Callable[[Bench], Awaitable[None]]) -> None:
    """Nothing of the server is left when it is closed."""

    async def whole() -> None:
        pids: list[int] = []
        async with asyncio.timeout(4 * WAIT_S):
            try:
                await bench.engine.start()
                await test(bench)
                seen = await bench.seen()
                pids = [seen["pid"], seen["child"]]
            finally:
                await bench.engine.close()
        assert [pid for pid in pids if alive(pid)] == []
        assert bench.deaths == []

    asyncio.run(whole())


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_asked_by_its_schema_and_answers_with_tokens_logprobs_and_versions(tmp_path: Path, kind: str) -> None:
    async def test(b: Bench) -> None:
        with pytest.raises(EngineError, match="no weights") as caught:
            await b.ask()
        assert caught.value.kind == "not_loaded"
        await b.load(1)
        assert b.engine.report().serving == b.weights(1).serving
        for number, response in enumerate(await asyncio.gather(*(b.ask(n) for n in range(16)))):
            assert number < 16
            check(response, 20)
            assert response.versions == [1] * 20
        ended = await b.ask(input_ids=[6, 30], greedy=True, temperature=0.7, top_p=0.9, top_k=5)
        assert (ended.output_ids[-1], len(ended.output_ids), ended.finish) == (2, 5, "stop")
        stopped = await b.ask(stop=["67"], stop_ids=[99])
        assert (stopped.output_ids, stopped.finish) == ([25, 26, 27, 28, 29, 30], "stop")
        assert len((await b.ask(new=3, stop_ids=[26])).output_ids) == 2
        with pytest.raises(EngineError, match="context length") as caught:
            await b.ask(input_ids=[127] * 128)
        assert (caught.value.kind, caught.value.retryable) == ("refused", False)
        last = (await b.seen())["bodies"][-2]
        assert last.get("seed") is None, "vLLM gets none"
        assert last.get("sampling_params", {}).get("sampling_seed", 0) == (1 << 40) % (1 << 31), "it has 31 bits there"
        assert set(last.get("stop_token_ids") or last["sampling_params"]["stop_token_ids"]) == {2, 26}
        arguments = (await b.seen())["args"]
        assert {"2", "0.5", "float32", "16", "128", "m", "dummy"} <= set(arguments.values())
        await b.load(2)
        check(await b.ask(), 20)
        assert (await b.seen())["weight"] == 2.0

    args = ["--enable-deterministic-inference"] if kind == "sglang" else []
    with_engine(Bench(tmp_path, kind, args=args, tensor_parallel=2, gpu_memory_utilization=0.5), test)


@pytest.mark.parametrize(
    ("kind", "lacks", "versions"),
    [
        ("vllm", "", {1, 2}),
        ("sglang", "", {1, 2}),
        ("vllm", "/collective_rpc", {1, 2}),
        pytest.param("sglang", "/pause_generation", None, marks=pytest.mark.full),
    ],
)
def test_an_update_while_requests_run_drops_none_and_stamps_every_token(
    tmp_path: Path, kind: str, lacks: str, versions: set[int] | None
) -> None:
    """Without a route for it the update is a restart on the new weights; without a pause what runs ends with the old server
    or is made again."""

    async def test(b: Bench) -> None:
        await b.load(1)
        pid = (await b.seen())["pid"]
        asked = [asyncio.create_task(b.ask(n, new=40)) for n in range(12)]
        await b.running(12)
        await poll_until(lambda: b.engine.report().status.running == 12, WAIT_S, "the gauge")
        assert b.engine.report().metrics["kv_use"] == 12.0
        asked[0].cancel()
        await b.running(11)
        await b.load(2)
        assert b.engine.report().serving == b.weights(2).serving
        assert ((await b.seen())["pid"] == pid) == (not lacks)
        assert b.engine.report().status.restarts == 0, "a restart that was wanted is no fault"
        responses = await asyncio.gather(*asked[1:])
        for response in responses:
            check(response, 40)
        assert versions in (None, {version for response in responses for version in response.versions})
        check(await b.ask(), 20)
        body = (await b.seen())["bodies"][-1]
        assert body.get("sampling_params", {}).get("sampling_seed") is None, "only a deterministic server knows seeds"

    with_engine(Bench(tmp_path, kind, foreign={"TOKEN_S": "0.04", "LACKS": lacks}), test)


def test_weights_that_cannot_be_served_leave_the_old_ones(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        await b.load(1)
        asked = asyncio.create_task(b.ask(new=40))
        await b.running(1)
        with pytest.raises(EngineError, match="weights are unusable") as caught:
            await b.load(5)
        assert caught.value.kind == "load_failed"
        assert b.engine.report().serving == b.weights(1).serving
        check(await asked, 40)
        await b.load(4)
        assert (await b.seen())["weight"] == 4.0, "what could not be loaded in place came by a restart"
        with pytest.raises(EngineError, match="export_tied"):
            await b.engine.load(b.weights(6, tied=True))
        assert b.engine.report().serving == b.weights(4).serving
        assert (await b.ask()).versions == [4] * 20

    foreign = {"TOKEN_S": "0.05", "BROKEN": "4", "UNUSABLE": "5"}
    with_engine(Bench(tmp_path, "vllm", foreign=foreign), test)


def test_a_killed_or_silent_server_comes_back_with_its_weights(tmp_path: Path) -> None:
    silence = tmp_path / "silence"

    async def test(b: Bench) -> None:
        await b.load(7)
        before = await b.seen()
        silence.touch()
        time.sleep(2.0)  # this process stands still, and then a ping fails
        await asyncio.sleep(0.4)
        silence.unlink()
        check(await b.ask(), 20)
        assert b.engine.report().status.restarts == 0
        asked = [asyncio.create_task(b.ask(n, new=100)) for n in range(8)]
        await b.running(8)
        os.kill(before["pid"], signal.SIGKILL)
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(failure, EngineError)
            assert (failure.kind, failure.retryable) == ("crash", True)
        check(await b.ask(), 20)
        assert b.engine.report().serving == b.weights(7).serving
        assert not alive(before["child"]), "a killed server's own children are ended too"
        silence.touch()
        await poll_until(lambda: b.engine.report().status.restarts == 2, WAIT_S, "the silent one is killed")
        silence.unlink()
        check(await b.ask(), 20)

    with_engine(Bench(tmp_path, "sglang", foreign={"TOKEN_S": "0.02", "SILENCE": str(silence)}, config={"ping_deadline_s": 1.0}), test)


@pytest.mark.full
def test_a_load_that_hangs_is_given_up_and_the_server_comes_back_with_the_old_weights(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        await b.load(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await b.load(2)
        response = await b.ask()
        check(response, 20)
        assert response.versions == [1] * 20

    with_engine(Bench(tmp_path, "vllm", foreign={"STUCK": "2"}), test)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raas\.engine\.options.*tensor_paralel"):
        Bench(tmp_path, "vllm", tensor_paralel=2)
    with pytest.raises(ConfigError, match=r"options\.python: '/no/python' is no program"):
        Bench(tmp_path, "sglang", python="/no/python")
    with pytest.raises(ConfigError, match=r"raas\.engine\.device 'cuda'"):
        Bench(tmp_path, "vllm", config={"device": "cuda"})

    async def start(bench: Bench) -> None:
        try:
            await bench.engine.start()
        finally:
            await bench.engine.close()

    with pytest.raises(EngineError, match=r"did not start: .*No module named .?vllm"):
        asyncio.run(start(Bench(tmp_path, "vllm", env={"PYTHONPATH": ""})))
    with pytest.raises(EngineError, match="return_token_ids"):
        asyncio.run(start(Bench(tmp_path, "vllm", foreign={"LACKS": "return_token_ids"})))


def test_a_server_and_its_children_end_with_the_service_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    service = Child([sys.executable, "-c", MAIN, str(Path(__file__).parent), str(tmp_path)], log_path=out)
    try:
        asyncio.run(poll_until(lambda: out.exists() and out.read_text().strip().isdigit(), WAIT_S, f"the engine is up: {out}"))
        group = int(out.read_text())
        members = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if alive(pid) and os.getpgid(pid) == group]
        assert len(members) == 3, "guard, server, and the server's child"
        os.kill(service.pid, signal.SIGKILL)
        asyncio.run(poll_until(lambda: not any(map(alive, members)), WAIT_S, "nothing is left"))
    finally:
        service.terminate(5.0)
