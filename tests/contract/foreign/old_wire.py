"""Two peers of the seed's wire, by its description alone (docs/compat.md): a trainer and a rollout service. Nothing of ours is imported.

They are what the public implementation's peers are on the wire: requests of pickled dicts, replies that are unpickled without a second
thought, torch tensors inside, no token but the password of the address that they were given.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 120.0


class OldTrainer:
    """/ready, /batch, /notify_version."""

    def __init__(self, url: str, model_id: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self.url = f"{parts.scheme}://{parts.hostname}:{parts.port}"
        secret = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        self.headers = {"Authorization": f"Basic {secret}"} if parts.password else {}
        self.model = {} if model_id is None else {"model_id": model_id}

    def _read(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"HTTP {error.code}: {error.read()!r:.300}") from None

    def post(self, path: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
        body = b"" if message is None else pickle.dumps(message)
        headers = self.headers | ({"Content-Type": "application/octet-stream"} if body else {})
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method="POST")
        if not body:
            request.add_unredirected_header("Content-Type", "")
        found: dict[str, Any] = pickle.loads(self._read(request))
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._read(urllib.request.Request(self.url + "/status", headers=self.headers)))
        return found

    def ready(self, **message: Any) -> None:
        assert self.status()["status"] == "ready"
        assert self.post("/ready", self.model | message) == {"ok": True}

    def batch(self, version: int | None = None) -> dict[str, Any]:
        query = urllib.parse.urlencode(self.model | ({} if version is None else {"version": version}))
        found: dict[str, Any] = pickle.loads(self._read(urllib.request.Request(f"{self.url}/batch?{query}", headers=self.headers)))
        return found

    def notify(self, version: int, run_eval: bool = False) -> dict[str, Any]:
        return self.post("/notify_version", self.model | {"version": version, "run_eval": run_eval})


class OldRaaS:
    """Tasks in, results out; `per_task` trajectories of each. `shape(result)` may change a result before it is handed out."""

    def __init__(self, uid: str = "old-0", per_task: int = 1, shape: Any = None) -> None:
        self.uid, self.per_task, self.shape = uid, per_task, shape or (lambda number, result: result)
        self.version, self.numbers, self.evals = 0, 0, 0
        self.senders: list[str] = []
        self.workflows: dict[str, dict[str, Any]] = {}
        self.results: dict[str, list[dict[str, Any]]] = {"": [], "eval_": []}
        self.lose_pulls = 0
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def register(self, dataflow: str) -> dict[str, Any]:
        body = json.dumps({"uid": self.uid, "raas_url": self.url, "gpu_count": 1}).encode()
        request = urllib.request.Request(f"{dataflow}/register_raas", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            found: dict[str, Any] = json.load(reply)
            return found

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sequence(self, number: int) -> dict[str, Any]:
        import torch

        ids = torch.tensor([[1, 2, 3, 10 + number % 90, 11, 12, 0]], dtype=torch.int32)
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0]], dtype=torch.int32)
        return {
            "input_ids": ids,
            "attention_mask": torch.tensor([[True] * 6 + [False]]),
            "loss_mask": mask,
            "logprobs": -0.5 * mask.float(),
            "versions": torch.where(mask > 0, self.version, -1).to(torch.int32),
        }

    def result(self, number: int) -> Any:
        import torch

        found = {
            "n_trajs": self.per_task,
            "rewards": torch.tensor([float((number + at) % 2) for at in range(self.per_task)]),
            "trajectories": [{"sequences": [self.sequence(number + at)]} for at in range(self.per_task)],
            "agent_metrics": {"turns": 2.0},
        }
        return self.shape(number, found)

    def answer(self, path: str, message: dict[str, Any]) -> Any:
        lane = "eval_" if path.startswith("/eval") else ""
        if path == "/register_workflow":
            self.workflows[message["workflow_id"]] = message
            return {"workflow_id": message["workflow_id"], "registered": True, "total_workflows": len(self.workflows)}
        if path in ("/submit", "/eval_submit"):
            assert isinstance(message["data"], dict)
            assert message["workflow_id"] in self.workflows
            self.numbers += 1
            self.results[lane].append({"task_id": self.numbers, "result": self.result(self.numbers)})
            return {"task_id": self.numbers}
        if path in ("/pull", "/eval_pull"):
            found, self.results[lane] = self.results[lane], []
            if found and self.lose_pulls:
                self.lose_pulls -= 1
                raise ConnectionError("the reply is lost, and the results with it")
            return {"items": found, "inflight": 0, "pending": 0, "total_submitted": self.numbers} if lane else found
        if path == "/notify_version":
            self.senders.append(message["sender_endpoint"])
            if message["version"] <= self.version:
                return {"ok": True, "model_id": message["model_id"], "version": self.version, "pulled": False}
            self.version = message["version"]
            return {"ok": True, "model_id": message["model_id"], "version": self.version, "pull_result": {"ok": True, "mode": "full"}}
        if path in ("/eval_start", "/reset_training_engine"):
            self.evals += path == "/eval_start"
            self.results = {"": [], "eval_": []}
        if path == "/shutdown":
            self.ended.set()
        return {"status": path[1:]}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        old = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = {"status": "ready", "engine_id": old.uid, "backend": "none", "models": [], "message": "", "max_concurrency": 16}
                status |= {"queued": 0, "inflight": 0, "pending_futures": 0, "workflows": [*old.workflows]}
                self.say(200, json.dumps(status).encode())

            def do_POST(self) -> None:
                message = pickle.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    with old.lock:
                        answer = {"ok": True, "result": old.answer(self.path, message)}
                except ConnectionError:
                    self.close_connection = True
                    return
                except Exception as error:
                    self.say(500, pickle.dumps({"ok": False, "error": repr(error)}))
                    return
                self.say(200, pickle.dumps(answer))

            def say(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None: ...

        return Handler


def until(condition: Any, what: str) -> Any:
    end = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found
