"""What every service owes to the wire: both formats, errors as values, unknown fields skipped, versions, runs and tokens checked.

Here are also the tool's own two hands: `Peer` calls a service, `Host` serves what the tool plays.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from astraflow.lib.wire import JSON, MSGPACK, Handler, Identity, Server, decode_body, new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.codec import encode, encode_json
from astraflow.protocol.errors import BY_NAME, AstraFlowError, Retryable, Unavailable
from astraflow.protocol.message import ErrorReply, Message
from astraflow.protocol.routes import Route
from astraflow.tools.conformance import WAIT_S, Failed, Skipped, Suite, check, expect, until

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)
T = TypeVar("T")


class Peer:
    """The service under test, called as one process of some peer would call it."""

    def __init__(self, url: str, token: str = "", run_id: str = "") -> None:
        self.url, self.token = url.rstrip("/"), token
        self.identity = new_identity(run_id, token)
        self._client = SyncClient(url, self.identity)
        self._http = httpx.Client(timeout=WAIT_S, trust_env=False)

    def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float = WAIT_S) -> P:
        """One call in msgpack; errors are raised as their own classes."""
        return self._client.call(route, request, timeout_s=timeout_s)

    def raw(self, method: str, path: str, body: bytes = b"", *, kind: str = MSGPACK, accept: str = MSGPACK, token: str = "") -> Any:
        """An HTTP exchange with bytes of one's own; `token` replaces the right one, an empty `accept` is left out. Raises Unavailable."""
        headers = {"content-type": kind, "accept": accept}
        if token or self.token:
            headers["authorization"] = f"Bearer {token or self.token}"
        request = self._http.build_request(method, self.url + path, content=body, headers=headers)
        if not accept:
            del request.headers["accept"]
        try:
            return self._http.send(request)
        except httpx.HTTPError as error:
            raise Unavailable(f"{method} {path}: {error or type(error).__name__}") from None

    def refusal(self, what: str, route: Route[Q, P], request: Q, *classes: type[AstraFlowError]) -> AstraFlowError:
        """The error with which the service refuses this. Raises Failed when it does not, or with another one than `classes`."""
        try:
            self.call(route, request)
        except Retryable as error:
            raise Failed(f"{what}: not refused, but put off: {type(error).__name__}: {error}") from None
        except AstraFlowError as error:
            expect(not classes or isinstance(error, classes), f"{what}: refused with {type(error).__name__}: {error}")
            return error
        raise Failed(f"{what}: not refused")

    def gone(self, look: Route[Any, Any]) -> bool:
        """Whether nobody answers a GET without parameters any more. Raises what is answered instead."""
        try:
            self.call(look)
        except Retryable:
            return True
        return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._http.close()


class Host:
    """Services that the tool plays, in a thread with a loop of its own."""

    def __init__(self, identity: Identity, host: str) -> None:
        self.identity, self.host = identity, host
        self._loop = asyncio.new_event_loop()
        self._servers: list[Server] = []
        threading.Thread(target=self._loop.run_forever, name="conformance host", daemon=True).start()

    def serve(self, name: str, api: type, handlers: Mapping[str, Handler], port: int = 0) -> Server:
        """A started service. Raises ConfigError when its address cannot be bound."""
        server = Server(name, api, handlers, self.identity, host=self.host, port=port)
        self.do(server.start())
        self._servers.append(server)
        return server

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def close(self) -> None:
        """End the services."""
        for server in self._servers:
            self.do(server.stop(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)


def error_reply(response: Any, what: str, *statuses: int) -> ErrorReply:
    """The body of a refusal. Raises Failed unless it has one of the statuses (any 4xx without) and is an ErrorReply that fits it."""
    status: int = response.status_code
    wanted = status in statuses if statuses else 400 <= status < 500
    expect(wanted, f"{what}: HTTP {status}, expected {' or '.join(map(str, statuses)) or '4xx'}")
    reply: ErrorReply = decode_body(response.content, ErrorReply, "json" in response.headers.get("content-type", ""))
    known = BY_NAME.get(reply.error)
    expect(known is None or status in (known.http_status, 405), f"{what}: {reply.error} with HTTP {status}")
    return reply


class WireSuite(Suite):
    """`look`: a GET route without parameters; `harmless`: a POST route and a message that changes nothing."""

    def __init__(self, peer: Peer, look: Route[Any, Any], harmless: tuple[Route[Any, Any], Message]) -> None:
        self.peer, self._get, (self._post, self._harmless) = peer, look, harmless

    @check("wire.answers", "the service answers its status")
    def answers(self) -> None:
        def answered() -> Message | None:
            try:
                found: Message = self.peer.call(self._get, timeout_s=WAIT_S)
            except Retryable:
                return None
            return found

        self._run_id = until(f"an answer to GET {self._get.path}", answered).run_id

    @check("wire.formats", "replies are msgpack or JSON, as Accept says; GET without Accept is JSON", "wire.answers")
    def formats(self) -> None:
        for accept, json in ((JSON, True), (MSGPACK, False), ("", True)):
            response = self.peer.raw("GET", self._get.path, accept=accept)
            expect(response.status_code == 200, f"GET {self._get.path}: HTTP {response.status_code}")
            kind = response.headers.get("content-type", "")
            expect(("json" in kind) == json, f"Accept {accept!r}: the reply's Content-Type is {kind!r}")
            decode_body(response.content, self._get.reply, json)
        body = encode_json(self._harmless)
        response = self.peer.raw("POST", self._post.path, body, kind=JSON, accept=JSON)
        expect("json" in response.headers.get("content-type", ""), f"POST {self._post.path} in JSON was not answered in JSON")

    @check("wire.malformed", "a body that is no message is refused with 4xx and an ErrorReply", "wire.answers")
    def malformed(self) -> None:
        whole = encode(self._harmless)
        path = self._post.path
        bodies = {"no msgpack": b"\xc1\xff", "a cut message": whole[:-1], "a list": encode([1, 2]), "another type": encode({"run_id": 7})}
        for what, body in bodies.items():
            error_reply(self.peer.raw("POST", path, body), f"POST {path} with {what}", 400, 422)
        error_reply(self.peer.raw("POST", path, b"{", kind=JSON, accept=JSON), f"POST {path} with half JSON", 400, 422)

    @check("wire.unknown_fields", "unknown fields are skipped: a newer peer may say more", "wire.answers")
    def unknown_fields(self) -> None:
        plain = msgspec.to_builtins(self._harmless) | {"field_of_the_future": {"a": [1]}}
        response = self.peer.raw("POST", self._post.path, encode(plain))
        expect(response.status_code not in (400, 422, 500), f"POST {self._post.path} with a further field: HTTP {response.status_code}")
        response = self.peer.raw("GET", f"{self._get.path}?field_of_the_future=1")
        expect(response.status_code == 200, f"GET {self._get.path} with a further parameter: HTTP {response.status_code}")

    @check("wire.unknown_path", "an unknown path is 404, a wrong method 405, each with an ErrorReply", "wire.answers")
    def unknown_path(self) -> None:
        error_reply(self.peer.raw("GET", "/no_such_call"), "GET /no_such_call", 404)
        error_reply(self.peer.raw("DELETE", self._get.path), f"DELETE {self._get.path}", 405)

    @check("wire.protocol_version", "another protocol version is refused with 426 WrongProtocol", "wire.answers")
    def protocol_version(self) -> None:
        body = encode(msgspec.to_builtins(self._harmless) | {"protocol_version": 999})
        reply = error_reply(self.peer.raw("POST", self._post.path, body), "a message of protocol version 999", 426)
        expect(reply.error == "WrongProtocol", f"refused as {reply.error}")

    @check("wire.run_id", "a message of another run is refused with 409 WrongRun", "wire.answers")
    def another_run(self) -> None:
        if not self._run_id:
            raise Skipped("the service stamps no run_id")
        body = encode(msgspec.to_builtins(self._harmless) | {"run_id": f"not-{self._run_id}"})
        reply = error_reply(self.peer.raw("POST", self._post.path, body), "a message of another run", 409)
        expect(reply.error == "WrongRun", f"refused as {reply.error}")

    @check("wire.token", "without the token, or with a wrong one, every call is 401 AuthError", "wire.answers")
    def token(self) -> None:
        if not self.peer.token:
            raise Skipped("no token was given (--token-file)")
        stranger = Peer(self.peer.url)
        try:
            for what, token in (("no token", ""), ("a wrong token", "not-" + self.peer.token)):
                for method, path in (("GET", self._get.path), ("POST", self._post.path), ("GET", "/no_such_call")):
                    reply = error_reply(stranger.raw(method, path, token=token), f"{method} {path} with {what}", 401)
                    expect(reply.error == "AuthError", f"{method} {path} with {what}: refused as {reply.error}")
        finally:
            stranger.close()
