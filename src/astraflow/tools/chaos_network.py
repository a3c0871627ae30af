"""The network of the simulation: every message is really encoded, carried with a delay, and decoded; some meet a fault.

A call that is lost is answered like a broken connection or not at all until the caller's deadline; one whose reply is lost has
been handled all the same; one that comes twice is handled twice. Late requests are handled although their caller has given up.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from astraflow.lib.wire import Handler, Identity, check_envelope, wire_error
from astraflow.protocol import codec
from astraflow.protocol.errors import BY_NAME, DeadlinePassed, RemoteError, Unavailable
from astraflow.protocol.message import ErrorReply, Message
from astraflow.protocol.routes import Route
from astraflow.tools.chaos_loop import OWNER, Process, VirtualLoop

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)

WORLD = contextvars.Context()
"""Carries belong to nobody: they go on when caller or receiver dies."""
STOP_S = 5.0


@dataclass
class Fate:
    """What happens to one call. The times are seconds."""

    kind: str = ""
    """`request_lost`, `reply_lost`, `late`, `twice`; empty = nothing."""
    there: float = 0.001
    back: float = 0.001
    silent: bool = False
    """A lost message is noticed by the caller's deadline only, not at once as a broken connection."""
    again: float = 0.0
    """When the second copy comes, after the first."""


class Fates(Protocol):
    """Who decides, and who watches."""

    def fate(self, route: str) -> Fate: ...

    def cut(self, url: str, caller: str) -> bool:
        """Whether nothing passes between the two now."""
        ...

    def delivered(self, text: str) -> None:
        """A request is about to be handled, or a reply to be read. May kill processes."""
        ...


@dataclass
class Endpoint:
    """One listening service."""

    url: str
    process: Process
    identity: Identity
    handlers: Mapping[str, Handler]
    stopping: bool = False
    running: int = 0


@dataclass
class _Call:
    """One request on its way."""

    owner: Process
    url: str
    name: str
    route: Route[Any, Any]
    data: bytes
    answer: asyncio.Future[str | tuple[str, bytes]]
    """Why the connection broke, or (name of the error or empty, body)."""
    fate: Fate

    @property
    def caller(self) -> str:
        return self.owner.name


class Network:
    """Endpoints by url."""

    def __init__(self, loop: VirtualLoop, fates: Fates) -> None:
        self._loop, self._fates = loop, fates
        self.endpoints: dict[str, Endpoint] = {}
        self._open: dict[int, tuple[Process, _Call]] = {}
        """Calls that a process handles now."""
        self._count = 0

    def send(self, call: _Call) -> None:
        fate = call.fate
        if fate.kind == "request_lost":
            self._lose(call, fate.there)
            return
        endpoint = self.endpoints.get(call.url)  # a connection is to one process; the next one at this address does not get its bytes
        self._at(fate.there, self._arrive, call, endpoint, True)
        if fate.kind == "twice":
            self._at(fate.there + fate.again, self._arrive, call, endpoint, False)

    def _at(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_at(self._loop.time() + delay_s, callback, *args, context=WORLD)

    def _lose(self, call: _Call, delay_s: float) -> None:
        if not call.fate.silent:
            self._at(delay_s, self._settle, call, "the connection broke")

    def _settle(self, call: _Call, answer: str | tuple[str, bytes]) -> None:
        if not call.answer.done():
            call.answer.set_result(answer)

    def _arrive(self, call: _Call, endpoint: Endpoint | None, first: bool) -> None:
        if call.fate.kind in ("late", "twice") and not call.owner.alive:
            return  # its connection died with it; what is only milliseconds old may still be read
        if self._fates.cut(call.url, call.caller):
            self._settle(call, "no route")
        elif endpoint is None or not endpoint.process.alive:
            self._settle(call, "connection refused")
        else:
            self._fates.delivered(f"{call.caller} → {endpoint.process.name} {call.name}{'' if first else ' again'}")
            if not endpoint.process.alive:  # killed by this very message
                self._settle(call, "the connection broke")
                return
            self._count += 1
            self._open[self._count] = (endpoint.process, call)
            endpoint.running += 1
            endpoint.process.spawn(self._handle(endpoint, call, first, self._count), call.name)

    async def _handle(self, endpoint: Endpoint, call: _Call, first: bool, number: int) -> None:
        error = ""
        try:
            if endpoint.stopping:
                raise Unavailable(f"{endpoint.process.name} is stopping")
            request = codec.decode(call.data, call.route.request)
            check_envelope(request, endpoint.identity, call.name)
            reply: Message = await endpoint.handlers[call.name](request)
            assert isinstance(reply, call.route.reply), f"{call.name}: handler returned {type(reply).__name__}"
            reply.run_id, reply.incarnation = endpoint.identity.run_id, endpoint.identity.incarnation
            body = codec.encode(reply)
        except Exception as failure:
            _, told = wire_error(failure, endpoint.process.name)
            error, body = told.error, codec.encode(told)
        endpoint.running -= 1
        self._open.pop(number, None)
        if not first:
            return
        if call.fate.kind == "reply_lost":
            self._lose(call, call.fate.back)
        else:
            self._at(call.fate.back, self._return, endpoint, call, error, body)

    def _return(self, endpoint: Endpoint, call: _Call, error: str, body: bytes) -> None:
        if self._fates.cut(call.url, call.caller):
            return  # until the deadline of the caller
        if not call.answer.done():
            self._fates.delivered(f"{call.caller} ← {endpoint.process.name} {call.name}{' ' + error if error else ''}")
        self._settle(call, (error, body))

    def died(self, process: Process) -> None:
        """Its sockets are closed by the kernel: callers notice at once."""
        for url in [url for url, endpoint in self.endpoints.items() if endpoint.process is process]:
            del self.endpoints[url]
        for number in [number for number, (owner, _) in self._open.items() if owner is process]:
            _, call = self._open.pop(number)
            self._at(0.001, self._settle, call, "the connection broke")


class SimClient:
    """`wire_client.Client`'s call, over the simulated network."""

    def __init__(self, network: Network, fates: Fates, loop: VirtualLoop, url: str, identity: Identity) -> None:
        self.url, self.identity = url.rstrip("/"), identity
        self._network, self._fates, self._loop = network, fates, loop

    async def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P:
        """Raises what a real client would."""
        owner, message = OWNER.get(), request if request is not None else route.request()
        assert owner is not None, "the world itself makes no calls"
        message.run_id, message.incarnation = self.identity.run_id, self.identity.incarnation
        name = route.path.strip("/")
        call = _Call(owner, self.url, name, route, codec.encode(message), self._loop.create_future(), self._fates.fate(name))
        self._network.send(call)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call.answer
        except TimeoutError:
            raise DeadlinePassed(f"{route.path} at {self.url}: no answer within {timeout_s:g} s") from None
        if isinstance(answer, str):
            raise Unavailable(f"{route.path} at {self.url}: {answer}")
        error, body = answer
        if not error:
            reply = codec.decode(body, route.reply)
            check_envelope(reply, self.identity, f"reply of {route.path}")
            return reply
        told = codec.decode(body, ErrorReply)
        raise BY_NAME.get(told.error, RemoteError)(told.message)

    async def close(self) -> None:
        return None


class SimServer:
    """`wire.Server`'s life, over the simulated network."""

    def __init__(self, network: Network, url: str, handlers: Mapping[str, Handler], identity: Identity) -> None:
        self.identity = identity
        self._network, self._url, self._handlers = network, url, handlers

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> None:
        owner = OWNER.get()
        assert owner is not None
        self._network.endpoints[self._url] = Endpoint(self._url, owner, self.identity, self._handlers)

    async def stop(self) -> None:
        """Refuse new calls, let running ones end for a while, then cut them."""
        endpoint = self._network.endpoints.get(self._url)
        if endpoint is None:
            return
        endpoint.stopping = True
        end = asyncio.get_running_loop().time() + STOP_S
        while endpoint.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self._network.died(endpoint.process)
