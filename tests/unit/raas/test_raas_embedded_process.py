"""The child process over its socketpair: frames both ways, kill -9, a vanished parent, mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from astraflow.raas.engines import embedded, frames
from astraflow.raas.engines.embedded_arch import read_architecture
from astraflow.raas.engines.embedded_weights import Weights
from astraflow.raas.engines.frames import (
    Cancel,
    Done,
    Failed,
    FromChild,
    Generate,
    Init,
    Load,
    Loaded,
    LoadFailed,
    Ping,
    Pong,
    Ready,
    Stop,
    ToChild,
)
from astraflow.workflows.api import ModelRequest

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    arch = read_architecture(directory)
    assert arch is not None
    weights = Weights(arch, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(0)
    words = {name: torch.randn(shape).bfloat16() * 0.2 for name, shape in weights.shapes.items()}
    save_file(words, directory / "model.safetensors")
    return directory


class Parent:
    """The other end of the socketpair, blocking with a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        self.connection = connection
        self._reader = frames.from_child()
        self._frames: list[FromChild] = []

    def send(self, *messages: ToChild) -> None:
        self.connection.sendall(b"".join(map(frames.pack, messages)))

    def receive(self) -> FromChild | None:
        """The next frame; None when the child is gone."""
        while not self._frames:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def expect(self, kind: type[Any]) -> Any:
        frame = self.receive()
        assert isinstance(frame, kind), frame
        return frame


@pytest.fixture
def child(model_dir: Path) -> Iterator[tuple[Parent, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "astraflow.raas.engines.embedded", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"})
    theirs.close()
    try:
        yield Parent(ours), process
    finally:
        ours.close()
        process.kill()
        process.wait(timeout=60)


def long_request(seed: int = 0) -> ModelRequest:
    return ModelRequest(input_ids=[3, 4, 5], max_new_tokens=4000, seed=seed)


def test_a_child_serves_loads_cancels_and_its_death_is_noticed(child: tuple[Parent, subprocess.Popen[bytes]], model_dir: Path) -> None:
    parent, process = child
    weights = str(model_dir / "model.safetensors")
    parent.send(Init(model_dir=str(model_dir), threads=1, eos_ids=[]), Generate(id="early", request=long_request()))
    ready = parent.expect(Ready)
    assert (ready.pid, ready.max_len, ready.device, ready.dtype, ready.loaded) == (process.pid, 4096, "cpu", "float32", False)
    assert parent.expect(Failed).kind == "not_loaded"

    short = ModelRequest(input_ids=[3], max_new_tokens=5)
    parent.send(Load(path=weights, timeline=3, version=7, digest="d"), Generate(id="a", request=short))
    loaded = parent.expect(Loaded)
    assert (loaded.timeline, loaded.version, loaded.digest) == (3, 7, "d")
    response = parent.expect(Done).response
    assert (response.versions, response.timeline, response.finish) == ([7] * 5, 3, "length")

    parent.send(Generate(id="long", request=long_request()), Ping(nonce=9))
    pong = parent.expect(Pong)
    assert (pong.nonce, pong.running + pong.queued, pong.version, pong.timeline) == (9, 1, 7, 3)
    assert pong.stats["generated_tokens"] >= 5
    nowhere = Load(path=str(model_dir / "nowhere"), timeline=3, version=8, digest="")
    parent.send(nowhere, Cancel(id="long"), Cancel(id="long"), Ping(nonce=10))
    assert "nowhere" in parent.expect(LoadFailed).message
    assert parent.expect(Failed).kind == "cancelled"
    pong = parent.expect(Pong)
    assert (pong.nonce, pong.running, pong.queued, pong.version) == (10, 0, 0, 7)

    parent.send(*(Generate(id=str(index), request=long_request(index)) for index in range(16)))
    os.kill(process.pid, signal.SIGKILL)
    assert parent.receive() is None
    assert process.wait(timeout=60) == -signal.SIGKILL


def in_process(model_dir: Path, *messages: ToChild, close: bool = False) -> tuple[int, Parent]:
    """Run the child's main in this process on messages that are already there."""
    ours, theirs = socket.socketpair()
    parent = Parent(ours)
    parent.send(*messages)
    if close:
        ours.shutdown(socket.SHUT_WR)
    return embedded.main(["--fd", str(theirs.detach())]), parent


def test_stop_and_a_vanished_parent_end_the_child_with_0(model_dir: Path) -> None:
    init = Init(model_dir=str(model_dir), threads=1, load_initial=True)
    assert in_process(model_dir, init, Stop())[0] == 0
    code, parent = in_process(model_dir, init, Generate(id="a", request=long_request()), close=True)
    assert code == 0
    assert parent.expect(Ready).loaded


def test_mistakes_end_the_child_with_one_line(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, parent = in_process(model_dir, Init(model_dir=str(tmp_path)))
    assert code == 1
    assert parent.receive() is None
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: model_dir: ")
    assert error.count("\n") == 1
    assert in_process(model_dir, Ping())[0] == 1
    assert "first frame is Ping, expected Init" in capsys.readouterr().err
    assert in_process(model_dir, close=True)[0] == 1


def test_the_engine_does_not_need_transformers() -> None:
    code = "import sys, astraflow.raas.engines.embedded; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
