from __future__ import annotations

import asyncio
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from astraflow.lib.net import free_port, http_url
from astraflow.lib.wire import Identity, Server, new_identity
from astraflow.lib.wire_client import Client, SyncClient
from astraflow.protocol import control, errors, weights
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.errors import (
    AstraFlowError,
    AuthError,
    BadMessage,
    ConfigError,
    DeadlinePassed,
    RemoteError,
    Unavailable,
    UnknownName,
    WrongProtocol,
    WrongRun,
)
from astraflow.protocol.message import Empty
from astraflow.protocol.routes import DataflowAPI, RaaSAPI, SenderAPI, table

RUN = new_identity("run-1")
Caller = Callable[..., Awaitable[Any]]


async def unused(request: Any) -> Any:
    raise AssertionError("not called in this test")


def handlers(api: type, **given: Callable[[Any], Awaitable[Any]]) -> dict[str, Any]:
    return {name: given.get(name, unused) for name in table(api)}


async def version(request: Empty) -> weights.SenderVersion:
    return weights.SenderVersion(model_id=request.incarnation, version=7, digest="d")


def with_both_clients(server: Server, identity: Identity, scenario: Callable[[Caller, Caller], Awaitable[None]]) -> None:
    """Run a scenario with the asyncio client and once more with the blocking one (in a thread)."""

    async def run() -> None:
        await server.start()
        async with Client(server.url, identity) as client:
            await scenario(client.call, client.raw)
        with SyncClient(server.url, identity) as blocking:

            async def call(*args: Any, **kwargs: Any) -> Any:
                return await asyncio.to_thread(blocking.call, *args, **kwargs)

            async def raw(*args: Any, **kwargs: Any) -> Any:
                return await asyncio.to_thread(blocking.raw, *args, **kwargs)

            await scenario(call, raw)
        await server.stop(0.2)

    asyncio.run(run())


def test_calls_carry_our_identity_and_replies_that_of_the_other_side() -> None:
    async def scenario(call: Caller, raw: Caller) -> None:
        reply = await call(SenderAPI.get_version, timeout_s=60)
        assert (reply.version, reply.model_id, reply.run_id) == (7, RUN.incarnation, "run-1")
        assert reply.incarnation == "other-life"

    server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), Identity("run-1", "other-life"))
    with_both_clients(server, RUN, scenario)


def test_get_requests_travel_as_query_parameters_of_every_plain_type() -> None:
    async def batch(request: BatchRequest) -> BatchReply:
        return BatchReply(kind="wait", reason=repr((request.model_id, request.timeline, request.version, request.wait_s)))

    async def scenario(call: Caller, raw: Caller) -> None:
        reply = await call(DataflowAPI.batch, BatchRequest(model_id="a&b=ü ", timeline=-1, version=3, wait_s=0.5), timeout_s=60)
        assert reply.reason == repr(("a&b=ü ", -1, 3, 0.5))

    with_both_clients(Server("dataflow", DataflowAPI, handlers(DataflowAPI, batch=batch), RUN), RUN, scenario)


@pytest.mark.parametrize("kind", sorted(set(errors.BY_NAME) - {"AstraFlowError", "RemoteError"}))
def test_every_error_class_arrives_as_itself(kind: str) -> None:
    async def fails(request: Empty) -> weights.SenderVersion:
        raise errors.BY_NAME[kind]("one line")

    async def scenario() -> None:
        server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=fails), RUN)
        await server.start()
        async with Client(server.url, RUN) as client:
            with pytest.raises(AstraFlowError, match=r"^one line$") as caught:
                await client.call(SenderAPI.get_version, timeout_s=60)
        assert type(caught.value) is errors.BY_NAME[kind]
        await server.stop()

    asyncio.run(scenario())


def test_a_failure_of_the_other_side_carries_its_name() -> None:
    async def fails(request: Empty) -> weights.SenderVersion:
        return {}["key"]

    async def scenario(call: Caller, raw: Caller) -> None:
        with pytest.raises(RemoteError, match=r"sender of default: KeyError: 'key' \[http://127\.0\.0\.1:\d+\]"):
            await call(SenderAPI.get_version, timeout_s=60)

    with_both_clients(Server("sender of default", SenderAPI, handlers(SenderAPI, get_version=fails), RUN), RUN, scenario)


def test_a_call_that_is_not_answered_in_time_names_itself() -> None:
    async def never(request: Empty) -> weights.SenderVersion:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(call: Caller, raw: Caller) -> None:
        with pytest.raises(DeadlinePassed, match=r"GET /get_version at http://127\.0\.0\.1:\d+: no answer within 0\.05 s"):
            await call(SenderAPI.get_version, timeout_s=0.05)

    with_both_clients(Server("sender", SenderAPI, handlers(SenderAPI, get_version=never), RUN), RUN, scenario)


def test_nobody_there_is_unavailable_and_may_be_tried_again() -> None:
    url = http_url("127.0.0.1", free_port())

    async def scenario() -> None:
        async with Client(url, RUN) as client:
            with pytest.raises(Unavailable, match="/get_version at http://127"):
                await client.call(SenderAPI.get_version, timeout_s=60)

    asyncio.run(scenario())
    with SyncClient(url, RUN) as client, pytest.raises(Unavailable, match="/get_version at http://127"):
        client.call(SenderAPI.get_version, timeout_s=60)


def test_a_service_that_comes_back_at_its_address_is_reached_again_as_a_new_life() -> None:
    async def scenario() -> None:
        lives = [new_identity("run-1"), new_identity("run-1")]
        port, seen = 0, []
        client: Client | None = None
        for life in lives:
            server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), life, port=port)
            await server.start()
            port = server.port
            client = client or Client(server.url, RUN)
            seen.append((await client.call(SenderAPI.get_version, timeout_s=60)).incarnation)
            await server.stop()
        assert seen == [life.incarnation for life in lives]
        assert client is not None
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("given", ["", "wrong", "secret2"])
def test_a_wrong_token_is_refused_and_the_right_one_passes(given: str) -> None:
    server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), Identity("run-1", "x", "secret"))

    async def scenario() -> None:
        await server.start()
        async with Client(server.url, Identity("run-1", "y", "secret")) as client:
            await client.call(SenderAPI.get_version, timeout_s=60)
        async with Client(server.url, Identity("run-1", "y", given)) as client:
            with pytest.raises(AuthError):
                await client.call(SenderAPI.get_version, timeout_s=60)
        await server.stop()

    asyncio.run(scenario())


def test_another_run_is_refused_on_both_ways_and_a_joining_peer_learns_its_run() -> None:
    async def scenario() -> None:
        server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), RUN)
        await server.start()
        async with Client(server.url, new_identity("run-2")) as client:
            with pytest.raises(WrongRun, match="run-2"):
                await client.call(SenderAPI.get_version, timeout_s=60)
        async with Client(server.url, new_identity("")) as client:
            assert (await client.call(SenderAPI.get_version, timeout_s=60)).run_id == "run-1"
        await server.stop()

    asyncio.run(scenario())


def test_raw_bytes_come_by_reference_whatever_its_letters() -> None:
    async def record(ref: str) -> bytes:
        return ref.encode()

    async def scenario(call: Caller, raw: Caller) -> None:
        for ref in ("abc", "ü b", "a%2Fb", "a?b#c"):
            assert await raw(RaaSAPI.record, ref, timeout_s=60) == ref.encode()

    with_both_clients(Server("raas", RaaSAPI, handlers(RaaSAPI, record=record), RUN), RUN, scenario)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "", "ftp://x", "http://", "http://[::1", "not a url"])
def test_a_url_that_cannot_be_one_is_named(url: str) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises(ConfigError, match="url"):
            kind(url, RUN)


@pytest.mark.parametrize("token", ["sécret", "two words", "line\nbreak"])
def test_a_token_that_no_header_can_hold_is_refused_without_printing_it(token: str) -> None:
    for make in (lambda i: SyncClient("http://127.0.0.1:1", i), lambda i: Server("s", SenderAPI, handlers(SenderAPI), i)):
        with pytest.raises(ConfigError, match="token") as caught:
            make(Identity("run-1", "x", token))
        assert token not in str(caught.value)


def test_environment_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://192.0.2.1:9")

    async def scenario(call: Caller, raw: Caller) -> None:
        await call(SenderAPI.get_version, timeout_s=60)

    with_both_clients(Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), RUN), RUN, scenario)


JSON_404 = b"HTTP/1.1 404 X\r\ncontent-type: application/json\r\ncontent-length: 37\r\n\r\n"


def answer_once(payload: bytes, then_s: float = 0.0) -> tuple[str, threading.Thread]:
    """A peer that is none of ours: accepts one connection, answers with these bytes and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.recv(65536)
            connection.sendall(payload)
            if then_s:
                end = time.monotonic() + then_s
                while time.monotonic() < end:
                    try:
                        connection.sendall(b"1\r\nx\r\n")
                    except OSError:
                        return
                    time.sleep(0.01)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return http_url("127.0.0.1", listener.getsockname()[1]), thread


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\n<html>", RemoteError),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", Unavailable),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", BadMessage),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 600\r\n\r\nhalf", Unavailable),
        (b"", Unavailable),
        (b"nonsense\r\n\r\n", Unavailable),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n{"protocol_version":9}', WrongProtocol),
        (b'HTTP/1.1 418 X\r\ncontent-type: application/json\r\ncontent-length: 33\r\n\r\n{"error":"NewKind","message":"m"}', RemoteError),
        (JSON_404 + b'{"error":"UnknownName","message":"m"}', UnknownName),
    ],
)
def test_whatever_answers_at_the_address_becomes_one_of_our_errors(payload: bytes, kind: type[Exception]) -> None:
    async def scenario(url: str) -> None:
        async with Client(url, RUN) as client:
            with pytest.raises(AstraFlowError) as caught:
                await client.call(SenderAPI.get_version, timeout_s=60)
            assert type(caught.value) is kind

    url, thread = answer_once(payload)
    asyncio.run(scenario(url))
    thread.join(10)
    url, thread = answer_once(payload)
    with SyncClient(url, RUN) as client:
        with pytest.raises(AstraFlowError) as caught:
            client.call(SenderAPI.get_version, timeout_s=60)
        assert type(caught.value) is kind
    thread.join(10)


def test_a_peer_that_drips_bytes_does_not_hold_a_call_beyond_its_time() -> None:
    drip = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    url, thread = answer_once(drip, then_s=10)
    with SyncClient(url, RUN) as client, pytest.raises(DeadlinePassed):
        client.call(SenderAPI.get_version, timeout_s=0.1)
    thread.join(10)

    async def scenario(url: str) -> None:
        async with Client(url, RUN) as client:
            with pytest.raises(DeadlinePassed):
                await client.call(SenderAPI.get_version, timeout_s=0.1)

    url, thread = answer_once(drip, then_s=10)
    asyncio.run(scenario(url))
    thread.join(10)


def test_closing_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), RUN)
        await server.start()
        client, blocking = Client(server.url, RUN), SyncClient(server.url, RUN)
        await asyncio.gather(*(client.call(SenderAPI.get_version, timeout_s=60) for _ in range(20)))
        await asyncio.to_thread(blocking.call, SenderAPI.get_version, timeout_s=60)
        await client.close()
        blocking.close()
        await server.stop()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(scenario(), debug=True)


def test_a_request_of_the_wrong_type_is_our_bug() -> None:
    client = SyncClient("http://127.0.0.1:1", RUN)
    with pytest.raises(AssertionError, match="/ready takes Ready"):
        client.call(DataflowAPI.ready, Empty(), timeout_s=1)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="ref"):
        client.raw(RaaSAPI.media, "", timeout_s=1)
    assert control.Ready.__struct_fields__
    client.close()
