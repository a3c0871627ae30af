"""JSON over HTTP to a server that somebody else wrote; what goes wrong is an EngineError of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from astraflow.raas.engines.base import EngineError

T = TypeVar("T")

MAX_WORDS = 500


class Http:
    """One server."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        # A connection per call: a server that closes idle ones (vLLM does after an error) would fail the next call on them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, headers=dict(headers or {}), limits=limits, trust_env=False)

    async def get(self, path: str, *, timeout_s: float | None) -> bytes:
        """Body of the reply. Raises as `post` does."""
        return await self._send("GET", path, timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None, query: Mapping[str, str] | None = None) -> bytes:
        """Body of the reply. `timeout_s` None = the caller's deadline bounds it.

        Raises EngineError: `crash` (no connection, or it broke), `timeout`, `engine` (5xx), all of which may pass when it is tried
        again, `busy` (429) too, and `refused` (any other status than 2xx) with the server's words.
        """
        return await self._send("POST", path, timeout_s, json=body, params=query)

    async def _send(self, method: str, path: str, timeout_s: float | None, **parts: Any) -> bytes:
        try:
            reply = await self._client.request(method, path, timeout=timeout_s, **parts)
        except httpx.TimeoutException:
            raise EngineError("timeout", f"{path}: no answer within {timeout_s:g} s", retryable=True) from None
        except httpx.HTTPError as error:
            raise EngineError("crash", f"{path}: {type(error).__name__}: {error}", retryable=True) from None
        if reply.is_success:
            return reply.content
        words = f"{path}: HTTP {reply.status_code}: {' '.join(reply.text.split())[:MAX_WORDS]}"
        kind = "engine" if reply.is_server_error else "busy" if reply.status_code == 429 else "refused"
        raise EngineError(kind, words, retryable=kind != "refused")

    async def close(self) -> None:
        await self._client.aclose()


def decoded(body: bytes, kind: type[T], what: str) -> T:
    """Raises EngineError(bad_response) naming the field that is missing or wrong; fields that nobody reads may be there."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError("bad_response", f"{what}: {error}") from None


class OpenAPI(msgspec.Struct):
    """What a FastAPI server says about itself under /openapi.json."""

    paths: dict[str, msgspec.Raw] = {}
    components: dict[str, dict[str, msgspec.Raw]] = {}

    def takes(self, schema: str, field: str) -> bool:
        """Whether a request schema has this field."""
        found = self.components.get("schemas", {}).get(schema)
        return found is not None and field in msgspec.json.decode(found, type=_Schema).properties


class _Schema(msgspec.Struct):
    properties: dict[str, msgspec.Raw] = {}


async def offered(http: Http, timeout_s: float) -> OpenAPI:
    """What this server offers; nothing when it does not say."""
    try:
        return decoded(await http.get("/openapi.json", timeout_s=timeout_s), OpenAPI, "/openapi.json")
    except EngineError as error:
        if error.retryable:
            raise
        return OpenAPI()
