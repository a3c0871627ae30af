"""The page as a Starlette app, mounted beside Dataflow's own routes or served alone. Reading only, but for the operators' buttons.

    /dashboard/            the page and its files; they hold nothing of the run, so they need no token
    /view/live             what goes on                           /view/rollouts      a page of rollouts
    /view/series?since=    curves, what is new                    /view/rollout       one rollout, by place
    /view/act (POST)       the buttons                            /view/group         the rollouts of a lease
                                                                  /view/export        JSON lines

Everything under `/view` passes the token check of the server that it is mounted into. All answers forbid scripts and styles that are
not files of this package, other hosts, and framing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.dashboard.live import Action, Live
from astraflow.dashboard.rollouts import Filter, Rollouts
from astraflow.dashboard.series import Series
from astraflow.lib.auth import foreign
from astraflow.lib.wire import Identity, wire_error
from astraflow.protocol.errors import AstraFlowError, AuthError, BadMessage, TooLarge, UserError

log = logging.getLogger(__name__)

PAGE = "/dashboard"
OPEN_PATHS = (f"{PAGE}/",)
"""What a browser may fetch before it was told the token."""
STATIC = Path(__file__).with_name("static")
MAX_ACT_BYTES = 4096
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The routes of one run directory. `identity`: who asks Dataflow, with the token that this page's own server asks for."""

    def __init__(self, run_dir: Path, identity: Identity) -> None:
        self._token = identity.token
        self.live, self.series, self.rollouts = Live(run_dir, identity), Series(run_dir), Rollouts(run_dir)

    def routes(self) -> list[BaseRoute]:
        """For `Server(extra_routes=…)`, together with `OPEN_PATHS`."""
        data: list[BaseRoute] = [
            Route("/live", self._answers(self._live)),
            Route("/series", self._answers(self._series)),
            Route("/rollouts", self._answers(self._page)),
            Route("/rollout", self._answers(self._one)),
            Route("/group", self._answers(self._group)),
            Route("/export", self._answers(self._export)),
            Route("/act", self._answers(self._act), methods=["POST"]),
        ]
        return [
            Route(PAGE, Guard(RedirectResponse(f"{PAGE}/"), self._token)),
            Mount(PAGE, Guard(StaticFiles(directory=STATIC, html=True), self._token)),
            Mount("/view", Guard(Router(data, redirect_slashes=False), self._token)),
        ]

    async def close(self) -> None:
        await self.live.close()
        self.rollouts.index.close()

    def _answers(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:  # the request handler: whatever failed is an answer
                if not isinstance(error, AstraFlowError):
                    log.error("%s failed", request.scope["path"], exc_info=error)
                status, reply = wire_error(error, "dashboard")
                return Response(msgspec.json.encode(reply), status, media_type="application/json")

        return answer

    async def _live(self, request: Request) -> Response:
        return _json(await self.live.look())

    async def _series(self, request: Request) -> Response:
        text = request.query_params.get("since", "0")
        if not text.isdecimal() or len(text) > 15:
            raise UserError(f"since: {text[:40]!r}: expected a number of rows, 0 or more")
        return _json(await asyncio.to_thread(self.series.since, int(text)))

    async def _page(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self.rollouts.page, Filter.of(request.query_params)))

    async def _one(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self.rollouts.one, request.query_params.get("place", "")))

    async def _group(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self.rollouts.group, request.query_params.get("lease", "")))

    async def _export(self, request: Request) -> Response:
        wanted = Filter.of(request.query_params)
        headers = {"Content-Disposition": 'attachment; filename="rollouts.jsonl"'}
        return StreamingResponse(self.rollouts.export(wanted), media_type="application/x-ndjson", headers=headers)

    async def _act(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise BadMessage("act: Content-Type: expected application/json")  # what a form of another site cannot send unasked
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_ACT_BYTES:
                raise TooLarge(f"act: over {MAX_ACT_BYTES} bytes")
        try:
            action = msgspec.json.decode(body, type=Action)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadMessage(f"act: {error}") from None
        return _json({"said": await self.live.act(action)})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Guard:
    """The headers of every answer; and, where no token is asked for, no other site's page: neither by a name that leads here (DNS
    rebinding) nor by a request across origins."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        if reason := foreign(headers.get("host", ""), headers.get("origin", ""), self._token):
            status, reply = wire_error(AuthError(reason), "dashboard")
            await Response(msgspec.json.encode(reply), status, media_type="application/json")(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        except HTTPException as error:  # no such path or method; the server's own answer would come without the headers
            text = f"{scope['path']}: {error.detail}"
            await PlainTextResponse(text, error.status_code, headers=error.headers)(scope, receive, with_headers)
