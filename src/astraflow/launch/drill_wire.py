"""A process of a run whose calls go wrong: `python -m astraflow.launch.drill_wire FAULTS HITS raas --config …`, only ever by `--chaos`.

The process itself is the one that `python -m astraflow raas --config …` would be, with two seams replaced before it begins: the
transports of httpx, through which all calls go, and the receiving end of weight streams. Nothing else in the package knows of faults.
A dropped reply was made and is on its way: its connection is closed before the body is read. (A trainer with several ranks starts them
as they are; their wires stay whole.)
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import httpx
import msgspec

from astraflow.launch.drill_spec import EVERY, STREAM, WIRES, Drill, Fault
from astraflow.launch.plan import ProcessSpec, Role
from astraflow.lib.jsonl import append_bytes
from astraflow.weights.fetch import _Stream

DROPPED = "drill: the reply was cut off"
LONGEST_CUT = 1 << 20
"""A stream is cut within its first MiB."""


class WireFaults(msgspec.Struct):
    """What a process is told."""

    role: Role
    seed: str
    until: float | None
    """Unix time after which nothing is hit."""
    faults: list[Fault]


class WireHit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the hits file: a hit, or (with `over`) that what was hit by these works again."""

    at: float
    """Unix time."""
    number: int = 0
    """Within the process."""
    pid: int = 0
    kind: str = ""
    target: str = ""
    call: str = ""
    time_s: float = 0.0
    """Of a delay."""
    lost_bytes: int = 0
    """Of a dropped reply, which are sent again; of a cut stream those that had come."""
    over: list[int] = []


def faulty(spec: ProcessSpec, drill: Drill, directory: Path, began: float) -> ProcessSpec:
    """The process with the faults of its role; the process itself when it has none. `began`: unix time of the run's start."""
    faults = drill.of_wires(spec.role)
    if not faults:
        return spec
    until = began + drill.for_s if math.isfinite(drill.for_s) else None
    told = msgspec.json.encode(WireFaults(spec.role, f"{drill.seed} {spec.name}", until, faults)).decode()
    python, _, _, *arguments = spec.argv
    argv = (python, "-m", "astraflow.launch.drill_wire", told, str(directory / f"wire-{spec.name}.jsonl"), *arguments)
    return ProcessSpec(spec.name, spec.role, argv, spec.env)


class Wires:
    """Draws and notes. Called from many threads."""

    def __init__(self, told: WireFaults, hits: Path) -> None:
        self._file = os.open(hits, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        lived = os.fstat(self._file).st_size  # so that a process that came back does not repeat its first life
        self._random = random.Random(f"{told.seed} {lived}")
        self._until = told.until if told.until is not None else math.inf
        self._calls = [(fault, WIRES[fault.target][told.role]) for fault in told.faults]
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._open: dict[str, list[int]] = {}

    def delay_s(self, call: str) -> float:
        """How much later a call is sent; noted."""
        with self._lock:
            found = [fault for fault in self._of("delay", call) if call != STREAM]
        for fault in found:
            self._note(WireHit(at=time.time(), kind="delay", target=fault.target, call=call, time_s=fault.time_s))
        return sum(fault.time_s for fault in found)

    def drop(self, call: str) -> Fault | None:
        """The fault that takes this reply, drawn anew for every reply."""
        with self._lock:
            return next((fault for fault in self._of("drop", call) if self._random.random() < fault.chance), None)

    def share(self) -> float:
        """Evenly in [0, 1)."""
        with self._lock:
            return self._random.random()

    def dropped(self, fault: Fault, call: str, lost_bytes: int) -> None:
        """It was taken."""
        number = self._note(WireHit(at=time.time(), kind="drop", target=fault.target, call=call, lost_bytes=lost_bytes))
        with self._lock:
            self._open.setdefault(call, []).append(number)

    def came(self, call: str) -> None:
        """A reply of the same call, or the first bytes of another stream."""
        if not self._open:
            return
        with self._lock:
            over = self._open.pop(call, [])
        if over:
            self._note(WireHit(at=time.time(), over=over))

    def _of(self, kind: str, call: str) -> list[Fault]:
        if time.time() > self._until:
            return []
        return [fault for fault, calls in self._calls if fault.kind == kind and (call in calls or (EVERY in calls and call != STREAM))]

    def _note(self, hit: WireHit) -> int:
        if not hit.over:
            hit.number, hit.pid = next(self._numbers), os.getpid()
        append_bytes(self._file, msgspec.json.encode(hit) + b"\n")
        return hit.number


def install(wires: Wires) -> None:
    """Replace both seams, in this process and for good."""
    _break_calls(wires)
    _cut_streams(wires)


def _break_calls(wires: Wires) -> None:
    whole, whole_async = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request

    def lost(request: httpx.Request, response: httpx.Response) -> bool:
        call = request.url.path
        fault = wires.drop(call)
        if fault is None:
            wires.came(call)
            return False
        wires.dropped(fault, call, int(response.headers.get("content-length", 0)))
        return True

    def handle_request(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        time.sleep(wires.delay_s(request.url.path))
        response = whole(self, request)
        if lost(request, response):
            response.close()
            raise httpx.ReadError(DROPPED)
        return response

    async def handle_async_request(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(wires.delay_s(request.url.path))
        response = await whole_async(self, request)
        if lost(request, response):
            await response.aclose()
            raise httpx.ReadError(DROPPED)
        return response

    httpx.HTTPTransport.handle_request = handle_request  # type: ignore[method-assign]
    httpx.AsyncHTTPTransport.handle_async_request = handle_async_request  # type: ignore[method-assign]


def _cut_streams(wires: Wires) -> None:
    receive: Callable[[_Stream, socket.socket, memoryview, bool], int] = _Stream._receive
    left: WeakKeyDictionary[socket.socket, tuple[Fault, int, int]] = WeakKeyDictionary()
    """Connection that will be cut → by what, after how many more bytes, of how many."""

    def cut(stream: _Stream, sock: socket.socket, room: memoryview, silent: bool) -> int:
        if silent and (fault := wires.drop(STREAM)) is not None and len(room) > 1:
            count = 1 + int(wires.share() * (min(len(room), LONGEST_CUT) - 1))  # less than what is waited for: it always comes to the cut
            left[sock] = (fault, count, count)
        if sock not in left:
            got = receive(stream, sock, room, silent)
            if silent:
                wires.came(STREAM)
            return got
        fault, more, count = left[sock]
        if more > 0:
            got = receive(stream, sock, room[:more], silent)
            left[sock] = (fault, more - got, count)
            return got
        del left[sock]
        wires.dropped(fault, STREAM, count)
        sock.shutdown(socket.SHUT_RDWR)
        raise ConnectionError("drill: the stream was cut")

    _Stream._receive = cut  # type: ignore[method-assign, assignment]


def main(arguments: Sequence[str]) -> None:
    """Become the process."""
    told, hits, *rest = arguments
    install(Wires(msgspec.json.decode(told, type=WireFaults), Path(hits)))
    sys.argv = ["astraflow", *rest]
    runpy.run_module("astraflow.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
