"""Who may come in: an address and a key per running episode, worth nothing once it has ended.

    call ─▶ key ─▶ body (limit, deadline) ─▶ the API's function ─▶ reply (deadline)

The key is looked at before anything is read. A call ends with its client (no answer is sampled for one that has gone), with its
episode, or by a deadline; one that reads slowly holds nothing but itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astraflow.lib.aio import deadline
from astraflow.lib.auth import same_token
from astraflow.lib.metrics import Counter
from astraflow.protocol.errors import DeadlinePassed
from astraflow.raas.episode import CURRENT
from astraflow.raas.gateway import anthropic, openai
from astraflow.raas.gateway.asks import Refusal, Reply, refusal_of
from astraflow.workflows.visit import Admission, Visit

log = logging.getLogger(__name__)

PREFIX = "/episodes/"
"""Of all addresses here; the cluster's token is not asked for below it."""
MAX_BODY_BYTES = 4 << 20
"""A history of about a million tokens; decoding it takes some ten milliseconds of the service's loop."""
MAX_DRAINED_BYTES = 64 << 20
"""Of a larger body so much is read and thrown away, so that its sender reads why it was refused; then the connection is cut."""
BODY_S = 60.0
SEND_S = 60.0
MOST_CALLS = 64
"""At once in one episode; the server's connections are there for all of them and for Dataflow."""
REMEMBERED = 1024
"""Ended episodes whose key is told so, and counted."""

Api = Callable[[Visit, bytes, bool], Awaitable[Reply]]
POSTS: dict[str, Api] = {
    "chat/completions": openai.chat,
    "completions": openai.text,
    "messages": anthropic.messages,
    "reward": openai.reward,
}


@dataclass(eq=False)
class _Guest:
    visit: Visit
    key: str
    training: bool
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    ended: bool = False


class Door:
    """Of one rollout service."""

    def __init__(self, url: Callable[[], str], counts: Counter) -> None:
        """`url`: of the service, as agents reach it."""
        self._url, self._counts = url, counts
        self._guests: dict[str, _Guest] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def routes(self) -> list[Route]:
        """For the server; open, because the episode's key stands in the place of the cluster's token."""
        return [Route(PREFIX + "{episode}/v1/{call:path}", _Endpoint(self))]

    def admit(self, visit: Visit) -> Admission:
        """Called in the episode's own task."""
        episode, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        running = CURRENT.get()
        self._guests[episode] = _Guest(visit, key, training=running is None or running.training)
        self._counts.add("raas/door_episodes")
        return Admission(f"{self._url().rstrip('/')}{PREFIX}{episode}/v1", key)

    def dismiss(self, admission: Admission) -> None:
        episode = admission.base_url.split("/")[-2]
        guest = self._guests.pop(episode, None)
        if guest is None:
            return
        guest.ended = True
        for call in guest.calls:
            call.cancel()
        self._ended[episode] = guest.key
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def guest(self, episode: str, given: str) -> _Guest:
        """Whoever the key belongs to. Raises Refusal; an episode that is not there and a wrong key look the same."""
        guest = self._guests.get(episode)
        expected = self._ended.get(episode, "") if guest is None else guest.key
        if not (same_token(given, expected or secrets.token_urlsafe(32)) and expected):
            self._counts.add("raas/door_wrong_key")
            raise Refusal(401, "the key is missing or is not that of this episode", code="invalid_api_key")
        if guest is None:
            self._counts.add("raas/door_after_end")
            raise Refusal(403, "this episode has ended: its key is worth nothing any more", code="episode_ended")
        if len(guest.calls) >= MOST_CALLS:
            raise Refusal(429, f"{MOST_CALLS} calls of this episode are running", code="too_many_calls")
        self._counts.add("raas/door_calls")
        return guest


class _Endpoint:
    """Everything below one episode's address."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = scope["path_params"]["call"]
        task = asyncio.current_task()
        assert task is not None
        guest: _Guest | None = None
        try:
            guest = self._door.guest(scope["path_params"]["episode"], _key(scope))
            guest.calls.add(task)
            reply = await self._reply(guest, call, scope, receive)
        except asyncio.CancelledError:
            if guest is None or not guest.ended:
                raise
            task.uncancel()
            reply = _refused(call, Refusal(403, "the episode ended before this call was answered", code="episode_ended"))
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                log.error("%s of an agent failed", call, exc_info=error)
                refusal = Refusal(500, f"{type(error).__name__} inside the rollout service", code="internal_error")
            reply = _refused(call, refusal)
        try:
            if reply is not None:
                await deadline(_send(reply, send), SEND_S, "reading of a reply")
        except asyncio.CancelledError:
            if guest is None or not guest.ended:
                raise
            task.uncancel()
            log.debug("a reply was cut: its episode has ended")
        except DeadlinePassed as error:
            log.debug("a reply was cut: %s", error)
        finally:
            if guest is not None:
                guest.calls.discard(task)

    async def _reply(self, guest: _Guest, call: str, scope: Scope, receive: Receive) -> Reply | None:
        """None = the client has gone, and nobody waits for a reply."""
        method = scope["method"]
        if call == "models" or call.startswith("models/"):
            _takes(method, "GET", call)
            return await openai.models(guest.visit, call.removeprefix("models").removeprefix("/"))
        if call not in POSTS:
            known = ", ".join(f"/v1/{name}" for name in [*POSTS, "models"])
            raise Refusal(404, f"there is no /v1/{call} here; known: {known}", code="unknown_url")
        _takes(method, "POST", call)
        body = await deadline(_body(scope, receive), BODY_S, "body of a call")
        if body is None:
            return None
        return await _unless_gone(receive, POSTS[call](guest.visit, body, guest.training))


def _takes(method: str, wanted: str, call: str) -> None:
    if method != wanted:
        raise Refusal(405, f"/v1/{call} takes {wanted}, not {method}", code="method_not_allowed")


def _key(scope: Scope) -> str:
    """`Authorization: Bearer …` as OpenAI's clients send it, or Anthropic's `x-api-key`."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else headers.get(b"x-api-key", b"").decode("latin-1")


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """All of it; None = the client went away. Raises Refusal for one over the limit."""
    chunks: list[bytes] = []
    size, more = 0, True
    while more and size <= MAX_DRAINED_BYTES:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        chunk: bytes = event.get("body", b"")
        size, more = size + len(chunk), event.get("more_body", False)
        if size > MAX_BODY_BYTES:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > MAX_BODY_BYTES:
        raise Refusal(413, f"a body of {'more than ' if more else ''}{size} bytes; at most {MAX_BODY_BYTES} are taken", code="too_large")
    return b"".join(chunks)


async def _unless_gone(receive: Receive, work: Awaitable[Reply]) -> Reply | None:
    """The work's result; it is cancelled when the client goes away meanwhile."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refused(call: str, refusal: Refusal) -> Reply:
    shape = anthropic.error if call.startswith("messages") else openai.error
    headers = {"retry-after": "1"} if refusal.status == 429 else {}
    return Reply([msgspec.json.encode(shape(refusal))], status=refusal.status, headers=headers)


async def _send(reply: Reply, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream" if reply.stream else b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    if reply.stream:
        headers.append((b"cache-control", b"no-cache"))
    else:
        headers.append((b"content-length", str(len(reply.pieces[0])).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    *before, last = reply.pieces
    for piece in before:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": last})
