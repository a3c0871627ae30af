"""Services as real processes for `astraflow conformance`, and wrong ones: a proxy before a right service that does one thing wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.lib.net import free_port, listen
from astraflow.tools.conformance import Suite

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
"""For what must come; how soon depends on the machine."""
RECIPE = """\
experiment: {{name: conformance, seed: 0, run_dir: {directory}/run}}
models: {{solver: {{path: assets/tiny/solver}}}}
train_dataset: {{loader: digits, options: {{task: sort, min_len: 3, max_len: 6}}}}
workflow: {{workflow: rlvr, reward: exact_match, n_samples: 4, generation: {{max_new_tokens: 10, temperature: 1.0}}}}
dataflow: {{pool: {{heartbeat_s: 1.0, status_timeout_s: 20.0, pull_wait_s: 1.0}}}}
raas: {{engine: {{kind: scripted, options: {{token_s: 0.01}}}}, slots: 8, cancel_grace_s: 0.2}}
trainer: {{train_batch_size: 8, max_steps: 50, eval_freq: 0, threads: 1, optimizer: {{lr: 1e-3}}}}
weights: {{io_timeout_s: 1.0, reader_wait_s: 0.5}}
launch: {{dataflow_port: {port}, token_file: {directory}/token}}
"""
TOKEN = "a-token-for-the-conformance-tests"
Change = Callable[[Request, bytes, Response], Awaitable[Response]]
"""(request, its body, the right answer) → the wrong one."""


class Stage:
    """One recipe, one port of Dataflow, and the processes of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (directory / "token").write_text(TOKEN + "\n")
        self.recipe = directory / "recipe.yaml"
        self.recipe.write_text(RECIPE.format(directory=directory, port=self.port))
        self.children: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}
        """Added to that of every process."""

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
        env = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "ASTRAFLOW_TOKEN": TOKEN} | self.environment
        with (self.directory / f"process-{len(self.children)}.txt").open("wb") as output:
            self.children.append(subprocess.Popen([sys.executable, *argv], env=env, cwd=ROOT, stdout=output, stderr=output))
        return self.children[-1]

    def astraflow(self, verb: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "astraflow", verb, "--config", str(self.recipe), *options)

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("process-*.txt")))

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait(WAIT_S)


class Proxy:
    """A Starlette app that passes every call on to `target` and lets `change` spoil the answer."""

    def __init__(self, target: str, change: Change, port: int = 0) -> None:
        self.target, self._change = target, change
        sock = listen("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        app = Starlette(routes=[Route("/{path:path}", self._pass, methods=["GET", "POST", "DELETE"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=asyncio.run, args=(self._server.serve(sockets=[sock]),), daemon=True)
        self._thread.start()

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> Response:
        """One call of the right service, by default in msgpack."""
        kept = {"authorization": f"Bearer {TOKEN}", "content-type": "application/msgpack", "accept": "application/msgpack"}
        try:
            async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client:
                answer = await client.request(method, self.target + path, content=body, headers=headers or kept)
        except httpx.HTTPError:
            return Response(status_code=503)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _pass(self, request: Request) -> Response:
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: request.headers[name] for name in ("authorization", "content-type", "accept") if name in request.headers}
        answer = await self.send(request.method, request.url.path + query, body, headers)
        return await self._change(request, body, answer)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)


@contextlib.contextmanager
def proxy(target: str, change: Change, port: int = 0) -> Iterator[Proxy]:
    made = Proxy(target, change, port)
    try:
        yield made
    finally:
        made.close()


def failures(suite: Suite) -> list[str]:
    """Names of the checks that failed."""
    try:
        return [result.name for result in suite.results() if result.verdict == "fail"]
    finally:
        suite.close()


def failure(suite: Suite, name: str) -> str:
    """Why the named check failed, and no other before it; the suite is not gone through any further."""
    try:
        for result in suite.results():
            if result.verdict == "fail":
                assert result.name == name, result
                return result.reason
    finally:
        suite.close()
    raise AssertionError(f"nothing failed, least of all {name}")
