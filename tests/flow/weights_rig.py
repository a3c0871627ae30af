"""A trainer's manager with its real sender process, receivers, and a proxy between them that damages what passes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from astraflow.lib.net import split_host_port
from astraflow.lib.tls import PLAIN, Tls
from astraflow.lib.wire import Identity, new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import weights as messages
from astraflow.protocol.routes import SenderAPI
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager
from astraflow.weights.receiver import Staged, WeightReceiver

torch.set_num_threads(1)
Tensors = dict[str, torch.Tensor]
WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""


def contents(version: int, words: int = 60_000) -> Tensors:
    """Every version has words of its own in every tensor; most of them are those of the version before."""
    base = torch.arange(words, dtype=torch.float32) * 1e-3
    base[:: 97 + version % 5] += 0.5 * (version + 1)
    return {"a.weight": base.view(-1, 100), "b.bias": torch.full((33,), float(version)), "scale": torch.tensor(version * 0.25)}


class Rig:
    """A trainer's manager and any number of receivers, all cleaned up at the end."""

    def __init__(self, tmp_path: Path, tls: Tls = PLAIN, **settings: Any):
        self.tmp_path = tmp_path
        quick: dict[str, Any] = {"chunk_bytes": 4096, "hash_threads": 1, "attempts": 3, "reader_wait_s": 2.0, "delta_wait_s": WAIT_S}
        quick |= {"io_timeout_s": WAIT_S, "start_s": WAIT_S}
        self.config = WeightsConfig(**{**quick, **settings})
        self.identity = new_identity("run-1", "secret-token", tls)
        self.managers: list[WeightManager] = []
        self.receivers: list[WeightReceiver] = []
        self.digests: dict[int, str] = {}
        self.manager = self.new_manager()

    def new_manager(self) -> WeightManager:
        self.managers.append(WeightManager("policy", self.config, self.identity, self.tmp_path))
        return self.managers[-1]

    def receiver(self, name: str = "raas-0", identity: Identity | None = None, **settings: Any) -> WeightReceiver:
        config = WeightsConfig(**{**{f: getattr(self.config, f) for f in self.config.__struct_fields__}, **settings})
        self.receivers.append(WeightReceiver("policy", name, self.tmp_path / "staging" / name, config, identity or self.identity))
        return self.receivers[-1]

    def publish(self, version: int, tensors: Tensors | None = None) -> str:
        self.manager.offload((tensors or contents(version)).items(), version)
        self.digests[version] = self.manager.published(version, WAIT_S)
        return self.digests[version]

    def pull(self, receiver: WeightReceiver, version: int, endpoint: str = "", **options: Any) -> Staged:
        return receiver.pull(endpoint or self.manager.endpoint, version, self.digests[version], **{"deadline_s": WAIT_S, **options})

    def info(self) -> messages.BufferInfo:
        """What the sender says about itself."""
        with SyncClient(self.manager.endpoint, self.identity) as client:
            return client.call(SenderAPI.get_buffer_info, timeout_s=WAIT_S)

    def stat(self, name: str, at_least: float) -> float:
        """Wait until a counter of the sender has arrived here."""
        until(lambda: self.manager.stats().get(f"weights/{name}", 0.0) >= at_least, name)
        return self.manager.stats()[f"weights/{name}"]

    def close(self) -> None:
        for part in (*self.receivers, *self.managers):
            part.close()


def until(condition: Callable[[], Any], name: str, seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {name}"
        time.sleep(0.01)
    return value


def assert_served(staged: Staged, tensors: Tensors) -> None:
    """The staged file has exactly the published words."""
    loaded = load_file(staged.path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(torch.int16), tensor.to(torch.bfloat16).view(torch.int16)), name


class Proxy:
    """Stands on 127.0.0.2 in front of a sender's two ports. `tamper(bytes, position in the connection)` changes the stream port's
    answers; None closes the connection there."""

    def __init__(self, ports: tuple[int, int]):
        self.tamper: Callable[[bytes, int], bytes | None] = lambda data, position: data
        self.hold = threading.Event()
        """While it is cleared no byte of the stream port passes: a transfer that has begun does not end."""
        self.hold.set()
        self.connections = 0
        self._http, self._stream = ports
        self._sockets = [socket.create_server(("127.0.0.2", port)) for port in ports]
        self._open: set[socket.socket] = set(self._sockets)
        for sock, port in zip(self._sockets, ports, strict=True):
            threading.Thread(target=self._accept, args=(sock, port), daemon=True).start()
        self.endpoint = f"http://127.0.0.2:{self._http}"

    def _accept(self, listening: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                self.connections += port == self._stream
                threading.Thread(target=self._pump, args=(client, port), daemon=True).start()

    def _pump(self, client: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError, ValueError), client, socket.create_connection(("127.0.0.1", port)) as server:
            self._open |= {client, server}
            position = 0
            while True:
                for sock in select.select([client, server], [], [])[0]:
                    data: bytes | None = sock.recv(16384)
                    if not data:
                        return
                    if sock is server and port == self._stream:
                        self.hold.wait()
                        position += len(data)
                        data = self.tamper(data, position - len(data))
                        if data is None:
                            return
                    (client if sock is server else server).sendall(data)

    def close(self) -> None:
        self.hold.set()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and closes them at the end."""
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextlib.contextmanager
def proxies(rig: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Proxy]]]:
    """Makes rigs that serve version 0, with a proxy in front of them."""
    made: list[Proxy] = []

    def make(first: Tensors | None = None, **settings: Any) -> tuple[Rig, Proxy]:
        here = rig(**settings)
        here.publish(0, first)
        port = split_host_port(here.manager.endpoint)[1]
        made.append(Proxy((port, here.info().stream_port)))
        return here, made[-1]

    yield make
    for each in made:
        each.close()
