"""What a service takes at most, and how long it waits for a peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.lib import limits
from astraflow.lib.limits import MAX_DEPTH, MAX_ITEMS, check_structure
from astraflow.lib.wire import Server, new_identity
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.message import Empty
from astraflow.protocol.routes import SenderAPI, table
from astraflow.protocol.weights import SenderVersion

PACK, JSON = msgspec.msgpack.encode, msgspec.json.encode
WAIT_S = 60.0


def nested(depth: int) -> Any:
    value: Any = {}
    for number in range(depth - 1):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("body", "json", "said"),
    [
        (PACK(nested(MAX_DEPTH + 2)), False, "deeper than 64"),
        (JSON(nested(MAX_DEPTH + 1)), True, "deeper than 64"),
        (b"\x91" * 10**6, False, "deeper than 64"),
        (b"[" * 10**6, True, "deeper than 64"),
        (b"\xdd\x00\x04\x00\x00" + b"\x90" * 2**18, False, "262144 elements"),
        (b"\xdd\xff\xff\xff\xff", False, "4294967295 elements"),
        (PACK([[0] * 200_000, [0] * 200_000]), False, "elements"),
        (b"[" + b"0," * MAX_ITEMS + b"0,0]", True, "commas"),
        (b"\x81\x91\x01\x02", False, "keys of maps"),
        (PACK({b"a": 1}), False, "keys of maps"),
    ],
    ids=["deep", "deep json", "bottomless", "bottomless json", "empties", "announced", "sum", "json", "list as key", "bytes as key"],
)
def test_what_is_too_much_is_refused_before_anything_is_made_of_it(body: bytes, json: bool, said: str) -> None:
    with pytest.raises(AstraFlowError, match=f"^here: .*{said}"):
        check_structure(body, json, "here")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=100,
)


@given(PLAIN, st.binary(max_size=60))
def test_what_is_within_the_limits_passes_and_rubbish_is_left_to_the_decoder(value: Any, rubbish: bytes) -> None:
    check_structure(PACK(value), False, "here")
    check_structure(JSON(value), True, "here")
    check_structure(PACK({7: value, None: 2, 1.5: 3, True: [nested(MAX_DEPTH - 2)]}), False, "here")
    for json in (False, True):
        with contextlib.suppress(AstraFlowError):
            check_structure(rubbish, json, "here")


async def version(request: Empty) -> SenderVersion:
    return SenderVersion(model_id="m", version=7, digest="d" * 20_000_000)


def served(scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server("sender", SenderAPI, dict.fromkeys(table(SenderAPI), version), new_identity("r"))
        await server.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await scenario(server)
        finally:
            await server.stop(1.0)

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"GET /get_ver", b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx"])
def test_a_request_that_does_not_come_or_does_not_end_is_not_waited_for(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server) -> None:
        monkeypatch.setattr(limits, "SLOW_S", 0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()

    served(scenario)


def test_a_peer_that_does_not_read_its_answer_is_cut_and_one_that_does_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server) -> None:
        monkeypatch.setattr(limits, "UNREAD_S", 0.3)
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        await loop.sock_sendall(sock, b"GET /get_version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not server.in_flight:
            await asyncio.sleep(0.01)
        while server.in_flight:
            await asyncio.sleep(0.01)
        sock.close()
        monkeypatch.setattr(limits, "UNREAD_S", WAIT_S)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=WAIT_S) as http:
            for _ in range(2):
                assert len((await http.get("/get_version")).json()["digest"]) == 20_000_000

    served(scenario)


def test_bodies_beyond_what_all_may_take_together_are_refused_and_the_next_ones_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server) -> None:
        monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 1000)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=WAIT_S) as http:
            for size, status in ((2000, 503), (500, 422), (2000, 503), (900, 422)):
                assert (await http.post("/transfer_done", content=b"\xc1" * size)).status_code == status
            assert server.bodies.bytes == 0
            crowd = await http.get("/get_version", headers={f"x-{i}": "1" for i in range(limits.MAX_HEADERS)})
            assert (crowd.status_code, "headers" in crowd.text) == (413, True)
            assert (await http.get("/get_version?a=" + "x" * limits.MAX_QUERY_BYTES)).status_code == 413
            packed = {"content-type": "application/msgpack", "content-encoding": "gzip"}
            assert "Content-Encoding" in (await http.post("/transfer_done", content=b"x", headers=packed)).text

    served(scenario)


def test_a_page_of_another_site_reaches_no_service_that_asks_for_no_token() -> None:
    async def scenario(server: Server) -> None:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=WAIT_S) as http:
            origins = [{"Origin": "http://evil.example"}, {"Origin": "null"}]
            for headers in (*origins, {"Host": "evil.example"}, {"Host": "["}, {"Host": "10.0.0.1:80"}):
                for method, path in (("GET", "/get_version"), ("POST", "/shutdown"), ("GET", "/nothing")):
                    answer = await http.request(method, path, headers=headers)
                    assert answer.status_code == 401, (headers, path)
            for host in (f"localhost:{server.port}", "[::1]", "127.0.0.2:1"):
                assert (await http.get("/nothing", headers={"Host": host})).status_code == 404
            assert (await http.get("/get_version/")).status_code == 404, "no redirects"

    served(scenario)
