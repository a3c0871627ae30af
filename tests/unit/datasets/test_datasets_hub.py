"""The hub's own client against a small hub on this machine; the client reads its settings at import, so in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("huggingface_hub")

FILES = {
    "README.md": b"a card",
    "data/test-00000.jsonl": b'{"problem": "1+1", "answer": "2"}\n',
    "data/test-00001.jsonl": b'{"problem": "1+2", "answer": "3"}\n',
    "data/train-00000.jsonl": b"not asked for\n",
}
COMMIT = "a" * 40
SCRIPT = """
import sys
from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.protocol.errors import UserError
try: print([task.data for task in load(DatasetConfig(loader=sys.argv[1]))])
except UserError as error: print("refused:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """The three requests of a snapshot: which commit, which files, one file."""

    asked: list[str] = []

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if "/datasets/HuggingFaceH4/MATH-500/" not in path:
            return self.send_error(404)
        if "/revision/" in path:
            return self.reply(json.dumps({"id": "x/y", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}).encode())
        if "/tree/" in path:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "1" * 40} for name, data in FILES.items()]
            return self.reply(json.dumps(tree).encode())
        return self.reply(FILES[path.split(f"/resolve/{COMMIT}/")[1]])

    do_HEAD = do_GET

    def reply(self, data: bytes) -> None:
        self.send_response(200)
        for name, value in {"ETag": f'"{md5(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def load_from(endpoint: str, home: object, loader: str, **variables: str) -> str:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT, loader], env=env, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_a_set_without_a_path_comes_from_the_hub_and_then_from_its_cache(hub, tmp_path):
    rows = "[{'prompt': '1+1', 'answer': '2'}, {'prompt': '1+2', 'answer': '3'}]"
    assert load_from(hub, tmp_path, "math500") == rows
    assert not any("train" in path or "README" in path for path in Hub.asked), "only the files of the split are fetched"
    assert load_from("http://127.0.0.1:1", tmp_path, "math500", HF_HUB_OFFLINE="1") == rows
    refused = load_from(hub, tmp_path, "aime24")
    assert refused.startswith("refused: dataset 'aime24': math-ai/aime24 cannot be downloaded; give the `path` of a copy")
    assert "\n" not in refused
