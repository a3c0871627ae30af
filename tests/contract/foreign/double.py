"""What the stand-ins for foreign servers share: a model whose log-probs name its weights, requests that can be ended, strict bodies.

They are programs of their own and import nothing of AstraFlow. Where a real server is silent or lax they refuse: an unknown field, a
wrong type, a weight update while something runs. FOREIGN_* variables make them miss a route or fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import uvicorn
from safetensors import safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

TOKEN_S = float(os.environ.get("FOREIGN_TOKEN_S", "0"))
LACKS = os.environ.get("FOREIGN_LACKS", "").split(",")
"""Routes (or fields) that this server does not have."""
BROKEN = float(os.environ.get("FOREIGN_BROKEN", "nan"))
"""Weights that cannot be loaded in place."""
UNUSABLE = float(os.environ.get("FOREIGN_UNUSABLE", "nan"))
"""Weights that no server can be started on."""
STUCK = float(os.environ.get("FOREIGN_STUCK", "nan"))
"""Weights whose load in place does not end."""
SILENCE = Path(os.environ.get("FOREIGN_SILENCE", "/nonexistent"))
"""While this file exists no health check is answered."""
END = 2


class Refused(Exception):
    """Answered with this status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind, strict=True)
    except msgspec.MsgspecError as error:
        raise Refused(400, f"{kind.__name__}: {error}") from None


class Double:
    """One server: its model, what runs, and what it was asked."""

    def __init__(self, arguments: list[str]) -> None:
        self.args = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
        self.flags = [argument for argument in arguments if "=" not in argument]
        self.running: dict[str, str] = {}
        """Request id → how it is to end, "" = by itself."""
        self.seen: list[Any] = []
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.stale = False
        """Caches of other weights are still there."""
        self.weight = -1.0

    def start_model(self, directory: str) -> None:
        self.directory = Path(directory)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        assert json.loads((self.directory / "config.json").read_text())["tie_word_embeddings"] is False
        if self.args["load-format"] == "dummy":
            assert not (self.directory / "model.safetensors").exists()
            return
        if self._read() == UNUSABLE:
            sys.exit("INFO starting\nValueError: these weights are unusable\nRuntimeError: the engine failed")
        self.weight = self._read()

    def _read(self) -> float:
        with safe_open(self.directory / "model.safetensors", framework="numpy") as file:
            assert set(file.keys()) == {"model.embed_tokens.weight", "lm_head.weight"}
            return float(file.get_tensor("lm_head.weight")[0])

    async def reload(self) -> None:
        wanted = self._read()
        if self.running or self.resumed.is_set():
            raise Refused(500, f"{len(self.running)} requests run, or nobody paused this server")
        if wanted in (BROKEN, UNUSABLE):
            raise Refused(500, "these weights cannot be loaded")
        if wanted == STUCK:
            await asyncio.Event().wait()
        self.weight, self.stale = wanted, True

    async def generate(self, rid: str, prompt: list[int], count: int, stop_ids: set[int], stops: list[str]) -> tuple[list[Any], str]:
        """[(log-prob, token)…] and how it ended."""
        assert rid not in self.running, rid
        out: list[tuple[float, int]] = []
        self.running[rid] = ""
        try:
            while not self.running[rid]:
                if not self.resumed.is_set():
                    await asyncio.sleep(0.005)
                    continue
                at = len(prompt) + len(out)
                token = END if at == prompt[0] else 23 + at % 10
                out.append((-self.weight - token / 1000 - 100 * self.stale, token))
                if token in stop_ids or any(stop in self.tokenizer.decode([t for _, t in out]) for stop in stops):
                    return out, "stop"
                if len(out) == count:
                    return out, "length"
                await asyncio.sleep(TOKEN_S)
            return out, self.running[rid]
        finally:
            del self.running[rid]

    def end(self, rid: str = "") -> None:
        """Abort the requests whose id begins like this."""
        for found in self.running:
            if found.startswith(rid):
                self.running[found] = "abort"


Routes = dict[str, tuple[str, Callable[[Request], Any]]]
"""Path → method and handler, which returns a JSON value, None or a Response."""


def serve(double: Double, routes: Routes, schemas: dict[str, list[str]], gauges: list[str]) -> None:
    """Until SIGTERM."""

    def guarded(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                value = await handler(request)
            except Refused as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=error.status)
            return value if isinstance(value, Response) else Response() if value is None else JSONResponse(value)

        return answer

    async def health(request: Request) -> Response:
        while SILENCE.exists():
            await asyncio.sleep(0.05)
        return Response()

    async def metrics(request: Request) -> Response:
        running = len(double.running)
        return PlainTextResponse("# HELP x\n" + "".join(f'{name}{{model="m"}} {running}.0\n' for name in gauges))

    async def seen(request: Request) -> dict[str, Any]:
        state = {"bodies": double.seen, "running": len(double.running), "args": double.args, "flags": double.flags}
        return {**state, "weight": double.weight, "pid": os.getpid(), "child": child.pid}

    async def openapi(request: Request) -> dict[str, Any]:
        fields = {name: {"properties": {f: {} for f in found if f not in LACKS}} for name, found in schemas.items()}
        return {"paths": {path: {} for path in offered}, "components": {"schemas": fields}}

    own = {"/health": ("GET", health), "/metrics": ("GET", metrics), "/openapi.json": ("GET", openapi), "/seen": ("GET", seen)}
    offered = {path: route for path, route in {**own, **routes}.items() if path not in LACKS}
    table = [Route(path, guarded(handler), methods=[method]) for path, (method, handler) in offered.items()]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as real ones have workers
    try:
        host, port = double.args.get("host", "127.0.0.1"), int(double.args["port"])
        uvicorn.run(Starlette(routes=table), host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    finally:
        child.kill()
        child.wait()


def now() -> int:
    return int(time.time())
