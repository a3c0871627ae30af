"""The server side of every service: a Starlette app derived from a route table, run by uvicorn inside the process's own loop.

What a call goes through: token → body (limit) → decode → protocol version and run → handler → stamp → encode.
Whatever fails answers as an `ErrorReply` with the HTTP status of its class; the client raises the same class again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as PathRoute
from starlette.types import Receive, Scope, Send

from astraflow.lib import limits
from astraflow.lib.auth import check_token, foreign, given_token, same_token, token_required
from astraflow.lib.net import host_port, http_url, listen, reachable_host
from astraflow.lib.tls import PLAIN, Tls, server_context
from astraflow.protocol.codec import decode, decode_json, encode, encode_json
from astraflow.protocol.errors import (
    BY_NAME,
    AstraFlowError,
    AuthError,
    BadMessage,
    ConfigError,
    DeadlinePassed,
    RemoteError,
    TooLarge,
    Unavailable,
    WrongProtocol,
    WrongRun,
)
from astraflow.protocol.message import PROTOCOL_VERSION, ErrorReply, Message
from astraflow.protocol.routes import Route, table

log = logging.getLogger(__name__)

MSGPACK = "application/msgpack"
JSON = "application/json"
MAX_BODY_BYTES = 256 * 2**20
THREAD_BYTES = 2**16
"""Larger bodies are decoded in a thread: the loop answers others meanwhile."""
HANDSHAKE_S, GOODBYE_S = 10.0, 0.5
"""TLS: a connection that has not proved itself for so long is closed; a closing one waits so long for the other side's goodbye."""
CHUNK_BYTES = 4 * 2**20
"""Large replies are handed to the transport in such pieces, so that it never buffers a whole one again."""

Handler = Callable[[Any], Awaitable[Any]]
"""async (request message) → reply message; for raw routes async (ref) → bytes."""


@dataclass(frozen=True)
class Identity:
    """Who a process is; stamped on all that it sends."""

    run_id: str
    """Empty while the run is not known yet (`raas --join`)."""
    incarnation: str
    """Random, new at each process start."""
    token: str = dataclasses.field(default="", repr=False)
    """Cluster token; empty = none is asked for (loopback only)."""
    tls: Tls = PLAIN
    """What its services show and its clients trust."""


def new_identity(run_id: str, token: str = "", tls: Tls = PLAIN) -> Identity:
    """The identity of a process that starts now."""
    return Identity(run_id, secrets.token_hex(8), token, tls)


class _Envelope(msgspec.Struct):
    protocol_version: int = PROTOCOL_VERSION


def check_envelope(message: Message, identity: Identity, where: str) -> None:
    """Raise WrongProtocol or WrongRun unless the message belongs here; an empty run id on either side means not known yet."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise WrongProtocol(f"{where}: protocol version {message.protocol_version}, this side speaks {PROTOCOL_VERSION}")
    if message.run_id and identity.run_id and message.run_id != identity.run_id:
        raise WrongRun(f"{where}: belongs to run {message.run_id!r}, this is run {identity.run_id!r}")


def decode_body(body: bytes | bytearray, kind: type[Any], json: bool) -> Any:
    """Decode a message; another protocol version is reported as such even when its fields cannot be read."""
    try:
        return decode_json(body, kind) if json else decode(body, kind)
    except BadMessage:
        with contextlib.suppress(BadMessage):
            version = (decode_json(body, _Envelope) if json else decode(body, _Envelope)).protocol_version
            if version != PROTOCOL_VERSION:
                raise WrongProtocol(f"{kind.__name__}: protocol version {version}, this side speaks {PROTOCOL_VERSION}") from None
        raise


def encode_body(message: Message, json: bool) -> bytes:
    """Encode a message. Raw msgpack fields (a delivery's group) are unpacked for JSON, where they would be no text."""
    if not json:
        return encode(message)
    packed = encode(message)
    if _has_raw(type(message)):
        return encode_json(msgspec.msgpack.decode(packed))
    return encode_json(message)


def _has_raw(kind: type[Message]) -> bool:
    cached = _RAW_TYPES.get(kind)
    if cached is None:
        cached = _RAW_TYPES[kind] = "RawType" in repr(msgspec.inspect.type_info(kind))
    return cached


_RAW_TYPES: dict[type[Message], bool] = {}


def wire_error(error: BaseException, name: str) -> tuple[int, ErrorReply]:
    """HTTP status and body for an error; classes that the other side does not know travel as their nearest known parent."""
    for kind in type(error).__mro__:
        if BY_NAME.get(kind.__name__) is kind and kind is not AstraFlowError:
            return BY_NAME[kind.__name__].http_status, ErrorReply(error=kind.__name__, message=_shown(str(error)))
    return RemoteError.http_status, ErrorReply(error="RemoteError", message=_shown(f"{name}: {type(error).__name__}: {error}"))


def _shown(text: str) -> str:
    """What fits into an answer. A lone surrogate, as Python's file names have them, is no text for the wire."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limits.MAX_ERROR_CHARS else f"{text[: limits.MAX_ERROR_CHARS]} … ({len(text)} characters)"


class Server:
    """One service. `start` binds and serves inside the running loop; signals stay with the process.

    `handlers`: one for every route of `api`, by its name there. `extra_routes` are Starlette routes of a later floor
    (dashboard, gateway); they pass the same token check unless their path begins with one of `open_paths`.
    Raises ConfigError for a host off loopback without a token.
    """

    def __init__(
        self,
        name: str,
        api: type,
        handlers: Mapping[str, Handler],
        identity: Identity,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
        extra_routes: Sequence[BaseRoute] = (),
        open_paths: Sequence[str] = (),
    ):
        routes = table(api)
        missing, unknown = set(routes) - set(handlers), set(handlers) - set(routes)
        assert not missing, f"{name}: no handler for {', '.join(sorted(missing))}"
        assert not unknown, f"{name}: handlers without a route: {', '.join(sorted(unknown))}"
        if token_required(host) and not identity.token:
            raise ConfigError(f"{name}: host {host!r} can be reached from other machines, so a token is required (or use 127.0.0.1)")
        check_token(identity.token, f"{name}: token")
        self.name, self.identity, self.host, self.port = name, identity, host, port
        self.max_body_bytes = max_body_bytes
        self.stopping = False
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.bodies = limits.Bodies(name)
        self._open_paths = tuple(open_paths)
        self._paths = [f"{route.method} {route.path}" for route in routes.values()]
        paths: dict[str, dict[str, _Call]] = {}
        for key, route in routes.items():
            paths.setdefault(route.path, {})[route.method] = _Call(self, route, handlers[key])
        self.app = Starlette(
            routes=[*(PathRoute(path, _Endpoint(calls)) for path, calls in paths.items()), *extra_routes],
            exception_handlers={HTTPException: self._http_error},
        )
        self.app.router.redirect_slashes = False  # a path is one of ours or unknown
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Address for others; known once `start` returned when the port was 0."""
        return http_url(reachable_host(self.host), self.port, bool(self.identity.tls.cert))

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError naming host:port when it cannot be bound, or a certificate file that cannot be used."""
        tls = server_context(self.identity.tls) if self.identity.tls.cert else None
        sock = listen(self.host, self.port)
        self.port = int(sock.getsockname()[1])
        config = uvicorn.Config(
            self._guarded,
            interface="asgi3",
            lifespan="off",
            ws="none",
            http=limits.PatientProtocol,
            h11_max_incomplete_event_size=limits.MAX_HEAD_BYTES,
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=1024,  # connections; a run has tens of peers with a few calls each, beyond that uvicorn answers 503
            timeout_keep_alive=75,  # longer than the client keeps an idle connection, so that it never writes into a closing one
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[sock]), name=f"{self.name} http")
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.001)
        log.info("%s listens on %s", self.name, host_port(self.host, self.port))

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Refuse new calls (Unavailable), let running ones finish until the deadline, then cut them."""
        if self._server is None or self._serving is None:
            return
        self.stopping = True
        end = time.monotonic() + deadline_s
        self._server.stop_listening()
        if self.in_flight:
            await asyncio.wait(set(self.in_flight), timeout=deadline_s)
        for call in self.in_flight:
            call.cancel()
        self._server.config.timeout_graceful_shutdown = max(1, round(end - time.monotonic()))
        self._server.should_exit = True
        await self._serving
        self._server = self._serving = None

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The token stands before everything, Starlette's own answers included."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await _reply_error(send, *wire_error(error, self.name), json=_wants_json(scope), identity=self.identity)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> AstraFlowError | None:
        """Why a request goes no further, by its head alone."""
        if len(scope["headers"]) > limits.MAX_HEADERS:
            return TooLarge(f"{self.name}: {len(scope['headers'])} headers, at most {limits.MAX_HEADERS} are taken")
        if len(scope["query_string"]) > limits.MAX_QUERY_BYTES:
            return TooLarge(f"{self.name}: a query of {len(scope['query_string'])} bytes, at most {limits.MAX_QUERY_BYTES} are taken")
        if self._open_paths and scope["path"].startswith(self._open_paths):
            return None
        token = self.identity.token
        if token and not same_token(given_token(_header(scope, b"authorization")), token):
            return AuthError(f"{self.name}: the cluster token is missing or wrong")
        reason = foreign(_header(scope, b"host"), _header(scope, b"origin"), token)
        return AuthError(f"{self.name}: {reason}") if reason else None

    async def _http_error(self, request: Request, error: Exception) -> Response:
        """Starlette's own errors: no such path, no such method."""
        assert isinstance(error, HTTPException)
        kind, text = ("BadMessage", error.detail)
        if error.status_code == 404:
            kind, text = "UnknownName", _shown(f"{self.name} has no {request.scope['path'][:200]}; known: {', '.join(self._paths)}")
        body = ErrorReply(error=kind, message=text, run_id=self.identity.run_id, incarnation=self.identity.incarnation)
        json = _wants_json(request.scope)
        headers = {**{name.decode(): value.decode() for name, value in limits.SAFE_HEADERS}, **(error.headers or {})}
        return Response(encode_body(body, json), error.status_code, headers=headers, media_type=JSON if json else MSGPACK)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As it is, but with limits for both ends of a TLS connection: uvicorn leaves them at 60 and 30 s, and a stopping service
        would wait so long for every idle client to answer its goodbye."""
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup([])

        def connection() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            return made

        for sock in sockets or ():
            listening = await asyncio.get_running_loop().create_server(
                connection,
                sock=sock,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
            self.servers.append(listening)

    def stop_listening(self) -> None:
        for server in self.servers:
            server.close()


class _Endpoint:
    """All methods of one path."""

    def __init__(self, calls: dict[str, _Call]):
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.get(scope["method"])
        if call is None:
            allowed = ", ".join(self._calls)
            raise HTTPException(405, f"{scope['path']} takes {allowed}, not {scope['method']}", headers={"Allow": allowed})
        await call(scope, receive, send)


class _Call:
    """One route: everything between the socket and the handler."""

    def __init__(self, server: Server, route: Route[Any, Any], handler: Handler):
        self._server, self._route, self._handler = server, route, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, identity = self._server, self._server.identity
        task = asyncio.current_task()
        assert task is not None
        json_in = self._route.method == "POST" and _essence(scope).endswith(("/json", "+json"))
        json_out = _wants_json(scope, default=self._route.method == "GET" or json_in)
        server.in_flight.add(task)
        held = limits.Held(server.bodies)
        try:
            if server.stopping:
                raise Unavailable(f"{server.name} is stopping")
            request = await self._request(scope, receive, json_in, held)
            if request is None:
                return  # the client went away in the middle of its request
            if self._route.raw_reply:
                body, media = await self._handler(scope["path_params"]["ref"]), "application/octet-stream"
            else:
                reply: Message = await self._handler(request)
                assert isinstance(reply, self._route.reply), f"{self._route.path}: handler returned {type(reply).__name__}"
                reply.run_id, reply.incarnation = identity.run_id, identity.incarnation
                body, media = encode_body(reply, json_out), JSON if json_out else MSGPACK
        except asyncio.CancelledError:
            if not server.stopping:
                raise
            task.uncancel()
            cut = Unavailable(f"{server.name} stopped before it could answer")
            await _reply_error(send, *wire_error(cut, server.name), json=json_out, identity=identity)
        except Exception as error:
            await self._failed(error, send, json_out)
        else:
            await _reply(send, 200, body, media)
        finally:
            server.in_flight.discard(task)
            held.release()

    async def _failed(self, error: Exception, send: Send, json: bool) -> None:
        server = self._server
        if isinstance(error, TimeoutError) and not isinstance(error, AstraFlowError):
            error = DeadlinePassed(f"{server.name} {self._route.path}: a wait inside the handler ended: {error or 'timeout'}")
        status, reply = wire_error(error, server.name)
        if isinstance(error, AstraFlowError):
            log.debug("%s %s refused: %s: %s", self._route.method, self._route.path, reply.error, reply.message)
        else:
            log.error("%s %s failed", self._route.method, self._route.path, exc_info=error)
        await _reply_error(send, status, reply, json=json, identity=server.identity)

    async def _request(self, scope: Scope, receive: Receive, json: bool, held: limits.Held) -> Message | None:
        where = f"{self._server.name} {self._route.path}"
        if self._route.method == "GET":
            request = _from_query(scope["query_string"], self._route.request)
        else:
            limit = min(self._route.max_body_bytes, self._server.max_body_bytes)
            body = await _read_body(scope, receive, limit, where, held)
            if body is None:
                return None
            kind, packed = _essence(scope), _header(scope, b"content-encoding")
            if body and not json and kind and not kind.endswith("msgpack"):
                raise BadMessage(f"{where}: Content-Type {kind[:80]!r}: expected {MSGPACK} or {JSON}")
            if packed not in ("", "identity"):
                raise BadMessage(f"{where}: Content-Encoding {packed[:80]!r}: bodies are taken as they are")
            decoded = partial(_decoded, body, self._route.request, json, where)
            request = await asyncio.to_thread(decoded) if len(body) > THREAD_BYTES else decoded()
        check_envelope(request, self._server.identity, where)
        return request


def _decoded(body: bytes, kind: type[Message], json: bool, where: str) -> Message:
    if not body:
        return _from_query(b"", kind)
    limits.check_structure(body, json, where)
    request: Message = decode_body(body, kind, json)
    return request


def _from_query(query: bytes, kind: type[Message]) -> Message:
    try:
        pairs = dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(query), errors="strict"))
        return msgspec.convert(pairs, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadMessage(f"{kind.__name__}: {error}") from None


async def _read_body(scope: Scope, receive: Receive, limit: int, where: str, held: limits.Held) -> bytes | None:
    """The whole body; None when the client disconnected. Raises TooLarge as soon as it is known to be over the limit."""
    announced = _header(scope, b"content-length")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"{where}: a body of {announced} bytes; at most {limit} are taken")
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        chunk: bytes = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"{where}: a body of more than {limit} bytes")
        if chunk:
            held.add(len(chunk))
            chunks.append(chunk)
        if not event.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _reply(send: Send, status: int, body: bytes, media: str) -> None:
    headers = [(b"content-type", media.encode("ascii")), (b"content-length", str(len(body)).encode("ascii")), *limits.SAFE_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if len(body) <= CHUNK_BYTES:
        await send({"type": "http.response.body", "body": body})
        return
    view = memoryview(body)
    for start in range(0, len(body), CHUNK_BYTES):
        more = start + CHUNK_BYTES < len(body)
        await send({"type": "http.response.body", "body": view[start : start + CHUNK_BYTES], "more_body": more})


async def _reply_error(send: Send, status: int, reply: ErrorReply, *, json: bool, identity: Identity) -> None:
    reply.run_id, reply.incarnation = identity.run_id, identity.incarnation
    await _reply(send, status, encode_body(reply, json), JSON if json else MSGPACK)


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def _essence(scope: Scope) -> str:
    """The Content-Type without its parameters."""
    return _header(scope, b"content-type").partition(";")[0].strip().lower()


def _wants_json(scope: Scope, default: bool = True) -> bool:
    accept = _header(scope, b"accept")
    if "msgpack" in accept:
        return False
    return True if "json" in accept else default


