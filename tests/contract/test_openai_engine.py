"""The engine for frozen models against a stand-in that follows OpenAI's reference to the letter, in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow.lib.net import free_port
from astraflow.lib.proc import Child
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import AstraFlowError, ConfigError
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines.base import EngineError, EngineSetup, Weights
from astraflow.raas.engines.openai import OpenAIEngine
from astraflow.workflows.api import ModelRequest, ModelResponse

WAIT_S = 60.0
CHARS = Path(__file__).parents[1] / "data" / "chars-model"
SERVICE = Path(__file__).parent / "foreign" / "openai_service.py"


def with_service(
    test: Callable[[OpenAIEngine, Callable[..., Awaitable[ModelResponse]]], Awaitable[None]], *arguments: str, **options: Any
) -> list[dict[str, Any]]:
    """Run `test(engine, ask)` and return the bodies that the service saw."""
    port = free_port()
    service = Child([sys.executable, str(SERVICE), f"--port={port}", *arguments])
    tokenizer = Tokenizer.load(CHARS)

    async def whole() -> list[dict[str, Any]]:
        config = EngineConfig(kind="openai", start_s=WAIT_S, options={"url": f"http://127.0.0.1:{port}/v1", **options})
        setup = EngineSetup(
            model_id="helper",
            model_dir=CHARS,
            tokenizer=tokenizer,
            eos_ids=[2],
            context_length=128,
            max_slots=4,
            config=config,
            dtype="float32",
            staged=lambda: None,
            on_death=lambda reason: None,
            log_path=Path("/dev/null"),
        )
        engine = OpenAIEngine(setup)

        async def ask(text: str = "right?", **fields: Any) -> ModelResponse:
            request = ModelRequest(input_ids=tokenizer.encode(text), **{"max_new_tokens": 8, "seed": 5, **fields})
            return await engine.agenerate(request)

        try:
            async with asyncio.timeout(2 * WAIT_S):
                await engine.start()
                await test(engine, ask)
                async with httpx.AsyncClient() as client:
                    bodies: list[dict[str, Any]] = (await client.get(f"http://127.0.0.1:{port}/seen", timeout=WAIT_S)).json()["bodies"]
                    return bodies
        finally:
            await engine.close()

    try:
        return asyncio.run(whole())
    finally:
        service.terminate(5.0)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


def test_text_goes_in_and_out_where_nothing_else_is_offered() -> None:
    yes = Tokenizer.load(CHARS).encode("yes")

    async def test(engine: OpenAIEngine, ask: Any) -> None:
        whole, cut = await ask(temperature=0.5, stop=["."]), await ask(max_new_tokens=2)
        assert (whole.output_ids, whole.finish, whole.logprobs, whole.versions) == ([*yes, 2], "stop", [0.0] * 4, [0] * 4)
        assert (cut.output_ids, cut.finish) == (yes[:2], "length")
        assert (await ask(stop_ids=[yes[1]])).output_ids == yes[:2], "an end that the service does not know"
        with pytest.raises(EngineError, match="top_k 5"):
            await ask(top_k=5)
        with pytest.raises(EngineError, match="content_filter"):
            await ask("filter")
        with pytest.raises(EngineError, match="takes no weights") as caught:
            await engine.load(Weights(path="/w", timeline=0, version=1, digest=""))
        assert caught.value.kind == "frozen"
        report = engine.report()
        assert report.serving is not None
        assert (report.serving.version, report.serving.digest, report.status.state) == (0, "", "ready")

    first = with_service(test)[0]
    wanted = {"model": "judge", "prompt": "right?", "max_tokens": 8, "temperature": 0.5, "top_p": 1.0, "seed": 5, "stop": ["."]}
    assert first == wanted


def test_token_ids_go_in_and_out_where_they_are_offered_and_a_busy_service_is_asked_again() -> None:
    async def test(engine: OpenAIEngine, ask: Any) -> None:
        whole, cut = await ask(), await ask(max_new_tokens=2, greedy=True)
        assert (whole.output_ids, whole.finish, whole.logprobs) == ([30, 31, 2], "stop", [-0.5] * 3)
        assert (cut.output_ids, cut.finish) == ([30, 31], "length")
        assert engine.report().metrics == {"requests": 2.0, "failures": 2.0}

    bodies = with_service(test, "--token-ids", "--busy=2", model="judge")
    assert bodies[0]["prompt"] == Tokenizer.load(CHARS).encode("right?")
    assert bodies[-1]["temperature"] == 0.0


def test_a_service_that_only_chats_is_asked_in_one_message() -> None:
    async def test(engine: OpenAIEngine, ask: Any) -> None:
        assert (await ask()).output_ids == [*Tokenizer.load(CHARS).encode("no"), 2]

    assert with_service(test, api="chat")[0]["messages"] == [{"role": "user", "content": "right?"}]


def test_a_key_a_model_or_an_option_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(engine: OpenAIEngine, ask: Any) -> None:
        with pytest.raises(EngineError, match="Incorrect API key") as caught:
            await ask()
        assert not caught.value.retryable

    with_service(nothing, key_variable="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match=r"options\.model: 'jury'.*serves judge"):
        with_service(nothing, model="jury")
    for options, words in (({"url": "localhost:8000"}, "expected http://"), ({"models": "x"}, "models"), ({"api": "soap"}, "api")):
        with pytest.raises(AstraFlowError, match=words):
            with_service(nothing, **options)
