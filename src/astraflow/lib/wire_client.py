"""The client side of every service, derived from the route table; errors of the other side are raised as their own classes."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from astraflow.lib.auth import check_token
from astraflow.lib.net import check_url
from astraflow.lib.tls import Tls, client_context, find_ssl_error, not_accepted, speaks_no_tls
from astraflow.lib.wire import JSON, MSGPACK, Identity, check_envelope, decode_body
from astraflow.protocol.codec import encode
from astraflow.protocol.errors import BY_NAME, AuthError, BadMessage, DeadlinePassed, RemoteError, Unavailable
from astraflow.protocol.message import ErrorReply, Message
from astraflow.protocol.routes import Route

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)

LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=30.0)
"""Per peer. 256: one instance's long polls and weight calls stay far below it; expiry is shorter than the server's 75 s."""

MAX_REPLY_BYTES = 1 << 30
"""More than the largest batch; a peer that sends more is broken."""


def _verify(url: str, tls: Tls) -> ssl.SSLContext | bool:
    """Plain HTTP needs no authorities (redirects are not followed)."""
    return client_context(tls) if url.startswith("https:") else False


@dataclass(frozen=True)
class _Call:
    """A request, ready to be sent."""

    method: str
    path: str
    params: dict[str, str] | None
    content: bytes | None
    headers: dict[str, str]


class _Peer:
    """What both clients share: building requests, reading replies."""

    def __init__(self, url: str, identity: Identity, max_reply_bytes: int):
        self._max_reply_bytes = max_reply_bytes
        self.url = check_url(url, "url", this_machine=not identity.token)
        self.identity = identity
        self._headers = {"accept": MSGPACK, "accept-encoding": "identity"}
        if check_token(identity.token, "token"):
            self._headers["authorization"] = f"Bearer {identity.token}"

    def _prepare(self, route: Route[Any, Any], request: Message | None, ref: str) -> _Call:
        if request is None:
            request = route.request()
        assert isinstance(request, route.request), f"{route.path} takes {route.request.__name__}, not {type(request).__name__}"
        assert ("{ref}" in route.path) == bool(ref), f"{route.path}: ref={ref!r}"
        request.run_id, request.incarnation = self.identity.run_id, self.identity.incarnation
        path = route.path.replace("{ref}", quote(ref, safe=""))
        if route.method == "GET":
            return _Call("GET", path, _query(request), None, self._headers)
        return _Call("POST", path, None, encode(request), self._headers | {"content-type": MSGPACK})

    def _message(self, route: Route[Any, P], response: httpx.Response, body: bytes) -> P:
        where = f"{route.path} at {self.url}"
        if response.status_code != 200:
            self._raise(where, response, body)
        reply: P = decode_body(body, route.reply, _is_json(response))
        check_envelope(reply, self.identity, f"reply of {where}")
        return reply

    def _bytes(self, route: Route[Any, Any], response: httpx.Response, body: bytes) -> bytes:
        if response.status_code != 200:
            self._raise(f"{route.path} at {self.url}", response, body)
        return body

    def _raise(self, where: str, response: httpx.Response, body: bytes) -> NoReturn:
        status = response.status_code
        try:
            reply: ErrorReply = decode_body(body, ErrorReply, _is_json(response))
        except BadMessage:
            kind = Unavailable if status in (502, 503, 504) else RemoteError
            raise kind(f"{where}: HTTP {status}, and not from an AstraFlow service") from None
        known = BY_NAME.get(reply.error, RemoteError)
        text = f"{reply.error}: {reply.message}" if reply.error not in BY_NAME else reply.message
        raise known(f"{text} [{self.url}]" if known is RemoteError else text)

    def _check_size(self, route: Route[Any, Any], size: int) -> None:
        """Bytes as they travel: a packed reply was not asked for, and is not unpacked."""
        if size > self._max_reply_bytes:
            raise BadMessage(f"{route.path} at {self.url}: a reply of more than {self._max_reply_bytes} bytes")

    def _refused(self, route: Route[Any, Any], error: httpx.HTTPError | TimeoutError, timeout_s: float) -> NoReturn:
        where = f"{route.method} {route.path} at {self.url}"
        if isinstance(error, TimeoutError | httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            raise DeadlinePassed(f"{where}: no answer within {timeout_s:g} s") from None
        text = " ".join(str(error).split()) or type(error).__name__
        secure = find_ssl_error(error)
        if isinstance(secure, ssl.SSLCertVerificationError):
            raise AuthError(f"{where}: its certificate is not accepted: {not_accepted(secure, self.identity.tls)}") from None
        if secure is not None and speaks_no_tls(secure):
            text = "it speaks no TLS; expected an address that begins with http://"
        elif isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http:"):
            text += " (a service with TLS does so; its address begins with https://)"
        raise Unavailable(f"{where}: {text}") from None


def _query(request: Message) -> dict[str, str]:
    fields = msgspec.to_builtins(request)
    return {name: _text(value) for name, value in fields.items() if value is not None}


def _text(value: Any) -> str:
    assert isinstance(value, str | int | float | bool), f"GET requests hold plain values only, not {type(value).__name__}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_json(response: httpx.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith(JSON)


class Caller(Protocol):
    """What a service needs of a client: one peer, called from the asyncio loop."""

    url: str

    async def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P: ...

    async def close(self) -> None: ...


class Client(_Peer):
    """Calls one peer from the asyncio loop; connections are kept alive.

    Raises the classes of `protocol/errors.py`: the peer's own errors, Unavailable when it cannot be reached, DeadlinePassed when
    it does not answer in time, RemoteError (with the peer's name) when it failed. Nothing is tried again here.
    """

    def __init__(self, url: str, identity: Identity, max_reply_bytes: int = MAX_REPLY_BYTES):
        super().__init__(url, identity, max_reply_bytes)
        self._http = httpx.AsyncClient(limits=LIMITS, timeout=None, trust_env=False, verify=_verify(self.url, identity.tls))

    async def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P:
        """The reply of one call; `timeout_s` covers all of it, connection included."""
        return self._message(route, *await self._send(route, self._prepare(route, request, ref), timeout_s))

    async def raw(self, route: Route[Any, Any], ref: str, *, timeout_s: float) -> bytes:
        """The bytes behind `ref` of a raw route."""
        return self._bytes(route, *await self._send(route, self._prepare(route, None, ref), timeout_s))

    async def _send(self, route: Route[Any, Any], call: _Call, timeout_s: float) -> tuple[httpx.Response, bytes]:
        chunks, size = list[bytes](), 0
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(
                    call.method, self.url + call.path, params=call.params, content=call.content, headers=call.headers
                ) as response,
            ):
                async for chunk in response.aiter_raw():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._check_size(route, size)
        except (httpx.HTTPError, TimeoutError) as error:
            self._refused(route, error, timeout_s)
        return response, b"".join(chunks)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class SyncClient(_Peer):
    """The same, blocking: for the trainer and the command line. Safe to share between threads."""

    def __init__(self, url: str, identity: Identity, max_reply_bytes: int = MAX_REPLY_BYTES):
        super().__init__(url, identity, max_reply_bytes)
        self._http = httpx.Client(limits=LIMITS, timeout=None, trust_env=False, verify=_verify(self.url, identity.tls))

    def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P:
        """The reply of one call; `timeout_s` covers all of it (a silent peer is noticed within twice that time at worst)."""
        return self._message(route, *self._send(route, self._prepare(route, request, ref), timeout_s))

    def raw(self, route: Route[Any, Any], ref: str, *, timeout_s: float) -> bytes:
        """The bytes behind `ref` of a raw route."""
        return self._bytes(route, *self._send(route, self._prepare(route, None, ref), timeout_s))

    def _send(self, route: Route[Any, Any], call: _Call, timeout_s: float) -> tuple[httpx.Response, bytes]:
        end = time.monotonic() + timeout_s
        chunks, size = list[bytes](), 0
        try:
            with self._http.stream(
                call.method, self.url + call.path, params=call.params, content=call.content, headers=call.headers, timeout=timeout_s
            ) as response:
                for chunk in response.iter_raw():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._check_size(route, size)
                    if time.monotonic() > end:
                        raise TimeoutError
        except (httpx.HTTPError, TimeoutError) as error:
            self._refused(route, error, timeout_s)
        return response, b"".join(chunks)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
