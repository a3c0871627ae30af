"""How long a full sync takes over loopback, beside a plain `sendfile` → `recv_into` of the same bytes in the same run.

The plain transfer has one connection with 16 MB socket buffers and fills fresh pages of shared memory; nothing is checked. A pull is
all of `WeightReceiver.pull`: first contact, ticket, six streams, checksums, digest, the staged file in its place. Every receiver is a
process of its own, started before the clock runs. Plain, one pull and two at once take turns, and medians are compared.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.lib.wire import new_identity
from astraflow.weights.config import WeightsConfig
from astraflow.weights.memory import anonymous_file
from astraflow.weights.receiver import WeightReceiver

SOCKET_BUFFER = 16 << 20
TENSOR_BYTES = 16 << 20
MODEL = "bench"
PULL_S = 120.0


def measure(size_bytes: int = 1 << 30, rounds: int = 5) -> dict[str, float]:
    """Medians in seconds and their ratios. Takes about `rounds` · 3 s for 1 GB, and 6 times its size in memory."""
    shared = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="astraflow-bench-", dir=shared if shared.is_dir() else None)))
        stack.callback(os.close, source := _filled(size_bytes))
        port = _first_line(stack.enter_context(_child("plain", str(source), str(size_bytes), fds=(source,))))
        endpoint, digest = stack.enter_context(_published(size_bytes, place))
        receivers = [stack.enter_context(_child("pull", endpoint, digest, str(place / f"receiver-{k}"))) for k in range(2)]
        times: dict[str, list[float]] = {"plain_tcp_s": [], "full_pull_s": [], "two_pulls_s": []}
        for number in range(rounds + 1):
            took = {
                "plain_tcp_s": _plain(int(port), size_bytes, place),
                "full_pull_s": _pull(receivers[:1]),
                "two_pulls_s": _pull(receivers),
            }
            for name, seconds in took.items():
                if number:  # the first round warms everything up
                    times[name].append(seconds)
        for child in receivers:
            _end(child)
    results = {name: statistics.median(values) for name, values in times.items()}
    results["full_pull_over_tcp"] = results["full_pull_s"] / results["plain_tcp_s"]
    results["two_pulls_over_tcp"] = results["two_pulls_s"] / results["plain_tcp_s"]
    return results


def _filled(size_bytes: int) -> int:
    """Anonymous shared memory with bytes in all of its pages."""
    fd = anonymous_file("bench", size_bytes)
    block = os.urandom(1 << 20)
    for offset in range(0, size_bytes, len(block)):
        os.pwrite(fd, block[: size_bytes - offset], offset)
    return fd


@contextlib.contextmanager
def _published(size_bytes: int, place: Path) -> Iterator[tuple[str, str]]:
    """A sender that serves version 0 of a model of this size: (endpoint, digest)."""
    import torch

    from astraflow.weights.manager import WeightManager

    manager = WeightManager(MODEL, WeightsConfig(), new_identity("bench"), place)
    try:
        words = torch.randint(-(1 << 15), 1 << 15, (TENSOR_BYTES // 2,), dtype=torch.int16).view(torch.bfloat16)
        count = -(-size_bytes // TENSOR_BYTES)
        # Rolled copies share no memory: none is taken for a tied one.
        named = {f"layers.{k}.weight": words.roll(k)[: (min(TENSOR_BYTES, size_bytes - k * TENSOR_BYTES)) // 2] for k in range(count)}
        manager.offload(named.items(), 0)
        del named
        yield manager.endpoint, manager.published(0)
    finally:
        manager.close()


@contextlib.contextmanager
def _child(*arguments: str, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """This module as a process that takes a line per task and answers with a line."""
    command = [sys.executable, "-m", "astraflow.tools.bench_transport", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds) as child:
        try:
            yield child
        finally:
            child.kill()


def _first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _end(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    child.wait(30)


def _plain(port: int, size_bytes: int, place: Path) -> float:
    """Seconds of a plain transfer into fresh pages."""
    path = place / "plain"
    began = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, size_bytes)
    with socket.socket() as sock, mmap.mmap(fd, size_bytes) as target, memoryview(target) as view:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        sock.connect(("127.0.0.1", port))
        done = 0
        while done < size_bytes:
            done += (got := sock.recv_into(view[done:]))
            assert got, "the plain sender closed early"
        seconds = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return seconds


def _pull(receivers: list[subprocess.Popen[str]]) -> float:
    """Seconds from the first one's start to the last one's end, on the clock that all processes of a machine share."""
    for child in receivers:
        assert child.stdin is not None
        child.stdin.write("pull\n")
        child.stdin.flush()
    spans = [json.loads(_first_line(child)) for child in receivers]
    return float(max(end for _, end in spans) - min(began for began, _ in spans))


def _serve_plain(source: int, size_bytes: int) -> None:
    """Child: the whole file to whoever connects, one after the other, until it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)  # accepted connections inherit it
        _say(listening.getsockname()[1])
        while True:
            sock, _ = listening.accept()
            with sock:
                done = 0
                while done < size_bytes:
                    done += os.sendfile(sock.fileno(), source, done, size_bytes - done)


def _serve_pulls(endpoint: str, digest: str, staging: Path) -> None:
    """Child: one full pull per line, each into an empty staging directory."""
    for _ in sys.stdin:
        receiver = WeightReceiver(MODEL, staging.name, staging, WeightsConfig(), new_identity("bench"))
        began = time.monotonic()
        receiver.pull(endpoint, 0, digest, full=True, deadline_s=PULL_S)
        ended = time.monotonic()
        receiver.close()
        _say([began, ended])


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """The child processes of `measure`; without arguments, the measurement itself."""
    match arguments:
        case ["plain", source, size_bytes]:
            _serve_plain(int(source), int(size_bytes))
        case ["pull", endpoint, digest, staging]:
            _serve_pulls(endpoint, digest, Path(staging))
        case _:
            _say(measure())


if __name__ == "__main__":
    main(sys.argv[1:])
