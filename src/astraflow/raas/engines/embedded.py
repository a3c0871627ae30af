"""Main of the embedded engine's child process: `python -m astraflow.raas.engines.embedded --fd N`.

One thread: read the frames that are there (blocking only when idle), run one step, write the answers. So a weight load, a cancel or a
ping waits for at most one step, and nothing needs a lock. The parent's death closes the socket, and the child ends.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import sys
import time
from collections import deque

from astraflow.protocol.errors import AstraFlowError, BadMessage
from astraflow.raas.engines import frames
from astraflow.raas.engines.embedded_core import EmbeddedEngineCore
from astraflow.raas.engines.frames import Cancel, FromChild, Generate, Init, Load, Ping, Pong, Ready, Stop, ToChild

__all__ = ["EmbeddedEngineCore", "Link", "main", "serve"]

READ_BYTES = 1 << 20
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Answers that the parent has not read yet; above it no new frames are read, so a slow parent slows only itself."""
INIT_WAIT_S = 60.0
"""The parent sends Init right after the start; without it the child ends."""


class Link:
    """Frames over a non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._incoming = frames.to_child()
        self._unsent = bytearray()
        self._ready: deque[ToChild] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self.closed = False
        """The parent is gone, or closed its end."""

    def send(self, frame: FromChild) -> None:
        self._unsent += frames.pack(frame)
        self._flush()

    def receive(self, wait_s: float | None) -> list[ToChild]:
        """All frames that are there now; waits up to `wait_s` (None = for ever) for the first one."""
        waiting_to_send = bool(self._unsent)
        events = (selectors.EVENT_READ if len(self._unsent) < MAX_UNSENT_BYTES else 0) | (selectors.EVENT_WRITE if waiting_to_send else 0)
        self._selector.modify(self._connection, events)
        for _, ready in self._selector.select(wait_s):
            if ready & selectors.EVENT_WRITE:
                self._flush()
            if ready & selectors.EVENT_READ:
                self._read()
        found = list(self._ready)
        self._ready.clear()
        return found

    def _read(self) -> None:
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
        self._ready.extend(self._incoming.feed(data))

    def _flush(self) -> None:
        try:
            sent = self._connection.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            return
        except ConnectionError:
            self.closed = True
            return
        del self._unsent[:sent]


def serve(link: Link, core: EmbeddedEngineCore) -> None:
    """Until the parent says Stop or is gone."""
    while not link.closed:
        for frame in link.receive(0 if core.busy else None):
            if isinstance(frame, Stop):
                return
            answer = handle(frame, core)
            if answer is not None:
                link.send(answer)
        for done in core.step() if core.busy else ():
            link.send(done)


def handle(frame: ToChild, core: EmbeddedEngineCore) -> FromChild | None:
    """The immediate answer to a frame, if there is one."""
    if isinstance(frame, Generate):
        return core.submit(frame.id, frame.request)
    if isinstance(frame, Cancel):
        return core.cancel(frame.id)
    if isinstance(frame, Load):
        return core.load(frame.path, timeline=frame.timeline, version=frame.version, digest=frame.digest)
    if isinstance(frame, Ping):
        scheduler = core.scheduler
        running, queued = len(scheduler.running), len(scheduler.waiting)
        return Pong(
            nonce=frame.nonce, running=running, queued=queued, version=core.version, timeline=core.timeline, stats=core.stats()
        )
    raise BadMessage(f"frame {type(frame).__name__} after Init")


def _first_frame(link: Link) -> tuple[Init, list[ToChild]]:
    deadline = time.monotonic() + INIT_WAIT_S
    while not link.closed and (left := deadline - time.monotonic()) > 0:
        found = link.receive(left)
        if found and isinstance(found[0], Init):
            return found[0], found[1:]
        if found:
            raise BadMessage(f"first frame is {type(found[0]).__name__}, expected Init")
    raise BadMessage(f"no Init frame within {INIT_WAIT_S:.0f} s")


def run(connection: socket.socket) -> None:
    """The child's life on an open socket."""
    link = Link(connection)
    init, early = _first_frame(link)
    started = time.perf_counter()
    core = EmbeddedEngineCore(init)
    link.send(
        Ready(
            pid=os.getpid(),
            max_len=core.max_len,
            device=core.device.type,
            dtype=str(core.dtype).removeprefix("torch."),
            seconds=time.perf_counter() - started,
            loaded=core.version >= 0,
        )
    )
    for frame in early:
        if isinstance(frame, Stop):
            return
        answer = handle(frame, core)
        if answer is not None:
            link.send(answer)
    serve(link, core)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 after Stop or when the parent is gone, 1 with one line on stderr for a user's or the parent's mistake."""
    parser = argparse.ArgumentParser(prog="python -m astraflow.raas.engines.embedded", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socketpair end")
    options = parser.parse_args(arguments)
    try:
        with socket.socket(fileno=options.fd) as connection:
            run(connection)
    except AstraFlowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the parent logs stderr
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
