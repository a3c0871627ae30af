"""Registration: in any order, never by mistake, again when Dataflow is another process or silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from astraflow.lib.aio import Backoff, poll_until
from astraflow.lib.wire import Handler, Server, new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import RegisterRaaS, RegisterRaaSReply
from astraflow.protocol.errors import Conflict, UserError
from astraflow.protocol.message import Message
from astraflow.protocol.routes import DataflowAPI, table
from astraflow.raas.registration import Registrar


class Dataflow:
    """A server of the real routes whose answers a test decides."""

    def __init__(self, answers: list[Any], port: int = 0) -> None:
        self.answers, self.calls = answers, 0
        handlers: dict[str, Handler] = dict.fromkeys(table(DataflowAPI), self._register)
        self.server = Server("dataflow", DataflowAPI, handlers, new_identity("run"), port=port)

    async def _register(self, request: Message) -> Message:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return RegisterRaaSReply(instance_id=answer, pool_size=1)

    async def __aenter__(self) -> Dataflow:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(1.0)


def registrar(url: str, silence_s: float = 60.0) -> tuple[Registrar, Client, list[str]]:
    client, seen = Client(url, new_identity("")), list[str]()
    message = RegisterRaaS(instance_id="r", url="http://127.0.0.1:1", models=["m"], total_slots=1)
    pauses = Backoff(0.01, 1.0, 0.01)
    made = Registrar(client, lambda: message, silence_s=silence_s, on_registered=lambda reply: seen.append(reply.run_id), backoff=pauses)
    return made, client, seen


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def test_an_error_reply_is_no_registration_and_is_tried_again() -> None:
    """Fault 23 of the public implementation: HTTP 500 taken for success."""

    async def test() -> None:
        async with Dataflow([RuntimeError("boom"), RuntimeError("boom"), "r"]) as dataflow:
            made, client, seen = registrar(dataflow.server.url)
            task = asyncio.create_task(made.run())
            await poll_until(lambda: made.known, 30, "registered", 0.005)
            assert (dataflow.calls, made.known, seen, made.message) == (3, dataflow.server.identity.incarnation, ["run"], "")
            task.cancel()
            await client.close()

    run(test)


@pytest.mark.parametrize(("answer", "error"), [(Conflict("another tokenizer"), Conflict), ("somebody", UserError)])
def test_a_refusal_or_an_answer_for_somebody_else_ends_it(answer: Any, error: type[Exception]) -> None:
    async def test() -> None:
        async with Dataflow([answer]) as dataflow:
            made, client, _ = registrar(dataflow.server.url)
            with pytest.raises(error):
                await made.run()
            await client.close()

    run(test)


def test_only_calls_that_dataflow_alone_makes_reveal_a_new_one() -> None:
    async def test() -> None:
        async with Dataflow(["r"]) as dataflow:
            made, client, _ = registrar(dataflow.server.url)
            made.heard("early", True)
            task = asyncio.create_task(made.run())
            await poll_until(lambda: made.known, 30, "registered", 0.005)
            made.heard("somebody with a browser", False)
            made.heard(made.known, True)
            await asyncio.sleep(0.05)
            assert dataflow.calls == 1
            made.heard("a new Dataflow", True)
            await poll_until(lambda: dataflow.calls == 2, 30, "registered again", 0.005)
            task.cancel()
            await client.close()

    run(test)


def test_silence_makes_it_register_again() -> None:
    async def test() -> None:
        async with Dataflow(["r"]) as dataflow:
            made, client, _ = registrar(dataflow.server.url, silence_s=0.05)
            task = asyncio.create_task(made.run())
            await poll_until(lambda: dataflow.calls >= 3, 30, "registered again", 0.005)
            task.cancel()
            await client.close()

    run(test)
