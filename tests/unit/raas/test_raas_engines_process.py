"""The parent of an engine child: a real process that speaks frames, and all the ways in which it can fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.aio import poll_until
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import ConfigError
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines.base import EngineError, EngineSetup, Weights
from astraflow.raas.engines.frames import Init
from astraflow.raas.engines.process import ProcessEngine, embedded
from astraflow.workflows.api import EpisodeError, ModelRequest

WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
CHARS = Path(__file__).parents[2] / "data" / "chars-model"
CHILD = """
import os, socket, sys, time
from astraflow.raas.engines import frames as f
from astraflow.workflows.api import ModelResponse

mode, fd = sys.argv[1], int(sys.argv[2])
if mode == "user":
    print("some library noise"); sys.exit("ConfigError: model_dir: cannot be served")
if mode == "dies":
    sys.exit(3)
conn, box, version, timeline = socket.socket(fileno=fd), f.to_child(), -1, 0
say = lambda frame: conn.sendall(f.pack(frame))
while data := conn.recv(1 << 16):
    for frame in box.feed(data):
        if isinstance(frame, f.Init):
            say(f.Ready(pid=os.getpid(), max_len=64, device="cpu", dtype="float32", seconds=0.0, loaded=False))
        elif isinstance(frame, f.Ping):
            if mode != "silent":
                say(f.Pong(nonce=frame.nonce, running=1, queued=2, version=version, timeline=timeline, stats={"tokens_per_s": 7.0}))
        elif isinstance(frame, f.Load):
            if frame.version == 13:
                say(f.LoadFailed(timeline=frame.timeline, version=13, message="no tensor w"))
            else:
                time.sleep({"slow": 0.5, "slower": 2.5}.get(mode, 0))
                version, timeline = frame.version, frame.timeline
                say(f.Loaded(timeline=timeline, version=version, digest=frame.digest, seconds=0.1))
        elif isinstance(frame, f.Generate):
            ask = frame.request.input_ids[0]
            if ask == 99:
                os.abort()
            elif ask == 98:
                say(f.Failed(id=frame.id, kind="overlong", message="too long"))
            elif ask != 97:
                one = ModelResponse(output_ids=[ask], logprobs=[-1.0], versions=[version], finish="stop", timeline=timeline)
                say(f.Done(id=frame.id, response=one))
        elif isinstance(frame, f.Cancel):
            say(f.Failed(id=frame.id, kind="cancelled", message=""))
            open(sys.argv[3], "a").write(frame.id + chr(10))
        elif isinstance(frame, f.Stop):
            sys.exit(0)
"""
V1 = Weights(path="/w", timeline=1, version=1, digest="d1")


class Bench:
    """One engine on the child above."""

    def __init__(self, tmp_path: Path, mode: str = "good", **config: Any) -> None:
        self.staged: Weights | None = None
        self.deaths: list[str] = []
        self.cancelled = tmp_path / "cancelled"
        script = tmp_path / "child.py"
        script.write_text(CHILD)
        tokenizer = Tokenizer.load(CHARS)
        self.setup = EngineSetup(
            model_id="default",
            model_dir=CHARS,
            tokenizer=tokenizer,
            eos_ids=[2],
            context_length=64,
            max_slots=4,
            config=EngineConfig(start_s=WAIT_S, **config),
            dtype="float32",
            staged=lambda: self.staged,
            on_death=self.deaths.append,
            log_path=tmp_path / "engine.log",
        )
        self.engine = ProcessEngine(
            "test", self.setup, lambda fd: [sys.executable, str(script), mode, str(fd), str(self.cancelled)], Init(model_dir="x")
        )

    async def ask(self, token: int, request_id: str = "r") -> Any:
        return await self.engine.agenerate(ModelRequest(request_id=request_id, input_ids=[token], max_new_tokens=4))


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(110):
            await test

    asyncio.run(bounded())


def with_engine(bench: Bench, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await bench.engine.start()
            await test(bench)
        finally:
            pid = bench.engine.report().status.pid
            await bench.engine.close()
            if pid:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    run(whole())


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    return lambda mode="good", **config: Bench(tmp_path, mode, **config)


def test_requests_loads_and_pings_are_answered(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        assert b.engine.report().serving is None
        await b.engine.load(V1)
        assert b.engine.report().serving == V1.serving
        answers = await asyncio.gather(*(b.ask(token, str(token)) for token in range(5, 20)))
        assert [a.output_ids for a in answers] == [[token] for token in range(5, 20)]
        assert answers[0].versions == [1]
        await poll_until(lambda: b.engine.report().status.queued == 2, WAIT_S, "pong")
        assert b.engine.report().metrics["tokens_per_s"] == 7.0

    with_engine(bench(ping_s=0.05), test)


def test_a_failed_load_keeps_the_old_receipt(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.engine.load(V1)
        with pytest.raises(EngineError, match="no tensor w"):
            await b.engine.load(Weights(path="/w", timeline=1, version=13, digest="x"))
        assert b.engine.report().serving == V1.serving
        assert b.engine.report().status.state == "ready"

    with_engine(bench(), test)


def test_an_overlong_request_is_the_prompts_fault(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        with pytest.raises(EpisodeError) as caught:
            await b.ask(98)
        assert (caught.value.boundary, caught.value.kind) == ("prompt", "overlong")

    with_engine(bench(), test)


def test_a_dead_child_fails_its_requests_and_comes_back_with_its_weights(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        b.staged = V1
        await b.engine.load(V1)
        waiting = asyncio.create_task(b.ask(97, "waits"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError) as caught:
            await b.ask(99, "kills")
        assert caught.value.retryable
        with pytest.raises(EngineError) as caught:
            await waiting
        assert (caught.value.kind, caught.value.retryable) == ("crash", True)
        assert (await b.ask(7)).versions == [1], "no request is served before the weights are back"
        assert b.engine.report().status.restarts == 1
        assert b.engine.report().serving == V1.serving

    with_engine(bench(), test)


def test_a_restart_without_loadable_weights_takes_the_receipt_back(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.engine.load(V1)
        b.staged = Weights(path="/w", timeline=1, version=13, digest="x")
        pid = b.engine.report().status.pid
        os.kill(pid, signal.SIGKILL)
        await poll_until(lambda: b.engine.report().status.pid not in (0, pid) and b.engine.report().serving is None, WAIT_S, "restart")
        await poll_until(lambda: "no tensor w" in b.engine.report().status.message, WAIT_S, "message")
        await b.engine.load(V1)
        assert b.engine.report().serving == V1.serving

    with_engine(bench(), test)


def test_a_silent_child_is_killed_and_replaced(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await poll_until(lambda: b.engine.report().status.restarts >= 1, WAIT_S, "restart")
        assert "no sign of life" in b.engine.report().status.message or b.engine.report().status.state == "ready"

    with_engine(bench("silent", ping_s=0.05, ping_deadline_s=0.3), test)


def test_a_child_is_not_silent_while_its_parent_stands_still(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        for _ in range(2):
            time.sleep(2.0)  # as a stopped process or a paused machine: no ping is sent, no answer is read
            await b.ask(7)
        assert b.engine.report().status.restarts == 0

    with_engine(bench(ping_s=0.05, ping_deadline_s=1.5), test)


def test_a_load_may_take_longer_than_a_ping(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.engine.load(V1)
        assert b.engine.report().status.restarts == 0

    with_engine(bench("slower", ping_s=0.05, ping_deadline_s=1.5, load_s=WAIT_S), test)


def test_the_receipt_stands_while_the_same_weights_come_back(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        b.staged = V1
        await b.engine.load(V1)
        pid = b.engine.report().status.pid
        os.kill(pid, signal.SIGKILL)
        await poll_until(lambda: b.engine.report().status.restarts == 1, WAIT_S, "its death is noticed", 0.001)
        answer = asyncio.create_task(b.ask(7))
        while not answer.done():
            assert b.engine.report().serving == V1.serving
            await asyncio.sleep(0.01)
        assert (await answer).versions == [1]
        assert b.engine.report().status.restarts == 1

    with_engine(bench("slow"), test)


def test_a_failed_supervision_gives_up_loudly_instead_of_leaving_requests_waiting(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        b.staged = object()  # type: ignore[assignment]  # a bug of the one who names the staged weights
        os.kill(b.engine.report().status.pid, signal.SIGKILL)
        await poll_until(lambda: b.deaths, WAIT_S, "death")
        assert "supervision failed" in b.deaths[0]
        with pytest.raises(EngineError, match="supervision"):
            await b.ask(7)

    with_engine(bench(), test)


def test_lives_leave_no_descriptors_and_no_zombies(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        gc.collect()  # what earlier tests dropped is not counted
        descriptors = len(os.listdir("/proc/self/fd"))
        for life in (1, 2):
            pid = b.engine.report().status.pid
            os.kill(pid, signal.SIGKILL)
            status = b.engine.report().status
            await poll_until(lambda life=life, status=status: status.restarts == life and status.pid, WAIT_S, "restart")
            assert not os.path.exists(f"/proc/{pid}")
        assert (await b.ask(7)).finish == "stop"
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    with_engine(bench(), test)


def test_over_the_limit_it_gives_up_once_and_says_so(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        os.kill(b.engine.report().status.pid, signal.SIGKILL)
        await poll_until(lambda: b.deaths, WAIT_S, "death")
        assert b.engine.report().status.state == "error"
        with pytest.raises(EngineError) as caught:
            await b.ask(7)
        assert (caught.value.kind, caught.value.retryable) == ("dead", False)
        assert len(b.deaths) == 1

    with_engine(bench(max_restarts=0), test)


def test_a_cancelled_call_cancels_the_request(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        call = asyncio.create_task(b.ask(97, "slow"))
        await asyncio.sleep(0.05)
        call.cancel()
        await poll_until(lambda: b.cancelled.exists() and b.cancelled.read_text() == "slow\n", WAIT_S, "cancel")

    with_engine(bench(), test)


def test_a_first_start_that_fails_says_whose_mistake_it_is(bench: Callable[..., Bench]) -> None:
    for mode, kind, text in [("user", ConfigError, "cannot be served"), ("dies", EngineError, "did not start")]:
        made = bench(mode)
        with pytest.raises(kind, match=text):
            run(made.engine.start())
        assert made.engine.report().status.pid == 0


def test_unknown_options_of_the_embedded_engine_are_named(bench: Callable[..., Bench]) -> None:
    made = bench(options={"kv_byte": 1})
    with pytest.raises(ConfigError, match="did you mean 'kv_bytes'"):
        asyncio.run(_make(made.setup))
    made = bench(options={"kv_bytes": "much"})
    with pytest.raises(ConfigError, match="kv_bytes"):
        asyncio.run(_make(made.setup))


async def _make(setup: EngineSetup) -> None:
    embedded(setup)
