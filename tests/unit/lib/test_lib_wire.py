from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route as PathRoute

from astraflow.lib.wire import JSON, MSGPACK, Identity, Server, new_identity
from astraflow.protocol import codec, control, weights
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.errors import BaseMismatch, ConfigError, Conflict, DeadlinePassed
from astraflow.protocol.message import Empty, ErrorReply, Message
from astraflow.protocol.rollout import Delivery, PullReply
from astraflow.protocol.routes import DataflowAPI, RaaSAPI, SenderAPI, table

RUN = Identity("run-1", "server-life")
Handlers = dict[str, Callable[[Any], Awaitable[Any]]]


async def unused(request: Any) -> Any:
    raise AssertionError("not called in this test")


def handlers(api: type, **given: Callable[[Any], Awaitable[Any]]) -> Handlers:
    return {name: given.get(name, unused) for name in table(api)}


async def version(request: Empty) -> weights.SenderVersion:
    return weights.SenderVersion(model_id="m", version=7, digest="d")


async def echo_ready(request: control.Ready) -> control.ReadyReply:
    return control.ReadyReply(timeline=len(request.model_id), version=request.version)


READY = control.Ready(model_id="abc", train_batch_size=8, sender_endpoint="", version=2)


def serve(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20) as http:
                await scenario(http)
        finally:
            await server.stop(1.0)

    asyncio.run(run())


def sender(**options: Any) -> Server:
    return Server("sender", SenderAPI, handlers(SenderAPI, get_version=version), options.pop("identity", RUN), **options)


def dataflow(identity: Identity = RUN, max_body_bytes: int = 1 << 20, **given: Callable[[Any], Awaitable[Any]]) -> Server:
    given.setdefault("ready", echo_ready)
    return Server("dataflow", DataflowAPI, handlers(DataflowAPI, **given), identity, max_body_bytes=max_body_bytes)


def error_of(response: httpx.Response) -> ErrorReply:
    if response.headers["content-type"] == JSON:
        return codec.decode_json(response.content, ErrorReply)
    assert response.headers["content-type"] == MSGPACK
    return codec.decode(response.content, ErrorReply)


def test_get_speaks_json_unless_asked_for_msgpack_and_stamps_its_identity() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        for headers, kind in (({}, JSON), ({"accept": "text/html, application/json"}, JSON), ({"accept": MSGPACK}, MSGPACK)):
            response = await http.get("/get_version?unknown=1&run_id=run-1", headers=headers)
            assert response.status_code == 200
            assert response.headers["content-type"] == kind
            decode = codec.decode_json if kind == JSON else codec.decode
            reply = decode(response.content, weights.SenderVersion)
            assert (reply.version, reply.run_id, reply.incarnation) == (7, "run-1", "server-life")

    serve(sender(), scenario)


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", MSGPACK, ""])
@pytest.mark.parametrize("accept", ["", "*/*", JSON, MSGPACK])
def test_post_answers_in_the_format_of_the_request_unless_told_otherwise(content_type: str, accept: str) -> None:
    json_in = "json" in content_type
    body = codec.encode_json(READY) if json_in else codec.encode(READY)

    async def scenario(http: httpx.AsyncClient) -> None:
        headers = {"accept": accept} | ({"content-type": content_type} if content_type else {})
        response = await http.post("/ready", content=body, headers=headers)
        json_out = "json" in accept or (json_in and "msgpack" not in accept)
        assert response.headers["content-type"] == (JSON if json_out else MSGPACK)
        reply = (codec.decode_json if json_out else codec.decode)(response.content, control.ReadyReply)
        assert (reply.timeline, reply.version) == (3, 2)

    serve(dataflow(), scenario)


def test_query_parameters_are_converted_and_checked_like_fields() -> None:
    seen: list[BatchRequest] = []

    async def batch(request: BatchRequest) -> BatchReply:
        seen.append(request)
        return BatchReply(kind="wait")

    async def scenario(http: httpx.AsyncClient) -> None:
        good = await http.get("/batch", params={"model_id": "größe & co", "timeline": "0", "version": "3", "wait_s": "1.5", "new": "x"})
        assert good.status_code == 200
        assert (seen[0].model_id, seen[0].version, seen[0].wait_s) == ("größe & co", 3, 1.5)
        for query, field in (("model_id=a&timeline=0", "version"), ("model_id=a&timeline=0&version=x", "version"), ("model_id", "")):
            bad = await http.get(f"/batch?{query}")
            assert bad.status_code == 422
            assert error_of(bad).error == "BadMessage"
            assert field in error_of(bad).message

    serve(dataflow(batch=batch), scenario)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"model_id": 3, "train_batch_size": 8, "sender_endpoint": ""}', "$.model_id"),
        (b'{"model_id": "a", "sender_endpoint": ""}', "train_batch_size"),
        (b"{", ""),
        (b"\xff\xff", ""),
        (b"[" * 5000, ""),
        (b"", "model_id"),
    ],
)
def test_a_body_that_cannot_be_decoded_answers_422_with_the_path(body: bytes, text: str) -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.post("/ready", content=body, headers={"content-type": JSON})
        assert response.status_code == 422
        assert error_of(response).error == "BadMessage"
        assert text in error_of(response).message

    serve(dataflow(), scenario)


def test_a_form_is_told_what_is_expected() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.post("/ready", data={"model_id": "a"}, headers={"accept": JSON})
        assert response.status_code == 422
        assert MSGPACK in error_of(response).message

    serve(dataflow(), scenario)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_while_it_is_read(announced: bool) -> None:
    async def pieces(total: int) -> Any:
        for _ in range(total // 1000):
            yield b"x" * 1000

    async def scenario(http: httpx.AsyncClient) -> None:
        content: Any = b"x" * 300_000 if announced else pieces(300_000)
        response = await http.post("/ready", content=content)
        assert response.status_code == 413
        assert error_of(response).error == "TooLarge"
        assert "100000" in error_of(response).message
        fits = await http.post("/ready", content=codec.encode(msgspec.to_builtins(READY) | {"unknown": "x" * 90_000}))
        assert fits.status_code == 200

    serve(dataflow(max_body_bytes=100_000), scenario)


def test_another_run_or_protocol_version_is_refused_and_an_unknown_run_is_let_in() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        async def post(**changes: Any) -> httpx.Response:
            return await http.post("/ready", content=codec.encode(msgspec.structs.replace(READY, **changes)))

        assert (await post(run_id="")).status_code == 200
        assert (await post(run_id="run-1")).status_code == 200
        other = await post(run_id="run-2")
        assert (other.status_code, error_of(other).error) == (409, "WrongRun")
        assert "run-2" in error_of(other).message
        newer = await post(protocol_version=99)
        assert (newer.status_code, error_of(newer).error) == (426, "WrongProtocol")
        unreadable = await http.post("/ready", content=b'{"protocol_version": 99, "model_id": 5}', headers={"content-type": JSON})
        assert error_of(unreadable).error == "WrongProtocol"
        assert (await http.get("/batch?protocol_version=2&model_id=a&timeline=0&version=0")).status_code == 426

    serve(dataflow(), scenario)


def test_the_token_stands_before_every_path_known_or_not() -> None:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("page")

    extra = [PathRoute("/page", page), PathRoute("/open/door", page)]
    server = sender(identity=Identity("run-1", "x", "secret"), extra_routes=extra, open_paths=["/open/"])

    async def scenario(http: httpx.AsyncClient) -> None:
        for path in ("/get_version", "/page", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"}):
                response = await http.get(path, headers=headers)
                assert (response.status_code, error_of(response).error) == (401, "AuthError")
                assert "secret" not in response.text
        for scheme in ("Bearer", "bearer"):
            assert (await http.get("/get_version", headers={"authorization": f"{scheme} secret"})).status_code == 200
        assert (await http.get("/page", headers={"authorization": "Bearer secret"})).text == "page"
        assert (await http.get("/open/door")).text == "page"

    serve(server, scenario)


def test_off_loopback_a_token_is_required() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*token"):
        sender(host="0.0.0.0")
    sender(host="0.0.0.0", identity=Identity("r", "i", "secret"))


def test_unknown_paths_and_methods_answer_as_errors_too() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        missing = await http.get("/get_versoin")
        assert (missing.status_code, error_of(missing).error) == (404, "UnknownName")
        assert "GET /get_version" in error_of(missing).message
        wrong = await http.post("/get_version", headers={"accept": MSGPACK})
        assert (wrong.status_code, error_of(wrong).error) == (405, "BadMessage")
        assert wrong.headers["allow"] == "GET"
        assert (await http.get("/docs")).status_code == 404

    serve(sender(), scenario)


class LocalConflict(Conflict):
    """A refinement that only this process knows."""


@pytest.mark.parametrize(
    ("raised", "status", "name", "text"),
    [
        (BaseMismatch("base 3 is not held"), 409, "BaseMismatch", "base 3 is not held"),
        (LocalConflict("superseded"), 409, "Conflict", "superseded"),
        (DeadlinePassed("groups"), 504, "DeadlinePassed", "groups"),
        (TimeoutError(), 504, "DeadlinePassed", "/get_version"),
        (KeyError("x"), 500, "RemoteError", "sender: KeyError: 'x'"),
        (AssertionError("bug"), 500, "RemoteError", "sender: AssertionError: bug"),
    ],
)
def test_errors_of_a_handler_travel_by_class(
    raised: Exception, status: int, name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(request: Empty) -> weights.SenderVersion:
        raise raised

    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.get("/get_version")
        reply = error_of(response)
        assert (response.status_code, reply.error) == (status, name)
        assert text in reply.message
        assert (reply.run_id, reply.incarnation) == ("run-1", "server-life")

    serve(Server("sender", SenderAPI, handlers(SenderAPI, get_version=fails), RUN), scenario)
    tracebacks = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(tracebacks) == (1 if status == 500 else 0)
    assert all(record.exc_info for record in tracebacks)


def test_a_handler_of_the_wrong_type_is_our_bug() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.get("/get_version")
        assert response.status_code == 500
        assert "Empty" in error_of(response).message

    async def wrong(request: Empty) -> Empty:
        return Empty()

    serve(Server("sender", SenderAPI, handlers(SenderAPI, get_version=wrong), RUN), scenario)


def test_every_route_needs_a_handler_and_every_handler_a_route() -> None:
    with pytest.raises(AssertionError, match="get_version"):
        Server("sender", SenderAPI, {name: unused for name in table(SenderAPI) if name != "get_version"}, RUN)
    with pytest.raises(AssertionError, match="extra"):
        Server("sender", SenderAPI, handlers(SenderAPI) | {"extra": unused}, RUN)


def test_raw_routes_give_bytes_by_reference() -> None:
    async def media(ref: str) -> bytes:
        if ref == "missing":
            raise Conflict(f"no media {ref}")
        return ref.encode() * 3

    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.get("/media/ab%2Fc%20d")
        assert response.status_code in (200, 404)
        assert (await http.get("/media/ab12")).content == b"ab12ab12ab12"
        assert error_of(await http.get("/media/missing")).error == "Conflict"
        assert (await http.get("/media/ab12?protocol_version=9")).status_code == 426

    serve(Server("raas", RaaSAPI, handlers(RaaSAPI, media=media), RUN), scenario)


def test_groups_that_travel_as_they_are_can_be_read_as_json() -> None:
    group = codec.encode({"lease_id": "l", "column": b"\x00\xff"})

    async def pull(request: Message) -> PullReply:
        delivery = Delivery(delivery_id="d", lease_id="l", attempt=1, group=msgspec.Raw(group))
        return PullReply(deliveries=[delivery], free_slots=1, in_flight=0, waiting=0, serving={})

    async def scenario(http: httpx.AsyncClient) -> None:
        response = await http.post("/pull", json={})
        assert json.loads(response.content)["deliveries"][0]["group"] == {"lease_id": "l", "column": "AP8="}
        packed = await http.post("/pull", content=b"", headers={"accept": MSGPACK})
        assert bytes(codec.decode(packed.content, PullReply).deliveries[0].group) == group

    serve(Server("raas", RaaSAPI, handlers(RaaSAPI, pull=pull), RUN), scenario)


def test_large_replies_and_requests_arrive_whole() -> None:
    blob = bytes(range(256)) * 65536

    async def media(ref: str) -> bytes:
        return blob

    async def register(request: control.RegisterRaaS) -> Empty:
        return Empty()

    async def scenario(http: httpx.AsyncClient) -> None:
        assert (await http.get("/media/x")).content == blob

    serve(Server("raas", RaaSAPI, handlers(RaaSAPI, media=media), RUN), scenario)


def test_stopping_lets_calls_finish_refuses_new_ones_and_cuts_the_rest() -> None:
    async def scenario() -> None:
        entered, release = asyncio.Event(), asyncio.Event()
        ends: list[str] = []

        async def short(request: Empty) -> weights.SenderVersion:
            entered.set()
            await release.wait()
            return await version(request)

        async def stuck(request: Empty) -> weights.BufferInfo:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("cleaned")
            raise AssertionError

        server = Server("sender", SenderAPI, handlers(SenderAPI, get_version=short, get_buffer_info=stuck), RUN)
        await server.start()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20) as http:
            first = asyncio.create_task(http.get("/get_version"))
            second = asyncio.create_task(http.get("/get_buffer_info"))
            await entered.wait()
            while len(server.in_flight) < 2:
                await asyncio.sleep(0.001)
            stop = asyncio.create_task(server.stop(0.3))
            await asyncio.sleep(0)
            release.set()
            assert (await first).status_code == 200
            cut = await second
            assert (cut.status_code, error_of(cut).error) == (503, "Unavailable")
            assert ends == ["cleaned"]
            await stop
            with pytest.raises(httpx.ConnectError):
                await http.get("/get_version")
        await server.stop()

    asyncio.run(scenario())


def test_signals_stay_with_the_process() -> None:
    before = [signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)]

    async def scenario(http: httpx.AsyncClient) -> None:
        assert signal.getsignal(signal.SIGTERM) == before[1]

    serve(sender(), scenario)
    assert [signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_port_in_use_is_named_in_one_line() -> None:
    async def scenario() -> None:
        first = sender()
        await first.start()
        second = sender(port=first.port)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{first.port}"):
            await second.start()
        await first.stop()
        await second.start()  # the port is free again at once
        await second.stop()

    asyncio.run(scenario())


def test_each_start_of_a_process_has_an_identity_of_its_own() -> None:
    assert new_identity("r").incarnation != new_identity("r").incarnation
